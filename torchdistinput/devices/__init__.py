"""Accelerators: copies of batches to a device ahead of the training step, with streams and pinned memory.

- ``accelerators``: The devices of this process; torch's streams, events and pinned memory.
- ``copy_ahead``: The asynchronous copy to a device, and why its memory is safe.
"""
