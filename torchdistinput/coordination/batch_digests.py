"""Digests of batches, with which ranks that must read the same data check that they do.

A digest covers only a part of a batch, and only some batches have one. A digest takes about ten microseconds, and ranks
that read different data differ in nearly every batch.

There are two cases. Ranks with the same data coordinate of a mesh must get the same pieces: the digest is made of the
pieces. Ranks that all read a whole opaque iterable and keep a part of each batch must read the same batches: the digest
is made of the batch before it is cut.

Equal means equal content, whatever the ``repr`` of an object says: texts, also the folders in the name of a file; bytes
of tensors and arrays; the entries of containers and sets; and of any other object what pickle would save of it. A
random augmentation that draws differently on each rank makes another content of the same sample. This counts as a
difference, too, because it cannot be told from different data.

What cannot be compared is logged once: tensors on devices, which the training thread would wait for, and objects that
cannot be pickled. Of these only the class counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from itertools import islice
from pickle import PickleBuffer
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, final

import numpy as np
import torch

from torchdistinput.batches.containers import PLAIN_TYPES, open_container
from torchdistinput.step_types import FilesRead, LocalStep

_LOG = logging.getLogger("torchdistinput")

_MAX_GAP: Final = 64
_DIGEST: Final = 1 << 62  # this bit is set in a digest, and not in the number for a size (``number_of_size``)
_MAX_ITEMS: Final = 6
_MAX_SAMPLES: Final = 3
_MAX_PARTS: Final = 48
_MAX_LEAVES: Final = 16  # of a container in a piece
_MAX_FIELDS: Final = 32
_MAX_DEPTH: Final = 16  # an object may hold itself
_PARTS_OF_DRAW: Final = 512
_ITEMS_OF_DRAW: Final = 8
_MAX_PARTS_OF_ROW: Final = 64
_BLOCKS: Final = 4
_BLOCK_BYTES: Final = 512
_MAX_VALUES: Final = 256
_NEW: Final = 1 << 63  # this bit is set in the digest of an element, and was not in version 0.2, which saw less


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
    """For a source without a sampler, whose rows carry the data's digest as that of a draw: moves it to ``read``."""
    if isinstance(step.draw_digest, FilesRead):
        step.ends = step.draw_digest.ends
    step.read, step.draw_digest = step.digest, 0


def digest_after_file(before: int, records: int) -> int:
    """The digest of the files that were read to their end, with one more of so many records. Local."""
    return (before * 1_000_003 + records + 1) % ((1 << 61) - 1) | _DIGEST


def number_of_size(samples: int) -> int:
    """The number that stands for a batch of ``samples`` samples without a digest; 0 stands for no batch. Local."""
    return samples + 1


def digest_of_read(value: Any) -> int:
    """The digest of a batch as an iterable yielded it: an object of any kind. Local.

    It covers a few items of each list and mapping, a few bytes of each tensor, array and text, and of any other object
    a part of what pickle would save.
    """
    return _digest(value, _MAX_PARTS, _MAX_ITEMS) | _DIGEST


def digest_of_samples(samples: Sequence[Any]) -> int:
    """The digest of the samples of a batch: of their number, and of three of them. Local."""
    return digest_of_read((len(samples), _few(samples, _MAX_SAMPLES)))


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
    """A number of 2**63 to 2**64 for an element of an iterable, of any kind; it covers more than ``digest_of_read``."""
    return _digest(element, _MAX_VALUES, _MAX_VALUES) | _NEW


def is_digest_of(digest: int, element: Any) -> bool:
    """Whether a saved digest is that of an element; true for those of version 0.2, which cannot be compared. Local."""
    return digest < _NEW or digest == digest_of_element(element)


def digest_of_draw(items: Sequence[Any]) -> int:
    """A number of 1 to 2**63 for the items of a sampler, of any kind: of their number, and of a few of them. Local."""
    return _digest(list(items), _PARTS_OF_DRAW, _ITEMS_OF_DRAW) // 2 + 1


def _digest(value: Any, most_parts: int, most_items: int) -> int:
    """A number of 64 bits for a value of any kind: of so many parts in all, and so many items of each container."""
    found = blake2b(digest_size=8)
    _add(found.update, value, [most_parts], most_items, _MAX_DEPTH)
    return int.from_bytes(found.digest(), "little")


def _add(add: Callable[[bytes], object], value: Any, room: list[int], most_items: int, depth: int) -> None:
    """Adds a value of any kind to a digest, while there is room for its parts; so many items of each list."""
    if room[0] <= 0:
        return
    container = open_container(value)
    if container is not None and depth:
        add(f"{container.kind} {len(container.children)}".encode())
        children: Sequence[Any] = container.children
        if container.kind in ("dict", "dataclass"):
            most_items = max(most_items, _MAX_FIELDS)
        if container.kind == "dict":  # its order may follow from that of a set, which each process has another of
            names = [_text_of(key) for key in container.keys]
            order = sorted(range(len(children)), key=names.__getitem__)
            add(" ".join(names[place] for place in order).encode("utf-8", "surrogatepass"))
            children = [children[place] for place in order]
    else:
        room[0] -= 1
        for part in _parts(value):
            add(part)
        children = _content_of(value, most_items) if depth else ()
    for child in _few(children, most_items):
        _add(add, child, room, most_items, depth - 1)


