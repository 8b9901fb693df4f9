"""Rows of strings that are sliced and known, against those that are collated and looked at."""

from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, default_collate

import torchdistinput as tdi
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.file_resharding import ReaderCursor
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.cuts import Cut
from torchdistinput.sources.files.batching import KnownRows, RecordRows, RecordStart
from torchdistinput.sources.read_failures import Failure


def files(folder: Path, sizes: tuple[int, ...] = (7, 0, 12, 5), bad: tuple[int, int] | None = None) -> list[str]:
    for number, size in enumerate(sizes):
        lines = [f"{number}.{line} \u00e4".encode() for line in range(size)]
        if bad is not None and bad[0] == number:
            lines[bad[1]] = b"\xff"
        (folder / f"{number}").write_bytes(b"".join(line + b"\n" for line in lines))
    return [str(folder / f"{number}") for number in range(len(sizes))]


def told(rows: RecordRows, start: RecordStart) -> tuple[list[Any], list[Any], list[Any]]:
    """The rows, where the reader stood after some of them, and the sizes of those that are known."""
    found: list[Any] = []
    places: list[Any] = []
    sized: list[Any] = []
    for cut in rows.of_epoch(0, start):
        if isinstance(cut, Failure):
            found.append((type(cut.error), str(cut.error), cut.where, cut.origin))
            continue
        if cut.place is not None:
            places.append((len(found), cut.place))
        if isinstance(cut, Cut):
            found += cut.rows
            continue
        assert isinstance(cut, KnownRows)
        for row, sizes, drew in cut.rows:
            assert drew == 0
            assert sizes.pieces == tuple(0 if piece is None else len(piece) for piece in row)
            sized.append(sizes)
            found.append(row)
    return found, places, sized


WORLDS = [(1, 1, True), (1, 3, True), (2, 1, False), (3, 2, False), (2, 2, True)]


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("bad", [None, (0, 6), (2, 8)], ids=str)
def test_sliced_rows_are_the_collated_ones(
    tmp_path: Path, world: tuple[int, int, bool], bad: tuple[int, int] | None
) -> None:
    workers, replicas, shared = world
    names = files(tmp_path, bad=bad)
    for cycle_length, size, drop_last, first in [
        (1, 6, False, 0),
        (1, 4, True, 1),
        (3, 5, False, 2),
        (2, 24, False, 0),
    ]:
        data = tdi.FileDataset(names, tdi.readers.text_lines, cycle_length=cycle_length, block_length=2)
        for worker in range(workers):
            topology = Topology(num_workers=workers, replicas_per_worker=replicas, worker=worker)
            settings: dict[str, Any] = {"by_file": not shared, "drop_last": drop_last, "with_index": False}
            made = [
                RecordRows(data, Cutter(topology, shared, size), default_collate, strings=strings, **settings)
                for strings in (False, True)
            ]
            start = RecordStart((), ReaderCursor(), first)
            (slow, slow_places, nothing), (fast, fast_places, sized) = (told(rows, start) for rows in made)
            assert fast == slow
            assert fast_places == slow_places
            assert not nothing
            assert len(sized) == sum(type(row) is list for row in fast)


def test_rows_are_not_known_where_they_are_labelled_thinned_or_sent_away(tmp_path: Path) -> None:
    data = tdi.FileDataset(files(tmp_path), tdi.readers.text_lines)
    cutter = Cutter(Topology(num_workers=1, replicas_per_worker=1, worker=0), shared=True, global_batch_size=4)
    for asked in ({"with_index": True}, {"with_index": False, "skip": True}):
        settings: dict[str, Any] = {"by_file": False, "drop_last": False, "strings": True, **asked}
        assert not told(RecordRows(data, cutter, default_collate, **settings), RecordStart())[2]
    rows = RecordRows(data, cutter, default_collate, by_file=False, drop_last=False, with_index=False, strings=True)
    again = pickle.loads(pickle.dumps(rows))
    assert told(again, RecordStart())[:2] == told(rows, RecordStart())[:2]


def as_it_is(samples: list[str]) -> list[str]:
    return samples


@pytest.mark.parametrize("partial_batch", ["keep", "pad"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_is_delivered_is_the_same(tmp_path: Path, partial_batch: Any, replicas: int) -> None:
    names = files(tmp_path, (7, 3, 12, 6))  # 28: the last batch of 4 leaves nothing for the third replica
    found = []
    for collate in (default_collate, as_it_is):  # the second one is no collate function that the library knows
        loader = DataLoader(tdi.FileDataset(names, tdi.readers.text_lines), 6, collate_fn=collate)
        options = tdi.InputOptions(partial_batch=partial_batch)
        with tdi.Strategy(["cpu"] * replicas).distribute_dataset(loader, options) as dataset:
            steps, states = [], []
            for element in dataset:
                parts = [element] if partial_batch == "keep" else element
                pieces = [[part] if replicas == 1 else list(part.values) for part in parts]
                steps.append(([list(piece) for piece in pieces[0]], [mask.tolist() for mask in chain(*pieces[1:])]))
                states.append(dataset.state_dict())
                pieces[0][0].append("more")  # it is the loop's own, and no other batch has a part of it
            found.append((steps, states, str(dataset.element_spec)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 5
