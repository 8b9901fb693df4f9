"""Ranks that are threads of one process, each connected with its parent and its children by real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import Exchange
from torchdistinput.coordination.tree import Link, Tree

HANG_SECONDS = 30.0


def trees(num_ranks: int) -> list[Tree]:
    """The connections of each rank."""
    found = [Tree(rank, num_ranks) for rank in range(num_ranks)]
    for tree in found:
        for child in tree.children:
            here, there = tcp_pair()
            tree.add(Link(child, here))
            found[child].add(Link(tree.rank, there))
    return found


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def channels(num_ranks: int, names: Sequence[int] | None = None) -> list[Channel]:
    """A channel for each rank."""
    chosen = range(num_ranks) if names is None else names
    return [Channel(tree, 1, chosen) for tree in trees(num_ranks)]


def summed(channel: Channel, words: Sequence[int]) -> Exchange[list[int]]:
    """The sums of each word over all ranks."""
    found = yield from channel.merge(np.array(words, np.int64).tobytes(), _added)
    return list(np.frombuffer(found, np.int64).tolist())


def _added(values: Sequence[bytes]) -> bytes:
    with np.errstate(over="ignore"):
        total = np.sum([np.frombuffer(each, np.int64) for each in values], axis=0)
    return bytes(total.tobytes())


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


def end_all(found: Sequence[Channel | Tree]) -> None:
    """Closes the sockets of all."""
    for each in found:
        (each if isinstance(each, Tree) else each.tree).end()
