r"""Faults as one-spot changes of our own source, and the means to load a package that has one.

The faults are listed, one paragraph each, in `mutants_forward.txt`, `mutants_backward.txt` (its
formulas, roundings, rows, teams) and `mutants_memory.txt` (its masks, strides, contract):

    name | what rejects it | what it is run on, if not on the kernel's shape in SHAPES
        why this happens in public code
        WHERE: old text => new text

WHERE is a module and a function, or a kernel's short name from KERNELS; several share a change. The
old text occurs exactly once in that function. A line indented further continues the one above, and
\n stands for a new line. What rejects a fault is a bound of the oracle (y, dx, dw), or an exact
property: `dtypes` of results, `inputs` untouched, nothing written `outside`, the bits of a row
`alone`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import rmsnorm_ref

if TYPE_CHECKING:
    from types import ModuleType

DTYPES = {"FP16": torch.float16, "BF16": torch.bfloat16, "FP32": torch.float32}
KERNELS = {
    "FORWARD": "forward.rmsnorm_forward_kernel",
    "WIDE_FORWARD": "wide.wide_forward_kernel",
    "BACKWARD": "backward.rmsnorm_backward_kernel",
    "FEW": "few_rows.few_rows_backward_kernel",
    "WIDE_BACKWARD": "wide.wide_backward_kernel",
    "PART": "wide.part_of_mean",
    "ABSENT": "wide.first_absent",
    "MEAN": "wide.mean_of_parts",
    "REDUCE": "backward.reduce_dw_kernel",
}
# The smallest input (M, N) that reaches a function and can show a fault in it: more than one row,
# masked lanes, and, where a kernel has them, a ragged tile, several chunks, several programs, teams
# of three or more. An odd width keeps few rows out of the kernel that is made for them.
SHAPES = {
    "FORWARD": (3, 17),
    "WIDE_FORWARD": (3, 9000),
    "BACKWARD": (9, 1561),
    "FEW": (7, 40),
    "WIDE_BACKWARD": (8, 17000),
    "PART": (4, 17000),
    "ABSENT": (4, 17000),
    "MEAN": (8, 17000),
    "REDUCE": (9, 513),
    "forward._build": (65, 17),
    "wide.build_forward": (3, 9000),
    "wide.build_backward": (4, 17000),
}
# Read once, so that all clones of a run are of one state.
SOURCE = {p.stem: p.read_text() for p in Path(rmsnorm_ref.__file__).parent.glob("*.py")}


class Case(NamedTuple):
    """Say what a mutant is run on."""

    M: int
    N: int
    scale: float = 1.0
    layout: str = "packed"  # see test_mutants.lay_out
    w: str = ""  # dtype of the weight; empty is that of x
    needs: str = "xw"  # who asks for a gradient
    equal: bool = False  # all x of a row are equal, so that rounding errors do not average out
    unit_w: bool = False  # the weight is all ones
    alone: bool = False  # row 0 is also run by itself
    queued: bool = False  # launched as one, with nothing to compile in between


class Mutant(NamedTuple):
    """Hold one fault planted in one spot."""

    name: str
    rejected_by: tuple[str, ...]
    why: str
    where: str
    old: str
    new: str
    case: Case
    dtypes: tuple[torch.dtype, ...]
    only: str  # "cpu", "cuda", or "cuda-early" (see `tiling.overlaps`): where alone it shows

    def __str__(self) -> str:
        """Name the fault, its place, and what was written there."""
        return f"{self.name}, {self.where}: {' '.join(self.new.split())}"


def read(file: str) -> list[Mutant]:
    """Read every fault of a list, and give a mutant for each of its spots."""
    text = Path(__file__).with_name(file).read_text().replace("\n        ", " ")
    found = []
    for paragraph in text.strip("\n").split("\n\n"):
        head, why, *spots = paragraph.splitlines()
        name, by, *given = head.split(" | ")
        options = dict(option.partition("=")[::2] for option in "; ".join(given).split("; "))
        for spot in spots:
            functions, change = spot[4:].split(": ", 1)
            old, new = change.split(" =>", 1)
            found += [
                make(name, by, why, where, old, new.removeprefix(" "), options)
                for where in functions.split()
            ]
    return found


def make(
    name: str, by: str, why: str, where: str, old: str, new: str, options: dict[str, str]
) -> Mutant:
    """Give the mutant of one spot, on the case that its options name."""
    M, N = SHAPES.get(where, (0, 0))
    case = Case(
        int(options.get("M", M)),
        int(options.get("N", N)),
        float(options.get("scale", 1.0)),
        options.get("layout", "packed"),
        options.get("w", ""),
        options.get("needs", "xw"),
        "equal" in options,
        alone="alone" in options,
        queued="queued" in options,
    )
    dtypes = tuple(DTYPES[dtype] for dtype in options.get("dtypes", " ".join(DTYPES)).split())
    return Mutant(
        name,
        tuple(by.split()),
        why.strip(),
        KERNELS.get(where, where),
        old.replace("\\n", "\n"),
        new.replace("\\n", "\n"),
        case,
        dtypes,
        options.get("only", ""),
    )


def plant(mutant: Mutant) -> str:
    """Return the source of the mutant's module, changed in its one spot."""
    module, function = mutant.where.split(".")
    source = SOURCE[module]
    node = next(n for n in ast.parse(source).body if getattr(n, "name", "") == function)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    lines = source.splitlines(keepends=True)
    text = "".join(lines[node.lineno - 1 : node.end_lineno])
    assert text.count(mutant.old) == 1, f"{mutant.where} has {mutant.old!r} other than once"
    assert mutant.old != mutant.new
    before, after = lines[: node.lineno - 1], lines[node.end_lineno :]
    return "".join([*before, text.replace(mutant.old, mutant.new), *after])


_numbers = itertools.count()


def load(folder: Path, mutant: Mutant | None) -> ModuleType:
    """Write a copy of the package, with the mutant in it if there is one, and import it.

    The copy has a name of its own, so that its kernels and operators are its own. Triton reads the
    source of a kernel from its file.
    """
    name = f"rmsnorm_ref_clone_{next(_numbers)}"
    path = folder / name
    path.mkdir()
    for module, source in SOURCE.items():
        changed = mutant is not None and mutant.where.startswith(f"{module}.")
        text = plant(mutant) if changed and mutant else source
        # An operator's name is global to the process, and the real one must stay as it is.
        (path / f"{module}.py").write_text(text.replace("rmsnorm_ref::", f"{name}::"))
    spec = importlib.util.spec_from_file_location(
        name, path / "__init__.py", submodule_search_locations=[str(path)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    # The shipped table: a search for every mutant would take minutes, and moves no more than bits.
    importlib.import_module(f"{name}.tuning").set_mode("fixed")
    # The fences are a dispatch mode, which would be shown one operator and no allocation.
    importlib.import_module(f"{name}.autograd")._through_dispatcher = lambda *_: False
    return package


def forget(package: Any) -> None:
    """Take a clone out of the modules that Python keeps."""
    for name in [n for n in sys.modules if n.split(".")[0] == package.__name__]:
        del sys.modules[name]


FORWARD_MUTANTS = read("mutants_forward.txt")
BACKWARD_MUTANTS = read("mutants_backward.txt") + read("mutants_memory.txt")
