"""Which kernel serves a shape, what each of its programs holds, and which rows it owns.

All of this is pinned (decision D4): correctness needs BLOCK_SIZE >= N, and a row's bits must not
depend on the rows that happen to sit beside it. Five choices follow M: the few-rows kernel with its
tiles, the number of programs and whether the dw reduction is early, which touch no bit but dw's,
the forward's L2 policy and its cap on registers, which touch none. What may be searched is in
`tuning.py`.

Times in comments are of bf16 on an H200: section `ablations` of h200-2026-11-30e-diagnosis.
"""

import functools
from typing import NamedTuple

import torch

from .table import Config

# Widest row that is accepted at all; every path below is tested up to here.
LARGEST_N = 65536
# Widest row kept whole in registers. At 8192 x 16384 one tile's backward takes 293 us, a team's 209
# (h200-2026-12-01-shapes); the forwards are level.
ONE_TILE_MAX = 8192

FORWARD_TILE = 2048  # elements; narrower rows share a tile until it holds this many
BACKWARD_TILE = 8192  # elements, one program per SM: 3 tiles in flight cover HBM's latency
NARROW_BACKWARD_TILE = 4096  # elements, two programs per SM: at N = 512, 54 us against 64
NARROW_MAX = 1024  # widest row that counts as narrow
# Narrow rows that a large tile serves better all the same, one or half a warp to a row: at 256
# columns 56.2 us against 58.9, at 128 53.0 against 54.4. In fp32 it costs a little (not recorded).
LARGE_TILE_ALL_THE_SAME = (128, 256)  # values of BLOCK_SIZE

MIN_ROWS_PER_PROGRAM = 4  # else the fp32 partial buffer outgrows a third of the data
# Of wide rows two, and two thirds: a team takes its rows one after the other, and the fewer the
# sooner it is done. With 2048 columns to a program 16 x 16384 took 8.6 us against 11.8, and
# 1024 x 16384 as long (not recorded).
MIN_ROWS_PER_TEAM = 2

REDUCE_TILE = 2048  # elements that a program of the dw reduction adds per step
# Rows of more columns have twice as many in a program that waits beside the first kernel: so those
# are not too many. 2048 x 8192 takes 30.1 us against 31.6.
REDUCE_NARROW_MAX = 4096
EARLY_FP32_BYTES_MAX = 32 * 2**20  # of x, see `reduces_early`

# What a program of the wide backward has of a row. A thread of it holds 64 bytes of x, and may have
# 128 registers, so that an SM holds 16 programs in 16 bits and 8 in fp32: work enough to go on with
# while one of them waits. Each place is then taken by a program of the one launch.
TEAM_COLS = 1024
TEAM_REGISTERS = 128
TEAM_BYTES_PER_THREAD = 64
COLS_PER_SECTOR = 16  # columns of a program are a multiple: a sector of 32 bytes, or two, is whole
PATIENCE = 1000  # looks at a part that is absent, about a microsecond each

# At most so many rows get dw and dx in one launch: 16 x 2048 takes 2.2 us against 4.9, 1024 x 2048
# 6.9 against 8.7; at 2048 x 2048 it would be 12.2 against 10.5. Of longer rows fewer are few:
# 768 x 4096 takes 9.0 us against 9.7, 1024 x 4096 would take 11.3 against 10.9 (not recorded).
FEW_ROWS_MAX = 1024
FEW_LONG_ROWS_MAX = 896
SHORT_ROW_MAX = 2048  # columns
# And at most so many bytes of x, as L2 has to hold x and dy for the second read: fp32 1024 x 8192
# would take 37.5 us against 30.1 (not recorded).
FEW_BYTES_MAX = 16 * 2**20
# Narrower rows share tiles in which the compiler lays the columns out by the number of rows.
FEW_ROWS_MIN_BLOCK = 64
# x and w of different sizes pull the two kernels to different layouts up to here.
FEW_ROWS_MIXED_MIN = 4097
# Of so many rows a dx program takes one: 128 x 4096, 3.4 us against 3.6. Of up to twice as many,
# and of narrow ones, it takes two, of more it takes four: 1024 x 2048, 6.9 us against 8.7. But no
# fewer than move no bit, and no more than a tile holds (see `dx_rows`).
ONE_DX_ROW_MAX = 128
# Up to so many rows, or one row for so many columns, dw is added up 8 rows a step: 1 x 2048 takes
# 1.58 us against 1.66, 64 x 8192 3.7 against 3.9. At 512 x 2048 it would be 8.1 against 4.6.
VERY_FEW_ROWS = 32
COLUMNS_PER_VERY_FEW_ROW = 64
VERY_FEW_DW_ROWS = 8
DW_ELEMENTS_PER_THREAD = 4  # in more rows than those: a step is short, and its loads are many
# Narrow rows have few columns, so few dw programs. A step of theirs is a load of 16 bytes of bf16
# per thread, and several are in flight: 512 x 512 takes 3.3 us against 4.8, 1024 x 1024 5.1 against
# 7.8. More than 8 warps share what is best for 8, and have less to pipeline.
NARROW_DW_ROWS_PER_WARP = 16
NARROW_DW_WARPS_MAX = 8
NARROW_DW_STAGES = 5

