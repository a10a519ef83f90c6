"""Directives that draw recorded results while the site builds: `results`, `drawing`, `tests`.

    :::{results} prediction
    :pass: forward
    :::

is a table of `tables.py` or `tables_other.py`, its caption linked to the recording behind it.

    :::{drawing} counters
    :pass: forward
    :::

is a figure of `rmsnorm_ref.measure.figures`, on the recording that speaks for its rows.

    :::{tests}
    sweep::test_sweep
    :::

lists tests by the property that each one states, and stops the build if one is gone. Loading this
extension also gives the `fact` role the functions of `findings.py`, `limits.py` and `proofs.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import evidence
import facts
import findings
import limits
import proofs
import tables
import tables_other
from accessible import FIGURE
from blocks import recording_link, table, text_or_code
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective
from tables import Table

from rmsnorm_ref.measure import choice, figures, recording
from rmsnorm_ref.measure.sweeps import KNOBS

if TYPE_CHECKING:
    from collections.abc import Callable

    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

TABLES = tables.TABLES | tables_other.TABLES
OPTIONS: dict[str, Callable[[str], Any]] = {
    "pass": directives.unchanged,
    "dtype": directives.unchanged,
    "section": directives.unchanged,
    "contender": directives.unchanged,
    "by": directives.unchanged,
    "least": directives.nonnegative_int,
    "optional": directives.flag,
}
# Which rows each figure needs, to find the recording that has most of them.
ROWS: dict[str, dict[str, Any]] = {
    "bandwidth_by_cell": {"kind": "kernel", "section": "seed"},
    "time_by_cell": {"kind": "kernel", "section": "seed"},
    "prediction": {"kind": "kernel", "section": "seed"},
    "size_sweep": {"kind": "kernel", "section": "sizes"},
    "width_sweep": {"kind": "kernel", "section": "widths"},
    "config_cost": {"kind": "config"},
    "ablation": {"kind": "ablation", "knob": set(KNOBS)},
    "error_by_cell": {"kind": "error"},
    "counters": {"kind": "counter"},
    "host_time": {"kind": "host"},
}
COLOURS = 48  # in the file of a figure: few are used, and it is a third of the size
DPI = 85  # of an image of the size it has on the page


class _Directive(SphinxDirective):
    """Share options, and turn what is missing into an error at the line that asks for it."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Callable[[str], Any]]] = OPTIONS

    def keywords(self) -> dict[str, Any]:
        """Return the options as keywords: `pass` is `pass_` in Python."""
        return {("pass_" if key == "pass" else key): v for key, v in self.options.items()}

    def run(self) -> list[nodes.Node]:
        """Build, or name the place of what cannot be built."""
        try:
            return self.build()
        except (LookupError, TypeError, ValueError) as error:
            what = " ".join([self.name, *self.arguments])
            raise self.error(f"{what}: {type(error).__name__}: {error}") from error

    def build(self) -> list[nodes.Node]:
        """Return the nodes."""
        raise NotImplementedError


class ResultsDirective(_Directive):
    """Draw one table of `TABLES`."""

    def build(self) -> list[nodes.Node]:
        """Return the table; nothing where it is optional and nobody recorded its rows."""
        keywords = self.keywords()
        optional = "optional" in keywords
        keywords.pop("optional", None)
        if self.arguments[0] == "faults":
            for path in proofs.TESTS.glob("mutants_*.txt"):
                self.env.note_dependency(str(path))
        try:
            found = TABLES[self.arguments[0]](**keywords)
        except LookupError:
            if optional:
                return []
            raise
        return [table_node(found, self.env.docname)]


def table_node(found: Table, docname: str) -> nodes.table:
    """Return a docutils table: a caption with links, a header row, a stub column."""
    caption = text_or_code(found.caption)
    for number, source in enumerate(found.sources):
        caption += [nodes.Text(", " if number else ". From "), *_recording(source, docname)]
    classes = ["results", "wordy" if len(found.titles) == 2 else "numeric"]
    return table(caption, found.titles, found.rows, classes=classes, stub=True)


