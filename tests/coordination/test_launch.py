"""Which backends the default group gets, and which devices' tensors a group takes as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from torchdistinput.coordination import launch
from torchdistinput.coordination.launch import Members


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends for three kinds of accelerator, of which this torch lacks the second one's."""
    found = {"cpu": "gloo", "first": "firstccl", "second": "secondccl", "third": "gloo"}

    def backend_for(device: str) -> str:
        if device not in found:
            raise ValueError(f"Default backend not registered for device : {device}")
        return found[device]

    monkeypatch.setattr(dist, "get_default_backend_for_device", backend_for)
    monkeypatch.setattr(dist.Backend, "backend_capability", {"gloo": ["cpu", "cuda"], "firstccl": ["first"]})
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend in ("gloo", "firstccl"))


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(
    ("accelerator", "backends"),
    [
        (None, "gloo"),
        ("first", "cpu:gloo,first:firstccl"),
        ("second", "gloo"),  # torch was built without it
        ("third", "gloo"),
        ("unknown", "gloo"),
    ],
)
def test_an_accelerator_without_a_backend_leaves_the_group_to_the_cpu(accelerator: str | None, backends: str) -> None:
    assert launch.backends_for(accelerator) == backends


@pytest.fixture
def group_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets the default group have these backends, and the ranks 0 to 3."""

    def make(backends: str) -> None:
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
        monkeypatch.setattr(launch, "global_ranks", lambda group: (0, 1, 2, 3))

    return make


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(
    ("backends", "kind", "ranks", "carried"),
    [
        ("cpu:gloo,first:firstccl", "first", (0, 1, 2, 3), True),
        ("first:firstccl", "first", (0, 1, 2, 3), True),
        ("cpu:gloo,cuda:gloo", "cuda", (0, 1, 2, 3), True),  # what a plain "gloo" stands for
        ("cpu:gloo,cuda:gloo", "first", (0, 1, 2, 3), False),
        ("cpu:gloo,third:gloo", "third", (0, 1, 2, 3), False),  # gloo does not know that device
        ("cpu:gloo,first:firstccl", "first", (0, 1), False),  # a mesh of some ranks
        ("cpu:gloo,first:firstccl", "first", (0, 2, 1, 3), False),  # or in another order
    ],
)
def test_a_group_carries_what_its_backend_knows_for_its_own_ranks(
    group_of: Callable[[str], None], backends: str, kind: str, ranks: tuple[int, ...], *, carried: bool
) -> None:
    group_of(backends)
    members = Members(ranks=ranks, workers=tuple(range(len(ranks))), rank=0)
    assert launch.carries(None, members, kind) is carried
