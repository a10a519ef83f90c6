"""What runs and times captured calls: a GPU, or in a test something whose time is made up."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

Work = Callable[[], object]


class Clock(Protocol):
    """What `graphed` asks of a GPU. A test hands in one whose time it makes up."""

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Make the place where all calls and captures happen the current one."""

    def capture(self, calls: Iterable[Work], n_kept: int) -> Work:
        """Return what replays the calls; keep the last `n_kept` results apart while recording."""

    def mark(self) -> Any:
        """Return a mark in the order of the work."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks, once `finish` has returned."""

    def finish(self) -> None:
        """Wait until all work is done."""


class CudaClock:
    """Time by CUDA events, on one stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Make the stream current, after all that was issued before."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, calls: Iterable[Work], n_kept: int) -> Work:
        """Capture a CUDA graph; inside, the memory of a result is reused `n_kept` calls later."""
        graph, kept = torch.cuda.CUDAGraph(), deque[object](maxlen=n_kept)
        with torch.cuda.graph(graph, stream=self._stream):
            for call in calls:
                kept.append(call())
        return graph.replay

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # the same
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two events."""
        return float(start.elapsed_time(end)) / 1e3

    def finish(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()
