"""Read docstrings as the plain prose they are, where reST would take arithmetic for markup.

`|dy|` is an absolute value and not a substitution, and the first line of a property may have a
colon without being split there into a type and a text. What Python writes for the field of a named
tuple, its number, is left out: the docstring of the class says what the fields are.
"""

import re
from typing import Any

from sphinx.application import Sphinx

CODE_OR_BAR = re.compile(r"(`[^`]*`)|\|")


def process(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Rewrite one docstring in place: escape bars outside code and examples."""
    del app, name, obj, options  # the event hands them over; a docstring needs none of them
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()
    example = False
    for i, line in enumerate(lines):
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        if not example:
            lines[i] = CODE_OR_BAR.sub(lambda match: match[1] or r"\|", line)
    if what in {"attribute", "property"}:
        lines[:0] = ["..", ""]  # napoleon looks for a type in the first line: an empty comment


def setup(app: Sphinx) -> dict[str, Any]:
    """Run before napoleon, whose own handler has the default priority of 500."""
    app.setup_extension("sphinx.ext.autodoc")  # which owns the event
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
