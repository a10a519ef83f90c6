"""What a caller may give: everything that can be wrong is refused here, by name and with a fix.

`op.py` asks before every call, and the dispatcher's operators ask because they can be called past
it. `autograd.py`, the launchers and the kernels trust the answer.
"""

import numbers

import torch
from torch import Tensor

from . import tiling
from .steps import DTYPES

FP32 = torch.finfo(torch.float32)


def check(x: Tensor, w: Tensor, eps: float) -> None:
    """Raise what `rmsnorm` says it raises for these arguments."""
    for name, tensor in (("x", x), ("w", w)):
        if not isinstance(tensor, Tensor):
            hint = f"torch.as_tensor({name}) makes one"
            if isinstance(tensor, torch.fx.Proxy):
                hint = "torch.fx.symbolic_trace has none: use torch.export or torch.compile"
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor ({hint})"
            )
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_nested:
            check_dtype(tensor, name)
            nested = " and is nested" if tensor.is_nested else ""
            raise TypeError(
                f"{name} has layout {tensor.layout}{nested}; it must be one strided tensor: "
                f"{name}.to_dense(), or {name}.to_padded_tensor(0.0) if it is nested"
            )
    if x.dim() == 0:
        raise ValueError("x is a scalar; it must be [..., N]: x.reshape(1) has one row of one")
    N = x.shape[-1]
    check_width(N, "x.shape[-1]")
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
    check_eps(eps)


def check_backward(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> None:
    """Raise RuntimeError unless what the backward was handed belongs to one forward.

    Autograd vouches for dy. The others may come from a saved-tensor hook, and all of them from
    somebody who calls the operator by its name; a kernel would read past the end of a short one.
    """
    if dy.dtype != x.dtype or rstd.dtype != torch.float32:
        raise RuntimeError(
            f"the backward got dy in {dy.dtype}, x in {x.dtype} and rstd in {rstd.dtype}; dy must "
            "have x's dtype and rstd float32: does a saved-tensor hook return another dtype?"
        )
    shape = x.shape
    if dy.shape != shape or w.shape != shape[-1:] or rstd.numel() * w.numel() != x.numel():
        raise RuntimeError(
            f"the backward got dy {list(dy.shape)}, x {list(shape)}, w {list(w.shape)} and rstd "
            f"{list(rstd.shape)}; they must be [..., N], [..., N], [N] and [M], one rstd per row "
            "of x: does a saved-tensor hook return another shape?"
        )
    device = x.device
    if dy.device != device or w.device != device or rstd.device != device:
        raise RuntimeError(
            f"the backward got dy on {dy.device}, x on {device}, w on {w.device} and rstd on "
            f"{rstd.device}; they must share a device: does a saved-tensor hook return another?"
        )


def check_dtype(tensor: Tensor, name: str) -> None:
    """Raise TypeError unless the dtype is one of the three."""
    if tensor.dtype not in DTYPES:
        hint = f"{name}.float() makes it float32; oracle.truth works in float64"
        if name == "dtype":
            hint = "dtype=torch.float32 makes it float32"
        elif tensor.is_quantized:
            hint = f"{name}.dequantize() makes it float32"
        elif tensor.is_complex():
            hint = f"torch.view_as_real({name}).flatten(-2) is real, twice as wide"
        raise TypeError(
            f"{name} is {tensor.dtype}; it must be float16, bfloat16 or float32. Nothing is "
            f"rounded for you: {hint}"
        )


def check_width(N: int, name: str) -> None:
    """Raise ValueError unless N columns are at least one and no more than the kernels serve."""
    if N < 1:
        raise ValueError(
            f"{name} is {N}; it must be 1 to {tiling.LARGEST_N}: a row needs at least one element "
            "to have a mean square"
        )
    if N > tiling.LARGEST_N:
        raise ValueError(
            f"{name} is {N}; it must be 1 to {tiling.LARGEST_N}, the widest row that these kernels "
            "are built and tested for (decision D1). A wider row needs a multi-pass variant, for "
            "instance torch.nn.functional.rms_norm"
        )


def check_eps(eps: float) -> None:
    """Raise TypeError or ValueError unless eps can be added in fp32."""
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        hint = "eps.item()" if isinstance(eps, Tensor) else "for instance 1e-6"
        raise TypeError(f"eps is {eps!r}; it must be a number: {hint}")
    if not (eps == 0 or FP32.tiny <= eps <= FP32.max):
        raise ValueError(
            f"eps is {eps!r}; it must be finite and not negative, and a normal number of float32, "
            "in which it is added: for instance 1e-6"
        )
