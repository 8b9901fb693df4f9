"""Iterables, loaders over them, and what a dataset function returned.

- ``source``: Any iterable; ``ShardedIterableDataset``.
- ``loader_source``: One in a ``DataLoader``.
- ``data_pipes``: Torch's DataPipes, told their seed and their part.
- ``from_function``: What a dataset function returned.
- ``reopening``: Data that is asked for again in each epoch.
- ``cursor``: Where the reading stands.
- ``reading``: Reading on from there, errors as values.
- ``divided_sources``: Data that each rank has a part of already, and the way out.
- ``user_state``: A ``state_dict`` of your own.
- ``state_packing``: What is in it, as JSON.
- ``inexact_states``: Libraries whose states do not restore exactly.
- ``between_epochs``: What data says of itself between two epochs.
- ``skip_in_loader``: A plain torch loader, entered in the middle.
"""
