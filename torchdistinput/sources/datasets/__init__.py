"""Datasets that users make: of files, of fragments, of other datasets.

- ``fragment_dataset``: ``FragmentDataset``, ``FileDataset``, ``list_files``: order, reading, decoding.
- ``mixture``: ``Mixture``: several sources as one, read from front to end.
- ``packed``: ``Packed``.
- ``record_source``: The source for datasets of files, fragments and mixtures; resumes, also in another world.
- ``record_rows``: Divides the decoding among ranks and loader workers, and cuts batches.
- ``record_position``: The saved position of all workers.
"""
