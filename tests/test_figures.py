"""Figures drawn from made-up rows: what each must show, and that nothing overlaps or is cut off."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fabricated import SEED, fabricated, kernel_row, slowed

from rmsnorm_ref import tiling, traffic
from rmsnorm_ref.measure import choice, figures, style
from rmsnorm_ref.measure.recording import LIVE, Recording, from_json, select, to_json
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD

plt = pytest.importorskip("matplotlib.pyplot", reason="figures need matplotlib")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matplotlib.axes import Axes
    from matplotlib.text import Text

# Each figure, its arguments, and the axes that carry a value and so must start at zero.
FIGURES: dict[str, tuple[Callable[..., style.Drawing], dict[str, Any], str]] = {
    "bandwidth": (figures.bandwidth_by_cell, {}, "x"),
    "bandwidth, narrow": (
        figures.bandwidth_by_cell,
        {"pass_": BACKWARD, "section": "narrow"},
        "x",
    ),
    "time": (figures.time_by_cell, {}, "x"),
    "time, backward": (figures.time_by_cell, {"pass_": BACKWARD}, "x"),
    "prediction": (figures.prediction, {}, "xy"),
    "size": (figures.size_sweep, {}, "y"),
    "width": (figures.width_sweep, {"pass_": BACKWARD}, "y"),
    "config": (figures.config_cost, {}, "y"),
    "config, backward": (figures.config_cost, {"pass_": BACKWARD}, "y"),
    "ablation": (figures.ablation, {}, "y"),
    "error": (figures.error_by_cell, {"pass_": FORWARD}, "x"),
    "error, backward": (figures.error_by_cell, {}, "x"),
    "counters": (figures.counters, {}, "x"),
    "host": (figures.host_time, {}, "x"),
    "chain": (figures.eager_chain, {}, "x"),
    "chain, fp32": (
        figures.eager_chain,
        {"pass_": BACKWARD, "contender": "eager_fp32"},
        "x",
    ),
}
every_figure = pytest.mark.parametrize("name", FIGURES)


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Return rows for every figure, made up once."""
    return fabricated()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Let no figure outlive its test."""
    yield
    plt.close("all")


def draw(name: str, recording: Recording, **more: Any) -> style.Drawing:
    """Draw a figure by its name above."""
    function, arguments, _ = FIGURES[name]
    return function(recording, **arguments, **more)


def texts(drawing: style.Drawing) -> list[Text]:
    """Return every text that is seen; an axis also keeps labels of ticks beyond its limits."""
    drawing.figure.draw_without_rendering()
    axes = [axis for panel in drawing.figure.axes for axis in (panel.xaxis, panel.yaxis)]
    kept = {tick.label1 for axis in axes for tick in axis.get_major_ticks()}
    shown = {tick.label1 for axis in axes for tick in axis._update_ticks()}
    return [
        text
        for text in drawing.figure.findobj(match=plt.Text)
        if text.get_visible() and text.get_text().strip() and text not in kept - shown
    ]


def markers(panel: Axes, *, hollow: bool) -> int:
    """Count single markers on a panel, hollow ones or filled ones."""
    return sum(
        (line.get_markerfacecolor() == style.CARD) == hollow
        for line in panel.lines
        if len(line.get_xdata()) == 1 and line.get_marker() not in {"None", "|", ""}
    )


def test_made_up_rows_are_what_a_recording_may_hold(recording: Recording) -> None:
    """The rows that these tests draw pass the checks that real ones must pass."""
    assert from_json(to_json(recording), recording.id) == recording


@every_figure
def test_value_axes_start_at_zero(name: str, recording: Recording) -> None:
    """A length stands for a number only if its axis starts at zero."""
    for panel, letter in itertools.product(draw(name, recording).figure.axes, FIGURES[name][2]):
        low, high = getattr(panel, f"get_{letter}lim")()
        assert low == 0 < high


@every_figure
def test_values_lie_inside_their_axes(name: str, recording: Recording) -> None:
    """No marker and no bar leaves the panel along an axis that carries a value."""
    for panel, letter in itertools.product(draw(name, recording).figure.axes, FIGURES[name][2]):
        top = getattr(panel, f"get_{letter}lim")()[1]
        data = [getattr(line, f"get_{letter}data")() for line in panel.lines]
        ends = [points[0] for points in data if len(points) == 1]
        ends += [bar.get_x() + bar.get_width() for bar in panel.patches if letter == "x"]
        assert 0 < max(ends) <= top


@every_figure
def test_the_image_says_where_its_numbers_come_from(name: str, recording: Recording) -> None:
    """GPU, versions, date, commit, and recorded or measured now are printed inside the image."""
    now = dataclasses.replace(recording, id=LIVE)
    for shown, when in ((recording, "recorded"), (now, "measured now")):
        printed = " ".join(t.get_text() for t in texts(draw(name, shown)))
        wanted = "NVIDIA H200, torch 2.11.0, triton 3.6.0, 2026-11-29, commit abc1234, "
        assert wanted + when in printed.replace("\n", " ")


@every_figure
def test_alt_text_is_one_sentence_where_a_gallery_finds_it(name: str, recording: Recording) -> None:
    """The alt text is one sentence, and the suptitle, unseen, holds it for sphinx-gallery."""
    figure, alt = draw(name, recording)
    assert alt.endswith(".")
    assert not re.search(r"[.!?] [A-Z]", alt)
    assert figure.get_suptitle() == alt
    assert alt not in {text.get_text() for text in texts(style.Drawing(figure, alt))}


@every_figure
def test_no_text_is_cut_off_or_overlaps_another(name: str, recording: Recording) -> None:
    """With as many cells and contenders as there are, each text has its own place on the card."""
    drawing = draw(name, recording)
    width, height = drawing.figure.bbox.size
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(drawing)]
    for text, box in boxes:
        assert box.x0 >= 0 <= box.y0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
    for (first, a), (second, b) in itertools.combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, down) <= 1, f"{first!r} and {second!r}"  # a pixel of rounding


@every_figure
def test_text_is_readable_on_a_narrow_page(name: str, recording: Recording) -> None:
    """No text is smaller than a note, and a card is never wider than its 6 inches."""
    drawing = draw(name, recording)
    assert drawing.figure.get_figwidth() == style.WIDTH_IN
    assert min(text.get_fontsize() for text in texts(drawing)) >= style.NOTE_PT


@every_figure
def test_the_card_is_opaque_and_settings_are_left_alone(name: str, recording: Recording) -> None:
    """A dark page does not shine through, and a reader's own matplotlib settings survive."""
    with plt.rc_context({"font.size": 5.0, "figure.facecolor": "none"}):
        before = dict(plt.rcParams)
        drawing = draw(name, recording)
        assert dict(plt.rcParams) == before
    for patch in (drawing.figure.patch, *(panel.patch for panel in drawing.figure.axes)):
        assert patch.get_facecolor()[3] == 1


