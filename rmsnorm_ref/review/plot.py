"""The report's one plot: how far each result is from the truth, beside the reference and eager."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import Report

_WHO = {"candidate": 0, "reference": 1, "eager_fp32": 2, "eager": 3}
_ROW, _LEFT, _WIDTH, _TOP = 19, 118, 640, 26


def svg(report: Report) -> str:
    """Draw relative L2 errors on a log axis, one line per dtype and result; "" without numbers.

    Drawn by hand in SVG: it takes the page's colours, light or dark, and needs no library.
    """
    rows = [
        r for r in (report.told.get("accuracy") or {}).get("rows", []) if r["contender"] in _WHO
    ]
    sizes = [
        r["relative_l2"] for r in rows if math.isfinite(r["relative_l2"]) and r["relative_l2"] > 0
    ]
    if not sizes:
        return ""
    low, high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))
    high = max(high, low + 1)
    lines = sorted({(r["dtype"], ("y", "dx", "dw").index(r["result"])) for r in rows})
    span = _WIDTH - _LEFT - 20

    def at(size: float) -> float:
        return _LEFT + span * (math.log10(size) - low) / (high - low)

    height = _TOP + _ROW * len(lines) + 44
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{_alt(rows)}">'
    ]
    bottom = _TOP + _ROW * len(lines)
    for power in range(low, high + 1):
        x = at(10.0**power)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom}"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">1e{power}</text>')
    parts.append(
        f'<text x="{_LEFT + span / 2}" y="{bottom + 34}" text-anchor="middle">'
        "relative L2 error</text>"
    )
    for index, (dtype, result) in enumerate(lines):
        name = ("y", "dx", "dw")[result]
        y = _TOP + _ROW * index + _ROW / 2
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{name}, {dtype}</text>'
        )
        own = [row for row in rows if (row["dtype"], row["result"]) == (dtype, name)]
        parts += [_mark(row, y, at) for row in own]
    x = float(_LEFT)
    for who, number in _WHO.items():
        if any(row["contender"] == who for row in rows):
            parts.append(_symbol(number, x + 6, 10.0))
            parts.append(f'<text x="{x + 16}" y="14">{who}</text>')
            x += 30 + 7.2 * len(who)
    return "".join([*parts, "</svg>"])


def _mark(row: dict[str, Any], y: float, at: Any) -> str:
    size = row["relative_l2"]
    if not (math.isfinite(size) and size > 0):
        return ""
    who = row["contender"]
    return _symbol(_WHO[who], at(size), y, f"{who}: {size:.2e}")


def _symbol(number: int, x: float, y: float, title: str = "") -> str:
    tip = f"<title>{html.escape(title)}</title>" if title else ""
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5"',
        f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"',
        f'<path d="M{x:.1f} {y - 5.5:.1f} l5.5 10 h-11 z"',
        f'<path d="M{x:.1f} {y - 6:.1f} l6 6 l-6 6 l-6 -6 z"',
    )
    end = ("circle", "rect", "path", "path")[number]
    return f'{shapes[number]} class="who{number}">{tip}</{end}>'


def _alt(rows: list[dict[str, Any]]) -> str:
    said = [
        f"{r['result']} {r['dtype']} {r['relative_l2']:.1e}"
        for r in rows
        if r["contender"] == "candidate"
    ]
    return html.escape("Relative L2 errors of the candidate: " + ", ".join(said))
