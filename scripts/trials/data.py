"""The data of a program, as each rank reads it: that of the oracle of the tests, where sample ``n`` is the number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.oracle.data import dataset_of, function_of
from tests.oracle.data import write_files as write
from trials.programs import Input

__all__ = ["global_loader", "numbers_in", "open_input", "write_files"]


def write_files(folder: Path, sources: tuple[Input, ...]) -> None:
    """Writes the files of the inputs that have some."""
    for number, source in enumerate(sources):
        if source.data == "files":
            inside = folder / f"input-{number}"
            inside.mkdir()
            write(source.as_read, inside)


def numbers_in(element: Any) -> list[int]:
    """The samples of an element."""
    tensor = element[0] if isinstance(element, (list, tuple)) else element
    return [int(each) for each in tensor.tolist()]


def _arguments(source: Input, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "batch_size": source.batch,
        "drop_last": source.drop_last,
        "num_workers": source.num_workers,
        "persistent_workers": source.persistent,
    }
    if source.order != "in order" and source.length:
        found["shuffle"] = True
    if source.order == "shuffled":
        found["generator"] = torch.Generator().manual_seed(seed)
    return found


def global_loader(source: Input, seed: int) -> DataLoader[Any]:
    """Makes torch's own loader of map-style data in one process, without loader workers where they change nothing.

    Args:
      source: the input.
      seed: of its generator.
    """
    arguments = _arguments(source, seed)
    if source.order == "in order" and not source.persistent:  # else seeds are drawn once
        arguments.update(num_workers=0, persistent_workers=False)
    return DataLoader(dataset_of(source.as_read, Path()), **arguments)


def open_input(strategy: tdi.Strategy, source: Input, seed: int, folder: Path) -> Any:
    """The input, distributed. Collective.

    Args:
      strategy: among whose replicas.
      source: the input.
      seed: of its generator.
      folder: of its files.
    """
    program = source.as_read
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[source.policy], prefetch=source.prefetch)
    if source.data == "function":
        return strategy.distribute_datasets_from_function(function_of(program), options)
    data = dataset_of(program, folder)
    if source.data == "ready":
        return strategy.distribute_dataset(data, options)
    arguments = _arguments(source, seed)
    if source.drop_in:
        return tdi.DataLoader(data, prefetch=source.prefetch, strategy=strategy, **arguments)
    return strategy.distribute_dataset(DataLoader(data, **arguments), options)
