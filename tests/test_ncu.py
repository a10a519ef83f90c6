"""Nsight Compute: its table read right, and every way to have no table named."""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
from ncu_output import ERF, table

from rmsnorm_ref.measure import ncu
from rmsnorm_ref.measure.ncu import CountersError, Launch

if TYPE_CHECKING:
    from pathlib import Path

READ, WRITE = ncu.METRICS


def test_table_is_read_among_messages() -> None:
    """Launches come back in order, with names that hold quotes and commas, and grouped digits."""
    text = table([(ERF, "32", "0"), ("rmsnorm_forward_kernel", "33,554,432", "33120000")])
    assert ncu.parse(text) == [
        Launch(ERF, 32, 0),
        Launch("rmsnorm_forward_kernel", 33554432, 33120000),
    ]


def test_other_columns_and_metrics_do_no_harm() -> None:
    """NVTX columns, rule columns and a third metric are passed over."""
    header = '"ID","Domain:Range","Kernel Name","Metric Name","Metric Unit","Metric Value","Rule"\n'
    line = '"{}","","k","{}","{}","{}",""\n'
    text = header + "".join(
        line.format(i, *metric)
        for i in range(2)
        for metric in ((WRITE, "byte", i), ("gpu__time_duration.sum", "ns", 9), (READ, "byte", 7))
    )
    assert ncu.parse(text) == [Launch("k", 7, 0), Launch("k", 7, 1)]


@pytest.mark.parametrize(("unit", "factor"), [("byte", 1), ("Kbyte", 1000), ("Mbyte", 1000_000)])
def test_units_are_read(unit: str, factor: int) -> None:
    """Bytes are bytes, whichever prefix ncu chose."""
    assert ncu.parse(table([("k", "1.5", "2")], unit)) == [
        Launch("k", round(1.5 * factor), 2 * factor)
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("==WARNING== No kernels were profiled.\n", "0 kernels"),
        ("", "0 kernels"),
        (table([]), "0 kernels"),
        (table([("my_kernel", "n/a", "5")]), "'n/a' 'byte' for dram__bytes_read.sum of my_kernel"),
        (table([("my_kernel", "5", "5")], "sector"), "'5' 'sector'"),
        ('"ID","Kernel Name"\n"0","k"\n', "no Metric Name"),
        (table([("my_kernel", "5", "5")]).replace(WRITE, "other"), f"no {WRITE} for my_kernel"),
    ],
)
def test_table_without_numbers_is_refused(text: str, said: str) -> None:
    """What is missing is named, with the kernel where there is one, and never read as 0."""
    with pytest.raises(CountersError, match=re.escape(said)):
        ncu.parse(text)


# ---- Running ncu, or something that is called so ------------------------------------------------


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a shell script called ncu first on PATH."""

    def install(script: str) -> None:
        path = tmp_path / "ncu"
        # Its log file follows --log-file, wherever that stands.
        find_log = 'while [ "$1" != --log-file ]; do shift; done; log=$2\n'
        path.write_text(f"#!/bin/sh\n{find_log}{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_csv_of_the_log_comes_back(fake_ncu: Any, tmp_path: Path) -> None:
    """The table is read from ncu's log, so that what a child prints cannot spoil it."""
    (tmp_path / "table").write_text(table([("k", "5", "6")]))
    fake_ncu(f'echo \'"noise","of","a child"\'; cp {tmp_path}/table "$log"')
    assert ncu.parse(ncu.run_under(["true"], flush=False)) == [Launch("k", 5, 6)]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo "==ERROR== ERR_NVGPUCTRPERM - The user does not" > "$log"', "run as root"),
        ('echo "==ERROR== Failed to initialize the profiler" > "$log"', "initialize the profiler"),
        ("echo ValueError: too much; exit 9", "exit code 9: ValueError: too much\n"),
        ("exit 0", "0 kernels"),
        ("kill -9 $$", "exit code -9"),
    ],
)
def test_failures_of_ncu_are_told(script: str, said: str, fake_ncu: Any) -> None:
    """No permission, no profiler, a child that raised, no output: each says what happened."""
    fake_ncu(script)
    with pytest.raises(CountersError, match=re.escape(said)):
        ncu.parse(ncu.run_under(["true"], flush=False))


def test_missing_ncu_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without Nsight Compute the message says what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "PLACES", (str(tmp_path / "ncu"), str(tmp_path / "*" / "ncu")))
    with pytest.raises(CountersError, match="install Nsight Compute"):
        ncu.find()


def test_ncu_is_found_off_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation that is not on PATH is found, the newest of several by name."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for version in ("2024.1.0", "2025.3.1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    monkeypatch.setattr(ncu, "PLACES", (f"{tmp_path}/*/ncu",))
    assert ncu.find() == f"{tmp_path}/2025.3.1/ncu"


def test_hanging_child_is_ended_with_all_that_it_started(
    fake_ncu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After the time limit neither ncu nor what it runs is left behind."""
    monkeypatch.setattr(ncu, "TIMEOUT_S", 0.5)
    fake_ncu(f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(CountersError, match="stopped after"):
        ncu.run_under(["true"], flush=False)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Tell whether a process is there and no zombie that nobody has collected yet."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False)
    return found.stdout.strip()[:1] not in {b"", b"Z"}


@pytest.mark.parametrize(("flush", "control"), [(True, "all"), (False, "none")])
def test_command_line_leaves_clocks_alone_and_counts_on_demand(flush: bool, control: str) -> None:
    """Every option has its value, and the child's own words come last, untouched."""
    words = ncu.command("ncu", "log", ["python", '{"a": 1}'], flush=flush)
    assert words[-2:] == ["python", '{"a": 1}']
    options = dict(zip(words[2:-2:2], words[3:-2:2], strict=True))
    assert options["--cache-control"] == control
    assert options["--clock-control"] == "none"
    assert options["--profile-from-start"] == "off"
    assert options["--print-units"] == "base"
