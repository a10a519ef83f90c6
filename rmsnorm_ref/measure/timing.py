"""What a time is: the one timed region, three ways to ask for it, and what makes it suspect.

**The timed region.** `graphed` gives the kernel time of one call. Before the clock runs, every
contender is called once on every input set: that compiles, searches configs, and for a backward
runs the forward. Then `n_loops` rounds of calls over all input sets are captured in a CUDA graph,
one graph per contender. A sample lies between two events on the stream around one replay of that
graph, divided by the calls in it. So in the time are the kernels of the calls, whatever lies
between them on the GPU, and the start of one graph, shared by all its calls. Python, autograd's
bookkeeping, compilation and memory allocation are not. Samples of all contenders take turns
(A B A B) with no wait in between, so that the host is always ahead and clocks are the same for all.

Inputs take turns because a graph that replays one input measures the L2: `n_input_sets` makes their
footprint several times its size, and as many results as input sets are kept while a graph is
captured, so that outputs take turns as well.

A backward is timed alone, and in the same way for everyone: `Backward` runs the forward before the
capture, on the stream of the capture, and the graph holds only what `torch.autograd.grad` launches
for x and w, a reduction of dw included.

`cold` is `triton.testing.do_bench`: one call after 256 MB of L2 were overwritten. `host` is the
time the host needs to issue a call, with the GPU far from busy.
"""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .calls import Backward, Forward, InputSet, ceilings, make_inputs, n_input_sets, n_loops
from .clock import Clock, CudaClock, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .schema import Flag

__all__ = [
    "Backward",
    "Clock",
    "CudaClock",
    "Forward",
    "InputSet",
    "NoGpuError",
    "NoSamplesError",
    "Sample",
    "Work",
    "ceilings",
    "cold",
    "flags",
    "graphed",
    "host",
    "make_inputs",
    "n_input_sets",
    "n_loops",
    "require_gpu",
]

Inputs = TypeVar("Inputs")

N_ROUNDS = 15  # samples per contender, and as many again for the repeat


class NoGpuError(RuntimeError):
    """There is no GPU to time, or Triton was told to interpret. Exit code 3."""

    exit_code = 3


class NoSamplesError(RuntimeError):
    """A measurement came back empty. Exit code 4."""

    exit_code = 4


def require_gpu() -> torch.device:
    """Return the current GPU; without one raise NoGpuError, before anything is compiled."""
    if not torch.cuda.is_available():
        raise NoGpuError(
            "bench times kernels on a GPU and torch sees none: run it on a machine with a CUDA "
            "device and a CUDA build of torch; `python -m rmsnorm_ref check` runs anywhere"
        )
    triton = import_module("triton")
    if triton.knobs.runtime.interpret:
        raise NoGpuError("TRITON_INTERPRET is set, and interpreted kernels have no time: unset it")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class Sample:
    """Hold the quantiles of one contender's samples, in seconds per call.

    `repeat_p50_s` is the median of as many more, interleaved with the first: how far it lies from
    `p50_s` is the noise of the measurement. None where there was no second timing.
    """

    p20_s: float
    p50_s: float
    p80_s: float
    n_samples: int
    repeat_p50_s: float | None = None

    @classmethod
    def of(cls, name: str, times_s: Sequence[float], repeat_s: Sequence[float] = ()) -> Sample:
        """Summarise samples; NoSamplesError names the contender that has none."""
        if not times_s:
            raise NoSamplesError(f"{name} returned no samples: its timing did not run")
        ordered = sorted(times_s)
        p20, p80 = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
        repeat = statistics.median(repeat_s) if repeat_s else None
        return cls(p20, statistics.median(ordered), p80, len(ordered), repeat)


# ---- Kernel time ------------------------------------------------------------------------------


