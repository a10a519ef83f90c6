"""Tables of kernel times as plain data, made from recordings; `results_tables.py` draws them.

A function here is a table by its own name. It takes the directive's options as keywords and returns
a `Table`. Rows appear as recordings have them, so a longer run lengthens a table by itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import findings
from findings import TIMES, cell_name, seconds

from rmsnorm_ref import traffic, tuning
from rmsnorm_ref.measure import choice, recording, style
from rmsnorm_ref.measure.choice import picked
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD
from rmsnorm_ref.measure.session import searched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from rmsnorm_ref.measure.recording import Row

SHAPE, DASH = f"M {TIMES} N", "\u2013"
FLAGS: dict[str, tuple[str, str]] = {
    "above_ceiling": ("*", "faster than the ceiling"),
    "fits_in_l2": ("†", "all inputs that take turns fit in the L2, so HBM is not what is timed"),
    "by_difference": ("‡", "forward and backward in one graph, less the forward"),
}


class Table(NamedTuple):
    """Hold a table's caption, header, body, and the ids of the recordings behind it."""

    caption: str
    titles: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    sources: tuple[str, ...] = ()


def label(contender: str) -> str:
    """Return a contender's name as the figures print it."""
    return style.LOOKS[contender].label if contender in style.LOOKS else contender


def prediction(pass_: str, dtype: str = "bfloat16") -> Table:
    """Set predicted against measured speed-up over both eager spellings, cell by cell."""
    rows, source = picked(kind="kernel", section="seed", pass_=pass_, dtype=dtype)
    measured: dict[str, dict[str, float]] = defaultdict(dict)
    predicted: dict[str, dict[str, float]] = defaultdict(dict)
    for race in findings.races(rows):
        spelling = findings.SPELLINGS.get(race.other.contender)
        if spelling:
            name = cell_name(race.ours)
            measured[name][spelling] = race.ratio
            predicted[name][spelling] = _predicted(race.ours, spelling)
    body = [
        (
            name,
            *(
                f"{values[name][spelling]:{form}}" if spelling in values[name] else ""
                for spelling in ("seed", "fp32")
                for values, form in ((predicted, ".2f"), (measured, ".2f"))
            ),
        )
        for name in measured
    ]
    caption = (
        f"Speed-up over eager, {pass_}, {dtype}: eager bytes over fused bytes, and eager time over "
        "fused time"
    )
    titles = (SHAPE, "eager: predicted", "measured", "fp32 inside: predicted", "measured")
    return Table(caption, titles, body, (source.id,))


def _predicted(row: Row, spelling: traffic.Spelling) -> float:
    dtype = findings.recorded_dtype(row)
    forward = row.pass_ == FORWARD
    eager = traffic.eager_forward if forward else traffic.eager_backward
    fused: Callable[..., traffic.Traffic] = traffic.forward if forward else traffic.backward
    return traffic.predicted_speedup(
        eager(row.M, row.N, dtype, spelling=spelling), fused(row.M, row.N, dtype)
    )


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Return our own rows as tables list them: by columns, then by rows."""
    return sorted(recording.select(rows, contender="ours"), key=lambda row: (row.N, row.M))


def cells(pass_: str, section: str = "seed", dtype: str = "bfloat16") -> Table:
    """List time, bandwidth, share of the ceiling and the fastest peer of each cell."""
    rows, source = picked(kind="kernel", section=section, pass_=pass_, dtype=dtype)
    found = findings.races(rows)
    body = []
    flagged: set[str] = set()
    for ours in in_order(rows):
        best = min(
            (race for race in found if race.ours is ours), key=lambda race: race.ratio, default=None
        )
        peer = ("", "")
        if best:
            peer = (label(best.other.contender), f"{best.ratio:.2f}{marks(best.other)}")
        flagged |= {*ours.flags, *(best.other.flags if best else ())}
        body.append(
            (
                cell_name(ours),
                f"{1e6 * seconds(ours):.2f}{marks(ours)}",
                f"{ours.bandwidth_bytes_per_s / 1e12:.2f}",
                f"{100 * ours.share_of_ceiling:.0f} %" if ours.ceiling else "",
                *peer,
            )
        )
    caption = f"{_section(section)}, {pass_}, {dtype}{footnotes(flagged)}"
    titles = (SHAPE, "µs", "TB/s", "of ceiling", "fastest peer", "its time / ours")
    return Table(caption, titles, body, (source.id,))


def peers(pass_: str, section: str = "seed", dtype: str = "bfloat16") -> Table:
    """List every contender's time over ours, cell by cell."""
    rows, source = picked(kind="kernel", section=section, pass_=pass_, dtype=dtype)
    found = findings.races(rows)
    names = [name for name in style.LOOKS if any(race.other.contender == name for race in found)]
    ratios: dict[tuple[str, str], findings.Race] = {
        (cell_name(race.ours), race.other.contender): race for race in found
    }
    body = []
    for ours in in_order(rows):
        at = cell_name(ours)
        cells_ = [ratios.get((at, name)) for name in names]
        body.append(
            (
                at,
                f"{1e6 * seconds(ours):.2f}",
                *(f"{race.ratio:.2f}{marks(race.other)}" if race else DASH for race in cells_),
            )
        )
    flagged = {flag for race in found for flag in race.other.flags}
    caption = f"Time over ours, {_section(section).lower()}, {pass_}, {dtype}{footnotes(flagged)}"
    return Table(caption, (SHAPE, "ours, µs", *map(label, names)), body, (source.id,))


