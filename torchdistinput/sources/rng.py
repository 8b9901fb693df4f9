"""Random draws that are the same on all ranks, although each rank has its own default random state; states as text."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn, final

import numpy as np
import numpy.random  # NumPy imports it when it is asked for, in the first step, and a Ctrl-C in that import is lost
import torch

from torchdistinput.errors import StateMismatch

WithRng = Callable[[Callable[[], Any]], Any]
"""Calls user code that may draw from torch's default random state, and returns what it returns."""

_HEADER: Final = struct.Struct("<III")  # bytes of the state, their checksum, bytes of the compressed bitmap


@final
class SharedRngState:
    """Rank 0's default random state after the last draws that a dataset of these ranks made with it."""

    def __init__(self) -> None:
        self.state: torch.Tensor | None = None


_SHARED_STATES: Final[dict[tuple[int, ...], SharedRngState]] = {}


def shared_state_of(ranks: tuple[int, ...]) -> SharedRngState:
    """The ``SharedRngState`` of these ranks: one for all their strategies, as a process has one default state. Local.

    A drop-in ``DataLoader`` has a strategy of its own, and may be read together with data of another strategy.
    """
    return _SHARED_STATES.setdefault(ranks, SharedRngState())


@final
class SharedRng:
    """Calls user code with rank 0's default random state in place of this rank's own.

    Without a generator, torch's samplers draw from the default one, and all ranks must draw the same numbers. If the
    rank's own state was equal to that of rank 0, it keeps the state after the draws, as in one process. Otherwise the
    rank gets its own state back.

    Args:
      state: rank 0's state.
      shared: records the state after each call.
    """

    def __init__(self, state: torch.Tensor, shared: SharedRngState | None = None) -> None:
        self._state = state
        self._shared = shared
        self._inside = False

    @property
    def state(self) -> torch.Tensor:
        """Rank 0's state after the last call, or within a call the state at this moment: uint8, a copy. Local."""
        return torch.get_rng_state() if self._inside else self._state.clone()

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Returns the result of the call."""
        if self._inside:
            return call()
        own = torch.get_rng_state()
        keeps = is_same_state(own, self._state)
        torch.set_rng_state(self._state)
        self._inside = True
        try:
            return call()
        finally:
            self._inside = False
            self._state = torch.get_rng_state()
            if self._shared is not None:
                self._shared.state = self._state
            if not keeps:
                torch.set_rng_state(own)


def global_states() -> Sequence[Any]:
    """The states of the global generators of torch (on the CPU), ``random`` and NumPy. Local."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)


def set_global_states(states: Sequence[Any]) -> None:
    """Sets these states. Local."""
    of_torch, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def is_same_state(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two states of a generator are equal. Local."""
    return one.numpy(force=True).tobytes() == other.numpy(force=True).tobytes()  # torch.equal takes 10 us


def state_of_epoch(seed: int, epoch: int) -> torch.Tensor:
    """A random state for an epoch before which the ranks do not communicate."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63).get_state()


def call_directly(call: Callable[[], Any]) -> Any:
    """Calls user code and leaves the random state alone."""
    return call()


def generators_of(*holders: object) -> list[torch.Generator]:
    """The torch generators that these objects, or the samplers inside of them, hold as ``generator``. Local.

    Args:
      *holders: samplers, loaders, or any other objects; objects without a generator are ignored.

    Returns:
      each generator once, in the order of the holders, from the outside in.
    """
    found: dict[int, torch.Generator] = {}
    seen: set[int] = set()
    for holder in holders:
        inner: Any = holder
        while id(inner) not in seen:
            seen.add(id(inner))
            # Each epoch calls this several times; an isinstance check of a protocol takes 20 us before Python 3.12.
            with suppress(AttributeError):
                if isinstance(inner.generator, torch.Generator):
                    found.setdefault(id(inner.generator), inner.generator)
            with suppress(AttributeError):
                inner = inner.sampler
    return list(found.values())


def packed(state: torch.Tensor) -> str:
    """A generator's state as a short text: base64 of its 32-bit words that are not 0, and a bitmap of them. Local.

    torch keeps the 32-bit words of its CPU generator in 64 bits each, so half of the 5056 bytes are zeros; the text
    has about 3400 characters.

    Args:
      state: the result of ``Generator.get_state()``, for any device: uint8, ``(bytes,)``.

    Raises:
      TypeError: the state is not such a tensor.
    """
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise TypeError(f"a random state is a tensor of uint8 in one dimension, got {state.dtype} {tuple(state.shape)}")
    content = state.cpu().numpy().tobytes()
    words = np.frombuffer(content + bytes(-len(content) % 4), dtype="<u4")
    there = words != 0
    bitmap = zlib.compress(np.packbits(there).tobytes())
    header = _HEADER.pack(len(content), zlib.crc32(content), len(bitmap))
    return base64.b64encode(header + bitmap + words[there].tobytes()).decode("ascii")


def unpacked(text: str) -> torch.Tensor:
    """The state from a text that ``packed`` made: uint8, on the CPU. Local.

    Raises:
      StateMismatch: the text is damaged.
    """
    if not isinstance(text, str):
        _refuse(f"it is {text!r:.40}, not a text")
    try:
        content = base64.b64decode(text, validate=True)
        length, checksum, size = _HEADER.unpack_from(content)
        there = _bits(content[_HEADER.size : _HEADER.size + size], -(-length // 4))
        words = np.zeros(len(there), dtype="<u4")
        words[there] = np.frombuffer(content[_HEADER.size + size :], dtype="<u4")
    except (ValueError, struct.error, zlib.error) as error:
        _refuse(str(error), error)
    state = words.tobytes()[:length]
    if zlib.crc32(state) != checksum:
        _refuse("its checksum is wrong")
    return torch.from_numpy(np.frombuffer(state, dtype=np.uint8).copy())


def _bits(compressed: bytes, count: int) -> Any:
    """The bitmap: bool, ``(count,)``."""
    size = -(-count // 8)
    stream = zlib.decompressobj()
    bits = stream.decompress(compressed, size + 1)  # never more than expected
    if len(bits) != size or not stream.eof:
        raise ValueError(f"a bitmap of {len(bits)} byte(s) in place of {size}")
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count).astype(bool)


def _refuse(found: str, cause: Exception | None = None) -> NoReturn:
    raise StateMismatch(
        f"a saved random state cannot be read: {found}. Load the state as state_dict() gave it, or an older one."
    ) from cause
