"""Train a small byte-level language model on the source files of Python's standard library, on any number of processes.

    python examples/train_text.py
    torchrun --standalone --nproc-per-node 2 examples/train_text.py

Nothing below knows how many processes there are: the batch sizes are global, and each process gets its share. At the
end the script proves that every window of every file was delivered exactly once, and that every held-out byte counted.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchdistinput as tdi

WINDOW = 128  # bytes in a record
START = 256  # the token before the first byte of a window
GLOBAL_BATCH = 64  # windows in a step, over all processes
HELD_OUT_EVERY = 20  # one file in so many is kept for the evaluation


def source_files(limit: int | None) -> list[str]:
    """The modules of the standard library without its tests and tools, in one order for all processes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    return [str(path) for path in files][:limit]


def windows(file: BinaryIO) -> Iterator[bytes]:
    """Cuts a file into records: windows of ``WINDOW`` bytes, the last one shorter."""
    while window := file.read(WINDOW):
        yield window


def to_sample(window: bytes) -> tuple[Tensor, int, int]:
    """Decodes a record: the bytes, filled up with zeros; how many there are; a checksum to recognise them by."""
    text = torch.zeros(WINDOW, dtype=torch.uint8)
    text[: len(window)] = torch.frombuffer(bytearray(window), dtype=torch.uint8)
    return text, len(window), zlib.crc32(window)


class ByteModel(nn.Module):
    """Predicts each byte of a window from those before it, by causal convolutions that reach ever further back."""

    def __init__(self, width: int = 64, dilations: tuple[int, ...] = (1, 2, 4, 8)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(START + 1, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, kernel_size=4, dilation=dilation) for dilation in dilations)
        self.reaches = [3 * dilation for dilation in dilations]
        self.head = nn.Conv1d(width, 256, kernel_size=1)

    def forward(self, text: Tensor) -> Tensor:
        """The logits of each byte, (batch, 256, WINDOW), for text (batch, WINDOW)."""
        before = F.pad(text.long(), (1, -1), value=START)
        hidden = self.embedding(before).transpose(1, 2)
        for layer, reach in zip(self.layers, self.reaches, strict=True):
            hidden = hidden + F.gelu(layer(F.pad(hidden, (reach, 0))))
        logits: Tensor = self.head(hidden)
        return logits


def bits(model: nn.Module, text: Tensor, length: Tensor) -> Tensor:
    """How many bits the model needs for each window, (batch,)."""
    nats = F.cross_entropy(model(text), text.long(), reduction="none")
    is_text = torch.arange(WINDOW, device=text.device) < length[:, None]
    return (nats * is_text).sum(dim=1) / math.log(2)


def train(strategy: tdi.Strategy, model: nn.Module, files: list[str], report_every: int) -> Tensor:
    """One epoch under the FILE policy: each process reads files of its own. Returns the checksums delivered here."""
    records = tdi.FileDataset(
        files, windows, map_fn=to_sample, shuffle_files=True, shuffle_buffer=1024, cycle_length=32, seed=0
    )
    loader = strategy.distribute_dataset(DataLoader(records, batch_size=GLOBAL_BATCH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    steps = sum(Path(file).stat().st_size for file in files) // (WINDOW * GLOBAL_BATCH)  # short batches add a few
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, total_iters=steps)
    checksums, losses = [], []
    for text, length, checksum in loader:
        bits_per_byte = bits(model, text, length) / length
        optimizer.zero_grad()
        tdi.average_loss(bits_per_byte, loader.step).backward()
        optimizer.step()
        schedule.step()
        checksums.append(checksum)
        losses.append(bits_per_byte.detach())
        if loader.step.index % report_every == 0:
            report(strategy, loader, torch.cat(losses))
            losses.clear()
    return torch.cat(checksums)


def report(strategy: tdi.Strategy, loader: tdi.DistributedDataset, losses: Tensor) -> None:
    """Prints how the training goes. Every process calls this, as the numbers come from all of them."""
    loss = strategy.reduce("MEAN", losses, axis=0)
    stats = loader.stats()
    samples = strategy.gather(torch.tensor([stats["samples"]]), axis=0).tolist()
    waiting = strategy.reduce("MEAN", stats["wait_seconds"] / stats["seconds"])
    say(
        strategy,
        f"step {loader.step.index:5d}   loss {loss:.3f} bits per byte   "
        f"windows per process {samples}   waiting for data {waiting:.1%} of the time",
    )


@torch.no_grad()
def evaluate(strategy: tdi.Strategy, model: nn.Module, files: list[str]) -> tuple[float, int]:
    """Bits per byte over every byte of the files, and their number. Under the DATA policy all share each batch."""
    records = tdi.FileDataset(files, windows, map_fn=to_sample)
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)
    totals = torch.zeros(2, dtype=torch.float64, device=strategy.device)
    for text, length, _ in strategy.distribute_dataset(DataLoader(records, batch_size=4 * GLOBAL_BATCH), options):
        totals += torch.stack([bits(model, text, length).double().sum(), length.sum()])
    all_bits, all_bytes = strategy.reduce("SUM", totals).tolist()
    return all_bits / all_bytes, int(all_bytes)


def count(files: list[str]) -> tuple[list[int], int]:
    """The checksums of all windows and the number of bytes, read in the plainest way."""
    contents = [Path(file).read_bytes() for file in files]
    cuts = [content[at : at + WINDOW] for content in contents for at in range(0, len(content), WINDOW)]
    return sorted(map(zlib.crc32, cuts)), sum(map(len, contents))


def say(strategy: tdi.Strategy, line: str) -> None:
    """Prints on one process only."""
    if strategy.input_pipeline_id == 0:
        print(line, flush=True)


def main() -> None:
    """Trains, evaluates and checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", action="store_true", help="use each process's accelerator, not the CPU")
    parser.add_argument("--files", type=int, default=400, help="use only the first so many files")
    parser.add_argument("--report-every", type=int, default=100, metavar="STEPS")
    arguments = parser.parse_args()

    strategy = tdi.Strategy(devices=None if arguments.accelerator else ["cpu"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = ByteModel().to(strategy.device)
    if strategy.num_input_pipelines > 1:
        model = DistributedDataParallel(model)

    files = source_files(arguments.files)
    held_out, training = files[::HELD_OUT_EVERY], [file for i, file in enumerate(files) if i % HELD_OUT_EVERY]
    say(strategy, f"{strategy.num_input_pipelines} process(es), {len(training)} files, {len(held_out)} more held out")

    checksums = train(strategy, model, training, arguments.report_every)
    bits_per_byte, evaluated_bytes = evaluate(strategy, model, held_out)

    delivered = strategy.gather(checksums, axis=0).sort().values.tolist()
    expected, _ = count(training)
    _, held_out_bytes = count(held_out)
    say(strategy, f"trained on {len(delivered)} windows of {len(expected)} in the files")
    say(strategy, f"held out: {bits_per_byte:.3f} bits per byte, over {evaluated_bytes} bytes of {held_out_bytes}")
    if delivered != expected or evaluated_bytes != held_out_bytes:
        sys.exit("records were lost or repeated")
    say(strategy, "each record was delivered exactly once")


if __name__ == "__main__":
    main()
