"""What is timed and how it is summarised; the clock is made up, so the right answer is known."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from made_up_clock import MadeUpClock
from paths import DEVICE

from rmsnorm_ref import interpreter, oracle, traffic
from rmsnorm_ref.measure import calls, timing
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = torch.bfloat16


def nothing(_: object) -> None:
    """Stand for a call that need not do anything."""


# ---- Kernel time ------------------------------------------------------------------------------


def test_a_sample_is_the_time_of_one_call() -> None:
    """Whatever the numbers of inputs and loops, the median is what one call costs."""
    cost_s = {0: 3e-6, 1: 5e-6}
    for n_inputs, loops in itertools.product((1, 2, 7), (1, 4)):
        clock = MadeUpClock(lambda graph, _: cost_s[graph])
        samples = timing.graphed(
            {"a": nothing, "b": nothing}, range(n_inputs), loops=loops, clock=clock
        )
        assert clock.n_calls == [n_inputs * loops] * 2
        assert [samples[name].p50_s for name in "ab"] == pytest.approx([3e-6, 5e-6])


def test_contenders_take_turns() -> None:
    """After one untimed replay each, samples go A B A B, twice as many as rounds."""
    clock = MadeUpClock(lambda *_: 1.0)
    timing.graphed({"a": nothing, "b": nothing}, [0], n_rounds=3, clock=clock)
    assert clock.order == [0, 1] * 7


def test_first_replay_is_not_in_the_time() -> None:
    """A replay that pays for uploading the graph moves no quantile."""
    clock = MadeUpClock(lambda _, replay: 1e-6 if replay else 1.0)
    sample = timing.graphed({"a": nothing}, [0], clock=clock)["a"]
    assert sample.p80_s == pytest.approx(1e-6)


def test_repeat_is_a_second_interleaved_timing() -> None:
    """Samples alternate between the first timing and the repeat, so their medians differ here."""
    clock = MadeUpClock(lambda _, replay: 1e-6 if replay % 2 else 2e-6)
    sample = timing.graphed({"a": nothing}, [0], clock=clock)["a"]
    assert (sample.p50_s, sample.repeat_p50_s) == pytest.approx((1e-6, 2e-6))
    assert sample.n_samples == timing.N_ROUNDS


def test_every_contender_runs_on_every_input_before_its_capture() -> None:
    """Compilation, searches and a backward's forward happen outside of the graph."""
    seen: list[Any] = []
    clock = MadeUpClock(lambda *_: 1.0)
    timing.graphed({"a": seen.append}, ["x", "y"], clock=clock)
    assert seen == ["x", "y"]


def test_a_contender_that_fails_leaves_the_others() -> None:
    """Its name and exception are handed over; without a handler the exception comes through."""

    def broken(_: object) -> None:
        raise RuntimeError("too wide")

    told: list[tuple[str, str]] = []
    samples = timing.graphed(
        {"broken": broken, "a": nothing},
        [0],
        clock=MadeUpClock(lambda *_: 1.0),
        on_failure=lambda name, error: told.append((name, str(error))),
    )
    assert list(samples) == ["a"]
    assert told == [("broken", "too wide")]
    with pytest.raises(RuntimeError, match="too wide"):
        timing.graphed({"broken": broken}, [0], clock=MadeUpClock(lambda *_: 1.0))


@pytest.mark.parametrize(("inputs", "n_rounds"), [([], 15), ([0], 0)])
def test_no_samples_name_the_contender(inputs: list[int], n_rounds: int) -> None:
    """Without inputs or rounds nothing is returned as if it had been measured."""
    with pytest.raises(timing.NoSamplesError, match="ours"):
        timing.graphed({"ours": nothing}, inputs, n_rounds, clock=MadeUpClock(lambda *_: 1.0))
    assert timing.NoSamplesError.exit_code == 4


def test_quantiles_are_those_of_the_samples() -> None:
    """Of 1 to 11, a fifth lies below 3, half below 6, four fifths below 9, in any order."""
    sample = timing.Sample.of("a", [float(i) for i in (11, 3, 1, 9, 2, 6, 4, 10, 5, 8, 7)])
    assert (sample.p20_s, sample.p50_s, sample.p80_s, sample.n_samples) == (3, 6, 9, 11)
    assert sample.repeat_p50_s is None


