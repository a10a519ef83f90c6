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

from . import tiling, tuning
from .launch import Launch


@triton.jit(do_not_specialize=["x_row_stride"])
def wide_forward_kernel(
    x_ptr,  # [M, N] storage dtype, unit column stride
    w_ptr,  # [N] its own dtype
    y_ptr,  # [M, N] dtype of x, packed
    rstd_ptr,  # [M] fp32
    x_row_stride: tl.int64,  # elements between rows of x, a multiple of ROW_ALIGN
    eps,
    N: tl.constexpr,
    CHUNK: tl.constexpr,  # columns per step
    ROW_ALIGN: tl.constexpr,  # power of two that divides N and every row stride
):
    # ---- Locate the row, in 64 bits
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + row * (x_row_stride // ROW_ALIGN * ROW_ALIGN)

    # ---- Load and reduce: M * N * e bytes from HBM; evict_last keeps them for the second read
    # One running sum per lane, one sum across lanes at the end. Masked lanes add 0.
    sum_of_squares = tl.zeros([CHUNK], dtype=tl.float32)
    for start in tl.range(0, N, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        x = tl.load(x_row_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_last")
        x = x.to(tl.float32)
        sum_of_squares += x * x
    rstd = tl.rsqrt(tl.sum(sum_of_squares, axis=0) / N + eps)
    # 4 * M bytes.
    tl.store(rstd_ptr + row, rstd)

    # ---- Load again and write: M * N * e bytes, from cache; M * N * e bytes, one rounding
    # evict_first: this was the last read of x.
    for start in tl.range(0, N, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        x = tl.load(x_row_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first")
        # N * e_w bytes from HBM once, from cache for all rows but the first few.
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        y = (x.to(tl.float32) * rstd * w).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * N + cols, y, mask=cols < N, cache_modifier=".cs")


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride", "M", "rows_per_program"])
def wide_backward_kernel(
    dy_ptr,  # [M, N] dtype of x, unit column stride
    x_ptr,  # [M, N] storage dtype, unit column stride
    w_ptr,  # [N] its own dtype
    rstd_ptr,  # [M] fp32, saved by the forward
    dx_ptr,  # [M, N] dtype of x, packed; None where nobody asks for it
    partial_dw_ptr,  # [n_programs, N] fp32; None where nobody asks for dw
    dy_row_stride: tl.int64,  # elements between rows of dy, a multiple of ROW_ALIGN
    x_row_stride: tl.int64,  # the same for x
    M: tl.int64,
    rows_per_program: tl.int64,
    N: tl.constexpr,
    CHUNK: tl.constexpr,  # columns per step
    N_CHUNKS: tl.constexpr,  # cdiv(N, CHUNK)
    ROW_ALIGN: tl.constexpr,  # power of two that divides N and every row stride
):
    # ---- Locate the rows: one contiguous chunk of rows per program, in 64 bits
    program = tl.program_id(0).to(tl.int64)
    first_row = program * rows_per_program
    last_row = tl.minimum(first_row + rows_per_program, M)
    # The private fp32 accumulator of the whole row, as a tuple: registers cannot be indexed.
    dw = ()
    for _ in tl.static_range(N_CHUNKS):
        dw = dw + (tl.zeros([CHUNK], dtype=tl.float32),)

    for row in tl.range(first_row, last_row):
        x_row_ptr = x_ptr + row * (x_row_stride // ROW_ALIGN * ROW_ALIGN)
        dy_row_ptr = dy_ptr + row * (dy_row_stride // ROW_ALIGN * ROW_ALIGN)
        # 4 * M bytes.
        rstd = tl.load(rstd_ptr + row)

        # ---- Load and reduce: 2 * M * N * e bytes from HBM, kept in cache for the second read
        # Masked lanes add 0. w comes from cache: no registers are left to hold it.
        if dx_ptr is not None:
            dot = tl.zeros([CHUNK], dtype=tl.float32)
            for chunk in tl.range(0, N_CHUNKS):
                cols = chunk * CHUNK + tl.arange(0, CHUNK)
                mask = cols < N
                x = tl.load(x_row_ptr + cols, mask, 0.0, eviction_policy="evict_last")
                dy = tl.load(dy_row_ptr + cols, mask, 0.0, eviction_policy="evict_last")
                w = tl.load(w_ptr + cols, mask, 0.0).to(tl.float32)
                dot += dy.to(tl.float32) * w * (x.to(tl.float32) * rstd)
            mean = tl.sum(dot, axis=0) / N

        # ---- Load again and write: x and dy from cache, M * N * e bytes of dx, one rounding
        new_dw = ()
        for chunk in tl.static_range(N_CHUNKS):
            cols = chunk * CHUNK + tl.arange(0, CHUNK)
            mask = cols < N
            x = tl.load(x_row_ptr + cols, mask, 0.0, eviction_policy="evict_first")
            dy = tl.load(dy_row_ptr + cols, mask, 0.0, eviction_policy="evict_first")
            dy = dy.to(tl.float32)
            x_hat = x.to(tl.float32) * rstd
            if dx_ptr is not None:
                w = tl.load(w_ptr + cols, mask, 0.0).to(tl.float32)
                dx = ((dy * w - x_hat * mean) * rstd).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + row * N + cols, dx, mask=mask)
            new_dw = new_dw + (dw[chunk] + dy * x_hat,)
        dw = new_dw

    # ---- Write: 4 * N bytes per program
    if partial_dw_ptr is not None:
        for chunk in tl.static_range(N_CHUNKS):
            cols = chunk * CHUNK + tl.arange(0, CHUNK)
            tl.store(partial_dw_ptr + program * N + cols, dw[chunk], mask=cols < N)


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride"])
def row_mean_kernel(
    dy_ptr,  # [M, N] dtype of x, unit column stride
    x_ptr,  # [M, N] storage dtype, unit column stride
    w_ptr,  # [N] its own dtype
    rstd_ptr,  # [M] fp32, saved by the forward
    mean_ptr,  # [M] fp32, mean(dyw * x_hat)
    dy_row_stride: tl.int64,  # elements between rows of dy, a multiple of ROW_ALIGN
    x_row_stride: tl.int64,  # the same for x
    N: tl.constexpr,
    CHUNK: tl.constexpr,  # columns per step
    ROW_ALIGN: tl.constexpr,  # power of two that divides N and every row stride
    NUM_STAGES: tl.constexpr,  # chunks in flight
):
    # ---- Locate the row, in 64 bits
    row = tl.program_id(0).to(tl.int64)
    x_row_ptr = x_ptr + row * (x_row_stride // ROW_ALIGN * ROW_ALIGN)
    dy_row_ptr = dy_ptr + row * (dy_row_stride // ROW_ALIGN * ROW_ALIGN)
    # 4 * M bytes.
    rstd = tl.load(rstd_ptr + row)
    # ---- Load and reduce: 2 * M * N * e bytes, N * e_w bytes of w; masked lanes add 0
    dot = tl.zeros([CHUNK], dtype=tl.float32)
    for start in tl.range(0, N, CHUNK, num_stages=NUM_STAGES):
        cols = start + tl.arange(0, CHUNK)
        x = tl.load(x_row_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_row_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        dot += dy * w * (x * rstd)
    # ---- Write: 4 * M bytes
    tl.store(mean_ptr + row, tl.sum(dot, axis=0) / N)


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride", "M", "rows_per_program"])
def column_backward_kernel(
    dy_ptr,  # [M, N] dtype of x, unit column stride
    x_ptr,  # [M, N] storage dtype, unit column stride
    w_ptr,  # [N] its own dtype
    rstd_ptr,  # [M] fp32, saved by the forward
    mean_ptr,  # [M] fp32, from row_mean_kernel; None where dx is
    dx_ptr,  # [M, N] dtype of x, packed; None where nobody asks for it
    partial_dw_ptr,  # [n_programs, N] fp32; None where nobody asks for dw
    dy_row_stride: tl.int64,  # elements between rows of dy, a multiple of ROW_ALIGN
    x_row_stride: tl.int64,  # the same for x
    M: tl.int64,
    rows_per_program: tl.int64,
    N: tl.constexpr,
    COLS: tl.constexpr,  # columns per program
    ROW_ALIGN: tl.constexpr,  # power of two that divides N and every row stride
    NUM_STAGES: tl.constexpr,  # rows in flight
):
    # ---- Locate: a block of columns, a contiguous chunk of rows, in 64 bits
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    mask = cols < N
    program = tl.program_id(1).to(tl.int64)
    first_row = program * rows_per_program
    last_row = tl.minimum(first_row + rows_per_program, M)
    # N * e_w bytes once per chunk of rows.
    if dx_ptr is not None:
        w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([COLS], dtype=tl.float32)
    for row in tl.range(first_row, last_row, num_stages=NUM_STAGES):
        # ---- Load: 2 * M * N * e bytes, the second time in this pass; masked lanes add 0 to dw
        x_row_start = row * (x_row_stride // ROW_ALIGN * ROW_ALIGN)
        dy_row_start = row * (dy_row_stride // ROW_ALIGN * ROW_ALIGN)
        x = tl.load(x_ptr + x_row_start + cols, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_row_start + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        x_hat = x * rstd
        # ---- Write: M * N * e bytes and the one rounding
        if dx_ptr is not None:
            mean = tl.load(mean_ptr + row)
            dx = ((dy * w - x_hat * mean) * rstd).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + row * N + cols, dx, mask=mask)
        dw += dy * x_hat
    # ---- Write: 4 * N bytes per chunk of rows
    if partial_dw_ptr is not None:
        tl.store(partial_dw_ptr + program * N + cols, dw, mask=mask)


def build_forward(N: int, dtype: torch.dtype, device: torch.device, config: tuning.Config):
    """Fix all that does not change between calls of one width; return the launch."""
    constants = (N, tiling.forward_chunk(N), tiling.row_align(N, dtype))
    options = tiling.one_row_per_sm(N, dtype, device)
    kernel = Launch(wide_forward_kernel, constants, config, device, **options)

    def launch(x, x_row_stride, w, eps, y, rstd) -> None:
        kernel((rstd.numel(), 1, 1), x, w, y, rstd, x_row_stride, eps)

    return launch


def build_backward(
    N: int, dtype: torch.dtype, device: torch.device, config: tuning.Config, *_needs: bool
):
    """Fix all that does not change between calls of one width; return the launch."""
    chunk = tiling.backward_chunk(N)
    constants = (N, chunk, -(-N // chunk), tiling.row_align(N, dtype))
    kernel = Launch(wide_backward_kernel, constants, config, device)

    def launch(dy, dy_stride, x, x_stride, w, rstd, dx, partial_dw, rows_per_program) -> None:
        M = rstd.numel()
        grid = (-(-M // rows_per_program), 1, 1)
        pointers = (dy, x, w, rstd, dx, partial_dw)
        kernel(grid, *pointers, dy_stride, x_stride, M, rows_per_program)

    return launch


def build_column_backward(
    N: int, dtype: torch.dtype, device: torch.device, config: tuning.Config, *_needs: bool
):
    """Fix all that does not change between calls of one width; return the two launches as one."""
    row_align = tiling.row_align(N, dtype)
    mean_constants = (N, tiling.ROW_MEAN_CHUNK, row_align, tuning.ROW_MEAN.num_stages)
    row_mean = Launch(row_mean_kernel, mean_constants, tuning.ROW_MEAN, device)
    constants = (N, tiling.COLUMN_BLOCK, row_align, config.num_stages)
    columns = Launch(column_backward_kernel, constants, config, device)

    def launch(dy, dy_stride, x, x_stride, w, rstd, dx, partial_dw, rows_per_program) -> None:
        M = rstd.numel()
        mean = None
        if dx is not None:
            mean = torch.empty_like(rstd)
            row_mean((M, 1, 1), dy, x, w, rstd, mean, dy_stride, x_stride)
        grid = (-(-N // tiling.COLUMN_BLOCK), -(-M // rows_per_program), 1)
        pointers = (dy, x, w, rstd, mean, dx, partial_dw)
        columns(grid, *pointers, dy_stride, x_stride, M, rows_per_program)

    return launch
