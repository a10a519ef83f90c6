"""What the tests prove, read from their source: properties, and kernels broken on purpose.

A page names a test or a fault through these functions, so the build stops when one is gone.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[2] / "tests"


@functools.cache
def docstring(name: str) -> str:
    """Return the sentence that a test states, by "sweep::test_sweep"; LookupError if it is gone."""
    module, _, function = name.partition("::")
    path = TESTS / f"test_{module}.py"
    if path.is_file():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return (ast.get_docstring(node) or "").strip()
    raise LookupError(f"there is no test {name}")


class Fault(NamedTuple):
    """Hold one way to break a kernel, what rejects it, and why it happens."""

    name: str
    rejected_by: tuple[str, ...]
    why: str


@functools.cache
def faults() -> tuple[Fault, ...]:
    """Return every fault that the tests plant in the kernels, each name once."""
    found: dict[str, Fault] = {}
    before = ""  # the reason that "the same" in a list refers to
    for path in sorted(TESTS.glob("mutants_*.txt")):
        for paragraph in path.read_text(encoding="utf-8").strip("\n").split("\n\n"):
            head, why, *_ = re.sub(r"\n {8}", " ", paragraph).splitlines()
            name, rejected_by = head.split(" | ")[:2]
            why = why.strip()
            if why.startswith("the same"):
                why = f"{before}; {why}"
            else:
                before = why
            found.setdefault(name, Fault(name, tuple(rejected_by.split()), why))
    if not found:
        raise LookupError(f"no lists of broken kernels in {TESTS}")
    return tuple(found.values())


def fault(name: str) -> str:
    """Return the name of a broken kernel, and refuse one that no test plants any more."""
    if name not in {found.name for found in faults()}:
        raise LookupError(f"no broken kernel is called {name!r}")
    return f"“{name}”"


NAMES = {function.__name__: function for function in (fault, faults)}
