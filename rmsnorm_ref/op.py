"""The op: argument checks, the autograd function, the module.

Everything a caller can get wrong is refused here, by name; the launchers and kernels trust it.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from . import interpreter, layout, tiling

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rmsnorm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide each row of x by its root mean square and multiply it by w; differentiable.

    y = x * rstd * w with rstd = 1 / sqrt(mean(x^2, over the last dim) + eps), all of it in fp32,
    rounded once, to the dtype of x. Autocast changes nothing: the statistics are fp32 already.
    A row whose sum of squares overflows fp32 (a norm of 1.8e19 or more) comes out as zeros.

    Args:
        x: [..., N], fp16, bf16 or fp32, any strides, on a GPU, or on the CPU where the kernels are
            interpreted. Read in place if its rows are evenly spaced, 16-byte aligned and have unit
            column stride; any other layout costs one packed copy.
        w: [N], fp16, bf16 or fp32, independent of the dtype of x, on the device of x.
        eps: added to the mean square, inside the root; finite and not negative.

    Returns:
        y: [..., N], dtype of x, contiguous, never an alias of x. Its backward gives dx with the
        dtype of x and dw with the dtype of w, and computes only the gradients that are asked for.

    Raises:
        TypeError: an argument is no tensor, eps is no number, or a dtype is not one of the three
            (float64 is refused and not rounded).
        ValueError: w is not [N]; N is 0 or more than 65536; eps is negative or not finite; x and w
            are on different devices.
        RuntimeError: the tensors are on the CPU and Triton cannot interpret any more; in the
            backward, create_graph is asked for.
        NotImplementedError: a torch.func transform is active.

    Source:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.

    Example:
        >>> import torch
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> rmsnorm(x, torch.ones(2))
        tensor([[0.8485, 1.1314]])
    """
    _check(x, w, eps)
    if torch._C._are_functorch_transforms_active():  # no public name says it
        raise NotImplementedError(
            "rmsnorm does not run under torch.func transforms (grad, vmap, jvp): they ask for "
            "second derivatives or batched kernels, and it has neither. Use torch.autograd.grad, "
            "or rmsnorm_ref.oracle.rmsnorm inside the transform"
        )
    y: Tensor = _RMSNorm.apply(x, w, eps)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return y


class RMSNorm(torch.nn.Module):
    """Normalise the last dimension, of N elements, with a learned weight: `rmsnorm` as a module.

    Takes the place of `torch.nn.RMSNorm(N, eps)`: the parameter is called `weight`, and state dicts
    load both ways. `weight` may have another dtype than the input; the output has the input's.

    Args:
        N: size of the last dimension, 1 to 65536.
        eps: added to the mean square, inside the root.
        device: of the weight.
        dtype: of the weight: fp16, bf16 or fp32.

    Raises:
        TypeError: N is no int, eps is no number, or dtype is not one of the three.
        ValueError: N or eps is out of range.

    Example:
        >>> RMSNorm(4096, eps=1e-5)
        RMSNorm(4096, eps=1e-05)
    """

    weight: Tensor

    def __init__(
        self,
        N: int,
        eps: float = 1e-6,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(N, bool) or not isinstance(N, int):
            raise TypeError(
                f"N is {N!r}; it must be an int, the size of the last dimension (normalise over "
                "several dimensions by flattening them first)"
            )
        _check_width(N, "N")
        _check_eps(eps)
        self.N = N
        self.eps = eps
        weight = torch.empty(N, device=device, dtype=dtype)
        _check_dtype(weight, "dtype")
        self.weight = torch.nn.Parameter(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        torch.nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return `rmsnorm(x, self.weight, self.eps)`; x is [..., N]."""
        return rmsnorm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return what the repr shows between its brackets."""
        return f"{self.N}, eps={self.eps}"


# ---- Checks -----------------------------------------------------------------------------------


def _check(x: Tensor, w: Tensor, eps: float) -> None:
    for name, tensor in (("x", x), ("w", w)):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor "
                f"(torch.as_tensor({name}) makes one)"
            )
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            _check_dtype(tensor, name)
            raise TypeError(f"{name} has layout {tensor.layout}; call {name}.to_dense() first")
    if x.dim() == 0:
        raise ValueError("x is a scalar; it must be [..., N]: x.reshape(1) has one row of one")
    N = x.shape[-1]
    _check_width(N, "x.shape[-1]")
    if w.dim() != 1 or w.shape[0] != N:
        raise ValueError(
            f"w has shape {list(w.shape)} and x has shape {list(x.shape)}; w must be [{N}], one "
            "weight per element of the last dimension of x"
        )
    if x.device != w.device:
        raise ValueError(
            f"x is on {x.device} and w is on {w.device}; they must share a device: "
            f"w.to({str(x.device)!r})"
        )
    _check_eps(eps)


def _check_dtype(tensor: Tensor, name: str) -> None:
    if tensor.dtype not in DTYPES:
        hint = "dtype=torch.float32" if name == "dtype" else f"{name}.float()"
        raise TypeError(
            f"{name} is {tensor.dtype}; it must be float16, bfloat16 or float32. Nothing is "
            f"rounded for you: {hint} makes it float32; oracle.truth works in float64"
        )


def _check_width(N: int, name: str) -> None:
    if N == 0:
        raise ValueError(f"{name} is 0; a row needs at least one element to have a mean square")
    if not 0 < N <= tiling.LARGEST_N:
        raise ValueError(
            f"{name} is {N}; it must be 1 to {tiling.LARGEST_N}, because decision D1 keeps a row "
            "within one program. A wider row needs a multi-pass variant, for instance "
            "torch.nn.functional.rms_norm"
        )


def _check_eps(eps: float) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps is {eps!r}; it must be a number, for instance 1e-6")
    if not 0.0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps!r}; it must be finite and not negative, for instance 1e-6")


