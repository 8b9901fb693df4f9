"""A source of a user's own, by the public contract alone, gets what files get; it is ``examples/sqlite_source.py``."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch.distributed as dist

import torchdistinput as tdi
from tests.data import Fragments
from tests.ecosystem.test_kinds import lines_of_three, plain_lines
from tests.support.launched import Scenes, launched
from torchdistinput import Fragment, readers
from torchdistinput.testing import RankFailed, check_source

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from sqlite_source import SqliteSource

ROWS, KEYS, BATCH = 103, 25, 10  # in five ranges, the last of them short
BAD = 42  # the text of this row is no number

Made = list[list[int]]


def database(folder: Path, bad: int | None = None) -> str:
    path = str(folder / "data.db")
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE samples (key INTEGER PRIMARY KEY, text TEXT)")
        rows = [(key, "?" if key == bad else str(key)) for key in range(ROWS)]
        made.executemany("INSERT INTO samples VALUES (?, ?)", rows)
    return path


def steps(loader: tdi.DistributedDataset, most: int | None = None) -> Made:
    """This rank's part of each step, to the end of an epoch or so many steps."""
    made: Made = []
    with closing(iter(loader)) as iterator:
        for part in iterator:
            made.append(part.tolist())
            if len(made) == most:
                break
    return made


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [*chain.from_iterable(lists)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return database(tmp_path_factory.mktemp("good")), database(tmp_path_factory.mktemp("bad"), BAD)


def uneven() -> tdi.DistributedDataset:
    """Of fragments that tell their numbers of records; by turns the files of one worker have most of them."""
    data = Fragments({0: 12, 12: 2, 14: 12, 26: 2}, block=2)
    chosen = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.FILE)
    return tdi.Strategy(["cpu"]).distribute_dataset(data, chosen, global_batch_size=8)


def scenes_of(_: int, folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "uneven": every_state,
        "too few": partial(refused, str(folder / "data.db")),
        **{f"in progress, {prefetch} ahead": partial(states_of_each_step, prefetch) for prefetch in (2, 8)},
    }


@pytest.fixture(scope="module")
def scenes(paths: tuple[str, str]) -> Scenes:
    return launched((2,), scenes_of, Path(paths[0]).parent)


def every_state() -> list[tuple[list[int], dict[str, Any]]]:
    loader = uneven()
    return [(part.tolist(), loader.state_dict()) for part in loader]


def test_a_state_after_more_steps_than_a_smaller_world_makes_is_taken_there(scenes: Scenes) -> None:
    ranks = scenes(2, "uneven")
    steps_of_two, done = len(ranks[0]), []
    assert steps_of_two > len(uneven())
    for step in range(steps_of_two - 1):  # after the last step the state is another one
        done += [number for rank in ranks for number in rank[step][0]]
        state = ranks[0][step][1]
        assert ranks[1][step][1] == state
        loader = uneven()
        loader.load_state_dict(state)
        rest = steps(loader)
        assert sorted(done + joined(rest)) == list(range(28))
        loader.load_state_dict(state)
        for made in range(len(rest) - 1):
            steps(loader, 1)
            again = uneven()
            again.load_state_dict(loader.state_dict())
            assert steps(again) == rest[made + 1 :]
            loader.load_state_dict(loader.state_dict())


# ------------------------------------------------------------------------------------------------ in one process


class Broken(SqliteSource):
    """Fails at one key, and says where it can go on, if it may."""

    def __init__(self, path: str, error: type[Exception] = ValueError) -> None:
        super().__init__(path, "samples", KEYS)
        self.error = error

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        for first, rows in super().read(fragment, position):
            if first <= BAD < first + len(rows):
                if first < BAD:
                    yield first, rows[: BAD - first]
                if self.error is tdi.SourceError:
                    raise tdi.SourceError("a bad row", offset=BAD, resume_at=BAD + 1)
                raise self.error("a bad row")
            yield first, rows


@pytest.mark.parametrize("window", [0, 4])
def test_blocks_of_columns_are_entered_again_at_any_record(window: int) -> None:
    def loader() -> tdi.DataLoader[Any]:
        return tdi.DataLoader(tdi.FragmentDataset(in_columns, shuffle_buffer=window), batch_size=3)

    in_columns = Fragments({0: 13, 13: 13}, block=5, of=lambda numbers: {"number": numbers})

    whole = [batch["number"].tolist() for batch in loader()]
    assert sorted(joined(whole)) == [*range(26)]
    for step in range(1, len(whole)):
        with loader() as begun, loader() as again:
            assert len([*zip(range(step), begun, strict=False)]) == step
            again.load_state_dict(begun.state_dict())
            assert [batch["number"].tolist() for batch in again] == whole[step:]


