"""The drop-in, loader workers, pinned memory, generators, resumes, and several ranks, with batches on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchdistinput as tdi
from tests.accelerator import simulated
from tests.accelerator.consumers import Witness, batch_of, check_alike, scratch
from torchdistinput.testing import run_ranks

ROWS = 40
WIDE = 20_000  # 160 KB a sample: travels alone, and in shared memory from a loader worker


@final
class Samples(Dataset[dict[str, Any]]):
    """A large leaf, a small one, and a string."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"wide": torch.full((WIDE,), index), "label": index, "name": f"sample {index}"}


def loop(loader: Any, device: torch.device) -> int:
    """Reads all of it beside torch's own batches of the same samples; keeps some."""
    witness, held, steps = Witness(), [], 0
    for batch, expected in zip(loader, DataLoader(Samples(), 4), strict=True):
        check_alike(batch["label"], expected["label"], device)
        witness.look(batch, expected)
        held.append((batch, expected))
        del batch
        scratch(device)
        if len(held) > 3:
            kept, wanted = held.pop(0)
            check_alike(kept, wanted, device)
            del kept
        steps += 1
    assert witness.wrong() == 0
    return steps


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_the_drop_in_on_a_device(
    device: torch.device, num_workers: int, pin_memory: bool, prefetch: int | None
) -> None:
    loader = tdi.DataLoader(
        Samples(),
        4,
        num_workers=num_workers,
        pin_memory=pin_memory,
        device=device,
        options=tdi.InputOptions(prefetch=prefetch),
    )
    with contextlib.closing(loader):
        for _ in range(2):
            assert loop(loader, device) == ROWS // 4


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader_distributed_to_a_device(device: torch.device, num_workers: int, pin_memory: bool) -> None:
    loader = DataLoader(Samples(), 4, num_workers=num_workers, pin_memory=pin_memory)
    with tdi.Strategy([device]).distribute_dataset(loader) as dataset:
        assert loop(dataset, device) == ROWS // 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_drop_in_pins_where_it_is_asked_to(device: torch.device, num_workers: int) -> None:
    """Without a device: batches stay on the host, pinned for this accelerator."""
    del device
    loader = tdi.DataLoader(Samples(), 4, num_workers=num_workers, pin_memory=True)
    with contextlib.closing(loader):
        for batch in loader:
            assert batch["wide"].is_pinned()
            assert batch["label"].is_pinned()


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_data_in_memory(device: torch.device, where: str, prefetch: int) -> None:
    """Tensors on the host, and tensors that are on the device already."""
    rows = torch.arange(ROWS * 50).reshape(ROWS, 50)
    data = TensorDataset(rows.to(device) if where == "device" else rows)
    torch.accelerator.set_stream(torch.Stream(device))
    witness = Witness()
    with tdi.Strategy([device]).distribute_dataset(DataLoader(data, 6), tdi.InputOptions(prefetch=prefetch)) as dataset:
        for step, (batch,) in enumerate(dataset):
            witness.look(batch, rows[6 * step : 6 * step + 6])
            del batch
            scratch(device)
    assert (len(witness), witness.wrong()) == (7, 0)


def test_a_state_taken_on_a_device_is_resumed_there_and_on_the_host(device: torch.device) -> None:
    def labels(batches: Any) -> list[list[int]]:
        return [batch["label"].tolist() for batch in batches]

    def make(where: torch.device | None) -> tdi.DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        ahead = tdi.InputOptions(prefetch=3)
        return tdi.DataLoader(Samples(), 4, shuffle=True, generator=generator, device=where, options=ahead)

    whole = labels(make(None))
    first = make(device)
    batches = iter(first)
    begun = [next(batches)["label"].tolist() for _ in range(4)]
    state = first.state_dict()
    first.close()
    assert begun == whole[:4]
    for where in (device, None):
        resumed = make(where)
        resumed.load_state_dict(state)
        assert labels(resumed) == whole[4:]
        resumed.close()


@pytest.fixture
def default_device(device: torch.device) -> Iterator[torch.device]:
    torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_with_the_device_as_default_the_drop_in_is_torchs_loader(
    default_device: torch.device, num_workers: int, shuffle: bool
) -> None:
    """The same batches, on the same devices, and the generators left in the same states."""

    def epochs(make: Any) -> Any:
        torch.manual_seed(3)
        generator = torch.Generator(default_device).manual_seed(4) if shuffle else None
        rows = torch.arange(ROWS, device="cpu")
        loader = make(TensorDataset(rows, rows * 2), 6, shuffle=shuffle, generator=generator, num_workers=num_workers)
        found = [[(part.device.type, part.tolist()) for part in batch] for _ in range(2) for batch in loader]
        states = [torch.get_rng_state().tolist(), torch.get_device_module(default_device).get_rng_state().tolist()]
        return found, states, None if generator is None else generator.get_state().tolist()

    assert epochs(tdi.DataLoader) == epochs(DataLoader)


def test_with_the_device_as_default_batches_go_there(default_device: torch.device) -> None:
    with contextlib.closing(tdi.DataLoader(Samples(), 4, device=default_device)) as loader:
        assert sum(batch["label"].sum().item() for batch in loader) == ROWS * (ROWS - 1) / 2


