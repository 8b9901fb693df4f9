"""An accelerator as torch's default device, on a machine without one.

What is made without saying where is on ``meta``, so that whoever reads it, or mixes it with what is on the CPU, fails.
As on an accelerator, seeds can be drawn there and read, and a generator of another device is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._device import DeviceContext
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.data import Mapped
from torchdistinput.sources import random_state
from torchdistinput.testing import run_ranks

__all__ = ["Elsewhere", "lend_generators"]

_DRAWS: Final = (torch.randperm, torch.randint)


@final
class _OnDevice(torch.Tensor):
    """Numbers that are read as an accelerator's are."""

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert meta device type tensor to numpy. Use Tensor.cpu()")
        return self.as_subclass(torch.Tensor).numpy()


@final
class Elsewhere(DeviceContext):  # `torch.get_default_device` knows no other kind
    """``with torch.device(...)`` of such a device.

    Args:
      generators: those that are of this device.
    """

    def __init__(self, *generators: torch.Generator) -> None:
        super().__init__("meta")
        self._generators = generators

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        generator = given.get("generator")
        if func is torch.empty and tuple(args) == ((),):  # a seed
            return func(*args, **given)
        if func in _DRAWS and generator is not None and given.get("device") is None:
            if all(generator is not own for own in self._generators):
                raise RuntimeError("Expected a 'meta' device type for generator but found 'cpu'")
            return func(*args, **given).as_subclass(_OnDevice)
        if func is torch.stack and args[0][0].is_meta:  # by itself it would import all of torch's compiler
            return torch.empty((len(args[0]), *args[0][0].shape), dtype=args[0][0].dtype, device="meta")
        return super().__torch_function__(func, types, args, given)  # type: ignore[no-untyped-call] # torch's


def lend_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that are drawn there come from the CPU's default state, as ``meta`` has no generator."""
    monkeypatch.setattr(random_state, "default_state", lambda _device: torch.get_rng_state())
    monkeypatch.setattr(random_state, "new_generator", lambda _device: torch.Generator())


TENSORS = TensorDataset(torch.arange(10.0), torch.arange(10))
ARRAY = np.arange(20.0, dtype=np.float32).reshape(10, 2)
MIXED = [(np.full(2, number, dtype=np.float32), number, float(number)) for number in range(10)]
LARGE = TensorDataset(torch.arange(10)[:, None].expand(10, 40_000).contiguous())


def unreadable(index: int) -> torch.Tensor:
    if index == 5:
        raise ValueError("unreadable")
    return torch.full((2,), index, device="cpu")


def shown(batch: Any) -> Any:
    """What can be compared: the device, the dtype and the values of each tensor, where there are any to read."""
    if isinstance(batch, torch.Tensor):
        values = batch.tolist() if batch.device.type == "cpu" else list(batch.shape)
        return batch.device.type, batch.dtype, batch.is_inference(), values
    if isinstance(batch, dict):
        return {key: shown(value) for key, value in batch.items()}
    return [shown(each) for each in batch] if isinstance(batch, list | tuple) else batch


def all_of(batches: Iterable[Any]) -> list[Any]:
    return [shown(batch) for batch in batches]


def outcome_of(batches: Iterable[Any]) -> Any:
    """The batches; or why torch makes none: that of 2.8 has no room elsewhere for what loader workers collate."""
    try:
        return all_of(batches)
    except RuntimeError as error:
        return str(error).rpartition("RuntimeError: ")[2].strip()


