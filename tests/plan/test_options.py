"""Options are checked where they are made, and each complaint has the value and what is needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from torchdistinput.plan.options import InputOptions, InputReplicationMode, Step


def test_the_defaults_are_those_of_the_guide() -> None:
    options = InputOptions()
    assert options.auto_shard_policy is None  # AUTO; of the drop-in DATA
    assert (options.prefetch, options.least_ahead, options.most_ahead) == (None, 2, 32)
    assert options.fetch_to_device
    assert options.coordination == "on"
    assert options.timeout_seconds is None
    assert options.replication_mode is InputReplicationMode.PER_WORKER


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        ({"auto_shard_policy": "DATA"}, TypeError, r"auto_shard_policy is 'DATA'; a member of AutoShardPolicy"),
        ({"replication_mode": "PER_WORKER"}, TypeError, r"replication_mode is 'PER_WORKER'"),
        ({"prefetch": True}, TypeError, r"prefetch is True; an int is needed"),
        ({"prefetch": 1.5}, TypeError, r"prefetch is 1\.5; an int is needed"),
        ({"prefetch": -1}, ValueError, r"prefetch is -1; it must be 0 or more"),
        ({"max_errors": -1}, ValueError, r"max_errors is -1; it must be 0 or more"),
        ({"max_errors": "3"}, TypeError, r"max_errors is '3'; an int is needed"),
        ({"trace": 3}, TypeError, r"trace is 3; the name of a folder is needed"),
        ({"log_every": -1}, ValueError, r"log_every is -1; it must be 0 or more"),
        ({"on_error": "ignore"}, ValueError, r"on_error is 'ignore'; it must be 'raise' or 'skip'"),
        ({"timeout_seconds": 0}, ValueError, r"timeout_seconds is 0; it must be positive"),
        ({"timeout_seconds": float("nan")}, ValueError, r"timeout_seconds is nan; it must be positive"),
        ({"coordination": "maybe"}, ValueError, r"coordination is 'maybe'; it must be 'on' or 'off'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(wrong: dict[str, Any], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        InputOptions(**wrong)


def test_a_folder_may_be_a_path() -> None:
    assert InputOptions(trace=Path("look")).measures


def test_options_and_steps_are_frozen_values() -> None:
    assert InputOptions() == InputOptions()
    assert InputOptions(prefetch=1) != InputOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        InputOptions().prefetch = 3  # type: ignore[misc]
    step = Step(0, 1, 4, (2, 2), 2, 1)
    assert step == Step(epoch=0, index=1, global_size=4, local_sizes=(2, 2), num_replicas=2, num_workers=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.index = 2  # type: ignore[misc]
