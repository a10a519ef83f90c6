"""From outcomes to findings: which rule was broken, what it does to the verdict, in whose words.

A finding says what was fed and what came out. What breaks a rule in silence fails; what refuses
aloud is a note, except where the caller has no say: autograd chooses the layout of dy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rmsnorm_ref import tiling

from .cases import EQUAL, NAN_AROUND, Case
from .rules import FAIL, NOTE, RULES
from .tolerance import CLEAN, EAGER, ROUNDING, WRONG

INFO = "info"
SEVERITIES = (FAIL, NOTE, INFO)
# What eager code does as well, or what the next run may do otherwise: failures only under --strict.
STRICT = {"r-rounding-y", "r-rounding-dx", "r-rounding-dw", "r-dtypes", "r-same-twice",
          "r-batch-invariance", "r-fp16-squares"}  # fmt: skip
_DIED = {"crashed": "r-crash", "hung": "r-hang"}
_LOUD = {"ValueError", "TypeError", "NotImplementedError", "AssertionError", "RuntimeError",
         "OutOfResources", "AcceleratorError", "PTXASError", "DSLRuntimeError"}  # fmt: skip


@dataclass
class Finding:
    """Hold one thing that a reader should know, with the smallest input that shows it."""

    rule: str
    severity: str
    title: str
    case: Case | None = None
    expected: str = ""
    got: str = ""
    code: str = ""
    where: str = ""
    tensor: str = ""
    explained_by: str = ""
    n_failing: int = 1
    compared: str = ""
    probe: str = ""

    @property
    def url(self) -> str:
        """Return the permalink of the rule."""
        return RULES[self.rule].url

    def json(self) -> dict[str, Any]:
        """Return what a JSON report holds."""
        plain = {name: value for name, value in vars(self).items() if name != "case"}
        case = None if self.case is None else {**self.case.json(), "label": self.case.label()}
        return {**plain, "url": self.url, "case": case}


@dataclass(frozen=True)
class Breach:
    """Name one thing wrong with one case: what kind, and of what."""

    kind: str  # value, rounding, range, flag, missing, raised, died
    what: str  # a result, a rule, a stage, or how a process ended


@dataclass
class Facts:
    """Hold what is known of the candidate when its outcomes are read."""

    arithmetic: dict[str, dict[str, Any]] = field(default_factory=dict)
    gives: str = "xw"
    eps: float = 1e-6
    takes_eps: bool = True

    def in_storage(self, dtype: str) -> bool:
        """Tell whether all steps are in the storage dtype, as eager code's are."""
        return bool(self.arithmetic.get(dtype, {}).get("storage"))


def breaches(case: Case, outcome: dict[str, Any], facts: Facts) -> list[Breach]:
    """List what is wrong with a case."""
    if "died" in outcome:
        return [Breach("died", outcome["died"]["how"])]
    if "cuda_error" in outcome:
        return [Breach("died", "cuda")]
    if "failed" in outcome:
        return [Breach("raised", "forward")]
    if "not_run" in outcome:
        return []
    found = [Breach("flag", rule) for rule in outcome["flags"]]
    if "raised" in outcome:
        found.append(Breach("raised", outcome["raised"]["stage"]))
    found += [Breach("missing", name) for name in outcome["missing"] if name[1:] in facts.gives]
    kinds = {ROUNDING: "rounding", WRONG: "value"}
    for name, judged in outcome["tensors"].items():
        level = judged["level"]
        if level == EAGER:
            found.append(Breach("range" if facts.in_storage(case.dtype) else "value", name))
        elif level != CLEAN:
            found.append(Breach(kinds[level], name))
    return found


def rule_of(case: Case, breach: Breach, facts: Facts) -> str:
    """Name the rule that a breach on a smallest case breaks: by the features that are left."""
    kind, what = breach.kind, breach.what
    if kind == "died":
        return _DIED.get(what, "r-cuda-error")
    if kind == "flag":
        return what
    if kind == "missing":
        return "r-who-needs-grad" if case.M else "r-zero-rows"
    if kind == "range":
        return "r-fp16-squares"
    if kind == "rounding":
        drifts = case.dtype == "float32" and case.values in EQUAL
        return "r-accumulation" if drifts else f"r-rounding-{what}"
    plain = "r-runs" if kind == "raised" else f"r-value-{what}"
    return _by_feature(case, facts) or plain


def _by_feature(case: Case, facts: Facts) -> str:  # noqa: C901, PLR0911  # one line a feature
    layouts = (case.dy_layout, case.x_layout, case.w_layout)
    for layout, name in zip(layouts, ("dy", "x", "w"), strict=True):
        if layout not in {"packed", NAN_AROUND}:
            return f"r-layout-{name}"
    if case.M == 0:
        return "r-zero-rows"
    if NAN_AROUND in layouts:
        return "r-reads-outside"
    if case.lead is not None:
        return "r-rank"
    if case.w_dtype not in {"", case.dtype}:
        return "r-mixed-dtype"
    if len(case.needs) < len(facts.gives):
        return "r-who-needs-grad"
    if case.scale >= 256 and case.dtype == "float16":
        return "r-fp16-squares"
    by_value = {"zeros": "r-zero-row", "a row of zeros": "r-zero-row", "ones": "r-accumulation",
                "equal in a row": "r-accumulation", "dy like x": "r-accumulation",
                "outlier channel": "r-real-input", "layer 0": "r-real-input",
                "layer 5": "r-real-input", "zeros in w": "r-weight",
                "small dy": "r-scales", "large dy": "r-scales"}  # fmt: skip
    if (case.eps != facts.eps and facts.takes_eps) or case.scale < 0.1:
        by_eps = case.scale > 1e-5 and case.dtype != "float16"  # in float16 these are few bits
        return "r-eps" if by_eps else "r-scales"
    if case.scale != 1:
        return "r-scales"
    return by_value.get(case.values, "")


