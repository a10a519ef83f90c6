"""What the race shows: three chains of kernels at every recorded cell, their bytes and times.

Bytes and order come from `traffic.py`, times from the recordings that `choice.py` puts first. A
lane's total is that of the cell's kernel rows, and its split among the eager kernels that of a
profile, where one is shipped.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from rmsnorm_ref import traffic
from rmsnorm_ref.measure import choice, recording
from rmsnorm_ref.measure.schema import FORWARD

if TYPE_CHECKING:
    from rmsnorm_ref.measure.recording import Row

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")
DTYPES = ("bfloat16", "float16", "float32")


class LaneName(NamedTuple):
    """How a recording calls a lane, how the page does, and what sets it apart."""

    contender: str
    label: str
    about: str


LANES = (
    LaneName("eager", "eager", "every operator in x's dtype"),
    LaneName("eager_fp32", "eager, fp32 inside", "x.float() first, a cast back before w"),
    LaneName("ours", "fused", "rmsnorm_ref"),
)


class Kernel(NamedTuple):
    """Hold one kernel: what it reads and writes, as (tensor, bytes)."""

    name: str
    reads: tuple[tuple[str, int], ...]
    writes: tuple[tuple[str, int], ...]

    @property
    def label(self) -> str:
        """Return the name as the page prints it: `cast → h`."""
        return self.name.replace("->", "→").replace("_to_copy", "cast")

    @property
    def n_bytes(self) -> int:
        """Count the bytes both ways."""
        return sum(n for _, n in self.reads + self.writes)


@dataclass(frozen=True)
class Lane:
    """Hold one contender's kernels in order, and the share of its time that each takes.

    `profile` is the recording that the shares were measured in; None: they are shares of bytes.
    """

    label: str
    kernels: tuple[Kernel, ...]
    time_s: float
    shares: tuple[float, ...]
    profile: str | None

    @property
    def n_bytes(self) -> int:
        """Count the bytes of all kernels."""
        return sum(kernel.n_bytes for kernel in self.kernels)


@dataclass(frozen=True)
class Race:
    """Hold the lanes of one cell and pass, and the bandwidth of its ceiling in bytes per second."""

    M: int
    N: int
    dtype: str
    pass_: Pass
    recording: str
    bandwidth: float
    lanes: tuple[Lane, ...]

    @property
    def cell(self) -> tuple[int, int, str]:
        """Name the cell."""
        return self.M, self.N, self.dtype


def races() -> list[Race]:
    """Return both passes of every cell of the seed's grid in which all three lanes are recorded."""
    found: dict[tuple[int, int, str], list[Race]] = {}
    for each in choice.ranked(kind="kernel", section="seed"):
        rows = recording.select(each.rows, kind="kernel", section="seed")
        for cell in {(row.M, row.N, row.dtype) for row in rows} - found.keys():
            M, N, dtype = cell
            of_cell = recording.select(rows, M=M, N=N, dtype=dtype)
            both = [race(each.id, of_cell, pass_) for pass_ in PASSES]
            if all(both):
                found[cell] = [one for one in both if one]
    order = sorted(found, key=lambda cell: (DTYPES.index(cell[2]), cell[1], cell[0]))
    return [one for cell in order for one in found[cell]]


def race(source: str, rows: list[Row], pass_: Pass) -> Race | None:
    """Return one pass of a cell from its rows in one recording; None if a lane is missing."""
    by_name = {row.contender: row for row in recording.select(rows, pass_=pass_)}
    if not all(lane.contender in by_name for lane in LANES):
        return None
    ours = by_name["ours"]
    if ours.ceiling is None or ours.obligatory_bytes is None:
        return None
    bandwidth = traffic.effective_bandwidth(ours.obligatory_bytes, ours.ceiling.time_s)
    lanes = tuple(_lane(name, by_name[name.contender]) for name in LANES)  # type: ignore[index]
    return Race(ours.M, ours.N, ours.dtype, pass_, source, bandwidth, lanes)


def start(found: list[Race]) -> tuple[int, int, str]:
    """Return the cell to begin with: in bf16, profiled if any is, and the largest of those."""
    profiled = {race.cell for race in found if race.lanes[0].profile}
    return max(
        (race.cell for race in found),
        key=lambda cell: (cell[2] == "bfloat16", cell in profiled, cell[0] * cell[1]),
    )


