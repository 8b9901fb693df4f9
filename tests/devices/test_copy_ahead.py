"""The memory law of copy_ahead.py: whatever the device, the user and the two threads do when, the data is right.

A schedule is one run of a background thread that sends, with tensors that it makes on the device beforehand, and a
consumer that keeps batches for a random time, drops them
in the middle of a step, allocates memory of its own, changes its stream, stops early, and closes. Each schedule is a
seed. That a schedule notices each order that is not kept, ``tests/mutants`` shows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.support.streams import POISON, FakeDevice, FakeStream, Turns
from torchdistinput import build_pipeline
from torchdistinput.batches import pytree
from torchdistinput.devices.accelerators import TorchStreams, make_copier
from torchdistinput.devices.copy_ahead import Copier, DirectCopier, StreamCopier

SCHEDULES = 400

CopierFactory = Callable[[FakeDevice], Copier]


def leaves_of(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last one is made on the device by the source."""
    return torch.arange(3) + 10 * step, torch.arange(4).reshape(2, 2) + 1000 * step, torch.full((3,), 7 * step)


class Schedule:
    """One run, all of it drawn from the seed."""

    def __init__(self, seed: int, make: CopierFactory) -> None:
        self.rng = random.Random(seed)
        self.turns = Turns(self.rng)
        self.device = FakeDevice(self.rng, self.turns, pin_failure=self.rng.choice([0, 0, 0, 0.1]))
        self.copier = make(self.device)
        self.queue: deque[Any] = deque()
        self.num_steps = self.rng.randint(2, 7)
        self.depth = self.rng.randint(1, 3)
        self.streams = [self.device.current_stream()]
        if self.rng.random() < 0.5:
            self.streams.append(self.device.new_stream())
        self.made: deque[torch.Tensor] = deque()
        self.kept: list[tuple[list[tuple[torch.Tensor, torch.Tensor]], FakeStream]] = []
        self.own: list[tuple[torch.Tensor, FakeStream]] = []
        self.stop = self.ended = self.failed = False

    def run(self) -> list[str]:
        self.turns.run(self.background, self.consumer)
        self.device.finish()
        return self.device.violations

    def background(self) -> None:
        self.copier.enter_thread()
        try:
            for step in range(self.num_steps):
                while len(self.queue) >= self.depth and not self.stop:
                    self.turns.pause()
                if self.stop:
                    break
                x, y, _ = leaves_of(step)
                self.make_ahead(step)
                if self.rng.random() < 0.2:
                    x = self.device.pin(x)
                batch = {"x": x, "names": ["a", "b"], "y": (y, step), "made": self.made.popleft()}
                if self.rng.random() < 0.3:
                    del batch["x"], batch["y"]  # nothing is left to be copied
                self.queue.append(self.copier.send(batch))
                del batch
        except MemoryError:
            self.failed = True
        self.ended = True

    def make_ahead(self, step: int) -> None:
        """On the device, as a source may do it: for this step, and sometimes for the next ones."""
        for number in range(step + len(self.made), step + self.rng.choice([1, 1, 2, 3])):
            (tensor,) = self.device.empty_like([leaves_of(number)[2]], self.device.current_stream())
            self.device.fill(tensor, 7 * number)
            self.made.append(tensor)
            del tensor

    def consumer(self) -> None:
        for step in range(self.num_steps):
            self.device.use(self.rng.choice(self.streams))
            self.copier.begin_step()
            while not self.queue and not self.ended:
                self.turns.pause()
            if not self.queue or self.rng.random() < 0.2:
                break
            batch = self.copier.hand_over(self.queue.popleft())
            self.keep(step, batch)
            del batch
            self.train()
        self.stop = True
        while not self.ended:
            self.turns.pause()
        for _ in range(len(self.queue)):
            transfer = self.queue.popleft()
            if self.rng.random() < 0.5:
                self.copier.discard(transfer)
            del transfer  # some are lost without a word: the copier has to remember them
            for _ in range(3):
                self.scratch()
        self.copier.close()
        self.device.pin_failure = 0
        # Another loader's: it gets what this one let go of.
        self.device.pin(torch.full((3,), POISON))
        self.device.pin(torch.full((2, 2), POISON))
        for own, stream in self.own:
            self.device.use(stream)
            self.device.read(own, torch.full_like(own, 5))

    def keep(self, step: int, batch: dict[str, Any]) -> None:
        assert batch["names"] == ["a", "b"]
        x, y, made = leaves_of(step)
        leaves = [(batch["made"], made)]
        if "x" in batch:
            assert batch["y"][1] == step
            leaves += [(batch["x"], x), (batch["y"][0], y)]
        self.kept.append((leaves, self.device.current_stream()))

    def train(self) -> None:
        """Reads the last batch, and at random: earlier ones again, memory of its own, in-place changes, drops."""
        self.look_at(-1)
        for _ in range(self.rng.randint(0, 4)):
            action = self.rng.choice([self.look_back, self.scratch, self.drop, self.overwrite])
            action()

    def look_back(self) -> None:
        if self.kept:
            self.look_at(self.rng.randrange(len(self.kept)))

    def look_at(self, index: int) -> None:
        leaves, home = self.kept[index]
        now = self.device.current_stream()
        self.device.use(home)  # within a step a batch is used on the stream of its `next`, as torch asks
        for leaf, expected in leaves:
            self.device.read(leaf, expected)
        self.device.use(now)

    def drop(self) -> None:
        if self.kept:
            self.kept.pop(self.rng.randrange(len(self.kept)))

    def scratch(self) -> None:
        """Memory of the user's own, from the pool that the batches come from; dropped now or read again at the end."""
        stream = self.device.current_stream()
        for like in leaves_of(0):
            (own,) = self.device.empty_like([like], stream)
            self.device.fill(own, 5)
            self.device.read(own, torch.full_like(like, 5))
            if self.rng.random() < 0.5:
                self.own.append((own, stream))

    def overwrite(self) -> None:
        """A batch belongs to the user: changed in place, then dropped."""
        if self.kept:
            leaves, home = self.kept.pop()
            now = self.device.current_stream()
            self.device.use(home)
            leaf, like = leaves[-1]
            self.device.fill(leaf, 9)
            self.device.read(leaf, torch.full_like(like, 9))
            self.device.use(now)


