"""Datasets that users make: of files, of fragments, of other datasets.

- ``file_dataset``: ``FileDataset``, ``list_files``.
- ``fragment_dataset``: ``FragmentDataset``, the base of ``FileDataset``: order, reading, decoding.
- ``steps``: How many steps an epoch takes, if that is known.
- ``mixture``: ``Mixture``: several sources as one, read from front to end.
- ``mixture_weights``: The weights of a mixture, and those of a state of it.
- ``packed``: ``Packed``.
"""
