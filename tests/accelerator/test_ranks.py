"""Several ranks, each on a device of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchdistinput as tdi
from tests.accelerator import simulated
from tests.accelerator.consumers import Witness, batch_of, scratch
from torchdistinput.testing import run_ranks

pytestmark = pytest.mark.simulated

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


def test_ranks_may_have_devices_of_two_kinds(weather: int) -> None:
    (device, total, weight), (other_device, *other) = run_ranks(2, sum_over_devices_of_two_kinds, weather)
    assert (device, other_device) == ("cpu", "simulated:1")
    assert total == [2.0, 2.0]
    assert other == [total, weight]


def test_each_rank_takes_the_device_of_its_local_rank(weather: int) -> None:
    found = run_ranks(2, on_the_device_of_its_rank, weather)
    assert found == [("simulated:0", 0, 0), ("simulated:1", 1, 0)]
