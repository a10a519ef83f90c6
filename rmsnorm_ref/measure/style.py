"""The one plot style: a card, the contenders' looks, and what every figure carries.

A card is opaque and light, so one image serves a light page and a dark one. It is 6 inches wide and
grows downwards: fewer columns and larger text keep it readable on a page of 400 pixels. Colours are
those of Okabe and Ito, which readers with a colour vision deficiency tell apart, and every series
has a marker of its own besides. Value axes start at zero. Where the numbers come from is printed
inside the image, because images travel without their captions.

matplotlib comes with the extra `docs` and is imported when a figure is drawn, not before.
"""

from __future__ import annotations

import functools
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from .recording import stale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.text import Text

    from .recording import Recording, Row

CARD, INK, FAINT, ROOM = "#fbfaf7", "#222222", "#6a6a6a", "#e6e3da"
EDGE = "#c9c5ba"  # of a card: seen on a white page, where the card would have no end
WIDTH_IN = 6.0
TEXT_PT, TITLE_PT, NOTE_PT = 11, 13, 9  # 9 points are 11 pixels where a page is narrowest
SHADE = 0.25  # opacity of a band between two quantiles
FOOT = "foot"  # the gid of the words at a figure's foot, which say where it comes from
MARGIN_IN = 0.12

RC = {
    "figure.facecolor": CARD,
    "figure.edgecolor": EDGE,
    "axes.facecolor": CARD,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.labelsize": TEXT_PT,
    "axes.titlesize": TEXT_PT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "font.size": TEXT_PT,
    "hatch.linewidth": 0.8,
    "legend.fontsize": TEXT_PT,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4,
    "text.color": INK,
}


class Drawing(NamedTuple):
    """A figure and the sentence that says, to those who cannot see it, what it shows."""

    figure: Figure
    alt: str


class Look(NamedTuple):
    """How one series is told apart: by name, by colour and by marker."""

    label: str
    colour: str
    marker: str


LOOKS = {
    "ours": Look("rmsnorm_ref", "#0072B2", "o"),
    "eager": Look("eager", "#D55E00", "s"),
    "eager_fp32": Look("eager (fp32 inside)", "#E69F00", "D"),
    "F.rms_norm": Look("F.rms_norm", "#009E73", "^"),
    "torch.compile": Look("torch.compile", "#CC79A7", "v"),
    "liger": Look("Liger", "#56B4E9", "P"),
    "fla": Look("FLA", "#000000", "X"),
    "flash_attn": Look("flash-attention", "#F0E442", "<"),
    "quack": Look("QuACK", "#808080", ">"),
}
# For series that are no contenders: widths, tensors, passes.
SERIES = tuple(
    zip(("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"), "o^sDv", strict=True),
)
# What a file with few colours must keep as it is.
COLOURS = frozenset(
    {CARD, INK, FAINT, ROOM, EDGE}
    | {look.colour for look in LOOKS.values()}
    | {colour for colour, _ in SERIES},
)


def series(labels: Sequence[str]) -> list[Look]:
    """Give each label a look; there are five, and a figure with more series would be unreadable."""
    return [Look(label, *look) for label, look in zip(labels, SERIES, strict=False)]


P = ParamSpec("P")


def styled(draw: Callable[P, Drawing]) -> Callable[P, Drawing]:
    """Wrap a function that draws: it sees the style, and nobody's settings are changed for good."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Drawing:
        with pyplot().rc_context(RC):
            return draw(*args, **kwargs)

    return wrapper


def pyplot() -> Any:
    """Return matplotlib.pyplot, which also lists the figure for a notebook or a gallery.

    Raises:
        ImportError: matplotlib is not installed; the message says how to get it.
    """
    try:
        import matplotlib.pyplot as plt  # noqa: PLC0415  # numbers must work without matplotlib
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib, which is not installed: pip install 'rmsnorm_ref[docs]'"
        ) from error
    return plt


def card(height_in: float, n_panels: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Open a card whose panels, side by side, are `height_in` high; `finish` adds the rest."""
    figure, panels = pyplot().subplots(
        1, n_panels, figsize=(WIDTH_IN, height_in), layout="constrained", squeeze=False, **options
    )
    figure.patch.set_linewidth(1)
    for panel in panels[0]:
        panel.tick_params(labelsize=TEXT_PT, color=FAINT, labelcolor=INK)
        panel.minorticks_off()
    return figure, list(panels[0])


def value_axis(axis: Any, label: str, top: float) -> None:
    """Make an axis start at zero, end at `top`, carry its unit, and draw its grid."""
    axis.axes.set(**{f"{axis.axis_name}lim": (0, top)})
    axis.set_label_text(label)
    axis.axes.grid(axis=axis.axis_name, color=ROOM, linewidth=0.8)


def point(
    panel: Axes,
    x: float,
    y: float,
    look: Look,
    *,
    x_band: tuple[float, float] | None = None,
    y_band: tuple[float, float] | None = None,
    hollow: bool = False,
    size: float = 7,
) -> None:
    """Draw one marker; a band is what lies between two quantiles; hollow means it is flagged."""
    for band, line in ((x_band, panel.hlines), (y_band, panel.vlines)):
        if band:
            line(y if line == panel.hlines else x, *band, color=look.colour, linewidth=2, zorder=2)
    panel.plot(
        [x],
        [y],
        look.marker,
        markersize=size,
        markerfacecolor=CARD if hollow else look.colour,
        markeredgecolor=look.colour if hollow else INK,
        markeredgewidth=1.6 if hollow else 0.5,
        zorder=3,
        clip_on=False,
    )


