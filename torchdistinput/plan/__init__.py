"""Numbers in, numbers out: the laws. No torch in here. Each law has a letter and a number that no other law has.

- ``topology``: Who reads and who computes; ``InputContext``.
- ``sharding``: ``AutoShardPolicy``; which files a worker reads.
- ``batching``: How a batch is cut.
- ``step_agreement``: The step that all ranks agree on: reports and the decision.
- ``permutation``: A keyed shuffle of [0, n) with random access.
- ``prefetch_depth``: How far ahead a rank would read.
- ``file_resharding``: Where the reading of files was left, and how the rest is dealt to another number of workers.
- ``checkpoint_format``: What a saved state looks like, and whether it fits.
- ``options``: ``InputOptions``, ``Step``.
"""