# ---- Cold, and the host -----------------------------------------------------------------------


def test_cold_asks_for_all_samples_in_seconds() -> None:
    """do_bench is asked for every sample, not for its default, the mean; milliseconds become s."""

    def do_bench(call: Callable[[], object], *, return_mode: str) -> list[float]:
        assert return_mode == "all"
        call()
        return [1.0, 2.0, 30.0]

    ran: list[int] = []
    sample = timing.cold("a", lambda: ran.append(1), do_bench)
    assert ran
    assert (sample.p50_s, sample.n_samples) == (2e-3, 3)
    with pytest.raises(timing.NoSamplesError, match="a"):
        timing.cold("a", lambda: None, lambda *_, **__: [])


def test_host_time_leaves_out_the_first_round_and_the_wait() -> None:
    """A slow first call and the wait for the GPU count for nothing; the rest is per call."""
    now_s = [0.0]
    made = {"a": 0, "b": 0}

    def call(name: str, cost_s: float) -> None:
        made[name] += 1
        now_s[0] += 100.0 if made[name] == 1 else cost_s

    def wait() -> None:
        now_s[0] += 1000.0

    work = {"a": lambda: call("a", 2.0), "b": lambda: call("b", 3.0)}
    samples = timing.host(work, n_rounds=3, n_calls=5, timer=lambda: now_s[0], finish=wait)
    assert {name: sample.p50_s for name, sample in samples.items()} == {"a": 2.0, "b": 3.0}
    assert {sample.n_samples for sample in samples.values()} == {3}
    assert made == {"a": 35, "b": 35}


# ---- How many, and what is suspect ------------------------------------------------------------


@pytest.mark.parametrize("l2_bytes", [2**20, 50 * 2**20])
@pytest.mark.parametrize("n_bytes", [2**10, 2**18, 2**24, 2**28])
def test_inputs_that_take_turns_outgrow_the_l2(n_bytes: int, l2_bytes: int) -> None:
    """Inputs that take turns are two or more, and as many as a multiple of the L2 takes."""
    n_sets = timing.n_input_sets(n_bytes, l2_bytes)
    assert 2 <= n_sets <= calls.MOST_INPUT_SETS
    assert n_sets * n_bytes >= calls.L2_MULTIPLE * l2_bytes or n_sets == calls.MOST_INPUT_SETS


@pytest.mark.parametrize("n_sets", [2, 60, 256])
@pytest.mark.parametrize("n_bytes", [2**10, 2**22, 2**30])
def test_graphs_are_long_enough_and_no_longer(n_sets: int, n_bytes: int) -> None:
    """At the assumed speed a graph lasts long enough, and with one loop less it would not."""
    one_s = n_bytes / calls.ASSUMED_BANDWIDTH + calls.ASSUMED_LAUNCH_S
    loops = timing.n_loops(n_sets, n_bytes)
    assert loops >= 1
    assert loops * n_sets * one_s >= calls.GRAPH_S
    assert loops == 1 or (loops - 1) * n_sets * one_s < calls.GRAPH_S


@pytest.mark.parametrize(
    ("bandwidth", "ceiling", "footprint", "expected"),
    [
        (3e12, 4e12, 100, ()),
        (4.01e12, 4e12, 100, ("above_ceiling",)),
        (3e12, None, 10, ("fits_in_l2",)),
        (5e12, 4e12, 10, ("above_ceiling", "fits_in_l2")),
    ],
)
def test_suspect_bandwidths_are_flagged(
    bandwidth: float, ceiling: float | None, footprint: int, expected: tuple[str, ...]
) -> None:
    """A bandwidth above the ceiling, or from inputs that fit in the L2, is flagged as such."""
    assert timing.flags(bandwidth, ceiling, footprint, 10) == expected


