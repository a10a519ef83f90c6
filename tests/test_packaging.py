import doctest
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import rmsnorm_ref
from rmsnorm_ref import oracle
from rmsnorm_ref.data import hidden_states
from rmsnorm_ref.review import rules

ROOT = Path(__file__).parents[1]


def run_python(code: str, cwd: Path, **environment: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "module", ["rmsnorm_ref", "rmsnorm_ref.oracle", "rmsnorm_ref.traffic", "rmsnorm_ref.data"]
)
def test_import_touches_neither_triton_nor_cuda(module: str, tmp_path: Path) -> None:
    """Importing the package, a model or the data imports no Triton and initialises no CUDA."""
    code = f"import sys, torch, {module}; print('triton' in sys.modules)"
    code += "; print(torch.cuda.is_initialized())"
    assert run_python(code, tmp_path).split() == ["False", "False"]


CPU_EXAMPLE = pytest.mark.skipif(
    torch.cuda.is_available(), reason="its tensors are on the CPU, and with a GPU Triton compiles"
)


@pytest.mark.parametrize(
    "module", ["oracle", "traffic", "data", pytest.param("op", marks=CPU_EXAMPLE)]
)
def test_docstring_examples_run(module: str) -> None:
    """Each example in a docstring gives the output it shows, and there is at least one."""
    result = doctest.testmod(importlib.import_module(f"rmsnorm_ref.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_wheel_carries_what_the_package_needs(tmp_path: Path) -> None:
    """A built wheel has every source file, the type marker, the data and the licence."""
    pytest.importorskip("setuptools", minversion="77", reason="building a wheel needs setuptools")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "rmsnorm_ref", tmp_path / "rmsnorm_ref")
    run_python("from setuptools.build_meta import build_wheel; build_wheel('dist')", tmp_path)
    (wheel,) = tmp_path.glob("dist/*.whl")
    assert wheel.name.startswith(f"rmsnorm_ref-{rmsnorm_ref.__version__}-")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.py", "*.npz", "*.md", "py.typed")
        for path in (ROOT / "rmsnorm_ref").rglob(pattern)
    }
    assert wanted <= names, wanted - names
    assert any(name.endswith("/LICENSE") for name in names)


def test_version_and_licence_are_one() -> None:
    """CITATION.cff names the package's version and the licence that pyproject.toml declares."""
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    citation = dict(line.split(": ", 1) for line in lines if ": " in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == rmsnorm_ref.__version__
    assert citation["license"] == project["license"]


def test_the_site_has_one_address() -> None:
    """Reports of a review and citations point where the package's metadata says the site is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"{project['urls']['Documentation']}/en" == rules.SITE


def test_readme_map_is_complete() -> None:
    """The README's map names every module of the package, and nothing that does not exist."""
    rows = re.compile(r"^\| `(rmsnorm_ref/\S+)` \|", re.MULTILINE)
    named = set(rows.findall((ROOT / "README.md").read_text()))
    package = ROOT / "rmsnorm_ref"
    present = {f"rmsnorm_ref/{path.name}" for path in package.glob("*.py")}
    present |= {f"rmsnorm_ref/{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert named == present - {"rmsnorm_ref/__init__.py"}


def test_hidden_states_are_finite_and_fresh() -> None:
    """Each call gives finite float16 rows and float32 gains of its own, from at most 200 kB."""
    states, again = hidden_states(), hidden_states()
    assert set(states) == {"layer_0_x", "layer_0_weight", "layer_5_x", "layer_5_weight"}
    for name, tensor in states.items():
        assert tensor.isfinite().all()
        assert tensor.dtype == (torch.float32 if name.endswith("weight") else torch.float16)
        assert tensor.shape[-1] == 384
        tensor.zero_()
        assert again[name].count_nonzero() > 0
    assert (ROOT / "rmsnorm_ref/data/minilm_hidden_states.npz").stat().st_size <= 200_000


@pytest.mark.parametrize("layer", [0, 5])
def test_hidden_states_have_outlier_channels(layer: int) -> None:
    """A channel of the real rows is larger against the rest than any channel of random rows."""
    x = hidden_states()[f"layer_{layer}_x"].double()
    random = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()

    def peak(rows: torch.Tensor) -> float:
        channel_rms = rows.square().mean(0).sqrt()
        return float(channel_rms.max() / channel_rms.median())

    assert peak(x) > 5 * peak(random)


@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernels_meet_the_truth_on_real_rows(layer: int, dtype: torch.dtype) -> None:
    """On a transformer's rows and gain, every element of y, dx and dw is within its bound."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states = hidden_states()
    x = states[f"layer_{layer}_x"].to(device, dtype).requires_grad_()
    w = states[f"layer_{layer}_weight"].to(device).requires_grad_()
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(layer)).to(device, dtype)
    y = rmsnorm_ref.rmsnorm(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    y, x, w = y.detach(), x.detach(), w.detach()
    true_dx, true_dw = oracle.truth_backward(dy, x, w)
    oracle.assert_within(y, oracle.truth(x, w), oracle.bound_y(x, w, 1e-6), "y")
    oracle.assert_within(dx, true_dx, oracle.bound_dx(dy, x, w, 1e-6), "dx")
    oracle.assert_within(dw, true_dw, oracle.bound_dw(dy, x, w, 1e-6), "dw")
