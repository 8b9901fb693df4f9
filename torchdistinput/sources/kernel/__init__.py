"""What all kinds of data share: how batches are cut, collated, labelled and noted on their way to the pipeline.

- ``cut``: Batches that are cut into rows: the pieces of this rank's replicas.
- ``batcher``: Divides batches of samples, and makes each piece of this rank.
- ``ready_batches``: Counts and cuts ready batches.
- ``opaque_batches``: Batches that stay whole and are not inspected.
- ``asking``: Asks a collate function for the structure of its batches.
- ``converting``: Torch's conversion of ready batches.
- ``sample_costs``: The costs of samples, by which batches are divided.
- ``sample_index``: The index of a sample, the same on whichever rank reads it.
- ``epoch_order``: The samples of any step of an epoch, where their order can be known without reading.
- ``index_array``: Indices as arrays; a digest of a batch of them.
- ``explanation``: What a loader will do in an epoch, for ``explain``.
- ``record_places``: Where a record comes from, and what stands for one that cannot be read.
- ``read_failures``: Failures of reading, as values.
- ``position_log``: Where reading stood after each batch that was read and may not be delivered yet.
- ``row_stream``: The rows of one epoch, as the pipeline takes them.
"""
