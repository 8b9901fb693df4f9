"""A fake accelerator that orders work as badly as a real one may, and reports code that relied on a lucky order.

The work that is queued on a stream runs in order. A random scheduler decides when it runs: between any two calls, as
the streams' speeds (drawn again for each device) allow, and in ``finish`` at the latest. The allocator has one pool for
each stream, and hands out a freed block at once, the most recently freed first, as CUDA's does. So does the pinned
pool, without checking whether a copy still reads the block. Memory is filled with ``POISON`` when it is handed out: on
the device in the order of the stream to which it belongs, on the host at once.

Tensors are real tensors over the fake memory: a block is free when the last tensor over it is gone.

    rng = random.Random(seed)
    turns = Turns(rng)
    device = FakeDevice(rng, turns)
    turns.run(background, consumer)  # two functions that call device or a StreamCopier(device)
    device.finish()
    assert device.violations == []
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput import build_pipeline
from torchdistinput.batches import pytree
from torchdistinput.devices.accelerators import TorchStreams, make_copier
from torchdistinput.devices.copy_ahead import Copier, DirectCopier, Handling, StreamCopier

__all__ = ["POISON", "FakeDevice", "FakeEvent", "FakeStream", "Turns"]

POISON = -777
_MAX_PAUSES = 100_000  # after so many pauses, the functions are taken to wait for each other for ever


@final
class Turns:
    """Runs functions on threads of their own, one at a time; a seeded choice at each ``pause`` picks the next one.

    Args:
      rng: makes the choices.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left = _MAX_PAUSES
        self._waiting: dict[int, threading.Semaphore] = {}  # by number, for functions that have not ended
        self._here = threading.local()
        self._failures: list[BaseException] = []

    def run(self, *actors: Callable[[], None]) -> None:
        """Runs all functions to their end, then raises the first error, if there was one."""
        self._waiting = {number: threading.Semaphore(0) for number in range(len(actors))}
        threads = [threading.Thread(target=self._act, args=actor, daemon=True) for actor in enumerate(actors)]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def pause(self) -> None:
        """Lets a function continue: another one, or the caller. Outside ``run`` it does nothing."""
        number = getattr(self._here, "number", None)
        if number is None:
            return
        self._left -= 1
        self._pass_on()
        self._waiting[number].acquire()
        if self._failures or self._left < 0:
            raise RuntimeError("another function failed, or all functions wait for each other")

    def _act(self, number: int, actor: Callable[[], None]) -> None:
        self._here.number = number
        self._waiting[number].acquire()
        try:
            actor()
        except BaseException as failure:
            self._failures.append(failure)
        del self._waiting[number]
        self._pass_on()

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting[self._rng.choice(sorted(self._waiting))].release()


@final
@dataclass(eq=False)
class FakeStream:
    """A queue of operations; with a higher ``speed`` the scheduler takes from it more often."""

    name: str
    speed: float
    queue: deque[FakeEvent | Callable[[], None]] = field(default_factory=deque)  # an event: a wait for it

    def runnable(self) -> bool:
        """Whether the first operation can run now."""
        if not self.queue:
            return False
        first = self.queue[0]
        return first.done if isinstance(first, FakeEvent) else True


@final
@dataclass(eq=False)
class FakeEvent:
    """An event, done when all work that was queued before it is done."""

    done: bool = False


@final
@dataclass(eq=False)
class _Memory:
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    owners: int = 0  # how often the block was handed out
    readers: list[int] = field(default_factory=list)  # for each queued read: the owner whose data it needs
    lent_to: list[FakeStream] = field(default_factory=list)


