"""What a review says: verdict first, findings from worst to least, tables, provenance."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .accuracy import EDGES_ULP
from .findings import INFO
from .rules import FAIL, NOTE

if TYPE_CHECKING:
    from .findings import Finding

PASS, NOTES, FAILED = "pass", "pass with notes", "fail"
EXIT_CODES = {PASS: 0, NOTES: 0, FAILED: 1}
_WHO = ("candidate", "reference", "eager_fp32", "eager")


@dataclass
class Report:
    """Hold one review. `duration_s` is the only thing that differs from run to run."""

    findings: list[Finding]
    told: dict[str, Any]
    provenance: dict[str, str]
    duration_s: float

    @property
    def verdict(self) -> str:
        """Return "pass", "pass with notes" or "fail"."""
        severities = {finding.severity for finding in self.findings}
        return FAILED if FAIL in severities else NOTES if NOTE in severities else PASS

    def rules(self, severity: str = FAIL) -> set[str]:
        """Return the ids of the rules that were broken."""
        return {finding.rule for finding in self.findings if finding.severity == severity}

    def summary(self) -> str:
        """Say in one sentence what was run and found."""
        counts = self.told.get("counts", {})
        n = {s: sum(f.severity == s for f in self.findings) for s in (FAIL, NOTE)}
        text = (
            f"{counts.get('cases', 0)} inputs and {counts.get('probes', 0)} properties were tried"
        )
        if counts.get("not_run"):
            text += (
                f"; {counts['not_run']} of them could not be: "
                "the process had ended too often, or memory was too small"
            )
        return f"{text}: {_count(n[FAIL], 'failure')}, {_count(n[NOTE], 'note')}."

    def computes(self) -> list[str]:
        """Say what the kernel computes, as it was fitted."""
        found = self.told.get("semantics")
        if not found:
            return []
        if "says" not in found:
            error = found.get("raised") or found.get("failed") or {}
            why = found.get("died", {}).get("said") or error.get("text") or "it could not be run"
            return [f"What it computes could not be fitted: {why}"]
        lines = [f"This kernel computes {found['says']}."]
        backward = {name: says for name, says in found.get("backward", {}).items() if says}
        if backward:
            said = "; ".join(f"{name} = {says}" for name, says in backward.items())
            lines.append(f"Its backward computes {said}.")
        for dtype, each in found["arithmetic"].items():
            lines.append(
                f"Arithmetic of y in {dtype}: {each['says']} "
                f"({_percent(each['share'])} of the bits agree)."
            )
        for dtype, says in found.get("fp32_weight", {}).items():
            lines += (
                [f"A float32 weight beside {dtype} is {says}."]
                if says.startswith("rounded")
                else []
            )
        if not self.told.get("takes_eps", True):
            eps = ", ".join(f"{value:.3g} in {dtype}" for dtype, value in self.told["eps"].items())
            lines.append(f"It takes no eps; its own was found to be {eps}.")
        return lines

    # ---- Tables ----------------------------------------------------------------------------------

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Return title, head and rows of each table."""
        found = []
        accuracy = self.told.get("accuracy") or {}
        rows = [_accuracy_row(row) for row in _sorted(accuracy.get("rows", []))]
        if rows:
            edges = [f"to {edge:g}" for edge in EDGES_ULP] + ["above"]
            head = [
                "dtype",
                "result",
                "whose",
                "relative L2",
                "largest, ulp",
                "error / bound",
                *edges,
            ]
            found.append(
                (
                    f"Error against the truth, x = {accuracy['label']}, % of elements by ulp",
                    head,
                    rows,
                )
            )
        bench = self.told.get("bench") or {}
        if bench.get("rows"):
            head = ["pass", "M x N", "whose", "time, us", "TB/s", "share of ceiling", "flags"]
            found.append(
                ("Time and effective bandwidth", head, [_bench_row(r) for r in bench["rows"]])
            )
        return found

    def remarks(self) -> list[str]:
        """Return what stands below the tables."""
        bench = self.told.get("bench") or {}
        lines = list((self.told.get("accuracy") or {}).get("notes", []))
        lines += [f"Timing is left out: {bench['left_out']}."] if "left_out" in bench else []
        return lines + list(bench.get("notes", []))

    # ---- Formats ---------------------------------------------------------------------------------

    def json(self) -> str:
        """Return the report as one strict JSON object."""
        whole = {
            "verdict": self.verdict,
            "summary": self.summary(),
            "computes": self.computes(),
            "findings": [finding.json() for finding in self.findings],
            "accuracy": self.told.get("accuracy"),
            "semantics": self.told.get("semantics"),
            "bench": self.told.get("bench"),
            "provenance": self.provenance,
            "duration_s": round(self.duration_s, 1),
        }
        return json.dumps(_strict(whole), indent=1)

    def markdown(self) -> str:
        """Return the report as Markdown."""
        lines = [
            f"# Review of {self.provenance['candidate']}: {self.verdict}",
            "",
            self.summary(),
            "",
        ]
        lines += [f"- {line}" for line in self.computes()]
        lines += ["", "## Findings", ""] + ([] if self.findings else ["None.", ""])
        for number, finding in enumerate(self.findings, 1):
            lines += [f"### {number}. {finding.severity}: {finding.title}", ""]
            lines += [f"Rule [{finding.rule}]({finding.url})." + _explained(finding), ""]
            lines += [f"- {name}: {text}" for name, text in details(finding)]
            lines += ["", "```python", finding.code, "```", ""] if finding.code else [""]
        for title, head, rows in self.tables():
            lines += [f"## {title}", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
            lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
        lines += [f"{remark}\n" for remark in self.remarks()]
        lines += ["## Provenance", ""]
        lines += [f"- {name}: {text}" for name, text in self.provenance.items()]
        return "\n".join([*lines, f"- duration: {self.duration_s:.1f} s", ""])

    def text(self) -> str:
        """Return what a terminal shows: verdict, findings, one line each."""
        lines = [f"{self.verdict.upper()}: {self.provenance['candidate']}", self.summary(), ""]
        lines += self.computes()
        for finding in self.findings:
            lines += ["", f"{finding.severity:4} {finding.rule}: {finding.title}"]
            lines += [f"    {_explained(finding)}"] if finding.explained_by else []
            lines += [f"     {finding.where}"] if finding.where else []
        lines += ["", *self.remarks(), f"{self.duration_s:.1f} s"]
        return "\n".join(line for line in lines if line is not None)

    def save(self, path: str | Path) -> None:
        """Write the report as its ending says: .md, .html or .json.

        Raises:
            ValueError: the ending is none of these.
        """
        path = Path(path)
        if path.suffix == ".html":
            from .html import page  # noqa: PLC0415  # it may import matplotlib

            text = page(self)
        elif path.suffix in {".md", ".json"}:
            text = self.markdown() if path.suffix == ".md" else self.json()
        else:
            raise ValueError(f"--out {path}: a report ends in .md, .html or .json")
        path.write_text(text, encoding="utf-8")


def details(finding: Finding) -> list[tuple[str, str]]:
    """Return what a finding says below its title."""
    pairs = [("expected", finding.expected), ("got", finding.got), ("shows", finding.where)]
    pairs.append(("compared", finding.compared))
    return [(name, text) for name, text in pairs if text]


def _explained(finding: Finding) -> str:
    return f" A consequence of {finding.explained_by}, probably." if finding.explained_by else ""


def _count(n: int, what: str) -> str:
    return f"{n or 'no'} {what}{'' if n == 1 else 's'}"


def _percent(share: float) -> str:
    """Print a share so that only what is all of it reads 100 %."""
    return f"{100 * share:.3g} %" if share in {0.0, 1.0} else f"{min(100 * share, 99.99):.2f} %"


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = ("y", "dx", "dw")
    known = [row for row in rows if row["contender"] in _WHO]
    return sorted(
        known, key=lambda r: (r["dtype"], results.index(r["result"]), _WHO.index(r["contender"]))
    )


def _accuracy_row(row: dict[str, Any]) -> list[str]:
    shares = ["" if s == 0 else _percent(s).removesuffix(" %") for s in row["histogram"]]
    numbers = [f"{row['relative_l2']:.2e}", f"{row['max_ulp']:.3g}", f"{row['ratio']:.3g}"]
    return [row["dtype"], row["result"], row["contender"], *numbers, *shares]


def _bench_row(row: dict[str, Any]) -> list[str]:
    share = row["share_of_ceiling"]
    return [
        row["pass"],
        f"{row['M']} x {row['N']}",
        row["contender"],
        f"{row['time_s'] * 1e6:.1f}",
        f"{row['bandwidth_bytes_per_s'] / 1e12:.2f}",
        f"{100 * share:.0f} %" if share else "",
        ", ".join(row["flags"]),
    ]


def _strict(value: Any) -> Any:
    """Replace what JSON cannot hold: it has no infinity and no NaN."""
    if isinstance(value, dict):
        return {str(name): _strict(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


__all__ = ["EXIT_CODES", "INFO", "Report", "details"]
