"""Citable places: claims with an id that stays, the list of all ids, and how to cite one.

    :::{claim} c-partial-buffer
    Text of the claim.
    :::

sets a claim apart, with its id and a permalink. `{ref}` and `[](#c-partial-buffer)` reach it.
`{citable}` lists all such places; `{citation}` and `{bibtex}` spell the recommended forms.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]  # myst-parser needs it anyway; it ships no types
from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

from rmsnorm_ref import __version__
from rmsnorm_ref.measure import choice
from rmsnorm_ref.review.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

CLAIM = re.compile(r"c(-[a-z0-9]+)+")
LISTING = "reference/ids"  # the page of the list
# What else may be cited, by label: decisions and rules of the oracle. Equations are found apart.
HEADED = {"Decisions": r"d\d+", "Rules of the oracle": r"o\d+"}


class ClaimDirective(SphinxDirective):
    """Set a citable statement apart: an id, a permalink, and the text."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return a container with the id as its target and its text inside."""
        name = self.arguments[0]
        domain = self.env.domains.standard_domain
        if not CLAIM.fullmatch(name):
            raise self.error(f"a claim's id looks like c-some-words, not {name!r}")
        if name in domain.anonlabels:
            raise self.error(f"claim {name} is already made on page {domain.anonlabels[name][0]}")
        box = nodes.container(classes=["claim"], ids=[name], names=[])
        self.set_source_info(box)
        head = nodes.paragraph("", "", classes=["claim-id"])
        head += nodes.reference("", name, refid=name, internal=True, reftitle="Link to this claim")
        box += head
        self.state.nested_parse(self.content, self.content_offset, box)
        domain.labels[name] = (self.env.docname, name, name)
        domain.anonlabels[name] = (self.env.docname, name)
        return [box]


class citable(nodes.General, nodes.Element):  # noqa: N801  # docutils spells nodes in lower case
    """Stands for the list until all pages are read."""


class CitableDirective(SphinxDirective):
    """List every decision, rule, equation and claim of the site."""

    def run(self) -> list[nodes.Node]:
        """Leave a node that `FillList` replaces."""
        return [citable()]


class FillList(SphinxPostTransform):
    """Replace `citable` by the list; before references are resolved, so that copies keep theirs."""

    default_priority = 4

    def run(self, **_: Any) -> None:
        """Write one list for each kind of place that the site has."""
        for node in list(self.document.findall(citable)):
            lists = [*self._headed(), *self._review(), *self._equations(), *self._claims()]
            node.replace_self(lists)

    def _headed(self) -> Iterator[nodes.Node]:
        labels = self.env.domains.standard_domain.labels
        for title, pattern in HEADED.items():
            names = sorted(
                (name for name in labels if re.fullmatch(pattern, name)),
                key=lambda name: int(name[1:]),
            )
            if names:
                yield nodes.rubric("", title)
                texts = [nodes.paragraph("", labels[name][2]) for name in names]
                yield listing((self._link(name), [p]) for name, p in zip(names, texts, strict=True))

    def _review(self) -> Iterator[nodes.Node]:
        names = [name for name in RULES if name in self.env.domains.standard_domain.labels]
        if names:
            yield nodes.rubric("", "Rules of a review")
            texts = [nodes.paragraph("", RULES[name].asks) for name in names]
            yield listing((self._link(name), [p]) for name, p in zip(names, texts, strict=True))

    def _equations(self) -> Iterator[nodes.Node]:
        numbers = self.env.domains.math_domain.equations
        names = sorted(name for name in numbers if name.startswith("eq-"))
        if names:
            yield nodes.rubric("", "Equations")
            yield listing(
                (nodes.literal("", name), [self._equation(name, *numbers[name])]) for name in names
            )

    def _claims(self) -> Iterator[nodes.Node]:
        for page in reading_order(self.env):
            boxes = [
                box
                for box in self.env.get_doctree(page).findall(nodes.container)
                if "claim" in box["classes"]
            ]
            if boxes:
                yield nodes.rubric("", f"Claims: {self.env.titles[page].astext()}")
                yield listing(
                    (self._link(box["ids"][0]), [copied(child) for child in box.children[1:]])
                    for box in boxes
                )

    def _link(self, name: str) -> nodes.Node:
        link = addnodes.pending_xref(
            "", refdomain="std", reftype="ref", reftarget=name, refexplicit=True,
            refwarn=True, refdoc=self.env.docname,
        )  # fmt: skip
        link += nodes.inline("", name)
        return link

    def _equation(self, name: str, page: str, number: int) -> nodes.Node:
        del number
        link = addnodes.pending_xref(
            "", refdomain="math", reftype="eq", reftarget=name, refwarn=True,
            refdoc=self.env.docname,
        )  # fmt: skip
        link += nodes.inline("", name)
        title = self.env.titles[page].astext()
        return nodes.paragraph("", "", nodes.Text("Equation "), link, nodes.Text(f", {title}"))


