"""The order of a mixture: which source comes next. One law, for shares of samples and for shares of tokens.

(M1) Next. The next sample comes from the source with the smallest ``used / weight``; of equal ones the first. ``used``
  counts its samples, or its tokens, since the weights changed last. A sample without tokens counts as one token, so
  that its source has turns like the others.
(M2) Shares. So at every position ``used / weight`` of two sources differs by at most one sample divided by its weight.
(M3) Samples. The samples of a source come in its own order, epoch after epoch; each epoch has each sample once.
(M4) Ends. ``"first"``: the mixture ends where a source would begin a second epoch. ``"all"``: there this source is left
  out, and the weights of the others stay in proportion, so each sample comes once; where all sources that have a weight
  have ended, the next weights hold at once. ``"repeat"``: sources go on.
(M5) Changes. Weights that change at a position begin a new segment there: ``used`` counts from there on, and each
  source goes on where it was.

A source that is a stream cannot say how many samples it has before it has ended, and the tokens of a sample are known
when it is read. So ``MixtureOrder`` asks for samples as the order needs them (``Supply``). Where samples are counted
and sizes are known, ``mixture_length`` finds the end by arithmetic: M1 merges the sequences ``m / weight`` of all
sources.

References: M1 is start-time fair queueing (Goyal, Vin, Cheng 1996); the sources are its flows, samples its packets.
"""

from __future__ import annotations

import heapq
import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, final

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.file_resharding import ReaderCursor

Stop: TypeAlias = Literal["first", "all", "repeat"]
Changes: TypeAlias = Sequence[tuple[int, Sequence[Fraction]]]
"""The weights, as shares of all sources, from positions on; the first is 0."""

_LARGEST: Final = 2**22


def shares(weights: Sequence[float], temperature: float | None = None) -> list[Fraction]:
    """Weights as fractions of 1, exactly; a float counts as the decimal number that Python prints for it.

    Args:
      weights: 0 or more each, and not all 0.
      temperature: the weights are raised to the power ``1 / temperature`` first.

    Raises:
      ValueError: a weight is negative or not finite, or all are 0; the temperature is not positive; a weight is so
        small that a source would come next to never.
    """
    if temperature is not None and not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature}; it must be positive.")
    for place, weight in enumerate(weights):
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"weight {place} is {weight}; weights must be 0 or more.")
    raised = [weight if temperature is None or not weight else weight ** (1 / temperature) for weight in weights]
    exact = [Fraction(str(weight)) for weight in raised]
    total = sum(exact, Fraction())
    if not total:
        raise ValueError("all weights are 0; one source at least must come.")
    found = [each / total for each in exact]
    smallest = min(each for each in found if each)
    if smallest * _LARGEST < 1:
        raise ValueError(f"a weight is {float(smallest):.3g} of all; it must be {1 / _LARGEST:.3g} at least, or 0.")
    return found


def check_changes(changes: Sequence[tuple[int, object]]) -> None:
    """Refuses weights that do not change at rising positions from 0 on. ValueError."""
    if not changes or changes[0][0] or any(a[0] >= b[0] for a, b in pairwise(changes)):
        raise ValueError(f"weights change at {[at for at, _ in changes]}; rising positions from 0 on are needed.")


