"""The rules of distributed input, as functions of plain numbers without torch.

A rule is called a *law*; each has a letter and a number that no other law has (``B1``, ``A3``).

- ``topology``: Workers (which read) and replicas (which compute); ``AutoShardPolicy``; which files a worker reads.
- ``batching``: How a batch is cut into the pieces of the replicas.
- ``step_agreement``: How all ranks agree on each step: the report of a rank, and the decision.
- ``permutation``: A keyed shuffle of [0, n) with random access.
- ``block_shuffle``: A keyed shuffle of [0, n) that takes whole blocks of stored samples.
- ``balancing``: How a batch is divided by the costs of its samples.
- ``mixing``: The order of a mixture of sources, and where it stands.
- ``packing``: How samples are packed into rows of a fixed length.
- ``file_resharding``: Positions in files, and how unread files are divided when the number of workers changes.
- ``checkpoint_format``: The format of a saved state, and the check whether the state fits an input.
- ``options``: ``InputOptions``, ``Step``; how many steps a rank reads ahead.
"""
