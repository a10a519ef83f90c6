"""The backward pass: dx per row, dw over all rows, from one read of x and dy.

With x_hat = x * rstd and dyw = dy * w:

    dx = (dyw - x_hat * mean(dyw * x_hat)) * rstd      a reduction inside each row
    dw = sum over rows of dy * x_hat                   a reduction over all rows

Both need the same x and dy, so one kernel reads them once and makes both gradients. dw has no
atomics (decision D3): a program adds up its own rows in its own fp32 accumulator and writes that
once; a second, small kernel adds the accumulators up in a fixed order. The same input gives the
same bits on every run.
"""

import functools

import torch
import triton
import triton.language as tl

from . import few_rows, table, tiling, tuning, wide
from .launch import Launch
from .table import Config


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride", "M"])
def rmsnorm_backward_kernel(
    # dy, x [M, N] in the storage dtype, unit column stride; w [N] in its own; rstd [M] in fp32.
    dy_ptr, x_ptr, w_ptr, rstd_ptr,
    # dx [M, N] in the dtype of x, packed; partial_dw [n_programs, N] in fp32. None: not asked for.
    dx_ptr, partial_dw_ptr,
    # Elements between rows, multiples of ROW_ALIGN.
    dy_row_stride: tl.int64, x_row_stride: tl.int64, M: tl.int64,
    # A tile is ROWS whole rows of BLOCK_SIZE = next_power_of_2(N) lanes.
    N: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    # ROW_ALIGN divides N and both strides; NUM_STAGES tiles are in flight, this one included.
    ROW_ALIGN: tl.constexpr, NUM_STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):
    # The reduction may be put in place at once: it waits for the end of all programs. Where no dw
    # is asked for there is none, and whatever comes next might not wait.
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # ---- Locate the rows
    # The programs take the tiles in turn, so that all of them together read one stretch of x and
    # one of dy, which move on, and none has more than one tile more than another. 64 bits, because
    # M * N passes 2^31.
    program = tl.program_id(0).to(tl.int64)
    row_step = tl.num_programs(0).to(tl.int64) * ROWS
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    col_mask = cols < N
    # N * e_w bytes, once per program and not once per row: w stays in registers.
    if dx_ptr is not None:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    # The private accumulator, fp32 whatever the storage: no other program can write to it.
    dw = tl.zeros([ROWS, BLOCK_SIZE], dtype=tl.float32)
    # A plain range would ignore num_stages, and not have the loads of the next tiles in flight.
    for row in tl.range(program * ROWS, M, row_step, num_stages=NUM_STAGES):
        rows = row + tl.arange(0, ROWS)[:, None]
        row_mask = rows < M
        mask = row_mask & col_mask
        # ---- Load
        # 2 * M * N * e bytes in all: the one read of x and dy that both gradients share. And 4 * M
        # of rstd, which spare the pass a reduction over x.
        # Masked lanes hold 0 in x, dy and rstd alike, so they add 0 to the mean and to dw.
        x_row_start = rows * (x_row_stride // ROW_ALIGN * ROW_ALIGN)
        dy_row_start = rows * (dy_row_stride // ROW_ALIGN * ROW_ALIGN)
        x = tl.load(x_ptr + x_row_start + cols, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + dy_row_start + cols, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        dy = dy.to(tl.float32)
        x_hat = x.to(tl.float32) * rstd
        if dx_ptr is not None:
            # ---- Reduce
            # How much of dyw lies along x_hat: one number per row, [ROWS, 1]. The kept axis is what
            # makes it broadcast along its own row. Divided by N: masked lanes are no elements.
            dyw = dy * w
            mean = tl.sum(dyw * x_hat, axis=1, keep_dims=True) / N
            # ---- Write
            # M * N * e bytes and the one rounding.
            dx = ((dyw - x_hat * mean) * rstd).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + rows * N + cols, dx, mask=mask)
        dw += dy * x_hat
    # ---- Write
    # 4 * N bytes per program, the only trace of dw before the second kernel.
    if partial_dw_ptr is not None:
        dw_row = tl.sum(dw, axis=0, keep_dims=True)
        tl.store(partial_dw_ptr + program * N + cols, dw_row, mask=col_mask)


@triton.jit(do_not_specialize=["n_programs"])
def reduce_dw_kernel(
    # partial_dw [n_programs, N] in fp32; dw [N] in the dtype of w.
    partial_dw_ptr, dw_ptr, n_programs: tl.int64,
    # A step adds ROWS partial rows; a program owns COLS columns.
    N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, OVERLAP: tl.constexpr,
):
    # ---- Locate the columns
    # Few to a program, so that many programs share a short job.
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    col_mask = cols < N
    # It may be in place early: nothing is read or written before the other kernel has ended.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    # ---- Load
    # 4 * n_programs * N bytes, mostly still in L2 from the kernel that wrote them.
    # The order of the additions is fixed by ROWS and n_programs: no atomics, the same bits.
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for first in range(0, n_programs, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        # A masked lane adds 0. 64 bits, as every row offset.
        mask = (rows < n_programs) & col_mask
        total += tl.load(partial_dw_ptr + rows.to(tl.int64) * N + cols, mask=mask, other=0.0)
    # ---- Reduce and write
    # N * e_w bytes and the one rounding.
    dw = tl.sum(total, axis=0, keep_dims=True)
    tl.store(dw_ptr + cols, dw.to(dw_ptr.dtype.element_ty), mask=col_mask)


def launch_backward(
    dy: torch.Tensor,
    dy_row_stride: int,
    x: torch.Tensor,
    x_row_stride: int,
    w: torch.Tensor,
    rstd: torch.Tensor,
    *,
    needs_dx: bool = True,
    needs_dw: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Allocate the gradients that are asked for, launch the kernels, return them.

    Args:
        dy: [..., N], dtype of x; row r starts at element `r * dy_row_stride`. Never written to.
        dy_row_stride: elements from one row to the next, a multiple of `tiling.row_align`.
        x: [..., N], fp16, bf16 or fp32.
        x_row_stride: as for dy.
        w: [N], packed, its own dtype.
        rstd: [M] fp32, from the forward.
        needs_dx: compute dx.
        needs_dw: compute dw.

    Returns:
        dx, packed, shape and dtype of x, and dw, [N] in the dtype of w; None where not asked for.
    """
    N = w.numel()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
    if rstd.numel() == 0:
        return dx, torch.zeros_like(w) if needs_dw else None
    dw = torch.empty_like(w) if needs_dw else None
    path = tiling.backward_path(rstd.numel(), N, x.device, x.dtype, w.dtype)
    if path == "few_rows_backward":
        # The warps that the one-tile kernel would have: with them, dx has the same bits.
        launch = tuning.prepared(
            "backward", few_rows.build_backward, x, w, _trial, needs_dx, needs_dw, searched=_build
        )
        launch(dy, dy_row_stride, x, x_row_stride, w, rstd, dx, dw)
        return dx, dw
    n_programs = tiling.n_programs(rstd.numel(), N, x.dtype, x.device)
    partial_dw = x.new_empty((n_programs, N), dtype=torch.float32) if needs_dw else None
    launch = tuning.prepared(path, _BUILD[path], x, w, _trial, needs_dx, needs_dw)
    launch(dy, dy_row_stride, x, x_row_stride, w, rstd, dx, partial_dw, n_programs)
    if needs_dw:
        early = path == "backward" and tiling.reduces_early(n_programs, x)
        _build_reduction(N, w.dtype, x.device, early)(partial_dw, dw)
    return dx, dw


def _build(N: int, dtype: torch.dtype, device: torch.device, config: Config, *needs: bool):
    """Fix all that does not change between calls of one width; return the launch.

    `needs`: whether dx and dw are asked for; both, where the search does not say.
    """
    tile = tiling.backward_tile(N)
    overlap = tiling.overlaps(device) and needs != (True, False)
    row_align = tiling.row_align(N, dtype)
    constants = (N, *tile, row_align, config.num_stages, overlap)
    kernel = Launch(rmsnorm_backward_kernel, constants, config, device)

    def launch(dy, dy_stride, x, x_stride, w, rstd, dx, partial_dw, n_programs) -> None:
        pointers = (dy, x, w, rstd, dx, partial_dw)
        kernel((n_programs, 1, 1), *pointers, dy_stride, x_stride, rstd.numel())

    return launch


@functools.lru_cache(maxsize=1024)
def _build_reduction(N: int, dtype: torch.dtype, device: torch.device, early: bool):
    """Fix all that does not change between reductions of one width; return the launch.

    `early`: launched while the kernel before it runs, which is the one-tile kernel.
    """
    del dtype  # of dw: the cache keeps one compiled kernel per dtype
    rows = tiling.reduce_rows(N, device, early=early)
    cols = tiling.reduce_cols(N, device, early=early)
    constants = (N, rows, cols, early)
    options = {"launch_pdl": True} if early else {}
    kernel = Launch(reduce_dw_kernel, constants, table.REDUCE, device, **options)
    grid = (-(-N // cols), 1, 1)

    def launch(partial_dw, dw) -> None:
        kernel(grid, partial_dw, dw, partial_dw.shape[0])

    return launch


_BUILD = {
    "backward": _build,
    "wide_backward": wide.build_backward,
}


def _trial(x: torch.Tensor, w: torch.Tensor):
    """Return a launch's arguments for the search: an input made from N and dtype alone."""
    N = w.numel()
    M = tuning.trial_rows(N, x.dtype)
    n_programs = tiling.n_programs(M, N, x.dtype, x.device)
    generator = torch.Generator(x.device).manual_seed(0)  # the caller's random state is not ours
    trial_x = torch.randn(M, N, generator=generator, device=x.device).to(x.dtype)
    dy, dx = trial_x.clone(), torch.empty_like(trial_x)
    rstd = torch.ones(M, dtype=torch.float32, device=x.device)
    partial_dw = torch.empty(n_programs, N, dtype=torch.float32, device=x.device)
    return dy, N, trial_x, N, w.detach(), rstd, dx, partial_dw, n_programs
