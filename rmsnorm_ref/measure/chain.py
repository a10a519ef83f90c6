"""The eager chain kernel by kernel: its own time, its own bytes, hence its own bandwidth.

torch.profiler times each kernel of a chain, and `match` gives it the bytes that `traffic.py` counts
for it. `explanation.py` makes of it why a measured speed-up is not the predicted one.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
from torch.profiler import ProfilerActivity

from rmsnorm_ref import traffic

from . import calls, peers, timing
from .schema import FORWARD, Quantiles, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.autograd.profiler_util import FunctionEvent

    from .schema import Dtype

CELLS = ((4096, 4096), (4096, 8192))
Pass = Literal["forward", "backward"]
Matched = Literal["order", "name", "none"]
CONTENDERS: dict[traffic.Spelling, Literal["eager", "eager_fp32"]] = {
    "seed": "eager",
    "fp32": "eager_fp32",
}
N_SETS, N_ROUNDS = 4, 5  # at 4096 x 4096 in bf16 four inputs are 268 MB; 20 samples a kernel

# What PyTorch calls the CUDA kernel of an operator. A power of 1 and a cast between equal dtypes
# are device-to-device copies; a division by a number multiplies by its reciprocal.
CUDA_NAMES = {
    "pow": r"pow_|copy|Memcpy",
    "mean": r"MeanOps",
    "sum": r"sum_functor",
    "add": r"Functor\w*_add",
    "rsqrt": r"rsqrt",
    "mul": r"MulFunctor",
    "div": r"DivFunctor|div_|MulFunctor",
    "_to_copy": r"copy|Memcpy",
}


class Profiled(NamedTuple):
    """Hold one launch as the profiler saw it."""

    name: str
    time_s: float


class ModelKernel(NamedTuple):
    """Hold one kernel of a modelled chain: "operator -> output", and what it moves."""

    name: str
    n_bytes: int
    obligatory_bytes: int  # of these, those of [M, N] tensors: 0 marks a small kernel


def model(
    M: int, N: int, dtype: torch.dtype, spelling: traffic.Spelling, pass_: Pass
) -> list[ModelKernel]:
    """Group the steps of the eager chain by kernel, in order of launch.

    >>> [kernel.name for kernel in model(4096, 4096, torch.bfloat16, "seed", "forward")][:2]
    ['pow -> square', 'mean -> variance']
    """
    count = traffic.eager_forward if pass_ == FORWARD else traffic.eager_backward
    kernels = []
    for name, group in itertools.groupby(
        count(M, N, dtype, spelling=spelling).steps, key=lambda step: step.kernel
    ):
        steps = list(group)
        obligatory = sum(step.n_bytes for step in steps if step.role == "obligatory")
        kernels.append(ModelKernel(name, sum(step.n_bytes for step in steps), obligatory))
    return kernels


# ---- Pairing what ran with what was modelled --------------------------------------------------


def match(names: Sequence[str], model_names: Sequence[str]) -> list[tuple[int | None, Matched]]:
    """Pair each kernel that ran with one of the model, by order where both agree, else by name.

    Args:
        names: CUDA kernels in order of launch, memory copies and fills included.
        model_names: "operator -> output" in order.

    Returns:
        For each name (index in the model or None, how). "order": as many ran as were modelled and
        every name fits, or a kernel of unknown name is the only one left between two that fit.
        "name": the counts differ, and this is part of the longest common sequence. "none": the
        model has no such kernel, such as the fill that precedes a large reduction.

    >>> match(["rsqrt_kernel", "Memset (Device)"], ["rsqrt -> rstd"])
    [(0, 'name'), (None, 'none')]
    """
    fits = [[_fits(name, modelled) for modelled in model_names] for name in names]
    if len(names) == len(model_names) and all(fits[i][i] for i in range(len(names))):
        return [(i, "order") for i in range(len(names))]
    pairs = _longest_common(fits, len(model_names))
    found: list[tuple[int | None, Matched]] = [(None, "none")] * len(names)
    for i, j in pairs:
        found[i] = (j, "name")
    ends = [(-1, -1), *pairs, (len(names), len(model_names))]
    for (i, j), (next_i, next_j) in itertools.pairwise(ends):
        if next_i - i == next_j - j:
            for step in range(1, next_i - i):
                found[i + step] = (j + step, "order")
    return found


def _fits(name: str, modelled: str) -> bool:
    return re.search(CUDA_NAMES[modelled.partition(" -> ")[0]], name) is not None


def _longest_common(fits: Sequence[Sequence[bool]], n_modelled: int) -> list[tuple[int, int]]:
    """Return the longest list of fitting (i, j) in which both grow; the earliest of several."""
    n = len(fits)
    longest = [[0] * (n_modelled + 1) for _ in range(n + 1)]
    for i, j in itertools.product(reversed(range(n)), reversed(range(n_modelled))):
        taken = 1 + longest[i + 1][j + 1] if fits[i][j] else 0
        longest[i][j] = max(taken, longest[i + 1][j], longest[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < n and j < n_modelled:
        if fits[i][j] and longest[i][j] == 1 + longest[i + 1][j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif longest[i][j] == longest[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


# ---- Profiling --------------------------------------------------------------------------------


def eager_profile(
    M: int, N: int, dtype: torch.dtype, spelling: traffic.Spelling, pass_: Pass
) -> list[Row]:
    """Profile one pass of an eager chain; return a row of kind "eager_kernel" for each kernel.

    Raises:
        timing.NoSamplesError: the profiler saw no kernels, or not the same ones in every call.
    """
    f = peers.contenders()[CONTENDERS[spelling]].build(N, dtype)
    work = calls.Forward(f) if pass_ == FORWARD else calls.Backward(f)
    sets = calls.make_inputs(M, N, dtype, N_SETS)
    launches = _profiled(work, sets)
    return rows_of(launches, N_SETS * N_ROUNDS, M, N, dtype, spelling, pass_)


def _profiled(
    work: Callable[[calls.InputSet], object], sets: Sequence[calls.InputSet]
) -> list[Profiled]:
    """Return all launches on the GPU of N_ROUNDS calls on every set, in order of their start."""
    kept: deque[object] = deque(maxlen=len(sets))  # so that results take turns, as inputs do
    for inputs in sets:
        kept.append(work(inputs))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]):
        # The first profile of a process loads CUPTI, and may miss what was launched meanwhile.
        kept.append(work(sets[0]))
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        for inputs in list(sets) * N_ROUNDS:
            kept.append(work(inputs))
        torch.cuda.synchronize()
    return launches_of(profile.events() or ())


def launches_of(events: Iterable[FunctionEvent]) -> list[Profiled]:
    """Return what ran on the GPU, in order of its start, from a profile's events."""
    # Device types are compared by name: torch exports their enumeration from a private module.
    found = [
        event
        for event in events
        if event.device_type.name == "CUDA"
        and not event.is_user_annotation
        and event.name != "Context Sync"
    ]
    found.sort(key=lambda event: event.time_range.start)
    spans = [(event.name, event.time_range) for event in found]
    return [Profiled(name, (span.end - span.start) * 1e-6) for name, span in spans]  # from us


