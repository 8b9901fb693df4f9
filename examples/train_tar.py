"""Trains on images in tar archives of WebDataset, on any number of processes; each process reads archives of its own.

    python examples/train_tar.py
    torchrun --standalone --nproc-per-node 2 examples/train_tar.py

The archives are made first, by Python alone; those of the package ``webdataset`` are read in the same way. A sample is
an image (``.pgm``), its class (``.cls``), and a description (``.json``) that is never read. A small network learns
whether an image shows a disc, a square or a cross. At the end of each epoch the script proves that each sample came
once.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchdistinput as tdi

ARCHIVES, SAMPLES, SIZE = 6, 120, 16
GLOBAL_BATCH = 32
EPOCHS = 3
PGM = b"P5 %d %d 255\n" % (SIZE, SIZE)


def image_of(label: int, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """A noisy image of a disc (0), a square (1) or a cross (2), (SIZE, SIZE) of uint8."""
    y, x = np.mgrid[:SIZE, :SIZE] - random.integers(6, SIZE - 6, size=(2, 1, 1))
    shapes = np.hypot(x, y) < 4.5, np.maximum(abs(x), abs(y)) < 4, (abs(x) < 2) | (abs(y) < 2)
    noise = random.integers(0, 90, size=(SIZE, SIZE))
    return np.asarray(150 * shapes[label] + noise, dtype=np.uint8)


def write_archives(folder: Path) -> None:
    """Writes the archives ``shapes-000.tar`` and so on. All processes write the same."""
    folder.mkdir(exist_ok=True)
    for number in range(ARCHIVES):
        random = np.random.default_rng(number)
        unfinished = folder / f"{number}.{os.getpid()}"
        with tarfile.open(unfinished, "w") as archive:
            for key in range(number * SAMPLES, (number + 1) * SAMPLES):
                label = int(random.integers(3))
                image = PGM + image_of(label, random).tobytes()
                for end, content in (("pgm", image), ("cls", b"%d" % label), ("json", b'{"author": "nobody"}')):
                    member = tarfile.TarInfo(f"shapes/{key:06}.{end}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        unfinished.replace(folder / f"shapes-{number:03}.tar")


def pgm(content: bytes) -> torch.Tensor:
    """Decodes an image: (1, SIZE, SIZE), from 0 to 1."""
    pixels = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=len(PGM))
    return pixels.view(1, SIZE, SIZE) / 255


def to_sample(sample: dict[str, Any]) -> tuple[torch.Tensor, int, int]:
    """The image, its class, and the number in its key."""
    return pgm(sample["pgm"]), int(sample["cls"]), int(sample["__key__"].rpartition("/")[2])


def main() -> None:
    """Makes the archives, trains, and prints the loss of each epoch in one process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = tdi.Strategy(devices=["cpu"])
    folder = Path(tempfile.gettempdir()) / "torchdistinput-shapes"
    write_archives(folder)
    samples = tdi.FileDataset(
        f"{folder}/shapes-{{000..{ARCHIVES - 1:03}}}.tar",
        tdi.readers.webdataset(["pgm", "cls"]),
        map_fn=to_sample,
        shuffle_files=True,
        shuffle_buffer=SAMPLES,
        cycle_length=3,
        seed=1,
    )
    loader = strategy.distribute_dataset(DataLoader(samples, batch_size=GLOBAL_BATCH))

    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(128, 3)
    )
    if strategy.num_replicas_in_sync > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        losses, keys = [], []
        for image, label, key in loader:
            loss = F.cross_entropy(model(image), label, reduction="none")
            tdi.average_loss(loss, loader.step).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            keys.append(key)
        mean = strategy.reduce("mean", torch.cat(losses), axis=0)
        seen = strategy.gather(torch.cat(keys), axis=0).sort().values
        if not torch.equal(seen, torch.arange(ARCHIVES * SAMPLES)):
            raise SystemExit("samples were lost or repeated")
        if strategy.input_pipeline_id == 0:
            print(f"epoch {epoch}: loss {mean:.3f} over {len(seen)} samples, each once")


if __name__ == "__main__":
    main()
