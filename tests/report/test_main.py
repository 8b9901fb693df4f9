"""``python -m torchdistinput``."""

from __future__ import annotations

import pytest
import torch

from torchdistinput.__main__ import COMMANDS, main


def test_without_arguments_it_says_what_is_installed_and_which_commands_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    for words in ("torchdistinput 0.", f"torch          {torch.__version__}", "devices ", "pages ", "README.md"):
        assert words in told
    assert "parquet: yes" in told or "parquet: no pyarrow" in told
    assert "which rank made the others wait" in " ".join(told.split("commands:")[0].split())
    for name, sentence in COMMANDS.items():
        assert name in told
        assert sentence.split()[0] in told
