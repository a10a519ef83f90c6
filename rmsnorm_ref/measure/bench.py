"""`python -m rmsnorm_ref bench`: measure cells, keep what was measured, print a table.

Exit codes: 0 done; 2 the command line or the machine does not allow it; 3 no GPU; 4 nothing was
measured; 130 and 143 stopped by SIGINT or SIGTERM, with everything measured so far saved and marked
as interrupted. After each step the recording is also written beside `--out`, with ".partial" at its
end, so that even a run that is killed outright leaves what it had.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from . import again, cells, peers, plan, provenance, timing
from .plan import Options
from .recording import Provenance, Recording, Row, name_of, save
from .session import GpuLostError, Session, Stopped
from .table import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from .plan import Step

__all__ = ["Options", "execute", "run"]

_BAR = "{percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left, {desc}"


def run(options: Options) -> int:
    """Measure what the options ask for; return the exit code.

    Raises:
        timing.NoGpuError: there is no GPU; raised before a kernel or a peer is loaded.
        timing.NoSamplesError: nothing was measured.
        GpuLostError: a contender broke the GPU's context; what was measured before is saved.
        ValueError: an option has a word that it does not know, or `out` is there already.
    """
    wanted, dtypes = cells.sections(options.cells), cells.dtypes(options.dtype)
    passes, names = plan.parse_passes(options.passes), plan.parse_peers(options.peers)
    before = plan.earlier(options.against)
    device = timing.require_gpu()
    properties = torch.cuda.get_device_properties(device)
    path = plan.out_path(options.out, properties.name)
    session = Session(device, properties.L2_cache_size, passes, before=before)
    plan.choose_peers(session, names)
    *_, remark = provenance.commit()
    if remark:
        session.note(remark)
    uuid = str(properties.uuid).removeprefix("GPU-")
    with provenance.ClockMonitor(f"GPU-{uuid}") as monitor:
        fixed = provenance.describe(device) | {
            "peers": {n: p.version for n, p in peers.contenders().items() if n in names},
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "command": options.command(),
        }
        facts = functools.partial(_facts, fixed, session, monitor, time.monotonic())
        return execute(session, list(plan.steps(session, wanted, dtypes)), path, facts)


def _facts(
    fixed: dict[str, Any],
    session: Session,
    monitor: provenance.ClockMonitor,
    started_s: float,
    *,
    interrupted: bool,
) -> Provenance:
    return Provenance(
        **fixed,
        clocks=monitor.clocks(),
        duration_s=round(time.monotonic() - started_s, 1),
        interrupted=interrupted,
        notes=tuple(session.notes),
    )


def execute(
    session: Session, steps: Sequence[Step], path: Path, facts: Callable[..., Provenance]
) -> int:
    """Carry out the steps, save the recording at `path`, print the table; return the exit code.

    Args:
        session: what the steps share.
        steps: in order; one that fails is noted, and the rest goes on.
        path: of the recording.
        facts: `facts(interrupted=...)` returns the provenance as of now.

    Raises:
        timing.NoSamplesError: no step returned a row.
        GpuLostError: see `run`.
    """
    rows: list[Row] = []
    partial = path.with_name(f"{path.name}.partial")
    stopped: Stopped | GpuLostError | None = None
    try:
        with _signals(session), _bar(steps) as bar:
            for step in steps:
                bar.set_description_str(step.label)
                rows += _measured(session, step)
                bar.update(step.weight)
                keep = Recording(name_of(path), facts(interrupted=True), tuple(rows))
                save(keep, partial, replace=True)
    except (Stopped, GpuLostError) as stop:
        stopped = stop
    if rows:
        if session.before is not None:
            session.note(again.remark(rows, session.before))
        interrupted = stopped is not None
        save(Recording(name_of(path), facts(interrupted=interrupted), tuple(rows)), path)
        partial.unlink(missing_ok=True)
        state = " (interrupted)" if interrupted else ""
        sys.stdout.write(f"{table(rows)}\n\nrecording: {path}{state}\n")
    if isinstance(stopped, Stopped):
        return 128 + stopped.signal_number
    if stopped is not None:
        raise stopped
    if not rows:
        raise timing.NoSamplesError("nothing was measured; what is missing and why is said above")
    return 0


def _measured(session: Session, step: Step) -> list[Row]:
    """Return the step's rows, or none if it fails as a whole; a GPU's memory is free after it."""
    try:
        found = step.measure()
    except GpuLostError:
        raise
    except Exception as error:  # noqa: BLE001  # one step must not cost the run
        session.failed(step.label, "all of it", error)
        found = []
    if session.stop_signal is not None:  # raised where Python drops exceptions, such as a callback
        raise Stopped(session.stop_signal)
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _bar(steps: Sequence[Step]) -> tqdm[Any]:
    total = sum(step.weight for step in steps)
    return tqdm(total=total, bar_format=_BAR, file=sys.stderr, dynamic_ncols=True, leave=False)


@contextlib.contextmanager
def _signals(session: Session) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `Stopped`, and remember them in case it gets lost."""

    def stop(signal_number: int, _: object) -> None:
        session.stop_signal = signal_number
        raise Stopped(signal_number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def heed() -> None:
        for number in numbers:
            signal.signal(number, stop)

    heed()
    session.heed_signals = heed
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
