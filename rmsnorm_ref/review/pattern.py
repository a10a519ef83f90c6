"""In which shapes a fault shows: the first simple sentence that parts failing from passing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cases import Case

_EACH: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    ("N is no power of two", lambda c: c.N & (c.N - 1) != 0),
    ("N is a power of two", lambda c: c.N & (c.N - 1) == 0),
    ("N is odd", lambda c: c.N % 2 == 1),
    *((f"N is no multiple of {k}", lambda c, k=k: c.N % k != 0) for k in (4, 8, 16, 32, 64, 128)),
    *((f"N is a multiple of {k}", lambda c, k=k: c.N % k == 0) for k in (8, 64, 128, 256)),
    *((f"M is no multiple of {k}", lambda c, k=k: c.M % k != 0) for k in (2, 4, 8, 16, 32)),
    *((f"M is a multiple of {k}", lambda c, k=k: c.M % k == 0) for k in (2, 4, 8, 16, 32)),
)  # fmt: skip


def tell(failing: list[Case], passing: list[Case]) -> str:  # noqa: PLR0911  # a sentence each
    """Return where a fault shows, in words; the cases differ in shape and dtype alone."""
    if not failing:
        return ""
    total = len(failing) + len(passing)
    if not passing:
        return f"in all {total} shapes of the sweep"
    count = f"in {len(failing)} of {total} shapes and dtypes of the sweep"
    dtypes = sorted({case.dtype for case in failing})
    others = [case for case in passing if case.dtype in dtypes]
    if len(dtypes) < len({case.dtype for case in (*failing, *passing)}):
        count += f", all of them in {' and '.join(dtypes)}"
        if not others:
            return count
    found = _threshold(failing, others) or next(
        (text for text, holds in _EACH if all(map(holds, failing)) and not any(map(holds, others))),
        "",
    )
    if found:
        return f"{count}: exactly where {found}"
    for name in ("N", "M"):
        values = {getattr(case, name) for case in failing}
        if len(values) == 1 and not any(getattr(case, name) in values for case in others):
            return f"{count}: only at {name} = {values.pop()}"
    if len({(case.M, case.N) for case in failing}) == 1:
        return f"{count}: only at [{failing[0].M}, {failing[0].N}]"
    return f"{count}, N from {min(c.N for c in failing)} to {max(c.N for c in failing)}"


def _threshold(failing: list[Case], passing: list[Case]) -> str:
    """Tell whether all that fail lie above, or below, all that pass."""
    if len(failing) < 2 or not passing:
        return ""
    for name in ("N", "M"):
        bad = [getattr(case, name) for case in failing]
        good = [getattr(case, name) for case in passing]
        if min(bad) > max(good):
            return f"{name} is above {max(good)}" + _gap(max(good), min(bad))
        if max(bad) < min(good):
            return f"{name} is below {min(good)}" + _gap(max(bad), min(good))
    return ""


def _gap(below: int, above: int) -> str:
    """Say between which two the edge lies, where they are no neighbours."""
    return f" (the edge lies between {below} and {above})" if above - below > 1 else ""
