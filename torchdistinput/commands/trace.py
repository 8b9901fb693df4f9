"""``python -m torchdistinput trace``: merges the trace files of all ranks into one of Chrome's form."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchdistinput.report.chrome import write_chrome
from torchdistinput.report.clocks import set_clocks
from torchdistinput.report.last_votes import last_votes
from torchdistinput.report.read_trace import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("folder", type=Path, help="that InputOptions(trace=...) or TORCHDISTINPUT_TRACE named")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json.gz"), help="compressed if it ends in .gz")
    parser.add_argument("--run", help="which run, where the folder has several; or latest")
    parser.add_argument(
        "--with",
        dest="profiles",
        action="append",
        default=[],
        metavar="[RANK=]PROFILE",
        help="a file of torch.profiler's export_chrome_trace, whose events are added; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the file, and says what is in it."""
    trace = read_trace(arguments.folder, arguments.run)
    clocks = set_clocks(trace)
    last = last_votes(trace, clocks)
    number = write_chrome(trace, clocks, last, arguments.output, arguments.profiles)
    bound = max(clocks.bounds.values()) / 1e6
    for note in trace.notes:
        sys.stderr.write(f"note: {note}\n")
    sys.stdout.write(
        f"{arguments.output}: {number} events of {len(trace.files)} ranks, clocks right to within {bound:.3f} ms; open "
        "it in Perfetto or chrome://tracing\n"
    )
    return 0
