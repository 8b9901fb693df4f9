"""Ranks that are threads of one process, each connected with its partners by real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torchdistinput.coordination.channel import ProcessGroupChannel
from torchdistinput.coordination.connections import Connections
from torchdistinput.coordination.recursive_doubling import partners

HANG_SECONDS = 30.0


def wired(num_ranks: int) -> list[Connections]:
    """The connections of each rank."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for peer in partners(rank, num_ranks):
            if peer > rank:
                ends[rank][peer], ends[peer][rank] = tcp_pair()
    return [Connections(rank, num_ranks, found) for rank, found in enumerate(ends)]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def kept() -> None:
    """The channel is this test's."""


def channels(num_ranks: int, names: Sequence[int] | None = None) -> list[ProcessGroupChannel]:
    """A channel for each rank."""
    chosen = range(num_ranks) if names is None else names
    return [ProcessGroupChannel(each, kept, chosen) for each in wired(num_ranks)]


def on_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call returns or raises; none may hang."""
    found: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found


def end_all(found: Sequence[ProcessGroupChannel]) -> None:
    """Closes the sockets of all."""
    for channel in found:
        channel.end()
