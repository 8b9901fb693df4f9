"""Sends batches of loader workers through shared memory that is reused.

- ``pool``: The memory, and how the end of its use is detected.
- ``worker``: A loader worker's part of the memory: allocates blocks, and stacks samples in them.
- ``transport``: Encodes batches in the loader worker, and decodes them in the main process.
"""
