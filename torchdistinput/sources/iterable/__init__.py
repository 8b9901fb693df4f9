"""Iterable data: any iterable, and torch loaders over iterable datasets.

- ``source``: Any iterable, or a ``DataLoader`` over one; ``ShardedIterableDataset``.
- ``position``: The position in an iterable, as states save it, also between two epochs.
- ``element_batches``: Reads it batch by batch from a position on, and cuts its batches there.
- ``divided_sources``: Finds data that is already divided among the ranks, and says what to do.
- ``user_state``: The user's own ``state_dict``, as JSON.
"""
