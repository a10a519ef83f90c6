"""The eager chain: launches paired with the model, and a speed-up explained without remainder."""

from __future__ import annotations

import dataclasses
import doctest
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rmsnorm_ref import steps, traffic
from rmsnorm_ref.measure import chain, explanation, timing
from rmsnorm_ref.measure.chain import Profiled
from rmsnorm_ref.measure.schema import BACKWARD, FORWARD, Quantiles, Row, checked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BF16 = torch.bfloat16
CELL = (4096, 4096, BF16)
MEMSET, MEMCPY = "Memset (Device)", "Memcpy DtoD (Device -> Device)"


def elementwise(functor: str) -> str:
    """Spell the CUDA name of an elementwise kernel."""
    return f"void at::native::vectorized_elementwise_kernel<4, at::native::{functor}, ...>(int)"


MUL = elementwise("BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor>")
POW = elementwise("(anonymous namespace)::pow_tensor_scalar_kernel_impl<c10::BFloat16>")
SCALED = elementwise("BUnaryFunctor<float, float, float, binary_internal::MulFunctor<float> >")
ADD = elementwise("CUDAFunctor_add<c10::BFloat16>")
SUM = "void at::native::reduce_kernel<512, 1, at::native::func_wrapper_t<at::native::sum_functor>>"
SEED_FORWARD = [
    POW,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<at::native::MeanOps<float>>>",
    elementwise("CUDAFunctorOnSelf_add<c10::BFloat16>"),
    elementwise("rsqrt_kernel_cuda(at::TensorIteratorBase&)::{lambda()#2}"),
    MUL,
    MUL,
]
SEED_BACKWARD = [
    *(MUL, MUL, MEMSET, SUM, MUL, MUL, SUM, POW, SCALED, MUL, SCALED),
    *(MEMCPY, SCALED, MUL, ADD),
]


def model_names(pass_: Any, spelling: traffic.Spelling = "seed") -> list[str]:
    """Name the model's kernels at `CELL`."""
    return [kernel.name for kernel in chain.model(*CELL, spelling, pass_)]


