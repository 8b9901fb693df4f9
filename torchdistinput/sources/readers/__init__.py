"""Readers: what reads one pass over one shard of the records, from the front or from a cursor.

- ``records``: The reader of the records of several files, in order.
- ``interleave``: Interleaves the records of several open files.
- ``open_file``: One open file: its records, and its cursor.
- ``parts``: Large files in parts.
- ``window_shuffle``: The shuffle of the records of a file.
- ``flat_map``: Several samples, or none, for a record.
- ``corrupt_records``: Goes on after a record that cannot be read.
- ``mixed``: Merges the records of the sources of a mixture.
"""
