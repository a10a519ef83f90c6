"""The directive `race`: eager, eager with fp32 inside and fused, on one bus and one time axis.

    ```{race}
    ```

Its node holds what a reader without JavaScript sees: a figure, the bytes as tables, and what of it
is modelled and what measured. In HTML the data is inlined beside it as JSON, so that the page also
works from a disk; race.js takes over from there, and is loaded by pages that have a race only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import race_data
import race_figure
from blocks import recording_link
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from rmsnorm_ref import steps, tiling, traffic
from rmsnorm_ref.measure import recording

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

CONTROLS = """
<div class="race-live" role="group" aria-label="Race of {n} implementations" hidden>
<div class="race-row">
<fieldset><legend>Pass</legend>
<label><input type="radio" name="race{i}-pass" value="forward" checked>forward</label>
<label><input type="radio" name="race{i}-pass" value="backward">backward</label></fieldset>
<fieldset><legend>Time</legend>
<label><input type="radio" name="race{i}-time" value="measured" checked>measured</label>
<label><input type="radio" name="race{i}-time" value="bytes">by bytes alone</label></fieldset>
<label>Cell <select class="race-cell"></select></label>
</div>
<div class="race-row race-player">
<button type="button" class="race-play">Play</button>
<button type="button" class="race-previous" aria-label="Previous kernel">◂ step</button>
<button type="button" class="race-next" aria-label="Next kernel">step ▸</button>
<label class="race-scrub">Time <input type="range" min="0" max="200" value="0"></label>
<label>Speed <select class="race-speed"><option value="0.25">¼ &times;</option>
<option value="0.5">½ &times;</option><option value="1" selected>1 &times;</option>
<option value="2">2 &times;</option><option value="4">4 &times;</option></select></label>
</div>
<p class="race-clock"></p>
{lanes}
<p>From one line of a bar to the next as many bytes move as x holds, M rows of N elements.</p>
<p class="race-status" role="status" aria-live="polite"></p>
</div>
"""
LANE = """
<div class="race-lane">
<p class="race-head"><strong>{label}</strong> <span>{about}</span></p>
<p class="race-count"></p>
<p class="race-now"></p>
<div class="race-bus" aria-hidden="true"><span>HBM</span><div class="race-rails">
<div class="race-rail race-read"></div><div class="race-rail race-write"></div></div>
<span>SMs</span></div>
<div class="race-track" aria-hidden="true"></div>
</div>
"""


class race(nodes.General, nodes.Element):  # noqa: N801  # docutils names a node by its class
    """Hold what stands without JavaScript; `payload` and `serial` are for the page's script."""


class details(nodes.General, nodes.Element):  # noqa: N801  # the same
    """Hold what a reader may open, under the line `summary`."""


class RaceDirective(SphinxDirective):
    """Place the race. It has no options: its cells are those that are recorded."""

    def run(self) -> list[nodes.Node]:
        """Return the node with its figure, its statement and its tables."""
        found = race_data.races()
        if not found:
            return [self.state.document.reporter.error("race: no cell has all lanes recorded")]
        for module in (traffic, steps, tiling, race_data, race_figure):
            self.env.note_dependency(str(module.__file__))
        for file in Path(str(recording.__file__)).parent.glob("recordings/*.json"):
            self.env.note_dependency(str(file))
        first = race_data.start(found)
        shown = [one for one in found if one.cell == first]
        payload = race_data.payload(found)
        box = race("", payload=payload, serial=self.env.new_serialno("race"))
        self.set_source_info(box)
        still = nodes.container(classes=["race-still"])
        for one in shown:
            figure = nodes.figure("", nodes.raw("", race_figure.svg(one), format="html"))
            figure += nodes.caption("", race_figure.sentence(one))
            still += [figure, race_figure.summary(one)]
        box += still
        box += _legend()
        box += self._statement(payload, shown[0])
        inner = details("", summary="The bytes, kernel by kernel")
        tables = map(race_figure.steps, shown)
        inner += nodes.container("", *tables, classes=["race-steps"])
        box += inner
        return [box]

    def _statement(self, payload: dict[str, Any], shown: race_data.Race) -> nodes.container:
        """Say what is modelled and what is measured; race.js shows what fits the choices."""
        ids = payload["recordings"]
        profile = shown.lanes[0].profile
        text = nodes.container(classes=["race-statement"])
        text += _paragraph(
            "Modelled: ",
            "which kernels run, in which order, and the bytes of every tensor, scratch included, "
            "as ",
            nodes.literal("", "traffic.py"),
            " counts them. A kernel's bytes are drawn as moving evenly while it lasts.",
        )
        for i, each in enumerate(ids):
            text += _paragraph(
                "Measured: ",
                "the time of each lane, kernels alone, a median. Recording: ",
                recording_link(each, self.env.docname),
                ".",
                classes=[f"race-if-recording-{i}", *_off(each != shown.recording)],
            )
            text += _paragraph(
                "Measured: ",
                "how an eager lane's time is shared among its kernels, by a profile of the chain. "
                "The fused lane shares its time by bytes. Recording: ",
                recording_link(each, self.env.docname),
                ".",
                classes=[f"race-if-profile-{i}", *_off(each != profile)],
            )
        text += _paragraph(
            "Modelled: ",
            "how a lane's time is shared among its kernels, by their bytes. No profile of this "
            "cell is recorded.",
            classes=["race-if-profile--1", *_off(profile is not None)],
        )
        text += _paragraph(
            "Modelled: ",
            "time, too. Each lane moves its bytes at the bandwidth of the ceiling, the fastest "
            "kernel that does nothing but move what the operation owes. Measured times are longer "
            "where a kernel uses the bus less well than that, or is too small to fill it.",
            classes=["race-if-bytes", "race-off"],
        )
        return text


