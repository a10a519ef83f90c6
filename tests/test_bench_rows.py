"""What the sections of a run return: rows with known times, because the clock is made up."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from made_up_clock import MadeUpClock, made_up_session

from rmsnorm_ref import tiling, traffic, tuning
from rmsnorm_ref.measure import cells, extras, kernel_rows, knobs, peers, recording, schema, timing
from rmsnorm_ref.measure.cells import Cell
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BF16 = torch.bfloat16
CELL = Cell("seed", 12, 64, BF16)


# ---- Kernel times -----------------------------------------------------------------------------


def test_kernel_rows_hold_what_was_measured() -> None:
    """Every contender has a row per pass with its own time; the ceiling is the fastest kernel."""
    contenders, n_sets = ("ours", "eager", "F.rms_norm"), 2
    n_ceilings = len(timing.ceilings(FORWARD))
    asked = made_up_session(lambda graph, _: (1 + graph) * 1e-6, ("eager", "F.rms_norm"))
    rows = kernel_rows.measure(asked, CELL)
    assert [(found.contender, found.pass_) for found in rows] == [
        (name, pass_) for pass_ in (FORWARD, BACKWARD) for name in contenders
    ]
    for i, found in enumerate(rows):
        backward = i >= len(contenders)
        graph = i + n_ceilings * backward
        assert found.time_s is not None
        assert found.ceiling is not None
        assert found.time_s.p50 == pytest.approx((1 + graph) * 1e-6)
        assert found.ceiling.time_s == pytest.approx((4 + backward * (n_ceilings + 3)) * 1e-6)
        assert found.ceiling.kernel == ("torch.add" if backward else "torch.neg")
        assert found.flags == ("above_ceiling",)  # contenders come first here, and cost less
        assert found.n_input_sets == n_sets
        assert found.obligatory_bytes == (3 if backward else 2) * 12 * 64 * 2
        assert found.noise == pytest.approx(0)
        assert (found.path is not None) == (found.contender == "ours")
        schema.checked(found, "row")


def test_ours_says_how_it_ran() -> None:
    """Path, config, programs and scratch bytes are those of the launch that was timed."""
    tuning.set_mode("fixed")
    asked = made_up_session()
    for M, N in ((12, 64), (5, 2048), (9, 12000)):
        cell = Cell("seed", M, N, BF16)
        forward, backward = kernel_rows.measure(asked, cell)
        device = asked.device
        assert forward.path == tiling.forward_path(N)
        assert backward.path == tiling.backward_path(M, N, device, BF16)
        few = backward.path == "few_rows_backward"
        n_programs = 0 if few else tiling.n_programs(M, N, BF16, device)
        assert backward.n_programs == n_programs
        counted = traffic.backward(M, N, BF16, device=device)
        assert backward.scratch_bytes == counted.scratch_bytes(n_programs)
        searched = "backward" if few else backward.path
        shipped = tuning.shipped(searched, N, BF16)
        assert backward.config == schema.Config(*shipped)
    tuning.set_mode(None)


def test_size_sweep_also_repeats_one_input() -> None:
    """Each size is timed on inputs that take turns and on one alone, which is flagged in the L2."""
    asked = made_up_session()
    asked.l2_bytes = 2**13  # one input fits, and eight do not
    rows = kernel_rows.measure(asked, Cell("sizes", 12, 64, BF16, ("ours",)))
    assert [found.kind for found in rows] == ["kernel", "resident"] * 2
    for found in recording.select(rows, kind="kernel"):
        assert found.n_input_sets is not None
        assert found.n_input_sets > 1
        assert "fits_in_l2" not in found.flags
    for found in recording.select(rows, kind="resident"):
        assert found.n_input_sets == 1
        assert "fits_in_l2" in found.flags


def wrong_peer(name: str, call: Callable[..., torch.Tensor]) -> peers.Peer:
    """Make a peer that is always there."""
    return peers.Peer(name, "torch", "1", None, lambda *_, **__: call)


def test_who_is_not_rmsnorm_is_not_timed() -> None:
    """A peer that forgets the weight is named with its error and has no row; ours goes on."""

    def forgets(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, w.shape, w * 0 + 1)

    asked = made_up_session()
    asked.peers["fla"] = wrong_peer("fla", forgets)
    rows = kernel_rows.measure(asked, CELL)
    assert {found.contender for found in rows} == {"ours"}
    assert "fla is not timed" in "".join(asked.notes)


def test_who_fails_is_missing_there_and_only_there() -> None:
    """A peer that raises on one shape is noted for that cell with what it said."""

    def fails(_: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such width\nand a long trace")

    asked = made_up_session()
    asked.peers["liger"] = wrong_peer("liger", fails)
    assert len(kernel_rows.measure(asked, CELL)) == 2
    assert asked.notes == [f"{CELL.label()}: liger is missing: RuntimeError: no such width"]


class Uncapturable(MadeUpClock):
    """A clock whose third capture in the backward, a peer's, fails, as a synchronising one does."""

    def capture(self, calls: Any, n_kept: int) -> Any:
        """Fail for the second contender's backward alone."""
        work = next(iter(calls)).func
        if type(work).__name__ == "Backward" and len(self.n_calls) > len(timing.ceilings(FORWARD)):
            self.n_backwards = getattr(self, "n_backwards", 0) + 1
            if self.n_backwards == 2:
                raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(calls, n_kept)


