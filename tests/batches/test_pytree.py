"""The law of leaves: what is cut, what is structure, what is a constant; structures as messages, and checked."""

from __future__ import annotations

import collections
import dataclasses
import json
import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Stream
from tests.support import inputs
from tests.support.epochs import Raised, lists, raised
from tests.support.structures import EMPTIABLE, KINDS, Pair, described
from torchdistinput.batches import pytree
from torchdistinput.batches.padding import Pad
from torchdistinput.batches.pytree import KnownShapes, batch_size
from torchdistinput.batches.schema import Structure, TensorSpec, structure_of
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.errors import BatchingError
from torchdistinput.step_types import LocalStep
from torchdistinput.testing import run_ranks


class Longer(Pair):
    """A class that extends a named tuple."""


class Odd:
    """An object that is no plain value."""


@dataclasses.dataclass
class Counted:
    """A dataclass with a field that its constructor does not take."""

    x: torch.Tensor
    count: int = dataclasses.field(default=0, init=False)


@pytest.mark.parametrize("kind", EMPTIABLE)
def test_an_empty_batch_looks_like_a_batch_of_no_samples(kind: str) -> None:
    assert described(structure_of(KINDS[kind](3)).empty()) == described(KINDS[kind](0))


@pytest.mark.filterwarnings("ignore:Sparse (CSR tensor support|invariant checks)")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_an_empty_batch_is_as_sparse_as_the_others(layout: torch.layout) -> None:
    structure = structure_of([torch.eye(3, dtype=torch.float64).to_sparse(layout=layout)])
    for told in (structure, Structure.from_json(json.loads(json.dumps(structure.to_json())))):
        (found,) = told.empty()
        assert (found.layout, found.dtype) == (layout, torch.float64)
        assert torch.mm(found, torch.ones(3, 2, dtype=torch.float64)).shape == (0, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_another_rank_can_be_told_the_structure(kind: str) -> None:
    structure = structure_of(KINDS[kind](3))
    told = Structure.from_json(json.loads(json.dumps(structure.to_json())))
    assert told.signature() == structure.signature()
    assert told.digest() == structure.digest()
    assert kind not in EMPTIABLE or described(told.empty()) == described(structure.empty())


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_mapped_by_nothing_is_itself(kind: str) -> None:
    batch = KINDS[kind](3)
    assert described(pytree.map_leaves(lambda leaf: leaf, batch)) == described(batch)
    assert pytree.batch_size(batch) == 3


def test_the_digest_is_the_same_in_every_process() -> None:
    """Literal values: ranks of one job compare them."""
    assert structure_of(torch.zeros(2, 3)).digest() == structure_of(torch.ones(7, 9)).digest()
    digests = {structure_of(make(2)).digest() for make in KINDS.values()}
    assert len(digests) == len(KINDS)
    assert all(0 <= digest < 2**24 for digest in digests)


def test_numbers_strings_and_objects_are_constants_that_every_piece_has() -> None:
    odd = Odd()
    batch = {"x": torch.arange(4), "n": 3, "name": "train", "odd": odd, "none": None, "raw": b"ab"}
    piece = pytree.cut(batch, 1, 2)
    assert piece.pop("x").tolist() == [1]
    assert piece == {"n": 3, "name": "train", "odd": odd, "none": None, "raw": b"ab"}


def test_a_list_with_a_tensor_or_a_container_in_it_is_structure() -> None:
    for value in (
        [torch.zeros(2)],
        [np.zeros(2)],
        [["a", "b"]],
        ({"k": torch.zeros(2)},),
        [np.float32(1), torch.ones(2)],
    ):
        nesting = structure_of(value).nesting
        assert nesting is not None
        assert nesting.cls in (list, tuple)


def test_arrays_of_any_kind_become_what_torch_can_hold() -> None:
    swapped = np.arange(3, dtype=">i4")
    frozen = np.arange(3)
    frozen.flags.writeable = False
    arrays = (swapped, frozen, np.array(["a", "b", "c"]), np.arange(3, dtype=np.float16))
    leaves = list(map(pytree.as_tensor, pytree.flatten(arrays)[0]))
    assert leaves[0].tolist() == leaves[1].tolist() == [0, 1, 2]
    assert leaves[2] == ["a", "b", "c"]
    assert leaves[3].dtype == torch.float16


def test_containers_are_rebuilt_in_their_class() -> None:
    ordered = collections.OrderedDict(x=torch.arange(4), y=torch.arange(4))
    assert type(pytree.cut(ordered, 0, 1)) is collections.OrderedDict
    longer = pytree.cut(Longer(torch.arange(4), torch.arange(4)), 2, 4)
    assert type(longer) is Longer
    assert longer.label.tolist() == [2, 3]
    assert pytree.cut(Counted(torch.arange(4)), 1, 3).x.tolist() == [1, 2]
    fallback = pytree.cut(collections.defaultdict(list, x=torch.arange(4)), 0, 1)
    assert type(fallback) is dict


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"x": torch.zeros(2), "y": [torch.zeros(3)]}, r"\['x'\] has 2, \['y'\]\[0\] has 3"),
        ({"x": torch.zeros(2), "s": ["a"]}, r"\['x'\] has 2, \['s'\] has 1"),
        ((torch.zeros(2), torch.tensor(1)), r"\[1\] is a scalar tensor.*plain int.*global_batch_size="),
        (([torch.zeros(3, 2)] * 2, torch.zeros(4)), "has 3, .* has 4.*count_fn=.*split_fn="),
        (torch.tensor(1), "the batch is a scalar tensor"),
        ({"n": 3}, "an element of type dict without a tensor, array or list"),
        ("text", "an element of type str without"),
        (None, "an element of type NoneType without"),
    ],
)
def test_a_batch_without_one_size_is_refused_by_the_paths_of_its_leaves(batch: Any, told: str) -> None:
    with pytest.raises(BatchingError, match=told):
        pytree.batch_size(batch)


