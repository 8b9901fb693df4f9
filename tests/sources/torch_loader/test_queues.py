"""Messages to loader workers and back: in order, whatever their size, and never in the way of who sends them."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import random
import threading
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Mapped
from tests.support.platforms import linux_pipes
from torchdistinput.sources.torch_loader import queues as messages
from torchdistinput.sources.torch_loader.queues import WorkerQueues, context_for, largest

WAIT_SECONDS = 30.0


def new(on_their_way: int = 7) -> WorkerQueues:
    return WorkerQueues(multiprocessing.get_context("fork").Queue(), on_their_way)


@linux_pipes
@pytest.mark.parametrize("on_their_way", [1, 5, 7, 16, 17, 40, 200])
@pytest.mark.parametrize("pages", [16, 64])
def test_as_many_messages_as_can_be_on_their_way_fit_without_anybody_reading(on_their_way: int, pages: int) -> None:
    made: Any = new(on_their_way)
    writer = made._queue._writer
    fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, pages * 4096)
    os.set_blocking(writer.fileno(), False)  # one that does not fit is an error
    size = largest(pages, on_their_way)
    assert size > 0
    for _ in range(on_their_way):
        writer.send_bytes(bytes(size))
    assert [len(made._reader.recv_bytes()) for _ in range(on_their_way)] == [size] * on_their_way


class Leaving:
    """Says a word when it is garbage, as torch's loader does."""

    def __init__(self, made: WorkerQueues) -> None:
        self.made = made
        self.itself = self

    def __del__(self) -> None:
        self.made.put("good-bye")


@linux_pipes
def test_who_is_garbage_can_still_say_a_word() -> None:
    leaving = Leaving(new())
    reader = Connection(os.dup(leaving.made._reader.fileno()), writable=False)
    del leaving
    gc.collect()
    assert reader.poll(WAIT_SECONDS)
    assert ForkingPickler.loads(reader.recv_bytes()) == "good-bye"
    reader.close()


@linux_pipes
def test_messages_of_all_sizes_come_in_the_order_in_which_they_were_put() -> None:
    rng = random.Random(0)
    for largest_of_them in (10, 9_000, 1_000_000):
        made = new()
        items = [bytes([k % 256]) * rng.randint(0, largest_of_them) for k in range(60)]

        def put(made: WorkerQueues = made, items: list[bytes] = items) -> None:
            for item in items:
                made.put(item)

        sender = threading.Thread(target=put)
        sender.start()
        assert [made.get(WAIT_SECONDS) for _ in items] == items
        sender.join()
        made.close()


class Registered:
    """Of which ``ForkingPickler`` is told how to pickle it, once there are queues."""

    def itself(self) -> Registered:
        """A method."""
        return self


def reduced(_: Registered) -> tuple[Any, ...]:
    return str, ("registered",)


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(item, id=name)
        for name, item in {
            "request": (3, (True, [1, 2], 7)),
            "plain request": (3, (3, (64, 96), 1 << 63)),
            "plain": (3, (2, bytes(256), ("a", None, 2.5, ()))),
            "tuple with more": (3, (2, torch.float16, torch.Size([3]))),
            "class": Registered,
            "function": reduced,
            "method": random.Random(3).random,
            "method of ours": [Registered().itself],
            "type of a type": type,
            "partial": partial(max, 1),
            "dtype": torch.float16,
            "array": np.arange(5.0),
            "generator": random.Random(3),
            "deep": {"a": [partial(len, "abc")] * 2, ("b",): frozenset("x")},
        }.items()
    ],
)
def test_a_message_is_pickled_as_multiprocessing_does_it(item: Any) -> None:
    assert messages._pickled(item) == bytes(ForkingPickler.dumps(item))


@linux_pipes
def test_what_is_registered_later_and_what_torch_shares_is_sent_as_multiprocessing_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(messages._REDUCERS, Registered, reduced)
    made, tensor = new(), torch.zeros(3)
    made.put((Registered(), tensor))
    text, other = made.get(WAIT_SECONDS)
    assert text == "registered"
    assert tensor.untyped_storage().is_shared()
    tensor[1] = 5
    assert other[1] == 5
    made.close()


def texts(large_from: int) -> Mapped:
    """Samples that cannot be put into memory that is used again: small, and from some index on large."""
    return Mapped(96, lambda index: [str(index), "x" * (20_000 if index >= large_from else 10)])


@pytest.mark.parametrize("large_from", [0, 40, 96])
def test_batches_of_texts_of_any_size_are_torchs(large_from: int) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}
    ours, torchs = tdi.DataLoader(texts(large_from), **settings), DataLoader(texts(large_from), **settings)
    for _ in range(2):
        assert list(ours) == list(torchs)


def feeders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "QueueFeederThread"}


@linux_pipes
def test_small_batches_need_no_thread_that_sends_requests() -> None:
    before = feeders()  # of loaders of torch's that are ending
    with tdi.DataLoader(
        Mapped(64, lambda index: torch.full((8,), float(index))), batch_size=4, num_workers=2, persistent_workers=True
    ) as loader:
        assert torch.cat(list(loader))[:, 0].tolist() == list(range(64))
        assert feeders() <= before


def test_workers_that_are_not_forked_have_the_queues_of_torch() -> None:
    spawn = multiprocessing.get_context("spawn")
    assert context_for(spawn, 2, None) is spawn
    assert context_for(None, 0, None) is None
    assert ForkingPickler.loads(ForkingPickler.dumps(messages._Pickled(ForkingPickler.dumps([1]).tobytes()))) == [1]
