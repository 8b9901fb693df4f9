"""Map-style data: torch ``DataLoader``s over map-style datasets, tensors and arrays in memory, samplers.

- ``source``: Takes the user's ``DataLoader`` apart and builds the one of this worker.
- ``piece_dataset``: Reads the pieces of batches, in a loader worker or here.
- ``map_stream``: The stream of rows of one epoch.
- ``sampler_draws``: Draws batches from the user's sampler, and cuts them.
- ``sampler_batches``: Draws or skips the batches of a sampler.
- ``drawn_again``: Draws an epoch of the user's sampler again, without moving it.
- ``in_memory``: Batches gathered from memory in one call for each tensor.
- ``columns``: One tensor or array of such a dataset.
- ``table``: A dict of tensors and arrays as a dataset.
- ``shuffle_sampler``: ``ShuffleSampler``.
- ``distributed_batch_sampler``: ``DistributedBatchSampler``.
- ``length_batches``: Batch samplers by the lengths of samples.
"""
