"""The reference of the kernels: arguments from their source, bytes from `traffic.py`.

`{kernel-arguments} forward.py rmsnorm_forward_kernel` reads the parameters from the source;
`{kernel-bytes} forward` takes the steps of the byte model and writes each size as a formula, found
by evaluating the model at two choices of dtypes. Nothing can differ from the code in silence.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from blocks import table
from sphinx.util.docutils import SphinxDirective

import rmsnorm_ref
from rmsnorm_ref import tiling, traffic

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

    from rmsnorm_ref.steps import Step

PACKAGE = Path(rmsnorm_ref.__file__).parent
KINDS = {"": "scalar", "tl.int64": "64-bit integer", "tl.constexpr": "compile-time constant"}
# A name means the same in every kernel. One that is not here stops the build.
MEANINGS = {
    "x_ptr": "x [M, N] in its storage dtype, unit column stride",
    "dy_ptr": "dy [M, N] in the dtype of x, unit column stride; never written to",
    "w_ptr": "w [N], packed, in a dtype of its own",
    "y_ptr": "y [M, N] in the dtype of x, packed",
    "rstd_ptr": "rstd [M] in fp32: the forward writes it, the backward reads it",
    "parts_ptr": "parts [M, MEMBERS], fp32 as the bits of int32: each program's part of "
    "mean(dyw * x_hat); `None` where dx is not asked for",
    "dx_ptr": "dx [M, N] in the dtype of x, packed; `None` where it is not asked for",
    "partial_dw_ptr": "partial_dw [n_programs, N] in fp32; `None` where dw is not asked for",
    "dw_ptr": "dw [N] in the dtype of w; `None` where it is not asked for",
    "x_row_stride": "elements from one row of x to the next, a multiple of ROW_ALIGN",
    "dy_row_stride": "elements from one row of dy to the next, a multiple of ROW_ALIGN",
    "M": "rows",
    "N": "elements of a row",
    "eps": "added to the mean square, inside the root",
    "n_programs": "rows of the partial buffer",
    "dw_programs": "how many programs own columns of dw",
    "pairs": "how many programs of each kind take turns, before the others",
    "BLOCK_SIZE": "lanes of a row's tile: next_power_of_2(N)",
    "ROWS": "rows in a tile; in the reduction, partial rows added per step",
    "ROW_ALIGN": "a power of two that divides N and every row stride",
    "CHUNK": "columns per step",
    "COLS": "columns that a program owns",
    "LANES": "lanes for those columns: next_power_of_2(COLS)",
    "MEMBERS": "programs that share a row",
    "PATIENCE": "looks at an absent part before it is made",
    "THREADS": "threads of a program, or more",
    "DW_ROWS": "rows that a program of dw adds per step",
    "DW_COLS": "columns that a program of dw owns",
    "DW_STAGES": "steps of dw in flight, this one included",
    "OVERLAP": "whether the second kernel is put in place while the first still runs",
    "NUM_STAGES": "steps of the loop in flight, this one included",
    "EVICTION": "L2 policy of x and y; it follows the size of x and changes no bit",
}
ROLES = {
    "obligatory": "headline",
    "small": "total",
    "cached": "read again, from a cache",
    "scratch": "scratch, per program",
}


class Argument(NamedTuple):
    """One parameter of a kernel."""

    name: str
    kind: str
    meaning: str


def arguments(source: str, name: str) -> list[Argument]:
    """Return the parameters of a kernel, from its source.

    Raises:
        KeyError: there is no such kernel, or `MEANINGS` does not know a parameter.
    """
    functions = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    found = []
    for parameter in functions[name].args.args:
        annotation = ast.unparse(parameter.annotation) if parameter.annotation else ""
        kind = "pointer" if parameter.arg.endswith("_ptr") else KINDS[annotation]
        found.append(Argument(parameter.arg, kind, MEANINGS[parameter.arg]))
    return found


class ArgumentsDirective(SphinxDirective):
    """Tabulate the parameters of a kernel, in their order."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        file, name = self.arguments
        self.env.note_dependency(str(PACKAGE / file))
        found = arguments((PACKAGE / file).read_text(encoding="utf-8"), name)
        rows = [(f"`{each.name}`", each.kind, each.meaning) for each in found]
        return [table(f"Arguments of `{name}`", ("Argument", "Kind", "What it is"), rows)]


