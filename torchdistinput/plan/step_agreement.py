"""Step agreement: the report of each rank, the report of all ranks, and the decision that follows from it.

A *report* tells of the next steps that a rank holds: samples, the sampler's draw, sums; and whether it failed or
stopped. The reports of two ranks are *joined* into one, which says of both what a reader of both would say. ``join`` is
associative, so the report of all ranks is the same in any tree. Its size follows from the steps alone, not from how
many ranks there are.

The laws. Every rank applies them to the same report, so all ranks decide the same:

(A1) A step is agreed when every rank holds it and at least one has it before its end.
(A2) An agreed step without a sample on any rank is passed over: not delivered, not counted, not the end.
(A3) The end is the first step that is past the end of every rank.
(A4) Where structures differ, no step is agreed, and all ranks stop. Where a rank lacks the structure and another one
    knows it, no step is agreed before the structure was told.
(A5) A step for which the samplers drew differently, or the ranks of one worker read different data, is not agreed, nor
    is any later step.
(A6) A rank that failed holds no step from its failure on, so all ranks deliver the same steps before it. It says so
    when the failure is its next step. A rank that stopped reading reports no step either, except that it is past its
    end.
(A7) Where more samples were left out than allowed, no step is agreed. A rank reports a step that lost samples only as
    the first step of a report. So ``skipped`` is right for every reported step, and all ranks stop before the same
    step, whatever they read ahead.
(A8) The prefetch depth is a function of the number of the step, and of a bound that fits the memory of every rank: what
    each tells with the first agreed step that has a sample, by the size of that step. So how often user code was called
    at a step is the same on all ranks and in every run.
(A9) Where a decision needs more than the report, it says of what each rank gives account (``StepDecision.asks``): then
    all ranks exchange their accounts, once, and nothing else.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from functools import cache, reduce
from typing import Final, NamedTuple, final

import numpy as np

from torchdistinput.plan.permutation import random_words

SUMMAND_BITS: Final = 48
"""Bits of a rank's summand at most."""
FAILED, STOPPED, LACKS, DIFFER = (1 << bit for bit in range(4))
"""What some rank says: its data failed, and the failure is its next step; its loop takes no further step; it lacks the
structure; it knows another structure than another rank."""
ANY_NUMBER: Final = (1 << 62) - 1
"""In place of how many steps fit a rank, where it does not know."""
ALIKE: Final = 0.8
"""A rank waits like the one that waited longest if it waited for this part of that time."""
MASK: Final = (1 << 63) - 1
"""Digests are numbers up to this one."""
DIFFERING_STRUCTURES, STRUCTURE, DATA, FAILURES, LOSSES, STOPS = (
    "structures",
    "structure",
    "data",
    "failures",
    "losses",
    "stops",
)
"""Of what ranks give account: of structures that differ; of the structure, for ranks that lack it; of what they drew
and read; of their failures; of the samples that they left out; of why they stopped."""
_HEAD: Final = 15  # words before those of the steps
_NOTHING: Final = -1
_SUM_WORD: Final = 1 << 62  # of the lower of the two words of a sum


