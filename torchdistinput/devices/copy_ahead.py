"""Asynchronous copies of batches to a device ahead of the training step, and why their memory is safe.

**Problem.** A batch should be copied to the accelerator while the step before it still computes. So a background thread
queues the copy on a side stream. Four things can then go wrong without any error:

1. the consumer reads before the copy is done;
2. the copy is written into the freed memory of an earlier batch, while kernels queued earlier still read it
   (a caching allocator reuses a block as soon as the last Python reference to it is gone);
3. the pinned host buffer is reused while the copy still reads it;
4. a batch that is not delivered (after an early ``break``) frees its memory while the copy still writes it.

**Decision.** The tensors on the device are allocated *on the consumer's stream* and only written on the side stream.
An allocator with one pool per stream promises one thing: a block is reused in the order of the stream to which it
belongs. Here this is the consumer's stream, so:

- right after the allocation an event is recorded on the consumer's stream, and the side stream waits for it before it
  writes. Whatever used the block before was queued on the consumer's stream before the block was freed, so before
  the allocation, so before the event (against 2). The event has to come *after* the allocation: a block freed between
  the two would be covered by nothing;
- after the copies an event is recorded on the side stream, and the consumer's stream waits for it at hand-over
  (against 1). From there on the batch is like any tensor that the user made on the current stream: it may be kept as
  long as they like and dropped at any moment, on any thread, with no further bookkeeping;
- host buffers stay referenced until that event is done; the event is polled, no thread waits for it (against 3);
- a batch that is discarded makes the consumer's stream wait for its event before the memory is freed (against 4).
  Batches that are neither handed over nor discarded stay referenced by the copier until it is closed.

The destinations are allocated and the event is recorded before the host memory is pinned. So the copy waits for the
steps that the training thread had queued when ``send`` began, and for no later ones. With a prefetch depth of one this
is enough to overlap copy and compute in full. A wait always refers to work that was queued earlier, so the streams
cannot deadlock.

*When the consumer changes its stream.* ``begin_step`` notes the stream of each ``next``. A batch that was sent for
another stream is cloned at hand-over into the pool of the current stream, and the old stream waits for the clone. This
is a copy inside the device, and only for the batches in flight at the change. Within a step torch's own rule holds: a
batch belongs to the stream that was current at ``next``; code that uses it on another stream keeps it alive or calls
``record_stream``.

*Tensors that the source makes on the device* are passed through. They belong to a stream of the consumer: the source is
read by the consumer's thread, or by a thread that begins on the consumer's stream. So the work that the source queues
comes first, as if nothing was read ahead. Once the consumer has changed its stream, the current stream waits at
hand-over for all earlier streams, and the allocator gets to know on which stream such tensors are used.

*Leaves that cannot be copied ahead* are moved by the consumer at hand-over, on its own stream, as its own ``.to``
would: tensors of another accelerator, sparse, nested and quantized tensors, subclasses, and objects with a method
``to`` (``TensorDict``, a batch of graphs, a user's class), alone or in a list. Other objects stay on the host, and so
do NumPy arrays (see ``batches.pytree``).

**Considered and refused.** *Allocating on the side stream*, holding each batch until the next ``next``: a batch that
the user keeps longer is overwritten. *record_stream* for each batch: frees then depend on polling events, memory piles
up when the host runs ahead. *A fixed ring of buffers*: needs fixed shapes, and breaks users who keep a batch. *A stream
for each epoch*: strands the blocks cached for the old one. *One buffer for the small leaves of a batch*: to pack and to
open it took longer than a copy of each leaf, on an H200 (256 leaves of 64 KB: 5 ms; one by one, by hand, 1.6 ms).

**Limits.** Other threads may not record or query events while a graph is captured in torch's default ("global") mode;
capture before the loop, or use ``prefetch=0``. Faults of the device itself are reported asynchronously, as always.

**References.** "CUDA semantics: memory management" and ``Tensor.record_stream`` in torch's documentation;
pytorch#147168 (what is wrong with record_stream); timm#2784 (a stream per epoch, a missing wait before reuse);
SPDL's note on the race between a transfer thread and the caching allocator.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch

from torchdistinput.batches.pytree import (
    flatten,
    map_leaves,
    map_values,
    moves_itself,
    objects_in,
    unflatten,
)

Batch = Any
DeviceStream = Any  # a torch.Stream, or a fake one
Event = Any  # a torch.Event, or a fake one


@final
@dataclass(eq=False)
class Transfer:
    """A batch whose copy to a device was begun (a *transfer*); made by ``send``, ended by ``hand_over`` or ``discard``.

    Attributes:
      batch: the batch as the consumer will get it; ``None`` once it was handed over or discarded.
      home: the consumer's stream on which the new tensors were allocated.
      ready: the event that is done when the copies are; ``None`` if nothing was copied.
      moved: the new tensors on the device.
      there: tensors that the source made on the device.
      late: whether leaves or objects are left that the consumer has to move itself.
    """

    batch: Batch
    home: DeviceStream = None
    ready: Event = None
    moved: Sequence[torch.Tensor] = ()
    there: tuple[torch.Tensor, ...] = ()
    late: bool = False


class Copier(Protocol):
    """Copies the batches of one local replica to its device. One per replica and loader, for the loader's life.

    Two threads use a copier: one that completes steps calls ``send``, and the consumer calls ``hand_over`` in ``next``.
    They may be the same thread. Where both send, ``ToDevice`` lets one after the other. A copier is made on the
    consumer's thread.
    """

    def enter_thread(self) -> None:
        """Called once by the background thread when it starts."""

    def begin_step(self) -> None:
        """Called by the consumer at each ``next``, first: notes the stream that the consumer works on."""

    def send(self, batch: Batch) -> Transfer:
        """Begins the copy of a batch to the device, without waiting for it. One thread at a time."""

    def hand_over(self, transfer: Transfer) -> Batch:
        """The batch of a transfer, safe to use on the consumer's current stream. The consumer calls this."""

    def discard(self, transfer: Transfer) -> None:
        """Frees a transfer that will not be handed over. Any thread. No effect on a transfer that has ended."""

    def close(self) -> None:
        """Releases all streams and memory, once the background thread has stopped. Idempotent."""


