"""Numbers as data: what all tests read that need no other kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, final

from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from torchdistinput import Fragment

Acts = Mapping[int, Callable[[], object]]


@final
class Numbers(Dataset[int]):
    """0 .. n-1; at some of them something happens, or at each one. ``asked`` has those that were given here."""

    def __init__(self, n: int, at: Acts = MappingProxyType({}), each: Callable[[int], object] = int) -> None:
        self.n, self.at, self.each = n, dict(at), each
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.each(index)
        self.at.get(index, int)()
        self.asked.append(index)
        return index


@final
class Count(IterableDataset[int]):
    """0 .. n-1; with DataLoader workers each yields its share, so the batches are those of one process."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, stride = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(start, self.n, stride))


@final
class Repeated(IterableDataset[int]):
    """0 .. n-1 in every loader worker, as a plain iterable does."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


@final
class Sized(IterableDataset[int]):
    """The same, which says its length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


@final
class Stream(IterableDataset[Any]):
    """What a function gives, for each loop anew."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


@final
class Order(Sampler[Any]):
    """The order that a function gives for an epoch, which it is told."""

    def __init__(self, n: int, of: Callable[[int], Iterable[Any]]) -> None:
        self.n, self.of, self.epoch = n, of, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        return iter(self.of(self.epoch))


@final
class Mapped(Dataset[Any]):
    """What a function gives for each of 0 .. n-1."""

    def __init__(self, n: int, of: Callable[[Any], Any]) -> None:
        self.n, self.of = n, of

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.of(index)


@final
class Together(Dataset[Any]):
    """What a function gives for some of 0 .. n-1 at once; none of them is read by itself."""

    def __init__(self, n: int, of: Callable[[list[int]], list[Any]]) -> None:
        self.n, self.of = n, of

    def __len__(self) -> int:
        return self.n

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return self.of(indices)


@final
class Kept(IterableDataset[Any]):
    """What a function gives for each of 0 .. n-1; its own state is its place, and it takes any state."""

    def __init__(self, n: int, of: Callable[[int], Any] = int) -> None:
        self.n, self.of, self.next = n, of, 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < self.n:
            self.next += 1
            yield self.of(self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: Any) -> None:
        found = state.get("next") if isinstance(state, dict) else None
        self.next = found if isinstance(found, int) else 0

    def shard(self, num_shards: int, index: int) -> Kept:
        return Kept(len(range(index, self.n, num_shards)), lambda number: self.of(index + num_shards * number))


@final
class Fragments:
    """Fragments of numbers in blocks: the first number of each, which names it, with how many it has."""

    def __init__(self, sizes: Mapping[int, int], block: int = 1, of: Callable[[list[int]], Any] = list) -> None:
        self.sizes, self.block, self.of = sizes, block, of

    def fragments(self) -> list[Fragment]:
        return [Fragment(str(first), size) for first, size in self.sizes.items()]

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[int, Any]]:
        first = int(fragment.name)
        for at in range(position or 0, self.sizes[first], self.block):
            yield at, self.of([*range(first + at, first + min(at + self.block, self.sizes[first]))])
