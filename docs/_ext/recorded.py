"""What the site shows of the recordings: the list with its provenance, and the schema."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blocks import definitions, recording_link, table, text_or_code
from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

from rmsnorm_ref.measure import choice, recording, schema
from rmsnorm_ref.measure.recording import Recording, stale

if TYPE_CHECKING:
    from sphinx.application import Sphinx

MODULES = re.compile(r"\b(typing|collections\.abc)\.")  # in front of a type's name
FOLDER = Path(recording.__file__).parent / "recordings"


class RecordingsDirective(SphinxDirective):
    """List the shipped recordings, the newest first: a section each, with its provenance."""

    def run(self) -> list[nodes.Node]:
        """Return a section per recording, whose id the `fact` role links to."""
        found: list[nodes.Node] = []
        for each in choice.shipped():
            label = f"recording-{each.id}"
            section = nodes.section(ids=[label])
            section += nodes.title("", each.id)
            section += definitions(provenance(each), "provenance")
            section += self._contents(each)
            section += self._download(each)
            domain = self.env.domains.standard_domain
            domain.labels[label] = (self.env.docname, label, each.id)
            domain.anonlabels[label] = (self.env.docname, label)
            found.append(section)
        return found

    def _contents(self, each: Recording) -> nodes.table:
        rows = []
        for (section, kind), n_rows in Counter((r.section, r.kind) for r in each.rows).items():
            here = recording.select(each.rows, section=section, kind=kind)
            shapes = len({(row.M, row.N) for row in here})
            dtypes = ", ".join(sorted({row.dtype for row in here}))
            rows.append((section, kind, str(shapes), dtypes, str(n_rows)))
        head = ("Section", "Kind", "Shapes", "Dtypes", "Rows")
        return table(f"What {each.id} holds", head, rows)

    def _download(self, each: Recording) -> nodes.paragraph:
        path = FOLDER / f"{each.id}.json"
        source = f"/{os.path.relpath(path, self.env.srcdir)}"
        link = addnodes.download_reference(
            "", "", refdoc=self.env.docname, reftarget=source, reftype="download"
        )
        size = f"{path.stat().st_size / 1000:.0f} kB"
        link += nodes.Text(f"{each.id}.json")
        return nodes.paragraph("", "", link, nodes.Text(f" ({size})"))


def provenance(each: Recording) -> dict[str, str]:
    """Return what the page says of one recording, in words."""
    facts = each.provenance
    peers = [f"{name} {version}" for name, version in facts.peers.items() if version]
    clean = "" if facts.clean else " (files differed from it)"
    words = {
        "GPU": f"{facts.gpu}, {facts.sm_count} SMs, L2 {facts.l2_bytes / 2**20:.0f} MiB, "
        f"driver {facts.driver}",
        "Software": f"rmsnorm_ref {facts.rmsnorm_ref}, torch {facts.torch}, Triton {facts.triton}, "
        f"CUDA {facts.cuda}, Python {facts.python}",
        "Tuning": facts.tuning,
        "Peers": ", ".join(peers) or "none",
        "Clocks": _clocks(each),
        "Date": f"{facts.date}, {facts.duration_s:.0f} s",
        "Commit": f"{facts.commit or 'unknown'}{clean}",
        "Kernels since": "changed" if stale(each) else "the same",
        "Command": f"`{facts.command}`",
    }
    if facts.interrupted:
        words["Interrupted"] = "yes: what had been measured by then is kept"
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


class SchemaDirective(SphinxDirective):
    """Explain every kind of row and every field, from the schema itself."""

    def run(self) -> list[nodes.Node]:
        """Return two tables."""
        kinds = [(f"`{name}`", meaning) for name, meaning in schema.KINDS.items()]
        fields = [
            (f"`{place}`", f"`{MODULES.sub('', type_)}`: {meaning}")
            for place, type_, meaning in recording.schema_table()
        ]
        return [
            table("Kinds of rows", ("Kind", "What was measured"), kinds),
            table("Fields", ("Field", "Type and meaning"), fields, classes=("made", "fields")),
        ]


class RecordedDataDirective(SphinxDirective):
    """List the recordings made with one version of the package, for the changelog."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a bullet per recording."""
        items = nodes.bullet_list()
        for each in choice.shipped():
            if each.provenance.rmsnorm_ref != self.arguments[0]:
                continue
            sections = ", ".join(dict.fromkeys(row.section for row in each.rows))
            text = f": {each.provenance.gpu}, {each.provenance.date[:10]}; {sections}."
            link = recording_link(each.id, self.env.docname)
            items += nodes.list_item("", nodes.paragraph("", "", link, nodes.Text(text)))
        return [items] if items.children else [nodes.paragraph("", "", *text_or_code("None."))]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("recordings", RecordingsDirective)
    app.add_directive("recording-schema", SchemaDirective)
    app.add_directive("recorded-data", RecordedDataDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
