"""Reports are summed as one message; what follows from the sums is what a reader of all the reports would say."""

from __future__ import annotations

import random

import pytest

from torchdistinput.plan.step_agreement import (
    BY_MAX,
    MAX_RANKS,
    MAX_SAMPLES,
    SUMMAND_BITS,
    AgreedWaits,
    RankWaits,
    StepDecision,
    StepReport,
    count,
    decide,
    peer_weight_of,
    weight_of,
)

MAX_DIGEST = 2**24 - 1
MAX_WORD = 2**63 - 1
MAX_SUMMAND = 2**SUMMAND_BITS - 1


def summed(reports: list[StepReport], slots: int, num_sums: int = 0) -> list[int]:
    words = [report.words(slots, weight_of(rank, len(reports)), 0, num_sums) for rank, report in enumerate(reports)]
    assert all(-(2**63) <= word < 2**63 for each in words for word in each)
    columns = list(zip(*words, strict=True))
    return [*map(sum, columns[:-BY_MAX]), *map(max, columns[-BY_MAX:])]


def read_all(reports: list[StepReport], slots: int, max_skipped: int | None = None, num_sums: int = 0) -> StepDecision:
    """What follows from the reports themselves, law by law."""
    known = [report.digest for report in reports if report.digest is not None]
    differ = len(set(known)) > 1
    steps: list[int] = []
    sums: list[list[int]] = []
    end = draws_differ = False
    skipped = sum(report.skipped for report in reports)
    too_many = max_skipped is not None and skipped > max_skipped
    for j in range(slots):
        if too_many:  # law A7
            break
        if differ or any(j >= len(report.sizes) for report in reports):  # laws A4 and A1: not held by every rank
            break
        sizes = [report.sizes[j] for report in reports]
        if all(size is None for size in sizes):  # law A3
            end = True
            break
        if any(report.stopped for report in reports):  # law A6: nobody makes a step with a rank that stopped
            break
        if len({report.draw_digests[j] if j < len(report.draw_digests) else 0 for report in reports}) > 1:  # law A5
            draws_differ = True
            break
        if num_sums:
            sums.append([sum(each) for each in zip(*(report.sums[j] for report in reports), strict=True)])
        steps.append(sum(size or 0 for size in sizes))
    return StepDecision(
        steps=tuple(steps),
        end=end,
        num_failed=sum(report.failed for report in reports),
        num_stopped=sum(report.stopped for report in reports),
        structure_wanted=bool(known) and len(known) < len(reports),
        structures_differ=differ,
        draws_differ=draws_differ,
        skipped=skipped,
        too_many_skipped=too_many,
        sums=tuple(sums),
    )


def random_summand(rng: random.Random) -> int:
    """Of any size that may be."""
    return int(rng.choice([0, 1, -1, MAX_SUMMAND, -MAX_SUMMAND, rng.getrandbits(40), -rng.getrandbits(20)]))


def random_ballot(rng: random.Random, slots: int, digests: list[int], num_sums: int) -> StepReport:
    sizes: list[int | None] = [rng.choice([0, 0, 1, 2, 7]) for _ in range(rng.randint(0, slots + 1))]
    if rng.random() < 0.4:
        place = rng.randint(0, len(sizes))
        sizes[place:] = [None] * (len(sizes) - place + rng.randint(0, 1))
    stopped = rng.random() < 0.15
    if stopped:
        sizes = [None] if sizes[:1] == [None] else []
    failed = not sizes and rng.random() < 0.5
    digest = rng.choice(digests) if rng.random() < 0.7 else None
    # What the sampler drew is a function of the step, but for a rank that draws something of its own now and then.
    drawn = tuple(0 if size is None else 2**63 - 1 - j - (rng.random() < 0.05) for j, size in enumerate(sizes))
    drawn = drawn if rng.random() < 0.9 else ()
    sums = tuple([random_summand(rng) if size else 0 for _ in range(num_sums)] for size in sizes)
    return StepReport(tuple(sizes), failed, stopped, digest, drawn, rng.choice([0, 0, 1, 5]), sums=sums)


def test_the_sums_say_what_all_the_ballots_say() -> None:
    rng = random.Random(0)
    for _ in range(20_000):
        slots = rng.randint(1, 4)
        digests = [rng.randint(0, MAX_DIGEST)] if rng.random() < 0.8 else [rng.randint(0, 3) for _ in range(3)]
        num_sums = rng.choice([0, 0, 1, 2])
        reports = [random_ballot(rng, slots, digests, num_sums) for _ in range(rng.randint(1, 6))]
        most = rng.choice([None, None, 0, 3, 10])
        decision = decide(summed(reports, slots, num_sums), len(reports), most, num_sums=num_sums)
        assert decision == read_all(reports, slots, most, num_sums), reports


def test_sums_are_exact_at_the_largest_world() -> None:
    for value in (MAX_SUMMAND, -MAX_SUMMAND):
        words = [word * MAX_RANKS for word in StepReport((1,), sums=([value, 1],)).words(1, num_sums=2)]
        assert all(-MAX_WORD <= word <= MAX_WORD for word in words)
        assert decide(words, MAX_RANKS, num_sums=2).sums == ([value * MAX_RANKS, MAX_RANKS],)


