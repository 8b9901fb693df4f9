"""Every case of ``conformance/per_replica_batch_size.json`` through ``InputContext``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdistinput as tdi

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "per_replica_batch_size.json").read_text())


def context_of(case: dict[str, Any]) -> tdi.InputContext:
    return tdi.InputContext(
        num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=case["num_replicas_in_sync"]
    )


def test_every_case_gives_the_value_or_the_error_text_that_the_file_says() -> None:
    ran = 0
    for case in CASES:
        expect = case["expect"]
        if "value" in expect:
            assert context_of(case).get_per_replica_batch_size(case["global_batch_size"]) == expect["value"], case["id"]
        else:
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared below
                context_of(case).get_per_replica_batch_size(case["global_batch_size"])
            assert type(caught.value).__name__ == expect["error"]["kind"], case["id"]
            assert str(caught.value) == expect["error"]["message"], case["id"]
        ran += 1
    assert ran == len(CASES) == 28


def test_the_context_that_a_dataset_function_gets_follows_the_same_rule() -> None:
    for case in CASES:
        strategy = tdi.Strategy(devices=["cpu"] * case["num_replicas_in_sync"])
        seen: list[tdi.InputContext] = []

        def dataset_fn(context: tdi.InputContext, seen: list[tdi.InputContext] = seen) -> list[torch.Tensor]:
            seen.append(context)
            return [torch.zeros(1)]

        strategy.distribute_datasets_from_function(dataset_fn)
        (context,) = seen
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        assert context.num_replicas_in_sync == case["num_replicas_in_sync"]
