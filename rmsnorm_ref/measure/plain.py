"""Two plain figures for results that no recording holds: curves over a number, dots beside names.

A script that computes something on the spot draws it with one call, in the style of all figures.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from . import style

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Words(NamedTuple):
    """Hold what a figure says: its finding, what it shows for alt text, and its axes' labels."""

    title: str
    shows: str  # "Worst error of y over its bound"; the title follows it in the alt text
    value: str  # label of the axis that carries the values
    place: str = ""  # label of the other axis

    @property
    def alt(self) -> str:
        """Return the alt text: one sentence."""
        return f"{self.shows}: {self.title}."


@style.styled
def curves(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    words: Words,
    source: str,
    *,
    log_x: int | None = 4,
    log_y: bool = False,
    line: tuple[str, Sequence[float]] | None = None,
) -> style.Drawing:
    """Draw up to five series over the same numbers.

    Args:
        x: what varies.
        series: values at each x, by label.
        words: what is written.
        source: where the values come from, say `live.here()`.
        log_x: base of a logarithmic x axis; None: linear.
        log_y: whether values are shown by their logarithm; otherwise their axis starts at zero.
        line: a label and values at each x, drawn in black: a bound, a prediction.
    """
    looks = style.series(list(series))
    figure, (panel,) = style.card(3.2)
    for look, values in zip(looks, series.values(), strict=True):
        panel.plot(x, values, look.marker, linestyle="-", color=look.colour, markersize=6)
    if line:
        panel.plot(x, line[1], color=style.INK, linewidth=1.6)
    if log_x:
        panel.set_xscale("log", base=log_x, subs=[])
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlabel(words.place)
    drawn = [value for values in series.values() for value in values]
    _value_axis(panel.yaxis, words.value, [*drawn, *(line[1] if line else ())], log=log_y)
    entries = style.key(panel, looks)
    if line:
        entries += panel.plot([], [], color=style.INK, linewidth=1.6, label=line[0])
    return style.finish(figure, words.title, words.alt, source, entries)


@style.styled
def dots(
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    words: Words,
    source: str,
    *,
    limit: tuple[str, float] = ("the bound", 1.0),
    log: bool = False,
) -> style.Drawing:
    """Draw one line per name, with a marker for each series on it.

    Args:
        names: one per line, the first on top; a name may have two lines.
        series: values by label, one per name; NaN: none.
        words: what is written; `place` is not used.
        source: where the values come from, say `live.here()`.
        limit: a label and a value, drawn as a black line across.
        log: whether values are shown by their logarithm; otherwise their axis starts at zero.
    """
    looks = style.series(list(series))
    line_in = 0.18 + 0.16 * max(len(looks), 1 + max(name.count("\n") for name in names))
    figure, (panel,) = style.card(line_in * len(names) + 0.6)
    panel.axvline(limit[1], color=style.INK, linewidth=1.6, zorder=1)
    for i, (look, values) in enumerate(zip(looks, series.values(), strict=True)):
        offset = (i - (len(looks) - 1) / 2) * 0.5 / max(1, len(looks) - 1)
        for y, value in enumerate(values):
            if not math.isnan(value):
                style.point(panel, value, y + offset, look)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    drawn = [value for values in series.values() for value in values if not math.isnan(value)]
    _value_axis(panel.xaxis, words.value, [*drawn, limit[1]], log=log)
    entries = style.key(panel, looks)
    entries += panel.plot([], [], color=style.INK, linewidth=1.6, label=limit[0])
    return style.finish(figure, words.title, words.alt, source, entries)


def _value_axis(axis: Any, label: str, values: Sequence[float], *, log: bool) -> None:
    """Give an axis its unit and its grid; it starts at zero, or spans whole decades."""
    style.value_axis(axis, label, 1.1 * max(values))
    if log:
        ticker = import_module("matplotlib.ticker")
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.axes.set(**{f"{axis.axis_name}lim": (10.0**low, 10.0**high)})
        axis.set_minor_locator(ticker.NullLocator())  # within a decade it would write labels
