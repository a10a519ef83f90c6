"""Broken kernels: each is rejected by the bound or the property that its entry names."""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from mutants import (
    BACKWARD_MUTANTS,
    DTYPES,
    FORWARD_MUTANTS,
    KERNELS,
    SHAPES,
    SOURCE,
    Case,
    Mutant,
    forget,
    load,
)
from paths import DEVICE, EPS, LAYOUTS, bits
from paths import make as draw
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rmsnorm_ref import oracle, tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Broken kernels overflow and divide by zero, and numpy says so where they are interpreted.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MUTANTS = FORWARD_MUTANTS + BACKWARD_MUTANTS
BOUNDS = ("y", "dx", "dw")

# Elements on either side of a tensor. No tile, 16-bit offset or step of the reduction reaches
# further, so a mutant touches no memory but what it was given.
FENCE = 65536
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
        fences = (fence for s in self.storages for fence in (s[:FENCE], s[len(s) - FENCE :]))
        return all(bool((fence == PAINT).all()) for fence in fences)


class Inputs(NamedTuple):
    """Hold one input of both passes."""

    x: Tensor
    w: Tensor
    dy: Tensor


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


def run(package: Any, given: Inputs, needs: str) -> tuple[dict[str, Any], Fences]:
    """Run the passes of a clone; return y and each gradient asked for, and the fences around."""
    x = given.x.detach().requires_grad_("x" in needs)
    w = given.w.detach().requires_grad_("w" in needs)
    wanted = {"d" + name: tensor for name, tensor in (("x", x), ("w", w)) if name in needs}
    with Fences() as fences:
        y = package.rmsnorm(x, w, EPS)
        tensors = list(wanted.values())
        found = torch.autograd.grad(y, tensors, given.dy, allow_unused=True) if tensors else ()
    return {"y": y.detach(), **dict(zip(wanted, found, strict=True))}, fences


def rows_alone(package: Any, given: Inputs, needs: str) -> dict[str, Tensor]:
    """Run every row by itself, and put y and dx together again."""
    rows = zip(given.x.split(1), given.dy.split(1), strict=True)
    runs = [run(package, Inputs(x, given.w, dy), needs.replace("w", ""))[0] for x, dy in rows]
    return {name: torch.cat([one[name] for one in runs]) for name in runs[0]}


