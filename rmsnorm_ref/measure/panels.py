"""From rows of a recording to places on a panel: what several figures share.

A figure of many cells has one line per cell, because a page scrolls downwards and not sideways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import recording as recordings
from . import style

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from matplotlib.axes import Axes

    from .recording import Quantiles, Recording, Row

Cell = tuple[int, int]  # (M, N)
TERA, MICRO, PERCENT, MEBI = 1e12, 1e6, 100, 2**20
TIMES = "\N{MULTIPLICATION SIGN}"
AXIS_IN = 0.6  # what ticks and a label take of a panel's height
# The section of a run that makes the rows of a kind, where the kind is not in every section.
SECTIONS = {
    "error": "errors",
    "counter": "counters",
    "config": "configs",
    "ablation": "ablations",
    "eager_kernel": "eager",
    "host": "host",
}
GROUP_GAP_IN = 0.14  # between two widths
ROW_SHARE = 0.06  # of a panel's height, for a boundary's name
ROOM_FOR_A_NAME = 0.4  # of a panel's width
CLEARANCE = 1.03  # between the highest marker and the lowest name


def picked(recording: Recording, **equal: Any) -> list[Row]:
    """Return the rows whose fields equal these.

    Raises:
        ValueError: there are none; the message names the recording, the fields, and the way out.
    """
    rows = list(recordings.select(recording.rows, **equal))
    if not rows:
        wanted = ", ".join(f"{field.rstrip('_')} = {value!r}" for field, value in equal.items())
        section = equal.get("section", SECTIONS.get(equal["kind"], "all"))
        raise ValueError(
            f"recording {recording.id!r} has no rows with {wanted}: choose others, or record them "
            f"with python -m rmsnorm_ref bench --cells {section}"
        )
    return rows


def times(row: Row) -> Quantiles:
    """Return the row's times; ValueError where it was not timed."""
    if row.time_s is None:
        raise ValueError(f"a row of kind {row.kind!r} was not timed")
    return row.time_s


def bandwidth(row: Row) -> tuple[float, float, float]:
    """Return the effective bandwidth at the 20 %, 50 % and 80 % quantile, TB/s, lowest first."""
    middle, time_s = row.bandwidth_bytes_per_s / TERA, times(row)
    return middle * time_s.p50 / time_s.p80, middle, middle * time_s.p50 / time_s.p20


def ceiling_bandwidth(row: Row) -> float:
    """Return the bandwidth of the best kernel that only moves these bytes, TB/s."""
    return row.bandwidth_bytes_per_s / TERA / row.share_of_ceiling


def detail(row: Row, key: str) -> Any:
    """Return what rows of this kind hold besides the fields of all rows."""
    return (row.detail or {})[key]


def cell(row: Row) -> Cell:
    """Return the row's (M, N)."""
    return row.M, row.N


def shape(M: int, N: int) -> str:
    """Return "M x N", as it is printed."""
    return f"{M} {TIMES} {N}"


def contenders(rows: Iterable[Row]) -> list[str]:
    """Return who is in rows, in the one order that every figure uses."""
    present = {row.contender for row in rows}
    return [name for name in style.LOOKS if name in present]


class Lines(NamedTuple):
    """Where each cell's line lies, top to bottom, and how high a panel of them is."""

    y: dict[Cell, float]
    height_in: float


def lines(rows: Iterable[Row], line_in: float) -> Lines:
    """Place one line per cell, `line_in` inches high, by N and then by M."""
    y: dict[Cell, float] = {}
    place, last_N = -1.0, None
    for M, N in sorted({cell(row) for row in rows}, key=lambda found: (found[1], found[0])):
        place += 1 + GROUP_GAP_IN / line_in * (last_N not in {None, N})
        y[M, N], last_N = place, N
    return Lines(y, (place + 1) * line_in + AXIS_IN)


def label_lines(panel: Axes, places: Lines) -> None:
    """Write M x N beside each line, the first cell on top."""
    panel.set_yticks(list(places.y.values()), [shape(*at) for at in places.y])
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(max(places.y.values()) + 0.55, -0.55)


def lanes(names: Sequence[str], spread: float = 0.66) -> dict[str, float]:
    """Return each series' offset from the middle of its line, so that equal values are all seen."""
    step = spread / max(1, len(names) - 1)
    return {name: i * step - spread / 2 * (len(names) > 1) for i, name in enumerate(names)}


def bar(
    panel: Axes,
    y: float,
    length: float,
    colour: str,
    height: float,
    *,
    left: float = 0,
    alpha: float = 1,
) -> None:
    """Draw one bar of a line."""
    outline: dict[str, Any] = {"edgecolor": style.INK, "linewidth": 0.5}
    panel.barh(y, length, height, left, color=colour, alpha=alpha, **outline)


def behind(panel: Axes, x: float, y: float, text: str, *, before: bool = False) -> None:
    """Write small text behind the end of a bar, or before its start."""
    panel.annotate(
        text,
        (x, y),
        xytext=(-4 if before else 4, 0),
        textcoords="offset points",
        ha="right" if before else "left",
        va="center",
        fontsize=style.NOTE_PT,
    )


def beside(panel: Axes, y: float, text: str) -> None:
    """Write to the right of a line, outside the panel."""
    panel.annotate(
        text,
        (1, y),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=style.TEXT_PT,
    )


def marks(panel: Axes, names: Mapping[float, str], most: float) -> float:
    """Draw boundaries across the panel, their names in rows above all data; return where it ends.

    A line stops at its name. Names stand on one side of their lines, the furthest on that side
    lowest, so that no line crosses a name.

    Args:
        panel: with its data drawn, so that its horizontal axis is known.
        names: what stands at each x.
        most: the highest value that is drawn.
    """
    panel.set_xlim(panel.get_xlim())
    to_share = panel.transData + panel.transAxes.inverted()
    before = all(to_share.transform((x, 0))[0] > ROOM_FOR_A_NAME for x in names)
    for row, x in enumerate(sorted(names, reverse=before)):
        top = 1 - row * ROW_SHARE
        panel.axvline(x, ymax=top, color=style.FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        panel.annotate(
            names[x],
            (x, top),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if before else 4, 0),
            textcoords="offset points",
            ha="right" if before else "left",
            va="top",
            color=style.FAINT,
            fontsize=style.NOTE_PT,
        )
    return CLEARANCE * most / (1 - len(names) * ROW_SHARE)


def span(values: Iterable[float], form: str = "{:.0f}") -> str:
    """Return "low to high", or one number where both read the same."""
    found = list(values)
    low, high = form.format(min(found)), form.format(max(found))
    return low if low == high else f"{low} to {high}"


def from_to(values: Sequence[float], several: str = "", single: str = "at") -> str:
    """Say from where to where sorted numbers go, or, where there is only one, at which they are."""
    low, high = (f"{value:.0f}" for value in (values[0], values[-1]))
    return f"{single} {low}" if low == high else f"{several} from {low} to {high}".strip()


def some(things: Collection[Any], noun: str) -> str:
    """Count things in words: "1 shape", "12 shapes"."""
    return f"{len(things)} {noun}{'s' * (len(things) != 1)}"


def percent(share: float, form: str = "{:.0f}") -> str:
    """Return a share in per cent, with the space that SI asks for."""
    return f"{form.format(PERCENT * share)} %"


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that a row names."""
    found: torch.dtype = getattr(torch, name)
    return found
