"""The parent's side: a candidate in a child process, with a time limit for every request.

A child that crashes, hangs or breaks the GPU's context is an answer like any other; the next child
goes on with what is left. A target is loaded by a child that knows nothing yet (see `nursery.py`);
a Python function is taken along by fork, or, on a machine that has a GPU, called in this very
process: neither its context nor autograd's threads survive a fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any

import torch

from .probes import state_kept
from .process import start
from .worker import Worker, answered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .nursery import Nursery
    from .process import Process, Target

FIRST = 3  # times the limit for a process's first call, which may compile
LOAD_S = 180.0  # importing torch and a kernel's package; a first build may compile
MOST_DEATHS = 6  # then the review stops feeding: what is left is told as not run
MOST_HANGS = 2


class Pool:
    """Keep one child alive and ask it; `nursery` starts it where the target is a name."""

    def __init__(
        self, target: Target, device: str, limit_s: float, nursery: Nursery | None = None
    ) -> None:
        self._target = target
        self._nursery = nursery
        self._device = device
        self._limit_s = limit_s
        self._child: Process | None = None
        self._buffer = b""
        self._ids = 0
        self.n_deaths = self.n_hangs = 0
        # Where there is a GPU, autograd keeps a thread for it, which a fork would miss.
        can_fork = device == "cpu" and not torch.cuda.is_available()
        self.in_process = target.function is not None and not can_fork
        self._worker: Worker | None = None
        # Widths at which a process ended: others are tried before its luck runs out there.
        self._deadly: set[int] = set()
        self.spares = True
        self.most_deaths, self.most_hangs = MOST_DEATHS, MOST_HANGS

    @property
    def gave_up(self) -> bool:
        """Tell whether too many children died for another to be started."""
        return self.n_deaths >= self.most_deaths or self.n_hangs >= self.most_hangs

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
        with state_kept():  # this process goes on after the review
            result = answered(self._worker, request)
        if "cuda_error" in result:
            self.n_deaths = self.most_deaths = 1  # nothing works in this process any more
        return result

    def _feed(self, requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Send all requests, yield answers until they are done or the child is gone."""
        child = self._child = self._child or start(self._target, self._device, self._nursery)
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
            limit_s = self._limit_s * (FIRST if self._is_new(child, request) else 1)
            limit_s = LOAD_S if request["op"] in {"load", "bench"} else limit_s
            answer = self._wait(child, request["id"], limit_s)
            yield answer
            if "died" in answer or "cuda_error" in answer:
                self.close()
                return

    def _is_new(self, child: Process, request: dict[str, Any]) -> bool:
        """Tell whether a request may have to compile: on a GPU at each width, else at the first."""
        case = request.get("case")
        if request["op"] == "load" or (case is None and self._device != "cpu"):
            return True
        kind = (case["N"], case["dtype"], case["w_dtype"]) if case and self._device != "cpu" else ()
        new = kind not in child.known
        child.known.add(kind)
        return new

    def _wait(self, child: Process, number: int, limit_s: float) -> dict[str, Any]:
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

    def _buried(self, child: Process, how: str, said: str = "") -> dict[str, Any]:
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

    def kill(self) -> None:
        """Have the child end, if there is one, and do not wait."""
        if self._child is not None:
            self._child.kill()

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
