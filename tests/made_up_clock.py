"""A GPU whose time is made up, so that what is measured is known before it is measured."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from paths import DEVICE

from rmsnorm_ref.measure import peers
from rmsnorm_ref.measure.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class MadeUpClock:
    """Let every replay take the time that `cost_s(graph, replay)` says, both counted from 0.

    Calls are counted and not made, so that a capture of interpreted kernels costs nothing. `order`
    keeps which graph was replayed when, and `n_calls` how many calls each graph holds.
    """

    def __init__(self, cost_s: Callable[[int, int], float]) -> None:
        self._cost_s = cost_s
        self._now_s = 0.0
        self.n_calls: list[int] = []
        self.order: list[int] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Make nothing current: there is no stream."""
        yield

    def capture(self, calls: Iterable[Callable[[], object]], n_kept: int) -> Callable[[], None]:
        """Return a replay that advances the time by the graph's cost times its calls."""
        assert n_kept > 0
        graph, n_calls = len(self.n_calls), len(list(calls))
        self.n_calls.append(n_calls)

        def replay() -> None:
            self._now_s += self._cost_s(graph, self.order.count(graph)) * n_calls
            self.order.append(graph)

        return replay

    def mark(self) -> float:
        """Return the time."""
        return self._now_s

    def seconds(self, start: float, end: float) -> float:
        """Return the time between two marks."""
        return end - start

    def finish(self) -> None:
        """Wait for nothing."""


def made_up_session(
    cost_s: Callable[[int, int], float] = lambda *_: 1e-6, names: tuple[str, ...] = ()
) -> Session:
    """Make a session on this machine's device whose time is made up, with an L2 of 1 KiB."""
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    known = peers.contenders()
    wanted = {name: known[name] for name in names}
    return Session(device, 1024, peers=wanted, clock=MadeUpClock(cost_s))
