"""Iterable data: any iterable, torch loaders over iterable datasets, and the datasets of a dataset function.

- ``source``: Any iterable, or a ``DataLoader`` over one; ``ShardedIterableDataset``.
- ``from_function``: The datasets that a dataset function returned: a source of sources.
- ``reopening``: Opens the data again in each epoch.
- ``position``: The position in an iterable, as states save it.
- ``element_reader``: Reads on from a position, batch by batch; errors become values.
- ``element_batches``: Its batches, cut where they are read.
- ``cut_samples``: Cuts batches of samples where they are read.
- ``divided_sources``: Finds data that is already divided among the ranks, and says what to do.
- ``user_state``: The user's own ``state_dict``.
- ``state_packing``: Packs its values as JSON.
- ``inexact_states``: Libraries whose states do not restore exactly.
- ``between_epochs``: The data's own state between two epochs.
"""