@final
class Report(NamedTuple):
    """What some ranks say of the steps that they hold. The defaults are those of one rank that holds none.

    The lists have an entry for each step that all of these ranks hold, oldest first. Waits are in microseconds.

    Args:
      ranks: how many ranks they are.
      flags: what some of them say: ``FAILED | ...``.
      structure: the digest of the structure, of the first rank that knows one; ``None``: no one does.
      skipped: samples that they left out in this epoch, up to and including the first step of each.
      live: how many steps at most one of them holds before its end, also beyond those that all hold.
      same: how many of the first steps have equal draws on all.
      last: the rank that waited least for the answer of the vote before, so voted last; ``None``: there was none.
      least: how long it waited, and did nothing else.
      most: how long the one waited that waited longest.
      waiter: the rank whose loop waited longest in the epoch; ``None``: nobody else asks.
      waited: how long.
      alike: how many of them waited about as long as the one that is known to have waited longest.
      sizes: samples in each step; 0 past the end.
      draws: the digest of the first rank's draw for each step, up to ``MASK``; 0 where there is none.
      peers: the digests of what they read, each times the peer weight of its rank, summed modulo 2**63; or empty.
      fits: how many steps like this one fit ahead into the memory of each; empty where that is agreed.
      sums: the sums of each step, one after the other.
    """

    ranks: int = 1
    flags: int = 0
    structure: int | None = None
    skipped: int = 0
    live: int = 0
    same: int = 0
    last: int | None = None
    least: int = 0
    most: int = 0
    waiter: int | None = None
    waited: int = 0
    alike: int = 0
    sizes: Sequence[int] = ()
    draws: Sequence[int] = ()
    peers: Sequence[int] = ()
    fits: Sequence[int] = ()
    sums: Sequence[int] = ()

    def to_bytes(self) -> bytes:
        """The report as a message: 15 words of 64 bits, then those of the steps."""
        ranks, flags, structure, skipped, live, same, last, least, most, waiter, waited, alike = self[:12]
        lists = [*self.sizes, *self.draws, *self.peers, *self.fits]
        for summed in self.sums:
            lists += divmod(summed, _SUM_WORD)
        return _words(_HEAD + len(lists)).pack(
            *(ranks, flags, _NOTHING if structure is None else structure, skipped, live, same),
            *(_NOTHING if last is None else last, least, most, _NOTHING if waiter is None else waiter, waited, alike),
            *(len(self.sizes), len(self.peers), len(self.fits)),
            *lists,
        )

    @staticmethod
    def from_bytes(message: bytes) -> Report:
        """The report in a message."""
        words = _words(len(message) // 8).unpack(message)
        ranks, flags, structure, skipped, live, same, last, least, most, waiter, waited, alike = words[:12]
        steps, num_peers, num_fits = words[12:_HEAD]
        draws = _HEAD + steps
        peers = draws + steps
        fits = peers + num_peers
        sums = fits + num_fits
        return Report(
            *(ranks, flags, None if structure == _NOTHING else structure, skipped, live, same),
            *(None if last == _NOTHING else last, least, most, None if waiter == _NOTHING else waiter, waited, alike),
            *(words[_HEAD:draws], words[draws:peers], words[peers:fits], words[fits:sums]),
            [high * _SUM_WORD + low for high, low in zip(words[sums::2], words[sums + 1 :: 2], strict=True)],
        )


def join(one: Report, other: Report) -> Report:
    """What the ranks of two reports say; the ranks of the first one come before those of the other. Associative."""
    steps = min(len(one.sizes), len(other.sizes))
    flags, structure = one.flags | other.flags, one.structure
    if structure is None:
        structure = other.structure
    elif other.structure is not None and other.structure != structure:
        flags |= DIFFER
    draws, others = one.draws[:steps], other.draws[:steps]
    same = min(one.same, other.same, steps)
    if draws != others:
        same = min(same, next(at for at in range(steps) if draws[at] != others[at]))
    last = other if one.last is None or (other.last is not None and other.least < one.least) else one
    waiter = one if other.waiter is None or (one.waiter is not None and one.waited >= other.waited) else other
    summed = steps * (len(one.sums) // len(one.sizes)) if one.sums else 0
    return Report(
        one.ranks + other.ranks,
        flags,
        structure,
        one.skipped + other.skipped,
        max(one.live, other.live),
        same,
        last.last,
        last.least,
        max(one.most, other.most),
        waiter.waiter,
        waiter.waited,
        one.alike + other.alike,
        tuple(map(operator.add, one.sizes, other.sizes)),
        draws,
        tuple([(mine + theirs) & MASK for mine, theirs in zip(one.peers, other.peers, strict=False)]),
        tuple(map(min, one.fits, other.fits)),
        tuple(map(operator.add, one.sums[:summed], other.sums)),
    )


def join_messages(messages: Sequence[bytes]) -> bytes:
    """``join``, of messages."""
    return reduce(join, map(Report.from_bytes, messages)).to_bytes()


@final
class AgreedWaits(NamedTuple):
    """What all ranks know of their waits after a vote, in microseconds.

    Args:
      last: the rank that voted last in the vote before; ``None`` where there was none.
      least: how long it waited for the answer.
      late: how much longer another rank waited, the one that waited longest.
      waiter: the rank whose loop waited longest in the epoch.
      waited: for how long.
      alike: whether most ranks waited about as long.
    """

    last: int | None
    least: int
    late: int
    waiter: int
    waited: int
    alike: bool


@final
class StepDecision(NamedTuple):
    """The decision of all ranks after one exchange of reports.

    Args:
      steps: global sizes of the agreed steps, oldest first; 0 for one that is passed over.
      sums: for each of them, the sums over all ranks.
      end: the data is over for every rank.
      asks: of what each rank gives account now, such as ``FAILURES``; empty: nothing more is needed. But after an
        account of the ``STRUCTURE``, nothing follows the steps.
      skipped: samples that all ranks left out, up to and including the next step of each.
      fits: how many steps like the first one that has a sample fit ahead into the memory of each rank; ``ANY_NUMBER``
        where none knows; ``None`` where no such step is agreed, or nobody asks.
      waits: how long the ranks waited, and who came last; ``None`` for a single rank.
    """

    steps: Sequence[int]
    sums: Sequence[Sequence[int]]
    end: bool
    asks: str
    skipped: int
    fits: int | None
    waits: AgreedWaits | None


def decide(report: Report, max_skipped: int | None = None) -> StepDecision:
    """The decision from the report of all ranks. Laws A1 to A9.

    Args:
      report: of all ranks.
      max_skipped: how many samples may be left out; ``None`` for any number.
    """
    flags, held = report.flags, len(report.sizes)
    too_many = max_skipped is not None and report.skipped > max_skipped
    asks = ""
    if flags & DIFFER:
        asks = DIFFERING_STRUCTURES
    elif flags & LACKS and report.structure is not None:
        asks = STRUCTURE
    count = 0 if asks or too_many else min(held, report.live)
    end = report.live < held and not (asks or too_many)
    if flags & STOPPED:  # a rank that stopped past its end says so, but takes no step with the others
        count = 0
        end = end and not report.live
    same = min(count, report.same)
    if report.peers and any(report.peers[:same]):
        same = next(at for at, read in enumerate(report.peers) if read)
    if same < count:
        count, end, asks = same, False, DATA
    if not (asks or end):
        asks = FAILURES if flags & FAILED else LOSSES if too_many else STOPS if flags & STOPPED else ""
    steps, fits = report.sizes[:count], None
    if report.fits:
        fits = next((fit for size, fit in zip(steps, report.fits, strict=False) if size), None)
    each = len(report.sums) // held if held else 0
    sums = [report.sums[at * each : (at + 1) * each] for at in range(count)]
    waits = None
    if report.waiter is not None:
        alike = 2 * report.alike > report.ranks
        waits = AgreedWaits(report.last, report.least, report.most - report.least, report.waiter, report.waited, alike)
    return StepDecision(steps, sums, end, asks, report.skipped, fits, waits)


def peer_weight_of(rank: int, workers: Sequence[int]) -> int:
    """The weight of the data that a rank read: the weights of each worker's ranks sum to 0 modulo 2**63.

    So equal digests of a worker's ranks cancel out, and unequal ones hardly ever do.

    Args:
      rank: the index of the rank.
      workers: the worker of each rank.

    >>> (peer_weight_of(0, [0, 1, 0]) + peer_weight_of(2, [0, 1, 0])) & MASK, peer_weight_of(1, [0, 1, 0])
    (0, 0)
    """
    peers = [place for place, worker in enumerate(workers) if worker == workers[rank]]
    if len(peers) == 1:
        return 0
    words = random_words(1, len(workers)) | np.uint64(1)
    return (int(words[rank]) if rank != peers[-1] else -int(words[peers[:-1]].sum())) & MASK


@cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q")
