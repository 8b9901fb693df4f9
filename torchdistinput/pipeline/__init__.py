"""The prefetch pipeline: draws steps, makes them, has all ranks agree on them, and delivers them.

- ``engine``: Draws steps ahead, has them made and agreed, and delivers them to ``next``; the walk of a step.
- ``step_maker``: Makes a step: read, counted and checked, padded, its copies begun, measured.
- ``step_completer``: The background thread that makes steps, for loader workers and copies to devices.
- ``part_sums``: The sums over this rank's parts of a step, for the vote.
- ``to_device``: Copies the pieces of a step to their devices.
- ``end_errors``: The errors of an iterator that ended.
- ``metrics``: Measures where the time of an input goes.
"""
