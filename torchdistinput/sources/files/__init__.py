"""Data in files: which files, who reads them in which order, their records, and where the reading stands.

- ``dataset``: ``FileDataset``, ``list_files``.
- ``fragment_dataset``: ``FragmentDataset``, of which ``FileDataset`` is one: order, walk, decoding.
- ``plain_epochs``: Its epochs in plain torch.
- ``checks``: Checks of what users give.
- ``source``: Its rows as a source, and their place after a resume.
- ``batching``: Who decodes which records; their batches, cut.
- ``position``: Where the reading of all workers stands.
- ``reading``: The records in their order, and where each comes from.
- ``interleave``: Which file has the next record.
- ``open_file``: One open file: its records, and where it can be entered again.
- ``steps``: How many steps an epoch takes, where that is known.
- ``window_shuffle``: The shuffle of the records of a file.
- ``corrupt_records``: Going on after a record that cannot be read.
- ``reader_api``: Readers that know where they are.
- ``record_index``: Where the records of a file start.
- ``exact_reads``: Reading no more than a file has.
- ``io``: Files are opened by their names, with fsspec.
- ``glob``: Which files a pattern means, and their names.
- ``retry``: Requests that failed in passing are made again.
"""
