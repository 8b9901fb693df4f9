"""Readers: functions that take a binary file object and yield the records in it, for ``FileDataset(files, read)``.

``text_lines``, ``json_lines``, ``csv_rows``, ``npy_rows`` and ``tfrecords`` are such functions, and
``fixed_length_records(num_bytes)``, ``parquet(columns)`` and ``webdataset(...)`` make some; a reader of your own is any
function of the same kind. A reader sees the uncompressed content, reads it once from front to back in bounded pieces
(also if the file lies about its lengths), and delivers the good records in front of a bad one. Only ``parquet`` goes to
the parts that it needs. Content that is corrupt or cut off is a ``SourceError`` with the ``offset`` at which the bad
record starts; ``FileDataset`` adds the name of the file. Where it is certain at which byte the next record starts, the
error says so (``resume_at``), and with ``on_error="skip"`` reading goes on there: after a bad line, a bad row in one
line whose quotes are even in number, a TFRecord whose payload does not fit its checksum, a sample in a tar archive that
lacks something. It is not after a corrupt length or in a file that is cut off. A reader of your own in blocks may say
so too.

All of these can be entered again in the middle of a file, so that a resumed run seeks there; ``in_blocks`` makes a
reader of your own that can. The functions below yield the blocks of such a reader, from an ``offset`` that they yielded
before; what their names stand for takes the file alone, and yields the records.
"""

from __future__ import annotations

from torchdistinput.sources.files.formats.csv import csv_rows
from torchdistinput.sources.files.formats.fixed_length import fixed_length_records
from torchdistinput.sources.files.formats.json_lines import json_lines
from torchdistinput.sources.files.formats.npy import npy_rows
from torchdistinput.sources.files.formats.parquet import parquet
from torchdistinput.sources.files.formats.text import text_lines
from torchdistinput.sources.files.formats.tfrecords import tfrecords
from torchdistinput.sources.files.formats.webdataset import webdataset
from torchdistinput.sources.files.io import skip_to
from torchdistinput.sources.files.reader_api import Layout, in_blocks

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
