"""Readers: what reads one pass over one shard of the records, from the front or from a cursor.

- ``interleave``: ``Reader``, the interface; the reader of several fragments, in order or interleaved.
- ``fragment_reader``: The reader of one fragment, or file: in blocks, or by number.
- ``files``: Files as a source of fragments; large files in parts.
- ``record_order``: The order of the records without reading them: of files, and of a mixture.
- ``mixed``: Merges the records of the sources of a mixture.
"""
