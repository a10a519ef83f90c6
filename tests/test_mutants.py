"""Broken kernels: each is rejected by the bound or the property that its entry in the list names."""

from __future__ import annotations

import ast
import functools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from mutants import (
    BACKWARD_MUTANTS,
    DTYPES,
    FORWARD_MUTANTS,
    KERNELS,
    SOURCE,
    Case,
    Mutant,
    forget,
    load,
    make,
)
from paths import DEVICE, EPS, LAYOUTS, bits
from paths import make as draw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm_ref import oracle, tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MUTANTS = FORWARD_MUTANTS + BACKWARD_MUTANTS
BOUNDS = ("y", "dx", "dw")

FENCE = 65536  # elements on either side of a tensor: no tile and no 16-bit offset reaches further
PAINT = -77.0  # what outputs are fenced with, a value that no result takes
ALLOCATIONS = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty}


class Fences(TorchDispatchMode):
    """Hand out, for every new empty tensor, one that holds NaN and lies between two fences."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace what launchers allocate, in the engine's thread too; leave the rest to torch."""
        del types
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket not in ALLOCATIONS or out.numel() == 0:
            return out
        assert out.is_contiguous()
        storage = out.new_full((2 * FENCE + out.numel(),), PAINT)
        storage[FENCE : len(storage) - FENCE] = math.nan
        self.storages.append(storage)
        # No view of the storage: autograd treats views apart.
        return out.set_(storage.untyped_storage(), FENCE, out.shape, out.stride())

    def surround(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies between fences."""
        start = tensor.untyped_storage().data_ptr()
        return any(storage.untyped_storage().data_ptr() == start for storage in self.storages)

    def are_whole(self) -> bool:
        """Tell whether nothing was written outside of what was allocated."""
        fences = (torch.cat((s[:FENCE], s[len(s) - FENCE :])) for s in self.storages)
        return all(bool((fence == PAINT).all()) for fence in fences)


class Inputs(NamedTuple):
    """Hold one input of both passes."""

    x: Tensor
    w: Tensor
    dy: Tensor


@functools.cache
def inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw the inputs of a case, NaN around and between their rows."""
    x, w, dy = draw(case.M, case.N, dtype, DTYPES.get(case.w, dtype), scale=case.scale)
    x = x[:, :1].expand_as(x) if case.equal else x
    w = torch.ones_like(w) if case.unit_w else w
    return lay_out(case.layout, x, w, dy)


def lay_out(layout: str, x: Tensor, w: Tensor, dy: Tensor) -> Inputs:
    """Place the inputs in memory as `layout` says; all but an expanded dy keep their values."""
    M, N = x.shape
    if layout == "sliced weight":
        return Inputs(x, w.repeat_interleave(2)[::2], dy)
    if layout == "expanded dy":
        return Inputs(x, w, dy[:1, :1].expand(M, N))
    strides = {"packed": (N, N), "padded": (N + 64, N + 128), "odd": (N + 1, N)}.get(layout)
    if strides is None:
        x = LAYOUTS[layout](x)
        return Inputs(x, w, dy.view(x.shape))
    return Inputs(fenced(x, strides[0]), w, fenced(dy, strides[1]))


def fenced(values: Tensor, row_stride: int) -> Tensor:
    """Copy [M, N] to memory whose rows are row_stride apart, NaN between and around them."""
    M, N = values.shape
    storage = values.new_full((2 * FENCE + M * row_stride,), math.nan)
    rows = storage[FENCE : FENCE + M * row_stride].view(M, row_stride)
    return rows[:, :N].copy_(values)


@functools.cache
def expected(case: Case, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Give truth and bound of each result that the case asks for."""
    x, w, dy = inputs(case, dtype)
    known = {"y": (oracle.truth(x, w, EPS), oracle.bound_y(x, w, EPS))}
    if case.needs:
        dx, dw = oracle.truth_backward(dy, x, w, EPS)
        known["dx"] = dx, oracle.bound_dx(dy, x, w, EPS)
        known["dw"] = dw, oracle.bound_dw(dy, x, w, EPS)
    return known


def run(package: Any, given: Inputs, needs: str) -> tuple[dict[str, Tensor | None], Fences]:
    """Run the passes of a clone; return y and each gradient asked for, and the fences around."""
    x = given.x.detach().requires_grad_("x" in needs)
    w = given.w.detach().requires_grad_("w" in needs)
    wanted = (
        {"dx": x, "dw": w}
        if needs == "xw"
        else {"d" + name: {"x": x, "w": w}[name] for name in needs}
    )
    with Fences() as fences:
        y = package.rmsnorm(x, w, EPS)
        tensors = list(wanted.values())
        found = torch.autograd.grad(y, tensors, given.dy, allow_unused=True) if tensors else ()
    return {"y": y.detach(), **dict(zip(wanted, found, strict=True))}, fences


def failures(package: Any, case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Return what rejects a clone: bounds with error/bound, exact properties with infinity."""
    given = inputs(case, dtype)
    before = [bits(tensor).clone() for tensor in given]
    results, fences = run(package, given, case.needs)
    found: dict[str, float] = {}
    for name, result in results.items():
        if result is None:
            found[name] = math.inf  # a gradient that was asked for and did not come
            continue
        verdict = oracle.compare(result, *expected(case, dtype)[name])
        found |= {} if verdict.ok else {name: verdict.worst_ratio}
        right = (given.w if name == "dw" else given.x).dtype
        found |= {} if result.dtype == right else {"dtypes": math.inf}
    exact = {
        "inputs": all(map(torch.equal, before, map(bits, given))),
        "outside": fences.are_whole(),
    }
    if case.alone:
        first, _ = run(package, Inputs(given.x[:1], given.w, given.dy[:1]), "x")
        exact["alone"] = all(
            torch.equal(bits(one), bits(many[:1]))
            for one, many in ((first[name], results[name]) for name in ("y", "dx"))
            if one is not None and many is not None
        )
    return found | {name: math.inf for name, holds in exact.items() if not holds}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Mutant | None], Any]]:
    """Load copies of the package, each with at most one mutant in it; each of them once."""
    loaded = []

    @functools.cache
    def load_once(mutant: Mutant | None) -> Any:
        loaded.append(load(tmp_path_factory.mktemp("clone"), mutant))
        return loaded[-1]

    yield load_once
    for package in loaded:
        forget(package)


