"""Tools to test distributed input without a cluster: real ranks in processes, fake ranks, a fake accelerator.

- ``ranks``: ``run_ranks`` runs a function in real processes with a real gloo group.
- ``collectives``: ``FakeCollectives`` runs ranks in threads, with failures and delays at chosen steps.
- ``sources``: ``check_source`` checks that a source of fragments keeps its contract.
- ``streams``: ``FakeDevice`` is an accelerator that reorders all work that it may reorder.
"""

from __future__ import annotations

from torchdistinput.testing.collectives import FakeCollectives
from torchdistinput.testing.ranks import RankFailed, run_ranks
from torchdistinput.testing.sources import check_source

__all__ = ["FakeCollectives", "RankFailed", "check_source", "run_ranks"]