@final
class Numbers(Dataset[torch.Tensor]):
    """Fails at one sample; makes a batch of no samples, too."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        if 2 in indices:
            raise ValueError("no 2")
        return torch.tensor(indices, dtype=torch.int64)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_an_empty_batch_is_passed_over_on_its_way_to_a_device(
    device: torch.device, num_workers: int, prefetch: int | None
) -> None:
    batches = [[], [0, 1], [], [4, 5], []]
    settings: Any = {"num_workers": num_workers, "options": tdi.InputOptions(prefetch=prefetch)}
    with tdi.DataLoader(Numbers(), batch_sampler=batches, collate_fn=same, device=device, **settings) as loader:
        assert [(batch.tolist(), loader.step.index) for batch in loader] == [([0, 1], 0), ([4, 5], 1)]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_an_error_ends_the_epoch_on_a_device(device: torch.device, num_workers: int, prefetch: int | None) -> None:
    settings: Any = {"num_workers": num_workers, "options": tdi.InputOptions(prefetch=prefetch)}
    with tdi.DataLoader(Numbers(), 2, collate_fn=same, device=device, **settings) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        with pytest.raises(ValueError, match="no 2"):
            next(iterator)
        with pytest.raises(tdi.InputError, match="this epoch ended with the error above, after step 1"):
            next(iterator)
        assert next(iterator, "ended") == "ended"


def same(batch: Any) -> Any:
    return batch


STEPS = 6


def on_the_device_of_its_rank(seed: int) -> Any:
    simulated.register()
    simulated.configure(seed, 100)
    strategy = tdi.Strategy()
    (device,) = strategy.devices
    witness = Witness()
    host = [batch_of(step) for step in range(STEPS)]
    with strategy.distribute_dataset(host) as dataset:
        for step, batch in enumerate(dataset):
            rank = dist.get_rank()
            witness.look(batch["large"], host[step]["large"].chunk(2)[rank])
            del batch
            scratch(device)
    return str(device), torch.accelerator.current_device_index(), witness.wrong()


def values_of_all_ranks(seed: int) -> dict[str, Any]:
    """The collective calls, on a device for which no process group has a backend."""
    simulated.register()
    simulated.configure(seed, 100)
    strategy = tdi.Strategy()
    device, rank = strategy.device, dist.get_rank()
    torch.manual_seed(rank)
    layer = torch.nn.Linear(3, 2)
    first = layer.weight.detach().clone()
    mirrored = strategy.mirror(layer)
    rows = torch.arange(float(2 + rank), device=device) + 10 * rank

    def step(own: Any) -> Any:
        context = tdi.get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", own.sum())

    index, texts = torch.arange(2 + rank, device=device) * 2 + (1 - rank), [f"{rank}"] * (2 + rank)
    found = {
        "sum": strategy.reduce("SUM", rows[:2]),
        "mean": strategy.reduce("MEAN", rows, 0),
        "ints": strategy.reduce("SUM", torch.tensor([2**14], dtype=torch.int16, device=device)),
        "gathered": strategy.gather(rows.reshape(-1, 1), 0),
        "in run": strategy.run(step, (rows,)),
        "ordered": strategy.gather_ordered(index, {"x": rows, "from": texts}),
        "weight": mirrored.weight.detach(),
        "first": first,
    }
    return {name: _on_the_host(value, device) for name, value in found.items()}


def _on_the_host(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: each if isinstance(each, list) else _on_the_host(each, device) for key, each in value.items()}
    assert value.device == device or value.device.type == "cpu"
    return str(value.device), value.cpu().tolist()


@pytest.mark.simulated
@pytest.mark.parametrize("init_group", [True, False])
def test_without_a_backend_for_the_device_values_travel_over_the_cpu(weather: int, init_group: bool) -> None:
    ranks = run_ranks(2, values_of_all_ranks, weather, init_group=init_group)
    for rank, found in enumerate(ranks):
        own = f"simulated:{rank}"
        assert found["sum"] == (own, [10.0, 12.0])
        assert found["mean"] == (own, pytest.approx((0 + 1 + 10 + 11 + 12) / 5))
        assert found["ints"] == (own, [-(2**15)])
        assert found["gathered"] == (own, [[0.0], [1.0], [10.0], [11.0], [12.0]])
        assert found["in run"] == (own, 34.0)
        assert found["ordered"]["x"] == (own, [10.0, 0.0, 11.0, 1.0, 12.0])
        assert found["ordered"]["from"] == ["1", "0", "1", "0", "1"]
        assert found["weight"] == (own, ranks[0]["first"][1])
    assert ranks[0]["first"] != ranks[1]["first"]


def sum_over_devices_of_two_kinds(seed: int) -> Any:
    simulated.register()
    simulated.configure(seed, 100)
    strategy = tdi.Strategy(["cpu" if dist.get_rank() == 0 else "simulated"])
    module = strategy.mirror(torch.nn.Linear(1, 1))
    total = strategy.reduce("SUM", torch.ones(2, device=strategy.device))
    return str(total.device), total.tolist(), module.weight.item()


@pytest.mark.simulated
def test_ranks_may_have_devices_of_two_kinds(weather: int) -> None:
    (device, total, weight), (other_device, *other) = run_ranks(2, sum_over_devices_of_two_kinds, weather)
    assert (device, other_device) == ("cpu", "simulated:1")
    assert total == [2.0, 2.0]
    assert other == [total, weight]


@pytest.mark.simulated
def test_each_rank_takes_the_device_of_its_local_rank(weather: int) -> None:
    found = run_ranks(2, on_the_device_of_its_rank, weather)
    assert found == [("simulated:0", 0, 0), ("simulated:1", 1, 0)]
