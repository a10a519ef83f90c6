"""The model of cost: the bytes that RMSNorm moves, step by step, fused and eager.

RMSNorm's time is the time of its memory traffic. This module counts that traffic from shapes
alone and imports no kernel, so a measurement is held against an independent prediction. Bytes are
*distinct* bytes, what must cross HBM once if every cache is perfect: a model, not a reading of a
DRAM counter. M is the number of rows, N the length of a row, e the bytes of one element of x.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

Access = Literal["read", "write"]
Role = Literal["obligatory", "small", "scratch"]
Spelling = Literal["seed", "fp32"]
Dtype = torch.dtype
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# A kernel is (operator, tensors read, tensors written). fp16 and bf16 have the same chains.
_Kernels = tuple[tuple[str, str, str], ...]
_EAGER_FORWARD: _Kernels = (
    ("_to_copy", "x", "h"),
    ("pow", "h", "square"),
    ("mean", "square", "variance"),
    ("add", "variance", "shifted"),
    ("rsqrt", "shifted", "rstd"),
    ("mul", "h rstd", "h_hat"),
    ("_to_copy", "h_hat", "x_hat"),
    ("mul", "w x_hat", "y"),
)
_EAGER_BACKWARD: _Kernels = (
    ("mul", "dy w", "dx_hat_promoted"),
    ("mul", "dy x_hat", "dw_terms"),
    ("sum", "dw_terms", "dw_promoted"),  # w was broadcast down the rows
    ("_to_copy", "dw_promoted", "dw"),
    ("_to_copy", "dx_hat_promoted", "dx_hat"),
    ("_to_copy", "dx_hat", "dh_hat"),
    ("mul", "dh_hat h", "drstd_terms"),
    ("mul", "dh_hat rstd", "dh_direct"),
    ("sum", "drstd_terms", "drstd"),  # rstd was broadcast along the row
    ("pow", "rstd", "rstd_cubed"),  # rsqrt: -rstd**3 / 2 times its gradient
    ("mul", "drstd", "drstd_halved"),
    ("mul", "drstd_halved rstd_cubed", "dvariance"),
    ("div", "dvariance", "dsquare"),  # mean: one number per row, spread over it and divided by N
    ("pow", "h", "h_power"),  # pow(2): 2 * h**1, whose power is a copy that nobody would write
    ("mul", "h_power", "h_doubled"),
    ("mul", "dsquare h_doubled", "dh_statistics"),
    ("add", "dh_direct dh_statistics", "dh"),  # h is used twice
    ("_to_copy", "dh", "dx"),
)
# A cast between equal dtypes launches nothing: the copy is then its original, on the right.
_COPY_OF = {"h": "x", "h_hat": "x_hat", "dh_hat": "dx_hat", "dh": "dx"}
_COPY_OF |= {"dx_hat_promoted": "dx_hat", "dw_promoted": "dw"}


@dataclass(frozen=True)
class Step:
    """Record one tensor's passage through one kernel.

    Role "obligatory" marks an [M, N] tensor, "small" one of M or N elements, and "scratch" a
    buffer with N elements per program, counted for one program.
    """

    kernel: str
    tensor: str
    access: Access
    n_elements: int
    n_bytes: int
    role: Role


@dataclass(frozen=True)
class Chain:
    """Hold the steps of one pass, kernel after kernel, in the order of launch."""

    steps: tuple[Step, ...]

    @property
    def obligatory_bytes(self) -> int:
        """Count the bytes of [M, N] tensors: the headline, and the numerator of bandwidth."""
        return sum(step.n_bytes for step in self.steps if step.role == "obligatory")

    @property
    def total_bytes(self) -> int:
        """Count the headline and the tensors of M or N elements; scratch stays apart."""
        return sum(step.n_bytes for step in self.steps if step.role != "scratch")

    def per_tensor(self) -> dict[tuple[str, Access], int]:
        """Sum bytes by (tensor, access), without scratch: that depends on the launch."""
        n_bytes: Counter[tuple[str, Access]] = Counter()
        for step in self.steps:
            if step.role != "scratch":
                n_bytes[step.tensor, step.access] += step.n_bytes
        return dict(n_bytes)


@dataclass(frozen=True)
class Traffic(Chain):
    """Hold the steps of one fused pass, whose scratch and requests depend on the launch."""

    def scratch_bytes(self, n_programs: int) -> int:
        """Count the partial dw buffer, fp32 [n_programs, N], written and read once: 2*P*N*4."""
        _require_count("n_programs", n_programs, minimum=0)
        return sum(step.n_bytes * n_programs for step in self.steps if step.role == "scratch")

    def requested_bytes(self, n_programs: int) -> dict[tuple[str, Access], int]:
        """Count the bytes that `n_programs` programs ask for, by (tensor, access).

        Every program loads w: a cache hides that from HBM, but not from a counter of loads.
        """
        _require_count("n_programs", n_programs, minimum=0)
        n_bytes: Counter[tuple[str, Access]] = Counter()
        for step in self.steps:
            repeats = n_programs if step.tensor in {"w", "partial_dw"} else 1
            n_bytes[step.tensor, step.access] += step.n_bytes * repeats
        return dict(n_bytes)


def forward(M: int, N: int, x_dtype: Dtype, w_dtype: Dtype | None = None) -> Traffic:
    """Count the fused forward: read x and w, write rstd and y.

    Args:
        M: rows, 0 or more. Without rows nothing asks for w, so it costs nothing either.
        N: elements of a row, 1 or more.
        x_dtype: dtype of x and y: float16, bfloat16 or float32.
        w_dtype: dtype of w; None means `x_dtype`.

    Returns:
        Traffic with obligatory_bytes == 2*M*N*e. total_bytes adds w, and 4*M for rstd in fp32.

    Raises:
        TypeError: a count is no int, or a dtype is not supported.
        ValueError: M is negative, or N is below 1.

    >>> forward(4096, 8192, torch.bfloat16).obligatory_bytes
    134217728
    """
    return Traffic(_steps((("forward", "x w", "rstd y"),), M, N, x_dtype, w_dtype, None))


def backward(
    M: int,
    N: int,
    x_dtype: Dtype,
    w_dtype: Dtype | None = None,
    *,
    needs_dx: bool = True,
    needs_dw: bool = True,
) -> Traffic:
    """Count the fused backward: dx and dw share one read of x and one of dy.

    Args:
        M: rows, 0 or more. Without rows w is not read; dw is still written, as zeros.
        N: elements of a row, 1 or more.
        x_dtype: dtype of x, dy and dx: float16, bfloat16 or float32.
        w_dtype: dtype of w and dw; None means `x_dtype`.
        needs_dx: whether dx is wanted. dw alone needs no w: its terms are dy*x_hat.
        needs_dw: whether dw is wanted. dx alone has no partial buffer.

    Returns:
        Traffic with obligatory_bytes == 3*M*N*e, 2*M*N*e without dx. total_bytes adds w, rstd, dw.

    Raises:
        TypeError: a count is no int, or a dtype is not supported.
        ValueError: M is negative, N is below 1, or neither gradient is wanted.

    >>> both = backward(512, 4096, torch.float16)
    >>> both.obligatory_bytes, both.scratch_bytes(132)
    (12582912, 4325376)
    """
    if not (needs_dx or needs_dw):
        raise ValueError("needs_dx and needs_dw are both False: ask for at least one gradient")
    reads = "x dy w rstd" if needs_dx else "x dy rstd"
    writes = " ".join(["dx"] * needs_dx + ["partial_dw"] * needs_dw)
    reduction: _Kernels = (("dw_reduction", "partial_dw", "dw"),) * needs_dw
    return Traffic(_steps((("backward", reads, writes), *reduction), M, N, x_dtype, w_dtype, None))


def eager_forward(
    M: int, N: int, x_dtype: Dtype, w_dtype: Dtype | None = None, spelling: Spelling = "seed"
) -> Chain:
    """Count the chain of CUDA kernels behind the usual three lines of eager PyTorch.

    "seed" spells `v = x.pow(2).mean(-1, keepdim=True); x = x * torch.rsqrt(v + eps); weight * x`.
    "fp32", common in language models, starts from `x.float()` and casts back before the weight.
    Assumes one kernel per operator, contiguous tensors, and an L2 too small to carry operands
    from one kernel to the next. y has the promoted dtype of x and w.

    Args, errors: as `forward`, and a ValueError for a spelling that is neither of the two.

    Returns:
        Chain of kernels named "operator -> output"; "seed" in one dtype has 7*M*N*e obligatory.

    >>> eager_forward(4096, 8192, torch.bfloat16).obligatory_bytes / (4096 * 8192 * 2)
    7.0
    """
    return Chain(_steps(_EAGER_FORWARD, M, N, x_dtype, w_dtype, spelling))


def eager_backward(
    M: int, N: int, x_dtype: Dtype, w_dtype: Dtype | None = None, spelling: Spelling = "seed"
) -> Chain:
    """Count the kernels that autograd launches for `eager_forward`, in its order.

    Arguments, assumptions and errors are those of `eager_forward`; dy has y's dtype. A gradient
    that promotion widened is cast back. "seed" in one dtype has 23*M*N*e obligatory bytes.

    >>> eager_backward(4096, 8192, torch.bfloat16).obligatory_bytes / (4096 * 8192 * 2)
    23.0
    """
    return Chain(_steps(_EAGER_BACKWARD, M, N, x_dtype, w_dtype, spelling))


def predicted_speedup(eager: Chain, fused: Chain) -> float:
    """Divide eager by fused bytes (ValueError if 0): the speed-up if both run at one bandwidth.

    >>> shape = 512, 2048, torch.float16
    >>> predicted_speedup(eager_forward(*shape), forward(*shape))
    3.5
    """
    if fused.obligatory_bytes == 0:
        raise ValueError("fused moves 0 obligatory bytes: no ratio exists; use M of 1 or more")
    return eager.obligatory_bytes / fused.obligatory_bytes


def effective_bandwidth(n_bytes: int, seconds: float) -> float:
    """Divide counted bytes by a finite time above 0 (else ValueError): bytes per second.

    >>> effective_bandwidth(3_000_000, 0.001)
    3000000000.0
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"seconds is {seconds}: it must be finite and above 0; check the timer")
    return n_bytes / seconds