def _off(off: bool) -> list[str]:
    return ["race-off"] if off else []


def _paragraph(head: str, *parts: str | nodes.Node, classes: list[str] | None = None) -> nodes.Node:
    found = nodes.paragraph("", "", nodes.strong("", head.strip()), nodes.Text(" "))
    found["classes"] = classes or []
    for part in parts:
        found += nodes.Text(part) if isinstance(part, str) else part
    return found


def _legend() -> nodes.Node:
    """Say what the two colours and a column are."""
    found = nodes.paragraph("", "", classes=["race-legend"])
    found += nodes.inline("", "reads", classes=["race-key", "race-key-read"])
    found += nodes.Text(" come from HBM, the GPU's memory, to its processors, the SMs; ")
    found += nodes.inline("", "writes", classes=["race-key", "race-key-write"])
    found += nodes.Text(
        " go back. Lanes share one time axis. A bar is a kernel: its length is time, its heights "
        "the shares of bytes read and written."
    )
    return found


def visit_race(translator: HTML5Translator, node: race) -> None:
    """Write the controls, hidden until race.js shows them, and the data."""
    lanes = "".join(LANE.format(**lane._asdict()) for lane in race_data.LANES)
    data = json.dumps(node["payload"], ensure_ascii=False, separators=(",", ":"))
    data = data.replace("</", "<\\/")  # nothing inside may end the script element
    translator.body.append(translator.starttag(node, "div", CLASS="race"))
    translator.body.append(
        CONTROLS.format(n=len(race_data.LANES), i=node["serial"], lanes=lanes)
        + f'<script type="application/json" class="race-data">{data}</script>'
    )


def depart_race(translator: HTML5Translator, node: race) -> None:
    """Close the box."""
    del node
    translator.body.append("</div>\n")


def visit_details(translator: HTML5Translator, node: details) -> None:
    """Open what can be opened."""
    translator.body.append(f"<details><summary>{node['summary']}</summary>\n")


def depart_details(translator: HTML5Translator, node: details) -> None:
    """Close it."""
    del node
    translator.body.append("</details>\n")


def pass_by(translator: nodes.NodeVisitor, node: nodes.Node) -> None:
    """Write nothing of its own: other formats have what is inside."""
    del translator, node


def add_files(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Load the script and the style on pages with a race."""
    del page, template, context
    if doctree is not None and next(iter(doctree.findall(race)), None) is not None:
        app.add_js_file("race.js", loading_method="defer")
        app.add_css_file("race.css")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive and its nodes."""
    app.add_directive("race", RaceDirective)
    plain = (pass_by, pass_by)
    app.add_node(race, html=(visit_race, depart_race), text=plain, latex=plain)
    app.add_node(details, html=(visit_details, depart_details), text=plain, latex=plain)
    app.connect("html-page-context", add_files)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
