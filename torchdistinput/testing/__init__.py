"""Tools to test distributed input without a cluster: real ranks in processes, fake ranks, a fake accelerator.

- ``ranks``: ``run_ranks``, real processes with a real gloo group.
- ``collectives``: Fake ranks in threads, failures by a sentence.
- ``sources``: ``check_source``, whether a source of fragments keeps its contract.
- ``streams``: A fake accelerator that reorders all it may.
"""

from __future__ import annotations

from torchdistinput.testing.collectives import FakeCollectives
from torchdistinput.testing.ranks import RankFailed, run_ranks
from torchdistinput.testing.sources import check_source

__all__ = ["FakeCollectives", "RankFailed", "check_source", "run_ranks"]
