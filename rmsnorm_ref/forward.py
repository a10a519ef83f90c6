"""The forward pass: y = x * rstd * w, with rstd = 1 / sqrt(mean(x^2) + eps).

A row is read from HBM once, lives in registers while its mean square is taken, and is written once
(decision D1). Everything between the load and the store is fp32 (decision D2). Rows wider than
`tiling.ONE_TILE_MAX` would spill out of the registers; `wide.py` takes them.

Besides y the kernel writes rstd, one fp32 number a row: 4·M bytes against 2·M·N elements, and the
backward is spared a whole reduction. Where no backward will come, nothing writes it.
"""

import torch
import triton
import triton.language as tl

from . import tiling, tuning, wide
from .launch import Launch
from .table import Config


@triton.jit(do_not_specialize=["x_row_stride", "M"])
def rmsnorm_forward_kernel(
    # x [M, N] in its storage dtype, unit column stride; w [N] in its own dtype.
    x_ptr, w_ptr,
    # y [M, N] in the dtype of x, packed; rstd [M] in fp32, or None: no backward will come.
    y_ptr, rstd_ptr,
    # Elements between rows of x, a multiple of ROW_ALIGN.
    x_row_stride: tl.int64, M: tl.int64, eps,
    # A tile: ROWS whole rows (1 from N = 1025 on) of BLOCK_SIZE = next_power_of_2(N) lanes.
    # ROW_ALIGN is a power of two that divides N and every row stride.
    N: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, ROW_ALIGN: tl.constexpr,
    # The L2 policy of x and y; it follows the size of x and changes no bit.
    EVICTION: tl.constexpr,
):
    # ---- Locate the rows
    # 64 bits: M * N passes 2^31 long before memory runs out.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    # Only a tile of several rows can run over the end, and a load that no mask guards is faster
    # (D1, "What did not help").
    row_mask = (rows < M) | (ROWS == 1)
    col_mask = cols < N
    # Dividing and multiplying changes no value. It shows the compiler a stride that is a multiple
    # of ROW_ALIGN; without that it loads 2 bytes at a time instead of 16.
    x_row_start = rows * (x_row_stride // ROW_ALIGN * ROW_ALIGN)

    # ---- Load
    # N * e_w bytes from HBM, then from cache (evict_last). Before x, to hide its latency.
    w = tl.load(w_ptr + cols, mask=col_mask, other=0.0, eviction_policy="evict_last")
    w = w.to(tl.float32)
    # M * N * e bytes, the only read of x. A masked lane holds 0 and adds 0 to the sum of squares.
    mask = row_mask & col_mask
    x = tl.load(x_ptr + x_row_start + cols, mask=mask, other=0.0, eviction_policy=EVICTION)
    x = x.to(tl.float32)

    # ---- Reduce
    # One number per row, [ROWS, 1]: the kept axis is what makes it broadcast along its own row.
    # Divided by N and not by BLOCK_SIZE: masked lanes are no elements.
    # eps inside the root: a row of zeros gives 1 / sqrt(eps), no division by zero unless eps is 0.
    rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps)

    # ---- Write
    # M * N * e bytes and the one rounding.
    y = (x * rstd * w).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + rows * N + cols, y, mask=mask, eviction_policy=EVICTION)
    # 4 * M bytes; last, so that no store of y waits behind them.
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, rstd, mask=row_mask)


def launch_forward(
    x: torch.Tensor, x_row_stride: int, w: torch.Tensor, eps: float, *, needs_rstd: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate y and rstd, launch the kernel that suits this width, return both.

    Args:
        x: [..., N], fp16, bf16 or fp32; row r starts at element `r * x_row_stride`.
        x_row_stride: elements from one row to the next, a multiple of `tiling.row_align`.
        w: [N], packed, its own dtype.
        eps: added to the mean square.
        needs_rstd: save rstd for a backward.

    Returns:
        y, packed, with the shape and dtype of x, and rstd, [M] in fp32; None where not asked for.
    """
    N = w.numel()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = x.new_empty(x.numel() // N, dtype=torch.float32) if needs_rstd else None
    if x.numel():
        path = tiling.forward_path(N)
        launch = tuning.prepared(path, _BUILD[path], x, w, _trial, needs_rstd)
        launch(x, x_row_stride, w, eps, y, rstd)
    return y, rstd


def _build(N: int, dtype: torch.dtype, device: torch.device, config: Config, *_needs: bool):
    """Fix all that does not change between calls of one width; return the launch."""
    tile = tiling.forward_tile(N)
    constants = (N, tile.block_size, tile.rows, tiling.row_align(N, dtype))
    kernels = {
        eviction: Launch(rmsnorm_forward_kernel, (*constants, eviction), config, device)
        for eviction in tiling.EVICTIONS
    }
    n_sm, n_threads = tiling.sm_count(device), tiling.threads_per_sm(device)
    one_wave = tiling.one_wave(N, dtype, config.num_warps, n_sm, n_threads)
    if one_wave:
        options = {"maxnreg": tiling.CAPPED_REGISTERS}
        capped = Launch(rmsnorm_forward_kernel, (*constants, ""), config, device, **options)

    def launch(x, x_row_stride, w, eps, y, rstd) -> None:
        M = y.numel() // N
        in_one_wave = M in one_wave and w.itemsize == 2
        kernel = capped if in_one_wave else kernels[tiling.eviction(x)]
        kernel((-(-M // tile.rows), 1, 1), x, w, y, rstd, x_row_stride, M, eps)

    return launch


_BUILD = {"forward": _build, "wide_forward": wide.build_forward}


def _trial(x: torch.Tensor, w: torch.Tensor):
    """Return a launch's arguments for the search: an input made from N and dtype alone."""
    N = w.numel()
    M = tuning.trial_rows(N, x.dtype)
    generator = torch.Generator(x.device).manual_seed(0)  # the caller's random state is not ours
    trial_x = torch.randn(M, N, generator=generator, device=x.device).to(x.dtype)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    return trial_x, N, w.detach(), 1e-6, torch.empty_like(trial_x), rstd
