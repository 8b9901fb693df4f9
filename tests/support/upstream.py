"""The stages before the vote, as calls of a test's own; see ``pipeline.interfaces.Upstream``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from torchdistinput.step_types import Drawn, Held, LocalStep


def _nothing(*_: object) -> None:
    pass


def _no_bytes(_: LocalStep) -> int:
    return 0


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
    weigh: Callable[[LocalStep], int] = _no_bytes
    consumers: dict[object, float] = field(default_factory=dict)
    look: Callable[[], object] = int
