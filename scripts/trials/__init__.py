"""The parts of ``scripts/chaos.py``: random programs, what may happen to them, and what must hold then."""
