"""Exactly once, as a property: random data, batches, worlds and places to stop; what is delivered is the dataset.

A case follows from its seed: an input, read in up to three parts, each in a world of its own. A part takes its state at
a random step, reads on for a few that are lost, as in a crash, and the next part loads it. The laws are written here
anew, from the design's text. A failure says its seed:

    TDI_SEED=17 python -m pytest tests/faults/test_exactly_once.py -k processes

plays that one alone. ``--all-cells`` plays ten times as many.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import torchdistinput as tdi
from tests.support import inputs
from tests.support.resume import Saved
from torchdistinput import readers
from torchdistinput.batches.per_replica import local_results
from torchdistinput.build_pipeline import Setting
from torchdistinput.dataset import DistributedDataset
from torchdistinput.loader_iterator import refuse_divided
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.resolve import recognise
from torchdistinput.testing import FakeCollectives, run_ranks

EPOCHS = 2
FAKE_CASES, REAL_CASES = 20, 6
MANY = 10
HANG_SECONDS = 60.0

# ------------------------------------------------------------------------------------------------------- the cases


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a run, in a world of its own.

    Args:
      world: its processes.
      replicas: of each process.
      prefetch: steps ahead.
      num_workers: loader workers.
      until: after how many steps the state is taken; ``None`` for the last part, which reads to the end.
      lost: how many steps are read after it.
    """

    world: int
    replicas: int
    prefetch: int
    num_workers: int
    until: int | None
    lost: int


@dataclasses.dataclass(frozen=True)
class Case:
    """An input and how it is read.

    Args:
      seed: what all the rest follows from.
      data: the kind of the input.
      policy: the name of the policy.
      batch: G.
      drop_last: of the loader, where there is one.
      sizes: records of each file, or rows of each ready batch; the sum of them is the size of any other data.
      suffix: of the files.
      order: further arguments of the ``FileDataset``.
      generator: whether the loader has a generator of its own; threads would share the default one.
      yields: ``"samples"``, ``"index"`` (with the index of each) or ``"padded"`` (with a mask).
      parts: how it is read.
    """

    seed: int
    data: str
    policy: str
    batch: int
    drop_last: bool
    sizes: tuple[int, ...]
    suffix: str
    order: dict[str, Any]
    generator: bool
    yields: str
    parts: tuple[Part, ...]

    @property
    def values(self) -> list[int]:
        if not self.data.startswith("files"):
            return list(range(sum(self.sizes)))
        return [1000 * file + record for file, size in enumerate(self.sizes) for record in range(size)]

    @property
    def one_world(self) -> bool:
        """Whether all parts cut and deal alike."""
        return len({(part.world, part.replicas) for part in self.parts}) == 1


DATA_OF = {
    "DATA": ("files", "files, bare", "map", "map, shuffled", "map, permuted", "stream", "ready"),
    "FILE": ("files", "files, bare"),
    "OFF": ("files", "files, bare", "map", "map, shuffled", "stream", "ready"),
    "HINT": ("map", "map, shuffled", "stream", "ready"),
}


def case_of(seed: int, *, processes: bool) -> Case:
    """The case of a seed.

    Args:
      seed: any int.
      processes: whether each rank has a process of its own, and so loader workers and a default random state.
    """
    rng = random.Random(seed)
    policy = rng.choice(["DATA", "DATA", "FILE", "FILE", "OFF", "HINT"])
    data = rng.choice(DATA_OF[policy])
    loads = data not in ("ready", "files, bare")
    worlds = [(rng.randint(1, 3), rng.randint(1, 3)) for _ in range(3)]
    workers = [rng.choice([0, 0, 0, 1, 2]) if processes and loads else 0 for _ in range(3)]
    if policy in ("OFF", "HINT") or rng.random() < 0.2:
        worlds = worlds[:1] * 3
    if data == "stream":
        workers = workers[:1] * 3
    numbers = range(rng.choice([1, 2, 3, 3, 3]))
    parts = [
        Part(*worlds[number], rng.choice([0, 1, 2, 5]), workers[number], rng.randrange(9), rng.choice([0, 0, 1, 4]))
        for number in numbers
    ]
    parts[-1] = dataclasses.replace(parts[-1], until=None, lost=0)
    order = {
        "cycle_length": rng.choice([1, 1, 2, 3, 9]),
        "block_length": rng.choice([1, 1, 2, 5]),
        "shuffle_buffer": rng.choice([0, 0, 2, 4, 50]),
        "shuffle_files": rng.random() < 0.5,
    }
    sizes = tuple(rng.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(rng.randint(3, 7)))
    yields = rng.choice(["samples", "samples", "index", "samples" if data == "ready" else "padded"])
    suffix, drops = rng.choice(["txt", "txt", "txt.gz"]), loads and rng.random() < 0.3
    generator, batch = not processes or rng.random() < 0.5, rng.randint(1, 9)
    return Case(seed, data, policy, batch, drops, sizes, suffix, order, generator, yields, tuple(parts))


