"""The stages before the vote, as calls of a test's own; see ``pipeline.step_maker``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, final

from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.pipeline.metrics import Metrics
from torchdistinput.pipeline.pipeline_executor import PipelineExecutor
from torchdistinput.pipeline.voter import Voter
from torchdistinput.step_types import Drawn, Held, LocalStep


def _nothing(*_: object) -> None:
    pass


@final
@dataclass
class Calls:
    """What is called in the place of each stage."""

    draw: Callable[[], Drawn | Held]
    produce: Callable[[Drawn | Held], Held]
    discard: Callable[[Sequence[LocalStep]], None] = _nothing
    enter_thread: Callable[[], None] = _nothing
    close_source: Callable[[], None] = _nothing
    close_devices: Callable[[], None] = _nothing
    consumers: dict[object, float] = field(default_factory=dict)
    check_workers: Callable[[], object] = int


class LoneVotes:
    """Votes that nobody is late for."""

    over = False
    rounds = 0

    def waiting_since(self) -> float | None:
        return None

    def late(self) -> list[int]:
        return []

    def unreached(self) -> str:
        return ""

    def abort(self, reason: str) -> None:
        """Tells nobody."""


def executor_of(
    calls: Calls,
    votes: Any,
    meter: Metrics,
    *,
    depth: int = 0,
    in_background: bool = False,
    timeout_seconds: float = 5.0,
    weigh: Callable[[LocalStep], int | None] | None = None,
) -> PipelineExecutor:
    """The executor over these stages and votes."""
    voter = Voter(votes, meter, weigh)
    clock = StragglerTimeout(votes, timeout_seconds, int)
    return PipelineExecutor(cast(Any, calls), voter, clock, meter, depth=depth, in_background=in_background)
