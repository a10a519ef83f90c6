"""Where and from which code a recording comes: the GPU, the versions, the clocks, the commit."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from rmsnorm_ref import __version__, tuning

from .fingerprint import fingerprint
from .schema import Clocks, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE = Path(__file__).parents[1]
# By the start of the device's name: bytes per second, and where the vendor states them.
DATASHEETS = {
    "NVIDIA H200": (4.8e12, "NVIDIA H200 Tensor Core GPU datasheet: 4.8 TB/s"),
    "NVIDIA H100 80GB HBM3": (3.35e12, "NVIDIA H100 Tensor Core GPU datasheet, SXM: 3.35 TB/s"),
    "NVIDIA A100-SXM4-80GB": (2.039e12, "NVIDIA A100 Tensor Core GPU datasheet: 2,039 GB/s"),
    "NVIDIA A100-SXM4-40GB": (1.555e12, "NVIDIA A100 Tensor Core GPU datasheet: 1,555 GB/s"),
}


def datasheet(gpu: str) -> tuple[float | None, str | None]:
    """Return what the vendor states for a GPU and where, or None twice for one not listed."""
    return next((found for name, found in DATASHEETS.items() if gpu.startswith(name)), (None, None))


def commit(package: Path = PACKAGE) -> tuple[str | None, bool, str | None]:
    """Return the commit of the code, whether tracked files equal it, and what to say about it.

    Outside a git checkout, say in an exported tree, RMSNORM_REF_COMMIT may name the commit. Nobody
    can check it there, so such a tree never counts as clean.
    """
    head = _output("git", "-C", str(package), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(package), "status", "--porcelain", "--untracked-files=no")
    # A package installed inside some other project's checkout is not that project's commit.
    ours = _output("git", "-C", str(package), "ls-files", "--", "__init__.py")
    if head and ours and changed is not None:
        return head, changed == "", None
    named = os.environ.get("RMSNORM_REF_COMMIT") or None
    source = "RMSNORM_REF_COMMIT names the commit" if named else "no commit is known"
    return named, False, f"not a git checkout: {source}, and the tree counts as not clean"


class ClockMonitor:
    """Read the clocks from nvidia-smi once a second while a run lasts; silent where it cannot."""

    def __init__(self, gpu_uuid: str) -> None:
        query = "--query-gpu=clocks.sm,clocks.mem --format=csv,noheader,nounits -lms 1000"
        self._command = ["nvidia-smi", "-i", gpu_uuid, *query.split()]
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        """Start reading."""
        with contextlib.suppress(OSError):
            # In a session of its own, so that Ctrl-C reaches the run and not the reader.
            self._process = subprocess.Popen(  # noqa: S603  # the words are our own
                self._command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reading."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._lines.extend(process.stdout)

    def clocks(self) -> Clocks | None:
        """Return what was seen so far."""
        return parse_clocks(list(self._lines))


def parse_clocks(lines: Sequence[str]) -> Clocks | None:
    """Return the span of "SM clock, memory clock" lines in MHz; None if no line has both.

    Example:
        >>> parse_clocks(["1980, 3201", "[N/A], 3201"]).sm_mhz.median
        1980.0
    """
    pairs = [tuple(word.strip() for word in line.split(",")) for line in lines]
    seen = [(float(p[0]), float(p[1])) for p in pairs if len(p) == 2 and all(map(str.isdigit, p))]
    if not seen:
        return None
    spans = (Span(min(mhz), statistics.median(mhz), max(mhz)) for mhz in zip(*seen, strict=True))
    return Clocks(*spans)


def driver_version() -> str | None:
    """Return the version of the GPU's driver, or None where nvidia-smi does not tell."""
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0].strip() if lines else None


def describe(device: torch.device) -> dict[str, Any]:
    """Return the fields of a Provenance that no run changes: machine, versions and code."""
    on_gpu = torch.cuda.get_device_properties(device)
    bandwidth, where = datasheet(on_gpu.name)
    head, clean, _ = commit()
    return {
        "gpu": on_gpu.name,
        "sm_count": on_gpu.multi_processor_count,
        "l2_bytes": on_gpu.L2_cache_size,
        "memory_bytes": on_gpu.total_memory,
        "datasheet_bandwidth_bytes_per_s": bandwidth,
        "datasheet": where,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": import_module("triton").__version__,
        "python": sys.version.split()[0],
        "rmsnorm_ref": __version__,
        "tuning": tuning.mode(),
        "commit": head,
        "clean": clean,
        "fingerprint": fingerprint(),
    }


def _output(*command: str) -> str | None:
    """Return what a command prints, or None where it cannot be run or fails."""
    try:
        done = subprocess.run(  # noqa: S603  # the words are our own
            command, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
