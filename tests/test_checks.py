"""What the backward, the operators and the launchers may be handed by others than `rmsnorm`."""

from __future__ import annotations

import pytest
import torch
from paths import EPS, assert_same_bits, leaves, make, on_every_kernel, run
from torch import Tensor

from rmsnorm_ref import RMSNorm, rmsnorm

FP32, BF16 = torch.float32, torch.bfloat16
M, N = 5, 24

# Who is refused, with the word that says so and the way out.
STRANGERS = {
    "quantised": (
        lambda x, w: rmsnorm(x, torch.quantize_per_tensor(w, 0.1, 0, torch.qint8)),
        ("w is torch.qint8", "w.dequantize()"),
    ),
    "traced": (
        lambda _, w: torch.fx.symbolic_trace(lambda t: rmsnorm(t, w)),
        ("x is a Proxy", "torch.fx.symbolic_trace", "torch.export"),
    ),
    "scripted": (
        lambda *_: torch.jit.script(torch.nn.Sequential(RMSNorm(8))),
        ("torch.jit.script", "torch.export", "torch.compile"),
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of script
@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_shown_the_way(name: str, device: str) -> None:
    """Who brings tensors of another kind, or reads the source, is told what to do instead."""
    call, parts = STRANGERS[name]
    with pytest.raises((TypeError, NotImplementedError)) as caught:
        call(torch.ones(2, 8, device=device), torch.ones(8, device=device))
    assert [part for part in parts if part not in str(caught.value)] == []


# A hook that hands one saved tensor back as another: x is [M, N], w [N], rstd [M].
HANDED_BACK = {
    "x in another dtype": ((M, N), Tensor.bfloat16, "bfloat16"),
    "x with a row less": ((M, N), lambda t: t[1:], "[4, 24]"),
    "x in another order": ((M, N), Tensor.t, "[24, 5]"),
    "x elsewhere": ((M, N), lambda t: t.to("meta"), "x on meta"),
    "w with a column less": ((N,), lambda t: t[1:], "w [23]"),
    "w of two dimensions": ((N,), lambda t: t[None], "w [1, 24]"),
    "w elsewhere": ((N,), lambda t: t.to("meta"), "w on meta"),
    "rstd in another dtype": ((M,), Tensor.double, "float64"),
    "rstd of a row less": ((M,), lambda t: t[1:], "rstd [4]"),
    "rstd elsewhere": ((M,), lambda t: t.to("meta"), "rstd on meta"),
}


@pytest.mark.parametrize("name", HANDED_BACK)
def test_a_hook_must_hand_back_what_was_saved(name: str, device: str) -> None:
    """A saved tensor of another shape, dtype or device is refused before a kernel reads it."""
    shape, change, says = HANDED_BACK[name]
    x, w, dy = leaves(M, N, FP32, device=device)

    def unpack(tensor: Tensor) -> Tensor:
        return change(tensor) if tensor.shape == shape else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = rmsnorm(x, w)
    with pytest.raises(RuntimeError, match="saved-tensor hook") as caught:
        y.backward(dy)
    assert says in str(caught.value)


# Arguments of the backward's operator, called by its name: dy, x, w, rstd with one of them changed.
BY_NAME = {
    "dy with a row less": (0, lambda t: t[1:], "dy [4, 24]"),
    "dy of narrow rows": (0, lambda t: t[:, 1:], "dy [5, 23]"),
    "dy elsewhere": (0, lambda t: t.to("meta"), "dy on meta"),
    "rstd of one row": (3, lambda t: t[:1], "rstd [1]"),
}


@pytest.mark.parametrize(
    ("name", "where"),
    # On the meta device nothing is elsewhere.
    [(n, where) for n in BY_NAME for where in ("", "meta") if not where or "elsewhere" not in n],
)
def test_the_operators_check_what_they_are_given(name: str, where: str, device: str) -> None:
    """Called by its name, on real tensors or stand-ins, the backward refuses what does not fit."""
    position, change, says = BY_NAME[name]
    x, w, dy = make(M, N, FP32, device=where or device)
    arguments = [dy, x, w, x.new_ones(M)]
    arguments[position] = change(arguments[position])
    with pytest.raises(RuntimeError) as caught:
        torch.ops.rmsnorm_ref.backward(*arguments, needs_dx=True, needs_dw=True)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("x", "w", "error"),
    [
        (torch.ones(2, 8, dtype=torch.float64), torch.ones(8), TypeError),
        (torch.ones(2, 8), torch.ones(7), ValueError),
        (torch.ones(2, 0), torch.ones(0), ValueError),
    ],
    ids=["float64", "short weight", "no columns"],
)
def test_stand_ins_are_refused_as_what_they_stand_for(
    x: Tensor, w: Tensor, error: type[Exception]
) -> None:
    """On the meta device an operator, called by its name, refuses what it refuses elsewhere."""
    with pytest.raises(error):
        torch.ops.rmsnorm_ref.forward(x.to("meta"), w.to("meta"), EPS)


def _zeros(like: Tensor) -> Tensor:
    """Stand for zeros without memory, as autograd does for a gradient that is known to be zero."""
    return torch._efficientzerotensor(like.shape, dtype=like.dtype, device=like.device)


@on_every_kernel
@pytest.mark.parametrize("name", ["x", "w", "dy"])
def test_zeros_without_memory(name: str, N: int, M: int, device: str) -> None:
    """A tensor that stands for zeros, and has no memory, counts as those zeros in both passes."""
    x, w, dy = make(M, N, BF16, device=device)
    given = {"x": x, "w": w, "dy": dy}
    expected = run(**{**given, name: torch.zeros_like(given[name])})
    assert_same_bits(run(**{**given, name: _zeros(given[name])}), expected)


@pytest.mark.parametrize("name", ["x", "w"])
def test_memory_that_was_freed(name: str, device: str) -> None:
    """A tensor whose storage was freed is refused by name, and never read at address 0."""
    given = dict(zip(("x", "w"), make(M, N, FP32, device=device), strict=False))
    given[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"^{name} has shape .* no memory.*freed"):
        rmsnorm(**given)
