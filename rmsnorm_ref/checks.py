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
            raise TypeError(
                f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor "
                f"(torch.as_tensor({name}) makes one)"
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


def check_dtype(tensor: Tensor, name: str) -> None:
    """Raise TypeError unless the dtype is one of the three."""
    if tensor.dtype not in DTYPES:
        hint = "dtype=torch.float32" if name == "dtype" else f"{name}.float()"
        raise TypeError(
            f"{name} is {tensor.dtype}; it must be float16, bfloat16 or float32. Nothing is "
            f"rounded for you: {hint} makes it float32; oracle.truth works in float64"
        )


def check_width(N: int, name: str) -> None:
    """Raise ValueError unless N columns are at least one and no more than the kernels serve."""
    if N == 0:
        raise ValueError(f"{name} is 0; a row needs at least one element to have a mean square")
    if not 0 < N <= tiling.LARGEST_N:
        raise ValueError(
            f"{name} is {N}; it must be 1 to {tiling.LARGEST_N}, the widest row that these kernels "
            "are built and tested for (decision D1). A wider row needs a multi-pass variant, for "
            "instance torch.nn.functional.rms_norm"
        )


def check_eps(eps: float) -> None:
    """Raise TypeError or ValueError unless eps can be added in fp32."""
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError(f"eps is {eps!r}; it must be a number, for instance 1e-6")
    if not (eps == 0 or FP32.tiny <= eps <= FP32.max):
        raise ValueError(
            f"eps is {eps!r}; it must be finite and not negative, and a normal number of float32, "
            "in which it is added: for instance 1e-6"
        )
