"""Start and end the child of a pool: forked with a function, or by a nursery to load a name."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import candidate
from .nursery import import_ahead, serve_as_child

if TYPE_CHECKING:
    from .candidate import Call
    from .nursery import Child, Nursery


class Target(NamedTuple):
    """Say what is reviewed: a name to import, or a function at hand."""

    name: str
    signature: str = ""
    init: str = ""
    function: Any = None

    def words(self, device: str) -> dict[str, str]:
        """Return what a nursery needs to load it and to serve it on a device."""
        asked = {"target": self.name, "signature": self.signature, "init": self.init}
        return asked | {"device": device}

    def call(self) -> Call:
        """Return the candidate as `f(x, w, eps)`, in this process."""
        return self.find().call

    def find(self) -> candidate.Candidate:
        """Import the target, or adapt the function."""
        if self.function is not None:
            return candidate.adapt(self.function, self.signature, self.init)
        return candidate.find(self.name, self.signature, self.init)


class Forked:
    """A child of this very process: what `nursery.Child` is of another."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        """Kill it: until it is waited for, the number is its own."""
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for its end; return its exit status, negative for a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


class Process:
    """Hold a child, the pipes to it and what it printed."""

    def __init__(self, child: Forked | Child, requests: int, answers: int, errors: str) -> None:
        self.requests, self.answers = requests, answers
        self.known: set[tuple[Any, ...]] = set()  # what was compiled
        self._child = child
        self._errors = Path(errors)
        self._said = ""
        self._status: int | None = None

    def end(self, *, kill: bool) -> int:
        """Close the pipes, wait; return the exit status, negative for a signal."""
        if self._status is None:
            os.close(self.requests)
            os.close(self.answers)
            if kill:
                self._child.kill()
            self._status = self._child.wait()
            self._keep_errors()
        return self._status

    def kill(self) -> None:
        """Have it end, and do not wait."""
        if self._status is None:
            self._child.kill()

    def said(self) -> str:
        """Return the last lines of its standard error, once it has ended."""
        return self._said

    def _keep_errors(self) -> None:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        self._errors.unlink(missing_ok=True)
        self._said = "\n".join(lines[-6:])


def start(target: Target, device: str, nursery: Nursery | None) -> Process:
    """Start a child: a fork that has the function, or without one a nursery's, which imports it."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    errors, name = tempfile.mkstemp(prefix="rmsnorm_ref-review-")
    child: Forked | Child
    if target.function is not None:
        child = _fork(target, device, (theirs_in, theirs_out, errors), (ours_out, ours_in))
    else:
        assert nursery is not None
        child = nursery.fork(target.words(device), theirs_in, theirs_out, errors)
    for descriptor in (theirs_in, theirs_out, errors):
        os.close(descriptor)
    return Process(child, ours_out, ours_in, name)


def _fork(
    target: Target, device: str, theirs: tuple[int, int, int], ours: tuple[int, int]
) -> Forked:
    import_ahead()  # here, only once
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    try:
        # Nothing of the parent's is left open: it sees the end of a pipe only then.
        for descriptor in ours:
            os.close(descriptor)
        serve_as_child(target.find, device, *theirs)
    finally:
        os._exit(0)
