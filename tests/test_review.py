"""The review: good kernels pass, faults are named by the right rule, nothing ends the review."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from reviewed import by_hand, one_plus, reviewed, rms, small
from torch import Tensor

from rmsnorm_ref import oracle, review
from rmsnorm_ref.review import tolerance
from rmsnorm_ref.review.rules import NOTE

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def functional(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Call PyTorch's own."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps)


def forward_only(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Record nothing."""
    return oracle.rmsnorm(x.detach(), w.detach(), eps)


def no_weight_gradient(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Leave w out of the graph."""
    return oracle.rmsnorm(x, w.detach(), eps)


@pytest.mark.parametrize("f", [oracle.rmsnorm, functional, by_hand()])
def test_right_kernels_pass_without_a_note_on_value(f: Any) -> None:
    """What computes in fp32 and rounds once breaks no rule of value, contract or extremes."""
    report = reviewed(f)
    assert report.rules() == set()
    assert report.rules(NOTE) <= {"r-batch-invariance", "r-double-backward"}
    assert report.told["semantics"]["right"]


@pytest.mark.parametrize("spelling", tolerance.SPELLINGS)
def test_eager_is_not_accused(spelling: str) -> None:
    """Eager code passes; that it rounds intermediates is a note that says which ones."""
    report = reviewed(tolerance.SPELLINGS[spelling], dtypes=("float16", "bfloat16"))
    assert report.verdict == "pass with notes"
    assert "r-rounding-y" in report.rules(NOTE)
    says = report.told["semantics"]["arithmetic"]["bfloat16"]["says"]
    assert says == {
        "eager": "every step in bfloat16",
        "eager_fp32": "x_hat rounded to bfloat16 before the weight",
    }[spelling]  # fmt: skip


@pytest.mark.parametrize(
    ("f", "rule"),
    [(forward_only, "r-forward-only"), (no_weight_gradient, "r-no-weight-gradient")],
)
def test_what_is_not_there_is_described(f: Any, rule: str) -> None:
    """A kernel without a backward, or without dw, passes with a note that says so."""
    report = reviewed(f)
    assert report.rules() == set()
    assert rule in report.rules(NOTE)


def write_over_x(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Spoil x."""
    del w
    x.mul_(2)
    return y


def view_dy(dx: Tensor, dw: Tensor, dy: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    """Ask for a view of dy that only a packed one has."""
    return dx + 0 * dy.view(-1).view(dx.shape), dw


def layer_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Subtract the mean first."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, None, eps)


def l2_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Forget to divide by N."""
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt() * w


FAULTS: dict[str, tuple[Any, str]] = {
    "y off": (by_hand(lambda y, *_: y * 1.01), "r-value-y"),
    "dx off": (by_hand(backward=lambda dx, dw, *_: (dx * 1.05, dw)), "r-value-dx"),
    "dw off": (by_hand(backward=lambda dx, dw, *_: (dx, dw * 1.05)), "r-value-dw"),
    "dw in bf16": (by_hand(backward=lambda dx, dw, *_: (dx, dw.bfloat16().float())), "r-value-dw"),
    "x written": (by_hand(write_over_x), "r-inputs-untouched"),
    "dy written": (
        by_hand(backward=lambda dx, dw, dy, *_: (dy.copy_(dx), dw)),
        "r-inputs-untouched",
    ),
    "dy viewed": (by_hand(backward=view_dy), "r-layout-dy"),
    "one width": (by_hand(lambda y, x, _: y * 1.02 if x.shape[-1] == 20 else y), "r-value-y"),
    "eps outside": (lambda x, w, eps: x / (rms(x) + eps) * w, "r-eps"),
    "eps fixed": (lambda x, w, _: oracle.rmsnorm(x, w, 1e-5), "r-eps"),
    "one plus": (one_plus, "r-weight"),
    "sum": (l2_norm, "r-statistic"),
    "layer norm": (layer_norm, "r-value-y"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str) -> None:
    """Each fault fails by its own rule, and the code of its finding raises when it is run."""
    f, rule = FAULTS[name]
    report = reviewed(f, dtypes=("float32",))
    assert report.verdict == "fail"
    assert rule in report.rules(), report.text()
    finding = next(found for found in report.findings if found.rule == rule)
    assert finding.case is not None
    assert finding.case.M * finding.case.N <= 60
    with pytest.raises((AssertionError, RuntimeError)):
        exec(finding.code, {"f": f})  # noqa: S102  # what a report tells its reader to do


def strided(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Take rows to be packed."""
    N = x.shape[-1]
    packed = torch.as_strided(x, (x.numel() // N, N), (N, 1), x.storage_offset())
    return oracle.rmsnorm(packed.reshape(x.shape), w, eps)


def test_layouts_are_told_apart() -> None:
    """A kernel that takes x to be packed breaks the rule of x's layout and no rule of value."""
    rules = reviewed(strided, dtypes=("float32",)).rules()
    assert "r-layout-x" in rules
    assert not {"r-value-y", "r-value-dx", "r-layout-dy"} & rules


def contiguous(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Refuse what is not packed."""
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    return oracle.rmsnorm(x, w, eps)


def test_refusing_aloud_is_a_note() -> None:
    """A layout of x that is refused by an error fails nothing."""
    report = reviewed(contiguous, dtypes=("float32",))
    assert report.verdict == "pass with notes"
    assert report.rules(NOTE) == {"r-layout-x"}


_kept: dict[Any, Tensor] = {}


def cached(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Hand out one buffer again and again."""
    y = oracle.rmsnorm(x.detach(), w.detach(), eps)
    return _kept.setdefault((x.shape, x.dtype), torch.empty_like(y)).copy_(y)


def test_a_shared_buffer_is_seen() -> None:
    """A result that the next call overwrites breaks the independence of calls."""
    assert "r-independent-calls" in reviewed(cached, dtypes=("float32",)).rules()


def crashes(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """End the process at one width."""
    if x.shape[-1] == 17:
        os.abort()
    return oracle.rmsnorm(x, w, eps)


def hangs(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Do not return at one width."""
    if x.shape[-1] == 17:
        time.sleep(600)
    return oracle.rmsnorm(x, w, eps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="functions are not forked beside a GPU")
@pytest.mark.parametrize(("f", "rule"), [(crashes, "r-crash"), (hangs, "r-hang")])
def test_a_review_outlives_its_candidate(f: Any, rule: str) -> None:
    """A crash and an endless loop are findings, at the width that shows them; the rest is run."""
    report = reviewed(f, dtypes=("float32",), limit_s=1.0)
    finding = next(found for found in report.findings if found.rule == rule)
    assert finding.case is not None
    assert (finding.case.M, finding.case.N) == (1, 17)
    assert report.rules() == {rule}


def test_same_seed_same_report() -> None:
    """But for its duration a report is the same each time."""
    f, _ = FAULTS["dx off"]
    one, other = (reviewed(f, dtypes=("bfloat16",)) for _ in range(2))
    one.duration_s = other.duration_s = 0.0
    assert one.markdown() == other.markdown()
    assert one.json() == other.json()


def test_strict_holds_to_one_rounding() -> None:
    """Under strict, what eager code rounds fails."""
    report = reviewed(tolerance.SPELLINGS["eager_fp32"], dtypes=("bfloat16",), strict=True)
    assert {"r-rounding-y", "r-rounding-dx", "r-rounding-dw"} <= report.rules()


def test_assert_passes() -> None:
    """The helper is silent on a right kernel, raises on a wrong one, and accepts rules by id."""
    review.assert_passes(oracle.rmsnorm, device="cpu", dtypes=("float32",), only=small)
    f, rule = FAULTS["y off"]
    options: dict[str, Any] = {"device": "cpu", "dtypes": ("float32",), "only": small}
    with pytest.raises(AssertionError, match=rule):
        review.assert_passes(f, **options)


def test_formats(tmp_path: Path) -> None:
    """JSON is strict, HTML fetches nothing, and both tell the verdict."""
    report = reviewed(FAULTS["sum"][0], dtypes=("float32",))
    report.save(tmp_path / "r.json")
    report.save(tmp_path / "r.html")
    found = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert found["verdict"] == "fail"
    assert {finding["rule"] for finding in found["findings"]} >= {"r-statistic"}
    page = (tmp_path / "r.html").read_text()
    assert "src=" not in page
    assert "<link" not in page
    assert "r-statistic" in page
