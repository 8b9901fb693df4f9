"""What a training loop does with batches on a device, and how a test sees what it found there."""

from __future__ import annotations

from typing import Any, final

import torch

from torchdistinput.batches.pytree import flatten

__all__ = ["Witness", "batch_of", "check_alike", "scratch"]


def batch_of(step: int, rows: int = 4) -> dict[str, Any]:
    """A batch with leaves of all kinds; its sizes vary with the step, and each value tells the step."""
    width = (1, 40, 700, 12_000)[step % 4]
    return {
        "large": torch.arange(rows * width).reshape(rows, width) + 1_000_000 * step,
        "turned": (torch.arange(rows * 6) + 100 * step).reshape(6, rows).t(),
        "strided": (torch.arange(rows * 8.0) + step).reshape(rows, 8)[:, ::2],
        "empty": torch.zeros(rows, 0),
        "names": [f"{step}/{row}" for row in range(rows)],
        "small": {f"{leaf}": torch.full((rows,), 10 * step + leaf, dtype=torch.int16) for leaf in range(9)},
        "pair": (torch.full((rows, 2), step, dtype=torch.float64), torch.ones(rows, dtype=torch.bool)),
    }


def check_alike(found: Any, expected: Any, device: torch.device) -> None:
    """On the device, bit for bit what the user's own ``.to`` would give, layout included."""
    leaves, structure = flatten(found)
    wanted, of_wanted = flatten(expected)
    assert structure == of_wanted
    for leaf, want in zip(leaves, wanted, strict=True):
        if not isinstance(want, torch.Tensor):
            assert leaf == want
            continue
        assert (leaf.device, leaf.dtype, leaf.shape) == (device, want.dtype, want.shape)
        assert leaf.layout == want.layout
        if want.layout is torch.strided:
            moved = want if device.type == "cpu" else torch.empty_like(want, device="meta")
            assert leaf.stride() == moved.stride()
            assert torch.equal(leaf.cpu(), want)
        else:
            assert torch.equal(leaf.cpu().to_dense(), want.to_dense())


@final
class Witness:
    """Reads leaves on the current stream, as a kernel would: queued, not waited for. ``check`` tells what was read."""

    def __init__(self) -> None:
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(self, batch: Any, expected: Any) -> None:
        for leaf, want in zip(flatten(batch)[0], flatten(expected)[0], strict=True):
            if isinstance(leaf, torch.Tensor):
                self._read.append((leaf.clone(), want))

    def __len__(self) -> int:
        """How many leaves were read."""
        return len(self._read)

    def wrong(self) -> int:
        """How many leaves were not what they should have been."""
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
        return sum(not torch.equal(found.cpu(), want) for found, want in self._read)


def scratch(device: torch.device) -> None:
    """Memory of the user's own, of all sizes, written on the current stream and dropped."""
    for size in (16, 320, 5_600, 100_000):
        torch.empty(size, dtype=torch.uint8, device=device).fill_(7)
