"""Small repairs of what the theme and the gallery write, so that axe-core finds nothing wrong.

None can be made by a setting or a template's block. Most are replacements in the finished page; a
test looks for the new text, so that a repair which a later theme makes void is noticed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REPAIRS = {
    # A heading needs a level; the captions of the table of contents need not be headings.
    '<p class="caption" role="heading">': '<p class="caption">',
    # Two landmarks of one kind need a name each.
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Site">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="This page">',
    # What scrolls sideways must be reached by keyboard.
    '<div class="highlight"><pre>': '<div class="highlight"><pre tabindex="0">',
    '<div class="table-wrapper ': (
        '<div tabindex="0" role="group" aria-label="Table, scrolls sideways where the page is '
        'narrow" class="table-wrapper '
    ),
    # A page needs a heading, and one with nothing found yet the way to its field.
    '<div id="search-results"></div>': (
        '<h1>Search</h1>\n<div id="search-results"></div>\n<p class="search-where">The field to '
        "search with stands above the site's contents, at the left; where the page is narrow the "
        "button at the top left opens them.</p>"
    ),
}
# A figure keeps a width at which its words can be read, and on a narrower page scrolls by itself.
FIGURE = (
    '<div class="wide-figure" tabindex="0" role="group" aria-label="Figure, scrolls sideways where '
    'the page is narrow">'
)
GALLERY_IMAGE = re.compile(r'<img [^>]*class = "sphx-glr-(?:single|multi)-img"\s*/>')


def repair_pages(app: Sphinx) -> None:
    """Repair every page between its template and its file."""
    if app.builder.format != "html":
        return
    templates: Any = app.builder.templates  # of builders for HTML
    render = templates.render

    def repaired(template: str, context: dict[str, Any]) -> str:
        page = str(render(template, context))
        for old, new in REPAIRS.items():
            page = page.replace(old, new)
        return GALLERY_IMAGE.sub(lambda image: f"{FIGURE}{image[0]}</div>", page)

    templates.render = repaired


class OneId(SphinxPostTransform):
    """Take an id from the box that the theme puts around a table or a formula that has it too."""

    formats = ("html",)
    default_priority = 501  # right after the theme's

    def run(self, **_: Any) -> None:
        """Leave the id to what is inside."""
        for box in self.document.findall(nodes.container):
            if {"table-wrapper", "math-wrapper"} & set(box["classes"]):
                box["ids"] = []


def setup(app: Sphinx) -> dict[str, Any]:
    """Repair once the builder has its templates."""
    app.add_post_transform(OneId)
    app.connect("builder-inited", repair_pages, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
