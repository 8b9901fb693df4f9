"""Data sources: how each kind of user data is recognised, read, and cut into the pieces of the replicas.

- ``resolve``: Finds the kind of the user's data and makes its source.
- ``from_function``: The datasets that a dataset function returned: a source of sources.
- ``fragments``: ``Fragment``, ``FragmentSource``: the public interface for data that is read in parts.
- ``checks``: What is asked of the user's objects, and refused.
- ``contract``: ``Source``, ``SourceFacts``: what the pipeline asks of any data.
- ``set_epoch``: Calls ``set_epoch`` on the user's samplers and datasets; the epoch counter of datasets in plain torch.
- ``sample_seed``: ``sample_seed``, ``seed_samples``: a random seed for each sample.
- ``epoch_rng``: The random states from which the order of an epoch is drawn, recorded for a resume.
- ``random_state``: ``RandomState``: the random states of a source, and the base seeds of loader workers.
- ``rng``: Random draws that are the same on all ranks.
"""
