"""A source of your own: the rows of an SQLite table, one fragment for each range of keys.

Import the class; run alone, this file does nothing.
``strategy.distribute_dataset(SqliteSource("data.db", "samples"), global_batch_size=256)`` divides the ranges (FILE) or
the rows of each batch (DATA), and resumes in the middle of a range with any number of ranks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from torchdistinput import Fragment


class SqliteSource:
    """Rows of a table, as tuples."""

    def __init__(self, path: str, table: str, keys_per_fragment: int = 1000) -> None:
        self.path, self.table, self.keys = path, table, keys_per_fragment

    def fragments(self) -> Sequence[Fragment]:
        """One for each range of keys in which there are rows."""
        # The remainder keeps the sign of the key, and the division rounds to 0: keys below 0 have ranges of their own.
        number = f"(rowid - ((rowid % {self.keys:d}) + {self.keys:d}) % {self.keys:d}) / {self.keys:d}"
        ask = f"SELECT {number}, count(*), max(rowid) FROM {self.table} GROUP BY 1"
        with closing(sqlite3.connect(self.path)) as database:
            ranges = database.execute(ask).fetchall()
        return [Fragment(f"{self.table}:{number}", count, fingerprint=str(last)) for number, count, last in ranges]

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        """The rows of a range from a key on; each block with its first key."""
        first = int(fragment.name.rpartition(":")[2]) * self.keys
        ask = f"SELECT rowid, * FROM {self.table} WHERE rowid >= ? AND rowid < ? ORDER BY rowid"
        with closing(sqlite3.connect(self.path)) as database:
            rows = database.execute(ask, (first if position is None else position, first + self.keys))
            while block := rows.fetchmany(64):
                yield block[0][0], [row[1:] for row in block]
