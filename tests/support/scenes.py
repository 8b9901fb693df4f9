"""The harness of the fault matrix: scenes on ranks, what each rank saw of them, and what they left behind."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import importlib
import json
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Acts, Numbers
from torchdistinput.testing.ranks import free_port

ROWS = 2  # samples of one rank in a step
SETTINGS = {"prefetch": [0, 2], "workers": [0, 2]}
GRACE_SECONDS = 30.0  # beside each bound, below the timeouts: for a machine that does other things too
BOUND_SECONDS = 90.0  # of a group of ranks, some of which die
STACKS_SECONDS = 80.0  # when a rank that hangs writes down where

# --------------------------------------------------------------------------------------------- what is left behind


@final
@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a process holds of the machine."""

    threads: Counter[str]
    files: Counter[str]
    children: frozenset[int]
    shared: frozenset[str]

    @staticmethod
    def now(known: frozenset[int] = frozenset()) -> Footprint:
        """Of this process; shared memory also of children that are known to have lived."""
        gc.collect()
        owners = {os.getpid(), *known, *(children := children_of(os.getpid()))}
        return Footprint(
            Counter(thread.name for thread in threading.enumerate() if thread.name.startswith("torchdistinput")),
            open_files(),
            frozenset(children),
            frozenset(name for name in os.listdir("/dev/shm") if owner_of(name) in owners),
        )

    def more_than(self, before: Footprint) -> list[str]:
        """What came since, in words."""
        more = {
            "threads": sorted((self.threads - before.threads).elements()),
            "files": sorted((self.files - before.files).elements()),
            "children": sorted(self.children - before.children),
            "shared memory": sorted(self.shared - before.shared),
        }
        return [f"{kind}: {found}" for kind, found in more.items() if found]


def open_files() -> Counter[str]:
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            found[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{number}"))] += 1
        except FileNotFoundError:  # the one that lists the others
            continue
    return found


def children_of(pid: int) -> set[int]:
    return {each for each, parent, _ in processes() if parent == pid}


def members_of(group: int) -> set[int]:
    """The living processes of a process group."""
    return {each for each, _, its_group in processes() if its_group == group}


def processes() -> Iterator[tuple[int, int, int]]:
    """The living: their number, parent and process group."""
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            state, parent, group = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:3]
            if state != "Z":  # nobody but its parent can take a dead one off the table
                yield int(entry), int(parent), int(group)


def owner_of(name: str) -> int:
    """The process that made a piece of shared memory, from the name that torch gave it."""
    numbers = re.match(r"torch_(\d+)_", name)
    return int(numbers[1]) if numbers else -1


