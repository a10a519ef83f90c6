"""Rows of more than `tiling.ONE_TILE_MAX` columns: the same formulas, a row in several pieces.

A row this wide, held in fp32, overflows the registers, and spilled registers are memory traffic
that the byte model does not grant. So a row is read twice: once for its sum, once for its result.
The second read comes out of the SM's own cache, so HBM still sees x once (and dy once).

In the forward one program takes a row in chunks. In the backward the dw accumulator of a whole row
would be as large as the register file. There a team of programs shares the row: each has its own
columns, and what it sums up there it hands to the others through memory, a number per row.
"""

import torch
import triton
import triton.language as tl

from . import tiling
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


# Bits of two fp32 NaNs: one says that a part is not there yet, the other stands in for it.
ABSENT = tl.constexpr(-1)
OTHER_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def part_of_mean(
    dy_row_ptr, x_row_ptr, w_ptr, rstd, member,
    N: tl.constexpr, COLS: tl.constexpr, LANES: tl.constexpr,
):
    """Sum one member's columns of a row: its part of mean(dyw * x_hat), as the bits of an fp32."""
    lanes = tl.arange(0, LANES)
    cols = member * COLS + lanes
    mask = (lanes < COLS) & (cols < N)
    # COLS * e bytes each of x and dy from HBM, kept in cache (evict_last) for the second read.
    # COLS * e_w bytes of w, from cache: no registers are left to hold it.
    x = tl.load(x_row_ptr + cols, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
    dy = tl.load(dy_row_ptr + cols, mask, 0.0, eviction_policy="evict_last").to(tl.float32)
    w = tl.load(w_ptr + cols, mask, 0.0).to(tl.float32)
    # Divided by N: masked lanes hold 0, add 0 and are no elements.
    part = tl.sum(dy * w * (x * rstd), axis=0) / N
    bits = part.to(tl.int32, bitcast=True)
    return tl.where(bits == ABSENT, OTHER_NAN, bits)


@triton.jit
def first_absent(parts, one_per_thread, MEMBERS: tl.constexpr):
    """Return the first member whose part is ABSENT to any warp; MEMBERS where none is."""
    # Every warp has looked by itself, and one may have seen what another has not. What comes next
    # must be the same for all, or they wait for each other at different places. So they agree: by
    # a maximum over a tensor in which every thread has an element of its own.
    every = tl.arange(0, triton.next_power_of_2(MEMBERS))
    found = tl.max(tl.where(parts == ABSENT, MEMBERS - every, 0), axis=0)
    return MEMBERS - tl.max(tl.where(one_per_thread, found, 0), axis=0)


@triton.jit
def mean_of_parts(
    parts_row_ptr, dy_row_ptr, x_row_ptr, w_ptr, rstd, one_per_thread,
    N: tl.constexpr, COLS: tl.constexpr, LANES: tl.constexpr, MEMBERS: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """Wait until all parts of a row are there, and add them up."""
    # 4 * M * MEMBERS bytes per member, out of L2: volatile, as others write them.
    every = tl.arange(0, triton.next_power_of_2(MEMBERS))
    parts = tl.load(parts_row_ptr + every, every < MEMBERS, 0, volatile=True)
    absent, looks = first_absent(parts, one_per_thread, MEMBERS), 0
    while absent < MEMBERS:
        looks += 1
        if looks > PATIENCE:
            # It may not have started: other kernels hold its place, or, where programs run one
            # after the other, this one does. So nobody waits for ever: the part is made here, by
            # the same sum, to the same bits.
            part = part_of_mean(dy_row_ptr, x_row_ptr, w_ptr, rstd, absent, N, COLS, LANES)
            tl.atomic_xchg(parts_row_ptr + absent, part, sem="relaxed")
        parts = tl.load(parts_row_ptr + every, every < MEMBERS, 0, volatile=True)
        absent = first_absent(parts, one_per_thread, MEMBERS)
    # In the same order for every member: one mean.
    return tl.sum(parts.to(tl.float32, bitcast=True), axis=0)


@triton.jit(do_not_specialize=["dy_row_stride", "x_row_stride", "M"])
def wide_backward_kernel(
    # dy, x [M, N] in the storage dtype, unit column stride; w [N] in its own; rstd [M] in fp32.
    dy_ptr, x_ptr, w_ptr, rstd_ptr,
    # parts [M, MEMBERS] in int32, all ABSENT: what the members sum up. None where dx is.
    parts_ptr,
    # dx [M, N] in the dtype of x, packed; partial_dw [n_teams, N] in fp32. None: not asked for.
    dx_ptr, partial_dw_ptr,
    # Elements between rows, multiples of ROW_ALIGN.
    dy_row_stride: tl.int64, x_row_stride: tl.int64, M: tl.int64,
    # MEMBERS programs are a team and share its rows: each has COLS columns, on LANES lanes.
    N: tl.constexpr, COLS: tl.constexpr, LANES: tl.constexpr, MEMBERS: tl.constexpr,
    # ROW_ALIGN divides N and both strides. After PATIENCE looks a part that is absent is made here.
    # A program has at most THREADS threads.
    ROW_ALIGN: tl.constexpr, PATIENCE: tl.constexpr, THREADS: tl.constexpr,
):
    # ---- Locate the columns and the rows
    # Members lie side by side, so that they start together; the teams take the rows in turn, in 64
    # bits.
    member = tl.program_id(0) % MEMBERS
    team = (tl.program_id(0) // MEMBERS).to(tl.int64)
    n_teams = (tl.num_programs(0) // MEMBERS).to(tl.int64)
    lanes = tl.arange(0, LANES)
    cols = member * COLS + lanes
    mask = (lanes < COLS) & (cols < N)
    one_per_thread = tl.arange(0, THREADS) < M * THREADS  # all true, but the compiler cannot know
    # The divisions show the compiler how strides are aligned.
    x_row_stride = x_row_stride // ROW_ALIGN * ROW_ALIGN
    dy_row_stride = dy_row_stride // ROW_ALIGN * ROW_ALIGN
    dw = tl.zeros([LANES], dtype=tl.float32)
    for next_row in tl.range(team, M + n_teams, n_teams):
        # ---- Load and reduce the next row
        # One row ahead, so that the others' parts of this row are there when they are looked for.
        if (dx_ptr is not None) and next_row < M:
            # 4 * M bytes of rstd per member. M * N * e bytes each of x and dy over all.
            rstd = tl.load(rstd_ptr + next_row)
            x_row_ptr = x_ptr + next_row * x_row_stride
            dy_row_ptr = dy_ptr + next_row * dy_row_stride
            part = part_of_mean(dy_row_ptr, x_row_ptr, w_ptr, rstd, member, N, COLS, LANES)
            # 4 * M bytes per member. An exchange is a store that others see while they run.
            tl.atomic_xchg(parts_ptr + next_row * MEMBERS + member, part, sem="relaxed")
        row = next_row - n_teams
        if row >= 0:
            x_row_ptr = x_ptr + row * x_row_stride
            dy_row_ptr = dy_ptr + row * dy_row_stride
            rstd = tl.load(rstd_ptr + row)
            if dx_ptr is not None:
                mean = mean_of_parts(
                    parts_ptr + row * MEMBERS, dy_row_ptr, x_row_ptr, w_ptr, rstd, one_per_thread,
                    N, COLS, LANES, MEMBERS, PATIENCE,
                )
            # ---- Load again and write
            # 2 * M * N * e bytes, for the last time (evict_first); from cache, unless dw alone is
            # asked for and this read is the first.
            x = tl.load(x_row_ptr + cols, mask, 0.0, eviction_policy="evict_first")
            dy = tl.load(dy_row_ptr + cols, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
            x_hat = x.to(tl.float32) * rstd
            if dx_ptr is not None:
                # N * e_w bytes of w per row, from cache.
                # M * N * e bytes of dx and the one rounding; streamed (.cs), as it is not read.
                w = tl.load(w_ptr + cols, mask, 0.0).to(tl.float32)
                dx = ((dy * w - x_hat * mean) * rstd).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + row * N + cols, dx, mask=mask, cache_modifier=".cs")
            # The private fp32 accumulator. Masked lanes add 0.
            dw += dy * x_hat
    # ---- Write
    # 4 * COLS bytes per program; reduce_dw_kernel adds them up.
    if partial_dw_ptr is not None:
        tl.store(partial_dw_ptr + team * N + cols, dw, mask=mask)


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
    team = tiling.team(N, device)
    lanes, patience = tiling.next_power_of_2(team.cols), tiling.patience(device)
    threads = 64 * config.num_warps  # a warp has 32 on most GPUs; too many do no harm
    constants = (N, team.cols, lanes, team.members, tiling.row_align(N, dtype), patience, threads)
    kernel = Launch(wide_backward_kernel, constants, config, device, **tiling.resident_team(device))

    def launch(dy, dy_stride, x, x_stride, w, rstd, dx, partial_dw, n_teams) -> None:
        M = rstd.numel()
        parts = None
        if dx is not None:
            parts = rstd.new_full((M, team.members), ABSENT.value, dtype=torch.int32)
        pointers = (dy, x, w, rstd, parts, dx, partial_dw)
        kernel((n_teams * team.members, 1, 1), *pointers, dy_stride, x_stride, M)

    return launch
