"""Items of loader workers as plain tuples: tensors in tuples, lists and dicts, as most batches are.

A pickler looks up each class and function by its name, on both sides, and asks for each tensor how to reduce it: after
a batch was decoded, in caches that know nothing of it, that takes several times as long as all of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import torch

from torchdistinput.backends.slots import tensor_over
from torchdistinput.flow import Sealed
from torchdistinput.sources.lending import is_plain

__all__ = ["DTYPES", "NUMBER_OF", "Contents", "UnusualError", "is_whole", "made", "told"]

DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)
NUMBER_OF: Final = {dtype: number for number, dtype in enumerate(DTYPES)}
"""Of the usual types, which travel as numbers."""

_ATOM, _SEALED, _TUPLE, _LIST, _DICT = range(-1, -6, -1)
_ATOMS: Final = frozenset({int, float, str, bytes, bool, type(None)})


class UnusualError(Exception):
    """Something that must be pickled."""


class Contents(Protocol):
    """Where the contents of an item's tensors are."""

    def is_new(self, storage: torch.UntypedStorage, whole: torch.Tensor | None) -> bool:
        """Whether nothing was told of a storage before. It is now."""

    def is_first(self, container: Any) -> bool:
        """Whether nothing was told of a list or dict before. It is now."""

    def put(self, storage: torch.UntypedStorage, whole: torch.Tensor) -> bytes | None:
        """The contents of a storage, if they are to be in the message."""


def told(value: Any, contents: Contents) -> tuple[Any, ...]:
    """What an item is made of. What of it is told twice, so that it must be one thing again, is unusual.

    Raises:
      UnusualError: it is made of something else.
    """
    cls = type(value)
    if cls is torch.Tensor:
        number = NUMBER_OF.get(value.dtype)
        if number is None or not is_plain(value) or value.is_neg():
            raise UnusualError
        storage = value.untyped_storage()
        if not is_whole(value, storage) or not contents.is_new(storage, value):
            raise UnusualError
        return number, tuple(value.shape), contents.put(storage, value)
    if cls is Sealed:
        return _SEALED, told(value.content, contents), value.size
    if cls is tuple:
        return _TUPLE, tuple([told(each, contents) for each in value])
    if cls in _ATOMS:
        return _ATOM, value
    if cls is list and contents.is_first(value):
        return _LIST, tuple([told(each, contents) for each in value])
    if cls is dict and contents.is_first(value) and all(type(key) in _ATOMS for key in value):
        return _DICT, tuple(value), tuple([told(each, contents) for each in value.values()])
    raise UnusualError


def made(what: tuple[Any, ...], buffers: Iterator[memoryview]) -> Any:
    """The item that was told of.

    Args:
      what: what was told.
      buffers: the contents that were not in it, in order.
    """
    kind = what[0]
    if kind >= 0:
        _, shape, content = what
        return tensor_over(next(buffers) if content is None else bytearray(content), DTYPES[kind], shape)
    if kind == _SEALED:
        return tuple.__new__(Sealed, (made(what[1], buffers), what[2]))
    if kind == _TUPLE:
        return tuple([made(each, buffers) for each in what[1]])
    if kind == _LIST:
        return [made(each, buffers) for each in what[1]]
    if kind == _DICT:
        return {key: made(each, buffers) for key, each in zip(what[1], what[2], strict=True)}
    return what[1]


def is_whole(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a plain tensor is all of its storage, as a new one of its shape would be."""
    shape: Sequence[int] = tensor.shape
    return (
        tensor.is_contiguous()
        and 0 < storage.nbytes() == tensor.nbytes
        and (1 not in shape or tensor.stride() == tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))
    )
