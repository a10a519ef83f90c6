"""Between the op and the kernels: autograd, the dispatcher, the tensors' device and layout.

An eager call on plain tensors goes through `torch.autograd.Function` straight to the launchers.
Whatever must not look into a launcher, or cannot (torch.compile, fake and meta tensors, subclasses,
dispatch modes), sees each pass as one opaque operator. Second derivatives are refused on both ways.
DTensors come back here as the plain tensors of one rank, by way of `sharded.py`.
"""

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import checks, interpreter, layout, tiling

# ---- Launching --------------------------------------------------------------------------------

_launchers: dict[str, tuple[Any, Any]] = {}


def _load(device: torch.device) -> tuple[Any, Any]:
    """Import the kernels at the first call on a type of device; remember their two launchers."""
    interpreter.prepare(device)
    from . import backward, forward

    launchers = forward.launch_forward, backward.launch_backward
    return _launchers.setdefault(device.type, launchers)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the tensors' GPU current where it is not: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


_HERE = contextlib.nullcontext()


def launch_forward(
    x: Tensor, w: Tensor, eps: float, *, needs_rstd: bool = True
) -> tuple[Tensor, Any]:
    """Return (y, rstd), None for rstd that is not needed; x is [..., N] in any layout."""
    _refuse_tangents(x, w)
    launch, _ = _launchers.get(x.device.type) or _load(x.device)
    x, x_row_stride = layout.rows(x, tiling.row_align(x.shape[-1], x.dtype), "x")
    w, _ = layout.rows(w, 1, "w")
    with _on(x.device):
        result: tuple[Tensor, Any] = launch(x, x_row_stride, w, eps, needs_rstd=needs_rstd)
    return result