def test_importing_measure_loads_nothing_heavy(tmp_path: Path) -> None:
    """No module but the ceilings' kernels imports Triton, a peer or a plotter, or starts CUDA."""
    folder = Path(timing.__file__).parent
    names = {path.stem for path in folder.glob("*.py")} - {"ceiling_kernels"}
    heavy = ("triton", "matplotlib", "liger_kernel", "fla", "flash_attn", "quack", "torch._dynamo")
    code = f"import sys, torch, importlib\nfor name in {sorted(names)}:\n"
    code += "    importlib.import_module('rmsnorm_ref.measure.' + name)\n"
    code += f"print([m for m in {heavy} if m in sys.modules], torch.cuda.is_initialized())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] False"


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU here")
def test_no_gpu_is_said_before_anything_is_loaded() -> None:
    """The error says what is missing and what runs anyway, and has an exit code of its own."""
    with pytest.raises(timing.NoGpuError, match="rmsnorm_ref check"):
        timing.require_gpu()
    assert timing.NoGpuError.exit_code == 3


# ---- What is called ---------------------------------------------------------------------------


def test_inputs_differ_and_repeat() -> None:
    """Input sets share w and nothing else, and the next process draws the same numbers."""
    first, again = (calls.make_inputs(3, 5, BF16, 2, DEVICE) for _ in range(2))
    assert first[0].w is first[1].w
    assert not torch.equal(first[0].x, first[1].x)
    assert first[0].x.data_ptr() != first[1].x.data_ptr()
    assert torch.equal(first[1].dy, again[1].dy)


@pytest.mark.parametrize("wrapper", [calls.Backward, calls.ForwardBackward])
def test_backward_returns_both_gradients(wrapper: Callable[..., Any]) -> None:
    """Both are those of the oracle, again and again, and no gradient is left on the inputs."""
    (inputs,) = calls.make_inputs(6, 32, torch.float32, 1, DEVICE)
    expected = oracle.rmsnorm_backward(inputs.dy, inputs.x, inputs.w)
    backward = wrapper(oracle.rmsnorm)
    for _ in range(2):
        for found, right in zip(backward(inputs), expected, strict=True):
            assert torch.equal(found, right)
    assert inputs.x.grad is None
    assert not inputs.x.requires_grad


def test_backward_runs_the_forward_once_per_input() -> None:
    """Only the first call on an input runs the forward, so a graph of later calls holds none."""
    ran: list[int] = []

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ran.append(x.data_ptr())
        return oracle.rmsnorm(x, w)

    inputs = calls.make_inputs(2, 8, torch.float32, 2, DEVICE)
    backward = calls.Backward(f)
    for _ in range(3):
        for each in inputs:
            backward(each)
    assert sorted(ran) == sorted(each.x.data_ptr() for each in inputs)


def test_forward_records_nothing() -> None:
    """The timed forward has no autograd in it; the recorded one has."""
    (inputs,) = calls.make_inputs(2, 8, torch.float32, 1, DEVICE)
    y: Any = calls.Forward(oracle.rmsnorm)(inputs)
    recorded: Any = calls.Recorded(oracle.rmsnorm)(inputs)
    assert y.grad_fn is None
    assert recorded.grad_fn is not None
    assert torch.equal(y, recorded)


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
def test_ceilings_move_the_obligatory_bytes(pass_: Any) -> None:
    """Every ceiling kernel reads x (and dy) whole and writes `out` whole, as the pass must."""
    interpreter.prepare(torch.device(DEVICE))
    for name, kernel in timing.ceilings(pass_).items():
        (inputs,) = calls.make_inputs(3, 700, torch.float32, 1, DEVICE)
        inputs.out.fill_(math.nan)
        kernel(inputs)
        total = inputs.x if pass_ == FORWARD else inputs.x + inputs.dy
        assert torch.equal(inputs.out, -total if name == "torch.neg" else total), name
    count = traffic.forward if pass_ == FORWARD else traffic.backward
    n_tensors = 2 if pass_ == FORWARD else 3
    assert count(3, 700, torch.float32).obligatory_bytes == n_tensors * inputs.x.nbytes


@pytest.mark.gpu
def test_a_graph_on_the_gpu_times_a_copy_near_its_bandwidth() -> None:
    """Kernel time of a large copy lies between the datasheet's limit and ten times as long."""
    inputs = calls.make_inputs(4096, 8192, BF16, 2)
    copies = {"neg": timing.ceilings(FORWARD)["torch.neg"]}
    sample = timing.graphed(copies, inputs, n_rounds=3, loops=4)["neg"]
    limit_s = 2 * inputs[0].x.nbytes / 20e12  # no card of today moves 20 TB/s
    assert limit_s < sample.p20_s <= sample.p80_s < 100 * limit_s
