"""The commands of ``python -m torchdistinput``, a module each: ``add_arguments(parser)`` and ``run(arguments)``.

- ``report``: Says who made the others wait, and on what; as text, JSON or one HTML page.
- ``trace``: Merges the trace files of all ranks into one of Chrome's form.
"""

from __future__ import annotations
