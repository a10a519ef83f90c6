"""Roles and directives for numbers and claims: `fact`, and `claim` with an id that stays.

    {fact}`share("ours", "forward", 4096, 8192)`

prints a number that is computed while the page is built, with a link to the recording behind it.

    :::{claim} c-partial-buffer
    Text of the claim.
    :::

sets a claim apart, with its id and a permalink. `{ref}` and `[](#c-partial-buffer)` reach it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from docutils import nodes
from evidence import NAMESPACE, Fact, recordings
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective, SphinxRole

from rmsnorm_ref.measure.recording import Recording, stale

if TYPE_CHECKING:
    from sphinx.application import Sphinx


class FactRole(SphinxRole):
    """Print what an expression over `evidence.NAMESPACE` gives."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Evaluate, and link to the recording if the number comes from one."""
        try:
            # The expression stands in this repository, like any other code of it.
            found = eval(self.text, {"__builtins__": {}}, NAMESPACE)  # noqa: S307
        except Exception as error:  # noqa: BLE001  # whatever it is, the build must name the place
            message = f"fact {self.text!r}: {type(error).__name__}: {error}"
            problem = self.inliner.reporter.error(message, line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, problem)], [problem]
        if isinstance(found, Fact):
            label = f"recording-{found.recording}"
            reference = addnodes.pending_xref(
                "", refdomain="std", reftype="ref", reftarget=label, refexplicit=True,
                refwarn=True, refdoc=self.env.docname,
            )  # fmt: skip
            reference += nodes.inline("", found.text, classes=["fact", "recorded"])
            return [reference], []
        if not isinstance(found, str | int | float):
            problem = self.inliner.reporter.error(
                f"fact {self.text!r} is a {type(found).__name__}, no number", line=self.lineno
            )
            return [self.inliner.problematic(self.rawtext, self.rawtext, problem)], [problem]
        return [nodes.inline("", str(found), classes=["fact", "computed"])], []


class ClaimDirective(SphinxDirective):
    """Set a citable statement apart: an id, a permalink, and the text."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return a container with the id as its target and its text inside."""
        name = self.arguments[0]
        box = nodes.container(classes=["claim"], ids=[name], names=[])
        self.set_source_info(box)
        head = nodes.paragraph("", "", classes=["claim-id"])
        head += nodes.reference("", name.upper(), refid=name, internal=True)
        box += head
        self.state.nested_parse(self.content, self.content_offset, box)
        domain = self.env.domains.standard_domain
        domain.labels[name] = (self.env.docname, name, name.upper())
        domain.anonlabels[name] = (self.env.docname, name)
        return [box]


class RecordingsDirective(SphinxDirective):
    """List the shipped recordings: a section each, with its provenance."""

    def run(self) -> list[nodes.Node]:
        """Return a section per recording, whose id the `fact` role links to."""
        found: list[nodes.Node] = []
        for each in recordings():
            label = f"recording-{each.id}"
            section = nodes.section(ids=[label])
            section += nodes.title("", each.id)
            section += _definitions(provenance(each))
            domain = self.env.domains.standard_domain
            domain.labels[label] = (self.env.docname, label, each.id)
            domain.anonlabels[label] = (self.env.docname, label)
            found.append(section)
        return found


def provenance(each: Recording) -> dict[str, str]:
    """Return what the page says of one recording, in words."""
    facts = each.provenance
    peers = [f"{name} {version}" for name, version in facts.peers.items() if version]
    clean = "" if facts.clean else " (files differed from it)"
    words = {
        "GPU": f"{facts.gpu}, {facts.sm_count} SMs, driver {facts.driver}",
        "Software": f"torch {facts.torch}, Triton {facts.triton}, CUDA {facts.cuda}",
        "Peers": ", ".join(peers) or "none",
        "Clocks": _clocks(each),
        "Date": f"{facts.date}, {facts.duration_s:.0f} s",
        "Commit": f"{facts.commit or 'unknown'}{clean}",
        "Kernels since": "changed" if stale(each) else "the same",
        "Command": facts.command,
        "Rows": ", ".join(f"{n} {kind}" for kind, n in _kinds(each).items()),
    }
    if facts.notes:
        words["Notes"] = "; ".join(facts.notes)
    return words


def _clocks(each: Recording) -> str:
    clocks = each.provenance.clocks
    if clocks is None:
        return "not read"
    sm, memory = clocks.sm_mhz, clocks.memory_mhz
    spread = f"from {sm.min:.0f} to {sm.max:.0f}"
    return f"SM {sm.median:.0f} MHz ({spread}), memory {memory.median:.0f} MHz"


def _kinds(each: Recording) -> dict[str, int]:
    return dict(Counter(row.kind for row in each.rows))


def _definitions(words: dict[str, str]) -> nodes.definition_list:
    items = nodes.definition_list(classes=["provenance"])
    for name, text in words.items():
        definition = nodes.definition("", nodes.paragraph("", text))
        items += nodes.definition_list_item("", nodes.term("", name), definition)
    return items


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the role and the directive."""
    app.add_role("fact", FactRole())
    app.add_directive("claim", ClaimDirective)
    app.add_directive("recordings", RecordingsDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
