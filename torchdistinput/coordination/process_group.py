"""The ranks of a strategy: how they compare their arguments, and how they sum, gather and broadcast tensors.

Decisions.
- All messages between ranks travel over the library's own connections (``connections.py``): one set for the calls of
  the strategy, on the caller's thread, and one set for each live iterator (``channel.py``). The ranks find each other
  through the store of the default group (``endpoint.py``, ``store.py``). Later the store is not asked again.
- An *agreement* has two parts. First the ranks meet, in an exchange without content. A rank that gives up there (after
  an error that names the late rank, or after an interruption) may call again, also with another text, and continues the
  same exchange. Then the ranks compare a digest of their texts. Only where digests differ, the texts are gathered.
- The caller's thread waits half a second at most before it handles signals and looks at the clock. After some seconds
  it logs a warning that names the late rank.
- Tensors on accelerators travel on the user's group where the group has a backend for them on all ranks. Otherwise, and
  where ranks have devices of different kinds, or where a mesh is not the whole default group, they travel over the CPU
  and the library's own connections.
- The store of the default group comes from a private function of torch (see ``private_names``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchdistinput.coordination.addresses import Address, own_addresses
from torchdistinput.coordination.channel import ProcessGroupChannel, lost
from torchdistinput.coordination.connections import AbortMessage, Array, Connections, Departed
from torchdistinput.coordination.endpoint import CONTROL, Endpoint, Late
from torchdistinput.coordination.exchanges import Exchange, StartedExchange
from torchdistinput.coordination.launch import Members, find_launch, store_of_default_group
from torchdistinput.coordination.private_names import another_connection
from torchdistinput.coordination.recursive_doubling import add_up, broadcast, combine, partners, spread
from torchdistinput.coordination.store import WARN_SECONDS, StoreBarrier, did_not_come, prefixed, refuse_ended, within
from torchdistinput.errors import CoordinationTimeout, InputError, RankLost

_LOG = logging.getLogger("torchdistinput")
_REST_SECONDS: Final = 0.5
_MAX_TROUBLE: Final = 1000  # characters of a text for the other ranks
_STORE_SECONDS: Final = 2.0  # beyond the bound of the requests to the store, until the store counts as unreachable
_SILENCE_SECONDS: Final = 10.0  # beyond the timeout, which names the rank: until a silent connection counts as lost
_OPEN_THE_NETWORK: Final = (
    "A firewall, or a network that is down or not the one meant, keeps the hosts apart: open a range of ports for "
    "TORCHDISTINPUT_PORTS=29600-29700, or name the interface in GLOO_SOCKET_IFNAME."
)

T = TypeVar("T")


class Channel(Protocol):
    """The connection of one live iterator to the same iterator on the other ranks.

    What is collective, every rank begins and completes in the same order; it raises ``RankLost`` if a rank went away.
    """

    rank: int
    num_ranks: int
    peer_times: dict[int, list[float]] | None
    """Gets, for each partner in an ``exchange``, when the message to it was sent and its own was received."""

    def exchange(self, words: Sequence[int], *, by_max: int = 0) -> Exchange[list[int]]:
        """The element-wise sums over the ranks; of the last ``by_max`` words the largest. Collective."""

    def gather(self, text: str) -> Exchange[list[str]]:
        """Every rank's text, by rank. Collective."""

    def waiting_since(self) -> float | None:
        """When the exchange in progress began (``time.monotonic``), or ``None``. Local: any thread."""

    def late(self) -> list[int]:
        """The ranks that have not yet joined the exchange in progress. Local: any thread."""

    def unreached(self) -> str:
        """Why the awaited rank cannot be reached, in words; empty where nothing tells so. Local: any thread."""

    use: int
    """How many iterators used the channel before."""

    def notify(self, use: int, why: str) -> None:
        """Tells the other ranks that this one leaves its loop, in a use of the channel. Local: any thread."""

    def departed(self, use: int) -> str:
        """Which rank left its loop or died, and why; empty if none, or if the use is over. Local: any thread."""

    def abort(self, reason: str) -> None:
        """Ends the channel on all ranks and tells them the reason. Local: any thread. Idempotent."""

    def release(self) -> None:
        """Gives the channel back, after an exchange that ended the iteration on all ranks. Local, idempotent."""


