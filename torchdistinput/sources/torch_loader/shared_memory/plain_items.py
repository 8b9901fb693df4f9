"""Encodes the items of loader workers as plain tuples: tensors in tuples, lists and dicts, as in most batches.

A pickler looks up each class and function by its name, in both processes, and asks for each tensor how to reduce it.
After a batch was decoded, with the processor's caches full of other data, this takes several times as long as the
encoding here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import torch

from torchdistinput.batches.containers import PLAIN_TYPES
from torchdistinput.sources.torch_loader.shared_memory.pool import tensor_over
from torchdistinput.sources.torch_loader.shared_memory.worker import is_plain
from torchdistinput.step_types import OpaqueBatch

__all__ = ["DTYPES", "NUMBER_OF", "Tensors", "UnusualError", "is_whole", "made", "told"]

DTYPES: Final = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)
NUMBER_OF: Final = {dtype: number for number, dtype in enumerate(DTYPES)}
"""Common types of tensors; their place in this list travels as a number."""

_ATOM, _SEALED, _TUPLE, _LIST, _DICT = range(-1, -6, -1)


class UnusualError(Exception):
    """The item holds a value that must be pickled."""


@final
class Tensors:
    """The tensors of an item in the order of their encoding. Each is the whole of a storage of its own."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}  # by the id of the storage
        self._containers: set[int] = set()  # by id

    def is_new(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether a storage was not encoded before. It counts as encoded from now on."""
        if id(storage) in self.found:
            return False
        self.found[id(storage)] = storage, tensor
        return True

    def is_first(self, container: Any) -> bool:
        """Whether a list or dict was not encoded before. It counts as encoded from now on."""
        if id(container) in self._containers:
            return False
        self._containers.add(id(container))
        return True


def told(value: Any, tensors: Tensors) -> tuple[Any, ...]:
    """The encoding of an item. An object that occurs twice must be one object again, so such an item is unusual.

    Raises:
      UnusualError: the item holds a value of another kind.
    """
    cls = type(value)
    if cls is torch.Tensor:
        number = NUMBER_OF.get(value.dtype)
        if number is None or not is_plain(value) or value.is_neg():
            raise UnusualError
        storage = value.untyped_storage()
        if not is_whole(value, storage) or not tensors.is_new(value, storage):
            raise UnusualError
        return number, tuple(value.shape)
    if cls is OpaqueBatch:
        return _SEALED, told(value.content, tensors), value.size
    if cls is tuple:
        return _TUPLE, tuple([told(each, tensors) for each in value])
    if cls in PLAIN_TYPES:
        return _ATOM, value
    if cls is list and tensors.is_first(value):
        if PLAIN_TYPES.issuperset(map(type, value)):  # there may be thousands of texts
            return _ATOM, value
        return _LIST, tuple([told(each, tensors) for each in value])
    if cls is dict and tensors.is_first(value) and all(type(key) in PLAIN_TYPES for key in value):
        return _DICT, tuple(value), tuple([told(each, tensors) for each in value.values()])
    raise UnusualError


def made(what: tuple[Any, ...], contents: Iterator[memoryview | bytearray]) -> Any:
    """The item, made from its encoding.

    Args:
      what: the encoding.
      contents: the contents of its tensors, in order.
    """
    kind = what[0]
    if kind >= 0:
        return tensor_over(next(contents), DTYPES[kind], what[1])
    if kind == _SEALED:
        return tuple.__new__(OpaqueBatch, (made(what[1], contents), what[2]))
    if kind == _TUPLE:
        return tuple([made(each, contents) for each in what[1]])
    if kind == _LIST:
        return [made(each, contents) for each in what[1]]
    if kind == _DICT:
        return {key: made(each, contents) for key, each in zip(what[1], what[2], strict=True)}
    return what[1]


def is_whole(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a plain tensor is all of its storage, as a new one of its shape would be."""
    shape: Sequence[int] = tensor.shape
    return (
        tensor.is_contiguous()
        and 0 < storage.nbytes() == tensor.nbytes
        and (1 not in shape or tensor.stride() == tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))
    )
