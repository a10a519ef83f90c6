"""The sections beside kernel times: a cold call, the host's time, errors against the truth."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

from rmsnorm_ref import oracle

from . import timing
from .calls import Backward, Forward, Recorded, ceilings, leaves
from .cells import BF16, COLD, FEW_CONTENDERS, HOST, Cell
from .peers import EPS
from .schema import FORWARD, Pass, Row
from .session import Session, best

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from .calls import Call, InputSet


def cold(
    session: Session,
    dtype: torch.dtype = BF16,
    time_cold: Callable[[str, timing.Work], timing.Sample] = timing.cold,
) -> list[Row]:
    """Return do_bench times of ours, F.rms_norm and one kernel that only moves the bytes."""
    cell = Cell("cold", *COLD, dtype, FEW_CONTENDERS)
    (inputs,) = session.inputs(cell, 1)
    calls = session.calls(cell, inputs)
    rows: list[Row] = []
    for pass_ in session.passes:
        wrap, bare = (Forward, "torch.neg") if pass_ == FORWARD else (Backward, "torch.add")
        work: dict[str, Callable[[InputSet], object]] = {n: wrap(c) for n, c in calls.items()}
        work[bare] = ceilings(pass_)[bare]
        clock = session.clock or timing.CudaClock()
        replays = {name: _replay(clock, contender, inputs) for name, contender in work.items()}
        first, second = (
            {name: time_cold(name, replay) for name, replay in replays.items()} for _ in range(2)
        )
        for name, sample in first.items():
            twice = dataclasses.replace(sample, repeat_p50_s=second[name].p50_s)
            above = sample.p50_s < first[bare].p50_s
            rows.append(
                session.row(
                    cell,
                    pass_,
                    name,
                    twice,
                    kind="cold",
                    n_input_sets=1,
                    ceiling=best({bare: first[bare]}),
                    flags=("above_ceiling",) if above else (),
                )
            )
    return rows


def _replay(
    clock: timing.Clock, contender: Callable[[InputSet], object], inputs: InputSet
) -> timing.Work:
    """Return the replay of a graph of one call; outside of it the call has run once."""
    with clock.running():
        contender(inputs)
        clock.finish()
        return clock.capture([lambda: contender(inputs)], 1)


# ---- The host's time --------------------------------------------------------------------------


def host(
    session: Session,
    dtype: torch.dtype = BF16,
    time_host: Callable[[Mapping[str, timing.Work]], dict[str, timing.Sample]] = timing.host,
) -> list[Row]:
    """Return the host's time per call: a forward without gradients, one with, and both passes.

    Contenders take turns, on an input so small that the GPU waits for the host.
    """
    cell = Cell("host", *HOST, dtype)
    (inputs,) = session.inputs(cell, 1)
    calls = session.calls(cell, inputs)
    ways: tuple[tuple[Pass, bool, Callable[[Call], Callable[[InputSet], object]]], ...] = (
        (FORWARD, False, Forward),
        (FORWARD, True, Recorded),
        ("forward+backward", True, _Training),
    )
    rows: list[Row] = []
    for pass_, requires_grad, wrap in ways:
        work = {name: functools.partial(wrap(call), inputs) for name, call in calls.items()}
        for name, sample in time_host(work).items():
            detail = {"requires_grad": requires_grad}
            rows.append(session.row(cell, pass_, name, sample, kind="host", detail=detail))
    return rows


class _Training:
    """Run both passes the way a training step does: gradients land in `.grad`, set to None first.

    x and w are made leaves once: a step does not make its parameters anew.
    """

    def __init__(self, f: Call) -> None:
        self._f = f
        self._leaves: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, inputs: InputSet) -> object:
        if self._leaves is None:
            self._leaves = leaves(inputs)
        x, w = self._leaves
        x.grad = w.grad = None
        self._f(x, w).backward(inputs.dy)  # type: ignore[no-untyped-call]  # torch's own
        return None


# ---- Errors -----------------------------------------------------------------------------------


def errors(session: Session, cell: Cell) -> list[Row]:
    """Return the largest error of each contender of a cell, per tensor, one row per pass."""
    (inputs,) = session.inputs(cell, 1)
    x, w, dy = inputs.x, inputs.w, inputs.dy
    calls = session.calls(cell, inputs)
    true_y, true_dx_dw = oracle.truth(x, w, EPS), oracle.truth_backward(dy, x, w, EPS)
    bounds = {
        "y": oracle.bound_y(x, w, EPS),
        "dx": oracle.bound_dx(dy, x, w, EPS),
        "dw": oracle.bound_dw(dy, x, w, EPS),
    }
    truths = dict(zip(("y", "dx", "dw"), (true_y, *true_dx_dw), strict=True))
    rows: list[Row] = []
    for name, call in calls.items():
        for pass_ in session.passes:
            try:
                found = _results(call, inputs, pass_)
            except Exception as error:  # noqa: BLE001  # a peer may raise whatever it likes
                session.failed(f"{cell.label()} {pass_}", name, error)
                continue
            verdicts = {t: oracle.compare(found[t], truths[t], bounds[t]) for t in found}
            detail = {
                "max_ulp": {t: _finite(v.errors.max_ulp) for t, v in verdicts.items()},
                "error_over_bound": {t: _finite(v.worst_ratio) for t, v in verdicts.items()},
            }
            rows.append(session.row(cell, pass_, name, None, kind="error", detail=detail))
    return rows


def _results(call: Call, inputs: InputSet, pass_: Pass) -> dict[str, torch.Tensor]:
    if pass_ == FORWARD:
        y: Any = Forward(call)(inputs)
        return {"y": y}
    gradients: Any = Backward(call)(inputs)
    return dict(zip(("dx", "dw"), gradients, strict=True))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