class Ranks(Protocol):
    """The ranks of a strategy: the collective calls that its caller's thread makes.

    Each raises ``CoordinationTimeout`` if a rank did not come, which it names, and ``RankLost`` if a rank went away.
    """

    rank: int
    num_ranks: int
    num_workers: int
    firsts: tuple[int, ...]  # the first rank of each worker, which represents the worker

    def waiting(self, timeout_seconds: float) -> contextlib.AbstractContextManager[None]:
        """Inside it, each wait for another rank has this bound in place of the strategy's. Local."""

    def gather_texts(self, text: str, what: str) -> list[str]:
        """Every rank's text, by rank. Collective: every rank calls this.

        Args:
          text: this rank's text.
          what: the name of the public call, for messages.
        """

    def combine(self, mine: bytes, merge: Callable[[bytes, bytes], bytes]) -> bytes:
        """One value merged from those of all ranks; see ``recursive_doubling.combine``. Collective."""

    def free_channels(self) -> list[int]:
        """The numbers of the channels that this rank could use again; the next unused number comes last. Local."""

    def open_channel(self, number: int) -> Channel:
        """The channel with this number, made if it is new. Collective: every rank calls this with the same number.

        Raises ``RankLost`` also if a rank refuses it.
        """

    def refuse_channel(self, number: int, why: str) -> None:
        """Tells the ranks that wait in ``open_channel`` that this rank will not come. Local, bounded."""

    def name(self, rank: int) -> int:
        """The number of the rank in the default group, as users know it. Local."""

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """Overwrites the tensor with the first rank's. Collective: every rank calls this with the same shape."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over workers. Collective: every rank calls this with the same shape and dtype."""

    def all_gather_uneven(self, tensor: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
        """Every worker's tensor, ``sizes[i]`` long along ``axis``. Collective: every rank calls this."""


@final
class ProcessGroupRanks:
    """The ranks of a process group or mesh.

    Collective: every rank of the group makes one.

    Args:
      group: the process group; ``None`` for the default one. Tensors of the ``direct`` kind of device travel on it.
      members: the ranks that take part.
      timeout_seconds: the bound of every wait for another rank.

    Raises:
      CoordinationTimeout: a rank did not come, and is named; or the store does not answer.
      RankLost: a rank, or the store, went away meanwhile.
      InputError: this rank cannot listen for the others: there is no such interface, or no free port or descriptor.
    """

    def __init__(self, group: dist.ProcessGroup | None, members: Members, timeout_seconds: float) -> None:
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
        launch = find_launch()
        self._channels: dict[int, ProcessGroupChannel] = {}
        self._free: set[int] = set()
        self._next_channel = 0
        self._meeting: StartedExchange[Any] | None = None  # the exchange that this rank gave up and may continue
        self._text_is_sent = False  # whether this rank's text was sent to the others
        self._sent_text = ""
        try:
            self._endpoint = Endpoint(
                self.rank, self._ranks, launch.interface, launch.ports, timeout_seconds + _SILENCE_SECONDS
            )
        except (InputError, OSError) as error:  # the others wait for this rank: they are told
            trouble = json.dumps(f"{AbortMessage.FAILED}: {error}"[:_MAX_TROUBLE])
            with contextlib.suppress(InputError, OSError, RuntimeError):  # its own trouble comes first
                self._sign_in(lambda: trouble)
            raise
        self._finalizer = weakref.finalize(self, _end, self._endpoint, self._channels)
        try:
            self._meet()
            self._channels[CONTROL] = self._open(CONTROL, "Strategy()")
        except BaseException:
            self._finalizer()
            raise

    def _meet(self) -> None:
        """Exchanges addresses with the partners of this rank. Collective."""
        address = self._endpoint.address

        def own() -> str:
            found = address.addresses or own_addresses(find_launch().address)
            return address._replace(addresses=found).to_text()

        texts = {peer: json.loads(text) for peer, text in self._sign_in(own).items()}
        self._endpoint.meet({peer: Address.of(found) for peer, found in texts.items() if isinstance(found, list)})
        for peer, found in texts.items():
            if isinstance(found, str):
                message = AbortMessage(peer, found)
                self._endpoint.refuse(CONTROL, message)
                raise RankLost(f"Strategy(): {lost(message, self._ranks)}")

    def _sign_in(self, own: Callable[[], str]) -> dict[int, bytes]:
        """Writes the text of this rank to the store, and reads the texts of its partners. Collective.

        Args:
          own: makes the text; it may wait for a resolver.
        """
        what, timeout_seconds = "Strategy()", self._timeout_seconds
        place = f"torchdistinput/{hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16]}"
        others = partners(self.rank, self.num_ranks)
        launch = find_launch()

        def ask(given_up: threading.Event) -> list[bytes]:
            # A second connection: a request blocks its client, and the training code may use the default one.
            found = store_of_default_group(launch, timeout_seconds, given_up)
            refuse_ended(found)
            root = another_connection(found, timeout_seconds)
            barrier = StoreBarrier(prefixed(place, root), self.rank, self._ranks, place)
            barrier.wait_for_all(what, timeout_seconds, own(), given_up)
            return barrier.texts(others)

        where = f" at {launch.address}" if launch.address else ""
        return dict(zip(others, within(timeout_seconds + _STORE_SECONDS, what, where, ask), strict=True))

    def _control(self) -> ProcessGroupChannel:
        if CONTROL not in self._channels:
            raise RankLost("the interpreter is exiting; no rank can be asked any more.")
        return self._channels[CONTROL]

    def name(self, rank: int) -> int:
        """See ``Ranks.name``."""
        return self._ranks[rank]

    @contextlib.contextmanager
    def waiting(self, timeout_seconds: float) -> Iterator[None]:
        """See ``Ranks.waiting``."""
        before, self._timeout_seconds = self._timeout_seconds, timeout_seconds
        try:
            yield
        finally:
            self._timeout_seconds = before

    def gather_texts(self, text: str, what: str) -> list[str]:
        """See ``Ranks.gather_texts``."""
        if os.getpid() != self._process:
            raise InputError(
                f"{what}: this process was forked from rank {self._ranks[self.rank]}, and a message from the fork "
                "would count as a message of that rank. Call this in the process of the rank; in the fork, read with "
                "torch's own DataLoader."
            )
        if not self._text_is_sent:
            self._go_on(what, lambda control: control.exchange([1]))
            self._text_is_sent, self._sent_text = True, text
        elif text != self._sent_text:
            self._control().abort(f"made another call ({what}) after it had given up waiting in the middle of one")
        sent = self._sent_text
        texts: list[str] = self._go_on(what, lambda control: _compare(control, sent))
        self._text_is_sent = False
        return texts

    def _go_on(self, what: str, exchange: Callable[[ProcessGroupChannel], Exchange[T]]) -> T:
        """An exchange with all ranks, on the caller's thread. Continues the exchange that this rank gave up, if any."""
        control = self._control()
        try:
            began = time.monotonic()
            warned = False
            control.gave_up = None
            control.connections.resting = False
            if self._meeting is None:
                self._meeting = StartedExchange(exchange(control))
            meeting: StartedExchange[T] = self._meeting
            while not meeting.poll():
                waited = time.monotonic() - began
                warned = self._look_for_late(control.late(), waited, what, warned=warned)
                seconds = min(_REST_SECONDS, max(0.01, self._timeout_seconds - waited))
                self._endpoint.rest(control.connections, seconds, waited)
            self._meeting = None
            return meeting.conclude()
        except CoordinationTimeout:
            late = self._names(control.late())
            after = f"after {self._timeout_seconds:g} seconds"
            control.gave_up = f"{AbortMessage.GAVE_UP} for rank {late} in {what} {after}"
            raise
        except RankLost as error:
            self._meeting = None
            raise RankLost(f"{what}: {error}") from None
        except BaseException as error:
            if not control.connections.resting:
                self._meeting = None
                control.abort(f"was interrupted by {type(error).__name__} in {what}")
            raise

    def _look_for_late(self, late: Sequence[int], waited: float, what: str, *, warned: bool) -> bool:
        """Names the late ranks, first in a warning, then in an error. Returns whether the warning was logged."""
        if waited < self._timeout_seconds and (warned or waited < WARN_SECONDS):
            return warned
        unreached = self._unreached(late)
        if waited >= self._timeout_seconds:
            raise self._did_not_come(what, late, unreached)
        why = f": {unreached}" if unreached else ""
        _LOG.warning("%s: waiting for rank %s for %.0f seconds%s", what, self._names(late), waited, why)
        return True

    def _unreached(self, late: Sequence[int]) -> str:
        """Why the late ranks cannot be reached, in words; empty where nothing tells so."""
        told = self._endpoint.told_unreached(late)
        control = self._channels.get(CONTROL)
        if told or control is None or control.late() != late:
            return told
        return control.unreached()

    def _did_not_come(self, what: str, late: Sequence[int], unreached: str) -> CoordinationTimeout:
        if unreached:
            names, seconds = self._names(late), self._timeout_seconds
            return CoordinationTimeout(
                f"{what}: rank {names} did not come within {seconds:g} seconds: {unreached}. {_OPEN_THE_NETWORK}"
            )
        return did_not_come(what, self._names(late), self._timeout_seconds)

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(str(self._ranks[rank]) for rank in ranks) or "unknown"

    def free_channels(self) -> list[int]:
        """See ``Ranks.free_channels``."""
        return [*sorted(self._free), self._next_channel]

    def open_channel(self, number: int) -> Channel:
        """See ``Ranks.open_channel``."""
        self._next_channel = max(self._next_channel, number + 1)
        for old in [each for each, channel in self._channels.items() if channel.is_dead and each != CONTROL]:
            del self._channels[old]
        if number in self._free:
            self._free.discard(number)
            self._channels[number].reopen()
        else:
            self._channels[number] = self._open(number, "iter()")
        return self._channels[number]

    def refuse_channel(self, number: int, why: str) -> None:
        """See ``Ranks.refuse_channel``."""
        self._next_channel = max(self._next_channel, number + 1)
        channel = self._channels.get(number)
        if channel is None:
            self._endpoint.refuse(number, AbortMessage(self.rank, why))
            return
        if number in self._free:
            self._free.discard(number)
            channel.reopen()
        channel.abort(why)

    def _open(self, number: int, what: str) -> ProcessGroupChannel:
        warned = False

        def meanwhile(missing: list[int], waited: float) -> None:
            nonlocal warned
            if waited < self._timeout_seconds:  # else the endpoint raises
                warned = self._look_for_late(missing, waited, what, warned=warned)

        try:
            connections = self._endpoint.open(number, self._timeout_seconds, meanwhile)
        except Late as late:
            unreached = late.unreached
            if number == CONTROL and not unreached:  # all have signed in, so all have called this
                place = f"rank {self._ranks[self.rank]} at its port {self._endpoint.address.port}"
                unreached = f"signed in, but did not connect to {place}"
            raise self._did_not_come(what, late.ranks, unreached) from None
        except InputError as error:
            raise type(error)(f"{what}: {error}") from error.__cause__
        except Departed as departed:
            text = str(lost(departed.message, self._ranks))
            if number == CONTROL and departed.message.why.startswith(AbortMessage.DIED):
                text += f" If it has not ended: {_OPEN_THE_NETWORK}"
            raise RankLost(f"{what}: {text}") from None
        give_back = partial(self._free.add, number)  # without self: its channels must not keep it alive
        return ProcessGroupChannel(connections, give_back, self._ranks)

    def _wire(self, tensor: Tensor) -> Tensor:
        """The tensor on a device from which it can be sent."""
        return tensor if tensor.device.type == self.direct else tensor.cpu()

    def _exchange(self, what: str, rounds: Callable[[Connections], Exchange[T]]) -> T:
        """An exchange of tensors, which cannot be continued after an error. Collective: every rank calls this."""
        try:
            return self._go_on(what, lambda control: control.collective(rounds))
        except BaseException as error:
            self._meeting = None
            self._control().abort(f"left {what}: {type(error).__name__}")
            raise

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """See ``Ranks.broadcast_from_first``."""
        tensor = without_repeats(tensor)
        data = self._wire(tensor.detach()).contiguous()
        plain = data.flatten().view(torch.uint8)  # of any dtype
        if plain.device.type == "cpu":
            self._exchange("a broadcast", lambda group: broadcast(group, plain.numpy()))
        else:
            dist.broadcast(plain, group=self._group, group_src=0)
        if data is not tensor:
            tensor.copy_(data)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """See ``Ranks.all_reduce_sum``."""
        wire = self._wire(tensor.detach())
        result = (
            wire.clone(memory_format=torch.contiguous_format)
            if self.counts
            else torch.zeros_like(wire, memory_format=torch.contiguous_format)
        )
        if result.device.type == "cpu":
            plain = result.view(-1).view(torch.uint8).numpy()
            self._exchange("a sum", lambda group: add_up(group, plain, partial(_add, result.dtype)))
        else:
            dist.all_reduce(result, group=self._group)
        return result.to(tensor.device)

    def combine(self, mine: bytes, merge: Callable[[bytes, bytes], bytes]) -> bytes:
        """See ``Ranks.combine``."""
        return self._exchange("a merge", lambda group: combine(group, mine, merge))

    def all_gather_uneven(self, tensor: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
        """See ``Ranks.all_gather_uneven``."""
        wire = self._wire(tensor.detach())
        shape = list(wire.shape)
        shape[axis] = max(sizes)
        padded = wire.new_zeros(shape)
        padded.narrow(axis, 0, wire.shape[axis]).copy_(wire)
        parts = [torch.empty_like(padded) for _ in self._ranks]
        if padded.numel() and wire.device.type == "cpu":
            plain = padded.view(-1).view(torch.uint8).numpy()
            rows = self._exchange("a gather", lambda group: spread(group, plain))
            parts = [torch.from_numpy(row).view(padded.dtype).view(shape) for row in rows]
        elif padded.numel():
            dist.all_gather(parts, padded, group=self._group)
        firsts = [parts[first].to(tensor.device) for first in self.firsts]
        return [part.narrow(axis, 0, size) for part, size in zip(firsts, sizes, strict=True)]


def _compare(control: ProcessGroupChannel, text: str) -> Exchange[list[str]]:
    """The texts of all ranks; they are sent only where their digests differ. Collective: every rank calls this."""
    digest = np.frombuffer(hashlib.sha256(text.encode(errors="surrogatepass")).digest(), np.int64)
    # The weights of all ranks sum to 0, so the weighted sum of equal digests is 0. All ranks see the same sums.
    others = control.num_ranks - 1
    weight = 2 * control.rank + 1 if control.rank < others else -(others**2)
    mine: list[int] = (digest * np.array([weight])).tolist()
    if any((yield from control.exchange(mine))):
        return (yield from control.gather(text))
    return [text] * control.num_ranks


def _add(dtype: torch.dtype, mine: Array, theirs: Array) -> None:
    torch.from_numpy(mine).view(dtype).add_(torch.from_numpy(theirs).view(dtype))  # numpy knows fewer dtypes


def without_repeats(tensor: Tensor) -> Tensor:
    """The tensor without the repeated rows of ``expand``: each such row shares one memory, and one is kept. Local."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _end(endpoint: Endpoint, channels: dict[int, ProcessGroupChannel]) -> None:
    """Tells the other ranks that this rank has ended. Runs at exit, after the iterators were closed."""
    endpoint.close()
    for channel in list(channels.values()):
        channel.end()
    channels.clear()
