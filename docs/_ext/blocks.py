"""Tables and lists that directives make, in docutils' nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CODE = re.compile(r"`([^`]+)`")


def text_or_code(text: str) -> list[nodes.Node]:
    """Return a text's nodes, `quoted` parts as code."""
    parts = CODE.split(text)  # text, code, text, code, ...
    return [
        nodes.literal("", part) if i % 2 else nodes.Text(part)
        for i, part in enumerate(parts)
        if part
    ]


def recording_link(name: str, docname: str, *classes: str) -> nodes.Node:
    """Return a link to a recording's provenance, from the page `docname`; -n checks that it is."""
    link = addnodes.pending_xref(
        "", refdomain="std", reftype="ref", reftarget=f"recording-{name}", refexplicit=True,
        refwarn=True, refdoc=docname,
    )  # fmt: skip
    link += nodes.inline("", name, classes=list(classes))
    return link


def table(
    caption: str | Iterable[nodes.Node],
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    classes: Sequence[str] = ("made",),
    stub: bool = False,
) -> nodes.table:
    """Return a table; a cell that reads as a number stands to the right.

    Args:
        caption: what the table shows, above it.
        head: one title per column.
        rows: one text per column; `quoted` parts are set as code.
        classes: what the style sheets call it.
        stub: whether the first column names its rows.
    """
    columns = [nodes.colspec(colwidth=1) for _ in head]
    if stub:
        columns[0]["stub"] = 1
    group = nodes.tgroup("", *columns, cols=len(head))
    group += nodes.thead("", _row(head))
    group += nodes.tbody("", *map(_row, rows))
    words = text_or_code(caption) if isinstance(caption, str) else caption
    # Widths follow the content: fixed ones would break names in the middle.
    return nodes.table("", nodes.title("", "", *words), group, classes=list(classes))


def _row(cells: Sequence[str]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        number = ["number"] if re.fullmatch(r"[\d.,\u202f]+( %)?", cell) else []
        row += nodes.entry("", nodes.paragraph("", "", *text_or_code(cell)), classes=number)
    return row


def definitions(words: Mapping[str, str], kind: str) -> nodes.definition_list:
    """Return a list of names and their texts, with `kind` as its class."""
    items = nodes.definition_list(classes=[kind])
    for name, text in words.items():
        definition = nodes.definition("", nodes.paragraph("", "", *text_or_code(text)))
        items += nodes.definition_list_item("", nodes.term("", name), definition)
    return items
