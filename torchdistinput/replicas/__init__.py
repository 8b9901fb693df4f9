"""The replicas of this process: ``Strategy.run``, and the collectives that a function calls inside of it.

- ``run``: Calls a function once for each local replica; ``get_replica_context``.
- ``coroutines``: A function on a separate thread that runs only while its caller waits for it.
"""
