"""The modules of the package that a steady step passes on rank 0 of two, in 200 steps of each kind of input.

Calls are counted, and the time of the training thread inside of ``next`` is charged to the module that runs: with the
profiler on it is several times as long, so only shares of it say something.

    python scripts/trace_step.py [KIND ...] [--long]

``any`` counts the modules that some of the steps passes, with all threads of the rank; ``most`` those that nine of ten
steps pass. ``--long`` lists the modules, with the calls a step and the share of the time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
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


def traced(kind: str, folder: str) -> dict[str, tuple[float, float]]:
    """For each module the calls a step, and its share of the time. Called on each rank."""
    data, policy = inputs(folder)[kind]
    dataset = tdi.Strategy(["cpu"]).distribute_dataset(data, tdi.InputOptions(auto_shard_policy=policy))
    calls: Counter[str] = Counter()
    spent: dict[str, float] = defaultdict(float)
    clock = [0.0]

    def module_of(frame: FrameType | None) -> str:
        _, inside, module = frame.f_code.co_filename.rpartition("/torchdistinput/") if frame else ("", "", "")
        return module if inside else ""

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[module_of(frame)] += 1

    def measure(frame: FrameType, event: str, _: object) -> None:
        """Charges the time since the last event to the module that ran until this one."""
        now = time.perf_counter()
        running = module_of(frame.f_back if event == "call" else frame)
        spent[running] += now - clock[0]
        count(frame, event, _)
        clock[0] = time.perf_counter()

    threading.setprofile(count)  # for the threads that are started from here on
    with dataset, iter(dataset) as iterator:
        for _ in range(BEFORE):
            next(iterator)
        calls.clear()
        for _ in range(STEPS):
            clock[0] = time.perf_counter()
            sys.setprofile(measure)
            next(iterator)
            sys.setprofile(None)
        threading.setprofile(None)
        del calls[""]
        whole = sum(spent[module] for module in calls)
        return {module: (number / STEPS, spent[module] / whole) for module, number in calls.items()}


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
            most = [module for module, (number, _) in calls.items() if number >= 0.9]
            whole = sum(number for number, _ in calls.values())
            print(f"{kind}: any {len(calls)}, most {len(most)}, {whole:.0f} calls a step")
            for module, (number, share) in sorted(calls.items()) if settings.long else ():
                print(f"    {module:48}{number:7.2f}{100 * share:6.1f} %")


if __name__ == "__main__":
    main()