def seeds_of(first: int, count: int, *, all_cells: bool) -> Sequence[int]:
    """The seeds to play: that of the environment, or as many as are usual."""
    wanted = os.environ.get("TDI_SEED")
    return [int(wanted)] if wanted is not None else range(first, first + count * (MANY if all_cells else 1))


# -------------------------------------------------------------------------------------------------------- the data


@dataclasses.dataclass(frozen=True)
class Stream(IterableDataset[int]):
    """Numbers in order; with loader workers each yields its share."""

    numbers: range

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(self.numbers if info is None else self.numbers[info.id :: info.num_workers])

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(self.numbers[index::num_shards])


@dataclasses.dataclass(frozen=True)
class Ready(IterableDataset[torch.Tensor]):
    """Ready batches of any sizes, numbered through."""

    sizes: tuple[int, ...]
    taken: range

    def __iter__(self) -> Iterator[torch.Tensor]:
        starts = [sum(self.sizes[:number]) for number in range(len(self.sizes))]
        return (torch.arange(starts[number], starts[number] + self.sizes[number]) for number in self.taken)

    def shard(self, num_shards: int, index: int) -> Ready:
        return Ready(self.sizes, self.taken[index::num_shards])


def input_of(case: Case, part: Part, folder: Path) -> tuple[Any, int | None]:
    """What is distributed, and its batch size if that is given beside it."""
    numbers = range(sum(case.sizes))
    if case.data == "ready":
        return Ready(case.sizes, range(len(case.sizes))), None
    if case.data.startswith("files"):
        names = str(folder / str(case.seed) / f"*.{case.suffix}")
        files = tdi.FileDataset(names, readers.text_lines, map_fn=int, seed=case.seed, **case.order)
        if case.data == "files, bare":
            return files, case.batch
        data: Any = files
    else:
        data = Stream(numbers) if case.data == "stream" else inputs.Table(numbers)
    more: dict[str, Any] = {"generator": torch.Generator().manual_seed(case.seed)} if case.generator else {}
    if case.data == "map, shuffled" and numbers:
        more["shuffle"] = True
    if case.data == "map, permuted":
        more["sampler"] = tdi.ShuffleSampler(len(numbers), seed=case.seed)
    return DataLoader(data, case.batch, drop_last=case.drop_last, num_workers=part.num_workers, **more), None


def write(case: Case, folder: Path) -> None:
    """Its files, if it has any."""
    if case.data.startswith("files"):
        (folder / str(case.seed)).mkdir()
        for number, size in enumerate(case.sizes):
            lines = "".join(f"{1000 * number + record}\n" for record in range(size))
            path = folder / str(case.seed) / f"{number}.{case.suffix}"
            path.write_bytes(gzip.compress(lines.encode()) if case.suffix.endswith("gz") else lines.encode())


# ----------------------------------------------------------------------------------------------------- one rank


@dataclasses.dataclass(frozen=True)
class Delivered:
    """A step, as one rank got it.

    Args:
      epoch: its epoch.
      index: its number in the epoch.
      global_size: samples on all ranks.
      pieces: the samples of each local replica.
      indices: those of the samples, if they were asked for.
    """

    epoch: int
    index: int
    global_size: int | None
    pieces: list[list[int]]
    indices: list[int]


