"""A batch that a collate function made is known by its schema, and a part without a sample is made of it."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.data import Mapped
from tests.support.structures import Pair
from torchdistinput.batches.collated import structure_of_collated
from torchdistinput.batches.schema import Structure
from torchdistinput.testing import RankFailed, run_ranks

CHANNELS = 3


def image(number: int) -> torch.Tensor:
    return torch.full((CHANNELS, 4, 4), float(number))


def sample(number: int) -> Any:
    """An image, a sequence of its own length, and a text."""
    return {"image": image(number), "steps": torch.arange(number % 3 + 1.0), "text": f"row {number}", "id": number}


def images(samples: list[Any]) -> Any:
    return [each["image"] for each in samples]


def time_first(samples: list[Any]) -> Any:
    return pad_sequence([each["steps"] for each in samples]), torch.tensor([len(each["steps"]) for each in samples])


def arrays(samples: list[Any]) -> Any:
    numbers = np.array([each["id"] for each in samples])
    return {"x": numbers, "time": numbers.astype("datetime64[s]"), "name": numbers.astype("U3"), "none": None}


def changing(samples: list[Any]) -> Any:
    """Takes its samples apart."""
    return torch.tensor([each.pop("id") for each in samples])


def drawing(samples: list[Any]) -> Any:
    noise = torch.rand(len(samples)) + torch.tensor(np.random.rand(len(samples)))
    return torch.tensor([each["id"] for each in samples]), noise + random.random()


EMPTY: dict[Callable[[list[Any]], Any], Any] = {
    images: [],
    time_first: (("float32", (1, 0)), ("int64", (0,))),
    arrays: {
        "x": ("numpy int64", (0,)),
        "time": ("numpy datetime64[s]", (0,)),
        "name": ("numpy <U3", (0,)),
        "none": None,
    },
    changing: ("int64", (0,)),
    drawing: (("int64", (0,)), ("float64", (0,))),
}
"""What the part of a replica without a sample is."""


def counted(samples: list[Any]) -> Any:
    return {"image": torch.stack(images(samples)), "ntokens": len(samples)}


def packed(samples: list[Any]) -> Any:
    return {"tokens": torch.cat([torch.arange(each["id"] % 2 + 2) for each in samples])}


def masked(samples: list[Any]) -> Any:
    return np.ma.masked_equal([each["id"] for each in samples], 1)


def weights(samples: list[Any]) -> Any:
    return torch.stack(images(samples)), torch.ones(CHANNELS)


def nested(samples: list[Any]) -> Any:
    return torch.nested.nested_tensor([each["steps"] for each in samples], layout=torch.jagged)


def picky(samples: list[Any]) -> Any:
    if len(samples) == 2 and samples[0]["id"] == samples[1]["id"]:
        raise ValueError("the same twice")
    return torch.stack(images(samples))


class Boxed:
    """A batch that nobody can look into."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples


UNKNOWN: dict[Callable[[list[Any]], Any], str] = {
    counted: r"type dict without a sample.*\['ntokens'\] is of type int",
    Boxed: "an element of type Boxed without a sample",
    packed: r"\['tokens'\] is of type Tensor, of shape",
    masked: "it is of type MaskedArray, a class or dtype",
    weights: r"\[1\] is of type Tensor, of shape \(3,\) for one sample and \(3,\) for two",
    nested: "it is of type NestedTensor, and nested|it is of type Tensor, and nested",
    picky: "its function failed when it was asked: ValueError: the same twice",
}
"""Batches of which no empty part can be made."""


