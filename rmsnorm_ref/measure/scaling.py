"""The op on several GPUs at once, a process for each: what a second rank costs the first.

Every rank has M rows of its own and the whole weight, as under DDP or sequence parallelism, and
runs both passes. Samples of one rank alone and of all ranks take turns, between the same processes;
between two samples all wait for each other, inside one nobody does.
"""

from __future__ import annotations

import functools
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn

from . import timing
from .cells import BF16, SCALING, Cell
from .session import OURS, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from .schema import Row

N_CALLS = 10  # calls in a sample: some milliseconds on a GPU
LONGEST_S = 120.0  # until all processes have started, searched and measured


class Job(NamedTuple):
    """Hold what every rank does."""

    M: int
    N: int
    dtype: torch.dtype
    counts: tuple[int, ...]  # how many ranks work at once, in turn
    n_rounds: int
    device_type: str


def counts(n_devices: int) -> tuple[int, ...]:
    """Return how many GPUs work at once: 1, 2, 4, ... and all of them.

    Example:
        >>> counts(1), counts(2), counts(6)
        ((1,), (1, 2), (1, 2, 4, 6))
    """
    return tuple(sorted({2**i for i in range(n_devices.bit_length())} | {n_devices}))


def measure(session: Session, dtype: torch.dtype = BF16) -> list[Row]:
    """Return a row for each number of GPUs: the time of a call on the slowest of them."""
    cell = Cell("scaling", *SCALING, dtype)
    n_devices = torch.cuda.device_count()
    if n_devices < 2:
        session.note(f"{cell.label()} is left out: it needs two GPUs, and torch sees {n_devices}")
        return []
    job = Job(*SCALING, dtype, counts(n_devices), 2 * timing.N_ROUNDS, "cuda")
    rows = []
    for n_ranks, times_s in together(job).items():
        sample = timing.Sample.of(f"{n_ranks} GPUs", times_s[::2], times_s[1::2])
        detail = {"n_gpus": n_ranks}
        row = session.row(
            cell, "forward+backward", OURS.name, sample, kind="scaling", detail=detail
        )
        rows.append(row)
    return rows


def together(job: Job) -> dict[int, list[float]]:
    """Start the processes; return, by how many ranks worked, each round's slowest time of a call.

    Raises:
        RuntimeError: a rank failed or did not answer in time.
    """
    context = get_context("spawn")
    n_ranks = max(job.counts)
    barrier, answers = context.Barrier(n_ranks), context.SimpleQueue()
    ranks: Any = spawn(_rank, (job, barrier, answers), n_ranks, join=False)  # type: ignore[no-untyped-call]  # torch's own
    try:
        ends_s = time.monotonic() + LONGEST_S
        while not ranks.join(timeout=1):  # raises what a rank raised
            if time.monotonic() > ends_s:
                raise RuntimeError(f"{n_ranks} ranks were not done after {LONGEST_S:g} s")
        found = [answers.get() for _ in range(n_ranks)]
    finally:
        for process in ranks.processes:
            process.kill()
    return {
        n: [max(times_s) for times_s in zip(*(each[n] for each in found if n in each), strict=True)]
        for n in job.counts
    }


def _rank(rank: int, job: Job, barrier: Any, answers: Any) -> None:
    """Measure on one GPU, in step with the other ranks."""
    device = torch.device("cpu")
    if job.device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    call = _both_passes(job, device)
    call()  # compiles, and searches
    times_s: dict[int, list[float]] = {n: [] for n in job.counts if rank < n}
    for _ in range(job.n_rounds):
        for n in job.counts:
            barrier.wait(LONGEST_S)
            if rank < n:
                times_s[n].append(_time_s(call, device))
    answers.put(times_s)


def _both_passes(job: Job, device: torch.device) -> Callable[[], object]:
    op = import_module("rmsnorm_ref").rmsnorm
    x, dy = (torch.randn(job.M, job.N, device=device).to(job.dtype) for _ in range(2))
    w = torch.ones(job.N, dtype=job.dtype, device=device, requires_grad=True)
    x.requires_grad_()
    return lambda: torch.autograd.grad(op(x, w), (x, w), dy)


def _time_s(call: Callable[[], object], device: torch.device) -> float:
    finish = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else _pass
    finish()
    start_s = time.perf_counter()
    for _ in range(N_CALLS):
        call()
    finish()
    return (time.perf_counter() - start_s) / N_CALLS


def _pass() -> None:
    """Wait for nothing: a CPU is done when the call returns."""
