"""The backward of few rows: both gradients in one launch, no partial buffer.

Where rows are few the data is small, and what costs is the second launch and a buffer of partial
sums that rivals the data. An H200's L2 holds x and dy then, so a second read costs HBM nothing.
One grid holds two kinds of programs: some own columns and add dw up over all rows, the others own
rows and write dx, by the formulas of `backward.py`.
"""

import functools

import torch
import triton
import triton.language as tl

from . import tiling
from .launch import Launch
from .table import Config


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride", "M", "dw_programs", "pairs"])
def few_rows_backward_kernel(
    # dy, x [M, N] in the storage dtype, unit column stride; w [N] in its own; rstd [M] in fp32.
    # dx [M, N] in the dtype of x, packed; dw [N] in the dtype of w. None: not asked for.
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr,
    # Elements between rows, multiples of ROW_ALIGN. dw_programs own columns, the others rows.
    dy_row_stride: tl.int64, x_row_stride: tl.int64, M: tl.int64, dw_programs: tl.int64,
    pairs: tl.int64,
    # A dx program's tile is ROWS whole rows of BLOCK_SIZE lanes, a dw program's DW_ROWS by DW_COLS.
    # DW_STAGES of a dw program's are in flight.
    N: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, ROW_ALIGN: tl.constexpr,
    DW_ROWS: tl.constexpr, DW_COLS: tl.constexpr, DW_STAGES: tl.constexpr,
):
    # The two kinds take turns for as many pairs, then come what is left of dw and of dx. 64 bits,
    # as every row offset. The divisions show the compiler how strides are aligned.
    program = tl.program_id(0).to(tl.int64)
    in_turn = program < 2 * pairs
    owns_columns = tl.where(in_turn, program % 2 == 0, program - pairs < dw_programs)
    index = tl.where(in_turn, program // 2, program - tl.where(owns_columns, pairs, dw_programs))
    x_row_stride = x_row_stride // ROW_ALIGN * ROW_ALIGN
    dy_row_stride = dy_row_stride // ROW_ALIGN * ROW_ALIGN
    if owns_columns:
        # ---- dw: locate the columns, walk all rows
        # M * N * e bytes each of x and dy over all programs, 4 * M of rstd per program.
        dw_cols = index * DW_COLS + tl.arange(0, DW_COLS)[None, :]
        dw = tl.zeros([DW_ROWS, DW_COLS], dtype=tl.float32)
        for first in tl.range(0, M, DW_ROWS, num_stages=DW_STAGES):
            # Masked lanes hold 0 in x, dy and rstd alike and add 0.
            dw_rows = first + tl.arange(0, DW_ROWS)[:, None]
            dw_mask = (dw_rows < M) & (dw_cols < N)
            x_c = tl.load(x_ptr + dw_rows * x_row_stride + dw_cols, mask=dw_mask, other=0.0)
            dy_c = tl.load(dy_ptr + dw_rows * dy_row_stride + dw_cols, mask=dw_mask, other=0.0)
            rstd_c = tl.load(rstd_ptr + dw_rows, mask=dw_rows < M, other=0.0)
            dw += dy_c.to(tl.float32) * (x_c.to(tl.float32) * rstd_c)
        if dw_ptr is not None:
            # ---- Write
            # N * e_w bytes and the one rounding. A column has one program: no buffer, no atomics.
            dw_row = tl.sum(dw, axis=0, keep_dims=True).to(dw_ptr.dtype.element_ty)
            tl.store(dw_ptr + dw_cols, dw_row, mask=dw_cols < N)
    else:
        # ---- dx: locate the rows
        # The formulas of the one-tile kernel, on as many threads a row, so a row keeps its bits.
        rows = index * ROWS + tl.arange(0, ROWS)[:, None]
        cols = tl.arange(0, BLOCK_SIZE)[None, :]
        mask = (rows < M) & (cols < N)
        # ---- Load
        # M * N * e bytes each of x and dy, which L2 has from the dw programs, or they from it.
        # 4 * M of rstd, N * e_w of w per program. Masked lanes hold 0 and add 0 to the mean.
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * dy_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        # ---- Reduce
        # One number per row, divided by N and not by BLOCK_SIZE.
        x_hat, dyw = x * rstd, dy * w
        mean = tl.sum(dyw * x_hat, axis=1, keep_dims=True) / N
        if dx_ptr is not None:
            # ---- Write
            # M * N * e bytes and the one rounding.
            dx = ((dyw - x_hat * mean) * rstd).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + rows * N + cols, dx, mask=mask)


def build_backward(
    N: int,
    dtype: torch.dtype,
    device: torch.device,
    config: Config,
    needs_dx: bool,
    needs_dw: bool,
):
    """Fix all that does not change between calls of one width; return the launch."""
    block_size, row_align = tiling.next_power_of_2(N), tiling.row_align(N, dtype)
    warps = config.num_warps

    @functools.cache
    def kernel(rows: int, *dw_tile: int) -> Launch:
        constants = (N, block_size, rows, row_align, *dw_tile)
        return Launch(few_rows_backward_kernel, constants, config, device)

    @functools.lru_cache(maxsize=1024)  # a training run asks for the same few numbers of rows
    def planned(M: int) -> tuple[Launch, tuple[int, int, int], int, int]:
        rows = tiling.dx_rows(M, N, dtype, config)
        dw_rows, dw_cols = tiling.dw_rows(M, N, warps, device), tiling.dw_cols(M, N, device)
        dw_stages = tiling.dw_stages(M, N, warps)
        dx_programs = -(-M // rows) if needs_dx else 0
        dw_programs = -(-N // dw_cols) if needs_dw else 0
        # In turn, so that neither kind begins late. But dw first where its few programs have long
        # ways to go: bf16 512 x 1024 takes 3.7 us, and in turn above 3.9 (not recorded).
        pairs = min(dw_programs, dx_programs) if dw_stages == 1 else 0
        grid = (dw_programs + dx_programs, 1, 1)
        return kernel(rows, dw_rows, dw_cols, dw_stages), grid, dw_programs, pairs

    def launch(dy, dy_stride, x, x_stride, w, rstd, dx, dw) -> None:
        M = rstd.numel()
        launch_kernel, grid, dw_programs, pairs = planned(M)
        launch_kernel(grid, dy, x, w, rstd, dx, dw, dy_stride, x_stride, M, dw_programs, pairs)

    return launch
