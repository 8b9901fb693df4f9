"""The devices of this process, and their streams, events and pinned memory, through torch's generic API.

The generic API (``torch.accelerator``, ``torch.Stream``, ``torch.Event``) works for any accelerator that torch knows. A
stream is made current by ``set_stream``, not by ``with stream:``. The ``with`` statement exists only in newer versions,
and keeps its state in the stream object, which two threads share here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from torchdistinput.batches.pytree import moves_itself
from torchdistinput.devices.copy_ahead import Copier, DirectCopier, Handling, HostCopier, StreamCopier
from torchdistinput.errors import InputError

# Accelerators whose torch backend has a single stream (`torch.Stream(device)` cannot make a second one), with the
# dtypes that they do not support.
_ONE_STREAM = {"mps": frozenset({torch.float64, torch.complex128})}


@final
@dataclass(frozen=True)
class Accelerators:
    """The accelerators of this machine that torch can use.

    Args:
      kind: the device type, for example ``"cuda"``; ``None`` if there is none.
      count: how many are visible to this process.
    """

    kind: str | None
    count: int

    @staticmethod
    def detect() -> Accelerators:
        """The accelerators that torch reports."""
        if not torch.accelerator.is_available():
            return Accelerators(None, 0)
        accelerator = torch.accelerator.current_accelerator()
        return Accelerators(None if accelerator is None else accelerator.type, torch.accelerator.device_count())

    def describe(self) -> str:
        """The accelerators in words, for messages."""
        if self.kind is None:
            return "no accelerator, only the CPU"
        last = "" if self.count == 1 else f" to {self.kind}:{self.count - 1}"
        return f"{self.count} accelerator{'s' * (self.count != 1)} of kind {self.kind} ({self.kind}:0{last})"


def resolve_devices(
    devices: Sequence[str | torch.device] | None, local_rank: int, *, found: Accelerators | None = None
) -> tuple[torch.device, ...]:
    """The devices of this process, one per local replica; each one is known to exist.

    Local: no communication. The CPU may be named several times (several replicas in one process, for tests). An
    accelerator may not: two replicas on it would only share its time, and collectives between them cannot work.

    Args:
      devices: the user's argument. ``None`` is one device: the accelerator with the index ``local_rank``, or the CPU
        where there is no accelerator. ``"cuda"`` without an index gets the index ``local_rank``.
      local_rank: this process's number on its machine.
      found: the accelerators to choose from; by default those of this machine.

    Raises:
      TypeError: if ``devices`` is not a sequence of names or devices.
      ValueError: if there is no device in ``devices``, one does not exist, or an accelerator is named twice.
    """
    found = Accelerators.detect() if found is None else found
    if devices is None:
        if found.kind is None:
            return (torch.device("cpu"),)
        devices = [found.kind]
    if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence):
        raise TypeError(
            f"devices={devices!r} is a {type(devices).__name__}; a sequence with one device per local replica is "
            f"needed, for example devices=[{str(devices)!r}]."
        )
    if not devices:
        raise ValueError("devices is empty; name one device per local replica, or leave it out (None) for the default.")
    resolved = tuple(_resolve_one(device, local_rank, found) for device in devices)
    for device in resolved:
        if device.type != "cpu" and resolved.count(device) > 1:
            raise ValueError(
                f"devices names {device} {resolved.count(device)} times; an accelerator holds one replica. Found: "
                f"{found.describe()}. Name different ones, or use several CPU replicas."
            )
    return resolved


def _resolve_one(name: str | torch.device, local_rank: int, found: Accelerators) -> torch.device:
    if not isinstance(name, str | torch.device):
        raise TypeError(
            f"devices holds {name!r}, a {type(name).__name__}; a name such as 'cpu' or 'cuda:0', or a torch.device, is "
            "needed."
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"devices holds {str(name)!r}, which is no device name of this torch. Found: {found.describe()}."
        ) from error
    named: int | None = device.index  # torch's types leave out the None
    if device.type == "cpu":
        if named not in (None, 0):
            raise ValueError(f"devices holds {str(name)!r}; torch has one CPU device. Write 'cpu', as often as needed.")
        return torch.device("cpu")
    if device.type != found.kind:
        usable = "'cpu'" if found.kind is None else f"'cpu' or '{found.kind}'"
        raise ValueError(f"devices holds {str(name)!r}, but this process found {found.describe()}. Use {usable}.")
    index = local_rank if named is None else named
    if index >= found.count:
        reason = f" (the index is this process's local rank, {local_rank})" if named is None else ""
        raise ValueError(
            f"there is no device {device.type}:{index}{reason}: this process found {found.describe()}. Start at most "
            f"{found.count} process(es) per machine, or name the devices, for example devices=['{device.type}:0'] "
            "where the launcher shows each process only its own device."
        )
    return torch.device(device.type, index)


def set_current(device: torch.device) -> None:
    """Makes an accelerator the current one of the calling thread; on the CPU there is nothing to do.

    A thread that works for an accelerator calls this first: a new thread starts on index 0, and merely switching back
    to that index would open a context there, some hundred MB for every process of the machine.
    """
    if device.type != "cpu":
        torch.accelerator.set_stream(torch.accelerator.current_stream(device))  # sets the index too, in every version


def streams_here(devices: Sequence[torch.device]) -> Callable[[int], None]:
    """The calling thread's streams, for another thread that works in its place. Local.

    A tensor belongs to the stream that was current when it was made: on another stream it may be read before it is
    written. A new thread starts on the default streams.

    Args:
      devices: the devices; the CPU has no streams.

    Returns:
      A function for the other thread. It makes these streams the thread's current ones, and the device at the given
      place its current device.
    """
    streams = [None if device.type == "cpu" else torch.accelerator.current_stream(device) for device in devices]

    def enter(place: int) -> None:
        for stream in (*streams, streams[place]):
            if stream is not None:
                torch.accelerator.set_stream(stream)  # sets the index too, in every version

    return enter


def default_state(device: torch.device) -> torch.Tensor:
    """The state of a device's default random generator: uint8, on the CPU, a copy. Local.

    Args:
      device: a device on which random numbers can be drawn.
    """
    if device.type == "cpu":
        return torch.get_rng_state()
    module = torch.get_device_module(device)
    state: torch.Tensor = module.get_rng_state() if device.type in _ONE_STREAM else module.get_rng_state(device)
    return state


def new_generator(device: torch.device) -> torch.Generator:
    """A random generator of a device. Local.

    Raises:
      InputError: no random numbers can be drawn there.
    """
    try:
        return torch.Generator(device)
    except RuntimeError as error:
        raise InputError(
            f"the default device is {device}, where no random numbers can be drawn ({error}), but torch draws a seed "
            "for the loader there when an epoch begins. Begin it outside of `with torch.device(...)`, or after "
            "torch.set_default_device('cpu')."
        ) from error


@final
class TorchStreams:
    """One accelerator through torch's generic API. See ``StreamBackend`` for the calls.

    Args:
      device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter_thread(self, stream: torch.Stream) -> None:
        """Makes a stream and its accelerator the current ones of the calling thread; see ``set_current``."""
        torch.accelerator.set_stream(stream)

    def new_stream(self) -> torch.Stream:
        """A stream from torch's pool of streams."""
        return torch.Stream(self._device)

    def current_stream(self) -> torch.Stream:
        """The current stream of this accelerator, whichever device is current in the calling thread."""
        return torch.accelerator.current_stream(self._device)

    def record(self, stream: torch.Stream) -> torch.Event:
        """Records a new event each time, so that no wait can refer to a later recording."""
        event = torch.Event(self._device)
        event.record(stream)
        return event

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Makes the stream wait for the event on the device; the host does not wait."""
        stream.wait_event(event)

    def done(self, event: torch.Event) -> bool:
        """Whether the event is done, without waiting."""
        return event.query()

    def block(self, event: torch.Event) -> None:
        """Waits on the host."""
        event.synchronize()

    def handling(self, leaf: Any) -> Handling:
        """Plain dense tensors in host memory are copied ahead; other tensors are moved at hand-over."""
        if not isinstance(leaf, torch.Tensor) or leaf.device == self._device:
            return Handling.STAYS
        dense = leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized)
        ahead = dense and type(leaf) is torch.Tensor and leaf.device.type == "cpu"
        return Handling.AHEAD if ahead else Handling.LATE

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pins through torch's cache of pinned blocks.

        An empty tensor has no memory to pin. A tensor with holes is copied without them: torch would copy it through
        pageable memory, for which the calling thread waits.
        """
        if tensor.numel() == 0:
            return tensor
        if not tensor.is_contiguous() and _has_holes(tensor):
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def empty_like(self, tensors: Sequence[torch.Tensor], stream: torch.Stream) -> list[torch.Tensor]:
        """Tensors on the device, from the pool of the stream: torch allocates from the current stream's pool."""
        with _current(stream):
            return [torch.empty_like(tensor, device=self._device) for tensor in tensors]

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: torch.Stream) -> None:
        """Queues copies on the stream; asynchronous where the source is pinned or on the device."""
        with _current(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

    def lend(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """Tells the allocator that the stream uses the tensor. Sparse and nested tensors are left to torch's rule."""
        if tensor.layout is torch.strided and not tensor.is_nested:
            tensor.record_stream(stream)

    def move_now(self, leaf: Any) -> Any:
        """Moves a leaf on the current stream, as the user's own ``.to`` would."""
        return leaf.to(self._device) if moves_itself(leaf) or self.handling(leaf) is Handling.LATE else leaf


def _has_holes(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor leave gaps in its memory, in every order of the dimensions."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach + 1 != tensor.numel()


@contextlib.contextmanager
def _current(stream: torch.Stream) -> Iterator[None]:
    """The stream is current inside; the thread's own device and the streams of both devices are restored."""
    of_thread = torch.accelerator.current_stream()
    if of_thread == stream:
        yield
        return
    of_device = of_thread if of_thread.device == stream.device else torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(of_device)
        if of_thread is not of_device:
            torch.accelerator.set_stream(of_thread)


def make_copier(device: torch.device) -> Copier:
    """The copier for a device. The consumer's thread calls it.

    Local: no communication.

    Args:
      device: one of the devices of ``resolve_devices``.
    """
    if device.type == "cpu":
        return HostCopier()
    if device.type in _ONE_STREAM:
        return DirectCopier(device, _ONE_STREAM[device.type])
    return StreamCopier(TorchStreams(device))
