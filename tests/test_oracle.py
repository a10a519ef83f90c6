"""The model of value: the oracle within its bounds, and faults outside them."""

from __future__ import annotations

import doctest
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rmsnorm_ref import oracle

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = math.inf, math.nan


class Case(NamedTuple):
    """Hold one input of both passes."""

    dy: Tensor
    x: Tensor
    w: Tensor


def make(M: int, N: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0) -> Case:
    """Draw x around `mean` times `scale`, and w far from 1, of either sign."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(M, N, generator=g) + mean) * scale
    w = torch.randn(N, generator=g) * 4
    return Case(torch.randn(M, N, generator=g).to(dtype), x.to(dtype), w.to(dtype))


def expected(case: Case, eps: float = 1e-6) -> dict[str, tuple[Tensor, Tensor]]:
    """Give truth and bound of each result."""
    dx, dw = oracle.truth_backward(*case, eps)
    return {
        "y": (oracle.truth(case.x, case.w, eps), oracle.bound_y(case.x, case.w, eps)),
        "dx": (dx, oracle.bound_dx(*case, eps)),
        "dw": (dw, oracle.bound_dw(*case, eps)),
    }


def judge(case: Case, eps: float = 1e-6) -> dict[str, oracle.Verdict]:
    """Compare each result of the oracle with the truth."""
    dx, dw = oracle.rmsnorm_backward(*case, eps)
    got = {"y": oracle.rmsnorm(case.x, case.w, eps), "dx": dx, "dw": dw}
    return {name: oracle.compare(got[name], *pair) for name, pair in expected(case, eps).items()}


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("N", [1, 2, 3, 17, 128, 769, 1560, 2048, 8191, 8192])
@pytest.mark.parametrize(("scale", "mean"), [(1e-3, 0.0), (1.0, 0.0), (1.0, 3.0), (1e3, 0.0)])
def test_oracle_is_within_its_bounds(dtype: torch.dtype, N: int, scale: float, mean: float) -> None:
    """The fp32 oracle meets the float64 truth in every element, at every width and scale."""
    verdicts = judge(make(16, N, dtype, scale, mean))
    assert all(verdict.ok for verdict in verdicts.values()), verdicts


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("N", [128, 769, 2048, 8192])
def test_bounds_are_not_loose_in_16_bit(dtype: torch.dtype, N: int) -> None:
    """The oracle uses more than half of each bound: none could be halved."""
    for name, verdict in judge(make(16, N, dtype)).items():
        assert 0.5 < verdict.worst_ratio <= 1, name


@pytest.mark.parametrize("M", [1, 64, 4096])
def test_dw_of_many_rows_that_agree_in_sign(M: int) -> None:
    """The bound of dw covers the growth of fp32 sums whose terms never cancel."""
    dy, x, w = make(M, 64, FP32)
    assert judge(Case(dy.abs(), x.abs(), w))["dw"].ok


def test_closed_gradient_is_the_derivative_of_the_truth() -> None:
    """Finite differences confirm autograd of the truth, and autograd the closed formula."""
    dy, x, w = (t.double().requires_grad_() for t in make(5, 9, FP32))
    assert torch.autograd.gradcheck(oracle.truth, (x, w))
    by_autograd = torch.autograd.grad(oracle.truth(x, w), (x, w), dy)
    bounds = oracle.bound_dx(dy, x, w), oracle.bound_dw(dy, x, w)
    # The bounds' analysis with float64's unit roundoff, twice because both sides round.
    rescale = 2 * (torch.finfo(FP64).eps / 2) / oracle.U
    triples = zip(oracle.truth_backward(dy, x, w), by_autograd, bounds, strict=True)
    for by_formula, reference, bound in triples:
        assert ((by_formula - reference).abs() <= rescale * bound).all()


def test_leading_dims_and_strides_do_not_matter() -> None:
    """A 4-D, strided, expanded input gives the result of its flat, contiguous copy."""
    dy, x, w = make(30, 32, BF16)
    x4, dy4, w2 = x.reshape(2, 3, 5, 32)[..., ::2], dy[0, ::2].expand(2, 3, 5, 16), w[::2]
    flat = (dy4.reshape(-1, 16), x4.reshape(-1, 16), w2.contiguous())
    for backward in (oracle.rmsnorm_backward, oracle.truth_backward):
        (dx, dw), (flat_dx, flat_dw) = backward(dy4, x4, w2), backward(*flat)
        assert torch.equal(dx.reshape(-1, 16), flat_dx)
        assert torch.equal(dw, flat_dw)
    for forward in (oracle.rmsnorm, oracle.truth):
        assert torch.equal(forward(x4, w2).reshape(-1, 16), forward(*flat[1:]))


@pytest.mark.parametrize("shape", [(0, 7168), (3, 0, 8)])
def test_zero_rows(shape: tuple[int, ...]) -> None:
    """Without rows y and dx are empty and dw is all zeros, in the oracle and in the truth."""
    x, w = torch.zeros(shape), torch.ones(shape[-1])
    assert oracle.rmsnorm(x, w).shape == oracle.truth(x, w).shape == shape
    for backward in (oracle.rmsnorm_backward, oracle.truth_backward):
        dx, dw = backward(x, x, w)
        assert (dx.shape, dw.tolist()) == (shape, [0.0] * shape[-1])
    assert all(verdict.ok for verdict in judge(Case(x, x, w)).values())


def test_mixed_dtypes_are_kept() -> None:
    """Results have the dtype of what they belong to; nothing is promoted."""
    dy, x, w = make(4, 16, BF16)
    w32 = w.float()
    dx, dw = oracle.rmsnorm_backward(dy, x, w32)
    assert (oracle.rmsnorm(x, w32).dtype, dx.dtype, dw.dtype) == (BF16, BF16, FP32)
    assert all(verdict.ok for verdict in judge(Case(dy, x, w32)).values())


def test_one_hot_gradient() -> None:
    """A one-hot row keeps only what eps lets through: dx = eps / (1/4 + eps)**1.5 = 0.0008."""
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    case = Case(x, x, torch.ones(4))
    assert expected(case, 1e-4)["dx"][0].tolist() == [[pytest.approx(1e-4 / 0.2501**1.5), 0, 0, 0]]
    assert all(verdict.ok for verdict in judge(case, 1e-4).values())


KNOWN = {
    "eps-inside": (torch.full((1, 4), 1e-3), 0.70711),
    "fp16-square": (torch.full((1, 8), 300.0).half(), 1.0),
    "bf16-sum": (torch.ones(1, 4096).bfloat16(), 1.0),
    "zero-row": (torch.zeros(2, 4), 0.0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_values(name: str) -> None:
    """Rows on which public kernels failed give the values worked out by hand, to five digits."""
    x, value = KNOWN[name]
    case = Case(torch.ones_like(x), x, torch.ones(x.shape[-1]))
    assert {round(y, 5) for y in expected(case)["y"][0].flatten().tolist()} == {value}
    assert all(verdict.ok for verdict in judge(case).values())
    if name == "zero-row":
        assert {round(dx, 9) for dx in expected(case)["dx"][0].flatten().tolist()} == {1000.0}


def test_rows_that_overflow_fp32_are_out_of_range() -> None:
    """Range: eight squares of 1e19 overflow fp32 and the bound refuses the oracle; 1e18 fits."""
    for value, ok in ((1e19, False), (1e18, True)):
        x = torch.full((1, 8), value)
        assert judge(Case(x, x, torch.ones(8)))["y"].ok == ok


def test_a_bad_row_spoils_no_other() -> None:
    """A NaN spoils its row, an infinity leaves NaN there and 0 beside it, others are as ever."""
    dy, x, w = make(4, 17, FP32)
    clean = oracle.rmsnorm(x, w)
    x[1, 3], x[2, 5] = NAN, INF
    y = oracle.rmsnorm(x, w)
    assert y[1].isnan().all()
    assert y[2].isnan().nonzero().tolist() == [[5]]
    assert not y[2].nan_to_num(0.0).any()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert judge(Case(dy, x, w))["y"].ok


def rstd(x: Tensor, inside: float = 1e-6, outside: float = 0.0) -> Tensor:
    """Give 1 / root mean square [M, 1], with eps on either side of the root."""
    return 1 / ((x.pow(2).mean(-1, keepdim=True) + inside).sqrt() + outside)


def bf16_sum(terms: Tensor) -> Tensor:
    """Sum along the first axis, rounding to bf16 at every addition."""
    total = torch.zeros_like(terms[0], dtype=BF16)
    for term in terms:
        total += term.to(BF16)
    return total.float()


FAULTS = {
    "eps outside": ("y", make(4, 64, BF16, 1e-3), lambda c: c.w * c.x * rstd(c.x, 0, 1e-6)),
    "rounded twice": ("y", make(9, 256, BF16), lambda c: (c.x * rstd(c.x)).bfloat16() * c.w),
    "bf16 sum": ("y", make(1, 4096, BF16), lambda c: 64 * c.w * c.x / bf16_sum(c.x[0] ** 2) ** 0.5),
    "padded mean": ("y", make(4, 60, BF16), lambda c: c.w * c.x * rstd(c.x) * (64 / 60) ** 0.5),
    "bf16 rstd": ("y", make(9, 256, FP32), lambda c: c.x * rstd(c.x).bfloat16() * c.w),
    "no mean term": ("dx", make(4, 64, BF16), lambda c: c.dy * c.w * rstd(c.x)),
    "dw from x": ("dw", make(9, 64, BF16, 2.0), lambda c: (c.dy * c.x).sum(0)),
    "bf16 dw": ("dw", make(64, 64, BF16), lambda c: bf16_sum(c.dy * c.x * rstd(c.x))),
    "first row lost": ("dw", make(4096, 8, BF16), lambda c: (c.dy * c.x * rstd(c.x))[1:].sum(0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bounds_reject_faults(fault: str) -> None:
    """A faulty formula, correct otherwise, leaves the bound, and the right one stays within it."""
    name, case, formula = FAULTS[fault]
    assert judge(case)[name].ok
    wrong = formula(Case(*(t.float() for t in case))).to(case.x.dtype)
    assert not oracle.compare(wrong, *expected(case)[name]).ok


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_ulp_is_the_gap_to_the_next_number(dtype: torch.dtype) -> None:
    """At every kind of value the spacing is the distance to the next number away from zero."""
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor([0.0, tiny / 4, tiny, 0.1, 1.0, 1.5, 3.0]).to(dtype)
    bits = values.view(torch.int32 if dtype == FP32 else torch.int16)
    gap = (bits + 1).view(dtype).double() - values.double()
    assert torch.equal(oracle.ulp(values, dtype), gap)
    assert torch.equal(oracle.ulp(-values, dtype), gap)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_tie_allows_both_neighbours_only(dtype: torch.dtype) -> None:
    """Where the truth is a tie both neighbours are within half an ulp, and the next are not."""
    step = torch.finfo(dtype).eps
    tie = torch.tensor([1 + step / 2], dtype=FP64)
    half_ulp = oracle.ulp(tie, dtype) / 2
    near = [(tie + n * step).to(dtype) for n in (-1.5, -0.5, 0.5, 1.5)]
    assert [oracle.compare(value, tie, half_ulp).ok for value in near] == [False, True, True, False]


PASS = [(NAN, NAN), (INF, INF), (INF, 65520.0), (65504.0, 65519.0), (INF, 1e30), (-INF, -7e4)]
PASS += [(0.0, 2.0**-26)]
FAIL = [(NAN, 1.0), (1.0, NAN), (INF, NAN), (NAN, INF), (-INF, INF), (65504.0, INF), (INF, 1.0)]
FAIL += [(INF, 65519.0), (65504.0, 1e30), (65504.0, 7e4), (-INF, 7e4), (2.0**-24, 2.0**-26)]


@pytest.mark.parametrize(("got", "wanted"), PASS + FAIL)
def test_non_finite_and_extreme_values_in_fp16(got: float, wanted: float) -> None:
    """NaN meets NaN, infinity meets what rounds to it, and the smallest step keeps its half."""
    truth, actual = torch.tensor([wanted], dtype=FP64), torch.tensor([got], dtype=FP16)
    half_ulp = torch.where(truth.isfinite(), oracle.ulp(truth, FP16) / 2, 0.0)
    verdict = oracle.compare(actual, truth, half_ulp)
    assert verdict.ok == (verdict.worst_ratio <= 1) == ((got, wanted) in PASS)


def test_compare_finds_the_worst_element() -> None:
    """The verdict, and the message, point at the largest error/bound, not the largest error."""
    truth, actual, bound = torch.zeros(2, 3).double(), torch.zeros(2, 3), torch.full((2, 3), 8.0)
    actual[0, 1], actual[1, 2], bound[1, 2] = 4.0, 2.0, 1.0
    assert oracle.compare(actual, truth, bound)[:3] == (False, 2.0, (1, 2))
    with pytest.raises(AssertionError) as caught:
        oracle.assert_within(actual, truth, bound, "dx")
    parts = ("dx[1, 2]: got 2.0", "expected 0.0", "ulp of torch.float32", "error/bound 2")
    assert all(part in str(caught.value) for part in parts)
    oracle.assert_within(actual, truth, bound * 2, "dx")


@pytest.mark.parametrize(("got", "bound"), [(1.0, NAN), (1.0, -1.0), (NAN, INF), (2.0, NAN)])
def test_a_broken_bound_never_passes(got: float, bound: float) -> None:
    """A NaN or negative bound fails even an exact result, and an infinite one passes no NaN."""
    one = torch.ones(1, dtype=FP64)
    assert not oracle.compare(torch.full((1,), got), one, one * bound).ok


def test_compare_refuses_other_shapes_and_dtypes() -> None:
    """Nothing is broadcast, float64 is no result, and a promoted result is caught when asked."""
    row, grid = torch.ones(3), torch.ones(2, 3, dtype=FP64)
    for truth, bound in ((grid, grid), (row.double(), grid)):
        with pytest.raises(ValueError, match="shapes"):
            oracle.compare(row, truth, bound)
    with pytest.raises(TypeError, match="float64"):
        oracle.compare(grid, grid, grid)
    with pytest.raises(TypeError, match="expected"):
        oracle.compare(row, row.double(), row.double(), dtype=BF16)


def test_errors_in_three_measures() -> None:
    """One step off at 1 is 2**-7 in bf16, that over the norm, and one ulp; nothing is no error."""
    truth = torch.tensor([1.0, 3.0], dtype=FP64)
    measured = oracle.errors(torch.tensor([1.0 + 2**-7, 3.0]).bfloat16(), truth)
    assert measured == (2**-7, pytest.approx(2**-7 / math.sqrt(10)), 1.0)
    assert oracle.errors(torch.tensor([NAN, 3.0]), truth) == (INF, INF, INF)
    empty = truth[:0]
    assert oracle.compare(empty.half(), empty, empty) == (True, 0.0, (), (0.0, 0.0, 0.0))


X, W = torch.ones(2, 8), torch.ones(8)
WRONG = [(X, X.double(), W, "x is"), (X.long(), X, W, "dy is"), (X[:1], X, W, "dy is")]
WRONG += [
    (X, X, W[:1], "w is"),
    (X, X, W[None], "w is"),
    (X[:, :0], X[:, :0], W[:0], "N 1 or more"),
]


@pytest.mark.parametrize(("dy", "x", "w", "message"), WRONG)
def test_wrong_inputs_are_refused_by_name(dy: Tensor, x: Tensor, w: Tensor, message: str) -> None:
    """float64 is not rounded in silence, w must be [N], dy must be like x."""
    with pytest.raises((TypeError, ValueError), match=message):
        oracle.rmsnorm_backward(dy, x, w)


def test_examples_run() -> None:
    """Every example in the module's docstrings prints what it says."""
    failed, attempted = doctest.testmod(oracle)
    assert (failed, attempted > 0) == (0, True)
