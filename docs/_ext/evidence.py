"""What prose may say in numbers: read from the shipped recordings or computed from the package.

The `fact` role evaluates an expression over the names of `NAMESPACE`. A function here returns a
`Fact`: a text, and the recording it was read from, so that a page can link a number to its
evidence. Nothing is typed in by hand, and a number whose cell was not recorded stops the build.
Which of several recordings a number is read from, `rmsnorm_ref.measure.choice` decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import rmsnorm_ref
from rmsnorm_ref import check, oracle, tiling, traffic, tuning
from rmsnorm_ref.measure import choice, recording
from rmsnorm_ref.measure.cells import CELL_SECTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rmsnorm_ref.measure.recording import Recording, Row


SUPERSCRIPTS = str.maketrans(
    "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)


class Fact(NamedTuple):
    """Hold a number as it is printed, and the id of the recording behind it."""

    text: str
    recording: str


def one(**equal: Any) -> tuple[Row, str]:
    """Return the first row with these fields and the id of its recording."""
    rows, source = choice.picked(**equal)
    return rows[0], source.id


def cell(
    contenders: Sequence[str], pass_: str, M: int, N: int, dtype: str
) -> tuple[list[Row], Recording]:
    """Return one cell's kernel rows, and their recording: the one whose table has the cell.

    A cell may be in several sections. The seed's comes first, so prose and tables agree.

    Raises:
        LookupError: no section of a recording has all of these contenders there.
    """
    run = {"kind": "kernel", "pass_": pass_, "dtype": dtype}
    places = [(name, each) for name in CELL_SECTIONS for each in choice.ranked(section=name, **run)]
    for section, each in sorted(places, key=lambda place: recording.stale(place[1])):
        found = recording.select(each.rows, section=section, M=M, N=N, **run)
        rows: dict[str, Row] = {row.contender: row for row in found}
        if rows.keys() >= set(contenders):
            return [rows[name] for name in contenders], each
    raise LookupError(f"no shipped recording has {contenders} at {M} x {N} {dtype} {pass_}")


def us(contender: str, pass_: str, M: int, N: int, dtype: str = "bfloat16") -> Fact:
    """Return the median kernel time in microseconds, three digits."""
    (row,), source = cell([contender], pass_, M, N, dtype)
    assert row.time_s is not None
    return Fact(micro(row.time_s.p50), source.id)


def micro(time_s: float) -> str:
    """Print a time in microseconds with three digits, the last one even if it is 0."""
    return f"{f'{1e6 * time_s:#.3g}'.rstrip('.')} µs"


def share(contender: str, pass_: str, M: int, N: int, dtype: str = "bfloat16") -> Fact:
    """Return the share of the ceiling that a cell reaches, in whole per cent."""
    (row,), source = cell([contender], pass_, M, N, dtype)
    assert row.time_s is not None
    assert row.ceiling is not None
    return Fact(f"{100 * row.ceiling.time_s / row.time_s.p50:.0f} %", source.id)


def bandwidth(contender: str, pass_: str, M: int, N: int, dtype: str = "bfloat16") -> Fact:
    """Return the effective bandwidth of a cell in TB/s."""
    (row,), source = cell([contender], pass_, M, N, dtype)
    assert row.time_s is not None
    assert row.obligatory_bytes is not None
    per_s = traffic.effective_bandwidth(row.obligatory_bytes, row.time_s.p50)
    return Fact(f"{per_s / 1e12:.2f} TB/s", source.id)


def speedup(other: str, pass_: str, M: int, N: int, dtype: str = "bfloat16") -> Fact:
    """Return how many times as long as ours another contender takes."""
    (ours, theirs), source = cell(["ours", other], pass_, M, N, dtype)
    assert ours.time_s is not None
    assert theirs.time_s is not None
    return Fact(f"{theirs.time_s.p50 / ours.time_s.p50:.2f}", source.id)


def n(value: float, digits: int = 3) -> str:
    """Print a computed number in so many significant digits, integers with thin spaces."""
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    digit, _, power = f"{value:.{digits}g}".partition("e")
    return f"{digit} \u00d7 10{str(int(power)).translate(SUPERSCRIPTS)}" if power else digit


def percent(value: float, digits: int = 0) -> str:
    """Print a computed ratio in per cent, whole ones unless decimals are asked for."""
    return f"{100 * value:.{digits}f} %"


def gpu(contender: str, pass_: str, M: int, N: int, dtype: str = "bfloat16") -> Fact:
    """Return the GPU that a cell was measured on."""
    _, source = cell([contender], pass_, M, N, dtype)
    return Fact(source.provenance.gpu, source.id)


# What an expression may use: the functions above, the package's two models and its constants.
NAMESPACE: dict[str, Any] = {
    "us": us,
    "share": share,
    "bandwidth": bandwidth,
    "speedup": speedup,
    "n": n,
    "percent": percent,
    "one": one,
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
