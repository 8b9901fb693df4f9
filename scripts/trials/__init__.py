"""The parts of ``scripts/chaos.py``: random programs, what may happen to them, and what must hold then."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for tests.oracle, which has the laws and the data
