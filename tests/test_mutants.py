"""Broken kernels: each is rejected by the bound or the property that its row in the table names."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from mutants import BF16, EVERY, FORWARD_FAULTS, FP16, FP32, SHAPES, Case, Fault
from mutants_backward import BACKWARD_FAULTS
from paths import DEVICE, LAYOUTS, bits, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rmsnorm_ref
from rmsnorm_ref import oracle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = Path(inspect.getfile(rmsnorm_ref)).parent

FENCE = 65536  # elements on either side of a tensor: no tile and no 16-bit offset reaches further
PAINT = -77.0  # what outputs are fenced with, a value that no result takes
EPS = 1e-6
ALLOCATIONS = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty}


class Mutant(NamedTuple):
    """Hold one fault planted in one spot."""

    fault: Fault
    where: str
    old: str
    new: str
    case: Case

    def __str__(self) -> str:
        """Name the fault and where it is planted."""
        return f"{self.fault.name}, {self.where}: {self.new}"


def mutants() -> list[Mutant]:
    """Give every spot of every fault, on the shape that its kernel is run with."""
    found = []
    for fault in FORWARD_FAULTS + BACKWARD_FAULTS:
        for where, change in fault.spots:
            old, new = change.split(" =>", 1)
            M, N = SHAPES.get(where, (0, 0))
            needs = fault.case.needs if {"dx", "dw", "alone"} & set(fault.rejected_by) else ""
            case = fault.case._replace(M=fault.case.M or M, N=fault.case.N or N, needs=needs)
            found.append(Mutant(fault, where, old, new.removeprefix(" "), case))
    return found


MUTANTS = mutants()


def plant(mutant: Mutant) -> str:
    """Return the source of the mutant's module, changed in its one spot."""
    module, function = mutant.where.split(".")
    source = (SOURCE / f"{module}.py").read_text()
    node = next(n for n in ast.parse(source).body if getattr(n, "name", "") == function)
    lines = source.splitlines(keepends=True)
    before, body = "".join(lines[: node.lineno - 1]), lines[node.lineno - 1 : node.end_lineno]
    text = "".join(body)
    assert text.count(mutant.old) == 1, f"{mutant.where} has {mutant.old!r} other than once"
    assert mutant.old != mutant.new
    return before + text.replace(mutant.old, mutant.new) + "".join(lines[node.end_lineno :])


class Fences(TorchDispatchMode):
    """Hand out, for every new empty tensor, one that holds NaN and lies between two fences."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace what launchers allocate, in the engine's thread too; leave the rest to torch."""
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
    assert case.M is not None
    assert case.N is not None
    x, w, dy = make(case.M, case.N, dtype, case.w_dtype, scale=case.scale)
    x = x[:, :1].expand_as(x) if case.equal else x
    w = torch.ones_like(w) if case.unit_w else w
    return lay_out(case.layout, x, w, dy)


def lay_out(layout: str, x: Tensor, w: Tensor, dy: Tensor) -> Inputs:
    """Place the inputs in memory as `layout` says; their values stay the same."""
    M, N = x.shape
    strides = {"padded": (N + 64, N + 128), "odd": (N + 1, N)}.get(layout, (N, N))
    if layout in LAYOUTS and layout != "packed":
        x = LAYOUTS[layout](x)
        return Inputs(x, w, dy.view(x.shape))
    if layout == "sliced weight":
        w = w.repeat_interleave(2)[::2]
    if layout == "expanded dy":
        return Inputs(x, w, dy[:1, :1].expand(M, N))
    return Inputs(fenced(x, strides[0]), w, fenced(dy, strides[1]))


def fenced(values: Tensor, row_stride: int) -> Tensor:
    """Copy [M, N] to memory whose rows are row_stride apart, NaN between and around them."""
    M, N = values.shape
    storage = values.new_full((2 * FENCE + M * row_stride,), math.nan)
    rows = storage[FENCE : FENCE + M * row_stride].view(M, row_stride)
    return rows[:, :N].copy_(values)