def graphed(
    contenders: Mapping[str, Callable[[Inputs], object]],
    inputs: Sequence[Inputs],
    n_rounds: int = N_ROUNDS,
    *,
    loops: int = 1,
    clock: Clock | None = None,
    on_failure: Callable[[str, Exception], None] | None = None,
) -> dict[str, Sample]:
    """Time the kernels of calls: see the module's docstring for what is in the time.

    Args:
        contenders: by name, what to call on an input. The first call on each input is not timed.
        inputs: they take turns; so many that none is still in L2 when it comes again.
        n_rounds: samples per contender, and as many again for the repeat.
        loops: how often a graph goes through all inputs, see `n_loops`.
        clock: what runs and times the graphs; None means CUDA.
        on_failure: called with a contender's name and what it raised; the others go on without it.
            None lets the exception through.

    Returns:
        The samples of every contender that did not fail, in seconds per call.

    Raises:
        NoSamplesError: no rounds, or no inputs.
    """
    if not inputs:
        raise NoSamplesError(f"no inputs were given to {', '.join(contenders)}")
    clock = clock or CudaClock()
    replays: dict[str, Work] = {}
    with clock.running():
        for name, contender in contenders.items():
            try:
                for each in inputs:
                    contender(each)
                clock.finish()
                turns = [functools.partial(contender, each) for each in inputs] * loops
                replays[name] = clock.capture(turns, len(inputs))
            except Exception as error:
                if on_failure is None:
                    raise
                on_failure(name, error)
        for replay in replays.values():
            replay()  # the first one uploads the graph
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in replays}
        for _ in range(2 * n_rounds):
            for name, replay in replays.items():
                start = clock.mark()
                replay()
                marks[name].append((start, clock.mark()))
        clock.finish()
    n_calls = loops * len(inputs)
    times_s = {
        name: [clock.seconds(*pair) / n_calls for pair in pairs] for name, pairs in marks.items()
    }
    return {name: Sample.of(name, times[::2], times[1::2]) for name, times in times_s.items()}


# ---- A cold call, and the host -----------------------------------------------------------------


def cold(name: str, call: Work, do_bench: Callable[..., Any] | None = None) -> Sample:
    """Time one call with a cold L2 by `triton.testing.do_bench`, all samples asked for.

    Args:
        name: for the message where it returns none.
        call: bench hands in the replay of a graph of one call, so that a backward's Python, which
            takes longer than its kernels, does not count.
        do_bench: Triton's, unless a test brings its own.

    Raises:
        NoSamplesError: it returned none.
    """
    if do_bench is None:
        do_bench = import_module("triton.testing").do_bench
    return Sample.of(name, [t_ms / 1e3 for t_ms in do_bench(call, return_mode="all")])


def host(
    contenders: Mapping[str, Work],
    n_rounds: int = N_ROUNDS,
    n_calls: int = 100,
    *,
    timer: Callable[[], float] = time.perf_counter,
    finish: Callable[[], object] | None = None,
) -> dict[str, Sample]:
    """Time how long the host takes to issue one call, contenders taking turns.

    Args:
        contenders: by name; on an input so small that the GPU waits for the host.
        n_rounds: samples per contender, and as many again for the repeat.
        n_calls: calls per sample; few enough not to fill the GPU's queue, where the host waits.
        timer: seconds on the host's clock.
        finish: waits for the GPU between samples, outside the time; None means CUDA's.
    """
    finish = finish or torch.cuda.synchronize
    times_s: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(2 * n_rounds + 1):
        for name, call in contenders.items():
            start = timer()
            for _ in range(n_calls):
                call()
            elapsed = timer() - start
            finish()
            if turn:  # the first round compiles and warms up
                times_s[name].append(elapsed / n_calls)
    return {name: Sample.of(name, times[::2], times[1::2]) for name, times in times_s.items()}


def flags(
    bandwidth: float, ceiling: float | None, footprint_bytes: int, l2_bytes: int
) -> tuple[Flag, ...]:
    """Return what makes a bandwidth suspect.

    Args:
        bandwidth: bytes per second, of a call.
        ceiling: the same of the ceiling's call, or None.
        footprint_bytes: what all input sets that take turns read and write.
        l2_bytes: size of the L2.

    Example:
        >>> flags(5e12, 4e12, 2**20, 50 * 2**20)
        ('above_ceiling', 'fits_in_l2')
    """
    found: list[Flag] = []
    if ceiling is not None and bandwidth > ceiling:
        found.append("above_ceiling")
    if footprint_bytes <= l2_bytes:
        found.append("fits_in_l2")
    return tuple(found)
