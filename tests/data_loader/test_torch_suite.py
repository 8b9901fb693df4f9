"""PyTorch's and torchdata's own tests of their loaders, with the class exchanged, where their files are at hand.

``TORCH_TEST_DATALOADER=test_dataloader.py pytest tests/data_loader/test_torch_suite.py``: the variable has the path of
the file ``test/test_dataloader.py`` of PyTorch's repository, which also needs ``expecttest``. Torch's own class is run
first: what fails with it says nothing. ``TORCHDATA_TEST_STATE_DICT`` has that of the file ``test_state_dict.py`` in
``test/stateful_dataloader`` of torchdata's repository; it needs ``expecttest`` and ``parameterized``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

OURS = '''
import torchdistinput

class _Exchanged(torchdistinput.DataLoader):
    """With what the tests ask of the class that is private to torch, where the rest of the test asks for more."""

    _iterator = None

    @property
    def _auto_collation(self):
        return self.batch_sampler is not None

_Exchanged.__name__ = _Exchanged.__qualname__ = "DataLoader"
DataLoader = _Exchanged
'''
OURS_WITH_A_STATE = """
import torchdistinput

class StatefulDataLoader(torchdistinput.DataLoader):
    def __init__(self, *args, snapshot_every_n_steps=16, **more):  # which is no argument of ours
        super().__init__(*args, **more)

