"""Map-style data: torch ``DataLoader``s over map-style datasets, tensors and arrays in memory, samplers.

- ``source``: Takes the user's ``DataLoader`` apart and builds the one of this worker.
- ``piece_dataset``: Reads the pieces of batches, in a loader worker or here.
- ``map_stream``: Draws batches from the user's sampler, and cuts them; the stream of rows of one epoch.
- ``sampler_batches``: Draws or skips the batches of a sampler.
- ``drawn_again``: Draws an epoch of the user's sampler again, without moving it.
- ``samplers``: ``ShuffleSampler``, ``TokenBatchSampler``, ``BucketBatchSampler``, ``DistributedBatchSampler``.
- ``in_memory``: Batches gathered from memory in one call for each tensor.
- ``table``: A dict of tensors and arrays as a dataset.
"""