def losses() -> Table:
    """List the cells of all sections in which a peer is faster than ours by more than the noise."""
    races, sources = findings.all_lost()
    body = [_loss(race) for race in races]
    caption = "Cells in which a peer is faster, by more than the noise of either"
    titles = (SHAPE, "dtype", "pass", "peer", "its time / ours", "warps, stages", "as shipped")
    return Table(caption, titles, body or [("none", *[DASH] * 6)], sources)


def _loss(race: findings.Race) -> tuple[str, ...]:
    ours = race.ours
    shipped = DASH
    if ours.path and (path := searched(ours.path)) in tuning.SPACES:
        table = tuning.shipped(path, ours.N, findings.recorded_dtype(ours))
        shipped = _config(table.num_warps, table.num_stages)
    config = _config(ours.config.num_warps, ours.config.num_stages) if ours.config else DASH
    what = (cell_name(ours), ours.dtype, ours.pass_, label(race.other.contender))
    return (*what, f"{race.ratio:.3f}", config, shipped)


def _config(num_warps: int, num_stages: int) -> str:
    return f"{num_warps}, {num_stages}"


def scratch() -> Table:
    """List what the partial buffer adds to the backward, by the recorded launches.

    N cancels, so all widths of a number of rows that were launched alike are one line; and so are
    all launches without a buffer.
    """
    wanted = {"kind": "kernel", "contender": "ours", "pass_": BACKWARD, "dtype": "bfloat16"}
    found: dict[tuple[int, int], Row] = {}
    sources: dict[str, None] = {}
    ranked = choice.ranked(**wanted)
    ranked = [each for each in ranked if not recording.stale(each)] or ranked
    launched = [row for each in ranked for row in recording.select(each.rows, **wanted)]
    for section in dict.fromkeys(row.section for row in launched):
        rows, source = picked(section=section, **wanted)
        for row in rows:
            if row.scratch_bytes is not None and (row.M, row.N) not in found:
                found[row.M, row.N] = row
                sources[source.id] = None
    alike: dict[tuple[int, str, int], list[Row]] = defaultdict(list)
    for (M, _), row in sorted(found.items()):
        path = (row.path or "").removesuffix("_backward").replace("_", " ")
        alike[(M, path, row.n_programs or 0) if row.scratch_bytes else (0, path, 0)].append(row)
    body = []
    for (_, path, n_programs), rows in alike.items():
        buffer = max(row.scratch_bytes / row.obligatory_bytes for row in rows)  # type: ignore[operator]
        shares = [100 * row.share_of_ceiling for row in rows if row.ceiling]
        body.append(
            (
                _span([row.M for row in rows]),
                _span([row.N for row in rows]),
                path,
                str(n_programs),
                f"{100 * buffer:.1f} %",
                f"{findings.spread(shares, '{:.0f}')} %" if shares else "",
            )
        )
    caption = "The partial buffer of P programs, written and read, over 3·M·N·e bytes (bfloat16)"
    titles = ("M", "N", "kernel", "P", "buffer / obligatory", "of ceiling")
    return Table(caption, titles, body, tuple(sources))


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}{DASH}{high}"


def _section(section: str) -> str:
    return {"seed": "The seed cells", "narrow": "Narrow rows", "wide": "Wide rows"}.get(
        section, {"few": "Few rows", "sizes": "Sizes", "widths": "Widths"}.get(section, section)
    )


def marks(row: Row) -> str:
    """Return the marks of a row's flags."""
    return "".join(FLAGS[flag][0] for flag in row.flags)


def footnotes(flagged: AbstractSet[str]) -> str:
    """Explain marks at the end of a caption."""
    return "".join(f"; {FLAGS[flag][0]}: {FLAGS[flag][1]}" for flag in FLAGS if flag in flagged)


TABLES: dict[str, Callable[..., Table]] = {
    function.__name__: function for function in (prediction, cells, peers, losses, scratch)
}
