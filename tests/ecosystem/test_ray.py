"""Ray's data is refused with the line to write; Ray Train's workers, as in the example. With the real package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.interpreters import Interpreters, printed

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


def test_ray_trains_workers_read_each_row_once_and_make_the_same_steps(
    all_cells: bool, interpreters: Interpreters
) -> None:
    if not all_cells:
        pytest.skip("Ray takes half a minute to start: run with --all-cells")
    output = printed(interpreters.run(["examples/ray_train.py"]))
    for epoch in (0, 1):
        assert f"epoch {epoch}: " in output
    assert output.count("103 samples, each row once: True") == 2, output
