"""Kernels that remember, that write where nobody looks, and that refuse: what a review says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from reviewed import by_hand, reviewed
from torch import Tensor

from rmsnorm_ref import oracle, review
from rmsnorm_ref.review import worker
from rmsnorm_ref.review.cases import Case
from rmsnorm_ref.review.findings import rank
from rmsnorm_ref.review.judge import raised
from rmsnorm_ref.review.process import Target
from rmsnorm_ref.review.rules import FAIL, NOTE

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

REMEMBERS = """
from rmsnorm_ref import oracle

kept = {}

def f(x, w, eps):
    eps = kept.setdefault(x.shape[-1], eps)
    return oracle.rmsnorm(x, w, eps)
"""
COUNTS = """
from rmsnorm_ref import oracle

n = 0

def f(x, w, eps):
    global n
    n += 1
    return oracle.rmsnorm(x, w, eps) * (2 if n > 30 else 1)
"""


def plain(case: Case) -> bool:
    """Keep one shape, and with it the probes of the smallest input."""
    return (case.M, case.N) == (4, 8) or (case.M, case.N, case.values) == (3, 17, "random")


def test_an_eps_that_is_kept_is_no_eps_of_another_place(tmp_path: Path) -> None:
    """What a fit over several calls says is not told of a kernel that keeps an earlier eps."""
    path = tmp_path / "remembers.py"
    path.write_text(REMEMBERS)
    report = review.review(f"{path}:f", device="cpu", dtypes=("float32",), only=plain)
    assert report.rules() == {"r-independent-calls"}, report.text()
    assert "whatever is passed" not in report.text()
    assert "depend on earlier calls" in report.text()


def test_a_property_is_tried_again_in_a_fresh_process(tmp_path: Path) -> None:
    """A kernel that goes wrong after some calls is not said to let a NaN out of its row."""
    path = tmp_path / "counts.py"
    path.write_text(COUNTS)
    report = review.review(f"{path}:f", device="cpu", dtypes=("float32",), only=plain)
    assert report.rules() == {"r-independent-calls"}, report.text()


class WritesToY(torch.autograd.Function):
    """Use y, which the caller holds, as the backward's work space."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        """Return y and keep it."""
        y = oracle.rmsnorm(x, w, eps)
        ctx.save_for_backward(x, w)
        ctx.kept, ctx.eps = y, eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Return dx and dw, and leave zeros behind."""
        x, w = ctx.saved_tensors
        ctx.kept.zero_()
        return *oracle.rmsnorm_backward(dy, x, w, ctx.eps), None


def writes_w_grad(dx: Tensor, dw: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Leave dw in w.grad as well."""
    given[-1].grad = dw.clone()
    return dx, dw


@pytest.mark.parametrize(
    ("f", "what"),
    [(WritesToY.apply, "wrote to y"), (by_hand(backward=writes_w_grad), "w.grad")],
    ids=["y", "w.grad"],
)
def test_what_the_caller_holds_is_not_written_to(f: object, what: str) -> None:
    """A backward that writes to y, or to the grad of a leaf, is found, with code that shows it."""
    report = reviewed(f, dtypes=("float32",), only=lambda case: (case.M, case.N) == (4, 64))
    (found,) = (one for one in report.findings if one.rule == "r-inputs-untouched")
    assert what in found.title
    with pytest.raises(AssertionError):
        exec(found.code, {"f": f})  # noqa: S102


def test_a_gradient_of_one_dtype_is_asked_for_in_all() -> None:
    """A kernel that gives none in fp16 is not forward-only: there it is asked for and missing."""
    right = by_hand()

    def f(x: Tensor, w: Tensor, eps: float) -> Tensor:
        y = right(x, w, eps)
        return y.detach() if x.dtype == torch.float16 else y

    report = reviewed(f, only=lambda case: (case.M, case.N) == (4, 64))
    assert "r-who-needs-grad" in report.rules(), report.text()
    assert "r-forward-only" not in report.rules(NOTE)


@pytest.mark.parametrize(
    ("refused", "severity"),
    [(lambda x: x.shape[0] == 11, FAIL), (lambda x: x.shape[1] % 2 == 1, NOTE)],
    ids=["eleven rows", "odd widths"],
)
def test_a_number_of_rows_cannot_be_refused(refused: object, severity: str) -> None:
    """A width that is refused aloud is a note; rows, beside others of that width, are a failure."""

    def f(x: Tensor, w: Tensor, eps: float) -> Tensor:
        if x.dim() == 2 and refused(x):  # type: ignore[operator]
            raise ValueError("not supported")
        return oracle.rmsnorm(x, w, eps)

    def fed(case: Case) -> bool:
        return case.M <= 64 and case.N in {8, 17, 20, 32, 44}

    report = reviewed(f, dtypes=("float32",), only=fed)
    severities = {one.severity for one in report.findings if one.rule == "r-runs"}
    assert severity in severities, report.text()
    assert (severity == FAIL) == ("r-runs" in report.rules())


def test_memory_that_is_short_is_told_from_memory_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No room for a small input is a failure; where memory is short, it is not run."""

    def greedy(x: Tensor, w: Tensor, eps: float) -> Tensor:
        raise torch.OutOfMemoryError(f"no room for {x.shape}, {w.shape}, {eps}")

    report = reviewed(greedy, dtypes=("float32",))
    assert report.rules() == {"r-runs"}
    asked = worker.Worker(Target("", function=greedy).find, "cpu")
    asked.answer({"op": "load"})
    case = Case(4, 8).json()
    requests = [{"op": "case", "case": case}]
    requests.append({"op": "probe", "probe": "same", "case": case, "gives": "xw"})
    for request in requests:
        assert worker.answered(asked, request)["failed"]["type"] == "OutOfMemoryError"
    monkeypatch.setattr(worker, "_is_short", lambda _: True)
    for request in requests:
        assert worker.answered(asked, request) == {"not_run": True}


def test_an_exception_that_cannot_be_printed_is_named() -> None:
    """An exception whose text raises keeps its type in the report."""

    class OddError(RuntimeError):
        """Raise where it is printed."""

        def __str__(self) -> str:
            raise ValueError

    assert raised("forward", OddError())["type"] == "OddError"


def test_what_was_written_to_heads_the_report() -> None:
    """A kernel that writes to x is told of that first, and of the wrong values it causes next."""

    def f(x: Tensor, w: Tensor, eps: float) -> Tensor:
        y = oracle.rmsnorm(x, w, eps)
        x.detach().mul_(2)
        return y

    report = reviewed(f, dtypes=("float32",), only=lambda case: (case.M, case.N) == (4, 64))
    assert min(report.findings, key=rank).rule == "r-inputs-untouched"
