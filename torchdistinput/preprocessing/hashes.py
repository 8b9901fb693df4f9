"""The hash functions of TensorFlow's string ops: FarmHash's ``Fingerprint64``, and SipHash-2-4.

References: Pike, "FarmHash", 2014; Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from torchdistinput.plan.arrays import Words

_ROWS: Final = 2**14


def buckets(texts: Sequence[str], number: int, salt: tuple[int, int] | None) -> npt.NDArray[np.int64]:
    """The bucket of each text, from 0 to ``number - 1``: FarmHash of its UTF-8 bytes, or SipHash keyed by the salt.

    Raises:
      ImportError: there is no salt, and the package ``pyfarmhash`` is not installed.
    """
    contents = [text.encode("utf-8", "surrogatepass") for text in texts]
    found = _farmhash(contents) if salt is None else _siphash(contents, salt)
    result: npt.NDArray[np.int64] = (found % np.uint64(number)).astype(np.int64)
    return result


def _farmhash(contents: Sequence[bytes]) -> Words:
    try:
        from farmhash import fingerprint64  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise ImportError(
            "hashing without a salt takes TensorFlow's FarmHash, of the package pyfarmhash, which is not installed: "
            "pip install 'torchdistinput[farmhash]'. With salt= SipHash is used, which needs no package."
        ) from error
    return np.fromiter(map(fingerprint64, contents), np.uint64, len(contents))


def _siphash(contents: Sequence[bytes], salt: tuple[int, int]) -> Words:
    found = np.empty(len(contents), np.uint64)
    for begin in range(0, len(contents), _ROWS):
        found[begin : begin + _ROWS] = _siphash_of_rows(contents[begin : begin + _ROWS], salt)
    return found


def _siphash_of_rows(contents: Sequence[bytes], salt: tuple[int, int]) -> Words:
    lengths = np.fromiter(map(len, contents), np.int64, len(contents))
    rounds = lengths // 8 + 1
    width = int(rounds.max(initial=1)) * 8
    padded = np.frombuffer(b"".join(each.ljust(width, b"\0") for each in contents), np.uint8).reshape(-1, width)
    words = padded.view("<u8").astype(np.uint64)
    words[np.arange(len(contents)), rounds - 1] |= (lengths % 256).astype(np.uint64) << np.uint64(56)
    low, high = (np.uint64(each % 2**64) for each in salt)
    start = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    state = [np.full(len(contents), np.uint64(one) ^ key) for one, key in zip(start, (low, high) * 2, strict=True)]
    for number in range(width // 8):
        inside = number < rounds
        rows = [each[inside] for each in state]
        word = words[inside, number]
        rows[3] ^= word
        rows = _mixed(_mixed(rows))
        rows[0] ^= word
        for each, new in zip(state, rows, strict=True):
            each[inside] = new
    state[2] ^= np.uint64(0xFF)
    for _ in range(4):
        state = _mixed(state)
    result: Words = state[0] ^ state[1] ^ state[2] ^ state[3]
    return result


def _turned(words: Words, bits: int) -> Words:
    turned: Words = (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))
    return turned


def _mixed(state: list[Words]) -> list[Words]:
    """One round of SipHash; sums wrap around."""
    a, b, c, d = state
    a = a + b
    b = _turned(b, 13) ^ a
    a = _turned(a, 32)
    c = c + d
    d = _turned(d, 16) ^ c
    a = a + d
    d = _turned(d, 21) ^ a
    c = c + b
    b = _turned(b, 17) ^ c
    c = _turned(c, 32)
    return [a, b, c, d]