def own(source: Any, **options: Any) -> tdi.DistributedDataset:
    return tdi.Strategy(["cpu"]).distribute_dataset(
        source, tdi.InputOptions(**options), global_batch_size=BATCH, collate_fn=lambda rows: [row[0] for row in rows]
    )


def test_what_a_source_raises_names_the_fragment_and_the_position(paths: tuple[str, str]) -> None:
    with pytest.raises(
        tdi.SourceError, match=r"samples:1: reading failed near position 25, after 17 records: .*a bad row"
    ):
        list(own(Broken(paths[0])))


def test_records_that_a_source_cannot_read_are_left_out_if_it_says_where_to_go_on(paths: tuple[str, str]) -> None:
    loader = own(Broken(paths[0], tdi.SourceError), on_error="skip")
    assert joined([*batch] for batch in loader) == [key for key in range(ROWS) if key != BAD]
    assert loader.stats()["skipped_samples"] == 1
    with pytest.raises(tdi.SourceError, match="samples:1"):
        list(own(Broken(paths[0]), on_error="skip"))


def test_a_fragment_that_changed_since_the_state_was_saved_is_named(tmp_path: Path) -> None:
    path = database(tmp_path)
    loader = own(SqliteSource(path, "samples", KEYS))
    steps_of(loader, 3)
    state = loader.state_dict()
    with closing(sqlite3.connect(path)) as changed, changed:
        changed.execute("DELETE FROM samples WHERE key = 30")
    later = own(SqliteSource(path, "samples", KEYS))
    with pytest.raises(tdi.StateMismatch, match="samples:1: the fragment has changed"):
        later.load_state_dict(state)


class Numbers:
    """Eight fragments of six numbers each; of some, the content has changed."""

    def __init__(self, changed: Sequence[int] = ()) -> None:
        self._changed = changed

    def fragments(self) -> list[Fragment]:
        return [Fragment(str(number), fingerprint=f"{number in self._changed}") for number in range(8)]

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        for at in range(position or 0, 6):
            yield at, [6 * int(fragment.name) + at]


def states_of_each_step(prefetch: int) -> list[str]:
    """One rank: the state after each step."""
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.FILE, prefetch=prefetch)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(Numbers(), options, global_batch_size=4)
    return [json.dumps(loader.state_dict()) for _ in loader]


@pytest.mark.parametrize("prefetch", [2, 8])
def test_of_several_ranks_each_fragment_in_progress_is_known_at_each_step(prefetch: int, scenes: Scenes) -> None:
    """Also one that was opened in the batch of which a part was delivered."""
    first, other = scenes(2, f"in progress, {prefetch} ahead")
    assert first == other
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.FILE)
    strategy = tdi.Strategy(["cpu"])
    for step, state in enumerate(first[:-1], 1):
        batches, row = divmod(step, 2)  # of each rank: a batch of four of its own records lasts two steps
        parts = {4 * batches // 6, (4 * batches + 3) // 6} if row else {(4 * batches - 1) // 6}
        in_progress = [2 * part + rank for part in parts for rank in range(2)]
        for fragment in range(8):
            loader = strategy.distribute_dataset(Numbers([fragment]), options, global_batch_size=4)
            if fragment in in_progress:
                with pytest.raises(tdi.StateMismatch, match=f"{fragment}: the fragment has changed"):
                    loader.load_state_dict(json.loads(state))
            elif fragment > max(in_progress):
                loader.load_state_dict(json.loads(state))
                assert len(joined(loader)) == 48 - 4 * step


def steps_of(loader: tdi.DistributedDataset, most: int) -> None:
    with closing(iter(loader)) as iterator:
        for _ in range(most):
            next(iterator)


def test_too_few_fragments_for_the_workers_are_refused_with_both_numbers(scenes: Scenes) -> None:
    for message in scenes(2, "too few"):
        assert "1 file(s)" in message
        assert "2 ranks" in message


def refused(path: str) -> str:
    with pytest.raises(tdi.ShardingError) as caught:
        tdi.Strategy(["cpu"]).distribute_dataset(SqliteSource(path, "samples", ROWS), global_batch_size=BATCH)
    assert dist.get_world_size() == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda _: 3, "the methods fragments and read"),
        (lambda path: Named(path, []), "gave no fragment"),
        (lambda path: Named(path, ["a", "a"]), "two fragments of the name 'a'"),
    ],
)
def test_what_is_no_source_is_refused(source: Any, message: str, paths: tuple[str, str]) -> None:
    with pytest.raises((TypeError, tdi.InputError), match=message):
        tdi.FragmentDataset(source(paths[0]))