@final
class HostCopier:
    """For the CPU, and for batches that stay where they are: a batch is passed through unchanged."""

    def enter_thread(self) -> None:
        """Nothing to do: the CPU is current everywhere."""

    def begin_step(self) -> None:
        """Nothing to do: the CPU has no streams."""

    def send(self, batch: Batch) -> Transfer:
        """Wraps the batch."""
        return Transfer(batch)

    def hand_over(self, transfer: Transfer) -> Batch:
        """Unwraps the batch."""
        return _open(transfer)

    def discard(self, transfer: Transfer) -> None:
        """Drops the batch."""
        transfer.batch = None

    def close(self) -> None:
        """Nothing is held."""


@final
class DirectCopier:
    """For an accelerator with one stream: the consumer moves each batch itself, at hand-over.

    Args:
      device: the accelerator.
      lacks: dtypes that the accelerator does not support.
    """

    def __init__(self, device: torch.device, lacks: Collection[torch.dtype] = ()) -> None:
        self._device = device
        self._lacks = lacks

    def enter_thread(self) -> None:
        """Nothing to do: the background thread does not touch the device."""

    def begin_step(self) -> None:
        """Nothing to do: there is only one stream."""

    def send(self, batch: Batch) -> Transfer:
        """Wraps the batch, still on the host.

        Raises:
          TypeError: the batch cannot be moved. It is raised here, so that all ranks raise it at the same step.
        """
        for leaf in flatten(batch)[0] if self._lacks else ():
            if isinstance(leaf, torch.Tensor) and leaf.dtype in self._lacks:
                raise TypeError(
                    f"a tensor of {leaf.dtype} cannot be moved to {self._device}, which has no such numbers. "
                    "Convert it in the dataset or in collate_fn, for example by x.float(). Python's floats become "
                    "float64 where torch collates them, and NumPy's are."
                )
        return Transfer(batch, late=True)

    def hand_over(self, transfer: Transfer) -> Batch:
        """Moves the batch."""
        return map_values(self._moved, _open(transfer))

    def _moved(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, torch.Tensor) or moves_itself(value) else value

    def discard(self, transfer: Transfer) -> None:
        """Drops the batch, which is on the host."""
        transfer.batch = None

    def close(self) -> None:
        """Nothing is held."""