def launches(names: Sequence[str], n_calls: int = 3) -> list[Profiled]:
    """Make up calls in which kernel i takes i + 1 us, and a little more in every later call."""
    return [
        Profiled(name, (i + 1) * 1e-6 * (1 + call / 100))
        for call in range(n_calls)
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize("module", [chain, explanation])
def test_examples_in_the_docstrings_run(module: Any) -> None:
    """What the docstrings promise is what they print."""
    assert doctest.testmod(module).failed == 0


# ---- Pairing ----------------------------------------------------------------------------------


def test_every_operator_of_the_model_has_a_cuda_name() -> None:
    """A kernel that `traffic.py` adds to a chain must be told how CUDA calls it."""
    operators = {kernel[0] for kernel in (*steps.EAGER_FORWARD, *steps.EAGER_BACKWARD)}
    assert operators == chain.CUDA_NAMES.keys()


@pytest.mark.parametrize("spelling", ["seed", "fp32"])
@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
def test_model_groups_all_bytes_of_the_chain(spelling: traffic.Spelling, pass_: Any) -> None:
    """Kernels are as many as the chain has, and their bytes add up to the chain's."""
    count = traffic.eager_forward if pass_ == FORWARD else traffic.eager_backward
    whole = count(*CELL, spelling=spelling)
    kernels = chain.model(*CELL, spelling, pass_)
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    assert {step.kernel for step in whole.steps} == {kernel.name for kernel in kernels}
    assert sum(kernel.n_bytes for kernel in kernels) == whole.total_bytes
    assert sum(kernel.obligatory_bytes for kernel in kernels) == whole.obligatory_bytes


def test_same_count_and_names_pair_in_order() -> None:
    """The seed's forward launches what is modelled, kernel for kernel."""
    pairs = chain.match(SEED_FORWARD, model_names(FORWARD))
    assert pairs == [(i, "order") for i in range(6)]


def test_fill_before_a_reduction_belongs_to_no_step() -> None:
    """A launch that the model lacks is paired with none; all others keep their step, by name."""
    names = model_names(BACKWARD)
    pairs = chain.match(SEED_BACKWARD, names)
    fill = SEED_BACKWARD.index(MEMSET)
    assert pairs[fill] == (None, "none")
    others = pairs[:fill] + pairs[fill + 1 :]
    assert others == [(i, "name") for i in range(len(names))]


def test_kernel_of_unknown_name_takes_the_place_left_between_two_known() -> None:
    """A name that nobody foresaw is paired by order if just one step is left for it."""
    renamed = [*SEED_FORWARD[:3], "void fast_inverse_root(int)", *SEED_FORWARD[4:]]
    pairs = chain.match(renamed, model_names(FORWARD))
    assert [index for index, _ in pairs] == list(range(6))
    assert pairs[3] == (3, "order")


def test_fused_kernels_leave_their_steps_unpaired() -> None:
    """Where fewer kernels ran than were modelled, no step is given to the wrong one."""
    fused = [SEED_FORWARD[0], SEED_FORWARD[1], "void fused(int)", MUL, MUL]
    pairs = chain.match(fused, model_names(FORWARD))
    assert [index for index, _ in pairs] == [0, 1, None, 4, 5]


@pytest.mark.parametrize("names", [[], ["unknown"] * 2, ["unknown"] * 9])
def test_strange_profile_pairs_nothing(names: list[str]) -> None:
    """Kernels that all have unknown names and another count are given no step at all."""
    assert chain.match(names, model_names(FORWARD)) == [(None, "none")] * len(names)


# ---- Rows -------------------------------------------------------------------------------------


def test_rows_carry_each_kernels_time_and_bytes() -> None:
    """A row per kernel of a call: the median over calls, its model step, valid by the schema."""
    rows = chain.rows_of(launches(SEED_BACKWARD), 3, *CELL, "seed", BACKWARD)
    details = [dict(row.detail or {}) for row in rows]
    assert [detail["kernel"] for detail in details] == SEED_BACKWARD
    assert [detail["index"] for detail in details] == list(range(len(SEED_BACKWARD)))
    assert [step for detail in details for step in detail["steps"]] == model_names(BACKWARD)
    total = traffic.eager_backward(*CELL).total_bytes
    assert sum(detail["n_bytes"] for detail in details) == total
    for i, row in enumerate(rows):
        assert checked(row, f"rows[{i}]") == row
        assert row.time_s is not None
        assert row.time_s.p50 == launches(SEED_BACKWARD)[len(rows) + i].time_s
        assert row.n_samples == 3


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "no kernel of eager forward at 4096 x 4096"),
        (launches(SEED_FORWARD)[:-1], "3 calls of eager forward"),
        ([*launches(SEED_FORWARD, 2), *launches(SEED_FORWARD[::-1], 1)], "not the same ones"),
    ],
)
def test_unequal_calls_are_refused(found: list[Profiled], said: str) -> None:
    """No profile, a lost launch, another order: an error that names the cell, and no rows."""
    with pytest.raises(timing.NoSamplesError, match=said):
        chain.rows_of(found, 3, *CELL, "seed", FORWARD)


def test_events_of_the_gpu_alone_are_launches() -> None:
    """Host events, annotations and waits are dropped, and launches come in order of start."""

    def event(name: str, start_us: float, *, device: str = "CUDA", annotation: bool = False) -> Any:
        return SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name=device),
            is_user_annotation=annotation,
            time_range=SimpleNamespace(start=start_us, end=start_us + 2.0),
        )

    events = [
        event("second", 9.0),
        event("cudaLaunchKernel", 1.0, device="CPU"),
        event("a range", 0.0, annotation=True),
        event("Context Sync", 5.0),
        event("first", 3.0),
    ]
    assert chain.launches_of(events) == [Profiled("first", 2e-6), Profiled("second", 2e-6)]


