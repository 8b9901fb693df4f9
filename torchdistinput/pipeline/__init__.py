"""The engine: a step is fetched, sent to its devices, agreed on by all ranks, and kept until the loop takes it.

- ``fetch``: Rows of a source become this worker's part of a step, measured and checked.
- ``upstream``: All that comes before the vote: a step is read, checked, padded and sent, and timed.
- ``to_device``: Pieces go to their devices.
- ``prefetcher``: Steps ahead, as the consumer sees them.
- ``prefetch_thread``: The one background thread: completes steps, votes.
- ``shutdown``: Who releases the resources, and which error later calls raise.
- ``metrics``: Where the time of an input goes.
"""
