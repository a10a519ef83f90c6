"""Which of several recordings speaks for a number: of these kernels, then fullest, then newest."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fabricated import fabricated, slowed

from rmsnorm_ref.measure import choice, live, recording
from rmsnorm_ref.measure.recording import Recording, select

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
READ = choice.shipped.__wrapped__  # without its memory
CELL = ("ours", "forward", 4096, 8192)


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what puts made-up recordings in the place of those that ship."""

    def ship(*found: Recording) -> None:
        by_id = {each.id: each for each in found}
        monkeypatch.setattr(recording, "shipped", lambda: list(by_id))
        monkeypatch.setattr(recording, "load", by_id.__getitem__)
        monkeypatch.setattr(choice, "shipped", READ)

    return ship


def made_up(name: str, day: int, *, current: bool = False, slower: float = 1, **equal: Any) -> Any:
    """Make a recording of a day in January with the rows of these fields, slowed by a factor."""
    whole = fabricated()
    rows = [
        row if row.time_s is None else slowed(row, slower) for row in select(whole.rows, **equal)
    ]
    facts = dataclasses.replace(
        whole.provenance,
        date=f"2026-01-{day:02}T00:00:00+00:00",
        fingerprint=recording.fingerprint() if current else "0" * 64,
        notes=("its list of cells was cut",) if equal else (),
    )
    return Recording(name, facts, tuple(rows))


def first(**equal: Any) -> str:
    """Return the id of the recording that is picked."""
    return choice.picked(**equal)[1].id


def test_a_fuller_recording_comes_before_a_newer_one(ship: Callable[..., None]) -> None:
    """A sample that was taken later, its cell list cut, does not hide a run of every cell."""
    ship(made_up("whole", 1), made_up("sample", 2, section="seed", N={2048}))
    assert first(section="seed") == "whole"
    assert first(section="seed", N=2048) == "sample"  # of equals among the rows asked for


def test_of_equally_full_recordings_the_newest_comes_first(ship: Callable[..., None]) -> None:
    """A new run of the same cells takes the old one's place, whatever the files are called."""
    ship(made_up("a-new", 2), made_up("z-old", 1))
    assert first(section="seed") == "a-new"
    assert [each.id for each in choice.shipped()] == ["a-new", "z-old"]


def test_these_kernels_come_before_changed_ones(ship: Callable[..., None]) -> None:
    """What was measured on this code comes first, even where older and with fewer cells."""
    ship(made_up("theirs", 2), made_up("ours", 1, current=True, section="seed", N={2048}))
    assert first(section="seed") == "ours"
    assert [each.id for each in choice.ranked(section="seed")] == ["ours", "theirs"]
    assert first(section="seed", N=4096) == "theirs"


def test_what_nobody_recorded_is_named(ship: Callable[..., None]) -> None:
    """Nothing ranks where no row matches, and picking says what was asked for."""
    ship(made_up("whole", 1))
    assert choice.ranked(section="seed", M=3) == []
    with pytest.raises(LookupError, match="'M': 3"):
        choice.picked(section="seed", M=3)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the extension with all that pages show."""
    pytest.importorskip("sphinx_gallery", reason="the site needs the docs extra")
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    import results_tables

    return results_tables


def test_all_of_the_site_moves_to_new_recordings(ship: Callable[..., None], pages: Any) -> None:
    """A run in several files takes over prose, tables, figures, race and gallery by itself."""
    old = made_up("old", 1)
    cells = made_up("all-cells", 2, current=True, slower=2, kind="kernel")
    rest = made_up(
        "all-rest", 3, current=True, slower=2, kind={"config", "ablation", "eager_kernel"}
    )
    ship(old)
    before = pages.evidence.us(*CELL)
    ship(old, cells, rest)
    after = pages.evidence.us(*CELL)
    assert (before.recording, after.recording) == ("old", "all-cells")
    assert float(after.text.split()[0]) == pytest.approx(
        2 * float(before.text.split()[0]), rel=0.01
    )
    assert pages.evidence.gpu(*CELL).recording == "all-cells"
    assert pages.findings.turned("num_stages", 1, 3).recording == "all-rest"
    assert pages.tables.cells("forward").sources == ("all-cells",)
    assert pages.tables_other.explained().sources == ("all-rest", "all-cells")
    assert live.recorded("seed").id == "all-cells"
    assert live.recorded("configs").id == "all-rest"


def test_prose_agrees_with_the_table_of_the_seed(ship: Callable[..., None], pages: Any) -> None:
    """A later sweep that passes through a seed cell does not change what is said of that cell."""
    ship(made_up("seed", 1, section="seed"), made_up("later", 2, slower=2, section="sizes"))
    (row,), source = pages.evidence.cell(["ours"], "forward", 4096, 4096, "bfloat16")
    assert (row.section, source.id) == ("seed", "seed")
    ship(made_up("later", 2, section="sizes"))
    assert pages.evidence.cell(["ours"], "forward", 4096, 4096, "bfloat16")[0][0].section == "sizes"


def test_a_speed_up_is_of_one_recording(ship: Callable[..., None], pages: Any) -> None:
    """A newer run of the same cells without the peers hides no page's comparison with them."""
    alone = made_up("alone", 2, section="seed", contender={"ours", "F.rms_norm"})
    ship(made_up("peers", 1), alone)
    assert pages.evidence.us(*CELL).recording == "peers"
    assert pages.evidence.speedup("eager", "forward", 4096, 8192).recording == "peers"
    with pytest.raises(LookupError, match="no shipped recording"):
        pages.evidence.speedup("liger", "forward", 3, 5)


def test_nothing_else_chooses() -> None:
    """Besides the rule itself only two pages ask what ships: the list, and what names a source."""
    asking = {
        path.relative_to(ROOT).as_posix()
        for folder in ("rmsnorm_ref", "docs/_ext", "gallery")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"recording.shipped", "choice.shipped"}
    }
    assert asking == {
        "rmsnorm_ref/measure/choice.py",
        "docs/_ext/recorded.py",
        "docs/_ext/facts.py",
    }
