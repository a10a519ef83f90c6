"""Facts about the recorded machine, and limits that follow from a formula or from a dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from evidence import Fact, micro
from findings import SPELLINGS, seconds, spread

from rmsnorm_ref import traffic
from rmsnorm_ref.measure import recording
from rmsnorm_ref.measure.choice import picked
from rmsnorm_ref.measure.schema import FORWARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rmsnorm_ref.measure.recording import Row


def sm_count() -> Fact:
    """Return how many SMs the GPU of the seed's recording has."""
    _, found = picked(kind="kernel", section="seed")
    return Fact(str(found.provenance.sm_count), found.id)


def per_sm(n_programs: int) -> int:
    """Return how many programs so many for each SM of that GPU are."""
    _, found = picked(kind="kernel", section="seed")
    return n_programs * found.provenance.sm_count


def datasheet() -> Fact:
    """Return the bandwidth that the vendor states for that GPU."""
    _, found = picked(kind="kernel", section="seed")
    stated = found.provenance.datasheet_bandwidth_bytes_per_s
    if stated is None:
        raise LookupError(f"{found.id} has no datasheet's bandwidth")
    return Fact(f"{stated / 1e12:.2g} TB/s", found.id)


def ceilings(pass_: str) -> Fact:
    """Return the least and the largest bandwidth of the ceiling in the seed's cells."""
    rows, source = picked(kind="kernel", section="seed", contender="ours", pass_=pass_)
    found = [
        row.obligatory_bytes / row.ceiling.time_s / 1e12
        for row in rows
        if row.ceiling and row.obligatory_bytes
    ]
    return Fact(f"{spread(found)} TB/s", source.id)


def least_rows(share: float, n_programs: int, n_bytes: int = 2) -> str:
    """Return from how many rows on the partial buffer is at most a share: 8P / (3e share)."""
    rows = math.ceil(8 * n_programs / (3 * n_bytes * share))
    return f"{rows:,}".replace(",", "\u202f")


def stalls_at(dtype: Any) -> str:
    """Return where a running total of ones stops growing in a dtype, found by adding."""
    one = torch.ones((), dtype=dtype)
    total = one.clone()
    while total + one > total:
        total = total + one
    return f"{int(total):,}".replace(",", "\u202f")


def trips(other: str, pass_: str) -> str:
    """Return how many whole [M, N] tensors an eager chain reads or writes, in units of x."""
    chain = _eager(other, pass_)
    return f"{chain.obligatory_bytes / (4096 * 4096 * 2):.0f}"


def n_kernels(other: str, pass_: str, *, large: bool = False) -> str:
    """Return how many kernels an eager chain launches, or how many touch an [M, N] tensor."""
    steps = _eager(other, pass_).steps
    return str(len({step.kernel for step in steps if step.role == "obligatory" or not large}))


def _eager(other: str, pass_: str) -> traffic.Chain:
    count = traffic.eager_forward if pass_ == FORWARD else traffic.eager_backward
    return count(4096, 4096, torch.bfloat16, spelling=SPELLINGS[other])


def values(found: Sequence[int]) -> str:
    """Print what a knob may be: "1, 2 and 4"."""
    *most, last = map(str, found)
    return f"{', '.join(most)} and {last}" if most else last


def pinned(name: str, contender: str, pass_: str, M: int, N: int, dtype: str) -> Fact:
    """Return a time from one recording by name: for what was seen once and is told as such."""
    return Fact(micro(seconds(_one(name, contender, pass_, M, N, dtype))), name)


def pinned_warps(name: str, pass_: str, M: int, N: int, dtype: str) -> Fact:
    """Return how many warps ours was launched with in one recording by name."""
    config = _one(name, "ours", pass_, M, N, dtype).config
    assert config is not None
    return Fact(str(config.num_warps), name)


def _one(name: str, contender: str, pass_: str, M: int, N: int, dtype: str) -> Row:
    return recording.select(
        recording.load(name).rows,
        kind="kernel", contender=contender, pass_=pass_, M=M, N=N, dtype=dtype,
    )[0]  # fmt: skip


NAMES: dict[str, Any] = {
    function.__name__: function
    for function in (
        sm_count, per_sm, datasheet, ceilings, least_rows, stalls_at, trips, n_kernels, values,
        pinned, pinned_warps,
    )
}  # fmt: skip