def plain(value: Any) -> Any:
    """A batch as plain values that show dtypes and shapes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}", value.shape
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return (
        type(value)(map(plain, value))
        if type(value) in (list, tuple)
        else tuple(map(plain, value))
        if isinstance(value, tuple)
        else value
    )


def parts_of(collate: Any, samples: int, size: int) -> list[tuple[Any, ...]]:
    """The parts of two replicas at each step."""
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    dataset = strategy.distribute_dataset(DataLoader(Mapped(samples, sample), size, collate_fn=collate))
    return [strategy.local_results(element) for element in dataset]


@pytest.mark.parametrize("collate", EMPTY)
def test_the_part_without_a_sample_follows_from_the_collate_function_alone(collate: Any) -> None:
    for size in (2, 2 * CHANNELS):
        *_, (_, without) = parts_of(collate, 2 * size + 1, size)
        found = plain(without)
        if collate is time_first:
            found = (("float32", (1, *found[0][1][1:])), found[1])  # as long as its longest sample would be
        assert found == EMPTY[collate]


@pytest.mark.parametrize("collate", UNKNOWN)
def test_where_it_does_not_follow_the_first_step_says_so_and_names_the_leaf(collate: Any) -> None:
    with pytest.raises(tdi.BatchingError, match=f"(?s)step 0 of epoch 0.*({UNKNOWN[collate]}).*empty_fn="):
        parts_of(collate, 3, 2)


def given(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


def with_empty_fn() -> list[Any]:
    strategy = tdi.Strategy(devices=["cpu"])

    def empty() -> Any:
        return {"image": torch.zeros(0, CHANNELS, 4, 4), "ntokens": 0}

    options = tdi.InputOptions(empty_fn=empty)
    loader: Any = DataLoader(Mapped(3, sample), 2, collate_fn=counted)
    ready = [{"image": torch.zeros(n, CHANNELS, 4, 4), "ntokens": n} for n in (2, 1)]
    return [
        given(tdi.DataLoader(Mapped(3, sample), 2, collate_fn=counted, options=options)),
        given(strategy.distribute_dataset(loader, options)),
        given(strategy.distribute_dataset(ready, options)),
        given(strategy.distribute_dataset(ready)),
    ]


def test_an_empty_fn_makes_it_and_a_ready_batch_is_cut_to_no_row_and_keeps_its_own_numbers() -> None:
    first, second = run_ranks(2, with_empty_fn)
    for one, other in zip(first[:3], second[:3], strict=True):
        assert [step["image"][1][0] for step in one] == [1, 1]
        assert [step["image"][1][0] for step in other] == [1, 0]
        assert other[1]["ntokens"] == 0
    assert [(step["image"][1][0], step["ntokens"]) for step in second[3]] == [(1, 2), (0, 1)]


def ready(count: int, value: Any) -> list[Any]:
    return [{"x": torch.zeros(2, 3), "of_batch": value} for _ in range(count)]


def as_ready(line: str) -> Any:
    return ready(1, int(line))[0]


READY: dict[str, Callable[[tdi.Strategy, str, tdi.InputOptions], Any]] = {
    "function": lambda strategy, _, options: strategy.distribute_datasets_from_function(
        lambda context: ready(3 if context.input_pipeline_id == 0 else 1, 1), options
    ),
    "objects": lambda strategy, _, options: strategy.distribute_datasets_from_function(
        lambda context: ready(3 if context.input_pipeline_id == 0 else 1, Mapped(1, sample)), options
    ),
    "OFF": lambda strategy, _, options: strategy.distribute_dataset(
        lambda: ready(3 if strategy.rank == 0 else 1, "train"),
        dataclasses.replace(options, auto_shard_policy=tdi.AutoShardPolicy.OFF),
    ),
    "FILE": lambda strategy, folder, options: strategy.distribute_dataset(
        DataLoader(
            tdi.FileDataset([f"{folder}/{count}.txt" for count in (5, 9)], tdi.readers.text_lines, map_fn=as_ready),
            batch_size=None,
        ),
        dataclasses.replace(options, auto_shard_policy=tdi.AutoShardPolicy.FILE),
    ),
}
"""Ready batches with a value for the whole batch, of which one rank has fewer."""


def ready_elements(folder: str, devices: int, names: list[str]) -> dict[str, list[Any]]:
    """One rank: the error without an ``empty_fn``, and the value in its last part of the last step with one."""
    strategy = tdi.Strategy(devices=["cpu"] * devices)
    options = tdi.InputOptions(empty_fn=lambda: {"x": torch.zeros(0, 3), "of_batch": None})
    found: dict[str, list[Any]] = {}
    for name in names:
        try:
            told = str([*READY[name](strategy, folder, tdi.InputOptions())])
        except tdi.BatchingError as error:
            told = str(error)
        last = [*READY[name](strategy, folder, options)][-1]
        found[name] = [told, strategy.local_results(last)[-1]["of_batch"]]
    return found


def test_no_value_of_another_batch_is_in_the_part_of_a_rank_whose_ready_batches_have_ended(tmp_path: Path) -> None:
    for count in (5, 9):
        (tmp_path / f"{count}.txt").write_text("".join(f"{number}\n" for number in range(count)))
    kinds = {"function": "int", "objects": "Mapped", "OFF": "str", "FILE": "int"}
    longer, shorter = run_ranks(2, ready_elements, str(tmp_path), 1, [*kinds])
    replicas = ready_elements(str(tmp_path), 2, ["function"])  # of its three batches the last has one replica only
    for found in (longer, shorter, replicas):
        for name, (told, _) in found.items():
            assert f"['of_batch'] is of type {kinds[name]}, " in told
            assert "step 0 of epoch 0" in told
            assert "empty_fn=" in told
    assert [found["function"][1] for found in (longer, shorter, replicas)] == [1, None, None]
    assert {name: shorter[name][1] for name in ("objects", "OFF")} == {"objects": None, "OFF": None}
    assert (longer["FILE"][1], shorter["FILE"][1]) == (None, 8)


def alone(folder: str) -> list[Any]:
    """One rank that sees its own steps only, of which none is empty."""
    return [each["of_batch"] for each in READY["OFF"](tdi.Strategy(devices=["cpu"]), folder, UNCOORDINATED)]


UNCOORDINATED = tdi.InputOptions(coordination="off")


def test_a_rank_that_is_never_left_without_a_sample_needs_no_empty_part(tmp_path: Path) -> None:
    assert run_ranks(2, alone, str(tmp_path)) == [["train"] * 6, ["train"] * 2]


def test_asking_leaves_the_random_states_and_the_samples_as_they_are() -> None:
    def run(replicas: int) -> Any:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        strategy = tdi.Strategy(devices=["cpu"] * replicas)
        loader: Any = DataLoader(Mapped(4, sample), 1, collate_fn=drawing)
        parts = [strategy.local_results(element) for element in strategy.distribute_dataset(loader)]
        return [[each.tolist() for each in part[0]] for part in parts]

    assert run(1) == run(2)


def test_containers_that_differ_and_values_of_the_whole_batch_are_unknown() -> None:
    one, two = torch.zeros(1, 2), torch.zeros(2, 2)
    pairs: list[Any] = [
        ({"a": one}, {"b": two}),
        ((one,), (two, two)),
        (one, [two]),
        (one, two.double()),
        (torch.zeros(1, 1), torch.zeros(2, 2)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        ("a", "a"),
        (2.5, 2.5),
        ([], []),
        (copy, copy),
    ]
    for answers in pairs:
        found = structure_of_collated(*answers)
        kinds = [leaf.kind for leaf in found.leaves]
        assert kinds in (["unknown"], ["rows"]), answers
        if kinds == ["unknown"]:
            with pytest.raises(tdi.BatchingError):
                found.empty()


def test_the_structure_of_collated_batches_can_be_told_to_another_rank() -> None:
    answers: list[Any] = [
        {
            "last": torch.zeros(2, 5, n, dtype=torch.int8),
            "array": np.zeros((3, n), dtype=">i2"),
            "list": ["a"] * n,
            "pair": Pair(torch.zeros(n), torch.zeros(n)),
        }
        for n in (1, 2)
    ]
    structure = structure_of_collated(*answers)
    told = Structure.from_json(structure.to_json())
    assert plain(told.empty()) == plain(structure.empty())
    assert plain(told.empty())["array"] == ("numpy >i2", (3, 0))
    assert plain(told.empty())["last"] == ("int8", (2, 5, 0))
    bad = structure_of_collated({"n": 1}, {"n": 2})
    assert Structure.from_json(bad.to_json()) == bad


def test_a_nested_tensor_of_several_replicas_in_a_process_comes_as_it_is() -> None:
    assert [[part.shape[0] for part in parts] for parts in parts_of(nested, 8, 4)] == [[2, 2]] * 2


def parts_alone(images: Tensor, replicas: int) -> tuple[Tensor, ...]:
    """What the replicas get of one global batch."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    loader = strategy.distribute_dataset(DataLoader(TensorDataset(images), batch_size=len(images)))
    ((element,),) = loader
    return tuple(piece for piece in strategy.local_results(element))


