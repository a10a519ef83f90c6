"""What others see of the op: compilers, dispatch modes, hooks, numbers and views of their own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from paths import EPS, assert_same_bits, check, make, on_every_kernel, run
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm_ref import RMSNorm, rmsnorm

FP32 = torch.float32


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
    expected = run(*inputs)
    with Names() as mode:
        found = run(*inputs)
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
