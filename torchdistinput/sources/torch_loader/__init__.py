"""Running a torch ``DataLoader``: its settings, its loader workers, and their end.

- ``settings``: What is refused, what is kept of yours.
- ``run``: One epoch's iterator, its loader workers, and their end.
- ``open_runs``: How long a rank waits for its loader workers.
- ``base_seeds``: The seed of loader workers, drawn when torch would.
- ``queues``: What goes to loader workers and back, without a thread in between.
- ``stuck_forks``: Loader workers that never come up are forked anew.
- ``private_names``: The private names of torch that are used here, and what is left out where one is missing.
- ``parent_death``: The end of loader workers whose parent dies.
- ``worker_processes``: What the system tells of them.
"""
