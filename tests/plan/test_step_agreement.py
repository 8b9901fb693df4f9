"""The reports of all ranks are joined into one; what follows from it is what a reader of all of them would say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import pytest

from torchdistinput.plan.step_agreement import (
    ANY_NUMBER,
    DATA,
    DIFFER,
    DIFFERING_STRUCTURES,
    FAILED,
    FAILURES,
    LACKS,
    LOSSES,
    MASK,
    STOPPED,
    STOPS,
    STRUCTURE,
    AgreedWaits,
    Report,
    decide,
    join,
    join_messages,
    peer_weight_of,
)

HUGE = 2**90


@dataclass(frozen=True)
class Rank:
    """What one rank holds: of each step the samples (``None`` past its end), the draw, what fits, and a sum."""

    sizes: Sequence[int | None]
    draws: Sequence[int]
    fits: Sequence[int]
    sums: Sequence[int]
    flags: int
    structure: int | None
    skipped: int
    waited: int | None
    in_epoch: int

    def report(self, rank: int) -> Report:
        return Report(
            flags=self.flags | LACKS * (self.structure is None),
            structure=self.structure,
            skipped=self.skipped,
            live=sum(size is not None for size in self.sizes),
            same=len(self.sizes),
            last=None if self.waited is None else rank,
            least=self.waited or 0,
            most=self.waited or 0,
            waiter=rank,
            waited=self.in_epoch,
            sizes=[size or 0 for size in self.sizes],
            draws=self.draws,
            fits=self.fits,
            sums=self.sums,
        )


def random_rank(rng: random.Random, structures: Sequence[int]) -> Rank:
    sizes: list[int | None] = [rng.choice([0, 0, 1, 2, 7]) for _ in range(rng.randint(0, 4))]
    if rng.random() < 0.4:
        place = rng.randint(0, len(sizes))
        sizes[place:] = [None] * (len(sizes) - place + rng.randint(0, 1))
    stopped = rng.random() < 0.15
    if stopped:
        sizes = [None] if sizes[:1] == [None] else []
    failed = not sizes and rng.random() < 0.5
    # What the sampler drew is a function of the step, but for a rank that draws something of its own now and then.
    return Rank(
        sizes=sizes,
        draws=[0 if size is None else MASK - j - (rng.random() < 0.05) for j, size in enumerate(sizes)],
        fits=[rng.choice([ANY_NUMBER, 3, 40]) for _ in sizes],
        sums=[rng.choice([0, 1, -1, HUGE, -HUGE, rng.getrandbits(40)]) for _ in sizes],
        flags=FAILED * failed | STOPPED * stopped,
        structure=rng.choice(structures) if rng.random() < 0.7 else None,
        skipped=rng.choice([0, 0, 1, 5]),
        waited=rng.choice([None, 0, 5, 2**45]),
        in_epoch=rng.choice([0, 7, 2**50]),
    )


def random_ranks(rng: random.Random) -> list[Rank]:
    structures = [rng.randint(0, MASK)] if rng.random() < 0.8 else [rng.randint(0, 3) for _ in range(3)]
    return [random_rank(rng, structures) for _ in range(rng.randint(1, 6))]


def in_any_tree(rng: random.Random, reports: Sequence[Report]) -> Report:
    """A few that follow each other are joined, until there is one."""
    messages = [report.to_bytes() for report in reports]
    while len(messages) > 1:
        place = rng.randrange(len(messages) - 1)
        end = rng.randint(place + 2, len(messages))
        messages[place:end] = [join_messages(messages[place:end])]
    return Report.from_bytes(messages[0])


def plain(report: Report) -> list[object]:
    """The values, whatever kind of list holds them."""
    return [list(each) if isinstance(each, Sequence) else each for each in report]


def test_reports_are_joined_alike_in_any_tree_and_travel_as_they_are() -> None:
    rng = random.Random(1)
    for _ in range(5_000):
        reports = [each.report(rank) for rank, each in enumerate(random_ranks(rng))]
        expected = plain(reduce(join, reports))
        assert plain(in_any_tree(rng, reports)) == expected
        assert plain(in_any_tree(rng, reports)) == expected
        assert [plain(Report.from_bytes(each.to_bytes())) for each in reports] == [plain(each) for each in reports]


def read_all(ranks: Sequence[Rank], max_skipped: int | None) -> tuple[object, ...]:
    """What follows from what the ranks hold, law by law."""
    known = {each.structure for each in ranks if each.structure is not None}
    lacks = any(each.structure is None for each in ranks)
    skipped = sum(each.skipped for each in ranks)
    asks = DIFFERING_STRUCTURES if len(known) > 1 else STRUCTURE if known and lacks else ""  # law A4
    steps: list[int] = []
    sums: list[int] = []
    fits: int | None = None
    end = False
    too_many = max_skipped is not None and skipped > max_skipped  # law A7
    stopped = any(each.flags & STOPPED for each in ranks)
    for j in range(0 if asks or too_many else min(len(each.sizes) for each in ranks)):  # law A1
        sizes = [each.sizes[j] for each in ranks]
        if all(size is None for size in sizes):  # law A3
            end = True
            break
        if stopped:  # law A6: nobody takes a step with a rank that stopped
            break
        if len({each.draws[j] for each in ranks}) > 1:  # law A5
            asks = DATA
            break
        steps.append(sum(size or 0 for size in sizes))
        sums.append(sum(each.sums[j] for each in ranks))
        if steps[-1] and fits is None:  # law A8
            fits = min(each.fits[j] for each in ranks)
    if not (asks or end):
        failed = any(each.flags & FAILED for each in ranks)
        asks = FAILURES if failed else LOSSES if too_many else STOPS if stopped else ""
    return steps, sums, end, asks, skipped, fits


def test_the_joined_report_says_what_all_the_ranks_say() -> None:
    rng = random.Random(0)
    for _ in range(20_000):
        ranks = random_ranks(rng)
        most = rng.choice([None, None, 0, 3, 10])
        found = decide(in_any_tree(rng, [each.report(rank) for rank, each in enumerate(ranks)]), most)
        sums = [each[0] for each in found.sums]
        told = (list(found.steps), sums, found.end, found.asks, found.skipped, found.fits)
        assert told == read_all(ranks, most), ranks
        waited = [each.waited for each in ranks if each.waited is not None]
        longest = max(each.in_epoch for each in ranks)
        assert found.waits is not None
        assert found.waits.last is None if not waited else ranks[found.waits.last or 0].waited == min(waited)
        assert (found.waits.least, found.waits.late) == (
            min(waited, default=0),
            max(waited, default=0) - min(waited, default=0),
        )
        assert (ranks[found.waits.waiter].in_epoch, found.waits.waited) == (longest, longest)


def test_no_number_of_ranks_or_samples_is_too_large_for_a_message() -> None:
    report = Report(flags=FAILED, structure=MASK, skipped=7, live=1, same=1, sizes=[2**33], draws=[MASK], sums=[-HUGE])
    many = report
    for _ in range(20):
        many = Report.from_bytes(join(many, many).to_bytes())
    assert (many.ranks, many.skipped, many.flags & DIFFER) == (2**20, 7 * 2**20, 0)
    found = decide(many)
    assert (list(found.steps), [list(each) for each in found.sums]) == ([2**53], [[-HUGE * 2**20]])


def test_the_size_of_a_message_follows_from_the_steps_alone() -> None:
    report = Report(live=2, same=2, sizes=[1, 1], draws=[5, 6])
    assert len(reduce(join, [report] * 100).to_bytes()) == len(report.to_bytes()) == 8 * (15 + 2 * 2)


@pytest.mark.parametrize(("alike", "most"), [((1, 1, 0, 1), True), ((1, 1, 0, 0), False), ((0, 0, 0, 0), False)])
def test_all_know_whether_most_ranks_waited_as_long_as_the_one_that_waited_longest(
    alike: Sequence[int], most: bool
) -> None:
    reports = [Report(waiter=rank, waited=rank, alike=each) for rank, each in enumerate(alike)]
    assert decide(reduce(join, reports)).waits == AgreedWaits(None, 0, 0, 3, 3, alike=most)


@pytest.mark.parametrize("workers", [(0, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2), (1, 0, 2, 0, 1, 0)])
def test_what_the_ranks_of_each_worker_read_is_compared_among_them_only(workers: tuple[int, ...]) -> None:
    rng = random.Random(3)

    def agreed(read: Sequence[Sequence[int]]) -> tuple[int, str]:
        reports = []
        for rank, each in enumerate(read):
            peers = [number * peer_weight_of(rank, workers) & MASK for number in each]
            reports.append(Report(live=2, same=2, sizes=[1, 1], draws=[5, 6], peers=peers))
        found = decide(in_any_tree(rng, reports))
        return len(found.steps), found.asks

    alike = [(100 + worker, 7 * worker) for worker in workers]
    assert agreed(alike) == (2, "")
    for rank, worker in enumerate(workers):
        for place in (0, 1):
            other = [list(each) for each in alike]
            other[rank][place] += 1
            assert agreed(other) == ((place, DATA) if workers.count(worker) > 1 else (2, ""))
