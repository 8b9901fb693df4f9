"""What all ranks did, from the trace files of a run: who made the others wait, on what, and what it cost.

- ``causes``: What a rank did while others waited for it, stage by stage.
- ``chrome``: All ranks in one file of Chrome's trace event form.
- ``charts``: The pictures of the page, as inline SVG.
- ``clocks``: The clocks of all ranks, set to one by the messages of the votes, with a bound of the error.
- ``last_votes``: Who voted last for each step, by how much, and who waited.
- ``page``: The report as one HTML page.
- ``read_trace``: The files of a run, found, checked and streamed.
- ``summary``: The numbers of a run: of each rank, over time, and the last steps.
- ``tables``: The tables of a report, for the terminal and for the page.
- ``verdict``: The sentence, from a few numbers of each rank.
"""

from __future__ import annotations