@pytest.fixture(scope="module")
def healthy(clone: Callable[[Mutant | None], Any]) -> Callable[[Case, torch.dtype], Any]:
    """Judge the unchanged package, loaded as a mutant is; once for each input."""
    return functools.cache(lambda case, dtype: failures(clone(None), case, dtype))


def pairs() -> Iterator[tuple[Mutant, torch.dtype]]:
    """Pair every mutant with the dtypes that it is run in.

    Rows of several chunks are slow to interpret, so they run in one: that with the loosest bounds.
    """
    for mutant in MUTANTS:
        loosest = max(mutant.dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        wide = mutant.case.N > tiling.ONE_TILE_MAX
        # A fault that the forward shows needs no backward.
        forward = mutant in FORWARD_MUTANTS and not {"dx", "dw"} & {*mutant.rejected_by}
        case = mutant.case._replace(needs="") if forward else mutant.case
        for dtype in (loosest,) if wide else mutant.dtypes:
            yield mutant._replace(case=case), dtype


def parameters() -> list[Any]:
    """Name the pairs, and skip where the fault cannot show."""
    found = []
    for mutant, dtype in pairs():
        reason = f"shows on {mutant.only} alone: {mutant.why}"
        marks = pytest.mark.skipif(mutant.only not in {"", DEVICE}, reason=reason)
        found.append(pytest.param(mutant, dtype, id=f"{mutant}-{str(dtype)[6:]}", marks=marks))
    return found


@pytest.mark.parametrize(("mutant", "dtype"), parameters())
def test_mutant_is_rejected(clone: Any, healthy: Any, mutant: Mutant, dtype: torch.dtype) -> None:
    """The named bounds and properties reject the mutant, and none rejects its original."""
    assert healthy(mutant.case, dtype) == {}
    found = failures(clone(mutant), mutant.case, dtype)
    print(f"{str(dtype)[6:]:9} {mutant} {found}")  # noqa: T201  # the table, with pytest -s
    assert {*mutant.rejected_by} <= {*found}
