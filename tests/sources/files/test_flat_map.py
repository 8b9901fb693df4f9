"""``flat_map_fn``: samples of one record or several, once on any number of ranks, resumed, shuffled, with failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Any, BinaryIO

import pytest

import torchdistinput as tdi
from torchdistinput import readers
from torchdistinput.testing import run_ranks

SIZES, BATCH = (13, 40, 9), 10
BAD = 20


def words(line: str) -> list[str]:
    """A line with a number n has n mod 4 samples."""
    return [f"{line}-{each}" for each in range(int(line) % 4)]


def words_but_of_one(line: str) -> list[str]:
    if int(line) == BAD:
        raise ValueError("a bad line")
    return words(line)


SAMPLES = [sample for number in range(sum(SIZES)) for sample in words(str(number))]


MIXED: dict[str, Any] = {"shuffle_files": True, "shuffle_buffer": 7, "cycle_length": 2, "block_length": 3, "seed": 5}
FILE, DATA = tdi.AutoShardPolicy.FILE, tdi.AutoShardPolicy.DATA


def plain_lines(file: BinaryIO) -> list[str]:
    """A reader without blocks."""
    return file.read().decode().split()


@readers.in_blocks
def lines_of_three(file: BinaryIO, offset: int) -> Iterator[tuple[int, list[str]]]:
    """Blocks of three lines."""
    file.seek(offset)
    while lines := [line.decode().strip() for line in islice(file, 3)]:
        yield offset, lines
        offset = file.tell()


WAYS: dict[str, tuple[tdi.AutoShardPolicy, dict[str, Any], Any, Any]] = {
    "FILE": (FILE, {}, words, readers.text_lines),
    "DATA": (DATA, {}, words, readers.text_lines),
    "FILE mixed": (FILE, MIXED, words, readers.text_lines),
    "DATA mixed": (DATA, MIXED, words, readers.text_lines),
    "FILE, in blocks of three": (FILE, {}, words, lines_of_three),
    "DATA, without blocks": (DATA, {"cycle_length": 2}, words, plain_lines),
}


def distributed(pattern: str, way: str, fn: Any = None, read: Any = None, **options: Any) -> Any:
    policy, settings, usual_fn, usual_read = WAYS[way]
    files = tdi.FileDataset(pattern, read or usual_read, flat_map_fn=fn or usual_fn, map_fn=str.upper, **settings)
    chosen = tdi.InputOptions(auto_shard_policy=policy, **options)
    return tdi.Strategy(["cpu"]).distribute_dataset(files, chosen, global_batch_size=4 if fn is None else BATCH)


def steps(loader: Any, most: int | None = None) -> list[list[str]]:
    made = []
    with closing(iter(loader)) as iterator:
        for part in iterator:
            made.append([*part])
            if len(made) == most:
                break
    return made


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, first = tmp_path_factory.mktemp("lines"), 0
    for number, size in enumerate(SIZES):
        (folder / f"{number}.txt").write_text("".join(f"{each}\n" for each in range(first, first + size)))
        first += size
    return str(folder / "*.txt")


def read(pattern: str, states: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        found[way] = steps(distributed(pattern, way))
        loader = distributed(pattern, way)
        if way in states:
            loader.load_state_dict(states[way])
        found[f"{way}, left"] = steps(loader, 2), loader.state_dict()
    found["skipped"] = steps(distributed(pattern, "DATA mixed", words_but_of_one, on_error="skip"))
    return found


def numbers(ranks: list[Any], what: str) -> list[str]:
    parts = [rank[what] if isinstance(rank[what], list) else rank[what][0] for rank in ranks]
    return [sample for step in zip(*parts, strict=True) for sample in chain.from_iterable(step)]


def test_each_sample_comes_once_and_an_epoch_goes_on_at_another_world_size(pattern: str) -> None:
    two = run_ranks(2, read, pattern, {})
    three = run_ranks(3, read, pattern, {way: two[0][f"{way}, left"][1] for way in WAYS})
    for way in WAYS:
        alone = [*chain.from_iterable(steps(distributed(pattern, way)))]
        assert sorted(alone) == sorted(SAMPLES)
        for ranks in (two, three):
            found = numbers(ranks, way)
            assert sorted(found) == sorted(SAMPLES)
            assert way.startswith("FILE") or found == alone
        rest = distributed(pattern, way)
        rest.load_state_dict(three[0][f"{way}, left"][1])
        parts = [numbers(two, f"{way}, left"), numbers(three, f"{way}, left"), [*chain.from_iterable(steps(rest))]]
        assert sorted(chain.from_iterable(parts)) == sorted(SAMPLES)
    for ranks in (two, three):
        good = [sample for sample in SAMPLES if not sample.startswith(f"{BAD}-")]
        assert sorted(numbers(ranks, "skipped")) == sorted(good)


@pytest.mark.parametrize("read", [lines_of_three, plain_lines, readers.text_lines])
@pytest.mark.parametrize("window", [0, 3])
def test_a_state_at_each_sample_goes_on_there(pattern: str, read: Any, window: int) -> None:
    def made() -> Any:
        settings = {"shuffle_buffer": window, "cycle_length": 2}
        files = tdi.FileDataset(pattern, read, flat_map_fn=words, **settings)  # type: ignore[arg-type]
        return tdi.Strategy(["cpu"]).distribute_dataset(files, global_batch_size=1)

    loader = made()
    whole, states = [], []
    for (sample,) in loader:
        whole.append(sample)
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert sorted(whole) == sorted(SAMPLES)
    for number, state in [*enumerate(states, 1)][::3]:
        rest = made()
        rest.load_state_dict(state)
        assert [sample for (sample,) in rest] == whole[number:]


@pytest.mark.parametrize("read", [readers.text_lines, plain_lines])
def test_a_failure_names_the_file_and_the_record_and_comes_after_the_samples_in_front(pattern: str, read: Any) -> None:
    def fn(line: str) -> list[str]:
        if int(line) == 30:
            raise ValueError("a bad line")
        return words(line)

    found: list[str] = []
    with pytest.raises(tdi.SourceError, match=r"1\.txt: .*flat_map_fn failed: ValueError: a bad line; .*'30'"):
        found.extend(chain.from_iterable(distributed(pattern, "FILE", fn, read)))
    assert found == SAMPLES[: len(found)]
    assert len(SAMPLES[: len(found)]) > 25
