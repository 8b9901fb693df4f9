"""The format of a saved state (``state_dict``), and the check whether a state fits the input that loads it.

A state is plain JSON with the same keys always. So ``json``, ``torch.save`` and ``torch.distributed.checkpoint`` can
all save it, the last one at any world size:

- ``version``: the version of this format.
- ``epoch``, ``step``, ``samples``: the steps that were delivered in the epoch, and the samples in them. Where a step
  was sought, the samples before it count too; those of a batch sampler's batches once the epoch has begun. Of ready
  batches only those that were read count, as their sizes are not known before.
- ``drawn``: a digest of the sampler's draw for the last of these steps; 0 where there is none.
- ``sample_seed``: the base of ``sample_seed()`` in map-style data; ``None`` where there is none, or none yet.
- ``random``: when a loader draws the seed of its loader workers, torch's default random state and the generators of the
  input, all at the beginning of the epoch.
- ``position``: ``["all", p]`` where one position holds for all workers, else ``["each", p0, p1, ...]``. For map-style
  data ``p`` is ``["map", rows]``, with the states of the generators under HINT; for the others see ``position`` of
  ``sources/datasets`` and ``sources/iterable``. ``None`` at the start of an epoch, unless the data has a position there
  (``SourceFacts.has_epoch_position``).
- ``fingerprint``: pairs of a name and a value that identify the input.

Version 1 (of 0.1 and 0.2) has the same keys and more: ``told_epoch`` and ``checksum``, which are not read, and in 0.2
sometimes ``group``, a list that has something in it where the state was taken between steps whose gradients were
accumulated.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, final

from torchdistinput.errors import StateMismatch

VERSION: Final = 2
OF_WORLD: Final = ("number of workers", "number of replicas")
"""Facts in the fingerprint of an input whose states fit one world size only."""
_ENCODER: Final = json.JSONEncoder(default=str)  # made once: states are taken in the loop


@final
@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an epoch begins or goes on: the keys of a state but for ``version`` and ``fingerprint``."""

    epoch: int
    step: int = 0
    samples: int = 0
    drawn: int = 0
    sample_seed: int | None = None
    random: tuple[str, ...] = ()
    position: list[Any] | None = None

    @property
    def mark(self) -> str:
        """A short text that is equal for equal places in the data."""
        return f"epoch {self.epoch}, step {self.step}, {zlib.crc32(_plain([self.random, self.position])):08x}"


_NAMES: Final = tuple(field.name for field in fields(Place))


def to_state(place: Place, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """The state, as plain JSON."""
    state = {"version": VERSION, **{name: getattr(place, name) for name in _NAMES}}
    pairs = [[name, value] for name, value in fingerprint.items()]
    return {**state, "random": list(place.random), "fingerprint": pairs}


def from_state(state: object) -> tuple[Place, Mapping[str, Any]]:
    """The place and the fingerprint in a state.

    Args:
      state: the result of ``state_dict()``.

    Raises:
      StateMismatch: the value is no state, is of a newer version, or is incomplete.
    """
    if not isinstance(state, Mapping):
        raise StateMismatch(f"found a {type(state).__name__} as a state; the dict of state_dict() is needed.")
    missing = [name for name in ("version", *_NAMES, "fingerprint") if name not in state]
    if missing:
        raise StateMismatch(
            f"{', '.join(missing)}: missing in the state, which has {', '.join(map(str, state)) or 'nothing':.200}. It "
            "was cut off, or is no state of this library. Give load_state_dict() the dict that state_dict() returned."
        )
    for name in ("version", "epoch", "step", "samples", "drawn", "sample_seed"):
        value = 0 if name == "sample_seed" and state[name] is None else state[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise StateMismatch(
                f"{name}: found {state[name]!r:.200} in the state; an int of 0 or more is needed. Load the state as it "
                "was saved."
            )
    if not 1 <= state["version"] <= VERSION:
        raise StateMismatch(
            f"version: the state has {state['version']}, this version of torchdistinput reads 1 to {VERSION}. Update "
            "torchdistinput, or start the epoch anew."
        )
    values = {name: state[name] for name in _NAMES}
    return Place(**{**values, "random": tuple(state["random"])}), dict(state["fingerprint"])


def differences(saved: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The differences between two fingerprints, in words, one text for each field."""
    if saved.get("kind") != found.get("kind"):
        return [f"kind: {saved.get('kind')!r:.200} in the state, {found.get('kind')!r:.200} here"]
    pairs = [(name, saved.get(name), found.get(name)) for name in sorted({*saved, *found})]
    return [
        f"{'number of ranks' if name == OF_WORLD[0] else name:.200}: {was!r:.200} in the state, {now!r:.200} here"
        for name, was, now in pairs
        if _plain(was) != _plain(now)
    ]


def _plain(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()
