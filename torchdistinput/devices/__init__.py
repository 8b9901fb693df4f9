"""Accelerators: streams, pinned memory, and the copy of batches ahead of the training."""