@every_figure
def test_missing_rows_are_named(name: str, recording: Recording) -> None:
    """Without rows a figure raises, and says which fields it looked for and how to record them."""
    empty = dataclasses.replace(recording, rows=())
    with pytest.raises(ValueError, match=r"'fabricated' has no rows with kind = .*bench --cells"):
        draw(name, empty)


def test_a_speed_up_needs_both_sides(recording: Recording) -> None:
    """Rows of eager alone give no speed-up, and the error says what is missing."""
    alone = dataclasses.replace(recording, rows=tuple(select(recording.rows, contender="eager")))
    with pytest.raises(ValueError, match="a speed-up needs both"):
        figures.prediction(alone)


def test_looks_are_all_different() -> None:
    """No two contenders, and no two other series, share a colour or a marker."""
    for looks in (list(style.LOOKS.values()), style.series(list("abcde"))):
        for field in ("label", "colour", "marker"):
            values = {getattr(look, field) for look in looks}
            assert len(values) == len(looks)
            assert style.CARD not in values


@pytest.mark.parametrize(
    ("draw_it", "section"),
    [(figures.bandwidth_by_cell, "seed"), (figures.size_sweep, "sizes")],
)
def test_flagged_rows_are_hollow(
    draw_it: Callable[..., style.Drawing], section: str, recording: Recording
) -> None:
    """As many markers are hollow as rows are flagged, and a legend entry says why."""
    rows = tuple(select(recording.rows, section=section, pass_=FORWARD))
    for n_flagged in (0, 3):
        flagged = [
            dataclasses.replace(row, flags=("above_ceiling",) if i < n_flagged else ())
            for i, row in enumerate(rows)
        ]
        drawing = draw_it(dataclasses.replace(recording, rows=tuple(flagged)))
        (panel,) = drawing.figure.axes
        assert markers(panel, hollow=True) == n_flagged
        assert markers(panel, hollow=False) == len(rows) - n_flagged
        printed = {text.get_text() for text in texts(drawing)}
        assert ("hollow: above ceiling" in printed) == bool(n_flagged)


def test_numbers_in_words_follow_the_rows(recording: Recording) -> None:
    """The share of the ceiling that title and alt text state is that of the rows."""
    row = kernel_row("seed", "ours", FORWARD, 4096, 8192)
    half = slowed(row, 2 * row.share_of_ceiling)
    drawing = figures.bandwidth_by_cell(dataclasses.replace(recording, rows=(half,)))
    assert half.share_of_ceiling == pytest.approx(0.5)
    assert "reaches 50 % of the ceiling" in drawing.alt


