"""What others see of the op: compilers, dispatch modes, hooks, numbers and views of their own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from paths import (
    DTYPES,
    EPS,
    MANY,
    PATHS,
    assert_same_bits,
    check,
    leaves,
    make,
    on_every_kernel,
    run,
)
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm_ref import RMSNorm, rmsnorm

if TYPE_CHECKING:
    from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_penalty_does_not_vanish(backend: str, device: str) -> None:
    """Compiled or not, a penalty on a gradient raises and is never dropped."""
    x, w, _ = make(3, 64, FP32, device=device)
    compiled = torch.compile(rmsnorm, backend=backend, fullgraph=True)
    y = compiled(x.requires_grad_(), w.requires_grad_()).square().sum()
    with pytest.raises(RuntimeError, match=r"create_graph|double backward"):
        (y + torch.autograd.grad(y, x, create_graph=True)[0].square().sum()).backward()


class Names(TorchDispatchMode):
    """Note the name of every operator that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105  # torch's name
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@on_every_kernel
def test_a_dispatch_mode_sees_both_passes(N: int, M: int, device: str) -> None:
    """A mode sees one operator per pass, and the bits are those of the direct call."""
    inputs = make(M, N, FP32, device=device)
    eps = 0.25  # no default of anybody
    expected = run(*inputs, eps)
    with Names() as mode:
        found = run(*inputs, eps)
    assert {"rmsnorm_ref::forward", "rmsnorm_ref::backward"} <= set(mode.names)
    assert_same_bits(found, expected)


def test_a_hook_that_changes_the_dtype_is_refused(device: str) -> None:
    """What a saved-tensor hook rounds away is not computed with in silence."""
    x, w, dy = make(3, 64, FP32, device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t):
        y = rmsnorm(x.requires_grad_(), w)
    with pytest.raises(RuntimeError, match="saved-tensor hook"):
        y.backward(dy)


def test_batched_gradients_are_refused(device: str) -> None:
    """A vectorised Jacobian asks for a batched backward, which is refused by name."""
    x, w, _ = make(3, 64, FP32, device=device)
    y = rmsnorm(x.requires_grad_(), w)
    with pytest.raises(NotImplementedError, match="batched"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape, device=device), is_grads_batched=True)


@on_every_kernel
def test_a_lazily_negated_view_is_negated(N: int, M: int, device: str) -> None:
    """A tensor whose sign waits in a flag is read with its sign."""
    x, w, dy = make(M, N, FP32, device=device)
    found = run(torch._neg_view(-x), w, torch._neg_view(-dy))
    assert_same_bits(found, run(x, w, dy))


@pytest.mark.parametrize("eps", [np.float32(EPS), np.float64(EPS), np.int64(1), 1, 0])
def test_eps_is_any_real_number(eps: float, device: str) -> None:
    """Numbers of Python and numpy are taken for eps at their float32 value."""
    x, w, dy = make(3, 64, FP32, device=device)
    check(x, w, dy, eps=float(eps))
    assert_same_bits([rmsnorm(x, w, eps)], [rmsnorm(x, w, float(eps))])


@pytest.mark.parametrize("eps", [1e-50, 1e39, 10**400, -1e-6, math.nan, math.inf])
def test_eps_that_float32_cannot_hold_is_refused(eps: float, device: str) -> None:
    """An eps that would be rounded to zero or infinity raises, in the function and the module."""
    x, w, _ = make(3, 64, FP32, device=device)
    for call in (lambda: rmsnorm(x, w, eps), lambda: RMSNorm(8, eps)):
        with pytest.raises(ValueError, match="eps is"):
            call()


def test_the_module_takes_any_integer() -> None:
    """N may be an integer of numpy, as shapes and configurations give it."""
    assert RMSNorm(np.int64(8)).weight.shape == (8,)


# ---- Stand-ins and the compiler -----------------------------------------------------------------


