"""Thin adapters to other libraries. Each is imported by who uses that library, and by nothing else.

- ``accelerate``: Where a loader ends, skipping in it, gathering from it.
- ``datasets``: A streaming dataset as fragments, which resume exactly at any world size.
- ``transformers``: Parts of any size in a Trainer, and what its loss is divided by.
"""
