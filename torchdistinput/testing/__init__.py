"""Tools to test distributed input without a cluster: real ranks in processes, fakes for the doors to the outside."""

from __future__ import annotations

from torchdistinput.testing.collectives import FakeCollectives
from torchdistinput.testing.ranks import RankFailed, run_ranks

__all__ = ["FakeCollectives", "RankFailed", "run_ranks"]
