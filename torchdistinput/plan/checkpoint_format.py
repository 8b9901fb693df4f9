"""The format of a saved state (``state_dict``), and the check whether a state fits the input that loads it.

A state is plain JSON with the same keys always. So ``json``, ``torch.save`` and ``torch.distributed.checkpoint`` can
all save it, the last one at any world size:

- ``version``: the version of this format.
- ``epoch``, ``step``, ``samples``: the steps that were delivered in the epoch, and the samples in them. Where a step
  was sought, the samples before it count too; those of a batch sampler's batches once the epoch has begun. Of ready
  batches only those that were read count, as their sizes are not known before.
- ``drawn``: a digest of the sampler's draw for the last of these steps; 0 where there is none.
- ``told_epoch``: the last argument of the user's ``set_epoch``; ``None`` if it was not called.
- ``sample_seed``: the base of ``sample_seed()`` in map-style data; ``None`` where there is none, or none yet.
- ``random``: when a loader draws the seed of its loader workers, torch's default random state and the generators of the
  input, all at the beginning of the epoch.
- ``position``: ``["all", p]`` where one position holds for all workers, else ``["each", p0, p1, ...]``. For map-style
  data ``p`` is ``["map", rows]``, with the states of the generators under HINT; for the others see ``position`` of
  ``sources/records`` and ``sources/iterable``. ``None`` at the start of an epoch, unless the data has a position there
  (``SourceFacts.has_epoch_position``).
- ``fingerprint``: pairs of a name and a value that identify the input.
- ``checksum``: a checksum of all other keys.

States of 0.2 may have a key ``group``: a list that has something in it where the state was taken between steps whose
gradients were accumulated. Their checksum counts it.
"""

from __future__ import annotations

import json
import marshal
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, final

from torchdistinput.errors import StateMismatch

VERSION: Final = 1
OF_WORLD: Final = ("number of workers", "number of replicas")
"""Facts in the fingerprint of an input whose states fit one world size only."""
_ENCODER: Final = json.JSONEncoder(default=str)  # made once: states are taken in the loop
_MAX_DEPTH: Final = 32
_MAX_BITS: Final = 1024


@final
@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A saved state: its keys, as the module describes them, and whether it was edited after it was saved.

    Args:
      in_group: whether 0.2 took it between steps whose gradients were accumulated; the first ones' are lost.
    """

    epoch: int
    step: int
    samples: int
    drawn: int
    told_epoch: int | None
    sample_seed: int | None
    random: tuple[str, ...]
    position: list[Any] | None
    fingerprint: Mapping[str, Any]
    in_group: bool = False
    was_changed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The state as plain JSON."""
        state: dict[str, Any] = {"version": VERSION, **{name: getattr(self, name) for name in _NAMES}}
        state["random"] = list(self.random)
        state["fingerprint"] = [[name, value] for name, value in self.fingerprint.items()]
        return {**state, "checksum": _checksum(state)}

    @property
    def mark(self) -> str:
        """A short text that is equal for equal places in the data."""
        place = [self.random, self.position]
        return f"epoch {self.epoch}, step {self.step}, {zlib.crc32(_plain(place)):08x}"

    @classmethod
    def from_dict(cls, state: object) -> SavedState:
        """The state from its plain JSON, checked.

        Args:
          state: the result of ``state_dict()``.

        Raises:
          StateMismatch: the value is no state, is of a newer version, or is incomplete.
        """
        saved = _checked_fields(state)
        plain = {name: saved[name] for name in _NAMES}
        plain.update(random=tuple(saved["random"]), fingerprint=dict(saved["fingerprint"]))
        return cls(**plain, in_group=bool(saved.get("group")), was_changed=saved["checksum"] != _checksum(saved))


_NAMES: Final = tuple(field.name for field in fields(SavedState) if field.name not in {"in_group", "was_changed"})
_FIELDS: Final = ("version", *_NAMES, "checksum")


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


def _checksum(state: Mapping[str, Any]) -> int:
    # Marshal writes plain values the same everywhere in its version 2, in a tenth of the time that JSON takes.
    content = [state[name] for name in _FIELDS[:-1]]
    if "group" in state:
        content.append(state["group"])
    try:
        return zlib.crc32(marshal.dumps(content, 2))
    except ValueError:  # subclasses of plain types, in a state that went through other hands
        return zlib.crc32(marshal.dumps(json.loads(_plain(content)), 2))


def _checked_fields(state: object) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise StateMismatch(f"found a {type(state).__name__} as a state; the dict of state_dict() is needed.")
    _check_plain(state)
    version = state.get("version")
    if isinstance(version, int) and not 1 <= version <= VERSION:
        raise StateMismatch(
            f"version: the state has {version}, this version of torchdistinput reads 1 to {VERSION}. Update "
            "torchdistinput, or start the epoch anew."
        )
    missing = [name for name in _FIELDS if name not in state]
    if missing:
        raise StateMismatch(
            f"{', '.join(missing)}: missing in the state, which has {', '.join(state) or 'nothing':.200}. It was "
            "cut off, or is no state of this library. Give load_state_dict() the dict that state_dict() returned."
        )
    for name in ("version", "epoch", "step", "samples", "drawn", "checksum"):
        _check(name, state[name], "an int of 0 or more", _is_count(state[name]))
    epoch = state["told_epoch"]
    is_epoch = epoch is None or (_is_count(epoch) and epoch < 1 << 63)  # loader workers share it as 64 bits
    _check("told_epoch", epoch, "an int of 0 or more, of 64 bits, or None", is_epoch)
    seed = state["sample_seed"]
    _check("sample_seed", seed, "an int, or None", seed is None or type(seed) is int)
    random = state["random"]
    _check("random", random, "a list of texts", _is_list(random) and all(isinstance(each, str) for each in random))
    position = state["position"]
    _check("position", position, "a list or None", position is None or _is_list(position))
    pairs = state["fingerprint"]
    named = _is_list(pairs) and all(_is_list(pair) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)
    _check("fingerprint", pairs, "a list of pairs of a name and a value", named)
    return state


def _check_plain(state: object) -> None:
    """Refuses values that no saved state holds, before they are compared or printed, which may fail or never end."""
    left: list[tuple[object, int]] = [(state, 0)]
    while left:
        value, depth = left.pop()
        is_plain = isinstance(value, str | bool | None)
        if isinstance(value, Mapping):
            is_plain = all(isinstance(key, str) for key in value)
            left += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list | tuple):
            is_plain = True
            left += [(each, depth + 1) for each in value]
        elif isinstance(value, int):
            is_plain = value.bit_length() <= _MAX_BITS
        elif isinstance(value, float):
            is_plain = math.isfinite(value)
        if not is_plain or depth > _MAX_DEPTH:
            what = f"nested more than {_MAX_DEPTH} deep" if is_plain else f"no plain value (a {type(value).__name__})"
            raise StateMismatch(f"the state has something in it that is {what}. Load the state as it was saved.")


def _check(name: str, found: object, needed: str, is_good: object) -> None:
    if not is_good:
        raise StateMismatch(
            f"{name}: found {found!r:.200} in the state; {needed} is needed. Load the state as it was saved."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
