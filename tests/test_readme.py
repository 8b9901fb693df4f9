"""The first lines that a newcomer reads run as they stand, in one process and under torchrun."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.interpreters import ROOT, Interpreters, printed

BEFORE = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
from torch.utils.data import TensorDataset
train = TensorDataset(torch.randn(600, 4), torch.randint(0, 3, (600,)))
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

AFTER = """
from pathlib import Path
weights = [round(value, 5) for value in torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()]
text = f"steps {loader.step.index + 1} weights {weights}"
Path(f"{strategy.num_input_pipelines}-{strategy.input_pipeline_id}.txt").write_text(text)
"""


def first_snippet() -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert found is not None
    return found[1]


def test_the_first_snippet_gives_the_same_weights_in_one_process_and_in_two(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEFORE + first_snippet() + AFTER)
    printed(interpreters.run([str(script)], folder=tmp_path))
    printed(interpreters.run_as_torchrun(2, str(script), folder=tmp_path))
    alone, *together = [(tmp_path / f"{name}.txt").read_text() for name in ("1-0", "2-0", "2-1")]
    assert alone.startswith("steps 3 ")
    assert together == [alone, alone]