class Handling(enum.Enum):
    """How a leaf gets to the device."""

    STAYS = enum.auto()
    """Not at all: it is no tensor, or it is on the device already."""
    AHEAD = enum.auto()
    """It is copied ahead of time, on the side stream."""
    LATE = enum.auto()
    """The consumer moves it at hand-over."""


class StreamBackend(Protocol):
    """The operations of an accelerator for ``StreamCopier``. Only ``block`` and ``move_now`` wait for the device."""

    def enter_thread(self, stream: DeviceStream) -> None:
        """Makes a stream of this accelerator, and so the accelerator, the current one of the calling thread."""

    def new_stream(self) -> DeviceStream:
        """A new stream of this accelerator."""

    def current_stream(self) -> DeviceStream:
        """The stream that is current on this accelerator in the calling thread."""

    def record(self, stream: DeviceStream) -> Event:
        """An event that is done when all that was queued on the stream so far is done."""

    def wait(self, stream: DeviceStream, event: Event) -> None:
        """Makes work that is queued on the stream from now on start after the event."""

    def done(self, event: Event) -> bool:
        """Whether the event is done."""

    def block(self, event: Event) -> None:
        """Waits, on the host, until the event is done."""

    def handling(self, leaf: Any) -> Handling:
        """How this leaf of a batch gets to the device."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in page-locked host memory: itself, or a copy, whose memory is reused once it is freed."""

    def empty_like(self, tensors: Sequence[torch.Tensor], stream: DeviceStream) -> list[torch.Tensor]:
        """Tensors on the accelerator from the stream's pool, to which their memory returns once they are freed."""

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: DeviceStream) -> None:
        """Queues a copy of each source to its target on the stream."""

    def lend(self, tensor: torch.Tensor, stream: DeviceStream) -> None:
        """Tells the allocator that a tensor of another stream's pool is used on this one, too."""

    def move_now(self, leaf: Any) -> Any:
        """A ``LATE`` leaf, or an object that moves itself, on the accelerator, on the calling thread's current stream.

        Anything else as it is.
        """