def test_in_every_schedule_the_consumer_reads_the_right_data() -> None:
    failures = 0
    for seed in range(SCHEDULES):
        schedule = Schedule(seed, StreamCopier)
        assert schedule.run() == [], f"seed {seed}"
        failures += schedule.failed
    assert failures >= 5, "some schedules should lose the background thread in the middle of a batch"


def make_pair() -> tuple[FakeDevice, StreamCopier]:
    device = FakeDevice(random.Random(0))
    return device, StreamCopier(device)


def test_what_the_device_has_no_numbers_for_is_refused_before_the_others_count_on_it() -> None:
    copier = DirectCopier(torch.device("meta"), lacks={torch.float64})
    assert copier.hand_over(copier.send([torch.ones(2), ["a", "b"]]))[0].device.type == "meta"
    with pytest.raises(TypeError, match=r"torch.float64 cannot be moved to meta.* x.float\(\)"):
        copier.send({"x": (torch.ones(2), torch.ones(2).double())})


def test_a_batch_that_a_device_has_no_numbers_for_is_an_error_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_pipeline, "make_copier", lambda _: make_copier(torch.device("mps", 0)))
    data = TensorDataset(torch.zeros(4, dtype=torch.float64))
    dataset = tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(data, 2))
    with pytest.raises(tdi.SourceError, match=r"step 0 of epoch 0.*float64 cannot be moved to mps:0"):
        next(iter(dataset))