def test_predictions_are_those_of_the_model(recording: Recording) -> None:
    """Every point's abscissa is eager bytes over fused bytes, as traffic.py counts them."""
    (panel,) = figures.prediction(recording).figure.axes
    drawn = {line.get_xdata()[0] for line in panel.lines if len(line.get_xdata()) == 1}
    shapes = [(*cell, torch.bfloat16) for cell in SEED]
    chains = [
        (traffic.eager_forward, traffic.forward),
        (traffic.eager_backward, traffic.backward),
    ]
    counted = {
        traffic.predicted_speedup(eager(*shape, spelling=spelling), fused(*shape))
        for shape, (eager, fused), spelling in itertools.product(shapes, chains, ("seed", "fp32"))
    }
    assert drawn == counted


@pytest.mark.parametrize(
    ("pass_", "boundaries"),
    [
        (FORWARD, {tiling.ONE_TILE_MAX}),
        (BACKWARD, {tiling.ONE_TILE_MAX}),
    ],
)
def test_widths_where_kernels_change_are_marked(
    pass_: str, boundaries: set[int], recording: Recording
) -> None:
    """The width sweep draws a line at every width where another kernel takes over, no other."""
    (panel,) = figures.width_sweep(recording, pass_=pass_).figure.axes
    upright = [line.get_xdata() for line in panel.lines if len(set(line.get_ydata())) == 2]
    assert {x[0] for x in upright if len(x) == 2 and x[0] == x[1]} == boundaries


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    ("draw_it", "section"), [(figures.size_sweep, "sizes"), (figures.width_sweep, "widths")]
)
def test_the_name_of_a_boundary_covers_no_data(
    draw_it: Callable[..., style.Drawing], section: str, pass_: str
) -> None:
    """No line, no marker and no band of what is recorded runs through the name of a boundary."""
    shown = choice.picked(kind="kernel", section=section, pass_=pass_, dtype="bfloat16")[1]
    drawing = draw_it(shown, pass_=pass_)
    drawing.figure.draw_without_rendering()
    (panel,) = drawing.figure.axes
    names = [text.get_window_extent() for text in panel.texts]
    assert names
    drawn = [line.get_transform().transform_path(line.get_path()) for line in panel.lines]
    for band in panel.collections:
        drawn += [band.get_transform().transform_path(path) for path in band.get_paths()]
    for path in drawn:
        if len(path.vertices) == 1:  # a marker has a size
            path = path.circle(path.vertices[0], 3.5 * drawing.figure.dpi / 72)  # noqa: PLW2901
        assert not any(path.intersects_bbox(name, filled=True) for name in names)


SPREADS = ("bandwidth", "prediction", "size", "width", "ablation", "host")


@pytest.mark.parametrize("name", SPREADS)
def test_what_shows_the_spread_is_explained(name: str, recording: Recording) -> None:
    """Where lines or bands show how far samples lie apart, the legend and the alt text say so."""
    drawing = draw(name, recording)
    assert style.SPREAD in {text.get_text() for text in texts(drawing)}
    assert style.SPREAD in drawing.alt


def test_a_kernel_outside_the_model_is_named_as_such(recording: Recording) -> None:
    """A profiled kernel that the model does not have shows its own name and no bandwidth."""
    (row, *_) = select(recording.rows, kind="eager_kernel")
    lost = dict(row.detail or {}) | {"steps": (), "n_bytes": 0, "kernel": "fill"}
    rows = (dataclasses.replace(row, detail=lost),)
    printed = {
        t.get_text() for t in texts(figures.eager_chain(dataclasses.replace(recording, rows=rows)))
    }
    assert {"fill", "not in the model"} <= printed


def test_a_changed_or_unknown_commit_is_said(recording: Recording) -> None:
    """Numbers from files that no commit holds are printed as such."""

    def note(**changes: Any) -> str:
        facts = dataclasses.replace(recording.provenance, **changes)
        return style.note(dataclasses.replace(recording, provenance=facts))

    assert "commit abc1234 with local changes, recorded" in note(clean=False)
    assert "no commit, recorded" in note(commit=None)


def test_without_matplotlib_the_error_says_what_to_install(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without matplotlib learns from the error how to get it."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'rmsnorm_ref\[docs\]'"):
        figures.host_time(recording)


def test_importing_figures_imports_no_matplotlib() -> None:
    """Whoever only reads numbers needs neither matplotlib nor Triton."""
    code = "import sys, rmsnorm_ref.measure.figures\n"
    code += "print(*{'matplotlib', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
