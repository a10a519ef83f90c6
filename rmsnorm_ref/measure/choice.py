"""Which recording speaks for a number, where several hold it: one rule for pages and figures.

1. A recording of the kernels as they are in this tree comes before one of kernels that changed.
2. Then the one with the most of the rows that are asked for, those of all contenders counted,
   whoever is asked for: neither a sample of the cells nor a run without peers hides a full one,
   and ours and a peer's are read from the same.
3. Then the newest.

So a new recording takes over wherever it should, and nothing that shows numbers names a file.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from . import recording

if TYPE_CHECKING:
    from .recording import Recording, Row


@functools.cache
def shipped() -> tuple[Recording, ...]:
    """Read all recordings that ship with the package, the newest first."""
    found = [recording.load(name) for name in recording.shipped()]
    return tuple(sorted(found, key=lambda each: each.provenance.date, reverse=True))


def ranked(**equal: Any) -> list[Recording]:
    """Return the recordings that have rows with these fields, the one to be believed first.

    Args:
        equal: fields by name, as `recording.select` takes them.

    Example:
        >>> [each.id for each in ranked(section="seed")] != []
        True
    """
    anyones = {name: value for name, value in equal.items() if name != "contender"}
    n_rows = {each.id: len(recording.select(each.rows, **anyones)) for each in shipped()}
    having = [each for each in shipped() if recording.select(each.rows, **equal)]
    return sorted(having, key=lambda each: (recording.stale(each), -n_rows[each.id]))


def picked(**equal: Any) -> tuple[list[Row], Recording]:
    """Return the rows with these fields from the recording to be believed, and that recording.

    Raises:
        LookupError: no recording has such a row.

    Example:
        >>> rows, source = picked(kind="kernel", section="seed", contender="ours")
        >>> {row.contender for row in rows}, source.id in recording.shipped()
        ({'ours'}, True)
    """
    found = ranked(**equal)
    if not found:
        raise LookupError(f"no shipped recording has a row with {equal}")
    return recording.select(found[0].rows, **equal), found[0]
