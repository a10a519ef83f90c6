"""One thing varied at a time: the size, the width, the launch config, the knobs that are pinned."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from rmsnorm_ref import tiling

from . import panels, style
from .recording import select
from .schema import FORWARD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .recording import Recording, Row

LEAST_SHOWN = 0.0005  # a smaller share prints as 0.0 %
MOST_EXTRA = 1.0  # the config figure shows up to twice the best time; the rest is named at its edge


@style.styled
def size_sweep(
    recording: Recording, *, pass_: str = FORWARD, dtype: str = "bfloat16"
) -> style.Drawing:
    """Draw bandwidth against the bytes of one call, from launch-bound through the L2 to HBM.

    Args:
        recording: with "kernel" rows of section "sizes"; "resident" ones, which find their input in
            the L2, are drawn dotted.
        pass_: "forward" or "backward".
        dtype: of x, such as "bfloat16".
    """
    fields = {"section": "sizes", "pass_": pass_, "dtype": dtype}
    rows = panels.picked(recording, kind="kernel", **fields)
    rows += select(recording.rows, kind="resident", **fields)
    figure, (panel,) = style.card(3.7)
    panel.set_xscale("log", base=4, subs=[])
    l2_mib = recording.provenance.l2_bytes / panels.MEBI
    marks = {l2_mib: f"L2: {l2_mib:.0f} MiB"}
    _curves(panel, rows, lambda row: (row.obligatory_bytes or 0) / panels.MEBI, marks)
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    panel.set_xlabel("bytes that one call must move, MiB")
    sizes = sorted((row.obligatory_bytes or 0) / panels.MEBI for row in rows)
    title = f"{pass_.title()}, {dtype}: {{}} {panels.from_to(sizes)} MiB"
    return _close(figure, panel, recording, rows, title)


@style.styled
def width_sweep(
    recording: Recording, *, pass_: str = FORWARD, dtype: str = "bfloat16"
) -> style.Drawing:
    """Draw bandwidth against N at fixed bytes, with the widths at which another kernel takes over.

    Arguments are those of `size_sweep`; the section is "widths". Lines join the powers of two;
    other widths stand alone, because their tiles have masked lanes.
    """
    rows = panels.picked(recording, kind="kernel", section="widths", pass_=pass_, dtype=dtype)
    figure, (panel,) = style.card(3.7)
    panel.set_xscale("log", base=4, subs=[])
    marks = {float(tiling.ONE_TILE_MAX): f"one tile up to N = {tiling.ONE_TILE_MAX}"}
    _curves(panel, rows, lambda row: row.N, marks)
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    panel.set_xlabel("N, elements per row; as many rows as make the same bytes")
    widths = sorted(row.N for row in rows)
    title = f"{pass_.title()}, {dtype}: {{}} {panels.from_to(widths, 'for N', 'at N =')}"
    return _close(figure, panel, recording, rows, title)


def _curves(
    panel: Axes, rows: Sequence[Row], at: Callable[[Row], float], marks: Mapping[float, str]
) -> None:
    """Draw the ceiling, one curve per contender with its p20-p80 band, and the boundaries."""
    by_x = sorted(rows, key=at)
    whole = [row for row in by_x if row.N & (row.N - 1) == 0] or by_x
    ceilings = {at(row): panels.ceiling_bandwidth(row) for row in whole if row.kind == "kernel"}
    one = "_" if len(ceilings) == 1 else ""  # a line through one point would not be seen
    x, heights = zip(*ceilings.items(), strict=True)
    panel.plot(x, heights, color=style.INK, linewidth=1.6, marker=one, ms=14, zorder=2)
    most = max(ceilings.values())
    curves = itertools.product(panels.contenders(rows), (("kernel", "-"), ("resident", ":")))
    for name, (kind, line) in curves:
        colour = style.LOOKS[name].colour
        own = [row for row in whole if (row.contender, row.kind) == (name, kind)]
        if own:
            places, bands = [at(row) for row in own], [panels.bandwidth(row) for row in own]
            lows, middles, highs = zip(*bands, strict=True)
            panel.fill_between(places, lows, highs, color=colour, alpha=style.SHADE, linewidth=0)
            panel.plot(places, middles, color=colour, linewidth=1.4, linestyle=line, zorder=2)
    for row in by_x:
        low, middle, high = panels.bandwidth(row)
        band = None if row in whole else (low, high)
        look = style.LOOKS[row.contender]
        style.point(panel, at(row), middle, look, y_band=band, hollow=bool(row.flags))
        most = max(most, high)
    style.value_axis(panel.yaxis, "effective bandwidth, TB/s", panels.marks(panel, marks, most))


def _close(
    figure: Figure, panel: Axes, recording: Recording, rows: Sequence[Row], title: str
) -> style.Drawing:
    names = panels.contenders(rows)
    entries = style.key(panel, [style.LOOKS[name] for name in names], rows)
    entries += panel.plot([], [], color=style.INK, linewidth=1.6, label="ceiling")
    if any(row.kind == "resident" for row in rows):
        entries += panel.plot([], [], ":", color=style.INK, label="one input, repeated")
    entries += style.spread(panel, shaded=True)
    first = select(rows, kind="kernel", contender=names[0])
    reached = panels.span((panels.bandwidth(row)[1] for row in first), "{:.1f}")
    finding = title.format(f"{style.LOOKS[names[0]].label} at {reached} TB/s")
    alt = (
        f"{finding}, for {panels.some({panels.cell(row) for row in rows}, 'shape')} and "
        f"{' and '.join(style.LOOKS[name].label for name in names)}, beside the measured ceiling, "
        f"with {style.SPREAD}."
    )
    return style.finish(figure, finding, alt, recording, entries)


@style.styled
def config_cost(
    recording: Recording, *, pass_: str = FORWARD, dtype: str = "bfloat16"
) -> style.Drawing:
    """Draw, per N, how much longer every launch config takes than the best one.

    Arguments are those of `size_sweep`; rows have kind "config". The ring is the config that ships.
    Configs that take more than twice the best time are counted above the axis.
    """
    rows = panels.picked(recording, kind="config", pass_=pass_, dtype=dtype)
    by_N: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.N):
        by_N[row.N].append(row)
    best_s = {N: min(panels.times(row).p50 for row in found) for N, found in by_N.items()}
    extra = {
        N: [panels.times(row).p50 / best_s[N] - 1 for row in found] for N, found in by_N.items()
    }
    top = min(MOST_EXTRA, max(map(max, extra.values()))) * panels.PERCENT
    figure, (panel,) = style.card(3.9)
    look, ring = style.series(["one config", "the shipped config"])
    costs = []
    for i, (N, found) in enumerate(by_N.items()):
        n_beyond = 0
        for row, cost in zip(found, extra[N], strict=True):
            if cost > MOST_EXTRA:
                n_beyond += 1
            else:
                style.point(panel, i, cost * panels.PERCENT, look, size=5)
            if panels.detail(row, "shipped"):
                costs.append(cost)
                size: dict[str, Any] = {
                    "markersize": 11,
                    "markerfacecolor": "none",
                    "markeredgewidth": 1.8,
                }
                height = min(cost, MOST_EXTRA) * panels.PERCENT
                panel.plot([i], [height], "o", mec=ring.colour, clip_on=False, **size)
        if n_beyond:
            worst = max(extra[N]) + 1
            text = f"+{n_beyond}\nto {worst:.{1 if worst < 10 else 0}f}{panels.TIMES}"
            panel.text(i, top * 1.03, text, ha="center", va="bottom", fontsize=style.NOTE_PT)
    panel.set_xticks(range(len(by_N)), [str(N) for N in by_N], rotation=30)
    panel.set_xlim(-0.5, len(by_N) - 0.5)
    panel.set_xlabel("N, elements per row")
    style.value_axis(panel.yaxis, "time above the best config's, %", 1.18 * top)
    entries = style.key(panel, [look])
    entries += panel.plot(
        [], [], "o", markersize=11, mfc="none", mec=ring.colour, mew=1.8, label=ring.label
    )
    worst = max(map(max, extra.values())) + 1
    finding = f"{pass_.title()}, {dtype}: a wrong config costs up to {worst:.2f} times the best"
    if costs:
        above = panels.percent(max(costs), "{:.1f}")
        best = max(costs) < LEAST_SHOWN
        finding += f"; the shipped one is {'the best' if best else f'at most {above} above it'}"
    n_widths = panels.some(by_N, "width")
    alt = f"Time of every launch config over the best one for {n_widths}: {finding}."
    return style.finish(figure, finding, alt, recording, entries)


KNOBS = {"programs_per_sm": "programs per SM", "num_stages": "num_stages"}


@style.styled
def ablation(recording: Recording, *, dtype: str = "bfloat16") -> style.Drawing:
    """Draw the backward's time against each knob that was varied, one line per shape.

    Arguments are those of `size_sweep`; rows have kind "ablation" and one of `KNOBS`.
    """
    rows = panels.picked(recording, kind="ablation", knob=set(KNOBS), dtype=dtype)
    knobs = [knob for knob in KNOBS if any(panels.detail(row, "knob") == knob for row in rows)]
    shapes = sorted({panels.cell(row) for row in rows}, key=lambda shape: (shape[1], shape[0]))
    looks = dict(zip(shapes, style.series([panels.shape(*shape) for shape in shapes]), strict=True))
    most = max(panels.times(row).p80 for row in rows) * panels.MICRO
    figure, axes = style.card(3.3, len(knobs), sharey=True)
    for panel, knob in zip(axes, knobs, strict=True):
        turned = _turned(rows, knob)
        values = sorted({value for _, value in turned})
        for shape, look in looks.items():
            own = {value: row for (at, value), row in sorted(turned.items()) if at == shape}
            x = [values.index(value) for value in own]
            heights = [panels.times(row).p50 * panels.MICRO for row in own.values()]
            panel.plot(x, heights, color=look.colour, linewidth=1.4)
            for place, height, row in zip(x, heights, own.values(), strict=True):
                time_s = panels.times(row)
                band = time_s.p20 * panels.MICRO, time_s.p80 * panels.MICRO
                style.point(panel, place, height, look, y_band=band, hollow=bool(row.flags))
        panel.set_xticks(range(len(values)), [str(value) for value in values])
        panel.set_xlim(-0.3, len(values) - 0.7)
        panel.set_xlabel(KNOBS[knob])
        style.value_axis(panel.yaxis, "time per call, µs" if panel is axes[0] else "", 1.08 * most)
    entries = style.key(axes[0], list(looks.values()), rows) + style.spread(axes[0])
    finding = f"Backward, {dtype}: fastest with " + " and ".join(
        _best_value(rows, knob) for knob in knobs
    )
    n_shapes, n_knobs = panels.some(shapes, "shape"), panels.some(knobs, "knob")
    alt = f"Time of the backward for {n_shapes} against {n_knobs}, with {style.SPREAD}: {finding}."
    return style.finish(figure, finding, alt, recording, entries)


def _turned(rows: Sequence[Row], knob: str) -> dict[tuple[panels.Cell, int], Row]:
    """Return the rows of one knob by shape and value."""
    return {
        (panels.cell(row), panels.detail(row, "value")): row
        for row in rows
        if panels.detail(row, "knob") == knob
    }


def _best_value(rows: Sequence[Row], knob: str) -> str:
    """Say at which values of a knob the shapes are fastest."""
    turned = _turned(rows, knob)
    best = set()
    for shape in {shape for shape, _ in turned}:
        own = {value: panels.times(row).p50 for (at, value), row in turned.items() if at == shape}
        best.add(min(own, key=own.__getitem__))
    return f"{KNOBS[knob]} = {' or '.join(map(str, sorted(best)))}"