class Named(SqliteSource):
    def __init__(self, path: str, names: Sequence[str]) -> None:
        super().__init__(path, "samples", KEYS)
        self.names = names

    def fragments(self) -> Sequence[Fragment]:
        return [Fragment(name) for name in self.names]


# -------------------------------------------------------------------------------------------------- check_source


def test_a_good_source_passes_the_check(tmp_path: Path) -> None:
    path = database(tmp_path)

    def change() -> None:
        with closing(sqlite3.connect(path)) as changed, changed:
            changed.execute("DELETE FROM samples WHERE key = 30")

    with closing(sqlite3.connect(path)) as below, below:
        below.executemany("INSERT INTO samples VALUES (?, '-')", [(key,) for key in range(-75, 0)])
    source = SqliteSource(path, "samples", 70)
    assert [each.num_records for each in source.fragments()][:3] == [5, 70, 70]
    check_source(source, change=change)


class Faulty(SqliteSource):
    """Breaks the contract in one way."""

    def __init__(self, path: str, fault: str) -> None:
        super().__init__(path, "samples", 100)
        self.fault = fault
        self.calls = 0

    def fragments(self) -> Sequence[Fragment]:
        self.calls += 1
        found = [*super().fragments()]
        if self.fault == "other fragments":
            return found[: 1 + self.calls % 2]
        if self.fault == "other counts":
            return [Fragment(each.name, 3) for each in found]
        return found

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        for first, rows in super().read(fragment, None if self.fault == "not entered" else position):
            if self.fault == "empty block":
                yield first, []
            if self.fault == "no list":
                yield first, cast(Any, 7)
            if self.fault == "tuples":
                yield (first, 1), rows
            elif self.fault == "no position":
                yield None, rows
            elif self.fault == "one late":
                yield first + 1, rows
            else:
                yield first, rows


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other fragments", "something else"),
        ("other counts", "samples:0: 100 records, but num_records=3"),
        ("not entered", "samples:0, position 64: 100 records came from there, not the same 36"),
        ("empty block", "samples:0: a block has no record"),
        ("no list", "samples:0: a block 7; a list of records"),
        ("tuples", "after JSON"),
        ("no position", "samples:0: a block came with the position None"),
        ("one late", "samples:0, position 1: 99 records came from there, not the same 100"),
    ],
)
def test_the_check_names_what_is_wrong(fault: str, message: str, paths: tuple[str, str]) -> None:
    with pytest.raises(AssertionError, match=message):
        check_source(Faulty(paths[0], fault))
    with pytest.raises(AssertionError, match="no Fragment shows it"):
        check_source(SqliteSource(paths[0], "samples", 100), change=lambda: None)


class OfTwoTypes:
    """A column is an array in one fragment, and a list in the other."""

    def fragments(self) -> Sequence[Fragment]:
        return [Fragment("a"), Fragment("b")]

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        yield 0, {"key": np.arange(3) if fragment.name == "a" else [0, 1, 2]}


def test_the_check_finds_columns_of_two_types_and_what_is_no_source() -> None:
    with pytest.raises(AssertionError, match=r"b, position 0: its columns are \{'key': 'list'\}, and those of a"):
        check_source(OfTwoTypes())
    for given in (OfTwoTypes, lambda source: source):
        with pytest.raises(AssertionError, match=r"an object with fragments\(\) and read"):
            check_source(cast(Any, given))
    with pytest.raises(tdi.InputError, match="the class OfTwoTypes"):
        tdi.Strategy(["cpu"]).distribute_dataset(OfTwoTypes, global_batch_size=2)


