"""What each pinned choice is worth, as far as it is recorded: the `choices` directive.

    ```{choices} eviction path
    ```

is a table for each of these choices of `rmsnorm_ref.measure.pinned`, with the time of every
alternative and the one that is taken; `all` is one table with a line for each. What no recording
holds is named in one sentence, and becomes a table by itself as soon as one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from docutils import nodes
from findings import NO_BREAK, cell_name, seconds, spread
from results_tables import _Directive, table_node
from tables import DASH, SHAPE, Table, footnotes, marks

from rmsnorm_ref.measure.choice import picked
from rmsnorm_ref.measure.pinned import CHOICES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sphinx.application import Sphinx

    from rmsnorm_ref.measure.pinned import Choice
    from rmsnorm_ref.measure.recording import Row

COMMAND = "python -m rmsnorm_ref bench --cells ablations"
RATIO = "best other / taken"
BY_KNOB = {str(choice.knob): choice for choice in CHOICES}
Cells = dict[tuple[str, int, int], dict[Any, "Row"]]


def recorded(choice: Choice) -> tuple[Cells, str]:
    """Return {(pass, M, N): {value: row}} of a choice, and its recording; LookupError: none."""
    rows, source = picked(kind="ablation", knob=choice.knob)
    cells: Cells = {}
    for row in rows:
        assert row.detail is not None
        cells.setdefault((row.pass_, row.M, row.N), {})[row.detail["value"]] = row
    return cells, source.id


def ratio(choice: Choice, rows: dict[Any, Row]) -> float | None:
    """Return the time of the fastest other alternative over that of the one that is taken."""
    first = next(iter(rows.values()))
    taken = choice.taken(first.M, first.N)
    others = [seconds(row) for value, row in rows.items() if value != taken]
    return min(others) / seconds(rows[taken]) if taken in rows and others else None


def single(choice: Choice) -> Table:
    """List the time of every alternative, cell by cell, and which one is taken."""
    cells, source = recorded(choice)
    values = list(dict.fromkeys(value for rows in cells.values() for value in rows))
    body = []
    for (pass_, M, N), rows in cells.items():
        found, taken = ratio(choice, rows), choice.taken(M, N)
        noise = [row.noise for row in rows.values() if row.repeat_time_s is not None]
        body.append(
            (
                f"{pass_}, {cell_name(next(iter(rows.values())))}",
                *(_time(rows[value]) if value in rows else DASH for value in values),
                "as asked" if taken is None else str(taken),
                DASH if found is None else f"{found:.3f}",
                f"{100 * max(noise):.1f} %" if noise else DASH,
            )
        )
    flagged = {flag for rows in cells.values() for row in rows.values() for flag in row.flags}
    caption = f"{choice.knob}: {choice.meaning} (bfloat16){footnotes(flagged)}"
    titles = (f"pass, {SHAPE}", *(f"{value}, µs" for value in values), "taken", RATIO, "noise")
    return Table(caption, titles, body, (source,))


def _time(row: Row) -> str:
    return f"{1e6 * seconds(row):.2f}{marks(row)}"


def summary(choices: Sequence[Choice]) -> Table:
    """List, for each choice, how much longer the best of its other alternatives takes."""
    body, sources = [], dict[str, None]()
    for choice in choices:
        cells, source = recorded(choice)
        ratios = [found for rows in cells.values() if (found := ratio(choice, rows)) is not None]
        if ratios:  # else both are taken, as the call asks for
            sources[source] = None
            cells_said = f"{len(ratios)} cell{'s' * (len(ratios) > 1)}"
            said = f"{spread(ratios, '{:.3f}')} ({cells_said})".replace(" ", NO_BREAK)
            body.append((f"{choice.knob}: {choice.meaning}", said))
    caption = "Time of the best alternative, over that of what is taken (bfloat16)"
    return Table(caption, ("choice", RATIO), body, tuple(sources))


class ChoicesDirective(_Directive):
    """Show what choices are worth, or say that it is not recorded."""

    optional_arguments = 20
    option_spec: ClassVar[dict[str, Any]] = {}

    def build(self) -> list[nodes.Node]:
        """Return the tables, and a sentence for the choices that no recording has."""
        every = self.arguments == ["all"]
        asked = list(CHOICES) if every else [BY_KNOB[knob] for knob in self.arguments]
        have, lacking = [], []
        for choice in asked:
            try:
                recorded(choice)
            except LookupError:
                lacking.append(choice)
            else:
                have.append(choice)
        tables = [single(choice) for choice in have]
        if every:
            tables = [summary(have)] if have else []
        found: list[nodes.Node] = [table_node(table, self.env.docname) for table in tables]
        return [*found, _lacking(lacking)] if lacking else found


def _lacking(choices: Sequence[Choice]) -> nodes.paragraph:
    said = nodes.paragraph("", "", nodes.Text("What "), classes=["unrecorded"])
    for place, choice in enumerate(choices):
        said += nodes.Text((" and " if place == len(choices) - 1 else ", ") if place else "")
        said += nodes.literal("", choice.knob)
    verb = "are" if len(choices) > 1 else "is"
    said += nodes.Text(f" {verb} worth is in no recording yet; ")
    said += [nodes.literal("", COMMAND), nodes.Text(" measures it.")]
    return said


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.setup_extension("results_tables")
    app.add_directive("choices", ChoicesDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
