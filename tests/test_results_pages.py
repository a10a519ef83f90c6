"""The tables, figures and facts of the design, model and results pages."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fabricated import fabricated, slowed
from site_build import sphinx

from rmsnorm_ref.measure import choice

if TYPE_CHECKING:
    from types import ModuleType

    from warm import Done

    from rmsnorm_ref.measure.recording import Recording

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/design/*.md"), *ROOT.glob("docs/model/*.md")])
PAGES.append(ROOT / "docs/results.md")
pytest.importorskip("sphinx_gallery", reason="the site needs the docs extra")
DECISION = (
    "Context", "Decision", "Why", "Alternatives", "Evidence", "What did not help", "Cost",
    "When to decide otherwise", "How it is tested",
)  # fmt: skip


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the extension, and give its `fact` role what it would have."""
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    import results_tables  # type: ignore[import-not-found]  # found by the line above

    return results_tables  # type: ignore[no-any-return]  # the same


@pytest.fixture
def recordings(pages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Let the pages see a list of recordings that a test may fill, the newest first."""
    assert pages
    shown: list[Recording] = []
    monkeypatch.setattr(choice, "shipped", lambda: tuple(shown))
    return shown


def without(recording: Recording, name: str, **equal: Any) -> Recording:
    """Return a recording under another name, with only the rows of these fields."""
    from rmsnorm_ref.measure.recording import select

    rows = tuple(select(recording.rows, **equal))
    return dataclasses.replace(recording, id=name, rows=rows)


def calls(text: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return (directive, argument, options) of every table and figure that a page asks for."""
    found = []
    for match in re.finditer(
        r"^```\{(results|drawing)\} (\w+)\n((?::.*\n)*)```", text, re.MULTILINE
    ):
        options = dict(re.findall(r"^:(\w+): (.+)$", match[3], re.MULTILINE))
        found.append((match[1], match[2], options))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_tables_of_a_page_are_whole(pages: ModuleType, page: Path) -> None:
    """Every table that a page asks for has rows, each as wide as its header, and its sources."""
    from rmsnorm_ref.measure.recording import shipped

    for directive, name, options in calls(page.read_text()):
        if directive == "drawing":
            continue
        keywords = {("pass_" if key == "pass" else key): value for key, value in options.items()}
        table = pages.TABLES[name](**keywords)
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.titles)}
        assert set(table.sources) <= set(shipped())
        assert table.sources or name == "faults"


