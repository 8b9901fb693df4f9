"""In one process the drop-in is torch's loader: batches, errors, warnings, and what is drawn by when."""

from __future__ import annotations

from hypothesis import given, seed

from tests.oracle.as_torch import as_torch
from tests.oracle.drawing import settings_of, torch_programs


def test_random_programs_see_what_they_see_of_torchs_loader(all_cells: bool, drawn_by: int) -> None:
    seed(drawn_by)(settings_of(all_cells=all_cells)(given(torch_programs())(as_torch)))()
