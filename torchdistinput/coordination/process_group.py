"""The ranks of a strategy: how they compare their arguments, and how they sum, gather and broadcast tensors.

Decisions.
- All messages between ranks travel over the library's own connections (``tree.py``), which all strategies of the same
  ranks share. A strategy has one channel for its calls, on the caller's thread (``calls.py``), and one for each live
  iterator.
- An *agreement* is one exchange of texts; equal ones travel as one. A rank that gives up there (after an error that
  names the late rank, or after an interruption) may make the same call again, and continues the same exchange. After
  another call it cannot go on: its text of before counts for the others.
- Tensors on accelerators travel on the user's group where the group has a backend for them on all ranks. Otherwise, and
  where ranks have devices of different kinds, or where a mesh is not the whole default group, they travel over the CPU
  and the library's own connections.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistinput.coordination.calls import Calls
from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import Exchange
from torchdistinput.coordination.launch import Members, meet_once, store_of_default_group
from torchdistinput.coordination.private_names import another_connection
from torchdistinput.coordination.store import Store, prefixed, refuse_ended
from torchdistinput.coordination.tree import Tree
from torchdistinput.errors import InputError

T = TypeVar("T")


def meet(group: dist.ProcessGroup | None, members: Members, timeout_seconds: float) -> Ranks:
    """The ranks of a process group or mesh, which connect where they have not yet. Collective: every rank calls this.

    Args:
      group: the process group; ``None`` for the default one.
      members: the ranks that take part.
      timeout_seconds: the bound of every wait for another rank.

    Raises:
      CoordinationTimeout: a rank did not come, and is named; or the store does not answer.
      RankLost: a rank, or the store, went away meanwhile.
      InputError: this rank cannot listen for the others: there is no such interface, or no free port or descriptor.
    """

    def store_of(given_up: threading.Event) -> Store:
        # A second connection: a request blocks its client, and the training code may use the default one.
        found = store_of_default_group(timeout_seconds, given_up)
        refuse_ended(found)
        place = hashlib.sha256(repr(members.ranks).encode()).hexdigest()[:16]
        return prefixed(f"torchdistinput/{place}", another_connection(found, timeout_seconds))

    met = meet_once(members, timeout_seconds, store_of)
    met.calls.make("Strategy()", timeout_seconds, lambda channel: channel.first(b""))
    return Ranks(group, members, timeout_seconds, met.tree, met.calls.channel.num_exchanges << 32)


@final
class Ranks:
    """The ranks of a strategy, which have met: the collective calls of its caller's thread.

    Each raises ``CoordinationTimeout`` if a rank did not come, which it names, and ``RankLost`` if a rank went away.

    Args:
      group: the process group; ``None`` for the default one. Tensors of the ``direct`` kind of device travel on it.
      members: the ranks that take part.
      timeout_seconds: the bound of every wait for another rank.
      tree: the connections between them.
      number: the first of the numbers of this strategy's channels: that of its calls.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, members: Members, timeout_seconds: float, tree: Tree, number: int
    ) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self._ranks = members.ranks
        self.rank: int = members.rank
        self.num_ranks: int = len(members.ranks)
        self.num_workers: int = members.num_workers
        self.firsts: tuple[int, ...] = members.firsts
        self.counts: bool = members.rank in members.firsts
        self.direct: str | None = None
        """The kind of device whose tensors travel on the group; the same on every rank. Others travel over the CPU."""
        self._timeout_seconds = timeout_seconds
        self._process = os.getpid()
        self._tree = tree
        self._number = number
        self._calls = Calls(Channel(tree, number, self._ranks))
        self._finalizer = weakref.finalize(self, self._calls.channel.end)

    def name(self, rank: int) -> int:
        """The number of a rank in the default group, as users know it. Local."""
        return self._ranks[rank]

    @contextlib.contextmanager
    def waiting(self, timeout_seconds: float) -> Iterator[None]:
        """Inside it, each wait for another rank has this bound in place of the strategy's. Local."""
        before, self._timeout_seconds = self._timeout_seconds, timeout_seconds
        try:
            yield
        finally:
            self._timeout_seconds = before

    def gather_texts(self, text: str, what: str) -> list[str]:
        """Every rank's text, by rank. Collective: every rank calls this.

        Args:
          text: this rank's text.
          what: the name of the public call, for messages.
        """
        if os.getpid() != self._process:
            raise InputError(
                f"{what}: this process was forked from rank {self._ranks[self.rank]}, and a message from the fork "
                "would count as a message of that rank. Call this in the process of the rank; in the fork, read with "
                "torch's own DataLoader."
            )
        texts = self._go_on(what, lambda control: control.gather(text))
        if texts[self.rank] != text:
            self._calls.leave(f"made another call ({what}) after it had given up waiting in the middle of one")
            texts = self._go_on(what, lambda control: control.gather(text))
        return texts

    def _go_on(self, what: str, exchange: Callable[[Channel], Exchange[T]]) -> T:
        """An exchange with all ranks, or the rest of the one that this rank gave up. Collective."""
        return self._calls.make(what, self._timeout_seconds, exchange)

    def num_calls(self) -> int:
        """How many exchanges the calls of this strategy took so far, the same on all ranks after each call. Local."""
        return self._calls.channel.num_exchanges

    def open_channel(self, number: int) -> Channel:
        """The channel with this number, which is ``num_calls()`` after the call that agreed on it. Local."""
        return Channel(self._tree, self._number + number, self._ranks)

    def _wire(self, tensor: Tensor) -> Tensor:
        """The tensor on a device from which it can be sent."""
        return tensor if tensor.device.type == self.direct else tensor.cpu()

    def _exchange(self, what: str, exchange: Callable[[Channel], Exchange[T]]) -> T:
        """An exchange of tensors, which cannot be continued after an error. Collective: every rank calls this."""
        try:
            return self._go_on(what, exchange)
        except BaseException as error:
            self._calls.leave(f"left {what}: {type(error).__name__}")
            raise

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """Overwrites the tensor with the first rank's. Collective: every rank calls this with the same shape."""
        tensor = without_repeats(tensor)
        data = self._wire(tensor.detach()).contiguous()
        plain = data.flatten().view(torch.uint8)  # of any dtype
        if plain.device.type == "cpu":
            found = self._exchange("a broadcast", lambda control: control.first(plain.numpy().tobytes()))
            plain.copy_(_bytes(found))
        else:
            dist.broadcast(plain, group=self._group, group_src=0)
        if data is not tensor:
            tensor.copy_(data)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over workers. Collective: every rank calls this with the same shape and dtype."""
        wire = self._wire(tensor.detach())
        result = (
            wire.clone(memory_format=torch.contiguous_format)
            if self.counts
            else torch.zeros_like(wire, memory_format=torch.contiguous_format)
        )
        if result.device.type == "cpu":
            plain = result.view(-1).view(torch.uint8)
            add = partial(_added, result.dtype)
            plain.copy_(_bytes(self._exchange("a sum", lambda control: control.merge(plain.numpy().tobytes(), add))))
        else:
            dist.all_reduce(result, group=self._group)
        return result.to(tensor.device)

    def combine(self, mine: bytes, merge: Callable[[bytes, bytes], bytes]) -> bytes:
        """One value from those of all ranks, merged two at a time in their order. Collective."""
        return self._exchange("a merge", lambda control: control.merge(mine, partial(reduce, merge)))

    def all_gather_uneven(self, tensor: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
        """Every worker's tensor, ``sizes[i]`` long along ``axis``. Collective: every rank calls this."""
        wire = self._wire(tensor.detach())
        shape = list(wire.shape)
        shape[axis] = max(sizes)
        padded = wire.new_zeros(shape)
        padded.narrow(axis, 0, wire.shape[axis]).copy_(wire)
        parts = [torch.empty_like(padded) for _ in self._ranks]
        if padded.numel() and wire.device.type == "cpu":
            plain = padded.view(-1).view(torch.uint8).numpy().tobytes()
            rows = self._exchange("a gather", lambda control: control.gather_bytes(plain))
            parts = [_bytes(row).view(padded.dtype).view(shape) for row in rows]
        elif padded.numel():
            dist.all_gather(parts, padded, group=self._group)
        firsts = [parts[first].to(tensor.device) for first in self.firsts]
        return [part.narrow(axis, 0, size) for part, size in zip(firsts, sizes, strict=True)]


def _bytes(content: bytes) -> Tensor:
    """Bytes of another rank as a tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _added(dtype: torch.dtype, values: Sequence[bytes]) -> bytes:
    total = _bytes(values[0])
    for each in values[1:]:
        total.view(dtype).add_(_bytes(each).view(dtype))
    return total.numpy().tobytes()


def without_repeats(tensor: Tensor) -> Tensor:
    """The tensor without the repeated rows of ``expand``: each such row shares one memory, and one is kept. Local."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
