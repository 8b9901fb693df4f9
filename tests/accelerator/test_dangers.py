"""The four dangers that ``copiers.py`` names are real: leave one wait or one reference out, and the data is wrong.

A stream is held while something else runs that would have to wait for it. With the library's own backend the data is
right all the same; with a lax one it is not, so the tests of this folder can fail.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.accelerator import simulated
from tests.accelerator.consumers import Witness
from torchdistinput.devices.accelerators import TorchStreams
from torchdistinput.devices.copy_ahead import StreamCopier

pytestmark = pytest.mark.simulated

SETTLE_SECONDS = 0.3


@dataclasses.dataclass(frozen=True)
class Laxity:
    """What a backend leaves out; nothing by default."""

    side_waits: bool = True
    home_waits: bool = True
    asks_events: bool = True


HONEST = Laxity()


class Lax:
    """The backend of the library, but for what it leaves out. See ``StreamBackend``."""

    def __init__(self, device: torch.device, laxity: Laxity) -> None:
        streams = TorchStreams(device)
        self._laxity = laxity
        self._streams = streams
        self.home = streams.current_stream()
        self.side = streams.new_stream()
        self.enter_thread, self.current_stream = streams.enter_thread, streams.current_stream
        self.lend = streams.lend
        self.record, self.block, self.handling = streams.record, streams.block, streams.handling
        self.pin, self.copy = streams.pin, streams.copy
        self.empty_like, self.move_now = streams.empty_like, streams.move_now

    def new_stream(self) -> torch.Stream:
        return self.side

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        heeds = {self.side: self._laxity.side_waits, self.home: self._laxity.home_waits}
        if heeds.get(stream, True):
            self._streams.wait(stream, event)

    def done(self, event: torch.Event) -> bool:
        return self._streams.done(event) if self._laxity.asks_events else True


_SIZES = {"large": 20_000, "one": 30, "two": 50}


def batch(value: int) -> dict[str, torch.Tensor]:
    """A large leaf and two small ones."""
    return {name: torch.full((size,), value) for name, size in _SIZES.items()}


def like(value: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Memory of the user's own, in the blocks that a batch would take: filled on the current stream."""
    return {name: torch.full((size,), value, device=device) for name, size in _SIZES.items()}


def settle(*streams: torch.Stream) -> None:
    """What is not held back has run afterwards."""
    until = time.monotonic() + SETTLE_SECONDS
    while not all(stream.query() for stream in streams) and time.monotonic() < until:
        time.sleep(0.001)


def host_like(value: int) -> dict[str, torch.Tensor]:
    return like(value, torch.device("cpu"))


Play = Callable[[torch.device, StreamCopier, Lax, Witness], None]


def read_before_the_copy_is_done(device: torch.device, copier: StreamCopier, lax: Lax, witness: Witness) -> None:
    like(9, device)  # what the memory holds before
    with simulated.held(lax.side):
        witness.look(copier.hand_over(copier.send(batch(1))), batch(1))
        settle(lax.home)


def copied_over_what_is_still_read(device: torch.device, copier: StreamCopier, lax: Lax, witness: Witness) -> None:
    earlier = like(3, device)
    settle(lax.home)
    with simulated.held(lax.home):
        witness.look(earlier, host_like(3))
        del earlier
        transfer = copier.send(batch(1))
        settle(lax.side)
    witness.look(copier.hand_over(transfer), batch(1))


def host_memory_reused_while_it_is_read(device: torch.device, copier: StreamCopier, lax: Lax, witness: Witness) -> None:
    with simulated.held(lax.side):
        transfers = [copier.send(batch(value)) for value in range(4)]
    for value, transfer in enumerate(transfers):
        witness.look(copier.hand_over(transfer), batch(value))


def given_up_while_it_is_written(device: torch.device, copier: StreamCopier, lax: Lax, witness: Witness) -> None:
    with simulated.held(lax.side):
        copier.discard(copier.send(batch(1)))
        own = like(5, device)
        settle(lax.home)
    settle(lax.side)
    witness.look(own, host_like(5))


def freed_while_another_stream_clones_it(
    device: torch.device, copier: StreamCopier, lax: Lax, witness: Witness
) -> None:
    transfer = copier.send(batch(1))
    settle(lax.side)
    other = torch.Stream(device)
    with simulated.held(other):
        torch.accelerator.set_stream(other)
        copier.begin_step()
        found: Any = copier.hand_over(transfer)
        torch.accelerator.set_stream(lax.home)
        own = like(5, device)
        settle(lax.home)
    torch.accelerator.set_stream(other)
    witness.look(found, batch(1))
    torch.accelerator.set_stream(lax.home)
    witness.look(own, host_like(5))


PLAYS: dict[str, tuple[Play, Laxity]] = {
    "1": (read_before_the_copy_is_done, Laxity(home_waits=False)),
    "2": (copied_over_what_is_still_read, Laxity(side_waits=False)),
    "3": (host_memory_reused_while_it_is_read, Laxity(asks_events=False)),
    "4": (given_up_while_it_is_written, Laxity(home_waits=False)),
    "change of stream": (freed_while_another_stream_clones_it, Laxity(home_waits=False)),
}


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("lax", [False, True])
@pytest.mark.parametrize("danger", PLAYS)
def test_the_data_is_wrong_only_where_a_wait_or_a_reference_is_left_out(
    device: torch.device, weather: int, danger: str, lax: bool, poison: bool
) -> None:
    simulated.configure(weather, poison=poison)
    play, laxity = PLAYS[danger]
    backend = Lax(device, laxity if lax else HONEST)
    copier = StreamCopier(backend)
    witness = Witness()
    play(device, copier, backend, witness)
    copier.close()
    assert (witness.wrong() > 0) == lax


@pytest.mark.parametrize("careful", [False, True])
def test_a_pinned_block_is_free_at_once_unless_care_is_asked_for(
    device: torch.device, weather: int, careful: bool
) -> None:
    """What the third danger rests on: CUDA's allocator waits for the copies it knows of, this one does not."""
    simulated.configure(weather, careful_host=careful)
    stream = torch.accelerator.current_stream(device)
    with simulated.held(stream):
        moved = torch.full((1000,), 1).pin_memory().to(device, non_blocking=True)
        torch.full((1000,), 2).pin_memory()
    assert torch.equal(moved.cpu(), torch.full((1000,), 1)) == careful


def test_a_batch_that_is_lost_without_a_word_is_remembered_by_the_copier(device: torch.device, weather: int) -> None:
    simulated.configure(weather)
    backend = Lax(device, HONEST)
    copier = StreamCopier(backend)
    with simulated.held(backend.side):
        copier.send(batch(1))
        own = like(5, device)
        settle(backend.home)
    settle(backend.side)
    witness = Witness()
    witness.look(own, host_like(5))
    copier.close()
    assert witness.wrong() == 0