def rows_of(
    launches: Sequence[Profiled],
    n_calls: int,
    M: int,
    N: int,
    dtype: torch.dtype,
    spelling: traffic.Spelling,
    pass_: Pass,
) -> list[Row]:
    """Return a row for each kernel of a call, from the launches of `n_calls` equal calls.

    Raises:
        timing.NoSamplesError: there are none, or the calls did not launch the same kernels.
    """
    where = f"{CONTENDERS[spelling]} {pass_} at {M} x {N}"
    if not launches:
        raise timing.NoSamplesError(
            f"torch.profiler saw no kernel of {where}: is another profiler attached, or CUPTI "
            "missing?"
        )
    per_call, left = divmod(len(launches), n_calls)
    names = [launch.name for launch in launches]
    if left or names != names[:per_call] * n_calls:
        raise timing.NoSamplesError(
            f"{n_calls} calls of {where} launched {len(launches)} kernels, and not the same ones "
            "in every call"
        )
    modelled = model(M, N, dtype, spelling, pass_)
    dtype_name = cast("Dtype", str(dtype).removeprefix("torch."))
    rows = []
    for index, (j, matched) in enumerate(match(names[:per_call], [m.name for m in modelled])):
        name = names[index]
        sample = timing.Sample.of(name, [call.time_s for call in launches[index::per_call]])
        detail = {
            "kernel": name,
            "index": index,
            "steps": () if j is None else (modelled[j].name,),
            "n_bytes": 0 if j is None else modelled[j].n_bytes,
            "matched": matched,
        }
        rows.append(
            Row(
                kind="eager_kernel",
                section="eager",
                contender=CONTENDERS[spelling],
                pass_=pass_,
                M=M,
                N=N,
                dtype=dtype_name,
                w_dtype=dtype_name,
                n_input_sets=N_SETS,
                time_s=Quantiles(sample.p20_s, sample.p50_s, sample.p80_s),
                n_samples=sample.n_samples,
                detail=detail,
            )
        )
    return rows