FLAGS = {
    "above_ceiling": "above ceiling",
    "fits_in_l2": "in L2",
    "by_difference": "by difference",
}


def key(panel: Axes, looks: Sequence[Look], rows: Iterable[Row] = ()) -> list[Artist]:
    """Return legend entries for markers, and one for hollow markers if rows are flagged."""
    entries: list[Artist] = []
    flags = {flag for row in rows for flag in row.flags}
    reasons = " or ".join(text for flag, text in FLAGS.items() if flag in flags)
    hollow = [Look(f"hollow: {reasons}", INK, "o")] if reasons else []
    for look in [*looks, *hollow]:
        face = CARD if look in hollow else look.colour
        style: dict[str, Any] = {
            "markerfacecolor": face,
            "markeredgecolor": INK,
            "markeredgewidth": 0.5,
        }
        style |= {"markersize": 7, "linestyle": "none"}
        entries += panel.plot([], [], marker=look.marker, label=look.label, **style)
    return entries


def patches(panel: Axes, looks: Sequence[Look], alpha: float = 1) -> list[Artist]:
    """Return legend entries for bars."""
    bars: list[Any] = [
        panel.bar(0, 0, color=look.colour, label=look.label, alpha=alpha) for look in looks
    ]
    return bars


SPREAD = "p20 to p80 of the samples"


def spread(panel: Axes, colour: str = FAINT, *, shaded: bool = False) -> list[Artist]:
    """Return the legend entry of what shows how far samples lie apart: lines, or shaded bands."""
    if shaded:
        return [panel.fill_between([], [], color=colour, alpha=SHADE, linewidth=0, label=SPREAD)]
    return [*panel.plot([], [], color=colour, linewidth=2, label=SPREAD)]


def note(recording: Recording) -> str:
    """Say in one line where numbers come from: GPU, versions, date, commit, recorded or not."""
    provenance = recording.provenance
    commit = f"commit {provenance.commit[:7]}" if provenance.commit else "no commit"
    changed = "" if provenance.clean else " with local changes"
    versions = f"torch {provenance.torch.partition('+')[0]}, triton {provenance.triton}"
    how = recording.id if recording.live else "recorded" + ", earlier kernels" * stale(recording)
    when = f"{provenance.date[:10]}, {commit}{changed}, {how}"
    return f"{provenance.gpu}, {versions}, {when}"


def finish(
    figure: Figure,
    title: str,
    alt: str,
    source: Recording | str,
    entries: Sequence[Artist] = (),
) -> Drawing:
    """Put title and legend above the panels, the provenance below; size the card to fit.

    Args:
        figure: from `card`.
        title: the finding, in a few words; long ones are wrapped.
        alt: one sentence for those who cannot see the figure.
        source: the recording that is drawn, or `live.here()` for what none holds.
        entries: legend entries, from `key`, `patches`, or artists with a label.
    """
    panels_in = figure.get_figheight()
    heading = _fitted(figure, title, fontsize=TITLE_PT, fontweight="bold", va="top")
    said = source if isinstance(source, str) else note(source)
    footing = _fitted(figure, said, fontsize=NOTE_PT, color=FAINT, va="bottom", gid=FOOT)
    legend = _legend(figure, list(entries))
    legend_in = _size_in(figure, legend)[1] if legend else 0.0
    title_in = _size_in(figure, heading)[1] + 2 * MARGIN_IN
    note_in = _size_in(figure, footing)[1] + 1.5 * MARGIN_IN
    height_in = panels_in + title_in + legend_in + note_in
    figure.set_size_inches(WIDTH_IN, height_in)
    heading.set_y(1 - MARGIN_IN / height_in)
    footing.set_y(0.75 * MARGIN_IN / height_in)
    if legend:
        legend.set_loc("upper left")
        legend.set_bbox_to_anchor((0, 1 - (title_in - MARGIN_IN / 2) / height_in))
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, note_in / height_in, 1, panels_in / height_in), w_pad=MARGIN_IN, h_pad=0.05)
    # A gallery takes the alt text of an image from the suptitle; it need not be seen for that.
    figure.suptitle(alt, visible=False, in_layout=False)
    return Drawing(figure, alt)


def _size_in(figure: Figure, artist: Artist) -> tuple[float, float]:
    extent = artist.get_window_extent()
    return extent.width / figure.dpi, extent.height / figure.dpi


def _fitted(figure: Figure, text: str, **font: Any) -> Text:
    """Write text at the left margin, wrapped at the last word that still fits the card."""
    artist = figure.text(MARGIN_IN / WIDTH_IN, 0, text, **font)
    for n_characters in range(len(text), 0, -1):
        artist.set_text(textwrap.fill(text, n_characters))
        if _size_in(figure, artist)[0] <= WIDTH_IN - 2 * MARGIN_IN:
            break
    return artist


def _legend(figure: Figure, entries: list[Artist]) -> Legend | None:
    """Make the legend, outside the layout, with the most columns that fit the card."""
    for n_columns in range(len(entries), 0, -1):
        legend = figure.legend(handles=entries, ncols=n_columns)
        legend.set_in_layout(False)
        if _size_in(figure, legend)[0] <= WIDTH_IN - MARGIN_IN or n_columns == 1:
            return legend
        legend.remove()
    return None