@pytest.mark.parametrize("N", PATHS)
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_stand_ins_have_the_right_shapes_and_dtypes(N: int, kind: str, device: str) -> None:
    """Tensors without data go through both passes: results as real ones, nothing is launched."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    where = "meta" if kind == "meta" else device
    with FakeTensorMode(allow_non_fake_inputs=False) if kind == "fake" else torch.device("meta"):
        x = torch.empty(N, 2, 3, dtype=BF16, device=where).movedim(0, 2).requires_grad_()
        w = torch.empty(N, device=where, requires_grad=True)
        y = rmsnorm(x, w)
        dx, dw = torch.autograd.grad(y.sum(), (x, w))
        (only,) = torch.autograd.grad(rmsnorm(x, w.detach()).sum(), x)
    for result, like in ((y, x), (dx, x), (only, x), (dw, w)):
        assert (result.shape, result.dtype, result.device) == (like.shape, like.dtype, like.device)
        assert result.is_contiguous()


@pytest.mark.parametrize(
    ("N", "M", "w_dtype"),
    [*((17, 2, dtype) for dtype in DTYPES), (17, MANY, FP32), (9000, 2, FP32)],
)
def test_operators_keep_the_dispatchers_rules(
    N: int, M: int, w_dtype: torch.dtype, device: str
) -> None:
    """Both operators pass PyTorch's own check of schema, fake results, strides and tracing."""
    x, w, dy = make(M, N, BF16, w_dtype, device=device)
    operators = torch.ops.rmsnorm_ref
    _, rstd = operators.forward(x, w, 1e-6)
    torch.library.opcheck(operators.forward.default, (x, w, 1e-6))
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(operators.backward.default, (dy, x, w, rstd, *needs))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@on_every_kernel
def test_compiles_as_one_graph(N: int, M: int, backend: str, device: str) -> None:
    """torch.compile takes both passes whole, between other operators, and gives eager's bits."""
    torch._dynamo.reset()  # so that this width is not the ninth variant of the last test's code
    x, w, dy = leaves(M, N, BF16, FP32, device=device)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return rmsnorm(x.neg(), w).neg()

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for y in (compiled(x, w), compiled(x, w)):
        found = torch.autograd.grad(y, (x, w), dy)
        eager = layer(x, w)
        assert_same_bits((y, *found), (eager, *torch.autograd.grad(eager, (x, w), dy)))


def test_compiles_with_a_changing_number_of_rows(device: str) -> None:
    """A module compiled once for any M serves few rows and many."""
    torch._dynamo.reset()
    module = RMSNorm(24, device=device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for M in (2, MANY, 3):
        x = make(M, 24, BF16, device=device)[0].requires_grad_()
        y = compiled(x)
        y.sum().backward()
        expected = run(x, module.weight)
        assert_same_bits((y, x.grad), expected[:2])


# ---- Ways in that are not `rmsnorm` ------------------------------------------------------------


def test_the_operators_refuse_what_the_op_refuses(device: str) -> None:
    """An operator called by its name raises on float64 and rounds nothing."""
    x, w, dy = (torch.ones(n, device=device, dtype=torch.float64) for n in ((2, 8), (8,), (2, 8)))
    with pytest.raises(TypeError, match=r"x is torch\.float64.*x\.float\(\)"):
        torch.ops.rmsnorm_ref.forward(x, w, 1e-6)
    rstd = torch.ones(2, device=device)
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        torch.ops.rmsnorm_ref.backward(dy, x, w, rstd, True, True)  # noqa: FBT003  # positional


def test_a_sparse_gradient_is_read(device: str) -> None:
    """A dy that autograd hands over as a sparse tensor gives the bits of the dense one."""
    x, w, dy = leaves(4, 24, FP32, device=device)
    dy[1] = 0
    y = rmsnorm(x, w)
    dense = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    assert_same_bits(torch.autograd.grad(y, (x, w), dy.to_sparse()), dense)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_tracing_is_refused_and_export_works(device: str) -> None:
    """torch.jit.trace raises and names the way out, and that way out gives eager's bits."""
    module = RMSNorm(24, device=device)
    x = make(3, 24, FP32, device=device)[0]
    with pytest.raises(NotImplementedError, match=r"torch\.export or torch\.compile"):
        torch.jit.trace(module, (x,))
    exported = torch.export.export(module, (x,)).module()
    assert_same_bits((exported(x),), (module(x),))
