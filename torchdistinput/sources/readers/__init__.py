"""Readers: what reads one pass over one shard of the records, from the front or from a cursor.

- ``reader``: ``Reader``: the interface.
- ``interleave``: The reader of several files, in order or interleaved.
- ``open_file``: One open file: its records, and its cursor.
- ``parts``: Large files in parts.
- ``window_shuffle``: The shuffle of the records of a file.
- ``record_order``: The same order without reading: of files, and of a mixture.
- ``flat_map``: Several samples, or none, for a record.
- ``corrupt_records``: Goes on after a record that cannot be read.
- ``mixed``: Merges the records of the sources of a mixture.
"""
