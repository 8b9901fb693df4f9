"""Data with an index: a torch ``DataLoader`` over a map-style dataset, tensors and arrays in memory, samplers.

- ``source``: A ``DataLoader`` taken apart, and the one of a worker built.
- ``rows``: Its rows.
- ``index_batches``: The batch sampler of yours, cut; ``DistributedBatchSampler``.
- ``sampler_batches``: Its batches, one after the other or passed over.
- ``index_array``: Indices as arrays; a digest of a batch of them.
- ``in_memory``: Batches gathered from memory at once.
- ``columns``: One tensor or array of them.
- ``table``: A dict of tensors and arrays as a dataset.
- ``shuffle_sampler``: ``ShuffleSampler``.
"""
