"""The op: what a caller sees, and the checks of what a caller gives.

Everything that can be wrong is refused here, by name; `autograd.py` and the kernels trust it.
"""

import numbers

import torch
from torch import Tensor

from . import autograd, interpreter, tiling

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP32 = torch.finfo(torch.float32)


def rmsnorm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide each row of x by its root mean square and multiply it by w; differentiable.

    y = x * rstd * w with rstd = 1 / sqrt(mean(x^2, over the last dim) + eps), all of it in fp32,
    rounded once, to the dtype of x. Autocast changes nothing: the statistics are fp32 already.
    A row whose sum of squares overflows fp32 (a norm of 1.8e19 or more) comes out as zeros; an
    element below 1e-19 adds nothing to that sum, which matters only where eps is 0.

    Args:
        x: [..., N], fp16, bf16 or fp32, any strides, on a GPU, or on the CPU where the kernels are
            interpreted. Read in place if it starts on 16 bytes and has evenly spaced rows of unit
            column stride; any other layout costs a packed copy in each pass.
            A DTensor is replicated or split by rows; each rank normalises the rows that it holds.
        w: [N], fp16, bf16 or fp32, independent of the dtype of x, on the device of x. Replicated on
            the mesh of x if that is a DTensor.
        eps: added to the mean square, inside the root; 0, or a positive normal number of fp32. With
            0, a row of zeros gives NaN.

    Returns:
        y: [..., N], dtype of x, contiguous, never an alias of x. Its backward gives dx with the
        dtype of x and dw with the dtype of w, and computes only the gradients that are asked for.

    Raises:
        TypeError: an argument is no tensor, eps is no number, a dtype is not one of the three
            (float64 is refused and not rounded), or only one of x and w is a DTensor.
        ValueError: w is not [N]; N is 0 or more than 65536; eps is out of range; x and w are on
            different devices or meshes, or split so that a rank lacks data of a row;
            RMSNORM_REF_TUNING is no known word.
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
    return autograd.apply(x, w, float(eps))


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
        if isinstance(N, bool) or not isinstance(N, numbers.Integral):
            raise TypeError(
                f"N is {N!r}; it must be an int, the size of the last dimension (normalise over "
                "several dimensions by flattening them first)"
            )
        _check_width(N, "N")
        _check_eps(eps)
        self.N: int = int(N)
        self.eps: float = float(eps)
        weight = torch.empty(self.N, device=device, dtype=dtype)
        _check_dtype(weight, "dtype")
        self.weight = torch.nn.Parameter(weight)
        self.reset_parameters()
        interpreter.expect(weight.device)

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
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_nested:
            _check_dtype(tensor, name)
            nested = " and is nested" if tensor.is_nested else ""
            raise TypeError(
                f"{name} has layout {tensor.layout}{nested}; it must be one strided tensor: "
                f"{name}.to_dense(), or {name}.to_padded_tensor(0.0) if it is nested"
            )
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
            f"{name} is {N}; it must be 1 to {tiling.LARGEST_N}, the widest row that these kernels "
            "are built and tested for (decision D1). A wider row needs a multi-pass variant, for "
            "instance torch.nn.functional.rms_norm"
        )


def _check_eps(eps: float) -> None:
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError(f"eps is {eps!r}; it must be a number, for instance 1e-6")
    if not (eps == 0 or FP32.tiny <= eps <= FP32.max):
        raise ValueError(
            f"eps is {eps!r}; it must be finite and not negative, and a normal number of float32, "
            "in which it is added: for instance 1e-6"
        )
