"""What all ranks did, from the trace files of a run: who made the others wait, on what, and what it cost.

- ``clocks``: The clocks of all ranks, set to one by the messages of the votes, with a bound of the error.
- ``read_trace``: The files of a run, found, checked and streamed.
- ``verdict``: The sentence, from a few numbers of each rank.
"""

from __future__ import annotations