class Kept:
    """Keeps its position in itself, anew for each reading or for all of them; pickled copies have their own."""

    def __init__(self, begins_anew: bool) -> None:
        self.begins_anew = begins_anew
        self.position = 0

    def fragments(self) -> Sequence[Fragment]:
        return [Fragment("numbers", 9)]

    def read(self, _: Fragment, position: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        if self.begins_anew or position is not None or self.position >= 9:
            self.position = position or 0
        while self.position < 9:
            self.position += 3
            yield self.position - 3, [*range(self.position - 3, self.position)]


@pytest.mark.parametrize("begins_anew", [True, False])
def test_the_check_finds_a_position_that_is_kept_in_the_source(begins_anew: bool) -> None:
    with pytest.raises(AssertionError, match="numbers: other records came when it was read beside another reading"):
        check_source(Kept(begins_anew))


# ------------------------------------------------------------------------------------------ check_source, on ranks


class Damaged(SqliteSource):
    """Keeps the contract in one process, and on ranks does one thing wrong."""

    def __init__(self, path: str, fault: str) -> None:
        super().__init__(path, "samples", KEYS)
        self.fault = fault

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        several = dist.is_initialized() and dist.get_world_size() > 1
        for first, rows in super().read(fragment, position):
            if several and self.fault == "fewer records" and first > 60:
                yield first, rows[1:]
            elif several and self.fault == "other records" and first == 50:
                yield first, [(key + 1000, text) for key, text in rows]
            elif several and self.fault == "another error" and first == 50:
                raise OSError("the database is locked")
            else:
                yield first, rows


def loader_of(data: Any, **options: Any) -> Any:
    chosen = tdi.InputOptions(**options)
    return tdi.Strategy(["cpu"]).distribute_dataset(data, chosen, global_batch_size=BATCH)


def as_much_as_this_rank(fault: str) -> Any:
    """A loader of a user's own, wrong in one way."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if fault == "a part of its own":  # and read as if it were the whole
        return loader_of(range(dist.get_rank(), 40, size))
    return loader_of(range(40 if size == 1 or fault != "longer" else 44))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fewer records", "Damaged, DATA, on 2 rank.*, first epoch: 2 samples are missing and 0 too many, of 103"),
        ("other records", "Damaged, DATA, on 2 rank.*: 25 samples are missing and 25 too many, of 103"),
        ("another error", "samples:2: .*the database is locked"),
    ],
)
def test_the_check_finds_what_a_source_does_wrong_on_ranks(fault: str, message: str, paths: tuple[str, str]) -> None:
    source = Damaged(paths[0], fault)
    check_source(source)
    with pytest.raises((AssertionError, RankFailed), match=message):
        check_source(source, worlds=(2,))


def test_the_check_reads_loaders_as_they_are() -> None:
    check_source(partial(as_much_as_this_rank, "nothing"), worlds=(2, 1))
    longer = {"one": partial(as_much_as_this_rank, "longer")}
    with pytest.raises(AssertionError, match="one, as it is, on 2 rank.*: 0 samples are missing and 4 too many, of 40"):
        check_source(longer, worlds=(2,))
    with pytest.raises(RankFailed, match="RankDisagreement"):
        check_source(partial(as_much_as_this_rank, "a part of its own"), worlds=(2, 1))
    with pytest.raises(AssertionError, match="of: found 3 records; at least 10 are needed"):
        check_source({"of": Fragments({1: 3})}, worlds=(2,))
    with pytest.raises(RankFailed, match="of: the function makes a source; give the source itself"):
        check_source({"of": partial(Fragments, {1: 3})}, worlds=(1,))


SIZES = (13, 40, 9)


def words(line: str) -> list[str]:
    """A line with a number n has n mod 4 samples."""
    return [f"{line}-{each}" for each in range(int(line) % 4)]


SAMPLES = [sample for number in range(sum(SIZES)) for sample in words(str(number))]


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, first = tmp_path_factory.mktemp("lines"), 0
    for number, size in enumerate(SIZES):
        (folder / f"{number}.txt").write_text("".join(f"{each}\n" for each in range(first, first + size)))
        first += size
    return str(folder / "*.txt")


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

    files = tdi.FileDataset(pattern, read, flat_map_fn=fn, map_fn=str.upper)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(files, global_batch_size=BATCH)
    found: list[str] = []
    with pytest.raises(tdi.SourceError, match=r"1\.txt: .*flat_map_fn failed: ValueError: a bad line; .*'30'"):
        found.extend(chain.from_iterable(loader))
    assert found == SAMPLES[: len(found)]
    assert len(SAMPLES[: len(found)]) > 25
