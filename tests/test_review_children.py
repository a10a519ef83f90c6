"""The processes a review runs in: several at once answer like one, and each end is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmsnorm_ref import oracle, review
from rmsnorm_ref.review import semantics, worker
from rmsnorm_ref.review.cases import Case
from rmsnorm_ref.review.crew import Crew
from rmsnorm_ref.review.process import Target
from rmsnorm_ref.review.rules import NOTE
from rmsnorm_ref.review.shrink import Shrinker

if TYPE_CHECKING:
    from pathlib import Path

IN_TRITON = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x, w, y, N, eps, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * N + cols
    row = tl.load(x + at, mask=cols < N, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(row * row, 0) / N + eps)
    gain = tl.load(w + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(y + at, (row * rstd * gain).to(y.dtype.element_ty), mask=cols < N)

def f(x, w, eps):
    x, w = x.detach().contiguous(), w.detach().contiguous()
    y = torch.empty_like(x)
    if len(x):
        kernel[(x.numel() // x.shape[-1],)](
            x, w, y, x.shape[-1], eps, triton.next_power_of_2(x.shape[-1])
        )
    return y
"""
ENDS_AT_17 = """
import os
from rmsnorm_ref import oracle

def f(x, w, eps):
    if x.shape[-1] == 17:
        os.abort()
    return oracle.rmsnorm(x, w, eps)
"""


def test_a_crew_answers_like_one_child(tmp_path: Path) -> None:
    """Answers come in the order of the requests, and are those of one process."""
    path = tmp_path / "ends_at_17.py"
    path.write_text(ENDS_AT_17)
    shapes = [(2, 8), (3, 17), (2, 8), (3, 12), (1, 17), (4, 20), (5, 24), (2, 16)]
    asked = [{"op": "case", "case": Case(*shape).json()} for shape in shapes]
    crew = Crew(Target(f"{path}:f"), "cpu", 20.0, size=2)
    try:
        assert crew.ask({"op": "load"})["takes_eps"]
        found = list(crew.each(asked))
    finally:
        crew.close()
    assert found[1]["died"]["said"].endswith("SIGABRT")
    assert found[4] == {"not_run": True}  # a width that ended one child is not tried again
    alone = worker.Worker(Target("", function=oracle.rmsnorm).find, "cpu")
    alone.answer({"op": "load"})
    for index in set(range(len(asked))) - {1, 4}:
        assert found[index] == alone.answer(asked[index])


@pytest.mark.parametrize(
    ("does", "rule"), [("os.abort()", "r-crash"), ("time.sleep(99)", "r-hang")]
)
def test_an_end_while_it_is_fitted(does: str, rule: str, tmp_path: Path) -> None:
    """A kernel that ends or hangs where it is fitted, and only there, is told of; the rest runs."""
    path = tmp_path / "ends.py"
    fitted = f"tuple(x.shape) == ({semantics.M}, {semantics.N})"
    body = f"    if {fitted}:\n        {does}\n    return oracle.rmsnorm(x, w, eps)\n"
    path.write_text(f"import os, time\nfrom rmsnorm_ref import oracle\n\ndef f(x, w, eps):\n{body}")
    limit_s = 20.0 if rule == "r-crash" else 1.0  # a busy machine is no hang
    report = review.review(
        f"{path}:f", device="cpu", dtypes=("float32",), only=small, limit_s=limit_s
    )
    assert report.rules() == {rule}
    assert "could not be fitted" in report.text()


@pytest.mark.parametrize("at_once", [1, 5])
def test_looking_ahead_finds_the_same_smallest_case(at_once: int) -> None:
    """A shrinker that has several cases run at once returns what one by one returns."""
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        return case.N > 100 and case.M >= 3

    shrinker = Shrinker(fails, {"needs": "xw"}, ("float32",), asked.extend, at_once)
    case = Case(9, 4097, "bfloat16", x_layout="odd slice")
    assert shrinker.shrink(case)[1] == Case(3, 128, "float32")
    assert len(asked) >= 5


def test_widths_known_to_be_fine_are_not_asked_about() -> None:
    """Where a sweep is fine up to a width and fails above, the search begins above it."""
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        asked.append(case)
        return case.N > 33000

    shrinker = Shrinker(fails, {"needs": "xw"}, ("float32",), fine_up_to=33000)
    case = Case(9, 131073, "bfloat16")
    assert shrinker.shrink(case)[1] == Case(1, 65536, "float32")
    assert min(case.N for case in asked) > 33000


def test_a_right_kernel_in_triton_is_not_accused(tmp_path: Path) -> None:
    """Interpreted, somebody's kernel rounds to bf16 as a GPU does, and is found right."""
    path = tmp_path / "in_triton.py"
    path.write_text(IN_TRITON)
    report = review.review(f"{path}:f", device="cpu", dtypes=("bfloat16",), only=small)
    assert report.rules() == set()
    assert report.told["interpreted"]
    assert not report.rules(NOTE) & {"r-rounding-y", "r-same-twice", "r-batch-invariance"}
    assert report.told["semantics"]["arithmetic"]["bfloat16"]["once"]


def small(case: Case) -> bool:
    """Keep what takes little time."""
    return case.M * case.N <= 600
