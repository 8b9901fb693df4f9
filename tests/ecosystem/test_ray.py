"""Ray's data is refused with the line to write; Ray Train's workers, as in the example. With the real package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.support.interpreters import Interpreters, printed
from torchdistinput.testing import run_ranks

ray_data = pytest.importorskip("ray.data")


def dataset() -> Any:
    """One that was never made: a real one starts Ray."""
    data: Any = object.__new__(ray_data.Dataset)
    data._current_executor = None  # for its __del__
    return data


def shard() -> Any:
    class Shard(ray_data.DataIterator):  # type: ignore[misc, name-defined]
        """As the private classes of Ray's that ``streaming_split`` gives."""

    Shard.__abstractmethods__ = frozenset()
    return object.__new__(Shard)


WAYS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda data: tdi.Strategy().distribute_dataset(data, global_batch_size=4),
    "a function": lambda data: tdi.Strategy().distribute_dataset(lambda: data, global_batch_size=4),
    "in torch's loader": lambda data: tdi.Strategy().distribute_dataset(DataLoader(data, batch_size=4)),
    "in the drop-in": lambda data: tdi.DataLoader(data, batch_size=4),
    "shuffled in the drop-in": lambda data: tdi.DataLoader(data, batch_size=4, shuffle=True),
    "of a dataset function": lambda data: tdi.Strategy().distribute_datasets_from_function(lambda _: data),
}


@pytest.mark.parametrize("way", WAYS)
def test_rays_data_is_refused_at_once_with_the_line_to_write(way: str) -> None:
    for data in (dataset(), shard()):
        with pytest.raises(tdi.InputError, match=r"of ray\.data as ") as caught:
            WAYS[way](data)
        message = str(caught.value)
        assert "shard.iter_torch_batches(batch_size=context.get_per_replica_batch_size(G))" in message
        assert ("streaming_split" in message) == (type(data) is ray_data.Dataset)


def refused_when_prepared() -> str:
    """One of two ranks: what is said of the loader that Ray Train makes of a drop-in one."""
    train: Any = pytest.importorskip("ray.train.torch")
    numbers = {"get_world_size": 2, "get_world_rank": dist.get_rank(), "get_local_rank": dist.get_rank()}
    context = mock.Mock(**{f"{name}.return_value": number for name, number in numbers.items()})
    with mock.patch("ray.train.get_context", return_value=context):  # Ray's own needs a running trainer
        loader: Any = tdi.DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
        prepared = train.prepare_data_loader(loader, move_to_device=False)
    with pytest.raises(tdi.InputError) as caught:
        list(prepared)
    return str(caught.value)


def test_the_loader_that_ray_trains_prepare_data_loader_makes_is_refused() -> None:
    for told in run_ranks(2, refused_when_prepared, timeout_seconds=120):
        assert "with Ray Train leave prepare_data_loader out" in told


def test_ray_trains_workers_read_each_row_once_and_make_the_same_steps(
    all_cells: bool, interpreters: Interpreters
) -> None:
    if not all_cells:
        pytest.skip("Ray takes half a minute to start: run with --all-cells")
    output = printed(interpreters.run(["examples/ray_train.py"]))
    for epoch in (0, 1):
        assert f"epoch {epoch}: " in output
    assert output.count("103 samples, each row once: True") == 2, output
