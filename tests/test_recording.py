"""Recordings: what the schema refuses, how files are kept, and what the fingerprint sees."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any, get_args

import pytest
from fabricated import fabricated

from rmsnorm_ref.measure import choice, recording, schema
from rmsnorm_ref.measure.recording import Recording, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHARED = {"M": 4096, "N": 8192, "dtype": "bfloat16", "w_dtype": "bfloat16"}
TIMED: dict[str, Any] = {"time_s": schema.Quantiles(1e-5, 2e-5, 3e-5), "n_samples": 15}
DETAILS: dict[str, dict[str, Any]] = {
    "host": {"requires_grad": True},
    "config": {"shipped": False},
    "ablation": {"knob": "num_stages", "value": 3},
    "error": {"max_ulp": {"y": 0.5}, "error_over_bound": {"y": None}},
    "counter": {
        "dram_read_bytes": 10,
        "dram_write_bytes": 11,
        "model_read_bytes": 12,
        "model_write_bytes": 13,
        "kernels": ("rmsnorm_forward_kernel",),
    },
    "eager_kernel": {
        "kernel": "pow",
        "index": 0,
        "steps": ("pow -> square",),
        "n_bytes": 100,
        "matched": "order",
    },
    "scaling": {"n_gpus": 2},
}


def row(kind: str, **more: Any) -> schema.Row:
    """Make a valid row of a kind."""
    fields: dict[str, Any] = {"section": "seed", "contender": "ours", "pass_": "forward", **SHARED}
    fields |= {} if kind in {"error", "counter"} else TIMED
    fields |= {"config": schema.Config(8, 1)} if kind == "config" else {}
    return schema.Row(kind=kind, detail=DETAILS.get(kind), **(fields | more))


@pytest.fixture
def whole() -> Recording:
    """Return a recording with a row of every kind, none of them measured."""
    rows = tuple(row(kind) for kind in get_args(schema.Kind))
    return Recording("whole", fabricated().provenance, rows)


@pytest.fixture
def broken(whole: Recording) -> Callable[[str, Any], dict[str, Any]]:
    """Return what puts a value at a place such as "rows.0.M" of a recording's JSON."""

    def put(place: str, value: Any) -> dict[str, Any]:
        found: Any = copy.deepcopy(recording.to_json(whole))
        *way, last = place.split(".")
        inside = found
        for word in way:
            inside = inside[int(word) if isinstance(inside, list) else word]
        if value is KeyError:
            del inside[last]
        else:
            inside[last] = value
        return found

    return put


# ---- The schema -------------------------------------------------------------------------------


def test_every_kind_survives_the_file(whole: Recording, tmp_path: Path) -> None:
    """What is saved is what is loaded, equal in every field of every kind of row."""
    path = tmp_path / "whole.json"
    recording.save(whole, path)
    assert recording.load(path) == whole


HOST, CONFIG, ERROR = (get_args(schema.Kind).index(kind) for kind in ("host", "config", "error"))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("rows.0.M", 0, r"rows\[0\].M: expected 1 or more"),
        ("rows.0.M", 1.5, r"rows\[0\].M: expected a whole number"),
        ("rows.0.M", True, r"rows\[0\].M: expected a whole number"),
        ("rows.0.kind", "kernels", r"rows\[0\].kind: expected one of"),
        ("rows.0.time_s", None, r"rows\[0\].time_s: kind kernel is timed"),
        ("rows.0.n_samples", 0, r"rows\[0\].n_samples: kind kernel is timed"),
        ("rows.0.time_s.p50", "fast", r"rows\[0\].time_s.p50: expected a number"),
        ("rows.0.time_s.p50", math.inf, r"rows\[0\].time_s.p50: expected a number"),
        ("rows.0.time_s.p50", 4e-5, r"rows\[0\].time_s: expected 0 < p20 <= p50 <= p80"),
        ("rows.0.time_s.p20", 0.0, r"rows\[0\].time_s: expected 0 < p20"),
        ("rows.0.ceiling", {"kernel": "torch.neg", "time_s": 0.0}, r"rows\[0\].ceiling: "),
        ("rows.0.flags", ["warm"], r"rows\[0\].flags\[0\]: expected one of"),
        ("rows.0.flags", "above_ceiling", r"rows\[0\].flags: expected a list"),
        ("rows.0.pass", KeyError, r"rows\[0\].pass: is missing"),
        ("rows.0.speed", 1.0, r"rows\[0\].speed: is no field"),
        ("rows.0.detail", {"shipped": True}, r"rows\[0\].detail: of kind kernel"),
        (f"rows.{HOST}.detail", None, rf"rows\[{HOST}\].detail: of kind host"),
        (f"rows.{HOST}.detail.requires_grad", 1, rf"rows\[{HOST}\].detail.requires_grad: expected"),
        (f"rows.{HOST}.detail.warm", 1, rf"rows\[{HOST}\].detail.warm: is no field"),
        (f"rows.{CONFIG}.config", None, rf"rows\[{CONFIG}\].config: kind config has one"),
        (f"rows.{ERROR}.time_s", {"p20": 1.0, "p50": 1.0, "p80": 1.0}, "error is not timed"),
        (f"rows.{ERROR}.detail.max_ulp", {"y": "inf"}, r"detail.max_ulp.y: expected a number"),
        ("rows", {}, "rows: expected a list"),
        ("provenance.gpu", None, "provenance.gpu: expected a string"),
        ("provenance.peers", {"fla": 6}, "provenance.peers.fla: expected a string"),
        ("provenance.clean", "yes", "provenance.clean: expected true or false"),
        ("provenance.commit", KeyError, "provenance.commit: is missing"),
        ("provenance", 3, "provenance: expected an object"),
        ("schema", 2, "schema: this version reads 1, got 2"),
        ("id", "other", "id: 'other' is in a file called 'whole'"),
    ],
)
def test_what_breaks_the_schema_is_named(
    broken: Callable[[str, Any], dict[str, Any]], place: str, value: Any, message: str
) -> None:
    """The error says which row and field, what is expected and what is there."""
    with pytest.raises(SchemaError, match=message):
        recording.from_json(broken(place, value), "whole")


