"""Thin adapters to other libraries. A program imports the adapters that it uses; this library imports none of them.

- ``accelerate``: Prepares a loader for accelerate: gradient accumulation, skipping, gathering of uneven parts.
- ``datasets``: A streaming dataset as fragments, which resume exactly at any world size.
- ``transformers``: Prepares a loader for a ``Trainer``: parts of any size, and the divisor of the loss.
"""
