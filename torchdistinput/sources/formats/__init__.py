"""Formats: functions that take a binary file object and yield the records in it.

- ``readers``: The public names, ``torchdistinput.readers``.
- ``reader_api``: The interface of readers that can resume inside a file.
- ``columns``: The records of a block as columns.
- ``text``: Lines of text, JSON and CSV.
- ``npy``: Rows of .npy files.
- ``tfrecords``: TFRecord.
- ``parquet``: Parquet, with pyarrow.
- ``arrow``: Columns of an Arrow table.
- ``fixed_length``: Records of one length.
- ``webdataset``: Samples in tar archives.
"""
