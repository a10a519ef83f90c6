"""How far the medians of a run lie from those of an earlier one: what repeating it is worth."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from .recording import select

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .recording import Recording, Row


FAR = 0.03  # a repeat is meant to move a median by less


def moves(rows: Iterable[Row], before: Recording) -> dict[Row, float]:
    """Return, for each kernel time that `before` has too, its median over the one there, less 1.

    Example:
        >>> from rmsnorm_ref.measure.live import recorded
        >>> seed = recorded("seed")
        >>> set(moves(seed.rows, seed).values())
        {0.0}
    """
    found: dict[Row, float] = {}
    for row, there in _pairs(rows, before):
        if there.time_s is not None and row.time_s is not None:
            found[row] = row.time_s.p50 / there.time_s.p50 - 1
    return found


def chose_anew(rows: Iterable[Row], before: Recording) -> set[Row]:
    """Return the kernel times of contenders whose own search chose another config than before.

    Theirs are times of another kernel, so they move for a reason.
    """
    pairs = _pairs(rows, before)
    return {row for row, there in pairs if there.config and row.config != there.config}


def _pairs(rows: Iterable[Row], before: Recording) -> Iterator[tuple[Row, Row]]:
    """Give each kernel time that `before` has too, with the one there."""
    earlier = {_cell(row): row for row in select(before.rows, kind="kernel")}
    for row in select(rows, kind="kernel"):
        there = earlier.get(_cell(row))
        if there is not None:
            yield row, there


def remark(rows: Iterable[Row], before: Recording) -> str:
    """Say in one line how far ours and the others moved since an earlier recording."""
    rows = list(rows)
    moved, anew = moves(rows, before), chose_anew(rows, before)
    parts = []
    for who, is_ours in (("ours", True), ("peers", False)):
        by = {row: abs(move) for row, move in moved.items() if (row.contender == "ours") is is_ours}
        if not by:
            continue
        row = max(by, key=by.__getitem__)
        far = {one for one, move in by.items() if move >= FAR}
        other = f" ({len(far & anew)} of them with another config)" if far & anew else ""
        parts.append(
            f"{who}: {len(by)} medians moved by {statistics.median(by.values()):.1%} (median), "
            f"{by[row]:.1%} at most ({row.contender}, {row.section} {row.M} x {row.N} {row.dtype} "
            f"{row.pass_}); {len(far)} by 3% or more{other}"
        )
    return f"against {before.id}: " + ("; ".join(parts) or "no cell in common")


def _cell(row: Row) -> tuple[object, ...]:
    return row.contender, row.section, row.M, row.N, row.dtype, row.w_dtype, row.pass_
