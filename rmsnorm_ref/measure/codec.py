"""Frozen dataclasses to JSON and back, every value checked against its annotation.

A recording is read years after it was written, maybe by hand. So what is wrong in one is told by
where it is: "rows[3].time_s.p50: expected a number, got null".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_SCALARS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


class SchemaError(ValueError):
    """Say where a recording breaks its schema, and how."""


def json_name(field_name: str) -> str:
    """Return a field's key in JSON: `pass_` is "pass", which Python keeps for itself."""
    return field_name.rstrip("_")


def encode(value: Any) -> Any:
    """Return what `json.dumps` takes for a dataclass, and for all that it holds."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {json_name(f.name): encode(getattr(value, f.name)) for f in fields}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def decode(hint: Any, value: Any, where: str) -> Any:
    """Return a JSON value as its annotation says it is.

    Args:
        hint: a dataclass, or an annotation made of str, bool, int, float, None, Literal, unions,
            `tuple[X, ...]`, `Mapping[str, X]` and Any.
        value: what `json.load` returned.
        where: the value's place, for the message.

    Raises:
        SchemaError: the value is not what the annotation says.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _decode_fields(hint, value, where)
    if origin in {Union, types.UnionType}:
        return _decode_union(arguments, value, where)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            raise SchemaError(f"{where}: expected one of {list(arguments)}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise SchemaError(f"{where}: expected a list, got {value!r}")
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise SchemaError(f"{where}: expected an object, got {value!r}")
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return _decode_scalar(hint, value, where)


def decode_keys(hints: Mapping[str, Any], value: Any, where: str) -> dict[str, Any]:
    """Return a JSON object that has exactly the keys of `hints`, each as annotated there."""
    prefix = f"{where}." if where else ""
    if not isinstance(value, Mapping):
        raise SchemaError(f"{where}: expected an object, got {value!r}")
    missing, unknown = sorted(hints.keys() - value.keys()), sorted(value.keys() - hints.keys())
    for problem, names in (("is missing", missing), ("is no field of the schema", unknown)):
        if names:
            raise SchemaError(f"{prefix}{names[0]}: {problem}")
    return {key: decode(hint, value[key], f"{prefix}{key}") for key, hint in hints.items()}


@functools.cache
def _fields(record: type) -> tuple[dict[str, str], dict[str, Any]]:
    """Return {JSON key: field name} and {JSON key: annotation}; resolving those takes a while."""
    hints = get_type_hints(record)
    names = {json_name(field.name): field.name for field in dataclasses.fields(record)}
    return names, {key: hints[name] for key, name in names.items()}


def _decode_fields(hint: Any, value: Any, where: str) -> Any:
    names, hints = _fields(hint)
    found = decode_keys(hints, value, where)
    return hint(**{names[key]: item for key, item in found.items()})


def _decode_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    hints = [argument for argument in arguments if argument is not type(None)]
    if len(hints) == 1:
        return decode(hints[0], value, where)
    for hint in hints:  # scalars: the first that fits
        with contextlib.suppress(SchemaError):
            return decode(hint, value, where)
    expected = " or ".join(_SCALARS[hint] for hint in hints)
    raise SchemaError(f"{where}: expected {expected}, got {value!r}")


def _decode_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:  # checked elsewhere, by what stands beside it
        return value
    accepted = (int, float) if hint is float else hint
    wrong = not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool)
    if wrong or (isinstance(value, float) and not math.isfinite(value)):
        raise SchemaError(f"{where}: expected {_SCALARS[hint]}, got {value!r}")
    return float(value) if hint is float else value
