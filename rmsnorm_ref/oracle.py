"""The model of value: what RMSNorm must return, and how far a correct kernel may land from it.

`truth` is float64. `rmsnorm` is the oracle: fp32 from end to end, rounded once. The bounds say,
element by element, how far fp32 arithmetic and one rounding can be from the truth. None looks at
another kernel, so the claim is "within X of the true value", not "same as theirs".

Range of the bounds: fp32 holds the sum of squares (a row with a norm above 1.8e19 overflows it,
whatever the dtype) and intermediates are zero or normal in fp32. Inputs are taken as given, that is
already rounded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

U = 2.0**-24  # unit roundoff of fp32: the relative cost of one rounding
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_EXPONENT = 0x7FF0_0000_0000_0000  # the exponent bits of a float64


def rmsnorm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute the fp32 oracle: x * rstd * w, rounded once.

    Args:
        x: [..., N], fp16, bf16 or fp32; any strides.
        w: [N], a dtype of its own.
        eps: added to the mean square, inside the root.

    Returns:
        y, [..., N] in x's dtype.

    Raises:
        TypeError: x or w has another dtype; float64 would be rounded in silence.
        ValueError: w is not [N], or N is 0.

    >>> rmsnorm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    _check(DTYPES, x=x, w=w)
    x32 = x.float()
    rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * rstd * w.float()).to(x.dtype)


def rmsnorm_backward(dy: Tensor, x: Tensor, w: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Differentiate the fp32 oracle with autograd; no formula of ours is involved.

    dy is [..., N], x's shape, fp16, bf16 or fp32; any strides, 0 included. The other arguments and
    the errors are as in `rmsnorm`; a ValueError also tells that dy has not x's shape.

    Returns:
        dx [..., N] in x's dtype and dw [N] in w's dtype, each rounded once.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> rmsnorm_backward(torch.ones(1, 2), x, torch.ones(2))[1]
    tensor([0.8485, 1.1314])
    """
    _check(DTYPES, x=x, w=w, dy=dy)
    with torch.enable_grad():
        x32 = x.detach().float().requires_grad_()
        w32 = w.detach().float().requires_grad_()
        dx, dw = torch.autograd.grad(rmsnorm(x32, w32, eps), (x32, w32), dy.detach().float())
    return dx.to(x.dtype), dw.to(w.dtype)


