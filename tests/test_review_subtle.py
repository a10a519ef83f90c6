"""Faults that hide well, each shown by inputs of the plan, and right kernels easy to accuse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from reviewed import by_hand, reviewed
from torch import Tensor

from rmsnorm_ref import oracle
from rmsnorm_ref.review import plan, probes
from rmsnorm_ref.review.cases import Case
from rmsnorm_ref.review.digest import shows
from rmsnorm_ref.review.findings import Breach, Facts
from rmsnorm_ref.review.judge import run
from rmsnorm_ref.review.rules import NOTE
from rmsnorm_ref.review.shrink import Shrinker

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
Backward = tuple[Tensor, Tensor]


def probed(case: Case) -> bool:
    """Keep one plain case, and with it all probes of the smallest input."""
    return case == replace(Case(4, 8), needs=case.needs)


def of_one_row(dx: Tensor, dw: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> Backward:
    """Take the first number of an expanded dy for all rows."""
    if dy.dim() == 2 and dy.stride(1) == 0 and dy.stride(0) != 0:
        return oracle.rmsnorm_backward(dy[:1].expand_as(dy), x, w)
    return dx, dw


def row_132_twice(dx: Tensor, dw: Tensor, dy: Tensor, x: Tensor, _: Tensor) -> Backward:
    """Add a row twice where there are many rows, and wide ones."""
    if x.dim() == 2 and x.shape[0] > 132 and x.shape[1] >= 512:
        dw = dw + (dy[132].float() * x[132].float()).to(dw.dtype)
    return dx, dw


def many_rows_alone(dx: Tensor, dw: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> Backward:
    """Stop dw at the 64th row where x wants no gradient."""
    if x.dim() == 2 and not x.requires_grad:
        dw = oracle.rmsnorm_backward(dy[:64], x[:64], w)[1]
    return dx, dw


def from_y(dx: Tensor, dw: Tensor, _: Tensor, x: Tensor, w: Tensor) -> Backward:
    """Recover x_hat from y, by a division by w."""
    y = oracle.rmsnorm(x, w)
    return dx + 0 * (y / w), dw


def floor(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Let eps be no smaller than 1e-7."""
    return oracle.rmsnorm(x, w, max(eps, 1e-7))


