"""Rows of more than `tiling.ONE_TILE_MAX` columns: the same formulas, the row in several chunks.

A row this wide, held in fp32, overflows the registers, and spilled registers are memory traffic
that the byte model does not grant. So a row is read twice, in chunks: once for its sum, once for
its result. The second read comes out of the SM's own cache as long as one row per program fits
there, so HBM still sees x once (and dy once).

From `tiling.CHUNKED_BACKWARD_MAX` columns on, the dw accumulator of a whole row is itself as large
as the register file. Then the backward is two kernels: one dot product per row, then a kernel whose
programs own a block of columns. That one moves 5·M·N elements instead of 3·M·N, and says so.
"""

import torch
import triton
import triton.language as tl

from . import table, tiling
from .launch import Launch
from .table import Config


@triton.jit(do_not_specialize=["x_row_stride"])
def wide_forward_kernel(
    # x [M, N] in its storage dtype, unit column stride; w [N] in its own dtype.
    x_ptr, w_ptr,
    # y [M, N] in the dtype of x, packed; rstd [M] in fp32, or None: no backward will come.
    y_ptr, rstd_ptr,
    # Elements between rows of x, a multiple of ROW_ALIGN.
    x_row_stride: tl.int64, eps,
    # CHUNK columns per step. ROW_ALIGN is a power of two that divides N and every row stride.
    N: tl.constexpr, CHUNK: tl.constexpr, ROW_ALIGN: tl.constexpr,
):
    # ---- Locate the row, in 64 bits
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + row * (x_row_stride // ROW_ALIGN * ROW_ALIGN)
    # ---- Load and reduce
    # M * N * e bytes from HBM; evict_last keeps them in the SM's cache for the second read.
    # One running sum per lane, one sum across lanes at the end. Masked lanes add 0.
    sum_of_squares = tl.zeros([CHUNK], dtype=tl.float32)
    for start in tl.range(0, N, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        x = tl.load(x_row_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last")
        x = x.to(tl.float32)
        sum_of_squares += x * x
    rstd = tl.rsqrt(tl.sum(sum_of_squares, axis=0) / N + eps)
    # 4 * M bytes.
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
    # ---- Load again and write
    # M * N * e bytes of x once more, from cache, and for the last time (evict_first).
    # M * N * e bytes of y, the one rounding; streamed (.cs), so that y does not push x out.
    for start in tl.range(0, N, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        x = tl.load(x_row_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first")
        # N * e_w bytes from HBM once, from cache for all rows but the first few.
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        y = (x.to(tl.float32) * rstd * w).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * N + cols, y, mask=cols < N, cache_modifier=".cs")


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride", "M"])
def wide_backward_kernel(
    # dy, x [M, N] in the storage dtype, unit column stride; w [N] in its own; rstd [M] in fp32.
    dy_ptr, x_ptr, w_ptr, rstd_ptr,
    # dx [M, N] in the dtype of x, packed; partial_dw [n_programs, N] in fp32. None: not asked for.
    dx_ptr, partial_dw_ptr,
    # Elements between rows, multiples of ROW_ALIGN.
    dy_row_stride: tl.int64, x_row_stride: tl.int64, M: tl.int64,
    # N_CHUNKS = cdiv(N, CHUNK) steps of CHUNK columns; ROW_ALIGN divides N and both strides.
    N: tl.constexpr, CHUNK: tl.constexpr, N_CHUNKS: tl.constexpr, ROW_ALIGN: tl.constexpr,
):
    # ---- Locate the rows
    # The programs take the rows in turn, in 64 bits.
    program = tl.program_id(0).to(tl.int64)
    # The private fp32 accumulator of the whole row, as a tuple: registers cannot be indexed.
    dw = (tl.zeros([CHUNK], dtype=tl.float32),) * N_CHUNKS
    for row in tl.range(program, M, tl.num_programs(0)):
        x_row_ptr = x_ptr + row * (x_row_stride // ROW_ALIGN * ROW_ALIGN)
        dy_row_ptr = dy_ptr + row * (dy_row_stride // ROW_ALIGN * ROW_ALIGN)
        # 4 * M bytes.
        rstd = tl.load(rstd_ptr + row)
        # ---- Load and reduce
        # 2 * M * N * e bytes from HBM, kept in cache (evict_last) for the second read.
        # N * e_w bytes of w per row, from cache: no registers are left to hold it.
        # One running sum per lane, one sum across lanes at the end, divided by N: masked lanes hold
        # 0, add 0 to the mean and are no elements.
        if dx_ptr is not None:
            dot = tl.zeros([CHUNK], dtype=tl.float32)
            for chunk in tl.range(0, N_CHUNKS):
                cols = chunk * CHUNK + tl.arange(0, CHUNK)
                x = tl.load(x_row_ptr + cols, cols < N, 0.0, eviction_policy="evict_last")
                dy = tl.load(dy_row_ptr + cols, cols < N, 0.0, eviction_policy="evict_last")
                w = tl.load(w_ptr + cols, cols < N, 0.0).to(tl.float32)
                dot += dy.to(tl.float32) * w * (x.to(tl.float32) * rstd)
            mean = tl.sum(dot, axis=0) / N
        # ---- Load again and write
        # 2 * M * N * e bytes, for the last time; from cache, unless dw alone is asked for and this
        # read is the first. N * e_w bytes of w per row, from cache.
        # M * N * e bytes of dx and the one rounding.
        # Unrolled, as only constants index a tuple. No element of one can be set: every row builds
        # a new one.
        new_dw = ()
        for chunk in tl.static_range(N_CHUNKS):
            cols = chunk * CHUNK + tl.arange(0, CHUNK)
            mask = cols < N
            x = tl.load(x_row_ptr + cols, mask, 0.0, eviction_policy="evict_first")
            dy = tl.load(dy_row_ptr + cols, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
            x_hat = x.to(tl.float32) * rstd
            if dx_ptr is not None:
                w = tl.load(w_ptr + cols, mask, 0.0).to(tl.float32)
                dx = ((dy * w - x_hat * mean) * rstd).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + row * N + cols, dx, mask=mask)
            new_dw = new_dw + (dw[chunk] + dy * x_hat,)
        dw = new_dw
    # ---- Write
    # 4 * N bytes per program.
    if partial_dw_ptr is not None:
        for chunk in tl.static_range(N_CHUNKS):
            cols = chunk * CHUNK + tl.arange(0, CHUNK)
            tl.store(partial_dw_ptr + program * N + cols, dw[chunk], mask=cols < N)


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride"])
def row_mean_kernel(
    # dy, x [M, N] in the storage dtype, unit column stride; w [N] in its own; rstd [M] in fp32.
    dy_ptr, x_ptr, w_ptr, rstd_ptr,
    # mean [M] in fp32: mean(dyw * x_hat), one number per row.
    mean_ptr,
    # Elements between rows, multiples of ROW_ALIGN.
    dy_row_stride: tl.int64, x_row_stride: tl.int64,
    # CHUNK columns per step, NUM_STAGES steps in flight; ROW_ALIGN divides N and both strides.
    N: tl.constexpr, CHUNK: tl.constexpr, ROW_ALIGN: tl.constexpr, NUM_STAGES: tl.constexpr,
):
    # ---- Locate the row, in 64 bits
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + row * (x_row_stride // ROW_ALIGN * ROW_ALIGN)
    dy_row_ptr = dy_ptr + row * (dy_row_stride // ROW_ALIGN * ROW_ALIGN)
    # 4 * M bytes.
    rstd = tl.load(rstd_ptr + row)
    # ---- Load and reduce
    # 2 * M * N * e bytes of x and dy; N * e_w bytes of w from HBM once, then from cache.
    # Masked lanes hold 0 and add 0.
    dot = tl.zeros([CHUNK], dtype=tl.float32)
    for start in tl.range(0, N, CHUNK, num_stages=NUM_STAGES):
        cols = start + tl.arange(0, CHUNK)
        x = tl.load(x_row_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_row_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        dot += dy * w * (x * rstd)
    # ---- Write
    # 4 * M bytes.
    tl.store(mean_ptr + row, tl.sum(dot, axis=0) / N)


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride", "M"])
def column_backward_kernel(
    # dy, x [M, N] in the storage dtype, unit column stride; w [N] in its own.
    dy_ptr, x_ptr, w_ptr,
    # rstd, mean [M] in fp32, from the forward and from row_mean_kernel; no mean where dx is None.
    rstd_ptr, mean_ptr,
    # dx [M, N] in the dtype of x, packed; partial_dw [n_programs, N] in fp32. None: not asked for.
    dx_ptr, partial_dw_ptr,
    # Elements between rows, multiples of ROW_ALIGN.
    dy_row_stride: tl.int64, x_row_stride: tl.int64, M: tl.int64,
    # COLS columns per program, NUM_STAGES rows in flight; ROW_ALIGN divides N and both strides.
    N: tl.constexpr, COLS: tl.constexpr, ROW_ALIGN: tl.constexpr, NUM_STAGES: tl.constexpr,
):
    # ---- Locate
    # A block of columns, whose programs take the rows in turn, in 64 bits.
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    mask = cols < N
    program = tl.program_id(1).to(tl.int64)
    # N * e_w bytes, once per program.
    if dx_ptr is not None:
        w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([COLS], dtype=tl.float32)
    for step in tl.range(program, M, tl.num_programs(1), num_stages=NUM_STAGES):
        # From the last row back: L2 still has some of what row_mean_kernel read last, where it ran.
        row = M - 1 - step
        # ---- Load
        # 2 * M * N * e bytes, mostly from HBM and for the second time: what wide rows cost.
        # 4 * M bytes of rstd, as many of mean, per block of columns. Masked lanes add 0 to dw.
        x_row_start = row * (x_row_stride // ROW_ALIGN * ROW_ALIGN)
        dy_row_start = row * (dy_row_stride // ROW_ALIGN * ROW_ALIGN)
        x = tl.load(x_ptr + x_row_start + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_row_start + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        x_hat = x * rstd
        # ---- Write
        # M * N * e bytes and the one rounding.
        if dx_ptr is not None:
            mean = tl.load(mean_ptr + row)
            dx = ((dy * w - x_hat * mean) * rstd).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + row * N + cols, dx, mask=mask)
        # The private fp32 accumulator, from the last row to the first.
        dw += dy * x_hat
    # ---- Write
    # 4 * COLS bytes per program; reduce_dw_kernel adds them up.
    if partial_dw_ptr is not None:
        tl.store(partial_dw_ptr + program * N + cols, dw, mask=mask)


def build_forward(
    N: int, dtype: torch.dtype, device: torch.device, config: Config, *_needs: bool
):
    """Fix all that does not change between calls of one width; return the launch."""
    constants = (N, tiling.forward_chunk(N), tiling.row_align(N, dtype))
    options = tiling.one_row_per_sm(N, dtype, device)
    kernel = Launch(wide_forward_kernel, constants, config, device, **options)

    def launch(x, x_row_stride, w, eps, y, rstd) -> None:
        kernel((y.numel() // N, 1, 1), x, w, y, rstd, x_row_stride, eps)

    return launch


def build_backward(
    N: int, dtype: torch.dtype, device: torch.device, config: Config, *_needs: bool
):
    """Fix all that does not change between calls of one width; return the launch."""
    chunk = tiling.backward_chunk(N)
    constants = (N, chunk, -(-N // chunk), tiling.row_align(N, dtype))
    kernel = Launch(wide_backward_kernel, constants, config, device)

    def launch(dy, dy_stride, x, x_stride, w, rstd, dx, partial_dw, n_programs) -> None:
        pointers = (dy, x, w, rstd, dx, partial_dw)
        kernel((n_programs, 1, 1), *pointers, dy_stride, x_stride, rstd.numel())

    return launch


def build_column_backward(
    N: int, dtype: torch.dtype, device: torch.device, config: Config, *_needs: bool
):
    """Fix all that does not change between calls of one width; return the two launches as one."""
    row_align = tiling.row_align(N, dtype)
    mean_config = table.row_mean(dtype)
    mean_constants = (N, tiling.ROW_MEAN_CHUNK, row_align, mean_config.num_stages)
    row_mean = Launch(row_mean_kernel, mean_constants, mean_config, device)
    constants = (N, tiling.COLUMN_BLOCK, row_align, config.num_stages)
    columns = Launch(column_backward_kernel, constants, config, device)

    def launch(dy, dy_stride, x, x_stride, w, rstd, dx, partial_dw, n_programs) -> None:
        M = rstd.numel()
        mean = None
        if dx is not None:
            mean = torch.empty_like(rstd)
            row_mean((M, 1, 1), dy, x, w, rstd, mean, dy_stride, x_stride)
        grid = (-(-N // tiling.COLUMN_BLOCK), n_programs, 1)
        pointers = (dy, x, w, rstd, mean, dx, partial_dw)
        columns(grid, *pointers, dy_stride, x_stride, M)

    return launch