def failures(package: Any, case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Return what rejects a clone: bounds with error/bound, exact properties with infinity."""
    given = inputs(case, dtype)
    before = [bits(tensor).clone() for tensor in given]
    if case.queued:
        run(package, given, case.needs)  # compiles
        torch.cuda._sleep(50_000_000)  # tens of milliseconds, in which all is launched
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
        alone = rows_alone(package, given, case.needs)
        exact["alone"] = all(torch.equal(bits(alone[name]), bits(results[name])) for name in alone)
    return found | {name: math.inf for name, holds in exact.items() if not holds}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread: for small tensors, waiting for a second one costs more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        # A fault that the forward shows needs no backward, unless it is in the store of rstd, which
        # only a backward wants.
        forward = mutant in FORWARD_MUTANTS and not {"dx", "dw"} & {*mutant.rejected_by}
        saves = mutant.old.startswith("rstd, mask")
        case = mutant.case._replace(needs="") if forward and not saves else mutant.case
        for dtype in (loosest,) if wide else mutant.dtypes:
            yield mutant._replace(case=case), dtype


def parameters() -> list[Any]:
    """Name the pairs, and skip where the fault cannot show."""
    found = []
    here = {"", DEVICE}
    if DEVICE == "cuda" and tiling.overlaps(torch.device("cuda", 0)):
        here.add("cuda-early")
    for mutant, dtype in pairs():
        reason = f"shows on {mutant.only} alone: {mutant.why}"
        marks = pytest.mark.skipif(mutant.only not in here, reason=reason)
        found.append(pytest.param(mutant, dtype, id=f"{mutant}-{str(dtype)[6:]}", marks=marks))
    return found


# A rounding too many moves a result by half a unit at most, where the bound grants half a unit: the
# smallest fault of all reaches 3 bounds at best. An input that shows half of that is a clear one.
CLEAR = 1.5


@pytest.mark.parametrize(("mutant", "dtype"), parameters())
def test_mutant_is_rejected(clone: Any, healthy: Any, mutant: Mutant, dtype: torch.dtype) -> None:
    """The named bounds and properties reject the mutant, and none rejects its original."""
    assert healthy(mutant.case, dtype) == {}
    found = failures(clone(mutant), mutant.case, dtype)
    print(f"{str(dtype)[6:]:9} {mutant} {found}")  # noqa: T201  # the table, with pytest -s
    assert all(found.get(name, 0.0) > CLEAR for name in mutant.rejected_by)


# What hides a fault, so that no test relies on such an input: (fault, place, input, dtypes).
BLIND: list[tuple[str, str, dict[str, Any], str]] = [
    ("eps outside the root", "FORWARD", {"scale": 1.0}, "FP16 BF16"),
    ("no eps", "FORWARD", {"scale": 1.0}, "FP16 BF16 FP32"),
    ("mean over the padded width", "FORWARD", {"N": 64}, "FP16 BF16 FP32"),
    ("mean in dx over the padded width", "FEW", {"N": 64}, "FP16 BF16 FP32"),
    ("no column mask", "FORWARD", {"N": 64}, "FP16 BF16 FP32"),
    ("store without a row mask", "FORWARD", {"M": 64}, "FP16 BF16 FP32"),
    ("last tile of rows lost", "forward._build", {"M": 64}, "FP16 BF16 FP32"),
    ("squares in fp16", "FORWARD", {"scale": 1.0}, "BF16"),
    ("weight ignored", "FORWARD", {"unit_w": True}, "FP16 BF16 FP32"),
    ("x_hat rounded before the weight", "FORWARD", {"unit_w": True}, "FP16 BF16"),
    ("weight rounded to the dtype of x", "FORWARD", {"w": ""}, "FP16 BF16"),
    ("mean without the weight", "FEW", {"unit_w": True}, "FP16 BF16 FP32"),
    ("weight inside dw", "BACKWARD", {"unit_w": True}, "FP16 BF16 FP32"),
    ("the one partial dw in bf16", "WIDE_BACKWARD", {}, "BF16"),
    ("dw in the dtype of x", "backward.launch_backward", {"w": ""}, "FP16 BF16"),
    ("x read as if packed", "FORWARD", {"layout": "packed"}, "FP16 BF16 FP32"),
    ("offset in too few bits", "FORWARD", {"M": 3}, "FP16 BF16 FP32"),
]


@pytest.mark.parametrize(("name", "place", "changes", "dtypes"), BLIND)
def test_blind_spot(
    clone: Any, name: str, place: str, changes: dict[str, Any], dtypes: str
) -> None:
    """On an input that hides a fault, the broken kernel passes every bound and property."""
    where = KERNELS.get(place, place)
    mutant = next(m for m, _ in pairs() if (m.name, m.where) == (name, where))
    for dtype in dtypes.split():
        assert failures(clone(mutant), mutant.case._replace(**changes), DTYPES[dtype]) == {}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("bound", BOUNDS)
def test_bound_has_teeth(bound: str, dtype: torch.dtype) -> None:
    """Every bound rejects at least three different faults in every dtype."""
    names = {m.name for m, run_in in pairs() if run_in == dtype and bound in m.rejected_by}
    assert len(names) >= 3


def test_every_kernel_has_mutants() -> None:
    """No kernel of the package is left without a fault planted in it."""
    found = {
        f"{module}.{name}"
        for module, source in SOURCE.items()
        for name in re.findall(r"@triton\.jit.*\n(?:@.*\n)*def (\w+)\(", source)
    }
    assert found == set(KERNELS.values())
    assert found <= {mutant.where for mutant in MUTANTS}


@pytest.mark.parametrize("kernel", KERNELS)
def test_fences_surround_every_result(clone: Any, kernel: str) -> None:
    """Whatever a launcher returns was handed out by the fences, so that they guard all of it."""
    results, fences = run(clone(None), inputs(Case(*SHAPES[kernel]), torch.float32), "xw")
    assert all(result is not None and fences.surround(result) for result in results.values())
