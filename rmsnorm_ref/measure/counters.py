"""How many bytes really cross the DRAM bus, by hardware counters, beside the model's.

A child process makes each call once under Nsight Compute (`ncu`), which reads the counters of every
kernel; the parent parses its CSV. One child per contender runs all cells, and a kernel that nobody
else launches (erf, on one number) marks where each call begins.

**The state of the L2.** By default ncu flushes all caches before each kernel. Then every read is
cold, but what a kernel leaves dirty in the L2, up to tens of megabytes, is written back by the
next flush, where no kernel runs and nothing counts: a kernel that writes less than that can seem
to write nothing. And the partial dw buffer, a few megabytes, would be fetched from DRAM by the
reduction, which otherwise finds it in the L2. So here caches are left alone (`--cache-control
none`), inputs and results take turns as in `timing.py`, and the call that counts comes last: it
meets an L2 full of its predecessors' data, whose dirty lines leave while it runs, as many as it
will leave behind. `flush=True` asks for the other count.

**What no counter sees.** ncu counts kernels, and PyTorch copies a contiguous tensor of one dtype
without one: the seed's backward has such a copy, x.pow(1). It is left out of the model's side where
no kernel ran for it. Lines that are written back between two kernels are not counted either.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from typing import TYPE_CHECKING, Literal, Protocol, cast

import torch

from rmsnorm_ref import tiling, traffic

from . import calls, ncu, peers
from .ncu import CountersError, Launch
from .schema import BACKWARD, FORWARD, Dtype, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

CELLS = (
    (512, 2048),
    (4096, 2048),
    (4096, 4096),
    (4096, 8192),
    (32768, 8192),
    (262144, 128),
    (8192, 16384),
    (8192, 32768),
    (2048, 65536),
)
PASSES = (FORWARD, BACKWARD)
CONTENDERS: tuple[Literal["ours", "eager"], ...] = ("ours", "eager")
MARKER = "erf_kernel"
COPY = "pow -> h_power"


class Run(Protocol):
    """Run a command under ncu."""

    def __call__(self, child: Sequence[str], *, flush: bool) -> str:
        """Return ncu's CSV."""


def measure(
    cells: Sequence[tuple[int, int]] = CELLS,
    dtype: torch.dtype = torch.bfloat16,
    passes: Sequence[str] = PASSES,
    *,
    flush: bool = False,
    run_under: Run = ncu.run_under,
) -> list[Row]:
    """Count DRAM bytes of ours and of eager (the seed's spelling), one call a cell and pass.

    Args:
        cells: (M, N).
        dtype: of x, w and dy.
        passes: "forward", "backward".
        flush: empty the caches before each kernel; see above what that hides.
        run_under: runs the child under ncu and returns its CSV; another one is for tests.

    Returns:
        Rows of kind "counter".

    Raises:
        CountersError: ncu is missing, may not read the counters, failed, or counted no kernel.
    """
    wanted = [(M, N, pass_) for M, N in cells for pass_ in passes]
    rows = []
    for contender in CONTENDERS:
        plan = {"contender": contender, "dtype": _name(dtype), "calls": wanted}
        child = [sys.executable, "-m", f"{__package__}.counters", json.dumps(plan)]
        launches = ncu.parse(run_under(child, flush=flush))
        for (M, N, pass_), of_call in zip(wanted, split(launches, len(wanted)), strict=True):
            rows.append(_row(contender, M, N, dtype, pass_, of_call))
    return rows


def split(launches: Sequence[Launch], n_calls: int) -> list[list[Launch]]:
    """Cut the launches at the markers: one list per call.

    Raises:
        CountersError: there are not `n_calls` markers, or a call launched nothing.
    """
    found: list[list[Launch]] = []
    for launch in launches:
        if MARKER in launch.kernel:
            found.append([])
        elif found:
            found[-1].append(launch)
    if len(found) != n_calls or not all(found):
        counted = [len(call) for call in found]
        raise CountersError(
            f"{n_calls} calls were made and ncu counted {counted} kernels between its markers; "
            f"the first kernels are {[launch.kernel[:60] for launch in launches[:3]]}"
        )
    return found


# ---- Rows -------------------------------------------------------------------------------------


