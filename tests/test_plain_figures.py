"""Figures of results that no recording holds, and sweeps with a single point."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import pytest
from fabricated import fabricated, kernel_row
from test_figures import texts

from rmsnorm_ref.measure import figures, style
from rmsnorm_ref.measure.schema import FORWARD

plt = pytest.importorskip("matplotlib.pyplot", reason="figures need matplotlib")

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = figures.Words("at most 3 bounds off", "Error by case", "error / bound", "case")
SERIES = {"as it came": [0.5, 3.0, 2.0], "mended": [0.5, 0.9, math.nan]}


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Let no figure outlive its test."""
    yield
    plt.close("all")


def drawings() -> list[style.Drawing]:
    """Draw each figure, with linear and with logarithmic values."""
    found = []
    for log in (False, True):
        whole = {"as it came": SERIES["as it came"]}
        line = ("the bound", [1.0, 1.0, 1.0])
        found.append(figures.curves([64, 512, 4096], whole, WORDS, "made up", log_y=log, line=line))
        found.append(
            figures.dots(["one", "two\nlines", "three"], SERIES, WORDS, "made up", log=log)
        )
    return found


def test_title_source_and_alt_are_what_was_said() -> None:
    """Title and source are printed, and the alt text is one sentence where a gallery finds it."""
    for figure, alt in drawings():
        printed = {text.get_text() for text in texts(style.Drawing(figure, alt))}
        assert {"at most 3 bounds off", "made up"} <= printed
        assert alt == figure.get_suptitle() == "Error by case: at most 3 bounds off."


def test_values_are_drawn_and_linear_axes_start_at_zero() -> None:
    """Each value has its marker, NaN has none, and a length means a number."""
    curve, dots, log_curve, log_dots = (drawing.figure.axes[0] for drawing in drawings())
    assert curve.get_ylim()[0] == dots.get_xlim()[0] == 0
    assert log_curve.get_yscale() == log_dots.get_xscale() == "log"
    assert list(curve.lines[0].get_ydata()) == SERIES["as it came"]
    drawn = [line.get_xdata()[0] for line in dots.lines if len(line.get_xdata()) == 1]
    values = [value for found in SERIES.values() for value in found if not math.isnan(value)]
    assert sorted(drawn) == sorted(values)


def test_no_text_is_cut_off_or_overlaps_another() -> None:
    """Each text has its own place on the card."""
    for drawing in drawings():
        boxes = [(t.get_text(), t.get_window_extent()) for t in texts(drawing)]
        width, height = drawing.figure.bbox.size
        for text, box in boxes:
            assert min(box.x0, box.y0) >= 0, text
            assert box.x1 <= width, text
            assert box.y1 <= height, text
        for (first, a), (second, b) in itertools.combinations(boxes, 2):
            across = min(a.x1, b.x1) - max(a.x0, b.x0)
            down = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert min(across, down) <= 1, f"{first!r} and {second!r}"


@pytest.mark.parametrize(
    ("draw", "section", "N", "said"),
    [
        (figures.width_sweep, "widths", 4095, "at N = 4095"),
        (figures.width_sweep, "widths", 4096, "at N = 4096"),
        (figures.size_sweep, "sizes", 4096, "at 4 MiB"),
    ],
)
def test_a_sweep_of_one_cell_is_drawn(draw: object, section: str, N: int, said: str) -> None:
    """One recorded cell is a point beside its ceiling, even at a width that is no power of two."""
    assert callable(draw)
    row = kernel_row(section, "ours", FORWARD, 256, N)
    figure, alt = draw(dataclasses.replace(fabricated(), rows=(row,)))
    assert said in alt
    (panel,) = figure.axes
    ceilings = [line for line in panel.lines if line.get_marker() == "_"]
    assert len(ceilings) == 1
    assert len(ceilings[0].get_xdata()) == 1
