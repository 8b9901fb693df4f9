"""On a device the values are right, whatever the streams' pace, and whatever the consumer keeps, drops and writes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.accelerator.consumers import Witness, batch_of, check_alike, scratch

STEPS = 24


def distributed(device: torch.device, data: Any, prefetch: int | None) -> tdi.DistributedDataset:
    return tdi.Strategy([device]).distribute_dataset(data, tdi.InputOptions(prefetch=prefetch))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 8, None])
def test_batches_that_are_kept_stay_right_while_others_come_and_go(
    device: torch.device, weather: int, prefetch: int | None
) -> None:
    rng = random.Random(weather)
    witness = Witness()
    held: list[tuple[int, Any]] = []
    with distributed(device, [batch_of(step) for step in range(STEPS)], prefetch) as dataset:
        for step, batch in enumerate(dataset):
            held.append((step, batch))
            del batch
            scratch(device)
            number, each = rng.choice(held)
            witness.look(each, batch_of(number))
            del each
            if len(held) > 4:
                held.pop(rng.randrange(len(held)))
        for number, each in held:
            check_alike(each, batch_of(number), device)
    assert witness.wrong() == 0


def test_batches_may_be_changed_in_place(device: torch.device) -> None:
    """Each leaf is the user's own, also where many of them came as one copy."""
    host = [batch_of(step) for step in range(STEPS)]
    witness = Witness()
    with distributed(device, host, 2) as dataset:
        for step, batch in enumerate(dataset):
            batch["small"]["3"].fill_(-1)
            batch["pair"][0].add_(batch["pair"][0])
            expected = batch_of(step)
            expected["small"]["3"].fill_(-1)
            expected["pair"][0].mul_(2)
            witness.look(batch, expected)
    assert witness.wrong() == 0
    for step, batch in enumerate(host):
        check_alike(batch, batch_of(step), torch.device("cpu"))


@pytest.mark.parametrize("prefetch", [1, 8])
def test_an_early_break_leaves_the_users_memory_alone(device: torch.device, prefetch: int) -> None:
    """Batches on their way are given up; what the user allocates next is the user's."""
    host = [batch_of(step) for step in range(STEPS)]
    witness = Witness()
    with distributed(device, host, prefetch) as dataset:
        for stop in (0, 3, 1, 6):
            for step, batch in enumerate(dataset):
                witness.look(batch, batch_of(step))
                if step == stop:
                    break
            for like in host[:4]:
                own = torch.full_like(like["large"], 5, device=device)
                witness.look(own, torch.full_like(like["large"], 5))
                del own
    assert witness.wrong() == 0


def test_after_a_close_in_the_middle_the_memory_is_free_and_the_batches_in_hand_are_right(device: torch.device) -> None:
    host = [batch_of(step) for step in range(STEPS)]
    dataset = distributed(device, host, 8)
    batches = iter(dataset)
    in_hand = [next(batches), next(batches)]
    dataset.close()
    for _ in range(20):
        scratch(device)
    for step, batch in enumerate(in_hand):
        check_alike(batch, batch_of(step), device)


def test_an_error_of_the_source_comes_after_the_batches_before_it(device: torch.device) -> None:
    def batches() -> Iterator[Any]:
        for step in range(5):
            yield batch_of(step)
        raise OSError("the disk is gone")

    witness = Witness()
    with distributed(device, batches(), 2) as dataset:
        arriving = iter(dataset)
        for step in range(5):
            witness.look(next(arriving), batch_of(step))
            scratch(device)
        with pytest.raises(tdi.SourceError, match="at step 5 of epoch 0 .* the disk is gone"):
            next(arriving)
    assert witness.wrong() == 0


def test_special_tensors_are_moved_as_the_users_own_to_would(device: torch.device) -> None:
    host = [
        {"sparse": (torch.eye(4) * (step + 1)).to_sparse(), "there": torch.full((4,), step, device=device)}
        for step in range(STEPS)
    ]
    with distributed(device, host, 2) as dataset:
        for step, batch in enumerate(dataset):
            scratch(device)
            assert torch.equal(batch["sparse"].cpu().to_dense(), torch.eye(4) * (step + 1))
            assert batch["sparse"].device == batch["there"].device == device
            assert batch["there"].tolist() == [step] * 4


class Graphs:
    """A batch of a user's own class, which moves in place as PyG's does."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graphs:
        self.x = self.x.to(device)
        return self


def test_objects_with_a_method_to_are_moved_as_by_the_user(device: torch.device) -> None:
    numbers = list(range(STEPS))
    data: Any = DataLoader(numbers, 1, collate_fn=lambda samples: Graphs(torch.full((5,), samples[0])))  # type: ignore[arg-type]
    with tdi.Strategy([device]).distribute_dataset(data) as dataset:
        for step, batch in enumerate(dataset):
            scratch(device)
            assert batch.x.device == device
            assert batch.x.tolist() == [step] * 5


def with_arrays(numbers: list[int]) -> dict[str, Any]:
    """A batch with arrays that are no tensors, and one that moves beside them."""
    ids = np.array(numbers)
    return {
        "ids": torch.tensor(numbers),
        "graphs": Graphs(torch.tensor(numbers)),
        "arrays": [ids, np.ma.masked_equal(ids, 1), ids.astype("datetime64[s]"), ids.astype("U2")],
        "record": ids.astype([("a", "i4")]),
    }


@pytest.mark.parametrize("drop_in", [False, True])
def test_arrays_that_a_collate_function_returned_stay_arrays(device: torch.device, drop_in: bool) -> None:
    data: Any = range(STEPS)
    kinds: dict[str, Any] = {}
    for to in (torch.device("cpu"), device):
        strategy, kinds[to.type] = tdi.Strategy([to]), []
        loader: Any = (
            tdi.DataLoader(data, 4, collate_fn=with_arrays, strategy=strategy)
            if drop_in
            else strategy.distribute_dataset(DataLoader(data, 4, collate_fn=with_arrays))
        )
        with loader:
            for step, batch in enumerate(loader):
                assert batch["ids"].device == batch["graphs"].x.device == to
                given = with_arrays(batch["ids"].tolist())
                arrays, expected = [*batch["arrays"], batch["record"]], [*given["arrays"], given["record"]]
                for array, like in zip(arrays, expected, strict=True):
                    assert (type(array), array.dtype) == (type(like), like.dtype)
                    assert array.tolist() == like.tolist()
                kinds[to.type].append(step)
    assert kinds["cpu"] == kinds[device.type] != []


def test_arrays_of_ready_batches_become_tensors_and_lists_on_any_device(device: torch.device) -> None:
    host = [{"x": np.full((4, 2), step), "names": np.array([*"abcd"])} for step in range(STEPS)]
    for to in (torch.device("cpu"), device):
        with distributed(to, host, None) as dataset:
            for step, batch in enumerate(dataset):
                assert (batch["x"].device, batch["x"].tolist()) == (to, [[step] * 2] * 4)
                assert batch["names"] == [*"abcd"]


def test_memory_does_not_grow(device: torch.device) -> None:
    host = [batch_of(step) for step in range(8)]
    with distributed(device, host * 30, 2) as dataset:
        reserved = []
        for step, batch in enumerate(dataset):
            del batch
            scratch(device)
            if step % 80 == 79:
                reserved.append(torch.accelerator.memory_reserved(device))
    assert reserved[1:] == reserved[:-1]