def test_a_structure_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(BatchingError, match=r"the key \(1, 2\)"):
        structure_of({(1, 2): torch.zeros(1)}).to_json()


def test_no_empty_batch_has_a_value_of_another_one_and_another_rank_is_told_so() -> None:
    for value in (3, "train", Odd()):
        structure = structure_of({"x": torch.zeros(1), "more": [torch.zeros(1), value]})
        for found in (structure, Structure.from_json(json.loads(json.dumps(structure.to_json())))):
            with pytest.raises(BatchingError, match=r"\['more'\]\[1\] is of type"):
                found.empty()


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "no.such.module:Pair",
        "tests.support.structures:NoSuch",
        "tests.support.structures:torch",
        "builtins:dict",
    ],
)
def test_only_fitting_classes_of_imported_modules_are_built(name: str) -> None:
    (kind, _, *children), leaves = structure_of(Pair(torch.zeros(1), torch.zeros(1))).to_json()
    with pytest.raises(BatchingError, match=f"cannot build the batch's namedtuple {name}"):
        Structure.from_json([[kind, name, *children], leaves])


def test_a_class_inside_a_function_cannot_be_found_by_another_rank() -> None:
    class Inner(NamedTuple):
        x: Any

    with pytest.raises(BatchingError, match="Define it at the top of a module"):
        Structure.from_json(structure_of(Inner(torch.zeros(1))).to_json())


def test_the_spec_has_a_tensor_spec_with_its_path_at_each_leaf() -> None:
    structure = structure_of({"x": torch.zeros(4, 5), "s": ["a"] * 4, "p": Pair(torch.zeros(4), torch.ones(4)), "n": 1})
    spec = structure.spec(2, lambda each: each)
    assert spec == {
        "x": TensorSpec((2, 5), torch.float32, "['x']"),
        "s": TensorSpec((2,), str, "['s']"),
        "p": Pair(
            TensorSpec((2,), torch.float32, "['p']['image']"),  # type: ignore[arg-type]
            TensorSpec((2,), torch.float32, "['p']['label']"),  # type: ignore[arg-type]
        ),
        "n": 1,
    }
    assert structure_of(torch.zeros(4)).spec(None, lambda each: each) == TensorSpec((None,), torch.float32)


