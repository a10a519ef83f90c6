"""The model of cost: exact integers, and eager chains held against what PyTorch dispatches."""

from __future__ import annotations

import doctest
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm_ref import tiling, traffic

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = ((1, 1), (512, 2048), (4096, 8192), (3, 769))
NO_KERNEL = {"detach", "view", "expand", "alias"}  # operators that only make a new view


class Dispatched(TorchDispatchMode):
    """Record every operator that moves data: (name, bytes read per tensor, bytes written)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[str, list[int], int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then note what it moved."""
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name not in NO_KERNEL:
            reads = sorted(distinct_bytes(arg) for arg in args if isinstance(arg, Tensor))
            self.kernels.append((name, reads, distinct_bytes(out)))
        return out


def distinct_bytes(tensor: Tensor) -> int:
    """Count a tensor's bytes once: a stride of 0 repeats elements that are read already."""
    n_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        n_elements *= size if stride else 1
    return n_elements * tensor.itemsize


def modelled(chain: traffic.Chain) -> list[tuple[str, list[int], int]]:
    """Put a chain into the recorder's form."""
    kernels: dict[str, tuple[list[int], list[int]]] = {}
    for step in chain.steps:
        reads, writes = kernels.setdefault(step.kernel, ([], []))
        (reads if step.access == "read" else writes).append(step.n_bytes)
    return [(k.split(" -> ")[0], sorted(r), sum(w)) for k, (r, w) in kernels.items()]


def seed(x: Tensor, w: Tensor) -> Tensor:
    """Spell RMSNorm in the input's dtype."""
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + 1e-6)
    return w * x


def fp32(x: Tensor, w: Tensor) -> Tensor:
    """Spell RMSNorm with fp32 inside, as language models do."""
    h = x.float()
    variance = h.pow(2).mean(-1, keepdim=True)
    h = h * torch.rsqrt(variance + 1e-6)
    return w * h.to(x.dtype)


@pytest.mark.parametrize("spelling", [seed, fp32])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
def test_eager_chain_is_what_torch_dispatches(
    spelling: Callable[[Tensor, Tensor], Tensor], x_dtype: torch.dtype, w_dtype: torch.dtype
) -> None:
    """Every operator of both passes appears in the model, in order, with its exact bytes."""
    M, N = 5, 7
    x = torch.ones(M, N, dtype=x_dtype, requires_grad=True)
    w = torch.ones(N, dtype=w_dtype, requires_grad=True)
    with Dispatched() as forward:
        y = spelling(x, w)
    dy = torch.ones_like(y)
    with Dispatched() as backward:
        torch.autograd.grad(y, (x, w), dy)
    args = (M, N, x_dtype, w_dtype, spelling.__name__)
    assert modelled(traffic.eager_forward(*args)) == forward.kernels
    assert modelled(traffic.eager_backward(*args)) == backward.kernels