# ---- Launching --------------------------------------------------------------------------------

_launchers: dict[str, tuple[Any, Any]] = {}


def _load(device: torch.device) -> tuple[Any, Any]:
    """Import the kernels at the first call on a type of device; remember their two launchers."""
    interpreter.prepare(device)
    from .backward import launch_backward
    from .forward import launch_forward

    return _launchers.setdefault(device.type, (launch_forward, launch_backward))


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the tensors' GPU current where it is not: Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


_HERE = contextlib.nullcontext()


def _launch_forward(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, rstd); x is [..., N] in any layout."""
    launch, _ = _launchers.get(x.device.type) or _load(x.device)
    x, x_row_stride = layout.rows(x, tiling.row_align(x.shape[-1], x.dtype))
    w, _ = layout.rows(w, 1)
    with _on(x.device):
        result: tuple[Tensor, Tensor] = launch(x, x_row_stride, w, eps)
    return result


def _launch_backward(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, *, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return (dx, dw), None for one that is not needed; dy and x are [..., N] in any layout."""
    _, launch = _launchers.get(x.device.type) or _load(x.device)
    row_align = tiling.row_align(x.shape[-1], x.dtype)
    dy, dy_row_stride = layout.rows(dy, row_align)
    x, x_row_stride = layout.rows(x, row_align)
    w, _ = layout.rows(w, 1)
    rstd, _ = layout.rows(rstd, 1)  # a saved-tensor hook may hand it back anywhere
    with _on(x.device):
        result: tuple[Tensor | None, Tensor | None] = launch(
            dy, dy_row_stride, x, x_row_stride, w, rstd, needs_dx=needs_dx, needs_dw=needs_dw
        )
    return result


# ---- The same two launches as dispatcher operators ---------------------------------------------

# torch.compile, fake tensors and the meta device cannot look into a launcher, and need not: to them
# a pass is one opaque operator. Eager calls skip the dispatcher, which costs more than the launch.


@torch.library.custom_op("rmsnorm_ref::forward", mutates_args=())
def _forward_op(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _launch_forward(x, w, eps)


@_forward_op.register_fake
def _(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    del w, eps
    rstd = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), rstd


@torch.library.custom_op("rmsnorm_ref::backward", mutates_args=())
def _backward_op(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    dx, dw = _launch_backward(dy, x, w, rstd, needs_dx=needs_dx, needs_dw=needs_dw)
    return x.new_empty(0) if dx is None else dx, w.new_empty(0) if dw is None else dw


@_backward_op.register_fake
def _(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    del dy, rstd
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else x.new_empty(0)
    dw = torch.empty_like(w, memory_format=torch.contiguous_format) if needs_dw else w.new_empty(0)
    return dx, dw


def _through_dispatcher(x: Tensor) -> bool:
    """Tell whether x is a stand-in, or a subclass whose data a kernel cannot reach by itself."""
    plain = type(x) is Tensor or type(x) is torch.nn.Parameter
    return torch.compiler.is_compiling() or not plain or x.is_meta


# ---- Autograd ---------------------------------------------------------------------------------


class _RMSNorm(torch.autograd.Function):
    """Saves x as it came, not a packed copy, so that a later change in place is caught."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        through_dispatcher = _through_dispatcher(x) or _through_dispatcher(w)
        y, rstd = (_forward_op if through_dispatcher else _launch_forward)(x, w, float(eps))
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w, rstd = ctx.saved_tensors
        needs_dx, needs_dw, _ = ctx.needs_input_grad
        if _through_dispatcher(dy) or _through_dispatcher(x):
            dx, dw = _backward_op(dy, x, w, rstd, needs_dx, needs_dw)
            return dx if needs_dx else None, dw if needs_dw else None, None
        # Under create_graph the results would be recorded as constants, and a penalty on a gradient
        # would vanish without a word. So the request itself is refused.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "rmsnorm has no second derivative, and create_graph=True asks for one: leave it "
                "out, or use rmsnorm_ref.oracle.rmsnorm where a gradient is itself differentiated"
            )
        dx, dw = _launch_backward(dy, x, w, rstd, needs_dx=needs_dx, needs_dw=needs_dw)
        return dx, dw, None