def test_a_structure_prints_as_a_reader_would_write_it() -> None:
    batch = {"x": torch.zeros(2, 3), "s": ["a", "b"], "n": 1, "p": (torch.zeros(2, dtype=torch.int64), np.zeros(2))}
    assert str(structure_of(batch)) == (
        "dict(x: float32[batch, 3], s: list of rows, n: int, p: tuple(0: int64[batch], 1: float64[batch]))"
    )


def test_two_batches_are_alike_by_nesting_and_by_class_dtype_inner_dims_and_layout_of_their_leaves() -> None:
    same = {"x": torch.zeros(5, 3), "y": (torch.zeros(5), ["a"] * 5), "n": 3}
    known = structure_of({"x": torch.ones(2, 3), "y": (torch.ones(2), ["b"] * 2), "n": 4})
    assert structure_of(same) == known
    assert hash(structure_of(same).nesting) == hash(known.nesting)
    for other in (
        {**same, "x": torch.zeros(5, 4)},
        {**same, "x": torch.zeros(5, 3).double()},
        {**same, "x": torch.eye(5, 3).to_sparse()},
        {**same, "y": (torch.zeros(5), ("a",) * 5)},
        {**same, "y": (torch.zeros(5), [1] * 5)},
        {**same, "y": (torch.zeros(5), ["a"] * 5, torch.ones(5))},
        {**same, "n": "3"},
        {**same, "z": torch.zeros(5)},
        {"y": same["y"], "x": same["x"], "n": 3},
        collections.OrderedDict(same),
    ):
        assert structure_of(other) != known, other


def test_a_batch_is_flattened_down_to_the_nesting_of_another_whatever_the_order_of_its_keys() -> None:
    _, nesting = pytree.flatten({"a": torch.zeros(1), "b": [{"c": torch.zeros(1), "d": torch.ones(1)}]})
    assert pytree.flatten_like(nesting, {"b": [{"d": 4, "c": (3, 3)}], "a": 1}) == [1, (3, 3), 4]
    for other in ({"b": [{"d": 4, "c": 3}]}, {"b": ({"d": 4, "c": 3},), "a": 1}, {"b": [[4, 3]], "a": 1}, 5):
        assert pytree.flatten_like(nesting, other) is None


def test_the_bytes_that_a_batch_holds_are_those_of_its_tensors_and_texts() -> None:
    tensors = {"x": torch.zeros(3, 4), "y": [torch.arange(3), torch.zeros(3, dtype=torch.bool)]}
    assert pytree.bytes_held(tensors) == 3 * 4 * 4 + 3 * 8 + 3
    short, long = pytree.bytes_held(["a", "b"]), pytree.bytes_held(["a" * 1001, b"b"])
    assert short is not None
    assert long == short + 1000
    assert pytree.bytes_held((torch.zeros(2), ["a", "b"])) == 8 + short
    assert pytree.bytes_held([1, 2]) is None
    assert pytree.bytes_held([{"x": torch.zeros(3), "y": ("a", "b")}] * 100) == 100 * (12 + short)
    assert pytree.bytes_held([(1, "a")] * 100) is None


class Own(torch.Tensor):
    """May be anything."""


x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
KNOWN: list[Any] = [x, y, (x, y), [x, y], {"x": x, "y": y}, (x,), [y], Pair(x, y), {"x": {"y": y}}, (x, [y]), [[y], x]]
UNKNOWN: list[Any] = [OrderedDict(x=x), {"x": OrderedDict(y=y)}, [x, "label"], x.as_subclass(Own)]
NOTHING: list[Any] = [(), [], {}]  # is no batch
OTHERS: list[Any] = [
    *(torch.zeros(5, 2), torch.zeros(4, 3), torch.zeros(4, 2, 1), x.double(), torch.eye(4, 2).to_sparse()),
    *((x, y, y), (y, x), (x, x), (x, y.int()), (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))),
    *([y, x], [x, y, x], {"y": y, "x": x}, {"x": x}, {"x": x, "z": y}, {"x": x, "y": y, "z": y}),
    *((x, None), {"x": x, "y": 3}, [x, [y]], Longer(x, y), (x, [y, y]), (x.as_subclass(Own), y)),
    *(None, 3, "xy", (), [], {}),
]


