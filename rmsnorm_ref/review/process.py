"""Start and end the child of a pool: forked with a function, or a fresh interpreter with a name."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import candidate
from .worker import Worker, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from .candidate import Call


class Target(NamedTuple):
    """Say what is reviewed: a name to import, or a function at hand."""

    name: str
    signature: str = ""
    init: str = ""
    function: Any = None

    def call(self) -> Call:
        """Return the candidate as `f(x, w, eps)`, in this process."""
        return self.find().call

    def find(self) -> candidate.Candidate:
        """Import the target, or adapt the function."""
        if self.function is not None:
            return candidate.adapt(self.function, self.signature, self.init)
        return candidate.find(self.name, self.signature, self.init)


class Process:
    """Hold a child, forked or started."""

    def __init__(self, pid: int, requests: int, answers: int, errors: str) -> None:
        self.pid, self.requests, self.answers = pid, requests, answers
        self._errors = Path(errors)
        self._said = ""
        self._status: int | None = None
        self.known: set[tuple[Any, ...]] = set()  # what was compiled
        self.popen: subprocess.Popen[bytes] | None = None

    def end(self, *, kill: bool) -> int:
        """Close the pipes, wait; return the exit status, negative for a signal."""
        if self._status is None:
            os.close(self.requests)
            os.close(self.answers)
            if kill:
                os.kill(self.pid, signal.SIGKILL)
            if self.popen is not None:
                try:
                    self._status = self.popen.wait(30.0)
                except subprocess.TimeoutExpired:  # a driver may hold on to it; we need not wait
                    self.popen.kill()
                    self._status = -signal.SIGKILL
            else:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._keep_errors()
        return self._status

    def said(self) -> str:
        """Return the last lines of its standard error, once it has ended."""
        return self._said

    def _keep_errors(self) -> None:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        self._errors.unlink(missing_ok=True)
        self._said = "\n".join(lines[-6:])


def start(target: Target, device: str) -> Process:
    """Start a child: a fork that has the function, or a fresh interpreter that imports it."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    errors, name = tempfile.mkstemp(prefix="rmsnorm_ref-review-")
    ends = {"requests": theirs_in, "answers": theirs_out, "device": device}
    begin = _spawn if target.function is None else _fork
    process = begin(target, ends, errors, (ours_out, ours_in, name))
    for descriptor in (theirs_in, theirs_out, errors):
        os.close(descriptor)
    return process


def _spawn(
    target: Target, ends: dict[str, Any], errors: int, ours: tuple[int, int, str]
) -> Process:
    setup = ends | {"target": target.name, "signature": target.signature, "init": target.init}
    here = str(Path(__file__).parents[2])
    before = os.environ.get("PYTHONPATH")
    environment = {
        # A search for the fastest launch moves no more than bits, and takes a second for a width.
        "RMSNORM_REF_TUNING": "fixed",
        **({"TRITON_INTERPRET": "1"} if ends["device"] == "cpu" else {}),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([here, *([before] if before else [])]),
    }
    popen = subprocess.Popen(  # noqa: S603  # our own interpreter and module
        # Not -m: runpy would warn of a module that its package has imported.
        [sys.executable, "-c", f"from {__package__}.worker import main; main()", json.dumps(setup)],
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=(ends["requests"], ends["answers"]),
        env=environment,
    )
    process = Process(popen.pid, *ours)
    process.popen = popen
    return process


def _fork(target: Target, ends: dict[str, Any], errors: int, ours: tuple[int, int, str]) -> Process:
    find: Callable[[], candidate.Candidate] = target.find
    # The first torch.autograd.grad of a process imports it, for most of a second; here, only once.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Process(pid, *ours)
    try:
        # Nothing of the parent's is left open: it sees the end of a pipe only then.
        os.close(ours[0])
        os.close(ours[1])
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        faulthandler.enable(2)
        serve(Worker(find, ends["device"]), ends["requests"], ends["answers"])
    finally:
        os._exit(0)