@final
class StreamCopier:
    """For an accelerator with streams: copies ahead, on one side stream of its own, as the top of this file explains.

    Args:
      streams: the accelerator.
    """

    def __init__(self, streams: StreamBackend) -> None:
        self._streams = streams
        self._side = streams.new_stream()
        self._home = streams.current_stream()
        self._homes = [self._home]  # all home streams so far
        self._unsettled: set[Transfer] = set()
        self._held: deque[tuple[Event, list[torch.Tensor]]] = deque()
        # Also when a loader is dropped without `close()`. Not at exit: the device may be gone by then.
        self._finish = weakref.finalize(self, _finish, streams, self._unsettled, self._held)
        self._finish.atexit = False

    def enter_thread(self) -> None:
        """Makes the accelerator and the consumer's stream the current ones of the calling thread."""
        self._streams.enter_thread(self._home)

    def begin_step(self) -> None:
        """Notes the stream that the consumer works on; batches sent from now on are allocated there."""
        self._home = self._streams.current_stream()
        if self._home not in self._homes:
            self._homes.append(self._home)

    def send(self, batch: Batch) -> Transfer:
        """Allocates on the consumer's stream, pins, and queues the copies on the side stream.

        Raises:
          RuntimeError: torch's own, if memory runs out; nothing is left in flight that could do harm.
        """
        while self._held and self._streams.done(self._held[0][0]):
            self._held.popleft()
        transfer = Transfer(None, self._home)
        leaves, nesting = flatten(batch)
        transfer.late = any(map(moves_itself, objects_in(leaves)))
        sources = self._allocate(leaves, transfer)
        transfer.batch = unflatten(nesting, leaves)
        self._unsettled.add(transfer)
        if sources:
            try:
                self._ship(transfer, sources)
            except BaseException:
                self.discard(transfer)
                raise
        return transfer

    def _allocate(self, leaves: list[Any], transfer: Transfer) -> list[torch.Tensor]:
        """Puts tensors on the device in the place of the leaves that are copied ahead, which are returned."""
        handling = [self._streams.handling(leaf) for leaf in leaves]
        transfer.late = transfer.late or Handling.LATE in handling
        transfer.there = tuple(
            leaf
            for leaf, each in zip(leaves, handling, strict=True)
            if each is Handling.STAYS and isinstance(leaf, torch.Tensor)
        )
        places = [place for place, each in enumerate(handling) if each is Handling.AHEAD]
        sources = [leaves[place] for place in places]
        transfer.moved = self._streams.empty_like(sources, transfer.home) if sources else []
        for place, target in zip(places, transfer.moved, strict=True):
            leaves[place] = target
        return sources

    def _ship(self, transfer: Transfer, sources: list[torch.Tensor]) -> None:
        allocated = self._streams.record(transfer.home)
        self._streams.wait(self._side, allocated)
        hosts = [self._streams.pin(source) for source in sources]
        try:
            self._streams.copy(hosts, transfer.moved, self._side)
        finally:  # also after a failure: the copies queued before it are in flight
            transfer.ready = self._streams.record(self._side)
            self._held.append((transfer.ready, hosts))

    def hand_over(self, transfer: Transfer) -> Batch:
        """Makes the consumer's current stream wait for the copies; the host does not wait.

        Raises:
          RuntimeError: if the transfer was discarded, or handed over before.
        """
        if transfer not in self._unsettled:
            raise RuntimeError("this transfer was discarded, or handed over before; each one ends once.")
        here = self._streams.current_stream()
        if transfer.ready is not None:
            self._streams.wait(here, transfer.ready)
            if here != transfer.home:
                self._clone_into(here, transfer)
        if len(self._homes) > 1:
            self._share(here, transfer.there)
        self._unsettled.discard(transfer)
        late = transfer.late
        batch = _open(transfer)
        return map_values(self._streams.move_now, batch) if late else batch

    def _clone_into(self, here: DeviceStream, transfer: Transfer) -> None:
        targets = self._streams.empty_like(transfer.moved, here)
        self._streams.copy(transfer.moved, targets, here)
        clones = {id(tensor): clone for tensor, clone in zip(transfer.moved, targets, strict=True)}
        cloned = self._streams.record(here)
        self._streams.wait(transfer.home, cloned)
        transfer.batch = map_leaves(lambda leaf: clones.get(id(leaf), leaf), transfer.batch)

    def _share(self, here: DeviceStream, there: tuple[torch.Tensor, ...]) -> None:
        for home in self._homes if there else ():
            self._streams.wait(here, self._streams.record(home))
        for tensor in there:
            self._streams.lend(tensor, here)

    def discard(self, transfer: Transfer) -> None:
        """Makes the stream that owns the memory wait for the copies, then lets go of it; the host does not wait."""
        if transfer not in self._unsettled:
            return
        if transfer.ready is not None:
            self._streams.wait(transfer.home, transfer.ready)
        self._unsettled.discard(transfer)
        _open(transfer)

    def close(self) -> None:
        """Discards the transfers that have not ended, and waits on the host for copies that read pinned memory."""
        self._finish()


def _finish(streams: StreamBackend, unsettled: set[Transfer], held: deque[tuple[Event, list[torch.Tensor]]]) -> None:
    for ready, _ in held:  # those of the unsettled transfers are among them, unless they are done
        streams.block(ready)
    unsettled.clear()
    held.clear()


def _open(transfer: Transfer) -> Batch:
    batch, transfer.batch, transfer.moved, transfer.there = transfer.batch, None, (), ()
    return batch
