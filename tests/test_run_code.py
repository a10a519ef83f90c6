"""Code that runs while a page is built: its output is shown, and what raises stops the build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from site_build import sphinx

if TYPE_CHECKING:
    from warm import Done

pytest.importorskip("myst_parser", reason="the site needs the docs extra")
ROOT = Path(__file__).parents[1]


def build(folder: Path, text: str) -> Done:
    """Build a site of one page."""
    conf = f"import sys\nsys.path.append({str(ROOT / 'docs/_ext')!r})\n"
    conf += "extensions = ['run_code', 'myst_parser']\nhtml_theme = 'basic'\n"
    (folder / "conf.py").write_text(conf)
    (folder / "index.md").write_text(f"# One\n\n{text}")
    (folder / "other.md").write_text(
        "---\norphan: true\n---\n# Two\n\n```{run}\nprint('a' in dir())\n```\n"
    )
    return sphinx(folder, folder / "site", ROOT)


def blocks(page: Path) -> list[str]:
    """Return the text of the blocks of code on a page."""
    found = re.findall(r"<pre>(.*?)</pre>", page.read_text(), re.DOTALL)
    return [re.sub(r"<[^>]+>", "", block).strip() for block in found]


def test_output_is_what_the_code_prints(tmp_path: Path) -> None:
    """Blocks of one page share names, those of two do not; what prints nothing shows nothing."""
    text = "```{run}\na = 6\n```\n\n```{run}\nprint(7 * a)\n```\n"
    result = build(tmp_path, text)
    assert result.returncode == 0, result.stderr
    assert blocks(tmp_path / "site/index.html") == ["a = 6", "print(7 * a)", "42"]
    assert blocks(tmp_path / "site/other.html")[1] == "False"


def test_code_that_raises_stops_the_build(tmp_path: Path) -> None:
    """The error and the line of the page are named."""
    result = build(tmp_path, "```{run}\n1 / 0\n```\n")
    assert result.returncode != 0
    assert "index.md:3: ERROR: run: ZeroDivisionError" in result.stderr
