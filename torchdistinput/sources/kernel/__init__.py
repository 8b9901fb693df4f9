"""What all kinds of data share: how batches are cut, collated, labelled and noted on their way to the pipeline.

- ``batcher``: Batches cut into rows; divides batches of samples, and makes each piece of this rank.
- ``collating``: Collate functions: asked for the structure of their batches; batches that stay whole.
- ``ready_batches``: Counts and cuts ready batches.
- ``sample_costs``: The costs of samples, by which batches are divided.
- ``sample_index``: The index of a sample, the same on whichever rank reads it.
- ``epoch_order``: The samples of any step of an epoch, where their order can be known without reading.
- ``index_array``: Indices as arrays; a digest of a batch of them.
- ``explanation``: What a loader will do in an epoch, for ``explain``.
- ``read_failures``: Where a record comes from, and failures of reading, as values.
- ``row_stream``: The rows of one epoch, as the pipeline takes them, and the log of where reading stood.
"""
