"""A small site with a race on its first page, built as the real one is, without the gallery."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from site_build import sphinx

ROOT = Path(__file__).parents[1]
CONF = """
import sys
sys.path.append({docs!r} + "/_ext")
project = "Race"
extensions = ["facts", "claims", "recorded", "race", "myst_parser"]
html_theme = "furo"
html_static_path = [{docs!r} + "/_static"]
html_css_files = ["custom.css"]
"""
INDEX = "# Race\n\n```{race}\n```\n\n## After\n\n" + "Text.\n\n" * 40
INDEX += "```{toctree}\nrecordings\n```\n"


def build(folder: Path) -> Path:
    """Build the small site with warnings as errors and return its folder."""
    source = folder / "source"
    source.mkdir()
    (source / "conf.py").write_text(CONF.format(docs=str(ROOT / "docs")))
    (source / "index.md").write_text(INDEX)
    (source / "recordings.md").write_text("# Recordings\n\n```{recordings}\n```\n")
    result = sphinx(source, folder / "site", ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "site"


def data(site: Path) -> dict[str, Any]:
    """Return the data that the page carries for its script."""
    page = (site / "index.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" class="race-data">(.*?)</script>', page)
    assert found is not None
    return dict(json.loads(found[1]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the small site once."""
    pytest.importorskip("sphinx", reason="the site needs the docs extra")
    return build(tmp_path_factory.mktemp("race"))
