"""Two processes that form a process group, kept for a whole test file: `Ranks.run(function)`.

A function runs on both ranks at once and gets a `Here`. It returns plain values, or raises; either
comes back. "cpu" ranks interpret the kernels and speak gloo, on any machine; "cuda" ranks have a
GPU each and speak NCCL.
"""

from __future__ import annotations

import datetime as dt
import os
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rmsnorm_ref import RMSNorm, oracle

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

N, EPS = 64, 0.01  # no default of anybody
BF16, FP32 = torch.bfloat16, torch.float32
WORLD = 2
LONGEST_S = 60


class Here(NamedTuple):
    """Tell a function where it runs."""

    rank: int
    device: torch.device
    mesh: DeviceMesh


class Ranks:
    """Start the processes, run functions on them, end them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        context = mp.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        self.tasks = [context.SimpleQueue() for _ in range(WORLD)]
        self.results = [context.Queue() for _ in range(WORLD)]
        self.processes = [
            context.Process(target=_serve, args=(rank, kind, str(store), *queues), daemon=True)
            for rank, queues in enumerate(zip(self.tasks, self.results, strict=True))
        ]
        before = os.environ.copy()
        os.environ["RMSNORM_REF_TUNING"] = "fixed"
        if kind == "cpu":  # a child reads these before torch and Triton
            os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        for process in self.processes:
            process.start()
        os.environ.clear()
        os.environ |= before

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(here, *args)` on every rank; return the results in the order of ranks."""
        for task in self.tasks:
            task.put((function, args))
        answers = [result.get(timeout=LONGEST_S) for result in self.results]
        failures = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for task in self.tasks:
            task.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _serve(rank: int, kind: str, store: str, tasks: Any, results: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=dt.timedelta(seconds=LONGEST_S),
    )
    here = Here(rank, device, init_device_mesh(kind, (WORLD,)))
    while (task := tasks.get()) is not None:
        function, args = task
        torch.manual_seed(0)  # all ranks draw the same numbers
        try:
            results.put((None, function(here, *args)))
        except Exception:  # noqa: BLE001  # whatever it is, the test shows it
            results.put((traceback.format_exc(), None))
    dist.destroy_process_group()


# ---- What the tests run on them -----------------------------------------------------------------


def batch(here: Here, *shape: int, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x, w, dy) of a whole batch [*shape, N], the same on every rank."""
    x, dy = torch.randn(2, *shape, N).to(here.device, dtype)
    return x, torch.randn(N).to(here.device, dtype), dy


def share(here: Here, whole: Tensor, dim: int = 0) -> Tensor:
    """Return a copy of this rank's rows of a batch."""
    return whole.tensor_split(WORLD, dim)[here.rank].clone()


def norm(here: Here, w: Tensor) -> RMSNorm:
    """Return the module with this weight."""
    module = RMSNorm(N, EPS, device=here.device, dtype=w.dtype)
    with torch.no_grad():
        module.weight.copy_(w)
    return module


def assert_gradients(x: Tensor, w: Tensor, dy: Tensor, dx: Tensor | None, dw: Tensor) -> None:
    """Hold gradients of the whole batch to their bounds."""
    true_dx, true_dw = oracle.truth_backward(dy, x, w, EPS)
    if dx is not None:
        oracle.assert_within(dx, true_dx, oracle.bound_dx(dy, x, w, EPS), "dx")
    oracle.assert_within(dw, true_dw, oracle.bound_dw(dy, x, w, EPS), "dw")


class Block(nn.Module):
    """The op between layers that a compiler and a checkpoint have work with."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, N), nn.Linear(N, N)
        self.norm = RMSNorm(N)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layers make of the normalised rows."""
        if self.checkpointed:
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)

    def layers(self, x: Tensor) -> Tensor:
        """Return what may be computed again in the backward."""
        return x + self.down(self.up(self.norm(x)).relu())


def gradients(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Run both passes, return the gradients of the parameters in their order, and forget them."""
    module(x).backward(dy)
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    assert all(grad is not None for grad in found)
    return [grad.clone() for grad in found if grad is not None]
