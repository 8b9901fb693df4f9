"""The weights of a mixture over its epochs: the weights that it was made with, and weights that are set later.

Problem. ``set_weights`` is called on one rank or on all, while ranks and loader workers have read ahead, each its own
number of steps. All must change at the same position, and the position must be in the state.

Decision. A rank that was given new weights says so in its next vote (law A9). In the exchange that follows, each rank
tells how far it may have read ahead. The weights hold from the latest of these steps on, so no record that was read is
given back. They are appended, with their epochs and positions, to a list in memory that loader workers share. A loader
worker looks there before each batch; it is never as far as the position when the weights arrive.

Weights that were set hold until others are set, in later epochs too, and a schedule ends there.

Ranks call at different times, so a request has the *moment* of its call: which loop over the data it was, the rows that
were delivered, and which call it was since then. The latest moment counts, and a request of an earlier moment than the
agreed one is dropped. So where all ranks call, the late ranks repeat what was agreed.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch

from torchdistinput.coordination.channel import plain_message
from torchdistinput.errors import InputError, RankDisagreement, StateMismatch
from torchdistinput.plan.mixing import shares
from torchdistinput.plan.stream_mixing import Changes

_MOST: Final = 4096  # changes, since the mixture was made or a state loaded
_SPARE: Final = 8  # steps, above all that a rank may have read ahead

_WeightsRequest: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]
"""The moment of a call, and the weights."""


def _nothing() -> int:
    return 0


def named_shares(
    names: Sequence[str], weights: Mapping[str, float], temperature: float | None = None
) -> tuple[Fraction, ...]:
    """The share of each source.

    Raises:
      ValueError: a weight is negative, of an unknown source, or missing; all weights are 0.
    """
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise ValueError(f"there is a weight for {unknown[0]!r}; the sources are {', '.join(map(repr, names))}.")
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(f"there is no weight for {missing[0]!r}; give each source one, or 0 to leave it out.")
    return tuple(shares([weights[name] for name in names], temperature))


class _Change(NamedTuple):
    """Weights that were set while an epoch ran."""

    epoch: int
    position: int
    agreed: int
    """The row of the epoch that was agreed after it: a state from this row on has the change, on every rank."""
    weights: tuple[float, ...]


@final
class MixtureWeights:
    """See the module.

    Args:
      names: of the sources.
      schedule: the weights from positions on.
      temperature: see ``Mixture``.
    """

    def __init__(
        self, names: Sequence[str], schedule: Sequence[tuple[int, Mapping[str, float]]], temperature: float | None
    ) -> None:
        self.names = list(names)
        self._temperature = temperature
        self._base: Changes = [(at, named_shares(names, each, temperature)) for at, each in schedule]
        self.schedule = [(at, {name: float(each[name]) for name in names}) for at, each in schedule]
        self.uncoordinated = False
        """Whether several ranks read it without votes, so that none can tell the others of new weights."""
        self._lock = threading.Lock()  # the user's thread sets weights, the thread that votes sends them
        self._loop, self._delivered = 0, _nothing
        self._asked: tuple[int, ...] = ()  # the moment of the last call here
        self._request: _WeightsRequest | None = None
        self._agreed: _WeightsRequest = (), ()  # the last one
        with torch.inference_mode(mode=False):  # an inference tensor could not be written outside of inference mode
            size = 1 + _MOST * (3 + len(self.names))  # their number, then the changes
            self._shared = torch.frombuffer(mmap.mmap(-1, 8 * size), dtype=torch.float64)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_request": None, "_delivered": _nothing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        if not self._shared.is_shared():  # type: ignore[no-untyped-call] # a copy: its workers are not forked yet
            shared = torch.frombuffer(mmap.mmap(-1, 8 * len(self._shared)), dtype=torch.float64)
            self._shared = shared.copy_(self._shared)

    @property
    def version(self) -> int:
        """How often weights were set; also in a loader worker."""
        return int(self._shared[0])

    @property
    def were_set(self) -> bool:
        """Whether weights were set since the mixture was made."""
        return bool(self.version)

    def _read(self, version: int) -> list[_Change]:
        """The first weights that were set, oldest first; also while the main process appends others."""
        width = 3 + len(self.names)
        rows = self._shared[1 : 1 + version * width].reshape(version, width).tolist()
        return [_Change(int(row[0]), int(row[1]), int(row[2]), tuple(row[3:])) for row in rows]

    def _append(self, change: _Change) -> None:
        version, width = self.version, 3 + len(self.names)
        if version == _MOST:
            raise InputError(f"the weights of a mixture were set {_MOST} times; set them more rarely.")
        row = torch.tensor([*change[:3], *change.weights], dtype=torch.float64)
        self._shared[1 + version * width : 1 + (version + 1) * width] = row
        self._shared[0] = float(version + 1)  # last: who reads this number finds the row

    def _replace(self, found: Sequence[_Change]) -> None:
        """Forgets all others; while nobody reads."""
        self._shared[0] = 0.0
        for change in found:
            self._append(change)

    def changes(self, epoch: int) -> Changes:
        """The weights of an epoch from positions on."""
        return self.versioned_changes(epoch)[1]

    def versioned_changes(self, epoch: int) -> tuple[int, Changes]:
        """The version, and the weights that it has of an epoch, from positions on."""
        version = self.version
        found = self._read(version)
        before = [each for each in found if each.epoch < epoch]
        now = {each.position: each for each in found if each.epoch == epoch}
        first: Changes = [(0, self._exact(before[-1].weights))] if before else self._base
        if now:
            first = [(at, weights) for at, weights in first if at < min(now)]
        return version, [*first, *((at, self._exact(each.weights)) for at, each in sorted(now.items()))]

    def _exact(self, weights: Sequence[float]) -> tuple[Fraction, ...]:
        return tuple(shares(weights, self._temperature))

    def ask(self, weights: Mapping[str, float]) -> None:
        """Asks for weights; the next vote carries them to all ranks.

        Raises:
          ValueError: see ``named_shares``.
          InputError: the ranks do not vote.
        """
        if self.uncoordinated:
            raise InputError(
                'set_weights() was called with coordination="off" and several ranks, each of which is at a step of '
                'its own. Use coordination="on", or a schedule: weights=[(0, {...}), (position, {...})].'
            )
        named_shares(self.names, weights, self._temperature)
        with self._lock:
            now = self._loop, self._delivered()
            self._asked = *now, 1 + (self._asked[2] if self._asked[:2] == now else 0)
            self._request = self._asked, tuple(float(weights[name]) for name in self.names)

    def follow(self, delivered: Callable[[], int]) -> None:
        """Begins another loop over the data, as all ranks do together.

        Args:
          delivered: returns the rows that were delivered here.
        """
        with self._lock:
            self._loop, self._delivered = self._loop + 1, delivered

    @property
    def requested(self) -> bool:
        """Whether weights were asked for here that the ranks have not agreed on."""
        return self._request is not None

    def request(self) -> _WeightsRequest | None:
        """The weights that were asked for here."""
        with self._lock:
            return self._request

    def settle(self, asked: Mapping[int, _WeightsRequest], sent: _WeightsRequest | None) -> tuple[float, ...] | None:
        """Chooses among the weights that ranks asked for; ``None`` if others were agreed at the same moment or later.

        Args:
          asked: by rank; the same on all ranks.
          sent: those of this rank.

        Raises:
          RankDisagreement: ranks asked for different weights at one moment.
        """
        with self._lock:
            if self._request == sent:  # else weights were asked for since
                self._request = None
        moment = max(each for each, _ in asked.values())
        if moment < self._agreed[0]:
            return None
        said = {f"rank {rank}": weights for rank, (each, weights) in asked.items() if each == moment}
        if moment == self._agreed[0]:
            said["agreed before"] = self._agreed[1]
        if len(set(said.values())) > 1:
            by_whom = "; ".join(f"{who}: {dict(zip(self.names, each, strict=True))}" for who, each in said.items())
            raise RankDisagreement(
                f"set_weights() of a mixture was called with different weights on different ranks: {by_whom}. Call it "
                "on one rank, or with the same weights on all."
            )
        if moment == self._agreed[0]:
            return None
        self._agreed = moment, next(iter(said.values()))
        return self._agreed[1]

    def take(self, weights: tuple[float, ...], epoch: int, position: int, agreed: int) -> None:
        """Takes weights on which the ranks agreed, from a position on."""
        found = self._read(self.version)
        if not found or found[-1].weights != weights:
            self._append(_Change(epoch, position, agreed, weights))

    def to_json(self, epoch: int, row: int) -> list[object]:
        """The weights as a state after ``row`` rows of an epoch has them, as plain values."""
        known = [
            each
            for each in self._read(self.version)
            if each.epoch < epoch or (each.epoch == epoch and each.agreed <= row)
        ]
        before = [each for each in known if each.epoch < epoch]
        kept = [*before[-1:], *known[len(before) :]]
        schedule = [[at, list(each.values())] for at, each in self.schedule]
        return [schedule, [[*each[:3], list(each[3])] for each in kept]]

    def load(self, value: object, epoch: int, position: int) -> None:
        """Takes the weights of a state. If that mixture was made with other weights, ours hold from now on.

        Args:
          value: of ``to_json``.
          epoch: of the state.
          position: how many samples of the epoch came.

        Raises:
          StateMismatch: the value is malformed.
        """
        schedule, found = self._parsed(value)
        own = [(at, tuple(each.values())) for at, each in self.schedule]
        if schedule == own:
            self._replace(found)
            return
        before = [each for each in found if each.epoch < epoch]
        then = [(each.position, each.weights) for each in found if each.epoch == epoch]
        first = [(0, before[-1].weights)] if before else schedule
        then = [*(each for each in first if not then or each[0] < then[0][0]), *then]
        now = next(weights for at, weights in reversed(own) if at <= position)
        plan = [*(each for each in then if each[0] < position), (position, now), *(e for e in own if e[0] > position)]
        self._replace([_Change(epoch, at, 0, weights) for at, weights in plan] if position else [])

    def _parsed(self, value: object) -> tuple[list[tuple[int, tuple[float, ...]]], list[_Change]]:
        parts: Any = value
        try:
            parsed = [(int(at), self._floats(weights)) for at, weights in parts[0]]
            return parsed, [_Change(int(a), int(b), int(c), self._floats(weights)) for a, b, c, weights in parts[1]]
        except (TypeError, ValueError, IndexError) as error:
            raise StateMismatch(f"position: found {value!r:.200} in the state as the weights of a mixture.") from error

    def _floats(self, weights: Sequence[Any]) -> tuple[float, ...]:
        if len(weights) != len(self.names):
            raise ValueError(len(weights))
        return tuple(map(float, weights))


@final
class WeightsSync:
    """Brings weights that were set on some rank to all ranks; see ``step_types.Updates``.

    Args:
      weights: of the mixture.
      epoch: that is read.
      first_row: rows of the epoch before the first row of this stream.
      batch_size: samples of a row.
      lead: rows that this rank may have read ahead of the agreed ones.
    """

    def __init__(self, weights: MixtureWeights, epoch: int, first_row: int, batch_size: int, lead: int) -> None:
        self._weights, self._epoch = weights, epoch
        self._first_row, self._batch_size, self._lead = first_row, batch_size, lead + _SPARE
        self._sent: _WeightsRequest | None = None

    def follow(self, delivered: Callable[[], int]) -> None:
        """See ``Updates.follow``."""
        self._weights.follow(delivered)

    @property
    def pending(self) -> bool:
        """See ``Updates.pending``."""
        return self._weights.requested

    def mine(self, rows: int) -> str:
        """See ``Updates.mine``."""
        request = self._sent = self._weights.request()
        return json.dumps({"read": self._first_row + rows + self._lead, "weights": request})

    def learn(self, rows: int, texts: Sequence[str]) -> None:
        """See ``Updates.learn``.

        Raises:
          RankDisagreement: ranks asked for different weights at once.
        """
        messages = [plain_message(text) for text in texts]
        asks = {rank: each["weights"] for rank, each in enumerate(messages) if each["weights"]}
        asked = {rank: (tuple(moment), tuple(weights)) for rank, (moment, weights) in asks.items()}
        found = self._weights.settle(asked, self._sent)
        if found is not None:
            row = max(each["read"] for each in messages)
            self._weights.take(found, self._epoch, row * self._batch_size, self._first_row + rows + 1)
