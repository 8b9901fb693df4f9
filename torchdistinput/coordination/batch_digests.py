"""Digests of batches, with which ranks that must read the same data check that they do.

A digest covers only a part of a batch, and only some batches have one. A digest takes about ten microseconds, and ranks
that read different data differ in nearly every batch.

There are two cases. Ranks with the same data coordinate of a mesh must get the same pieces: the digest is made of the
pieces. Ranks that all read a whole opaque iterable and keep a part of each batch must read the same batches: the digest
is made of the batch before it is cut.

Equal means equal bytes. A random augmentation that draws differently on each rank makes different bytes of the same
sample. This counts as a difference, too, because it cannot be told from different data. Not covered are objects of
unknown classes, tensors on devices, and the folder in the name of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final, final

import numpy as np
import torch

from torchdistinput.batches.containers import open_container
from torchdistinput.step_types import DividedDraw, LocalStep

_MAX_GAP: Final = 64
_DIGEST: Final = 1 << 62  # this bit is set in a digest, and not in the number for a size (``number_of_size``)
_MAX_ITEMS: Final = 6
_MAX_SAMPLES: Final = 3
_MAX_PARTS: Final = 12
_MAX_NAME: Final = 1024
_MAX_LEAVES: Final = 16  # of a container in a piece
_MAX_PARTS_OF_ROW: Final = 64
_BLOCKS: Final = 4
_BLOCK_BYTES: Final = 512
_MAX_VALUES: Final = 256
_PLAIN: Final = (str, bytes, int, float, bool, type(None))


@final
class BatchDigests:
    """Computes a digest of the pieces for the first row of an epoch, and after it as ``longer_gap`` says."""

    def __init__(self) -> None:
        self._until_next, self._gap = 0, 1

    def __call__(self, step: LocalStep, row: Sequence[Any]) -> None:
        """Writes the digest of a row into its step; 1 for a row without one (0 stands for the end). Local."""
        if self._until_next:
            self._until_next -= 1
            step.read = 1
            return
        self._until_next, self._gap = self._gap - 1, longer_gap(self._gap)
        step.read = digest_of_batch(row)


def longer_gap(gap: int) -> int:
    """The number of batches from one digest to the next: twice the number before, so 1, 2, 4, ...; at most 64. Local.

    Ranks that read different data often begin alike, for example with a common part. A short epoch has few batches.
    """
    return min(2 * gap, _MAX_GAP)


def take_for_read(step: LocalStep, row: Sequence[Any]) -> None:
    """For a source without a sampler, whose rows carry the data's digest in ``drew``: moves it to ``read``. Local."""
    step.read, drew = step.digest, step.drew
    if isinstance(drew, DividedDraw):
        drew.drew = 0
    else:
        step.drew = 0


def number_of_size(samples: int) -> int:
    """The number that stands for a batch of ``samples`` samples without a digest; 0 stands for no batch. Local."""
    return samples + 1


def digest_of_read(value: Any) -> int:
    """The digest of a batch as an iterable yielded it: an object of any kind. Local.

    It covers a few items of each list and mapping, a few bytes of each tensor, array and text, and the types of all
    other objects. Numbers that are not finite count by their bytes.
    """
    return _digest(value, _MAX_PARTS, _MAX_ITEMS) | _DIGEST


def digest_of_samples(samples: Sequence[Any]) -> int:
    """The digest of the samples of a batch: of their number, and of three of them. Local."""
    return digest_of_read((len(samples), samples[:: -(-len(samples) // _MAX_SAMPLES) or 1]))


def words_of(number: int) -> str:
    """A number from ``digest_of_...`` or ``number_of_size`` in words: a checksum, or a size. Local."""
    return f"{number:x}" if number & _DIGEST else "no batch" if not number else f"{number - 1} sample(s)"


def digest_of_batch(row: Sequence[Any]) -> int:
    """A number of 1 to 2**63 that is equal for equal pieces, and for different pieces hardly ever. Local.

    It covers the shapes and types of the leaves, and a few of their bytes or texts. Tensors on devices are not read:
    the training thread would wait for the device.

    Args:
      row: the pieces; ``None`` for an empty one.
    """
    return _digest(list(row), _MAX_PARTS_OF_ROW, _MAX_LEAVES) // 2 + 1


def digest_of_element(element: Any) -> int:
    """A number of 1 to 2**63 for one element of an iterable, of any kind. It covers more than ``digest_of_read``."""
    return _digest(element, _MAX_VALUES, _MAX_VALUES) // 2 + 1


def _digest(value: Any, most_parts: int, most_items: int) -> int:
    """A number of 64 bits for a value of any kind: of so many parts in all, and so many items of each container."""
    found = blake2b(digest_size=8)
    _add(found.update, value, [most_parts], most_items)
    return int.from_bytes(found.digest(), "little")


def _parts_of_tensor(leaf: torch.Tensor) -> Iterator[bytes]:
    yield str(leaf.dtype).encode()
    if leaf.is_nested or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return
    yield str(tuple(leaf.shape)).encode()
    if not leaf.numel() or leaf.is_quantized:
        return
    rows = leaf.detach() if leaf.dim() else leaf.detach().reshape(1)
    if not rows.is_contiguous():
        rows = rows[:: -(-len(rows) // _BLOCKS)].contiguous()
    yield from _blocks(rows.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy())


def _blocks(content: Any) -> Iterator[bytes]:
    """A few blocks of bytes, from the first to the last."""
    for block in range(_BLOCKS):
        start = (len(content) - _BLOCK_BYTES) * block // (_BLOCKS - 1)
        yield bytes(content[max(0, start) : max(0, start) + _BLOCK_BYTES])
        if start <= 0 and len(content) <= _BLOCK_BYTES:
            return


def _add(add: Callable[[bytes], object], value: Any, room: list[int], most_items: int) -> None:
    """Adds a value of any kind to a digest, while there is room for its parts; so many items of each container."""
    if room[0] <= 0:
        return
    container = open_container(value)
    if container is None:
        room[0] -= 1
        for part in _parts(value):
            add(part)
        return
    children = container.children
    add(f"{container.kind} {len(children)}".encode())
    if container.kind == "dict":  # its order may follow from that of a set, which each process has another of
        order = sorted(range(len(children)), key=lambda place: str(container.keys[place]))
        add(" ".join(str(container.keys[place]) for place in order).encode("utf-8", "surrogatepass"))
        children = [children[place] for place in order]
    for child in children[:: -(-len(children) // most_items) or 1]:
        _add(add, child, room, most_items)


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield from _parts_of_tensor(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{value.dtype} {value.shape}".encode()
        if value.dtype.kind not in "OV":
            yield from _blocks(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, bytes):
        yield str(len(value)).encode()
        yield from _blocks(value)
    elif isinstance(value, str):
        # Each machine may have its own folders.
        name = value.rpartition("/")[2] if len(value) < _MAX_NAME else value
        yield from _parts(name.encode("utf-8", "surrogatepass"))
    else:
        yield (repr(value) if type(value) in _PLAIN else type(value).__name__).encode()
