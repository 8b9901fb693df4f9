"""The layers beyond Keras's answers: learned on ranks, saved, used in a pipeline, and what they refuse."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import raised
from torchdistinput.preprocessing import Discretization, IntegerLookup, Normalization, StringLookup
from torchdistinput.testing import run_ranks

LINES = [f"{('the', 'a', 'of', 'to', 'in')[each % 5]} word{each % 17}, Word{each % 3}!" for each in range(97)]
X = torch.from_numpy(np.random.default_rng(0).standard_normal((211, 3)).astype(np.float32))
IDS = torch.from_numpy(np.random.default_rng(1).zipf(1.5, 300) % 50)


def adapted(folder: str, only: bool = False) -> Any:
    """What layers learn, by their states."""
    strategy = tdi.Strategy(["cpu"], timeout_seconds=5.0 if only else 60.0)
    if only and strategy.input_pipeline_id == 0:
        found = raised(lambda: Normalization().adapt(X, strategy=strategy))
        return None if found is None else (found.kind, found.message)
    if only:
        return None
    files = tdi.FileDataset(folder + "/*.txt", tdi.readers.text_lines, map_fn=str.split)
    layers: list[Any] = [
        Normalization(),
        Discretization(num_bins=7),
        IntegerLookup(max_tokens=20, output_mode="count"),
        StringLookup(),
        StringLookup(output_mode="multi_hot"),
    ]
    with strategy.scope():
        layers[0].adapt(DataLoader(X, batch_size=10, shuffle=True))  # type: ignore[arg-type]
        layers[1].adapt(X)
        layers[2].adapt(IDS.reshape(100, 3))
        layers[3].adapt(LINES)
        layers[4].adapt(DataLoader(files, batch_size=7, collate_fn=list))
    states = [layer.get_extra_state() for layer in layers]
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        for state in states
    ]


def test_layers_learn_the_same_at_every_world_size(tmp_path: Path, all_cells: bool) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("".join(f"{line}\n" for line in LINES[number::4]))
    one = adapted(str(tmp_path))
    for world_size in (2, 3) if all_cells else (3,):
        for found in run_ranks(world_size, adapted, str(tmp_path)):
            assert found == one


def test_adapt_on_one_rank_only_names_the_others(tmp_path: Path) -> None:
    kind, message = run_ranks(2, adapted, str(tmp_path), True)[0]
    assert kind in ("CoordinationTimeout", "RankLost")
    assert "rank 1" in message


def test_a_state_holds_the_vocabulary_and_is_loaded_without_ranks() -> None:
    layer = StringLookup(max_tokens=10, output_mode="one_hot", pad_to_max_tokens=True)
    layer.adapt(LINES)
    model = nn.ModuleList([layer, nn.Linear(10, 1)])
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    empty = StringLookup(max_tokens=10, output_mode="one_hot", pad_to_max_tokens=True)
    again = nn.ModuleList([empty, nn.Linear(10, 1)])
    again.load_state_dict(torch.load(io.BytesIO(content.getvalue()), weights_only=True))
    assert torch.equal(again[0](LINES), model[0](LINES))
    assert empty.get_vocabulary() == layer.get_vocabulary()
    with pytest.raises(ValueError, match="the vocabulary was given"):
        StringLookup(vocabulary=["a"]).adapt(["b"])


def test_a_vocabulary_comes_from_a_file_of_any_filesystem() -> None:
    with fsspec.open("memory://terms.txt", "w") as file:
        file.write("b\na\n")
    assert StringLookup(vocabulary="memory://terms.txt")(["a", "b", "c"]).tolist() == [2, 1, 0]
    with fsspec.open("memory://ids.txt", "w") as file:
        file.write("7\n5\n")
    assert IntegerLookup(vocabulary="memory://ids.txt")([5, 7, 9]).tolist() == [2, 1, 0]


def unknown_token() -> Any:
    strategy = tdi.Strategy(["cpu"])
    lookup = StringLookup(vocabulary=["a", "b"], num_oov_indices=0)
    data = ["a", "b", "a", "b", "a", "zebra", "b", "a"]
    loader = strategy.distribute_dataset(
        DataLoader(data, batch_size=4, collate_fn=lookup)  # type: ignore[arg-type] # a list is a dataset
    )
    steps: list[Any] = []
    found = raised(lambda: steps.extend(loader))
    assert found is not None
    return len(steps), found.kind, found.message.splitlines()[0]


def test_an_unknown_token_in_a_pipeline_is_named_on_all_ranks_at_the_same_step() -> None:
    for steps, kind, message in run_ranks(2, unknown_token):
        assert (steps, kind) == (1, "SourceError")
        assert "'zebra' is not in the vocabulary" in message


def in_a_function() -> Any:
    """A learned table in the pipeline of ``from_function``; then one that was given, another one on each rank."""
    strategy = tdi.Strategy(["cpu"])
    with strategy.scope():
        lookup = StringLookup()
        lookup.adapt(LINES[:50])
        mirrored = strategy.mirror(lookup)

    def dataset(context: tdi.InputContext) -> DataLoader[Any]:
        part: Any = LINES[context.input_pipeline_id :: context.num_input_pipelines]
        return DataLoader(part, context.get_per_replica_batch_size(10), collate_fn=mirrored)

    with strategy.distribute_datasets_from_function(dataset) as loader:
        found = [each for batch in loader for each in batch.tolist()]
    own = nn.Sequential(StringLookup(vocabulary=["a", f"of rank {strategy.input_pipeline_id}"]))
    return found, raised(lambda: strategy.mirror(own)), strategy.mirror(lookup).get_vocabulary()


def test_learned_tables_are_mirrored_and_given_ones_that_differ_are_refused() -> None:
    (everything, error, vocabulary), *_ = run_ranks(1, in_a_function)
    assert error is None
    first, second = run_ranks(2, in_a_function)
    assert (first[0], second[0]) == (everything[::2], everything[1::2])
    assert first[2] == second[2] == vocabulary
    for _, error, _ in (first, second):
        assert error.kind == "RankDisagreement"
        assert "extra states" in error.message


def test_strings_come_as_arrays_and_bytes_too() -> None:
    layer = StringLookup()
    layer.adapt(np.array(["b", "é", "b"]).astype("U"))
    assert layer.get_vocabulary() == ["[UNK]", "b", "é"]
    for texts in (np.array([["b"], ["é"]]), np.array([["b"], ["é"]], object), np.char.encode([["b"], ["é"]], "utf-8")):
        assert layer(texts).tolist() == [[1], [2]]
    learned = StringLookup()
    learned.adapt(np.char.encode(["b", "é", "b"], "utf-8"))
    assert learned.get_vocabulary() == layer.get_vocabulary()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: StringLookup(vocabulary=["a", "b", "a"]), "the term 'a' more than once"),
        (lambda: StringLookup(num_oov_indices=2), "num_oov_indices=2; it must be 0 or 1"),
        (lambda: StringLookup(output_mode="tf_idf"), "output_mode is 'tf_idf'"),
        (lambda: StringLookup(vocabulary=["a", "", "b"], mask_token=""), "the mask token '' is term 1"),
        (lambda: StringLookup(vocabulary=[1, 2]), "str is needed"),
        (lambda: IntegerLookup(vocabulary=["a"]), "int is needed"),
        (lambda: StringLookup(max_tokens=2, vocabulary=["a", "b"]), "3 tokens, special ones too"),
        (lambda: StringLookup(vocabulary=["a"])([["a"], ["a", "a"]]), "rows of lengths"),
        (lambda: StringLookup(vocabulary=["a"])([1]), "strings are needed"),
        (lambda: IntegerLookup(vocabulary=[1])([1.5]), "ints are needed"),
        (lambda: Normalization(mean=0.0, variance=-1.0), "a variance is -1.0"),
        (lambda: Normalization()(X), "there is no mean yet"),
        (lambda: Normalization().adapt(torch.zeros(0, 3)), "there is no data"),
        (lambda: Normalization().adapt(["a"]), "numbers are needed"),
        (lambda: Discretization(bin_boundaries=[1.0, 0.0]), "do not rise"),
        (lambda: Normalization(mean=[1.0, 2.0], variance=1.0), "the shapes (2,) and ()"),
        (lambda: Discretization(num_bins=2)([1.0]), "there are no boundaries yet"),
    ],
)
def test_bad_arguments_are_told(make: Any, told: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:  # Keras's classes
        make()
    assert told in str(caught.value)


def test_a_doubled_term_is_found_by_a_few_comparisons_of_each_term() -> None:
    compared = 0

    class Term(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    terms = [Term(f"t{number}") for number in range(300)]
    with pytest.raises(ValueError, match="the term 't299' more than once"):
        StringLookup().set_vocabulary([*terms, Term("t299")])
    assert compared < 10 * len(terms)
