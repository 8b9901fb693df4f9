"""Batches by tokens and by buckets: their law, on ranks, after a resume, and what they refuse."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler

import torchdistinput as tdi

LENGTHS = np.random.default_rng(0).lognormal(3, 1, 400).astype(int) % 300
DATA = torch.arange(400)


@pytest.mark.parametrize("padded", [False, True])
def test_batches_hold_at_most_so_many_tokens_and_no_sample_more_would_fit(padded: bool) -> None:
    for seed in range(20):
        dice = random.Random(seed)
        lengths = [dice.randint(0, 50) for _ in range(dice.randint(1, 200))]
        order = dice.sample(range(len(lengths)), len(lengths))
        batches = list(tdi.TokenBatchSampler(order, lengths, 100, padded=padded))
        assert [index for batch in batches for index in batch] == order

        def tokens(batch: list[int], lengths: list[int] = lengths) -> int:
            return max(lengths[each] for each in batch) * len(batch) if padded else sum(lengths[each] for each in batch)

        assert all(tokens(batch) <= 100 for batch in batches)
        for batch, following in pairwise(batches):
            assert tokens([*batch, following[0]]) > 100


def test_token_batches_are_bounded_in_samples_and_drop_what_is_too_long() -> None:
    sampler = tdi.TokenBatchSampler(range(6), [1, 1, 1, 99, 1, 1], 10, max_samples=2, too_long="drop", drop_last=True)
    assert list(sampler) == [[0, 1], [2, 4]]
    assert sampler.dropped == 1
    with pytest.raises(ValueError, match="sample 3 has 99 tokens, more than max_tokens=10"):
        list(tdi.TokenBatchSampler(range(6), [1, 1, 1, 99, 1, 1], 10))


def test_a_batch_has_samples_of_one_bucket_and_each_sample_comes_once() -> None:
    boundaries, sizes = [10, 40], [16, 8, 2]
    batches = list(tdi.BucketBatchSampler(SequentialSampler(DATA), LENGTHS.tolist(), boundaries, sizes))
    assert sorted(index for batch in batches for index in batch) == list(range(400))
    for batch in batches:
        buckets = {int(np.searchsorted(boundaries, LENGTHS[index], side="right")) for index in batch}
        assert len(buckets) == 1
        assert len(batch) <= sizes[buckets.pop()]
    short = tdi.BucketBatchSampler(SequentialSampler(DATA), LENGTHS.tolist(), boundaries, sizes, drop_last=True)
    assert {len(batch) for batch in short} == {16, 8, 2}


def test_epochs_are_those_of_the_sampler() -> None:
    shuffle = tdi.ShuffleSampler(400, seed=1)
    sampler = tdi.TokenBatchSampler(shuffle, LENGTHS.tolist(), 400)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    plain = tdi.BucketBatchSampler(range(400), LENGTHS.tolist(), [10], 7)
    plain.set_epoch(3)
    assert list(plain) == list(plain)


@pytest.mark.parametrize(
    ("make_one", "told"),
    [
        (lambda: tdi.TokenBatchSampler(range(3), [1, 1, 1], 0), "max_tokens"),
        (lambda: tdi.TokenBatchSampler(range(3), [1, 1, 1], 5, too_long="cut"), "too_long is 'cut'"),  # type: ignore[arg-type]
        (lambda: list(tdi.TokenBatchSampler(range(3), [1, -2, 1], 5)), "the length of sample 1 is -2"),
        (lambda: tdi.BucketBatchSampler(range(3), [1, 1, 1], [5, 5], 2), "rising lengths"),
        (lambda: tdi.BucketBatchSampler(range(3), [1, 1, 1], [5], [2]), "1 batch sizes for 2 buckets"),
        (lambda: tdi.BucketBatchSampler(range(3), [1, 1, 1], [5], 0), "batch_size"),
    ],
)
def test_bad_arguments_are_told(make_one: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_one()
