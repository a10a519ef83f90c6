"""The results as figures: bandwidth by cell, time by cell, prediction against measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rmsnorm_ref import traffic

from . import panels, style
from .schema import FORWARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .recording import Recording, Row

SPELLINGS: dict[str, traffic.Spelling] = {"eager": "seed", "eager_fp32": "fp32"}


@style.styled
def bandwidth_by_cell(
    recording: Recording,
    *,
    pass_: str = FORWARD,
    dtype: str = "bfloat16",
    section: str = "seed",
) -> style.Drawing:
    """Draw every contender's effective bandwidth per cell, in a bar that is as long as the ceiling.

    Args:
        recording: with "kernel" rows.
        pass_: "forward" or "backward".
        dtype: of x, such as "bfloat16".
        section: "seed", "narrow", "wide" or "few".
    """
    rows = panels.picked(recording, kind="kernel", section=section, pass_=pass_, dtype=dtype)
    names = panels.contenders(rows)
    offsets = panels.lanes(names)
    places = panels.lines(rows, max(0.3, 0.1 + 0.055 * len(names)))
    figure, (panel,) = style.card(places.height_in + 0.2)
    panels.label_lines(panel, places)
    shares: dict[panels.Cell, float] = {}
    ceilings = {panels.cell(row): panels.ceiling_bandwidth(row) for row in rows}
    for at, ceiling in ceilings.items():
        y = places.y[at]
        panel.barh(y, ceiling, height=0.9, color=style.ROOM, zorder=1)
        panel.vlines(ceiling, y - 0.45, y + 0.45, color=style.INK, linewidth=1.6, zorder=2)
    for row in sorted(rows, key=lambda found: found.contender == "ours"):
        low, middle, high = panels.bandwidth(row)
        at = panels.cell(row)
        style.point(
            panel,
            middle,
            places.y[at] + offsets[row.contender],
            style.LOOKS[row.contender],
            x_band=(low, high),
            hollow=bool(row.flags),
        )
        if row.contender == "ours":
            shares[at] = middle / ceilings[at]
            panels.beside(panel, places.y[at], panels.percent(shares[at]))
    most = max([*ceilings.values(), *(panels.bandwidth(row)[2] for row in rows)])
    label = "effective bandwidth, TB/s (bar: the ceiling"
    label += ";\nat the right: the share of it that rmsnorm_ref reaches)" if shares else ")"
    style.value_axis(panel.xaxis, label, 1.02 * most)
    entries = style.key(panel, [style.LOOKS[name] for name in names], rows) + style.spread(panel)
    finding = "bandwidth by cell"
    if shares:
        reach = panels.span(panels.PERCENT * share for share in shares.values())
        finding = f"rmsnorm_ref reaches {reach} % of the ceiling"
    alt = (
        f"Effective bandwidth of the {pass_} in {dtype} for {panels.some(ceilings, 'shape')} and "
        f"{panels.some(names, 'implementation')}, each beside the measured ceiling: {finding}; "
        f"lines are {style.SPREAD}."
    )
    title = f"{pass_.title()}, {dtype}: {finding}"
    return style.finish(figure, title, alt, recording, entries)


class _Race(NamedTuple):
    """One cell's measured speed-up over one eager spelling, beside the predicted one."""

    row: Row
    ours_s: float
    measured: float
    predicted: float


def _races(rows: Sequence[Row]) -> list[_Race]:
    ours = {
        (panels.cell(row), row.pass_, row.dtype): panels.times(row).p50
        for row in rows
        if row.contender == "ours"
    }
    races = []
    for row in rows:
        ours_s = ours.get((panels.cell(row), row.pass_, row.dtype))
        if row.contender in SPELLINGS and ours_s is not None:
            shape = row.M, row.N, panels.torch_dtype(row.dtype)
            spelling = SPELLINGS[row.contender]
            if row.pass_ == FORWARD:
                eager = traffic.eager_forward(*shape, spelling=spelling)
                fused = traffic.forward(*shape)
            else:
                eager = traffic.eager_backward(*shape, spelling=spelling)
                fused = traffic.backward(*shape)
            predicted = traffic.predicted_speedup(eager, fused)
            races.append(_Race(row, ours_s, panels.times(row).p50 / ours_s, predicted))
    if not races:
        raise ValueError(
            "no cell was timed with 'ours' and with 'eager' or 'eager_fp32': a speed-up needs both"
        )
    return races


