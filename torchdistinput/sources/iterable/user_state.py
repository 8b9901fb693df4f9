"""The user's own state: a dataset, or the iterator over it, with ``state_dict`` and ``load_state_dict``.

It is taken where the data is read, in a loader worker perhaps, as the text of a JSON value: so it can be kept while the
reading goes on, and saved without pickle.

**Exact, or not used.** A state is taken one element before the end of a batch, with a digest of that last element. Who
restores it reads that element first: if it is another one, the state does not say where the data stood, and is refused.
So the check costs a digest where a state is taken, and one element where it is restored. What is known not to restore
exactly is not asked for its state, and what cannot be saved is left out (``own_state="auto"``): the data is read again
from its front, or from the last state that could be saved.

**Between two epochs.** Data in this process may count its epochs in its state. So that of the dataset itself is saved
there too, unless it has ``set_epoch``, which tells it more. It is restored before the dataset is iterated, as the epoch
before has left it. To some the state after the last element means that nothing is left: where the epoch comes out empty
so, the dataset is iterated once more, as by then it has forgotten that state.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

from torchdistinput.batches.containers import is_tensor_collection
from torchdistinput.errors import InputError, StateMismatch
from torchdistinput.sources.iterable.inexact_states import why_inexact
from torchdistinput.sources.iterable.state_packing import packed_state, unpacked_state
from torchdistinput.sources.set_epoch import wants_epochs

__all__ = [
    "NOBODY",
    "HasState",
    "Kept",
    "OwnState",
    "Snapshot",
    "begun_again",
    "entered",
    "front_of",
    "keeps_state",
    "tell_unused",
    "why_unused",
]

OwnState = Literal["auto", "use", "ignore"]
"""See ``InputOptions.own_state``."""

_END: Final = object()


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
    reads_again: bool = False
    """Whether the data is read again where it cannot; else that is an error."""
    digest: int = 0
    """Of the element that follows; 0 where it is not to be compared."""


def why_unused(data: object, own_state: OwnState) -> str:
    """Why a state that the data has is not used; nothing where it is, or there is none. Local."""
    if own_state == "use" or not isinstance(data, HasState):
        return ""
    if own_state == "ignore":
        return 'own_state="ignore"'
    if needed := _arguments_of(data):
        return f"{type(data).__name__}.state_dict() needs arguments ({needed}), which nobody knows here"
    return why_inexact(data)


def tell_unused(dataset: object, own_state: OwnState) -> None:
    """Warns that a state of map-style data is not saved; that of a ``TensorDict`` is what it holds. Local.

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
    """The arguments that ``state_dict`` cannot be called without."""
    try:
        parameters = inspect.signature(data.state_dict).parameters.values()
    except (TypeError, ValueError):  # a function of C without a signature
        return ""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(each.name for each in parameters if each.default is each.empty and each.kind not in variable)


def keeps_state(data: object, own_state: OwnState) -> bool:
    """Whether a state of the data's own is used. Local."""
    return isinstance(data, HasState) and not why_unused(data, own_state)


class Kept(NamedTuple):
    """Who keeps a state of the user's own: the dataset, its iterator, both, or nobody."""

    dataset: HasState | None
    iterator: HasState | None
    own_state: OwnState

    def __bool__(self) -> bool:
        return self.dataset is not None or self.iterator is not None

    @property
    def is_checked(self) -> bool:
        """Whether the element that follows a state is compared when it is restored."""
        return self.own_state == "auto"

    def snapshot(self) -> Snapshot:
        """The state as it is now, or why it cannot be saved."""
        try:
            return Snapshot(_text_of(self.dataset, self.iterator))
        except ValueError as error:  # raised where the state is asked for, not in a loop that saves none
            return Snapshot("", str(error), reads_again=self.is_checked)


NOBODY: Final = Kept(None, None, "auto")
"""Without a state."""


def _text_of(dataset: HasState | None, iterator: HasState | None) -> str:
    """The states of both as one text; a ``ValueError`` says why it cannot be."""
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


def front_of(data: object, own_state: OwnState) -> Snapshot | None:
    """The state of a dataset before its next epoch, where it is to be saved; ``None`` where not. Local."""
    if not isinstance(data, HasState) or why_unused(data, own_state) or wants_epochs(data):
        return None
    return Kept(data, None, own_state).snapshot()


def entered(data: Iterable[Any], text: str | None, own_state: OwnState) -> tuple[Iterator[Any], Kept]:
    """An iterator over the data, which goes on from a state of its own if there is one, and who keeps that state.

    The state of a dataset is restored before it is iterated, that of its iterator, which the dataset may be itself,
    after.

    Args:
      data: the user's.
      text: the state to restore; ``None`` begins as the data does.
      own_state: what the user asked for.

    Raises:
      StateMismatch: there is a state, but nobody to restore it; or the text is no JSON.
    """
    state = {} if text is None else _parsed(text)
    if "dataset" in state:
        _load(data, state["dataset"])
    iterator = iter(data)
    if "iterator" in state:
        _load(iterator, state["iterator"])
    if why_unused(data, own_state):
        return iterator, Kept(None, None, own_state)
    own = None if iterator is data else _keeper(data, own_state)
    return iterator, Kept(own, _keeper(iterator, own_state), own_state)


def _keeper(data: object, own_state: OwnState) -> HasState | None:
    return data if isinstance(data, HasState) and own_state != "ignore" and not why_unused(data, own_state) else None


def begun_again(data: Iterable[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """The iterator over data that was restored between two epochs; another one where nothing is left in it."""
    first = next(iterator, _END)
    return iter(data) if first is _END else _after(first, iterator)


def _after(first: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """Both, without another ``iter()``, by which data that is its own iterator would begin again."""
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
