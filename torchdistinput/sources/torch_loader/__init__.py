"""Runs a torch ``DataLoader``: its settings, its loader workers, and how they are ended.

In this room a *worker* without more is a loader worker.

- ``settings``: Which loaders are refused, and which of the user's settings are kept.
- ``loader_runs``: The iterator of one epoch, its loader workers, and how both are ended.
- ``open_runs``: How long a rank waits for its loader workers.
- ``private_names``: The private names of torch used in this room, and what is left out where one is missing.
- ``worker_processes``: Which loader workers are stopped; how they end with their parent.
"""
