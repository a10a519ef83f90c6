"""From all outcomes to findings: group what is wrong, shrink one input of a group, name causes."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import code, pattern, probes
from .cases import EQUAL, NAN_AROUND, Case
from .findings import STRICT, Breach, Facts, Finding, breaches, rule_of, severity_of, words
from .rules import FAIL, NOTE, RULES
from .shrink import Shrinker
from .tolerance import CLEAN

if TYPE_CHECKING:
    from .crew import Crew
    from .plan import Scope

# The smallest fault of all, a rounding too many, reaches 2 bounds where it shows.
CLEAR = 1.5
HABIT = 0.5  # share of a dtype's shapes from which a rounding counts as how the kernel computes
_CAUSES = {"value", "range", "flag"}  # what makes a property fail that rests on the same case
MOST_CLASSES = 6  # kinds of inputs that one fault is shrunk from
Outcomes = list[tuple[Case, dict[str, Any]]]
Groups = dict[Breach, Outcomes]


class Digest:
    """Hold what a review knows while it makes sense of its outcomes; `findings` is what it finds.

    `loads` is the text that finds the candidate in a report's code.
    """

    def __init__(self, pool: Crew, scope: Scope, facts: Facts, loads: str, device: str) -> None:
        self.pool, self.scope, self.facts = pool, scope, facts
        self.loads, self.device = loads, device
        self.findings: list[Finding] = []
        self._seen: dict[Case, dict[str, Any]] = {}

    def cases(self, cases: list[Case], outcomes: list[dict[str, Any]]) -> None:
        """Group what is wrong, shrink one case of each group, and give each rule one finding."""
        groups: Groups = {}
        scope = self.scope
        self._seen = dict(zip(cases, outcomes, strict=True))
        for case, outcome in self._seen.items():
            for breach in breaches(case, outcome, self.facts):
                groups.setdefault(breach, []).append((case, outcome))
        sweep = [
            (c, o)
            for c, o in zip(cases, outcomes, strict=True)
            if _is_sweep(c) and "not_run" not in o
        ]
        apart = uneven(groups, sweep)
        for breach, failing in apart.items():
            bad = {case for case, _ in failing}
            other = {"value": "uneven", "uneven": "value"}.get(breach.kind, "")
            bad |= {case for case, _ in apart.get(Breach(other, breach.what), [])}
            without = {"y", "dx", "dw"} & {breach.what}  # a gradient that was not asked for
            told = [c for c, o in sweep if c in bad or without <= set(o.get("tensors", {}))]
            swept, fine = [c for c in told if c in bad], [c for c in told if c not in bad]
            where = pattern.tell(swept, fine)
            classes: dict[str, tuple[Case, dict[str, Any]]] = {}
            for case, outcome in sorted(failing, key=lambda pair: _plainness(pair[0])):
                classes.setdefault(rule_of(_packed(case), breach, self.facts), (case, outcome))
            if breach.kind == "uneven" and Breach("value", breach.what) in apart:
                classes.pop(f"r-value-{breach.what}", None)  # the same fault, told from the worse
            found: dict[str, Finding] = {}
            # One for all classes: what most of them shrink to is then run once.
            # A kernel with an eps of its own may have another one in each dtype: both stay.
            plain = {"needs": scope.gives, "eps": self.facts.eps if scope.takes_eps else None}
            dtypes = scope.dtypes if scope.takes_eps else ()
            shows_it = functools.partial(self._shows, breach)
            at_once = len(self.pool.pools)
            up_to = _fine_up_to(swept, fine)
            shrinker = Shrinker(shows_it, plain, dtypes, self._run_all, at_once, up_to)
            for case, outcome in list(classes.values())[:MOST_CLASSES]:
                one = self._finding(breach, case, outcome, where, shrinker)
                one.n_failing = len(failing)
                if breach.kind == "raised" and one.rule == "r-runs" and _other_rows_run(told, bad):
                    one.severity = FAIL
                found.setdefault(one.rule, one)
            self.findings += found.values()

    def _finding(
        self, breach: Breach, case: Case, outcome: dict[str, Any], where: str, shrinker: Shrinker
    ) -> Finding:
        """Shrink one failing case and put it into words."""
        blamed = _packed(case) if breach.kind == "died" else case
        if breach.kind == "died":
            case, outcome = self._smaller_death(case, outcome, breach)
        elif not self.pool.gave_up:
            case, blamed = shrinker.shrink(case)
            outcome = self._run(case)
        rule = rule_of(blamed, breach, self.facts)
        title, expected, got = words(case, breach, outcome)
        severity = severity_of(case, rule, breach, outcome)
        if breach == Breach("died", "crashed") and not self.pool.in_process and rule == "r-crash":
            self.pool.renew()
            if breach not in breaches(case, self.pool.ask(_asked(case)), self.facts):
                title += "; alone, in a process that has just begun, it comes back"
            self.pool.forgive()
        if breach.kind == "rounding":
            says = self.facts.arithmetic.get(case.dtype, {}).get("says", "")
            told = breach.what == "y" and says and not self.facts.arithmetic[case.dtype]["once"]
            title += f"; y has the bits of: {says}" if told else ""
        make = {
            "value": code.value,
            "uneven": code.value,
            "rounding": code.value,
            "range": code.value,
            "missing": code.missing,
        }
        judged = outcome.get("tensors", {}).get(breach.what, {})
        fenced = {"fenced": True} if judged and judged["got"] != judged["got"] else {}
        program = make.get(breach.kind, code.flag)(
            self.loads, case, breach.what if breach.kind != "raised" else "", self.device, **fenced
        )
        tensor = breach.what if breach.what in {"y", "dx", "dw"} else ""
        where = where if rule.startswith(("r-value", "r-rounding", "r-runs")) else ""
        return Finding(rule, severity, title, case, expected, got, program, where, tensor)

    def _run(self, case: Case) -> dict[str, Any]:
        if case not in self._seen:
            self._seen[case] = self.pool.ask(_asked(case))
        return self._seen[case]

    def _run_all(self, cases: list[Case]) -> None:
        """Run several cases side by side, where there are several children."""
        left = [case for case in cases if case not in self._seen]
        asked = [_asked(case) for case in left]
        self._seen |= dict(zip(left, self.pool.each(asked), strict=True)) if left else {}

    def _shows(self, breach: Breach, case: Case) -> bool:
        return shows(breach, case, self._run(case), self.facts)

    def _smaller_death(
        self, case: Case, outcome: dict[str, Any], breach: Breach
    ) -> tuple[Case, dict[str, Any]]:
        """Try the packed case, and one row of it, in processes of their own."""
        if self.pool.in_process:
            return case, outcome
        self.pool.forgive()
        for smaller in (_packed(case), replace(_packed(case), M=1)):
            self.pool.forgive()
            found = self.pool.ask(_asked(smaller))
            if breach in breaches(smaller, found, self.facts):
                case, outcome = smaller, found
        self.pool.forgive()
        return case, outcome

    def probes(self, chosen: list[tuple[str, Case]], seen: list[dict[str, Any]]) -> None:
        """Turn what probes saw into findings, the first of each name."""
        done: Counter[tuple[str, str]] = Counter()
        for (name, case), outcome in zip(chosen, seen, strict=True):
            if not outcome or "not_run" in outcome or "refused" in outcome:
                continue
            rule = probes.PROBES[name].rule
            plain = self._run(replace(case, needs=self.scope.gives))
            broken = breaches(case, plain, self.facts) if "said" in outcome else []
            if outcome.get("raised") and any(b.kind in {"raised", "died"} for b in broken):
                continue  # the case itself is refused, which is told
            for breach in breaches(case, outcome, self.facts) if "said" not in outcome else []:
                said = words(case, breach, outcome)[2].partition("\n")[0]
                outcome = {"severity": FAIL, "said": said}  # noqa: PLW2901
                rule = rule_of(case, breach, self.facts) if breach.kind == "died" else rule
            done[name, rule] += 1
            if done[name, rule] == 1 and "said" in outcome:
                title = f"Fed x = {case.label()}: {outcome['said']}"
                program = code.probe(self.loads, name, case, self.scope.gives, self.device)
                seen_as = (title, case, RULES[rule].asks, outcome["said"], program)
                found = Finding(rule, outcome["severity"], *seen_as, probe=name)
                if outcome["severity"] == FAIL or rule in STRICT:
                    found.explained_by = self._cause(rule, case, broken, probes.PROBES[name].needs)
                self.findings.append(found)

    def _cause(self, rule: str, case: Case, broken: list[Breach], needs: str) -> str:
        """Name the rule that the very input of a property breaks; without `needs`, in y alone."""
        shown = (b for b in broken if b.kind in _CAUSES and (needs or b.what not in {"dx", "dw"}))
        return next((r for r in (rule_of(case, b, self.facts) for b in shown) if r != rule), "")

    def explain(self, cause: Finding) -> None:
        """Put a cause first, with the code of what it explains."""
        values = [f for f in self.findings if f.severity == FAIL and f.tensor]
        shown = next((f for f in values if f.tensor == "y"), None)
        if shown is not None:
            cause.case, cause.code, cause.where = shown.case, shown.code, shown.where
        if cause.rule == "r-eps" and self.scope.takes_eps:  # plainest where it outweighs x
            eps = self.facts.eps
            case = Case(1, 2, self.scope.dtypes[0], values="ones", scale=eps**0.5, eps=eps)
            case = replace(case, needs=self.scope.gives, one_plus=self.scope.one_plus)
            breach, outcome = Breach("value", "y"), self._run(case)
            if breach in breaches(case, outcome, self.facts):
                cause.case, cause.where = case, words(case, breach, outcome)[0]
                cause.code = code.value(self.loads, case, "y", self.device)
        same = [f for f in self.findings if f.rule == cause.rule]
        self.findings = [f for f in self.findings if f not in same]
        for finding in values:
            finding.explained_by = "" if finding in same else cause.rule
        self.findings.append(cause)


def shows(breach: Breach, case: Case, outcome: dict[str, Any], facts: Facts) -> bool:
    """Tell whether a case shows a breach, for whoever looks for a smaller one."""
    if breach.kind != "uneven":
        return breach in breaches(case, outcome, facts)
    judged = outcome.get("tensors", {}).get(breach.what, {"level": CLEAN})
    return bool(judged["level"] != CLEAN and judged["ratio"] > CLEAR)


def uneven(groups: Groups, sweep: list[tuple[Case, dict[str, Any]]]) -> Groups:
    """Set apart roundings that are no habit of the kernel.

    A kernel that rounds an intermediate does so on every input. One that is exact on most shapes of
    a dtype and coarse on some has a fault there, however small. Clear ones alone: fp32 arithmetic
    in an unusual order may leave its bound by a hair.
    """
    found: Groups = {}
    for breach, failing in groups.items():
        if breach.kind != "rounding":
            found[breach] = failing
            continue
        habits = {case.dtype: _share(breach.what, case.dtype, sweep) for case, _ in failing}
        for case, outcome in failing:
            clear = outcome["tensors"][breach.what]["ratio"] > CLEAR
            odd = clear and case.dtype != "float32" and habits[case.dtype] < HABIT
            odd = odd and case.values not in EQUAL  # where fp32 itself drifts
            one = Breach("uneven", breach.what) if odd else breach
            found.setdefault(one, []).append((case, outcome))
    return found


def _share(name: str, dtype: str, sweep: list[tuple[Case, dict[str, Any]]]) -> float:
    """Return in what part of the sweep a result is not clean, tiny inputs left out."""
    seen = [
        outcome["tensors"][name]["level"] != CLEAN
        for case, outcome in sweep
        if case.dtype == dtype and case.M * case.N >= 64 and name in outcome.get("tensors", {})
    ]
    return sum(seen) / len(seen) if seen else 1.0


def merged(findings: list[Finding]) -> list[Finding]:
    """Give each rule but those of values one finding, and mark what follows from another."""
    kept: dict[tuple[str, str, str], Finding] = {}
    results: dict[tuple[str, str, str], list[str]] = {}
    for one in sorted(findings, key=lambda f: ("y", "dx", "dw", "").index(f.tensor)):
        by_result = one.rule.startswith(("r-value", "r-rounding")) or not one.tensor
        by_result = by_result and one.rule not in {"r-crash", "r-hang", "r-cuda-error"}
        key = (one.rule, one.severity, one.tensor + one.title if by_result else "")
        kept.setdefault(key, one)
        results.setdefault(key, []).append(one.tensor)
    for key, named in results.items():
        names = [name for name in dict.fromkeys(named) if name]
        if len(names) > 1:
            kept[key].where = f"in {' and '.join(names)}"
    worst = {one.rule: one.n_failing for one in kept.values() if one.severity == FAIL}
    failed = set(worst)
    # A wrong result is no worse than a rounding on some inputs: they are of the same fault.
    same = [
        key
        for key, one in kept.items()
        if (
            one.n_failing < worst.get(one.rule.replace("rounding", "value"), 0)
            and one.rule.startswith("r-rounding")
        )
        or (
            (one.rule, one.severity) == ("r-accumulation", NOTE)
            and f"r-value-{one.tensor}" in worst
        )
    ]
    for key in same:
        del kept[key]
    for one in kept.values():
        causes = [f"r-value-{one.tensor}"] if one.rule.startswith("r-rounding") else []
        causes += ["r-value-dx"] if one.rule == "r-double-backward" and one.severity == FAIL else []
        causes += ["r-inputs-untouched"] if "inplace operation" in one.got else []
        causes += ["r-outside"] if one.rule == "r-crash" else []
        cause = next((c for c in causes if c in failed), "")
        one.explained_by = one.explained_by or cause
    return list(kept.values())


def _asked(case: Case) -> dict[str, Any]:
    return {"op": "case", "case": case.json()}


def _other_rows_run(sweep: list[Case], bad: set[Case]) -> bool:
    """Tell whether what is refused is no width: other numbers of rows run at the same one."""
    fine = {(case.N, case.dtype) for case in sweep if case not in bad}
    return any((case.N, case.dtype) in fine for case in sweep if case in bad)


def _fine_up_to(bad: list[Case], fine: list[Case]) -> int:
    """Return the widest N below which all of a sweep is fine and above which all fails, or 0."""
    widest = max((case.N for case in fine), default=0)
    return widest if bad and all(case.N > widest for case in bad) else 0


def _packed(case: Case) -> Case:
    """Take NaN around for packed: it is how every shape of the sweep is fed."""
    words = {
        f"{t}_layout": "packed"
        for t in ("x", "dy", "w")
        if getattr(case, f"{t}_layout") == NAN_AROUND
    }
    return replace(case, **words)  # type: ignore[arg-type]


def _is_sweep(case: Case) -> bool:
    words = {name: getattr(case, name) for name in ("eps", "needs", "seed", "one_plus")}
    return case.M > 0 and _packed(case) == Case(case.M, case.N, case.dtype, **words)


def _plainness(case: Case) -> tuple[int, bool, int]:
    plain = Case(case.M, case.N, case.dtype)
    packed = _packed(case)
    differ = (not case.M) + sum(
        getattr(packed, n) != getattr(plain, n)
        for n in vars(plain)
        if n not in {"eps", "seed", "one_plus"}
    )
    return differ, case.N == 1, case.M * case.N  # one column says little