def _lane(name: LaneName, row: Row) -> Lane:
    dtype = getattr(torch, row.dtype)
    forward = row.pass_ == FORWARD
    chain: traffic.Chain
    if name.contender == "ours":
        chain = (traffic.forward if forward else traffic.backward)(row.M, row.N, dtype)
    else:
        count = traffic.eager_forward if forward else traffic.eager_backward
        spelling: traffic.Spelling = "seed" if name.contender == "eager" else "fp32"
        chain = count(row.M, row.N, dtype, spelling=spelling)
    ran = kernels(chain, row.n_programs or 0)
    assert row.time_s is not None
    shares, profile = _profiled(row, [kernel.name for kernel in ran])
    if profile is None:
        total = sum(kernel.n_bytes for kernel in ran)
        shares = tuple(kernel.n_bytes / total for kernel in ran)
    return Lane(name.label, ran, row.time_s.p50, shares, profile)


def kernels(chain: traffic.Chain, n_programs: int) -> tuple[Kernel, ...]:
    """Group a chain's steps by kernel; a tensor that a cache serves does not cross the bus."""
    found = []
    for name, group in itertools.groupby(chain.steps, key=lambda step: step.kernel):
        moved: dict[str, list[tuple[str, int]]] = {"read": [], "write": []}
        for step in group:
            times = n_programs if step.role == "scratch" else 1
            if step.role != "cached":
                moved[step.access].append((step.tensor, step.n_bytes * times))
        found.append(Kernel(name, tuple(moved["read"]), tuple(moved["write"])))
    return tuple(found)


def _profiled(row: Row, names: list[str]) -> tuple[tuple[float, ...], str | None]:
    """Return each kernel's share of a profiled chain's time, and the recording; else nothing.

    A launch that the model lacks, such as the fill before a large reduction, counts as part of the
    kernel it precedes.
    """
    wanted = {
        "kind": "eager_kernel", "contender": row.contender, "pass_": row.pass_,
        "M": row.M, "N": row.N, "dtype": row.dtype,
    }  # fmt: skip
    for each in choice.ranked(**wanted):
        profile = recording.select(each.rows, **wanted)
        seconds = dict.fromkeys(names, 0.0)
        waiting = 0.0
        for launch in profile:
            assert launch.detail is not None
            assert launch.time_s is not None
            steps = [step for step in launch.detail["steps"] if step in seconds]
            waiting += launch.time_s.p50
            for step in steps:
                seconds[step] += waiting / len(steps)
            waiting = 0.0 if steps else waiting
        if profile and all(seconds.values()):
            total = sum(seconds.values())
            return tuple(seconds[name] / total for name in names), each.id
    return (), None


def payload(found: list[Race]) -> dict[str, Any]:
    """Return the races as JSON for the page: each distinct chain and list of bytes only once."""
    chains: dict[Any, int] = {}
    n_bytes: dict[tuple[int, ...], int] = {}
    sources: dict[str, int] = {}
    cells: dict[tuple[int, int, str], dict[str, Any]] = {}
    for one in found:
        lanes = []
        for lane in one.lanes:
            chain = tuple(
                (
                    k.label,
                    tuple(t for t, _ in k.reads),
                    tuple(t for t, _ in k.writes),
                )
                for k in lane.kernels
            )
            flat = tuple(n for k in lane.kernels for _, n in k.reads + k.writes)
            shares = [float(f"{share:.6g}") for share in lane.shares] if lane.profile else None
            profile = sources.setdefault(lane.profile, len(sources)) if lane.profile else -1
            lanes.append({
                "chain": chains.setdefault(chain, len(chains)),
                "bytes": n_bytes.setdefault(flat, len(n_bytes)),
                "time": lane.time_s,
                "shares": shares,
                "profile": profile,
            })  # fmt: skip
        source = sources.setdefault(one.recording, len(sources))
        cell = cells.setdefault(one.cell, {"M": one.M, "N": one.N, "dtype": one.dtype})
        cell |= {"recording": source}
        cell[one.pass_] = {"bandwidth": one.bandwidth, "lanes": lanes}
    return {
        "lanes": [lane.label for lane in LANES],
        "start": list(cells).index(start(found)),
        "recordings": list(sources),
        "chains": list(chains),
        "bytes": list(n_bytes),
        "cells": list(cells.values()),
    }


def _names(moved: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    return tuple(tensor for tensor, _ in moved)
