"""The benchmarks of ``scripts/bench.py``: one file for each case, and what they share."""
