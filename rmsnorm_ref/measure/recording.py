"""A run of measurements as one JSON file: how it is read, checked and kept.

A file is an object with `schema` (1), `id` (the file's name without .json), `provenance` (on what,
when and from which code) and `rows` (one measurement each). `schema_table()` lists every field and
what it means; `load` checks every one.

Recordings that ship with the package are append-only: a number that was cited stays where it was.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .codec import SchemaError, decode_keys, encode
from .fingerprint import fingerprint
from .schema import (
    Ceiling,
    Clocks,
    Config,
    Provenance,
    Quantiles,
    Row,
    Span,
    checked,
    schema_table,
)

__all__ = [
    "Ceiling",
    "Clocks",
    "Config",
    "Provenance",
    "Quantiles",
    "Recording",
    "Row",
    "SchemaError",
    "Span",
    "fingerprint",
    "from_json",
    "load",
    "name_of",
    "save",
    "schema_table",
    "select",
    "shipped",
    "stale",
    "to_json",
]

SCHEMA = 1
LIVE = "measured now"  # in place of an id, where rows are in no file
_RECORDINGS = resources.files(__package__).joinpath("recordings")


@dataclass(frozen=True)
class Recording:
    """Hold the rows of one run and where they come from."""

    id: str
    provenance: Provenance
    rows: tuple[Row, ...]

    @property
    def live(self) -> bool:
        """Tell whether the rows were measured just now and are in no file."""
        return self.id == LIVE


def load(path_or_id: str | os.PathLike[str]) -> Recording:
    """Read a recording and check every field.

    Args:
        path_or_id: a file, or the id of a recording that ships with the package.

    Raises:
        FileNotFoundError: there is none; the message lists those that ship.
        SchemaError: something in the file is not as the schema says; the message tells where.

    Example:
        >>> all(load(name).rows for name in shipped())
        True
    """
    path = Path(path_or_id)
    if str(path_or_id) in shipped():
        text = _RECORDINGS.joinpath(f"{path_or_id}.json").read_text(encoding="utf-8")
    elif path.is_file():
        text = path.read_text(encoding="utf-8")
    else:
        known = ", ".join(shipped()) or "none"
        raise FileNotFoundError(f"no recording {str(path_or_id)!r}; those that ship: {known}")
    try:
        return from_json(json.loads(text), name_of(path))
    except ValueError as error:
        raise SchemaError(f"{path.name}: {error}") from error


def save(recording: Recording, path: str | os.PathLike[str], *, replace: bool = False) -> None:
    """Write a recording whole or not at all.

    Args:
        recording: its id must be the file's name without .json, and its rows must be valid.
        path: where; the file must not be there yet, for recordings are only ever added.
        replace: overwrite; for the file that a run keeps while it lasts.

    Raises:
        FileExistsError: the file is there.
        SchemaError: the recording is not as the schema says; nothing is written.
    """
    path = Path(path)
    value = to_json(recording)
    from_json(value, name_of(path))
    if path.exists() and not replace:
        raise FileExistsError(f"{path} is there already, and recordings are only ever added")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=1, allow_nan=False)
            stream.write("\n")
        Path(temporary).chmod(0o644)  # mkstemp lets nobody else read it
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def name_of(path: Path) -> str:
    """Return the id that the recording in this file has."""
    return path.name.partition(".json")[0]


def to_json(recording: Recording) -> dict[str, Any]:
    """Return the JSON object of a recording."""
    return {"schema": SCHEMA, **encode(recording)}


def from_json(value: Any, name: str) -> Recording:
    """Return the recording in a JSON object, every field checked; `name` is what its id must be.

    Raises:
        SchemaError: something is not as the schema says; the message tells where.
    """
    if isinstance(value, Mapping) and value.get("schema", SCHEMA) != SCHEMA:
        raise SchemaError(f"schema: this version reads {SCHEMA}, got {value['schema']!r}")
    hints = {"schema": int, "id": str, "provenance": Provenance, "rows": tuple[Row, ...]}
    found = decode_keys(hints, value, "")
    if found["id"] != name:
        raise SchemaError(f"id: {found['id']!r} is in a file called {name!r}")
    rows = tuple(checked(row, f"rows[{i}]") for i, row in enumerate(found["rows"]))
    return Recording(name, found["provenance"], rows)


def shipped() -> list[str]:
    """Return the ids of the recordings that ship with the package, oldest first by name."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in _RECORDINGS.iterdir()
        if entry.name.endswith(".json")
    )


def select(rows: Iterable[Row], **equal: Any) -> list[Row]:
    """Return the rows whose fields equal the given values.

    Args:
        rows: of a recording, or measured now.
        equal: fields by name; a set means "any of these".

    Raises:
        AttributeError: a row has no such field.

    Example:
        >>> select([], kind="kernel", N={2048, 4096})
        []
    """

    def fits(row: Row) -> bool:
        for name, value in equal.items():
            found = getattr(row, name)
            if (found not in value) if isinstance(value, set | frozenset) else (found != value):
                return False
        return True

    return [row for row in rows if fits(row)]


def stale(recording: Recording) -> bool:
    """Tell whether the kernels' code is another one than the recording was made with."""
    return recording.provenance.fingerprint != fingerprint()
