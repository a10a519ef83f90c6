"""What a review says that a kernel computes: its gain, its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from reviewed import by_hand, one_plus, reviewed, rms

from rmsnorm_ref import oracle
from rmsnorm_ref.review import gradients, semantics
from rmsnorm_ref.review.rules import NOTE

if TYPE_CHECKING:
    from torch import Tensor

    from rmsnorm_ref.review.cases import Case

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def tiny(case: Case) -> bool:
    """Keep a few cases: what is asked is in the fit."""
    return case.M * case.N <= 300 and case.dy_layout == case.x_layout == "packed"


def test_one_plus_w_is_described_and_reviewed() -> None:
    """A gain of 1 + w is named, with the flag that reviews it; with the flag it passes."""
    report = reviewed(one_plus, dtypes=("bfloat16",), only=tiny)
    assert any("* (1 + w)" in line for line in report.computes())
    assert "--one-plus-w" in report.findings[0].title
    report = reviewed(one_plus, one_plus_w=True)
    assert report.rules() == set()
    assert not {rule for rule in report.rules(NOTE) if rule.startswith("r-value")}
    assert report.told["semantics"]["right"]
    report = reviewed(oracle.rmsnorm, dtypes=("float32",), one_plus_w=True, only=tiny)
    assert "r-weight" in report.rules()


def no_mean(_: Tensor, dw: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiate as if the statistic were a constant."""
    return dy * w / rms(x), dw


def no_gain(_: Tensor, dw: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Leave w out of the mean."""
    x_hat = x / rms(x)
    return (dy * w - x_hat * (dy * x_hat).mean(-1, keepdim=True)) / rms(x), dw


def squared(_: Tensor, dw: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Take the square of rstd where its cube belongs."""
    x_hat = x / rms(x)
    return (dy * w - x * (dy * w * x_hat).mean(-1, keepdim=True)) / rms(x), dw


def dw_from_x(dx: Tensor, _: Tensor, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Take x for x_hat."""
    return dx, (dy * x).reshape(-1, len(w)).sum(0)


@pytest.mark.parametrize(
    ("backward", "says"),
    [
        (no_mean, "dx = rstd * (dy * w), rstd without eps"),
        (no_gain, "dx = rstd * (dy * w - x_hat * mean(dy * x_hat)), rstd without eps"),
        (squared, "dx = rstd * (dy * w - x * mean(dy * w * x_hat)), rstd without eps"),
        (dw_from_x, "dw = sum(dy * x)"),
    ],
)
def test_wrong_backwards_are_described(backward: object, says: str) -> None:
    """What a wrong backward computes is fitted, and said in the finding on its result."""
    report = reviewed(by_hand(backward=backward), dtypes=("float32",), only=tiny)
    finding = next(found for found in report.findings if found.rule == f"r-value-{says[:2]}")
    assert finding.title.endswith(says)
    assert any(says in line for line in report.computes())


def test_a_right_backward_is_described() -> None:
    """Of a right kernel the sentence is the formula, in its own gain."""
    for f, one_plus_w, gain in ((oracle.rmsnorm, False, "w"), (one_plus, True, "(1 + w)")):
        said = semantics.fit(
            f, "cpu", ["float32"], takes_eps=True, fixed_eps=1e-6, gives="xw",
            gain=semantics.GAINS[one_plus_w],
        )["backward"]  # fmt: skip
        assert said == {name: text.format(g=gain) for name, text in gradients.RIGHT.items()}


def test_spellings_of_a_backward_differ() -> None:
    """On the input of the fit no other spelling comes close to the right dx, or dw."""
    x, w, dy = (t.double() for t in semantics.inputs(torch.float32))
    for spellings, spell in (
        (gradients.DX, gradients.spell_dx),
        (gradients.DW, gradients.spell_dw),
    ):
        right, size = spell(spellings[0], (x, w, dy), 1e-3)
        for words in spellings[1:]:
            other, _ = spell(words, (x, w, dy), 1e-3)
            assert float(((other - right).abs() / size).max()) > 1e-3, words