@pytest.mark.parametrize("last", KNOWN, ids=lambda _: "")
def test_exactly_what_has_the_shapes_of_the_last_batch_is_known(last: Any) -> None:
    known = KnownShapes()
    assert known.leaves_of(last) is None
    known.remember(last, pytree.batch_size(last))
    again = pytree.map_leaves(torch.ones_like, last)
    assert known.size == pytree.batch_size(again)
    assert list(map(id, known.leaves_of(again) or ())) == list(map(id, pytree.flatten(again)[0]))
    for other in [*KNOWN, *UNKNOWN, *OTHERS]:
        assert (known.leaves_of(other) is not None) == (other is last)


@pytest.mark.parametrize("last", [*UNKNOWN, *NOTHING], ids=lambda _: "")
def test_what_is_not_plain_is_not_remembered(last: Any) -> None:
    known = KnownShapes()
    known.remember((x, y), 4)
    known.remember(last, 4)
    assert all(known.leaves_of(batch) is None for batch in [*KNOWN, *UNKNOWN, *OTHERS])


def measured(checker: SchemaChecker, piece: Any) -> int:
    """Lets a schema checker see a batch; samples in it."""
    checker.take(structure_of(piece))
    return batch_size(piece)


@pytest.mark.parametrize("kind", EMPTIABLE)
def test_a_piece_is_measured_and_makes_empty_pieces_like_it(kind: str) -> None:
    checker = SchemaChecker()
    assert measured(checker, KINDS[kind](3)) == 3
    assert checker.structure is not None
    assert described(checker.structure.empty()) == described(KINDS[kind](0))


def test_every_other_structure_is_refused() -> None:
    for before in KINDS:
        for now in KINDS:
            if before == now:
                continue
            checker = SchemaChecker()
            measured(checker, KINDS[before](2))
            with pytest.raises(BatchingError, match=r"structure of the elements changed: before .*, now .*"):
                measured(checker, KINDS[now](2))


def test_the_order_of_the_keys_of_a_dict_may_change() -> None:
    checker = SchemaChecker()
    first = {"x": torch.zeros(2), "y": {"a": torch.ones(2), "b": torch.ones(2)}}
    measured(checker, first)
    digest = checker.digest
    for other in ({"y": first["y"], "x": first["x"]}, {"x": first["x"], "y": {"b": first["x"], "a": first["x"]}}):
        for found in (structure_of(other), pickle.dumps(structure_of(other)), pickle.dumps(structure_of(other))):
            checker.take(found)
            assert checker.digest == digest


def test_what_another_rank_told_is_as_if_seen_here() -> None:
    seen, told = SchemaChecker(), SchemaChecker()
    measured(seen, {"x": torch.zeros(2, 3)})
    told.learn(structure_of({"x": torch.zeros(9, 5)}))
    assert seen.digest == told.digest
    with pytest.raises(BatchingError, match="changed"):
        measured(told, torch.zeros(2))


def test_elements_that_a_function_collated_keep_their_first_structure_and_may_differ() -> None:
    checker = SchemaChecker(one_structure=False, may_lack=True)
    checker.take(structure_of({"x": torch.zeros(2, 3)}))
    checker.take(structure_of([torch.zeros(2)]))
    assert described(checker.empty()) == described({"x": torch.zeros(0, 3)})
    assert checker.digest == SchemaChecker(one_structure=False).digest


PAD = tdi.InputOptions(partial_batch="pad")


