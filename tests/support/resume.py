"""Runs that are stopped and taken up again, as plain values that compare and travel between processes.

A run is read with its state taken at every place where a state can be taken. Each state is then loaded into a fresh
loader, which has to deliver what the uninterrupted run delivered from there on.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import torchdistinput as tdi
from tests.support import inputs
from tests.support.epochs import cut_by_s, lists, pieces

SEED = 5
OTHER_SEED = 1234
"""The default seed of a fresh process: what a run resumes from is its state, not a seed that is set again."""
EPOCHS = 3

Delivered = tuple[int, int, Any]
"""Epoch, step, and one part for each local replica."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the data is read; a run may be taken up with another one.

    Args:
      replicas: replicas of this process under a strategy; 0 for the drop-in loader, which has one.
      prefetch: steps made ready ahead.
      more: arguments of the loader, such as ``num_workers``.
    """

    replicas: int = 0
    prefetch: int = 0
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A state, as it was written down.

    Args:
      done: how many steps of the whole run had been delivered.
      text: the state as JSON.
    """

    done: int
    text: str

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.text)
        return state


@dataclasses.dataclass(frozen=True)
class Run:
    """Something that is iterated, with what makes plain parts of its elements."""

    loader: Any
    parts: Callable[[Any], list[Any]]

    def save(self, done: int) -> Saved:
        return Saved(done, json.dumps(self.loader.state_dict()))

    def load(self, saved: Saved) -> Run:
        self.loader.load_state_dict(saved.state)
        return self


def run_of(make: Callable[..., Any], setting: Setting, options: dict[str, Any] | None = None) -> Run:
    """A fresh run.

    Args:
      make: makes a DataLoader, of the class and with the further arguments that it is given.
      setting: how it is read.
      options: further ``InputOptions``, under a strategy.
    """
    if not setting.replicas:
        ahead = tdi.InputOptions(prefetch=setting.prefetch)
        return Run(make(tdi.DataLoader, options=ahead, **setting.more), lambda batch: [lists(batch)])
    strategy = tdi.Strategy(devices=["cpu"] * setting.replicas)
    chosen = {"auto_shard_policy": tdi.AutoShardPolicy.DATA, "prefetch": setting.prefetch, **(options or {})}
    dataset = strategy.distribute_dataset(make(torch.utils.data.DataLoader, **setting.more), tdi.InputOptions(**chosen))
    return Run(dataset, lambda element: pieces(strategy, element))


def known(name: str, folder: Path) -> Callable[..., Any]:
    """Makes the DataLoader of that name in ``inputs.LOADERS``."""
    return lambda cls, **more: inputs.LOADERS[name](folder, cls, **more)


def steps(run: Run, until: int | None = None, epochs: int = EPOCHS) -> Iterator[Delivered]:
    """Reads on from where the run stands, to the end of its epochs or for ``until`` steps."""
    left = until
    for _ in range(epochs + 1):
        if left == 0 or run.loader.state_dict()["epoch"] >= epochs:
            return
        for element in run.loader:
            step = run.loader.step
            yield step.epoch, step.index, run.parts(element)
            left = None if left is None else left - 1
            if left == 0:
                return
    raise AssertionError(f"the run stands still at epoch {run.loader.state_dict()['epoch']}")


def record(run: Run, epochs: int = EPOCHS) -> tuple[list[Delivered], list[Saved]]:
    """Reads the epochs, and takes the state before the first, after each step inside the loop, and after each epoch."""
    delivered: list[Delivered] = []
    states = [run.save(0)]
    for _ in range(epochs):
        for element in run.loader:
            step = run.loader.step
            delivered.append((step.epoch, step.index, run.parts(element)))
            states.append(run.save(len(delivered)))
        states.append(run.save(len(delivered)))
    return delivered, states


def one_process(make: Callable[..., Any], more: dict[str, Any], epochs: int = EPOCHS) -> list[tuple[int, int, Any]]:
    """The global batches of torch's loader in one process: epoch, step, batch."""
    loader = make(torch.utils.data.DataLoader, **more)
    return [(epoch, index, batch) for epoch in range(epochs) for index, batch in enumerate(loader)]


def cut(batches: Sequence[tuple[int, int, Any]], replicas: int) -> list[Delivered]:
    """What so many replicas get of global batches."""
    if not replicas:
        return [(epoch, index, [lists(batch)]) for epoch, index, batch in batches]
    return [(epoch, index, cut_by_s(batch, replicas)) for epoch, index, batch in batches]


@contextmanager
def iterables_may_be_skipped() -> Iterator[None]:
    """Without the warnings that iterables under DATA are read by every rank, and passed over on a resume."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
