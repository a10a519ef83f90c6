"""The gallery's scripts: each is a page, a plain script, and short in lines and in time."""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
from pathlib import Path

import pytest
from warm import fresh, warm

pytest.importorskip("matplotlib", reason="the gallery draws: it needs the docs extra")

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "gallery").glob("plot_*.py"))
ALONE = "plot_foreign_kernel"  # runs in a Python of its own, as a reader would have it
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
MOST_LINES, MOST_CPU_S = 120, 20
IMPORTS_CPU_S = 4  # of torch and matplotlib

# A matplotlib backend whose `show` tells what each figure says, instead of opening a window.
TELLING_BACKEND = """
import json
from matplotlib import pyplot
from matplotlib.backend_bases import FigureManagerBase as FigureManager
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

def show(*args, **kwargs):
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        texts = [text.get_text().replace("\\n", " ") for text in figure.texts]
        print("FIGURE", json.dumps([figure.get_suptitle(), texts]))
"""

# What a script's kernel is launched with on a GPU: its arguments in order, a number for a constant.
KERNELS = {
    ("plot_fp32_sums", "rstd_kernel"): ["*bf16", "*fp32", "fp32", 16, "i32", 16, "tl.bfloat16"],
    ("plot_dw_without_atomics", "atomic_dw_kernel"): ["*fp32", "*fp32", "*fp32", "*fp32", 4, 1024],
    ("plot_foreign_kernel", "their_kernel"): ["*bf16", "*bf16", "*bf16", "i32", "fp32", 1024, 0],
}


def title_of(script: Path) -> str:
    """Return the title of a script's page."""
    docstring = ast.get_docstring(ast.parse(script.read_text())) or ""
    title, rule, *_ = docstring.splitlines()
    assert rule == "=" * len(title)
    return title


@every_script
def test_a_script_is_short(script: Path) -> None:
    """A script has at most 120 lines, so that it is read and not only run."""
    assert len(script.read_text().splitlines()) <= MOST_LINES


def test_titles_are_findings() -> None:
    """Every title is a sentence with a verb, without a full stop, and no two are alike."""
    verbs = r"\b(lies?|moves?|is|are|stops|give|costs|leaves|trains)\b"
    titles = [title_of(script) for script in SCRIPTS]
    assert all(re.search(verbs, title) and not title.endswith(".") for title in titles), titles
    assert len(set(titles)) == len(titles)


def test_every_script_has_its_place_in_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the pages names every script that there is, and no other."""
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    import gallery_order  # type: ignore[import-not-found]  # found by the line above

    assert sorted(gallery_order.ORDER) == [script.name for script in SCRIPTS]
    key = gallery_order.Argument("")
    names = [script.name for script in SCRIPTS]
    assert sorted([*names, "plot_new.py"], key=key) == [*gallery_order.ORDER, "plot_new.py"]


@every_script
def test_a_script_runs_alone_and_its_figures_speak(script: Path, tmp_path: Path) -> None:
    """From another folder, with nothing set, a script runs in seconds; each figure says its source.

    Its time is that of the processor, which other work on the machine does not lengthen. One script
    imports all by itself; the others, which begin by the same imports, find them done.
    """
    (tmp_path / "telling.py").write_text(TELLING_BACKEND)
    backend = {"MPLBACKEND": "module://telling"}
    warmed = warm("torch", "matplotlib.pyplot", **backend).run
    run = functools.partial(fresh, **backend) if script.stem == ALONE else warmed
    result = run(shutil.copy(script, tmp_path), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.cpu_s < MOST_CPU_S - (0 if script.stem == ALONE else IMPORTS_CPU_S)
    lines = result.stdout.splitlines()
    figures = [json.loads(line.removeprefix("FIGURE ")) for line in lines if "FIGURE " in line]
    assert figures
    for alt, texts in figures:
        assert alt.endswith(".")
        assert len(alt.split()) >= 8
        source = [text for text in texts if re.search("measured now|recorded|counted by", text)]
        assert source, texts
        assert re.search(r"\d{4}-\d\d-\d\d, (commit \w{7}|no commit)|counted by", source[0])


@pytest.mark.parametrize(("script", "kernel"), KERNELS, ids=lambda name: name)
def test_a_kernel_of_a_script_compiles(script: str, kernel: str, tmp_path: Path) -> None:
    """A kernel that a script defines compiles for a GPU, which the interpreter cannot tell."""
    source = (ROOT / "gallery" / f"{script}.py").read_text()
    (node,) = [n for n in ast.parse(source).body if getattr(n, "name", "") == kernel]
    assert isinstance(node, ast.FunctionDef)
    names = [argument.arg for argument in node.args.args]
    text = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
    given = dict(zip(names, KERNELS[script, kernel], strict=True))
    types = {
        n: t if str(t).strip("*")[:2] in {"bf", "fp", "i3"} else "constexpr"
        for n, t in given.items()
    }
    constants = ", ".join(f"{n!r}: {given[n]}" for n, t in types.items() if t == "constexpr")
    (tmp_path / "alone.py").write_text(
        "import triton\nimport triton.language as tl\n"
        "from triton.backends.compiler import GPUTarget\n"
        f"from triton.compiler import ASTSource\n\n@triton.jit\n{text}\n\n"
        f"source = ASTSource({kernel}, {types!r}, {{{constants}}})\n"
        "print(triton.compile(source, target=GPUTarget('cuda', 90, 32)).metadata.name)\n"
    )
    result = fresh(str(tmp_path / "alone.py"))
    assert result.stdout.strip() == kernel, result.stderr