def padded(batch: Any, size: int, rows: int) -> Any:
    share = LocalStep([batch], (size,))
    Pad(rows, with_index=False)(share, structure_of(batch))
    assert share.sizes == (size,)
    return share.pieces[0]


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("name", EMPTIABLE)
def test_every_leaf_gets_the_rows_and_keeps_its_class_and_samples(name: str, size: int) -> None:
    batch = EMPTIABLE[name](size)
    element, mask = padded(batch, size, 3)
    assert described(element) == described(EMPTIABLE[name](3)) or "text" in name or size < 3
    assert batch_size(element) == 3
    assert mask.tolist() == [True] * size + [False] * (3 - size)
    assert structure_of(element).signature() == structure_of(batch).signature()


def test_padded_rows_are_zeros_empty_strings_and_none() -> None:
    batch = {"x": torch.ones(1, 2), "flag": torch.tensor([True]), "name": ["a"], "id": [7], "scale": 0.5}
    element, mask = padded(batch, 1, 3)
    assert lists(element) == {
        "x": [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
        "flag": [True, False, False],
        "name": ["a", "", ""],
        "id": [7, None, None],
        "scale": 0.5,
    }
    assert mask.dtype == torch.bool


def test_a_full_piece_is_not_copied() -> None:
    batch = torch.ones(3)
    assert padded(batch, 3, 3)[0] is batch


def test_a_piece_that_is_too_large_is_refused() -> None:
    with pytest.raises(tdi.BatchingError, match="a piece has 4 samples, and partial_batch='pad' makes pieces of 3"):
        padded(torch.ones(4), 4, 3)


def test_without_a_mask_the_loss_of_padded_rows_is_refused_and_with_it_may_be_nan() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    dataset = strategy.distribute_dataset(DataLoader(range(1, 4), batch_size=2), PAD)  # type: ignore[arg-type]
    losses = torch.zeros(0)
    for numbers, mask in dataset:
        losses = numbers.double().log()  # of a padded row: -inf
        loss = tdi.average_loss(losses, dataset.step, mask)
        assert loss == pytest.approx(losses[mask].mean().item())
    with pytest.raises(ValueError, match=r"2 losses .* padded rows out, give weights"):
        tdi.average_loss(losses, dataset.step)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"] / 50), batch["y"] % 3, reduction="none")


@pytest.mark.parametrize("replicas", [1, 3, 5])
def test_padded_gradients_are_those_of_one_process(replicas: int) -> None:
    def loaded() -> Any:
        return DataLoader(inputs.Records(), batch_size=5, shuffle=True, generator=inputs.generator())

    def step(batch: dict[str, Any], mask: torch.Tensor) -> None:
        assert batch["x"].shape == (-(-5 // replicas), 2)
        torch.autograd.backward(tdi.average_loss(loss_of(model, batch), dataset.step, mask))

    strategy, model, reference = tdi.Strategy(devices=["cpu"] * replicas), net(), net()
    dataset = strategy.distribute_dataset(loaded(), PAD)
    with strategy.scope():
        for element, batch in zip(dataset, loaded(), strict=True):
            model.zero_grad()
            strategy.run(step, args=element)
            want = torch.autograd.grad(loss_of(reference, batch).mean(), list(reference.parameters()))
            for parameter, gradient in zip(model.parameters(), want, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


def sources_without_a_size() -> list[Raised | None]:
    strategy = tdi.Strategy(devices=["cpu"])
    own: Any = DataLoader(range(11), batch_sampler=inputs.uneven_batches())  # type: ignore[arg-type]
    whole = DataLoader(Stream(inputs.ready_batches), batch_size=None)
    return [
        raised(lambda: strategy.distribute_dataset(own, PAD)),
        raised(lambda: strategy.distribute_dataset(whole, PAD)),
        raised(lambda: strategy.distribute_dataset(inputs.ready_batches, PAD)),
        raised(lambda: strategy.distribute_datasets_from_function(lambda _: [torch.ones(2)], PAD)),
    ]


def test_without_a_known_batch_size_every_rank_is_refused_when_the_dataset_is_distributed() -> None:
    for rank in run_ranks(2, sources_without_a_size):
        for refusal in rank:
            assert refusal is not None
            assert refusal.kind == "BatchingError"
            assert "needs a known global batch size" in refusal.message
