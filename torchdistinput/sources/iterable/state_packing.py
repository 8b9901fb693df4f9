"""Packs a user's own state as JSON, and back: also tuples, tensors, arrays, bytes, and dicts with any plain keys.

A value that JSON cannot hold becomes a dict with the key ``$`` for its kind, and its content. A user's dict that has
this key is written as pairs.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any, Final

import numpy as np
import torch

_MOST_BYTES: Final = 1 << 20
_KIND: Final = "$"
_PLAIN: Final = (str, int, float, bool, type(None))


def packed_state(value: Any, name: str) -> str:
    """The value as JSON.

    Args:
      value: the user's state.
      name: the name of the state in messages.

    Raises:
      ValueError: a value in it cannot be written, or the state is too long; the message is for the user.
    """
    text = json.dumps(_packed(value, name), separators=(",", ":"))
    if len(text) > _MOST_BYTES:
        raise ValueError(
            f"{name} takes {len(text):,} bytes, and a saved state at most {_MOST_BYTES:,}. Save more beside it."
        )
    return text


def unpacked_state(text: str) -> Any:
    """The value from the result of ``packed_state``.

    Raises:
      ValueError: ``packed_state`` did not return this text.
    """
    try:
        return _unpacked(json.loads(text))
    except (AttributeError, KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _packed(value: Any, path: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_packed(each, f"{path}[{i}]") for i, each in enumerate(value)]
    if kind is tuple:
        return {_KIND: "tuple", "of": [_packed(each, f"{path}[{i}]") for i, each in enumerate(value)]}
    if isinstance(value, dict):
        return _packed_dict(value, path)
    if kind is bytes:
        return {_KIND: "bytes", "of": _text_of(value, path)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        content = _text_of(value.tobytes(), path)
        return {_KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "of": content}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        content = _text_of(plain.numpy().tobytes(), path)
        return {_KIND: "tensor", "dtype": dtype, "shape": list(value.shape), "of": content}
    raise ValueError(
        f"{path} is of type {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
        + ". A saved state is made of str, int, float, bool, None, bytes, lists, tuples, dicts, and dense tensors and "
        "arrays of numbers. Convert it in state_dict(), and back in load_state_dict()."
    )


def _packed_dict(value: dict[Any, Any], path: str) -> Any:
    if all(type(key) is str for key in value) and _KIND not in value:
        return {key: _packed(each, f'{path}["{key}"]') for key, each in value.items()}
    pairs = [[_packed(key, f"a key of {path}"), _packed(each, f"{path}[{key!r}]")] for key, each in value.items()]
    return {_KIND: "dict", "of": pairs}


def _text_of(content: bytes, path: str) -> str:
    if len(content) > _MOST_BYTES:
        raise ValueError(
            f"{path} takes {len(content):,} bytes, and a saved state at most {_MOST_BYTES:,}. Save more beside it."
        )
    return base64.b64encode(zlib.compress(content)).decode()


def _bytes_of(text: str) -> bytes:
    reader = zlib.decompressobj()
    content = reader.decompress(base64.b64decode(text), _MOST_BYTES)
    if not reader.eof:
        raise ValueError("it is longer than a saved state may be, or was cut.")
    return content


def _unpacked(value: Any) -> Any:
    if type(value) is list:
        return [_unpacked(each) for each in value]
    if type(value) is not dict:
        return value
    if _KIND not in value:
        return {key: _unpacked(each) for key, each in value.items()}
    kind, content = value[_KIND], value["of"]
    if kind == "tuple":
        return tuple(_unpacked(each) for each in content)
    if kind == "dict":
        return {_unpacked(key): _unpacked(each) for key, each in content}
    if kind == "bytes":
        return _bytes_of(content)
    if kind in {"array", "tensor"}:
        return _numbers(value)
    raise ValueError(f"it has a value of the kind {kind!r:.40}.")


def _numbers(value: dict[str, Any]) -> Any:
    content, shape = _bytes_of(value["of"]), value["shape"]
    if value[_KIND] == "array":
        array = np.frombuffer(content, np.dtype(value["dtype"])).reshape(shape)
        return array.copy() if shape else array[()]
    if not content:
        return torch.empty(shape, dtype=getattr(torch, value["dtype"]))
    plain = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    return plain.view(getattr(torch, value["dtype"])).reshape(shape)
