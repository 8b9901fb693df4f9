"""Mixtures: files, fragments, map-style data and packs; shares of samples and tokens; weights that change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Fragments, Together
from tests.support.epochs import steps_until_raised
from tests.support.launched import Scenes, launched
from torchdistinput import Fragment
from torchdistinput.errors import BatchingError, ShardingError, SourceError, StateMismatch

WEB, CODE, KEYS, BOOK = 700, 330, 90, 45
WEIGHTS = {"web": 5, "code": 3, "keys": 1, "book": 1}
NONE = dict.fromkeys(WEIGHTS, 0)
SIZE = 20


def keys() -> Fragments:
    """Fragments of a user's own."""
    return Fragments({3000 + KEYS // 3 * part: KEYS // 3 for part in range(3)}, block=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("mixture")
    for name, first, count in (("web", 0, WEB), ("code", 1000, CODE)):
        for file in range(4):
            numbers = range(first + count * file // 4, first + count * (file + 1) // 4)
            (made / f"{name}-{file}.txt").write_text("".join(f"{number}\n" for number in numbers))
    return str(made)


def files(folder: str, name: str, **more: Any) -> tdi.FileDataset:
    return tdi.FileDataset(f"{folder}/{name}-*.txt", tdi.readers.text_lines, map_fn=int, **more)


def sources(folder: str) -> dict[str, Any]:
    return {
        "web": files(folder, "web", shuffle_files=True, shuffle_buffer=32, seed=3),
        "code": files(folder, "code", cycle_length=2, block_length=3),
        "keys": keys(),
        "book": range(5000, 5000 + BOOK),
    }


LENGTHS: dict[str, Any] = {"web": len, "code": len, "keys": lambda number: number % 7, "book": [9] * BOOK}


def mixture(folder: str, **more: Any) -> Any:
    return tdi.Mixture(sources(folder), more.pop("weights", WEIGHTS), **{"stop": "all", "seed": 4, **more})


def batches(order: list[Any]) -> list[list[Any]]:
    return [order[start : start + SIZE] for start in range(0, len(order), SIZE)]


def test_a_mixture_of_mixtures_keeps_both_shares_and_the_epochs_of_the_inner_one() -> None:
    def inner() -> tdi.Mixture:
        return tdi.Mixture({"x": range(100), "y": range(200, 300)}, {"x": 1, "y": 1}, with_source=True)

    outer = tdi.Mixture(
        {"in": inner(), "out": range(1000, 1100)}, {"in": 2, "out": 1}, stop="repeat", num_samples=600, with_source=True
    )
    inside = [sample for name, sample in outer if name == "in"]
    assert len(inside) == 400
    assert inside[:200] == list(inner())
    assert sorted(inside[200:]) == sorted(inside[:200])
    assert inside[200:] != inside[:200]


def test_temperature_evens_shares_out() -> None:
    even = tdi.Mixture(
        {"a": range(300), "b": range(1000, 1200)}, {"a": 100, "b": 1}, temperature=2, stop="repeat", num_samples=275
    )
    assert sum(each >= 1000 for each in even) == 25  # 1/11 of 275


def test_a_batched_source_is_asked_for_many_samples_at_once() -> None:
    asked = []

    def read(indices: list[int]) -> list[int]:
        asked.append(len(indices))
        return indices

    mixed = tdi.Mixture({"x": Together(100, read), "y": range(1000, 1100)}, {"x": 1, "y": 1})
    loader = tdi.Strategy(["cpu"]).distribute_dataset(mixed, global_batch_size=60, collate_fn=len)
    next(iter(loader))
    assert max(asked) == 30


def test_tokens_are_shared_and_counted(folder: str) -> None:
    weights = {**NONE, "web": 2, "code": 1}
    mixed = mixture(folder, weights=weights, unit="tokens", lengths=LENGTHS, stop="first", with_source=True)
    strategy = tdi.Strategy(["cpu"])
    loader = strategy.distribute_dataset(mixed, global_batch_size=SIZE)
    tokens: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    for names, numbers in loader:
        for name, number in zip(names, numbers.tolist(), strict=True):
            tokens[name] += len(str(number))
            samples[name] += 1
        assert abs(tokens["web"] / 2 - tokens["code"]) <= 4
        told = loader.stats()
        for name in ("web", "code", "book"):
            of_source = told[f"sources/{name}/samples"], told[f"sources/{name}/tokens"]
            assert of_source == (samples[name], tokens[name])
    assert sum(samples.values()) > 400
    assert samples["book"] == 0


class OnePart:
    """A fragment that says its number of records, or does not."""

    def __init__(self, size: int, said: int | None = None) -> None:
        self.size, self.said = size, said

    def fragments(self) -> list[Fragment]:
        return [Fragment("part", self.said)]

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, list[int]]]:
        yield 0, list(range(self.size))


def test_a_source_whose_end_is_noticed_after_a_change_of_weights_has_ended_before_it() -> None:
    changes = [(0, {"a": 1, "b": 0.5, "c": 0.5}), (2, {"a": 0.5, "b": 3, "c": 3})]

    def mixed(a: Any) -> Any:
        return tdi.Mixture({"a": a, "b": range(10, 41), "c": range(50, 65)}, changes, stop="all", shuffle=False)

    order = list(mixed([0]))
    assert list(mixed(OnePart(1))) == list(mixed(OnePart(1, 1))) == order
    with pytest.raises(SourceError, match=r"the source 'a' of the mixture ended after 1 of the 3 records"):
        list(mixed(OnePart(1, 3)))


def packs_in(file: BinaryIO) -> Iterator[list[int]]:
    """A reader: numbers of a file in rows of at most 30 digits, in order."""
    waiting: list[str] = []
    for line in tdi.readers.text_lines(file):
        if sum(map(len, waiting)) + len(line) > 30:
            yield [*map(int, waiting)]
            waiting = []
        waiting.append(line)
    if waiting:
        yield [*map(int, waiting)]


def packs_of_files(folder: str) -> Any:
    packed = {name: tdi.FileDataset(f"{folder}/{name}-*.txt", packs_in, cycle_length=2) for name in ("web", "code")}
    return tdi.Mixture(packed, {"web": 2, "code": 1}, stop="all", seed=4)


def test_a_stream_is_not_packed_by_index_and_the_way_out_is_named(folder: str) -> None:
    streams: list[tuple[Any, str]] = [
        *((packs_of_files(folder), "a Mixture"), (keys(), "a Fragments")),
        (files(folder, "web"), "a FileDataset"),
    ]
    for stream, name in streams:
        with pytest.raises(TypeError, match=rf"found {name}\. Pack its records while they are read"):
            tdi.Packed(stream, 64)


def test_counts_of_map_style_sources_are_told() -> None:
    data = {"a": range(2000), "b": range(5000, 7000)}
    mixed = tdi.Mixture(data, {"a": 1, "b": 1}, stop="all", lengths={"a": [3] * 2000})
    loader = tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(mixed, SIZE))
    assert sorted(number for batch in loader for number in batch.tolist()) == [*data["a"], *data["b"]]
    told = loader.stats()
    assert [told[f"sources/{name}/{unit}"] for name in "ab" for unit in ("samples", "tokens")] == [2000, 6000, 2000, 0]