# What `one_wave` caps the forward's registers at, per thread.
CAPPED_REGISTERS = 32
UNCAPPED_REGISTERS = 40  # what the compiler takes for 16 elements a thread
REGISTERS_PER_SM = 65536

# From so many bytes of x on, all that the forward streams is marked evict_last, which changes no
# bit. 32768 x 8192 takes 253 us against 261; 8192 x 8192, where it begins, 65.1 against 66.6; at
# 4096 x 4096 it is a per cent, which way depends. The backward does not feel it.
LARGE_BYTES = 128 * 2**20
EVICTIONS = ("", "evict_last")

INTERPRETED_PROGRAMS = 4  # stands for the SM count where there are no SMs
INTERPRETED_FEW_ROWS_MAX = 8  # so that small inputs reach every kernel
INTERPRETED_TEAM_COLS = 8192  # programs are few, so that there are teams of them
INTERPRETED_TEAM_PROGRAMS = 4  # stands for the programs on an SM


class Tile(NamedTuple):
    """What one program holds at a time: `rows` whole rows of `block_size` lanes."""

    block_size: int
    rows: int


class Team(NamedTuple):
    """The programs that share a wide row: `members` of them, with `cols` columns each."""

    members: int
    cols: int


INTERPRETED_REDUCE_TILE = Tile(4096, 2)  # few rows, as programs are few: it takes several steps


