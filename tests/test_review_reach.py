"""What the plan, the probes and the fences reach, and right kernels that they must not accuse."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from reviewed import by_hand, reviewed
from torch import Tensor

from rmsnorm_ref import oracle
from rmsnorm_ref.review import candidate, fences, plan, probes
from rmsnorm_ref.review.cases import HEADS, Case, make
from rmsnorm_ref.review.judge import run
from rmsnorm_ref.review.pool import Pool
from rmsnorm_ref.review.process import Target
from rmsnorm_ref.review.rules import FAIL, NOTE
from rmsnorm_ref.review.tolerance import CLEAN, SPELLINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
Backward = tuple[Tensor, Tensor]


def functional(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Call PyTorch's own."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps)


# ---- How it is called ----------------------------------------------------------------------------


def imports_at_the_call(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Need the caller's builtins, as a TorchScript function does."""
    assert "__import__" in sys._getframe(1).f_builtins
    return oracle.rmsnorm(x, w, eps)


def test_a_candidate_is_called_with_builtins() -> None:
    """The frame that calls it has all builtins, and a signature still names x, w, eps and N."""
    call = candidate.adapt(imports_at_the_call, "x, w, eps").call
    assert call(torch.ones(2, 4), torch.ones(4), 1e-6).shape == (2, 4)
    with pytest.raises(ValueError, match="uses open"):
        candidate.adapt(imports_at_the_call, "x, w, open('f')")


