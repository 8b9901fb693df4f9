"""The tests of torch's own ``test/test_dataloader.py``, with torch's class ``DataLoader`` or with torchdistinput's.

It is a module, and not a function: processes that are spawned import what they run by its name, and must find the same
class. Two variables of the environment tell which file and which class.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch.utils.data

import torchdistinput


class _Exchanged(torchdistinput.DataLoader[Any]):
    """With what torch's tests ask of the class that is private to torch, where the rest of the test asks for more."""

    _iterator = None

    @property
    def _auto_collation(self) -> bool:
        return self.batch_sampler is not None


_Exchanged.__name__ = _Exchanged.__qualname__ = "DataLoader"
_CLASSES = {"torch": torch.utils.data.DataLoader, "torchdistinput": _Exchanged}
_FILE = Path(os.environ["TORCH_TEST_DATALOADER"])

sys.modules["exchanged"] = sys.modules[
    __name__
]  # the file imports itself by the name of its __file__, without a package
# A test that names the class by its full path gets the same one; torch itself must keep its own.
exec(compile(_FILE.read_text().replace("torch.utils.data.DataLoader(", "DataLoader("), str(_FILE), "exec"), globals())
globals()["DataLoader"] = _CLASSES[os.environ["TORCH_TEST_CLASS"]]