def test_lists_arrays_and_constants_stay_on_the_host_and_every_tensor_moves() -> None:
    """The second batch is cloned to the stream to which the consumer has changed."""
    device, copier = make_pair()
    x, names, array = torch.arange(6).reshape(2, 3), ["a", "b"], np.ma.masked_equal([1, 2], 2)
    sent = [copier.send((x, names, {"n": 3, "x": x, "array": array})) for _ in range(2)]
    for transfer in sent:
        batch = copier.hand_over(transfer)
        device.use(device.new_stream())
        device.finish()
        assert torch.equal(batch[0], x)
        assert torch.equal(batch[2]["x"], x)
        assert batch[0] is not x
        assert batch[1] is names
        assert batch[2]["n"] == 3
        assert batch[2]["array"] is array


class Movable:
    """A batch of a user's own class, with torch's convention."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: Any) -> Movable:
        return Movable(str(device))


class InUnits(np.ndarray[Any, Any]):
    """An array with units, which has a method of that name, too."""

    def to(self, unit: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("with_streams", [False, True])
def test_what_has_a_method_to_is_moved_by_it_alone_and_in_a_list(with_streams: bool) -> None:
    device, copier = make_pair() if with_streams else (None, DirectCopier(torch.device("meta")))
    if device is not None:
        device.move_now = lambda leaf: leaf.to("meta") if pytree.moves_itself(leaf) else leaf  # type: ignore[method-assign]
    x, names, other = torch.arange(3), ["a", "b"], InUnits(3)
    batch = copier.hand_over(copier.send({"x": x, "one": Movable(), "list": [Movable()], "names": names, "o": other}))
    assert [batch["one"].device, batch["list"][0].device] == ["meta", "meta"]
    assert batch["names"] is names
    assert batch["o"] is other
    assert copier.hand_over(copier.send(Movable())).device == "meta"


def test_a_tensor_dict_moves_as_the_users_own_to_would() -> None:
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({"x": torch.zeros(3, 2)}, batch_size=[3])
    streams = TorchStreams(torch.device("meta"))
    copier = DirectCopier(torch.device("meta"))
    assert copier.hand_over(copier.send({"b": batch}))["b"]["x"].device.type == "meta"
    assert streams.move_now(batch)["x"].device.type == "meta"


def test_a_parcel_ends_once() -> None:
    _, copier = make_pair()
    discarded, handed_over = copier.send(torch.arange(3)), copier.send(torch.arange(3))
    copier.discard(discarded)
    copier.discard(discarded)
    copier.hand_over(handed_over)
    copier.discard(handed_over)
    for transfer in (discarded, handed_over):
        with pytest.raises(RuntimeError, match="each one ends once"):
            copier.hand_over(transfer)


def test_a_copier_that_is_dropped_without_closing_waits_too() -> None:
    device, copier = make_pair()
    device.stand_still()
    ready = copier.send(torch.arange(3)).ready
    assert not ready.done
    del copier
    assert ready.done


def test_memory_does_not_grow_over_a_thousand_steps() -> None:
    rng = random.Random(1)
    device = FakeDevice(rng)
    copier = StreamCopier(device)
    sizes: list[list[tuple[int, ...]]] = [[(2, 3)] * 5 + [(40,)], [(4,)] * 9, [(64,), (3,)]]
    coming: deque[Any] = deque()
    kept: deque[Any] = deque(maxlen=2)
    blocks: list[tuple[int, int]] = []
    for step in range(1000):
        coming.append(copier.send([torch.full(size, step) for size in sizes[step % 3]]))
        if len(coming) > 2:
            batch = copier.hand_over(coming.popleft())
            for leaf in batch:
                device.read(leaf, torch.full_like(leaf, step - 2))
            kept.append(batch)
        if step % 20 == 19:
            device.finish()  # the host runs ahead of the device, but not for ever
        blocks.append((device.num_blocks("pinned"), device.num_blocks(device.current_stream().name)))
    assert device.violations == []
    assert blocks[-1] == blocks[99]