def test_a_schedule_in_steps(folder: str) -> None:
    weights = [(0, {**NONE, "web": 1}), (7, {**NONE, "code": 1})]
    mixed = mixture(folder, weights=weights, batch_size=SIZE, stop="first")
    steps = batches(list(mixed))
    assert [max(step) < 1000 for step in steps] == [True] * 7 + [False] * (len(steps) - 7)
    with pytest.raises(BatchingError, match="batch_size=20, but the global batch size is 10"):
        tdi.Strategy(["cpu"]).distribute_dataset(mixed, global_batch_size=10)


def test_a_state_of_other_weights_says_so_and_may_begin_a_new_segment(folder: str) -> None:
    loader = tdi.Strategy(["cpu"]).distribute_dataset(mixture(folder), global_batch_size=SIZE)
    iterator = iter(loader)
    before = [number for _ in range(9) for number in next(iterator).tolist()]
    state = loader.state_dict()
    loader.close()
    weights = {**NONE, "web": 1, "code": 1}
    other = tdi.Strategy(["cpu"]).distribute_dataset(mixture(folder, weights=weights), global_batch_size=SIZE)
    with pytest.raises(StateMismatch, match="weights: "):
        other.load_state_dict(state)
    other.load_state_dict(state, strict=False)
    after = [number for batch in other for number in batch.tolist()]
    assert before + after == list(mixture(folder, weights=[(0, WEIGHTS), (9 * SIZE, weights)]))
    assert [number for batch in other for number in batch.tolist()] == epoch_of(mixture(folder, weights=weights), 1)
    other.load_state_dict(state, strict=False)
    iterator = iter(other)
    part = [number for _ in range(4) for number in next(iterator).tolist()]
    state = other.state_dict()  # goes on by the weights of the epoch, which began at the resume
    again = tdi.Strategy(["cpu"]).distribute_dataset(mixture(folder, weights=weights), global_batch_size=SIZE)
    again.load_state_dict(state)
    assert part + [number for batch in again for number in batch.tolist()] == after


