"""The op: what a caller sees, as a function and as a module."""

import numbers

import torch
from torch import Tensor

from . import autograd, checks, interpreter


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
        NotImplementedError: a torch.func transform is active, or a tensor carries a tangent of
            forward-mode autograd.

    Source:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.

    Example:
        >>> import torch
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> rmsnorm(x, torch.ones(2))
        tensor([[0.8485, 1.1314]])
    """
    checks.check(x, w, eps)
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
        checks.check_width(N, "N")
        checks.check_eps(eps)
        self.N: int = int(N)
        self.eps: float = float(eps)
        weight = torch.empty(self.N, device=device, dtype=dtype)
        checks.check_dtype(weight, "dtype")
        self.weight = torch.nn.Parameter(weight)
        self.reset_parameters()
        interpreter.expect(weight.device)

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        torch.nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return `rmsnorm(x, self.weight, self.eps)`; x is [..., N]."""
        return rmsnorm(x, self.weight, self.eps)

    def __prepare_scriptable__(self) -> None:  # torch's name: asked by torch.jit.script
        """Refuse to be scripted, alone or inside of a model."""
        raise NotImplementedError(
            "rmsnorm cannot be compiled by torch.jit.script, which reads a subset of Python: use "
            "torch.export or torch.compile"
        )

    def extra_repr(self) -> str:
        """Return what the repr shows between its brackets."""
        return f"{self.N}, eps={self.eps}"