def _few(items: Any, most: int) -> Any:
    """At most so many items of a list, or rows of an array, at equal distances from the first one on."""
    return items[:: -(-len(items) // most) or 1]


def _text_of(key: Any) -> str:
    """A text that is equal for equal keys of a mapping."""
    return str(key) if type(key) in PLAIN_TYPES else f"{_digest(key, _MAX_PARTS, _MAX_ITEMS):x}"


def _parts(value: Any) -> Iterator[bytes]:
    """The bytes of a value that is no container; of an object only its class."""
    if type(value) in (int, float, bool, type(None)):
        yield repr(value).encode()
    elif isinstance(value, str):
        yield from _parts(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview | PickleBuffer):
        content = memoryview(value)
        yield str(content.nbytes).encode()
        yield from _blocks(content.cast("B") if content.c_contiguous else content.tobytes())
    elif isinstance(value, torch.Tensor):
        yield from _parts_of_tensor(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{value.dtype} {value.shape}".encode()
        if not _has_objects(value):
            yield from _blocks(np.ascontiguousarray(_few_rows(value)).reshape(-1).view(np.uint8))
    elif isinstance(value, torch.layout | torch.memory_format):
        yield str(value).encode()
    elif isinstance(value, type | FunctionType | BuiltinFunctionType):
        yield value.__qualname__.encode()
    else:
        yield type(value).__name__.encode()


def _parts_of_tensor(leaf: torch.Tensor) -> Iterator[bytes]:
    yield str(leaf.dtype).encode()
    if leaf.device.type != "cpu":
        _tell_unchecked(f"tensors on {leaf.device.type}, which would be waited for")
    elif _is_dense(leaf):
        yield str(tuple(leaf.shape)).encode()
        if leaf.numel():
            rows = _few_rows(leaf.detach()).resolve_conj().resolve_neg()
            yield from _blocks((rows.int_repr() if rows.is_quantized else rows).reshape(-1).view(torch.uint8).numpy())


def _is_dense(leaf: torch.Tensor) -> bool:
    return not leaf.is_nested and leaf.layout is torch.strided


def _has_objects(array: Any) -> bool:
    """Whether entries of an array of NumPy are objects, or texts of any length, whose bytes lie elsewhere."""
    return bool(array.dtype.hasobject) or array.dtype.kind == "T"


def _few_rows(array: Any) -> Any:
    """The tensor or array, ready to be read as bytes: a few of its rows, if it would have to be copied for that."""
    if not array.ndim:
        return array.reshape(1)
    whole = array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous
    few = array if whole else _few(array, _BLOCKS)
    return few.contiguous() if isinstance(few, torch.Tensor) else few


def _blocks(content: Any) -> Iterator[bytes]:
    """A few blocks of bytes, from the first to the last."""
    for block in range(_BLOCKS):
        start = (len(content) - _BLOCK_BYTES) * block // (_BLOCKS - 1)
        yield bytes(content[max(0, start) : max(0, start) + _BLOCK_BYTES])
        if start <= 0 and len(content) <= _BLOCK_BYTES:
            return


def _content_of(value: Any, most_items: int) -> Sequence[Any]:
    """The content of a value that is no container; empty where ``_parts`` gives its bytes."""
    if type(value) in PLAIN_TYPES or isinstance(value, _BY_BYTES):
        return ()
    if isinstance(value, set | frozenset):  # each process has its entries in another order
        return sorted(map(_text_of, value)) if len(value) <= _MAX_VALUES else [len(value)]
    if isinstance(value, np.ndarray | np.generic):
        return [*_few(value.reshape(-1), most_items)] if isinstance(value, np.ndarray) and _has_objects(value) else ()
    if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or _is_dense(value)):
        return ()
    try:
        saved = value.__reduce_ex__(_PICKLE)
    except Exception as error:
        _tell_unchecked(f"objects of the class {type(value).__name__}, which cannot be pickled")
        _LOG.debug("while its content was asked for: %r", error)
        return ()
    if isinstance(saved, str):
        return [saved]
    made, arguments, state, items, entries = (*saved, None, None, None)[:5]
    return [made, arguments, state, *([*islice(more, most_items)] for more in (items, entries) if more is not None)]


_BY_BYTES: Final = (
    *(str, bytes, bytearray, memoryview, PickleBuffer),
    *(type, FunctionType, BuiltinFunctionType, torch.layout, torch.memory_format),
)
_PICKLE: Final = 5  # from this protocol on, buffers are not copied


@cache
def _tell_unchecked(what: str) -> None:
    """Says it once in a process."""
    _LOG.warning("a difference among ranks, or after a resume, is not noticed in what cannot be compared: %s.", what)