def seeded(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def _generators_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    lend_generators(monkeypatch)


@pytest.fixture(scope="module")
def npy_files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("npy")
    for number in range(2):
        np.save(folder / f"{number}.npy", np.arange(12.0).reshape(6, 2) + number)
    return f"{folder}/*.npy"


@pytest.mark.parametrize("replacement", [False, True])
def test_a_generator_of_the_default_device_draws_what_torch_draws(replacement: bool) -> None:
    def batches(make: Callable[..., Iterable[Any]]) -> list[Any]:
        generator = seeded()
        sampler = torch.utils.data.RandomSampler(TENSORS, replacement, 47 if replacement else 13, generator)
        with Elsewhere(generator):
            loader = make(TENSORS, 4, sampler=sampler)
            return [all_of(loader), all_of(loader), generator.get_state().tolist()]

    assert batches(tdi.DataLoader) == batches(DataLoader)


def views(samples: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors that are not all of their memory, large ones."""
    whole = torch.stack([sample for (sample,) in samples])
    return {"part": whole[:, 39_000:], "short": whole.to(torch.bfloat16)[:, 39_990:]}


def distributed(strategy: tdi.Strategy, npy_files: str) -> Iterator[list[Any]]:
    """The batches of one dataset after the other, of each kind, and what else there is to ask."""
    table = {"a": torch.arange(10.0, device="cpu"), "b": torch.arange(10, device="cpu")}
    padded = tdi.InputOptions(partial_batch="pad", with_index=True)
    yield all_of(strategy.distribute_dataset(table, padded, global_batch_size=8))
    ready = [TENSORS[:4], TENSORS[4:9], TENSORS[9:]]
    yield all_of(strategy.distribute_dataset(ready, tdi.InputOptions(with_index=True)))
    yield all_of(strategy.distribute_datasets_from_function(lambda _context: DataLoader(TENSORS, 4, num_workers=1)))
    files = tdi.FileDataset(npy_files, tdi.readers.npy_rows, map_fn=torch.from_numpy)
    yield all_of(strategy.distribute_dataset(files, tdi.InputOptions(with_index=True), global_batch_size=8))
    skipping = tdi.InputOptions(on_error="skip", with_index=True, prefetch=0)
    yield all_of(strategy.distribute_dataset(DataLoader(Mapped(10, unreadable), 4, num_workers=2), skipping))
    here = tdi.InputOptions(prefetch=0)  # the background thread has no default device
    yield all_of(strategy.distribute_dataset(DataLoader(LARGE, 4, num_workers=1, collate_fn=views), here))
    dataset = strategy.distribute_dataset(DataLoader(LARGE, 4, sampler=tdi.ShuffleSampler(10, 3), num_workers=1))
    iterator = iter(dataset)
    yield [shown(next(iterator)), str(iterator.element_spec)]
    state = dataset.state_dict()
    rest = all_of(iterator)
    dataset.load_state_dict(state)
    assert all_of(dataset) == rest
    yield rest
    dataset.close()
    mine = 3 * strategy.input_pipeline_id
    yield [
        strategy.gather_ordered(np.array([mine + 2, mine, mine + 1]), ["a", "b", "c"]),
        strategy.gather_ordered(np.zeros(0, dtype=np.int64), []),
        strategy.reduce("sum", 3.0),
        strategy.reduce("mean", np.arange(4) + mine, axis=0).tolist(),
        strategy.gather(torch.ones(mine, device="cpu"), 0).tolist(),
    ]


def at_a_rank(npy_files: str) -> None:
    lend_generators(pytest.MonkeyPatch())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    expected = list(distributed(tdi.Strategy(devices=["cpu"]), npy_files))
    with Elsewhere():
        assert list(distributed(tdi.Strategy(devices=["cpu"], mesh=mesh), npy_files)) == expected


def test_nothing_of_the_library_follows_the_default_device_at_two_ranks(npy_files: str) -> None:
    run_ranks(2, at_a_rank, npy_files)


def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def deterministic() -> Iterator[None]:
    torch._C._set_deterministic_algorithms(True)  # the public one would import all of torch's compiler
    yield
    torch._C._set_deterministic_algorithms(False)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "default device": Elsewhere,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "float64": contextlib.contextmanager(float64),
    "deterministic": contextlib.contextmanager(deterministic),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["tensors", "array", "mixed", "large", "files"])
def test_in_and_out_of_modes_the_batches_are_torchs(kind: str, num_workers: int, mode: str, npy_files: str) -> None:
    """Made inside, used inside and outside of it, and inside again."""

    def epochs(make: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        with MODES[mode]():
            files = tdi.FileDataset(npy_files, tdi.readers.npy_rows)
            dataset: Any = {"tensors": TENSORS, "array": ARRAY, "mixed": MIXED, "large": LARGE, "files": files}[kind]
            shuffles = kind != "files" and mode != "default device"  # there torch itself needs another generator
            order = {"shuffle": True, "generator": seeded()} if shuffles else {}
            loader = make(dataset, 4, num_workers=num_workers, persistent_workers=num_workers > 0, **order)
            found = [outcome_of(loader)]
        files.set_epoch(3)
        found.append(outcome_of(loader))
        with MODES[mode]():
            return [*found, outcome_of(loader), torch.get_rng_state().tolist()]

    assert epochs(tdi.DataLoader) == epochs(DataLoader)
