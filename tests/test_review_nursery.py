"""Where a review's children come from: they share an import, and know of no call but their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from rmsnorm_ref.__main__ import STOPPED
from rmsnorm_ref.review.cases import Case
from rmsnorm_ref.review.crew import Crew
from rmsnorm_ref.review.nursery import Nursery
from rmsnorm_ref.review.pool import Pool
from rmsnorm_ref.review.process import Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASE = {"op": "case", "case": Case(2, 8).json()}
COUNTS = """
import os, sys, threading, time
from pathlib import Path
from rmsnorm_ref import oracle

with Path(r"{log}").open("a") as log:
    log.write("imported\\n")
{at_import}
first = 0

def f(x, w, eps):
    global first
    first = first or os.getpid()
    if first != os.getpid():
        raise RuntimeError("it was called in another process before")
    {at_call}
    return oracle.rmsnorm(x, w, eps)
"""

WRITES_PIDS = "Path(__file__).with_name('pids').write_text(f'{os.getpid()} {os.getppid()}')"


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., tuple[Target, Path]]:
    """Write a candidate that tells of its imports and of calls elsewhere; return both files."""

    def write(at_import: str = "", at_call: str = "") -> tuple[Target, Path]:
        path, log = tmp_path / "counts.py", tmp_path / "log.txt"
        path.write_text(COUNTS.format(log=log, at_import=at_import, at_call=at_call))
        return Target(f"{path}:f"), log

    return write


def asked(nursery: Nursery, target: Target, limit_s: float = 20.0) -> dict[str, Any]:
    """Return what a child that has just begun makes of one input."""
    with closing(Pool(target, "cpu", limit_s, nursery)) as pool:
        return pool.ask(CASE)


def test_children_share_an_import_and_no_call(
    written: Callable[..., tuple[Target, Path]],
) -> None:
    """A candidate is imported once, and called for the first time in each child."""
    target, log = written()
    with closing(Nursery("cpu")) as nursery:
        assert nursery.load(target.words("cpu"))
        for _ in range(3):
            assert "raised" not in asked(nursery, target)
    assert log.read_text().splitlines() == ["imported"]


@pytest.mark.parametrize(
    "at_import",
    ["threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 / 0"],
    ids=["a thread", "an error"],
)
def test_what_a_fork_would_miss_is_loaded_by_each(
    at_import: str, written: Callable[..., tuple[Target, Path]]
) -> None:
    """A thread does not survive a fork, and an error is told by the child that it is asked of."""
    target, log = written(at_import)
    with closing(Nursery("cpu")) as nursery:
        assert not nursery.load(target.words("cpu"))
        found = [asked(nursery, target) for _ in range(2)]
    for outcome in found:
        if at_import == "1 / 0":
            assert outcome["failed"]["type"] == "ZeroDivisionError"
        else:
            assert "raised" not in outcome
    assert len(log.read_text().splitlines()) == 3


def test_a_thread_that_a_fork_starts_again_is_no_hindrance(
    written: Callable[..., tuple[Target, Path]],
) -> None:
    """An allocator's own thread, which is known by its name, does not make each child import."""
    name = "ctypes.CDLL(None).prctl(15, b'jemalloc_bg_thd', 0, 0, 0)"  # 15: PR_SET_NAME
    body = f"lambda: ({name}, ready.set(), time.sleep(60))"
    target, _ = written(
        "import ctypes; ready = threading.Event(); "
        f"threading.Thread(target={body}, daemon=True).start(); ready.wait()"
    )
    with closing(Nursery("cpu")) as nursery:
        assert nursery.load(target.words("cpu"))
        assert "raised" not in asked(nursery, target)


@pytest.mark.parametrize(
    ("at_call", "said"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("os.abort()", "SIGABRT"),
        ("time.sleep(99)", "did not return within"),
    ],
)
def test_an_end_is_told_as_it_was(
    at_call: str, said: str, written: Callable[..., tuple[Target, Path]]
) -> None:
    """How a child ended is known, though it is no child of the process that asks; others go on."""
    target, _ = written(at_call=f"if x.shape[-1] == 8: {at_call}")
    with closing(Nursery("cpu")) as nursery:
        assert nursery.load(target.words("cpu"))
        assert said in asked(nursery, target, 1.0)["died"]["said"]
        with closing(Pool(target, "cpu", 20.0, nursery)) as pool:
            assert "tensors" in pool.ask({"op": "case", "case": Case(2, 9).json()})


def test_nothing_is_left_behind(written: Callable[..., tuple[Target, Path]]) -> None:
    """Once a nursery is closed its own processes have ended, and so have its children."""
    target, log = written(at_call=WRITES_PIDS)
    with closing(Nursery("cpu")) as nursery:
        assert nursery.load(target.words("cpu"))
        asked(nursery, target)
    for pid in log.with_name("pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_an_interrupt_is_told_in_one_line(written: Callable[..., tuple[Target, Path]]) -> None:
    """Ctrl-C, which all processes of the terminal get, ends them all, and shows no traceback."""
    target, log = written(at_call=f"{WRITES_PIDS}; time.sleep(99)")
    command = [sys.executable, "-m", "rmsnorm_ref", "review", target.name, "--device", "cpu"]
    # What a shell starts in the background ignores Ctrl-C, and so would all that it starts.
    heeded = signal.signal(signal.SIGINT, signal.default_int_handler)
    review = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    signal.signal(signal.SIGINT, heeded)
    pids = log.with_name("pids")
    while not (pids.exists() and pids.read_text()):
        assert review.poll() is None
        time.sleep(0.1)
    os.killpg(review.pid, signal.SIGINT)
    _, said = review.communicate(timeout=60)
    assert review.returncode == STOPPED
    assert "Traceback" not in said
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_child_of_before_ends_like_any_other(
    written: Callable[..., tuple[Target, Path]],
) -> None:
    """A child that loaded the candidate by itself is ended, though others fork by then."""
    target, log = written(at_import=WRITES_PIDS, at_call="time.sleep(99)")
    with closing(Nursery("cpu")) as nursery:
        with closing(Pool(target, "cpu", 1.0, nursery)) as pool:
            assert "signature" in pool.ask({"op": "load"})
            pid = int(log.with_name("pids").read_text().split()[0])
            assert nursery.load(target.words("cpu"))
            assert pool.ask(CASE)["died"]["how"] == "hung"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_who_ends_a_review_does_not_wait_for_an_import(
    written: Callable[..., tuple[Target, Path]],
) -> None:
    """A crew that is closed while its candidate is being loaded ends that as well."""
    target, log = written(at_import="time.sleep(99)")
    crew = Crew(target, "cpu", 20.0)
    while not log.exists():
        time.sleep(0.01)
    begun = time.monotonic()
    crew.close()
    assert time.monotonic() - begun < 30