def scratch_share(M: int, N: int, x_dtype: Dtype, n_programs: int) -> float:
    """Divide the partial dw buffer by the backward's obligatory bytes: 8*P / (3*M*e), any N.

    While this is a few per cent the headline may leave the buffer out; with few rows it may not.

    >>> round(scratch_share(512, 4096, torch.bfloat16, 132), 2)
    0.34
    """
    _require_count("M", M, minimum=1)
    both = backward(M, N, x_dtype)
    return both.scratch_bytes(n_programs) / both.obligatory_bytes


def _steps(
    kernels: _Kernels, M: int, N: int, x_dtype: Dtype, w_dtype: Dtype | None, spelling: str | None
) -> tuple[Step, ...]:
    """Spell out kernels as steps; no spelling means the fused ones."""
    _require_count("M", M, minimum=0)
    _require_count("N", N, minimum=1)
    w_dtype = x_dtype if w_dtype is None else w_dtype
    for argument, dtype in (("x_dtype", x_dtype), ("w_dtype", w_dtype)):
        if dtype not in DTYPES:
            raise TypeError(f"{argument} is {dtype}: pass one of {', '.join(map(str, DTYPES))}")
    if spelling not in {None, "seed", "fp32"}:
        raise ValueError(f"spelling is {spelling!r}: pass 'seed' or 'fp32'")
    y_dtype = torch.promote_types(x_dtype, w_dtype) if spelling else x_dtype
    inside = x_dtype if spelling == "seed" else torch.float32  # what holds the statistics
    shapes: tuple[tuple[Role, int, Dtype, str], ...] = (
        ("obligatory", M * N, x_dtype, "x dx x_hat dx_hat"),
        ("obligatory", M * N, y_dtype, "y dy dx_hat_promoted dw_terms"),
        ("obligatory", M * N, inside, "h h_hat square dh dh_hat dh_direct dh_statistics"),
        ("obligatory", M * N, inside, "drstd_terms dsquare h_power h_doubled"),
        ("small", M, inside, "rstd variance shifted drstd rstd_cubed drstd_halved dvariance"),
        ("small", N if M else 0, w_dtype, "w"),
        ("small", N, w_dtype, "dw"),
        ("small", N, y_dtype, "dw_promoted"),
        ("scratch", N, torch.float32, "partial_dw"),
    )
    sizes = {name: (role, n, dtype) for role, n, dtype, names in shapes for name in names.split()}
    same = {copy: name for copy, name in _COPY_OF.items() if sizes[copy] == sizes[name]}
    steps: list[Step] = []
    for operator, reads, writes in kernels:
        moved: list[tuple[str, Access]] = [(same.get(name, name), "read") for name in reads.split()]
        moved += [(same.get(name, name), "write") for name in writes.split()]
        if operator == "_to_copy" and moved[0][0] == moved[1][0]:
            continue
        kernel = f"{operator} -> {moved[-1][0]}" if spelling else operator
        for tensor, access in moved:
            role, n, dtype = sizes[tensor]
            steps.append(Step(kernel, tensor, access, n, n * dtype.itemsize, role))
    return tuple(steps)


def _require_count(name: str, value: object, *, minimum: int) -> None:
    """Refuse what is no whole number of `minimum` or more; a bool is a mistake, not a count."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: pass an int, such as x.shape[0]")
    if value < minimum:
        raise ValueError(f"{name} is {value}: it must be {minimum} or more; check the shape")