@pytest.mark.parametrize(("M", "N"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_headlines(M: int, N: int, dtype: torch.dtype) -> None:
    """Forward moves 2MN elements, backward 3MN, the seed's chain 7MN: a predicted 3.5."""
    row_bytes = M * N * dtype.itemsize
    fused, eager = traffic.forward(M, N, dtype), traffic.eager_forward(M, N, dtype)
    assert fused.obligatory_bytes == 2 * row_bytes
    assert traffic.backward(M, N, dtype).obligatory_bytes == 3 * row_bytes
    assert eager.obligatory_bytes == 7 * row_bytes
    assert traffic.predicted_speedup(eager, fused) == 3.5


def test_fp32_spelling_costs_more_in_16_bit_and_the_same_in_32() -> None:
    """Casts and fp32 temporaries take 28 + 4e bytes an element; in fp32 nothing is cast."""
    wide = traffic.eager_forward(512, 2048, torch.bfloat16, spelling="fp32")
    assert wide.obligatory_bytes == 512 * 2048 * (28 + 4 * 2)
    same = traffic.eager_forward(512, 2048, torch.float32, spelling="fp32")
    assert same == traffic.eager_forward(512, 2048, torch.float32)


@pytest.mark.parametrize("w_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_itemised(dtype: torch.dtype, w_dtype: torch.dtype | None) -> None:
    """Beside x and y the forward reads w once and writes four bytes per row; it has no scratch."""
    M, N = 96, 1000
    e, e_w = dtype.itemsize, (w_dtype or dtype).itemsize
    counted = traffic.forward(M, N, dtype, w_dtype)
    expected = {
        ("x", "read"): M * N * e,
        ("w", "read"): N * e_w,
        ("rstd", "write"): 4 * M,
        ("y", "write"): M * N * e,
    }
    assert counted.per_tensor() == expected
    assert counted.total_bytes == sum(expected.values())
    assert counted.requested_bytes(M) == expected | {("w", "read"): M * N * e_w}
    assert counted.scratch_bytes(132) == 0


@pytest.mark.parametrize("w_dtype", [None, *DTYPES])
@pytest.mark.parametrize(("needs_dx", "needs_dw"), [(True, True), (True, False), (False, True)])
def test_backward_itemised(w_dtype: torch.dtype | None, needs_dx: bool, needs_dw: bool) -> None:
    """Each tensor appears exactly when a wanted gradient needs it, with its own bytes."""
    M, N, P, dtype = 1960, 1000, 13, torch.bfloat16
    e, e_w = dtype.itemsize, (w_dtype or dtype).itemsize
    counted = traffic.backward(M, N, dtype, w_dtype, needs_dx=needs_dx, needs_dw=needs_dw)
    expected = {("x", "read"): M * N * e, ("dy", "read"): M * N * e, ("rstd", "read"): 4 * M}
    asked: dict[tuple[str, str], int] = {}
    if needs_dx:
        expected |= {("w", "read"): N * e_w, ("dx", "write"): M * N * e}
        asked |= {("w", "read"): P * N * e_w}
    if needs_dw:
        expected |= {("dw", "write"): N * e_w}
        asked |= {("partial_dw", "write"): P * N * 4, ("partial_dw", "read"): P * N * 4}
    assert counted.per_tensor() == expected
    assert counted.total_bytes == sum(expected.values())
    assert counted.obligatory_bytes == (3 if needs_dx else 2) * M * N * e
    assert counted.requested_bytes(P) == expected | asked
    assert counted.scratch_bytes(P) == (2 * P * N * 4 if needs_dw else 0)


@pytest.mark.parametrize(("needs_dx", "needs_dw"), [(True, True), (True, False), (False, True)])
def test_few_rows_itemised(needs_dx: bool, needs_dw: bool) -> None:
    """Few rows have no partial buffer, and what both gradients need is asked for twice."""
    M, N, e = 96, 1000, 2
    counted = traffic.backward(M, N, torch.bfloat16, needs_dx=needs_dx, needs_dw=needs_dw)
    dx_programs = 24  # any
    dw_programs = -(-N // tiling.dw_cols(M, N, torch.device("cuda"))) if needs_dw else 0
    reads = (needs_dx + needs_dw) * M * N * e
    asked = {("x", "read"): reads, ("dy", "read"): reads}
    asked["rstd", "read"] = (needs_dx + dw_programs) * M * 4
    if needs_dx:
        asked |= {("w", "read"): dx_programs * N * e, ("dx", "write"): M * N * e}
    if needs_dw:
        asked |= {("dw", "write"): N * e}
    assert counted.requested_bytes(dx_programs) == asked
    assert counted.scratch_bytes(dx_programs) == 0
    assert counted.obligatory_bytes == (3 if needs_dx else 2) * M * N * e


@pytest.mark.parametrize(("needs_dx", "needs_dw"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("N", [12000, 32768, 32769, 65536])
def test_wide_rows_itemised(N: int, needs_dx: bool, needs_dw: bool) -> None:
    """A wide dx asks for x and dy twice, and each of the programs on a row hands over a number."""
    M, P, dtype, w_dtype = 96, 13, torch.bfloat16, torch.float32
    data, small, w = M * N * 2, 4 * M, N * 4
    counted = traffic.backward(M, N, dtype, w_dtype, needs_dx=needs_dx, needs_dw=needs_dw)
    members = -(-N // 1024)
    expected = {("x", "read"): data, ("dy", "read"): data, ("rstd", "read"): small}
    asked = expected | {("rstd", "read"): small * members * (1 + needs_dx)}
    if needs_dx:
        parts = small * members  # filled, written and read
        expected |= {("w", "read"): w, ("dx", "write"): data}
        expected |= {("parts", "write"): 2 * parts, ("parts", "read"): parts}
        asked |= {("x", "read"): 2 * data, ("dy", "read"): 2 * data, ("dx", "write"): data}
        asked |= {("w", "read"): 2 * M * w}
        asked |= {("parts", "write"): 2 * parts, ("parts", "read"): parts * members}
    if needs_dw:
        expected |= {("dw", "write"): w}
        asked |= {("dw", "write"): w, ("partial_dw", "write"): P * w, ("partial_dw", "read"): P * w}
    assert counted.per_tensor() == expected
    assert counted.requested_bytes(P) == asked
    assert counted.total_bytes == sum(expected.values())


def test_wide_forward_itemised() -> None:
    """A wide forward asks for x twice and for w once per row, and moves each of them once."""
    M, N = 7, 12000
    counted = traffic.forward(M, N, torch.bfloat16, torch.float32)
    asked = {("x", "read"): 4 * M * N, ("w", "read"): 4 * M * N}
    asked |= {("y", "write"): 2 * M * N, ("rstd", "write"): 4 * M}
    assert counted.requested_bytes(M) == asked
    assert counted.total_bytes == 4 * M * N + 4 * N + 4 * M


def test_fp16_and_bf16_count_the_same() -> None:
    """The cost depends on the bytes of an element, not on what its bits mean."""
    for count in (traffic.forward, traffic.backward, traffic.eager_forward, traffic.eager_backward):
        assert count(64, 300, torch.float16) == count(64, 300, torch.bfloat16)


def test_no_rows_move_nothing_but_dw() -> None:
    """With M = 0 nothing is read, and the backward still writes a dw of zeros."""
    assert traffic.forward(0, 64, torch.float16).total_bytes == 0
    assert traffic.forward(0, 64, torch.float16).requested_bytes(0)["w", "read"] == 0
    assert traffic.backward(0, 64, torch.float16).total_bytes == 64 * 2
    assert traffic.backward(0, 64, torch.float16).scratch_bytes(0) == 0


def test_scratch_share_at_512_rows() -> None:
    """132 programs add 34 % to the backward at M = 512 in bf16, whatever N, and 4 % at M = 4096."""
    shares = {traffic.scratch_share(512, N, torch.bfloat16, 132) for N in (1, 4096, 8192)}
    assert shares == {1056 / 3072}
    assert traffic.scratch_share(4096, 8192, torch.bfloat16, 132) == 1056 / 24576


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_bandwidth_refuses_impossible_times(seconds: float) -> None:
    """A duration that is not finite and above 0 gives an error, not a bandwidth."""
    with pytest.raises(ValueError, match="seconds"):
        traffic.effective_bandwidth(1, seconds)


def test_bandwidth_is_bytes_per_second() -> None:
    """Twice the bytes in half the time is four times the bandwidth."""
    assert traffic.effective_bandwidth(6, 0.5) == 12.0
    assert traffic.effective_bandwidth(12, 0.25) == 48.0


@pytest.mark.parametrize(
    "count", [traffic.forward, traffic.backward, traffic.eager_forward, traffic.eager_backward]
)
@pytest.mark.parametrize(
    ("args", "error", "name"),
    [
        ((-1, 8, torch.float16), ValueError, "M is -1"),
        ((8, 0, torch.float16), ValueError, "N is 0"),
        ((8.0, 8, torch.float16), TypeError, "M is 8"),
        ((8, True, torch.float16), TypeError, "N is True"),
        ((8, 8, torch.float64), TypeError, "x_dtype is torch.float64"),
        ((8, 8, torch.float16, torch.int8), TypeError, "w_dtype is torch.int8"),
    ],
)
def test_errors_name_the_argument(
    count: Callable[..., traffic.Chain], args: tuple[Any, ...], error: type[Exception], name: str
) -> None:
    """A shape or dtype that no kernel takes is refused by name, in every count."""
    with pytest.raises(error, match=name):
        count(*args)


def test_errors_of_single_functions() -> None:
    """Arguments that only one function has are refused by name too."""
    with pytest.raises(ValueError, match="needs_dx"):
        traffic.backward(8, 8, torch.float16, needs_dx=False, needs_dw=False)
    with pytest.raises(ValueError, match="spelling is 'other'"):
        traffic.eager_forward(8, 8, torch.float16, spelling="other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n_programs is -1"):
        traffic.backward(8, 8, torch.float16).scratch_bytes(-1)
    with pytest.raises(TypeError, match="n_programs is 1"):
        traffic.forward(8, 8, torch.float16).requested_bytes(1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="M is 0"):
        traffic.scratch_share(0, 8, torch.float16, 132)
    empty = traffic.forward(0, 8, torch.float16)
    with pytest.raises(ValueError, match="obligatory"):
        traffic.predicted_speedup(empty, empty)


def test_examples_run() -> None:
    """Every example in the module's docstrings prints what it says."""
    result = doctest.testmod(traffic)
    assert result.attempted > 0
    assert result.failed == 0
