"""The tests of torchdata's ``test_state_dict.py`` that fail with the drop-in, each with its reason."""

from __future__ import annotations

from typing import Final

_KEYS = "looks into the state, whose keys are others here"
_ALIVE = "loads a state while an iterator is alive, which is refused: leave the loop, or close() the iterator, first"
_DRAWS = "augmentation draws from the global random state, which is not restored; seed_samples=True is the way here"
_OUT_OF_ORDER = "in_order=False has no state in the middle of an epoch, which is refused"
_LAST_STEP = "a state of the last step of a known length is the start of the next epoch, not an epoch without a step"
_NEVER_RESET = (
    "a dataset that is its own iterator, and that __iter__ does not set back, was read to its end before a state of "
    "its first batch is loaded into the same object; a new object goes on as it should"
)

KNOWN: Final = {
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
