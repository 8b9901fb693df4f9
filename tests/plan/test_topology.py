"""Who reads and who computes; what contexts tell a user's function."""

from __future__ import annotations

import pytest

from torchdistinput.plan.topology import InputContext, Topology, ValueContext


def test_the_replicas_of_all_workers_are_numbered_through() -> None:
    for workers in range(1, 6):
        for local in range(1, 5):
            world = [Topology(num_workers=workers, replicas_per_worker=local, worker=i) for i in range(workers)]
            assert [k for topology in world for k in topology.replica_ids] == list(range(workers * local))
            assert all(topology.num_replicas == workers * local for topology in world)
            assert all(
                topology.replica_ids[r] == topology.worker * local + r for topology in world for r in range(local)
            )


def test_the_batch_size_of_a_replica_is_the_quotient_where_there_is_one() -> None:
    for replicas in range(1, 21):
        context = InputContext(num_replicas_in_sync=replicas)
        for size in range(1, 41):
            if size % replicas == 0:
                assert context.get_per_replica_batch_size(size) == size // replicas
                continue
            with pytest.raises(ValueError, match=f"`global_batch_size` {size} is not divisible by") as told:
                context.get_per_replica_batch_size(size)
            assert str(told.value).endswith(f"`num_replicas_in_sync` {replicas} ")


def test_a_context_without_arguments_is_that_of_one_process() -> None:
    context = InputContext()
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (1, 0, 1)
    assert context.get_per_replica_batch_size(7) == 7
    assert (ValueContext().replica_id_in_sync_group, ValueContext().num_replicas_in_sync) == (0, 1)
