"""One review, from a target to a report: load, ask what it is, run the plan, shrink, judge."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from . import code, pattern, plan, probes
from .cases import NAN_AROUND, Case
from .findings import (
    INFO,
    STRICT,
    Breach,
    Facts,
    Finding,
    Groups,
    breaches,
    from_semantics,
    merged,
    rank,
    rule_of,
    severity_of,
    shows,
    uneven,
    words,
)
from .pool import Pool, Target
from .provenance import provenance
from .report import Report
from .rules import FAIL, NOTE
from .shrink import Shrinker

MOST_CLASSES = 6  # kinds of inputs that one fault is shrunk from


class Options(NamedTuple):
    """Hold what a review was asked for."""

    target: Target
    device: str = ""
    dtypes: tuple[str, ...] = plan.ALL_DTYPES
    full: bool = False
    bench: bool = False
    seed: int = 0
    strict: bool = False
    limit_s: float = 20.0
    progress: bool = False
    only: Any = None  # a predicate on cases and probes' cases: what is not wanted is left out


class _Review:
    """Hold what is known so far."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.pool = Pool(options.target, self.device, options.limit_s)
        self.findings: list[Finding] = []
        self.facts = Facts()
        self.scope = plan.Scope()
        self.told: dict[str, Any] = {"counts": {}}
        self._seen: dict[Case, dict[str, Any]] = {}
        name, signature, init = options.target[:3]
        extra = (f", signature={signature!r}" if signature else "") + (f", init={init!r}" if init else "")
        self.loads = f"load({name!r}{extra})" if options.target.function is None else name
        self.bar = tqdm(total=1, unit="", file=sys.stderr, leave=False, disable=not options.progress,
                        bar_format="{percentage:3.0f}% |{bar}| {desc}")  # fmt: skip

    # ---- What it is ------------------------------------------------------------------------------

    def describe(self) -> bool:
        """Load the candidate and find out what it gives; False where there is nothing to review."""
        self.bar.set_description_str("loading")
        loaded = self.pool.ask({"op": "load"})
        if "signature" not in loaded:
            breach = Breach("died", loaded["died"]["how"]) if "died" in loaded else Breach("raised", "import")
            error = loaded.get("failed", {"type": "", "text": loaded.get("died", {}).get("said", "")})
            rule = "r-runs" if breach.kind == "raised" else rule_of(Case(1, 1), breach, self.facts)
            text = f"{error['type']}: {error['text']}".strip(": ")
            self.findings.append(Finding(rule, FAIL, f"The candidate cannot be loaded: {text}", got=text))
            return False
        self.told |= loaded
        eps = {d: 1e-6 for d in self.options.dtypes}
        if not loaded["takes_eps"]:
            eps = {d: self.pool.ask({"op": "eps", "dtype": d}).get("eps", 1e-6) for d in eps}
        self.told["eps"] = eps
        gives, dtypes = self._gives(eps)
        if not dtypes:
            return False
        self.facts = Facts(gives=gives, eps=eps[dtypes[0]])
        sm_count = torch.cuda.get_device_properties(0).multi_processor_count if self.device != "cpu" else 0
        self.told |= self.pool.ask({"op": "interpreted"})
        self.scope = plan.Scope(dtypes, self.options.full, bool(self.told.get("interpreted")), loaded["takes_eps"],
                                eps[dtypes[0]], gives, self.options.seed, sm_count=sm_count)  # fmt: skip
        return True

    def _gives(self, eps: dict[str, float]) -> tuple[str, tuple[str, ...]]:
        """Ask for gradients; tell which come, and which dtypes are taken."""
        gives, dtypes, refused = "xw", [], []
        for dtype in self.options.dtypes:
            case = Case(8, 64, dtype, eps=eps[dtype])
            outcome = self.pool.ask({"op": "case", "case": case.json()})
            error = outcome.get("raised") or outcome.get("failed")
            if error and error["stage"] != "backward":
                # A kernel may refuse tensors that require a gradient.
                alone = self.pool.ask({"op": "case", "case": replace(case, needs="").json()})
                if "tensors" in alone and "raised" not in alone:
                    gives, error = "", None
                else:
                    refused.append((case, outcome, error))
                    continue
            dtypes.append(dtype)
            if "missing" in outcome and not error:
                gives = "".join(leaf for leaf in gives if "d" + leaf not in outcome["missing"])
        for case, outcome, error in refused:
            title = f"{case.dtype} is refused: {error['type']}"
            severity = NOTE if dtypes else FAIL
            program = code.flag(self.loads, case, "r-runs", self.device)
            got = f"{error['type']}: {error['text']}"
            self.findings.append(Finding("r-runs", severity, title, case, "a result", got, program))
        absent = {"": "r-forward-only", "w": "r-no-x-gradient", "x": "r-no-weight-gradient"}.get(gives)
        if absent and dtypes:
            said = {"": "This kernel is forward-only: y has no gradient, and the backward is left out",
                    "w": "This kernel gives no gradient to x", "x": "This kernel gives no gradient to w"}  # fmt: skip
            self.findings.append(Finding(absent, NOTE, said[gives], Case(8, 64, dtypes[0])))
        return gives, tuple(dtypes)

    # ---- What it does ----------------------------------------------------------------------------

    def execute(self) -> None:
        """Run semantics, cases, probes and the table of errors; shrink what was found."""
        scope = self.scope
        self.bar.set_description_str("finding out what it computes")
        fitted = self.pool.ask({"op": "semantics", "dtypes": list(scope.dtypes),
                                "takes_eps": scope.takes_eps, "eps": scope.eps})  # fmt: skip
        self.told["semantics"] = fitted
        self.facts.arithmetic = fitted.get("arithmetic", {})
        cases = plan.cases(scope)
        if not scope.takes_eps:
            cases = [replace(case, eps=self.told["eps"][case.dtype]) for case in cases]
        chosen = plan.probes(scope)
        if self.options.only is not None:
            cases = [case for case in cases if self.options.only(case)]
            chosen = [(name, case) for name, case in chosen if self.options.only(case)]
        self.bar.reset(len(cases) + len(chosen) + 2)
        outcomes = self._all(f"{len(cases)} cases", [{"op": "case", "case": case.json()} for case in cases])
        asked = [{"op": "probe", "probe": n, "case": c.json(), "gives": scope.gives} for n, c in chosen]
        seen = self._all(f"{len(chosen)} probes", asked)
        self._judge(cases, outcomes)
        self._judge_probes(chosen, seen)
        cause = from_semantics(fitted)
        if cause is not None:
            self._explain(cause)
        self.findings = merged(self.findings)
        self.bar.set_description_str("errors beside the reference's")
        if not self.pool.gave_up and self.options.only is None:
            words = {"dtypes": list(scope.dtypes), "gives": scope.gives, "eps": scope.eps}
            self.told["accuracy"] = self.pool.ask({"op": "accuracy", **words})
        not_run = sum("not_run" in outcome for outcome in (*outcomes, *seen))
        self.told["counts"] = {"cases": len(cases), "probes": len(chosen), "not_run": not_run}

    def _all(self, what: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.bar.set_description_str(what)
        found = []
        for answer in self.pool.each(requests):
            found.append(answer)
            self.bar.update()
        return found

    # ---- What that means -------------------------------------------------------------------------

    def _judge(self, cases: list[Case], outcomes: list[dict[str, Any]]) -> None:
        """Group what is wrong, shrink one case of each group, and give each rule one finding."""
        groups: Groups = {}
        scope = self.scope
        self._seen = dict(zip(cases, outcomes, strict=True))
        for case, outcome in self._seen.items():
            for breach in breaches(case, outcome, self.facts):
                groups.setdefault(breach, []).append((case, outcome))
        sweep = [(c, o) for c, o in zip(cases, outcomes, strict=True) if _is_sweep(c) and "not_run" not in o]
        for breach, failing in uneven(groups, sweep).items():
            self.bar.set_description_str(f"shrinking {breach.kind} {breach.what}")
            bad = {case for case, _ in failing}
            where = pattern.tell([c for c, _ in sweep if c in bad], [c for c, _ in sweep if c not in bad])
            classes: dict[str, tuple[Case, dict[str, Any]]] = {}
            for case, outcome in sorted(failing, key=lambda pair: _plainness(pair[0])):
                classes.setdefault(rule_of(_packed(case), breach, self.facts), (case, outcome))
            found: dict[str, Finding] = {}
            # One for all classes: what most of them shrink to is then run once.
            plain = {"needs": scope.gives, "eps": self.facts.eps}
            shrinker = Shrinker(functools.partial(self._shows, breach), plain, scope.dtypes)
            for case, outcome in list(classes.values())[:MOST_CLASSES]:
                one = self._finding(breach, case, outcome, where, shrinker)
                one.n_failing = len(failing)
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
        severity = severity_of(rule, breach, outcome)
        if rule == "r-runs" and breach.what == "forward" and case.N > 4096 and severity == NOTE:
            severity = INFO  # a limit that is told is no fault
        if breach.kind == "rounding":
            says = self.facts.arithmetic.get(case.dtype, {}).get("says", "")
            told = breach.what == "y" and says and not self.facts.arithmetic[case.dtype]["once"]
            title += f"; y has the bits of: {says}" if told else ""
        make = {"value": code.value, "uneven": code.value, "rounding": code.value, "range": code.value, "missing": code.missing}
        program = make.get(breach.kind, code.flag)(self.loads, case, breach.what if breach.kind != "raised" else "", self.device)
        tensor = breach.what if breach.what in {"y", "dx", "dw"} else ""
        where = where if rule.startswith(("r-value", "r-rounding", "r-runs")) else ""
        return Finding(rule, severity, title, case, expected, got, program, where, tensor)

    def _run(self, case: Case) -> dict[str, Any]:
        if case not in self._seen:
            self._seen[case] = self.pool.ask({"op": "case", "case": case.json()})
        return self._seen[case]

    def _shows(self, breach: Breach, case: Case) -> bool:
        return shows(breach, case, self._run(case), self.facts)

    def _smaller_death(
        self, case: Case, outcome: dict[str, Any], breach: Breach
    ) -> tuple[Case, dict[str, Any]]:
        """Try the packed case, and one row of it, in processes of their own."""
        self.pool.spares = False
        for smaller in (_packed(case), replace(_packed(case), M=1)):
            self.pool.n_deaths = self.pool.n_hangs = 0
            found = self.pool.ask({"op": "case", "case": smaller.json()})
            if breach in breaches(smaller, found, self.facts):
                case, outcome = smaller, found
        self.pool.n_deaths = self.pool.n_hangs = 0
        return case, outcome

    def _judge_probes(self, chosen: list[tuple[str, Case]], seen: list[dict[str, Any]]) -> None:
        done: Counter[tuple[str, str]] = Counter()
        for (name, case), outcome in zip(chosen, seen, strict=True):
            if outcome in ({}, {"not_run": True}) or "refused" in outcome:
                continue
            rule = probes.PROBES[name].rule
            for breach in breaches(case, outcome, self.facts) if "said" not in outcome else []:
                outcome = {"severity": FAIL, "said": words(case, breach, outcome)[2]}  # noqa: PLW2901
                rule = rule_of(case, breach, self.facts) if breach.kind == "died" else rule
            done[name, rule] += 1
            if done[name, rule] == 1 and "said" in outcome:
                title = f"Fed x = {case.label()}: {outcome['said']}"
                program = code.probe(self.loads, name, case, self.scope.gives, self.device)
                self.findings.append(Finding(rule, outcome["severity"], title, case,
                                             _asks(rule), outcome["said"], program))  # fmt: skip

    def _explain(self, cause: Finding) -> None:
        """Put a cause first, with the code of what it explains."""
        values = [f for f in self.findings if f.severity == FAIL and f.tensor]
        shown = next((f for f in values if f.tensor == "y"), None)
        if shown is not None:
            cause.case, cause.code, cause.where = shown.case, shown.code, shown.where
        same = [f for f in self.findings if f.rule == cause.rule]
        self.findings = [f for f in self.findings if f not in same]
        for finding in values:
            finding.explained_by = "" if finding in same else cause.rule
        self.findings.append(cause)

    def bench(self) -> None:
        """Time the candidate, where there is a GPU, and say why not where there is none."""
        if self.device == "cpu":
            self.told["bench"] = {"left_out": "there is no GPU: nothing was timed"}
            return
        self.bar.set_description_str("timing")
        dtype = "bfloat16" if "bfloat16" in self.scope.dtypes else self.scope.dtypes[0]
        request = {"op": "bench", "full": self.options.full, "dtype": dtype, "gives": self.scope.gives}
        found = self.told["bench"] = self.pool.ask(request)
        if "rows" not in found:
            self.told["bench"] = {"left_out": str(found.get("failed") or found)}
            return
        eager = {(r["pass"], r["M"], r["N"]): r for r in found["rows"] if r["contender"] == "eager"}
        for row in (r for r in found["rows"] if r["contender"] == "candidate"):
            cell = f"{row['pass']} {row['M']} x {row['N']} {row['dtype']}"
            got = f"{row['bandwidth_bytes_per_s'] / 1e12:.2f} TB/s"
            if "above_ceiling" in row["flags"]:
                self.findings.append(Finding("r-impossible-number", NOTE, f"{cell}: {got} is more than the ceiling moves", got=got))  # fmt: skip
            other = eager.get((row["pass"], row["M"], row["N"]))
            if other and row["time_s"] > other["time_s"]:
                ratio = row["time_s"] / other["time_s"]
                self.findings.append(Finding("r-slower-than-eager", NOTE, f"{cell}: {ratio:.2f} times eager's time", got=got))  # fmt: skip


def _asks(rule: str) -> str:
    from .rules import RULES  # noqa: PLC0415

    return RULES[rule].asks


def _packed(case: Case) -> Case:
    """Take NaN around for packed: it is how every shape of the sweep is fed."""
    words = {f"{t}_layout": "packed" for t in ("x", "dy", "w") if getattr(case, f"{t}_layout") == NAN_AROUND}
    return replace(case, **words)  # type: ignore[arg-type]


def _is_sweep(case: Case) -> bool:
    plain = _packed(case)
    return plain == Case(case.M, case.N, case.dtype, eps=case.eps, needs=case.needs, seed=case.seed) and case.M > 0


def _plainness(case: Case) -> tuple[int, int]:
    plain = Case(case.M, case.N, case.dtype)
    packed = _packed(case)
    differ = sum(getattr(packed, n) != getattr(plain, n) for n in vars(plain) if n not in {"eps", "seed"})
    return differ, case.M * case.N


def review(options: Options) -> Report:
    """Review a candidate; whatever it does ends up in the report."""
    start = time.monotonic()
    state = _Review(options)
    try:
        if state.describe():
            state.execute()
        if options.bench:
            state.bench()
    finally:
        state.pool.close()
        state.bar.close()
    for finding in state.findings:
        if options.strict and finding.severity == NOTE and finding.rule in STRICT:
            finding.severity = FAIL
    facts = provenance(options, state.device, state.told)
    found = sorted(state.findings, key=rank)
    return Report(found, state.told, facts, time.monotonic() - start)
