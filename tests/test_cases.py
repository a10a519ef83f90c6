"""Inputs on which norm kernels have failed in public, each by its name, in every kernel.

Others of their kind live where their means are: same-row in test_sweep.py, huge-offset in
test_gpu.py, warp-64 in test_tuning.py, offline-docs and failing-example in test_site.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from paths import (
    LAYOUTS,
    MANY,
    PATHS,
    assert_same_bits,
    check,
    each_in_a_dtype,
    in_every_dtype,
    make,
    on_every_kernel,
    on_every_kernel_and_dtype,
    on_every_shape,
    on_every_shape_and_dtype,
    on_every_width,
    programs,
    run,
    shapes,
)

from rmsnorm_ref import oracle, rmsnorm, tuning

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("shape", [(2, 1024, 256), *((2, M // 2, N) for N, M in shapes(*PATHS))])
def test_sum_backward(shape: tuple[int, ...], device: str) -> None:
    """A dy whose strides are all 0, as a sum's backward makes, does what real ones do."""
    x, _, _ = make(math.prod(shape[:-1]), shape[-1], BF16, device=device)
    x = x.view(shape).requires_grad_()
    w = torch.ones(shape[-1], device=device, requires_grad=True)
    rmsnorm(x, w).sum().backward()
    expected = run(x, w, torch.ones_like(x))
    assert_same_bits((x.grad, w.grad), (expected.dx, expected.dw))


