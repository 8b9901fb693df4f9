"""``python -m torchdistinput explain``."""

from __future__ import annotations

import argparse
import json
import sys

from torchdistinput.commands.target import add_target, planned_loader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_target(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan of a loader.

    Raises:
      InputError: the target has no loader.
    """
    with planned_loader(arguments.target, arguments.world_size) as loader:
        found = loader.explain()
    sys.stdout.write(f"{json.dumps(found.to_json()) if arguments.json else found}\n")
    return 0
