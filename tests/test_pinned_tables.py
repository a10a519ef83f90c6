"""What pages say of each pinned choice: its times once a recording has them, a sentence before."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fabricated import fabricated, slowed
from site_build import sphinx

from rmsnorm_ref.measure import choice, figures
from rmsnorm_ref.measure.pinned import CHOICES

if TYPE_CHECKING:
    from warm import Done

    from rmsnorm_ref.measure.pinned import Choice

pytest.importorskip("sphinx_gallery", reason="the site needs the docs extra")
ROOT = Path(__file__).parents[1]
BY_KNOB = {choice.knob: choice for choice in CHOICES}
CONF = f"""
import dataclasses, sys
sys.path += [{str(ROOT / "docs/_ext")!r}, {str(ROOT / "tests")!r}]
from fabricated import fabricated
from rmsnorm_ref.measure import choice
made_up = fabricated()
kept = tuple(row for row in made_up.rows if row.knob not in {{"rstd", "walk"}})
choice.shipped = lambda: (dataclasses.replace(made_up, rows=kept),)
extensions = ["pinned_tables", "myst_parser"]
html_theme = "basic"
"""


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the extension, and let it see the made-up recording alone."""
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    import pinned_tables  # type: ignore[import-not-found]  # found by the line above

    monkeypatch.setattr(choice, "shipped", lambda: (fabricated(),))
    return pinned_tables


def page(folder: Path, text: str) -> Done:
    """Build one page, of the made-up recording without two of the choices."""
    (folder / "conf.py").write_text(CONF)
    (folder / "index.md").write_text(f"# One\n\n{text}\n\n(recording-fabricated)=\n## Made up\n")
    return sphinx(folder, folder / "site", ROOT)


@pytest.mark.parametrize("chosen", CHOICES, ids=list(BY_KNOB))
def test_a_table_has_every_alternative(tables: Any, chosen: Choice) -> None:
    """A line per cell, a time per alternative, and the one that the package takes there."""
    table = tables.single(chosen)
    values = [f"{each.value}, µs" for each in chosen.alternatives]
    assert list(table.titles[1:-3]) == values
    assert {len(row) for row in table.rows} == {len(table.titles)}
    shapes = [shape for _ in chosen.passes for shape in chosen.shapes]
    assert [row[-3] for row in table.rows] == [
        str(chosen.taken(*shape) or "as asked") for shape in shapes
    ]
    assert table.sources == ("fabricated",)


def test_a_ratio_is_of_the_best_other_alternative(tables: Any) -> None:
    """Above 1 the choice was right, below 1 it costs: by the fastest of all others."""
    chosen = BY_KNOB["eviction"]
    (row, *_) = [row for row in fabricated().rows if row.knob == "eviction"]
    taken = chosen.taken(row.M, row.N)
    others = [each.value for each in chosen.alternatives if each.value != taken]
    for factors, ratio in (((1.5, 1.25), 1.25), ((0.5, 3), 0.5)):
        rows = {taken: row}
        rows |= {value: slowed(row, factor) for value, factor in zip(others, factors, strict=True)}
        assert tables.ratio(chosen, rows) == pytest.approx(ratio)
    assert tables.ratio(chosen, {taken: row}) is None


def test_the_summary_has_a_line_per_choice(tables: Any) -> None:
    """All choices but the one that a call decides are summed up."""
    found = [row[0].partition(":")[0] for row in tables.summary(CHOICES).rows]
    assert found == [knob for knob in BY_KNOB if knob != "rstd"]


def test_every_choice_is_shown_by_a_decision() -> None:
    """Each choice has its table on one page of D1 to D4, and D4 sums all of them up."""
    shown: list[str] = []
    for path in sorted((ROOT / "docs/design").glob("d?.md")):
        for words in re.findall(r"^```\{choices\} (.+)$", path.read_text(), re.MULTILINE):
            shown += words.split()
    assert sorted(shown) == sorted([*BY_KNOB, "all"])


def test_what_is_not_recorded_is_one_sentence(tables: Any, tmp_path: Path) -> None:
    """A recorded choice is a table that links to it; the others are named with the command."""
    result = page(tmp_path, "```{choices} rstd eviction walk\n```\n\n```{choices} all\n```")
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "site/index.html").read_text()
    assert text.count("<table") == 2
    assert text.count('href="#recording-fabricated"') >= 2
    sentences = re.findall(r'<p class="unrecorded">(.*?)</p>', text, re.DOTALL)
    plain = {" ".join(re.sub(r"<[^>]+>", "", each).split()) for each in sentences}
    assert len(sentences) == 2
    assert plain == {
        f"What rstd and walk are worth is in no recording yet; {tables.COMMAND} measures it."
    }


def test_an_unknown_choice_stops_the_build(tmp_path: Path) -> None:
    """A choice that does not exist is named as an error of its page."""
    result = page(tmp_path, "```{choices} no_choice\n```")
    assert result.returncode != 0
    assert "no_choice" in result.stderr


def test_other_figures_do_not_mistake_choices_for_knobs() -> None:
    """The drawing of the two numeric knobs is the same with and without the choices."""
    whole = fabricated()
    knobs = {None, "num_stages", "programs_per_sm"}
    rows = tuple(row for row in whole.rows if row.knob in knobs)
    assert len(rows) < len(whole.rows)
    with_choices = figures.ablation(whole)
    assert with_choices.alt == figures.ablation(dataclasses.replace(whole, rows=rows)).alt
