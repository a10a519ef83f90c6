"""Start and end the child of a pool: forked with a function, or by a nursery to load a name."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from . import candidate
from .nursery import import_ahead
from .worker import Worker, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from .candidate import Call
    from .nursery import Nursery


class Target(NamedTuple):
    """Say what is reviewed: a name to import, or a function at hand."""

    name: str
    signature: str = ""
    init: str = ""
    function: Any = None

    def words(self) -> dict[str, str]:
        """Return what a nursery needs to load it."""
        return {"target": self.name, "signature": self.signature, "init": self.init}

    def call(self) -> Call:
        """Return the candidate as `f(x, w, eps)`, in this process."""
        return self.find().call

    def find(self) -> candidate.Candidate:
        """Import the target, or adapt the function."""
        if self.function is not None:
            return candidate.adapt(self.function, self.signature, self.init)
        return candidate.find(self.name, self.signature, self.init)


class Child(Protocol):
    """A process that can be killed and waited for."""

    def kill(self) -> None:
        """Kill it, unless it has ended."""

    def wait(self) -> int:
        """Wait for its end; return its exit status, negative for a signal."""


class Forked:
    """A child of this very process."""

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

    def __init__(self, child: Child, requests: int, answers: int, errors: str) -> None:
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
    child: Child
    if target.function is not None:
        child = _fork(target, device, (theirs_in, theirs_out, errors), (ours_out, ours_in))
    else:
        assert nursery is not None
        words = target.words() | {"device": device}
        child = nursery.fork(words, theirs_in, theirs_out, errors)
    for descriptor in (theirs_in, theirs_out, errors):
        os.close(descriptor)
    return Process(child, ours_out, ours_in, name)


def _fork(
    target: Target, device: str, theirs: tuple[int, int, int], ours: tuple[int, int]
) -> Forked:
    find: Callable[[], candidate.Candidate] = target.find
    import_ahead()  # here, only once
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    requests, answers, errors = theirs
    try:
        # Nothing of the parent's is left open: it sees the end of a pipe only then.
        os.close(ours[0])
        os.close(ours[1])
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        faulthandler.enable(2)
        serve(Worker(find, device), requests, answers)
    finally:
        os._exit(0)
