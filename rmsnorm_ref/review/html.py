"""The report as one HTML file: nothing is fetched, and it is readable light and dark."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from .plot import svg
from .report import details

if TYPE_CHECKING:
    from .findings import Finding
    from .report import Report

_STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1b; --paper: #fdfcf9; --faint: #66645d;
  --line: #dedad0; --card: #f5f3ec; --fail: #a3200d; --note: #8a5a00; --pass: #1f6b3a; --link: #00558c;
  --who0: #d55e00; --who1: #0072b2; --who2: #009e73; --who3: #7d7b75; }
@media (prefers-color-scheme: dark) { :root { --ink: #e9e6de; --paper: #191917; --faint: #a19e94;
  --line: #3b3a35; --card: #23221f; --fail: #ff9080; --note: #e8b450; --pass: #79c994; --link: #7fbfea;
  --who0: #ff9146; --who1: #5db4ee; --who2: #3fd0a4; --who3: #a5a299; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 .75rem; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: .25rem 0 .5rem; font-weight: 600; }
a { color: var(--link); } code, pre { font: .85rem/1.45 ui-monospace, monospace; }
.verdict { display: inline-block; padding: .15rem .7rem; border-radius: .3rem; color: var(--paper);
  font-weight: 700; margin-right: .5rem; }
.fail .verdict, .verdict.fail { background: var(--fail); } .verdict.note { background: var(--note); }
.verdict.pass { background: var(--pass); } .verdict.info { background: var(--faint); }
.finding { border: 1px solid var(--line); border-left: .35rem solid var(--faint); border-radius: .3rem;
  padding: .7rem .9rem; margin: .8rem 0; background: var(--card); }
.finding.fail { border-left-color: var(--fail); } .finding.note { border-left-color: var(--note); }
.word { font-size: .8rem; font-weight: 700; margin-right: .6rem; } .word.fail { color: var(--fail); }
.word.note { color: var(--note); } .word.info { color: var(--faint); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
pre { overflow-x: auto; background: var(--paper); border: 1px solid var(--line); padding: .6rem; margin: .5rem 0 0;
  border-radius: .3rem; } summary { cursor: pointer; color: var(--link); }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { padding: .2rem .4rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left; } th { color: var(--faint); font-weight: 600; }
tr.own td { font-weight: 600; } tr.first td { border-top: 2px solid var(--line); }
.plot { width: 100%; min-width: 34rem; max-width: 46rem; height: auto; } .plot text { fill: var(--ink); font-size: 12px; }
.plot .grid { stroke: var(--line); } .who0 { fill: var(--who0); } .who1 { fill: none; stroke: var(--who1); stroke-width: 2; }
.who2 { fill: none; stroke: var(--who2); stroke-width: 2; } .who3 { fill: none; stroke: var(--who3); stroke-width: 2; }
.faint { color: var(--faint); font-size: .9rem; }
"""
_WORD = {"pass": "pass", "pass with notes": "note", "fail": "fail"}


def page(report: Report) -> str:
    """Return the whole file."""
    name = html.escape(report.provenance["candidate"])
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{report.verdict}: review of {name}</title><style>{_STYLE}</style></head><body>",
        body(report),
        "</body></html>\n",
    ]
    return "".join(parts)


def body(report: Report) -> str:
    """Return what the page shows."""
    name = html.escape(report.provenance["candidate"])
    parts = [
        f'<h1><span class="verdict {_WORD[report.verdict]}">{report.verdict}</span>',
        f"Review of <code>{name}</code></h1>",
        f"<p>{html.escape(report.summary())}</p>",
        "<ul>",
        *(f"<li>{html.escape(line)}</li>" for line in report.computes()),
        "</ul>",
        "<h2>Findings</h2>",
        *([] if report.findings else ["<p>None.</p>"]),
        *(_finding(finding, index == 0) for index, finding in enumerate(report.findings)),
    ]
    plot = svg(report)
    parts += ["<h2>How far from the truth</h2>", f'<div class="table">{plot}</div>'] if plot else []
    for title, head, rows in report.tables():
        parts += [f"<h2>{html.escape(title)}</h2>", _table(head, rows)]
    parts += [f'<p class="faint">{html.escape(remark)}</p>' for remark in report.remarks()]
    parts.append("<h2>Provenance</h2><dl>")
    facts = report.provenance | {"duration": f"{report.duration_s:.1f} s"}
    parts += [f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items()]
    return "\n".join([*parts, "</dl>"])


def _finding(finding: Finding, is_open: bool) -> str:
    word = finding.severity
    parts = [
        f'<div class="finding {word}"><h3><span class="word {word}">{word.upper()}</span>',
        f"{html.escape(finding.title)}</h3>",
        f'<div class="faint">Rule <a href="{finding.url}">{finding.rule}</a>',
    ]
    if finding.explained_by:
        parts.append(f", probably a consequence of {finding.explained_by}")
    parts.append("</div><dl>")
    parts += [f"<dt>{k}</dt><dd>{html.escape(v)}</dd>" for k, v in details(finding)]
    parts.append("</dl>")
    if finding.code:
        shown = " open" if is_open else ""
        parts.append(f"<details{shown}><summary>Show it again</summary>")
        parts.append(f"<pre>{html.escape(finding.code)}</pre></details>")
    return "".join([*parts, "</div>"])


def _table(head: list[str], rows: list[list[str]]) -> str:
    parts = [
        '<div class="table"><table><tr>',
        *(f"<th>{html.escape(h)}</th>" for h in head),
        "</tr>",
    ]
    for index, row in enumerate(rows):
        new = index > 0 and row[:2] != rows[index - 1][:2]
        classes = " ".join(["own"] * (row[2] == "candidate") + ["first"] * new)
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        parts.append(f'<tr class="{classes}">{cells}</tr>')
    return "".join([*parts, "</table></div>"])
