"""Data sources: how each kind of user data is recognised, read, and cut into the pieces of the replicas.

- ``resolve``: Finds the kind of the user's data and makes its source.
- ``fragments``: ``Fragment``, ``FragmentSource``: the public interface for data that is read in parts.
- ``plain_epochs``: The epoch counter of datasets in plain torch.
- ``checks``: Checks of the user's arguments.
- ``base``: The interface of a source.
- ``cuts``: Batches that are cut into rows: the pieces of this rank's replicas.
- ``read_failures``: Failures of reading, as values.
- ``asking``: Asks a collate function for the structure of its batches.
- ``split_batches``: Counts and cuts ready batches.
- ``opaque_batches``: Batches that stay whole and are not inspected.
- ``converting``: Torch's conversion of ready batches.
- ``set_epoch``: Calls ``set_epoch`` on the user's samplers and datasets.
- ``sample_index``: The index of a sample, the same on whichever rank reads it.
- ``sample_costs``: The costs of samples, by which batches are divided.
- ``sample_seed``: ``sample_seed``, ``seed_samples``: a random seed for each sample.
- ``order_advice``: What to write so that each epoch has the same order.
- ``epoch_draws``: The random states from which the order of an epoch is drawn, recorded for a resume.
- ``rng``: Random draws that are the same on all ranks.
"""
