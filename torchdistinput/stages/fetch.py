"""The first stage: rows of the source become shares, which are measured and whose structure is checked.

A row is read in two halves. ``draw`` runs on the caller's thread, where user code of this process belongs, as in torch.
``finish`` may run on the background thread, and reads there what loader workers made ready.
"""

from __future__ import annotations

from typing import Any, final

from torchdistinput import tree
from torchdistinput.flow import (
    NOTHING_SKIPPED,
    Digest,
    Drawn,
    Failed,
    Held,
    Like,
    PastEnd,
    ReadFailure,
    Row,
    Rows,
    Sealed,
    Share,
    Skipped,
    Thinned,
)
from torchdistinput.mould import Mould

__all__ = ["Fetch"]


@final
class Fetch:
    """Reads a stream.

    Args:
      stream: the rows of one epoch.
      mould: learns the structure of the elements.
      as_read: whether a step without an empty piece is complete as it is read: it is neither padded nor sent anywhere.
    """

    def __init__(self, stream: Rows, mould: Mould, *, as_read: bool = False) -> None:
        self._stream = stream
        self._as_read = as_read
        self._draw = stream.draw
        self._mould = mould
        self._last = mould.last
        self._before: object = None
        self._drawn_out = False
        self._read_out = False

    def draw(self) -> Drawn | Held:
        """The next step, or the half of it that belongs to the caller's thread. Past the end again and again."""
        if self._drawn_out:
            return PastEnd()
        draw = self._draw
        try:
            content = draw()
            like: Like
            if type(content) is tuple:
                row, like, drew = content
                if like.kind is self._last.mark and not self._read_out:
                    return Share(row, like.sizes, row if self._as_read and like.is_full else (), drew)
            if content is not None:
                return Drawn(content) if self._stream.in_background else self._read(content)
        except Exception as error:
            self._drawn_out = True
            return _failed(error)
        self._drawn_out = True
        return PastEnd()

    def finish(self, drawn: Drawn | Held) -> Held:
        """The whole step."""
        return self._read(drawn.content) if isinstance(drawn, Drawn) else drawn

    def _read(self, content: Any) -> Held:
        if self._read_out:
            return PastEnd()
        try:
            if type(content) is tuple:
                return self._learned(*content)
            row = self._stream.fetch(content)
            if row is not None:
                # The common case is written out: a call takes as long as half of it.
                size = None
                if len(row) == 1:
                    piece = row[0]
                    size = piece.size if type(piece) is Sealed else self._last.size_of(piece)
                sizes, skipped = self._measured(row) if size is None else ((size,), NOTHING_SKIPPED)
                return self._share(row, sizes, self._stream.digest_of(content), skipped)
        except Exception as error:
            self._read_out = True
            return _failed(error)
        self._read_out = True
        return PastEnd()

    def _learned(self, row: Row, like: Like, drew: Digest) -> Share:
        """A row that the reader knows. Once two of its kind were looked at here too, there is no need to any more.

        Not where anything had to be done to the pieces, or where their structure was only just learned.
        """
        if like.kind is self._before and self._at_a_look(row) == like.sizes:
            self._last.mark = like.kind
            return self._share(row, like.sizes, drew)
        self._before = like.kind
        sizes, skipped = self._measured(row)
        return self._share(row, sizes, drew, skipped)

    def _share(self, row: Row, sizes: tuple[int, ...], drew: Digest, skipped: Skipped = NOTHING_SKIPPED) -> Share:
        return Share(row, sizes, row if self._as_read and 0 not in sizes else (), drew, skipped)

    def _at_a_look(self, row: Row) -> tuple[int | None, ...]:
        known = self._mould.known_size
        return tuple(0 if each is None else each.size if type(each) is Sealed else known(each) for each in row)

    def _measured(self, row: Row) -> tuple[tuple[int, ...], Skipped]:
        sizes, skipped = [], NOTHING_SKIPPED
        for place, piece in enumerate(row):
            size = self._mould.known_size(piece)
            if size is None:
                size, lost = self._look(row, place)
                skipped = skipped.plus(lost)
            sizes.append(size)
        return tuple(sizes), skipped

    def _look(self, row: Row, place: int) -> tuple[int, Skipped]:
        """Measures a piece that is not plainly like the last one, and learns or checks its structure."""
        piece, skipped, size = row[place], NOTHING_SKIPPED, None
        if type(piece) is Sealed:
            return piece.size, skipped
        if isinstance(piece, Thinned):
            skipped = piece.skipped
            row[place] = piece = piece.piece  # what is left takes its place
            size = self._mould.known_size(piece)
        if piece is None:
            return 0, skipped
        if size is None:
            tree.batch_size(piece)
            if tree.holds_arrays(piece):
                row[place] = tree.map_leaves(_itself, piece)
            row[place], size = self._mould.measure(row[place])
        return size, skipped

    def close(self) -> None:
        """Ends the stream. Idempotent."""
        self._stream.close()


def _itself(leaf: Any) -> Any:
    return leaf


def _failed(error: Exception) -> Failed:
    if isinstance(error, ReadFailure) and isinstance(error.__cause__, Exception):
        return Failed(error.__cause__, error.where, error.origin)
    return Failed(error, "")