def test_files_that_are_no_recording_are_named(tmp_path: Path) -> None:
    """Broken JSON and other JSON give the file's name; a missing file lists those that ship."""
    path = tmp_path / "a.json"
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(SchemaError, match=r"^a\.json: "):
            recording.load(path)
    with pytest.raises(FileNotFoundError, match="those that ship"):
        recording.load("no-such-recording")


def test_table_describes_every_field(whole: Recording) -> None:
    """Each key of a recording's JSON has one line with a meaning, detail's keys by kind."""
    described = {place: meaning for place, _, meaning in schema.schema_table()}
    value = recording.to_json(whole)
    wanted = {f"provenance.{key}" for key in value["provenance"]}
    wanted |= {f"rows[].{key}" for each in value["rows"] for key in each}
    for each in value["rows"]:
        wanted |= {f"rows[].detail.{key} ({each['kind']})" for key in each["detail"] or ()}
    assert set(described) == wanted
    assert all(described.values())
    assert set(schema.KINDS) == set(get_args(schema.Kind))


def test_derived_numbers_follow_from_what_is_stored() -> None:
    """Bandwidth, share of the ceiling and noise are quotients of stored fields, or an error."""
    timed = row(
        "kernel", obligatory_bytes=60, ceiling=schema.Ceiling("c", 1e-5), repeat_time_s=2.2e-5
    )
    assert timed.bandwidth_bytes_per_s == pytest.approx(60 / 2e-5)
    assert timed.share_of_ceiling == pytest.approx(0.5)
    assert timed.noise == pytest.approx(0.1)
    for name in ("bandwidth_bytes_per_s", "share_of_ceiling", "noise"):
        with pytest.raises(ValueError, match="kind error"):
            getattr(row("error"), name)


def test_select_takes_values_and_sets(whole: Recording) -> None:
    """Rows that equal every given value, or are in a given set, are returned in order."""
    assert recording.select(whole.rows, kind="cold", M=4096) == [row("cold")]
    assert recording.select(whole.rows, kind={"cold", "kernel"}) == [row("kernel"), row("cold")]
    assert recording.select(whole.rows, M=1) == []
    with pytest.raises(AttributeError, match="speed"):
        recording.select(whole.rows, speed=1)


# ---- Files ------------------------------------------------------------------------------------


def test_recordings_are_only_added(whole: Recording, tmp_path: Path) -> None:
    """A second save to the same file is refused and changes nothing, unless it is asked for."""
    path = tmp_path / "whole.json"
    recording.save(whole, path)
    less = dataclasses.replace(whole, rows=whole.rows[:1])
    with pytest.raises(FileExistsError, match="only ever added"):
        recording.save(less, path)
    assert recording.load(path) == whole
    recording.save(less, path, replace=True)
    assert recording.load(path) == less
    assert [found.name for found in tmp_path.iterdir()] == ["whole.json"]


def test_an_invalid_recording_is_not_written(whole: Recording, tmp_path: Path) -> None:
    """What the schema refuses leaves no file behind, whole or in part."""
    for wrong in (
        dataclasses.replace(whole, rows=(dataclasses.replace(row("kernel"), M=0),)),
        dataclasses.replace(
            whole, rows=(dataclasses.replace(row("kernel"), repeat_time_s=math.nan),)
        ),
        dataclasses.replace(whole, id="other"),
    ):
        with pytest.raises(SchemaError):
            recording.save(wrong, tmp_path / "whole.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", recording.shipped())
def test_shipped_recordings_keep_the_schema(name: str) -> None:
    """Every recording in the package loads, was made from a commit, and holds rows."""
    found = recording.load(name)
    assert found.rows
    assert found.provenance.commit


def test_headline_speaks_for_these_kernels() -> None:
    """The numbers shown were measured on the code that is here: if this fails, measure again."""
    _, headline = choice.picked(kind="kernel", section="seed", contender="ours")
    assert not recording.stale(headline)
    assert not headline.provenance.interrupted


def test_stale_means_another_code(whole: Recording) -> None:
    """A recording of these kernels is not stale, one of others is."""
    now = dataclasses.replace(whole.provenance, fingerprint=recording.fingerprint())
    assert not recording.stale(dataclasses.replace(whole, provenance=now))
    then = dataclasses.replace(now, fingerprint="0" * 64)
    assert recording.stale(dataclasses.replace(whole, provenance=then))


def test_the_json_is_plain(whole: Recording, tmp_path: Path) -> None:
    """A file holds strict JSON with the documented top-level keys; `pass_` is "pass" there."""
    recording.save(whole, tmp_path / "whole.json")
    text = (tmp_path / "whole.json").read_text()
    value = json.loads(text, parse_constant=pytest.fail)
    assert list(value) == ["schema", "id", "provenance", "rows"]
    assert {"pass", "kind"} < set(value["rows"][0])
    assert text.endswith("}\n")