def left_since(before: Footprint, known: frozenset[int], seconds: float = 10.0) -> list[str]:
    """What stays, when it had time to go."""
    until = time.monotonic() + seconds
    while (left := Footprint.now(known).more_than(before)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


# --------------------------------------------------------------------------------------------- the harness


@final
@dataclasses.dataclass
class Story:
    """What one rank saw of a scene, as plain values.

    Args:
      steps: steps delivered.
      kind: the class of what was raised, or nothing.
      message: its text.
      causes: the classes of its ``__cause__``, of that one's, and so on.
      waited: seconds from the last step to the error.
      left: what was still there after ``close``, in words.
      warned: what was logged as a warning.
      note: whatever else the scene has to tell.
      dead: whether the rank was ended before it could tell anything.
    """

    steps: int = 0
    kind: str = ""
    message: str = ""
    causes: list[str] = dataclasses.field(default_factory=list)
    waited: float = 0.0
    left: list[str] = dataclasses.field(default_factory=list)
    warned: list[str] = dataclasses.field(default_factory=list)
    note: Any = None
    dead: bool = False


@final
class Stage:
    """One scene on one rank.

    Args:
      strategy: of all scenes.
      prefetch: steps ahead.
      workers: loader workers.
      folder: common to all ranks.
    """

    def __init__(self, strategy: tdi.Strategy, prefetch: int, workers: int, folder: Path) -> None:
        self.strategy = strategy
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.odd = min(1, self.world - 1)  # the rank with the fault, where it is one
        self.prefetch, self.workers, self.folder = prefetch, workers, folder
        self.story = Story()
        self.children: frozenset[int] = frozenset()
        self.dataset: tdi.DistributedDataset | None = None
        self.since = time.monotonic()

    @property
    def batch(self) -> int:
        """The global batch size."""
        return ROWS * self.world

    def first_of(self, step: int, rank: int) -> int:
        """The first sample of a rank in a step, under DATA; of the last rank, where there are not as many."""
        return step * self.batch + ROWS * min(rank, self.world - 1)

    def numbers(self, faults: Acts, **arguments: Any) -> Any:
        """A loader of numbers."""
        return self.loader(Numbers(600, faults), **arguments)

    def loader(self, data: Any, **arguments: Any) -> Any:
        """A loader with as many workers as the scene has."""
        return DataLoader(data, **{"batch_size": self.batch, "num_workers": self.workers, **arguments})

    def distribute(self, data: Any, **options: Any) -> tdi.DistributedDataset:
        """Keeps the dataset, so that it is closed after the scene."""
        options = {"prefetch": self.prefetch, "timeout_seconds": 60, **options}
        self.dataset = self.strategy.distribute_dataset(data, tdi.InputOptions(**options))
        self.since = time.monotonic()
        return self.dataset

    def read(self, data: Any, at: int = -1, do: Callable[[], object] = bool, **options: Any) -> None:
        """Reads to the end, or to the error; does something after so many steps."""
        self.loop(self.distribute(data, **options), at, do)

    def loop(self, steps: Any, at: int = -1, do: Callable[[], object] = bool) -> None:
        """Counts steps."""
        for _ in steps:
            self.count()
            if self.story.steps == at:
                do()
                self.since = time.monotonic()

    def count(self) -> None:
        """A step was delivered."""
        self.story.steps += 1
        self.since = time.monotonic()
        if not self.children:
            self.children = frozenset(children_of(os.getpid()))

    def play(self, scene: Callable[[Stage], None]) -> Story:
        """The scene, from its first step to what it leaves."""
        before = Footprint.now()
        with heard() as self.story.warned:
            try:
                scene(self)
            except BaseException as error:  # whatever it is, the test judges it
                self.story.waited = time.monotonic() - self.since
                self.story.kind, self.story.message = type(error).__name__, str(error)
                self.story.causes = causes_of(error)
            if self.dataset is not None:
                self.dataset.close()
        self.dataset = None
        self.story.left = left_since(before, self.children)
        return self.story


Scene = Callable[[Stage], None]
Played = dict[str, list[tuple[dict[str, Any], list[Story]]]]  # by cell: settings, and what each rank saw


def causes_of(error: BaseException) -> list[str]:
    found = []
    while error.__cause__ is not None:
        error = error.__cause__
        found.append(type(error).__name__)
    return found


@contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings that the library logs meanwhile."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("torchdistinput")
    log.addHandler(handler)
    try:
        yield texts
    finally:
        log.removeHandler(handler)


def play_all(module: str, cells: Sequence[tuple[str, dict[str, Any]]], folder: str) -> list[Story]:
    """One rank: scenes of a module, one after the other, on one strategy."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    gc.freeze()  # or each collection would look at all of torch again
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=60)
    workers = max(setting["workers"] for _, setting in cells)
    list(strategy.distribute_dataset(DataLoader(Numbers(20), batch_size=4, num_workers=workers)))  # made once
    gc.collect()
    found = []
    for number, (name, setting) in enumerate(cells):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        scene: Scene = importlib.import_module(module).SCENES[name]
        found.append(Stage(strategy, folder=place, **setting).play(scene))
    return found


# --------------------------------------------------------------------------------------------- what is expected


@final
@dataclasses.dataclass(frozen=True)
class Expected:
    """What a cell has to show.

    Args:
      steps: delivered on every rank before; two numbers: without and with loader workers.
      ranks: where the fault is.
      words: in every message.
      kind: what the other ranks raise.
      own: what the ranks with the fault raise; ``None``: they are no more.
      causes: one of them is behind what the ranks with the fault raise.
      ahead: whether steps that were agreed before may still be delivered.
      seconds: from the last step to the error.
      named: whether the ranks are named; one process has no name.
    """

    steps: int | tuple[int, int]
    ranks: tuple[int, ...] = (1,)
    words: tuple[str, ...] = ("BrokenError",)
    kind: str = "SourceError"
    own: str | None = "SourceError"
    causes: tuple[str, ...] = ("BrokenError",)
    ahead: bool = False
    seconds: float = 5.0
    named: bool = True


def check(stories: Sequence[Story], expected: Expected, setting: Mapping[str, Any]) -> None:
    """What every rank of one run of a cell saw."""
    base = expected.steps if isinstance(expected.steps, int) else expected.steps[setting["workers"] > 0]
    beyond = max(setting["prefetch"], 1) + 1 if expected.ahead else 0
    reached = max([base, *(stories[rank].steps for rank in expected.ranks)])
    for rank, story in enumerate(stories):
        own = rank in expected.ranks
        assert story.left == [], rank
        assert story.dead == (own and expected.own is None), (rank, story)
        if story.dead:
            continue
        assert story.kind == (expected.own if own else expected.kind), (rank, story)
        # Who comes late still agrees on the steps for which the others had voted before they gave up.
        assert base <= story.steps <= (base + beyond if own else reached) + beyond, (rank, story)
        assert story.waited < expected.seconds + GRACE_SECONDS, (rank, story)
        if not own or expected.own == expected.kind:
            check_message(rank, story, expected, own=own)


def check_message(rank: int, story: Story, expected: Expected, *, own: bool) -> None:
    names = names_of(expected) if expected.named else []
    missing = [word for word in (*expected.words, *names) if word not in story.message]
    assert not missing, (rank, story.message[:2000])
    assert len(story.message) < 100_000
    if expected.kind == "SourceError":
        assert bool(story.causes) == own, (rank, story)
        assert not own or set(expected.causes) & set(story.causes), (rank, story)


def names_of(expected: Expected) -> list[str]:
    """How the ranks with the fault are named."""
    if len(expected.ranks) == 1:
        return [f"rank {expected.ranks[0]}"]
    return ["rank", *map(str, expected.ranks)]


# --------------------------------------------------------------------------------------------- ranks that may die


def mortal(rank: int, world: int, port: int, folder: str, module: str, cell: tuple[str, dict[str, Any]]) -> None:
    """One rank in a process of its own; it writes down what it saw, if it lives."""
    os.setpgid(0, 0)
    with Path(folder, f"{rank}.stacks").open("w") as stacks:
        faulthandler.dump_traceback_later(STACKS_SECONDS, file=stacks)
        torch.set_num_threads(1)
        multiprocessing.set_start_method("fork", force=True)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        (story,) = play_all(module, [cell], folder)
        Path(folder, f"{rank}.json").write_text(json.dumps(dataclasses.asdict(story)))
    os._exit(0)  # the default group has lost a member: what its own teardown does is not the matter here


@final
class Group:
    """Ranks of one cell in processes that may die; ``run_ranks`` would end the others as soon as one does.

    Args:
      module: where the scene is.
      cell: its name and setting.
      folder: where the ranks write.
    """

    world = 2

    def __init__(self, module: str, cell: tuple[str, dict[str, Any]], folder: Path) -> None:
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        port = free_port()
        for rank in range(self.world):
            (folder / f"{rank}.stacks").touch()
        places = [(rank, self.world, port, str(folder), module, cell) for rank in range(self.world)]
        self.ranks = [context.Process(target=mortal, args=place) for place in places]
        for process in self.ranks:
            process.start()

    def stories(self) -> list[Story]:
        """What each rank saw."""
        until = time.monotonic() + BOUND_SECONDS
        try:
            for process in self.ranks:
                process.join(max(0.0, until - time.monotonic()))
            hanging = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
            stacks = [(self.folder / f"{rank}.stacks").read_text() for rank in hanging]  # empty: it never began
            assert not hanging, "\n".join([f"ranks {hanging} hang", *stacks])
            return [self._story(rank, process.pid or 0) for rank, process in enumerate(self.ranks)]
        finally:
            self.end()

    def _story(self, rank: int, pid: int) -> Story:
        told = self.folder / f"{rank}.json"
        if told.exists():
            return Story(**json.loads(told.read_text()))
        until = time.monotonic() + GRACE_SECONDS + 5.0  # torch's workers look for their parent every 5 s
        while (left := members_of(pid)) and time.monotonic() < until:
            time.sleep(0.05)
        return Story(dead=True, left=[f"children: {sorted(left)}"] if left else [])

    def end(self) -> None:
        """Ends all, and their loader workers."""
        for process in self.ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
