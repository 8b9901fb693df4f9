"""Tar archives on ranks: each sample once, in step, and on from any state at another world size, damaged or not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.sources.files.test_webdataset import tar
from tests.support.epochs import raised
from torchdistinput import readers
from torchdistinput.testing import run_ranks

SIZES = (5, 9, 0, 3, 1, 7, 12)
G, STOP = 4, 2
NUMBERS = [100 * shard + sample for shard, size in enumerate(SIZES) for sample in range(size)]
BAD = 103


class Case(NamedTuple):
    """A way to read the archives."""

    policy: str
    pattern: str = "?.tar"
    indexed: bool = False
    workers: int = 0
    skip: bool = False


CASES = {
    "FILE": Case("FILE"),
    "FILE, 2 loader workers": Case("FILE", workers=2),
    "DATA": Case("DATA"),
    "DATA, compressed": Case("DATA", "?.tar.gz"),
    "DATA, with an index": Case("DATA", indexed=True),
    "FILE, skipping": Case("FILE", "bad/?.tar", skip=True),
    "DATA, skipping": Case("DATA", "bad/?.tar", skip=True),
    "DATA, skipping, with an index": Case("DATA", "bad/?.tar", skip=True, indexed=True),
}


def write(folder: Path) -> None:
    (folder / "bad").mkdir()
    for shard, size in enumerate(SIZES):
        names = [(f"{sample:02}", 100 * shard + sample) for sample in range(size)]
        whole = [(f"s{shard}/{key}.{end}", b"%d" % number) for key, number in names for end in ("jpg", "id", "cls")]
        content = tar(whole)
        (folder / f"{shard}.tar").write_bytes(content)
        (folder / f"{shard}.tar.gz").write_bytes(gzip.compress(content))
        damaged = [member for member in whole if member != (f"s1/{BAD - 100:02}.cls", b"%d" % BAD)]
        (folder / f"bad/{shard}.tar").write_bytes(tar(damaged))


def opened(folder: str, case: Case) -> Any:
    index: Any = {"index_folder": f"{folder}/index"} if case.indexed else {}
    read = readers.webdataset("auto", ["cls", "id"])
    data = tdi.FileDataset(f"{folder}/{case.pattern}", read, map_fn=checked, cycle_length=2, **index)
    options = tdi.InputOptions(
        auto_shard_policy=tdi.AutoShardPolicy[case.policy], on_error="skip" if case.skip else "raise"
    )
    return tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(data, G, num_workers=case.workers), options)


def checked(sample: dict[str, Any]) -> int:
    assert [*sample] == ["__key__", "cls", "id"]
    assert sample["__key__"] == f"s{sample['cls'] // 100}/{sample['cls'] % 100:02}"
    assert sample["id"] == sample["cls"]
    return int(sample["cls"])


Played = dict[str, tuple[list[list[int]], list[list[int]] | None, str]]
"""Of each case: its epoch, what was left of the epoch of the state that was given, and a state."""


def play(folder: str, states: dict[str, str]) -> tuple[Played, Any, int | None]:
    """One rank: an epoch of each case, and the rest of another world's; then what a bad sample raises, and a length."""
    found: Played = {}
    for name, case in CASES.items():
        with opened(folder, case) as loader:
            iterator = iter(loader)
            epoch = [next(iterator).tolist() for _ in range(STOP)]
            state = json.dumps(loader.state_dict())
            epoch += [batch.tolist() for batch in iterator]
        rest = None
        if name in states:
            with opened(folder, case) as loader:
                loader.load_state_dict(json.loads(states[name]))
                rest = [batch.tolist() for batch in loader]
        found[name] = (epoch, rest, state)
    with opened(folder, Case("DATA", "bad/?.tar")) as loader:
        failure = raised(lambda: [*loader])
        steps = loader.step.index
    with opened(folder, Case("DATA", indexed=True)) as loader:
        length = len(loader)
    return found, (failure, steps), length


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[tuple[Played, Any, int | None]]]:
    """What each rank of each world has read; each world gets the states of the one before."""
    folder = tmp_path_factory.mktemp("tars")
    write(folder)
    found: dict[int, list[tuple[Played, Any, int | None]]] = {}
    states: dict[str, str] = {}
    for world in (2, 3, 1):
        found[world] = run_ranks(world, play, str(folder), states, timeout_seconds=240)
        states = {case: state for case, (_, _, state) in found[world][0][0].items()}
    return found


def steps_of(ranks: Sequence[list[list[int]]]) -> list[list[int]]:
    assert len({len(each) for each in ranks}) == 1, "the ranks made different numbers of steps"
    return [[number for part in row for number in part] for row in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_each_sample_comes_once_also_after_a_resume_at_another_world_size(
    name: str, world: int, worlds: dict[int, list[tuple[Played, Any, int | None]]]
) -> None:
    case = CASES[name]
    truth = sorted({*NUMBERS} - ({BAD} if case.skip else set()))
    steps = steps_of([played[name][0] for played, _, _ in worlds[world]])
    assert sorted(number for step in steps for number in step) == truth
    assert len({played[name][2] for played, _, _ in worlds[world]}) == 1, "the states of the ranks differ"
    if case.policy == "DATA":
        assert steps == steps_of([worlds[1][0][0][name][0]])
    before = {3: 2, 1: 3}.get(world)
    if before is not None:
        rests = [played[name][1] for played, _, _ in worlds[world]]
        rest = steps_of([each for each in rests if each is not None])
        first = steps_of([played[name][0][:STOP] for played, _, _ in worlds[before]])
        assert sorted(number for step in first + rest for number in step) == truth
        if case.policy == "DATA":
            assert first + rest == steps


def test_a_sample_that_lacks_something_fails_on_every_rank_at_the_same_step(
    worlds: dict[int, list[tuple[Played, Any, int | None]]],
) -> None:
    for ranks in worlds.values():
        assert len({steps for _, (_, steps), _ in ranks}) == 1
        for _, (failure, _), _ in ranks:
            assert failure.kind == "SourceError"
            assert "1.tar: the sample 's1/03' at byte 9216: 'cls' of keys=('cls', 'id') is not there" in failure.message


def test_an_index_tells_the_length(worlds: dict[int, list[tuple[Played, Any, int | None]]]) -> None:
    lengths = {length for ranks in worlds.values() for *_, length in ranks}
    assert lengths == {-(-len(NUMBERS) // G)}
