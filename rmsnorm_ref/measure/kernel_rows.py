"""Kernel time of both passes on one cell: every contender and every ceiling, interleaved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import timing
from .calls import Backward, Forward, ForwardBackward, Recorded, ceilings, n_loops
from .schema import BACKWARD, FORWARD, Flag, Kind, Pass, Row
from .session import OURS, Session, best, obligatory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .calls import Call, InputSet
    from .cells import Cell
    from .peers import Pin
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
    """Return a row for each contender of one pass, with the ceiling timed among them.

    A peer that searches is timed with each config that it would try; its row is of the fastest.
    """
    n_bytes = obligatory_bytes(pass_, cell)
    assert n_bytes is not None
    loops = n_loops(len(inputs), n_bytes)
    lanes = _lanes(session, cell, pass_, calls)
    contenders = {label: lane.call for label, lane in lanes.items()}
    contenders |= {_CEILING + name: kernel for name, kernel in ceilings(pass_).items()}
    uncaptured: list[str] = []

    def on_failure(label: str, error: Exception) -> None:
        session.failed(f"{cell.label()} {pass_}", label, error)
        name = lanes[label].name if label in lanes else OURS.name
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if pass_ == BACKWARD and name != OURS.name and not out_of_memory:
            uncaptured.append(name)

    samples = timing.graphed(
        contenders, inputs, loops=loops, clock=session.clock, on_failure=on_failure
    )
    found: dict[str, tuple[Sample, dict[str, Any]]] = {}
    for label, lane in lanes.items():
        sample = samples.get(label)
        if sample and (lane.name not in found or sample.p50_s < found[lane.name][0].p50_s):
            found[lane.name] = sample, {"config": lane.pin.config} if lane.pin else {}
    flagged: dict[str, tuple[Flag, ...]] = {}
    for name in dict.fromkeys(uncaptured):
        if name not in found:  # not with any config
            difference = by_difference(session, cell, name, calls[name], inputs, loops)
            if difference is not None:
                found[name], flagged[name] = (difference, {}), ("by_difference",)
    floor = {n.removeprefix(_CEILING): s for n, s in samples.items() if n.startswith(_CEILING)}
    ceiling = best(floor)
    footprint = n_bytes * len(inputs)
    rows = []
    for name in calls:
        if name not in found:
            continue
        sample, more = found[name]
        bandwidth = n_bytes / sample.p50_s
        most = n_bytes / ceiling.time_s if ceiling else None
        flags = timing.flags(bandwidth, most, footprint, session.l2_bytes)
        rows.append(
            session.row(
                cell,
                pass_,
                name,
                sample,
                kind=kind,
                n_input_sets=len(inputs),
                ceiling=ceiling,
                flags=flags + flagged.get(name, ()),
                **more,
            )
        )
    return rows


class _Lane(NamedTuple):
    """Hold one thing to time: whose it is, what to call, and with which config if one is held."""

    name: str
    call: Callable[[InputSet], object]
    pin: Pin | None = None


def _lanes(session: Session, cell: Cell, pass_: Pass, calls: dict[str, Call]) -> dict[str, _Lane]:
    """Return what is timed by label: a contender, or each config of one that searches."""
    wrap = Forward if pass_ == FORWARD else Backward
    found: dict[str, _Lane] = {}
    for name, call in calls.items():
        contender = wrap(call)
        pins = session.peers[name].pins(pass_, cell.N) if name in session.peers else ()
        for pin in pins:
            found[f"{name} with {pin.choice}"] = _Lane(name, _pinned(contender, pin), pin)
        if not pins:
            found[name] = _Lane(name, contender)
    return found


def _pinned(contender: Callable[[InputSet], object], pin: Pin) -> Callable[[InputSet], object]:
    """Return the contender, its own search held to one config."""

    def call(inputs: InputSet) -> object:
        with pin.held():
            return contender(inputs)

    return call


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
