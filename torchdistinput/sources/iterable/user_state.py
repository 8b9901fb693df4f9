"""The user's own state: a dataset, or the iterator over it, with ``state_dict`` and ``load_state_dict``.

The state is taken in the process that reads the data, perhaps a loader worker, as the text of a JSON value. So it stays
unchanged while the reading goes on, and is saved without pickle.

**Exact, or not used.** A state is taken one element before the end of a batch, with a digest of the last element. After
a restore this element is read first. If it is different, the state did not describe the position of the data, and is
refused. So the check costs a digest when a state is taken, and one element when it is restored. With
``own_state="auto"``, the state of data that is known not to restore exactly is not taken, and a state that cannot be
saved is left out: the data is read again from its start, or from the last state that could be saved.

**Between two epochs.** Data in this process may count its epochs in its state. So the state of the dataset itself is
saved between two epochs too, unless the dataset has ``set_epoch``, which says more. The state after the last epoch
is restored before the dataset is iterated. For some datasets the state after the last element means that nothing is
left. If the epoch is empty for this reason, the dataset is iterated once more, as it has dropped the state by then.

Data that is known not to restore exactly is found by attributes of its library, which is not imported; some of them are
private. If one is missing, the state is assumed to be exact, and checked like any other when it is restored.

**As JSON**: also tuples, tensors, arrays, bytes, and dicts with any plain keys. A value that JSON cannot hold becomes a
dict with the key ``$`` for its kind, and its content. A user's dict that has this key is written as pairs.
"""

from __future__ import annotations

