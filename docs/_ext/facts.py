"""The `fact` role: a number in prose that is computed while the page is built.

    {fact}`share("ours", "forward", 4096, 8192)`

prints what the expression gives. A number that was read from a recording links to it; hovering
over any number shows its expression, and over a recorded one also GPU, date and commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from docutils import nodes
from evidence import NAMESPACE, Fact
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

from rmsnorm_ref.measure import choice, recording

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

    from rmsnorm_ref.measure.recording import Recording

LOGGER = logging.getLogger(__name__)


class fact_text(nodes.inline):  # noqa: N801  # docutils finds a node's visitor by its name
    """A number, with a `title` that says where it comes from."""


class FactRole(SphinxRole):
    """Print what an expression over `evidence.NAMESPACE` gives."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Evaluate; remember the recording if the number comes from one."""
        try:
            # The expression stands in this repository, like any other code of it.
            found = eval(self.text, {"__builtins__": {}}, NAMESPACE)  # noqa: S307
        except Exception as error:  # noqa: BLE001  # whatever it is, the build must name the place
            return self._problem(f"{type(error).__name__}: {error}")
        if isinstance(found, Fact):
            node = fact_text("", found.text, classes=["fact", "recorded"])
            node["recording"] = found.recording
            node["title"] = f"{self.text}, from {origin(found.recording)}"
            return [node], []
        if isinstance(found, bool) or not isinstance(found, str | int | float):
            return self._problem(f"a {type(found).__name__} is no number")
        node = fact_text("", str(found), classes=["fact", "computed"])
        node["title"] = f"{self.text}, computed from the package"
        return [node], []

    def _problem(self, text: str) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        message = self.inliner.reporter.error(f"fact {self.text!r}: {text}", line=self.lineno)
        return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]


def origin(name: str) -> str:
    """Say in a few words what a recording was made on."""
    found = shipped(name)
    facts = found.provenance
    commit = f", commit {facts.commit[:7]}" if facts.commit else ""
    earlier = ", earlier kernels" if recording.stale(found) else ""
    return f"{name}: {facts.gpu}, {facts.date[:10]}{commit}{earlier}"


def shipped(name: str) -> Recording:
    """Return a recording that ships with the package."""
    return next(each for each in choice.shipped() if each.id == name)


def link_facts(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Link every recorded number to its recording, once all pages are known."""
    places = app.env.domains.standard_domain.anonlabels
    for node in list(doctree.findall(fact_text)):
        if "recording" not in node:
            continue
        label = f"recording-{node['recording']}"
        if label not in places:
            LOGGER.warning("no page lists recording %s", node["recording"], location=node)
            continue
        target, anchor = places[label]
        uri = app.builder.get_relative_uri(page, target)
        link = nodes.reference("", "", internal=True, refuri=f"{uri}#{anchor}")
        node.parent.replace(node, link)
        link += node


def visit_fact(translator: HTML5Translator, node: fact_text) -> None:
    """Write the number with its tooltip."""
    translator.body.append(translator.starttag(node, "span", "", title=node["title"]))


def depart_fact(translator: HTML5Translator, node: fact_text) -> None:
    """Close it."""
    del node
    translator.body.append("</span>")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the role, its node and its links."""
    app.add_node(fact_text, html=(visit_fact, depart_fact))
    app.add_role("fact", FactRole())
    app.connect("doctree-resolved", link_facts)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
