"""``python -m torchdistinput report``: who made the others wait, and on what; as text, JSON or one HTML page."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from torchdistinput.report.clocks import set_clocks
from torchdistinput.report.last_votes import last_votes
from torchdistinput.report.page import page
from torchdistinput.report.read_trace import read_trace
from torchdistinput.report.summary import Summary, summarize
from torchdistinput.report.tables import head, tables


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
    summary = summarize(trace, clocks, last_votes(trace, clocks))
    if arguments.html is not None:
        arguments.html.write_text(page(summary), encoding="utf-8")
    told = json.dumps(summary.as_json(), indent=1) if arguments.json else as_text(summary)
    sys.stdout.write(f"{told}\n")
    if arguments.html is not None and not arguments.json:
        sys.stdout.write(f"\nthe page: {arguments.html}\n")
    return 0


def as_text(summary: Summary) -> str:
    """The report for a terminal."""
    notes = [f"note: {note}" for note in summary.notes]
    parts = [str(summary.verdict), head(summary), *notes, *(f"\n{table.as_text()}" for table in tables(summary))]
    return "\n".join(parts)