def truth(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute y in float64: [..., N]. Arguments and errors as `rmsnorm`; float64 is allowed.

    >>> y = truth(torch.full((1, 4), 1e-3, dtype=torch.float64), torch.ones(4))
    >>> round(y[0, 0].item(), 5)
    0.70711
    """
    x_hat, _ = _normalise(x, w, eps)
    return x_hat * w.double()


def truth_backward(dy: Tensor, x: Tensor, w: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Compute dx [..., N] and dw [N] in float64 by the closed formula, without autograd.

    With x_hat = x * rstd and dyw = dy * w: dx = (dyw - x_hat * mean(dyw * x_hat)) * rstd, and dw
    sums dy * x_hat over all rows. Arguments and errors as `rmsnorm_backward`; float64 is allowed.

    >>> one_hot = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    >>> dx, dw = truth_backward(one_hot, one_hot, torch.ones(4), eps=1e-4)
    >>> round(dx[0, 0].item(), 6)
    0.0008
    """
    x_hat, rstd = _normalise(x, w, eps, dy)
    dyw = dy.double() * w.double()
    dx = (dyw - x_hat * (dyw * x_hat).mean(-1, keepdim=True)) * rstd
    return dx, (dy.double() * x_hat).reshape(-1, w.numel()).sum(0)


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the spacing of `dtype` at |value|, float64; the smallest subnormal from below.

    Exact: it keeps value's exponent bits. Beyond the largest finite value the spacing goes on
    doubling. Infinity and NaN have none: inf.

    >>> ulp(torch.tensor([1.0, -3.0, 0.0]), torch.bfloat16).tolist()
    [0.0078125, 0.015625, 9.183549615799121e-41]
    """
    power_of_two = (value.double().view(torch.int64) & _EXPONENT).view(torch.float64)
    limits = torch.finfo(dtype)
    return power_of_two.clamp(min=limits.tiny) * limits.eps


class Errors(NamedTuple):
    """Hold the largest absolute error, |error|_2 / |truth|_2, and the largest error in ulps."""

    max_abs: float
    relative_l2: float
    max_ulp: float


def errors(actual: Tensor, truth: Tensor) -> Errors:
    """Measure actual [...] against truth [...] float64, in ulps of actual's dtype.

    NaN against NaN, and infinity against a truth that rounds to it, are no error. Any other
    meeting with NaN or infinity is an infinite one. Empty tensors have none.

    >>> errors(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    Errors(max_abs=0.0, relative_l2=0.0, max_ulp=0.0)
    """
    error = _error(actual, truth)
    if error.numel() == 0:
        return Errors(0.0, 0.0, 0.0)
    size = torch.where(truth.isfinite(), truth, 0.0).norm()
    n_ulps = _ratio(error, ulp(truth, actual.dtype))
    return Errors(error.max().item(), _ratio(error.norm(), size).item(), n_ulps.max().item())


def sum_roundings(N: int) -> int:
    """Count the roundings on the longest path through a sum of N terms.

    A thread adds its own terms in series, then lanes and warps combine in a tree of log2(N). The
    series has N/32 terms for one warp; no more than 128, since a thread has 255 registers; and up
    to 16 where the interpreter's host library sums in blocks of eight accumulators.
    """
    return min(N, 128, max(16, math.ceil(N / 32))) + math.ceil(math.log2(N))


def rstd_roundings(N: int) -> float:
    """Bound the relative error of rstd in units of U.

    The sum's terms are positive, so its relative error is at most one U per rounding on a path.
    Four more: the square, the division by N, eps itself, adding it. The root halves a relative
    error, since d(s**-0.5)/s**-0.5 = -0.5 ds/s. rsqrt's own is 2**-22.9, under 3 U (PTX manual).
    """
    return (sum_roundings(N) + 4) / 2 + 3


def bound_y(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Bound |y - truth|, element by element: float64 [..., N].

    Half an ulp of x's dtype, plus U*K*|truth|: rstd's K and two multiplications, all relative to
    the result, as nothing is subtracted. Their sum is exactly right: where fp32 lands on a tie,
    the store moves half an ulp, and may move on in the direction of the fp32 error.
    Arguments and errors as `truth`.
    """
    y = truth(x, w, eps)
    return _stored(y, U * (rstd_roundings(w.numel()) + 2) * y.abs(), x.dtype)


def bound_dx(dy: Tensor, x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Bound |dx - truth|, element by element: float64 [..., N].

    dx = (dyw - x_hat*c)*rstd with c = mean(dyw*x_hat). The bracket may cancel, so the fp32 error
    is relative to its two parts and not to dx. With K for rstd and S for a sum:
    dyw carries 1, the subtraction 1, the last product K + 1: K + 3.
    x_hat*c carries K + 1 for x_hat, K + S + 5 for c (relative to mean|dyw*x_hat|, as the terms
    have signs), and 1; then the same subtraction and product: 3K + S + 9.
    Half an ulp of x's dtype on top. Arguments and errors as `truth_backward`.
    """
    x_hat, rstd = _normalise(x, w, eps, dy)
    k, s = rstd_roundings(w.numel()), sum_roundings(w.numel())
    dyw = (dy.double() * w.double()).abs()
    x_hat_c = x_hat.abs() * (dyw * x_hat.abs()).mean(-1, keepdim=True)
    fp32_error = U * rstd * ((k + 3) * dyw + (3 * k + s + 9) * x_hat_c)
    return _stored(truth_backward(dy, x, w, eps)[0], fp32_error, x.dtype)


def bound_dw(dy: Tensor, x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Bound |dw - truth|, element by element: float64 [N].

    Each term dy*x_hat carries rstd's K and two multiplications. Summing M of them in fp32 rounds
    M times, each by at most U times a partial sum, which sum|dy*x_hat| bounds. Roundings of a
    long sum point either way, so they add like a random walk: sqrt(M), not M. That is 3 sigma
    when all terms agree in sign (rounding is uniform, and partial sums have a third of the last
    one's mean square), far more when they do not. Equal rows drift in step, one U per row that a
    program adds in series: covered up to sqrt(M) of them (4096 rows in 132 programs: 32), not far
    above.
    Half an ulp of w's dtype on top. Arguments and errors as `truth_backward`.
    """
    N = w.numel()
    x_hat, _ = _normalise(x, w, eps, dy)
    terms = (dy.double() * x_hat).abs().reshape(-1, N)
    fp32_error = U * (rstd_roundings(N) + 2 + math.sqrt(len(terms))) * terms.sum(0)
    return _stored(truth_backward(dy, x, w, eps)[1], fp32_error, w.dtype)


class Verdict(NamedTuple):
    """Hold whether all is within bounds, the worst error/bound, its index, and the errors."""

    ok: bool
    worst_ratio: float
    index: tuple[int, ...]  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    errors: Errors


def compare(
    actual: Tensor, truth: Tensor, bound: Tensor, *, dtype: torch.dtype | None = None
) -> Verdict:
    """Hold actual [...] against truth and bound, both float64 [...], element by element.

    NaN must meet NaN, and infinity a truth that rounds to that infinity or, within the bound,
    may; anything else that is not finite fails, and so does a NaN bound. Empty tensors pass.
    TypeError if actual is not fp16, bf16 or fp32, or not `dtype`; ValueError if shapes differ.

    >>> x, w = torch.linspace(-1, 1, 32).bfloat16(), torch.ones(32)
    >>> compare(rmsnorm(x, w), truth(x, w), bound_y(x, w)).ok
    True
    """
    if actual.dtype not in DTYPES or dtype not in {None, actual.dtype}:
        raise TypeError(f"actual is {actual.dtype}: expected {dtype or DTYPES}")
    _same_shape(actual, truth, bound)
    measured, error = errors(actual, truth), _error(actual, truth)
    if error.numel() == 0:
        return Verdict(ok=True, worst_ratio=0.0, index=(), errors=measured)
    ratio = _ratio(error, bound)
    index = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    ok = bool(((error <= bound) & error.isfinite()).all())  # NaN <= bound is False
    return Verdict(ok, ratio.max().item(), index, measured)


def assert_within(
    actual: Tensor, truth: Tensor, bound: Tensor, name: str, *, dtype: torch.dtype | None = None
) -> None:
    """Raise AssertionError, naming the worst element, unless `compare` finds all within bounds."""
    verdict = compare(actual, truth, bound, dtype=dtype)
    if verdict.ok:
        return
    got, expected, allowed = (t[verdict.index].item() for t in (actual, truth, bound))
    n_ulps = errors(actual[verdict.index], truth[verdict.index]).max_ulp
    raise AssertionError(
        f"{name}{list(verdict.index)}: got {got!r}, expected {expected!r}, off by {n_ulps:.4g} ulp "
        f"of {actual.dtype}; bound {allowed:.4g}, error/bound {verdict.worst_ratio:.4g}"
    )


def _check(allowed: tuple[torch.dtype, ...], **tensors: Tensor) -> None:
    """Refuse dtypes outside `allowed`, w that is not [N], and dy that is not like x."""
    for name, tensor in tensors.items():
        if tensor.dtype not in allowed:
            raise TypeError(f"{name} is {tensor.dtype}: pass one of {allowed}")
    x, w, dy = tensors["x"], tensors["w"], tensors.get("dy")
    if x.ndim == 0 or w.shape != x.shape[-1:] or w.numel() == 0:
        raise ValueError(f"w is {list(w.shape)}, x {list(x.shape)}: w must be [N], N 1 or more")
    if dy is not None and dy.shape != x.shape:
        raise ValueError(f"dy is {list(dy.shape)}, x {list(x.shape)}: dy must have x's shape")


def _same_shape(*tensors: Tensor) -> None:
    """Refuse to broadcast: a row compared with a matrix would pass or fail by accident."""
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"actual, truth (and bound) have shapes {shapes}: they must be equal")


def _normalise(x: Tensor, w: Tensor, eps: float, dy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x_hat [..., N] and rstd [..., 1] in float64."""
    _check((*DTYPES, torch.float64), x=x, w=w, **({} if dy is None else {"dy": dy}))
    x64 = x.double()
    rstd = torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + eps)
    return x64 * rstd, rstd


def _stored(truth: Tensor, fp32_error: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the store's half ulp, where fp32 may have landed; a non-finite truth allows nothing."""
    bound = ulp(truth.abs() + fp32_error, dtype) / 2 + fp32_error
    return torch.where(truth.isfinite(), bound, 0.0)


def _error(actual: Tensor, truth: Tensor) -> Tensor:
    """Give |actual - truth| in float64, with infinity standing for where rounding reaches it."""
    _same_shape(actual, truth)
    a = actual.double()
    overflow = 2.0 ** math.frexp(torch.finfo(actual.dtype).max)[1]  # the number after the largest
    reached = torch.copysign(truth.abs().clamp(min=overflow), a)
    same = (a == truth) | (a.isnan() & truth.isnan())
    error = (torch.where(a.isinf(), reached, a) - truth).abs()
    return torch.where(same, 0.0, error.nan_to_num(nan=math.inf, posinf=math.inf))


def _ratio(error: Tensor, unit: Tensor) -> Tensor:
    """Divide, with 0/0 = 0 and NaN = inf."""
    ratio = (error / unit).nan_to_num(nan=math.inf, posinf=math.inf)
    return torch.where((error == 0) & (unit >= 0), 0.0, ratio)