def detection_images(rows: int) -> Tensor:
    return torch.randn(rows, 2, 4, 4, generator=torch.Generator().manual_seed(1))


def empty_part() -> Tensor:
    _, part = parts_alone(detection_images(1), 2)
    assert part.shape == (0, 2, 4, 4)
    return part


def one_row() -> Tensor:
    _, part = parts_alone(detection_images(3), 2)
    assert part.shape == (1, 2, 4, 4)
    return part


def norm_of_one_row(norm: nn.Module) -> Callable[[Tensor], Any]:
    """Asks a norm for a part of one row."""
    return lambda _: norm(one_row().flatten(1))


TRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "view": (lambda x: x.view(len(x), -1), lambda x: x.flatten(1)),
    "reshape": (lambda x: x.reshape(len(x), -1), lambda x: x.view(-1, 32)),
    "amax": (lambda x: x.amax(dim=0), lambda x: x.sum(dim=0)),
    "argmax": (lambda x: x.argmax(dim=0), lambda x: x.flatten(1).argmax(dim=1)),
    "the first": (lambda x: x[0], lambda x: x[:1]),
    "InstanceNorm": (nn.InstanceNorm2d(2, affine=True), nn.GroupNorm(2, 2)),
    "BatchNorm": (norm_of_one_row(nn.BatchNorm1d(32)), norm_of_one_row(nn.BatchNorm1d(32).eval())),
    "statistics": (norm_of_one_row(nn.BatchNorm1d(32)), norm_of_one_row(nn.LayerNorm(32))),
}
"""What fails on an empty part, or a part of one row, and what to write instead."""


