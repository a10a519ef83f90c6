"""A built site cannot be stale: the documented command, run again, shows what the package says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from site_build import build

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "# One\n\nLimit {fact}`tiling.LARGEST_N`.\n\n```{toctree}\nauto_examples/index\n```\n"
SCRIPT = '''"""
One
===

Text.
"""

from rmsnorm_ref import tiling

print("limit", tiling.LARGEST_N)
'''
MADE = "auto_examples/plot_one"


def rebuild(folder: Path) -> tuple[str, str, str]:
    """Build by the documented command; return the page, the script's page and the output."""
    result = build(folder)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    site = folder / "site"
    page = (site / "index.html").read_text(encoding="utf-8")
    return page, (site / f"{MADE}.html").read_text(encoding="utf-8"), output


def test_changed_constant_changes_the_pages(small: Path) -> None:
    """A constant changed in the package changes prose and gallery, though neither was touched."""
    (small / "docs/index.md").write_text(PAGE)
    (small / "gallery/plot_one.py").write_text(SCRIPT)
    page, example, _ = rebuild(small)
    assert ">65536<" in page
    assert "limit 65536" in example

    tiling = small / "rmsnorm_ref/tiling.py"
    old = tiling.read_text()
    assert "LARGEST_N = 65536" in old
    tiling.write_text(old.replace("LARGEST_N = 65536", "LARGEST_N = 65535"))
    page, example, _ = rebuild(small)
    assert ">65535<" in page
    assert "limit 65535" in example


def test_unchanged_package_reruns_no_script(small: Path) -> None:
    """A build of nothing new runs no gallery script again, so that writing prose stays quick."""
    rebuild(small)
    (small / "docs/index.md").write_text("# Two\n\n```{toctree}\nauto_examples/index\n```\n")
    page, _, output = rebuild(small)
    assert "<h1>Two" in page
    assert "previously been run" in output


def test_new_recording_changes_the_pages(small: Path) -> None:
    """A recording that is added is taken up by the next build."""
    (small / "docs/index.md").write_text(
        "# One\n\n```{recordings}\n```\n\n```{toctree}\nauto_examples/index\n```\n"
    )
    page, _, _ = rebuild(small)
    shipped = small / "rmsnorm_ref/measure/recordings"
    old = next(shipped.glob("*.json"))
    assert "another-run" not in page
    text = old.read_text().replace(f'"{old.stem}"', '"another-run"')
    (shipped / "another-run.json").write_text(text)
    page, _, _ = rebuild(small)
    assert 'id="recording-another-run"' in page
