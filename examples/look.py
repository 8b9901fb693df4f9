"""Which rank makes the others wait, and on what: a run with a slow rank, and its report as one HTML page.

    python examples/look.py --folder look

Three ranks read images from files. Rank 1 has a slow disk under one of its files. Each rank writes a trace
(``InputOptions(trace=...)``); the same is had of any program by ``TORCHDISTINPUT_TRACE=look torchrun ... train.py``.
Then the traces are read as the commands do it:

    python -m torchdistinput report look --html look/report.html
    python -m torchdistinput trace look -o look/trace.json.gz      # for Perfetto
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import torchdistinput as tdi
from torchdistinput.__main__ import main as command
from torchdistinput.testing import run_ranks

RANKS = 3
FILES = 9
RECORDS = 60
BATCH = 18
SLOW_FILE = 4  # rank i reads the files i, i + 3, ...: it is one of rank 1
SLOW = 1
TRAINING_SECONDS = 0.004


def read_slowly(file: BinaryIO) -> Iterator[bytes]:
    """The records of a file. Those of one file say that they are slow, as if it lay on another disk."""
    while record := file.read(64):
        if record[0] == SLOW:
            time.sleep(0.02)
        yield record


def to_image(record: bytes) -> Tensor:
    """Decodes a record."""
    return torch.frombuffer(bytearray(record), dtype=torch.uint8).float()


def train(folder: str) -> None:
    """What each rank does."""
    strategy = tdi.Strategy(devices=["cpu"])
    files = tdi.FileDataset(f"{folder}/data/*.bin", read_slowly, map_fn=to_image)
    options = tdi.InputOptions(trace=folder)
    loader = strategy.distribute_dataset(DataLoader(files, batch_size=BATCH), options)
    for _ in range(3):  # epochs
        for _batch in loader:
            time.sleep(TRAINING_SECONDS)


def main() -> None:
    """Makes the files, runs the ranks, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the trace and the report are written; by default a new one")
    given = parser.parse_args().folder
    folder: Path = given if given is not None else Path(tempfile.mkdtemp(prefix="look-"))
    (folder / "data").mkdir(parents=True)
    for number in range(FILES):
        content = bytes([SLOW if number == SLOW_FILE else 0]) * 64 * RECORDS
        (folder / "data" / f"images-{number:04}.bin").write_bytes(content)
    run_ranks(RANKS, train, str(folder))
    command(["report", str(folder), "--html", str(folder / "report.html")])
    command(["trace", str(folder), "-o", str(folder / "trace.json.gz")])


if __name__ == "__main__":
    main()
