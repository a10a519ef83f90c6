"""What a gallery script draws: rows measured now where there is a GPU, else rows of a recording.

    shown = live.evidence("seed", [(4096, 4096), (4096, 8192)])
    figures.bandwidth_by_cell(shown)

A live set is small, so that a page takes seconds; it is measured as `bench` measures, by the same
functions. Without a GPU the shipped recording that `choice.py` picks for the section takes its
place: a fuller or a newer one is drawn as soon as it ships.
"""

from __future__ import annotations

import datetime as dt
from importlib import import_module
from typing import TYPE_CHECKING, get_args

import torch

from rmsnorm_ref import interpreter

from . import chain, choice, kernel_rows, knobs, peers, provenance, timing
from .cells import BF16, Cell
from .recording import LIVE, Recording, stale
from .schema import CellSection, Provenance
from .session import Session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .schema import Row, Section

CONTENDERS = ("ours", "eager", "F.rms_norm")  # of a live set: they need nothing but torch
Shape = tuple[int, int]  # (M, N)


def evidence(section: Section, shapes: Sequence[Shape], dtype: torch.dtype = BF16) -> Recording:
    """Measure a few shapes of a section where there is a GPU; elsewhere return what was recorded.

    Args:
        section: "seed", "narrow", "wide", "few", "sizes", "widths", "configs", "ablations" or
            "eager".
        shapes: (M, N) of a live set; "configs" takes its rows from N alone.
        dtype: of a live set.

    Raises:
        LookupError: no shipped recording has the section.
    """
    try:
        device = timing.require_gpu()
    except timing.NoGpuError:
        return recorded(section)
    properties = torch.cuda.get_device_properties(device)
    session = Session(device, properties.L2_cache_size, peers=_peers())
    started = dt.datetime.now(dt.UTC)
    rows = measure(session, section, shapes, dtype)
    facts = Provenance(
        **provenance.describe(device),
        peers={name: peer.version for name, peer in session.peers.items()},
        clocks=None,
        date=started.isoformat(timespec="seconds"),
        command=f"rmsnorm_ref.measure.live.evidence({section!r}, {list(shapes)!r})",
        duration_s=round((dt.datetime.now(dt.UTC) - started).total_seconds(), 1),
        interrupted=False,
        notes=tuple(session.notes),
    )
    return Recording(LIVE, facts, tuple(rows))


def measure(
    session: Session, section: Section, shapes: Sequence[Shape], dtype: torch.dtype = BF16
) -> list[Row]:
    """Return the rows of a section for these shapes, measured as `bench` measures them.

    Raises:
        ValueError: the section has no live set: it needs more than a GPU, or more than seconds.
    """
    rows: list[Row] = []
    for M, N in shapes:
        cell = Cell(section, M, N, dtype, CONTENDERS)
        if section in get_args(CellSection):
            rows += kernel_rows.measure(session, cell)
        elif section == "configs":
            rows += knobs.configs(session, N, dtype)
        elif section == "ablations":
            rows += knobs.ablation(session, cell)
        elif section == "eager":
            for pass_ in session.passes:
                rows += chain.eager_profile(M, N, dtype, "seed", pass_)
            rows += kernel_rows.measure(session, cell._replace(section="seed"))
        else:
            raise ValueError(f"section {section!r} has no live set: draw `recorded({section!r})`")
    return rows


def recorded(section: Section) -> Recording:
    """Return the shipped recording that speaks for a section, by the rule of `choice.py`.

    Raises:
        LookupError: none has any.

    Example:
        >>> {row.section for row in recorded("seed").rows} >= {"seed"}
        True
    """
    return choice.picked(section=section)[1]


def source(shown: Recording, what: str = "times") -> str:
    """Say in one line what a page shows: which recording, or which GPU just now.

    Args:
        shown: what is drawn.
        what: was measured, "times" or "bytes".

    Example:
        >>> source(recorded("seed")).startswith("times: recording ")
        True
    """
    facts = shown.provenance
    commit = (facts.commit or "unknown")[:7]
    where = shown.id if shown.live else f"recording {shown.id}"
    earlier = ", earlier kernels" if stale(shown) else ""
    return f"{what}: {where}, {facts.gpu}, {facts.date[:10]}, commit {commit}{earlier}"


def here() -> str:
    """Say where kernels of this process run, and on what: the source note of their results.

    Call it after the first kernel has run; Triton reads its switch when it is first imported.
    """
    where = "CPU, interpreted" if interpreter.interprets() else torch.cuda.get_device_name()
    commit, clean, _ = provenance.commit()
    named = f"commit {commit[:7]}" if commit else "no commit"
    changed = "" if clean or not commit else " with local changes"
    versions = f"torch {torch.__version__.partition('+')[0]}"
    versions += f", triton {import_module('triton').__version__}"
    now = f"{dt.datetime.now(dt.UTC):%Y-%m-%d}"
    return f"{where}, {versions}, {now}, {named}{changed}, measured now"


def _peers() -> dict[str, peers.Peer]:
    known = peers.contenders()
    return {name: known[name] for name in CONTENDERS if name in known}