"""


def failures(content: str, folder: Path) -> set[str]:
    """The tests of a file with this text that fail, as ``Class.test``; one that hangs for 20 minutes ends the run."""
    folder.mkdir(exist_ok=True)
    (folder / "test_exchanged.py").write_text(content)
    call = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-W", "ignore", "-p", "no:cacheprovider"]
    call += ["-o", "faulthandler_timeout=1200", "-o", "faulthandler_exit_on_timeout=true", "test_exchanged.py"]
    run = subprocess.run(call, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    assert re.search(r"\d+ passed", run.stdout), run.stdout
    found = re.findall(r"^(?:SUB)?FAILED.*?::(\w+)::(\w+)", run.stdout, flags=re.MULTILINE)
    return {f"{cls}.{name}" for cls, name in found}


_FOR_ONE_RANK = "a DistributedSampler is refused: its part would be divided once more when there is a process group"
_LOOKS_INSIDE = (
    "asks the iterator for _workers, which is private to torch; tests/faults/test_departures.py and others count them"
)

KNOWN: Final = {
    "TestDataLoader.test_duplicating_data_with_drop_last": _FOR_ONE_RANK,
    "TestDataLoader.test_get_worker_info": _LOOKS_INSIDE,
    "TestDataLoader.test_iterable_style_dataset": _LOOKS_INSIDE,
    "TestDataLoader.test_partial_workers": _LOOKS_INSIDE,
    "TestDataLoaderPersistentWorkers.test_duplicating_data_with_drop_last": _FOR_ONE_RANK,
    "TestDataLoaderPersistentWorkers.test_get_worker_info": _LOOKS_INSIDE,
    "TestDataLoaderPersistentWorkers.test_iterable_style_dataset": _LOOKS_INSIDE,
    "TestDataLoaderPersistentWorkers.test_partial_workers": _LOOKS_INSIDE,
}


_KEYS = "looks into the state, whose keys are others here"
_ALIVE = "loads a state while an iterator is alive, which is refused: leave the loop, or close() the iterator, first"
_DRAWS = "augmentation draws from the global random state, which is not restored; seed_samples=True is the way here"
_OUT_OF_ORDER = "in_order=False has no state in the middle of an epoch, which is refused"
_LAST_STEP = "a state of the last step of a known length is the start of the next epoch, not an epoch without a step"
_NEVER_RESET = (
    "a dataset that is its own iterator, and that __iter__ does not set back, was read to its end before a state of "
    "its first batch is loaded into the same object; a new object goes on as it should"
)

OF_TORCHDATA: Final = {
    "TestStatefulDataLoaderMap_shard1.test_random_state": _DRAWS,
    "TestStatefulSampler_shard1.test_random_state": _DRAWS,
    "TestSnapshotZero_shard2.test_iterable": _DRAWS,
    "TestSnapshotZero_shard2.test_map": _DRAWS,
    "TestSnapshotZero_shard2.test_map_iterrupted_shuffle": _ALIVE,
    "TestSnapshotEnd_shard2.test_generator": _ALIVE,
    "TestSnapshotEnd_shard2.test_generator_no_state": _ALIVE,
    "TestSnapshotEnd_shard2.test_iterable": _DRAWS,
    "TestSnapshotEnd_shard2.test_map": _DRAWS,
    "TestNumWorkersMismatch_shard3.test_num_workers_mismatch": "wants an error; map-style data may have other workers",
    "TestInitialState_shard0.test_init_error": "the error of worker_init_fn comes with the first batch, not in iter()",
    "TestInitialState_shard0.test_initial_state": _KEYS,
    "TestInitialState_shard0.test_load_state_after_initial_state_dict": _KEYS,
    "TestInitialState_shard0.test_load_state_before_initial_state_dict": _DRAWS,
    "TestInitialState_shard0.test_load_then_state": _ALIVE,
    "TestStatefulDataLoaderIterable2_shard0.test_random_state": _NEVER_RESET,
    "TestDynamicStateIterableDataset_shard0.test": _KEYS,
    "TestDatasetIteratorStateDuplication_shard0.test": _KEYS,
    "TestFastStateDictRequestRoundRobin_shard3.test_fast_state_dict_request": "compares two states word by word",
    **{f"TestEndOfEpochBehavior_shard0.test_end_of_epoch_behavior_{number}": _LAST_STEP for number in range(4)},
    "TestMultiEpochState_shard0.test_inline": _ALIVE,
    "TestMultiEpochState_shard0.test_pw": _ALIVE,
    "TestSingleIterCalled_shard0.test_inline": _KEYS,
    "TestSingleIterCalled_shard0.test_inline_iter": _KEYS,
    "TestSingleIterCalled_shard0.test_mp": _KEYS,
    "TestSingleIterCalled_shard0.test_mp_iter": _KEYS,
    "TestOutOfOrderWithCheckpointing.test_out_of_order_index_ds": _OUT_OF_ORDER,
    "TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_no_completed_workers": _OUT_OF_ORDER,
    "TestOutOfOrderWithCheckpointing.test_out_of_order_iterable_ds_one_completed_worker": _OUT_OF_ORDER,
}


def test_torchs_own_tests_pass_but_for_those_listed(tmp_path: Path) -> None:
    if "TORCH_TEST_DATALOADER" not in os.environ:
        pytest.skip("TORCH_TEST_DATALOADER is not set: the path of test/test_dataloader.py of PyTorch's repository")
    pytest.importorskip("expecttest", reason="torch.testing._internal imports expecttest")
    text = Path(os.environ["TORCH_TEST_DATALOADER"]).read_text()
    exchanged = text.replace("torch.utils.data.DataLoader(", "DataLoader(") + OURS
    torchs, ours = failures(text, tmp_path / "torch"), failures(exchanged, tmp_path / "ours")
    if not ours <= torchs | set(KNOWN):  # some of these tests measure time: they get a second chance
        ours &= failures(exchanged, tmp_path / "again")
    assert ours | torchs == set(KNOWN) | torchs


def test_torchdatas_own_tests_pass_but_for_those_listed(tmp_path: Path) -> None:
    if "TORCHDATA_TEST_STATE_DICT" not in os.environ:
        pytest.skip("TORCHDATA_TEST_STATE_DICT is not set: the path of test_state_dict.py of torchdata's repository")
    content = Path(os.environ["TORCHDATA_TEST_STATE_DICT"]).read_text()
    theirs = "from torchdata.stateful_dataloader import Stateful, StatefulDataLoader\n"
    assert content.count(theirs) == 1
    assert failures(content.replace(theirs, theirs + OURS_WITH_A_STATE), tmp_path) == set(OF_TORCHDATA)
