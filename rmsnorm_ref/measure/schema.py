"""What a recording holds, field by field: rows, provenance, and what each must be.

Times are seconds, sizes bytes; what does not apply is null. Only what was measured or set is
stored: a bandwidth, a share of the ceiling or a speed-up is computed from it, where needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .codec import SchemaError, decode_keys, encode, json_name

SCHEMA = 1
KINDS = {
    "kernel": "kernel time: a CUDA graph of calls on rotating inputs, Python outside",
    "resident": "the same on one input again and again: what is left of it in L2 is not read",
    "cold": "triton.testing.do_bench: one call after the L2 was overwritten",
    "host": "time the host spends per call, the GPU idle",
    "config": "kernel time of one config of the search, the dw reduction left out",
    "ablation": "kernel time with one knob turned, or one pinned choice made otherwise",
    "error": "largest error of a pass against the float64 truth",
    "counter": "bytes that crossed the DRAM bus, by hardware counters, beside the model's",
    "eager_kernel": "one kernel of an eager chain, profiled",
    "scaling": "both passes on one GPU and on several at once: a call on the slowest of them",
}
Kind = Literal[
    "kernel", "resident", "cold", "host", "config", "ablation", "error", "counter", "eager_kernel",
    "scaling",
]  # fmt: skip
CellSection = Literal["seed", "narrow", "wide", "few", "sizes", "widths"]
ExtraSection = Literal[
    "cold", "configs", "ablations", "host", "errors", "counters", "eager", "scaling"
]
Section = Literal[CellSection, ExtraSection]
Contender = Literal[
    "ours",
    "eager",
    "eager_fp32",
    "F.rms_norm",
    "torch.compile",
    "liger",
    "fla",
    "flash_attn",
    "quack",
    "torch.neg",  # these two only as ceilings with a cold L2
    "torch.add",
]
Pass = Literal["forward", "backward", "forward+backward"]
OnePass = Literal["forward", "backward"]
FORWARD: Literal["forward"] = "forward"
BACKWARD: Literal["backward"] = "backward"
Dtype = Literal["float16", "bfloat16", "float32"]
Flag = Literal["above_ceiling", "fits_in_l2", "by_difference"]
Knob = Literal[
    "num_stages", "programs_per_sm",
    # What tiling.py pins, see pinned.py:
    "path", "team_cols", "few_rows", "eviction", "one_row_per_sm", "one_wave", "backward_tile",
    "few_rows_tiles", "dw_stages", "dx_rows", "rstd", "reduction", "reduce_cols",
    "reduction_start", "walk", "dw_sum",
]  # fmt: skip
FormerKnob = Literal["dw_tile", "split"]  # of choices that older recordings hold, and no tree has
_PerTensor = Mapping[str, float | None]

# What `detail` holds, by kind: {key: (annotation, meaning)}. Kinds that are not here have none.
DETAILS: dict[str, dict[str, tuple[Any, str]]] = {
    "host": {"requires_grad": (bool, "whether x and w asked for gradients")},
    "config": {"shipped": (bool, "whether it is what the shipped table says")},
    "ablation": {
        "knob": (Knob | FormerKnob, "what was turned; all but two are choices that tiling.py pins"),
        "value": (int | str, "to what: a number, or the alternative's name"),
    },
    "error": {
        "max_ulp": (_PerTensor, "y, or dx and dw: ulp of its dtype; null where not finite"),
        "error_over_bound": (_PerTensor, "the same over oracle.py's bound; null where not finite"),
    },
    "counter": {
        "dram_read_bytes": (int, "counted, all kernels of the call"),
        "dram_write_bytes": (int, "counted"),
        "model_read_bytes": (int, "what traffic.py expects to be read, scratch included"),
        "model_write_bytes": (int, "what it expects to be written, scratch included"),
        "kernels": (tuple[str, ...], "names of the kernels counted, in order of launch"),
    },
    "eager_kernel": {
        "kernel": (str, "its name"),
        "index": (int, "its place in the chain, from 0"),
        "steps": (tuple[str, ...], "kernels of traffic.py's chain that it stands for"),
        "n_bytes": (int, "bytes of those, read and written"),
        "matched": (Literal["order", "name", "none"], "how kernel and model were paired"),
    },
    "scaling": {"n_gpus": (int, "how many worked at once, each on M rows of its own")},
}


def _says(meaning: str) -> dict[str, str]:
    return {"meaning": meaning}


@dataclass(frozen=True)
class Quantiles:
    """Hold quantiles of one measurement's samples, in seconds."""

    p20: float = field(metadata=_says("a fifth of the samples took less"))
    p50: float = field(metadata=_says("the median"))
    p80: float = field(metadata=_says("a fifth took more"))


