"""Whether a wrong result is one of its input, or of the calls before it: a fresh process tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .findings import Facts, Finding, breaches
from .rules import FAIL

if TYPE_CHECKING:
    from .crew import Crew

RULE = "r-independent-calls"
MOST = 8  # processes, some seconds each
SPOIL = {"r-outside", "r-crash", "r-hang", "r-cuda-error"}  # what is left in memory is chance


def tell(findings: list[Finding], pool: Crew, facts: Facts) -> list[Finding]:
    """Run what fails once more, in a fresh process; return the findings with those of calls before.

    What is right there cannot be shown by one input: one finding of `RULE` says so for all.
    """
    shown = [f for f in findings if f.severity == FAIL and f.tensor and f.got and f.case]
    spoilt = any(f.rule in SPOIL for f in findings)
    if not shown or spoilt or pool.gave_up or pool.in_process:
        return findings
    pool.renew()
    passing = [one for one in shown if _is_right(one, pool, facts)]
    if passing or any(f.rule == RULE and not f.explained_by for f in findings):
        # It has a memory: each of the others in a process of its own.
        for one in shown[:MOST]:
            pool.renew()
            passing += [one] if one not in passing and _is_right(one, pool, facts) else []
    if not passing:
        return findings
    kept = [f for f in findings if f not in passing]
    if not any(f.rule == RULE and f.severity == FAIL for f in kept):
        first = passing[0]
        first.rule, first.where = RULE, ""
        first.title += "; a process that has just begun gives the truth"
        first.code += "\n# It holds in a fresh process, and failed after the review's other inputs."
        kept.append(first)
    return kept


def _is_right(one: Finding, pool: Crew, facts: Facts) -> bool:
    """Tell whether a result that was wrong is not."""
    assert one.case is not None
    outcome = pool.ask({"op": "case", "case": one.case.json()})
    broken = {breach.what for breach in breaches(one.case, outcome, facts)}
    return one.tensor in outcome.get("tensors", {}) and one.tensor not in broken
