"""What a review is made of: targets, the command, inputs, hypotheses, sentences, the rules."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from rmsnorm_ref import __main__, oracle
from rmsnorm_ref.review import candidate, pattern, plan, semantics
from rmsnorm_ref.review.cases import LAYOUTS, VALUES, Case, make
from rmsnorm_ref.review.rules import RULES

if TYPE_CHECKING:
    from pathlib import Path


KERNELS = """
import torch
from rmsnorm_ref import oracle

def swapped(weight, x, epsilon):
    return oracle.rmsnorm(x, weight, epsilon)

def own_eps(x, w):
    return oracle.rmsnorm(x, w, 1e-5)

class Module(torch.nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        return oracle.rmsnorm(hidden_states, self.weight, self.variance_epsilon)
"""


@pytest.mark.parametrize(
    ("name", "signature"), [("swapped", ""), ("own_eps", ""), ("Module", ""), ("own_eps", "x, w")]
)
def test_signatures(name: str, signature: str, tmp_path: Path) -> None:
    """Kernels with other signatures are adapted, by their parameters' names or by a few words."""
    path = tmp_path / "kernels_of_others.py"
    path.write_text(KERNELS)
    call = candidate.load(f"{path}:{name}", signature)
    x, w = torch.randn(3, 8), torch.rand(8)
    assert torch.equal(call(x, w, 1e-5), oracle.rmsnorm(x, w, 1e-5))


@pytest.mark.parametrize("target", ["nothing", "no_file.py:f", "math:nothing"])
def test_bad_targets(target: str) -> None:
    """A target that names nothing is refused in words."""
    with pytest.raises(ValueError, match=r"nothing|no_file"):
        candidate.load(target)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command loads a file in a process of its own, writes a report, and exits with 1."""
    path = tmp_path / "wrong.py"
    # What it refuses takes no time.
    path.write_text("def f(x, w, eps):\n    assert x.numel() <= 512\n    return x * w\n")
    out = tmp_path / "report.md"
    words = ["review", f"{path}:f", "--device", "cpu", "--dtype", "float32", "--out", str(out),
             "--out", str(out.with_suffix(".json"))]  # fmt: skip
    assert __main__.main(words) == 1
    assert "FAIL" in capsys.readouterr().out
    text = out.read_text()
    assert json.loads(out.with_suffix(".json").read_text())["verdict"] == "fail"
    assert text.startswith(f"# Review of {path}:f: fail")
    assert RULES["r-value-y"].url in text


@pytest.mark.parametrize(
    "words",
    [
        ["--out", "report.txt"],
        ["--out", "no/folder/report.md"],
        ["--dtype", "float8"],
        ["--device", "meta"],
        ["--time-limit", "0"],
        ["--time-limit", "nan"],
    ],
    ids=" ".join,
)
def test_wrong_words(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A word that cannot be followed is named before anything is run, with exit code 2."""
    path = tmp_path / "right.py"
    path.write_text("from rmsnorm_ref.oracle import rmsnorm\n")
    assert __main__.main(["review", f"{path}:rmsnorm", *words]) == 2
    said = capsys.readouterr()
    assert words[0] in said.err
    assert not said.out


@pytest.mark.parametrize("target", ["no_file.py:f", "no_colon.py", ":f", "some.module:"])
def test_no_target(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that is not there is a wrong word, and no kernel that failed."""
    assert __main__.main(["review", target]) == 2
    assert target in capsys.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", VALUES)
def test_what_is_printed_makes_the_input(layout: str, values: str) -> None:
    """Every layout of every kind of values can be made, has its shape, and holds no NaN."""
    found = make(Case(4, 384, "bfloat16", x_layout=layout, values=values))
    assert found["x"].shape == Case(4, 384, x_layout=layout).shape
    assert found["x"].isfinite().all()


def test_hypotheses_differ() -> None:
    """On the input of the fit no two statistics, roots or weights come close to each other."""
    x, w, _ = semantics.inputs(torch.float32)
    x, w = x.double(), w.double()
    rows = [statistic(x) for statistic in semantics.STATISTICS.values()]
    gains = [weight(w) for weight in semantics.WEIGHTS.values()]
    for group in (rows, gains):
        for index, one in enumerate(group):
            for other in group[:index]:
                assert float(((one - other) / one).abs().max()) > 1e-2


def test_pattern_names_the_rule_behind_shapes() -> None:
    """The sentence on where a fault shows separates what fails from what passes."""
    cases = [Case(3, N) for N in (4, 8, 12, 20, 32, 33)]
    said = pattern.tell(
        [c for c in cases if c.N & (c.N - 1)], [c for c in cases if not c.N & (c.N - 1)]
    )
    assert "no power of two" in said
    assert "N is above 12" in pattern.tell(cases[3:], cases[:3])


def test_a_plan_has_every_feature() -> None:
    """The short plan, interpreted or not, feeds every layout, all values, and every dtype."""
    for interpreted in (False, True):
        cases = plan.cases(plan.Scope(interpreted=interpreted))
        assert {case.x_layout for case in cases} >= set(plan.X_LAYOUTS)
        assert {case.dy_layout for case in cases} >= set(plan.DY_LAYOUTS)
        assert {case.values for case in cases} == set(VALUES)
        assert {case.dtype for case in cases} == set(plan.ALL_DTYPES)


def test_rules_say_what_breaking_them_costs() -> None:
    """Every rule has an id of its kind, a group, and text; their order keeps groups together."""
    groups = [rule.group for rule in RULES.values()]
    assert len(set(groups)) == 1 + sum(a != b for a, b in pairwise(groups))
    for rule in RULES.values():
        assert rule.id.startswith("r-")
        assert rule.asks.endswith(".")
        assert rule.breach
