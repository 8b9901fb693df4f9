"""The report as one HTML page: nothing from outside, no script, readable without colours and on a phone."""

from __future__ import annotations

from html import escape
from typing import Final

from torchdistinput.report.charts import lateness, timeline, waits
from torchdistinput.report.summary import Summary
from torchdistinput.report.tables import ReportTable, head, tables

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8888; --soft: #8882; }
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1rem; }
h1 { font-size: 1rem; font-weight: 600; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .2rem; }
p { margin: .2rem 0 .6rem; max-width: 46rem; }
.verdict { border: 2px solid; border-left-width: .6rem; font-size: 1.3rem; line-height: 1.35; max-width: none;
  overflow-wrap: anywhere; padding: .7rem .9rem; }
.note { font-size: .9rem; opacity: .8; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
thead th { border-bottom: 2px solid; vertical-align: bottom; white-space: normal; }
th:first-child { background: Canvas; left: 0; position: sticky; text-align: left; }
tbody th { font-weight: 600; max-width: 60vw; overflow-wrap: anywhere; white-space: normal; }
svg { display: block; height: auto; max-width: 60rem; min-width: 40rem; width: 100%; }
svg text { fill: currentColor; font: 13px system-ui, sans-serif; }
"""


def page(summary: Summary) -> str:
    """The page, as text."""
    verdict = summary.verdict
    notes = "".join(f"<li>{escape(note)}</li>" for note in summary.notes)
    ranks, *others = (_table(table) for table in tables(summary)) if summary.ranks else ("",)
    charts = (waits(summary), timeline(summary), lateness(summary))
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Input of run {escape(summary.run)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{'Input-bound' if verdict.input_bound else 'Not input-bound'}</h1>",
        f'<p class="verdict">{escape(str(verdict))}</p>',
        f"<p>{escape(head(summary))}.</p>",
        f'<ul class="note">{notes}</ul>' if notes else "",
        ranks,
        *(_section(title, note, svg) for title, note, svg in charts if svg),
        *others,
        f'<p class="note">Written by torchdistinput {escape(summary.version)}. {escape(_clocks(summary))}</p>',
        "</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _clocks(summary: Summary) -> str:
    if len(summary.ranks) == 1:
        return "Times are those of the rank's clock."
    return f"Times are on the clock of the lowest rank; the bound of their error holds if {summary.assumes}."


def _table(table: ReportTable) -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in table.rows
    )
    body = f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    return _section(table.title, table.note, body)


def _section(title: str, note: str, body: str) -> str:
    """A table or picture, which scrolls by itself where the window is narrower."""
    head = f'<h2>{escape(title)}</h2>\n<p class="note">{escape(note)}</p>'
    return f'{head}\n<div class="scroll" tabindex="0">{body}</div>'
