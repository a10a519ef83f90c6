"""Audit somebody's RMSNorm kernel: `python -m rmsnorm_ref review file.py:function`, or from Python.

from rmsnorm_ref import review

report = review.review("kernel.py:rmsnorm")     # or a Python function
report.save("report.html")

def test_my_kernel():
    review.assert_passes(my_rmsnorm)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .candidate import load
from .process import Target
from .report import Report
from .rules import RULES, Rule
from .run import Options
from .run import review as _review

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RULES", "Report", "Rule", "assert_passes", "load", "review"]


def review(
    f: str | Callable[..., Any], *, signature: str = "", init: str = "", **options: Any
) -> Report:
    """Review a kernel and return the report.

    Args:
        f: "path/to/file.py:function", "package.module:function", a function or a module class. A
            name is loaded in a fresh process. A function is taken along into a fork; on a machine
            that has a GPU it is called in this process, where a crash is not survived.
        signature: how it is called, such as "w, x, eps"; read from its parameters if empty.
        init: how a module class is made, such as "N, eps=eps".
        options: `device`, `dtypes`, `full`, `bench`, `huge`, `seed`, `strict`, `one_plus_w`,
            `limit_s` (seconds for one input), `progress`, as on the command line.

    Example:
        >>> def half(x, w, eps):
        ...     return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w / 2
        >>> "r-value-y" in review(half, dtypes=("float32",), device="cpu").rules()
        True
    """
    if isinstance(f, str):
        target = Target(f, signature, init)
    else:
        name = getattr(f, "__qualname__", type(f).__name__)
        target = Target(f"{getattr(f, '__module__', '')}:{name}", signature, init, f)
    return _review(Options(target, **options))


def assert_passes(
    f: str | Callable[..., Any], *, allow: tuple[str, ...] = (), **options: Any
) -> None:
    """Raise AssertionError with the findings unless a kernel passes; for a test-suite of your own.

    Args:
        f: as for `review`.
        allow: ids of rules whose breach is known and accepted.
        options: as for `review`; `strict=True` also holds y, dx and dw to one rounding.
    """
    report = review(f, **options)
    if report.rules() - set(allow):
        raise AssertionError(report.text())