class Module(torch.nn.Module):
    """Keep a buffer that its backward needs, beside the weight."""

    def __init__(self, n_columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(n_columns))
        self.register_buffer("one", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Compute y."""
        return oracle.rmsnorm(x, self.weight) * self.one


def test_a_module_that_was_made_in_inference_mode_is_trained() -> None:
    """A module is made at its first call, which may be any, and called again in all others."""
    call = candidate.adapt(Module, init="N").call
    x, w = torch.randn(3, 8), torch.ones(8)
    with torch.inference_mode():
        call(x, w, 1e-6)
    call(x.requires_grad_(), w, 1e-6).sum().backward()


# ---- What is fed ---------------------------------------------------------------------------------


def as_if_packed(like: Tensor, values: Tensor) -> Tensor:
    """Write row after row into memory that has the order of another tensor."""
    made = torch.empty_like(like)
    made.as_strided((values.numel(),), (1,)).copy_(values.reshape(-1))
    return made


def y_as_if_packed(y: Tensor, x: Tensor, _: Tensor) -> Tensor:
    """Write y as if x were packed."""
    return as_if_packed(x, y) if x.stride(-1) == 1 else y


def dx_as_if_packed(dx: Tensor, dw: Tensor, dy: Tensor, *_: Tensor) -> Backward:
    """Write dx as if dy were packed."""
    return (as_if_packed(dy, dx) if dy.stride(-1) == 1 and 0 not in dy.stride() else dx), dw


def sixteen_rows(dx: Tensor, dw: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> Backward:
    """Stop dw at the 16th row where w has another dtype than x."""
    if w.dtype != x.dtype and x.dim() == 2:
        dw = oracle.rmsnorm_backward(dy[:16].to(x.dtype), x[:16], w)[1]
    return dx, dw


def clamped(_: Tensor, __: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> Backward:
    """Clamp dy."""
    return oracle.rmsnorm_backward(dy.to(x.dtype).clamp(-16, 16), x, w)


def doubled_for(x_dtype: torch.dtype, w_dtype: torch.dtype) -> Any:
    """Return twice y for one pair of dtypes."""
    return by_hand(lambda y, x, w: 2 * y if (x.dtype, w.dtype) == (x_dtype, w_dtype) else y)


def heads(case: Case) -> bool:
    """Keep transposed heads, and what is packed beside them."""
    return case.N == 40 and (HEADS in {case.x_layout, case.dy_layout} or case.lead == (2, 2, 3))


def mixed(case: Case) -> bool:
    """Keep a w in another dtype."""
    return bool(case.w_dtype) and case.N < 64


# The fault, its rule, and what is fed of the plan.
FED: dict[str, tuple[Any, str, Callable[[Case], bool]]] = {
    "heads in y": (by_hand(y_as_if_packed), "r-layout-x", heads),
    "heads in dx": (by_hand(backward=dx_as_if_packed), "r-layout-dy", heads),
    "many rows, mixed": (by_hand(backward=sixteen_rows), "r-mixed-dtype", mixed),
    "w in fp16": (doubled_for(torch.float32, torch.float16), "r-mixed-dtype", mixed),
    "fp16 and bf16": (doubled_for(torch.float16, torch.bfloat16), "r-mixed-dtype", mixed),
}


@pytest.mark.parametrize("name", FED)
def test_the_plan_shows_it(name: str) -> None:
    """A short plan holds the input that shows the fault, and the code of its finding raises."""
    f, rule, fed = FED[name]
    report = reviewed(f, only=fed)
    assert report.rules() == {rule}, report.text()
    finding = next(found for found in report.findings if found.rule == rule)
    with pytest.raises(AssertionError):
        exec(finding.code, {"f": f})  # noqa: S102  # what a report tells its reader to do


def test_a_large_dy_shows_a_clamp() -> None:
    """A backward that clamps dy fails, and what does not is right under the same dy."""
    assert reviewed(by_hand(backward=clamped), only=_large).verdict == "fail"
    assert reviewed(functional, only=_large).rules() == set()


def _large(case: Case) -> bool:
    return case.values == "large dy"


@pytest.mark.parametrize("layouts", [(HEADS, "packed"), ("packed", HEADS), (HEADS, HEADS)])
def test_transposed_heads_are_the_same_numbers(layouts: tuple[str, str]) -> None:
    """Transposed heads hold what is packed holds, in another order of memory."""
    case = Case(24, 8, x_layout=layouts[0], dy_layout=layouts[1])
    found, packed = make(case), make(Case(24, 8))
    for name, layout in zip(("x", "dy"), layouts, strict=True):
        assert found[name].shape == case.shape == (2, 2, 6, 8)
        assert torch.equal(found[name].reshape(24, 8), packed[name])
        assert found[name].is_contiguous() == (layout == "packed")
    assert all(t["level"] == CLEAN for t in run(oracle.rmsnorm, case)["tensors"].values())


def test_ordinary_sizes_are_fed() -> None:
    """Many rows that are wide are in the short plan at full speed, and more in the full one."""
    largest = max(plan.cases(plan.Scope()), key=lambda case: case.M * case.N)
    assert (largest.M, largest.N) == (2048, 1024)  # as the review's page says
    for full in (False, True):
        cases = plan.cases(plan.Scope(full=full))
        assert any(c.M > 32 and 2048 <= c.N <= 4096 for c in cases)
        assert any(c.M > 128 and c.N > 4096 for c in cases)
        assert any(c.M * c.N >= 2**20 and c.N <= 1024 for c in cases)
    assert any(c.M > 512 and c.N > 8192 for c in cases)
    for case in plan.cases(plan.Scope(interpreted=True)):
        assert case.M * case.N <= 2**20


# ---- What is asked -------------------------------------------------------------------------------


def in_float16(_: Tensor, dw: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> Backward:
    """Multiply dy by w in x's dtype, and do the rest in fp32."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    dyw, x_hat = (dy * w).float(), x.float() * rstd
    return ((dyw - x_hat * (dyw * x_hat).mean(-1, keepdim=True)) * rstd).to(x.dtype), dw


@pytest.mark.parametrize("shape", [(5, 1000), (9, 9000)])
def test_a_loss_scale(shape: tuple[int, int]) -> None:
    """A product that leaves float16's range fails a kernel in fp32, and is a note on eager code."""
    case = Case(*shape, "float16")
    assert probes.run(by_hand(backward=in_float16), "loss_scale", case, "xw")["severity"] == FAIL
    for spelled in SPELLINGS.values():
        assert probes.run(spelled, "loss_scale", case, "xw")["severity"] == NOTE
    for right in (oracle.rmsnorm, functional):
        for seed in range(4):
            assert probes.run(right, "loss_scale", replace(case, seed=seed), "xw") == {}


def inferring(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Return something else in inference mode."""
    return oracle.rmsnorm(x, w, eps) * (1 + torch.is_inference_mode_enabled())


def not_inferring(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Refuse inference mode."""
    assert not torch.is_inference_mode_enabled()
    return oracle.rmsnorm(x, w, eps)


def test_inference_mode() -> None:
    """Another y in inference mode fails, an error there is a note, the same y is right."""
    case = Case(4, 8)
    assert probes.run(inferring, "inference", case, "xw")["severity"] == FAIL
    assert probes.run(not_inferring, "inference", case, "xw")["severity"] == NOTE
    assert probes.run(oracle.rmsnorm, "inference", case, "xw") == {}


def doing(act: Callable[[], Any], *, backward: bool) -> Any:
    """Make a right kernel that does something besides, in one of its passes."""

    def forwards(y: Tensor, *_: Tensor) -> Tensor:
        act()
        return y

    def backwards(dx: Tensor, dw: Tensor, *_: Tensor) -> Backward:
        act()
        return dx, dw

    return by_hand(backward=backwards) if backward else by_hand(forwards)


ACTS: dict[str, tuple[Callable[[], Any], str]] = {
    "the default dtype": (lambda: torch.set_default_dtype(torch.float64), FAIL),
    "the seed of random numbers": (lambda: torch.manual_seed(0), FAIL),
    "the state of random numbers": (lambda: torch.rand(1), NOTE),
    "the number of threads": (lambda: torch.set_num_threads(2), NOTE),
    "the use of deterministic algorithms": (
        lambda: torch.set_deterministic_debug_mode("warn"), NOTE,
    ),
}  # fmt: skip


@pytest.fixture
def untouched() -> Iterator[None]:
    """Hold what a test changes for the process to what it was."""

    def state() -> list[Any]:
        return [torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
                torch.get_deterministic_debug_mode(), torch.get_rng_state().tolist()]  # fmt: skip

    before = state()
    yield
    assert state() == before


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("what", ACTS)
def test_what_the_process_shares(what: str, backward: bool) -> None:
    """What a pass changes for the whole process is named, and put back."""
    act, severity = ACTS[what]
    f = doing(act, backward=backward)
    for _ in range(2):  # the first call may have changed it for good
        found = probes.run(f, "state_grads" if backward else "state", Case(4, 8), "xw")
        assert what in found["said"]
        assert found["severity"] == severity
    assert probes.run(f, "state" if backward else "state_grads", Case(4, 8), "xw") == {}


def quiet(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Leave recording off."""
    y = by_hand()(x, w, eps)
    torch.set_grad_enabled(False)
    return y


def test_recording_left_off_is_told_as_such() -> None:
    """A kernel that turns recording off breaks one rule, by whatever it is called."""

    def probed(case: Case) -> bool:
        return case == replace(Case(4, 8), needs=case.needs)

    assert reviewed(quiet, only=probed, dtypes=("float32",)).rules() == {"r-global-state"}


@pytest.mark.usefixtures("untouched")
def test_a_process_is_left_as_it_was() -> None:
    """Where a candidate is called in this very process, what it changes is put back."""
    pool = Pool(Target("quiet", function=quiet), "cpu", 20.0)
    pool.in_process = True
    assert "failed" not in pool.ask({"op": "load"})
    assert "failed" not in pool.ask({"op": "case", "case": Case(4, 8).json()})


@pytest.mark.parametrize("interpreted", [False, True])
def test_properties_are_asked(interpreted: bool) -> None:
    """A plan asks about state once in each dtype, and about a loss scale in float16 alone."""
    chosen = plan.probes(plan.Scope(interpreted=interpreted))
    assert [case.dtype for name, case in chosen if name == "state"] == list(plan.ALL_DTYPES)
    assert {case.dtype for name, case in chosen if name == "loss_scale"} == {"float16"}
    assert any(name == "inference" for name, _ in chosen)


# ---- What is handed out --------------------------------------------------------------------------


def test_memory_that_grows_takes_its_fence_along() -> None:
    """A tensor that is made larger in place may be filled, and what is behind it may not."""
    with fences.raised() as fence:
        made = torch.empty(3)
        view = made.view(3)
        made.fill_(1)
        made.resize_(200, 1000)
        assert bool((view == 1).all())
        assert bool(made.flatten()[3:].isnan().all())
        made.fill_(2)
        torch.empty(2, dtype=torch.bfloat16).resize_as_(made.bfloat16()).zero_()
        assert bool((view == 2).all())
        assert fence.are_whole()
        made.as_strided((1,), (1,), made.storage_offset() + made.numel()).fill_(0)
        assert not fence.are_whole()


def test_what_was_written_before_it_grew_is_not_forgotten() -> None:
    """A store behind a tensor is seen, though the tensor takes that place later."""
    with fences.raised() as fence:
        made = torch.empty(3)
        made.as_strided((4,), (1,)).fill_(0)
        made.resize_(10)
        assert not fence.are_whole()


def test_memory_that_was_given_back_is_not_read() -> None:
    """A storage that the candidate has freed is left alone."""
    with fences.raised() as fence:
        made = torch.empty(8)
        made.untyped_storage().resize_(0)
        assert fence.are_whole()


def resized(y: Tensor, *_: Tensor) -> Tensor:
    """Hand out a tensor that began as one element."""
    return torch.empty(1, dtype=y.dtype).resize_(y.shape).copy_(y)


def test_a_result_that_grew_is_right() -> None:
    """A kernel that makes its result larger in place writes nothing outside."""
    outcome = run(by_hand(resized), Case(6, 40))
    assert not outcome["flags"]
    assert all(tensor["level"] == CLEAN for tensor in outcome["tensors"].values())
