"""The parent's side: a candidate in a child process, with a time limit for every request.

A child that crashes, hangs or breaks the GPU's context is an answer like any other; the next child
goes on with what is left. A target is loaded in a fresh interpreter; a Python function is taken
along by fork on a CPU, and called in this very process on a GPU, whose context no fork survives.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from . import candidate
from .worker import Worker, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .candidate import Call

FIRST = 3  # times the limit for a process's first call, which may compile
LOAD_S = 180.0  # importing torch and a kernel's package; a first build may compile
MOST_DEATHS = 6  # then the review stops feeding: what is left is told as not run
MOST_HANGS = 2


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


class Child(Protocol):
    """A process that answers."""

    pid: int
    requests: int
    answers: int
    errors: Path


class Pool:
    """Keep one child alive and ask it."""

    def __init__(self, target: Target, device: str, limit_s: float) -> None:
        self._target = target
        self._device = device
        self._limit_s = limit_s
        self._child: _Process | None = None
        self._buffer = b""
        self._ids = 0
        self.n_deaths = self.n_hangs = 0
        self.in_process = target.function is not None and device != "cpu"
        self._worker: Worker | None = None
        # Widths at which a process ended: others are tried before its luck runs out there.
        self._deadly: set[int] = set()
        self.spares = True

    @property
    def gave_up(self) -> bool:
        """Tell whether too many children died for another to be started."""
        return self.n_deaths >= MOST_DEATHS or self.n_hangs >= MOST_HANGS

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request."""
        return next(iter(self.each([request])))

    def each(self, requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the answer to each request.

        `died` says how a child ended; `not_run` that a request was passed over.
        """
        left = list(requests)
        while left:
            if self.gave_up:
                yield {"not_run": True}
                left.pop(0)
                continue
            if self.in_process:
                yield self._here(left.pop(0))
                continue
            if _width(left[0]) in self._deadly and self.spares:
                yield {"not_run": True}
                left.pop(0)
                continue
            if self._child is None and left[0]["op"] != "load":
                loaded = next(self._feed([{"op": "load"}]))
                if "signature" not in loaded:
                    yield loaded
                    left.pop(0)
                    continue
            for answer in self._feed(self._until_deadly(left)):
                done = left.pop(0)
                yield answer
                if self._child is None:
                    self._deadly |= {_width(done)} - {-1}
                    break

    def _until_deadly(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take the requests before the next one that is passed over."""
        if not self.spares or not self._deadly:
            return requests
        ends = (i for i, request in enumerate(requests) if _width(request) in self._deadly)
        return requests[: next(ends, len(requests))]

    def _here(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._worker is None:
            self._worker = Worker(self._target.find, self._device)
        try:
            return self._worker.answer(request)
        except Exception as error:  # noqa: BLE001  # told, and judged like a child's
            return {"failed": {"stage": "", "type": type(error).__name__, "text": str(error)[:300]}}

    def _feed(self, requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Send all requests, yield answers until they are done or the child is gone."""
        child = self._child = self._child or _start(self._target, self._device)
        numbered = []
        for request in requests:
            self._ids += 1
            numbered.append(request | {"id": self._ids})
        sent = (json.dumps(numbered) + "\n").encode()
        try:
            # A pipe holds 64 KiB: the child reads the line whole before it answers.
            _write(child.requests, sent)
        except BrokenPipeError:
            yield self._buried(child, "ended")
            return
        for request in numbered:
            limit_s = self._limit_s * (1 if child.warm else FIRST)
            limit_s = LOAD_S if request["op"] in {"load", "bench"} else limit_s
            child.warm = request["op"] != "load"
            answer = self._wait(child, request["id"], limit_s)
            yield answer
            if "died" in answer or "cuda_error" in answer:
                self.close()
                return

    def _wait(self, child: _Process, number: int, limit_s: float) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                said = json.loads(line)
                if said.get("done") == number:
                    if "cuda_error" in said["result"]:
                        self.n_deaths += 1
                    result: dict[str, Any] = said["result"]
                    return result
                continue
            left = end - time.monotonic()
            ready = select.select([child.answers], [], [], max(0.0, left))[0]
            if not ready:
                self.n_hangs += 1
                return self._buried(child, "hung", f"did not return within {limit_s:g} s")
            found = os.read(child.answers, 65536)
            if not found:
                return self._buried(child, "crashed")
            self._buffer += found

    def _buried(self, child: _Process, how: str, said: str = "") -> dict[str, Any]:
        """End a child; return how it ended."""
        self.n_deaths += 1
        status = child.end(kill=how == "hung")
        tail = child.said()
        self.close()
        if how == "hung":
            return {"died": {"how": how, "said": said, "tail": ""}}
        number = -status if status < 0 else 0
        said = signal.Signals(number).name if number else f"exit code {status}"
        return {"died": {"how": how, "said": f"the process ended by {said}", "tail": tail}}

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child, self._buffer = self._child, None, b""
        if child is not None:
            child.end(kill=True)


def _width(request: dict[str, Any]) -> int:
    return int(request.get("case", {}).get("N", -1))


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


class _Process:
    """Hold a child, forked or started."""

    def __init__(self, pid: int, requests: int, answers: int, errors: str) -> None:
        self.pid, self.requests, self.answers = pid, requests, answers
        self._errors = Path(errors)
        self._status: int | None = None
        self.warm = False
        self.popen: subprocess.Popen[bytes] | None = None

    def end(self, *, kill: bool) -> int:
        """Close the pipes, wait; return the exit status, negative for a signal."""
        if self._status is None:
            os.close(self.requests)
            os.close(self.answers)
            if kill:
                os.kill(self.pid, signal.SIGKILL)
            if self.popen is not None:
                self._status = self.popen.wait()
            else:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def said(self) -> str:
        """Return the last lines of its standard error, once."""
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        self._errors.unlink(missing_ok=True)
        return "\n".join(lines[-6:])


def _start(target: Target, device: str) -> _Process:
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    errors, name = tempfile.mkstemp(prefix="rmsnorm_ref-review-")
    ends = {"requests": theirs_in, "answers": theirs_out, "device": device}
    start = _spawn if target.function is None else _fork
    process = start(target, ends, errors, (ours_out, ours_in, name))
    for descriptor in (theirs_in, theirs_out, errors):
        os.close(descriptor)
    return process


def _spawn(
    target: Target, ends: dict[str, Any], errors: int, ours: tuple[int, int, str]
) -> _Process:
    setup = ends | {"target": target.name, "signature": target.signature, "init": target.init}
    here = str(Path(__file__).parents[2])
    before = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([here, *([before] if before else [])])
    }
    popen = subprocess.Popen(  # noqa: S603  # our own interpreter and module
        [sys.executable, "-m", f"{__package__}.worker", json.dumps(setup)],
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=(ends["requests"], ends["answers"]),
        env=environment,
    )
    process = _Process(popen.pid, *ours)
    process.popen = popen
    return process


def _fork(
    target: Target, ends: dict[str, Any], errors: int, ours: tuple[int, int, str]
) -> _Process:
    find: Callable[[], candidate.Candidate] = target.find
    # The first torch.autograd.grad of a process imports it, for most of a second; here, only once.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return _Process(pid, *ours)
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
