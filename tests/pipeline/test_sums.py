"""Sums of each step, and of groups of steps: what the programs of ``tests/oracle`` do not have, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.oracle.test_in_process import fake_strategy
from tests.support.collectives import FakeCollectives

Fn = Callable[[Any], Any]


def numbers(size: int) -> Any:
    return [torch.tensor(number) for number in range(size)]


def total(batch: torch.Tensor) -> int:
    return int(batch.sum())


def steps_of(world: int, play: Callable[[Any], Any], replicas: int = 2) -> list[Any]:
    """What each rank plays with its strategy."""
    ranks = FakeCollectives(world)
    found = ranks.run(lambda rank: play(fake_strategy(ranks, rank, replicas)))
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: DataLoader(numbers(23), 5), {"balance": list(range(23))}),
        (lambda: DataLoader(numbers(23), 5), {"balance": tdi.Balance(range(23), equal_counts=True)}),
        (lambda: DataLoader(tdi.Mixture({"a": numbers(9), "b": numbers(7)}, {"a": 2, "b": 1}, stop="all"), 5), {}),
    ],
    ids=["balance", "equal counts", "mixture"],
)
def test_sums_do_not_depend_on_who_reads_what(make: Callable[[], Any], options: dict[str, Any]) -> None:
    def play(strategy: tdi.Strategy) -> list[Any]:
        options_of_sums = tdi.InputOptions(sums={"all": total}, **options)
        with strategy.distribute_dataset(make(), options_of_sums) as dataset:
            found = []
            for group in tdi.groups(dataset, 2):
                for element, step in group:
                    own = sum(total(part) for part in strategy.local_results(element))
                    assert step.local_sums == {"all": own}
                found.append(([step.sums for _, step in group], group.sums, group.global_size))
            return found

    (alone,) = steps_of(1, play, 1)
    for steps, sums, _ in alone:
        assert sums == {"all": sum(step["all"] for step in steps)}
    assert (len(alone[0][0]), alone[0][2]) == (2, 10)
    for world in (2, 3):
        assert steps_of(world, play) == [alone] * world


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([lambda batch: batch.sum().to("meta"), total], "tensor of shape [], torch.int64, on meta; an int is needed"),
        ([lambda batch: batch, total], "on cpu; an int is needed"),
        ([lambda _: 0.5, total], "returned the float 0.5; an int is needed"),
        ([total, lambda batch: batch.double().mean()], "in the training loop by strategy.reduce('sum', value)"),
        ([lambda _: 1 << 48, total], "a sum of 49 bits over this rank's part; an int of at most 48 bits is needed"),
        ([lambda _: True, total], "returned a bool; an int is needed"),
        ([lambda _: None, total], "returned a NoneType"),
        ([lambda batch: 1 // 0, total], "ZeroDivisionError"),
    ],
)
def test_a_function_that_fails_on_a_rank_is_an_error_on_all_at_its_step(functions: Sequence[Fn], words: str) -> None:
    def play(strategy: tdi.Strategy) -> tuple[int, str]:
        bad = functions[strategy.input_pipeline_id]
        steps: list[Any] = []

        def function(batch: torch.Tensor) -> Any:
            return bad(batch) if batch[0] >= 8 else total(batch)

        options = tdi.InputOptions(sums={"tokens": function}, prefetch=1)
        with strategy.distribute_dataset(DataLoader(numbers(16), 4), options) as dataset:
            with pytest.raises(tdi.SourceError) as caught:
                steps.extend(dataset)
            assert caught.value.step == 2
            return len(steps), str(caught.value)

    for steps, message in steps_of(2, play, 1):
        assert steps == 2
        assert "sums['tokens']" in message
        assert words in message.split("\n\nThe traceback")[0]


def test_sums_of_other_names_are_a_disagreement() -> None:
    def play(strategy: tdi.Strategy) -> str:
        options = tdi.InputOptions(sums={f"of {strategy.input_pipeline_id}": total})
        with pytest.raises(tdi.RankDisagreement) as caught:
            strategy.distribute_dataset(DataLoader(numbers(4), 2), options)
        return str(caught.value)

    assert all("sums" in message for message in steps_of(2, play))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sums": [total]}, TypeError, "sums is .*a dict of functions by name is needed"),
        ({"sums": {1: total}}, TypeError, "a name in sums is 1; a text is needed"),
        ({"sums": {"a": 1}}, TypeError, r"sums\['a'\] is 1; a function is needed"),
        ({"sums": {"a": total}, "coordination": "off"}, ValueError, "need coordination='on'"),
    ],
)
def test_options_that_make_no_sums_are_refused(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tdi.InputOptions(**options)