Played = tuple[list[Delivered], Saved]


def options_of(case: Case, part: Part) -> tdi.InputOptions:
    return tdi.InputOptions(
        auto_shard_policy=tdi.AutoShardPolicy[case.policy],
        prefetch=part.prefetch,
        with_index=case.yields == "index",
        partial_batch="pad" if case.yields == "padded" else "keep",
    )


def taken_apart(case: Case, part: Part, element: Any) -> tuple[list[list[int]], list[int]]:
    """The samples of each local replica, and their indices."""
    pieces, indices = [], []
    for piece in local_results(element, part.replicas):
        if case.yields == "padded":
            rows, mask = piece
            assert len(rows) == len(mask) == -(-case.batch // (part.world * part.replicas))
            assert not rows[~mask].any()
            pieces.append(rows[mask].tolist())
        elif case.yields == "index":
            indices += piece[0].tolist()
            pieces.append(piece[1].tolist())
            assert len(piece[0]) == len(piece[1])
        else:
            pieces.append(piece.tolist())
    return pieces, indices


def steps_of(case: Case, part: Part, dataset: DistributedDataset) -> Generator[Delivered, None, None]:
    """The steps from where the dataset stands to the end of its epochs."""
    for _ in range(EPOCHS + 1):
        if dataset.state_dict()["epoch"] >= EPOCHS:
            return
        for element in dataset:
            step = dataset.step
            pieces, indices = taken_apart(case, part, element)
            assert step.local_sizes == tuple(map(len, pieces))
            yield Delivered(step.epoch, step.index, step.global_size, pieces, indices)
    raise AssertionError(f"the run stands still at epoch {dataset.state_dict()['epoch']}")


def play(case: Case, part: Part, dataset: DistributedDataset, saved: Saved | None) -> Played:
    """One rank: what it got until the state was taken, and the state."""
    delivered: list[Delivered] = []
    with dataset:
        if saved is not None:
            dataset.load_state_dict(saved.state)
        steps = steps_of(case, part, dataset)
        for each in islice(steps, part.until):
            delivered.append(each)
        taken = Saved(len(delivered), json.dumps(dataset.state_dict()))
        for _ in islice(steps, part.lost):
            pass
        steps.close()
    return delivered, taken


# --------------------------------------------------------------------------------------------------------- the laws


def batch_sizes(case: Case, count: int, num_workers: int) -> list[int]:
    """The sizes of one reader's batches; loader workers that share a stream take turns."""
    if case.data == "stream" and num_workers:
        shares = [len(range(worker, count, num_workers)) for worker in range(num_workers)]
        turns = zip_longest(*(batch_sizes(case, share, 0) for share in shares))
        return [size for turn in turns for size in turn if size is not None]
    full, rest = divmod(count, case.batch)
    return [case.batch] * full + ([rest] if rest and not case.drop_last else [])


def split_by_s(size: int, replicas: int) -> list[int]:
    most = -(-size // replicas)
    return [max(0, min(most, size - replica * most)) for replica in range(replicas)]


def rows_by_c(case: Case, sizes: list[int], worker: int, part: Part) -> list[list[int]]:
    """The rows of a worker with batches of its own."""
    replicas, rows = part.world * part.replicas, []
    for size in sizes:
        pieces = split_by_s(size, replicas)
        if case.data != "ready":
            pieces = [piece for piece in pieces if piece]
            pieces += [0] * (-len(pieces) % part.replicas)
            if size == case.batch:
                low, extra = divmod(size, replicas)
                turn = worker * part.replicas
                pieces = ([low + 1] * extra + [low] * (replicas - extra)) * 2
                pieces = pieces[turn : turn + replicas]
        rows += [pieces[start : start + part.replicas] for start in range(0, len(pieces), part.replicas)]
    return rows


def law(case: Case, part: Part, counts: Sequence[int]) -> list[list[list[int]]]:
    """The steps of an epoch: for each worker, the size of each local replica's piece.

    Args:
      case: the input.
      part: how it is read.
      counts: samples of each worker, where workers have data of their own.
    """
    world, local = part.world, part.replicas
    shares = [case.sizes[worker::world] if case.policy == "HINT" else case.sizes for worker in range(world)]
    if case.data != "ready":
        shares = [tuple(batch_sizes(case, count, part.num_workers)) for count in counts]
    if world == 1 or case.policy == "DATA":
        cuts = [split_by_s(size, world * local) for size in shares[0]]
        steps = [[cut[worker * local : (worker + 1) * local] for worker in range(world)] for cut in cuts]
    else:
        rows = [rows_by_c(case, list(sizes), worker, part) for worker, sizes in enumerate(shares)]
        steps = [list(step) for step in zip_longest(*rows, fillvalue=[0] * local)]
    return [step for step in steps if any(map(any, step))]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step as all ranks together got it: what each has, by rank."""

    part: Part
    ranks: tuple[Delivered, ...]

    @property
    def epoch(self) -> int:
        return self.ranks[0].epoch

    def samples(self, worker: int) -> list[int]:
        return [*chain(*self.ranks[worker].pieces)]


def check(case: Case, played: Sequence[Sequence[Played]]) -> None:
    """Whether the parts, each as its ranks played it, keep the laws."""
    epochs: dict[int, list[Step]] = defaultdict(list)
    for part, ranks in zip(case.parts, played, strict=True):
        assert len({saved for _, saved in ranks}) == 1, "the ranks' states differ"
        for together in zip(*(delivered for delivered, _ in ranks), strict=True):
            step = Step(part, together)
            assert {(each.epoch, each.index) for each in together} == {(together[0].epoch, len(epochs[step.epoch]))}
            assert {each.global_size for each in together} == {
                sum(len(step.samples(rank)) for rank in range(part.world))
            }
            assert together[0].global_size, "a step without samples"
            epochs[step.epoch].append(step)
    assert set(epochs) <= set(range(EPOCHS))
    for epoch in range(EPOCHS):
        check_epoch(case, epochs[epoch])


def check_epoch(case: Case, steps: Sequence[Step]) -> None:
    """Whether the steps of an epoch have each sample once, and the sizes of the laws."""
    everything = Counter(case.values)
    world = case.parts[-1].world
    of_workers = [
        Counter(chain(*(step.samples(worker) for step in steps if worker < step.part.world))) for worker in range(3)
    ]
    repeated = case.policy == "OFF" and world > 1
    for whole in of_workers[:world] if repeated else [sum(of_workers, Counter[int]())]:
        assert whole <= everything, f"twice: {whole - everything}"
        missing = everything - whole
        short_batches = 1 if repeated else sum(part.world for part in case.parts)
        assert not missing or (case.drop_last and missing.total() <= short_batches * (case.batch - 1)), missing
    if case.policy == "DATA" or case.one_world:
        counts = counts_of(case, [of_worker.total() for of_worker in of_workers[:world]])
        sizes = [[[len(piece) for piece in each.pieces] for each in step.ranks] for step in steps]
        laws = [law(case, step.part, counts) for step in steps]
        assert sizes == [of_part[number] for number, of_part in enumerate(laws)]
        assert len(sizes) == len(law(case, case.parts[-1], counts))
    if case.yields == "index":
        check_indices(case, steps, unique=not repeated)


def counts_of(case: Case, delivered: list[int]) -> list[int]:
    """How many samples each worker has; where files are shuffled, from what it delivered."""
    if case.policy == "FILE":
        world = len(delivered)
        dealt = [sum(case.sizes[worker::world]) for worker in range(world)]
        return delivered if case.order["shuffle_files"] else dealt
    everyone = range(sum(case.sizes))
    return [
        len(everyone[worker :: len(delivered)] if case.policy == "HINT" else everyone)
        for worker in range(len(delivered))
    ]


def check_indices(case: Case, steps: Sequence[Step], *, unique: bool) -> None:
    """Whether the indices are those of the samples, whoever read them."""
    pairs = [
        pair
        for step in steps
        for rank, each in enumerate(step.ranks)
        for pair in zip(each.indices, step.samples(rank), strict=True)
    ]
    if unique:
        assert len({index for index, _ in pairs}) == len(pairs)
    if case.data.startswith("files"):
        assert all(index == value // 1000 * 2**40 + value % 1000 for index, value in pairs)
    elif case.data.startswith("map") and case.policy != "HINT":
        assert all(index == value for index, value in pairs)


# ---------------------------------------------------------------------------------------------------------- the runs


def play_as_thread(world: FakeCollectives, case: Case, part: Part, folder: Path, saved: Saved | None) -> list[Played]:
    """All ranks of a part, each a thread; composed as ``Strategy.distribute_dataset`` composes it."""

    def one(rank: int) -> Played:
        topology = Topology(num_workers=part.world, replicas_per_worker=part.replicas, worker=rank)
        devices, ranks = [torch.device("cpu")] * part.replicas, world.ranks(rank) if part.world > 1 else None
        setting = Setting(topology=topology, devices=devices, ranks=ranks, timeout_seconds=HANG_SECONDS)
        data, size = input_of(case, part, folder)
        options = options_of(case, part)
        source, policy = recognise(data, options, topology, refuse_divided, global_batch_size=size, collate_fn=None)
        return play(case, part, DistributedDataset(source, setting, options, "1", policy=policy.name, seed=0), saved)

    found = world.run(one, timeout_seconds=2 * HANG_SECONDS)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if not isinstance(each, BaseException)]


def play_as_process(todo: Sequence[tuple[Case, Part, Saved | None]], folder: Path) -> list[Played]:
    """One rank: a part of each case."""
    strategies = {local: tdi.Strategy(devices=["cpu"] * local, timeout_seconds=HANG_SECONDS) for local in (1, 2, 3)}
    found = []
    for case, part, saved in todo:
        torch.manual_seed(case.seed + (0 if saved is None else 1 + dist.get_rank()))
        data, size = input_of(case, part, folder)
        try:
            dataset = strategies[part.replicas].distribute_dataset(data, options_of(case, part), global_batch_size=size)
            found.append(play(case, part, dataset, saved))
        except Exception as error:
            raise AssertionError(told(case, "processes")) from error
    return found


def told(case: Case, where: str) -> str:
    replay = f"TDI_SEED={case.seed} python -m pytest tests/faults/test_exactly_once.py -k {where}"
    return f"{case}\n{replay}"


@pytest.fixture(autouse=True)
def _iterables_may_be_skipped() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def test_each_sample_comes_once_among_threads(all_cells: bool, tmp_path: Path) -> None:
    """The ranks are threads that meet in a fake world."""
    for seed in seeds_of(0, FAKE_CASES, all_cells=all_cells):
        case = case_of(seed, processes=False)
        write(case, tmp_path)
        played: list[list[Played]] = []
        try:
            for part in case.parts:
                saved = played[-1][0][1] if played else None
                played.append(
                    play_as_thread(
                        FakeCollectives(part.world, timeout_seconds=HANG_SECONDS), case, part, tmp_path, saved
                    )
                )
            check(case, played)
        except Exception as error:
            raise AssertionError(told(case, "threads")) from error


def test_each_sample_comes_once_among_processes(all_cells: bool, tmp_path: Path) -> None:
    """The ranks are processes with a gloo group, loader workers and a default random state."""
    cases = [case_of(seed, processes=True) for seed in seeds_of(0, REAL_CASES, all_cells=all_cells)]
    for case in cases:
        write(case, tmp_path)
    played: list[list[list[Played]]] = [[] for _ in cases]
    for number in range(3):
        for world in (1, 2, 3):
            places = [
                place
                for place, case in enumerate(cases)
                if len(case.parts) > number and case.parts[number].world == world
            ]
            todo = [
                (cases[place], cases[place].parts[number], played[place][-1][0][1] if number else None)
                for place in places
            ]
            ranks = run_ranks(world, play_as_process, todo, tmp_path, timeout_seconds=60 + 10 * len(todo))
            for place, *found in zip(places, *ranks, strict=True):
                played[place].append(found)
    for case, of_case in zip(cases, played, strict=True):
        try:
            check(case, of_case)
        except AssertionError as error:
            raise AssertionError(told(case, "processes")) from error
