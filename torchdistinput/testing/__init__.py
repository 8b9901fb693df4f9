"""Tools to test distributed input without a cluster.

- ``ranks``: ``run_ranks`` runs a function in real processes with a real gloo group.
- ``sources``: ``check_source`` checks that a source of fragments keeps its contract, and what it gives on ranks.
- ``worlds``: the second half of it: what ranks read of a source, compared with one process.
"""

from __future__ import annotations

from torchdistinput.testing.ranks import RankFailed, run_ranks
from torchdistinput.testing.sources import check_source

__all__ = ["RankFailed", "check_source", "run_ranks"]