def _recording(source: str, docname: str) -> list[nodes.Node]:
    """Return a link to a recording, and a word where it is of kernels that have changed since."""
    link = recording_link(source, docname, "fact", "recorded")
    if recording.stale(facts.shipped(source)):
        return [link, nodes.Text(" (earlier kernels)")]
    return [link]


# ---- Figures ----------------------------------------------------------------------------------


class drawing(nodes.General, nodes.Element):  # noqa: N801  # docutils finds visitors by class name
    """Hold a figure's file name and its alt text."""


class DrawingDirective(_Directive):
    """Draw one figure on the recording that speaks for its rows."""

    def build(self) -> list[nodes.Node]:
        """Write the image where Sphinx keeps images, and return a figure with a caption."""
        name, keywords = self.arguments[0], self.keywords()
        least = keywords.pop("least", 1)
        equal = ROWS[name] | keywords
        if "dtype" not in equal:
            equal["dtype"] = "bfloat16"
        rows, source = choice.picked(**equal)
        if len({(row.M, row.N) for row in rows}) < least:
            return []  # a curve of one point says less than nothing
        drawn = getattr(figures, name)(source, **keywords)
        file = "-".join([name, *map(str, keywords.values())]) + ".png"
        folder = Path(self.env.app.outdir) / "_images"
        folder.mkdir(parents=True, exist_ok=True)
        width, height = write(drawn.figure, folder / file)
        node = drawing(file=file, alt=drawn.alt, width=width, height=height)
        caption = nodes.caption("", "", nodes.Text("Drawn while this page was built, from "))
        caption += _recording(source.id, self.env.docname)
        caption += nodes.Text(".")
        return [nodes.figure("", node, caption, classes=["drawing"])]


def write(figure: Any, path: Path) -> tuple[int, int]:
    """Write a matplotlib figure as two small PNGs; return its size on the page, in CSS pixels."""
    from gallery_images import reduce_colours  # noqa: PLC0415  # only where a page has a figure
    from matplotlib import pyplot as plt  # noqa: PLC0415

    for file, scale in ((path.with_name(twice(path.name)), 2), (path, 1)):
        figure.savefig(file, dpi=scale * DPI)
        size = reduce_colours(file, COLOURS)
    plt.close(figure)
    return size


def twice(file: str) -> str:
    """Name the image of twice the size, for screens that have the pixels."""
    return file.removesuffix(".png") + "-2x.png"


def visit_drawing(translator: HTML5Translator, node: drawing) -> None:
    """Write the image's tag, its path relative to the page, in a box that scrolls."""
    path = f"{translator.builder.imgpath}/{node['file']}"
    translator.body.append(FIGURE)
    translator.body.append(
        translator.emptytag(
            node, "img", "\n", src=path, alt=node["alt"], width=str(node["width"]),
            height=str(node["height"]), loading="lazy",
            srcset=f"{path}, {translator.builder.imgpath}/{twice(node['file'])} 2x",
        )
    )  # fmt: skip
    translator.body.append("</div>")
    raise nodes.SkipNode


# ---- Tests ------------------------------------------------------------------------------------


class TestsDirective(_Directive):
    """List tests, each by the property that its docstring states."""

    required_arguments = 0
    has_content = True
    __test__ = False  # pytest collects classes by name

    def build(self) -> list[nodes.Node]:
        """Return a bullet list."""
        items = nodes.bullet_list(classes=["tests"])
        for line in filter(None, map(str.strip, self.content)):
            sentence, (module, _, function) = proofs.docstring(line), line.partition("::")
            self.env.note_dependency(str(proofs.TESTS / f"test_{module}.py"))
            words = nodes.paragraph("", "", *text_or_code(" ".join(sentence.split())))
            words += nodes.Text(" ")
            words += nodes.literal("", f"test_{module}.py::{function}")
            items += nodes.list_item("", words)
        return [items]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives, and give the `fact` role more functions."""
    evidence.NAMESPACE.update(findings.NAMES | limits.NAMES | proofs.NAMES)
    app.add_directive("results", ResultsDirective)
    app.add_directive("drawing", DrawingDirective)
    app.add_directive("tests", TestsDirective)
    app.add_node(drawing, html=(visit_drawing, None))
    app.add_css_file("results.css")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
