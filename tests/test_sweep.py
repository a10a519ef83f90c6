"""Both passes against the truth, over widths, rows, shapes and dtypes, and the same bits twice."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from paths import (
    DTYPES,
    FEW,
    LAYOUTS,
    MANY,
    assert_same_bits,
    check,
    in_every_dtype,
    make,
    on_every_kernel,
    on_every_kernel_and_dtype,
    on_every_path,
    on_every_shape,
    on_every_width,
    programs,
    run,
)

from rmsnorm_ref import launch, tiling
from rmsnorm_ref.data import hidden_states


def on_gpu(*values: object) -> list[object]:
    """Mark parameters whose size only a GPU can afford."""
    return [pytest.param(value, marks=pytest.mark.gpu) for value in values]


CELLS = [*itertools.product((2048, 4096, 8192), (5,), (torch.float16, torch.bfloat16))]
CELLS += [(4096, 64, torch.bfloat16)]  # more rows than the interpreter has programs
GPU_CELLS = itertools.product(
    (2048, 4096, 8192), (512, 1024, 2048, 4096), (torch.float16, torch.bfloat16)
)


@pytest.mark.parametrize(
    ("N", "M", "dtype"),
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.gpu) for cell in GPU_CELLS)],
)
def test_sweep(N: int, M: int, dtype: torch.dtype, device: str) -> None:
    """Every cell of the sweep meets the bounds of y, dx and dw in every element."""
    check(*make(M, N, dtype, device=device))


@on_every_shape
@in_every_dtype
def test_every_width(N: int, M: int, dtype: torch.dtype, device: str) -> None:
    """Any width, power of two or not, meets the bounds in every dtype."""
    check(*make(M, N, dtype, device=device))


# One column more than a tile, or a chunk of either pass, holds; and one less than the widest tile.
EDGES = (1025, 2049, 4097, 8191, 8193, 16385, 32769)


@pytest.mark.parametrize("N", EDGES)
def test_a_single_column_beyond_an_edge_counts(N: int, device: str) -> None:
    """The last column is not lost where it is alone in its chunk, nor the only lane masked."""
    check(*make(2, N, torch.float32, device=device))


@on_every_width
@pytest.mark.parametrize(("per_program", "more"), [(0, 0), (0, 1), (0, 2), (4, 1)])
def test_rows_from_none_to_more_than_programs(
    N: int, per_program: int, more: int, device: str
) -> None:
    """Any number of rows is right, none and one more than programs can share evenly included."""
    check(*make(per_program * programs() + more, N, torch.float16, device=device))


@pytest.mark.parametrize("N", [1561, 17000, 33000])
def test_every_program_counts_its_rows_once(
    N: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Where programs are many, they take rows in turn, wide ones too, and dw adds up all rows."""
    monkeypatch.setattr(tiling, "sm_count", lambda _: 64)
    M = 4 * tiling.MIN_ROWS_PER_PROGRAM + 1
    assert tiling.n_programs(M, N, torch.float32, torch.device(device)) >= 4
    check(*make(M, N, torch.float32, device=device))


