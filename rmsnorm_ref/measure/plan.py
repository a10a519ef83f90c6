"""What a run was asked for: its options, its contenders, its steps in order."""

from __future__ import annotations

import datetime as dt
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import (
    alternatives,
    cells,
    chain,
    counters,
    extras,
    kernel_rows,
    knobs,
    peers,
    pinned,
    scaling,
)
from .cells import CELL_SECTIONS, Cell
from .recording import load, name_of
from .schema import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from .recording import Recording, Row
    from .schema import OnePass, Section
    from .session import Session


class Options(NamedTuple):
    """Hold the command line's words, as they were given."""

    cells: str = "seed"
    dtype: str | None = None
    passes: str = "forward,backward"
    peers: str = "all"
    out: str | None = None
    against: str | None = None

    def command(self) -> str:
        """Return the command that repeats the run, without where its result went."""
        words = ["python -m rmsnorm_ref bench --cells", self.cells, "--passes", self.passes]
        words += ["--peers", self.peers, *(["--dtype", self.dtype] if self.dtype else [])]
        return " ".join(words)


class Step(NamedTuple):
    """Hold one piece of a run; `weight` is how long it takes, roughly, in seconds on an H200."""

    label: str
    weight: int
    measure: Callable[[], list[Row]]


def parse_passes(words: str) -> tuple[OnePass, ...]:
    """Return the passes that a comma-separated list names, the forward first."""
    chosen = {word.strip() for word in words.split(",")}
    if not chosen <= {FORWARD, BACKWARD}:
        raise ValueError(f"--passes {words!r}: expected forward, backward or both, with a comma")
    return tuple(pass_ for pass_ in (FORWARD, BACKWARD) if pass_ in chosen)


def parse_peers(words: str) -> tuple[str, ...]:
    """Return the peers that "all", "none" or a comma-separated list names."""
    known = tuple(peers.contenders())
    if words in {"all", "none"}:
        return known if words == "all" else ()
    chosen = tuple(word.strip() for word in words.split(","))
    unknown = [word for word in chosen if word not in known]
    if unknown:
        raise ValueError(f"--peers {words!r}: expected all, none, or a list of {', '.join(known)}")
    return chosen


def earlier(words: str | None) -> Recording | None:
    """Return the recording that `--against` names; ValueError if there is none."""
    if words is None:
        return None
    try:
        return load(words)
    except (OSError, ValueError) as error:
        raise ValueError(f"--against {words!r}: {error}") from error


def choose_peers(session: Session, names: Sequence[str]) -> None:
    """Give the session the peers that can be built, and say which cannot and why."""
    for name, peer in peers.contenders().items():
        if name not in names:
            continue
        if peer.missing_reason is None:
            session.peers[name] = peer
        else:
            session.note(f"{name} is missing: {peer.missing_reason}")


def out_path(out: str | None, gpu: str) -> Path:
    """Return where the recording goes; ValueError if it cannot be written there."""
    if out is None:
        slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        now = dt.datetime.now(dt.UTC)
        out = f"rmsnorm_ref-{slug}-{now:%Y%m%dT%H%M%SZ}.json"
    path = Path(out)
    if path.suffix != ".json" or path.name != f"{name_of(path)}.json":
        raise ValueError(f"--out {out!r}: its name must end in .json, and hold that only once")
    if path.exists() or not path.parent.is_dir():
        state = "is there already" if path.exists() else "is in a folder that does not exist"
        raise ValueError(f"--out {out!r} {state}; a recording is always a new file")
    return path


def steps(
    session: Session, wanted: Sequence[Section], dtypes: tuple[torch.dtype, ...] | None
) -> Iterator[Step]:
    """Yield the pieces of a run in order."""
    for section in CELL_SECTIONS:
        for cell in cells.cells(section, dtypes) if section in wanted else ():
            weight = 2 if cell.contenders else 8
            measure = functools.partial(kernel_rows.measure, session, cell)
            yield Step(cell.label(), weight, measure)
    for dtype in dtypes or (cells.BF16,):
        yield from _knobs_and_host(session, wanted, dtype)
    for cell in cells.error_cells(dtypes) if "errors" in wanted else ():
        yield Step(cell.label(), 1, functools.partial(extras.errors, session, cell))
    for dtype in dtypes or (cells.BF16,):
        yield from _counted_and_profiled(session, wanted, dtype)


def _knobs_and_host(
    session: Session, wanted: Sequence[Section], dtype: torch.dtype
) -> Iterator[Step]:
    one, name = functools.partial, cells.dtype_name(dtype)
    if "cold" in wanted:
        yield Step(f"cold {name}", 3, one(extras.cold, session, dtype))
    for N in cells.CONFIG_N if "configs" in wanted else ():
        yield Step(f"configs {N} {name}", 9, one(knobs.configs, session, N, dtype))
    turned = "ablations" in wanted and BACKWARD in session.passes
    for M, N in cells.ABLATION_SHAPES if turned else ():
        cell = Cell("ablations", M, N, dtype)
        yield Step(cell.label(), 3, one(knobs.ablation, session, cell))
    if "ablations" in wanted and dtype == cells.BF16:
        yield from _choices(session)
    if "host" in wanted:
        yield Step(f"host {name}", 20, one(extras.host, session, dtype))


def _choices(session: Session) -> Iterator[Step]:
    for choice in pinned.CHOICES:
        for M, N in choice.shapes if set(choice.passes) & set(session.passes) else ():
            measure = functools.partial(alternatives.measure, session, choice, M, N)
            yield Step(f"ablations {choice.knob} {M} x {N} bfloat16", 2, measure)


def _counted_and_profiled(
    session: Session, wanted: Sequence[Section], dtype: torch.dtype
) -> Iterator[Step]:
    one = functools.partial
    if "counters" in wanted:
        count = one(counters.measure, dtype=dtype, passes=session.passes)
        yield Step("counters", 90, count)
    for M, N in chain.CELLS if "eager" in wanted else ():
        for spelling in chain.CONTENDERS:
            for pass_ in session.passes:
                profile = one(chain.eager_profile, M, N, dtype, spelling, pass_)
                yield Step(f"eager {M} x {N} {spelling} {pass_}", 3, profile)
    if "scaling" in wanted:
        yield Step(f"scaling {cells.dtype_name(dtype)}", 20, one(scaling.measure, session, dtype))
