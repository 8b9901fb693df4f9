"""Data sources: how each kind of user data is recognised, read, and cut into the pieces of the replicas.

- ``resolve``: Finds the kind of the user's data and makes its source.
- ``fragments``: ``Fragment``, ``FragmentSource``: the public interface for data that is read in parts.
- ``checks``: Checks of the user's arguments.
- ``base``: The interface of a source.
- ``set_epoch``: Calls ``set_epoch`` on the user's samplers and datasets.
- ``sample_seed``: ``sample_seed``, ``seed_samples``: a random seed for each sample.
- ``order_advice``: What to write so that each epoch has the same order.
- ``epoch_draws``: The random states from which the order of an epoch is drawn, recorded for a resume.
- ``rng``: Random draws that are the same on all ranks.
"""
