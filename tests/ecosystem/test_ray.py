"""Ray Train's loaders are refused with the line to write; its workers, as in the example. With the real package."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import torchdistinput as tdi
from tests.support.interpreters import Interpreters, printed
from torchdistinput.testing import run_ranks

pytest.importorskip("ray.data")


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