def launch_backward(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, *, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return (dx, dw), None for one that is not needed; dy and x are [..., N] in any layout."""
    _refuse_tangents(dy, x, w)
    dy = dy if dy.layout is torch.strided else dy.to_dense()
    checks.check_backward(dy, x, w, rstd)
    _, launch = _launchers.get(x.device.type) or _load(x.device)
    row_align = tiling.row_align(x.shape[-1], x.dtype)
    dy, dy_row_stride = layout.rows(dy, row_align, "dy")
    x, x_row_stride = layout.rows(x, row_align, "x")
    w, _ = layout.rows(w, 1, "w")
    rstd, _ = layout.rows(rstd, 1, "rstd")  # a saved-tensor hook may hand it back anywhere
    with _on(x.device):
        result: tuple[Tensor | None, Tensor | None] = launch(
            dy, dy_row_stride, x, x_row_stride, w, rstd, needs_dx=needs_dx, needs_dw=needs_dw
        )
    return result


# ---- The same two launches as dispatcher operators ---------------------------------------------

# torch.compile, fake tensors and the meta device cannot look into a launcher, and need not: to them
# a pass is one opaque operator. Eager calls skip the dispatcher, which costs more than the launch.


@torch.library.custom_op("rmsnorm_ref::forward", mutates_args=())
def forward_op(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y [..., N] in the dtype of x, and rstd [M] in fp32."""
    checks.check(x, w, eps)  # the operator can be called by its name, past `rmsnorm`
    return launch_forward(x, w, eps)


@forward_op.register_fake
def _(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    checks.check(x, w, eps)
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), rstd


@torch.library.custom_op("rmsnorm_ref::backward", mutates_args=())
def backward_op(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    """Return dx and dw; one that is not needed is empty, because an operator cannot return None."""
    checks.check(x, w, 0.0)
    dx, dw = launch_backward(dy, x, w, rstd, needs_dx=needs_dx, needs_dw=needs_dw)
    return x.new_empty(0) if dx is None else dx, w.new_empty(0) if dw is None else dw


@backward_op.register_fake
def _(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    checks.check_backward(dy, x, w, rstd)
    checks.check(x, w, 0.0)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else x.new_empty(0)
    dw = torch.empty_like(w, memory_format=torch.contiguous_format) if needs_dw else w.new_empty(0)
    return dx, dw


# ---- Autograd ---------------------------------------------------------------------------------


def apply(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return y, recorded for autograd; the arguments have been checked."""
    _refuse_transforms()
    _refuse_tangents(x, w)
    y: Tensor
    if _through_dispatcher(x, w):
        if _distributed(x, w):
            from . import sharded

            return sharded.apply(x, w, eps, apply)
        y, _ = forward_op(x, w, eps)
        return y
    if torch._C._is_tracing():
        raise NotImplementedError(
            "rmsnorm cannot be traced by torch.jit.trace, which hands out shapes that are no "
            "numbers: use torch.export or torch.compile"
        )
    x, w = _unwrap_if_dead(x), _unwrap_if_dead(w)
    if _recorded(x, w):
        y = _record(x, w, eps)
    else:
        y, _ = launch_forward(x, w, eps, needs_rstd=False)
    return y


def _through_dispatcher(x: Tensor, w: Tensor) -> bool:
    """Tell whether somebody else must see the call: a compiler, a mode, a subclass, a stand-in."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or type(x) not in _PLAIN
        or type(w) not in _PLAIN
        or x.is_meta
        or w.is_meta
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def _distributed(x: Tensor, w: Tensor) -> bool:
    """Tell whether x or w is a DTensor; there is none before somebody imported their module."""
    dtensors = sys.modules.get("torch.distributed.tensor")
    return dtensors is not None and any(isinstance(t, dtensors.DTensor) for t in (x, w))


# A tensor that outlived its torch.func transform is a wrapper without storage.
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def _recorded(x: Tensor, w: Tensor) -> bool:
    """Tell whether autograd has anything to record."""
    return torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)


def _refuse_transforms(*, batched: bool = False) -> None:
    if batched or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "rmsnorm does not run under torch.func transforms (grad, vmap, jvp) or batched "
            "gradients: they ask for second derivatives or batched kernels, and it has neither. "
            "Use torch.autograd.grad, or rmsnorm_ref.oracle.rmsnorm inside the transform"
        )


def _refuse_tangents(*tensors: Tensor) -> None:
    # Asked again below the dispatcher, which drops a tangent without a word.
    if forward_ad._current_level >= 0 and any(_has_tangent(tensor) for tensor in tensors):
        raise NotImplementedError(
            "rmsnorm has no forward-mode derivative, and a dual tensor (forward_ad, "
            "torch.func.linearize) asks for one: use torch.autograd.grad, or "
            "rmsnorm_ref.oracle.rmsnorm where a derivative is taken forward"
        )


def _has_tangent(tensor: Tensor) -> bool:
    try:
        tangent: Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]  # torch's
    except RuntimeError:  # inside a graph of AOT autograd torch cannot tell, and has dropped it
        return True
    return tangent is not None


def _refuse_second_derivative() -> None:
    # Under create_graph the gradients would be recorded as constants, and a penalty on a gradient
    # would vanish without a word. So the request itself is refused.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "rmsnorm has no second derivative, and create_graph=True asks for one: leave it out, "
            "or use rmsnorm_ref.oracle.rmsnorm where a gradient is itself differentiated"
        )


def _gradients_by_operator(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor | None, Tensor | None, None]:
    dx, dw = backward_op(dy, x, w, rstd, needs_dx, needs_dw)
    return dx if needs_dx else None, dw if needs_dw else None, None


class _RMSNorm(torch.autograd.Function):
    """Saves x as it came, not a packed copy, so that a later change in place is caught."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        y, rstd = launch_forward(x, w, eps)
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        _refuse_transforms(batched=torch._C._functorch.is_legacy_batchedtensor(dy))
        _refuse_second_derivative()
        x, w, rstd = ctx.saved_tensors
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        if _through_dispatcher(dy, x) or type(w) not in _PLAIN:
            return _gradients_by_operator(dy, x, w, rstd, needs_dx, needs_dw)
        dx, dw = launch_backward(dy, x, w, rstd, needs_dx=needs_dx, needs_dw=needs_dw)
        return dx, dw, None


# `Function.apply` adds two things in Python, for a tenth of a forward's host time: default values,
# of which there are none, and the unwrapping that `apply` has done.
_record: Any = super(torch.autograd.Function, _RMSNorm).apply


def _save_for_operator(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Any) -> None:
    x, w, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, w, rstd)


def _backward_of_operator(
    ctx: Any, dy: Tensor, _: Any
) -> tuple[Tensor | None, Tensor | None, None]:
    _refuse_second_derivative()
    x, w, rstd = ctx.saved_tensors
    needs_dx, needs_dw, _ = ctx.needs_input_grad
    return _gradients_by_operator(dy, x, w, rstd, needs_dx, needs_dw)


forward_op.register_autograd(_backward_of_operator, setup_context=_save_for_operator)
