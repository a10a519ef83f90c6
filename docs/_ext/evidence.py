"""What prose may say in numbers: read from the shipped recordings or computed from the package.

The `fact` role evaluates an expression over the names of `NAMESPACE`. A function here returns a
`Fact`: a text, and the recording it was read from, so that a page can link a number to its
evidence. Nothing is typed in by hand, and a number whose cell was not recorded stops the build.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import rmsnorm_ref
from rmsnorm_ref import check, oracle, tiling, traffic, tuning
from rmsnorm_ref.measure import recording

if TYPE_CHECKING:
    from rmsnorm_ref.measure.recording import Recording, Row


class Fact(NamedTuple):
    """Hold a number as it is printed, and the id of the recording behind it."""

    text: str
    recording: str


@functools.cache
def recordings() -> tuple[Recording, ...]:
    """Return all shipped recordings, the newest first."""
    loaded = [recording.load(name) for name in recording.shipped()]
    return tuple(sorted(loaded, key=lambda found: found.provenance.date, reverse=True))


def newest(**equal: Any) -> Recording:
    """Return the newest recording that has a row with these fields, say section="seed"."""
    for found in recordings():
        if recording.select(found.rows, **equal):
            return found
    raise LookupError(f"no shipped recording has a row with {equal}")


def one(**equal: Any) -> tuple[Row, str]:
    """Return the row with these fields from the newest recording that has one, and its id."""
    found = newest(**equal)
    return recording.select(found.rows, **equal)[0], found.id


def cell(contender: str, pass_: str, M: int, N: int, dtype: str = "bfloat16") -> tuple[Row, str]:
    """Return the kernel row of one cell."""
    return one(kind="kernel", contender=contender, pass_=pass_, M=M, N=N, dtype=dtype)


def us(contender: str, pass_: str, M: int, N: int, dtype: str = "bfloat16") -> Fact:
    """Return the median kernel time in microseconds, three digits."""
    row, source = cell(contender, pass_, M, N, dtype)
    assert row.time_s is not None
    return Fact(f"{row.time_s.p50 * 1e6:.3g} µs", source)


def share(contender: str, pass_: str, M: int, N: int, dtype: str = "bfloat16") -> Fact:
    """Return the share of the ceiling that a cell reaches, in whole per cent."""
    row, source = cell(contender, pass_, M, N, dtype)
    assert row.time_s is not None
    assert row.ceiling is not None
    return Fact(f"{100 * row.ceiling.time_s / row.time_s.p50:.0f} %", source)


def bandwidth(contender: str, pass_: str, M: int, N: int, dtype: str = "bfloat16") -> Fact:
    """Return the effective bandwidth of a cell in TB/s."""
    row, source = cell(contender, pass_, M, N, dtype)
    assert row.time_s is not None
    assert row.obligatory_bytes is not None
    per_s = traffic.effective_bandwidth(row.obligatory_bytes, row.time_s.p50)
    return Fact(f"{per_s / 1e12:.2f} TB/s", source)


def speedup(other: str, pass_: str, M: int, N: int, dtype: str = "bfloat16") -> Fact:
    """Return how many times as long as ours another contender takes."""
    ours, source = cell("ours", pass_, M, N, dtype)
    theirs = recording.select(
        recording.load(source).rows,
        kind="kernel", contender=other, pass_=pass_, M=M, N=N, dtype=dtype,
    )  # fmt: skip
    if not theirs:
        raise LookupError(f"{source} has no row of {other} for {pass_} {M} x {N} {dtype}")
    assert ours.time_s is not None
    assert theirs[0].time_s is not None
    return Fact(f"{theirs[0].time_s.p50 / ours.time_s.p50:.2f}", source)


def n(value: float, digits: int = 3) -> str:
    """Print a computed number in so many significant digits, integers with thin spaces."""
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    return f"{value:.{digits}g}"


def percent(value: float) -> str:
    """Print a computed ratio in whole per cent."""
    return f"{100 * value:.0f} %"


def gpu(**equal: Any) -> Fact:
    """Return the GPU of the newest recording that has a row with these fields."""
    found = newest(**equal)
    return Fact(found.provenance.gpu, found.id)


# What an expression may use: the functions above, the package's two models and its constants.
NAMESPACE: dict[str, Any] = {
    "us": us,
    "share": share,
    "bandwidth": bandwidth,
    "speedup": speedup,
    "n": n,
    "percent": percent,
    "one": one,
    "newest": newest,
    "Fact": Fact,
    "traffic": traffic,
    "tiling": tiling,
    "tuning": tuning,
    "oracle": oracle,
    "check": check,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "min": min,
    "max": max,
    "len": len,
    "finfo": torch.finfo,
    "gpu": gpu,
    "version": rmsnorm_ref.__version__,
}
