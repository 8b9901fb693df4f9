"""Where several ranks read, and the drop-in cannot do as torch: errors, empty batches, any order, DataPipes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdistinput as tdi
from tests.data import Numbers
from tests.support.epochs import lists, raised
from torchdistinput.testing import run_ranks

HINT = tdi.AutoShardPolicy.HINT


def fail() -> None:
    raise ValueError("no 6")


def until_the_end(settings: list[dict[str, Any]]) -> list[Any]:
    """One rank: what each ``next`` gave to a loop that goes on after every error, until the end came twice."""
    found = []
    for more in settings:
        iterator = iter(tdi.DataLoader(Numbers(12, {6: fail}), batch_size=4, **more))
        given: list[Any] = []
        while given.count("StopIteration") < 2:
            try:
                given.append(next(iterator).tolist())
            except StopIteration:
                given.append("StopIteration")
            except Exception as error:
                given.append((type(error).__name__, str(error)))
        found.append(given)
    return found


def test_an_error_ends_the_epoch_of_all_ranks_and_a_loop_that_goes_on_after_errors_comes_to_its_end() -> None:
    settings = [{}, {"num_workers": 1}, {"prefetch": 0}, {"prefetch": 3, "num_workers": 2}]
    for rank, found in enumerate(run_ranks(2, until_the_end, settings)):
        for given in found:
            first, (error, told), (again, ended), *ends = given
            assert first == [2 * rank, 2 * rank + 1]
            assert error == "SourceError"
            assert "the input of rank 1 failed at step 1 of epoch 0" in told
            assert again == "InputError"
            assert "this epoch ended with the error above, after step 1, and cannot go on" in ended
            assert "no 6" in ended
            assert ends == ["StopIteration"] * 2


def empty_batches() -> list[Any]:
    data: Any = range(6)
    loader = tdi.DataLoader(data, batch_sampler=[[], [0, 1], [], [2, 3, 4], []])
    found = [(lists(batch), loader.step.index) for batch in loader]
    items: Any = [torch.zeros(0), torch.arange(3.0), torch.zeros(0)]
    return [found, [(lists(batch), loader.step.index) for batch in tdi.DataLoader(items, batch_size=None)]]


def test_a_batch_without_samples_is_passed_over_on_every_rank() -> None:
    first, second = run_ranks(2, empty_batches)
    assert first[0] == [([0], 0), ([2, 3], 1)]
    assert second[0] == [([1], 0), ([4], 1)]
    assert [[batch for batch, _ in rank[1]] for rank in (first, second)] == [[[0.0, 1.0]], [[2.0]]]


def in_any_order() -> Any:
    data: Any = range(6)
    loader = tdi.DataLoader(data, batch_size=2, num_workers=2, in_order=False)
    return raised(lambda: next(iter(loader)))


def test_batches_in_any_order_are_refused_on_every_rank() -> None:
    for refusal in run_ranks(2, in_any_order):
        assert refusal.kind == "InputError"
        assert "in_order=False" in refusal.message
        assert "in_order=True" in refusal.message


def pipe_of(kind: str) -> Any:
    numbers = IterableWrapper(range(24))
    if kind == "divided":
        return numbers.sharding_filter()
    return numbers.shuffle().sharding_filter() if kind == "shuffled" else numbers.shuffle()


def pipes(jobs: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
    """One rank: two epochs of each, and what it was warned of. Ranks have default random states of their own."""
    torch.manual_seed(dist.get_rank())
    found = []
    for kind, policy, more in jobs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = tdi.DataLoader(pipe_of(kind), batch_size=4, policy=tdi.AutoShardPolicy[policy], **more)
            refusal = raised(lambda: next(iter(loader)))  # noqa: B023 - called at once
            epochs = [] if refusal else [[batch.tolist() for batch in loader] for _ in range(2)]
        messages = [str(each.message) for each in caught if each.category is UserWarning]
        found.append((refusal, epochs, messages))
    return found


WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_data_pipe_is_read_once_by_all_ranks_together_under_either_policy() -> None:
    jobs = [(kind, policy, more) for kind in ("divided", "shuffled") for policy in ("DATA", "HINT") for more in WORKERS]
    jobs += [("whole", "HINT", {})]
    ranks = run_ranks(2, pipes, jobs)
    for (kind, policy, more), first, second in zip(jobs, *ranks, strict=True):
        if kind == "whole":
            for refusal, _, _ in (first, second):
                assert refusal.kind == "ShardingError"
                assert "sharding_filter" in refusal.message
            continue
        assert first[0] is second[0] is None
        for of_first, of_second in zip(first[1], second[1], strict=True):
            batches = [*of_first, *of_second]
            assert sorted(sum(batches, [])) == [*range(24)], (kind, policy, more)  # noqa: RUF017 - a few
        if kind == "divided" and not more:
            own = [[0, 1], [4, 5]] if policy == "DATA" else [[0, 2], [4, 6]]
            assert first[1][0][:2] == own
        if kind == "shuffled":
            assert first[1][0] != first[1][1]
        hints = [each for each in first[2] if "sharding_filter" in each and "AutoShardPolicy.HINT" in each]
        assert len(hints) == (policy == "DATA")
        assert not any("repeated" in each for each in first[2])