@functools.cache
def expected(case: Case, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Give truth and bound of y, dx and dw."""
    x, w, dy = inputs(case, dtype)
    return model(x, w, dy)


def model(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Give truth and bound of y, dx and dw."""
    dx, dw = oracle.truth_backward(dy, x, w, EPS)
    return {
        "y": (oracle.truth(x, w, EPS), oracle.bound_y(x, w, EPS)),
        "dx": (dx, oracle.bound_dx(dy, x, w, EPS)),
        "dw": (dw, oracle.bound_dw(dy, x, w, EPS)),
    }


def run(op: Any, given: Inputs, needs: str = "xw") -> tuple[dict[str, Tensor | None], Fences]:
    """Run both passes of a clone and return what it gave, with the memory that it was given."""
    x = given.x.detach().requires_grad_("x" in needs)
    w = given.w.detach().requires_grad_("w" in needs)
    with Fences() as fences:
        y = op.rmsnorm(x, w, EPS)
        wanted = [tensor for tensor in (x, w) if tensor.requires_grad]
        gradients = torch.autograd.grad(y, wanted, given.dy, allow_unused=True) if wanted else ()
    found = iter(gradients)
    dx = next(found) if "x" in needs else None
    dw = next(found) if "w" in needs else None
    return {"y": y.detach(), "dx": dx, "dw": dw}, fences


def failures(op: Any, case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Return what rejects a clone: bounds with error/bound, exact properties with infinity."""
    given = inputs(case, dtype)
    before = [bits(tensor).clone() for tensor in given]
    results, fences = run(op, given, case.needs)
    found: dict[str, float] = {}
    for name, tensor, asked in (("y", given.x, ""), ("dx", given.x, "x"), ("dw", given.w, "w")):
        result = results[name]
        if name != "y" and asked not in case.needs:
            continue
        if result is None:
            found[name] = math.inf  # a gradient that was asked for and did not come
            continue
        verdict = oracle.compare(result, *expected(case, dtype)[name])
        found |= {} if verdict.ok else {name: verdict.worst_ratio}
        found |= {} if result.dtype == tensor.dtype else {"dtypes": math.inf}
    same = all(torch.equal(a, bits(b)) for a, b in zip(before, given, strict=True))
    found |= {} if same else {"inputs": math.inf}
    found |= {} if fences.are_whole() else {"outside": math.inf}
    if case.alone:
        first, _ = run(op, Inputs(given.x[:1], given.w, given.dy[:1]))
        pairs = [(first[name], results[name]) for name in ("y", "dx")]
        same = all(
            torch.equal(bits(a), bits(b[:1])) for a, b in pairs if a is not None and b is not None
        )
        found |= {} if same else {"alone": math.inf}
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Mutant | None], Any]]:
    """Load copies of the package, each under a name of its own and with at most one mutant in it."""
    loaded: list[str] = []
    numbers = itertools.count()
    folder = tmp_path_factory.mktemp("clones")

    @functools.cache
    def load(mutant: Mutant | None) -> Any:
        name = f"rmsnorm_ref_clone_{next(numbers)}"
        loaded.append(name)
        path = folder / name
        path.mkdir()
        for file in SOURCE.glob("*.py"):
            changed = mutant is not None and mutant.where.startswith(f"{file.stem}.")
            source = plant(mutant) if changed and mutant else file.read_text()
            # An operator's name is global to the process, and the real one must stay as it is.
            (path / file.name).write_text(source.replace("rmsnorm_ref::", f"{name}::"))
        spec = importlib.util.spec_from_file_location(
            name, path / "__init__.py", submodule_search_locations=[str(path)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        op = importlib.import_module(f"{name}.op")
        op.interpreter.prepare(torch.device(DEVICE))
        importlib.import_module(f"{name}.tuning").set_mode("fixed")
        return op

    yield load
    for name in list(sys.modules):
        if name.split(".")[0] in loaded:
            del sys.modules[name]


@pytest.fixture(scope="module")
def healthy(
    clone: Callable[[Mutant | None], Any],
) -> Callable[[Case, torch.dtype], dict[str, float]]:
    """Judge the unchanged package, loaded as a mutant is; once for each input."""
    return functools.cache(lambda case, dtype: failures(clone(None), case, dtype))


def parameters() -> Iterator[Any]:
    """Pair every mutant with the dtypes that show it."""
    for mutant in MUTANTS:
        only = mutant.fault.only
        skip = pytest.mark.skip(reason=f"shows on {only} alone: {mutant.fault.why}")
        dtypes = mutant.fault.dtypes
        if mutant.where.startswith("wide.") and BF16 in dtypes:
            dtypes = tuple(dtype for dtype in dtypes if dtype != FP16)  # wide rows are slow
        for dtype in dtypes:
            marks = skip if only not in {"", DEVICE} else ()
            yield pytest.param(mutant, dtype, id=f"{mutant}-{str(dtype)[6:]}", marks=marks)


@pytest.mark.parametrize(("mutant", "dtype"), parameters())
def test_mutant_is_rejected(clone: Any, healthy: Any, mutant: Mutant, dtype: torch.dtype) -> None:
    """The named bound or property rejects the mutant, and nothing rejects the source it came from."""
    assert healthy(mutant.case, dtype) == {}
    found = failures(clone(mutant), mutant.case, dtype)
    print(f"{str(dtype)[6:]:9} {mutant} {found}")
    assert set(mutant.fault.rejected_by) <= set(found)
