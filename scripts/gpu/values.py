"""Random steps: the consumer holds 0 to 8 batches, leaves early, and changes its stream; every byte is checked.

Under torch's stream sanitizer (what ``TORCH_CUDA_SANITIZER=1`` enables) the same steps must raise no report, and with
one wait left out they must.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from gpu.accelerator import Figures, device, is_real
from torchdistinput.devices.accelerators import TorchStreams
from torchdistinput.devices.copy_ahead import StreamCopier, Transfer

__all__ = ["run", "sanitized"]

Batch = dict[str, torch.Tensor]
_LEAVES = 6
_WIDTHS = (1, 1 << 8, 1 << 12, 1 << 16)


def batch_of(step: int) -> Batch:
    """A batch whose leaves vary in size with the step; each value is the number of the step."""
    rng = random.Random(step)
    return {f"{leaf}": torch.full((4, rng.choice(_WIDTHS)), step) for leaf in range(_LEAVES)}


class Batches(Dataset[Batch]):
    """So many of them."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, step: int) -> Batch:
        return batch_of(step)


class Consumer:
    """What a training loop does with batches: keeps some, drops some, writes memory of its own, changes its stream.

    Args:
      where: the device.
      seed: draws what it does.
      changes_stream: whether it does that.
    """

    def __init__(self, where: torch.device, seed: int, *, changes_stream: bool) -> None:
        self._where = where
        self._rng = random.Random(seed)
        self._streams = [torch.accelerator.current_stream(where)]
        if changes_stream:
            self._streams += [torch.Stream(where), torch.Stream(where)]
        self._wrong: list[torch.Tensor] = []
        self._held: list[tuple[int, Batch]] = []

    def choose_stream(self) -> None:
        """Before ``next``. What it holds belongs to the old stream, so it is dropped."""
        if len(self._streams) > 1 and self._rng.random() < 0.05:
            self._held.clear()
            torch.accelerator.set_stream(self._rng.choice(self._streams))

    def take(self, step: int, batch: Batch) -> None:
        """Looks at one of the batches that it holds, as a kernel would: queued, not waited for."""
        self._held.append((step, batch))
        for size in (64, 1 << 14, 1 << 18):
            torch.empty(size, dtype=torch.int64, device=self._where).fill_(-1)
        number, each = self._rng.choice(self._held)
        self._wrong.append(
            sum(
                ((leaf != number).sum() for leaf in each.values()),
                start=torch.zeros((), dtype=torch.int64, device=self._where),
            )
        )
        while len(self._held) > self._rng.randrange(9):
            self._held.pop(self._rng.randrange(len(self._held)))

    def leaves(self) -> bool:
        """Whether it leaves the epoch now."""
        return self._rng.random() < 0.01

    def wrong(self) -> int:
        """Values that were not those of their step."""
        torch.accelerator.synchronize(self._where)
        found = sum(int(each) for each in self._wrong)
        self._wrong.clear()
        self._held.clear()
        torch.accelerator.set_stream(self._streams[0])
        return found


def play(
    data: Any, prefetch: int | None, where: torch.device, steps: int, *, seed: int, changes_stream: bool = True
) -> int:
    """So many steps, over as many epochs as that takes. Returns how many values were wrong."""
    consumer = Consumer(where, seed, changes_stream=changes_stream)
    with tdi.Strategy([where]).distribute_dataset(data, tdi.InputOptions(prefetch=prefetch)) as dataset:
        for _, step in zip(range(steps), _epochs(dataset, consumer), strict=False):
            consumer.take(*step)
    return consumer.wrong()


def _epochs(dataset: tdi.DistributedDataset, consumer: Consumer) -> Iterator[tuple[int, Batch]]:
    while True:
        batches = iter(dataset)
        consumer.choose_stream()
        while (batch := next(batches, None)) is not None:
            yield dataset.step.index, batch
            del batch
            if consumer.leaves():
                break
            consumer.choose_stream()
        batches.close()


def sources(number: int) -> dict[str, Callable[[], Any]]:
    """Where batches come from: made on this thread, and by loader workers."""
    return {
        "in process": lambda: [batch_of(step) for step in range(number)],
        "map-style": lambda: DataLoader(Batches(number), batch_size=None),
        "loader workers": lambda: DataLoader(Batches(number), batch_size=None, num_workers=2),
    }


def run(small: bool) -> Figures:  # noqa: FBT001 - as all parts
    """2,000 steps in all, without the sanitizer."""
    where, steps = device(), 60 if small else 250
    wrong: dict[str, int] = {}
    for name, make in sources(64).items():
        for prefetch in (0, 2, None) if name == "in process" else (2, None) if name == "map-style" else (1, 4, None):
            wrong[f"{name}, prefetch {prefetch}"] = play(make(), prefetch, where, steps, seed=len(wrong))
    return {"steps": steps * len(wrong), "wrong": wrong, "ok": not any(wrong.values())}


class _Unwaiting(TorchStreams):  # type: ignore[misc] # final: this is the planted fault
    """The planted fault: the consumer's stream does not wait for the copies."""

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Waits only on the side stream."""
        if stream != torch.accelerator.current_stream(self._device):
            super().wait(stream, event)


def sanitized(small: bool) -> Figures:  # noqa: FBT001 - as all parts
    """Under the sanitizer: no report, and one for a planted missing wait.

    The sanitizer's own records do not stand two threads, so this thread sends ahead too, as a background thread would.
    """
    where, steps = device(), 20 if small else 2000
    if not is_real(where):
        return {"ok": True, "left_out": "torch's stream sanitizer knows CUDA only"}
    from torch.cuda import _sanitizer  # noqa: PLC0415 - of CUDA alone

    _sanitizer.enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
    report, wrong = _reported(TorchStreams(where), where, steps)
    planted, _ = _reported(_Unwaiting(where), where, steps)
    return {
        "steps": steps,
        "report": report,
        "wrong": wrong,
        "planted": planted,
        "ok": not report and wrong == 0 and bool(planted),
    }


def _reported(streams: TorchStreams, where: torch.device, steps: int) -> tuple[str, int]:
    """The first report of the sanitizer, and wrong values: batches are sent up to 4 ahead, and some are given up."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            wrong = _ahead_on_one_thread(streams, where, steps)
    except Exception:
        if not printed.getvalue():  # the sanitizer prints what it found, and raises after that, in ways of its own
            raise
        wrong = 0
    return printed.getvalue().strip()[:400], wrong


def _ahead_on_one_thread(streams: TorchStreams, where: torch.device, steps: int) -> int:
    consumer, rng = Consumer(where, 3, changes_stream=True), random.Random(5)
    copier = StreamCopier(streams)
    ahead: deque[tuple[int, Transfer]] = deque()
    for step in range(steps):
        consumer.choose_stream()
        copier.begin_step()
        for number in range(step + len(ahead), step + 1 + rng.randrange(5)):
            ahead.append((number, copier.send(batch_of(number))))
        while ahead and ahead[0][0] < step:
            copier.discard(ahead.popleft()[1])
        if not ahead:
            ahead.append((step, copier.send(batch_of(step))))
        consumer.take(step, copier.hand_over(ahead.popleft()[1]))
        if consumer.leaves():
            while ahead:
                copier.discard(ahead.popleft()[1])
    copier.close()
    return consumer.wrong()
