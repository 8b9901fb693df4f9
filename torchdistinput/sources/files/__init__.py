"""Data in files and other fragments: lists them, reads their records in the order of an epoch, and resumes.

- ``dataset``: ``FileDataset``, ``list_files``.
- ``fragment_dataset``: ``FragmentDataset``, the base of ``FileDataset``: order, reading, decoding.
- ``parts``: Large files in parts.
- ``plain_epochs``: The epoch counter of datasets in plain torch.
- ``source``: The source for such a dataset; resumes, also in another world.
- ``batching``: Divides the decoding among ranks and loader workers, and cuts batches.
- ``position``: The saved position of all workers.
- ``reading``: The reader of the records of several files, in order.
- ``interleave``: Interleaves the records of several open files.
- ``open_file``: One open file: its records, and its cursor.
- ``mixture``: ``StreamMixture``: several sources as one, read from front to end.
- ``mixed_reader``: Merges the records of the sources of a mixture.
- ``mixture_weights``: The weights of a mixture, which may be set while it runs.
- ``steps``: How many steps an epoch takes, if that is known.
- ``flat_map``: Several samples, or none, for a record.
- ``window_shuffle``: The shuffle of the records of a file.
- ``corrupt_records``: Goes on after a record that cannot be read.
- ``columns``: The records of a block as columns.
- ``reader_api``: The interface of readers that can resume inside a file.
- ``record_index``: Index files with the offsets, or the lengths, of the records of a file.
- ``indexed_records``: The samples of files by number, for packs.
- ``exact_reads``: Reads a claimed number of bytes safely.
- ``io``: Opens files by name, with fsspec.
- ``file_cache``: Copies of remote files in a local folder, for all processes of a host.
- ``glob``: Expands patterns to the names of files.
- ``braces``: Expands ``{000..012}`` and ``{a,b}`` in names.
- ``retry``: Repeats requests that failed for a moment.
"""
