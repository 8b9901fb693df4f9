"""From the data that a user gives to the pieces of each replica: one folder for each kind of data.

- ``resolve``: What kind of data it is.
- ``fragments``: ``Fragment``, ``FragmentSource``: how data that is read in parts takes part.
- ``base``: What every source offers.
- ``in_worker``: What runs in loader workers.
- ``split_batches``: Ready batches, counted and cut.
- ``opaque_batches``: Batches that nobody looks into.
- ``converting``: Torch's conversion of ready batches.
- ``set_epoch``: Who is told the epoch.
- ``sample_index``: The number of a sample, whoever reads it.
- ``sample_seed``: Sample_seed, ``seed_samples``.
- ``rng``: Random draws that all ranks make alike.
"""
