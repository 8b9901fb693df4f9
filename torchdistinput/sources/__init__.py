"""Data sources: how each kind of user data is recognised, read, and cut into the pieces of the replicas.

- ``resolve``: Finds the kind of the user's data and makes its source.
- ``fragments``: ``Fragment``, ``FragmentSource``: the public interface for data that is read in parts.
- ``plain_epochs``: The epoch counter of datasets in plain torch.
- ``checks``: Checks of the user's arguments.
- ``contract``: ``Source``, ``SourceFacts``: what the pipeline asks of any data.
- ``user_data``: What is asked of the user's objects.
- ``set_epoch``: Calls ``set_epoch`` on the user's samplers and datasets.
- ``sample_seed``: ``sample_seed``, ``seed_samples``: a random seed for each sample.
- ``epoch_rng``: The random states from which the order of an epoch is drawn, recorded for a resume.
- ``random_state``: ``RandomState``: the random states of a source.
- ``rng``: Random draws that are the same on all ranks.
"""
