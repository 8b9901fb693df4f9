"""The commands of ``python -m torchdistinput``, a module each: ``add_arguments(parser)`` and ``run(arguments)``.

- ``explain``: Says what a loader will do: who reads what, in how many steps, and where.
- ``samples``: Names the samples of a step, and the steps of a sample.
- ``target``: Makes the loader that these two are about, without starting ranks.
- ``report``: Says who made the others wait, and on what; as text, JSON or one HTML page.
- ``trace``: Merges the trace files of all ranks into one of Chrome's form.
"""

from __future__ import annotations