import base64
import inspect
import json
import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from torchdistinput.batches.containers import is_tensor_collection
from torchdistinput.errors import InputError, StateMismatch
from torchdistinput.sources.set_epoch import wants_epochs

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
        return {_KIND: "bytes", "of": _compressed(value, path)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        content = _compressed(value.tobytes(), path)
        return {_KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "of": content}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        content = _compressed(plain.numpy().tobytes(), path)
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


def _compressed(content: bytes, path: str) -> str:
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


OwnState = Literal["auto", "use", "ignore"]
"""See ``InputOptions.own_state``."""

_END: Final = object()


@runtime_checkable
class HasState(Protocol):
    """A dataset or iterator that can be saved and restored by itself."""

    def state_dict(self) -> Any:
        """The position of the data, as a state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Sets the data to the position of the state."""


class Mark(NamedTuple):
    """What a resume needs of the moment before one element: the own state, and the digest of this element."""

    text: str | None = None
    """The state as JSON; empty if it cannot be saved, ``None`` if there is none."""
    refusal: str = ""
    """Why it cannot be saved."""
    reads_again: bool = False
    """Whether the data is read again if the state cannot be saved; else this is an error."""
    digest: int = 0
    """The digest of the element; 0: it is not compared."""


def why_unused(data: object, own_state: OwnState) -> str:
    """Why the data's own state is not used; empty if it is used, or the data has none. Local."""
    if own_state == "use" or not isinstance(data, HasState):
        return ""
    if own_state == "ignore":
        return 'own_state="ignore"'
    if needed := _arguments_of(data):
        return f"{type(data).__name__}.state_dict() needs arguments ({needed}), which nobody knows here"
    return why_inexact(data)


def tell_unused(dataset: object, own_state: OwnState) -> None:
    """Warns that the state of map-style data is not saved; not for a ``TensorDict``, whose state is its data. Local.

    Raises:
      InputError: ``own_state="use"`` asks for it.
    """
    if not isinstance(dataset, HasState) or own_state == "ignore" or is_tensor_collection(dataset):
        return
    unused = (
        f"the state_dict() of the map-style {type(dataset).__name__} is neither saved nor restored: its samples are "
        "read by their indices, ahead of the loop and by several ranks, so it has no one state for a step. Random "
        "augmentation is the same after a resume with seed_samples=True; save other state beside the loader's."
    )
    if own_state == "use":
        raise InputError(f'own_state="use" was given, but {unused} Leave own_state out.')
    warnings.warn(f'{unused} own_state="ignore" says that you know.', stacklevel=2)


def _arguments_of(data: HasState) -> str:
    """The required arguments of ``state_dict``."""
    try:
        parameters = inspect.signature(data.state_dict).parameters.values()
    except (TypeError, ValueError):  # a C function without a signature
        return ""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(each.name for each in parameters if each.default is each.empty and each.kind not in variable)


def keeps_state(data: object, own_state: OwnState) -> bool:
    """Whether the data's own state is used. Local."""
    return isinstance(data, HasState) and not why_unused(data, own_state)


class StatefulObjects(NamedTuple):
    """The objects with a state of the user's own: the dataset, its iterator, both, or none."""

    dataset: HasState | None
    iterator: HasState | None
    own_state: OwnState

    def __bool__(self) -> bool:
        return self.dataset is not None or self.iterator is not None

    @property
    def is_checked(self) -> bool:
        """Whether elements are compared with those that came when the state was saved."""
        return self.own_state != "use"

    def mark(self) -> Mark:
        """The state at this moment, or the reason why it cannot be saved."""
        try:
            return Mark(_text_of(self.dataset, self.iterator))
        except ValueError as error:  # raised when a state is asked for, not in a loop that saves none
            return Mark("", str(error), reads_again=self.is_checked)


def _text_of(dataset: HasState | None, iterator: HasState | None) -> str:
    """The states of both as one text; a ``ValueError`` says why that is not possible."""
    parts: list[str] = []
    for part, keeper in (("dataset", dataset), ("iterator", iterator)):
        if keeper is None:
            continue
        name = f"{type(keeper).__name__}.state_dict()"
        try:
            state = keeper.state_dict()
        except Exception as error:
            raise ValueError(f"{name} failed: {type(error).__name__}: {error}") from error
        try:
            parts.append(f'"{part}":{packed_state(state, name)}')
        except RecursionError as error:
            raise ValueError(f"{name} contains itself: {type(error).__name__}: {error}") from error
    return f"{{{','.join(parts)}}}"


def front_of(data: object, own_state: OwnState) -> Mark | None:
    """The state of a dataset before its next epoch; ``None`` if it is not to be saved. Local."""
    if not isinstance(data, HasState) or why_unused(data, own_state) or wants_epochs(data):
        return None
    return StatefulObjects(data, None, own_state).mark()


def entered(data: Iterable[Any], text: str | None, own_state: OwnState) -> tuple[Iterator[Any], StatefulObjects]:
    """An iterator over the data, which goes on from its own state if there is one, and the objects with this state.

    The state of a dataset is restored before ``iter``. The state of its iterator, which may be the dataset itself, is
    restored after ``iter``.

    Args:
      data: the user's data.
      text: the state to restore; ``None``: the data begins as usual.
      own_state: the user's option.

    Raises:
      StateMismatch: there is a state, but no object that can restore it; or the text is not JSON.
    """
    state = {} if text is None else _parsed(text)
    if "dataset" in state:
        _load(data, state["dataset"])
    iterator = iter(data)
    if "iterator" in state:
        _load(iterator, state["iterator"])
    if why_unused(data, own_state):
        return iterator, StatefulObjects(None, None, own_state)
    own = None if iterator is data else _keeper(data, own_state)
    return iterator, StatefulObjects(own, _keeper(iterator, own_state), own_state)


def _keeper(data: object, own_state: OwnState) -> HasState | None:
    return data if isinstance(data, HasState) and own_state != "ignore" and not why_unused(data, own_state) else None


def begun_again(data: Iterable[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """The iterator over data that was restored between two epochs; a new one if nothing is left in it."""
    first = next(iterator, _END)
    return iter(data) if first is _END else _after(first, iterator)


def _after(first: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """The first element and the rest, without another ``iter()``: data that is its own iterator would begin again."""
    yield first
    while (element := next(iterator, _END)) is not _END:
        yield element


def _load(keeper: object, state: Any) -> None:
    if not isinstance(keeper, HasState):
        raise StateMismatch(
            f"the state holds one of the data's own, but {type(keeper).__name__} has no state_dict() and "
            "load_state_dict(). Give the dataset that it was saved from."
        )
    keeper.load_state_dict(state)


def _parsed(text: str) -> dict[str, Any]:
    try:
        state = unpacked_state(text)
    except ValueError as error:
        raise StateMismatch(
            f"the dataset's own state in the state is {text[:80]!r}, which is no JSON ({error}). Load the state as it "
            "was saved."
        ) from error
    if type(state) is not dict or not {"dataset", "iterator"}.issuperset(state):
        raise StateMismatch(f"the dataset's own state in the state is {text[:80]!r}. Load the state as it was saved.")
    return state


_MOST_DEPTH: Final = 64


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether examples of a Hugging Face ``IterableDataset`` wait in a buffer, from which they come in random order."""
    left = [vars(dataset).get("_ex_iterable")]
    for _ in range(_MOST_DEPTH):
        found = [each for each in left if each is not None]
        if any(type(each).__name__ == "BufferShuffledExamplesIterable" for each in found):
            return True
        left = [inside for each in found for inside in _inner(each)]
    return False


def _inner(iterable: Any) -> list[Any]:
    held = getattr(iterable, "__dict__", {})
    several = held.get("ex_iterables")
    return [held.get("ex_iterable"), *(several if isinstance(several, list | tuple) else [])]


def why_inexact(data: object) -> str:
    """The reason why the data's own state does not restore it exactly; empty if no reason is known. Local."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(data).__mro__}
    if ("datasets", "IterableDataset") not in kinds or not _has_shuffle_buffer(data):
        return ""
    # datasets 2.18 to 5.2.0, whose own documentation says so. With two loader workers its load_state_dict() can also
    # end in an IndexError.
    return (
        "the state of a Hugging Face IterableDataset does not hold its shuffle buffer, whose examples are lost on a "
        "resume"
    )
