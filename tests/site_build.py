"""How tests build the site: from a copy, by the README's command, with the network denied."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from warm import Done, fresh, warm

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
GALLERY = sorted((ROOT / "gallery").glob("plot_*.py"))

# On the path of a Python that builds: no connection to another machine is made.
NO_NETWORK = str(ROOT / "tests/no_network")
# What a build imports whatever is in the site: small sites are built by forks that begin with it.
IMPORTED = (
    "torch",
    "matplotlib.pyplot",
    "sphinx.cmd.build",
    "sphinx_gallery.gen_gallery",
    "myst_parser.parsers.sphinx_",
    "furo",
)


class Tags(HTMLParser):
    """Collect every tag of a page with its attributes, and the text."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep one tag."""
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Keep one text."""
        self.texts.append(data)

    @property
    def ids(self) -> set[str]:
        """Return every id of the page."""
        return {str(attributes["id"]) for _, attributes in self.tags if "id" in attributes}

    def values(self, tag: str, attribute: str) -> list[str]:
        """Return an attribute's value from every tag that has it."""
        return [str(a[attribute]) for name, a in self.tags if name == tag and attribute in a]


def copy_sources(folder: Path) -> Path:
    """Copy what the site is built from, so that a build leaves nothing in the checkout."""
    leftovers = shutil.ignore_patterns("auto_examples", "gen_modules", "__pycache__")
    for name in ("docs", "gallery", "rmsnorm_ref", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=leftovers)
    for name in ("README.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(folder: Path, *, alone: bool = False, **variables: str) -> Done:
    """Run the README's build in a folder, with the network denied, and return how it ended."""
    return sphinx("docs", "site", folder, alone=alone, **variables)


def sphinx(
    source: Path | str, site: Path | str, folder: Path, *, alone: bool = False, **variables: str
) -> Done:
    """Build a site in a folder, warnings as errors: in a fork, or in a Python of its own."""
    denied = {"PYTHONPATH": NO_NETWORK}
    run = functools.partial(fresh, **denied) if alone else warm(*IMPORTED, **denied).run
    command = ("-m", "sphinx", "-n", "-W", str(source), str(site))
    return run(*command, folder=folder, **variables)


def pages_of(site: Path) -> list[Path]:
    """Return all pages of a built site."""
    return sorted(p for p in site.rglob("*.html") if "_static" not in p.parts)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the whole site once, whichever of the test processes comes first."""
    pytest.importorskip("sphinx_gallery", reason="the site needs the docs extra")
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # shared by all workers of this run
    folder, ended = root / "whole", root / "whole.json"
    with FileLock(root / "whole.lock"):
        if not ended.is_file():
            folder.mkdir()
            result = build(copy_sources(folder), alone=True, RMSNORM_REF_COMMIT="0123456789abcdef")
            ended.write_text(json.dumps([result.returncode, result.stdout + result.stderr]))
    returncode, output = json.loads(ended.read_text())
    assert returncode == 0, output
    return folder / "site"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return sources with one page and one gallery script that only prints, to break."""
    pytest.importorskip("sphinx_gallery", reason="the site needs the docs extra")
    folder = copy_sources(tmp_path)
    for script in (folder / "gallery").glob("plot_*.py"):
        script.unlink()
    (folder / "gallery/plot_one.py").write_text('"""\nOne\n===\n\nText.\n"""\n\nprint(1)\n')
    for page in (folder / "docs").rglob("*.md"):
        page.unlink()
    (folder / "docs/index.md").write_text("# One\n\n```{toctree}\nauto_examples/index\n```\n")
    return folder


class Unperturbed(http.server.ThreadingHTTPServer):
    """Serve on where a browser leaves before all of a page has come: it has seen enough."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what goes wrong, unless it is that."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture(scope="session")
def served(site: Path) -> Iterator[str]:
    """Serve the built site on this machine alone, and stop afterwards."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing: a failing test's output is its own."""

    handler = functools.partial(Quiet, directory=str(site))
    server = Unperturbed(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