@style.styled
def time_by_cell(
    recording: Recording,
    *,
    pass_: str = FORWARD,
    dtype: str = "bfloat16",
    section: str = "seed",
) -> style.Drawing:
    """Draw the time of the fused kernel and of eager, and what counting bytes predicts for eager.

    The prediction is the fused kernel's measured time, times eager bytes over fused bytes: eager
    at the bandwidth of the fused kernel. Arguments are those of `bandwidth_by_cell`.
    """
    rows = panels.picked(recording, kind="kernel", section=section, pass_=pass_, dtype=dtype)
    races = _races(rows)
    names = ["ours", *(name for name in SPELLINGS if any(r.row.contender == name for r in races))]
    offsets = panels.lanes(names, 0.27 * (len(names) - 1))
    places = panels.lines([race.row for race in races], 0.22 * (len(names) + 0.7))
    figure, (panel,) = style.card(places.height_in)
    panels.label_lines(panel, places)
    most = max(max(panels.times(race.row).p50, race.ours_s * race.predicted) for race in races)
    most *= panels.MICRO * 1.36  # room for the text behind the longest bar
    for race in races:
        y = places.y[panels.cell(race.row)]
        look = style.LOOKS["ours"]
        ours_us = race.ours_s * panels.MICRO
        panels.bar(panel, y + offsets["ours"], ours_us, look.colour, 0.25)
        look, at = style.LOOKS[race.row.contender], y + offsets[race.row.contender]
        predicted_us = race.ours_s * race.predicted * panels.MICRO
        measured_us = panels.times(race.row).p50 * panels.MICRO
        panels.bar(panel, at, measured_us, look.colour, 0.25)
        panel.vlines(predicted_us, at - 0.14, at + 0.14, color=style.CARD, linewidth=4)
        panel.vlines(predicted_us, at - 0.14, at + 0.14, color=style.INK, linewidth=1.6)
        text = f"{race.measured:.2f}{panels.TIMES} ({race.predicted:.2f}{panels.TIMES})"
        panels.behind(panel, max(measured_us, predicted_us), at, text)
    label = "time per call, µs (behind each bar: how much faster\n"
    label += "the fused kernel is, and the prediction in brackets)"
    style.value_axis(panel.xaxis, label, most)
    entries = style.patches(panel, [style.LOOKS[name] for name in names])
    entries += panel.plot([], [], "|", color=style.INK, markersize=10, mew=2, label="predicted")
    first = names[1]
    reached = panels.span((r.measured for r in races if r.row.contender == first), "{:.2f}")
    predicted = panels.span((r.predicted for r in races if r.row.contender == first), "{:.2f}")
    finding = f"{reached} times faster than eager, {predicted} predicted"
    alt = (
        f"Time per call of the {pass_} in {dtype} for {panels.some(places.y, 'shape')}, fused "
        f"and eager, with the time that counting bytes predicts for eager: {finding}."
    )
    title = f"{pass_.title()}, {dtype}: {finding}"
    return style.finish(figure, title, alt, recording, entries)


@style.styled
def prediction(
    recording: Recording, *, dtype: str = "bfloat16", section: str = "seed"
) -> style.Drawing:
    """Draw predicted against measured speed-up, one point per cell, pass and eager spelling.

    Arguments are those of `bandwidth_by_cell`. Points above the line were gained by more than the
    round trips removed: eager ran below the bandwidth of the fused kernel.
    """
    races = _races(panels.picked(recording, kind="kernel", section=section, dtype=dtype))
    kinds = sorted(
        {(race.row.contender, race.row.pass_) for race in races},
        key=lambda kind: (kind[1] != FORWARD, kind[0]),
    )
    looks = dict(zip(kinds, style.series([f"{_short(n)}, {p}" for n, p in kinds]), strict=True))
    figure, (panel,) = style.card(3.9)
    x_most = 1.12 * max(race.predicted for race in races)
    y_most = 1.08 * max(x_most / 1.12, *(race.measured for race in races))
    panel.plot([0, x_most], [0, x_most], color=style.FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
    for race in races:
        look = looks[race.row.contender, race.row.pass_]
        times_s = panels.times(race.row)
        band = times_s.p20 / race.ours_s, times_s.p80 / race.ours_s
        hollow = bool(race.row.flags)
        style.point(panel, race.predicted, race.measured, look, y_band=band, hollow=hollow)
    style.value_axis(panel.xaxis, "predicted speed-up: eager bytes / fused bytes", x_most)
    style.value_axis(panel.yaxis, "measured speed-up", y_most)
    entries = style.key(panel, list(looks.values()), [race.row for race in races])
    entries += panel.plot(
        [], [], color=style.FAINT, linewidth=1.2, linestyle=(0, (4, 3)), label="as predicted"
    )
    entries += style.spread(panel)
    n_above = sum(race.measured > race.predicted for race in races)
    finding = f"{n_above} of {len(races)} speed-ups exceed the prediction"
    alt = (
        f"Measured against predicted speed-up over eager in {dtype}, both passes and spellings, "
        f"with {style.SPREAD}: {finding}; measured / predicted is "
        f"{panels.span((race.measured / race.predicted for race in races), '{:.2f}')}."
    )
    return style.finish(figure, finding, alt, recording, entries)


def _short(contender: str) -> str:
    return "fp32 inside" if contender == "eager_fp32" else "eager"
