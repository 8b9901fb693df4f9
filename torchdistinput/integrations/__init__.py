"""Thin adapters to training frameworks. Each is imported by who uses that framework, and by nothing else.

- ``accelerate``: Where a loader ends, skipping in it, gathering from it.
- ``transformers``: Parts of any size in a Trainer, and what its loss is divided by.
"""
