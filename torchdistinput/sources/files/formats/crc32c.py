"""CRC-32C (Castagnoli), the checksum of TFRecord files, in NumPy. Python's ``zlib.crc32`` has another polynomial.

The register of a CRC is linear over GF(2). So the checksum of a block is the exclusive or of one word for each byte;
the word depends on the byte and on its distance from the end of the block. All bytes are looked up in a table at once,
without a loop. Zeros in front of a block do not change its checksum, so data is padded at the front to whole blocks.
The words of the blocks are then joined in pairs, until one word is left: the left word of a pair is moved by the length
of the right one, by another table. Short records of about the same length are the rows of one look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

_Words32: TypeAlias = "npt.NDArray[np.uint32]"

_POLYNOMIAL: Final = 0x82F63B78  # reflected: the lowest bit is the highest power
_BLOCK: Final = 1024
_SLAB: Final = 1 << 18  # bytes that are looked up at a time; bounds the memory, as each byte needs an index of 8 bytes
_SHORT: Final = 48
_ALL_ONES: Final = 0xFFFFFFFF
_WIDTHS: Final = 1 << np.arange(2, 11)  # lengths to which short records are filled with zeros at the front
_ROWS: Final = np.arange(0, _BLOCK * 256, 256, dtype=np.intp)


def _byte_table() -> list[int]:
    """The register after each byte value, from a register of 0."""
    table = []
    for byte in range(256):
        word = byte
        for _ in range(8):
            word = (word >> 1) ^ (_POLYNOMIAL if word & 1 else 0)
        table.append(word)
    return table


_BYTES: Final = _byte_table()


@lru_cache(maxsize=1)
def _block_table() -> _Words32:
    """The register after a byte and the bytes behind it in its block: a row for each place of the byte, flattened."""
    one_byte = np.array(_BYTES, dtype=np.uint32)
    table = np.empty((_BLOCK, 256), dtype=np.uint32)
    table[-1] = one_byte
    for row in range(_BLOCK - 2, -1, -1):
        table[row] = (table[row + 1] >> np.uint32(8)) ^ one_byte[table[row + 1] & np.uint32(0xFF)]
    return table.reshape(-1)


@lru_cache(maxsize=64)
def _move_table(level: int) -> _Words32:
    """The register after ``_BLOCK * 2**level`` zero bytes, for each value of each of its four bytes: shape (4, 256)."""
    values = np.arange(256, dtype=np.uint32)
    words = np.stack([values << np.uint32(8 * place) for place in range(4)])
    if level:
        return _move(_move(words, level - 1), level - 1)
    one_byte = np.array(_BYTES, dtype=np.uint32)
    for _ in range(_BLOCK):
        words = (words >> np.uint32(8)) ^ one_byte[words & np.uint32(0xFF)]
    return words


def _move(words: _Words32, level: int) -> _Words32:
    """Registers after ``_BLOCK * 2**level`` more zero bytes."""
    table = _move_table(level)
    low = np.uint32(0xFF)
    moved: _Words32 = table[0][words & low]
    for place in range(1, 4):
        moved ^= table[place][(words >> np.uint32(8 * place)) & low]
    return moved


def _join(words: _Words32) -> int:
    """The register of consecutive blocks, from the registers of the blocks."""
    level = 0
    while len(words) > 1:
        if len(words) % 2:
            words = np.concatenate([np.zeros(1, dtype=np.uint32), words])
        words = _move(words[0::2], level) ^ words[1::2]
        level += 1
    return int(words[0])


def _slab(register: int, data: npt.NDArray[np.uint8]) -> int:
    """The register after at least four more bytes."""
    blocks = -(-len(data) // _BLOCK)
    width = min(len(data), _BLOCK)  # a single block needs no zeros in front
    indices: npt.NDArray[np.intp] = np.zeros(blocks * width, dtype=np.intp)
    start = len(indices) - len(data)
    indices[start:] = data
    # A register has the value that four bytes of this value would leave, so it is mixed into the first four bytes.
    indices[start : start + 4] ^= np.frombuffer(register.to_bytes(4, "little"), dtype=np.uint8)
    square = indices.reshape(blocks, width)
    square += _ROWS[-width:]
    return _join(np.bitwise_xor.reduce(_block_table().take(square), axis=1))


def crc32c(data: bytes) -> int:
    """The CRC-32C of bytes (RFC 3720, appendix B.4): ``crc32c(b"123456789") == 0xE3069283``."""
    register = _ALL_ONES
    whole = np.frombuffer(data, dtype=np.uint8)
    stop = 0
    while len(data) - stop >= _SHORT:
        start, stop = stop, min(stop + _SLAB, len(data))
        register = _slab(register, whole[start:stop])
    for byte in data[stop:]:
        register = (register >> 8) ^ _BYTES[(register ^ byte) & 0xFF]
    return register ^ _ALL_ONES


def masked_crc32c(data: bytes) -> int:
    """The CRC-32C as TFRecord stores it: rotated and shifted, so that checksums of checksums stay useful."""
    word = crc32c(data)
    return ((word >> 15 | word << 17) + 0xA282EAD8) & _ALL_ONES


def masked_crcs32c(records: Sequence[bytes]) -> _Words32:
    """``masked_crc32c`` of each record; for short records in a fraction of the time."""
    words: _Words32 = np.empty(len(records), dtype=np.uint32)
    lengths = np.fromiter(map(len, records), np.intp, len(records))
    alike = np.where(lengths < 4, len(_WIDTHS), np.searchsorted(_WIDTHS, lengths))
    for kind in np.unique(alike).tolist():
        numbers = np.flatnonzero(alike == kind)
        at_once = 1 if kind == len(_WIDTHS) else _SLAB // int(_WIDTHS[kind])
        for start in range(0, len(numbers), at_once):
            some = numbers[start : start + at_once]
            chosen = [records[number] for number in some.tolist()]
            words[some] = crc32c(chosen[0]) if at_once == 1 else _crcs_of_alike(chosen, int(_WIDTHS[kind]))
    masked: _Words32 = (words >> np.uint32(15) | words << np.uint32(17)) + np.uint32(0xA282EAD8)
    return masked


def _crcs_of_alike(records: Sequence[bytes], width: int) -> _Words32:
    """The CRC-32C of records of 4 to ``width`` bytes each; ``width`` is at most a block."""
    filled = b"".join([record.rjust(width, b"\0") for record in records])
    indices = np.frombuffer(filled, dtype=np.uint8).reshape(-1, width).astype(np.intp)
    starts = width - np.fromiter(map(len, records), dtype=np.intp, count=len(records))
    for place in range(4):  # the first register is all ones
        indices[np.arange(len(records)), starts + place] ^= 0xFF
    indices += _ROWS[-width:]
    words: _Words32 = np.bitwise_xor.reduce(_block_table().take(indices), axis=1) ^ np.uint32(_ALL_ONES)
    return words
