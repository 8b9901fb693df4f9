"""The public interface for data that is read in parts: with it your own data gets all features of ``FileDataset``.

A *fragment* is a part of the data that one worker reads: a file, a key range of a table, a row group. It can be read
from its start or from a *position* inside of it. A source of fragments has two methods and no state. The library builds
on them: the policies FILE and DATA, the order of an epoch, interleaving, the window shuffle, ``on_error="skip"``,
``with_index``, errors that name the fragment, and a saved state that fits any world size. ``testing.check_source``
checks a source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable


@final
@dataclass(frozen=True)
class Fragment:
    """A part of the data.

    Args:
      name: unique, and the same on every rank. Errors and states name it.
      num_records: how many records it has, if that is known without reading them.
      num_bytes: about how large it is.
      fingerprint: a text that changes with the content, if there is one. A state that was saved in the middle of a
        fragment is refused if the fragment has changed since.
    """

    name: str
    num_records: int | None = None
    num_bytes: int | None = None
    fingerprint: str | None = None


@runtime_checkable
class FragmentSource(Protocol):
    """Data that is read in parts. It must pickle, for loader workers, and keep no state: it may be read twice at once.

    ``strategy.distribute_dataset(source, global_batch_size=G)`` takes one; ``FragmentDataset(source, ...)`` shuffles,
    interleaves and decodes its records.

    >>> class Numbers:
    ...     def fragments(self):
    ...         return [tdi.Fragment("0", num_records=4), tdi.Fragment("10", num_records=4)]
    ...
    ...     def read(self, fragment, position):
    ...         for start in range(position or 0, 4, 2):  # blocks of two records
    ...             yield start, [int(fragment.name) + start, int(fragment.name) + start + 1]
    >>> list(tdi.Strategy(["cpu", "cpu"]).distribute_dataset(Numbers(), global_batch_size=5))
    [PerReplica(0: tensor([0, 1, 2]), 1: tensor([ 3, 10])), PerReplica(0: tensor([11, 12]), 1: tensor([13]))]
    """

    def fragments(self) -> Sequence[Fragment]:
        """All fragments, in order: the same at each call, and on every rank. Local."""

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, Sequence[Any] | Mapping[str, Any]]]:
        """The records of one fragment, in order, in blocks of one record or more. Local.

        It is called on the thread that iterates, or in a loader worker; several times at once, and the generator may be
        closed early. All that it needs to find the data is in ``fragment.name``. Columns have the same types in all
        blocks of all fragments.

        Args:
          fragment: one of ``fragments()``.
          position: ``None`` for the front, or a position that an earlier call yielded for this fragment.

        Yields:
          ``(position, records)``: the position of this block, as a plain JSON value (a number, a text, a list of them),
          and its records. A read from the position yields this block and the rest of the fragment again. Records that
          are dicts may come as a dict of columns, each an array or a list with one entry for each record; then batches
          are slices of the columns, if there is no ``map_fn`` and no ``collate_fn``.

        Raises:
          SourceError: a record cannot be read. Raise it after the blocks in front of the record, with ``offset`` (the
            position of this record) and ``resume_at`` (the position of the next record): then ``on_error="skip"`` goes
            on at ``resume_at``.
        """