@pytest.mark.usefixtures("unprepared")
@pytest.mark.parametrize(("N", "M"), [(64, 3), (512, 8), (1024, 5)])
@pytest.mark.parametrize("stages", [1, 2])
def test_few_rows_are_right_in_either_order_of_programs(
    N: int, M: int, stages: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Programs of dw take turns with those of dx, or come first; none is left out or doubled."""
    launched = []
    really = launch.Launch.__call__

    def spy(self: Any, grid: Any, *args: Any) -> None:
        launched.append(args[-1])  # how many programs take turns, where rows are few
        really(self, grid, *args)

    monkeypatch.setattr(launch.Launch, "__call__", spy)
    monkeypatch.setattr(tiling, "dw_stages", lambda *_: stages)
    monkeypatch.setattr(tiling, "dw_cols", lambda *_: 32)  # interpreted, too, several programs
    check(*make(M, N, torch.float32, device=device))
    assert (launched[-1] == 0) == (stages > 1)


@on_every_path
@pytest.mark.parametrize("leading", [(), (2, 3), (2, 1, 3)])
def test_leading_dims_only_count_rows(N: int, leading: tuple[int, ...], device: str) -> None:
    """A tensor of one to four dimensions gives the bits of its flat [M, N], and dw is [N]."""
    x, w, dy = make(math.prod(leading), N, torch.bfloat16, device=device)
    flat = run(x, w, dy)
    shape = (*leading, N)
    shaped = check(x.view(shape), w, dy.view(shape))
    assert shaped.y.shape == shaped.dx.shape == shape
    assert_same_bits(
        (shaped.y.view(x.shape), shaped.dx.view(x.shape), shaped.dw), (flat.y, flat.dx, flat.dw)
    )


@on_every_kernel_and_dtype
@pytest.mark.parametrize("w_dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
def test_any_dtype_of_w_beside_any_dtype_of_x(
    N: int, M: int, dtype: torch.dtype, w_dtype: torch.dtype, device: str
) -> None:
    """The dtypes of y and dx are that of x, dw has that of w, and each is as exact as its own."""
    check(*make(M, N, dtype, w_dtype, device=device))


@pytest.mark.parametrize("layer", ["layer_0", "layer_5"])
@in_every_dtype
def test_hidden_states_next_to_random_rows(layer: str, dtype: torch.dtype, device: str) -> None:
    """Real rows, whose outlier channels rule the mean square, meet the bounds as random ones do."""
    states = hidden_states()
    x, w = states[f"{layer}_x"].to(device, dtype), states[f"{layer}_weight"].to(device)
    random_x, _, dy = make(*x.shape, dtype, device=device)
    check(x, w, dy)
    check(random_x, w, dy)


@on_every_path
def test_hidden_states_laid_end_to_end(N: int, device: str) -> None:
    """Outlier channels are as harmless in rows that reach the other kernels."""
    states = hidden_states()
    stream = torch.cat([states["layer_0_x"].flatten(), states["layer_5_x"].flatten()])
    M = min(max(4, 1024 // N), len(stream) // N)  # enough to meet an outlier channel
    x = stream[: M * N].view(M, N).to(device)
    w = states["layer_0_weight"].repeat(-(-N // 384))[:N].to(device)
    assert M > 0
    assert x.abs().max() > 10 * x.float().square().mean().sqrt()
    check(x, w, make(M, N, x.dtype, device=device)[2])


@on_every_shape
def test_the_same_input_gives_the_same_bits(N: int, M: int, device: str) -> None:
    """Two runs on one input agree to the last bit: nothing depends on who finishes first."""
    x, w, dy = make(M, N, torch.bfloat16, device=device)
    assert_same_bits(run(x, w, dy), run(x, w, dy))


@on_every_width
@pytest.mark.parametrize("M", [7, 64, *on_gpu(4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *on_gpu(torch.float16, torch.float32)])
def test_a_row_has_the_same_bits_in_any_batch(
    N: int, M: int, dtype: torch.dtype, device: str
) -> None:
    """A row has the same y and dx, bit for bit, alone and at either end of a batch."""
    x, w, dy = make(M, N, dtype, device=device)
    x[-1], dy[-1] = x[0], dy[0]
    alone, batch = run(x[:1], w, dy[:1]), run(x, w, dy)
    for row in (batch.y[:1], batch.y[-1:]):
        assert_same_bits([row], [alone.y])
    for row in (batch.dx[:1], batch.dx[-1:]):
        assert_same_bits([row], [alone.dx])


@pytest.mark.parametrize("N", [64, 512, 1024, *on_gpu(40, 128, 256, 768, 1536, 2048, 4096, 8192)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", [torch.bfloat16, torch.float32])
def test_all_rows_have_the_same_bits_among_few_and_among_many(
    N: int, dtype: torch.dtype, w_dtype: torch.dtype, device: str
) -> None:
    """Whatever kernel and tile its batch gets, no row moves by a bit: most of them would not."""
    sizes = [M for M in (1, 7, 32, 33, 128, 129, 256, 512, 513, 1024) if M < MANY]
    x, w, dy = make(MANY + 2, N, dtype, w_dtype, device=device)
    many = run(x, w, dy)
    for M in sizes:
        few = run(x[:M], w, dy[:M])
        assert_same_bits((few.y, few.dx), (many.y[:M], many.dx[:M]))


@pytest.mark.parametrize("M", [FEW, MANY])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_x_and_dy_may_lie_differently(layout: str, M: int, device: str) -> None:
    """Any layout of x beside any layout of dy gives the bits of two packed tensors."""
    x, w, dy = make(M, 24, torch.bfloat16, device=device)
    expected = run(x, w, dy)
    x = LAYOUTS[layout](x)
    for place in LAYOUTS.values():
        placed = place(dy)
        found = run(x, w, placed.reshape(x.shape) if placed.dim() != x.dim() else placed)
        assert_same_bits((t.view_as(e) for t, e in zip(found, expected, strict=True)), expected)


@on_every_kernel
def test_expanded_rows_count_as_many(N: int, M: int, device: str) -> None:
    """Rows that are one row of memory, at stride 0, give the bits of their copies."""
    x, w, dy = make(1, N, torch.bfloat16, device=device)
    x, dy = x.expand(M, N), dy.expand(M, N)
    assert x.stride(0) == 0
    assert_same_bits(run(x, w, dy), run(x.contiguous(), w, dy.contiguous()))
