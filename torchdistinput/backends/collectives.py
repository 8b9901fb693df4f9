"""The door to process groups: how the ranks of a strategy agree, and how tensors are summed and gathered.

Decisions.
- Control traffic runs on gloo groups of our own: one for agreements on the caller's thread, one for each live iterator
  (``channels.py``). They are bare groups (``connections.py``) over a store prefix of their own, not ``new_group``: no
  rank outside the strategy takes part, they outlive a default group that is ended first, and a name is never used twice
  (``new_group(use_local_synchronization=True)`` reuses the name of a destroyed group and then dials its old addresses).
- Before an agreement the ranks sign in at the store (``attendance.py``), so an absent rank is known by name and the
  wait stays interruptible. That is some five requests of each rank, once an epoch, which also tell whether all have
  the same to say; only if not are their texts gathered.
- Tensors on accelerators travel on the user's group where that has a backend for them, on all ranks; else, and where
  ranks have devices of different kinds, or a mesh is not just the default group, over the CPU and our own group.
- The store of the default group comes from a private function of torch (torch's own FSDP gets it so): there is no
  public way to it, and a second store would need a second address.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Sequence
from typing import Protocol, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistinput.backends.attendance import Attendance
from torchdistinput.backends.board import Store, prefixed
from torchdistinput.backends.channels import ProcessGroupChannel, Watch, all_gather, gather_texts, not_met
from torchdistinput.backends.connections import new_gloo_group
from torchdistinput.backends.exchanges import Exchange
from torchdistinput.backends.launch import Members
from torchdistinput.backends.mail import Gloo, Mail
from torchdistinput.errors import RankLost

__all__ = ["Channel", "ProcessGroupRanks", "Ranks", "without_repeats"]


class Channel(Protocol):
    """One live iterator's connection to the same iterator on the other ranks."""

    rank: int
    num_ranks: int

    def exchange(self, words: Sequence[int]) -> Exchange[list[int]]:
        """The element-wise sums over the ranks. Collective: every rank calls this, and goes through it, in one order.

        Raises:
          RankLost: a rank went away.
        """

    def expect(self) -> None:
        """Makes ready for an exchange of as many words as the last one had, which is sure to follow. Local."""

    def gather(self, text: str) -> Exchange[list[str]]:
        """Every rank's text, by rank. Collective: every rank calls this, and goes through it, in one order.

        Raises:
          RankLost: a rank went away.
        """

    def waiting_since(self) -> float | None:
        """When the exchange in progress began (``time.monotonic``), or ``None``. Local: any thread."""

    def late(self) -> list[int]:
        """Ranks that have not come to the exchange in progress. Local: any thread."""

    def abort(self, reason: str) -> None:
        """Ends the channel on all ranks, from any thread; the others learn the reason. Local, idempotent."""

    def release(self) -> None:
        """Gives the channel back. Local, idempotent; after an exchange that ended the iteration on all ranks."""


