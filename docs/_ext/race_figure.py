"""The race at rest: the figure and the tables for readers without JavaScript.

The figure is SVG with lengths in per cent and text in pixels, so it narrows without shrinking its
text. Its colours come from race.css, which follows the theme.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from blocks import table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from docutils import nodes
    from race_data import Kernel, Lane, Race

TIMES = "\N{MULTIPLICATION SIGN}"
LANE_PX, BAR_PX, HEAD_PX = 52, 20, 22


def size(n_bytes: float) -> str:
    """Print bytes in the largest decimal unit that leaves 1 or more, three digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            digits = 2 if n_bytes < 10 * scale else 1 if n_bytes < 100 * scale else 0
            return f"{n_bytes / scale:.{digits}f} {unit}"
    return f"{n_bytes} B"


def microseconds(time_s: float) -> str:
    """Print a time in microseconds, one decimal."""
    return f"{time_s * 1e6:.1f} µs"


def shape(race: Race) -> str:
    """Print a race's cell."""
    return f"{race.M} {TIMES} {race.N} in {race.dtype}"


def sentence(race: Race) -> str:
    """Say in one sentence what the figure of a race shows."""
    fused = race.lanes[-1]
    lanes = [
        f"{lane.label} moves {size(lane.n_bytes)} in {microseconds(lane.time_s)} with "
        f"{count(lane)}, taking {lane.time_s / fused.time_s:.2f} times as long as fused"
        for lane in race.lanes[:-1]
    ]
    lanes.append(
        f"fused moves {size(fused.n_bytes)} in {microseconds(fused.time_s)} with {count(fused)}"
    )
    return f"{race.pass_.capitalize()} of {shape(race)}: {'; '.join(lanes)}."


def count(lane: Lane) -> str:
    """Print how many kernels a lane launches."""
    n = len(lane.kernels)
    return f"{n} kernel{'s' * (n > 1)}"


def svg(race: Race) -> str:
    """Draw the lanes of a race on one time axis, each kernel split into its reads and writes."""
    end_s = max(lane.time_s for lane in race.lanes)
    height = len(race.lanes) * LANE_PX
    head = f'<svg class="race-figure" width="100%" height="{height}" role="img" '
    parts = [f'{head}aria-label="{escape(sentence(race))}" xmlns="http://www.w3.org/2000/svg">']
    for i, lane in enumerate(race.lanes):
        top = i * LANE_PX
        text = f"{size(lane.n_bytes)}, {microseconds(lane.time_s)}"
        parts.append(
            f'<text x="0" y="{top + 15}"><tspan font-weight="bold">{escape(lane.label)}</tspan> '
            f"{count(lane)}, {text}</text>"
        )
        left_s = 0.0
        for kernel, share in zip(lane.kernels, lane.shares, strict=True):
            width_s = share * lane.time_s
            parts += _bars(kernel, 100 * left_s / end_s, 100 * width_s / end_s, top + HEAD_PX)
            left_s += width_s
    return "".join([*parts, "</svg>"])


def _bars(kernel: Kernel, left: float, width: float, top: int) -> Iterable[str]:
    """Draw one kernel: above the bytes read, below the bytes written, heights by their share."""
    read = sum(n for _, n in kernel.reads) / kernel.n_bytes * BAR_PX
    title = f"<title>{escape(kernel.label)}, {size(kernel.n_bytes)}</title>"
    for kind, y, high in (("read", top, read), ("write", top + read, BAR_PX - read)):
        yield (
            f'<rect class="race-fill-{kind}" x="{left:.3f}%" y="{y:.1f}" width="{width:.3f}%" '
            f'height="{high:.1f}" stroke-width="1">{title}</rect>'
        )


def summary(race: Race) -> nodes.table:
    """Return a table of one pass: kernels, bytes, time, and the time over fused."""
    rows = [
        [
            lane.label,
            str(len(lane.kernels)),
            size(sum(n for kernel in lane.kernels for _, n in kernel.reads)),
            size(sum(n for kernel in lane.kernels for _, n in kernel.writes)),
            microseconds(lane.time_s),
            f"{lane.time_s / race.lanes[-1].time_s:.2f}",
        ]
        for lane in race.lanes
    ]
    heads = ["lane", "kernels", "read", "written", "time", "time / fused"]
    return table(f"{race.pass_.capitalize()} at {shape(race)}", heads, rows)


def steps(race: Race) -> nodes.table:
    """Return a table of one pass, kernel by kernel."""
    rows = [
        [
            lane.label,
            kernel.label,
            tensors(kernel.reads),
            tensors(kernel.writes),
            microseconds(lane.time_s * share),
        ]
        for lane in race.lanes
        for kernel, share in zip(lane.kernels, lane.shares, strict=True)
    ]
    heads = ["lane", "kernel", "reads", "writes", "time"]
    return table(f"{race.pass_.capitalize()} at {shape(race)}, kernel by kernel", heads, rows)


def tensors(moved: Iterable[tuple[str, int]]) -> str:
    """Print tensors and their bytes."""
    return ", ".join(f"{tensor} {size(n)}" for tensor, n in moved)