def test_backward_that_cannot_be_captured_is_a_difference() -> None:
    """Its time is both passes less the forward, and its row says so."""
    n_before = 2 + len(timing.ceilings(FORWARD)) + 1 + len(timing.ceilings(BACKWARD))
    costs_s = {n_before: 9e-6, n_before + 1: 4e-6}
    asked = made_up_session(names=("eager",))
    asked.clock = Uncapturable(lambda graph, _: costs_s.get(graph, 1e-6))
    rows = kernel_rows.measure(asked, CELL)
    (found,) = recording.select(rows, contender="eager", pass_=BACKWARD)
    assert found.time_s is not None
    assert found.time_s.p50 == pytest.approx(5e-6)
    assert "by_difference" in found.flags
    assert "by_difference" not in rows[0].flags


def test_who_searches_is_timed_with_each_config() -> None:
    """Its one row is of the fastest config, also where another one cannot be launched."""
    tuner = SimpleNamespace(
        configs=[SimpleNamespace(num_warps=n, num_stages=2) for n in (1, 2, 4, 8)]
    )
    seen: list[int] = []

    def searches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        warps = [config.num_warps for config in tuner.configs]
        if warps == [1]:
            raise RuntimeError("out of resource")
        seen.extend(warps)
        return torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)

    asked = made_up_session(lambda graph, _: {0: 5e-6, 1: 3e-6, 2: 2e-6, 3: 4e-6}.get(graph, 1e-6))
    pins = tuple(peers.Pin(tuner, config) for config in tuner.configs)
    peer = dataclasses.replace(wrong_peer("fla", searches), pins=lambda *_: pins)
    asked.peers["fla"] = peer
    asked.passes = (FORWARD,)
    ours, found = kernel_rows.measure(asked, CELL)
    assert (ours.contender, found.contender) == ("ours", "fla")
    assert found.config == schema.Config(4, 2)
    assert found.time_s is not None
    assert found.time_s.p50 == pytest.approx(2e-6)
    assert seen.count(2) == seen.count(4) == seen.count(8) > 1
    (note,) = asked.notes
    assert "fla with" in note
    assert "out of resource" in note


# ---- Knobs ------------------------------------------------------------------------------------