def test_every_table_is_shown_somewhere(pages: ModuleType) -> None:
    """No table is left that no page asks for."""
    pages_ = [*PAGES, ROOT / "docs/howto/distributed.md"]
    shown = {name for page in pages_ for _, name, _ in calls(page.read_text())}
    assert set(pages.TABLES) <= shown


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_decisions_have_the_same_headings(number: int) -> None:
    """D1 to D4 answer the same questions in the same order, under labels that stay."""
    text = (ROOT / f"docs/design/d{number}.md").read_text()
    assert f"(d{number})=\n# D{number}: " in text
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == DECISION


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_no_measured_number_is_typed_by_hand(page: Path) -> None:
    """Outside roles and code no page has a time, a bandwidth or a percentage."""
    text = re.sub(r"\{\w+\}`[^`]*`|```python.*?```", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(r"\d[\d.]*\s?(?:µs|us\b|TB/s|GB/s|%)", text) == []


def test_a_contender_has_one_colour_in_every_file(pages: ModuleType, tmp_path: Path) -> None:
    """A figure's file has few colours, and every contender's own is among them, unchanged."""
    from PIL import Image

    from rmsnorm_ref.measure import figures, style

    pages.write(figures.bandwidth_by_cell(fabricated()).figure, tmp_path / "figure.png")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["figure-2x.png", "figure.png"]
    for file in files:
        with Image.open(file) as image:
            found = {
                "#{:02X}{:02X}{:02X}".format(*rgb) for _, rgb in image.convert("RGB").getcolors()
            }
        assert len(found) <= pages.COLOURS
        assert {look.colour for look in style.LOOKS.values()} | {style.CARD.upper()} <= found


def test_tables_grow_with_the_recording(pages: ModuleType, recordings: list[Recording]) -> None:
    """A cell that was not there before is a new line, with no edit."""
    whole = fabricated()
    recordings.append(without(whole, "part", kind="kernel", section="seed", N={2048}))
    before = pages.tables.cells("forward")
    recordings.append(whole)
    after = pages.tables.cells("forward")
    assert len(before.rows) < len(after.rows)
    assert {row[0] for row in before.rows} < {row[0] for row in after.rows}


def test_prediction_is_time_over_time(pages: ModuleType, recordings: list[Recording]) -> None:
    """Eager twice as slow doubles every measured speed-up and leaves the predicted one."""
    from rmsnorm_ref.measure.recording import select

    whole = fabricated()
    slow = [
        slowed(row, 2.0) if (row.contender, row.kind) == ("eager", "kernel") else row
        for row in whole.rows
    ]
    recordings.append(whole)
    once = {row[0]: row for row in pages.tables.prediction("forward").rows}
    recordings[0] = dataclasses.replace(whole, rows=tuple(slow))
    twice = {row[0]: row for row in pages.tables.prediction("forward").rows}
    assert len(once) == len(select(whole.rows, section="seed", contender="ours", pass_="forward"))  # noqa: S106  # no password
    for cell, row in once.items():
        assert twice[cell][1] == row[1] == "3.50"
        assert float(twice[cell][2]) == pytest.approx(2 * float(row[2]), abs=0.02)
        assert twice[cell][3:] == row[3:]


def test_a_loss_is_more_than_the_noise(pages: ModuleType, recordings: list[Recording]) -> None:
    """A peer is listed where it is faster by more than the repeats differ, and only there."""
    from rmsnorm_ref.measure.recording import select

    rows = select(fabricated().rows, kind="kernel", section="seed", contender={"ours", "quack"})
    for repeat, n_lost in ((1.0, len(rows) // 2), (1.5, 0)):
        noisy = []
        for row in rows:
            assert row.time_s is not None
            noisy.append(dataclasses.replace(row, repeat_time_s=repeat * row.time_s.p50))
        assert len(pages.findings.lost(noisy)) == n_lost
    assert not recordings


def test_the_worst_loss_is_of_all_sections(pages: ModuleType, recordings: list[Recording]) -> None:
    """It is the largest of what the table of losses lists."""
    recordings.append(fabricated())
    listed = [float(row[4]) for row in pages.tables.losses().rows]
    assert pages.findings.worst_loss().text == f"{100 * (1 - min(listed)):.1f} %"


def test_scratch_is_what_was_launched(pages: ModuleType) -> None:
    """The shares that D3 shows are those of the recorded launches, and few rows have none."""
    rows = pages.tables.scratch().rows
    (few,) = [row for row in rows if row[2] == "few rows"]
    assert few[3:5] == ("0", "0.0 %")
    assert any(float(row[4].split()[0]) > 0 for row in rows)
    assert len({(row[0], *row[2:4]) for row in rows}) == len(rows)  # N cancels: no line twice


def test_a_repeat_is_of_two_full_runs_of_the_same_kernels(
    pages: ModuleType, recordings: list[Recording]
) -> None:
    """The two newest such runs are compared; a partial one, or one of other kernels, is not."""
    whole = fabricated()
    others = dataclasses.replace(whole.provenance, fingerprint="1" * 64)
    slower = tuple(
        slowed(row, 1.05) if (row.section, row.kind, row.contender) == KERNEL_OF_FLA else row
        for row in whole.rows
    )
    recordings += [
        dataclasses.replace(whole, id="second", rows=slower),
        without(whole, "partial", contender="ours"),
        dataclasses.replace(whole, id="others", provenance=others),
        dataclasses.replace(whole, id="first"),
    ]
    table = pages.tables_other.repeat()
    assert table.sources == ("second", "first")
    largest = {name: most for name, _, most, _ in table.rows}
    assert largest.pop("FLA") == "5.0 %"
    assert set(largest.values()) == {"0.0 %"}
    assert pages.findings.most_moved().text == "5.0 %"
    del recordings[-1]
    with pytest.raises(LookupError, match="no two runs"):
        pages.tables_other.repeat()


KERNEL_OF_FLA = ("seed", "kernel", "fla")


def test_scaling_is_shown_once_it_is_recorded(
    pages: ModuleType, recordings: list[Recording], tmp_path: Path
) -> None:
    """Without rows an optional table is left out; with rows it compares with one GPU alone."""
    with pytest.raises(LookupError, match="no shipped recording"):
        pages.tables_other.scaling()
    recordings.append(fabricated())
    assert pages.tables_other.scaling().rows[0][::2] == ("1", "100.0 %")
    result = build(tmp_path, "```{results} host\n:optional:\n```\n")
    assert result.returncode == 0, result.stderr
    assert "Host time" in (tmp_path / "site/index.html").read_text()


def test_faults_and_tests_are_those_of_the_suite(pages: ModuleType) -> None:
    """Pages name every planted fault as the tests do, and refuse what is not there."""
    from mutants import BACKWARD_MUTANTS, FORWARD_MUTANTS

    names = {mutant.name for mutant in FORWARD_MUTANTS + BACKWARD_MUTANTS}
    assert {fault.name for fault in pages.proofs.faults()} == names
    assert not any(fault.why.startswith("the same") for fault in pages.proofs.faults())
    with pytest.raises(LookupError, match="no broken kernel"):
        pages.proofs.fault("a fault that nobody plants")
    with pytest.raises(LookupError, match="there is no test"):
        pages.proofs.docstring("sweep::test_nothing")


def test_a_total_stalls_where_the_dtype_says(pages: ModuleType) -> None:
    """Adding ones stops at 2 / eps: at the first total whose neighbour is two away."""
    import torch

    for dtype in (torch.float16, torch.bfloat16):
        stalls = int(pages.limits.stalls_at(dtype).replace("\u202f", ""))
        assert stalls == 2 / torch.finfo(dtype).eps


def test_least_rows_is_the_border(pages: ModuleType) -> None:
    """From so many rows on the buffer's share is at most the one asked for; one less is more."""
    import torch

    from rmsnorm_ref import traffic

    least = int(pages.limits.least_rows(0.01, 132).replace("\u202f", ""))
    assert traffic.scratch_share(least, 4096, torch.bfloat16, 132) <= 0.01
    assert traffic.scratch_share(least - 1, 4096, torch.bfloat16, 132) > 0.01


def build(folder: Path, text: str) -> Done:
    """Build a site of one page with the facts and results extensions."""
    conf = f"import sys\nsys.path.append({str(ROOT / 'docs/_ext')!r})\n"
    conf += "extensions = ['facts', 'claims', 'recorded', 'results_tables', 'myst_parser']\n"
    conf += "html_theme = 'basic'\n"
    conf += "myst_enable_extensions = ['colon_fence']\n"
    (folder / "conf.py").write_text(conf)
    recorded = "# Recordings\n\n```{recordings}\n```\n"
    (folder / "index.md").write_text(f"# One\n\n{text}\n\n{recorded}")
    return sphinx(folder, folder / "site", ROOT)


def test_directives_draw_and_link(tmp_path: Path) -> None:
    """A table links to its recording, a figure has its alt text, a test is shown by its claim."""
    text = "```{results} losses\n```\n\n```{drawing} prediction\n```\n\n"
    text += "```{drawing} size_sweep\n:pass: forward\n:least: 99\n```\n\n"
    text += "```{tests}\nsweep::test_sweep\n```\n"
    result = build(tmp_path, text)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "site/index.html").read_text()
    image = re.search(r'<img alt="([^"]+)"[^>]*src="(_images/prediction.png)"', page)
    assert image is not None
    assert "predicted speed-up" in image[1]
    assert (tmp_path / "site" / image[2]).stat().st_size < 100_000
    assert re.search(r'<caption>.*href="#recording-', page, re.DOTALL)
    assert "Every cell of the sweep meets the bounds" in page
    assert "size_sweep" not in page


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```{results} no_table\n```", "no_table"),
        ("```{results} cells\n:pass: forward\n:section: nowhere\n```", "no shipped recording"),
        ("```{tests}\nsweep::test_gone\n```", "there is no test sweep::test_gone"),
        ("{fact}`fault('no such fault')`", "no broken kernel"),
    ],
)
def test_what_is_gone_stops_the_build(tmp_path: Path, text: str, said: str) -> None:
    """A table, a section, a test or a fault that does not exist fails the build, and is named."""
    result = build(tmp_path, text)
    assert result.returncode != 0
    assert said in result.stdout + result.stderr
