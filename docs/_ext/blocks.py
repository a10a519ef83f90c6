"""Tables and lists that directives make, in docutils' nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from docutils import nodes

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


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> nodes.table:
    """Return a table; a cell that reads as a number stands to the right.

    Args:
        caption: what the table shows, above it.
        head: one title per column.
        rows: one text per column; `quoted` parts are set as code.
    """
    body = nodes.tbody()
    for row in rows:
        body += _row(row)
    group = nodes.tgroup("", cols=len(head))
    group += [nodes.colspec(colwidth=1) for _ in head]
    group += nodes.thead("", _row(head))
    group += body
    # Widths follow the content: fixed ones would break names in the middle.
    return nodes.table("", nodes.title("", "", *text_or_code(caption)), group, classes=["made"])


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
