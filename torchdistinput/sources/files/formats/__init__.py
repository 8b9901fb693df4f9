"""Formats: functions that take a binary file object and yield the records in it.

- ``readers``: Text, JSON, TFRecord, fixed length.
- ``csv``: CSV.
- ``npy``: Rows of .npy files.
- ``crc32c``: The checksum of TFRecord.
"""
