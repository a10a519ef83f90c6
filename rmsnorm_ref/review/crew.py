"""Several children on one GPU: a kernel is compiled for every width, and each takes a core."""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch

from .nursery import Nursery
from .pool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .process import Target

MOST = 16
BYTES_EACH = 2 * 2**30  # of the GPU's memory: a context, and what the cases hold
DEATHS_EACH, HANGS_EACH = 3, 1
WIDE = 16384  # columns of rows that take about twice as long to compile as short ones


class Crew:
    """Ask several pools at once, like one of them.

    All of one width and dtype goes to one pool, where it is compiled once. Which one follows from
    the order of the requests alone, and so do the answers.
    """

    def __init__(self, target: Target, device: str, limit_s: float, size: int = 0) -> None:
        self._nursery = Nursery(device) if target.function is None else None
        size = size or _size(target, device)  # while that one imports
        # One fork loads the candidate for all. The first pool does not wait for it, as it may turn
        # out to be no use: what is asked first loads the candidate by itself.
        self._loading = threading.Thread(target=self._load, args=(target.words(device),))
        self._loading.start()
        self.pools = [Pool(target, device, limit_s, self._nursery) for _ in range(size)]
        self._homes: dict[tuple[Any, ...], Pool] = {}
        self._loads = dict.fromkeys(self.pools, 0.0)
        self._starting: list[threading.Thread] = []
        if size > 1:
            for pool in self.pools:
                pool.most_deaths, pool.most_hangs = DEATHS_EACH, HANGS_EACH
            # All but the first, which is asked at once, start in the background.
            self._starting = [
                threading.Thread(target=self._start, args=(pool,), daemon=True)
                for pool in self.pools[1:]
            ]
            for thread in self._starting:
                thread.start()

    def _load(self, words: dict[str, str]) -> None:
        if self._nursery is not None:
            self._nursery.load(words)

    def _start(self, pool: Pool) -> None:
        self._loading.join()
        pool.ask({"op": "load"})

    @property
    def gave_up(self) -> bool:
        """Tell whether no pool goes on."""
        return all(pool.gave_up for pool in self.pools)

    @property
    def in_process(self) -> bool:
        """Tell whether the candidate runs in this very process."""
        return self.pools[0].in_process

    def renew(self) -> None:
        """End all children: who is asked next knows of no earlier call."""
        _end(self.pools)

    def forgive(self) -> None:
        """Forget all deaths, and pass over nothing from now on: the search for the smallest."""
        for pool in self.pools:
            pool.spares = False
            pool.n_deaths = pool.n_hangs = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request."""
        return next(iter(self.each([request])))

    def each(self, requests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the answer to each request, in their order, as `Pool.each` does."""
        if len(requests) > 1:
            self._wait_for_all()
        shares: dict[Pool, list[int]] = {}
        for index, request in enumerate(requests):
            shares.setdefault(self._home(request), []).append(index)
        if len(shares) == 1:
            yield from next(iter(shares)).each(requests)
            return
        answered: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for pool, share in shares.items():
            words = pool, share, [requests[i] for i in share], answered
            threading.Thread(target=_work, args=words, daemon=True).start()
        known: dict[int, dict[str, Any]] = {}
        for wanted in range(len(requests)):
            while wanted not in known:
                index, answer = answered.get()
                if index < 0:
                    raise answer
                known[index] = answer
            yield known.pop(wanted)

    def _home(self, request: dict[str, Any]) -> Pool:
        case = request.get("case")
        if case is None or self._starting:  # a pool that starts is its thread's alone
            return self.pools[0]
        key = (case["N"], case["dtype"])
        if key not in self._homes:
            # Who has least to compile so far; wide rows take longer.
            home = self._homes[key] = min(self.pools, key=self._loads.__getitem__)
            self._loads[home] += 1 + case["N"] / WIDE
        return self._homes[key]

    def leave_one(self) -> None:
        """End all children but the first: nothing else is to run while it times."""
        self._wait_for_all()
        _end(self.pools[1:])

    def _wait_for_all(self) -> None:
        for thread in self._starting:
            thread.join()
        self._starting = []

    def close(self) -> None:
        """End all children."""
        if self._nursery is not None:
            self._nursery.stop_loading()
        self._loading.join()
        _end(self.pools)
        self._wait_for_all()  # one that was being started is there now
        _end(self.pools)
        if self._nursery is not None:
            self._nursery.close()


def _end(pools: list[Pool]) -> None:
    """End the children of some pools, side by side: a GPU's driver takes a while over each."""
    for pool in pools:
        pool.kill()
    for pool in pools:
        pool.close()


def _work(
    pool: Pool,
    share: list[int],
    requests: list[dict[str, Any]],
    answered: queue.SimpleQueue[tuple[int, Any]],
) -> None:
    """Have a pool answer its share; what it raises goes where it is waited for."""
    try:
        for index, answer in zip(share, pool.each(requests), strict=True):
            answered.put((index, answer))
    except BaseException as error:  # noqa: BLE001  # see above
        answered.put((-1, error))


def _size(target: Target, device: str) -> int:
    if device == "cpu" or target.function is not None:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(MOST, (cores or 2) - 1, free // BYTES_EACH))
