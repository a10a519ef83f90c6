"""What the sections of a run share: patience with a peer, and signals that stay heard."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import torch
from made_up_clock import made_up_session

from rmsnorm_ref.measure import bench, peers, session
from rmsnorm_ref.measure.cells import Cell

if TYPE_CHECKING:
    import pytest

BF16 = torch.bfloat16


def test_a_contender_that_takes_too_long_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose build does not end is stopped and noted, and the others are measured."""

    def build(N: int, dtype: torch.dtype, eps: float = 1e-6) -> peers.Call:
        del N, dtype, eps
        while True:
            time.sleep(0.01)

    asked, cell = made_up_session(), Cell("seed", 4, 16, BF16)
    inputs = asked.inputs(cell, 1)[0]
    asked.calls(cell, inputs)  # compiles ours
    asked.peers["endless"] = peers.Peer("endless", "torch", "1", None, build)
    monkeypatch.setattr(session, "PATIENCE_S", 3)
    assert list(asked.calls(cell, inputs)) == ["ours"]
    assert "endless is missing: TimeoutError: it took more than 3 s" in asked.notes[-1]


def test_signals_are_heeded_after_a_peer_took_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose import resets a signal's handler does not make a run deaf to it."""

    def build(N: int, dtype: torch.dtype, eps: float = 1e-6) -> peers.Call:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return peers.contenders()["eager"].build(N, dtype, eps)

    asked = made_up_session()
    monkeypatch.setitem(asked.peers, "deaf", peers.Peer("deaf", "torch", "1", None, build))
    cell = Cell("seed", 4, 16, BF16)
    with bench._signals(asked):
        handler = signal.getsignal(signal.SIGINT)
        asked.calls(cell, asked.inputs(cell, 1)[0])
        assert signal.getsignal(signal.SIGINT) is handler
