"""Accelerators: streams, pinned memory, and the copy of batches ahead of the training.

- ``accelerators``: Torch's streams, events, pinned memory.
- ``copy_ahead``: The copy to a device, and why it is safe.
- ``small_leaves``: Small leaves of a batch, copied as one.
- ``pinned_memory``: Memory of loader workers, locked in place for an accelerator.
"""