# A shape at which each path is taken, both counts prime or nearly so: that no two formulas of the
# table below give the same number there.
SHAPES = {
    "forward": (1009, 4093),
    "wide_forward": (1009, 10007),
    "backward": (1009, 4093),
    "few_rows_backward": (509, 8 * 113),
    "wide_backward": (1009, 20011),
}


def dtypes(path: str) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    """Return two pairs of dtypes of x and w that tell formulas apart; few rows take one size."""
    if path == "few_rows_backward":
        return (torch.float16, torch.float16), (torch.float32, torch.float32)
    return (torch.float16, torch.float32), (torch.float32, torch.float16)


def steps(path: str) -> list[tuple[Step, Step]]:
    """Return the steps of a path at its shape, in either pair of dtypes; they must lead there."""
    M, N = SHAPES[path]
    count = traffic.forward if path.endswith("forward") else traffic.backward
    one, other = (count(M, N, *pair).steps for pair in dtypes(path))
    assert path in {step.kernel for step in one}
    return list(zip(one, other, strict=True))


def size(one: Step, other: Step, M: int, N: int) -> str:
    """Write a step's bytes as a formula, from the step in either pair of `dtypes`."""
    members = tiling.team(N, traffic.GPU).members
    count = {M * members: "M·MEMBERS", M * N: "M·N", M: "M", N: "N"}[one.n_elements]
    widths = (one.n_bytes // one.n_elements, other.n_bytes // other.n_elements)
    if widths == (4, 4):
        return f"4·{count}"
    assert set(widths) == {2, 4}
    return f"{count}·e_w" if one.tensor in {"w", "dw"} else f"{count}·e"


def times(step: Step, path: str, M: int, N: int) -> str:
    """Write how often all programs together ask for a tensor."""
    known: dict[int | None, str] = {None: "P", 1: "once", M: "M", 2 * M: "2·M"}
    if path == "wide_backward":
        members = tiling.team(N, traffic.GPU).members
        known |= {members: "MEMBERS", 2 * members: "2·MEMBERS"}
    if path == "few_rows_backward":
        known[None] = "⌈M / ROWS⌉"
        known[1 + -(-N // tiling.dw_cols(M, N, traffic.GPU))] = "1 + ⌈N / DW_COLS⌉"
    return known[step.repeats]


class BytesDirective(SphinxDirective):
    """Tabulate what one path moves, by the byte model."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        path = self.arguments[0]
        M, N = SHAPES[path]
        rows = [
            (
                f"`{one.kernel}`",
                f"`{one.tensor}`",
                one.access,
                size(one, other, M, N),
                times(one, path, M, N),
                ROLES[one.role],
            )
            for one, other in steps(path)
        ]
        head = ("Kernel", "Tensor", "Access", "Bytes", "Asked for", "Counted as")
        return [table(f"Bytes of the path `{path}`", head, rows, classes=("made", "bytes"))]


def ranges() -> list[tuple[str, str, str, str]]:
    """Return (columns, forward, backward, backward of few rows) for all widths, by `tiling.py`."""
    many = 2**40
    found: list[tuple[int, int, tuple[str, str, str]]] = []
    for N in range(1, tiling.LARGEST_N + 1):
        several = "several rows to a tile" if tiling.forward_tile(N).rows > 1 else ""
        paths = (
            f"`{tiling.forward_path(N)}`" + (several and f", {several}"),
            f"`{tiling.backward_path(many, N, traffic.GPU, torch.bfloat16)}`",
            f"`{tiling.backward_path(1, -(-N // 8) * 8, traffic.GPU, torch.bfloat16)}`",
        )
        if found and found[-1][2] == paths:
            found[-1] = (found[-1][0], N, paths)
        else:
            found.append((N, N, paths))
    return [(f"{first} to {last}", *paths) for first, last, paths in found]


class PathsDirective(SphinxDirective):
    """Tabulate which kernel serves which width."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        head = ("Columns N", "Forward", "Backward", "Backward, few rows")
        return [table("The path of each width", head, ranges())]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("kernel-arguments", ArgumentsDirective)
    app.add_directive("kernel-bytes", BytesDirective)
    app.add_directive("paths", PathsDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
