"""The prefetch pipeline: fetches steps, copies them to the devices, has all ranks agree on them, and delivers them.

- ``fetch``: Turns the rows of a source into this worker's part of a step, counted and checked.
- ``upstream``: The stages before the vote: read, check, pad, copy, and measure a step.
- ``to_device``: Copies the pieces of a step to their devices.
- ``prefetcher``: Draws steps ahead, completes them, and delivers the agreed ones to ``next``; with a background thread.
- ``voter``: Begins the votes of this rank when they are due, and continues them, with or without waiting.
- ``ready_queue``: The agreed outcomes that the consumer did not take yet.
- ``interfaces``: The interfaces between the prefetcher, the stages before the vote, and the vote.
- ``end_errors``: The errors of an iterator that ended.
- ``metrics``: Measures where the time of an input goes.
"""
