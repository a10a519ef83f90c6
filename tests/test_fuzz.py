"""Random shapes, strides, dtypes, scales and wishes, each element held to its bound.

RMSNORM_REF_FUZZ_EXAMPLES sets the number of cases (10000 makes the long run, meant for a GPU), and
RMSNORM_REF_FUZZ_SEED another stream of them, so that several processes can share a long run.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from paths import DEVICE, DTYPES, Results, make, run, stored
from torch import Tensor

from rmsnorm_ref import oracle

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = int(os.environ.get("RMSNORM_REF_FUZZ_EXAMPLES", "120"))
SEED = os.environ.get("RMSNORM_REF_FUZZ_SEED")

# Every width compiles kernels of its own for each pair of dtypes, so they are few; narrow ones come
# up more often, because they are cheap and because several rows then share a tile.
NARROW = (1, 2, 3, 17, 64, 100, 513, 769, 1025, 1560)
ONE_ROW = (2048, 4097, 8192)
WIDE = (12000, 20000, 40000, 65536)
# Elements of x in one case: an interpreted row costs as much as a thousand compiled ones.
MOST_ELEMENTS = {"cpu": 2**17, "cuda": 2**23}[DEVICE]  # enough for many rows of any one tile
MOST_ROWS = {"cpu": 24, "cuda": 1500}[DEVICE]

hypothesis.settings.register_profile(
    "rmsnorm_ref",
    max_examples=EXAMPLES,
    deadline=None,  # the first case of a width compiles
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),  # they are about time
)


class Layout(NamedTuple):
    """Say how a tensor lies in a larger buffer: one entry for each of its dimensions."""

    order: tuple[int, ...]  # dimensions from the slowest to the fastest in memory
    gaps: tuple[int, ...]  # elements left over at the end of each dimension
    steps: tuple[int, ...]  # of which every step-th element is taken
    expanded: tuple[bool, ...]  # the dimension is one element, repeated
    offset: int  # elements before the first

    def sizes(self, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Return the size of each dimension that is stored, and of the buffer around it."""
        sizes = [min(n, 1) if e else n for n, e in zip(shape, self.expanded, strict=True)]
        return sizes, [(n + g) * s for n, g, s in zip(sizes, self.gaps, self.steps, strict=True)]

    def place(self, values: Tensor) -> Tensor:
        """Return a tensor laid out so; it has the values, repeated where expanded."""
        sizes, whole = self.sizes(values.shape)
        buffer = values.new_full((self.offset + math.prod(whole),), math.nan)
        view = buffer[self.offset :].view([whole[dim] for dim in self.order])
        view = view.permute([self.order.index(dim) for dim in range(values.dim())])
        taken = tuple(slice(0, n * s, s) for n, s in zip(sizes, self.steps, strict=True))
        view = view[taken]
        view.copy_(values[tuple(slice(0, n) for n in sizes)])
        return view.expand(values.shape)


class Case(NamedTuple):
    """Hold all that is drawn of one call."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    layouts: tuple[Layout, Layout, Layout]
    scale: float
    eps: float
    needs: tuple[bool, bool]
    seed: int

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, w and dy as they lie in memory."""
        *leading, N = self.shape
        x, w, dy = make(math.prod(leading), N, *self.dtypes, seed=self.seed, scale=self.scale)
        shaped = (x.view(self.shape), w, dy.view(self.shape))
        placed = [lay.place(values) for lay, values in zip(self.layouts, shaped, strict=True)]
        return placed[0], placed[1], placed[2]


@st.composite
def layouts(draw: st.DrawFn, n_dims: int, *, may_expand: bool = True) -> Layout:
    """Draw a layout, half of them packed in every dimension but the order."""
    plain = draw(st.booleans())

    def each(choices: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(choices, min_size=n_dims, max_size=n_dims)))

    zero, one = st.just(0), st.just(1)
    order = draw(st.one_of(st.just(list(range(n_dims))), st.permutations(range(n_dims))))
    repeat = st.sampled_from([0, 0, 0, 1]) if may_expand and not plain else zero
    return Layout(
        order=tuple(order),
        gaps=each(zero if plain else st.sampled_from([0, 0, 1, 8])),
        steps=each(one if plain else st.sampled_from([1, 1, 2, 3])),
        expanded=tuple(bool(e) for e in each(repeat)),
        offset=0 if plain else draw(st.sampled_from([0, 0, 1, 8])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a call that must succeed."""
    widths = draw(st.sampled_from([NARROW, NARROW, NARROW, ONE_ROW, WIDE]))
    N = draw(st.sampled_from(widths))
    rows_left = max(1, min(MOST_ROWS, MOST_ELEMENTS // N))
    leading: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        leading.append(draw(st.integers(0, rows_left)))
        rows_left //= max(1, leading[-1])
    dtype = draw(st.sampled_from(DTYPES))
    dims = len(leading) + 1
    shape = (*leading, N)
    of_x, of_w, of_dy = draw(layouts(dims)), draw(layouts(1)), draw(layouts(dims))
    # Gaps and steps in four dimensions multiply: a single row could lie in gigabytes.
    buffers = (math.prod(layout.sizes(shape)[1]) for layout in (of_x, of_dy))
    hypothesis.assume(max(buffers) <= 8 * MOST_ELEMENTS)
    return Case(
        shape=shape,
        dtypes=(dtype, draw(st.sampled_from([dtype, torch.float32]))),
        layouts=(of_x, of_w, of_dy),
        scale=10.0 ** draw(st.integers(-3, 3)),
        eps=draw(st.sampled_from([1e-8, 1e-6, 1e-5, 1e-2, 1.0])),
        needs=draw(st.sampled_from([(True, True), (True, False), (False, True)])),
        seed=draw(st.integers(0, 2**31)),
    )


def check_results(case: Case, x: Tensor, w: Tensor, dy: Tensor, results: Results) -> None:
    """Hold what was returned to its bounds, shape, dtype and layout, and to what was asked for."""
    truths = (oracle.truth(x, w, case.eps), *oracle.truth_backward(dy, x, w, case.eps))
    bounds: tuple[Callable[[], Tensor], ...] = (
        lambda: oracle.bound_y(x, w, case.eps),
        lambda: oracle.bound_dx(dy, x, w, case.eps),
        lambda: oracle.bound_dw(dy, x, w, case.eps),
    )
    assert [result is not None for result in results] == [True, *case.needs]
    for name, result, like, truth, bound in zip(
        Results._fields, results, (x, x, w), truths, bounds, strict=True
    ):
        if result is not None:
            assert result.is_contiguous()
            oracle.assert_within(result, truth, bound(), name, dtype=like.dtype)


def _with_seed(test: Callable[[], None]) -> Callable[[], None]:
    return test if SEED is None else hypothesis.seed(int(SEED))(test)


@pytest.mark.slow
@_with_seed
@hypothesis.settings(hypothesis.settings.get_profile("rmsnorm_ref"))
@hypothesis.given(case=cases())
def test_any_call(case: Case) -> None:
    """Whatever the call, results are within bounds and the inputs' memory is untouched."""
    x, w, dy = case.inputs()
    before = [stored(tensor) for tensor in (x, w, dy)]
    needs_dx, needs_dw = case.needs
    results = run(x, w, dy, case.eps, needs_dx=needs_dx, needs_dw=needs_dw)
    check_results(case, x, w, dy, results)
    assert all(torch.equal(old, stored(new)) for old, new in zip(before, (x, w, dy), strict=True))
