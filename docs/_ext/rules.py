"""The directive `rules`: the review's table of rules as sections, so that an id is a permalink."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from blocks import text_or_code
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from rmsnorm_ref.review.rules import RULES

if TYPE_CHECKING:
    from sphinx.application import Sphinx


class RulesDirective(SphinxDirective):
    """List the rules of `rmsnorm_ref.review.rules`, a section each, under their groups."""

    def run(self) -> list[nodes.Node]:
        """Return a section per group, with a section per rule whose id is the rule's."""
        domain = self.env.domains.standard_domain
        found: list[nodes.Node] = []
        for group, rules in groupby(RULES.values(), key=lambda rule: rule.group):
            outer = nodes.section(ids=[f"rules-{group.lower()}"])
            outer += nodes.title("", group)
            for rule in rules:
                section = nodes.section(ids=[rule.id])
                section += nodes.title("", rule.id)
                # Only backquotes are markup in the table's text.
                asks = nodes.strong("", "", *text_or_code(rule.asks))
                section += nodes.paragraph("", "", asks, nodes.Text(" "), *text_or_code(rule.why))
                breach = rule.breach[0].lower() + rule.breach[1:]
                section += nodes.paragraph("", "", *text_or_code(f"Verdict: {breach}"))
                domain.labels[rule.id] = (self.env.docname, rule.id, rule.id)
                domain.anonlabels[rule.id] = (self.env.docname, rule.id)
                outer += section
            found.append(outer)
        return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("rules", RulesDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
