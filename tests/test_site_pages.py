"""What every built page must have, read from its HTML: no browser is needed."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest
import torch
from site_build import ROOT, Tags, build, pages_of

import rmsnorm_ref
from rmsnorm_ref import tiling, traffic

sys.path.append(str(ROOT / "docs/_ext"))
import accessible  # type: ignore[import-not-found]  # found by the line above, like the next four
import breaks  # type: ignore[import-not-found]
import kernels  # type: ignore[import-not-found]
import mathml  # type: ignore[import-not-found]
import published  # type: ignore[import-not-found]
import yaml  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from pathlib import Path

KERNEL_FILES = ("forward", "backward", "few_rows", "wide")


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Tags]:
    """Read every page once, by its path."""
    return {path.relative_to(site).as_posix(): Tags(path) for path in pages_of(site)}


def test_every_image_has_alt_text(pages: dict[str, Tags]) -> None:
    """Every figure of the site says in words what it shows, and there is at least one."""
    figures = []
    for page in pages.values():
        for tag, attributes in page.tags:
            # The gallery's index shows thumbnails beside their titles: they are decoration there.
            if tag == "img" and not str(attributes.get("src")).endswith("_thumb.png"):
                figures.append(attributes.get("alt") or "")
    scraped = [alt for alt in figures if alt.startswith("plot ")]
    assert figures
    assert all(alt.strip() for alt in figures), figures
    assert not scraped, "a figure with no title: its alt text is its script's name"


def test_every_figure_of_the_gallery_says_its_source(pages: dict[str, Tags]) -> None:
    """The alt text says, as the figure's foot does, on what and when, live or from a recording."""
    when = r"\d{4}-\d\d-\d\d, (commit|no commit) .*(recorded(, earlier kernels)?|measured now)\.$"
    for name, page in pages.items():
        if name.startswith("auto_examples/plot_"):
            figures = [alt for alt in page.values("img", "alt") if alt]
            assert figures, name
            for alt in figures:
                assert re.search(f"{when}|Counted by ", alt), f"{name}: {alt}"


def test_every_page_has_a_description_of_its_own(pages: dict[str, Tags]) -> None:
    """Every page says in one description, unlike any other, what is on it."""
    seen: dict[str, str] = {}
    for name, page in pages.items():
        found = [
            str(attributes["content"])
            for tag, attributes in page.tags
            if tag == "meta" and attributes.get("name") == "description"
        ]
        assert len(found) == 1, f"{name}: {found}"
        assert 20 <= len(found[0]) <= 210, f"{name}: {found[0]}"
        assert "Go to the end" not in found[0], f"{name}: the gallery's note is no description"
        assert found[0] not in seen, f"{name} and {seen[found[0]]} have one description"
        seen[found[0]] = name


def test_every_page_of_prose_states_its_description() -> None:
    """A description of a page of prose is written for it, and not cut from its text."""
    for path in (ROOT / "docs").rglob("*.md"):
        if "auto_examples" not in path.parts:
            front = path.read_text(encoding="utf-8").partition("\n---\n")[0]
            assert re.search(r"^    description: \S", front, re.MULTILINE), path


def test_every_page_has_a_card_that_exists(site: Path, pages: dict[str, Tags]) -> None:
    """The social card that a page names was drawn, and is a file of this site."""
    for name, page in pages.items():
        cards = [a["content"] for _, a in page.tags if a.get("property") == "og:image"]
        if name.startswith(("genindex", "py-modindex", "search")):
            continue
        assert len(cards) == 1, name
        assert (site / str(cards[0])).is_file(), name


def test_pages_load_nothing_from_elsewhere(site: Path, pages: dict[str, Tags]) -> None:
    """No page loads a script, a style, a font or an image from another host."""
    loading = {"script": "src", "img": "src", "link": "href", "iframe": "src"}
    for name, page in pages.items():
        for tag, attribute in loading.items():
            for address in page.values(tag, attribute):
                assert "//" not in address, f"{name}: {tag} {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style


def test_every_link_between_pages_leads_somewhere(site: Path, pages: dict[str, Tags]) -> None:
    """A link to another page of the site finds the page, and the place on it that it names."""
    n_links = 0
    for name, page in pages.items():
        for address in page.values("a", "href"):
            parts = urlsplit(address)
            if parts.scheme or not address:
                continue
            root = site if parts.path.startswith("/") else (site / name).parent
            target = (root / unquote(parts.path).lstrip("/")) if parts.path else site / name
            if target.is_dir():
                target /= "index.html"
            assert target.is_file(), f"{name}: {address}"
            n_links += 1
            if parts.fragment and target.suffix == ".html":
                found = pages[target.resolve().relative_to(site.resolve()).as_posix()].ids
                assert unquote(parts.fragment) in found, f"{name}: {address}"
    assert n_links > 100


