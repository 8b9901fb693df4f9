"""Batches of loader workers in shared memory that is used again."""
