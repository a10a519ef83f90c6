"""The model of cost: the bytes that RMSNorm moves, step by step, fused and eager.

RMSNorm's time is the time of its memory traffic. This module counts that traffic from shapes
alone and imports no kernel, so a measurement is held against an independent prediction: of what
crosses HBM, and apart from it of what programs ask for and a cache may serve. It reads no counter.
M is the number of rows, N the length of a row, e the bytes of one element of x. N also decides
which kernels run, by the thresholds in `tiling.py`.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

from . import steps, tiling
from .steps import Access, Role, Step

Spelling = Literal["seed", "fp32"]
Dtype = torch.dtype
GPU = torch.device("cuda")  # a name: nothing is initialised


@dataclass(frozen=True)
class Chain:
    """Hold the steps of one pass, kernel after kernel, in the order of launch."""

    steps: tuple[Step, ...]

    @property
    def obligatory_bytes(self) -> int:
        """Count the bytes of [M, N] tensors: the headline, and the numerator of bandwidth."""
        return self._sum("obligatory")

    @property
    def total_bytes(self) -> int:
        """Count what HBM is expected to move: the headline and the small tensors, no scratch."""
        return self._sum("obligatory", "small")

    def per_tensor(self) -> dict[tuple[str, Access], int]:
        """Sum total_bytes by (tensor, access); each byte of a fused pass is there once."""
        n_bytes: Counter[tuple[str, Access]] = Counter()
        for step in self.steps:
            if step.role in {"obligatory", "small"}:
                n_bytes[step.tensor, step.access] += step.n_bytes
        return dict(n_bytes)

    def _sum(self, *roles: Role) -> int:
        return sum(step.n_bytes for step in self.steps if step.role in roles)


@dataclass(frozen=True)
class Traffic(Chain):
    """Hold the steps of one fused pass, whose scratch and requests depend on the launch."""

    partial_row_bytes: int = 0

    def scratch_bytes(self, n_programs: int) -> int:
        """Count a partial dw buffer, fp32 [n_programs, N], written and read once: 2*P*N*4.

        The kernel for few rows has none, whatever n_programs is.
        """
        steps.require_count("n_programs", n_programs, minimum=0)
        return 2 * self.partial_row_bytes * n_programs

    def requested_bytes(self, n_programs: int) -> dict[tuple[str, Access], int]:
        """Count the bytes that programs ask for, by (tensor, access), whoever serves them.

        n_programs is the number of tiles in the forward (of rows where N is wide), in the backward
        `tiling.n_programs(M, N, device)`, and where rows are few that of programs that write dx.
        """
        steps.require_count("n_programs", n_programs, minimum=0)
        n_bytes: Counter[tuple[str, Access]] = Counter()
        for step in self.steps:
            repeats = n_programs if step.repeats is None else step.repeats
            n_bytes[step.tensor, step.access] += step.n_bytes * repeats
        return dict(n_bytes)


def forward(
    M: int, N: int, x_dtype: Dtype, w_dtype: Dtype | None = None, *, needs_rstd: bool = True
) -> Traffic:
    """Count the fused forward: read x and w, write rstd and y.

    Above `tiling.ONE_TILE_MAX` columns x is asked for twice, the second time out of a cache.

    Args:
        M: rows, 0 or more. Without rows nothing asks for w, so it costs nothing either.
        N: elements of a row, 1 or more.
        x_dtype: dtype of x and y: float16, bfloat16 or float32.
        w_dtype: dtype of w; None means `x_dtype`.
        needs_rstd: whether a backward will come; without one nothing writes rstd.

    Returns:
        Traffic with obligatory_bytes == 2*M*N*e. total_bytes adds w, and 4*M for rstd in fp32.

    Raises:
        TypeError: a count is no int, or a dtype is not supported.
        ValueError: M is negative, or N is below 1.

    >>> forward(4096, 8192, torch.bfloat16).obligatory_bytes
    134217728
    """
    name, again = ("wide_forward", " x@cached") if N > tiling.ONE_TILE_MAX else ("forward", "")
    kernels = ((name, "x w*P" + again, "rstd y" if needs_rstd else "y"),)
    return Traffic(steps.spell_out(kernels, M, N, x_dtype, w_dtype, None))


def backward(
    M: int,
    N: int,
    x_dtype: Dtype,
    w_dtype: Dtype | None = None,
    *,
    needs_dx: bool = True,
    needs_dw: bool = True,
    device: torch.device = GPU,
) -> Traffic:
    """Count the fused backward: dx and dw share one read of x and one of dy.

    dx of a wide row needs x and dy a second time, out of a cache, and the programs that share the
    row hand each other a number each. Few rows are read once for dx and once for dw, the second
    time out of a cache (L2, if it is as large as an H200's), and have no partial buffer.

    Args:
        M: rows, 0 or more. Without rows w is not read; dw is still written, as zeros.
        N: elements of a row, 1 or more.
        x_dtype: dtype of x, dy and dx: float16, bfloat16 or float32.
        w_dtype: dtype of w and dw; None means `x_dtype`.
        needs_dx: whether dx is wanted. dw alone needs no w: its terms are dy*x_hat.
        needs_dw: whether dw is wanted. dx alone has no partial buffer.
        device: how many rows are few, and how many programs share a wide one, depends on whether
            kernels are compiled or interpreted.

    Returns:
        Traffic with obligatory_bytes == 3*M*N*e, 2*M*N*e without dx. total_bytes adds w, rstd, dw,
        and those numbers.

    Raises: as `forward`, and a ValueError where neither gradient is wanted.

    >>> both = backward(4096, 4096, torch.float16)
    >>> both.obligatory_bytes, both.scratch_bytes(132)
    (100663296, 4325376)
    """
    if not (needs_dx or needs_dw):
        raise ValueError("needs_dx and needs_dw are both False: ask for at least one gradient")
    path = tiling.backward_path(M, N, device, x_dtype, w_dtype)
    members = tiling.team(N, device).members if path == "wide_backward" else 1
    kernels: steps.Kernels = ()
    reads = f"x dy rstd*{members}"
    more = []
    if needs_dx and path == "backward":
        reads += " w*P"
    elif needs_dx:
        kernels = (("fill", "", "parts"),)
        reads = f"x dy rstd*{2 * members} w*{2 * M} x@cached dy@cached parts*{members}"
        more = ["parts"]
    writes = " ".join(["dx"] * needs_dx + more + ["partial_dw*P"] * needs_dw)
    kernels += ((path, reads, writes), *(("reduce_dw", "partial_dw*P", "dw"),) * needs_dw)
    if path == "few_rows_backward":
        dw_programs = needs_dw * -(-N // tiling.dw_cols(M, N, device))
        reads = f"x dy rstd*{needs_dx + dw_programs}" + " w*P" * needs_dx
        reads += " x@cached dy@cached" * (needs_dx and needs_dw)
        kernels = ((path, reads, " ".join(["dx"] * needs_dx + ["dw"] * needs_dw)),)
    partial_row_bytes = needs_dw * (path != "few_rows_backward") * N * 4
    found = steps.spell_out(kernels, M, N, x_dtype, w_dtype, None, members)
    return Traffic(found, partial_row_bytes)


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
    return Chain(steps.spell_out(steps.EAGER_FORWARD, M, N, x_dtype, w_dtype, spelling))


def eager_backward(
    M: int, N: int, x_dtype: Dtype, w_dtype: Dtype | None = None, spelling: Spelling = "seed"
) -> Chain:
    """Count the kernels that autograd launches for `eager_forward`, in its order.

    Arguments, assumptions and errors are those of `eager_forward`; dy has y's dtype. A gradient
    that promotion widened is cast back. "seed" in one dtype has 23*M*N*e obligatory bytes.

    >>> eager_backward(4096, 8192, torch.bfloat16).obligatory_bytes / (4096 * 8192 * 2)
    23.0
    """
    return Chain(steps.spell_out(steps.EAGER_BACKWARD, M, N, x_dtype, w_dtype, spelling))


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


def buffer_bytes(n_programs: int, N: int) -> int:
    """Return the bytes of a partial dw buffer, fp32 [n_programs, N], written and read once.

    >>> buffer_bytes(132, 4096)
    4325376
    """
    return 2 * n_programs * N * 4


def scratch_share(M: int, N: int, x_dtype: Dtype, n_programs: int) -> float:
    """Divide the partial dw buffer by the backward's obligatory bytes: 8*P / (3*M*e), any N.

    While this is a few per cent the headline may leave the buffer out. With few rows it would not
    be, which is one reason why they have a kernel without it.

    >>> round(scratch_share(512, 4096, torch.bfloat16, 132), 2)
    0.34
    """
    steps.require_count("M", M, minimum=1)
    steps.require_count("n_programs", n_programs, minimum=0)
    both = backward(M, N, x_dtype)
    return buffer_bytes(n_programs, N) / both.obligatory_bytes