def listing(found: Iterable[tuple[nodes.Node, list[Any]]]) -> nodes.definition_list:
    """Return a list of ids, each with what stands there."""
    items = nodes.definition_list(classes=["citable"])
    for name, body in found:
        items += nodes.definition_list_item(
            "", nodes.term("", "", name), nodes.definition("", *body)
        )
    return items


def copied(node: nodes.Node) -> nodes.Node:
    """Copy part of another page: no ids, and references that start from this page."""
    copy = node.deepcopy()
    for each in copy.findall(nodes.Element):
        each["ids"] = []
        each.attributes.pop("refdoc", None)
    return copy


def reading_order(env: BuildEnvironment) -> list[str]:
    """Return all pages in the order of the table of contents."""
    found: list[str] = []

    def walk(page: str) -> None:
        if page not in found:
            found.append(page)
            for child in env.toctree_includes.get(page, []):
                walk(child)

    walk(env.config.root_doc)
    return found + sorted(set(env.all_docs) - set(found))


class CitationDirective(SphinxDirective):
    """Spell the recommended citation of one place: `{citation} d3 design/d3 [section]`.

    With a section of the recordings, the one that speaks for it is cited too.
    """

    required_arguments = 2
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the line as a block that can be copied."""
        name, page, *sections = self.arguments
        address = f"{self.config.citation_base}{page}.html#{name}"
        parts = [f"rmsnorm_ref {__version__}", name, address]
        parts += [f"recording {choice.picked(section=each)[1].id}" for each in sections]
        return [_block(", ".join(parts), "text")]


class BibtexDirective(SphinxDirective):
    """Spell CITATION.cff as BibTeX, so that the two cannot differ."""

    def run(self) -> list[nodes.Node]:
        """Return the entry as a block that can be copied."""
        path = Path(self.env.srcdir).parent / "CITATION.cff"
        self.env.note_dependency(str(path))
        cff = yaml.safe_load(path.read_text(encoding="utf-8"))
        released = str(cff["date-released"])
        fields = {
            "title": "{" + cff["title"] + "}",
            "author": "{" + " and ".join(each["name"] for each in cff["authors"]) + "}",
            "version": cff["version"],
            "year": released[:4],
            "month": released[5:7].lstrip("0"),
            "url": self.config.citation_base,
        }
        lines = [f"  {name} = {{{value}}}" for name, value in fields.items()]
        return [_block("@software{rmsnorm_ref,\n" + ",\n".join(lines) + "\n}", "bibtex")]


def _block(text: str, language: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language=language, classes=["citation"])


def rewrite_list(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Write the list again at every build: any page may have a new claim."""
    del app
    return [LISTING] if LISTING in env.all_docs else []


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_config_value("citation_base", "", "html", frozenset({str}))
    app.add_node(citable)
    app.add_directive("claim", ClaimDirective)
    app.add_directive("citable", CitableDirective)
    app.add_directive("citation", CitationDirective)
    app.add_directive("bibtex", BibtexDirective)
    app.add_post_transform(FillList)
    app.connect("env-updated", rewrite_list)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
