"""Kernels that search for their launch: a review draws each key's config, and times none.

To time every config at every width takes minutes, and needs a GPU. What is fastest depends on the
moment, so two reviews of one kernel would review two. And whatever a search may choose has to be
right. So each key of Triton's autotuner takes one of its configs, drawn by the key, and by the
width of the rows, which not every key holds: over a review all are met, and in the next the same.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUNS, RUNS_NOT = 0.0, float("inf")  # what stands for a time
CHANGED = ("cache_results", "do_bench", "best_config", "configs_timings", "bench_time")

_width = 0


def fed(n_columns: int) -> None:
    """Say how wide the rows are that a candidate is called with, before each call."""
    global _width  # noqa: PLW0603  # autograd may run the backward in a thread of its own
    _width = n_columns


@contextlib.contextmanager
def drawn(seen: dict[str, int]) -> Iterator[None]:
    """Let no search time anything inside; add to `seen` each kernel's number of configs.

    What is drawn is forgotten at the end: a search outside is the kernel's own.
    """
    module: Any = sys.modules.get("triton.runtime.autotuner")
    if module is None:
        yield
        return
    tuners: dict[int, tuple[Any, dict[str, Any], dict[Any, Any]]] = {}
    before = module.Autotuner.prune_configs
    original = getattr(before, "undrawn", before)  # inside another such block, draw once

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        left: list[Any] = original(self, kwargs)
        if len(left) < 2:
            return left
        name = self.base_fn.__name__
        seen[name] = max(seen.get(name, 0), len(left))
        if id(self) not in tuners:
            tuners[id(self)] = self, *_state(self)
        self.cache_results = False  # a file of times that nobody measured is for nobody
        self.do_bench = _first_that_runs()
        key = hashlib.sha256(repr((name, _width, _key(self, kwargs))).encode())
        turn = int(key.hexdigest(), 16) % len(left)
        return [*left[turn:], *left[:turn]]

    prune_configs.undrawn = original  # type: ignore[attr-defined]  # read above
    module.Autotuner.prune_configs = prune_configs
    try:
        yield
    finally:
        module.Autotuner.prune_configs = before
        for found in tuners.values():
            _put_back(*found)


@functools.cache
def draw_for_good() -> None:
    """Let no search time anything in this process from now on, as a review's children do."""
    if importlib.util.find_spec("triton"):
        importlib.import_module("triton")
    forever = drawn({})
    forever.__enter__()
    atexit.register(forever.__exit__, None, None, None)  # before its module is taken apart


def _state(tuner: Any) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Return what a search changes of a tuner, as far as it is there yet, and what it chose."""
    return {k: vars(tuner)[k] for k in CHANGED if k in vars(tuner)}, dict(tuner.cache)


def _put_back(tuner: Any, kept: dict[str, Any], chosen: dict[Any, Any]) -> None:
    for name in CHANGED:
        vars(tuner).pop(name, None)
    vars(tuner).update(kept)
    tuner.cache.clear()
    tuner.cache.update(chosen)


def _key(tuner: Any, kwargs: dict[str, Any]) -> list[str]:
    """Return what a search tells apart: the values of its key, and every dtype."""
    given = {**tuner.nargs, **kwargs}
    values = [_spell(given[name]) for name in tuner.keys if name in given]
    return values + [str(value.dtype) for value in given.values() if hasattr(value, "dtype")]


def _spell(value: Any) -> str:
    """Name a value of a key, the same in every process: not by an address."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return str(getattr(value, "__name__", type(value).__name__))


def _first_that_runs() -> Callable[..., list[float]]:
    """Return what a tuner takes for its clock: one launch, until one fits this GPU."""
    found = False

    def do_bench(kernel_call: Callable[[], Any], quantiles: Any = None) -> list[float]:
        del quantiles
        nonlocal found
        if found:
            return [RUNS_NOT] * 3
        try:
            kernel_call()  # raises where it does not fit a GPU: the tuner goes on to the next
        except Exception as error:
            # What a compiler would refuse, and a tuner pass over, the interpreter asserts.
            if type(error).__name__ == "InterpreterError" and _asserts(error):
                return [RUNS_NOT] * 3
            raise
        found = True
        return [RUNS] * 3

    return do_bench


def _asserts(error: BaseException | None) -> bool:
    """Tell whether an assertion stands behind an error."""
    while error is not None and not isinstance(error, AssertionError):
        error = error.__cause__
    return error is not None