@pytest.mark.parametrize("shape", [(2, 3, 5, 16), *((2, 1, M // 2, N) for N, M in shapes(*PATHS))])
def test_rank_4(shape: tuple[int, ...], device: str) -> None:
    """A [2, 3, 5, 16] tensor is 30 rows, and its dw is [16]; so for any four dimensions."""
    N = shape[-1]
    x, w, dy = make(math.prod(shape[:-1]), N, FP16, device=device)
    found, flat = check(x.view(shape), w, dy.view(shape)), run(x, w, dy)
    assert found.dw.shape == (N,)
    assert_same_bits((found.y.view_as(x), found.dx.view_as(x), found.dw), flat)


@pytest.mark.parametrize("shape", [(0, 7168), (3, 0, 8)])
def test_zero_rows_as_reported(shape: tuple[int, ...], device: str) -> None:
    """No rows give an empty y and dx, a dw of zeros, and no error in any later call."""
    x = torch.empty(shape, device=device, requires_grad=True)
    w = torch.ones(shape[-1], device=device, requires_grad=True)
    y = rmsnorm(x, w)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    assert torch.equal(w.grad, torch.zeros_like(w))
    check(*make(2, 8, FP32, device=device))


@on_every_width
@in_every_dtype
def test_zero_rows(N: int, dtype: torch.dtype, device: str) -> None:
    """At every width, no rows give no y and no dx, and a dw of zeros in w's dtype."""
    x, w, dy = make(0, N, dtype, FP32, device=device)
    y, dx, dw = check(x, w, dy)
    assert y.shape == dx.shape == (0, N)
    assert_same_bits([dw], [torch.zeros_like(w)])


@pytest.mark.usefixtures("poisoned")
@on_every_width
def test_one_more(N: int, device: str) -> None:
    """One row more than there are programs: that row too is written."""
    check(*make(programs() + 1, N, BF16, device=device))


@on_every_shape
def test_who_needs_grad(N: int, M: int, device: str) -> None:
    """A gradient is present exactly when asked for, with the bits it has beside the other."""
    x, w, dy = make(M, N, BF16, device=device)
    both = run(x, w, dy)
    for needs_dx, needs_dw in ((True, False), (False, True)):
        leaf_x, leaf_w = x.clone().requires_grad_(needs_dx), w.clone().requires_grad_(needs_dw)
        y = rmsnorm(leaf_x, leaf_w)
        y.backward(dy)
        expected = (both.y, both.dx if needs_dx else None, both.dw if needs_dw else None)
        assert_same_bits((y, leaf_x.grad, leaf_w.grad), expected)


@pytest.mark.parametrize(("N", "M", "dtype"), [(4, 1, FP32), *each_in_a_dtype(shapes(4, *PATHS))])
def test_one_hot(N: int, M: int, dtype: torch.dtype, device: str) -> None:
    """A one-hot row keeps in dx only what eps lets through, eps / (1/N + eps)**1.5."""
    eps = 1e-4
    x = torch.zeros(M, N, dtype=dtype, device=device)
    x[:, 0] = 1
    w = torch.ones(N, dtype=dtype, device=device)
    truth, _ = oracle.truth_backward(x, x, w, eps)
    assert truth[0, 0].item() == pytest.approx(eps / (1 / N + eps) ** 1.5)
    if N == 4:
        assert round(truth[0, 0].item(), 4) == 0.0008
    dx = check(x, w, x, eps).dx
    assert not dx[:, 1:].any()


@on_every_kernel
def test_mixed_dtype(N: int, M: int, device: str) -> None:
    """With x in bf16 and w in fp32 nothing is promoted: y and dx are bf16, dw is fp32."""
    y, dx, dw = check(*make(M, N, BF16, FP32, device=device))
    assert (y.dtype, dx.dtype, dw.dtype) == (BF16, BF16, FP32)


@pytest.mark.parametrize("N", [4, 17, 8192, 12000, 20000, 33000])
def test_eps_inside(N: int, device: str) -> None:
    """With eps inside the root a row of 1e-3 gives 0.70711; outside it would give 0.99900."""
    x = torch.full((1, N), 1e-3, device=device)
    y = check(x, torch.ones(N, device=device)).y
    assert {round(value, 5) for value in y.flatten().tolist()} == {0.70711}


@pytest.mark.parametrize("N", [8, 17, 8192, 12000, 20000, 33000])
def test_fp16_square(N: int, device: str) -> None:
    """A row of 300 in fp16, whose square fp16 cannot hold, gives ones."""
    x = torch.full((1, N), 300.0, dtype=FP16, device=device)
    w = torch.ones(N, dtype=FP16, device=device)
    assert_same_bits([check(x, w).y], [torch.ones_like(x)])


@on_every_shape_and_dtype
def test_zero_row(N: int, M: int, dtype: torch.dtype, device: str) -> None:
    """A row of zeros gives y = 0, dw = 0 and dx = 1000, and never a NaN."""
    x = torch.zeros(M, N, dtype=dtype, device=device)
    w = torch.ones(N, dtype=dtype, device=device)
    y, dx, dw = check(x, w)
    assert not y.any()
    assert not dw.any()
    assert {round(value) for value in dx.flatten().tolist()} == {1000}


@on_every_shape_and_dtype
def test_padding(N: int, M: int, dtype: torch.dtype, device: str) -> None:
    """NaN and infinity stay in their rows: y and dx of all others keep their bits."""
    x, w, dy = make(M, N, dtype, device=device)
    clean = run(x, w, dy)
    at = N // 2
    x[1, at], x[2, at], x[3] = math.nan, math.inf, math.nan
    bad = check(x, w, dy)
    others = [0, *range(4, M)]
    assert_same_bits((bad.y[others], bad.dx[others]), (clean.y[others], clean.dx[others]))
    assert bad.y[[1, 3]].isnan().all()
    assert bad.y[2].isnan().nonzero().tolist() == [[at]]
    assert not bad.y[2].nan_to_num(0.0).any()


@on_every_shape
def test_padding_of_dy(N: int, M: int, device: str) -> None:
    """A NaN in dy spoils its row of dx and its column of dw, and not one bit beyond."""
    x, w, dy = make(M, N, BF16, device=device)
    clean = run(x, w, dy)
    at = N // 2
    dy[1, at] = math.nan
    bad = check(x, w, dy)
    assert bad.dx[1].isnan().all()
    assert bad.dw[at].isnan()
    rows, columns = [0, *range(2, M)], [column for column in range(N) if column != at]
    assert_same_bits((bad.dx[rows], bad.dw[columns]), (clean.dx[rows], clean.dw[columns]))


@on_every_kernel_and_dtype
def test_offset(N: int, M: int, dtype: torch.dtype, device: str) -> None:
    """Contiguous tensors that start one element into their storage give an aligned call's bits."""
    x, w, dy = make(M, N, dtype, device=device)
    aligned = run(x, w, dy)
    x, dy, w = (LAYOUTS["offset"](tensor) for tensor in (x, dy, w[None]))
    assert x.is_contiguous()
    assert x.storage_offset() == 1
    assert_same_bits(run(x, w[0], dy), aligned)


@on_every_kernel
def test_autotune_cpu(N: int, M: int, device: str) -> None:
    """Both passes run where a search has several configs and there is nothing to time them on."""
    if device != "cpu":
        pytest.skip("on a GPU the search runs: test_gpu.py")
    tuning.set_mode("search")
    try:
        check(*make(M, N, BF16, device=device))
        searched = {path for path, *_ in tuning.chosen()}
    finally:
        tuning.set_mode(None)
    assert len(searched) == 2
    n_tried = [list(tuning.pruned(path, N, BF16).values()).count(None) for path in searched]
    assert max(n_tried) > 1


@pytest.mark.parametrize(("N", "M"), shapes(4096, *PATHS))
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_bf16_sum(N: int, M: int, dtype: torch.dtype, device: str) -> None:
    """A sum does not stall at the storage dtype's precision, along a row or down the rows."""
    x = torch.ones(M, N, dtype=dtype, device=device)
    w = torch.ones(N, dtype=dtype, device=device)
    dy = torch.ones_like(x)
    stall = 2 / torch.finfo(dtype).eps  # the first whole number to which adding 1 changes nothing
    dy[0], dy[3:] = stall, 0
    y, _, dw = check(x, w, dy)
    assert_same_bits((y, dw), (torch.ones_like(x), torch.full_like(w, stall + 2)))


@on_every_kernel
def test_transposed(N: int, M: int, device: str) -> None:
    """Any strides give the bits of the contiguous copy, and a contiguous y and dx."""
    x, w, dy = make(M, N, BF16, device=device)
    packed = run(x, w, dy)
    w = LAYOUTS["every other column"](w[None])[0]
    for place in LAYOUTS.values():
        y, dx, dw = run(place(x), w, place(dy))
        assert y.is_contiguous()
        assert dx.is_contiguous()
        assert y.shape == dx.shape == place(x).shape
        assert_same_bits((y.view(x.shape), dx.view(x.shape), dw), packed)


@pytest.mark.parametrize(
    ("M", "N"), [(7, 769), (5, 513), (MANY, 513), (MANY, 8191), (3, 9001), (3, 20001)]
)
def test_odd_width(M: int, N: int, device: str) -> None:
    """Widths that no vector load divides are right, and the same on every run."""
    x, w, dy = make(M, N, FP16, device=device)
    assert_same_bits(check(x, w, dy), run(x, w, dy))


@in_every_dtype
def test_wide(dtype: torch.dtype, device: str) -> None:
    """The widest row works, and one column more is refused with the limit and the way out."""
    check(*make(2, 65536, dtype, device=device))
    with pytest.raises(ValueError, match=r"65537.*65536.*multi-pass"):
        rmsnorm(*make(2, 65537, dtype, device=device)[:2])


def test_short_w(device: str) -> None:
    """A w that is shorter than a row is refused with both shapes."""
    with pytest.raises(ValueError, match=r"\[4\].*\[2, 8\]"):
        rmsnorm(torch.ones(2, 8, device=device), torch.ones(4, device=device))


@on_every_kernel
def test_overflow_32(N: int, M: int, device: str) -> None:
    """Rows are right up to where fp32 holds their squares' sum; one beyond spoils no other."""
    largest = math.sqrt(torch.finfo(FP32).max / N)
    x, w, dy = make(M, N, FP32, device=device)
    x[1] = largest / 2
    clean = check(x, w, dy)
    x[1] = 1e19
    spoilt = run(x, w, dy)
    assert_same_bits((spoilt.y[::2], spoilt.dx[::2]), (clean.y[::2], clean.dx[::2]))


@on_every_kernel_and_dtype
@pytest.mark.parametrize("scale", [1e-3, pytest.param(1.0, marks=pytest.mark.gpu), 1e3])
def test_scales(N: int, M: int, dtype: torch.dtype, scale: float, device: str) -> None:
    """At small and large scales, with a mean and a w far from 1, every element is in bounds."""
    check(*make(M, N, dtype, device=device, scale=scale))
