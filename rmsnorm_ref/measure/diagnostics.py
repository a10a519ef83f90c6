"""What stands behind the results: errors, DRAM counters, host time, the eager chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import panels, style
from .recording import select
from .schema import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from .recording import Recording, Row

NAME_SHOWN = 24  # characters of a kernel's name
ERROR_SHOWN = 2.0  # in bounds; what is further out is drawn at the edge, with its value


@style.styled
def error_by_cell(
    recording: Recording, *, pass_: str = BACKWARD, dtype: str = "bfloat16"
) -> style.Drawing:
    """Draw, per cell and tensor, the worst error against the float64 truth over its bound.

    Args:
        recording: with "error" rows.
        pass_: "forward" (y) or "backward" (dx and dw).
        dtype: of x, such as "bfloat16".
    """
    rows = panels.picked(recording, kind="error", pass_=pass_, dtype=dtype)
    tensors = list(panels.detail(rows[0], "error_over_bound"))
    names = panels.contenders(rows)
    offsets = panels.lanes(names)
    places = panels.lines(rows, max(0.3, 0.1 + 0.055 * len(names)))
    figure, axes = style.card(places.height_in, len(tensors), sharey=True)
    panels.label_lines(axes[0], places)
    for panel, tensor in zip(axes, tensors, strict=True):
        panel.axvline(1, color=style.INK, linewidth=1.6, zorder=1)
        for row in rows:
            y = places.y[panels.cell(row)] + offsets[row.contender]
            ratio = panels.detail(row, "error_over_bound")[tensor]
            _bounded(panel, ratio, y, style.LOOKS[row.contender])
        style.value_axis(panel.xaxis, f"{tensor}: error / bound", ERROR_SHOWN)
        panel.tick_params(axis="y", length=0)
    entries = style.key(axes[0], [style.LOOKS[name] for name in names])
    entries += axes[0].plot([], [], color=style.INK, linewidth=1.6, label="the bound")
    beyond = [ratio for row in rows for ratio in _ratios(row) if ratio > ERROR_SHOWN]
    if beyond:
        label = f"further out, to {max(beyond):,.0f}"
        entries += axes[0].plot([], [], ">", color=style.INK, label=label)
    ours = [_ratios(row) for row in rows if row.contender == "ours"]
    worst = max((max(ratios) for ratios in ours), default=None)
    finding = f"{pass_.title()}, {dtype}: error over bound"
    if worst is not None:
        finding += f", rmsnorm_ref at most {worst:.2f}"
    alt = (
        f"Worst error of {' and '.join(tensors)} against the float64 truth, as a share of the "
        f"bound, for {panels.some(places.y, 'shape')} and "
        f"{panels.some(names, 'implementation')}: {finding}."
    )
    return style.finish(figure, finding, alt, recording, entries)


def _ratios(row: Row) -> list[float]:
    found = panels.detail(row, "error_over_bound").values()
    return [float("inf") if ratio is None else ratio for ratio in found]


def _bounded(panel: Axes, ratio: float | None, y: float, look: style.Look) -> None:
    """Draw one ratio; beyond the axis, an arrow at its edge, in the colour of the series."""
    if ratio is not None and ratio <= ERROR_SHOWN:
        style.point(panel, ratio, y, look)
    else:
        style.point(panel, ERROR_SHOWN, y, look._replace(marker=">"), size=6)


@style.styled
def counters(
    recording: Recording, *, pass_: str = FORWARD, dtype: str = "bfloat16"
) -> style.Drawing:
    """Draw the DRAM bytes that hardware counted, over the bytes that one fused pass must move.

    Reads and writes are stacked; the black line is where the model of cost puts their sum.
    Arguments are those of `error_by_cell`; rows have kind "counter".
    """
    rows = panels.picked(recording, kind="counter", pass_=pass_, dtype=dtype)
    names = panels.contenders(rows)
    offsets = panels.lanes(names, 0.36 * (len(names) - 1))
    places = panels.lines(rows, 0.24 * (len(names) + 0.7))
    figure, (panel,) = style.card(places.height_in + 0.2)
    panels.label_lines(panel, places)
    height = 0.72 / (len(names) + 0.4)
    off: dict[str, list[float]] = {name: [] for name in names}
    most = 0.0
    for row in rows:
        y, look = places.y[panels.cell(row)] + offsets[row.contender], style.LOOKS[row.contender]
        read, written, model = _dram(row)
        panels.bar(panel, y, read, look.colour, height)
        panels.bar(panel, y, written, look.colour, height, left=read, alpha=0.5)
        panel.vlines(model, y - height / 2, y + height / 2, color=style.INK, linewidth=2.4)
        off[row.contender].append((read + written) / model - 1)
        end = max(read + written, model)
        panels.behind(panel, end, y, panels.percent(off[row.contender][-1], "{:+z.1f}"))
        most = max(most, end)
    label = "DRAM bytes / obligatory bytes of the fused pass\n(behind the bar: counted over model)"
    style.value_axis(panel.xaxis, label, 1.16 * most)
    entries = style.patches(panel, [style.LOOKS[name] for name in names])
    entries += style.patches(panel, [style.Look("paler: written", style.FAINT, "")], alpha=0.5)
    entries += panel.plot([], [], "|", color=style.INK, markersize=11, mew=2.4, label="model")
    said = [
        f"{style.LOOKS[name].label} {panels.span((100 * v for v in off[name]), '{:+z.1f}')} %"
        for name in names
    ]
    finding = f"{pass_.title()}, {dtype}: DRAM bytes against the model, {said[0]}"
    alt = (
        f"DRAM bytes of the {pass_} in {dtype} by hardware counter for "
        f"{panels.some(places.y, 'shape')}, off the model by: {'; '.join(said)}."
    )
    return style.finish(figure, finding, alt, recording, entries)


def _dram(row: Row) -> tuple[float, float, float]:
    """Return bytes read, bytes written and the model's sum, over the fused pass's obligatory."""
    n_tensors = 2 if row.pass_ == FORWARD else 3
    unit = n_tensors * row.M * row.N * panels.torch_dtype(row.dtype).itemsize
    read, written = panels.detail(row, "dram_read_bytes"), panels.detail(row, "dram_write_bytes")
    model = panels.detail(row, "model_read_bytes") + panels.detail(row, "model_write_bytes")
    return read / unit, written / unit, model / unit


HOST_CALLS = {
    ("forward", False): "forward without gradients",
    ("forward", True): "forward, for a backward",
    ("forward+backward", True): "forward and backward",
}


@style.styled
def host_time(recording: Recording, *, dtype: str = "bfloat16") -> style.Drawing:
    """Draw the time that Python and the launch cost per call, with little for the GPU to do.

    Arguments are those of `error_by_cell`; rows have kind "host".
    """
    rows = panels.picked(recording, kind="host", dtype=dtype)
    names = panels.contenders(rows)
    calls: dict[tuple[str, tuple[str, bool]], Row] = {
        (row.contender, (row.pass_, panels.detail(row, "requires_grad"))): row for row in rows
    }
    kinds = [kind for kind in HOST_CALLS if any(call == kind for _, call in calls)]
    looks = dict(zip(kinds, style.series([HOST_CALLS[kind] for kind in kinds]), strict=True))
    offsets = panels.lanes([str(kind) for kind in kinds], 0.26 * (len(kinds) - 1))
    figure, (panel,) = style.card(0.24 * (len(kinds) + 0.9) * len(names) + panels.AXIS_IN)
    most = max(panels.times(row).p80 for row in rows) * panels.MICRO
    for (name, kind), row in calls.items():
        if kind not in looks:
            continue
        y, time_s = names.index(name) + offsets[str(kind)], panels.times(row)
        colour, middle = looks[kind].colour, time_s.p50 * panels.MICRO
        panels.bar(panel, y, middle, colour, 0.24)
        panel.hlines(y, time_s.p20 * panels.MICRO, time_s.p80 * panels.MICRO, color=style.INK, lw=2)
        panels.behind(panel, time_s.p80 * panels.MICRO, y, f"{middle:.0f}")
    panel.set_yticks(range(len(names)), [style.LOOKS[name].label for name in names])
    panel.set_ylim(len(names) - 0.45, -0.55)
    panel.tick_params(axis="y", length=0)
    style.value_axis(panel.xaxis, "host time per call, µs", 1.12 * most)
    finding = f"Host time per call, {panels.shape(*panels.cell(rows[0]))} {dtype}"
    said = ", ".join(
        f"{style.LOOKS[name].label} {panels.times(calls[name, kinds[0]]).p50 * panels.MICRO:.0f}"
        for name in names
        if (name, kinds[0]) in calls
    )
    alt = (
        f"{finding}, by implementation, with {style.SPREAD}; {HOST_CALLS[kinds[0]]}, median in "
        f"microseconds: {said}."
    )
    entries = style.patches(panel, list(looks.values())) + style.spread(panel, style.INK)
    return style.finish(figure, finding, alt, recording, entries)


@style.styled
def eager_chain(
    recording: Recording,
    *,
    M: int = 4096,
    N: int = 4096,
    pass_: str = FORWARD,
    dtype: str = "bfloat16",
    contender: str = "eager",
) -> style.Drawing:
    """Draw eager kernel by kernel along one time axis, each with its bytes and its bandwidth.

    Below the chain stands the fused pass of the same shape, where the recording has one.

    Args:
        recording: with "eager_kernel" rows.
        M: rows.
        N: elements of a row.
        pass_: "forward" or "backward".
        dtype: of x, such as "bfloat16".
        contender: "eager" or "eager_fp32".
    """
    cell = {"M": M, "N": N, "pass_": pass_, "dtype": dtype}
    found = panels.picked(recording, kind="eager_kernel", contender=contender, **cell)
    chain = sorted(found, key=lambda row: panels.detail(row, "index"))
    bars = [(*_eager_kernel(row), panels.times(row).p50 * panels.MICRO) for row in chain]
    eager_us = sum(time_us for _, _, time_us in bars)
    fused = _fused(recording, cell)
    colours = [style.LOOKS[contender].colour] * len(bars)
    starts_us = [sum(time_us for _, _, time_us in bars[:i]) for i in range(len(bars))]
    if fused:
        bars.append(("fused", fused.obligatory_bytes or 0, panels.times(fused).p50 * panels.MICRO))
        colours.append(style.LOOKS["ours"].colour)
        starts_us.append(0)
    figure, (panel,) = style.card(0.25 * len(bars) + panels.AXIS_IN)
    for y, ((_, n_bytes, time_us), start_us) in enumerate(zip(bars, starts_us, strict=True)):
        panels.bar(panel, y, time_us, colours[y], 0.8, left=start_us)
        before = start_us + time_us / 2 > eager_us / 2
        end_us = start_us if before else start_us + time_us
        panels.behind(panel, end_us, y, _moved(n_bytes, time_us), before=before)
    labels = [name for name, _, _ in bars]
    panel.set_yticks(range(len(bars)), labels, fontsize=style.NOTE_PT)
    panel.set_ylim(len(bars) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    style.value_axis(panel.xaxis, "time, µs", 1.02 * eager_us)
    n_bytes = sum(moved for _, moved, _ in bars[: len(chain)])
    who = style.LOOKS[contender].label
    shape = panels.shape(M, N)
    finding = (
        f"{pass_.title()} of {shape} in {who}: {panels.some(chain, 'kernel')}, {eager_us:.0f} µs"
    )
    if fused:
        finding += f"; fused {bars[-1][2]:.0f} µs"
    alt = (
        f"Kernels of the {pass_} at {shape} {dtype}, one after the other in time: "
        f"{finding}; eager moves {_moved(n_bytes, eager_us)}."
    )
    return style.finish(figure, finding, alt, recording)


def _eager_kernel(row: Row) -> tuple[str, int]:
    """Return the kernel's name, by the model's steps where those are known, and its bytes."""
    steps: Sequence[str] = panels.detail(row, "steps")
    name: str = " + ".join(steps) or panels.detail(row, "kernel")
    short = name if len(name) <= NAME_SHOWN else f"{name[: NAME_SHOWN - 1]}…"
    return short.replace("->", "→"), panels.detail(row, "n_bytes")


def _fused(recording: Recording, cell: dict[str, object]) -> Row | None:
    """Return the fused pass of the same shape, or None."""
    rows = select(recording.rows, kind="kernel", contender="ours", **cell)
    return rows[0] if rows else None


def _moved(n_bytes: float, time_us: float) -> str:
    if not n_bytes:
        return "not in the model"
    if n_bytes < 1e6:
        return f"{n_bytes / 1e3:.0f} kB"
    return f"{n_bytes / 1e6:.0f} MB, {n_bytes / time_us / 1e6:.1f} TB/s"
