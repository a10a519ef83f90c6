"""The shapes that reach every kernel, inputs for them, and the one comparison most tests make.

Which kernels run depends on N, and the backward's on whether rows are few. So a property is tested
on every kernel by testing it at `shapes(*WIDTHS)`, or, where launches are dear, at
`shapes(*PATHS)`: one width for each kernel and kind of tile.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rmsnorm_ref import oracle, rmsnorm, tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on"}
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
_DEVICE = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
EPS = 1e-6

# Several rows per tile up to 1024 (forward) and 4096 (backward), both sizes of that tile and odd
# widths among them; a tile of one row up to 8192; above, teams of more and more programs.
WIDTHS = (1, 3, 17, 64, 200, 513, 769, 1560, 2048, 8192, 12000, 20000, 33000)
PATHS = (17, 64, 8192, 12000, 20000, 33000)

FEW = 4
BF16 = torch.bfloat16
MANY = next(
    M for M in range(2, 9999, 2) if tiling.backward_path(M, 2048, _DEVICE, BF16) == "backward"
)
WIDE_ROWS = 8  # several teams of programs share them, interpreted too


def shapes(*widths: int) -> list[tuple[int, int]]:
    """List (N, M) so that every kernel of these widths runs; M is even."""
    found: list[tuple[int, int]] = []
    for N in widths:
        rows = (FEW, MANY) if N <= tiling.ONE_TILE_MAX else (WIDE_ROWS,)
        found += {tiling.backward_path(M, N, _DEVICE, BF16): (N, M) for M in rows}.values()
    return found


def each_in_a_dtype(cells: list[tuple[int, int]]) -> list[Any]:
    """Pair (N, M) with every dtype; interpreted, each with one of them, in turn."""
    return [
        pytest.param(*cell, dtype, marks=[] if index % 3 == turn else pytest.mark.gpu)
        for index, cell in enumerate(cells)
        for turn, dtype in enumerate(DTYPES)
    ]


on_every_width = pytest.mark.parametrize("N", WIDTHS)
on_every_path = pytest.mark.parametrize("N", PATHS)
on_every_shape = pytest.mark.parametrize(("N", "M"), shapes(*WIDTHS))
on_every_kernel = pytest.mark.parametrize(("N", "M"), shapes(*PATHS))
on_every_shape_and_dtype = pytest.mark.parametrize(
    ("N", "M", "dtype"), each_in_a_dtype(shapes(*WIDTHS))
)
on_every_kernel_and_dtype = pytest.mark.parametrize(
    ("N", "M", "dtype"), each_in_a_dtype(shapes(*PATHS))
)
in_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])


class Results(NamedTuple):
    """Hold what both passes return; a gradient that was not asked for is None."""

    y: Tensor
    dx: Tensor | None
    dw: Tensor | None


def make(
    M: int,
    N: int,
    dtype: torch.dtype,
    w_dtype: torch.dtype | None = None,
    device: str = DEVICE,
    seed: int = 0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw x [M, N], w [N], dy [M, N]; the same numbers on every device.

    No mean is zero and w is far from 1, so that no term of either pass is small by chance.
    """
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(M, N, generator=g) + 0.5) * scale
    w = 2 * torch.randn(N, generator=g) + 1
    dy = torch.randn(M, N, generator=g) + 0.5
    return x.to(device, dtype), w.to(device, w_dtype or dtype), dy.to(device, dtype)


def leaves(*shape: Any, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Make x and w that want gradients, and a dy; shape is (M, N, dtype of x and maybe of w)."""
    x, w, dy = make(*shape, device=device)
    return x.requires_grad_(), w.requires_grad_(), dy


def run(
    x: Tensor,
    w: Tensor,
    dy: Tensor | None = None,
    eps: float = EPS,
    *,
    needs_dx: bool = True,
    needs_dw: bool = True,
) -> Results:
    """Run both passes on inputs as they lie in memory; dy is ones where it is left out."""
    x, w = x.detach().requires_grad_(needs_dx), w.detach().requires_grad_(needs_dw)
    y = rmsnorm(x, w, eps)
    wanted = [tensor for tensor, needed in ((x, needs_dx), (w, needs_dw)) if needed]
    found = iter(torch.autograd.grad(y, wanted, torch.ones_like(y) if dy is None else dy))
    dx = next(found) if needs_dx else None
    return Results(y.detach(), dx, next(found) if needs_dw else None)


def check(x: Tensor, w: Tensor, dy: Tensor | None = None, eps: float = EPS) -> Results:
    """Run both passes, hold every element of y, dx and dw to its bound, and return them."""
    results = run(x, w, dy, eps)
    dy = torch.ones_like(x) if dy is None else dy
    dx, dw = oracle.truth_backward(dy, x, w, eps)
    y = oracle.truth(x, w, eps)
    assert results.dx is not None
    assert results.dw is not None
    oracle.assert_within(results.y, y, oracle.bound_y(x, w, eps), "y", dtype=x.dtype)
    oracle.assert_within(results.dx, dx, oracle.bound_dx(dy, x, w, eps), "dx", dtype=x.dtype)
    oracle.assert_within(results.dw, dw, oracle.bound_dw(dy, x, w, eps), "dw", dtype=w.dtype)
    assert all(result.is_contiguous() and result.device == x.device for result in results)
    return results


def assert_same_bits(actual: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> None:
    """Compare bit patterns: NaN equals the same NaN, and 0.0 does not equal -0.0."""
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a tensor as integers of the same shape."""
    integer = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return tensor.detach().contiguous().view(integer)


def programs() -> int:
    """Count the programs that the backward's rows are shared by, one per SM."""
    return tiling.sm_count(_DEVICE)


def stored(tensor: Tensor) -> Tensor:
    """Copy the bits of a tensor's whole storage, gaps between its rows included."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return bits(whole.set_(tensor.detach().untyped_storage())).clone()


# ---- The same numbers, laid out in other ways; all that lies between them is NaN -----------------


def _inside(values: Tensor, rows: int, columns: int, at: int = 0, step: int = 1) -> Tensor:
    """Put [M, N] into every `step`-th column, from column `at` on, of a buffer of NaN."""
    M, N = values.shape
    buffer = torch.full((rows, columns), float("nan"), dtype=values.dtype, device=values.device)
    view = buffer[:: rows // M, at : at + N * step : step]
    return view.copy_(values)


def _offset(values: Tensor) -> Tensor:
    buffer = torch.full((values.numel() + 1,), float("nan"), dtype=values.dtype)
    return buffer.to(values.device)[1:].view(values.shape).copy_(values)


def _uneven(values: Tensor) -> Tensor:
    M, N = values.shape
    buffer = torch.full((2, M // 2 + 1, N), float("nan"), dtype=values.dtype)
    return buffer.to(values.device)[:, : M // 2].copy_(values.view(2, M // 2, N))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": torch.clone,
    "offset": _offset,
    "aligned slice": lambda t: _inside(t, len(t), t.shape[1] + 32, at=16),
    "odd slice": lambda t: _inside(t, len(t), t.shape[1] + 3, at=1),
    "every other row": lambda t: _inside(t, 2 * len(t), t.shape[1]),
    "every other column": lambda t: _inside(t, len(t), 2 * t.shape[1], step=2),
    "transposed": lambda t: t.t().contiguous().t(),
    "uneven rows, 3-D": _uneven,  # [2, M/2, N], M even; no one stride walks all rows
}
