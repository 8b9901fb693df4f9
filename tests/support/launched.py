"""Many scenes in one launch of ranks: a launch takes longer than a scene."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from torchdistinput.testing import run_ranks

Name = TypeVar("Name")
Result = TypeVar("Result")
Scenes = Callable[[int, str], list[Any]]
"""What each rank of a world returned in the scene of that name."""

ScenesOf = Callable[[int, Path], dict[str, Callable[[], Any]]]
"""The scenes of a world by name, given a folder with files."""


def launched(worlds: Iterable[int], scenes_of: ScenesOf, folder: Path) -> Scenes:
    """Plays the scenes of each world, one launch for each."""
    play = partial(_play, scenes_of, folder)
    ranks = at_once({world: partial(run_ranks, world, play, timeout_seconds=120) for world in worlds})
    return lambda world, name: [rank[name] for rank in ranks[world]]


def at_once(launches: Mapping[Name, Callable[[], Result]]) -> dict[Name, Result]:
    """Makes several launches at a time, which wait for the most part."""
    with ThreadPoolExecutor(len(launches)) as pool:
        return dict(zip(launches, pool.map(lambda launch: launch(), launches.values()), strict=True))


def _play(scenes_of: ScenesOf, folder: Path) -> dict[str, Any]:
    """One rank: all scenes of its world, one after the other."""
    return {name: scene() for name, scene in scenes_of(dist.get_world_size(), folder).items()}


def lines_logged() -> list[str]:
    """The lines that the library logs in this rank from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchdistinput")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines
