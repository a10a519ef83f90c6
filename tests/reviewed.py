"""Kernels to review, right but for what a test changes, and the review of a small plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmsnorm_ref import oracle, review

if TYPE_CHECKING:
    from collections.abc import Callable

    from rmsnorm_ref.review.cases import Case


def small(case: Case) -> bool:
    """Keep what takes no time, every feature among it."""
    return case.M * case.N <= 1200


def reviewed(f: Any, **options: Any) -> review.Report:
    """Review on a CPU, on small inputs."""
    return review.review(f, device="cpu", **({"only": small} | options))


def by_hand(forward: Any = None, backward: Any = None) -> Callable[..., Tensor]:
    """Make a right kernel, but for what is given: it may change y, or dx and dw."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
            ctx.save_for_backward(x, w)
            ctx.eps = eps
            y = oracle.rmsnorm(x, w, eps)
            return forward(y, x, w) if forward else y

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, w = ctx.saved_tensors
            dx, dw = oracle.rmsnorm_backward(dy.to(x.dtype), x, w, ctx.eps)
            return (*(backward(dx, dw, dy, x, w) if backward else (dx, dw)), None)

    apply: Callable[..., Tensor] = Function.apply
    return lambda x, w, eps: apply(x, w, eps)  # noqa: PLW0108  # its parameters' names are read


def rms(x: Tensor) -> Tensor:
    """Return the root of the mean square of each row."""
    return x.square().mean(-1, keepdim=True).sqrt()


def one_plus(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Take w for the gain less one."""
    return oracle.rmsnorm(x, 1 + w, eps)
