"""The modules of the package that a steady step passes on rank 0 of two, in 200 steps of each kind of input.

    python scripts/trace_step.py [KIND ...] [--long]

``any`` counts the modules that some of the steps passes, with all threads of the rank; ``most`` those that nine of ten
steps pass. ``--long`` lists the modules, with the calls a step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

BATCH, BEFORE, STEPS = 8, 600, 200
LENGTH = BATCH * 2 * (BEFORE + STEPS)


class Numbers(Dataset[torch.Tensor]):
    """Samples that loader workers make."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def inputs(folder: str) -> dict[str, tuple[Any, tdi.AutoShardPolicy]]:
    """The data of each kind, and its policy."""
    data, files = tdi.AutoShardPolicy.DATA, sorted(map(str, Path(folder).iterdir()))
    return {
        "memory": (DataLoader(TensorDataset(torch.arange(float(LENGTH))), BATCH, shuffle=True), data),
        "files": (DataLoader(tdi.FileDataset(files, tdi.readers.text_lines), BATCH), tdi.AutoShardPolicy.FILE),
        "workers": (DataLoader(Numbers(), BATCH, shuffle=True, num_workers=2), data),
        "ready": ([torch.arange(float(BATCH))] * (LENGTH // BATCH), data),
    }


def traced(kind: str, folder: str) -> dict[str, float]:
    """For each module the calls a step. Called on each rank."""
    data, policy = inputs(folder)[kind]
    dataset = tdi.Strategy(["cpu"]).distribute_dataset(data, tdi.InputOptions(auto_shard_policy=policy))
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        _, inside, module = frame.f_code.co_filename.rpartition("/torchdistinput/")
        if event == "call" and inside:
            calls[module] += 1

    threading.setprofile(note)  # for the threads that are started from here on
    with dataset, iter(dataset) as iterator:
        for _ in range(BEFORE):
            next(iterator)
        calls.clear()
        sys.setprofile(note)
        for _ in range(STEPS):
            next(iterator)
        sys.setprofile(None)
        threading.setprofile(None)
        return {module: count / STEPS for module, count in calls.items()}


def main() -> None:
    """Prints a line for each kind of input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=["memory", "files", "workers", "ready"])
    parser.add_argument("--long", action="store_true")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in "ab":
            Path(folder, name).write_text("".join(f"line {number}\n" for number in range(LENGTH)))
        for kind in settings.kinds:
            calls = run_ranks(2, traced, kind, folder)[0]
            most = [module for module, count in calls.items() if count >= 0.9]
            print(f"{kind}: any {len(calls)}, most {len(most)}, {sum(calls.values()):.0f} calls a step")
            for module, count in sorted(calls.items()) if settings.long else ():
                print(f"    {module}: {count:.2f}")


if __name__ == "__main__":
    main()
