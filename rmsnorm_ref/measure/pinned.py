"""The choices that `tiling.py` pins, as data: what could be done in its place, and where it shows.

An alternative sets other values in `tiling` while the package's own launchers build and launch; no
kernel is copied. `alternatives.py` times them, so a threshold has a measurement behind it that any
run can repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rmsnorm_ref import tiling, traffic, tuning

from .cells import BF16
from .schema import BACKWARD, FORWARD, Knob, OnePass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from . import variants

Value = int | str
NOTHING: Mapping[str, Any] = {}


class Alternative(NamedTuple):
    """Hold one way to decide: what it is called, and what differs."""

    value: Value
    sets: Mapping[str, Any] = NOTHING  # attributes of `tiling`
    needs_rstd: bool = True
    torch_sum: bool = False  # adds the partial rows up, in place of reduce_dw_kernel
    kernel: variants.Name | None = None  # stands for the one-tile backward

    @property
    def atomic(self) -> bool:
        """Tell whether programs add to one row of sums, in place of a buffer of several."""
        return (self.kernel or "").startswith("atomics")


class Choice(NamedTuple):
    """Hold one pinned choice, where it is measured, and what the package takes there."""

    knob: Knob
    meaning: str
    passes: tuple[OnePass, ...]
    shapes: tuple[tuple[int, int], ...]  # (M, N)
    alternatives: tuple[Alternative, ...]
    taken: Callable[[int, int], Value | None]  # None: either, as the call asks for
    base: Mapping[str, Any] = NOTHING  # attributes of `tiling` that all alternatives share
    searched: bool = False  # the tile differs, so each gets the best of its numbers of warps


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


# The package's own, also while another stands in its place.
one_wave, very_few_rows, dw_stages = tiling.one_wave, tiling.very_few_rows, tiling.dw_stages
reduce_cols = tiling.reduce_cols
ONE_DX_ROW_MAX = tiling.ONE_DX_ROW_MAX


N_SM = 132  # of an H200


def one_wave_on_h200(N: int) -> range:
    """Return what `tiling.one_wave` says of the shipped config on an H200, bf16."""
    return one_wave(N, BF16, tuning.shipped("forward", N, BF16).num_warps, N_SM, 2048)


def early_on_h200(M: int, N: int) -> bool:
    """Return what `tiling.reduces_early` says of bf16 on an H200."""
    x = torch.empty(M, N, dtype=BF16, device="meta")
    return tiling.reduces_early_on(N_SM, tiling.n_programs_on(N_SM, M, N), x)


BOTH: tuple[OnePass, ...] = (FORWARD, BACKWARD)
BUFFER = {"backward_path": _always("backward")}  # the two kernels, however few the rows
FEW = {"backward_path": _always("few_rows_backward")}  # the one launch, however many
LARGE_TILE = {"NARROW_MAX": 0}
SMALL_TILE = {"NARROW_MAX": tiling.LARGEST_N, "LARGE_TILE_ALL_THE_SAME": ()}
ELEMENTS = 2**25  # 64 MiB of x

CHOICES = (
    Choice(
        "path", "a row whole in registers, or in chunks", BOTH, ((8192, 16384),),
        (Alternative("one tile", {"ONE_TILE_MAX": tiling.LARGEST_N}),
         Alternative("chunks", {"ONE_TILE_MAX": 0})),
        lambda _, N: "one tile" if N <= tiling.ONE_TILE_MAX else "chunks", searched=True,
    ),
    Choice(
        "team_cols", "columns that each program of a team has of a wide row", (BACKWARD,),
        ((8192, 16384), (2048, 65536)),
        tuple(Alternative(cols, {"TEAM_COLS": cols}) for cols in (1024, 2048, 4096, 8192)),
        _always(tiling.TEAM_COLS), searched=True,
    ),
    Choice(
        "few_rows", "dw without a buffer, or with one", (BACKWARD,),
        ((16, 2048), (1024, 2048), (2048, 2048), (512, 8192), (1024, 8192)),
        (Alternative("one launch", {"backward_path": _always("few_rows_backward")}),
         Alternative("buffer", BUFFER)),
        lambda M, N: "buffer" if tiling.backward_path(M, N, traffic.GPU, BF16) == "backward"
        else "one launch",
    ),
    Choice(
        "eviction", "the L2 policy of all that the forward streams", (FORWARD,),
        ((4096, 4096), (8192, 8192), (32768, 8192)),
        tuple(Alternative(policy or "none", {"EVICTIONS": (policy, policy)})
              for policy in ("", "evict_last", "evict_first")),
        lambda M, N: tiling.eviction(torch.empty(M, N, dtype=BF16, device="meta")) or "none",
    ),
    Choice(
        "one_row_per_sm", "a second program kept off an SM", (FORWARD,), ((2048, 65536),),
        (Alternative("on", {"one_row_per_sm": _always(
            tiling.one_row_per_sm(tiling.LARGEST_N, BF16, traffic.GPU))}),
         Alternative("off", {"one_row_per_sm": _always({})})),
        lambda _, N: "on" if tiling.one_row_per_sm(N, BF16, traffic.GPU) else "off",
    ),
    Choice(
        "one_wave", "32 registers a thread, so that all rows are in work at once", (FORWARD,),
        ((1024, 4096), (2048, 2048), (4096, 2048)),
        (Alternative("capped", {"one_wave": _always(range(2**40))}, needs_rstd=False),
         Alternative("not capped", {"one_wave": _always(range(0))}, needs_rstd=False)),
        lambda M, N: "capped" if M in one_wave_on_h200(N) else "not capped",
    ),
    Choice(
        "backward_tile", "elements of a tile: small ones, two programs per SM, or large ones, one",
        (BACKWARD,), tuple((ELEMENTS // N, N) for N in (64, 128, 256, 512)),
        (Alternative(tiling.NARROW_BACKWARD_TILE, SMALL_TILE),
         Alternative(tiling.BACKWARD_TILE, LARGE_TILE)),
        lambda _, N: tiling.backward_tile(N).rows * tiling.backward_tile(N).block_size,
        searched=True,
    ),
    Choice(
        "few_rows_tiles", "dw of few rows added up 8 at a time, or as many as fill the threads",
        (BACKWARD,), ((1, 2048), (16, 2048), (64, 8192), (512, 2048)),
        (Alternative("least", {"very_few_rows": _always(2**40)}),
         Alternative("full", {"very_few_rows": _always(0)})),
        lambda M, N: "least" if M <= very_few_rows(N) else "full", base=FEW,
    ),
    Choice(
        "dw_stages", "steps of dw that few narrow rows keep in flight", (BACKWARD,),
        ((512, 512), (1024, 1024), (1024, 2048)),
        tuple(Alternative(stages, {"dw_stages": _always(stages)})
              for stages in (1, tiling.NARROW_DW_STAGES)),
        lambda M, N: dw_stages(M, N, tuning.shipped("backward", N, BF16).num_warps), base=FEW,
    ),
    Choice(
        "dx_rows", "rows of a dx program of few rows: the least of these, or the most",
        (BACKWARD,), ((128, 4096), (512, 4096), (1024, 2048)),
        (Alternative(1, {"ONE_DX_ROW_MAX": 2**40}), Alternative("2 or 4", {"ONE_DX_ROW_MAX": 0})),
        lambda M, _: 1 if M <= ONE_DX_ROW_MAX else "2 or 4", base=FEW,
    ),
    Choice(
        "rstd", "one fp32 number per row, written for a backward", (FORWARD,),
        ((524288, 64), (65536, 512), (2048, 2048)),
        (Alternative("written"), Alternative("left out", needs_rstd=False)), _always(None),
    ),
    Choice(
        "reduction", "what adds the partial rows of dw up", (BACKWARD,),
        ((512, 2048), (4096, 8192)),
        (Alternative("kernel"), Alternative("torch.sum", torch_sum=True)), _always("kernel"),
        base=BUFFER,
    ),
    Choice(
        "reduce_cols", "columns that one program of that kernel adds up", (BACKWARD,),
        ((2048, 2048), (2048, 8192)),
        tuple(Alternative(cols, {"reduce_cols": _always(cols)}) for cols in (16, 32, 64)),
        lambda M, N: reduce_cols(N, traffic.GPU, early=early_on_h200(M, N)), base=BUFFER,
    ),
    Choice(
        "reduction_start", "that kernel put in place while the first still runs, or after it",
        (BACKWARD,), ((512, 2048), (2048, 2048), (4096, 8192)),
        (Alternative("early", {"reduces_early": _always(value=True)}),
         Alternative("after", {"reduces_early": _always(value=False)})),
        lambda M, N: "early" if early_on_h200(M, N) else "after", base=BUFFER,
    ),
    Choice(
        "walk", "programs that take the tiles in turn, or a chunk of neighbouring rows each",
        (BACKWARD,), ((4096, 8192), (32768, 8192), (262144, 128)),
        (Alternative("in turn"), Alternative("chunks", kernel="in_chunks")), _always("in turn"),
    ),
    Choice(
        "dw_sum", "what adds up dw over programs", (BACKWARD,), ((2048, 2048), (4096, 8192)),
        (Alternative("buffer"), Alternative("atomics per program", kernel="atomics_per_program"),
         Alternative("atomics per row", kernel="atomics_per_row")),
        _always("buffer"), base=BUFFER,
    ),
)  # fmt: skip
