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
import torch

from torchdistinput.devices.copy_ahead import Handling

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
