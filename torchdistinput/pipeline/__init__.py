"""The prefetch pipeline: fetches steps, copies them to the devices, has all ranks agree on them, and delivers them.

- ``fetch``: Turns the rows of a source into this worker's part of a step, counted and checked.
- ``step_maker``: The stages before the vote: read, check, pad, copy, and measure a step.
- ``part_sums``: The sums over this rank's parts of a step, for the vote.
- ``to_device``: Copies the pieces of a step to their devices.
- ``pipeline_executor``: Draws steps ahead, has them completed and agreed, and delivers them to ``next``.
- ``step_completer``: The background thread that completes steps, for loader workers and copies to devices.
- ``voter``: Begins the votes of this rank when they are due, goes on with them, and holds their outcomes.
- ``end_errors``: The errors of an iterator that ended.
- ``metrics``: Measures where the time of an input goes.
"""
