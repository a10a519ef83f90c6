"""One review, from a target to a report: load, ask what it is, run the plan, shrink, judge."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm import tqdm

from . import code, gradients, history, plan, semantics
from .cases import Case
from .crew import Crew
from .digest import Digest, merged
from .findings import STRICT, Breach, Facts, Finding, from_semantics, rank, rule_of
from .provenance import provenance
from .report import Report
from .rules import FAIL, NOTE

if TYPE_CHECKING:
    from .process import Target

GIVES = {
    "": "This kernel is forward-only: y has no gradient, and the backward is left out",
    "w": "This kernel gives no gradient to x",
    "x": "This kernel gives no gradient to w",
}


class Options(NamedTuple):
    """Hold what a review was asked for."""

    target: Target
    device: str = ""
    dtypes: tuple[str, ...] = plan.ALL_DTYPES
    full: bool = False
    bench: bool = False
    huge: bool = False
    seed: int = 0
    strict: bool = False
    one_plus_w: bool = False
    limit_s: float = 20.0
    progress: bool = False
    only: Any = None  # a predicate on cases and probes' cases: what is not wanted is left out


class _Review:
    """Hold what is known so far."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.pool = Crew(options.target, self.device, options.limit_s)
        self.findings: list[Finding] = []
        self.facts = Facts()
        self.scope = plan.Scope()
        self.told: dict[str, Any] = {"counts": {}}
        name, signature, init = options.target[:3]
        extra = (f", signature={signature!r}" if signature else "") + (
            f", init={init!r}" if init else ""
        )
        self.loads = f"load({name!r}{extra})" if options.target.function is None else name
        self.bar = tqdm(
            total=1,
            unit="",
            file=sys.stderr,
            leave=False,
            disable=not options.progress,
            bar_format="{percentage:3.0f}% |{bar}| {desc}",
        )

    # ---- What it is ------------------------------------------------------------------------------

    def describe(self) -> bool:
        """Load the candidate and find out what it gives; False where there is nothing to review."""
        self.bar.set_description_str("loading")
        loaded = self.pool.ask({"op": "load"})
        if "signature" not in loaded:
            breach = (
                Breach("died", loaded["died"]["how"])
                if "died" in loaded
                else Breach("raised", "import")
            )
            error = loaded.get(
                "failed", {"type": "", "text": loaded.get("died", {}).get("said", "")}
            )
            rule = "r-runs" if breach.kind == "raised" else rule_of(Case(1, 1), breach, self.facts)
            text = f"{error['type']}: {error['text']}".strip(": ")
            self.findings.append(
                Finding(rule, FAIL, f"The candidate cannot be loaded: {text}", got=text)
            )
            return False
        self.told |= loaded
        eps = dict.fromkeys(self.options.dtypes, 1e-6)
        if not loaded["takes_eps"]:
            eps = {d: self._own_eps(d) for d in eps}
        self.told["eps"] = eps
        gives, dtypes = self._gives(eps)
        if not dtypes:
            return False
        self.facts = Facts({}, gives, eps[dtypes[0]], loaded["takes_eps"])
        sm_count = (
            torch.cuda.get_device_properties(0).multi_processor_count if self.device != "cpu" else 0
        )
        self.told |= self.pool.ask({"op": "interpreted", "dtype": dtypes[0]})
        self.scope = plan.Scope(
            dtypes,
            self.options.full,
            bool(self.told.get("interpreted")),
            loaded["takes_eps"],
            eps[dtypes[0]],
            gives,
            self.options.seed,
            self.options.huge,
            sm_count=sm_count,
            one_plus=self.options.one_plus_w,
        )
        return True

    def _own_eps(self, dtype: str) -> float:
        asked = {"op": "eps", "dtype": dtype, "one_plus": self.options.one_plus_w}
        return float(self.pool.ask(asked).get("eps", 1e-6))

    def _gives(self, eps: dict[str, float]) -> tuple[str, tuple[str, ...]]:
        """Ask for gradients; tell which come, and which dtypes are taken.

        What comes in one dtype, or at one of two shapes, is a gradient that this kernel gives:
        where it does not come elsewhere, that is a finding of its own.
        """
        found: dict[str, set[str]] = {}
        refused: list[tuple[Case, dict[str, Any]]] = []
        wary: list[tuple[Case, dict[str, Any]]] = []  # refused, where x requires a gradient
        for dtype in self.options.dtypes:
            case = Case(8, 64, dtype, eps=eps[dtype], one_plus=self.options.one_plus_w)
            outcome = self.pool.ask({"op": "case", "case": case.json()})
            error = outcome.get("raised") or outcome.get("failed")
            if "not_run" in outcome and not self.pool.gave_up:
                error = {"stage": "forward", "type": "OutOfMemoryError", "text": "no room"}
            if error and error["stage"] != "backward":
                alone = self.pool.ask({"op": "case", "case": replace(case, needs="").json()})
                runs = "tensors" in alone and "raised" not in alone
                (wary if runs else refused).append((case, error))
                continue
            found[dtype] = {*"xw"} if error else _came(outcome)
            if not error and len(found[dtype]) < 2:
                again = self.pool.ask({"op": "case", "case": replace(case, M=5, N=48).json()})
                if "missing" in again and "raised" not in again:
                    found[dtype] |= _came(again)
        given = set().union(*found.values())
        gives = "".join(leaf for leaf in "xw" if leaf in given)
        if gives:
            refused += wary
        else:  # forward-only in all dtypes, some of which say so aloud
            found |= {case.dtype: set() for case, _ in wary}
        dtypes = [dtype for dtype in self.options.dtypes if dtype in found]
        for case, error in refused:
            title = f"{case.dtype} is refused: {error['type']}"
            title += "" if dtypes else "; if it is called another way, say how with --signature"
            severity = NOTE if dtypes else FAIL
            program = code.flag(self.loads, case, "r-runs", self.device)
            got = f"{error['type']}: {error['text']}"
            self.findings.append(Finding("r-runs", severity, title, case, "a result", got, program))
        absent = {"": "r-forward-only", "w": "r-no-x-gradient", "x": "r-no-weight-gradient"}.get(
            gives
        )
        if absent and dtypes:
            case = Case(8, 64, dtypes[0], eps=eps[dtypes[0]], one_plus=self.options.one_plus_w)
            program = code.missing(self.loads, case, "dw" if gives == "x" else "dx", self.device)
            seen = ("a gradient", "None", program)
            self.findings.append(Finding(absent, NOTE, GIVES[gives], case, *seen))
        return gives, tuple(dtypes)

    # ---- What it does ----------------------------------------------------------------------------

    def execute(self) -> None:
        """Run semantics, cases, probes and the table of errors; shrink what was found."""
        scope = self.scope
        self.bar.set_description_str("finding out what it computes")
        words = {"dtypes": list(scope.dtypes), "gives": scope.gives, "eps": scope.eps,
                 "takes_eps": scope.takes_eps, "one_plus": scope.one_plus}  # fmt: skip
        fitted = self.pool.ask({"op": "semantics", **words})
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
        outcomes = self._all(
            f"{len(cases)} cases", [{"op": "case", "case": case.json()} for case in cases]
        )
        asked = [
            {"op": "probe", "probe": n, "case": c.json(), "gives": scope.gives} for n, c in chosen
        ]
        seen = self._all(f"{len(chosen)} probes", asked)
        self.bar.set_description_str("looking for the smallest inputs")
        digest = Digest(self.pool, scope, self.facts, self.loads, self.device)
        digest.cases(cases, outcomes)
        digest.probes(chosen, seen)
        cause = from_semantics(fitted, one_plus=scope.one_plus)
        if cause is not None:
            digest.explain(cause)
        told = history.tell(digest.findings, self.pool, self.facts, scope.gives)
        self.findings += merged(told)
        if cause is not None and (cause not in told or cause.rule == history.RULE):
            text = "results depend on earlier calls, and a fit takes several"
            self.told["semantics"] = {"raised": {"text": text}}
        if "died" in fitted:
            self._died_while_fitted(fitted["died"])
        self.bar.set_description_str("errors beside the reference's")
        if not self.pool.gave_up and self.options.only is None:
            self.told["accuracy"] = self.pool.ask({"op": "accuracy", **words})
        self._compare()
        self.told |= self.pool.ask({"op": "tuned"})
        not_run = sum("not_run" in outcome for outcome in (*outcomes, *seen))
        if not_run and not any(f.severity == FAIL for f in self.findings):
            title = f"{not_run} of {len(cases) + len(chosen)} inputs could not be tried"
            got = "not run: too little memory, or the process had ended too often"
            self.findings.append(Finding("r-runs", NOTE, title, None, "a result", got))
        self.told["counts"] = {"cases": len(cases), "probes": len(chosen), "not_run": not_run}

    def _died_while_fitted(self, died: dict[str, str]) -> None:
        """Tell of the end of a child that no case has told of: the inputs were others."""
        case = Case(semantics.M, semantics.N, self.scope.dtypes[0])
        rule = rule_of(case, Breach("died", died["how"]), self.facts)
        if rule not in {finding.rule for finding in self.findings}:
            title = f"Fed x = [{case.M}, {case.N}], its rows of many scales: {died['said']}"
            self.findings.append(Finding(rule, FAIL, title, None, "a result", died["said"]))

    def _compare(self) -> None:
        """Put the errors of reference and eager beside those of a kernel that rounds more often."""
        rows = (self.told.get("accuracy") or {}).get("rows", [])
        for finding in self.findings:
            dtype = finding.case.dtype if finding.case else ""
            sizes = {
                row["contender"]: row["relative_l2"]
                for row in rows
                if row["dtype"] == dtype and row["result"] == finding.tensor
            }
            says = self.told["semantics"].get("backward", {}).get(finding.tensor)
            gain = semantics.GAINS[self.scope.one_plus]
            right = gradients.RIGHT.get(finding.tensor, "").format(g=gain)
            if says and says != right and finding.rule.startswith("r-value"):
                finding.title += f"; this backward computes {finding.tensor} = {says}"
            own = sizes.pop("candidate", None)
            if own is not None and finding.rule.startswith("r-rounding"):
                others = ", ".join(f"{name} {size:.2e}" for name, size in sorted(sizes.items()))
                finding.compared = f"relative L2 error {own:.2e} in {dtype}; {others}"

    def _all(self, what: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.bar.set_description_str(what)
        found = []
        for answer in self.pool.each(requests):
            found.append(answer)
            self.bar.update()
        return found

    def bench(self) -> None:
        """Time the candidate, where there is a GPU, and say why not where there is none."""
        if self.device == "cpu":
            self.told["bench"] = {"left_out": "there is no GPU: nothing was timed"}
            return
        self.bar.set_description_str("timing")
        self.pool.leave_one()
        dtype = "bfloat16" if "bfloat16" in self.scope.dtypes else self.scope.dtypes[0]
        request = {
            "op": "bench",
            "full": self.options.full,
            "dtype": dtype,
            "gives": self.scope.gives,
        }
        found = self.told["bench"] = self.pool.ask(request)
        if "rows" not in found:
            self.told["bench"] = {"left_out": str(found.get("failed") or found)}
            return
        eager = {(r["pass"], r["M"], r["N"]): r for r in found["rows"] if r["contender"] == "eager"}
        for row in (r for r in found["rows"] if r["contender"] == "candidate"):
            cell = f"{row['pass']} {row['M']} x {row['N']} {row['dtype']}"
            got = f"{row['bandwidth_bytes_per_s'] / 1e12:.2f} TB/s"
            if "above_ceiling" in row["flags"]:
                title = f"{cell}: {got} is more than the ceiling moves"
                self.findings.append(Finding("r-impossible-number", NOTE, title, got=got))
            other = eager.get((row["pass"], row["M"], row["N"]))
            if other and row["time_s"] > other["time_s"]:
                title = f"{cell}: {row['time_s'] / other['time_s']:.2f} times eager's time"
                self.findings.append(Finding("r-slower-than-eager", NOTE, title, got=got))


def _came(outcome: dict[str, Any]) -> set[str]:
    """Return the leaves that got a gradient; both where the process ended and nobody can tell."""
    return {leaf for leaf in "xw" if "d" + leaf not in outcome.get("missing", ())}


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
