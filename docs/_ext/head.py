"""What a page's head says: one description, and the files that the page has a use for.

A page of prose states its description, under `html_meta`. A page made from a script is described by
its first paragraph. Pages that Sphinx makes are described below.
"""

from __future__ import annotations

import html
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sphinxext.opengraph  # type: ignore[import-untyped]  # ships no types
from docutils import nodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx

MADE_BY_SPHINX = {
    "genindex": "Every documented name of rmsnorm_ref, in alphabetical order.",
    "py-modindex": "The documented modules of rmsnorm_ref.",
    "search": "Search the pages of rmsnorm_ref; the search runs in the browser.",
}
LONGEST = 200  # characters; previews cut what is longer


def described(doctree: nodes.document) -> str:
    """Return a page's stated description, or else its first paragraph, cut at a word."""
    for meta in doctree.findall(nodes.meta):
        if meta.get("name") == "description":
            return str(meta["content"])
    # Of the text itself: the gallery puts a note about the download before it.
    paragraphs = doctree.findall(nodes.paragraph)
    first = next((each for each in paragraphs if isinstance(each.parent, nodes.section)), None)
    text = " ".join(first.astext().split()) if first else ""
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " ..."


def add_description(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Add the meta tag to a page that does not state one."""
    del app, template
    if 'name="description"' in context.get("metatags", ""):
        return
    text = described(doctree) if doctree else MADE_BY_SPHINX.get(page, "")
    if text:
        tag = f'<meta name="description" content="{html.escape(text)}" />\n'
        context["metatags"] = context.get("metatags", "") + tag


def leave_out(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Load the gallery's styles and script on the gallery's pages alone."""
    del app, template, doctree
    if not page.startswith("auto_examples/"):
        for kind in ("css_files", "script_files"):
            context[kind] = [file for file in context[kind] if not _of_the_gallery(file.filename)]


def _of_the_gallery(address: object) -> bool:
    return Path(str(address)).name.startswith(("sg-", "sg_"))


def for_card(doctree: nodes.document, length: int, known_titles: set[str]) -> str:
    """Take the place of a function that would quote formulas and code."""
    del length, known_titles
    return described(doctree)


def setup(app: Sphinx) -> dict[str, Any]:
    """Describe pages before the cards are drawn."""
    # The cards' font has one weight; matplotlib would say so at every page.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    sphinxext.opengraph.get_description = for_card
    app.connect("html-page-context", add_description, priority=100)
    # Last of all: what another extension adds to one page must be in the lists already.
    app.connect("html-page-context", leave_out, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
