"""The command `python -m rmsnorm_ref check`: its cells, its verdicts, its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from paths import DEVICE

import rmsnorm_ref
from rmsnorm_ref import __main__, check, tiling

if TYPE_CHECKING:
    from pathlib import Path

FEW = [
    check.Cell(3, 64, torch.bfloat16),
    check.Cell(20, 769, torch.float32),
    check.Cell(72, 384, torch.float16, "layer_5"),
]


@pytest.fixture
def few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check three small cells instead of a sweep of some minutes."""
    monkeypatch.setattr(check, "cells", lambda **_: FEW)


@pytest.mark.usefixtures("few_cells")
def test_table_names_every_cell_and_where_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a line per cell, says how the kernels ran, and the exit code is 0."""
    assert __main__.main(["check"]) == 0
    printed = capsys.readouterr().out
    for cell in FEW:
        assert cell.label() in printed
    assert ("interpreted on cpu" if DEVICE == "cpu" else "compiled on") in printed
    assert printed.count("within ") == len(FEW) + 1
    assert "OUTSIDE" not in printed


@pytest.mark.usefixtures("few_cells")
def test_json_holds_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON is one strict object with the verdict and the provenance of every cell."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    assert __main__.main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert report["ok"] is True
    assert report["rmsnorm_ref"] == rmsnorm_ref.__version__
    assert [row["cell"] for row in report["cells"]] == [cell.label() for cell in FEW]
    for row in report["cells"]:
        assert set(row["error_over_bound"]) == set(row["max_ulp"]) == {"y", "dx", "dw"}
        assert all(0 <= ratio <= 1 for ratio in row["error_over_bound"].values())


@pytest.mark.usefixtures("few_cells")
@pytest.mark.parametrize("factor", [1.01, float("inf")])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_kernel_is_outside(
    factor: float,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A result that is one per cent or infinitely off gives exit code 1, and JSON stays JSON."""
    right = check.rmsnorm
    monkeypatch.setattr(check, "rmsnorm", lambda x, w, eps: right(x, w, eps) * factor)
    assert check.run(as_json=as_json) == 1
    printed = capsys.readouterr().out
    if as_json:
        assert json.loads(printed, parse_constant=pytest.fail)["ok"] is False
    else:
        assert "OUTSIDE" in printed


@pytest.mark.usefixtures("few_cells")
@pytest.mark.parametrize("error", [RuntimeError("no kernels here"), ValueError("bad word")])
def test_a_machine_that_cannot_run_gives_2(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the op refuses is told in one line, with an exit code that is no verdict."""

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(check, "rmsnorm", refuse)
    assert __main__.main(["check"]) == 2
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize("interpreted", [True, False])
def test_cells_cover_the_sweep_every_kernel_and_real_input(interpreted: bool) -> None:
    """--full holds the 24 cells of the sweep; either way every path and real input is checked."""
    device = torch.device("cpu" if interpreted else "cuda")
    for full in (False, True):
        cells = check.cells(full=full, interpreted=interpreted)
        assert len(set(cells)) == len(cells)
        assert {tiling.forward_path(cell.N) for cell in cells} == {"forward", "wide_forward"}
        assert {tiling.backward_path(cell.M, cell.N, device, cell.dtype) for cell in cells} == {
            "few_rows_backward",
            "backward",
            "wide_backward",
        }
        assert {cell.layer for cell in cells} == {"", *check.REAL_LAYERS}
    sweep = {
        check.Cell(M, N, dtype)
        for N in (2048, 4096, 8192)
        for M in (512, 1024, 2048, 4096)
        for dtype in (torch.float16, torch.bfloat16)
    }
    assert sweep <= set(cells)


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """No command is an error that lists the commands."""
    with pytest.raises(SystemExit) as left:
        __main__.main([])
    assert left.value.code == 2
    assert "check" in capsys.readouterr().err


def test_a_command_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends a command with one line and the exit code that a shell gives."""

    def stop(**_: bool) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run", stop)
    assert __main__.main(["check"]) == 130
    assert capsys.readouterr().err == "rmsnorm_ref: stopped\n"


def test_nobody_reads(tmp_path: Path) -> None:
    """A reader that has gone is no verdict: the exit code is that of SIGPIPE, without a word."""
    path = tmp_path / "three.py"
    path.write_text("f = 3\n")  # fails where it is loaded, so that there is soon a report
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "rmsnorm_ref", "review", f"{path}:f", "--device", "cpu"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 141
    assert "Error" not in done.stderr