def test_no_id_is_on_a_page_twice(pages: dict[str, Tags]) -> None:
    """An id names one place of a page, so that a link to it leads to that place."""
    for name, page in pages.items():
        found = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
        assert not [id_ for id_, n in found.items() if n > 1], name


def test_every_page_has_an_icon_that_exists(site: Path, pages: dict[str, Tags]) -> None:
    """A page names its icon, so that a browser does not ask for one that is not there."""
    for name, page in pages.items():
        icons = [
            str(a["href"]) for tag, a in page.tags if tag == "link" and "icon" in str(a["rel"])
        ]
        root = site if icons[0].startswith("/") else (site / name).parent
        assert (root / icons[0].lstrip("/")).is_file(), name


def test_lines_break_between_words_and_not_inside() -> None:
    """Names may break behind dots and brackets; options and shapes may not break at all."""
    dt = '<dt class="sig py"><span class="sig-prename descclassname"><span class="pre">a.b.</span>'
    assert "a.<wbr>b.<wbr></span>" in breaks.breaks(f"{dt}</span></dt>")
    bracket = '<span class="sig-paren">(</span>'
    assert f"{bracket}<wbr>" in breaks.breaks(f'<dt class="sig py">{bracket}</dt>')
    assert f"{bracket}<wbr>" not in breaks.breaks(bracket)
    word = '<span class="pre">{}</span>'
    assert "whole" in breaks.breaks(word.format("--peers"))
    assert "whole" in breaks.breaks(word.format("f(&quot;one-two-three-four&quot;)"))
    assert breaks.breaks(word.format("x_hat")) == word.format("x_hat")
    long = "test_a.py::test_of_a_name_that_is_long"
    assert breaks.breaks(word.format(long)).replace("<wbr>", "") == word.format(long)
    assert "of_<wbr>a_<wbr>name" in breaks.breaks(word.format(long))
    shape = "16 \N{MULTIPLICATION SIGN}\n64"
    assert breaks.breaks(f"<p>{shape}</p>") == "<p>16\u00a0\N{MULTIPLICATION SIGN}\u00a064</p>"
    for literal in (f"<pre>{shape}</pre>", f"<script>{shape}</script>", f'<i title="{shape}">'):
        assert breaks.breaks(literal) == literal


def test_a_function_stands_apart_from_a_factor() -> None:
    """There is a space before the name of a function where a factor precedes it, not a sign."""
    assert "<mspace" in mathml.mathml(r"\tfrac{1}{2} \operatorname{ulp}(x)")
    assert "<mspace" in mathml.mathml(r"2 \log x", as_block=True)
    for formula in (r"\operatorname{ulp}(x)", r"1 + \max(x)", "ab(x)"):
        assert "<mspace" not in mathml.mathml(formula)


def test_repairs_of_the_theme_are_needed(site: Path) -> None:
    """Each repair that docs/_ext/accessible.py makes is found in the pages, and none is undone."""
    text = "".join(path.read_text(encoding="utf-8") for path in pages_of(site))
    for old, new in accessible.REPAIRS.items():
        assert new in text, f"no page has {old} any more: drop the repair"


def test_every_figure_is_in_a_box_that_scrolls(site: Path) -> None:
    """Every figure is in a box that the keyboard reaches, so that its words need not shrink."""
    text = "".join(path.read_text(encoding="utf-8") for path in pages_of(site))
    images = re.findall(r"(?:<div [^>]*>)?<img [^>]*_images/[^>]*>", text)
    figures = [tag for tag in images if "_thumb." not in tag]
    boxless = [tag for tag in figures if not tag.startswith(accessible.FIGURE)]
    assert figures
    assert not boxless


def test_no_page_shows_a_run_time(pages: dict[str, Tags]) -> None:
    """No page tells how long its script took, which says nothing about a kernel's time."""
    for name, page in pages.items():
        assert "running time" not in " ".join(page.texts), name


def test_footer_names_version_and_commit(pages: dict[str, Tags]) -> None:
    """Every page says at its foot which version and commit it was built from."""
    wanted = f"Version {rmsnorm_ref.__version__}, commit 0123456"
    for name, page in pages.items():
        assert wanted in " ".join(page.texts), name


def test_published_ids_are_all_there(site: Path) -> None:
    """No id that was published is missing, on the page where it was."""
    missing = set(published.published()) - set(published.built(site))
    assert published.published()
    assert not missing, "an id never goes: it may have been cited"


def test_ids_of_the_site_are_published(site: Path) -> None:
    """Every id that can be cited is in the list that keeps it from going."""
    new = set(published.built(site)) - set(published.published())
    assert not new, "add them with `python docs/_ext/published.py site`"


