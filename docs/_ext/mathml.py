"""Write formulas as MathML, which browsers draw themselves.

Sphinx's own choice loads a script from another host at reading time, so a page opened with no
network shows raw TeX. docutils already carries a converter; this extension only plugs it in.
"""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.writers.html5 import HTML5Translator

MARKS = {".", ",", ":", ";", ")"}
# MathML cannot tell an opening bar from a closing one, and would set both apart as operators.
BAR = '<mo stretchy="false">|</mo>', '<mo stretchy="false" lspace="0" rspace="0">|</mo>'

# The name of a function stands apart from a factor before it, as in "half ulp(x)".
FUNCTION = re.compile(
    r"(?:(?<=</mfrac>)|(?<=</mi>)|(?<=</mn>))(\s*)(<mi[^>]*>\w\w+</mi>\s*<mo>&ApplyFunction;)"
)


class JoinMarks(SphinxPostTransform):
    """Give a formula the comma or full stop behind it, which else may begin the next line."""

    default_priority = 700

    def run(self, **_: Any) -> None:
        """Move the marks."""
        for node in list(self.document.findall(nodes.math)):
            after = node.next_node(descend=False, siblings=True)
            if isinstance(after, nodes.Text) and after[:1] in MARKS:
                node["mark"] = after[0]
                after.parent.replace(after, nodes.Text(after[1:]))


def mathml(text: str, *, as_block: bool = False) -> str:
    """Return a formula, its bars and functions set apart as they should be."""
    formula: str = tex2mathml(text, as_block=as_block)
    return FUNCTION.sub(r'\1<mspace width="0.17em"/>\2', formula.replace(*BAR))


def visit_math(translator: HTML5Translator, node: nodes.math) -> None:
    """Write an inline formula, with the mark that follows it."""
    formula = mathml(node.astext())
    if "mark" in node:
        formula = f'<span class="joined">{formula}{node["mark"]}</span>'
    translator.body.append(formula)
    raise nodes.SkipNode


def visit_display_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed formula, with its number and link where the page gives it a label."""
    # It scrolls where it is wider than the page, and what scrolls must be reached by keyboard.
    translator.body.append(translator.starttag(node, "div", CLASS="math", tabindex="0"))
    if node["number"]:
        translator.body.append(f'<span class="eqno">({node["number"]})')
        translator.add_permalink_ref(node, "Link to this equation")
        translator.body.append("</span>")
    translator.body.append(mathml(node.astext(), as_block=True))
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer under the name that `html_math_renderer` in conf.py picks."""
    app.add_post_transform(JoinMarks)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_display_math, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
