"""The site builds as the README says, offline, and a broken source stops it."""

import re
import socket
import zlib
from pathlib import Path

import pytest
from site_build import GALLERY, NO_NETWORK, ROOT, build
from warm import fresh, warm


def test_site_builds_with_no_network(site: Path) -> None:
    """The README's build passes with warnings as errors and every connection refused."""
    assert (site / "index.html").is_file()
    for script in GALLERY:
        assert (site / "auto_examples" / f"{script.stem}.html").is_file()


def test_network_really_is_denied() -> None:
    """A connection to a listening port fails under the guard that the builds run under."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.socket().connect(('127.0.0.1', {port}))"
        for path, ends in (("", 0), (NO_NETWORK, 1)):
            for run in (fresh, warm(PYTHONPATH=path).run):
                assert run("-c", code, PYTHONPATH=path).returncode == ends


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


BROKEN = {
    "{py:func}`rmsnorm_ref.no_such_name`": "rmsnorm_ref.no_such_name",
    "{py:class}`torch.NoSuchClass`": "torch.NoSuchClass",
    "[text](#no-such-label)": "no-such-label",
    "{doc}`no-such-page`": "no-such-page",
    "{ref}`no-such-ref`": "no-such-ref",
    "{eq}`eq-no-such`": "eq-no-such",
    "{term}`no such term`": "no such term",
    "![No such picture.](no-such-picture.png)": "no-such-picture.png",
    "{fact}`us('ours', 'forward', 3, 5)`": "us('ours', 'forward', 3, 5)",
    "{fact}`traffic`": "a module is no number",
    "{fact}`us('ours', 'forward', 4096, 8192)`": "no page lists recording",
    ":::{claim} Wrong_Id\nText.\n:::": "Wrong_Id",
    ":::{claim} c-one\nText.\n:::\n\n:::{claim} c-one\nText.\n:::": "c-one is already made",
}


def test_broken_sources_fail_the_build(small: Path) -> None:
    """What does not exist, or stands there twice, fails the build; each is named in a warning."""
    with (small / "docs/index.md").open("a") as page:
        page.write("\n" + "\n\n".join(BROKEN) + "\n")
    result = build(small)
    assert result.returncode != 0
    lines = (result.stdout + result.stderr).splitlines()
    warnings = [line for line in lines if "WARNING" in line or "ERROR" in line]
    for name in BROKEN.values():
        assert any(name in line for line in warnings), name


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


def test_hosted_build_fails_on_warnings() -> None:
    """The host builds the same site: from conf.py, with the docs extra, warnings as errors."""
    settings = (ROOT / ".readthedocs.yaml").read_text()
    for line in ("version: 2", "configuration: docs/conf.py", "fail_on_warning: true", "- docs"):
        assert line in settings


def test_readme_example_runs(tmp_path: Path) -> None:
    """The README's example runs as it stands, from another folder, with no GPU or with one."""
    readme = (ROOT / "README.md").read_text()
    example = re.search(r"<!-- begin example -->\n```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None
    result = fresh("-c", example[1], folder=tmp_path)
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
