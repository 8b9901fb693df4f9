"""The prefetch pipeline: fetches steps, copies them to the devices, has all ranks agree on them, and delivers them.

- ``fetch``: Turns the rows of a source into this worker's part of a step, counted and checked.
- ``upstream``: The stages before the vote: read, check, pad, copy, and measure a step.
- ``to_device``: Copies the pieces of a step to their devices.
- ``prefetcher``: The consumer's side: draws steps ahead and delivers agreed steps to ``next``.
- ``prefetch_thread``: The background thread: completes steps and votes for them.
- ``shutdown``: Releases the resources of an iterator, and makes the errors that later calls raise.
- ``metrics``: Measures where the time of an input goes.
"""
