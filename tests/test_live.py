"""What a page shows: rows measured now where there is a GPU, else a recording."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fabricated import fabricated
from made_up_clock import made_up_session

from rmsnorm_ref import rmsnorm
from rmsnorm_ref.measure import chain, choice, live, provenance, recording, timing
from rmsnorm_ref.measure.recording import select

FP32 = torch.float32


def test_a_section_that_nobody_recorded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rows of a section the error says which."""
    monkeypatch.setattr(choice, "shipped", lambda: (fabricated(),))
    assert live.recorded("seed") == fabricated()
    with pytest.raises(LookupError, match="'cold'"):
        live.recorded("cold")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU rows are measured")
def test_without_a_gpu_rows_are_recorded() -> None:
    """Where nothing can be timed, evidence is the recording, and says so."""
    shown = live.evidence("seed", [(4096, 4096)])
    assert not shown.live
    assert shown == live.recorded("seed")
    assert live.source(shown).startswith(f"times: recording {shown.id}, NVIDIA")
    assert live.source(shown, "bytes").startswith(f"bytes: recording {shown.id}, NVIDIA")


@pytest.mark.parametrize(
    ("section", "shape", "kinds"),
    [
        ("seed", (8, 64), {"kernel"}),
        ("sizes", (8, 64), {"kernel", "resident"}),
        ("configs", (1, 8192), {"config"}),
        ("ablations", (12, 2048), {"ablation"}),
        ("eager", (8, 64), {"kernel", "eager_kernel"}),
    ],
)
def test_a_live_set_has_the_rows_of_its_section(
    section: Any, shape: live.Shape, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured now has the kinds that the section's figure draws, at the shape asked."""
    profiled = select(fabricated().rows, kind="eager_kernel")[:1]
    monkeypatch.setattr(chain, "eager_profile", lambda *_: profiled)
    monkeypatch.setattr(live.knobs.tuning, "TRIAL_BYTES", 8192 * 4 * 2)
    rows = live.measure(made_up_session(), section, [shape], FP32)
    assert {row.kind for row in rows} == kinds
    assert {row.N for row in rows if row.kind != "eager_kernel"} == {shape[1]}


def test_a_section_that_needs_more_than_a_gpu_is_refused() -> None:
    """Counters need a profiler's rights: asking for them live is an error that says what to do."""
    with pytest.raises(ValueError, match=r"recorded\('counters'\)"):
        live.measure(made_up_session(), "counters", [(8, 64)])


def test_with_a_gpu_rows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a GPU, evidence holds its facts and rows, and says that it is live."""
    facts = dataclasses.asdict(fabricated().provenance)
    described = {k: v for k, v in facts.items() if k in provenance_fields()}
    monkeypatch.setattr(timing, "require_gpu", lambda: torch.device("cpu"))
    properties = SimpleNamespace(L2_cache_size=1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(provenance, "describe", lambda _: described)
    session = made_up_session(names=("eager",))
    monkeypatch.setattr(live, "Session", lambda *_, **__: session)
    shown = live.evidence("seed", [(8, 64)], FP32)
    assert shown.live
    assert {row.contender for row in shown.rows} == {"ours", "eager"}
    assert shown.provenance.gpu == facts["gpu"]
    assert "measured now" in live.source(shown)
    assert recording.from_json(recording.to_json(shown), recording.LIVE) == shown


def provenance_fields() -> set[str]:
    """Name the facts that no run changes, which `provenance.describe` returns."""
    changing = {"peers", "clocks", "date", "command", "duration_s", "interrupted", "notes"}
    return {f.name for f in dataclasses.fields(fabricated().provenance)} - changing


def test_a_result_made_here_says_where(device: str) -> None:
    """The source note names the machine, the versions, the date and the commit."""
    rmsnorm(torch.ones(1, 8, device=device), torch.ones(8, device=device))
    note = live.here()
    assert note.startswith("CPU, interpreted, torch" if device == "cpu" else "NVIDIA")
    assert note.endswith("measured now")
    assert "commit" in note
