"""The one-tile backward with a chunk of neighbouring rows per program, which the package left.

It is made from the package's own kernel by changes of its text, so that nothing but the walk over
the rows differs: what a measurement of both then shows is the walk's.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

CHANGES = (
    ("def rmsnorm_backward_kernel(", "def chunks_backward_kernel("),
    (
        "    row_step = tl.num_programs(0).to(tl.int64) * ROWS\n",
        """\
    n_tiles = tl.cdiv(tl.cdiv(M, ROWS), tl.num_programs(0))
    first_row = program * n_tiles * ROWS
    last_row = tl.minimum(first_row + n_tiles * ROWS, M)
""",
    ),
    ("tl.range(program * ROWS, M, row_step,", "tl.range(first_row, last_row, ROWS,"),
)


@functools.cache
def kernel() -> Any:
    """Return the changed kernel; its arguments and its grid are those of the package's.

    Raises:
        ValueError: the package's kernel no longer has a text that is to be changed, just once.
    """
    module = import_module("rmsnorm_ref.backward")  # it imports Triton
    text = inspect.getsource(module.rmsnorm_backward_kernel.fn)
    for old, new in CHANGES:
        if text.count(old) != 1:
            raise ValueError(f"rmsnorm_backward_kernel has {old!r} {text.count(old)} times, not 1")
        text = text.replace(old, new)
    # Triton reads a kernel's source from its file, each time that it is compiled anew.
    file = Path(tempfile.mkdtemp(prefix="rmsnorm_ref_chunks_")) / "chunks_kernel.py"
    file.write_text(f"import triton\nimport triton.language as tl\n\n\n{text}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found.chunks_backward_kernel
