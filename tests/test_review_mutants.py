"""Every broken kernel of the mutants' lists breaks a rule of the review, and the right one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch
from mutants import BACKWARD_MUTANTS, FORWARD_MUTANTS, Mutant, forget, load
from paths import DEVICE, make, run

from rmsnorm_ref.review import plan
from rmsnorm_ref.review.digest import shows
from rmsnorm_ref.review.findings import Breach, Facts, breaches
from rmsnorm_ref.review.pool import Pool
from rmsnorm_ref.review.process import Target

if TYPE_CHECKING:
    from pathlib import Path

    from rmsnorm_ref.review.cases import Case

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE != "cpu", reason="a review of interpreted kernels"),
]

MUTANTS = [m for m in FORWARD_MUTANTS + BACKWARD_MUTANTS if not m.only.startswith("cuda")]
# What eager code in 16 bits does as well, and as often: a note of r-rounding-*, and under strict a
# failure.
HABITS = {
    "x_hat rounded before the weight",
    "dx rounded twice",
    "x_hat rounded in the backward",
}
# A rounding where w has another dtype than x, or on one of several paths: no habit.
UNEVEN = {
    "weight rounded to the dtype of x",
    "dw in the dtype of x",
    "partial dw in the dtype of x",
}
# What the mutants' own inputs call otherwise.
LIKE = {
    "padded": {"aligned slice", "wider slice"},
    "odd": {"odd slice"},
    "sliced weight": {"every other"},
    "expanded dy": {"one number expanded"},
}
RULES = {"inputs": "r-inputs-untouched", "outside": "r-outside", "dtypes": "r-dtypes"}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Bring in what a first call brings in, for all children at once: they are forked from here."""
    x, w, dy = make(2, 8, torch.float32)
    run(x, w, dy)


@functools.cache
def cases() -> list[Case]:
    """List what the short review of an interpreted kernel runs."""
    return plan.cases(plan.Scope(interpreted=True))


def like(mutant: Mutant) -> list[Case]:
    """List the cases of that plan that reach the mutant, those most like its own input first."""
    narrow = mutant.case.N <= 64
    found = [c for c in cases() if c.N == mutant.case.N or (narrow and c.N <= 64)]

    def unlike(case: Case) -> tuple[bool, ...]:
        layouts = {case.x_layout, case.dy_layout, case.w_layout}
        plain = layouts <= {"packed", "packed, NaN around"}
        wanted = LIKE.get(mutant.case.layout, {mutant.case.layout})
        return (
            case.needs != (mutant.case.needs or "xw"),
            plain != (mutant.case.layout == "packed"),
            not plain and not wanted <= layouts,
            case.M < mutant.case.M,
            (case.scale != 1) != (mutant.case.scale != 1),
            bool(case.w_dtype) != bool(mutant.case.w),
            case.dtype == "float32",
        )

    return sorted(found, key=unlike)


def seen(pool: Pool, mutant: Mutant, wanted: set[str]) -> set[str]:
    """Run cases until all that is wanted was seen; return what was."""
    found: set[str] = set()
    for case in like(mutant):
        if wanted - {"alone"} <= found:
            break
        outcome = pool.ask({"op": "case", "case": case.json()})
        pool.n_deaths = 0  # a read far outside may end the process, and others are left to try
        for breach in breaches(case, outcome, Facts()):
            if breach.kind == "raised":
                found.add("dtypes" if case.w_dtype else "raised")
            elif breach.kind in {"value", "rounding"}:
                clear = breach.kind == "value" or shows(
                    Breach("uneven", breach.what), case, outcome, Facts()
                )
                found.add(breach.what if clear else "rounding " + breach.what)
            elif breach.kind == "missing":
                found.add(breach.what)
            else:
                found |= {name for name, rule in RULES.items() if rule == breach.what}
    if "alone" in wanted:
        chosen = plan.probes(plan.Scope(interpreted=True))
        chosen.sort(key=lambda probe: abs(probe[1].N - mutant.case.N))
        for name, case in chosen:
            if name.startswith("batch") and not wanted <= found:
                asked = {"op": "probe", "probe": name, "case": case.json(), "gives": "xw"}
                found |= {"alone"} if "said" in pool.ask(asked) else set()
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_breaks_the_right_rule(mutant: Mutant, tmp_path: Path) -> None:
    """Among the inputs of a short review there is one on which the mutant breaks its rule."""
    package = load(tmp_path, mutant)
    pool = Pool(Target("mutant", function=package.rmsnorm), "cpu", 60.0)
    pool.spares = False
    wanted = set(mutant.rejected_by)
    try:
        found = seen(pool, mutant, wanted)
    finally:
        pool.close()
        forget(package)
    assert wanted <= found, found
