"""Reads the trace files of a run: what the ranks did, who was late, and what it cost. No torch, no numpy in it."""
