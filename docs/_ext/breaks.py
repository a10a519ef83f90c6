"""Where a line of a page may break, and where not.

A signature breaks behind a dot or an opening bracket before it breaks inside a name, and a long
word of code behind a dot, a comma or an underscore. An option of a command line stays in one piece,
and so do two numbers with a sign of multiplication between them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PRENAME = re.compile(r'(?<=<span class="sig-prename descclassname"><span class="pre">)[^<]+')
BRACKET = re.compile(r'<span class="(?:sig-paren|pre)">[(\[]</span>(?:</span>)?')
SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.DOTALL)
CHARACTER = "(?:[^<&]|&[^;]+;)"
HYPHENATED = re.compile(f'<span class="pre">(?={CHARACTER}{{3,30}}</span>)(?=[^<]*-)')
LONG = re.compile(f'(?<=<span class="pre">){CHARACTER}{{25,}}(?=</span>)')
TIMES = "\N{MULTIPLICATION SIGN}"
SHAPE = re.compile(rf"(?<=\d)\s{TIMES}\s(?=\d)")
LITERAL = re.compile(r"(<pre.*?</pre>|<script.*?</script>|<[^>]*>)", re.DOTALL)


def breaks(body: str) -> str:
    """Return the body of a page with its places to break."""
    body = SIGNATURE.sub(lambda found: _signature(found[0]), body)
    body = LONG.sub(lambda word: re.sub("[_.,](?!$)", r"\g<0><wbr>", word[0]), body)
    body = HYPHENATED.sub('<span class="pre whole">', body)
    parts = LITERAL.split(body)  # text, tag or literal, text, ...
    parts[::2] = [SHAPE.sub(f"\u00a0{TIMES}\u00a0", text) for text in parts[::2]]
    return "".join(parts)


def _signature(text: str) -> str:
    text = PRENAME.sub(lambda name: name[0].replace(".", ".<wbr>"), text)
    return BRACKET.sub(r"\g<0><wbr>", text)


def in_body(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Place them in a page that has a body of its own."""
    del app, page, template, doctree
    if "body" in context:
        context["body"] = breaks(context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Work on the body before its page is made."""
    app.connect("html-page-context", in_body)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
