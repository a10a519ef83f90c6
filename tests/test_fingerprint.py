"""What the fingerprint of the kernels' code sees, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmsnorm_ref.measure import fingerprint

PACKAGE = Path(fingerprint.__file__).parents[1]

SOURCE = '''
"""A module."""
import os

def f(x: int, *, scale=1.5) -> str:
    """Say it."""
    # because
    return f"{x!r}: {scale:.2f}" + "b" if x else os.sep

class C:
    """Hold."""
    y = [1, None, 2.5e-3, ...]
'''


def test_fingerprint_is_blind_to_prose() -> None:
    """Comments, docstrings, quotes and line breaks change nothing."""
    prose = SOURCE.replace("A module.", "Another.").replace("because", "why").replace('"b"', "'b'")
    prose = prose.replace("Say it.", "Say\n    it.").replace("[1, None,", "[\n        1,\n None,")
    prose = prose.replace('    """Hold."""\n', "")
    assert prose != SOURCE
    assert fingerprint.canonical(prose) == fingerprint.canonical(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1.5", "1.25"),
        ("scale=", "size="),
        ("if x", "if not x"),
        ("!r", "!s"),
        ("2.5e-3", "2.5e-4"),
    ],
)
def test_fingerprint_sees_code(old: str, new: str) -> None:
    """A constant, a name, an operator or a format that differs is another code."""
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert fingerprint.canonical(changed) != fingerprint.canonical(SOURCE)


def test_fingerprint_is_the_same_on_every_python() -> None:
    """The canonical text is pinned: syntax trees differ between versions, this must not."""
    assert fingerprint.canonical('def f(a):\n    "doc"\n    return f"{a}-" * 2') == (
        "Module(body=[FunctionDef(name='f',args=arguments(args=[arg(arg='a')]),body=[Return(value="
        "BinOp(left=JoinedStr(values=[FormattedValue(value=Name(id='a',ctx=Load()),conversion=-1),"
        "Constant(value='-')]),op=Mult(),right=Constant(value=2)))])])"
    )


def test_fingerprint_covers_every_kernel() -> None:
    """No file of the package that holds a kernel or a launch is left out."""
    with_kernels = {
        path.stem for path in PACKAGE.glob("*.py") if "\n@triton.jit" in path.read_text()
    }
    assert with_kernels
    assert with_kernels | {"launch", "table", "tiling", "tuning"} == set(fingerprint.MODULES)
