"""``python -m torchdistinput samples``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from torchdistinput.commands.target import Loader, add_target, planned_loader
from torchdistinput.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_target(parser)
    parser.add_argument("--epoch", type=int, default=0, help="the number of the epoch (default: 0)")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--step", type=int, help="the number of the step in the epoch, from 0: which samples it has")
    asked.add_argument(
        "--sample",
        type=_sample,
        metavar="SAMPLE",
        help="in which step this sample comes: an index, or FILE:RECORD, or SOURCE:INDEX of a mixture",
    )
    parser.add_argument("--rank", type=int, help="only the samples of this rank")


def run(arguments: argparse.Namespace) -> int:
    """Prints the samples of a step, or the steps of a sample.

    Raises:
      InputError: the target has no loader, or the samples cannot be told; or there is no such step or sample.
    """
    with planned_loader(arguments.target, arguments.world_size) as loader:
        try:
            if arguments.step is None:
                told, as_json = _steps(loader, arguments)
            else:
                found = loader.samples_of(arguments.epoch, arguments.step, arguments.rank)
                told, as_json = str(found), found.to_json()
        except ValueError as error:
            raise error if isinstance(error, InputError) else InputError(str(error)) from error
    sys.stdout.write(f"{json.dumps(as_json) if arguments.json else told}\n")
    return 0


def _sample(text: str) -> Any:
    name, _, number = text.rpartition(":")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither an index nor NAME:NUMBER")
    return (name, int(number)) if name else int(number)


def _steps(loader: Loader, arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The steps of a sample, as text and as JSON."""
    sample, rank = arguments.sample, arguments.rank
    found = [each for each in loader.steps_of(sample, arguments.epoch) if rank in {None, each.rank}]
    notes = loader.samples_of(arguments.epoch, found[0].step).notes if found else ()
    name = sample if isinstance(sample, int) else ":".join(map(str, sample))
    head = f"Epoch {arguments.epoch}, on {arguments.world_size} rank(s): sample {name} comes in " + (
        f"{len(found)} step(s)." if found else "no step." if rank is None else f"no step of rank {rank}."
    )
    lines = [
        f"  step {each.step}: rank {each.rank}" + ("" if each.replica == each.rank else f", replica {each.replica}")
        for each in found
    ]
    as_json = {
        "epoch": arguments.epoch,
        "sample": sample,
        "world_size": arguments.world_size,
        "steps": [each._asdict() for each in found],
        "notes": notes,
    }
    return "\n".join([head, *lines, *notes]), as_json
