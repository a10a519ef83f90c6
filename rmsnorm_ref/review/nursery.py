"""A Python that has imported what every child of a review needs, and forks one for each start.

To import torch takes seconds, and a review on a GPU has a dozen children, and a new one for each
that ends. This one imports it once. It has seen no candidate and touched no GPU, so what it forks
knows as little as a fresh interpreter.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from . import candidate
from .worker import Worker, serve

LONGEST_END_S = 30.0  # a driver may hold on to a process that was killed; we need not wait


class Nursery:
    """Start that Python, have it fork and kill, be told how each child ended."""

    def __init__(self, device: str) -> None:
        here = str(Path(__file__).parents[2])
        before = os.environ.get("PYTHONPATH")
        environment = {
            # A search for the fastest launch moves no more than bits, and takes a second a width.
            "RMSNORM_REF_TUNING": "fixed",
            **({"TRITON_INTERPRET": "1"} if device == "cpu" else {}),
            **os.environ,
            "PYTHONPATH": os.pathsep.join([here, *([before] if before else [])]),
        }
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()  # pools start and end children side by side
        words = [str(theirs.fileno()), *(["triton"] if device != "cpu" else [])]
        self._popen = subprocess.Popen(  # noqa: S603  # our own interpreter and module
            # Not -m: runpy would warn of a module that its package has imported.
            [sys.executable, "-c", f"from {__name__} import main; main()", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=environment,
        )
        theirs.close()

    def fork(self, setup: dict[str, Any], requests: int, answers: int, errors: int) -> Child:
        """Fork a child that serves `setup`; the descriptors are for it, and stay open here."""
        ended, tells = os.pipe()
        descriptors = (requests, answers, errors, tells)
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(setup).encode()], descriptors)
            pid = int(self._socket.recv(64))
        os.close(tells)
        return Child(self, pid, ended)

    def kill(self, pid: int) -> None:
        """Kill a child, unless it has ended: a number may be somebody else's by then."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.send(json.dumps({"kill": pid}).encode())
            self._socket.recv(64)

    def close(self) -> None:
        """End it; its children end when their requests do."""
        self._socket.close()
        self._popen.wait()


class Child:
    """Hold a forked child and the pipe that tells how it ended."""

    def __init__(self, nursery: Nursery, pid: int, ended: int) -> None:
        self._nursery = nursery
        self._pid = pid
        self._ended = ended

    def kill(self) -> None:
        """Kill it."""
        self._nursery.kill(self._pid)

    def wait(self) -> int:
        """Wait for its end; return its exit status, negative for a signal."""
        ready = select.select([self._ended], [], [], LONGEST_END_S)[0]
        told = array.array("i", os.read(self._ended, 4) if ready else b"")
        os.close(self._ended)
        return told[0] if told else -signal.SIGKILL


# ---- What runs in that Python ------------------------------------------------------------------


def import_ahead(*names: str) -> None:
    """Import what the first torch.autograd.grad of a process does, and what else is installed."""
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # most of a second
    for name in names:
        if importlib.util.find_spec(name):
            importlib.import_module(name)


def main() -> None:
    """Import, then fork for each request until the socket is closed; a fork serves, and returns."""
    import_ahead(*sys.argv[2:])
    asked = socket.socket(fileno=int(sys.argv[1]))
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # one that is handled wakes
    signal.set_wakeup_fd(wakes)
    tells: dict[int, int] = {}
    while True:
        ready = select.select([asked.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _tell_of_ends(tells)
        if asked.fileno() not in ready:
            continue
        message, descriptors, *_ = socket.recv_fds(asked, 65536, 4)
        if not message:
            return
        request = json.loads(message)
        if "kill" in request:
            if request["kill"] in tells:
                os.kill(request["kill"], signal.SIGKILL)
            asked.send(b"0")
            continue
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (asked.fileno(), woken, wakes, descriptors[3], *tells.values()):
                os.close(descriptor)
            _become(request, *descriptors[:3])
            return
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        tells[pid] = descriptors[3]
        asked.send(str(pid).encode())


def _tell_of_ends(tells: dict[int, int]) -> None:
    """Write the status of every child that has ended to whoever waits for it."""
    for pid in list(tells):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            place = tells.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(place, array.array("i", [os.waitstatus_to_exitcode(status)]).tobytes())
            os.close(place)


def _become(setup: dict[str, Any], requests: int, answers: int, errors: int) -> None:
    """Serve one candidate: this process is a child."""
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.close(errors)
    faulthandler.enable(2)
    words = setup["target"], setup["signature"], setup["init"]
    serve(Worker(lambda: candidate.find(*words), setup["device"]), requests, answers)
