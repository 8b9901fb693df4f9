"""``python -m torchdistinput report``: who made the others wait, and on what; as text, JSON or one HTML page."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from torchdistinput.report.clocks import Clocks, set_clocks
from torchdistinput.report.last_votes import common, last_votes
from torchdistinput.report.page import page
from torchdistinput.report.read_trace import RunTrace, read_trace
from torchdistinput.report.summary import Summary, summarize
from torchdistinput.report.tables import head, tables

_EARLY_NS: Final = 2_000_000_000
"""From which on a record that ends before the others is spoken of: a rank writes five times a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("folder", type=Path, help="that InputOptions(trace=...) or TORCHDISTINPUT_TRACE named")
    parser.add_argument("--html", type=Path, metavar="FILE", help="writes one page, without anything from outside")
    parser.add_argument("--json", action="store_true", help="prints the numbers as JSON")
    parser.add_argument("--run", help="which run, where the folder has several; or latest")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report, and writes the page."""
    trace = read_trace(arguments.folder, arguments.run)
    clocks = set_clocks(trace)
    summary = _with_what_is_missing(summarize(trace, clocks, last_votes(trace, clocks)), trace, clocks)
    if arguments.html is not None:
        arguments.html.write_text(page(summary), encoding="utf-8")
    told = json.dumps(summary.as_json(), indent=1) if arguments.json else as_text(summary)
    sys.stdout.write(f"{told}\n")
    if arguments.html is not None and not arguments.json:
        sys.stdout.write(f"\nthe page: {arguments.html}\n")
    return 0


def _with_what_is_missing(summary: Summary, trace: RunTrace, clocks: Clocks) -> Summary:
    """The summary, which says how many ranks its verdict is of where not of all, and whose record ends first."""
    count, verdict = len(summary.ranks), summary.verdict
    if count < summary.world_size:
        text = f"of {count} of {summary.world_size} ranks only, as no more have spans here: {verdict.text}"
        verdict = replace(verdict, text=text)
    ends = {rank: common(trace, clocks, rank, (0, votes.ended))[1] for rank, votes in trace.votes.items()}
    last = max(ends.values())
    early = [
        f"the record of rank {rank} ends {(last - end) / 1e9:.0f} s before the last one"
        for rank, end in ends.items()
        if last - end > _EARLY_NS
    ]
    return replace(summary, verdict=verdict, notes=[*summary.notes, *early])


def as_text(summary: Summary) -> str:
    """The report for a terminal."""
    notes = [f"note: {note}" for note in summary.notes]
    more = [] if summary.headspace is None else [summary.headspace]
    parts = [str(summary.verdict), *more, head(summary), *notes, *(f"\n{table.as_text()}" for table in tables(summary))]
    return "\n".join(parts)
