"""Readers: functions that take a binary file object and yield the records in it, for ``FileDataset(files, read)``.

``text_lines``, ``json_lines``, ``csv_rows``, ``npy_rows`` and ``tfrecords`` are readers.
``fixed_length_records(num_bytes)``, ``parquet(columns)`` and ``webdataset(...)`` make readers. A reader of your own is
any function of this kind. A reader gets the uncompressed content. It reads the content once from front to back in
bounded pieces, also if the file lies about its lengths; only ``parquet`` reads just the parts that it needs.

A reader delivers the good records in front of a bad one. For content that is corrupt or cut off it raises
``SourceError`` with the ``offset`` at which the bad record starts; ``FileDataset`` adds the name of the file. Where it
is certain at which byte the next record starts, the error says so (``resume_at``), and with ``on_error="skip"`` reading
continues there. It is certain after a bad line, after a bad row in one line with an even number of quotes, after a
TFRecord whose payload does not match its checksum, and after a bad sample in a tar archive that is not damaged. It is
not certain after a corrupt length, or in a file that is cut off. A reader of your own that reads in blocks may set
``resume_at`` too.

All these readers can start in the middle of a file, so a resumed run seeks there; ``in_blocks`` makes such a reader of
a function of your own. The functions in the modules of formats yield the blocks of such a reader, from an ``offset``
that they yielded before. The public names in this module take only the file, and yield the records.
"""

from __future__ import annotations

from torchdistinput.sources.formats.fixed_length import fixed_length_records
from torchdistinput.sources.formats.npy import npy_rows
from torchdistinput.sources.formats.parquet import parquet
from torchdistinput.sources.formats.reader_api import Layout, in_blocks
from torchdistinput.sources.formats.text import csv_rows, json_lines, text_lines
from torchdistinput.sources.formats.tfrecords import tfrecords
from torchdistinput.sources.formats.webdataset import webdataset
from torchdistinput.sources.storage.io import skip_to

__all__ = [
    "Layout",
    "csv_rows",
    "fixed_length_records",
    "in_blocks",
    "json_lines",
    "npy_rows",
    "parquet",
    "skip_to",
    "text_lines",
    "tfrecords",
    "webdataset",
]
