"""What the op promises to autograd and to all that rewrites programs around it.

torch.autograd.gradcheck is not used: it differentiates numerically in float64, which the kernels
refuse. Gradients are held to the oracle's bounds instead, whose formula gradcheck has confirmed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from paths import (
    EPS,
    LAYOUTS,
    assert_same_bits,
    in_every_dtype,
    leaves,
    make,
    on_every_kernel,
    on_every_width,
    run,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rmsnorm_ref import RMSNorm, rmsnorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32


# ---- One graph, used in every way ---------------------------------------------------------------


@on_every_kernel
def test_a_retained_graph_gives_the_same_bits_again(N: int, M: int, device: str) -> None:
    """A second backward through one graph finds what it saved as it was."""
    x, w, dy = leaves(M, N, BF16, device=device)
    y = rmsnorm(x, w)
    once = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    assert_same_bits(torch.autograd.grad(y, (x, w), dy), once)


@pytest.mark.parametrize("use_reentrant", [True, False])
@on_every_kernel
def test_checkpointing(N: int, M: int, use_reentrant: bool, device: str) -> None:
    """A forward that is run again in the backward gives the same bits."""
    x, w, dy = leaves(M, N, BF16, device=device)
    y = checkpoint(rmsnorm, x, w, use_reentrant=use_reentrant)
    y.backward(dy)
    assert_same_bits((y, x.grad, w.grad), run(x, w, dy))


def offset(tensor: Tensor) -> Tensor:
    """Copy a tensor to a place one element into its storage, where no vector load may start."""
    return LAYOUTS["offset"](tensor.reshape(1, -1)).view(tensor.shape)


@pytest.mark.parametrize("pack", [lambda t: t.cpu().clone(), offset], ids=["to CPU", "offset"])
@on_every_kernel
def test_saved_tensor_hooks(N: int, M: int, pack: Callable[[Tensor], Tensor], device: str) -> None:
    """What was saved, x, w and rstd alone, may come back from a hook elsewhere in memory."""
    x, w, dy = leaves(M, N, BF16, device=device)
    packed: list[torch.Size] = []

    def note_and_pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return pack(tensor)

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    with torch.autograd.graph.saved_tensors_hooks(note_and_pack, unpack):
        y = rmsnorm(x, w)
    assert packed == [(M, N), (N,), (M,)]
    assert_same_bits(torch.autograd.grad(y, (x, w), dy), run(x, w, dy)[1:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changed", ["x", "w"])
def test_a_change_in_place_is_caught(changed: str, layout: str, device: str) -> None:
    """A backward whose x or w has changed raises, also where the forward had read a copy of x."""
    x, w, dy = make(4, 24, FP32, device=device)
    x = LAYOUTS[layout](x)
    leaf_x, leaf_w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = rmsnorm(leaf_x, leaf_w)
    with torch.no_grad():
        (leaf_x if changed == "x" else leaf_w).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy.view_as(y))


def test_gradients_accumulate(device: str) -> None:
    """A second backward adds to .grad, and a w used by two calls gets the sum of both."""
    x, w, dy = leaves(4, 24, FP32, device=device)
    _, dx, dw = run(x, w, dy)
    for _ in range(2):
        rmsnorm(x, w).backward(dy)
    assert_same_bits((x.grad, w.grad), (dx + dx, dw + dw))
    other = make(4, 24, FP32, device=device, seed=1)[0]
    both = torch.autograd.grad((rmsnorm(x, w), rmsnorm(other, w)), w, (dy, dy))
    assert_same_bits(both, [dw + run(other, w, dy).dw])


@on_every_kernel
def test_calls_may_interleave(N: int, M: int, device: str) -> None:
    """Two forwards and then two backwards, in either order, do not mix what they saved."""
    first, second = (make(M, N, BF16, device=device, seed=seed) for seed in (0, 1))
    expected = [run(*inputs) for inputs in (first, second)]
    for order in ((0, 1), (1, 0)):
        graphs = []
        for x, w, dy in (first, second):
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()  # noqa: PLW2901
            graphs.append((rmsnorm(x, w), (x, w), dy))
        for index in order:
            y, inputs, dy = graphs[index]
            assert_same_bits(torch.autograd.grad(y, inputs, dy), expected[index][1:])


@on_every_kernel
@pytest.mark.parametrize("expanded", [(), (1,), (-1, 1)])
def test_any_strides_of_dy(N: int, M: int, expanded: tuple[int, ...], device: str) -> None:
    """A dy of one number, one row or one column does what its contiguous copy does."""
    x, w, dy = make(M, N, BF16, device=device)
    part = {0: dy[0, 0], 1: dy[:1], 2: dy[:, :1]}[len(expanded)].expand(M, N)
    assert 0 in part.stride()
    assert_same_bits(run(x, w, part), run(x, w, part.contiguous()))


@on_every_width
@in_every_dtype
def test_no_graph_where_none_is_wanted(N: int, dtype: torch.dtype, device: str) -> None:
    """Without gradients y needs none, and the kernel that saves no rstd gives it the same bits."""
    x, w, _ = make(3, N, dtype, device=device)
    y = rmsnorm(x, w.clone().requires_grad_()).detach()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found = rmsnorm(x, w.clone().requires_grad_())
        assert not found.requires_grad
        assert_same_bits([found.clone()], [y])
    assert not rmsnorm(x, w).requires_grad


# ---- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("needed", [(0,), (1,), (0, 1)], ids=["x", "w", "both"])
def test_create_graph_is_refused(needed: tuple[int, ...], device: str) -> None:
    """Asking for a differentiable gradient raises at once, so no penalty on it can vanish."""
    x, w, dy = make(4, 24, FP32, device=device)
    inputs = [x, w]
    wanted = [inputs[index].requires_grad_() for index in needed]
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(rmsnorm(x, w), wanted, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        rmsnorm(x, w).sum().backward(create_graph=True)


def test_a_gradient_penalty_is_refused(device: str) -> None:
    """A loss that holds the norm of a gradient cannot be built, with layers on either side."""
    inner, outer = (torch.nn.Linear(8, 8, device=device) for _ in range(2))
    x = make(4, 8, FP32, device=device)[0].requires_grad_()
    score = outer(RMSNorm(8, device=device)(inner(x))).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(score, x, create_graph=True)


def test_stand_ins_refuse_a_second_derivative_too() -> None:
    """On the meta device as well a second derivative ends in an error, and not in a constant."""
    x = torch.ones(2, 8, device="meta", requires_grad=True)
    y = rmsnorm(x, torch.ones(8, device="meta"))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum().backward()


TRANSFORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad": lambda x, w: torch.func.grad(lambda t: rmsnorm(t, w).sum())(x),
    "vjp": lambda x, w: torch.func.vjp(lambda t: rmsnorm(t, w), x),
    "jvp": lambda x, w: torch.func.jvp(lambda t: rmsnorm(t, w), (x,), (x,)),
    "vmap": lambda x, w: torch.func.vmap(lambda t: rmsnorm(t, w))(x),
    "linearize": lambda x, w: torch.func.linearize(lambda t: rmsnorm(t, w), x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functional_transforms_are_refused(transform: str, device: str) -> None:
    """Transforms of torch.func raise an error that says why, and what to call instead."""
    x, w, _ = make(4, 24, FP32, device=device)
    with pytest.raises(NotImplementedError, match=r"torch\.func.*torch\.autograd\.grad.*oracle"):
        TRANSFORMS[transform](x, w)


class _Mode(TorchDispatchMode):
    """See every operator and change none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run what was called."""
        del types
        return func(*args, **(kwargs or {}))


def _under_a_mode(x: Tensor, w: Tensor) -> Tensor:
    with _Mode():
        return rmsnorm(x, w)


DUALS = {
    "x": lambda dual, t: rmsnorm(dual, t[0]),
    "w": lambda dual, t: rmsnorm(t, dual[0]),
    "without recording": lambda dual, t: torch.no_grad()(rmsnorm)(dual, t[0]),
    "under a mode": lambda dual, t: _under_a_mode(dual, t[0]),
    "on meta": lambda dual, t: rmsnorm(dual.to("meta"), t[0].to("meta")),
    "the operator": lambda dual, t: torch.ops.rmsnorm_ref.forward(dual, t[0], EPS),
    "compiled": lambda dual, t: torch.compile(rmsnorm, backend="eager")(dual, t[0]),
    "compiled by AOT": lambda dual, t: torch.compile(rmsnorm, backend="aot_eager")(dual, t[0]),
    "dy": lambda dual, t: rmsnorm(t.requires_grad_(), t[0].detach()).backward(dual),
}


@pytest.mark.parametrize("way", DUALS)
def test_forward_mode_is_refused(way: str, device: str) -> None:
    """A tangent raises, whichever way it comes: there is no forward derivative to carry it."""
    x, _, _ = make(4, 24, FP32, device=device)
    rmsnorm(x, x[0])  # before torch.compile imports Triton
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=r"forward-mode.*oracle"),
    ):
        DUALS[way](torch.autograd.forward_ad.make_dual(x, x), x.clone())


def test_a_dual_level_alone_changes_nothing(device: str) -> None:
    """Tensors without a tangent pass a level of forward-mode autograd with the same bits."""
    x, w, dy = make(4, 24, FP32, device=device)
    expected = run(x, w, dy)
    with torch.autograd.forward_ad.dual_level():
        assert_same_bits(run(x, w, dy), expected)


def test_a_tensor_that_outlived_its_transform(device: str) -> None:
    """What a finished torch.func transform has let out is read as the tensor inside it."""
    x, w, dy = leaves(4, 24, FP32, device=device)
    leaked: list[torch.Tensor] = []

    def loss(t: torch.Tensor) -> torch.Tensor:
        leaked.append(t * 1)
        return t.sum()

    torch.func.grad(loss)(x.detach())
    y = rmsnorm(leaked[0], w)
    (dw,) = torch.autograd.grad(y, w, dy)
    expected = run(x, w, dy)
    assert_same_bits((y, dw), (expected.y, expected.dw))


def test_nothing_is_recorded_where_no_gradient_is_asked_for(device: str) -> None:
    """Without a tensor that wants a gradient, or under no_grad, y has the same bits and no node."""
    x, w, dy = leaves(4, 24, FP32, device=device)
    expected = run(x, w, dy).y
    with torch.no_grad():
        without = rmsnorm(x, w)
    for y in (without, rmsnorm(x.detach(), w.detach())):
        assert y.grad_fn is None
        assert_same_bits((y,), (expected,))


def test_functional_call_swaps_the_weight(device: str) -> None:
    """A functional call transforms nothing, and so it works, gradients included."""
    x, w, dy = leaves(4, 24, FP32, device=device)
    y = torch.func.functional_call(RMSNorm(24, device=device), {"weight": w}, (x,))
    assert_same_bits((y, *torch.autograd.grad(y, (x, w), dy)), run(x, w, dy))


# ---- Autocast -----------------------------------------------------------------------------------


@in_every_dtype
@pytest.mark.parametrize("autocast_dtype", [torch.float16, BF16])
def test_autocast_changes_nothing(
    dtype: torch.dtype, autocast_dtype: torch.dtype, device: str
) -> None:
    """Under autocast the output keeps the dtype and the bits it has outside."""
    x, w, dy = leaves(4, 24, dtype, FP32, device=device)
    with torch.autocast(device, dtype=autocast_dtype):
        y = rmsnorm(x, w)
        found = torch.autograd.grad(y, (x, w), dy)
    assert_same_bits((y, *found), run(x, w, dy))