def test_profile_of_the_host_has_no_launches() -> None:
    """Torch's own events have the attributes that are read, and on the CPU none is a launch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).add_(1)
    events = profile.events()
    assert events
    assert chain.launches_of(events) == []


# ---- Explaining -------------------------------------------------------------------------------


def kernel_row(contender: Any, pass_: Any, time_s: float) -> Row:
    """Make up a kernel row at `CELL`."""
    return Row(
        kind="kernel",
        section="seed",
        contender=contender,
        pass_=pass_,
        M=CELL[0],
        N=CELL[1],
        dtype="bfloat16",
        w_dtype="bfloat16",
        time_s=Quantiles(time_s, time_s, time_s),
        n_samples=1,
    )


def at_one_bandwidth(pass_: Any, small_s: float) -> Iterator[Row]:
    """Make up a chain whose large kernels all reach 1 TB/s of obligatory bytes."""
    for index, kernel in enumerate(chain.model(*CELL, "seed", pass_)):
        time_s = kernel.obligatory_bytes / 1e12 if kernel.obligatory_bytes else small_s
        detail = {"index": index, "steps": (kernel.name,), "n_bytes": kernel.n_bytes}
        row = kernel_row("eager", pass_, time_s)
        yield dataclasses.replace(row, kind="eager_kernel", detail=detail)


@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
def test_bytes_explain_all_where_bandwidths_agree(pass_: Any) -> None:
    """At one bandwidth and with nothing small, the measured speed-up is the predicted one."""
    fused = traffic.forward if pass_ == FORWARD else traffic.backward
    eager = traffic.eager_forward if pass_ == FORWARD else traffic.eager_backward
    ours = kernel_row("ours", pass_, fused(*CELL).obligatory_bytes / 1e12)
    found = explanation.explain(list(at_one_bandwidth(pass_, 0.0)), ours)
    assert math.isclose(found.measured, found.predicted)
    assert math.isclose(found.predicted, traffic.predicted_speedup(eager(*CELL), fused(*CELL)))
    assert math.isclose(found.bandwidth_factor, 1.0)
    assert found.left_out == 0.0


@pytest.mark.parametrize("with_chain", [True, False])
def test_speed_up_splits_without_remainder(with_chain: bool) -> None:
    """Bandwidths, small kernels and gaps account for the whole difference, whatever they are."""
    kernels = chain.rows_of(launches(SEED_BACKWARD), 3, *CELL, "seed", BACKWARD)
    ours = kernel_row("ours", BACKWARD, 7e-6)
    whole = kernel_row("eager", BACKWARD, 150e-6)
    found = explanation.explain(kernels, ours, whole if with_chain else None)
    times = [row.time_s.p50 for row in kernels if row.time_s]
    theirs = 150e-6 if with_chain else sum(times)
    assert math.isclose(found.measured, theirs / 7e-6)
    split = found.predicted * found.bandwidth_factor + found.left_out
    assert math.isclose(split, found.measured)
    # The fill of 3 us and what works on one number per row: power, halving, product.
    assert math.isclose(found.small_s, sum(times[i] for i in (2, 7, 8, 9)))


@pytest.mark.parametrize("changes", [{"M": 8}, {"dtype": "float16"}, {"pass_": FORWARD}])
def test_rows_of_two_cells_are_not_explained(changes: dict[str, Any]) -> None:
    """Times of different cells, dtypes or passes are never divided by one another."""
    kernels = list(at_one_bandwidth(BACKWARD, 1e-6))
    with pytest.raises(ValueError, match="one cell is wanted"):
        explanation.explain(
            kernels, dataclasses.replace(kernel_row("ours", BACKWARD, 1e-6), **changes)
        )
    with pytest.raises(ValueError, match="one cell is wanted"):
        explanation.explain([], kernel_row("ours", BACKWARD, 1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("spelling", ["seed", "fp32"])
@pytest.mark.parametrize("pass_", [FORWARD, BACKWARD])
def test_profile_of_this_gpu_holds_every_step(spelling: traffic.Spelling, pass_: Any) -> None:
    """Every kernel of the model is found among those that PyTorch launches here."""
    rows = chain.eager_profile(*CELL, spelling, pass_)
    paired = [step for row in rows for step in dict(row.detail or {})["steps"]]
    assert paired == model_names(pass_, spelling)
