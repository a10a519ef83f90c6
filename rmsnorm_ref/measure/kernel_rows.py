"""Kernel time of both passes on one cell: every contender and every ceiling, interleaved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import timing
from .calls import Backward, Forward, ForwardBackward, Recorded, ceilings, n_loops
from .schema import BACKWARD, FORWARD, Flag, Kind, Pass, Row
from .session import OURS, Session, best, obligatory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .calls import Call, InputSet
    from .cells import Cell
    from .timing import Sample

_CEILING = "ceiling "  # what sets a ceiling's name apart from a contender's


def measure(session: Session, cell: Cell) -> list[Row]:
    """Return the kernel rows of a cell; in the size sweep also those of one input over and over."""
    inputs = session.inputs(cell)
    calls = session.calls(cell, inputs[0])
    rows: list[Row] = []
    for pass_ in session.passes:
        rows += time_pass(session, cell, pass_, calls, inputs)
        if cell.section == "sizes":
            rows += time_pass(session, cell, pass_, calls, inputs[:1], kind="resident")
    return rows


def time_pass(
    session: Session,
    cell: Cell,
    pass_: Pass,
    calls: dict[str, Call],
    inputs: Sequence[InputSet],
    kind: Kind = "kernel",
) -> list[Row]:
    """Return a row for each contender of one pass, with the ceiling timed among them."""
    n_bytes = obligatory_bytes(pass_, cell)
    assert n_bytes is not None
    loops = n_loops(len(inputs), n_bytes)
    wrap = Forward if pass_ == FORWARD else Backward
    contenders: dict[str, Callable[[InputSet], object]] = {
        name: wrap(call) for name, call in calls.items()
    }
    contenders |= {_CEILING + name: kernel for name, kernel in ceilings(pass_).items()}
    uncaptured: list[str] = []

    def on_failure(name: str, error: Exception) -> None:
        session.failed(f"{cell.label()} {pass_}", name, error)
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if pass_ == BACKWARD and name in calls and name != OURS.name and not out_of_memory:
            uncaptured.append(name)

    samples = timing.graphed(
        contenders, inputs, loops=loops, clock=session.clock, on_failure=on_failure
    )
    flagged: dict[str, tuple[Flag, ...]] = {}
    for name in uncaptured:
        found = by_difference(session, cell, name, calls[name], inputs, loops)
        if found is not None:
            samples[name], flagged[name] = found, ("by_difference",)
    floor = {n.removeprefix(_CEILING): s for n, s in samples.items() if n.startswith(_CEILING)}
    ceiling = best(floor)
    footprint = n_bytes * len(inputs)
    rows = []
    for name in calls:
        if name not in samples:
            continue
        bandwidth = n_bytes / samples[name].p50_s
        most = n_bytes / ceiling.time_s if ceiling else None
        flags = timing.flags(bandwidth, most, footprint, session.l2_bytes)
        rows.append(
            session.row(
                cell,
                pass_,
                name,
                samples[name],
                kind=kind,
                n_input_sets=len(inputs),
                ceiling=ceiling,
                flags=flags + flagged.get(name, ()),
            )
        )
    return rows


def by_difference(
    session: Session,
    cell: Cell,
    name: str,
    call: Call,
    inputs: Sequence[InputSet],
    loops: int,
) -> Sample | None:
    """Time forward and backward in one graph, and the forward, and return the difference."""
    both: dict[str, Callable[[InputSet], object]] = {
        "both": ForwardBackward(call),
        "forward": Recorded(call),
    }
    samples = timing.graphed(
        both,
        inputs,
        loops=loops,
        clock=session.clock,
        on_failure=lambda _, error: session.failed(f"{cell.label()} by difference", name, error),
    )
    if len(samples) < 2 or samples["both"].p20_s <= samples["forward"].p50_s:
        return None
    less, whole = samples["forward"].p50_s, samples["both"]
    return timing.Sample(
        whole.p20_s - less, whole.p50_s - less, whole.p80_s - less, whole.n_samples
    )
