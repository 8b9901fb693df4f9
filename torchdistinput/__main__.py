"""``python -m torchdistinput``: what is installed here, and commands for the shell.

A command is a line of ``COMMANDS`` and a module of ``torchdistinput/commands/`` with ``add_arguments(parser)`` and
``run(arguments)``, which returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from torchdistinput.devices.accelerators import Accelerators
from torchdistinput.errors import InputError

PURPOSE: Final = (
    "Distributed input for PyTorch, as TensorFlow's: every rank gets its part of each global batch, in step. Before a "
    "run these commands say who will read what, and after it which rank made the others wait, and on what. Without a "
    "command: what is installed here."
)
COMMANDS: Final = {
    "explain": "Says what a loader will do on N ranks, without starting them: who reads what, in how many steps.",
    "samples": "Names the samples of a step on N ranks, or the steps of a sample, without starting them.",
    "trace": "Merges the trace files of all ranks into one, for Perfetto and chrome://tracing.",
    "report": "Says from the trace files of a run which rank made the others wait, and on what; also as an HTML page.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, or says what is installed. Local.

    Args:
      argv: the arguments; those of this process by default.

    Returns:
      The exit status: 0, 1 after an error of the input or of a file, 2 (from argparse) for wrong arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m torchdistinput", description=PURPOSE)
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, sentence in COMMANDS.items():
        command = commands.add_parser(name, help=sentence, description=sentence)
        module = importlib.import_module(f"torchdistinput.commands.{name}")
        module.add_arguments(command)
        command.set_defaults(run_command=module.run)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        sys.stdout.write(f"{about()}\n\n{parser.format_help()}")
        return 0
    try:
        status: int = arguments.run_command(arguments)
    except (InputError, OSError) as error:
        sys.stderr.write(f"torchdistinput {arguments.command}: {error}\n")
        return 1
    return status


def about() -> str:
    """The versions, the devices, the extras and where the pages are, a line each. Local."""
    accelerators = Accelerators.detect()
    devices = "cpu" if accelerators.kind is None else f"{accelerators.count} x {accelerators.kind}, cpu"
    return "\n".join(
        [
            f"torchdistinput {installed('torchdistinput') or 'not installed: only its folder is on the path'}",
            f"torch          {torch.__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"devices        {devices}",
            *(f"{'extras' if place == 0 else '':<15}{line}" for place, line in enumerate(extras())),
            f"pages          {pages()}",
        ]
    )


def extras() -> list[str]:
    """Each extra, and which of its packages are missing."""
    if installed("torchdistinput") is None:
        return []
    needs: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("torchdistinput") or ():
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        name = re.match(r"[\w.-]+", line)
        if extra and name:
            needs.setdefault(extra[1], []).append(name[0])
    lines = []
    for extra_name, packages in needs.items():
        missing = [package for package in packages if installed(package) is None]
        lines.append(f"{extra_name}: {'no ' + ', '.join(missing) if missing else 'yes'}")
    return lines


def installed(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pages() -> str:
    """Where README.md and examples/ are: beside the package, unless it was installed without them."""
    root = Path(__file__).parents[1]
    if (root / "README.md").exists():
        return f"{root / 'README.md'}, {root / 'examples'}"
    return "README.md and examples/ in the source of torchdistinput"


if __name__ == "__main__":
    sys.exit(main())
