"""The consumer's streams, threads and devices are the consumer's own: they may change, and nobody else changes them."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from tests.accelerator.consumers import Witness, batch_of, check_alike, scratch
from torchdistinput.devices.accelerators import make_copier
from torchdistinput.pipeline.to_device import ToDevice

STEPS = 16
LEAVES = 15  # tensors in a batch


def distributed(devices: Any, data: Any, prefetch: int | None = 2) -> tdi.DistributedDataset:
    return tdi.Strategy(devices).distribute_dataset(data, tdi.InputOptions(prefetch=prefetch))


def current() -> tuple[int, list[torch.Stream]]:
    """The calling thread's device, and its stream on each."""
    streams = [torch.accelerator.current_stream(index) for index in range(torch.accelerator.device_count())]
    return torch.accelerator.current_device_index(), streams


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_the_consumer_may_change_its_stream_between_steps(device: torch.device, weather: int, prefetch: int) -> None:
    streams = [torch.accelerator.current_stream(device), torch.Stream(device), torch.Stream(device)]
    witness = Witness()
    with distributed([device], [batch_of(step) for step in range(STEPS)], prefetch) as dataset:
        batches = iter(dataset)
        for step in range(STEPS):
            torch.accelerator.set_stream(streams[(step * step + weather) % 3])
            batch = next(batches)
            witness.look(batch, batch_of(step))
            del batch
            scratch(device)
    assert witness.wrong() == 0


def test_the_consumer_may_read_on_a_side_stream_of_its_own(device: torch.device) -> None:
    """By torch's rule: the side stream waits for the current one, and the batch is recorded as used there."""
    here, aside = torch.accelerator.current_stream(device), torch.Stream(device)
    witness = Witness()
    with distributed([device], [batch_of(step) for step in range(STEPS)]) as dataset:
        for step, batch in enumerate(dataset):
            aside.wait_event(here.record_event())
            torch.accelerator.set_stream(aside)
            witness.look(batch, batch_of(step))
            torch.accelerator.set_stream(here)
            batch["large"].record_stream(aside)
            here.wait_event(aside.record_event())
            del batch
            scratch(device)
    assert witness.wrong() == 0


def test_another_thread_may_take_over_the_loop(device: torch.device) -> None:
    witness = Witness()
    with distributed([device], [batch_of(step) for step in range(STEPS)]) as dataset:
        batches = iter(dataset)
        for step in range(4):
            witness.look(next(batches), batch_of(step))

        def go_on() -> None:
            torch.accelerator.set_stream(torch.Stream(device))
            for step in range(4, STEPS):
                witness.look(next(batches), batch_of(step))
                scratch(device)

        thread = threading.Thread(target=go_on)
        thread.start()
        thread.join()
    assert (len(witness), witness.wrong()) == (STEPS * LEAVES, 0)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_step_leaves_the_threads_device_and_streams_as_they_were(device: torch.device, prefetch: int) -> None:
    torch.accelerator.set_stream(torch.Stream(device))
    dataset = distributed([device], [batch_of(step) for step in range(4)], prefetch)
    before = current()
    for _ in dataset:
        assert current() == before
    dataset.close()
    assert current() == before


@pytest.mark.pair
@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_step_of_another_device_leaves_the_threads_device_and_streams_as_they_were(
    pair: tuple[torch.device, torch.device], on: int, prefetch: int
) -> None:
    dataset = distributed([pair[1 - on]], [batch_of(step) for step in range(6)], prefetch)
    for device in (pair[1 - on], pair[on]):
        torch.accelerator.set_stream(torch.Stream(device))
    before = current()
    assert before[0] == on
    for step, batch in enumerate(dataset):
        assert current() == before
        check_alike(batch, batch_of(step), pair[1 - on])
    dataset.close()
    assert current() == before


@pytest.mark.pair
@pytest.mark.parametrize("prefetch", [0, 2, None])
def test_two_devices_in_one_process(pair: tuple[torch.device, torch.device], prefetch: int | None) -> None:
    strategy = tdi.Strategy(list(pair))
    witness = Witness()
    host = [batch_of(step) for step in range(STEPS)]
    with strategy.distribute_dataset(host, tdi.InputOptions(prefetch=prefetch)) as dataset:
        for step, batch in enumerate(dataset):
            for replica, device in enumerate(pair):
                part = strategy.local_results(batch["large"])[replica]
                assert part.device == device
                witness.look(part, host[step]["large"].chunk(2)[replica])
                scratch(device)
    assert witness.wrong() == 0


