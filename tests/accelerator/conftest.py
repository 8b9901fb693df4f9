"""Run by ``scripts/test_accelerator`` only: on the accelerator that torch finds, else on the simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.accelerator import simulated

PAUSE_MICROSECONDS = 100
SEEDS = (0, 1, 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    del collection_path
    return None if config.getoption("--accelerator") else True


def is_real() -> bool:
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type != simulated.NAME


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test runs under several weathers, where there is one to be had."""
    metafunc.parametrize("weather", [0] if is_real() else SEEDS, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A real accelerator cannot be held, and may be the only one of its machine."""
    if not is_real():
        return
    lacking = {"simulated"} | ({"pair"} if torch.accelerator.device_count() < 2 else set())
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in lacking)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def weather(request: pytest.FixtureRequest) -> Iterator[int]:
    """The seed; streams run at random paces, and pinned memory is handed on without mercy."""
    seed: int = request.param
    if not is_real():
        simulated.register()
        simulated.configure(seed, PAUSE_MICROSECONDS)
    before = [torch.accelerator.current_stream(index) for index in range(torch.accelerator.device_count())]
    yield seed
    for stream in reversed(before):
        torch.accelerator.set_stream(stream)
        torch.accelerator.synchronize(stream.device)


@pytest.fixture
def device(weather: int) -> torch.device:
    """The first one."""
    del weather
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


@pytest.fixture
def pair(device: torch.device) -> tuple[torch.device, torch.device]:
    """The first two; for tests with that mark."""
    return device, torch.device(device.type, 1)
