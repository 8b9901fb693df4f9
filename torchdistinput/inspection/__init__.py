"""What a loader will do, told before it does it: the plan, and the samples of any step. Nothing is read, no rank runs.

- ``sample_lookup``: The samples of a step, and the steps of a sample, at any number of ranks.
- ``explanation``: The plan of a loader, as a value and as text.
"""