def test_all_ranks_know_who_waited_least_in_a_vote_by_how_much_and_whose_loop_waited_longest() -> None:
    for waited in ([3, 2, 5], [2**39, 7 * 10**9, 2**38], [0, 1, 1]):
        reports = [
            StepReport((), skipped=7, waits=RankWaits(rank, wait, 10 * (3 - rank), rank != alone))
            for alone in range(3)
            for rank, wait in enumerate(waited)
        ]
        for alone in range(3):
            decision = decide(summed(reports[3 * alone : 3 * alone + 3], 1), 3)
            least = min(waited)
            assert decision.waits == AgreedWaits(waited.index(least), least, max(waited) - least, 0, 30, alike=True)
            assert decision.skipped == 21
    few = [StepReport((), waits=RankWaits(rank, None, 5, alike=rank < 2)) for rank in range(4)]
    assert decide(summed(few, 1), 4).waits == AgreedWaits(None, 0, 0, 3, 5, alike=False)
    most = RankWaits(MAX_RANKS - 1, 0, 2**60, alike=True)
    words = [word * MAX_RANKS for word in StepReport((), skipped=9, waits=most).words(1)[:-BY_MAX]]
    found = decide([*words, *most.words()], MAX_RANKS)
    assert max(most.words()) <= MAX_WORD
    assert found.skipped == 9 * MAX_RANKS
    assert found.waits == AgreedWaits(MAX_RANKS - 1, 0, 0, MAX_RANKS - 1, 2**40 - 1, alike=True)


def test_the_counters_of_the_largest_world_fit_their_words() -> None:
    """The words of as many ranks as there may be are the words of one, so many times."""
    full = StepReport((0, None, 0), failed=True, stopped=True, digest=MAX_DIGEST)
    lacking = StepReport((0,), failed=True, stopped=True)
    for report in (full, lacking):
        words = [word * MAX_RANKS for word in report.words(3)]
        assert all(0 <= word <= MAX_WORD for word in words)
        decision = decide(words, MAX_RANKS)
        assert (decision.num_failed, decision.num_stopped) == (MAX_RANKS, MAX_RANKS)
        assert not decision.structures_differ
        assert decision.skipped == 0
    words = [word * MAX_RANKS for word in StepReport((0, None), digest=MAX_DIGEST).words(2)]
    assert [count(word) for word in words[4:6]] == [(MAX_RANKS, MAX_RANKS, 0), (MAX_RANKS, 0, 0)]
    assert decide(words, MAX_RANKS).steps == (0,)


def test_the_largest_step_keeps_its_size_apart_from_the_counters() -> None:
    for ranks in (1, 2, 1000, MAX_RANKS):
        share, rest = divmod(MAX_SAMPLES, ranks)
        word = StepReport((share,)).words(1)[4] * (ranks - 1) + StepReport((share + rest,)).words(1)[4]
        assert 0 <= word <= MAX_WORD
        assert count(word) == (ranks, ranks, MAX_SAMPLES)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 64, 300])
def test_weights_cancel_out_equal_draws_and_no_others(num_ranks: int) -> None:
    weights = [weight_of(rank, num_ranks) for rank in range(num_ranks)]
    assert sum(weights) % 2**64 == 0
    alike = [StepReport((1,), draw_digests=(12345,))] * num_ranks
    assert decide(summed(alike, 1), num_ranks).steps == (num_ranks,)
    for rank in range(num_ranks if num_ranks > 1 else 0):
        other = [*alike[:rank], StepReport((1,), draw_digests=(12346,)), *alike[rank + 1 :]]
        decision = decide(summed(other, 1), num_ranks)
        assert decision.draws_differ
        assert decision.steps == ()


def test_sums_that_wrap_around_as_tensors_do_say_the_same() -> None:
    reports = [StepReport((1, 1), draw_digests=(2**63 - 1, second)) for second in (7, 7, 8)]
    wrapped = [(word + 2**63) % 2**64 - 2**63 for word in summed(reports, 2)]
    assert decide(wrapped, 3) == decide(summed(reports, 2), 3)
    assert decide(wrapped, 3).steps == (3,)
    assert decide(wrapped, 3).draws_differ


@pytest.mark.parametrize("workers", [(0, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2), (1, 0, 2, 0, 1, 0)])
def test_what_the_ranks_of_each_worker_read_is_compared_among_them_only(workers: tuple[int, ...]) -> None:
    num_ranks = len(workers)

    def decision(read: list[tuple[int, ...]], drawn: list[tuple[int, ...]]) -> StepDecision:
        reports = [
            StepReport((1, 1), draw_digests=drew, read=numbers) for drew, numbers in zip(drawn, read, strict=True)
        ]
        words = [
            report.words(2, weight_of(rank, num_ranks), peer_weight_of(rank, workers))
            for rank, report in enumerate(reports)
        ]
        return decide([sum(each) for each in zip(*words, strict=True)], num_ranks)

    alike: list[tuple[int, ...]] = [(100 + worker, 7 * worker) for worker in workers]
    drawn: list[tuple[int, ...]] = [(5, 6)] * num_ranks
    assert decision(alike, drawn).steps == (num_ranks, num_ranks)
    assert decision(alike, [()] * num_ranks).steps == (num_ranks, num_ranks)
    for rank, worker in enumerate(workers):
        for slot in (0, 1):
            other = list(alike[rank])
            other[slot] += 1
            found = decision([*alike[:rank], tuple(other), *alike[rank + 1 :]], drawn)
            assert found.draws_differ == (workers.count(worker) > 1)
            assert len(found.steps) == (slot if found.draws_differ else 2)
        drew = [*drawn[:rank], (5, 9), *drawn[rank + 1 :]]
        assert decision(alike, drew).draws_differ
