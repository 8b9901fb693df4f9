"""``flat_map_fn``: samples of one record or several, once on any number of ranks, resumed, shuffled, with failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
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


class Chunks:
    """The lines of a file in chunks of ``size``; the last chunk may be shorter. It changes its state in place."""

    def __init__(self, size: int = 4, bad: int = -1) -> None:
        self.size, self.bad = size, bad

    def initial_state(self) -> list[str]:
        return []

    def __call__(self, state: list[str], line: str) -> tuple[list[str], list[str]]:
        state.append(line)
        if line == str(self.bad):
            raise ValueError("a bad line")
        if len(state) < self.size:
            return state, []
        whole = "+".join(state)
        state.clear()
        return state, [whole]

    def final_samples(self, state: list[str]) -> list[str]:
        return ["+".join(state)] if state else []


def chunks(lines: list[int], size: int = 4) -> list[str]:
    return ["+".join(map(str, lines[start : start + size])) for start in range(0, len(lines), size)]


LINES = [[*range(13)], [*range(13, 53)], [*range(53, 62)]]
"""Of each file."""
CHUNKS = [*chain.from_iterable(map(chunks, LINES))]

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
    "FILE, chunks": (FILE, {}, Chunks(), lines_of_three),
    "DATA, chunks": (DATA, {"cycle_length": 2}, Chunks(), lines_of_three),
    "FILE mixed, chunks": (FILE, MIXED, Chunks(), lines_of_three),
    "DATA mixed, chunks": (DATA, MIXED, Chunks(), plain_lines),
}


def samples_of(way: str) -> list[str]:
    return sorted(CHUNKS if way.endswith("chunks") else SAMPLES)


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
    for way, fn in (("DATA mixed", words_but_of_one), ("FILE, chunks", Chunks(bad=BAD))):
        found[f"{way}, skipped"] = steps(distributed(pattern, way, fn, on_error="skip"))
    return found


def numbers(ranks: list[Any], what: str) -> list[str]:
    parts = [rank[what] if isinstance(rank[what], list) else rank[what][0] for rank in ranks]
    return [sample for step in zip(*parts, strict=True) for sample in chain.from_iterable(step)]


def test_each_sample_comes_once_and_an_epoch_goes_on_at_another_world_size(pattern: str) -> None:
    two = run_ranks(2, read, pattern, {})
    three = run_ranks(3, read, pattern, {way: two[0][f"{way}, left"][1] for way in WAYS})
    for way in WAYS:
        alone = [*chain.from_iterable(steps(distributed(pattern, way)))]
        assert sorted(alone) == samples_of(way)
        for ranks in (two, three):
            found = numbers(ranks, way)
            assert sorted(found) == samples_of(way)
            assert way.startswith("FILE") or found == alone
        rest = distributed(pattern, way)
        rest.load_state_dict(three[0][f"{way}, left"][1])
        parts = [numbers(two, f"{way}, left"), numbers(three, f"{way}, left"), [*chain.from_iterable(steps(rest))]]
        assert sorted(chain.from_iterable(parts)) == samples_of(way)
    for ranks in (two, three):
        good = [sample for sample in SAMPLES if not sample.startswith(f"{BAD}-")]
        assert sorted(numbers(ranks, "DATA mixed, skipped")) == sorted(good)
        in_chunks = [*chain.from_iterable(chunks([line for line in lines if line != BAD]) for lines in LINES)]
        assert sorted(numbers(ranks, "FILE, chunks, skipped")) == sorted(in_chunks)


@pytest.mark.parametrize("read", [lines_of_three, plain_lines, readers.text_lines])
@pytest.mark.parametrize("window", [0, 3])
def test_a_state_at_each_sample_goes_on_there(pattern: str, read: Any, window: int) -> None:
    def made() -> Any:
        settings = {"shuffle_buffer": window, "cycle_length": 2}
        files = tdi.FileDataset(pattern, read, flat_map_fn=Chunks(), **settings)  # type: ignore[arg-type]
        return tdi.Strategy(["cpu"]).distribute_dataset(files, global_batch_size=1)

    loader = made()
    whole, states = [], []
    for (chunk,) in loader:
        whole.append(chunk)
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert sorted(whole) == sorted(CHUNKS)
    for number, state in enumerate(states, 1):
        rest = made()
        rest.load_state_dict(state)
        assert [chunk for (chunk,) in rest] == whole[number:]


def test_damaged_records_in_front_leave_the_state_as_it_was(tmp_path: Path) -> None:
    """The reader knows where the next record starts; the chunk goes on with it."""
    (tmp_path / "0.json").write_text("".join("?\n" if number in {0, 6, 19} else f"{number}\n" for number in range(20)))
    good = [number for number in range(20) if number not in {0, 6, 19}]

    def made() -> Any:
        files = tdi.FileDataset(str(tmp_path / "0.json"), readers.json_lines, flat_map_fn=ChunksOfNumbers())
        options = tdi.InputOptions(on_error="skip")
        return tdi.Strategy(["cpu"]).distribute_dataset(files, options, global_batch_size=1)

    loader = made()
    assert [*chain.from_iterable(loader)] == chunks(good)
    iterator = iter(made_loader := made())
    first = [next(iterator) for _ in range(3)]
    state = made_loader.state_dict()
    iterator.close()
    rest = made()
    rest.load_state_dict(state)
    assert [*chain.from_iterable([*first, *rest])] == chunks(good)


class ChunksOfNumbers(Chunks):
    def __call__(self, state: list[str], line: Any) -> tuple[list[str], list[str]]:
        return super().__call__(state, str(line))


def test_what_is_wrong_with_a_state_or_the_last_samples_is_told(pattern: str) -> None:
    class Sets(Chunks):
        def initial_state(self) -> Any:
            return set()

    class Ends(Chunks):
        def final_samples(self, state: list[str]) -> list[str]:
            raise ValueError(f"{len(state)} are left")

    with pytest.raises(tdi.SourceError, match=r"0\.txt: the state of flat_map_fn must be plain JSON .*got set\(\)"):
        steps(distributed(pattern, "FILE", Sets()))
    with pytest.raises(tdi.SourceError, match=r"0\.txt: flat_map_fn.final_samples failed: ValueError: 1 are left"):
        steps(distributed(pattern, "FILE", Ends()))
    with pytest.raises(tdi.SourceError, match=r"1\.txt: flat_map_fn failed: ValueError: a bad line; .*'20'"):
        steps(distributed(pattern, "FILE", Chunks(bad=BAD)))


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
