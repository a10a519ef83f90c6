"""A run's rows as text: one line per cell and pass, ours beside the ceiling and the best peer."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .recording import select

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .recording import Row

TITLES = (
    "cell",
    "dtype",
    "pass",
    "us",
    "p20 - p80",
    "TB/s",
    "of ceiling",
    "best peer",
    "us",
    "peer / ours",
    "noise",
    "flags",
)
LEGEND = (
    "TB/s: 2*M*N*e bytes forward, 3*M*N*e backward, over the median. of ceiling: the time of the\n"
    "fastest kernel that only moves these bytes, over ours. noise: how far a second, interleaved\n"
    "timing lay from the first. flags: a, above the ceiling; l, all inputs that take turns fit in\n"
    "L2; d, the peer's backward is forward and backward less forward."
)
_LETTERS = {"above_ceiling": "a", "fits_in_l2": "l", "by_difference": "d"}


def table(rows: Sequence[Row]) -> str:
    """Return the lines of every timed cell, then the host's times, then a count of the rest."""
    lines: list[tuple[str, ...]] = [TITLES]
    cells: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in select(rows, kind={"kernel", "resident", "cold"}):
        cells[row.kind, row.section, row.M, row.N, row.dtype, row.pass_].append(row)
    for found in cells.values():
        line = _line(found)
        if line:
            lines.append(line)
    parts = [_aligned(lines), LEGEND] if len(lines) > 1 else []
    hosts = select(rows, kind="host")
    if hosts:
        titles = ("host, us per call", "M x N", "gradients", "pass")
        parts.append(_aligned([titles, *_hosts(hosts)]))
    scaled = select(rows, kind="scaling")
    if scaled:
        titles = ("GPUs at once", "M x N on each", "us per call, both passes", "of one alone")
        parts.append(_aligned([titles, *_scaled(scaled)]))
    shown = {"kernel", "resident", "cold", "host", "scaling"}
    others = [row.kind for row in rows if row.kind not in shown]
    counted = [f"{others.count(kind)} {kind}" for kind in dict.fromkeys(others)]
    if counted:
        parts.append(f"also recorded, rows: {', '.join(counted)}")
    return "\n\n".join(parts)


def _line(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the line of one cell and pass; nothing where ours is missing."""
    ours = next(iter(select(rows, contender="ours")), None)
    if ours is None or ours.time_s is None:
        return ()
    peers = [row for row in rows if row.contender not in {"ours", "torch.neg", "torch.add"}]
    best = min(peers, key=_p50, default=None)
    best_flags = best.flags if best else ()
    name = {"kernel": ours.section, "resident": f"{ours.section}, one input"}.get(ours.kind, "cold")
    return (
        f"{name} {ours.M} x {ours.N}",
        ours.dtype,
        ours.pass_,
        _us(ours.time_s.p50),
        f"{_us(ours.time_s.p20)} - {_us(ours.time_s.p80)}",
        f"{ours.bandwidth_bytes_per_s / 1e12:.2f}",
        f"{ours.share_of_ceiling:.3f}" if ours.ceiling else "",
        best.contender if best else "",
        _us(_p50(best)) if best else "",
        f"{_p50(best) / ours.time_s.p50:.2f}" if best else "",
        f"{ours.noise:.1%}" if ours.repeat_time_s else "",
        "".join(_LETTERS[flag] for flag in _LETTERS if flag in {*ours.flags, *best_flags}),
    )


def _hosts(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    return [
        (
            f"{row.contender}: {_us(_p50(row))}",
            f"{row.M} x {row.N}",
            "yes" if row.detail and row.detail["requires_grad"] else "no",
            row.pass_,
        )
        for row in rows
    ]


def _scaled(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [
        (
            str(row.detail["n_gpus"] if row.detail else ""),
            f"{row.M} x {row.N}",
            _us(_p50(row)),
            f"{_p50(row) / _p50(rows[0]):.3f}",
        )
        for row in rows
    ]


def _p50(row: Row) -> float:
    assert row.time_s is not None  # only timed rows come here
    return row.time_s.p50


def _us(time_s: float) -> str:
    return f"{time_s * 1e6:.2f}"


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = ([word.ljust(widths[i]) for i, word in enumerate(line)] for line in lines)
    return "\n".join("  ".join(words).rstrip() for words in padded)
