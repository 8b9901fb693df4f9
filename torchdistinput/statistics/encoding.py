"""Encodes a state as bytes, to send it to another rank or save it, and decodes it. No pickle: decoding runs no code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from torchdistinput.statistics.base import State


def encoded(state: State) -> bytes:
    """The bytes of a state: the length of a JSON text, this text with the structure, then the contents of its arrays.

    Raises:
      TypeError: the state holds an object of another kind than ``State`` allows.
    """
    arrays: list[bytes] = []
    text = json.dumps(_plain(state, arrays)).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *arrays])


def decoded(content: bytes | memoryview) -> State:
    """The state that was encoded as these bytes."""
    view = memoryview(content)
    length = int.from_bytes(view[:8], "little")
    place = 8 + length

    def restored(item: Any) -> Any:
        nonlocal place
        match item:
            case ["array", str() as dtype, [*shape]]:
                array = np.empty(shape, dtype)
                array.reshape(-1).view(np.uint8)[:] = np.frombuffer(view, np.uint8, array.nbytes, place)
                place += array.nbytes
                return array
            case ["dict", [*keys], [*values]]:
                return {key: restored(value) for key, value in zip(keys, values, strict=True)}
            case ["set", [*values]]:
                return set(values)
            case ["list", [*values]]:
                return [restored(value) for value in values]
            case [only]:
                return only
            case _:
                raise ValueError(f"{item!r:.100} is no part of a state.")

    return restored(json.loads(bytes(view[8 : 8 + length])))


def _plain(item: Any, arrays: list[bytes]) -> Any:
    """JSON for a part of a state; the contents of arrays are appended to ``arrays``."""
    match item:
        case np.ndarray():
            arrays.append(np.ascontiguousarray(item).tobytes())
            return ["array", item.dtype.str, list(item.shape)]
        case dict():
            return ["dict", list(item), [_plain(value, arrays) for value in item.values()]]
        case set():
            return ["set", list(item)]
        case list() | tuple():
            return ["list", [_plain(value, arrays) for value in item]]
        case np.generic():
            return [item.item()]
        case None | bool() | int() | float() | str():
            return [item]
        case _:
            allowed = "dicts, lists, sets, strings, numbers, None and NumPy arrays"
            raise TypeError(f"a state holds a {type(item).__name__}; it may hold {allowed}.")
