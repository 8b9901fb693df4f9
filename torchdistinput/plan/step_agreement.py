"""Step agreement: the report of each rank, the sum of all reports, and the decision that follows from the sum.

A *report* holds the sizes of the next steps that a rank holds (``None`` for a step past its end of data), and flags. A
report is ``7 + 2K + KS`` words of 64 bits, with ``S`` sums that the user asked for. The words of all ranks are summed,
and of the last three words the largest is taken. So one exchange of fixed size carries them:

- word 0: four counters of 15 bits: ranks that failed, stopped, lack the structure, know the structure.
- words 1 and 2: the sums of ``d`` and of ``d * d`` over the ranks that know a structure with digest ``d`` (24 bits).
  The structures are equal if and only if ``count * sum(d * d) == sum(d) ** 2`` (Cauchy and Schwarz).
- word 3: samples that were left out because they could not be read, up to and including the first step of the report
  (48 bits), and ranks whose loops waited about as long as the one that is known to have waited longest (15 bits).
- word 4 + j, for the j-th step not yet agreed: ranks that hold it (15 bits), ranks for which it is not past their end
  (15 bits), samples in it (33 bits).
- word 4 + K + j: the digest of the sampler's draw for that step times the rank's *weight*, modulo 2**64. The weights of
  all ranks sum to 0, so equal digests cancel out, and unequal ones hardly ever do (about once in 2**63). Added to it is
  the digest of the data that the rank read times its *peer weight*; the peer weights of each worker's ranks sum to 0.
- one word for each sum of each step: this rank's summand, which has at most ``SUMMAND_BITS`` bits.
- the last three: how long the rank waited for the answer of the vote before, such that the largest word is that of the
  shortest wait, and the rank (15 bits): who waited least voted last, by its own clock; the same time, such that the
  largest is the longest wait; and how long its loop waited in the epoch so far, and the rank.

The laws. Every rank applies them to the same sums, so all ranks decide the same:

(A1) A step is agreed when every rank holds it and at least one has it before its end.
(A2) An agreed step without a sample on any rank is passed over: not delivered, not counted, not the end.
(A3) The end is the first step that is past the end of every rank.
(A4) Where structures differ, no step is agreed, and all ranks stop.
(A5) A step for which the samplers drew differently, or the ranks of one worker read different data, is not agreed, nor
    is any later step.
(A6) A rank that failed holds no step from its failure on, so all ranks deliver the same steps before it. It sets the
    failure flag when the failure is its next step. A rank that stopped reading reports no step either, except that it
    is past its end.
(A7) Where more samples were left out than allowed, no step is agreed. A rank reports a step that lost samples only as
    the first step of a message. So word 3 is right for every reported step, and all ranks stop before the same step,
    whatever they read ahead.
(A8) The prefetch depth is a function of the number of the step, and of a bound that fits the memory of every rank. The
    ranks exchange it with the first agreed step that has a sample, by the size of that step. So how often user code was
    called at a step is the same on all ranks and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple, final

import numpy as np

from torchdistinput.plan.permutation import random_words

_COUNTER_BITS = 15
_SAMPLE_BITS = 33
_COUNTER = (1 << _COUNTER_BITS) - 1
MAX_RANKS = _COUNTER
MAX_SAMPLES = (1 << _SAMPLE_BITS) - 1
_WORD = 1 << 64
_HALF = 1 << 63
_ALL = _WORD - 1
_LACKING, _KNOWING = 2 * _COUNTER_BITS, 3 * _COUNTER_BITS
_HEAD = 4  # words before the words of the steps
_HOLDING = _SAMPLE_BITS + _COUNTER_BITS  # bits of a step's word below the ranks that hold it
_HELD = 1 << _HOLDING
_HELD_AND_LIVE = _HELD + (1 << _SAMPLE_BITS)
_MAX_WAIT = (1 << 40) - 1  # microseconds
SUMMAND_BITS = 48
"""Bits of a rank's summand at most: the sum over as many ranks as there may be fits a word."""
_SKIPPED = 48  # bits of the samples that were left out
BY_MAX = 3
"""How many words there are at the end of which the largest is taken."""
ALIKE = 0.8
"""A rank waits like the one that waited longest if it waited for this part of that time."""