def epoch_of(mixed: tdi.Mixture, epoch: int) -> list[int]:
    mixed.set_epoch(epoch)
    return list(mixed)


OF_VERSION_02: dict[str, Any] = {
    "version": 1, "epoch": 0, "step": 2, "samples": 12, "drawn": 0, "told_epoch": None, "sample_seed": None,
    "random": ["every 0", ""],
    "position": ["all", ["files", 1, [], [[2, '["mixture", 12, [[8, 0, 0, 60, 0, 8, [[[0, 0, 0, 0, 60]], 0, 0, [], 0]],'
                 ' [4, 0, 0, 40, 0, 4, [[[0, 0, 0, 0, 40]], 0, 0, [], 0]]]]']], 2, [[[0, [2.0, 1.0]]], []]]],
    "fingerprint": [
        ["kind", "mixture"], ["batch size", 6], ["drop_last", False], ["sources", "a, b"],
        ["weights", '[[0, {"a": 2.0, "b": 1.0}]]'], ["unit", "samples"], ["stop", "all"], ["num_samples", None],
        ["seed", 0], ["shuffle", True], ["source a", "f2c7825916093323"], ["source b", "6984952899e3290d"],
        ["policy", "DATA"],
    ],
    "checksum": 406099430,
}  # fmt: skip
AT_A_START: dict[str, Any] = {
    "epoch": 1, "step": 0, "samples": 0, "checksum": 979501167,
    "position": ["all", ["files", 1, [], [[0, "[[], 0, 0, [], 0]"]], 0, [[[0, [2.0, 1.0]]], []]]],
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, AT_A_START])
def test_a_state_of_version_02_is_refused_by_its_name(more: dict[str, Any]) -> None:
    mixed = tdi.Mixture({"a": range(60), "b": range(100, 140)}, {"a": 2, "b": 1}, stop="all")
    loader = tdi.Strategy(["cpu"]).distribute_dataset(mixed, global_batch_size=6)
    with pytest.raises(StateMismatch, match=r"of a mixture of version 0\.2, whose samples came in another order"):
        loader.load_state_dict({**OF_VERSION_02, **more})