def test_configs_are_those_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each config that is not pruned has a row per pass, and exactly one of them ships."""
    monkeypatch.setattr(tuning, "TRIAL_BYTES", 2**12)
    rows = knobs.configs(made_up_session(), 128)
    for pass_, path in ((FORWARD, "forward"), (BACKWARD, "backward")):
        found = recording.select(rows, pass_=pass_)
        tried = [c for c, reason in tuning.pruned(path, 128, BF16).items() if reason is None]
        assert [each.config for each in found] == [schema.Config(*config) for config in tried]
        shipped = [each.config for each in found if each.detail and each.detail["shipped"]]
        assert shipped == [schema.Config(*tuning.shipped(path, 128, BF16))]
        assert {each.path for each in found} == {path}


def test_ablation_turns_one_knob_at_a_time() -> None:
    """Rows say what was turned; scratch bytes and programs follow the programs per SM."""
    asked = made_up_session()
    cell = Cell("ablations", 16 * tiling.sm_count(asked.device), 2048, BF16)
    rows = knobs.ablation(asked, cell)
    turned = [(each.detail["knob"], each.detail["value"]) for each in rows if each.detail]
    assert turned == [("num_stages", stages) for stages in tuning.STAGES] + [
        ("programs_per_sm", n) for n in (1, 2, 4)
    ]
    shipped = tuning.shipped("backward", 2048, BF16)
    for found in rows:
        schema.checked(found, "row")
        assert found.config is not None
        assert found.config.num_warps == shipped.num_warps
        counted = traffic.backward(2**20, 2048, BF16)
        assert found.scratch_bytes == counted.scratch_bytes(found.n_programs or 0)
        assert found.ceiling is not None
    programs = [found.n_programs or 0 for found in rows[-3:]]
    assert programs == sorted(set(programs))


# ---- Host, cold, errors -----------------------------------------------------------------------


def test_host_rows_are_side_by_side() -> None:
    """Each contender has its time without gradients, with, and for both passes."""
    calls = []

    def time_host(work: Any) -> dict[str, timing.Sample]:
        for call in work.values():
            call()
            calls.append(call())
        return {name: timing.Sample(1e-5, 2e-5, 3e-5, 5, 2e-5) for name in work}

    rows = extras.host(made_up_session(names=("F.rms_norm",)), BF16, time_host)
    assert [(each.contender, each.pass_, each.detail) for each in rows] == [
        (name, pass_, {"requires_grad": requires_grad})
        for pass_, requires_grad in ((FORWARD, False), (FORWARD, True), ("forward+backward", True))
        for name in ("ours", "F.rms_norm")
    ]
    for each in rows:
        schema.checked(each, "row")
    assert [y is not None and y.requires_grad for y in calls] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_cold_rows_have_a_bare_kernel_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and F.rms_norm are timed twice with a cold L2, and so is a kernel that only moves."""
    monkeypatch.setattr(extras, "COLD", (8, 64))
    n_asked = []

    def time_cold(name: str, call: timing.Work) -> timing.Sample:
        call()
        n_asked.append(name)
        time_s = {"ours": 2e-6, "F.rms_norm": 0.5e-6}.get(name, 1e-6)
        return timing.Sample(time_s, time_s, time_s, 7)

    rows = extras.cold(made_up_session(names=("F.rms_norm",)), BF16, time_cold)
    assert [each.contender for each in rows] == [
        *("ours", "F.rms_norm", "torch.neg"),
        *("ours", "F.rms_norm", "torch.add"),
    ]
    assert len(n_asked) == 2 * len(rows)
    for each in rows:
        schema.checked(each, "row")
        assert each.flags == (("above_ceiling",) if each.contender == "F.rms_norm" else ())
        assert each.repeat_time_s is not None


def test_errors_are_those_of_the_oracle() -> None:
    """Ours lies within its bounds; a contender that is not in the cell has no row."""
    who = ("ours", "F.rms_norm", "eager")
    rows = extras.errors(made_up_session(names=("F.rms_norm",)), Cell("errors", 12, 64, BF16, who))
    assert [(each.contender, each.pass_) for each in rows] == [
        (name, pass_) for name in ("ours", "F.rms_norm") for pass_ in (FORWARD, BACKWARD)
    ]
    for each in rows:
        schema.checked(each, "row")
        assert each.detail is not None
        tensors = {"y"} if each.pass_ == FORWARD else {"dx", "dw"}
        assert set(each.detail["max_ulp"]) == set(each.detail["error_over_bound"]) == tensors
        if each.contender == "ours":
            assert all(0 < ratio <= 1 for ratio in each.detail["error_over_bound"].values())


# ---- On a GPU ---------------------------------------------------------------------------------

BENCH = [sys.executable, "-m", "rmsnorm_ref", "bench", "--cells", "few", "--peers", "F.rms_norm"]


@pytest.mark.gpu
@pytest.mark.slow
def test_a_run_on_a_gpu_is_whole(tmp_path: Path) -> None:
    """Every cell of `few` has both contenders in both passes, at a time below a millisecond."""
    subprocess.run([*BENCH, "--out", str(tmp_path / "a.json")], check=True, capture_output=True)
    found = recording.load(tmp_path / "a.json")
    assert len(found.rows) == len(cells.cells("few")) * 2 * 2
    assert all(each.time_s and each.time_s.p50 < 1e-3 for each in found.rows)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_run_on_a_gpu_stops_when_asked(tmp_path: Path) -> None:
    """SIGINT in the middle ends it with 130 and a recording of what it had."""
    path, partial = tmp_path / "a.json", tmp_path / "a.json.partial"
    with subprocess.Popen([*BENCH, "--out", str(path)], stderr=subprocess.DEVNULL) as run:
        while not partial.exists() and run.poll() is None:
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130
    assert recording.load(path).provenance.interrupted