@final
class RankWaits(NamedTuple):
    """What one rank tells of its waits, in microseconds.

    Args:
      rank: its index.
      in_vote: how long it waited for the answer of the vote before, and did nothing else; ``None``: there was none.
      in_epoch: how long its loop has waited in the epoch.
      alike: whether that is ``ALIKE`` of the longest wait that it knows of, or more.
    """

    rank: int
    in_vote: int | None
    in_epoch: int
    alike: bool = False

    def words(self) -> list[int]:
        """The last words of the report."""
        total = min(self.in_epoch, _MAX_WAIT) << _COUNTER_BITS | self.rank
        if self.in_vote is None:
            return [0, 0, total]
        wait = min(self.in_vote, _MAX_WAIT - 1)
        return [_MAX_WAIT - wait << _COUNTER_BITS | self.rank, wait, total]


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

    @classmethod
    def of(cls, words: Sequence[int], *, alike: bool) -> AgreedWaits:
        """By the last words of a report, of which each is the largest of all ranks'."""
        shortest, longest, total = words
        least = _MAX_WAIT - (shortest >> _COUNTER_BITS) if shortest else 0
        last = shortest & _COUNTER if shortest else None
        return cls(last, least, longest - least, total & _COUNTER, total >> _COUNTER_BITS, alike)


@final
class StepReport(NamedTuple):
    """The report of one rank in one exchange.

    Args:
      sizes: samples of this rank in each step that it holds, oldest first; ``None`` once past its end.
      failed: the data of this rank failed, and the failure is its next step.
      stopped: the training loop of this rank takes no further step.
      digest: the digest of the structure that this rank knows, or ``None`` if it never saw an element.
      draw_digests: the digest of the sampler's draw for each step in ``sizes``; 0, or missing, where there is none.
      skipped: samples that this rank left out in this epoch, up to and including the first of ``sizes``.
      read: the digest of the data that this rank read for each step in ``sizes``; 0, or missing, where there is none.
      sums: for each step in ``sizes``, this rank's summands; all of the same number.
      waits: how long this rank waited; ``None`` for a single rank.
    """

    sizes: tuple[int | None, ...]
    failed: bool = False
    stopped: bool = False
    digest: int | None = None
    draw_digests: tuple[int, ...] = ()
    skipped: int = 0
    read: tuple[int, ...] = ()
    sums: tuple[Sequence[int], ...] = ()
    waits: RankWaits | None = None

    def words(self, num_slots: int, weight: int = 0, peer_weight: int = 0, num_sums: int = 0) -> list[int]:
        """The report as words, as the module describes them. More steps than slots wait for the next exchange.

        Args:
          num_slots: steps that a message has room for, K.
          weight: this rank's, from ``weight_of``; 0 for a single rank.
          peer_weight: this rank's, from ``peer_weight_of``; 0 for the only rank of a worker.
          num_sums: how many sums there are, S.
        """
        digest = self.digest
        knows = digest is not None
        flags = self.failed | self.stopped << _COUNTER_BITS | (not knows) << _LACKING | knows << _KNOWING
        alike = self.waits is not None and self.waits.alike
        words = [flags, digest or 0, (digest or 0) ** 2]
        words.append(self.skipped + (alike << _SKIPPED))
        words += [_HELD if size is None else _HELD_AND_LIVE + size for size in self.sizes[:num_slots]]
        words += [0] * (_HEAD + num_slots - len(words))
        # A sum of such words wraps around as the numbers modulo 2**64 do.
        if peer_weight:
            pairs = zip_longest(self.draw_digests[:num_slots], self.read[:num_slots], fillvalue=0)
            words += [((drawn * weight + read * peer_weight + _HALF) & _ALL) - _HALF for drawn, read in pairs]
        else:
            words += [((number * weight + _HALF) & _ALL) - _HALF for number in self.draw_digests[:num_slots]]
        words += [0] * (_HEAD + 2 * num_slots - len(words))
        if num_sums:
            for summands in self.sums[:num_slots]:
                words += summands
            words += [0] * (_HEAD + (2 + num_sums) * num_slots - len(words))
        return words + ([0] * BY_MAX if self.waits is None else self.waits.words())


@final
class StepDecision(NamedTuple):
    """The decision of all ranks after one exchange.

    Args:
      steps: global sizes of the agreed steps, oldest first; 0 for one that is passed over.
      end: the data is over for every rank.
      num_failed: how many ranks failed.
      num_stopped: how many ranks stopped reading.
      structure_wanted: some rank lacks the structure and some rank knows it.
      structures_differ: the ranks know different structures.
      draws_differ: after the agreed steps, the samplers drew differently, or ranks of one worker read differently.
      skipped: samples that all ranks left out, up to and including the next step of each.
      too_many_skipped: ``skipped`` is more than allowed.
      sums: for each of ``steps``, the sums over all ranks.
      waits: how long the ranks waited, and who came last; ``None`` before any rank waited.
    """

    steps: tuple[int, ...]
    end: bool
    num_failed: int
    num_stopped: int
    structure_wanted: bool
    structures_differ: bool
    draws_differ: bool
    skipped: int = 0
    too_many_skipped: bool = False
    sums: tuple[Sequence[int], ...] = ()
    waits: AgreedWaits | None = None


