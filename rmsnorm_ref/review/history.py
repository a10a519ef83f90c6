"""Whether a wrong result is one of its input, or of the calls before it: a fresh process tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .findings import Facts, Finding, breaches
from .rules import FAIL

if TYPE_CHECKING:
    from .crew import Crew

RULE = "r-independent-calls"
MOST = 10  # processes, some seconds each
SPOIL = {"r-outside", "r-crash", "r-hang", "r-cuda-error"}  # what is left in memory is chance
CAUSES = ("r-statistic", "r-weight", "r-eps")  # what was fitted; told of all inputs, so asked first


def tell(findings: list[Finding], pool: Crew, facts: Facts, gives: str) -> list[Finding]:
    """Run what fails once more, in a fresh process; return the findings with those of calls before.

    What is right there cannot be shown by one input: one finding of `RULE` says so for all. What
    was not run alone, once such a memory is known, is told as its consequence.
    """
    shown = [f for f in findings if f.severity == FAIL and f.case and f.rule != RULE]
    shown = [f for f in shown if (f.tensor and f.got) or f.probe]
    spoilt = any(f.rule in SPOIL for f in findings)
    if not shown or spoilt or pool.gave_up or pool.in_process:
        return findings
    pool.renew()
    passing = [one for one in shown if _is_right(one, pool, facts, gives)]
    if not passing and not any(f.rule == RULE and not f.explained_by for f in findings):
        return findings
    # It has a memory: each of the others in a process of its own, one for each input.
    left = sorted((f for f in shown if f not in passing), key=lambda f: f.rule not in CAUSES)
    inputs = list(dict.fromkeys((f.case, f.probe) for f in left))
    for at in inputs[:MOST]:
        pool.renew()
        for one in (f for f in left if (f.case, f.probe) == at):
            passing += [one] if _is_right(one, pool, facts, gives) else []
    if not passing:
        return findings
    kept = [f for f in findings if f not in passing]
    if not any(f.rule == RULE and f.severity == FAIL for f in kept):
        # In the words of a result, if there is one: what was fitted is told of all inputs.
        first = min(passing, key=lambda f: (f.rule in CAUSES, bool(f.probe)))
        if first.rule in CAUSES and first.case:
            first.title = f"Fed x = {first.case.label()} after other inputs: y is not the truth"
        first.rule, first.where = RULE, ""
        first.title += "; a process that has just begun gives the truth"
        first.code += "\n# It holds in a fresh process, and failed after the review's other inputs."
        kept.append(first)
    tried = {id(one) for one in left if (one.case, one.probe) in inputs[:MOST]}
    for one in kept:
        if one.rule != RULE and one.tensor and id(one) not in tried:
            one.explained_by = RULE
    return kept


def _is_right(one: Finding, pool: Crew, facts: Facts, gives: str) -> bool:
    """Tell whether a result that was wrong, or a property that did not hold, is right."""
    assert one.case is not None
    request: dict[str, Any] = {"op": "case", "case": one.case.json()}
    if one.probe:
        outcome = pool.ask(request | {"op": "probe", "probe": one.probe, "gives": gives})
        return not outcome
    outcome = pool.ask(request)
    broken = {breach.what for breach in breaches(one.case, outcome, facts)}
    return one.tensor in outcome.get("tensors", {}) and one.tensor not in broken
