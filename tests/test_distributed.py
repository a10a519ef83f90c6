"""PyTorch's own distributed training around the op: every property on two ranks.

Interpreted with gloo on any machine, compiled with NCCL where there are two GPUs. The functions
whose names begin with an underscore run on the ranks.
"""

from __future__ import annotations

import pytest
import torch
from ranks import (
    BF16,
    EPS,
    FP32,
    WORLD,
    Block,
    Here,
    Ranks,
    assert_gradients,
    batch,
    gradients,
    norm,
    share,
)
from torch import nn

from rmsnorm_ref import oracle, rmsnorm


def _ddp(here: Here) -> None:
    x, w, dy = batch(here, 3, 4)
    module = nn.parallel.DistributedDataParallel(norm(here, w))
    mine = share(here, x).requires_grad_()
    (dw,) = gradients(module, mine, share(here, dy))
    # DDP divides by the number of ranks, because losses are means.
    assert_gradients(x, w, dy, None, dw * WORLD)
    assert mine.grad is not None
    true_dx, _ = oracle.truth_backward(share(here, dy), share(here, x), w, EPS)
    bound = oracle.bound_dx(share(here, dy), share(here, x), w, EPS)
    oracle.assert_within(mine.grad, true_dx, bound, "dx")


def test_ddp_gives_the_joined_batchs_gradient(ranks: Ranks) -> None:
    """Under DDP dw is that of all ranks' rows as one batch, within the bound; dx is row-local."""
    ranks.run(_ddp)


def _block_against_one_process(here: Here) -> None:
    x, _, dy = batch(here, 3, 4)
    alone = Block().to(here.device)
    expected = gradients(alone, x, dy)
    found = gradients(nn.parallel.DistributedDataParallel(alone), share(here, x), share(here, dy))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one * WORLD, other)


def test_ddp_trains_a_block_as_one_process_does(ranks: Ranks) -> None:
    """All gradients of a block under DDP are, to fp32's accuracy, those of a single process."""
    ranks.run(_block_against_one_process)


def _fsdp_in_fp32(here: Here) -> None:
    from torch.distributed.fsdp import fully_shard

    x, w, dy = batch(here, 4, dtype=BF16)
    w = w.float()
    module = norm(here, w)
    fully_shard(module, mesh=here.mesh)
    y = module(share(here, x))
    y.backward(share(here, dy))
    found = module.weight.grad.full_tensor()  # type: ignore[union-attr]
    assert (y.dtype, found.dtype) == (BF16, FP32)
    assert_gradients(x, w, dy, None, found * WORLD)


def test_fully_shard_keeps_an_fp32_weight_beside_bf16_rows(ranks: Ranks) -> None:
    """With no policy the weight stays fp32, y is bf16, and dw is that of the joined batch."""
    ranks.run(_fsdp_in_fp32)


def _compiled_and_checkpointed(here: Here) -> None:
    torch._dynamo.reset()
    x, _, dy = batch(here, 3, 4)
    block = Block().to(here.device)
    module = nn.parallel.DistributedDataParallel(block)
    given = share(here, x), share(here, dy)
    expected = gradients(module, *given)
    for checkpointed in (False, True):
        block.checkpointed = checkpointed
        compiled = torch.compile(module, backend="aot_eager")
        for way in (module, compiled):
            for one, other in zip(gradients(way, *given), expected, strict=True):
                assert torch.equal(one, other)


def test_compile_and_checkpoint_on_top_of_ddp_move_no_bit(ranks: Ranks) -> None:
    """torch.compile around DDP, a checkpoint inside it, and both, give plain DDP's bits."""
    ranks.run(_compiled_and_checkpointed)


def _fsdp(here: Here) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    x, w, dy = batch(here, 4, dtype=BF16)
    module = norm(here, w.float())
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    fully_shard(module, mesh=here.mesh, mp_policy=policy)
    y = module(share(here, x))
    y.backward(share(here, dy))
    assert isinstance(module.weight, DTensor)
    assert isinstance(module.weight.grad, DTensor)
    found = module.weight.grad.full_tensor()
    assert (y.dtype, found.dtype) == (BF16, FP32)
    each = []
    for rows, gradient in zip(x.tensor_split(WORLD), dy.tensor_split(WORLD), strict=True):
        leaf = w.clone().requires_grad_()
        each += torch.autograd.grad(rmsnorm(rows.clone(), leaf, EPS), leaf, gradient.clone())
    assert torch.equal(found, torch.stack(each).float().mean(0))


def test_fully_shard_adds_each_ranks_gradient_once_in_fp32(ranks: Ranks) -> None:
    """bf16 parameters, fp32 reduction: dw is the fp32 mean of the ranks' own dw, to the bit."""
    ranks.run(_fsdp)


def _same_rows(here: Here, width: int) -> list[bytes]:
    x, dy = torch.randn(2, 12, width).to(here.device, BF16)
    w = torch.randn(width).to(here.device).requires_grad_()
    y = rmsnorm(x.requires_grad_(), w, EPS)
    found = (y.detach(), *torch.autograd.grad(y, (x, w), dy))
    return [t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in found]


@pytest.mark.parametrize("width", [64, 2048, 9000])
def test_in_fixed_mode_ranks_agree_to_the_bit(ranks: Ranks, width: int) -> None:
    """Two ranks that take the shipped table give the same y, dx and dw for the same rows."""
    one, other = ranks.run(_same_rows, width)
    assert one == other


def _broken(here: Here) -> None:
    if here.rank == 1:
        raise ZeroDivisionError("on purpose")


def test_a_failure_on_one_rank_is_a_failure(ranks: Ranks) -> None:
    """What one rank raises fails the test that ran it, and the ranks go on."""
    with pytest.raises(AssertionError, match=r"(?s)rank 1.*ZeroDivisionError: on purpose"):
        ranks.run(_broken)
    assert ranks.run(_rank) == list(range(WORLD))


def _rank(here: Here) -> int:
    return here.rank
