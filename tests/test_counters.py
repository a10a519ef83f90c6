"""DRAM counters: calls told apart, the model put beside them, the child's call counted alone."""

from __future__ import annotations

import doctest
import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ncu_output import ERF, Counted, table

from rmsnorm_ref import tiling, traffic
from rmsnorm_ref.measure import counters, recording
from rmsnorm_ref.measure.ncu import CountersError, Launch
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD, checked

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the partial buffer the number of programs that an H200 has, on any machine."""
    monkeypatch.setattr(tiling, "sm_count", lambda _: 132)


def test_examples_in_the_docstrings_run() -> None:
    """What the docstrings promise is what they print."""
    assert doctest.testmod(counters).failed == 0


def test_markers_cut_the_launches_into_calls() -> None:
    """What lies between two markers is one call; what came before the first is nobody's."""
    early, mark, a, b = (Launch(name, 1, 2) for name in ("early", ERF, "a", "b"))
    assert counters.split([early, mark, a, mark, a, b], 2) == [[a], [a, b]]


@pytest.mark.parametrize(
    "names", [[], ["a"], [ERF, "a"], [ERF, "a", ERF], [ERF, "a", ERF, "a", ERF, "a"]]
)
def test_lost_or_empty_call_is_refused(names: list[str]) -> None:
    """Counts are never given to the wrong cell: two calls need two markers, both followed."""
    with pytest.raises(CountersError, match="2 calls were made"):
        counters.split([Launch(name, 1, 1) for name in names], 2)


class FakeRun:
    """Stand for ncu: count two kernels for every call of a plan, with numbers that tell it."""

    def __init__(self) -> None:
        self.plans: list[dict[str, Any]] = []

    def __call__(self, child: Sequence[str], *, flush: bool) -> str:
        """Return the table of a plan."""
        assert not flush
        assert list(child[:3]) == [sys.executable, "-m", "rmsnorm_ref.measure.counters"]
        self.plans.append(json.loads(child[3]))
        launches: list[Counted] = []
        for M, N, _ in self.plans[-1]["calls"]:
            launches += [(ERF, "4", "4"), ("first", str(M), "1"), ("second", str(N), "2")]
        return table(launches)


def test_rows_hold_counts_and_model_side_by_side() -> None:
    """Each contender runs all cells in one child; a row sums its call's kernels and is valid."""
    run = FakeRun()
    rows = counters.measure([(4096, 2048), (512, 2048)], torch.float16, run_under=run)
    assert [plan["contender"] for plan in run.plans] == ["ours", "eager"]
    assert {plan["dtype"] for plan in run.plans} == {"float16"}
    assert [(row.contender, row.M, row.pass_) for row in rows] == [
        (contender, M, pass_)
        for contender in ("ours", "eager")
        for M in (4096, 512)
        for pass_ in (FORWARD, BACKWARD)
    ]
    for i, row in enumerate(rows):
        assert checked(row, f"rows[{i}]") == row
        detail = dict(row.detail or {})
        assert detail["dram_read_bytes"] == row.M + row.N
        assert detail["dram_write_bytes"] == 3
        assert detail["kernels"] == ("first", "second")
    assert {row.path for row in recording.select(rows, contender="eager")} == {None}
    paths = [row.path for row in recording.select(rows, contender="ours", pass_=BACKWARD)]
    assert paths == ["backward", "few_rows_backward"]


@pytest.mark.parametrize(("M", "N"), counters.CELLS)
@pytest.mark.parametrize("pass_", counters.PASSES)
def test_model_is_what_traffic_expects_hbm_to_move(M: int, N: int, pass_: str) -> None:
    """Reads and writes add up to total_bytes and, in the backward, the scratch of 132 SMs."""
    dtype = torch.bfloat16
    both = sum(counters.model_bytes("ours", M, N, dtype, pass_))
    if pass_ == FORWARD:
        assert both == traffic.forward(M, N, dtype).total_bytes
        return
    few = tiling.backward_path(M, N, traffic.GPU, dtype) == "few_rows_backward"
    n_programs = 0 if few else tiling.n_programs(M, N, dtype, traffic.GPU)
    fused = traffic.backward(M, N, dtype)
    assert both == fused.total_bytes + fused.scratch_bytes(n_programs)
    assert (n_programs > 0) != few


def test_copy_that_no_kernel_makes_is_left_out_of_the_model() -> None:
    """The eager backward's x.pow(1) costs 2*M*N*e, which count only where a kernel copies."""
    args = ("eager", 4096, 4096, torch.bfloat16, "backward")
    whole = sum(counters.model_bytes(*args, ("mul", "direct_copy_kernel_cuda")))
    assert whole == traffic.eager_backward(4096, 4096, torch.bfloat16).total_bytes
    assert whole - sum(counters.model_bytes(*args, ("mul",))) == 2 * 4096 * 4096 * 2


@pytest.mark.parametrize("pass_", counters.PASSES)
def test_child_counts_the_last_turn_alone(pass_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All inputs had a turn, nearly all a second, and one call lies between Start and Stop."""
    seen: list[str] = []
    properties = SimpleNamespace(L2_cache_size=8 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(torch, "erf", lambda *_, **__: seen.append("mark"))
    work = counters.calls.Forward if pass_ == FORWARD else counters.calls.Backward
    called = work.__call__
    monkeypatch.setattr(work, "__call__", lambda *a: (seen.append("call"), called(*a))[1])
    plan = {"contender": "eager", "dtype": "float32", "calls": [(4, 256, pass_)] * 2}
    counters.make_calls(json.dumps(plan), "cpu")
    n_sets = counters.calls.n_input_sets(2 * 4 * 256 * 4, 8 * 1024)
    assert n_sets > 2
    assert seen == [*["call"] * (2 * n_sets - 1), "start", "mark", "call", "stop"] * 2


@pytest.mark.gpu
def test_counters_of_this_gpu() -> None:
    """Where ncu may count, ours is one kernel forward and reads no less than x."""
    M, N = 4096, 8192
    try:
        rows = counters.measure([(M, N)], torch.bfloat16, ["forward"])
    except CountersError as error:
        pytest.skip(str(error))
    detail = dict(rows[0].detail or {})
    assert len(detail["kernels"]) == 1
    assert "rmsnorm_forward" in detail["kernels"][0]
    assert detail["dram_read_bytes"] >= M * N * 2
