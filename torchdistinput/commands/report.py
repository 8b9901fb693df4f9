"""``python -m torchdistinput report``."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("folder", help="the folder that InputOptions(trace=...) or TORCHDISTINPUT_TRACE named")


def run(arguments: argparse.Namespace) -> int:
    """Not there yet."""
    raise NotImplementedError(arguments.folder)