def test_list_of_ids_is_complete(pages: dict[str, Tags]) -> None:
    """The page of ids links to every decision, rule, claim and equation of the site."""
    links = {link.rpartition("#")[2] for link in pages["reference/ids.html"].values("a", "href")}
    for place in published.published():
        anchor = place.rpartition("#")[2]
        assert anchor in links or anchor.startswith("recording-"), anchor


def test_recorded_numbers_link_to_their_recording(pages: dict[str, Tags]) -> None:
    """A number read from a recording says in its tooltip which, and is a link to it."""
    recorded = [
        str(a.get("title"))
        for _, a in pages["index.html"].tags
        if "recorded" in str(a.get("class")).split()
    ]
    assert recorded
    links = pages["index.html"].values("a", "href")
    for title in recorded:
        name = re.search(r"from (\S+): ", title)
        assert name is not None, title
        assert f"reference/recordings.html#recording-{name[1]}" in links


def test_every_kernel_is_on_a_page(pages: dict[str, Tags]) -> None:
    """Each kernel's source is in the reference, and no parameter is explained that none has."""
    shown = "".join(
        "".join(page.texts) for name, page in pages.items() if "reference/kernels/" in name
    )
    used = set()
    for file in KERNEL_FILES:
        source = (ROOT / "rmsnorm_ref" / f"{file}.py").read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert f"def {node.name}(" in shown
                assert f"Arguments of {node.name}" in " ".join(shown.split())
                used |= {argument.name for argument in kernels.arguments(source, node.name)}
    assert used == set(kernels.MEANINGS)


@pytest.mark.parametrize("path", sorted(kernels.SHAPES))
def test_byte_formulas_are_those_of_the_model(path: str) -> None:
    """The formulas in a path's table, evaluated at another shape, give the model's bytes."""
    M, N = kernels.SHAPES[path]
    formulas = [kernels.size(one, other, M, N) for one, other in kernels.steps(path)]
    M, N = 2 * M if path != "few_rows_backward" else M // 2, N + 8
    count = traffic.forward if path.endswith("forward") else traffic.backward
    w_dtype = torch.bfloat16 if path == "few_rows_backward" else torch.float32
    fresh = count(M, N, torch.bfloat16, w_dtype).steps
    assert path in {step.kernel for step in fresh}
    names = {"M": M, "N": N, "e": 2, "e_w": w_dtype.itemsize}
    names["MEMBERS"] = tiling.team(N, traffic.GPU).members
    for step, formula in zip(fresh, formulas, strict=True):
        factors = [names.get(factor) or int(factor) for factor in formula.split("·")]
        n_bytes = 1
        for factor in factors:
            n_bytes *= factor
        assert n_bytes == step.n_bytes, (step, formula)


def test_paths_table_covers_every_width() -> None:
    """The table of paths has every width once, from 1 to the largest."""
    spans = [tuple(map(int, row[0].split(" to "))) for row in kernels.ranges()]
    assert spans[0][0] == 1
    assert spans[-1][1] == tiling.LARGEST_N
    assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(spans))


def test_citation_file_and_page_agree(pages: dict[str, Tags]) -> None:
    """CITATION.cff has the package's version, and the BibTeX entry has CITATION.cff's fields."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == rmsnorm_ref.__version__
    assert citation["cff-version"] == "1.2.0"
    shown = "".join(pages["cite.html"].texts)
    for value in (citation["title"], citation["version"], citation["authors"][0]["name"]):
        assert f"{{{value}}}" in shown
    assert str(citation["date-released"])[:4] in shown


def test_hosted_pages_name_their_address_and_commit(small: Path) -> None:
    """On the host a page knows its address and commit; a citation takes that of the version."""
    (small / "docs/index.md").write_text(
        "# One\n\n```{citation} d3 design/d3\n```\n\n```{toctree}\nauto_examples/index\n```\n"
    )
    result = build(
        small,
        READTHEDOCS="True",
        READTHEDOCS_CANONICAL_URL="https://docs.example/en/latest/",
        READTHEDOCS_GIT_COMMIT_HASH="fedcba9876543210",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    page = (small / "site/index.html").read_text(encoding="utf-8")
    assert f"https://docs.example/en/v{rmsnorm_ref.__version__}/design/d3.html#d3" in page
    assert '<link rel="canonical" href="https://docs.example/en/latest/index.html"' in page
    assert 'content="https://docs.example/en/latest/_images/social_previews/' in page
    assert "commit fedcba9<" in page.replace("\n", "<")
    lost = (small / "site/404.html").read_text(encoding="utf-8")
    assert 'href="/en/latest/_static/' in lost
