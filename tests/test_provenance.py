"""Where a recording says it comes from: commit, clocks, datasheet."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from rmsnorm_ref.measure import provenance, schema

if TYPE_CHECKING:
    from pathlib import Path


def git(folder: Path, *words: str) -> str:
    """Run git in a folder as somebody."""
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_commit_is_clean_until_a_tracked_file_changes(tmp_path: Path) -> None:
    """Untracked files do not matter; a changed tracked file does."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    (package / "untracked.py").touch()
    assert provenance.commit(package) == (head, True, None)
    (package / "__init__.py").write_text("changed = 1")
    assert provenance.commit(package) == (head, False, None)


@pytest.mark.parametrize("named", ["", "abc123"])
def test_without_git_no_tree_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """An exported tree may be given its commit by a variable, counts as not clean and says so."""
    monkeypatch.setenv("RMSNORM_REF_COMMIT", named)
    head, clean, remark = provenance.commit(tmp_path)
    assert (head, clean) == (named or None, False)
    assert remark is not None
    assert "not a git checkout" in remark


def test_another_projects_checkout_is_not_ours(tmp_path: Path) -> None:
    """A package that lies untracked inside a checkout does not take that checkout's commit."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "first")
    package = tmp_path / "venv" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    head, clean, remark = provenance.commit(package)
    assert (head, clean) == (None, False)
    assert remark is not None


def test_clocks_are_the_span_of_what_was_seen() -> None:
    """Lines without two numbers are skipped; none at all is no clocks."""
    found = provenance.parse_clocks(["1980, 3201\n", "345, 3201\n", "[N/A], 3201\n", "1755, 26"])
    assert found is not None
    assert found.sm_mhz == schema.Span(345, 1755, 1980)
    assert found.memory_mhz == schema.Span(26, 3201, 3201)
    assert provenance.parse_clocks(["[N/A], [N/A]"]) is None


def test_a_machine_without_nvidia_smi_has_no_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run there goes on, without clocks and driver."""
    monkeypatch.setenv("PATH", "")
    with provenance.ClockMonitor("GPU-0") as monitor:
        assert monitor.clocks() is None
    assert provenance.driver_version() is None


def test_datasheets_are_those_of_known_cards() -> None:
    """The stated bandwidth has a source, and a card that is not listed has neither."""
    bandwidth, where = provenance.datasheet("NVIDIA H200")
    assert bandwidth == 4.8e12
    assert where
    assert provenance.datasheet("NVIDIA GeForce") == (None, None)
