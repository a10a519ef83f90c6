"""Several ranks at once: all work, they take turns as asked, and a failing one ends the run."""

from __future__ import annotations

import pytest
import torch
from made_up_clock import made_up_session
from paths import DEVICE

from rmsnorm_ref.measure import scaling

BF16 = torch.bfloat16
COUNTS = scaling.counts(2 if DEVICE == "cpu" else torch.cuda.device_count())


def test_every_count_has_a_time_for_each_round() -> None:
    """Real processes run both passes, alone and together, and every round gives a time."""
    job = scaling.Job(4, 64, BF16, COUNTS, 3, DEVICE)
    found = scaling.together(job)
    assert tuple(found) == COUNTS
    for times_s in found.values():
        assert len(times_s) == job.n_rounds
        assert min(times_s) > 0


def test_a_rank_that_fails_ends_the_run() -> None:
    """What a rank raises comes back, and no process is left waiting for it."""
    job = scaling.Job(4, 2**17, BF16, COUNTS, 3, DEVICE)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="65536"):
        scaling.together(job)


def test_a_row_is_the_slowest_ranks_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows name how many GPUs worked, with quantiles over rounds and a repeat from every second."""
    times_s = {1: [1.0, 2.0, 1.0, 2.0], 2: [1.5, 3.0, 1.5, 3.0]}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(scaling, "together", lambda _: times_s)
    alone, both = scaling.measure(made_up_session())
    assert (alone.detail, both.detail) == ({"n_gpus": 1}, {"n_gpus": 2})
    assert alone.time_s is not None
    assert both.time_s is not None
    assert (alone.time_s.p50, alone.repeat_time_s, both.time_s.p50) == (1.0, 2.0, 1.5)


def test_one_gpu_gives_a_note_and_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is nothing to compare, the section says so and the run goes on."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    session = made_up_session()
    assert scaling.measure(session) == []
    assert "needs two GPUs, and torch sees 1" in session.notes[-1]