def model_bytes(
    contender: str, M: int, N: int, dtype: torch.dtype, pass_: str, kernels: Sequence[str] = ()
) -> tuple[int, int]:
    """Return the bytes that `traffic.py` expects to be read and written, scratch included.

    `kernels` are the names of those that ran: without a copy among them the eager backward's copy
    is left out, because no kernel made it.

    >>> model_bytes("ours", 4096, 4096, torch.bfloat16, "forward")
    (33562624, 33570816)
    """
    if contender == "ours":
        fused = traffic.forward if pass_ == FORWARD else traffic.backward
        apart = {"cached", "scratch"}  # served by a cache; counted for one program
        steps = [step for step in fused(M, N, dtype).steps if step.role not in apart]
        scratch = _scratch_bytes(M, N, dtype) // 2 if pass_ == BACKWARD else 0
    else:
        eager = traffic.eager_forward if pass_ == FORWARD else traffic.eager_backward
        copied = any("copy" in kernel.lower() for kernel in kernels)
        steps = [step for step in eager(M, N, dtype).steps if copied or step.kernel != COPY]
        scratch = 0
    read = sum(step.n_bytes for step in steps if step.access == "read")
    write = sum(step.n_bytes for step in steps if step.access == "write")
    return read + scratch, write + scratch


def _scratch_bytes(M: int, N: int, dtype: torch.dtype) -> int:
    """Return the bytes of the partial dw buffer on this GPU, written and read."""
    if tiling.backward_path(M, N, traffic.GPU, dtype) == "few_rows_backward":
        return 0
    return traffic.backward(M, N, dtype).scratch_bytes(tiling.n_programs(M, N, dtype, traffic.GPU))


def _name(dtype: torch.dtype) -> Dtype:
    return cast("Dtype", str(dtype).removeprefix("torch."))


def _row(
    contender: Literal["ours", "eager"],
    M: int,
    N: int,
    dtype: torch.dtype,
    pass_: str,
    launches: Sequence[Launch],
) -> Row:
    names = tuple(launch.kernel for launch in launches)
    model_read, model_write = model_bytes(contender, M, N, dtype, pass_, names)
    backward = pass_ == BACKWARD
    path = tiling.forward_path(N)
    if backward:
        path = tiling.backward_path(M, N, traffic.GPU, dtype)
    return Row(
        kind="counter",
        section="counters",
        contender=contender,
        pass_=BACKWARD if backward else FORWARD,
        M=M,
        N=N,
        dtype=_name(dtype),
        w_dtype=_name(dtype),
        path=path if contender == "ours" else None,
        obligatory_bytes=(3 if backward else 2) * M * N * dtype.itemsize,
        scratch_bytes=_scratch_bytes(M, N, dtype) if contender == "ours" and backward else None,
        detail={
            "dram_read_bytes": sum(launch.read_bytes for launch in launches),
            "dram_write_bytes": sum(launch.write_bytes for launch in launches),
            "model_read_bytes": model_read,
            "model_write_bytes": model_write,
            "kernels": names,
        },
    )


# ---- The child --------------------------------------------------------------------------------


def make_calls(plan: str, device: str = "cuda") -> None:
    """Make every call of a plan, the last turn of each between cudaProfilerStart and Stop.

    Args:
        plan: the JSON that `measure` writes: contender, dtype, calls (M, N, pass).
        device: where; another than a GPU is for tests.
    """
    wanted = json.loads(plan)
    dtype = getattr(torch, wanted["dtype"])
    marker = torch.zeros(1, device=device)
    l2_bytes = torch.cuda.get_device_properties(marker.device).L2_cache_size
    for M, N, pass_ in wanted["calls"]:
        f = _contender(wanted["contender"], N, dtype)
        work = calls.Forward(f) if pass_ == FORWARD else calls.Backward(f)
        n_sets = calls.n_input_sets(2 * M * N * dtype.itemsize, l2_bytes)
        sets = calls.make_inputs(M, N, dtype, n_sets, device)
        kept: deque[object] = deque(maxlen=n_sets)  # else results would reuse one another's lines
        for inputs in [*sets, *sets[:-1]]:  # the first round compiles, and runs the forwards
            kept.append(work(inputs))
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.erf(marker, out=marker)
        kept.append(work(sets[-1]))
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]  # the same


def _contender(name: str, N: int, dtype: torch.dtype) -> peers.Call:
    if name != "ours":
        return peers.contenders()[name].build(N, dtype)
    from rmsnorm_ref import rmsnorm  # noqa: PLC0415  # the child alone runs it

    return lambda x, w: rmsnorm(x, w, peers.EPS)


if __name__ == "__main__":
    make_calls(sys.argv[1])