@pytest.mark.pair
def test_run_reduce_and_gather_over_two_devices(pair: tuple[torch.device, torch.device]) -> None:
    strategy = tdi.Strategy(list(pair))
    rows = [torch.arange(12.0).reshape(6, 2) + 100 * step for step in range(5)]
    with strategy.distribute_dataset(rows) as dataset:
        for step, batch in enumerate(dataset):
            before = current()
            doubled = strategy.run(lambda part: part * 2, args=(batch,))
            assert [each.device for each in strategy.local_results(doubled)] == list(pair)
            total = strategy.reduce("sum", doubled, axis=0)
            assert torch.equal(total.cpu(), (rows[step] * 2).sum(0))
            gathered = strategy.gather(doubled, axis=0)
            assert torch.equal(gathered.cpu(), rows[step] * 2)
            assert current() == before
            scratch(pair[0])


@pytest.mark.pair
def test_replicas_of_two_devices_meet(pair: tuple[torch.device, torch.device]) -> None:
    strategy = tdi.Strategy(list(pair))

    def step(part: torch.Tensor) -> Any:
        context = tdi.get_replica_context()
        assert context is not None
        assert torch.accelerator.current_device_index() == part.device.index
        return context.all_reduce("sum", part.sum()), context.all_gather(part, axis=0)

    rows = torch.arange(5.0)
    with strategy.distribute_dataset([rows] * 3) as dataset:
        for batch in dataset:
            sums, gathered = strategy.run(step, args=(batch,))
            for device, total, whole in zip(
                pair, strategy.local_results(sums), strategy.local_results(gathered), strict=True
            ):
                assert (total.device, whole.device) == (device, device)
                assert total.item() == 10
                assert whole.tolist() == rows.tolist()


@pytest.mark.pair
def test_a_mirrored_module_finds_the_gradients_of_one_process(pair: tuple[torch.device, torch.device]) -> None:
    strategy = tdi.Strategy(list(pair))
    module = torch.nn.Linear(3, 1)
    alone = copy.deepcopy(module)
    mirrored = strategy.mirror(module)
    inputs = torch.arange(15.0).reshape(5, 3) / 15

    def train(model: torch.nn.Module, part: torch.Tensor, step: tdi.Step) -> torch.Tensor:
        loss = tdi.average_loss(model(part).squeeze(1), step)
        loss.backward()  # type: ignore[no-untyped-call]
        assert model.get_parameter("weight").grad is not None
        return loss.detach()

    with strategy.distribute_dataset([inputs]) as dataset:
        (batch,) = dataset
        total = strategy.reduce("sum", strategy.run(train, args=(mirrored, batch, dataset.step)))
    loss = alone(inputs).mean()
    loss.backward()
    torch.testing.assert_close(total.cpu(), loss.detach())
    grads = [model.weight.grad.cpu() for model in strategy.local_results(mirrored)]
    torch.testing.assert_close(sum(grads), alone.weight.grad)


@pytest.mark.pair
def test_run_works_on_the_callers_streams(pair: tuple[torch.device, torch.device]) -> None:
    """Each replica has a thread of its own, but the batch belongs to the streams that were current at ``next``."""
    strategy = tdi.Strategy(list(pair))
    witness = Witness()
    host = [batch_of(step) for step in range(STEPS)]
    for device in reversed(pair):
        torch.accelerator.set_stream(torch.Stream(device))
    before = current()

    def read(part: torch.Tensor) -> torch.Tensor:
        assert current() == (part.device.index, before[1])
        return part.clone()

    with strategy.distribute_dataset(host) as dataset:
        for step, batch in enumerate(dataset):
            found = strategy.run(read, args=(batch["large"],))
            del batch
            for part, want in zip(strategy.local_results(found), host[step]["large"].chunk(2), strict=True):
                scratch(part.device)
                witness.look(part, want)
            assert current() == before
    assert witness.wrong() == 0