def count(word: int) -> tuple[int, int, int]:
    """A summed step word taken apart: ranks that hold it, ranks before their end, samples."""
    return word >> _HOLDING, word >> _SAMPLE_BITS & _COUNTER, word & MAX_SAMPLES


def decide(words: Sequence[int], num_ranks: int, max_skipped: int | None = None, *, num_sums: int = 0) -> StepDecision:
    """The decision from the summed reports of ``num_ranks`` ranks. Laws A1 to A8.

    Args:
      words: the sums; of the last three words the largest.
      num_ranks: the number of reports in the sums.
      max_skipped: how many samples may be left out; ``None`` for any number.
      num_sums: how many sums there are, S.
    """
    flags, digests, squares, skipped = words[:_HEAD]
    num_alike, skipped = skipped >> _SKIPPED, skipped & (1 << _SKIPPED) - 1
    stopped, knowing = flags >> _COUNTER_BITS & _COUNTER, flags >> _KNOWING & _COUNTER
    differ = knowing * squares != digests * digests
    too_many = max_skipped is not None and skipped > max_skipped
    slots = (len(words) - _HEAD - BY_MAX) // (2 + num_sums)
    steps: list[int] = []
    end = draws_differ = False
    if not (differ or too_many):
        steps, end, draws_differ = _agreed(words, slots, num_ranks, stopped=stopped > 0)
    first = _HEAD + 2 * slots
    sums = [words[at : at + num_sums] for at in range(first, first + len(steps) * num_sums, num_sums or 1)]
    return StepDecision(
        steps=tuple(steps),
        end=end,
        num_failed=flags & _COUNTER,
        num_stopped=stopped,
        structure_wanted=knowing > 0 and flags >> _LACKING & _COUNTER > 0,
        structures_differ=differ,
        draws_differ=draws_differ,
        skipped=skipped,
        too_many_skipped=too_many,
        sums=tuple(sums),
        waits=AgreedWaits.of(words[-BY_MAX:], alike=2 * num_alike > num_ranks) if any(words[-BY_MAX:]) else None,
    )


def _agreed(words: Sequence[int], slots: int, num_ranks: int, *, stopped: bool) -> tuple[list[int], bool, bool]:
    """The steps that are agreed, whether the end follows, and whether draws differ there. Laws A1-3, A5, A6."""
    draw_digests = words[_HEAD + slots : _HEAD + 2 * slots]
    alike = not any(draw_digests)
    steps: list[int] = []
    before, samples = None, 0
    for place, word in enumerate(words[_HEAD : _HEAD + slots]):
        if word != before:  # most steps are equal to the one before
            holding, live, samples = count(word)
            if holding < num_ranks:
                break
            if not live:
                return steps, True, False
            if stopped:  # a stopped rank that is past its end says so, but will take no step with the others
                break
            before = word
        if not alike and draw_digests[place] % _WORD:
            return steps, False, True
        steps.append(samples)
    return steps, False, False


def weight_of(rank: int, num_ranks: int) -> int:
    """The weight of a rank's draws: the weights of all ranks sum to 0 modulo 2**64, so that equal draws cancel out.

    >>> sum(weight_of(rank, 5) for rank in range(5)) % 2**64
    0
    """
    if num_ranks == 1:
        return 0
    words = random_words(0, num_ranks - 1) | np.uint64(1)
    return int(words[rank]) if rank < num_ranks - 1 else -int(words.sum()) % _WORD


def peer_weight_of(rank: int, workers: Sequence[int]) -> int:
    """The weight of the data that a rank read: the weights of each worker's ranks sum to 0 modulo 2**64.

    Args:
      rank: the index of the rank.
      workers: the worker of each rank.

    >>> peer_weight_of(0, [0, 1, 0]) + peer_weight_of(2, [0, 1, 0]) == 2**64, peer_weight_of(1, [0, 1, 0])
    (True, 0)
    """
    peers = [place for place, worker in enumerate(workers) if worker == workers[rank]]
    if len(peers) == 1:
        return 0
    words = random_words(1, len(workers)) | np.uint64(1)
    return int(words[rank]) if rank != peers[-1] else -int(words[peers[:-1]].sum()) % _WORD
