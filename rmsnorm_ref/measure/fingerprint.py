"""A hash of what the kernels compute and how they are launched, blind to how that is written up.

A recording speaks for the code that was timed. Comments, docstrings and layout may change without
a new measurement; anything else in these files may not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from importlib import resources

MODULES = ("forward", "backward", "few_rows", "wide", "tiling", "tuning", "table", "launch")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def fingerprint() -> str:
    """Return the sha256 over the syntax trees of the modules that decide a kernel's time.

    Example:
        >>> len(fingerprint())
        64
    """
    package = resources.files(__package__.rpartition(".")[0])
    digest = hashlib.sha256()
    for name in MODULES:
        source = package.joinpath(f"{name}.py").read_text(encoding="utf-8")
        digest.update(f"{name}\n{canonical(source)}\n".encode())
    return digest.hexdigest()


def canonical(source: str) -> str:
    """Return Python source as one line of nodes, without comments, docstrings or layout.

    Unlike `ast.dump` it is the same for every Python version: fields that are absent or empty are
    left out, so that one which a later version adds changes nothing.
    """
    return _spell(ast.parse(source))


def _spell(node: object) -> str:
    if isinstance(node, list):
        return "[" + ",".join(map(_spell, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    kept = (f"{key}={_spell(v)}" for key, v in fields.items() if v is not None and v != [])
    return f"{type(node).__name__}({','.join(kept)})"
