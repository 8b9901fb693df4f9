"""The interfaces of the executor to its neighbours: the stages before the vote, and the vote itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchdistinput.coordination.exchanges import Exchange
from torchdistinput.step_types import Drawn, Held, LocalStep, Outcome


class Votes(Protocol):
    """The stage in which all ranks agree on their steps; see ``step_sync.StepSync``."""

    @property
    def over(self) -> bool:
        """Whether the last outcome of the epoch was returned."""

    @property
    def alone(self) -> bool:
        """Whether no other rank votes."""

    @property
    def rounds(self) -> int:
        """About how many times a vote has to be polled until it is complete."""

    @property
    def holds(self) -> bool:
        """Whether there is something to vote for."""

    def settle(self, held: Held) -> Outcome:
        """Where no other rank votes: the outcome of the next step of this rank."""

    def hold(self, held: Held) -> None:
        """Takes the next step of this rank. Also while a vote is in progress, which does not cover the step."""

    def vote(self, fits: int | None = None) -> Exchange[list[Outcome]]:
        """One exchange: the outcomes that the ranks agree on. ``fits``: steps ahead that fit this rank's memory."""

    def stop(self, delivered: int) -> list[LocalStep]:
        """The consumer stopped after ``delivered`` steps. Returns the list of held steps, which the caller clears."""

    def waiting_since(self) -> float | None:
        """When the exchange in progress began, or ``None``. Any thread."""

    def late(self) -> list[int]:
        """The ranks that have not yet joined the exchange in progress. Any thread."""

    def unreached(self) -> str:
        """Why the awaited rank cannot be reached, in words; empty where nothing tells so. Any thread."""

    def abort(self, reason: str) -> None:
        """Ends the exchange on all ranks and tells them the reason. Any thread, idempotent."""


class LoaderWorkers(Protocol):
    """The loader workers of a source: whether one of them is late for a waiting consumer."""

    consumers: dict[object, float]
    """The consumers that wait for a step now, each with the time since when, by ``perf_counter``."""

    def check_workers(self) -> object:
        """Checks whether a loader worker is late for a consumer that waits."""


class Upstream(LoaderWorkers, Protocol):
    """The stages before the vote, in which no other rank takes part; see ``upstream.StepMaker``."""

    def draw(self) -> Drawn | Held:
        """The half of the next step that belongs to the consumer's thread."""

    def produce(self, drawn: Drawn | Held, /) -> Held:
        """The complete step: fetched, and its copies to the devices begun."""

    def discard(self, steps: Sequence[LocalStep], /) -> None:
        """Discards steps that will not be delivered."""

    def enter_thread(self) -> None:
        """The thread that calls ``produce`` calls this first."""

    def close_source(self) -> None:
        """Ends loader workers and open files."""

    def close_devices(self) -> None:
        """Releases the devices, once the thread has stopped."""
