"""What is pinned: tiles, numbers of programs, and when registers are capped."""

from __future__ import annotations

import pytest
import torch
from paths import in_every_dtype, on_every_width

from rmsnorm_ref import tiling, traffic, tuning

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")


@pytest.mark.parametrize("block_size", [2**i for i in range(17)])
def test_tile_spans_the_row(block_size: int) -> None:
    """BLOCK_SIZE is the next power of two, and narrow rows fill the tile up to its size."""
    for N in {block_size // 2 + 1, block_size}:
        for tile, most in (
            (tiling.forward_tile(N), tiling.FORWARD_TILE),
            (
                tiling.backward_tile(N),
                tiling.NARROW_BACKWARD_TILE if tiling.shares_sm(N) else tiling.BACKWARD_TILE,
            ),
        ):
            assert tile.block_size == block_size
            assert tile.block_size * tile.rows == max(most, block_size)


@on_every_width
@in_every_dtype
@pytest.mark.parametrize("n_sm", [1, 4, 132])
def test_programs_number_what_the_sms_allow_and_none_is_idle(
    monkeypatch: pytest.MonkeyPatch, N: int, dtype: torch.dtype, n_sm: int
) -> None:
    """Programs are as many as the SMs allow, or fewer, and then each has a few rows at least."""
    monkeypatch.setattr(tiling, "sm_count", lambda _: n_sm)
    tile_rows, members, fewest_rows = 1, 1, tiling.MIN_ROWS_PER_TEAM
    if N <= tiling.ONE_TILE_MAX:
        tile_rows, fewest_rows = tiling.backward_tile(N).rows, tiling.MIN_ROWS_PER_PROGRAM
        most = n_sm * (2 if tiling.shares_sm(N) else 1)
    else:
        members = tiling.team(N, traffic.GPU).members
        most = max(members, n_sm * tiling.team_programs(dtype, traffic.GPU))
    for M in (*range(1, 70), n_sm * tile_rows, n_sm * tile_rows + 1, 4096, 1_000_003):
        n_programs, n_tiles = tiling.n_programs(M, N, dtype, traffic.GPU), -(-M // tile_rows)
        assert 1 <= n_programs <= n_tiles
        assert n_programs * members <= most
        if (n_programs + 1) * members <= most:
            fewest = -(-fewest_rows // tile_rows)  # tiles of a program
            assert n_tiles < (n_programs + 1) * fewest


@pytest.mark.parametrize("device", [CPU, traffic.GPU])
def test_a_team_has_all_columns_and_none_of_it_is_idle(device: torch.device) -> None:
    """Every wide row is covered, each program has columns, about as many, in whole sectors."""
    for N in (*range(tiling.ONE_TILE_MAX + 1, 9300), *range(9300, tiling.LARGEST_N + 1, 97)):
        members, cols = tiling.team(N, device)
        assert cols % tiling.COLS_PER_SECTOR == 0
        assert (members - 1) * cols < N <= members * cols
    assert tiling.team(tiling.LARGEST_N, traffic.GPU) == (64, tiling.TEAM_COLS)


def test_all_programs_of_a_wide_backward_fit_on_the_sms() -> None:
    """Threads, times registers, times programs per SM, are the registers that an SM has."""
    for dtype, per_sm in ((FP16, 16), (BF16, 16), (FP32, 8)):
        assert tiling.team_programs(dtype, traffic.GPU) == per_sm
        tried = [c for c, why in tuning.pruned("wide_backward", 20000, dtype).items() if not why]
        most = max(config.num_warps for config in tried) * 32 * tiling.TEAM_REGISTERS * per_sm
        assert most == tiling.REGISTERS_PER_SM
    assert tiling.resident_team(CPU) == {}


def test_a_cap_on_registers_is_asked_for_where_it_makes_one_wave() -> None:
    """Registers are capped where that makes one wave of two, and not elsewhere."""
    wave = tiling.one_wave(2048, BF16, 4, 132, 2048)
    assert wave == tiling.one_wave(1032, FP16, 4, 132, 2048) == range(132 * 12 + 1, 132 * 16 + 1)
    assert tiling.one_wave(4096, BF16, 8, 132, 2048) == range(132 * 6 + 1, 132 * 8 + 1)
    others = ((2048, FP32, 4), (2044, BF16, 4), (2048, BF16, 8), (1024, BF16, 4), (8192, BF16, 8))
    assert not any(tiling.one_wave(*other, 132, 2048) for other in others)
    assert not tiling.one_wave(2048, BF16, 4, 132, 1536), "12 programs are all it has room for"
    assert not tiling.one_wave(2048, BF16, 4, 4, tiling.threads_per_sm(torch.device("cpu")))


def test_a_reduction_starts_early_where_no_sm_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs on each SM, and a GPU that can: else it would gather on the idle SMs."""
    assert not tiling.overlaps(CPU)
    monkeypatch.setattr(tiling, "sm_count", lambda _: 132)
    x = torch.empty(32 * 2**20 + 1, dtype=BF16, device="meta")
    assert not tiling.reduces_early(132, torch.empty(4, 4))
    monkeypatch.setattr(tiling, "overlaps", lambda _: True)
    assert [n for n in range(1, 265) if tiling.reduces_early(n, x)] == [132, 264]
    early = [tiling.reduces_early(132, x[: 2**i].float()) for i in range(22, 26)]
    assert early == [True, True, False, False], "16, 32, 64 and 128 MiB of fp32"


@pytest.mark.parametrize(
    ("N", "dtype", "most"),
    [
        (64, BF16, 1024),
        (1000, FP32, 1024),
        (2048, BF16, 1024),
        (2056, BF16, 896),
        (4096, FP32, 896),
        (8192, BF16, 896),
        (8192, FP32, 512),
    ],
)
def test_few_rows_are_fewer_where_they_are_long(N: int, dtype: torch.dtype, most: int) -> None:
    """The limit on few rows is lower above 2048 columns, and where x has more than 16 MiB."""
    paths = [tiling.backward_path(M, N, traffic.GPU, dtype) for M in (1, most, most + 1)]
    assert paths == ["few_rows_backward", "few_rows_backward", "backward"]


def test_steps_of_dw_are_in_flight_where_narrow_rows_are_not_very_few() -> None:
    """Up to 1024 columns, from 33 rows on, and with 16 bytes of bf16 to load per thread."""
    assert [tiling.dw_stages(M, 1024, 8) > 1 for M in (1, 32, 33, 1024)] == [
        False,
        False,
        True,
        True,
    ]
    assert [tiling.dw_stages(512, N, 4) > 1 for N in (64, 1024, 1032)] == [True, True, False]
    assert [tiling.dw_stages(512, 256, warps) > 1 for warps in (4, 8, 16)] == [True, True, False]


def test_sizes_of_x_and_w_may_differ_where_few_rows_are_long() -> None:
    """Elsewhere w pulls the one kernel to another layout than the other, so there is one kernel."""
    for N, path in ((4096, "backward"), (4104, "few_rows_backward"), (8192, "few_rows_backward")):
        assert tiling.backward_path(4, N, traffic.GPU, BF16, FP32) == path
        assert tiling.backward_path(4, N, traffic.GPU, FP32, FP16) == path


@on_every_width
@pytest.mark.parametrize("M", [1, 2, 5, 64, 512, 528, 4096])
def test_scratch_is_a_share_of_the_data_and_one_row_at_most(
    monkeypatch: pytest.MonkeyPatch, M: int, N: int
) -> None:
    """All programs but one have 4 rows or more, so their scratch is a third of 3*M*N*e.

    Teams have 2 rows or more, which makes it two thirds.
    """
    monkeypatch.setattr(tiling, "sm_count", lambda _: 132)
    n_programs = tiling.n_programs(M, N, FP16, traffic.GPU)
    both = traffic.backward(M, N, FP16)
    thirds = 1 if N <= tiling.ONE_TILE_MAX else 2
    assert both.scratch_bytes(n_programs - 1) * 3 <= both.obligatory_bytes * thirds
