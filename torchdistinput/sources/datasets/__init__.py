"""Datasets that users make: of files, of fragments, of other datasets.

- ``file_dataset``: ``FileDataset``, ``list_files``.
- ``fragment_dataset``: ``FragmentDataset``, the base of ``FileDataset``: order, reading, decoding.
- ``mixture``: ``Mixture``: several sources as one, read from front to end.
- ``mixture_weights``: The weights of a mixture, and those of a state of it.
- ``packed``: ``Packed``.
"""