@pytest.mark.parametrize(("fails", "works"), TRAPS.values(), ids=TRAPS)
def test_what_fails_on_a_short_part_has_a_way_out(
    fails: Callable[[Tensor], Any], works: Callable[[Tensor], Any]
) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        fails(empty_part())
    works(empty_part())


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda out: F.cross_entropy(out, torch.zeros(len(out), dtype=torch.int64)),
    "mse_loss": lambda out: F.mse_loss(out, torch.ones_like(out)),
    "mean": lambda out: out.mean(),
}


@pytest.mark.parametrize("loss", MEANS)
def test_a_mean_loss_of_an_empty_part_is_nan_but_its_gradients_are_zero(loss: str) -> None:
    model = nn.Linear(16, 3)
    value = MEANS[loss](model(empty_part()[:, 0].flatten(1)))
    torch.autograd.backward(value)
    assert math.isnan(value.item())
    assert [p.grad is not None and p.grad.eq(0).all().item() for p in model.parameters()] == [True, True]


def test_the_mean_of_the_parts_means_is_not_the_mean_but_average_loss_is() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    loader = strategy.distribute_dataset(
        DataLoader(TensorDataset(torch.tensor([1.0, 1.0, 4.0]).double()), batch_size=3)
    )
    ((losses,),) = loader
    parts = strategy.local_results(losses)
    assert [part.tolist() for part in parts] == [[1.0, 1.0], [4.0]]
    assert [part.mean().item() for part in parts] == [1.0, 4.0]
    assert sum(tdi.average_loss(part, loader.step).item() for part in parts) == pytest.approx(2.0)
    assert strategy.reduce("MEAN", losses, axis=0) == 2.0  # for logs and metrics


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "Linear": (nn.Linear(4, 3), (2, 4)),
    "Conv2d": (nn.Conv2d(2, 3, 3), (2, 4, 4)),
    "MaxPool2d": (nn.MaxPool2d(2), (2, 4, 4)),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(1), (2, 4, 4)),
    "BatchNorm2d": (nn.BatchNorm2d(2), (2, 4, 4)),
    "LSTM": (nn.LSTM(4, 3, batch_first=True), (5, 4)),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (5, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_on_an_empty_batch_and_get_gradients_of_zero(name: str) -> None:
    layer, shape = LAYERS[name]
    out = layer(torch.zeros(0, *shape, requires_grad=True))
    out = out[0] if isinstance(out, tuple) else out
    assert len(out) == 0
    torch.autograd.backward(out.sum())
    assert all(p.grad is not None and p.grad.eq(0).all() for p in layer.parameters())


# Under DDP every rank runs every layer at every step

SAMPLES = 5
OVER_TWO_RANKS = {4: ["2 + 2", "1 + 0"], 1: ["1 + 0"] * 5}  # the parts by global batch size
PATIENCE_SECONDS = 60.0


class Net(nn.Module):
    """Two layers; ``skips`` leaves the first one out where there is nothing to do."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.outer = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.skips and len(x) == 0 else torch.tanh(self.inner(x))
        out: Tensor = self.outer(hidden)
        return out


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(SAMPLES, 3, dtype=torch.float64, generator=made), torch.arange(SAMPLES) % 2)


def gradients(
    global_batch: int, skips: bool, finds: bool, passes_over: bool = False, timeout_seconds: float = PATIENCE_SECONDS
) -> list[float]:
    """Those of an epoch, added up."""
    net = Net(skips=skips)
    model = DistributedDataParallel(net, find_unused_parameters=finds)
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=timeout_seconds)
    loader = strategy.distribute_dataset(DataLoader(data(), global_batch))
    for x, y in loader:
        if passes_over and len(x) == 0:
            continue
        per_sample = F.cross_entropy(model(x), y, reduction="none")
        torch.autograd.backward(tdi.average_loss(per_sample, loader.step))
    return flat(net)


def all_gradients(cases: list[tuple[int, bool, bool]]) -> list[list[float]]:
    return [gradients(*case) for case in cases]


def gradients_of_one_process(global_batch: int) -> list[float]:
    net = Net()
    for x, y in DataLoader(data(), global_batch):
        torch.autograd.backward(F.cross_entropy(net(x), y))
    return flat(net)


def flat(net: Net) -> list[float]:
    return [value for p in net.parameters() if p.grad is not None for value in p.grad.flatten().tolist()]


def test_running_every_layer_or_finding_the_unused_gives_the_gradients_of_one_process() -> None:
    cases = [(size, unused, unused) for size in OVER_TWO_RANKS for unused in (False, True)]
    for found in run_ranks(2, all_gradients, cases):
        for (size, *_), of_case in zip(cases, found, strict=True):
            assert of_case == pytest.approx(gradients_of_one_process(size), abs=1e-12)


def test_a_layer_that_is_skipped_where_the_part_is_empty_breaks_the_next_step() -> None:
    with pytest.raises(RankFailed, match="Expected to have finished reduction in the prior iteration"):
        run_ranks(2, gradients, 1, True, False)


def test_passing_over_an_empty_part_leaves_the_others_waiting_for_its_gradients() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, gradients, 1, False, False, True, 2.0)
    assert isinstance(failure.value.__cause__, tdi.CoordinationTimeout)
