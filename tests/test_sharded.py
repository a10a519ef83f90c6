"""DTensors: rows split over two ranks, through the function and through torch's own plans.

Interpreted with gloo on any machine, compiled with NCCL where there are two GPUs. The functions
whose names begin with an underscore run on the ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import EPS, WORLD, Here, N, Ranks, assert_gradients, batch, gradients, norm, share
from torch import nn

from rmsnorm_ref import RMSNorm, oracle, rmsnorm

PLACEMENTS = ("rows", "sequence", "uneven", "an empty rank", "replicated", "one row")


def _dtensor(here: Here, case: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    shape = {"uneven": (3, 1), "an empty rank": (1, 3), "one row": ()}.get(case, (4, 6))
    placement: Any = Shard(1) if case == "sequence" else Shard(0)
    if case in {"replicated", "one row"}:
        placement = Replicate()
    x, w, dy = batch(here, *shape)
    xs = distribute_tensor(x, here.mesh, [placement]).requires_grad_()
    ws = distribute_tensor(w, here.mesh, [Replicate()]).requires_grad_()
    y = rmsnorm(xs, ws, EPS)
    assert tuple(y.placements) == (placement,)
    assert (y.shape, y.stride()) == (x.shape, x.stride())
    y.backward(distribute_tensor(dy, here.mesh, [placement]))
    assert tuple(xs.grad.placements) == (placement,)
    assert torch.equal(y.full_tensor(), rmsnorm(x, w, EPS))  # rows keep their bits
    assert_gradients(x, w, dy, xs.grad.full_tensor(), ws.grad.full_tensor())


@pytest.mark.parametrize("case", PLACEMENTS)
def test_a_dtensor_split_by_rows_is_right(ranks: Ranks, case: str) -> None:
    """y, dx and dw of a DTensor are those of the whole tensor, and y's rows have the same bits."""
    ranks.run(_dtensor, case)


def _no_communication(here: Here) -> dict[str, int]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    x, w, dy = batch(here, 4, 6)
    xs = distribute_tensor(x, here.mesh, [Shard(1)]).requires_grad_()
    ws = distribute_tensor(w, here.mesh, [Replicate()]).requires_grad_()
    dys = distribute_tensor(dy, here.mesh, [Shard(1)])
    with CommDebugMode() as op:
        rmsnorm(xs, ws, EPS).backward(dys)
    with CommDebugMode() as reading:
        ws.grad.full_tensor()
    return {"op": op.get_total_counts(), "reading dw": reading.get_total_counts()}


def test_the_op_sends_nothing(ranks: Ranks) -> None:
    """Both passes on sharded rows launch no collective; reading the whole dw launches one."""
    assert ranks.run(_no_communication) == [{"op": 0, "reading dw": 1}] * WORLD


def _sequence_parallel(here: Here, *, compiled: bool) -> None:
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    torch._dynamo.reset()
    x, w, dy = batch(here, 2, 6)
    module = parallelize_module(norm(here, w), here.mesh, SequenceParallel())
    call: Any = torch.compile(module, backend="aot_eager") if compiled else module
    mine = share(here, x, 1).requires_grad_()
    y = call(mine)
    y.to_local().backward(share(here, dy, 1))
    assert torch.equal(y.full_tensor(), rmsnorm(x, w, EPS))
    assert mine.grad is not None
    true_dx, _ = oracle.truth_backward(dy, x, w, EPS)
    bound = oracle.bound_dx(dy, x, w, EPS)
    oracle.assert_within(mine.grad, share(here, true_dx, 1), share(here, bound, 1), "dx")
    assert_gradients(x, w, dy, None, module.weight.grad.full_tensor())
    # An optimizer adds the ranks' shares up: one step of SGD takes the whole of dw.
    expected = module.weight.full_tensor() - module.weight.grad.full_tensor()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    torch.testing.assert_close(module.weight.to_local(), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_sequence_parallel_takes_the_module(ranks: Ranks, compiled: bool) -> None:
    """SequenceParallel is right around the module, compiled or not, and an optimizer's step too."""
    ranks.run(_run_sequence_parallel, compiled)


def _run_sequence_parallel(here: Here, compiled: bool) -> None:
    _sequence_parallel(here, compiled=compiled)


def _tensor_parallel_block(here: Here) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    x, _, dy = batch(here, 2, 6)
    block = nn.Sequential(RMSNorm(N), nn.Linear(N, N), nn.ReLU(), nn.Linear(N, N)).to(here.device)
    expected = gradients(block, x, dy)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, here.mesh, plan)
    found = gradients(block, share(here, x, 1), share(here, dy, 1))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.full_tensor(), other)  # type: ignore[attr-defined]


def test_a_tensor_parallel_block_trains_as_one_process_does(ranks: Ranks) -> None:
    """With the norm sequence-parallel and its layers column- and row-wise, gradients agree."""
    ranks.run(_tensor_parallel_block)


def _refused(here: Here) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    x, w, _ = batch(here, 4, 6)
    split, whole = ([Shard(1)], [Replicate()])
    xs, ws = (distribute_tensor(t, here.mesh, p) for t, p in ((x, split), (w, whole)))
    grid = init_device_mesh(here.device.type, (WORLD, 1))
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (xs, w, TypeError, r"w is a plain tensor.*distribute_tensor.*SequenceParallel"),
        (x, ws, TypeError, r"x is a plain tensor.*from_local.*full_tensor"),
        (distribute_tensor(x, here.mesh, [Shard(2)]), ws, ValueError, r"x is laid out.*redist"),
        (DTensor.from_local(x, here.mesh, [Partial()]), ws, ValueError, r"x is laid out.*redist"),
        (xs, distribute_tensor(w, here.mesh, [Shard(0)]), ValueError, r"w is laid out.*redist"),
        (xs, distribute_tensor(w, grid, whole * 2), ValueError, "share a mesh"),
    ]
    for one, other, kind, message in cases:
        with pytest.raises(kind, match=message):
            rmsnorm(one, other, EPS)


def test_a_layout_that_needs_communication_is_refused(ranks: Ranks) -> None:
    """A plain w beside split rows, split columns, a split w, two meshes: refused, with the fix."""
    ranks.run(_refused)
