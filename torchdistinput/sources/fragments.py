"""Fragments: how data that is read in parts takes part in everything that ``FileDataset`` does.

A *fragment* is a part that one worker reads from its front, or from a *position* in it: a file, a key range of a table,
a row group. A source of fragments has two methods, and no state. From them follow the policies FILE and DATA, the order
of an epoch, interleaving, the window shuffle, ``on_error="skip"``, ``with_index``, errors that name the fragment, and a
saved state that knows no world size. ``testing.check_source`` checks a source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

__all__ = ["Fragment", "FragmentSource"]


@final
@dataclass(frozen=True)
class Fragment:
    """A part of the data.

    Args:
      name: unique, and the same on every rank. Errors and states name it.
      num_records: how many records it has, where that is known without reading them.
      num_bytes: about how large it is.
      fingerprint: a text that changes with the content, where there is one. A state that was saved in the middle of a
        fragment is refused when the fragment has changed since.
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
    """

    def fragments(self) -> Sequence[Fragment]:
        """All fragments, in order: the same at each call, and on every rank. Local."""

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        """The records of one fragment, in order, in blocks of one record or more. Local.

        Args:
          fragment: one of ``fragments()``.
          position: ``None`` for the front, or a position that an earlier call yielded for this fragment.

        Yields:
          ``(position, records)``: where this block can be entered again, as a plain JSON value (a number, a text, a
          list of them), and its records. From each position the same rest comes.

        Raises:
          SourceError: a record cannot be read. With ``offset`` (the position of that record alone) and ``resume_at``
            (the position of the next one), after the blocks in front of it, ``on_error="skip"`` goes on there.
        """