@dataclass(frozen=True)
class Config:
    """Hold the config that a kernel ran with."""

    num_warps: int = field(metadata=_says("warps per program"))
    num_stages: int = field(metadata=_says("tiles in flight in a pipelined loop"))


@dataclass(frozen=True)
class Ceiling:
    """Hold the fastest kernel that only moves a pass's bytes, timed in the same interleaving."""

    kernel: str = field(metadata=_says("which one that was"))
    time_s: float = field(metadata=_says("its median"))


@dataclass(frozen=True)
class Span:
    """Hold what a quantity was while the run lasted."""

    min: float = field(metadata=_says("the least seen"))
    median: float = field(metadata=_says("the median"))
    max: float = field(metadata=_says("the most seen"))


@dataclass(frozen=True)
class Clocks:
    """Hold the clocks that nvidia-smi reported, once a second."""

    sm_mhz: Span = field(metadata=_says("of the SMs"))
    memory_mhz: Span = field(metadata=_says("of the memory"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold one measurement."""

    kind: Kind = field(metadata=_says("what was measured, see the kinds"))
    section: Section = field(metadata=_says("the part of the run it belongs to"))
    contender: Contender = field(metadata=_says("whose kernels"))
    pass_: Pass = field(metadata=_says("backward: dx and dw, its reduction included"))
    M: int = field(metadata=_says("rows"))
    N: int = field(metadata=_says("elements of a row"))
    dtype: Dtype = field(metadata=_says("of x, y, dy and dx"))
    w_dtype: Dtype = field(metadata=_says("of w and dw"))
    path: str | None = field(default=None, metadata=_says("ours: the kernel, named in tiling.py"))
    config: Config | None = field(
        default=None, metadata=_says("ours: as launched; fla: its fastest")
    )
    n_programs: int | None = field(
        default=None,
        metadata=_says("ours: tiles (forward), rows of the partial buffer (backward; few rows: 0)"),
    )
    n_input_sets: int | None = field(default=None, metadata=_says("inputs that take turns"))
    time_s: Quantiles | None = field(default=None, metadata=_says("of one call"))
    repeat_time_s: float | None = field(
        default=None, metadata=_says("median of a second timing, interleaved with the first")
    )
    n_samples: int | None = field(default=None, metadata=_says("how many the quantiles are of"))
    obligatory_bytes: int | None = field(
        default=None, metadata=_says("2*M*N*e forward, 3*M*N*e backward, the same for everyone")
    )
    scratch_bytes: int | None = field(
        default=None, metadata=_says("ours: the partial dw buffer, written and read")
    )
    ceiling: Ceiling | None = field(default=None, metadata=_says("what the same bytes need"))
    flags: tuple[Flag, ...] = field(
        default=(),
        metadata=_says(
            "above_ceiling: faster than the ceiling. fits_in_l2: all that takes turns fits in L2. "
            "by_difference: forward and backward together, less forward"
        ),
    )
    detail: Mapping[str, Any] | None = field(default=None, metadata=_says("more, by kind"))

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Divide the obligatory bytes by the median time; ValueError where there is none."""
        if self.time_s is None or self.obligatory_bytes is None:
            raise ValueError(f"a row of kind {self.kind} has no bandwidth")
        return self.obligatory_bytes / self.time_s.p50

    @property
    def share_of_ceiling(self) -> float:
        """Divide the ceiling's time by the median time; ValueError where there is none."""
        if self.time_s is None or self.ceiling is None:
            raise ValueError(f"this row of kind {self.kind} has no ceiling")
        return self.ceiling.time_s / self.time_s.p50

    @property
    def knob(self) -> str | None:
        """Return what an ablation turned; None for rows of other kinds."""
        return self.detail["knob"] if self.kind == "ablation" and self.detail else None

    @property
    def noise(self) -> float:
        """Return how far the second timing was from the first, as a share of it."""
        if self.time_s is None or self.repeat_time_s is None:
            raise ValueError(f"this row of kind {self.kind} was timed once")
        return abs(self.repeat_time_s / self.time_s.p50 - 1)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Hold on what, when and from which code the rows of a recording were measured."""

    gpu: str = field(metadata=_says("its name, as the driver gives it"))
    sm_count: int = field(metadata=_says("streaming multiprocessors"))
    l2_bytes: int = field(metadata=_says("size of the L2"))
    memory_bytes: int = field(metadata=_says("size of its memory"))
    datasheet_bandwidth_bytes_per_s: float | None = field(
        metadata=_says("what the vendor states; no ceiling here is computed from it")
    )
    datasheet: str | None = field(metadata=_says("where that is stated"))
    driver: str | None = field(metadata=_says("version of the GPU's driver"))
    cuda: str | None = field(metadata=_says("CUDA that torch was built with"))
    torch: str = field(metadata=_says("version"))
    triton: str = field(metadata=_says("version"))
    python: str = field(metadata=_says("version"))
    rmsnorm_ref: str = field(metadata=_says("version"))
    tuning: Literal["search", "fixed"] = field(metadata=_says("how ours chose its configs"))
    peers: Mapping[str, str | None] = field(
        metadata=_says("version of each peer; null: not installed")
    )
    clocks: Clocks | None = field(metadata=_says("null: nvidia-smi would not tell"))
    date: str = field(metadata=_says("of the start, UTC, ISO 8601"))
    commit: str | None = field(metadata=_says("of the code"))
    clean: bool = field(metadata=_says("whether every tracked file was as in that commit"))
    fingerprint: str = field(metadata=_says("of the kernels' code, comments and docstrings apart"))
    command: str = field(metadata=_says("what was run"))
    duration_s: float = field(metadata=_says("how long it took"))
    interrupted: bool = field(metadata=_says("whether it was stopped before its end"))
    notes: tuple[str, ...] = field(metadata=_says("who was left out of which cell, and why"))


# ---- Rules that one field alone cannot state --------------------------------------------------


def checked(row: Row, where: str) -> Row:
    """Hold a row to what its kind asks for; return it with its detail as annotated.

    Raises:
        SchemaError: it breaks a rule; the message starts with `where` and the field.
    """
    timed = row.kind not in {"error", "counter"}
    quantiles = row.time_s
    rules = (
        ("M", row.M >= 1, "expected 1 or more"),
        ("N", row.N >= 1, "expected 1 or more"),
        ("time_s", timed == (quantiles is not None), f"kind {row.kind} is {_timed(timed)}"),
        ("n_samples", timed == bool(row.n_samples), f"kind {row.kind} is {_timed(timed)}"),
        (
            "time_s",
            quantiles is None or 0 < quantiles.p20 <= quantiles.p50 <= quantiles.p80,
            "expected 0 < p20 <= p50 <= p80",
        ),
        ("config", row.kind != "config" or row.config is not None, "kind config has one"),
        ("ceiling", row.ceiling is None or row.ceiling.time_s > 0, "its time must be above 0"),
        ("detail", (row.kind in DETAILS) == (row.detail is not None), f"of kind {row.kind}"),
    )
    for name, holds, rule in rules:
        if not holds:
            raise SchemaError(f"{where}.{name}: {rule}, got {getattr(row, name)!r}")
    if row.detail is None:
        return row
    hints = {key: hint for key, (hint, _) in DETAILS[row.kind].items()}
    detail = decode_keys(hints, encode(row.detail), f"{where}.detail")
    return dataclasses.replace(row, detail=detail)


def _timed(timed: bool) -> str:
    return "timed" if timed else "not timed"


def schema_table() -> list[tuple[str, str, str]]:
    """Return every field of a recording as (place, type, meaning), in the order of the file.

    Example:
        >>> schema_table()[0]
        ('provenance.gpu', 'str', 'its name, as the driver gives it')
    """
    found: list[tuple[str, str, str]] = []
    for place, record in (("provenance", Provenance), ("rows[]", Row)):
        for entry in dataclasses.fields(record):
            name = f"{place}.{json_name(entry.name)}"
            found.append((name, str(entry.type), entry.metadata["meaning"]))
    for kind, keys in DETAILS.items():
        for key, (hint, meaning) in keys.items():
            found.append((f"rows[].detail.{key} ({kind})", _spell(hint), meaning))
    return found


def _spell(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
