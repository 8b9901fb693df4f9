"""The door to process groups, its wires: gloo groups of our own, in which ranks connect at their first message.

Problem. A gloo group connects every rank with every other before it is of any use: ``W - 1`` sockets in each rank (at
1,000 ranks more than a process may have open by default), ``W**2`` addresses at the store, and as many handshakes. Here
a rank sends to ``log2 W`` others in a channel (``doubling.py``), and to its neighbours in a ring.

Decisions.
- Two ranks connect at the first message between them. To begin that one waits until both have asked for each other;
  all later ones are as with gloo's own way. In a channel that is when it is made, right after all ranks have signed in.
  How long gloo waits for a rank that dies in between is as it was: up to the timeout for its address, five times that
  for an answer there.
- One interface, the first that ``GLOO_SOCKET_IFNAME`` names, as a channel's messages are small. With several of them
  gloo has a set of connections for each, chosen by the tag of a message, and none that closes all of them.
- A transport that cannot connect later (TLS, or libuv on other systems than Linux) connects at once.

References: gloo ``transport/tcp/context.cc`` (``getPair``), ``pair.cc`` (``waitUntilConnected``), and gloo#419.
"""

# ruff: noqa: SLF001 - torch's options of a gloo group have private names only
from __future__ import annotations

import datetime
from functools import partial
from typing import Any, cast

import torch.distributed as dist

from torchdistinput.backends.board import Store
from torchdistinput.backends.forks import never_ended_by_forks
from torchdistinput.backends.launch import find_launch
from torchdistinput.backends.mail import Gloo

__all__ = ["new_gloo_group"]


def new_gloo_group(store: Store, rank: int, num_ranks: int, timeout_seconds: float) -> Gloo:
    """A gloo group that torch does not know of. Collective: every rank of it calls this; waits for none of them.

    Args:
      store: a part of a store, for nothing else.
      rank: this rank.
      num_ranks: of the group.
      timeout_seconds: bounds its collectives, and the wait for another rank's address.

    Raises:
      RuntimeError: this host has no such interface, or no address.
    """
    gloo = cast(Any, dist).ProcessGroupGloo
    options = gloo._Options()
    options._timeout = datetime.timedelta(seconds=timeout_seconds)
    options._devices = [_device(gloo)]  # its own: it ends with the group
    group = gloo(store, rank, num_ranks, options)
    never_ended_by_forks(group)
    return cast(Gloo, group)


def _device(gloo: Any) -> Any:
    interface = find_launch().interface
    made = partial(gloo.create_device, interface=interface) if interface else gloo.create_default_device
    try:
        return made(lazy_init=True)
    except RuntimeError:  # this transport cannot; or it raises again what is wrong
        return made(lazy_init=False)
