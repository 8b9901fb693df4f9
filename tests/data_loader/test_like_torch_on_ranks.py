"""Where several ranks read, and the drop-in cannot do as torch: errors, empty batches, any order, DataPipes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
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
    settings: list[dict[str, Any]] = [
        *({}, {"num_workers": 1}, {"options": tdi.InputOptions(prefetch=0)}),
        {"num_workers": 2, "options": tdi.InputOptions(prefetch=3)},
    ]
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


def pipes() -> list[Any]:
    """One rank: two epochs of a DataPipe, and the refusal of another. Ranks have default random states of their own."""
    torch.manual_seed(dist.get_rank())
    loader = tdi.DataLoader(IterableWrapper(range(24)).shuffle(), batch_size=4, shuffle=True)
    divided = DataLoader(IterableWrapper(range(24)).sharding_filter(), batch_size=4)
    refusal = raised(lambda: tdi.Strategy(["cpu"]).distribute_dataset(divided))
    return [[[batch.tolist() for batch in loader] for _ in range(2)], refusal]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_data_pipe_is_read_once_by_all_ranks_together_and_its_filter_is_refused() -> None:
    (first, refusal), (second, other) = run_ranks(2, pipes)
    for of_first, of_second in zip(first, second, strict=True):
        assert sorted(sum([*of_first, *of_second], [])) == [*range(24)]  # noqa: RUF017 - a few
    assert first[0] != first[1]
    assert refusal.kind == other.kind == "InputError"
    assert "sharding_filter" in refusal.message