def severity_of(case: Case, rule: str, breach: Breach, outcome: dict[str, Any]) -> str:
    """Say what a breach does to the verdict."""
    if breach.kind in {"rounding", "range"}:
        return NOTE
    if rule == "r-dtypes":  # of a w in another dtype eager code promotes
        return NOTE if case.w_dtype not in {"", case.dtype} else FAIL
    beyond = rule == "r-runs" and case.N > tiling.LARGEST_N  # wider than "ordinary size"
    if breach.kind != "raised" or (breach.what == "backward" and not beyond):
        return FAIL
    error = (outcome.get("raised") or outcome.get("failed") or {}).get("type", "")
    loud = error in _LOUD or error.endswith("CompilationError")
    refused = {"r-layout-x", "r-layout-w", "r-rank", "r-zero-rows", "r-mixed-dtype", "r-runs"}
    if not loud or rule not in refused:
        return FAIL
    # A limit that is told is no fault, if it is told before anything was computed.
    return INFO if beyond and breach.what == "forward" else NOTE


def words(case: Case, breach: Breach, outcome: dict[str, Any]) -> tuple[str, str, str]:
    """Return title, expected and got of a breach on its smallest case."""
    fed = f"Fed x = {case.label()}"
    if breach.kind == "died":
        said = outcome.get("died", {}).get("said") or outcome.get("cuda_error", "")
        tail = outcome.get("died", {}).get("tail", "")
        return (
            f"{fed}: the call {_ended(breach.what)}",
            "a result or an exception",
            f"{said}\n{tail}".strip(),
        )
    if breach.kind == "flag":
        return (
            f"{fed}: {outcome['flags'][breach.what]}",
            RULES[breach.what].asks,
            outcome["flags"][breach.what],
        )
    if breach.kind == "missing":
        return f"{fed}: {breach.what} was asked for and did not come", "a gradient", "None"
    if breach.kind == "raised":
        error = outcome.get("raised") or outcome["failed"]
        text = f"{error['type']}: {error['text']}"
        return f"{fed}: the {breach.what or 'call'} raised {error['type']}", "a result", text
    judged = outcome["tensors"][breach.what]
    at = f"{breach.what}{judged['index']}"
    got, truth, bound = judged["got"], judged["expected"], judged["bound"]
    title = f"{fed}: {at} came out {' the truth is '.join(apart(got, truth))}"
    if breach.kind == "rounding":
        far = f"{judged['ratio']:.3g} bounds from the truth"
        title = f"{fed}: {at} is {far}, no further than eager code"
        if case.dtype == "float32" and case.values in EQUAL:
            title = f"{fed}: {at} is {far}, as where equal terms are added one by one"
    if breach.kind == "range":
        title += ", as in eager code that stays in float16"
    expected = f"{truth!r}, within {bound:.3g}"
    return title, expected, f"{got!r}, off by {abs(got - truth):.3g} ({judged['ratio']:.3g} bounds)"


def apart(got: float, truth: float) -> tuple[str, str]:
    """Print two numbers with as many digits as tell them apart, six or more."""
    for digits in range(6, 18):
        one, other = f"{got:.{digits}g}", f"{truth:.{digits}g}"
        if one != other:
            break
    return f"{one},", other


def _ended(how: str) -> str:
    return {
        "hung": "did not come back",
        "crashed": "ended the process",
        "cuda": "broke the GPU's context",
    }.get(how, how)


def from_semantics(found: dict[str, Any], *, one_plus: bool = False) -> Finding | None:
    """Give a finding where the function that was fitted is another one."""
    if found.get("right", True) or "raised" in found or "statistic" not in found:
        return None
    root, statistic, weight = found["root"], found["statistic"], found["weight"]
    gain = "(1 + w)" if one_plus else "w"
    rule = "r-weight" if weight != gain else "r-eps"
    if statistic != "mean(x^2)" or root in {"x * sqrt(s + eps)", "x / (s + eps)"}:
        rule = "r-statistic"
    if root != "x / sqrt(s + eps)" and rule == "r-weight":
        rule = "r-eps"
    title = f"This kernel computes {found['says']}"
    if weight == "(1 + w)" and not one_plus:
        title += "; if that is meant, review it with --one-plus-w"
    return Finding(
        rule,
        FAIL,
        title,
        None,
        f"y = x / sqrt(mean(x^2) + eps) * {gain}",
        found["says"].removeprefix("y = "),
        tensor="y",
    )


def rank(finding: Finding) -> tuple[int, int, int, str]:
    """Order findings from worst to least, causes before what they explain."""
    order = list(RULES)
    first = {
        "r-inputs-untouched": 0,
        "r-outside": 0,
        "r-alias": 0,
        "r-crash": 0,
        "r-hang": 0,
        "r-cuda-error": 0,
    }
    return (
        SEVERITIES.index(finding.severity),
        bool(finding.explained_by) + first.get(finding.rule, 1),
        order.index(finding.rule),
        finding.title,
    )