def test_a_record_that_cannot_be_read_fails_its_own_step_or_is_left_out(folder: str, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("1\n2\n?\n4\n" + "5\n" * 100)
    bad = tdi.FileDataset(str(tmp_path / "bad.txt"), tdi.readers.text_lines, map_fn=int)
    mixed = tdi.Mixture({"bad": bad, "good": range(1000, 1100)}, {"bad": 1, "good": 1}, seed=1)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(mixed, global_batch_size=2)
    delivered: list[list[int]] = []
    with pytest.raises(SourceError, match=r"bad: .*bad.txt: map_fn failed on record 2"):
        delivered.extend(batch.tolist() for batch in loader)
    whole = [*chain(*delivered)]
    assert 2 in whole
    skips = tdi.InputOptions(on_error="skip", max_errors=1)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(mixed, skips, global_batch_size=2)
    found = [number for batch in loader for number in batch.tolist()]
    assert found[: len(whole)] == whole
    assert loader.stats()["skipped_samples"] == 1


def all_but_one(indices: list[int]) -> list[int]:
    if 7 in indices:
        raise OSError("sample 7 is damaged")
    return [5000 + index for index in indices]


def test_samples_that_are_read_together_are_all_named_where_one_cannot_be_read() -> None:
    mixed = tdi.Mixture({"a": Together(60, all_but_one)}, {"a": 1}, stop="all", shuffle=False)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(mixed, global_batch_size=4)
    with pytest.raises(SourceError, match="a: samples: samples 4, 5, 6, 7 cannot be read: OSError: sample 7"):
        list(loader)


def test_of_samples_that_are_read_together_the_one_that_cannot_be_read_is_left_out(folder: str) -> None:
    code = tdi.FileDataset(f"{folder}/code-*.txt", tdi.readers.text_lines, map_fn=int)
    mixed = tdi.Mixture({"code": code, "together": Together(60, all_but_one)}, {"code": 1, "together": 1}, stop="all")
    loader = tdi.Strategy(["cpu"]).distribute_dataset(mixed, global_batch_size=SIZE)
    with pytest.raises(SourceError, match="together: samples: .*sample 7 is damaged"):
        list(loader)
    skips = tdi.InputOptions(on_error="skip", max_errors=1)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(mixed, skips, global_batch_size=SIZE)
    found = sorted(number for batch in loader for number in batch.tolist() if number >= 5000)
    assert found == [5000 + index for index in range(60) if index != 7]


@pytest.mark.parametrize(
    ("weights", "more", "error", "told"),
    [
        ([(0, WEIGHTS), (5, {"web": 1})], {}, ValueError, "there is no weight for 'code'"),
        ([(5, WEIGHTS)], {}, ValueError, "rising positions from 0 on"),
        ({"web": 5}, {}, ValueError, "there is no weight for 'code'; give each source one, or 0"),
        ({**WEIGHTS, "b": 1}, {}, ValueError, "there is a weight for 'b'; the sources are 'web', 'code'"),
        (NONE, {}, ValueError, "all weights are 0"),
        (WEIGHTS, {"stop": "never"}, ValueError, "stop is 'never'"),
        (WEIGHTS, {"unit": "tokens"}, ValueError, "there is none for 'web'. Give lengths="),
        (WEIGHTS, {"unit": "bytes"}, ValueError, "unit is 'bytes'"),
        (WEIGHTS, {"lengths": {"nobody": len}}, ValueError, "there are lengths for 'nobody'"),
        (WEIGHTS, {"lengths": {"web": [1, 2]}}, TypeError, "lengths of 'web' is an array"),
        (WEIGHTS, {"lengths": {"book": [1, 2]}}, ValueError, "has 2 numbers; the source has 45 samples"),
    ],
)
def test_bad_mixtures_are_told(folder: str, weights: Any, more: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        mixture(folder, weights=weights, **more)


def test_sources_that_cannot_be_mixed_are_told(folder: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the source 'a' is a list_iterator; .* no place from which it could go on"):
        tdi.Mixture({"a": iter([1]), "web": files(folder, "web")}, {"a": 1, "web": 1})
    endless = mixture(folder, stop="repeat")
    with pytest.raises(ValueError, match="the source 'in' has no end"):
        tdi.Mixture({"in": endless}, {"in": 1}, stop="all")
    (tmp_path / "empty.txt").write_text("")
    empty = tdi.FileDataset(str(tmp_path / "empty.txt"), tdi.readers.text_lines)
    with pytest.raises(SourceError, match="the source 'empty' of the mixture has no record"):
        list(tdi.Mixture({"empty": empty, "web": files(folder, "web")}, {"empty": 1, "web": 1}, stop="repeat"))
    with pytest.raises(ValueError, match="the source 'e' is empty"):
        tdi.Mixture({"e": []}, {"e": 1})


def refused_policy(folder: str) -> str:
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.FILE)
    with pytest.raises(ShardingError) as error:
        tdi.Strategy(["cpu"]).distribute_dataset(mixture(folder), options, global_batch_size=SIZE)
    return str(error.value)


def test_policy_file_is_refused_with_the_way_out(scenes: Scenes) -> None:
    told = scenes(2, "policy FILE")
    assert told == [told[0]] * 2
    assert "policy FILE deals out whole files" in told[0]
    assert "Use AutoShardPolicy.DATA" in told[0]


def test_costs_of_a_mixture_are_those_of_sources_and_records(folder: str) -> None:
    asked: set[tuple[int, Any]] = set()

    def cost(sample: tuple[int, Any]) -> float:
        asked.add(tuple(sample))
        return 1.0

    strategy = tdi.Strategy(["cpu"] * 2)
    with strategy.distribute_dataset(mixture(folder), tdi.InputOptions(balance=cost), global_batch_size=SIZE) as loader:
        for _ in loader:
            pass
    assert {(0, "3"), (1, "1007"), (2, 3005), (3, 7)} < asked
    with pytest.raises(TypeError, match=r"a mixture has no samples by index; .* \(number of the source, record\)"):
        strategy.distribute_dataset(mixture(folder), tdi.InputOptions(balance=[1.0]), global_batch_size=SIZE)


def length_on_rank(line: str) -> int:
    """Of a line; one is another on rank 1."""
    return 9 if line == "1007" and torch.distributed.get_rank() == 1 else len(line)


def lengths_differ(folder: str, num_workers: int, unit: str, options: dict[str, Any]) -> list[Any]:
    found = []
    array = [9 - torch.distributed.get_rank()] * BOOK
    for more in ({"code": length_on_rank}, {"book": array}):
        mixed = mixture(folder, unit=unit, lengths={**LENGTHS, **more})
        data: Any = DataLoader(mixed, SIZE, num_workers=num_workers)
        with tdi.Strategy(["cpu"]).distribute_dataset(data, tdi.InputOptions(**options)) as loader:
            steps, error = steps_until_raised(loader)
        assert error is not None
        found.append((steps, error.kind, error.message))
    return found


def same_cost(_sample: Any) -> float:
    return 1.0


LENGTHS_DIFFER: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tokens": (0, "tokens", {}),
    "samples, a loader worker": (1, "samples", {}),
    "tokens, by cost": (0, "tokens", {"balance": same_cost}),
}


@pytest.mark.parametrize("name", LENGTHS_DIFFER)
def test_lengths_that_differ_between_ranks_are_refused_on_all_at_the_step_of_the_sample(
    name: str, folder: str, scenes: Scenes
) -> None:
    first, second = scenes(2, name)
    assert first == second
    _, unit, _ = LENGTHS_DIFFER[name]
    order = list(mixture(folder, unit=unit, lengths=LENGTHS))
    at = [order.index(1007) // SIZE, next(place for place, number in enumerate(order) if number >= 5000) // SIZE]
    for (steps, kind, message), step in zip(first, at, strict=True):
        assert (steps, kind) == (step, "RankDisagreement")
        assert f"the ranks read different data at step {step} of epoch 0" in message
        assert "rank 0: " in message
        assert "rank 1: " in message
        assert "lengths= must tell every rank the same" in message


def no_length_on_rank(line: str) -> int:
    if line == "1007" and torch.distributed.get_rank() == 1:
        raise KeyError(line)
    return len(line)


def fails_to_measure(folder: str, num_workers: int) -> list[Any]:
    found = []
    for length in (no_length_on_rank, lambda line: -1 if line == "1007" else len(line)):
        data: Any = DataLoader(mixture(folder, lengths={"code": length}), SIZE, num_workers=num_workers)
        with tdi.Strategy(["cpu"]).distribute_dataset(data) as loader:
            steps, error = steps_until_raised(loader)
        assert error is not None
        found.append((steps, error.kind, error.message.splitlines()[0]))
    return found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_length_that_cannot_be_found_is_the_error_of_all_ranks_at_one_step(
    folder: str, num_workers: int, scenes: Scenes
) -> None:
    first, second = scenes(2, f"no length, {num_workers} workers")
    assert first == second
    step = list(mixture(folder)).index(1007) // SIZE
    (_, _, missing), (_, _, negative) = first
    assert [each[:2] for each in first] == [(step, "SourceError")] * 2
    assert f"the input of rank 1 failed at step {step}" in missing
    assert "code: the length of record 7 of" in missing
    assert "could not be found: KeyError: '1007'" in missing
    assert "code-0.txt is -1; it must be 0 or more" in negative


def scenes_of(_: int, folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "policy FILE": partial(refused_policy, str(folder)),
        **{name: partial(lengths_differ, str(folder), *given) for name, given in LENGTHS_DIFFER.items()},
        **{f"no length, {workers} workers": partial(fails_to_measure, str(folder), workers) for workers in (0, 1)},
    }


@pytest.fixture(scope="module")
def scenes(folder: str) -> Scenes:
    return launched((2,), scenes_of, Path(folder))
