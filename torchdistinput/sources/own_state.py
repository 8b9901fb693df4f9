"""The user's own state: a dataset, or the iterator over it, with ``state_dict`` and ``load_state_dict``.

It is taken where the data is read, in a loader worker perhaps, as the text of a JSON value: so it can be kept while the
reading goes on, and saved without pickle. A state that is not plain is refused when somebody wants to save it: a loop
that saves nothing need not care.

Between two epochs none is saved. To some the state after the last element means that nothing is left, to others that
all begins again; so an epoch that is entered at its front begins as it does in a new process. An order that changes
from epoch to epoch comes with ``set_epoch``, which is told again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torchdistinput.errors import StateMismatch

__all__ = ["HasState", "Snapshot", "entered", "snapshot_of"]


@runtime_checkable
class HasState(Protocol):
    """A dataset or iterator that can be saved and restored by itself."""

    def state_dict(self) -> Any:
        """Where it stands."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Goes there."""


class Snapshot(NamedTuple):
    """An own state at one moment."""

    text: str
    """The state as JSON; nothing where it was refused."""
    refusal: str = ""
    """Why it cannot be saved."""


def snapshot_of(keeper: HasState) -> Snapshot:
    """The state as it is now, or why it cannot be saved."""
    name = type(keeper).__name__
    try:
        state = keeper.state_dict()
        problem = _problem(state, f"{name}.state_dict()")
        return Snapshot("", problem) if problem else Snapshot(json.dumps(state, separators=(",", ":")))
    except Exception as error:  # raised where the state is asked for, not in a loop that saves none
        return Snapshot("", f"{name}.state_dict() failed: {type(error).__name__}: {error}")


def _problem(value: Any, path: str) -> str:
    """What in a value would not come back from JSON as it was; nothing where all would."""
    kind = type(value)
    if value is None or kind in (str, int, bool) or (kind is float and math.isfinite(value)):
        return ""
    if kind is list:
        return next(filter(None, (_problem(each, f"{path}[{i}]") for i, each in enumerate(value))), "")
    if kind is dict:
        for key, each in value.items():
            if type(key) is not str:
                return _refusal(path, f"has the key {key!r}, of type {type(key).__name__}")
            if problem := _problem(each, f'{path}["{key}"]'):
                return problem
        return ""
    what = f"is {value}" if kind is float else f"is of type {kind.__module__}.{kind.__qualname__}"
    return _refusal(path, what.replace("builtins.", ""))


def _refusal(path: str, what: str) -> str:
    return (
        f"{path} {what}. A saved state is plain JSON: str, int, finite float, bool, None, lists, and dicts with str "
        "keys. Convert it in state_dict() (tolist(), list(...), a generator's state as hex) and back in "
        "load_state_dict()."
    )


def entered(data: Iterable[Any], text: str | None) -> tuple[Iterator[Any], HasState | None]:
    """An iterator over the data, which goes on from a state of its own if there is one, and who keeps that state.

    A state of the dataset counts before one of its iterator.

    Args:
      data: the user's.
      text: the state to restore; ``None`` begins as the data does.

    Raises:
      StateMismatch: there is a state, but nobody to restore it; or the text is no JSON.
    """
    state = None if text is None else _parsed(text)
    if isinstance(data, HasState):
        if text is not None:
            data.load_state_dict(state)
        return iter(data), data
    iterator = iter(data)
    keeper = iterator if isinstance(iterator, HasState) else None
    if text is None:
        return iterator, keeper
    if keeper is None:
        raise StateMismatch(
            f"the state holds one of the dataset's own, but neither {type(data).__name__} nor its iterator "
            f"{type(iterator).__name__} has state_dict() and load_state_dict(). Give the dataset that it was saved "
            "from."
        )
    keeper.load_state_dict(state)
    return iterator, keeper


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise StateMismatch(
            f"the dataset's own state in the state is {text[:80]!r}, which is no JSON ({error}). Load the state as it "
            "was saved."
        ) from error
