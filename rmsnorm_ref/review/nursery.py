"""A Python that has imported what every child of a review needs, and forks one for each start.

To import torch and a candidate takes seconds, and a review on a GPU has a dozen children, and a new
one for each that ends. So a Python imports torch once; forks of it that load a candidate know as
little as a fresh interpreter. One fork loads the candidate and calls nothing: if that went well,
and left no thread and no GPU behind that a fork would miss, it forks the children from then on.
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
from typing import TYPE_CHECKING, Any

import torch

from . import candidate
from .worker import Worker, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    # What a fork does: with the words of the request and the descriptors that came with it.
    Become = Callable[[dict[str, Any], list[int]], None]

LONGEST_LOAD_S = 60.0  # of the candidate in one fork for all
STARTED_AGAIN = {"jemalloc_bg_thd"}  # by a fork itself: threads of an allocator, as pyarrow's
LONGEST_END_S = 30.0  # a driver may hold on to a process that was killed; we need not wait


class Nursery:
    """Start that Python, have it fork and kill, be told how each child ended."""

    def __init__(self, device: str) -> None:
        here = str(Path(__file__).parents[2])
        before = os.environ.get("PYTHONPATH")
        environment = {
            # A search for the fastest launch moves no more than bits, and takes a second a width.
            "RMSNORM_REF_TUNING": "fixed",
            # So that to ask whether there is a GPU leaves its driver alone.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # Children compute with one thread; a pool that an import starts would not be forked.
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            **({"TRITON_INTERPRET": "1"} if device == "cpu" else {}),
            **os.environ,
            "PYTHONPATH": os.pathsep.join([here, *([before] if before else [])]),
        }
        self._lock = threading.Lock()  # pools start and end children side by side
        self._first, theirs = _pair()
        self._socket = self._first  # of whoever forks from now on
        self._loads: int | None = None  # the fork that loads the candidate for all
        # Ctrl-C reaches the whole group; whoever started the review ends these.
        starts = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from {__name__} "
        self._popen = subprocess.Popen(  # noqa: S603  # our own interpreter and module
            # Not -m: runpy would warn of a module that its package has imported.
            [sys.executable, "-c", starts + "import main; main()", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=environment,
        )
        theirs.close()

    def load(self, setup: dict[str, Any]) -> bool:
        """Have one fork load the candidate, and the children forked from that, if it can be."""
        ours, theirs = _pair()
        pid = self._loads = self._ask(self._first, {"load": setup}, theirs.fileno())
        theirs.close()
        ready = select.select([ours.fileno()], [], [], LONGEST_LOAD_S)[0]
        if not ready or not ours.recv(64):
            self.kill(self._first, pid)
            ours.close()
            return False
        self._socket = ours
        return True

    def stop_loading(self) -> None:
        """End the fork that loads the candidate, if it still does: `load` returns."""
        if self._loads is not None and self._socket is self._first:
            self.kill(self._first, self._loads)

    def fork(self, setup: dict[str, Any], requests: int, answers: int, errors: int) -> Child:
        """Fork a child that serves `setup`; the descriptors are for it, and stay open here."""
        ended, tells = os.pipe()
        forker = self._socket
        pid = self._ask(forker, setup, requests, answers, errors, tells)
        os.close(tells)
        return Child(lambda: self.kill(forker, pid), ended)

    def kill(self, forker: socket.socket, pid: int) -> None:
        """Kill a fork of its own, unless it has ended: a number may be somebody else's by then."""
        with contextlib.suppress(OSError):
            self._ask(forker, {"kill": pid})

    def _ask(self, forker: socket.socket, words: dict[str, Any], *descriptors: int) -> int:
        with self._lock:
            socket.send_fds(forker, [json.dumps(words).encode()], descriptors)
            return int(forker.recv(64))

    def close(self) -> None:
        """End it; its children end when their requests do."""
        self._socket.close()
        self._first.close()
        try:
            self._popen.wait(LONGEST_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()


class Child:
    """Hold a forked child and the pipe that tells how it ended."""

    def __init__(self, kill: Callable[[], None], ended: int) -> None:
        self.kill = kill
        self._ended = ended

    def wait(self) -> int:
        """Wait for its end; return its exit status, negative for a signal."""
        ready = select.select([self._ended], [], [], LONGEST_END_S)[0]
        told = array.array("i", os.read(self._ended, 4) if ready else b"")
        os.close(self._ended)
        return told[0] if told else -signal.SIGKILL


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return two ends that keep messages whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


# ---- What runs in that Python ------------------------------------------------------------------


def import_ahead(*names: str) -> None:
    """Import what the first torch.autograd.grad of a process does, and what else is installed."""
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # most of a second
    for name in names:
        if importlib.util.find_spec(name):
            importlib.import_module(name)


def main() -> None:
    """Import, then fork for each request until the socket is closed."""
    import_ahead("triton")

    def become(setup: dict[str, Any], descriptors: list[int]) -> None:
        if "load" in setup:
            _load(setup["load"], descriptors[0])
        else:
            words = setup["target"], setup["signature"], setup["init"]
            serve_as_child(lambda: candidate.find(*words), setup["device"], *descriptors)

    _Forker(socket.socket(fileno=int(sys.argv[1])), become).run()


class _Forker:
    """Fork for each request that comes over a socket, tell how each fork ended."""

    def __init__(self, asked: socket.socket, become: Become) -> None:
        self._asked = asked
        self._become = become
        self._tells: dict[int, int | None] = {}  # by process: where its end is told, if anywhere
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # one that is handled wakes
        signal.set_wakeup_fd(self._wakes)

    def run(self) -> None:
        """Answer until nobody asks any more; return in a fork, once it has done its work."""
        while True:
            ready = select.select([self._asked.fileno(), self._woken], [], [])[0]
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._tell_of_ends()
            if self._asked.fileno() in ready:
                message, descriptors, *_ = socket.recv_fds(self._asked, 65536, 4)
                if not message:
                    break
                request = json.loads(message)
                if "kill" in request:
                    self._kill(request["kill"])
                elif self._fork(request, descriptors):
                    return
        for pid in self._tells:  # what these wait for has gone as well
            os.waitpid(pid, 0)
        os._exit(0)

    def _kill(self, pid: int) -> None:
        if pid in self._tells:
            os.kill(pid, signal.SIGKILL)
        self._asked.send(b"0")

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> bool:
        """Fork; return whether this is the fork, at its end."""
        tell = None if "load" in request else descriptors.pop()
        pid = os.fork()
        if pid:
            self._tells[pid] = tell
            for descriptor in descriptors:
                os.close(descriptor)
            self._asked.send(str(pid).encode())
            return False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if tell is not None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._asked.close()
        for ours in (self._woken, self._wakes, tell, *self._tells.values()):
            if ours is not None:
                os.close(ours)
        self._become(request, descriptors)
        return True

    def _tell_of_ends(self) -> None:
        """Write the status of every fork that has ended to whoever waits for it."""
        for pid in list(self._tells):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            place = self._tells.pop(pid)
            if place is not None:
                code = array.array("i", [os.waitstatus_to_exitcode(status)])
                with contextlib.suppress(BrokenPipeError):
                    os.write(place, code.tobytes())
                os.close(place)


def _load(setup: dict[str, Any], descriptor: int) -> None:
    """Load a candidate, say so, and fork for each request with it; end where that is no use."""
    nowhere = os.open(os.devnull, os.O_WRONLY)  # a child that loads it by itself is listened to
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.cuda.is_available()  # whatever that starts, each child starts for itself
    n_threads = _n_threads()
    found = candidate.find(setup["target"], setup["signature"], setup["init"])
    if _n_threads() > n_threads or not _survives_a_fork(setup["device"]):
        return
    asked = socket.socket(fileno=descriptor)
    asked.send(b"loaded")
    _Forker(
        asked,
        lambda setup, descriptors: serve_as_child(lambda: found, setup["device"], *descriptors),
    ).run()


def _n_threads() -> int:
    """Count the threads that a fork would miss."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return threading.active_count()
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
    return sum(name not in STARTED_AGAIN for name in names)


def _survives_a_fork(device: str) -> bool:
    """Tell whether a fork of this process can use the device: not once its driver was asked."""
    if device == "cpu":
        return True
    pid = os.fork()
    if not pid:
        with contextlib.suppress(Exception):
            torch.zeros(1, device=device)
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def serve_as_child(
    find: Callable[[], candidate.Candidate], device: str, requests: int, answers: int, errors: int
) -> None:
    """Serve one candidate in this process, whose output goes to `errors` from now on."""
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.close(errors)
    faulthandler.enable(2)
    serve(Worker(find, device), requests, answers)