@final
class Made(Dataset[dict[str, torch.Tensor]]):
    """Batches that are made on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        made = torch.empty(4, 500, dtype=torch.int64, device=self.device)
        return {"made": made.fill_(step), "host": torch.full((4,), step)}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self[step] for step in range(STEPS))


def as_rows(made: Made) -> Any:
    return DataLoader(made, batch_size=None)


def as_iterable(made: Made) -> Any:
    return iter(made)


@pytest.mark.parametrize(
    ("kind", "prefetch"), [(as_iterable, 0), (as_iterable, 1), (as_iterable, 4), (as_rows, 0), (as_rows, 4)]
)
@pytest.mark.parametrize("changing", [False, True])
def test_what_the_source_makes_on_the_device_is_read_after_it_was_made(
    device: torch.device, kind: Callable[[Made], Any], prefetch: int, changing: bool
) -> None:
    """As if it was made at the ``next`` that gives it, though it is made ahead of time."""
    streams = [torch.Stream(device), torch.Stream(device)]
    torch.accelerator.set_stream(streams[0])
    witness = Witness()
    with distributed([device], kind(Made(device)), prefetch) as dataset:
        arriving = iter(dataset)
        for step in range(STEPS):
            torch.accelerator.set_stream(streams[step // 3 % 2 if changing else 0])
            batch = next(arriving)
            expected = {"made": torch.full((4, 500), step), "host": torch.full((4,), step)}
            witness.look(batch, expected)
            del batch
            scratch(device)
    assert witness.wrong() == 0


@pytest.mark.pair
def test_what_is_read_in_the_background_is_read_on_the_consumers_streams(
    pair: tuple[torch.device, torch.device],
) -> None:
    for device in pair:
        torch.accelerator.set_stream(torch.Stream(device))
    streams = current()[1]
    transfer = ToDevice([make_copier(device) for device in pair])
    found = []

    def background() -> None:
        transfer.enter_thread()
        found.append(current())

    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    transfer.close()
    assert found == [(0, streams)]


MANY_STEPS = 24


def distributed_values(device: torch.device, data: Any, prefetch: int | None) -> tdi.DistributedDataset:
    return tdi.Strategy([device]).distribute_dataset(data, tdi.InputOptions(prefetch=prefetch))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 8, None])
def test_batches_that_are_kept_stay_right_while_others_come_and_go(
    device: torch.device, weather: int, prefetch: int | None
) -> None:
    rng = random.Random(weather)
    witness = Witness()
    held: list[tuple[int, Any]] = []
    with distributed_values(device, [batch_of(step) for step in range(MANY_STEPS)], prefetch) as dataset:
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
    host = [batch_of(step) for step in range(MANY_STEPS)]
    witness = Witness()
    with distributed_values(device, host, 2) as dataset:
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
    host = [batch_of(step) for step in range(MANY_STEPS)]
    witness = Witness()
    with distributed_values(device, host, prefetch) as dataset:
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
    host = [batch_of(step) for step in range(MANY_STEPS)]
    dataset = distributed_values(device, host, 8)
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
    with distributed_values(device, batches(), 2) as dataset:
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
        for step in range(MANY_STEPS)
    ]
    with distributed_values(device, host, 2) as dataset:
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
    numbers = list(range(MANY_STEPS))
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
    data: Any = range(MANY_STEPS)
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
    host = [{"x": np.full((4, 2), step), "names": np.array([*"abcd"])} for step in range(MANY_STEPS)]
    for to in (torch.device("cpu"), device):
        with distributed_values(to, host, None) as dataset:
            for step, batch in enumerate(dataset):
                assert (batch["x"].device, batch["x"].tolist()) == (to, [[step] * 2] * 4)
                assert batch["names"] == [*"abcd"]


def test_memory_does_not_grow(device: torch.device) -> None:
    host = [batch_of(step) for step in range(8)]
    with distributed_values(device, host * 30, 2) as dataset:
        reserved = []
        for step, batch in enumerate(dataset):
            del batch
            scratch(device)
            if step % 80 == 79:
                reserved.append(torch.accelerator.memory_reserved(device))
    assert reserved[1:] == reserved[:-1]
