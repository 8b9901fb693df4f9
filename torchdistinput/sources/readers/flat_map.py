"""``flat_map_fn``: several samples, or none, for a record, also across the records of a fragment.

The samples count as records of their fragment. The function is applied where records are read. So numbers, windows,
cursors and batches are those of its samples, and a resumed run calls it again for the records of the block in which it
goes on.

**State.** A ``StatefulFlatMap`` has a state from record to record. The position of a block has the state in front of it
as JSON text, and reading goes on with what this text says, in the run itself as after a resume.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, Protocol, TypeAlias, cast, final, runtime_checkable

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import SourceError
from torchdistinput.sources.formats.reader_api import Block, BlockReader, facts_of
from torchdistinput.sources.readers.corrupt_records import CorruptRecord
from torchdistinput.sources.readers.open_file import Read
from torchdistinput.sources.storage.retry import one_line


@runtime_checkable
class StatefulFlatMap(Protocol):
    r"""A ``flat_map_fn`` of ``FileDataset`` that looks across records: to pack lines to samples of one length, say.

    It gets the records of one fragment (a file, or a part of one with ``fragment_bytes``) in their order there, before
    any shuffling, and begins anew with the next: fragments are dealt to ranks and shuffled. So the samples of each
    fragment are the same at any world size, and none reaches from one fragment into another.

    The object keeps nothing, as several fragments may be read at once: its state is handed to it. The state is plain
    JSON (numbers, texts, lists, dicts with texts as keys), and small, as it is saved with the position in each open
    fragment.

    Example:
      >>> class Chunks:
      ...     def initial_state(self):
      ...         return []
      ...
      ...     def __call__(self, left, line):
      ...         left = left + line.split()
      ...         whole = len(left) // 2 * 2
      ...         return left[whole:], [left[start : start + 2] for start in range(0, whole, 2)]
      ...
      ...     def final_samples(self, left):
      ...         return [left] if left else []
      >>> fsspec.filesystem("memory").pipe("/data/text", b"one two three\nfour five")
      >>> list(tdi.FileDataset("memory://data/text", tdi.readers.text_lines, flat_map_fn=Chunks()))
      [['one', 'two'], ['three', 'four'], ['five']]
    """

    def initial_state(self) -> Any:
        """The state at the front of a fragment."""

    def __call__(self, state: Any, record: Any, /) -> tuple[Any, Iterable[Any]]:
        """The state after a record, and the samples that are complete with it."""

    def final_samples(self, state: Any, /) -> Iterable[Any]:
        """The samples that are left at the end of a fragment."""


FlatMap: TypeAlias = Callable[[Any], Iterable[Any]] | StatefulFlatMap


def decoded_first(decode: Callable[[Any], Any], flat_map_fn: FlatMap) -> FlatMap:
    """A ``flat_map_fn`` for records that are to be decoded first."""
    if isinstance(flat_map_fn, StatefulFlatMap):
        return _DecodedFirst(decode, flat_map_fn)
    return partial(decoded_call, decode, flat_map_fn)


def flat_mapped(read: Read, flat_map_fn: FlatMap, name: str, *, skip: bool) -> Read:
    """A reader of the samples that a function makes of the records of another reader.

    Args:
      read: the reader of the records.
      flat_map_fn: gives the samples of a record.
      name: the file, or fragment, for messages.
      skip: whether a record for which the function fails is left out; else it is a ``SourceError``.
    """
    blocks = facts_of(read).blocks
    if isinstance(flat_map_fn, StatefulFlatMap):
        scan = _Scan(flat_map_fn, name, skip=skip)
        return partial(_scanned, scan, read) if blocks is None else BlockReader(partial(_scanned_blocks, scan, blocks))
    samples_of = partial(_samples_of, flat_map_fn, name, skip=skip)
    if blocks is None:
        return lambda file: chain.from_iterable(map(samples_of, read(file)))

    def flat(file: BinaryIO, offset: int) -> Iterator[Block[Any]]:
        for position, records in blocks(file, offset):
            made: list[Any] = []
            try:
                for record in records:
                    made += samples_of(record)
            except SourceError:
                yield position, made  # the samples in front come first
                raise
            yield position, made

    return BlockReader(flat)


def _samples_of(flat_map_fn: Callable[[Any], Iterable[Any]], name: str, record: Any, *, skip: bool) -> list[Any]:
    try:
        return list(flat_map_fn(record))
    except Exception as error:
        return _left_out(f"flat_map_fn failed: {in_one_line(error)}; the record is {record!r:.100}", name, error, skip)


def _left_out(problem: str, name: str, error: Exception, skip: bool) -> list[Any]:  # noqa: FBT001 - of four
    if skip:
        return [CorruptRecord(f"{one_line(name)}: {problem}")]
    raise SourceError(problem) from error


@final
class _Scan:
    """The samples of the records of a fragment, in order, with the state between them.

    Args:
      flat_map: the user's object.
      name: the fragment, for messages.
      skip: whether a record for which it fails is left out, and leaves the state as it was.
    """

    def __init__(self, flat_map: StatefulFlatMap, name: str, *, skip: bool) -> None:
        self.skip = skip
        self._flat_map = flat_map
        self._name = name

    def text_of(self, state: Any) -> str:
        """The state as JSON text.

        Raises:
          SourceError: it is no JSON value.
        """
        try:
            return json.dumps(state)
        except (TypeError, ValueError) as error:
            raise SourceError(
                f"the state of flat_map_fn must be plain JSON (numbers, texts, lists, dicts), got {state!r:.100}: "
                f"{in_one_line(error)}"
            ) from error

    def first(self) -> str:
        """The state at the front of a fragment, as text."""
        return self.text_of(self._flat_map.initial_state())

    def step(self, state: Any, record: Any) -> tuple[Any, list[Any]]:
        """The state after a record, and its samples."""
        before = self.text_of(state) if self.skip else ""
        try:
            state, samples = self._flat_map(state, record)
            return state, list(samples)
        except Exception as error:
            problem = f"flat_map_fn failed: {in_one_line(error)}; the record is {record!r:.100}"
            return json.loads(before or "null"), _left_out(problem, self._name, error, self.skip)

    def last(self, state: Any) -> list[Any]:
        """The samples that are left at the end."""
        try:
            return list(self._flat_map.final_samples(state))
        except Exception as error:
            problem = f"flat_map_fn.final_samples failed: {in_one_line(error)}"
            return _left_out(problem, self._name, error, self.skip)


def _scanned(scan: _Scan, read: Read, file: BinaryIO) -> Iterator[Any]:
    """The samples of a fragment whose reader has no blocks."""
    state = json.loads(scan.first())
    for record in read(file):
        state, samples = scan.step(state, record)
        yield from samples
    yield from scan.last(state)


def _scanned_blocks(
    scan: _Scan, blocks: Callable[[BinaryIO, Any], Iterator[Block[Any]]], file: BinaryIO, offset: Any
) -> Iterator[Block[Any]]:
    """The samples of each block. A position is ``[[position of the reader, state]]``; ``None``: behind all records."""
    at, text = (0, scan.first()) if offset == 0 else offset[0]
    try:
        for at, records in blocks(file, at) if at is not None else ():  # noqa: B020 - the last position
            made: list[Any] = []
            state = json.loads(text)
            try:
                for record in records:
                    state, samples = scan.step(state, record)
                    made += samples
            except SourceError:
                yield _place(at, text), made  # the samples in front come first
                raise
            yield _place(at, text), made
            text = scan.text_of(state)
    except SourceError as error:
        if scan.skip and error.offset is not None and error.resume_at is not None:
            error.offset, error.resume_at = _place(error.offset, text), _place(error.resume_at, text)
        raise
    if last := scan.last(json.loads(text)):
        yield _place(None, text), last


def _place(at: Any, text: str) -> int:
    return cast(int, [[at, text]])  # as the positions of a FragmentSource, which only their reader interprets


@final
class _DecodedFirst:
    """A ``StatefulFlatMap`` for records that are to be decoded first."""

    def __init__(self, decode: Callable[[Any], Any], flat_map: StatefulFlatMap) -> None:
        self._decode = decode
        self._flat_map = flat_map

    def initial_state(self) -> Any:
        return self._flat_map.initial_state()

    def __call__(self, state: Any, record: Any) -> tuple[Any, Iterable[Any]]:
        return self._flat_map(state, self._decode(record))

    def final_samples(self, state: Any) -> Iterable[Any]:
        return self._flat_map.final_samples(state)


def decoded_call(decode: Callable[[Any], Any], map_fn: Callable[[Any], Any], record: Any) -> Any:
    """Calls a function with a record that is decoded first."""
    return map_fn(decode(record))
