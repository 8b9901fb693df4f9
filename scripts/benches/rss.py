"""The peak of the resident memory, over that of the bare loop; fresh interpreters, one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from benches.memory_use import peak_mib
from benches.model import Column, Contender, Measured, Table, Target, largest
from benches.peers import peer

__all__ = ["tables"]

PEAK = "peak RSS, MiB"
BATCH = 1024
LINE = "a line of text, about as long as they are in the wild: {:09d}\n"


def _data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(samples * 64, dtype=torch.float32).view(samples, 64), torch.arange(samples)


def bare_memory(samples: int) -> Measured:
    """A permutation, ``index_select``, a batch at a time."""
    x, y = _data(samples)
    for rows in torch.split(torch.randperm(samples), BATCH):
        x.index_select(0, rows), y.index_select(0, rows)
    return {"mib": peak_mib()}


def torch_memory(samples: int) -> Measured:
    """Torch's loader."""
    dataset = torch.utils.data.TensorDataset(*_data(samples))
    deque(torch.utils.data.DataLoader(dataset, BATCH, shuffle=True), maxlen=0)
    return {"mib": peak_mib()}


def our_memory(samples: int) -> Measured:
    """The drop-in."""
    dataset = torch.utils.data.TensorDataset(*_data(samples))
    deque(peer("torchdistinput").DataLoader(dataset, BATCH, shuffle=True), maxlen=0)
    return {"mib": peak_mib()}


def _write(path: Path, lines: int) -> str:
    with path.open("w") as file:
        file.writelines(map(LINE.format, range(lines)))
    return str(path)


def bare_files(path: str) -> Measured:
    """A line at a time."""
    with Path(path).open() as file:
        batch: list[str] = []
        for line in file:
            batch.append(line[:-1])
            if len(batch) == BATCH:
                batch = []
    return {"mib": peak_mib()}


def our_files(path: str, shuffle_buffer: int) -> Measured:
    """A ``FileDataset`` under FILE."""
    tdi = peer("torchdistinput")
    data = tdi.FileDataset(path, tdi.readers.text_lines, shuffle_buffer=shuffle_buffer)
    with tdi.Strategy(["cpu"]).distribute_dataset(data, global_batch_size=BATCH) as dataset:
        deque(dataset, maxlen=0)
    return {"mib": peak_mib()}


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """In memory, and files."""
    samples, lines = (10_000, 10_000) if small else (1_000_000, 400_000)
    path = _write(folder / "text.txt", lines)
    rounds = 1 if small else 2
    columns = (Column(PEAK, "less", largest("mib")),)
    memory = (
        Contender("a loop by hand", "limit", bare_memory, (samples,), fresh=True),
        Contender("tdi.DataLoader", "ours", our_memory, (samples,), fresh=True),
        Contender("DataLoader", "peer", torch_memory, (samples,), fresh=True),
    )
    files = (
        Contender("a loop by hand", "limit", bare_files, (path,), fresh=True),
        Contender("FileDataset", "ours", our_files, (path, 0), fresh=True),
        Contender("FileDataset, shuffle_buffer=1000", "ours", our_files, (path, 1000), fresh=True),
    )

    def bounds(*ours: str) -> tuple[Target, ...]:
        return tuple(Target(PEAK, name, 1.1, ("a loop by hand",), better_by=False) for name in ours)

    of_files = bounds("FileDataset", "FileDataset, shuffle_buffer=1000")
    return [
        Table("Memory, samples in memory", columns, memory, 1, rounds, bounds("tdi.DataLoader")),
        Table("Memory, text files", columns, files, 1, rounds, of_files),
    ]
