"""Nsight Compute (`ncu`) from Python: run a child under it, read the counts that it prints.

What is counted and what the numbers mean is in `counters.py`.
"""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")  # both in one pass over the kernel
UNITS = {"byte": 1, "B": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}
TIMEOUT_S = 240
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


class CountersError(RuntimeError):
    """The counters cannot be read here; the message says why and what would help."""


class Launch(NamedTuple):
    """Hold one kernel's count."""

    kernel: str
    read_bytes: int
    write_bytes: int


# ---- Running ncu ------------------------------------------------------------------------------


def command(ncu: str, log: str, child: Sequence[str], *, flush: bool) -> list[str]:
    """Return the command line: base units, the GPU's own clocks, counting switched on by calls."""
    options = {
        "--metrics": ",".join(METRICS),
        "--cache-control": "all" if flush else "none",
        "--clock-control": "none",
        "--profile-from-start": "off",
        "--target-processes": "all",
        "--print-units": "base",
        "--log-file": log,
    }
    return [ncu, "--csv", *(part for option in options.items() for part in option), *child]


def find() -> str:
    """Return where ncu is; CountersError if it is not installed."""
    found = shutil.which("ncu")
    for place in PLACES:
        root, _, pattern = place.partition("*")
        matches = sorted(Path(root).glob(f"*{pattern}")) if pattern else [Path(place)]
        found = found or next((str(path) for path in reversed(matches) if path.is_file()), None)
    if found is None:
        raise CountersError(
            "ncu is not on PATH: install Nsight Compute (it is part of the CUDA toolkit) to count "
            "DRAM bytes, or leave the section counters out"
        )
    return found


def run_under(child: Sequence[str], *, flush: bool) -> str:
    """Run a child under ncu; return the CSV that it wrote, or raise with its last words."""
    above = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "LC_ALL": "C",  # numbers with a point
        "RMSNORM_REF_TUNING": "fixed",  # a search would be counted in minutes, not seconds
        "PYTHONPATH": os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH")))),
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        output, code = _run(command(find(), str(log), child, flush=flush), environment)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    complain(text + output, code)
    return text


def _run(words: Sequence[str], environment: dict[str, str]) -> tuple[str, int]:
    """Run a command in a process group of its own, which ends with us whatever ends us."""
    with subprocess.Popen(  # noqa: S603  # ncu and this interpreter
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            raise CountersError(f"ncu was stopped after {TIMEOUT_S} s") from error
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return output, process.returncode


def complain(output: str, code: int) -> None:
    """Raise CountersError if ncu's exit code or output tells of a failure."""
    if "ERR_NVGPUCTRPERM" in output:
        raise CountersError(
            "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, give the "
            "container CAP_SYS_ADMIN, or have the driver loaded with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    lines = output.strip().splitlines() or ["it said nothing"]
    errors = [line for line in lines if "==ERROR==" in line]
    if code or errors:
        said = "\n".join([(errors or lines)[-1], *lines[-8:]])  # the line that matters, then more
        raise CountersError(f"ncu ended with exit code {code}: {said}")


# ---- Reading its CSV --------------------------------------------------------------------------


def parse(text: str) -> list[Launch]:
    """Return the launches in ncu's CSV, in order; its own messages around the table are skipped.

    The table has a line per launch and metric; lines of one launch share its ID.

    Raises:
        CountersError: there is no table, or a metric is missing or has no number.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    counts: dict[str, dict[str, int]] = {}
    kernels: dict[str, str] = {}
    for line in csv.DictReader(lines):
        launch, metric = line.get("ID"), line.get("Metric Name")
        if launch is None or metric is None:
            raise CountersError(f"ncu's table has columns {list(line)}, and no Metric Name")
        kernels[launch] = line["Kernel Name"]
        if metric in METRICS:
            counts.setdefault(launch, {})[metric] = _bytes(line)
    if not kernels:
        raise CountersError("ncu counted 0 kernels: its output has no line with a launch")
    for launch, kernel in kernels.items():
        missing = [metric for metric in METRICS if metric not in counts.get(launch, {})]
        if missing:
            raise CountersError(f"ncu has no {missing[0]} for {kernel}")
    return [Launch(kernels[i], *(counts[i][metric] for metric in METRICS)) for i in kernels]


def _bytes(line: dict[str, str]) -> int:
    value, unit = line["Metric Value"], line["Metric Unit"]
    try:
        return round(float(value.replace(",", "")) * UNITS[unit])
    except (ValueError, KeyError):
        raise CountersError(
            f"ncu says {value!r} {unit!r} for {line['Metric Name']} of {line['Kernel Name']}: "
            "bytes were expected; does this GPU have the metric?"
        ) from None
