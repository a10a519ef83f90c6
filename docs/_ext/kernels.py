"""The reference of the kernels: arguments from their source, bytes from `traffic.py`.

Nothing is retyped. `{kernel-arguments} forward.py rmsnorm_forward_kernel` reads the comments that
stand above a kernel's parameters; `{kernel-bytes} forward` takes the steps of the byte model and
writes each size as a formula, found by evaluating the model at two choices of dtypes.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sphinx.util.docutils import SphinxDirective
from tables import table

import rmsnorm_ref
from rmsnorm_ref import tiling, traffic

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

    from rmsnorm_ref.steps import Step

PACKAGE = Path(rmsnorm_ref.__file__).parent
KINDS = {"": "scalar", "tl.int64": "64-bit integer", "tl.constexpr": "compile-time constant"}
ROLES = {
    "obligatory": "headline",
    "small": "total",
    "reread": "read from HBM again",
    "cached": "read again, from a cache",
    "scratch": "scratch, per program",
}


class Argument(NamedTuple):
    """One parameter of a kernel."""

    name: str
    kind: str
    meaning: str


def arguments(source: str, name: str) -> list[Argument]:
    """Return the parameters of a kernel; the comment above a parameter holds until the next one.

    Raises:
        LookupError: there is no such kernel, or its first parameter has no comment.
    """
    lines = source.splitlines()
    kernel = next(
        (
            n
            for n in ast.walk(ast.parse(source))
            if isinstance(n, ast.FunctionDef) and n.name == name
        ),
        None,
    )
    if kernel is None:
        raise LookupError(f"no kernel is called {name}")
    found, comment, seen = [], "", kernel.lineno
    for parameter in kernel.args.args:
        between = lines[seen : parameter.lineno - 1]
        above = [line.strip().removeprefix("#").strip() for line in between if "#" in line]
        comment, seen = " ".join(above) or comment, max(seen, parameter.lineno)
        if not comment:
            raise LookupError(f"{name}: no comment above {parameter.arg}")
        annotation = ast.unparse(parameter.annotation) if parameter.annotation else ""
        pointer = parameter.arg.endswith("_ptr")
        found.append(Argument(parameter.arg, "pointer" if pointer else KINDS[annotation], comment))
    return found


class ArgumentsDirective(SphinxDirective):
    """Tabulate the parameters of a kernel."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Return the table; parameters under one comment share a row."""
        file, name = self.arguments
        self.env.note_dependency(str(PACKAGE / file))
        rows: list[list[str]] = []
        for each in arguments((PACKAGE / file).read_text(encoding="utf-8"), name):
            if rows and rows[-1][1:] == [each.kind, each.meaning]:
                rows[-1][0] += f", `{each.name}`"
            else:
                rows.append([f"`{each.name}`", each.kind, each.meaning])
        return [table(f"Arguments of `{name}`", ("Argument", "Kind", "What it is"), rows)]


# A shape at which each path is taken, both counts prime or nearly so: that no two formulas of the
# table below give the same number there.
SHAPES = {
    "forward": (1009, 4093),
    "wide_forward": (1009, 10007),
    "backward": (1009, 4093),
    "few_rows_backward": (509, 8 * 509),
    "wide_backward": (1009, 20011),
    "column_backward": (1009, 40009),
}


def steps(path: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> tuple[Step, ...]:
    """Return the steps of a path at its shape; the shape must lead there."""
    M, N = SHAPES[path]
    if path.endswith("forward"):
        assert tiling.forward_path(N) == path
        return traffic.forward(M, N, x_dtype, w_dtype).steps
    assert tiling.backward_path(M, N, traffic.GPU) == path
    return traffic.backward(M, N, x_dtype, w_dtype).steps


def size(one: Step, other: Step, M: int, N: int) -> str:
    """Write a step's bytes as a formula: `one` is fp16 with an fp32 weight, `other` the reverse."""
    count = {M * N: "M·N", M: "M", N: "N"}[one.n_elements]
    widths = (one.n_bytes // one.n_elements, other.n_bytes // other.n_elements)
    return f"{count}·" + {(2, 4): "e", (4, 2): "e_w", (4, 4): "4"}[widths]


def times(step: Step, path: str, M: int, N: int) -> str:
    """Write how often all programs together ask for a tensor."""
    tile = tiling.backward_tile(min(N, tiling.ONE_TILE_MAX))
    dw_cols = tiling.dw_cols(traffic.GPU)
    known: dict[int | None, str] = {
        None: "P",
        1: "1",
        M: "M",
        2 * M: "2·M",
        -(-N // tiling.COLUMN_BLOCK): f"⌈N / {tiling.COLUMN_BLOCK}⌉",
    }
    if path == "few_rows_backward":
        known = {None: "P", 1: "1", -(-M // tile.rows): "⌈M / ROWS⌉"}
        known[1 + -(-N // dw_cols)] = f"1 + ⌈N / {dw_cols}⌉"
    return known[step.repeats]


class BytesDirective(SphinxDirective):
    """Tabulate what one path moves, by the byte model."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        path = self.arguments[0]
        M, N = SHAPES[path]
        pairs = zip(
            steps(path, torch.float16, torch.float32),
            steps(path, torch.float32, torch.float16),
            strict=True,
        )
        rows = [
            (
                f"`{one.kernel}`",
                f"`{one.tensor}`",
                one.access,
                size(one, other, M, N),
                times(one, path, M, N),
                ROLES[one.role],
            )
            for one, other in pairs
        ]
        head = ("Kernel", "Tensor", "Access", "Bytes", "Asked for", "Counted as")
        return [table(f"Bytes of the path `{path}`", head, rows)]


def ranges() -> list[tuple[str, str, str, str]]:
    """Return (columns, forward, backward, backward of few rows) for all widths, by `tiling.py`."""
    many = 2**40
    found: list[tuple[int, int, tuple[str, str, str]]] = []
    for N in range(1, tiling.LARGEST_N + 1):
        several = "several rows to a tile" if tiling.forward_tile(N).rows > 1 else ""
        paths = (
            f"`{tiling.forward_path(N)}`" + (several and f", {several}"),
            f"`{tiling.backward_path(many, N, traffic.GPU)}`",
            f"`{tiling.backward_path(1, -(-N // 8) * 8, traffic.GPU)}`",
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
        head = ("Columns N", "Forward", "Backward", "Backward, few rows, N % 8 = 0")
        return [table("The path of each width", head, ranges())]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("kernel-arguments", ArgumentsDirective)
    app.add_directive("kernel-bytes", BytesDirective)
    app.add_directive("paths", PathsDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