@final
class FakeDevice:
    """The fake accelerator: a ``StreamBackend``, with the operations of a consumer on a device.

    Args:
      rng: decides when queued work runs.
      turns: gets a turn at each call; without it the caller is the only thread.
      pin_failure: how likely ``pin`` fails; may be changed later.
    """

    def __init__(self, rng: random.Random, turns: Turns | None = None, pin_failure: float = 0.0) -> None:
        self.violations: list[str] = []
        self._rng = rng
        self._turns = Turns(rng) if turns is None else turns
        self.pin_failure = pin_failure
        self._eagerness = rng.choice([0.1, 0.5, 0.8])
        self._streams: list[FakeStream] = []
        self._default = self.new_stream()
        self._current: dict[int, FakeStream] = {}
        self._pools: defaultdict[tuple[str, int], list[_Memory]] = defaultdict(list)
        self._num_blocks: Counter[str] = Counter()
        self._owned: dict[int, tuple[_Memory, int, str]] = {}  # by address: the block, its present owner, its pool

    # The operations of a consumer.

    def use(self, stream: FakeStream) -> None:
        """Makes the stream the current one of the calling thread."""
        self._current[threading.get_ident()] = stream

    def read(self, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        """Queues a kernel on the current stream that reads a tensor, and checks that it finds the expected values."""
        self._turn()
        block, owner, _ = self._owned[_address(tensor)]
        block.readers.append(owner)
        stream, wanted, found = self.current_stream(), expected.clone(), _unowned(block, tensor)

        def kernel() -> None:
            block.readers.remove(owner)
            if not torch.equal(found, wanted):
                self.violations.append(f"a kernel on {stream.name} read {found.tolist()}, not {wanted.tolist()}")

        stream.queue.append(kernel)

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """Queues a kernel on the current stream that overwrites a tensor."""
        self._turn()
        self._write(tensor, torch.full_like(tensor, value), self.current_stream())

    def stand_still(self) -> None:
        """Stops the scheduler: from now on work runs only in ``block`` and ``finish``."""
        self._eagerness = 0.0

    def num_blocks(self, pool: str) -> int:
        """How many blocks a pool has ever needed; pools are called ``"pinned"`` or by the name of their stream."""
        return self._num_blocks[pool]

    def finish(self) -> None:
        """Runs all queued work.

        Raises:
          RuntimeError: if the streams wait for each other.
        """
        while any(stream.queue for stream in self._streams):
            if not self._run_one():
                raise RuntimeError("the streams wait for each other")

    # The operations of a device for `StreamCopier`.

    def enter_thread(self, stream: FakeStream) -> None:
        """Makes the stream the current one; there is only one fake device."""
        self.use(stream)

    def new_stream(self) -> FakeStream:
        """A stream with a speed of its own."""
        stream = FakeStream(f"stream {len(self._streams)}", self._rng.choice([0.02, 0.2, 1.0]))
        self._streams.append(stream)
        return stream

    def current_stream(self) -> FakeStream:
        """The current stream of this thread, as in torch."""
        return self._current.get(threading.get_ident(), self._default)

    def record(self, stream: FakeStream) -> FakeEvent:
        """Queues the event."""
        self._turn()
        event = FakeEvent()

        def done() -> None:
            event.done = True

        stream.queue.append(done)
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Queues the wait."""
        self._turn()
        stream.queue.append(event)

    def done(self, event: FakeEvent) -> bool:
        """Polls the event."""
        self._turn()
        return event.done

    def block(self, event: FakeEvent) -> None:
        """Runs the device until the event is done."""
        while not event.done:
            if not self._run_one():
                raise RuntimeError("the streams wait for each other")

    def handling(self, leaf: Any) -> Handling:
        """Tensors are copied ahead, unless they are on the device already."""
        if not isinstance(leaf, torch.Tensor):
            return Handling.STAYS
        pool = self._owned[_address(leaf)][2] if _address(leaf) in self._owned else "pinned"
        return Handling.AHEAD if pool == "pinned" else Handling.STAYS

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the pinned pool; the next owner of a block writes to it at once."""
        self._turn()
        if self._rng.random() < self.pin_failure:
            raise MemoryError("the fake device has no pinned memory left")
        if _address(tensor) in self._owned:
            return tensor
        pinned = self._allocate(tensor, "pinned")
        self._overwrite(*self._owned[_address(pinned)][:2], pinned, tensor)
        return pinned

    def empty_like(self, tensors: Sequence[torch.Tensor], stream: FakeStream) -> list[torch.Tensor]:
        """Tensors from the stream's pool; the new owner writes poison there in the order of the stream."""
        return [self._empty_like(tensor, stream) for tensor in tensors]

    def _empty_like(self, tensor: torch.Tensor, stream: FakeStream) -> torch.Tensor:
        self._turn()
        new = self._allocate(tensor, stream.name)
        self._write(new, _poison(new.numel() * new.element_size()).view(new.dtype).view(new.shape), stream)
        return new

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: FakeStream) -> None:
        """Queues the copies; each copies the content that its source has when it runs."""
        for source, target in zip(sources, targets, strict=True):
            self._turn()
            block, owner, _ = self._owned[_address(source)]
            block.readers.append(owner)
            self._write(target, _unowned(block, source), stream, after=partial(block.readers.remove, owner))

    def lend(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """Makes the block of a tensor wait, once the tensor is gone, for the work then queued on the stream."""
        block, _, pool = self._owned[_address(tensor)]
        if pool != stream.name:
            block.lent_to.append(stream)

    def move_now(self, leaf: Any) -> Any:
        """The leaf as it is: nothing is moved late here."""
        return leaf

    # The machine itself.

    def _allocate(self, like: torch.Tensor, pool: str) -> torch.Tensor:
        size = max(1, like.numel() * like.element_size())  # memory without a byte has no address
        free = self._pools[pool, size]
        if not free:
            self._num_blocks[pool] += 1
            free.append(_Memory(_poison(size).numpy()))
        block = free.pop()
        block.owners += 1
        lease = block.memory[:]  # lives as long as the storage of the tensors over it
        strides = torch.empty_like(like, device="meta").stride()
        tensor = torch.empty(0, dtype=like.dtype, device="cpu")
        tensor.set_(torch.from_numpy(lease).untyped_storage(), 0, like.shape, strides)
        self._owned[_address(tensor)] = (block, block.owners, pool)
        weakref.finalize(lease, self._free, _address(tensor), block, free).atexit = False
        return tensor

    def _free(self, address: int, block: _Memory, pool: list[_Memory]) -> None:
        del self._owned[address]
        self._hand_back(block, pool)

    def _hand_back(self, block: _Memory, pool: list[_Memory]) -> None:
        if block.lent_to:
            block.lent_to.pop().queue.append(lambda: self._hand_back(block, pool))
        else:
            pool.append(block)

    def _write(
        self, tensor: torch.Tensor, values: torch.Tensor, stream: FakeStream, after: Callable[[], None] | None = None
    ) -> None:
        block, owner, _ = self._owned[_address(tensor)]
        target = _unowned(block, tensor)

        def kernel() -> None:
            self._overwrite(block, owner, target, values)
            if after is not None:
                after()

        stream.queue.append(kernel)

    def _overwrite(self, block: _Memory, owner: int, target: torch.Tensor, values: torch.Tensor) -> None:
        early = [reader for reader in block.readers if reader < owner]
        if early:
            self.violations.append(f"memory was overwritten while {len(early)} queued reader(s) of its last owner wait")
        target.copy_(values)

    def _turn(self) -> None:
        self._turns.pause()
        while self._rng.random() < self._eagerness and self._run_one():
            pass

    def _run_one(self) -> bool:
        ready = [stream for stream in self._streams if stream.runnable()]
        if not ready:
            return False
        stream = self._rng.choices(ready, [each.speed for each in ready])[0]
        operation = stream.queue.popleft()
        if not isinstance(operation, FakeEvent):
            operation()
        return True


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unowned(block: _Memory, tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that does not keep the block from being handed out."""
    memory = torch.from_numpy(block.memory).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _poison(num_bytes: int) -> torch.Tensor:
    return torch.full((-(-num_bytes // 8),), POISON, device="cpu").view(torch.uint8)[:num_bytes]


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
