"""The one-tile backward decided otherwise where that is written in the kernel, not in `tiling`.

Each variant is made from the package's own kernel by changes of its text, so that nothing but the
choice differs: what a measurement of both then shows is the choice's.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

Name = Literal["in_chunks", "atomics_per_program", "atomics_per_row"]
STORE = "        tl.store(partial_dw_ptr + program * N + cols, dw_row, mask=col_mask)\n"
CHANGES: dict[Name, tuple[tuple[str, str], ...]] = {
    # One chunk of neighbouring rows per program.
    "in_chunks": (
        (
            "    row_step = tl.num_programs(0).to(tl.int64) * ROWS\n",
            """\
    n_tiles = tl.cdiv(tl.cdiv(M, ROWS), tl.num_programs(0))
    first_row = program * n_tiles * ROWS
    last_row = tl.minimum(first_row + n_tiles * ROWS, M)
""",
        ),
        ("tl.range(program * ROWS, M, row_step,", "tl.range(first_row, last_row, ROWS,"),
    ),
    # The programs add their sums to one row of the buffer, in whatever order they end.
    "atomics_per_program": (
        (STORE, "        tl.atomic_add(partial_dw_ptr + cols, dw_row, mask=col_mask)\n"),
    ),
    # They add each row to it and keep no sum, as a kernel does that has one program per row.
    "atomics_per_row": (
        (
            "        dw += dy * x_hat\n",
            "        tl.atomic_add(partial_dw_ptr + rows * 0 + cols, dy * x_hat, mask=mask)\n",
        ),
        ("        dw_row = tl.sum(dw, axis=0, keep_dims=True)\n", ""),
        (STORE, "        pass\n"),
    ),
}


@functools.cache
def kernel(name: Name) -> Any:
    """Return a changed kernel; its arguments and its grid are those of the package's.

    Raises:
        ValueError: the package's kernel no longer has a text that is to be changed, just once.
    """
    package = import_module("rmsnorm_ref.backward")  # it imports Triton
    text = inspect.getsource(package.rmsnorm_backward_kernel.fn)
    renamed = ("def rmsnorm_backward_kernel(", f"def {name}_kernel(")
    for old, new in (renamed, *CHANGES[name]):
        if text.count(old) != 1:
            raise ValueError(f"rmsnorm_backward_kernel has {old!r} {text.count(old)} times, not 1")
        text = text.replace(old, new)
    # Triton reads a kernel's source from its file, whenever that is compiled.
    file = Path(_folder().name) / f"{name}_kernel.py"
    file.write_text(f"import triton\nimport triton.language as tl\n\n\n{text}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, f"{name}_kernel")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rmsnorm_ref_")  # until the process ends


def build_on_zeros(build: Callable[..., Callable[..., None]]) -> Callable[..., Any]:
    """Return a builder whose launch first sets the row that atomics add to to zero."""

    @functools.wraps(build)
    def building(*args: Any) -> Callable[..., None]:
        launch = build(*args)

        def launch_on_zeros(*arguments: Any) -> None:
            *_, partial_dw, _ = arguments
            partial_dw[0].zero_()
            launch(*arguments)

        return launch_on_zeros

    return building


def build_copy(*_: Any) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Return what stands for the reduction after atomics: the one rounding to dw's dtype."""
    return lambda partial_dw, dw: dw.copy_(partial_dw[0])