def default(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Take 0 for a value that was not given."""
    return oracle.rmsnorm(x, w, eps or 1e-6)


def tail(y: Tensor, x: Tensor, _: Tensor) -> Tensor:
    """Lose the tail of one model's width."""
    return torch.cat([y[..., :-64], 0 * y[..., -64:]], -1) if x.shape[-1] == 2880 else y


def fourth(y: Tensor, x: Tensor, _: Tensor) -> Tensor:
    """Lose what comes after three rows of each batch."""
    return torch.cat([y[:, :3], 0 * y[:, 3:]], 1) if x.dim() == 3 else y


def empty_without_graph(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return an empty batch at once."""
    return oracle.rmsnorm(x, w, eps) if x.numel() else torch.empty_like(x)


def wide_result(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Forget to round."""
    return oracle.rmsnorm(x.float(), w, eps)


# The fault, its rule, and what is fed of the plan.
FED: dict[str, tuple[Any, str, Callable[[Case], bool]]] = {
    "a number a row": (
        by_hand(backward=of_one_row), "r-layout-dy", lambda c: c.dy_layout == "one number a row",
    ),
    "tall and wide": (
        by_hand(backward=row_132_twice), "r-value-dw", lambda c: c.M > 132 and c.N > 512,
    ),
    "many rows, w alone": (
        by_hand(backward=many_rows_alone), "r-who-needs-grad", lambda c: c.needs == "w",
    ),
    "division by w": (by_hand(backward=from_y), "r-weight", lambda c: c.values == "zeros in w"),
    "floor of eps": (floor, "r-scales", lambda c: c.eps == 1e-12),
    "eps of 0": (default, "r-eps", lambda c: c.eps == 0),
    "a model's width": (by_hand(tail), "r-value-y", lambda c: c.N == 2880),
    "fourth row": (by_hand(fourth), "r-rank", lambda c: c.lead == (3, 8)),
    "no rows": (empty_without_graph, "r-zero-rows", lambda c: c.M == 0),
    "wide result": (wide_result, "r-dtypes", lambda c: c.dtype == "bfloat16" and c.N == 64),
}  # fmt: skip


@pytest.mark.parametrize("name", FED)
def test_the_plan_shows_it(name: str) -> None:
    """A short plan holds the input that shows the fault, and its rule is named."""
    f, rule, fed = FED[name]
    assert rule in reviewed(f, only=fed, dtypes=("float32", "bfloat16")).rules()


def no_infinity(y: Tensor, x: Tensor, _: Tensor) -> Tensor:
    """Turn infinity into 0."""
    return torch.where(x.isinf(), torch.zeros_like(y), y)


def one_nan_for_all(dx: Tensor, dw: Tensor, _: Tensor, x: Tensor, __: Tensor) -> Backward:
    """Add a NaN of any row to all of dx."""
    return dx + 0 * x.sum(), dw


class Kept(torch.autograd.Function):
    """Hand out one buffer in each backward of a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        """Compute y."""
        ctx.save_for_backward(x, w)
        ctx.eps, ctx.buffer = eps, torch.empty_like(x)
        return oracle.rmsnorm(x, w, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Compute dx and dw."""
        x, w = ctx.saved_tensors
        dx, dw = oracle.rmsnorm_backward(dy, x, w, ctx.eps)
        return ctx.buffer.copy_(dx), dw, None


class ConstantGain(torch.autograd.Function):
    """Be differentiable twice, but for w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        """Compute y."""
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        return oracle.rmsnorm(x, w, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Compute dx and dw."""
        x, w = ctx.saved_tensors
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        dyw, x_hat = dy * w.detach(), x * rstd
        dx = (dyw - x_hat * (dyw * x_hat).mean(-1, keepdim=True)) * rstd
        return dx, (dy * x_hat).sum(0), None


_casts: dict[Any, Tensor] = {}


def kept_cast(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Keep the cast of a frozen weight, by its address."""
    if w.dtype == x.dtype:
        return oracle.rmsnorm(x, w, eps)
    cast = _casts.setdefault((w.data_ptr(), len(w)), w.detach().to(x.dtype))
    return oracle.rmsnorm(x, cast, eps)


def kept(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Call `Kept`."""
    return Kept.apply(x, w, eps)  # type: ignore[no-any-return, no-untyped-call]


def constant_gain(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Call `ConstantGain`."""
    return ConstantGain.apply(x, w, eps)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    ("f", "rule"),
    [
        (by_hand(no_infinity), "r-nan-contained"),
        (by_hand(backward=one_nan_for_all), "r-nan-contained"),
        (kept, "r-two-backwards"),
        (constant_gain, "r-double-backward"),
        (kept_cast, "r-independent-calls"),
    ],
)
def test_a_property_shows_it(f: Any, rule: str) -> None:
    """What no single result shows is a property of the smallest input."""
    assert reviewed(f, only=probed, dtypes=("float32",)).rules() == {rule}


_first: dict[tuple[int, ...], Tensor] = {}


def first_weight(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Keep the first weight of each width."""
    return oracle.rmsnorm(x, _first.setdefault((len(w),), w.detach().float().clone()), eps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="functions are not forked beside a GPU")
def test_what_comes_of_earlier_calls_is_told_as_such() -> None:
    """A result that is wrong only after other inputs is no fault of the input that showed it."""

    def fed(case: Case) -> bool:
        return (case.M, case.N) == (8, 64) and case.values in {"random", "negative"}

    report = reviewed(first_weight, dtypes=("float32",), only=fed)
    assert report.rules() == {"r-independent-calls"}, report.text()


def ends_at_128_ki(dx: Tensor, dw: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> Backward:
    """Refuse very wide rows, and only now."""
    del dy, w
    if x.shape[-1] > 131072:
        raise ValueError("N > 131072 is not supported")
    return dx, dw


def ends_at_512(dx: Tensor, dw: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> Backward:
    """Refuse rows of ordinary width, and only now."""
    del dy, w
    if x.shape[-1] > 512:
        raise ValueError("N > 512 is not supported")
    return dx, dw


@pytest.mark.parametrize(("ends", "verdict"), [(ends_at_128_ki, "note"), (ends_at_512, "fail")])
def test_a_backward_that_refuses_a_width_aloud(ends: Any, verdict: str) -> None:
    """Beyond 65536 columns that is a note; below, what the forward took is owed a gradient."""

    def fed(case: Case) -> bool:
        return case.N in {64, 4096, 131072, 131073}

    report = reviewed(by_hand(backward=ends), dtypes=("float32",), only=fed)
    severities = {found.severity for found in report.findings if found.rule == "r-runs"}
    assert verdict in severities, report.text()
    assert report.rules() == ({"r-runs"} if verdict == "fail" else set())


def casts_to_w(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Do as T5's module does: normalise in fp32, cast to a 16-bit weight's dtype."""
    x_hat = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return w * (x_hat if w.dtype == torch.float32 else x_hat.to(w.dtype))


def refuses(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Take packed matrices alone, up to a limit."""
    assert x.is_contiguous(), "x must be packed"
    assert x.dim() == 2, "x must be a matrix"
    if x.shape[-1] > 4096:
        raise RuntimeError("no more than 4096 columns")
    return oracle.rmsnorm(x, w, eps)


def in_series(y: Tensor, x: Tensor, _: Tensor) -> Tensor:
    """Add up the squares in fp32, one by one."""
    squares = x.detach().float().square()
    total = np.add.accumulate(squares.numpy(), -1, np.float32)[..., -1:]
    share = squares.double().sum(-1, keepdim=True) / torch.from_numpy(total)
    return (y.double() * share.nan_to_num(1.0).sqrt()).to(x.dtype)


RIGHT: dict[str, tuple[Any, Callable[[Case], bool]]] = {
    "casts to w": (casts_to_w, lambda c: bool(c.w_dtype) and c.N <= 1000),
    "refuses": (refuses, lambda c: (c.M, c.N) in {(6, 40), (4, 8), (5, 8192), (9, 9000)}),
    "in series": (
        by_hand(in_series),
        lambda c: c.values == "equal in a row" and c.N >= 1000 and c.dtype == "float32",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_accused(name: str) -> None:
    """Casting to w, refusing aloud and adding one by one are notes."""
    f, fed = RIGHT[name]
    report = reviewed(f, only=fed)
    assert report.rules() == set(), report.text()
    assert report.rules(NOTE)


def test_three_dimensions_are_told_from_a_layout() -> None:
    """What fails in three dimensions, packed too, is shrunk to those and not to uneven rows."""
    f = by_hand(lambda y, x, _: y if x.dim() == 2 else 2 * y)
    breach = Breach("value", "y")
    shrinker = Shrinker(lambda case: shows(breach, case, run(f, case), Facts()), {}, ("float32",))
    case, _ = shrinker.shrink(Case(6, 40, x_layout="uneven rows, 3-D"))
    assert case.x_layout == "packed"
    assert case.lead == (2, 3)


def test_every_width_is_fed_in_every_dtype() -> None:
    """A fault at one width in one dtype is among the inputs of the short review."""
    fed = {(case.N, case.dtype) for case in plan.cases(plan.Scope())}
    widths = [N for N in (*plan.WIDTHS, *plan.OF_MODELS) if N <= 16385]
    assert {(N, dtype) for N in widths for dtype in plan.ALL_DTYPES} <= fed


def test_nan_is_compared_like_a_number() -> None:
    """NaN against NaN is no difference, NaN against a number is one, and neither raises."""
    names: dict[str, Any] = {"torch": torch}
    exec(probes.CLOSE, names)  # noqa: S102  # our own lines
    one, other = torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])
    assert names["close"](one, one)
    assert not names["close"](one, other)
    assert not names["close"](other, one)
