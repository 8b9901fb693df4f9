"""Batches of loader workers in shared memory that is used again.

- ``pool``: The memory, and how the end of its use is seen.
- ``worker``: Who uses what of it; samples are stacked there.
- ``transport``: Batches on their way through it.
- ``plain_items``: Usual batches as plain tuples.
"""