def _scales(weights: Sequence[Fraction]) -> dict[int, int]:
    """For each source with a weight a whole number in inverse proportion to it."""
    common = math.lcm(*(weight.numerator for weight in weights if weight))
    return {source: common // weight.numerator * weight.denominator for source, weight in enumerate(weights) if weight}


# ---------------------------------------------------------------------------------------------------- as it is read


class Supply(Protocol):
    """The records of the sources that are at hand, and come next."""

    def have(self, source: int, count: int) -> int:
        """Reads on until ``count`` records are at hand, or the source has ended. Returns how many are at hand."""

    def length(self, source: int, number: int) -> int:
        """The tokens of one of the records at hand."""


@final
class MixtureOrder:
    """The order of sources as they are read, M1 to M5.

    Args:
      used: what each source has used since the weights changed last.
      changes: the weights.
      stop: see M4.
      length: how many positions there are at most; ``None`` for no limit.
      tokens: whether tokens are counted.
    """

    def __init__(
        self, used: Sequence[int], changes: Changes, stop: Stop, length: int | None, *, tokens: bool = False
    ) -> None:
        self.used = list(used)
        """What each source has used since the weights changed last: samples, or tokens."""
        self._changes, self._stop, self._length, self._tokens = changes, stop, length, tokens
        self._ended: set[int] = set()
        self._next: list[tuple[int, int, int]] = []  # a heap of the sources, each with used / weight, and its scale

    def draw(self, position: int, count: int, supply: Supply) -> list[int]:
        """The sources of the next ``count`` positions; fewer at the end."""
        count = count if self._length is None else min(count, self._length - position)
        starts = {at for at, _ in self._changes}
        found: list[int] = []
        taken = [0] * len(self.used)
        while len(found) < count:
            at = position + len(found)
            if at in starts:
                self.used = [0] * len(self.used)
                starts.remove(at)
                self._next = []
            self._next = self._next or self._sources_at(at)
            if not self._next:
                break  # all sources have ended
            _, source, scale = self._next[0]
            if supply.have(source, taken[source] + 1) <= taken[source]:
                if self._stop == "first":
                    break
                self._ended.add(source)
                heapq.heappop(self._next)
                continue
            self.used[source] += max(1, supply.length(source, taken[source])) if self._tokens else 1
            heapq.heapreplace(self._next, (self.used[source] * scale, source, scale))
            taken[source] += 1
            found.append(source)
        return found

    def _sources_at(self, position: int) -> list[tuple[int, int, int]]:
        here = max(number for number, (at, _) in enumerate(self._changes) if at <= position)
        for _, weights in self._changes[here:]:
            scales = _scales(weights)
            found = [(self.used[each] * scales[each], each, scales[each]) for each in scales if each not in self._ended]
            if found:
                heapq.heapify(found)
                return found
        return []


# ------------------------------------------------------------------------------------------------ without reading


def mixture_length(sizes: Sequence[int], changes: Changes, stop: Stop, length: int | None = None) -> int:
    """How many positions a mixture by samples has, of sources of known sizes: by arithmetic, without walking through.

    Args:
      sizes: samples of each source.
      changes: the weights.
      stop: when the mixture ends.
      length: how many positions there are, for ``"repeat"``; for the others at most.

    >>> mixture_length([10**9] * 3, [(0, shares([0.5, 0.3, 0.2]))], "first")
    2000000000

    Raises:
      ValueError: changes are not in order, or ``"repeat"`` has no length.
    """
    check_changes(changes)
    if stop == "repeat":
        if length is None:
            raise ValueError('a mixture that repeats its sources has no end; stop="repeat" needs a number of samples.')
        return length
    start, left = 0, list(sizes)
    limits = [*(at if length is None else min(at, length) for at, _ in changes[1:]), length]
    for number, until in enumerate(limits):
        while until is None or start < until:
            weighted = (_scales(weights) for _, weights in changes[number:])
            alive = ({each: of[each] for each in of if stop == "first" or left[each]} for of in weighted)
            scales = next((each for each in alive if each), None)
            if scales is None:
                return start  # all sources have ended
            if stop == "first":
                end = start + min(_place(source, left[source], scales, None) for source in scales)
                if until is None or end < until:
                    return end
            else:
                end = start + sum(left[source] for source in scales)
            reached = end if until is None else min(end, until)
            limit = None if stop == "first" else left
            came = {source: _count(source, reached - start, scales, limit) for source in scales}
            start, left = reached, [size - came.get(source, 0) for source, size in enumerate(left)]
    return start


def _place(source: int, number: int, scales: dict[int, int], left: Sequence[int] | None) -> int:
    """How many samples come before that one of the source under the same weights: by M1, those of a smaller number.

    Args:
      source: the source.
      number: of the sample, since the weights changed last.
      scales: see ``_scales``.
      left: how many samples each source has left; ``None``: none of them ends.
    """
    key, found = number * scales[source], number
    for other, scale in scales.items():
        if other != source:
            count, rest = divmod(key, scale)
            count += bool(rest) or other < source
            found += count if left is None else min(count, left[other])
    return found


def _count(source: int, place: int, scales: dict[int, int], left: Sequence[int] | None) -> int:
    """How many samples of the source come before a place under the same weights."""
    most = place if left is None else min(place, left[source])
    return bisect_left(range(most), place, key=lambda number: _place(source, number, scales, left))


# ---------------------------------------------------------------------------------------------------- where it stands


class SourceCursor(NamedTuple):
    """The position in one source of a mixture."""

    done: int = 0
    """How many of its records came in this epoch of the mixture."""
    tokens: int = 0
    """How many tokens these had; 0 where no lengths were given."""
    used: int = 0
    """Its samples, or tokens, since the weights changed last."""
    turn: int = 0
    """Which of its own epochs its reader is in, in this epoch of the mixture."""
    behind: int = 0
    """How many records came after the place of its reader."""
    place: Cursor | None = None
    """The cursor of its reader; ``None``: the front."""


class MixtureCursor(NamedTuple):
    """The position of the reader of a mixture: the counterpart of a ``ReaderCursor``."""

    position: int = 0
    """How many samples of the mixture came."""
    sources: Sequence[SourceCursor] = ()
    """One for each source. Empty: none is open yet."""

    @property
    def slots(self) -> Sequence[SourceCursor]:
        """The open sources; see ``ReaderCursor.slots``."""
        return self.sources

    @property
    def opened(self) -> int:
        """See ``Reader.opened``."""
        return self.position

    def to_json(self) -> list[object]:
        """The position as plain lists and ints."""
        sources = [[*each[:-1], None if each.place is None else each.place.to_json()] for each in self.sources]
        return ["mixture", self.position, sources]

    def to_text(self) -> str:
        """``to_json`` as JSON."""
        return json.dumps(self.to_json())


Cursor: TypeAlias = ReaderCursor | MixtureCursor
"""The position of a reader: of files, or of a mixture."""


def cursor_from_json(value: object) -> Cursor:
    """The position of a reader from the value of ``to_json``.

    Raises:
      StateMismatch: the value is malformed, or of a mixture of version 0.2.
    """
    match value:
        case ["mixture", int(position), list() as sources] if position >= 0:
            return MixtureCursor(position, tuple(map(_source_from_json, sources)))
        case _:
            return ReaderCursor.from_json(value)


def of_version_02() -> StateMismatch:
    """The error for the state of a mixture of version 0.2."""
    return StateMismatch(
        "the saved state is that of a mixture of version 0.2, whose samples came in another order, so none can go on "
        "from it. Finish its epoch with version 0.2, or begin the epoch anew."
    )


def _source_from_json(value: object) -> SourceCursor:
    match value:
        case [int(done), int(tokens), int(used), int(turn), int(behind), place] if (
            min(done, tokens, used, turn, behind) >= 0
        ):
            inner = None if place is None else cursor_from_json(place)
            return SourceCursor(done, tokens, used, turn, behind, inner)
        case [int(), int(), int(), int() | None, int(), int(), _]:
            raise of_version_02()
        case _:
            raise StateMismatch(
                "the saved state is damaged: the place of a source of a mixture must be [done, tokens, used, turn, "
                f"behind, place], found {value!r:.200}; load a state as state_dict() gave it"
            )
