"""Devices are checked before anything is built on them, and what torch offers on the CPU is as the door expects it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torchdistinput.devices.accelerators import (
    Accelerators,
    TorchStreams,
    _current,
    _has_holes,
    resolve_devices,
    set_current,
    streams_here,
)
from torchdistinput.devices.copy_ahead import Handling

NONE = Accelerators(None, 0)
ONE = Accelerators("cuda", 1)
FOUR = Accelerators("cuda", 4)


@pytest.mark.parametrize(
    ("devices", "local_rank", "found", "names"),
    [
        (None, 2, FOUR, ["cuda:2"]),
        (None, 2, NONE, ["cpu"]),
        (["cuda"], 3, FOUR, ["cuda:3"]),
        ([torch.device("cuda"), "cuda:0", "cpu"], 1, FOUR, ["cuda:1", "cuda:0", "cpu"]),
        (["cpu", "cpu:0", torch.device("cpu")], 5, NONE, ["cpu", "cpu", "cpu"]),
    ],
)
def test_a_device_that_is_not_named_in_full_is_that_of_the_local_rank(
    devices: Any, local_rank: int, found: Accelerators, names: list[str]
) -> None:
    assert list(map(str, resolve_devices(devices, local_rank, found=found))) == names


@pytest.mark.parametrize(
    ("devices", "found", "error", "message"),
    [
        (["cuda"], NONE, ValueError, r"'cuda', but this process found no accelerator, only the CPU\. Use 'cpu'"),
        (["xpu:0"], FOUR, ValueError, r"'xpu:0', but this process found 4 accelerators of kind.*Use 'cpu' or 'cuda'"),
        (["cuda:4"], FOUR, ValueError, r"no device cuda:4: this process found 4 accelerators.*at most 4 process"),
        (None, ONE, ValueError, r"no device cuda:2 \(the index is this process's local rank, 2\): .* found 1 accel"),
        (["cuda"], ONE, ValueError, r"local rank, 2.*devices=\['cuda:0'\]"),
        (["cpu:1"], NONE, ValueError, r"'cpu:1'; torch has one CPU device"),
        (["warp"], FOUR, ValueError, r"'warp', which is no device name of this torch\. Found: 4 accelerators"),
        (["meta"], FOUR, ValueError, r"'meta', but this process found"),
        ([], FOUR, ValueError, r"devices is empty"),
        (
            ["cuda", "cuda:2"],
            FOUR,
            ValueError,
            r"names cuda:2 2 times.*4 accelerators of kind cuda \(cuda:0 to cuda:3\)",
        ),
        ("cuda", FOUR, TypeError, r"a sequence with one device per local replica is needed"),
        (3, FOUR, TypeError, r"a sequence with one device per local replica is needed"),
        ([0], FOUR, TypeError, r"devices holds 0, a int"),
    ],
)
def test_a_device_that_does_not_exist_is_refused_with_what_was_found(
    devices: Any, found: Accelerators, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_devices(devices, 2, found=found)


def test_what_was_found_on_this_machine_can_be_used() -> None:
    found = Accelerators.detect()
    assert (found.kind is None) == (found.count == 0)
    for device in resolve_devices(None, 0):
        set_current(device)
        assert torch.zeros(2, device=device).device == device


def test_plain_dense_host_tensors_go_ahead_and_special_ones_late() -> None:
    streams = TorchStreams(torch.device("cuda", 0))
    dense = torch.arange(6).reshape(2, 3)
    assert streams.handling(dense) is Handling.AHEAD
    assert streams.handling(dense.t()) is Handling.AHEAD
    assert streams.handling(dense[:0]) is Handling.AHEAD
    assert streams.handling(dense.to_sparse()) is Handling.LATE
    assert streams.handling(torch.nn.Parameter(torch.ones(2))) is Handling.LATE
    assert streams.handling(torch.ones(2, device="meta")) is Handling.LATE  # elsewhere: the consumer's `.to` decides
    assert streams.handling(["a", "b"]) is Handling.STAYS
    assert streams.handling(3) is Handling.STAYS
    assert TorchStreams(torch.device("cpu")).handling(dense) is Handling.STAYS
    assert streams.pin(dense[:0]).numel() == 0


SHAPES = {
    "whole": (torch.zeros(4, 6), False),
    "transposed": (torch.zeros(4, 6).t(), False),
    "channels last": (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), False),
    "rows": (torch.zeros(9, 6)[2:5], False),
    "scalar": (torch.zeros(()), False),
    "every other": (torch.zeros(9)[::2], True),
    "columns": (torch.zeros(9, 6)[:, 1:], True),
    "expanded": (torch.zeros(1, 6).expand(4, 6), True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_has_holes_is_pinned_without_them_and_all_else_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, holes = SHAPES[name]
    empty_like, made = torch.empty_like, list[torch.Tensor]()

    def pinned(like: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made.append(empty_like(like, device=device))
        return made[-1]

    monkeypatch.setattr(torch, "empty_like", pinned)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    found = TorchStreams(torch.device("cuda", 0)).pin(tensor)
    assert found is (made[0] if holes else tensor)
    assert torch.equal(found, tensor)
    assert not _has_holes(found)
    assert found.stride() == empty_like(tensor).stride()  # as that of the tensor on the device, or it is no one copy


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", ["side", "user's"])
def test_a_stream_is_current_only_inside_and_the_threads_device_comes_back(
    index: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = FakeAccelerator()
    monkeypatch.setattr(torch.accelerator, "current_stream", accelerator.current_stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", accelerator.set_stream)
    accelerator.set_stream(FakeStream(torch.device("cuda", 1), "user's"))
    accelerator.set_stream(FakeStream(torch.device("cuda", 0), "other"))
    accelerator.index = index
    before = (accelerator.index, dict(accelerator.streams))
    with _current(FakeStream(torch.device("cuda", 1), name)):  # type: ignore[arg-type]
        assert accelerator.index == 1
        assert accelerator.current_stream().name == name
    assert (accelerator.index, accelerator.streams) == before
    set_current(torch.device("cuda", 1))
    assert accelerator.index == 1
    assert accelerator.current_stream().name == "user's"


def test_a_thread_that_works_in_anothers_place_gets_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator()
    monkeypatch.setattr(torch.accelerator, "current_stream", accelerator.current_stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", accelerator.set_stream)
    first, second = FakeStream(torch.device("cuda", 0), "one"), FakeStream(torch.device("cuda", 1), "other")
    for stream in (first, second):
        accelerator.set_stream(stream)
    enter = streams_here([torch.device("cuda", 0), torch.device("cpu"), torch.device("cuda", 1)])
    for place, index in enumerate((0, 1, 1)):
        accelerator.index, accelerator.streams = 0, {}
        enter(place)
        assert (accelerator.index, accelerator.streams) == (index, {0: first, 1: second})


@dataclass(frozen=True)
class FakeStream:
    device: torch.device
    name: str


class FakeAccelerator:
    """The current device and streams of one thread, as ``torch.accelerator`` keeps them."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, FakeStream] = {}

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return self.streams[self.index if device is None else device.index]

    def set_stream(self, stream: FakeStream) -> None:
        self.index = stream.device.index
        self.streams[self.index] = stream