class Ranks(Protocol):
    """The ranks of a strategy, as its caller's thread sees them."""

    rank: int
    num_ranks: int
    num_workers: int
    firsts: tuple[int, ...]  # the first rank of each worker, which speaks for it

    def gather_texts(self, text: str, what: str) -> list[str]:
        """Every rank's text, by rank. Collective: every rank calls this.

        Args:
          text: what this rank has to say.
          what: the call that this serves, for messages.

        Raises:
          CoordinationTimeout: a rank did not come; it is named.
          RankLost: a rank went away meanwhile.
        """

    def free_channels(self) -> list[int]:
        """Numbers of the channels that could be used again here. Local."""

    def open_channel(self, number: int) -> Channel:
        """The channel of that number, made if it is new. Collective: every rank calls this with the same number."""

    def name(self, rank: int) -> int:
        """The rank in the default group, as users know it. Local."""

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """Overwrites the tensor with the first rank's. Collective: every rank calls this with the same shape."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over workers. Collective: every rank calls this with the same shape and dtype."""

    def all_gather_uneven(self, tensor: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
        """Every worker's tensor, ``sizes[i]`` long along ``axis``. Collective: every rank calls this."""


@final
class ProcessGroupRanks:
    """The ranks of a process group or mesh.

    Collective: every one of them makes one.

    Args:
      group: the process group; ``None`` for the default one. Tensors on accelerators travel on it, if ``direct``.
      members: who takes part.
      timeout_seconds: the bound of every wait for another rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, members: Members, timeout_seconds: float) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self._members = members
        self._ranks = members.ranks
        self.rank: int = members.rank
        self.num_ranks: int = len(members.ranks)
        self.num_workers: int = members.num_workers
        self.firsts: tuple[int, ...] = members.firsts
        self.counts: bool = members.rank in members.firsts
        self.direct: str | None = None
        """The kind of device whose tensors travel as they are; the same on every rank. All others go over the CPU."""
        self._timeout_seconds = timeout_seconds
        # A connection of its own: a wait holds the client, and the training code may use the default one meanwhile.
        root = cast(Store, dist.distributed_c10d._get_default_store()).clone()  # noqa: SLF001 - see above
        place = f"torchdistinput/{hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16]}"
        # Each rank counts its own strategies over these ranks: the n-th one meets the n-th one of the others.
        count = root.add(f"{place}/strategies/{self.rank}", 1)
        self._root = prefixed(f"{place}/{count}", root)
        self._watch = Watch()
        self._channels: dict[int, ProcessGroupChannel] = {}
        self._free: set[int] = set()
        self._next_channel = 0
        self._attendance = Attendance(self._root, self.rank, self._ranks)
        self._attendance.wait_for_all("Strategy()", timeout_seconds)
        self._controls = [self._new_group("control")]
        weakref.finalize(self, _drop_groups, self._attendance, self._controls, self._channels)

    def _control(self) -> Gloo:
        if not self._controls:
            raise RankLost("the interpreter is exiting; no rank can be asked any more.")
        return self._controls[0]

    def name(self, rank: int) -> int:
        """See ``Ranks.name``."""
        return self._ranks[rank]

    def gather_texts(self, text: str, what: str) -> list[str]:
        """See ``Ranks.gather_texts``."""
        if self._attendance.wait_for_all(what, self._timeout_seconds, text):
            return [text] * self.num_ranks
        try:
            return gather_texts(self._control(), text)
        except RuntimeError as error:
            raise RankLost(f"{what}: the connection to another rank broke; see the other ranks' logs.") from error

    def free_channels(self) -> list[int]:
        """See ``Ranks.free_channels``; the next unused number comes last."""
        return [*sorted(self._free), self._next_channel]

    def open_channel(self, number: int) -> Channel:
        """See ``Ranks.open_channel``."""
        self._next_channel = max(self._next_channel, number + 1)
        for old in [each for each, channel in self._channels.items() if channel.is_dead]:
            self._channels.pop(old).drop()
        if number in self._free:
            self._free.discard(number)
            self._channels[number].reopen()
        else:
            self._channels[number] = self._make_channel(number)
        return self._channels[number]

    def _make_channel(self, number: int) -> ProcessGroupChannel:
        free = self._free  # and not self, which must not be kept alive by its channels

        def give_back(*, reusable: bool) -> None:
            if reusable:
                free.add(number)

        store = prefixed(f"channel/{number}", self._root.clone())
        try:
            mail = Mail(self._new_group(f"channel/{number}/group"), self._timeout_seconds)
        except RuntimeError as error:
            raise not_met(store, self.rank, self._ranks, error) from error
        return ProcessGroupChannel(mail, store, self._watch, give_back, self._ranks)

    def _new_group(self, name: str) -> Gloo:
        return new_gloo_group(prefixed(name, self._root), self.rank, self.num_ranks, self._timeout_seconds)

    def _wire(self, tensor: Tensor) -> Tensor:
        """Where it can travel."""
        return tensor if tensor.device.type == self.direct else tensor.cpu()

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """See ``Ranks.broadcast_from_first``."""
        tensor = without_repeats(tensor)
        data = self._wire(tensor).contiguous()
        plain = data.flatten().view(torch.uint8)  # gloo does not know every dtype; bytes it does
        if plain.device.type == "cpu":
            self._control().broadcast(plain, 0).wait()
        else:
            dist.broadcast(plain, group=self._group, group_src=0)
        if data is not tensor:
            tensor.copy_(data)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """See ``Ranks.all_reduce_sum``."""
        wire = self._wire(tensor)
        result = wire.clone() if self.counts else torch.zeros_like(wire)
        if result.device.type == "cpu":
            self._control().allreduce([result]).wait()
        else:
            dist.all_reduce(result, group=self._group)
        return result.to(tensor.device)

    def all_gather_uneven(self, tensor: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
        """See ``Ranks.all_gather_uneven``."""
        wire = self._wire(tensor)
        shape = list(wire.shape)
        shape[axis] = max(sizes)
        padded = wire.new_zeros(shape)
        padded.narrow(axis, 0, wire.shape[axis]).copy_(wire)
        parts = [torch.empty_like(padded) for _ in self._ranks]
        if padded.numel() and wire.device.type == "cpu":
            parts = all_gather(self._control(), padded)
        elif padded.numel():
            dist.all_gather(parts, padded, group=self._group)
        firsts = [parts[first].to(tensor.device) for first in self._members.firsts]
        return [part.narrow(axis, 0, size) for part, size in zip(firsts, sizes, strict=True)]


def without_repeats(tensor: Tensor) -> Tensor:
    """The part of an expanded tensor that its rows are made of: they are one and the same. Else the tensor. Local."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _drop_groups(attendance: Attendance, controls: list[Gloo], channels: dict[int, ProcessGroupChannel]) -> None:
    """Runs at exit, after the iterators were closed: a gloo thread that outlives the interpreter aborts the process."""
    with contextlib.suppress(dist.DistError, RuntimeError):  # the store may have ended first: then nobody waits at it
        attendance.leave()
    controls.clear()
    for channel in channels.values():
        channel.drop()
    channels.clear()