def forward_tile(N: int) -> Tile:
    """Return the forward's tile for rows of N columns: a function of N alone."""
    block_size = next_power_of_2(N)
    return Tile(block_size, max(1, FORWARD_TILE // block_size))


def backward_tile(N: int) -> Tile:
    """Return the backward's tile for rows of N columns: a function of N alone."""
    block_size = next_power_of_2(N)
    elements = NARROW_BACKWARD_TILE if shares_sm(N) else BACKWARD_TILE
    return Tile(block_size, max(1, elements // block_size))


def shares_sm(N: int) -> bool:
    """Tell whether the backward of N columns has small tiles and two programs per SM."""
    return N <= NARROW_MAX and next_power_of_2(N) not in LARGE_TILE_ALL_THE_SAME


def one_wave(N: int, dtype: torch.dtype, num_warps: int, n_sm: int, threads_per_sm: int) -> range:
    """Return the numbers of rows for which a cap on registers puts all rows in work at once.

    An SM's registers hold 12 programs of 128 threads as they are compiled, and 16 of them capped.
    A grid in between is then one wave and not two: 1024 x 4096 takes 5.7 us against 6.2. A larger
    one is slower by the cap: 4096 x 2048 takes 10.1 us against 9.9. What fits the cap is one row
    per tile, 16-bit, in whole vectors, with 16 elements a thread.
    """
    threads = 32 * num_warps
    block_size, rows = forward_tile(N)
    fits = rows == 1 and block_size == 16 * threads and dtype.itemsize == 2 and N % 8 == 0
    uncapped = REGISTERS_PER_SM // (UNCAPPED_REGISTERS * threads)
    capped = threads_per_sm // threads  # as many as there are threads for
    return range(n_sm * uncapped + 1, n_sm * capped + 1) if fits else range(0)


def forward_chunk(N: int) -> int:
    """Return how many columns of a wide row the forward takes at a time."""
    return 8192 if N <= 16384 else 16384


def one_row_per_sm(N: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Return the launch option that keeps a second program off an SM, where rows are very wide.

    The second read of a row hits the SM's own cache only while all rows in work on that SM fit in
    it. From 128 KiB a row on, two do not. Allowing 64 registers per thread makes the compiler use
    more than half of the register file, which leaves no room for a second program: 2048 x 65536
    takes 131 us against 141.
    """
    if N * dtype.itemsize < 128 * 1024 or device.type != "cuda" or torch.version.hip:
        return {}
    return {"maxnreg": 64}


def team(N: int, device: torch.device) -> Team:
    """Return how many programs share a wide row in the backward, and how many columns each has.

    A function of N, and of whether kernels are interpreted: the parts of a row are added up in the
    same order whatever the device.
    """
    most = TEAM_COLS if device.type == "cuda" else INTERPRETED_TEAM_COLS
    cols = -(-N // -(-N // most))
    cols = -(-cols // COLS_PER_SECTOR) * COLS_PER_SECTOR
    return Team(-(-N // cols), cols)


def team_programs(dtype: torch.dtype, device: torch.device) -> int:
    """Return how many programs of the wide backward an SM holds at once."""
    if device.type != "cuda":
        return INTERPRETED_TEAM_PROGRAMS
    threads = TEAM_COLS * dtype.itemsize // TEAM_BYTES_PER_THREAD
    return REGISTERS_PER_SM // (TEAM_REGISTERS * threads)


def resident_team(device: torch.device) -> dict[str, int]:
    """Return the launch option that lets an SM hold as many programs as `team_programs` says."""
    if device.type != "cuda" or torch.version.hip:
        return {}
    return {"maxnreg": TEAM_REGISTERS}


def patience(device: torch.device) -> int:
    """Return how often a program looks for another's part before it makes that part itself.

    Interpreted, where programs run one after the other, it need not wait for what cannot come.
    """
    return PATIENCE if device.type == "cuda" else 0


def reduce_cols(N: int, device: torch.device, *, early: bool) -> int:
    """Return how many columns of the partial buffer one program adds up; see `reduces_early`.

    16 or 32 on a GPU, so that many programs share a short job. The interpreter pays per program and
    not per element.
    """
    if device.type != "cuda":
        return INTERPRETED_REDUCE_TILE.block_size
    return 32 if early and N > REDUCE_NARROW_MAX else 16


def reduce_rows(N: int, device: torch.device, *, early: bool) -> int:
    """Return how many rows of the partial buffer one program adds up per step."""
    if device.type != "cuda":
        return INTERPRETED_REDUCE_TILE.rows
    return REDUCE_TILE // reduce_cols(N, device, early=early)


@functools.lru_cache(maxsize=64)
def overlaps(device: torch.device) -> bool:
    """Tell whether a kernel can be put in place while the one that it depends on still runs.

    Programmatic dependent launch, from compute capability 9.0 on. It changes no bit.
    """
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def reduces_early(n_programs: int, x: torch.Tensor) -> bool:
    """Tell whether the dw reduction is put in place while `n_programs` programs still run."""
    return overlaps(x.device) and reduces_early_on(sm_count(x.device), n_programs, x)


def reduces_early_on(n_sm: int, n_programs: int, x: torch.Tensor) -> bool:
    """Return the same for a device of `n_sm` streaming multiprocessors where kernels may overlap.

    Its start is then hidden: 2048 x 2048 takes 10.5 us against 11.2. Only where every SM has as
    many programs as the next: on idle ones the waiting programs would gather, and then do all the
    work there (512 x 2048 would take 7.2 us against 6.4). And not in large fp32, which it slows:
    32768 x 512 would take 54.3 us against 52.8 (not recorded).
    """
    large = x.itemsize > 2 and x.numel() * x.itemsize > EARLY_FP32_BYTES_MAX
    return n_programs % n_sm == 0 and not large


def eviction(x: torch.Tensor) -> str:
    """Return the L2 policy, as Triton spells it, of all that the one-tile forward streams."""
    return EVICTIONS[x.numel() * x.element_size() >= LARGE_BYTES]


def forward_path(N: int) -> str:
    """Name the forward that serves rows of N columns."""
    return "forward" if N <= ONE_TILE_MAX else "wide_forward"


def dx_rows(M: int, N: int, dtype: torch.dtype, config: Config) -> int:
    """Return how many whole rows a dx program of the few-rows kernel holds.

    One, two or four, or the fewest that move no bit: for which the compiler spreads a row over the
    threads as it does in the one-tile kernel (`tests/test_compile.py` compares them). There are two
    such spreads. By whole vectors of 16 bytes, which takes a tile of a vector per thread. Or by the
    elements of w that a thread gets, where that is less than a vector and loads are pipelined: in
    the few-rows kernel this takes a tile of one row.
    On AMD, where nothing was compared, it is the whole tile of the one-tile kernel.
    """
    block_size, most = backward_tile(N)
    if torch.version.hip:
        return most
    threads, vector = 32 * config.num_warps, 16 // dtype.itemsize
    if config.num_stages > 1 and threads <= block_size < threads * vector:
        return 1
    least = threads * vector // block_size
    wanted = 1 if M <= ONE_DX_ROW_MAX else 2
    if M > 2 * ONE_DX_ROW_MAX and N > NARROW_MAX:
        wanted = 4
    return min(max(least, wanted), most)


def dw_rows(M: int, N: int, num_warps: int, device: torch.device) -> int:
    """Return how many rows a dw program of the few-rows kernel adds per step."""
    if device.type != "cuda":
        return INTERPRETED_FEW_ROWS_MAX // 2  # so that it takes several steps
    if M <= very_few_rows(N):
        return VERY_FEW_DW_ROWS
    if N <= NARROW_MAX:
        return NARROW_DW_ROWS_PER_WARP * min(num_warps, NARROW_DW_WARPS_MAX)
    return DW_ELEMENTS_PER_THREAD * 32 * num_warps // dw_cols(M, N, device)


def dw_stages(M: int, N: int, num_warps: int) -> int:
    """Return how many of those steps a dw program keeps in flight."""
    pipelined = very_few_rows(N) < M and N <= NARROW_MAX and num_warps <= NARROW_DW_WARPS_MAX
    return NARROW_DW_STAGES if pipelined and not torch.version.hip else 1


def dw_cols(M: int, N: int, device: torch.device) -> int:
    """Return how many columns a dw program of the few-rows kernel owns.

    Interpreted, it is as many as in the reduction (see `reduce_cols`).
    """
    if device.type != "cuda":
        return reduce_cols(N, device, early=False)
    # 16 numbers of 16 bits are one sector of 32 bytes: the least that is read without waste. So
    # short rows have programs enough.
    return 16 if very_few_rows(N) < M and N <= SHORT_ROW_MAX else 32


def very_few_rows(N: int) -> int:
    """Return the most rows of N columns that get the smallest tiles."""
    return max(VERY_FEW_ROWS, N // COLUMNS_PER_VERY_FEW_ROW)


def backward_path(
    M: int,
    N: int,
    device: torch.device,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype | None = None,
) -> str:
    """Name the backward that serves M rows of N columns; no dtype of w: that of x.

    The choice follows M, and moves no bit of dx: the few-rows kernel spreads a row over the threads
    as the one-tile kernel does. Where N is a multiple of 8 both load it by the same vectors (at
    N = 513 in fp32 they do not, and the last bit moved), and where x and w are of one size, or a
    row is long, w does not pull the one kernel to another spread. dw depends on M anyway, as its
    sum does.
    """
    if N <= ONE_TILE_MAX:
        most = FEW_ROWS_MAX if N <= SHORT_ROW_MAX else FEW_LONG_ROWS_MAX
        most = most if device.type == "cuda" else INTERPRETED_FEW_ROWS_MAX
        same_size = w_dtype is None or x_dtype.itemsize == w_dtype.itemsize
        fits = N % 8 == 0 and next_power_of_2(N) >= FEW_ROWS_MIN_BLOCK
        fits &= same_size or N >= FEW_ROWS_MIXED_MIN
        fits &= M * N * x_dtype.itemsize <= FEW_BYTES_MAX
        return "few_rows_backward" if M <= most and fits else "backward"
    return "wide_backward"


@functools.lru_cache(maxsize=1024)
def row_align(N: int, dtype: torch.dtype) -> int:
    """Return the largest power of two, at most 16 bytes' worth of elements, that divides N.

    Row strides must be multiples of it, so that every row of every view is loaded by the same
    instructions: it is a function of N and dtype, and so are a row's bits.
    """
    return min(N & -N, 16 // dtype.itemsize)


@functools.lru_cache(maxsize=1024)
def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@functools.lru_cache(maxsize=64)
def sm_count(device: torch.device) -> int:
    """Return how many streaming multiprocessors `device` has; asked once per device."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=64)
def threads_per_sm(device: torch.device) -> int:
    """Return how many threads an SM of `device` has room for; 0 where threads have no registers."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    return int(torch.cuda.get_device_properties(device).max_threads_per_multi_processor)


def n_programs(M: int, N: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many programs share the rows of a backward; they take its tiles in turn.

    Of wide rows it is the number of teams. Each has a row of the partial dw buffer. A team has
    `MIN_ROWS_PER_TEAM` rows or more, all but one, if there are as many.
    """
    if N <= ONE_TILE_MAX:
        return n_programs_on(sm_count(device), M, N)
    teams = sm_count(device) * team_programs(dtype, device) // team(N, device).members
    return max(1, min(teams, M // MIN_ROWS_PER_TEAM))


def n_programs_on(n_sm: int, M: int, N: int) -> int:
    """Return the same for one tile to a row and a device of `n_sm` streaming multiprocessors.

    The number follows the SM count, and M where rows are few: all programs but one have
    `MIN_ROWS_PER_PROGRAM` rows or more, which keeps the [n_programs, N] fp32 buffer, written and
    read, at a third of a 16-bit backward's bytes.
    """
    rows = backward_tile(N).rows
    most = n_sm * (2 if shares_sm(N) else 1)
    n_tiles, least = -(-M // rows), -(-MIN_ROWS_PER_PROGRAM // rows)
    return max(1, min(most, n_tiles // least))
