"""``python -m torchdistinput``: what the trace files of a run say, from a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torchdistinput.errors import InputError
from torchdistinput.tracing.merge import merge
from torchdistinput.tracing.report import Report, find_files

_REPORT: Final = "Says from the trace files of a run which rank made the others wait, and on what."
_TRACE: Final = "Merges the trace files of all ranks into one, for Perfetto and chrome://tracing."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Local.

    Args:
      argv: the arguments; those of this process by default.

    Returns:
      The exit status: 0, 1 after an error of the input or of a file, 2 (from argparse) for wrong arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m torchdistinput", description="Reads the traces of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, sentence, run in (("report", _REPORT, report), ("trace", _TRACE, trace)):
        command = commands.add_parser(name, help=sentence, description=sentence)
        command.set_defaults(run_command=run)
        command.add_argument("folder", type=Path, help="that InputOptions(trace=...) or TORCHDISTINPUT_TRACE named")
        command.add_argument("--run", help="which run, where the folder has several; or latest")
        if run is report:
            command.add_argument("--json", action="store_true", help="prints the numbers as JSON instead")
            command.add_argument("--html", type=Path, metavar="FILE", help="writes the same as a page, too")
        else:
            to = command.add_argument("-o", "--output", type=Path, default=Path("trace.json.gz"))
            to.help = "compressed if it ends in .gz"
    arguments = parser.parse_args(argv)
    try:
        arguments.run_command(arguments)
    except (InputError, OSError) as error:
        sys.stderr.write(f"torchdistinput {arguments.command}: {error}\n")
        return 1
    return 0


def report(arguments: argparse.Namespace) -> None:
    """Prints who made the others wait, and on what."""
    found = Report.of(arguments.folder, arguments.run)
    if arguments.html is not None:
        arguments.html.write_text(found.as_html())
    sys.stdout.write(f"{found.as_json() if arguments.json else found}\n")


def trace(arguments: argparse.Namespace) -> None:
    """Merges the files, and says what was written."""
    files, notes = find_files(arguments.folder, arguments.run)
    number, bound = merge(files, arguments.output, notes)
    sys.stderr.write("".join(f"note: {note}\n" for note in notes))
    told = f"{number} events of {len(files)} ranks, clocks right to within {1000 * bound:.3f} ms"
    sys.stdout.write(f"{arguments.output}: {told}; open it in Perfetto or chrome://tracing\n")


if __name__ == "__main__":
    sys.exit(main())
