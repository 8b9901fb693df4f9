"""The order of a mixture whose sources are read from front to end: the next sources, and the position to go on from.

A source that is a stream cannot say how many records it has before it has ended, and the lengths of its records are
known when they are read. So the sources are asked for records as the order needs them (``Supply``), and the rest of the
order is planned again where one has ended. With ``stop="all"`` a segment is planned for the sources that have records
left, so each is asked for one more at the start of a segment. The order is the same as if all sizes were known before.

In samples the law is that of ``plan.mixing`` (M1 to M6). In tokens it is:

(T1) The next sample comes from the source whose tokens so far, divided by its weight, are the fewest; of equal ones the
  first. A sample without tokens counts as one token, so that its source has turns like the others.
(T2) So at every position, the tokens of a source are its share of all of them up to the length of one sample: of two
  sources, ``tokens / weight`` differs by less than the longest sample divided by its weight.
(T3) Ends are as in M5. A source that has ended is left out, and the weights of the others stay in proportion. Where all
  sources that have a weight have ended, the next weights hold at once.
(T4) Weights that change at a position begin a new segment: the tokens count from there on.

References: T1 is start-time fair queueing (Goyal, Vin, Cheng 1996); the sources are its flows, samples its packets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final, NamedTuple, Protocol, TypeAlias, final

import numpy as np

from torchdistinput.errors import StateMismatch
from torchdistinput.plan.file_resharding import ReaderCursor
from torchdistinput.plan.mixing import MixedOrder, Stop

Changes: TypeAlias = Sequence[tuple[int, Sequence[Fraction]]]
"""The weights, as shares of all sources, from positions on; the first is 0."""

_UNKNOWN: Final = 2**40  # records of a source whose end is not known
_ENDLESS: Final = 2**62


class Supply(Protocol):
    """The records of the sources that are at hand, and come next."""

    def have(self, source: int, count: int) -> int:
        """Reads on until ``count`` records are at hand, or the source has ended. Returns how many are at hand."""

    def length(self, source: int, number: int) -> int:
        """The tokens of one of the records at hand."""

    def done(self, source: int) -> int:
        """How many records of the source came before."""


@final
class SampleOrder:
    """The order of sources that are mixed by samples.

    Args:
      sizes: how many records each source has, where that is known.
      changes: the weights.
      stop: see M5 of ``plan.mixing``.
      key: of the permutations.
      length: how many positions there are at most; ``None`` for no limit.
    """

    def __init__(
        self, sizes: Sequence[int | None], changes: Changes, stop: Stop, key: Sequence[int], length: int | None
    ) -> None:
        self._sizes = list(sizes)
        self._stop, self._key, self._length = stop, key, length
        self.change(changes)

    def change(self, changes: Changes) -> None:
        """Plans the order anew, with weights that differ from the next position on."""
        self._changes = changes
        length = _ENDLESS if self._length is None and self._stop == "repeat" else self._length
        sizes = [_UNKNOWN if size is None else size for size in self._sizes]
        self._order = MixedOrder(sizes, changes, self._stop, self._key, length)
        self._asked_until = 0  # segments that start before this position were planned for sources that had records left

    def draw(self, position: int, count: int, supply: Supply) -> list[int]:
        """The sources of the next ``count`` positions; fewer at the end."""
        for _ in range(1 + len(self._sizes)):  # each time one more size is known
            sources = self._order.sources(position, count)
            needed = np.bincount(sources, minlength=len(self._sizes)).tolist()
            if self._stop == "all":
                for source, least in self._order.counted_on(self._asked_until, position + count):
                    if self._sizes[source] is None:
                        needed[source] = max(needed[source], least - supply.done(source))
            short = [source for source, some in enumerate(needed) if supply.have(source, some) < some]
            if not short:
                self._asked_until = max(self._asked_until, position + count)
                drawn: list[int] = sources.tolist()
                return drawn
            for source in short:
                self._sizes[source] = supply.done(source) + supply.have(source, needed[source])
            self.change(self._changes)
        raise AssertionError(f"a source of known size has ended before position {position + count}: {self._sizes}")

    def size(self, source: int) -> int | None:
        """How many records the source has, if it has ended or this was known before."""
        return self._sizes[source]

    def used(self, source: int) -> int:
        """See ``TokenOrder.used``."""
        return 0


@final
class TokenOrder:
    """The order of sources that are mixed by tokens, T1 to T4.

    Args:
      used: the tokens that each source had since the weights changed last.
      changes: the weights.
      stop: see M5 of ``plan.mixing``.
      length: how many positions there are at most; ``None`` for no limit.
    """

    def __init__(self, used: Sequence[int], changes: Changes, stop: Stop, length: int | None) -> None:
        self._used = list(used)
        self._stop, self._length = stop, length
        self._ended: set[int] = set()
        self.change(changes)

    def change(self, changes: Changes) -> None:
        """Takes weights that differ from the next position on."""
        self._changes = changes

    def _scales(self, position: int) -> list[tuple[int, int]]:
        """The sources that may come at a position, each with a whole number in inverse proportion to its weight."""
        here = max(number for number, (at, _) in enumerate(self._changes) if at <= position)
        for _, weights in self._changes[here:]:
            common = math.lcm(*(weight.numerator for weight in weights if weight))
            found = [
                (source, common // weight.numerator * weight.denominator)
                for source, weight in enumerate(weights)
                if weight and source not in self._ended
            ]
            if found:
                return found
        return []

    def draw(self, position: int, count: int, supply: Supply) -> list[int]:
        """The sources of the next ``count`` positions; fewer at the end."""
        count = count if self._length is None else min(count, self._length - position)
        starts = {at for at, _ in self._changes}
        found: list[int] = []
        taken = [0] * len(self._used)
        scales: list[tuple[int, int]] = []
        while len(found) < count:
            at = position + len(found)
            if at in starts:
                self._used = [0] * len(self._used)
                starts.remove(at)
                scales = []
            scales = scales or self._scales(at)
            if not scales:
                break  # all sources have ended
            source = min(scales, key=lambda each: self._used[each[0]] * each[1])[0]
            if supply.have(source, taken[source] + 1) <= taken[source]:
                if self._stop == "first":
                    break
                self._ended.add(source)
                scales = []
                continue
            self._used[source] += max(1, supply.length(source, taken[source]))
            taken[source] += 1
            found.append(source)
        return found

    def size(self, source: int) -> int | None:
        """See ``SampleOrder.size``: it is found again where it is needed."""
        return None

    def used(self, source: int) -> int:
        """The tokens that the source had since the weights changed last."""
        return self._used[source]


class SourceCursor(NamedTuple):
    """The position in one source of a mixture."""

    done: int = 0
    """How many of its records came in this epoch of the mixture."""
    tokens: int = 0
    """How many tokens these had; 0 where no lengths were given."""
    used: int = 0
    """Tokens since the weights changed last, where they are shares of tokens."""
    size: int | None = None
    """How many records it has, if it has ended."""
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
      StateMismatch: the value is malformed; the message names the part that is wrong.
    """
    match value:
        case ["mixture", int(position), list() as sources] if position >= 0:
            return MixtureCursor(position, tuple(map(_source_from_json, sources)))
        case _:
            return ReaderCursor.from_json(value)


def _source_from_json(value: object) -> SourceCursor:
    match value:
        case [int(done), int(tokens), int(used), int() | None as size, int(turn), int(behind), place] if (
            min(done, tokens, used, size or 0, turn, behind) >= 0
        ):
            inner = None if place is None else cursor_from_json(place)
            return SourceCursor(done, tokens, used, size, turn, behind, inner)
        case _:
            raise StateMismatch(
                "the saved state is damaged: the place of a source of a mixture must be [done, tokens, used, size, "
                f"turn, behind, place], found {value!r:.200}; load a state as state_dict() gave it"
            )
