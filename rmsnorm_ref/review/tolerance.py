"""How far a result may lie from the truth: three levels, and what eager code does on the input.

`clean` is within the bound of `oracle.py`: fp32 arithmetic and one rounding. `rounding` is beyond
it, but no further than the usual eager code, which rounds intermediates to the storage dtype: a
worst case for every element, and on random input also the size of the error as a whole, against
that of the eager code itself. `wrong` is what is left.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm_ref import oracle

if TYPE_CHECKING:
    from collections.abc import Callable

CLEAN, ROUNDING, EAGER, WRONG = "clean", "rounding", "as eager", "wrong"
LEVELS = (CLEAN, ROUNDING, EAGER, WRONG)
# How much larger than eager's the error as a whole may be. Rounding rstd is one draw per row, so
# that over 8 rows its size varies by half; a bf16 sum over 256 rows reaches 8.
MOST_OF_EAGER = 3.0
SMALLEST_SAMPLE = 512  # elements for that comparison, in 8 rows or more


def eager(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Stay in the storage dtype from end to end."""
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def eager_fp32(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Compute in fp32 and cast back before the weight."""
    h = x.float()
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


SPELLINGS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "eager": eager,
    "eager_fp32": eager_fp32,
}


class Inputs(NamedTuple):
    """Hold one case's tensors and its eps."""

    x: Tensor
    w: Tensor
    dy: Tensor
    eps: float


def grads(f: Callable[..., Tensor], given: Inputs) -> dict[str, Tensor]:
    """Run both passes of a differentiable function that is trusted."""
    x, w = given.x.detach().requires_grad_(), given.w.detach().requires_grad_()
    with torch.enable_grad():
        y = f(x, w, given.eps)
        dx, dw = torch.autograd.grad(y, (x, w), given.dy.to(y.dtype))
    return {"y": y.detach(), "dx": dx, "dw": dw}


def truths(given: Inputs, names: set[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return truth and bound of each result that is asked for, float64."""
    x, w, dy, eps = given
    found = {}
    if "y" in names:
        found["y"] = oracle.truth(x, w, eps), oracle.bound_y(x, w, eps)
    if names & {"dx", "dw"}:
        dx, dw = oracle.truth_backward(dy, x, w, eps)
        if "dx" in names:
            found["dx"] = dx, oracle.bound_dx(dy, x, w, eps)
        if "dw" in names:
            found["dw"] = dw, oracle.bound_dw(dy, x, w, eps)
    return found


def eager_tolerance(
    name: str,
    given: Inputs,
    truth: Tensor,
    bound: Tensor,
    dtype: torch.dtype,
    *,
    in_series: bool = False,
) -> Tensor:
    """Bound what any order of the right operations reaches that rounds each to `dtype`.

    Three roundings before the root, halved by it, and the root's own: 2.5 u in rstd. y adds 2 u. In
    dx the direct part adds 3 u, the mean part 3 times rstd's and 8 u, each relative to its own
    part; dw adds 3 u to every term. Results are rounded to their dtype once more. In float16 each
    of the squares may also lose half the smallest number.

    `in_series`: of equal terms added one by one, fp32 drifts in one direction, U per term.
    """
    x, w, dy, eps = given
    limits = torch.finfo(dtype)
    u, smallest = limits.eps / 2, limits.tiny * limits.eps
    rstd = torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + eps)
    in_series_u = oracle.U * w.numel() if in_series else 0.0
    in_rstd = 2.5 * u + in_series_u / 2 + 0.75 * smallest * rstd**2
    if name == "y":
        slack = (in_rstd + 2 * u) * truth.abs()
        return bound + slack + smallest * (1 + w.double().abs())
    x_hat = (x.double() * rstd).abs()
    if name == "dw":
        terms = (in_rstd + 3 * u) * dy.double().abs() * x_hat + smallest
        return bound + terms.reshape(-1, w.numel()).sum(0) + u * truth.abs()
    dyw = (dy.double() * w.double()).abs()
    mean_part = x_hat * (dyw * x_hat).mean(-1, keepdim=True)
    in_mean = 3 * in_rstd + 8 * u + in_series_u
    in_dx = rstd * ((in_rstd + 3 * u) * dyw + in_mean * mean_part)
    return bound + in_dx + smallest * (1 + rstd)


def judge(
    name: str,
    actual: Tensor,
    truth: Tensor,
    bound: Tensor,
    given: Inputs,
    *,
    random: bool,
    in_series: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Return the level of one result, its worst element, and its errors.

    `dtype` is what the kernel's intermediates may be rounded to, x's own if it is not given.
    """
    dtype = dtype or given.x.dtype
    error = (actual.double() - truth).abs()
    if bool((error <= bound).all()):  # the usual case, and nothing in it is NaN
        ratio = (error / bound).nan_to_num(nan=0.0).max().item() if error.numel() else 0.0
        return {"level": CLEAN, "ratio": ratio}
    verdict = oracle.compare(actual, truth, bound)
    level, at = CLEAN, verdict.index
    if not verdict.ok:
        tolerance = eager_tolerance(name, given, truth, bound, dtype, in_series=in_series)
        tolerance = torch.where(truth.isfinite(), tolerance, 0.0)
        loose_ok, farthest = _within(actual, truth, tolerance, error)
        level = ROUNDING if loose_ok else WRONG
        at = verdict.index if loose_ok else farthest
        if level == ROUNDING and random and not _no_larger_than_eager(name, verdict, given):
            level = WRONG
        if level == WRONG and _errs_as_eager(name, actual, truth, tolerance, given):
            level = EAGER
    return {
        "level": level,
        "ratio": verdict.worst_ratio,
        "index": list(at),
        "got": actual[at].item() if actual.numel() else 0.0,
        "expected": truth[at].item() if actual.numel() else 0.0,
        "bound": bound[at].item() if actual.numel() else 0.0,
        "relative_l2": verdict.errors.relative_l2,
        "max_ulp": verdict.errors.max_ulp,
    }


def _within(
    actual: Tensor, truth: Tensor, tolerance: Tensor, error: Tensor
) -> tuple[bool, tuple[int, ...]]:
    """Tell whether all is within a tolerance, and where it is farthest from that."""
    if not bool(error.isfinite().all()):
        loose = oracle.compare(actual, truth, tolerance)
        return loose.ok, loose.index
    ratio = torch.where(error == 0, 0.0, error / tolerance)
    at = torch.unravel_index(ratio.argmax(), ratio.shape)
    return bool((error <= tolerance).all()), tuple(int(i) for i in at)


def _no_larger_than_eager(name: str, verdict: oracle.Verdict, given: Inputs) -> bool:
    """Compare the error as a whole with that of both eager spellings on the same input."""
    rows = given.x.numel() // given.x.shape[-1]
    n_results = given.w.numel() if name == "dw" else given.x.numel()
    if rows < 8 or n_results * (rows if name == "dw" else 1) < SMALLEST_SAMPLE or n_results < 32:
        return True
    theirs = [_of_eager(f, name, given) for f in SPELLINGS.values()]
    truth = truths(given, {name})[name][0]
    sizes = [oracle.errors(found, truth).relative_l2 for found in theirs]
    return not verdict.errors.relative_l2 > MOST_OF_EAGER * max(
        [size for size in sizes if math.isfinite(size)], default=math.inf
    )


def _of_eager(f: Callable[..., Tensor], name: str, given: Inputs) -> Tensor:
    return f(given.x, given.w, given.eps) if name == "y" else grads(f, given)[name]


def _errs_as_eager(
    name: str, actual: Tensor, truth: Tensor, tolerance: Tensor, given: Inputs
) -> bool:
    """Tell whether eager code in the storage dtype errs as much, say by overflow in float16."""
    if given.x.dtype == torch.float32:
        return False
    theirs = _of_eager(eager, name, given).double()
    allowed = tolerance + 4 * (theirs - truth).abs()
    allowed = torch.where(theirs.isfinite() & truth.isfinite(), allowed, math.inf)
    error = (actual.double() - truth).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    same = (actual.double() == truth) | (actual.isnan() & truth.isnan())
    return bool((same | (error <= allowed)).all())
