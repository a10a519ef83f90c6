import functools
import http.server
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GALLERY = sorted((ROOT / "gallery").glob("plot_*.py"))
pytest.importorskip("sphinx_gallery", reason="the site needs the docs extra")

# Imported by every Python that finds it on its path: any connection to another machine fails.
NO_NETWORK = """
import socket

def _connect(self, address):
    if self.family != socket.AF_UNIX:
        raise OSError(f"the network is denied: {address}")
    return _real(self, address)

_real = socket.socket.connect
socket.socket.connect = _connect
socket.getaddrinfo = lambda *args, **kwargs: (_ for _ in ()).throw(OSError("no network"))
"""


class Tags(HTMLParser):
    """Collect every tag of a page with its attributes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep one tag."""
        self.tags.append((tag, dict(attrs)))


def copy_sources(folder: Path) -> Path:
    """Copy what the site is built from, so that a build leaves nothing in the checkout."""
    leftovers = shutil.ignore_patterns("auto_examples", "gen_modules", "__pycache__")
    for name in ("docs", "gallery", "rmsnorm_ref"):
        shutil.copytree(ROOT / name, folder / name, ignore=leftovers)
    shutil.copy(ROOT / "README.md", folder)
    return folder


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the README's build in a folder, with the network denied, and return how it ended."""
    denied = folder / "denied"
    denied.mkdir(exist_ok=True)
    (denied / "sitecustomize.py").write_text(NO_NETWORK)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-n", "-W", "docs", "site"],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(denied)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the whole site once."""
    folder = copy_sources(tmp_path_factory.mktemp("whole"))
    result = build(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "site"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return sources with one page and one gallery script that only prints, to break."""
    folder = copy_sources(tmp_path)
    for script in (folder / "gallery").glob("plot_*.py"):
        script.unlink()
    (folder / "gallery/plot_one.py").write_text('"""\nOne\n===\n\nText.\n"""\n\nprint(1)\n')
    for pages in ("reference", "tutorial", "howto"):
        shutil.rmtree(folder / "docs" / pages)
    for page in ("glossary", "design"):
        (folder / f"docs/{page}.md").unlink()
    (folder / "docs/index.md").write_text("# One\n\n```{toctree}\nauto_examples/index\n```\n")
    return folder


def test_site_builds_with_no_network(site: Path) -> None:
    """The README's build passes with warnings as errors and every connection refused."""
    assert (site / "index.html").is_file()
    for script in GALLERY:
        assert (site / "auto_examples" / f"{script.stem}.html").is_file()


def test_network_really_is_denied(tmp_path: Path) -> None:
    """A connection to a listening port fails under the guard that the builds run under."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.socket().connect(('127.0.0.1', {port}))"
        for path, ends in (("", 0), (str(tmp_path), 1)):
            environment = os.environ | {"PYTHONPATH": path}
            command = [sys.executable, "-c", code]
            result = subprocess.run(command, env=environment, capture_output=True, check=False)
            assert result.returncode == ends


def test_small_site_builds(small: Path) -> None:
    """The cut-down site that the failing builds start from is itself sound."""
    result = build(small)
    assert result.returncode == 0, result.stdout + result.stderr


def test_gallery_script_that_raises_fails_the_build(small: Path) -> None:
    """A build ends in failure, and names the error, when one gallery script raises."""
    with (small / "gallery/plot_one.py").open("a") as script:
        script.write('raise RuntimeError("broken on purpose")\n')
    result = build(small)
    assert result.returncode != 0
    assert "broken on purpose" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{py:func}`rmsnorm_ref.no_such_name`", "rmsnorm_ref.no_such_name"),
        ("{py:class}`torch.NoSuchClass`", "torch.NoSuchClass"),
        ("[text](#no-such-label)", "no-such-label"),
        ("{doc}`no-such-page`", "no-such-page"),
    ],
)
def test_broken_reference_fails_the_build(small: Path, text: str, name: str) -> None:
    """A reference to a name, label or page that does not exist fails the build, and is named."""
    with (small / "docs/index.md").open("a") as page:
        page.write(f"\nSee {text}.\n")
    result = build(small)
    assert result.returncode != 0
    assert name in result.stdout + result.stderr


def test_every_image_has_alt_text(site: Path) -> None:
    """Every figure of the site says in words what it shows, and there is at least one."""
    figures = []
    for page in site.rglob("*.html"):
        for tag, attributes in Tags(page).tags:
            # The gallery's index shows thumbnails beside their titles: they are decoration there.
            if tag == "img" and not str(attributes.get("src")).endswith("_thumb.png"):
                figures.append(attributes.get("alt") or "")
    scraped = [alt for alt in figures if alt.startswith("plot ")]
    assert figures
    assert all(alt.strip() for alt in figures), figures
    assert not scraped, "a figure with no title: its alt text is its script's name"


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """No page loads a script, a style, a font or an image from another host."""
    loading = {"script": "src", "img": "src", "link": "href", "iframe": "src"}
    for page in site.rglob("*.html"):
        for tag, attributes in Tags(page).tags:
            address = str(attributes.get(loading.get(tag, ""), ""))
            assert "//" not in address, f"{page.name}: {tag} {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style


def test_no_page_shows_a_run_time(site: Path) -> None:
    """No page tells how long its script took, which says nothing about a kernel's time."""
    for page in site.rglob("*.html"):
        assert "running time" not in page.read_text(encoding="utf-8"), page.name


@pytest.mark.parametrize("script", GALLERY, ids=lambda path: path.stem)
def test_gallery_script_runs_alone(script: Path, tmp_path: Path) -> None:
    """A gallery script runs as a plain script, from another folder, and is at most 120 lines."""
    assert len(script.read_text().splitlines()) <= 120
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, shutil.copy(script, tmp_path)],
        cwd=tmp_path,
        env=environment | {"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_ci_runs_the_readme_commands() -> None:
    """CI takes both commands out of the README and spells neither itself."""
    readme = (ROOT / "README.md").read_text().splitlines()
    script = (ROOT / ".ci/run").read_text()
    assert "pip install -e '.[docs]' && sphinx-build -n -W docs site" in readme
    assert "pip install -e '.[test]' && pytest" in readme
    for extra in ("docs", "test"):
        assert f"{extra}_command=$(readme_command {extra})" in script
        assert f'"${extra}_command"' in script
    assert "sphinx-build" not in script
    assert "&& pytest" not in script


def test_readme_example_runs(tmp_path: Path) -> None:
    """The README's example runs as it stands, from another folder, with no GPU or with one."""
    readme = (ROOT / "README.md").read_text()
    example = re.search(r"<!-- begin example -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", example[1]]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "torch.bfloat16 torch.bfloat16 torch.float32" in result.stdout


def test_inventories_match_their_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed inventories hold what docs/_ext/inventories.py would write today."""
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    import inventories  # type: ignore[import-not-found]  # found by the line above

    for project in inventories.NAMES:
        committed = (ROOT / "docs/_inv" / f"{project.lower()}.inv").read_bytes()
        header, body = committed.split(b"zlib.\n", 1)
        fresh_header, fresh_body = inventories.inventory(project).split(b"zlib.\n", 1)
        assert header == fresh_header
        # Not the bytes: two zlib builds may compress the same lines differently.
        assert zlib.decompress(body) == zlib.decompress(fresh_body)


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """Serve the built site on this machine alone, and stop afterwards."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium on the path")
def test_no_page_scrolls_sideways_on_a_phone(served: str, site: Path, tmp_path: Path) -> None:
    """At 400 pixels no page is wider than its window, and formulas are drawn, not shown as TeX."""
    pages = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    pages = [page for page in pages if not page.startswith("_")]
    frames = "".join(f'<iframe width="400" height="800" src="/{page}"></iframe>' for page in pages)
    script = """
      addEventListener("load", () => {
        const wide = [...document.querySelectorAll("iframe")].map((frame) => {
          const root = frame.contentDocument.documentElement;
          const maths = frame.contentDocument.querySelectorAll("math");
          const flat = [...maths].filter((m) => m.getBoundingClientRect().height < 5).length;
          return `${frame.src} ${root.scrollWidth} ${maths.length} ${flat}`;
        });
        document.body.innerText = wide.join("\\n") + "\\nEND";
      });"""
    (site / "_phone.html").write_text(f"<body>{frames}<script>{script}</script></body>")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --dump-dom"
    flags += " --virtual-time-budget=20000"
    flags += " --disable-background-networking --disable-component-update --disable-sync"
    command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path}", f"{served}/_phone.html"]
    dumped = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    rows = re.findall(rf"{served}(/\S+) (\d+) (\d+) (\d+)", dumped.stdout)
    assert "END" in dumped.stdout
    assert len(rows) == len(pages), dumped.stdout
    assert [row for row in rows if int(row[1]) > 400] == []
    assert [row for row in rows if int(row[3]) > 0] == []
    assert any(int(row[2]) > 0 for row in rows)
