"""``python -m torchdistinput samples``."""

from __future__ import annotations

import argparse
import json
import sys

from torchdistinput.commands.target import add_target, planned_loader
from torchdistinput.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_target(parser)
    parser.add_argument("--epoch", type=int, default=0, help="the number of the epoch (default: 0)")
    parser.add_argument("--step", type=int, required=True, help="the number of the step in the epoch, from 0")
    parser.add_argument("--rank", type=int, help="only the samples of this rank")


def run(arguments: argparse.Namespace) -> int:
    """Prints the samples of a step.

    Raises:
      InputError: the target has no loader, or the samples cannot be told; or there is no such step.
    """
    with planned_loader(arguments.target, arguments.world_size) as loader:
        try:
            found = loader.samples_of(arguments.epoch, arguments.step, arguments.rank)
        except ValueError as error:
            raise error if isinstance(error, InputError) else InputError(str(error)) from error
    sys.stdout.write(f"{json.dumps(found.to_json()) if arguments.json else found}\n")
    return 0
