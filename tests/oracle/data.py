"""The data of a program, as users give it; and what comes back, as samples and structure. A sample is a number."""

from __future__ import annotations

import gzip
import random
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import fsspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

import torchdistinput as tdi
from tests.oracle.laws import (
    Changes,
    Samples,
    batched,
    cost_of,
    files_of,
    function_batches,
    interleaved,
    mixed,
    parts_of,
    ready_batches,
)
from tests.oracle.program import Program
from torchdistinput import readers
from torchdistinput.sources.kernel.epoch_order import FileRecord, SourceSample

# What a batch is


class Wide(NamedTuple):
    """A class of the user's."""

    ids: torch.Tensor
    wide: torch.Tensor


@dataclass(frozen=True)
class Collate:
    """A kind of batch.

    Args:
      sample: makes a sample of a number.
      batch: makes a batch of a list of samples.
      ids: the numbers in a batch.
      certain: whether a rule tells what a batch without samples is.
      ready: whether a batch can be cut where the source makes it.
      only_ready: whether only the source makes such a batch.
      pads: whether it can be padded.
      refused: whether it has what each batch has of its own, so that none can be made without samples.
    """

    sample: Callable[[int], Any]
    batch: Callable[[list[Any]], Any]
    ids: Callable[[Any], list[int]]
    certain: bool = True
    ready: bool = True
    only_ready: bool = False
    pads: bool = True
    refused: bool = False


def _itself(number: int) -> Any:
    return number


def _pair(number: int) -> Any:
    return number, torch.full((2,), float(number))


def _seeded(number: int) -> Any:
    return number, 0


def _named(number: int) -> Any:
    sample = {"id": number, "name": f"s{number}"}
    return dict(reversed(sample.items())) if number % 3 == 1 else sample


def _wide(numbers: list[int]) -> Any:
    ids = torch.tensor(numbers, dtype=torch.int64)
    return Wide(ids, ids[:, None] * torch.ones(1, 3, dtype=torch.float64))


def _images(numbers: list[int]) -> Any:
    return torch.tensor(numbers, dtype=torch.int16)[:, None, None].expand(-1, 3, 2).contiguous()


def _counted(numbers: list[int]) -> Any:
    return {"ids": _tensor(numbers), "count": len(numbers), "mean": sum(numbers) / max(len(numbers), 1)}


def _square(numbers: list[int]) -> Any:
    ids = _tensor(numbers)
    return {"ids": ids, "sums": ids + ids[:, None]}


def _nested(numbers: list[int]) -> Any:
    parts = [torch.zeros(1 + number % 3) for number in numbers]
    return {"ids": _tensor(numbers), "parts": torch.nested.nested_tensor(parts, layout=torch.jagged)}


def _time_first(numbers: list[int]) -> Any:
    return torch.tensor(numbers)[None].expand(2, -1).contiguous()


def _tensor(numbers: list[int]) -> Any:
    return torch.tensor(numbers, dtype=torch.int64)


class Boxed:
    """A batch that nobody can look into."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


def _columns(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def _arrays(numbers: list[int]) -> Any:
    return {"ids": np.array(numbers, np.int64), "when": np.array(numbers, "datetime64[s]")}


def _table(numbers: list[int]) -> Any:
    ids = np.array(numbers, np.int64)
    return {"ids": ids, "halves": ids[:, None] / np.ones((1, 2), np.float32)}


def _ids_of_table(batch: Any) -> list[int]:
    ids: list[int] = batch["ids"].tolist()
    assert batch["halves"].tolist() == [[float(number)] * 2 for number in ids]
    return ids


def _columns_alike(numbers: list[int]) -> Any:
    ids = torch.tensor(numbers, dtype=torch.int64)
    return {"ids": ids, "minus": -ids}


def _ids_of_columns_alike(batch: Any) -> list[int]:
    assert batch["minus"].layout is torch.strided
    assert torch.equal(batch["ids"], -batch["minus"])
    assert batch["ids"].dtype == batch["minus"].dtype == torch.int64
    ids: list[int] = batch["ids"].tolist()
    return ids


def _texts(numbers: list[int]) -> Any:
    ids = torch.tensor(numbers, dtype=torch.int64)
    return {"ids": ids, "names": [f"s{number}" for number in numbers], "twice": [ids, 2 * ids]}


def _noted(numbers: list[int]) -> Any:
    return {"ids": torch.tensor(numbers, dtype=torch.int64), "note": "the same", "of": len(numbers)}


def _ids_of_texts(batch: Any) -> list[int]:
    ids: list[int] = batch["ids"].tolist()
    assert batch["names"] == [f"s{number}" for number in ids]
    assert [each.tolist() for each in batch["twice"]] == [ids, [2 * each for each in ids]]
    return ids


def _ids_of_pairs(batch: Any) -> list[int]:
    ids, vectors = batch
    assert [vector.tolist() for vector in vectors] == [[float(number)] * 2 for number in ids]
    return [int(number) for number in ids]


def _ids_of_seeded(batch: Any) -> list[int]:
    ids: list[int] = batch[0].tolist()
    return ids


def _ids_by_name(batch: Any) -> list[int]:
    ids: list[int] = batch["ids"].tolist()
    return ids


def _ids_of_names(batch: Any) -> list[int]:
    ids: list[int] = batch["id"].tolist()
    assert all(name in {f"s{number}", ""} for number, name in zip(ids, batch["name"], strict=True))  # "": padded
    return ids


COLLATES: dict[str, Collate] = {
    "default": Collate(_itself, default_collate, lambda batch: batch.tolist()),
    "pair": Collate(_pair, default_collate, _ids_of_pairs, ready=False),
    "seeded": Collate(_seeded, default_collate, _ids_of_seeded, ready=False),
    "augmented": Collate(_seeded, default_collate, _ids_of_seeded, ready=False),
    "named": Collate(_named, default_collate, _ids_of_names, ready=False),
    "wide": Collate(_itself, _wide, lambda batch: batch.ids.tolist()),
    "images": Collate(_itself, _images, lambda batch: batch[:, 0, 0].tolist()),
    "objects": Collate(_itself, list, list, certain=False, ready=False),
    "boxed": Collate(_itself, Boxed, lambda batch: batch.numbers, False, ready=False, pads=False, refused=True),
    "counted": Collate(_itself, _counted, _ids_by_name, certain=False, pads=False, refused=True),
    "square": Collate(_itself, _square, _ids_by_name, False, ready=False, pads=False, refused=True),
    "nested": Collate(_itself, _nested, _ids_by_name, False, ready=False, pads=False, refused=True),
    "columns": Collate(_pair, _columns, _ids_of_pairs, certain=False, ready=False, pads=False),
    "arrays": Collate(_itself, _arrays, _ids_by_name, certain=False, ready=False, pads=False),
    "table": Collate(_itself, _table, _ids_of_table, only_ready=True),
    "alike": Collate(_itself, _columns_alike, _ids_of_columns_alike, only_ready=True),
    "texts": Collate(_itself, _texts, _ids_of_texts, only_ready=True),
    "noted": Collate(_itself, _noted, _ids_by_name, certain=False, only_ready=True),
    "time first": Collate(_itself, _time_first, lambda batch: batch[0].tolist(), ready=False, pads=False),
}

# What is given


BUCKETS: Final = (3, 5)
"""Boundaries of the lengths of samples in a batch."""


class CannotRead(Exception):
    """Of a bad sample."""


class Items(Dataset[Any]):
    """Map-style; it divides itself as Hugging Face datasets do."""

    def __init__(self, program: Program, numbers: Sequence[int]) -> None:
        self.program, self.numbers = program, numbers
        self.asked: Final = deque[int]()  # of a list the ranks would compare the entries
        # What a rank notes as it reads, in lists of as many entries as there are samples.
        self.cache: list[Any] = []
        self.scores: list[float] = []
        self.rows: list[dict[str, int]] = []
        self.make_room()

    def make_room(self) -> None:
        """For notes on each sample."""
        more = range(len(self.rows), len(self.numbers))
        self.cache += [None for _ in more]
        self.scores += [0.0 for _ in more]
        self.rows += [{"number": number, "reads": 0} for number in more]

    def note(self, index: int) -> None:
        """Notes that a sample is read."""
        self.asked.append(self.numbers[index])
        self.cache[index] = 1
        self.scores[index] += 0.5
        self.rows[index]["reads"] += 1

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        self.note(index)
        return sample_of(self.program, self.numbers[index])

    def shard(self, num_shards: int, index: int) -> Items:
        return type(self)(self.program, self.numbers[index::num_shards])


class Wrapped(Items):
    """Map-style, over a part of something."""

    def __init__(self, program: Program, numbers: Sequence[int]) -> None:
        super().__init__(program, ())
        self.inner: Subset[int] = Subset(range(64), list(numbers))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(self.inner[index])
        return sample_of(self.program, self.inner[index])


class ByLists(Items):
    """Each index is a list, and gives a batch."""

    def __getitem__(self, indices: Any) -> Any:
        kind = COLLATES[self.program.collate]
        return kind.batch([sample_of(self.program, self.numbers[index]) for index in indices])


class Plain:
    """An iterable that torch does not know."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


class Listed(Sampler[int]):
    """Indices in order, which nobody but the user knows; from a batch on another one, where it is odd."""

    def __init__(self, program: Program) -> None:
        length, (flaw, at) = len(program.numbers), program.flaw
        self.length, self.order = length, list(range(length))
        if flaw == "ends":
            del self.order[at * program.batch :]
        if flaw == "order":
            self.order = self.order[1:] + self.order[:1]
        if flaw == "draws" and at * program.batch < length:
            self.order[at * program.batch] = (at * program.batch + 1) % length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class Together(Items):
    """Map-style, asked for several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Told:
    """Turns samples by the epoch that it is told; see ``Program.shows``. Reads the epoch at each sample."""

    program: Program
    _told = 0

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch

    @property
    def epoch(self) -> int:
        if self.program.shows == "nothing":
            raise AttributeError("epoch")
        return self._told

    def turned(self, numbers: Iterable[int]) -> Iterator[int]:
        counts, epoch, length = self.program.shows == "counts", self._told, len(self.program.numbers)
        self._told += 2 * counts
        return ((number + (epoch if counts else self._told)) % length for number in numbers)


class ToldItems(Told, Items):
    def __getitem__(self, index: int) -> Any:
        (number,) = self.turned([self.numbers[index]])
        self.asked.append(number)
        return sample_of(self.program, number)


class ToldSampler(Told):
    def __init__(self, program: Program) -> None:
        self.program = program

    def __len__(self) -> int:
        return len(self.program.numbers)

    def __iter__(self) -> Iterator[int]:
        return self.turned(range(len(self)))


class Stream(IterableDataset[Any]):
    """Samples in order; with loader workers each yields its share."""

    def __init__(self, program: Program, numbers: Sequence[int]) -> None:
        self.program, self.numbers = program, numbers

    def __iter__(self) -> Iterator[Any]:
        if self.program.flaw[0] == "opens":
            raise CannotRead("nothing at all")
        info = get_worker_info()
        return self._read(list(self.numbers if info is None else self.numbers[info.id :: info.num_workers]))

    def _read(self, numbers: Iterable[int]) -> Iterator[Any]:
        for number in numbers:
            yield sample_of(self.program, number)

    def state_dict(self, place: int) -> dict[str, Any]:
        """It needs an argument, so it is not that of a loader's state."""
        raise NotImplementedError(place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError(state)

    def shard(self, num_shards: int, index: int) -> Stream:
        return type(self)(self.program, self.numbers[index::num_shards])


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.numbers)


class ToldStream(Told, SizedStream):
    def _read(self, numbers: Iterable[int]) -> Iterator[Any]:
        return super()._read(self.turned(numbers))


def _as_odd(batch: Any, how: str) -> Any:
    """See ``Program.odd_batch``."""
    name, leaf = next(reversed(batch.items()))
    others = {key: value for key, value in batch.items() if key != name}
    if how == "missing":
        return others
    if how == "keys":
        return {name: leaf, **others}
    if how == "uneven":
        return {**others, name: leaf[:-1]}
    if how == "layout":
        return {**others, name: leaf.to_sparse()}
    ids = batch["ids"]
    return {**batch, "ids": ids.astype(np.int32) if isinstance(ids, np.ndarray) else ids.int()}


MORE_OF_A_STATE: dict[str, Any] = {
    "$": "tuple",
    "pairs": [(1, b"2"), {3: None, "$": 4}],
    "tensors": [torch.tensor([1 + 2j]).conj(), torch.zeros(2, 0), torch.tensor([True])],
    "array": np.arange(4, dtype=">i2").reshape(2, 2)[:, ::-1],
}
"""What a user may have in a state."""


class Kept(Stream):
    """The same with a state of its own, from which its next iterator begins."""

    place = 0

    def __iter__(self) -> Iterator[Any]:
        return self._read(list(self.numbers)[self.place :])  # where it begins is read now

    def _read(self, numbers: Iterable[int]) -> Iterator[Any]:
        for number in numbers:
            self.place += 1
            yield sample_of(self.program, number)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override] # a state of a loader
        return {"place": self.place, **MORE_OF_A_STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state.pop("place")
        assert str(state) == str(MORE_OF_A_STATE)


class Ready(IterableDataset[Any]):
    """Ready batches."""

    def __init__(self, program: Program, batches: Sequence[Samples]) -> None:
        self.program, self.batches = program, batches

    def __iter__(self) -> Iterator[Any]:
        make = _tensor if self.program.collate == "default" else COLLATES[self.program.collate].batch
        place, how = self.program.odd_batch
        for number, batch in enumerate(self.batches):
            made = make(batch)
            yield _as_odd(made, how) if how and number == place else made

    def shard(self, num_shards: int, index: int) -> Ready:
        return type(self)(self.program, self.batches[index::num_shards])


class SizedReady(Ready):
    def __len__(self) -> int:
        return len(self.batches)


class ToldReady(Told, SizedReady):
    def __iter__(self) -> Iterator[Any]:
        make = _tensor if self.program.collate == "default" else COLLATES[self.program.collate].batch
        numbers = self.turned(chain(*self.batches))
        return (make([*islice(numbers, len(batch))]) for batch in self.batches)


class Repeated(Sampler[int]):
    """Draws with replacement, all at once, one sample more than there are."""

    def __init__(self, length: int, generator: torch.Generator | None) -> None:
        self.length, self.generator = length, generator

    def __len__(self) -> int:
        return self.length + 1

    def __iter__(self) -> Iterator[int]:
        yield from torch.randint(self.length, (self.length + 1,), generator=self.generator).tolist()


class Drawn(Sampler[int]):
    """Draws at each sample."""

    def __init__(self, length: int, generator: torch.Generator | None) -> None:
        self.length, self.generator = length, generator

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, (), generator=self.generator))


class AskedAgain(BaseException):
    """An iterator was asked for more after it had failed."""


class Breaking:
    """An iterator that fails once."""

    def __init__(self, batches: Sequence[Samples]) -> None:
        self.left: Final = [*batches]

    def __iter__(self) -> Iterator[Samples]:
        return self

    def __next__(self) -> Samples:
        if not self.left:
            self.left.append([])
            raise CannotRead("no further batch")
        if not self.left[0]:
            raise AskedAgain
        return self.left.pop(0)


class Uneven(Sampler[list[int]]):
    """Batches of sizes 3, 1, ``batch``, 3, 1, ..."""

    def __init__(self, length: int, batch: int, flaw: tuple[str, int]) -> None:
        self.flaw = flaw
        self.generator = torch.Generator()  # else the default one is taken for drawn from, which threads share
        self.batches: list[list[int]] = []
        numbers = list(range(length))
        while numbers:
            size = (3, 1, batch)[len(self.batches) % 3]
            self.batches.append(numbers[:size])
            numbers = numbers[size:]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        flaw, at = self.flaw
        if flaw == "opens":
            raise CannotRead("no batches")
        return Breaking(self.batches[:at]) if flaw == "breaks" else iter(self.batches)


class Lines:
    """A source of fragments: its files are lists in memory."""

    def __init__(self, files: Sequence[Samples]) -> None:
        self.files = files

    def fragments(self) -> Sequence[tdi.Fragment]:
        return [tdi.Fragment(f"{number:02}", num_records=len(each)) for number, each in enumerate(self.files)]

    def read(self, fragment: tdi.Fragment, position: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        records = self.files[int(fragment.name)]
        for place in range(position or 0, len(records), 2):
            yield place, [str(each) for each in records[place : place + 2]]


def sample_of(program: Program, number: int) -> Any:
    if program.draws:
        torch.rand(())
    if number in program.bad:
        raise CannotRead(number)
    if program.draws_numbers:
        if program.collate == "augmented":
            assert torch.initial_seed() == tdi.sample_seed()
            return number, drawn_number()
        return number, tdi.sample_seed()
    sample = COLLATES[program.collate].sample(number)
    return dict(reversed(sample.items())) if program.flaw[0] == "keys" else sample


def drawn_number() -> int:
    """Drawn from all three global generators."""
    return int(torch.randint(2**20, ())) << 40 | random.getrandbits(20) << 20 | int(np.random.randint(2**20))


def _table_of(numbers: Iterable[int]) -> TensorDataset:
    return TensorDataset(torch.tensor(list(numbers), dtype=torch.int64))


@dataclass(frozen=True)
class Decode:
    """The ``map_fn`` of files."""

    program: Program

    def __call__(self, line: str) -> Any:
        return sample_of(self.program, int(line))


class Unmarked(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """A store that tells nothing of a file but its size."""

    protocol = "unmarked"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("unmarked://"))

    def info(self, path: Any, **more: Any) -> dict[str, Any]:
        return {key: value for key, value in super().info(path, **more).items() if key in {"name", "size", "type"}}

    def ukey(self, path: str) -> str:
        raise NotImplementedError

    def created(self, path: str) -> Any:
        raise NotImplementedError

    def modified(self, path: str) -> Any:
        raise NotImplementedError


fsspec.register_implementation("unmarked", Unmarked, clobber=True)


def write_files(program: Program, folder: Path, changes: str = "") -> None:
    """Its files, if it has any; see ``Turn.changes``."""
    for number, records in enumerate(files_of(program)):
        found = [*records, 1000 * number + 900] if changes == "longer" else records[:: -1 if changes else 1]
        text = "".join(f"{record}\n" for record in found).encode()
        path = folder / f"{number:02}.{program.files.format}"
        path.write_bytes(gzip.compress(text) if program.files.format == "txt.gz" else text)


def files_in(program: Program, folder: Path) -> Any:
    how, decode = program.files, Decode(program)
    more = {
        "map_fn": decode,
        "seed": program.seed,
        "cycle_length": how.cycle_length,
        "block_length": how.block_length,
        "shuffle_files": how.shuffle_files,
        "shuffle_buffer": how.shuffle_buffer,
    }
    if how.format == "fragments":
        more["shuffle_fragments"] = more.pop("shuffle_files")
        return tdi.FragmentDataset(Lines(files_of(program)), **more)  # type: ignore[arg-type]
    if how.part_bytes:
        more["fragment_bytes"] = how.part_bytes
    names: Any = str(folder / f"*.{how.format}")
    if not how.marked:
        names = [f"unmarked://{folder}/{number:02}.{how.format}" for number in range(len(program.sizes))]
    return tdi.FileDataset(names, readers.text_lines, **more)  # type: ignore[arg-type]


def mixture_of(program: Program, folder: Path, changes: Changes) -> tdi.Mixture:
    """Its sources, mixed by these weights."""
    how, decode = program.mixed, Decode(program)
    more: dict[str, Any] = {"seed": program.seed, "map_fn": decode, "shuffle_buffer": 3 if how.is_shuffled else 0}
    sources: dict[str, Any] = {}
    lengths: dict[str, Any] = {}
    for number, (kind, numbers) in enumerate(zip(how.kinds, files_of(program), strict=True)):
        name = f"{number:02}"
        lengths[name] = _cost_of_line
        if kind == "list":
            sources[name], lengths[name] = Items(program, numbers), [*map(cost_of, numbers)]
        elif kind == "file":
            sources[name] = tdi.FileDataset(str(folder / f"{name}.txt"), readers.text_lines, **more)
        else:
            sources[name] = tdi.FragmentDataset(Lines([numbers]), **more)
    weights = [(at, dict(zip(sources, those, strict=True))) for at, those in changes]
    return tdi.Mixture(
        sources,
        weights,
        unit="tokens" if how.tokens else "samples",
        lengths=lengths if how.tokens else None,
        stop=how.stop,
        num_samples=how.num_samples,
        seed=program.seed,
        shuffle=how.is_shuffled,
    )


def _cost_of_line(line: str) -> int:
    return cost_of(int(line))


def dataset_of(program: Program, folder: Path) -> Any:
    """The data itself."""
    numbers = program.numbers
    if program.data == "files":
        return files_in(program, folder)
    if program.data == "mixture":
        return mixture_of(program, folder, program.mixed.weights)
    if program.data == "ready":
        ready = {"": Ready, "length": SizedReady}.get(program.shows, ToldReady)
        return ready(program, ready_batches(program.sizes))
    if program.flaw[0] == "part":
        numbers = [number + 1 for number in numbers]
    if program.flaw[0] == "order" and program.data == "stream":
        numbers = numbers[::-1]
    if program.data == "table":
        return _table_of(numbers)
    if program.data == "joined":
        ends = accumulate(program.sizes)
        return ConcatDataset(
            [_table_of(numbers[end - size : end]) for end, size in zip(ends, program.sizes, strict=True)]
        )
    if program.data == "subset":
        return Subset(_table_of(range(511, -1, -1)), [511 - number for number in numbers])
    kinds: dict[str, Any] = {
        "items": Items,
        "together": Together,
        "lists": ByLists,
        "wrapped": Wrapped,
        "stream": Stream,
        "kept": Kept,
    }
    if program.shows and program.order != "told":
        kinds = {"items": ToldItems, "stream": SizedStream if program.shows == "length" else ToldStream}
    return kinds[program.data](program, numbers)


def grow(data: Any, samples: int) -> None:
    """Gives the data more samples; of a part of a table as many others."""
    if isinstance(data, Subset):
        data.indices[:] = [index - samples for index in data.indices]  # type: ignore[index]
    else:
        data.numbers = range(len(data) + samples)
        data.make_room()


def collate_of(program: Program) -> Callable[[Any], Any] | None:
    """The user's collate function; ``None`` for torch's."""
    return None if program.collate == "default" or program.is_in_memory else COLLATES[program.collate].batch


SAMPLERS: dict[str, Callable[[int, torch.Generator | None], Sampler[int]]] = {
    "repeated": Repeated,
    "weighted": lambda length, generator: WeightedRandomSampler(range(1, length + 1), length + 2, generator=generator),
    "subset": lambda length, generator: SubsetRandomSampler(range(0, length, 2), generator=generator),
    "drawn": Drawn,
}


class Held(NamedTuple):
    """What a user holds of a loader: its own generator, and the sampler that is told its epoch."""

    generator: torch.Generator | None
    sampler: Any

    @classmethod
    def of(cls, program: Program) -> Held:
        sampler: Any = ToldSampler(program) if program.order == "told" and program.shows else None
        if program.order == "permuted":
            block = 2 if program.seed % 3 == 2 else None
            sampler = tdi.ShuffleSampler(len(program.numbers), program.seed, block=block)
        return cls(torch.Generator().manual_seed(program.seed) if program.own_generator else None, sampler)


def draw_from(generator: torch.Generator | None, numbers: int, of_default: int) -> None:
    """Draws as a program of the user's may: from a loader's own generator, if it has one, and the default ones."""
    for _ in range(numbers if generator is not None else 0):
        torch.rand((), generator=generator)
    for _ in range(of_default):
        torch.rand(()), random.random(), np.random.rand()


def loader_of(
    program: Program,
    dataset: Any,
    held: Held | None = None,
    *,
    loader_workers: int,
    cls: Any = DataLoader,
    **more: Any,
) -> Any:
    """A loader as written for one process: torch's, or the drop-in with its further arguments."""
    length = len(program.numbers)
    generator, told = held or Held.of(program)
    more |= {"collate_fn": collate_of(program), "num_workers": loader_workers, "generator": generator}
    if program.order == "batches":
        return cls(dataset, batch_sampler=Uneven(length, program.batch, program.flaw), **more)
    if program.order in {"tokens", "buckets"}:
        order = SubsetRandomSampler(range(length), generator=generator)
        batches: Any = tdi.TokenBatchSampler(order, cost_of, 7 + program.batch, padded=True)
        if program.order == "buckets":
            batches = tdi.BucketBatchSampler(order, cost_of, [*BUCKETS], program.batch)
        return cls(dataset, batch_sampler=batches, **more)
    if isinstance(dataset, ByLists):
        shuffled = RandomSampler(dataset, generator=generator) if program.order == "shuffled" else None
        batches = BatchSampler(shuffled or SequentialSampler(dataset), program.batch, program.drop_last)
        return cls(dataset, batch_size=None, sampler=batches, **{**more, "collate_fn": None})
    if told is not None and program.seed % 2:  # inside of a batch sampler
        batches = BatchSampler(told, program.batch, program.drop_last)
        return cls(dataset, batch_sampler=batches, **more)
    more |= {"batch_size": program.batch, "drop_last": program.drop_last}
    if told is not None:
        more["sampler"] = told
    elif program.order == "shuffled":
        more["shuffle"] = True
    elif program.order == "listed":
        more["sampler"] = Listed(program)
    elif program.order in SAMPLERS:
        more["sampler"] = SAMPLERS[program.order](length, generator)
    return cls(dataset, **more)


def whole_batch(program: Program) -> Any:
    """A batch of two samples, as the collate function makes it."""
    kind = COLLATES[program.collate]
    return kind.batch([kind.sample(1), kind.sample(2)])


def ids_in(program: Program, batch: Any) -> list[int]:
    """The samples of a batch."""
    return batch[0].tolist() if program.is_in_memory else COLLATES[program.collate].ids(batch)


def function_of(program: Program) -> Callable[[tdi.InputContext], Any]:
    """The dataset function."""
    return lambda context: Ready(program, function_batches(program, context.input_pipeline_id))


class OneProcess:
    """The batches of one process in each epoch: of torch's own loader over the numbers, or of files by the laws.

    Args:
      program: the program.
      folder: of its files.
      grown: how many samples more the data had in each of the first epochs.
      resumed: the epoch of a mixture that was resumed by other weights, and all weights in it.
      drawn: how many numbers were drawn by other code right before an epoch.
    """

    def __init__(
        self,
        program: Program,
        folder: Path,
        grown: Sequence[int] = (),
        resumed: tuple[int, Changes] = (-1, ()),
        drawn: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._program, self._folder, self._epochs = program, folder, list[list[Samples]]()
        self._grown, self._more, self._resumed, self._drawn = list(grown), 0, resumed, drawn
        plain = replace(program, bad=frozenset(), collate="objects", shows="")
        if program.data == "files":
            self._files = files_in(plain, folder)
        elif program.data != "mixture" and not program.is_ready:
            plain = replace(plain, data="subset" if program.data == "subset" else "items")
            self._held = Held.of(plain)
            self._loader = loader_of(plain, dataset_of(plain, folder), self._held, loader_workers=0)
            self._default = torch.Generator().manual_seed(program.seed).get_state()

    def __call__(self, epoch: int, grown: int = 0) -> list[Samples]:
        while len(self._epochs) <= epoch:
            self._grown += [grown] if len(self._grown) == len(self._epochs) else []
            more = self._grown[len(self._epochs)] - self._more
            if more:
                grow(self._loader.dataset, more)
                self._more += more
            self._epochs.append(self._read(len(self._epochs)))
        return self._epochs[epoch]

    def as_it_was(self, epoch: int, grown: int) -> OneProcess:
        """Another one, whose data had grown by so many samples in an epoch, and may grow otherwise after it."""
        return OneProcess(self._program, self._folder, [*self._grown[:epoch], grown])

    def forget(self, epoch: int) -> None:
        """Reads this epoch and those after it anew: they begin with data that has grown."""
        if self._grown[epoch:]:
            anew = OneProcess(self._program, self._folder, self._grown[:epoch], self._resumed, self._drawn)
            vars(self).update(vars(anew))

    def draw(self, epoch: int, numbers: int) -> None:
        """Draws so many numbers right before an epoch."""
        self._drawn = {**self._drawn, epoch: numbers}
        self.forget(epoch)

    def reweighed(self, program: Program, epoch: int, samples: int) -> OneProcess:
        """Another one, of a mixture with the weights of this program, from so many samples of an epoch on."""
        before = [each for each in self._changes(epoch) if each[0] < samples]
        return OneProcess(program, self._folder, (), (epoch, [*before, (samples, program.mixed.weights[0][1])]))

    def _changes(self, epoch: int) -> Changes:
        return self._resumed[1] if self._resumed[0] == epoch else self._program.mixed.weights

    def _mixed(self, epoch: int) -> Samples:
        """The samples of a mixture, by the law; those of a source may come in an order of the library."""
        program, how, changes = self._program, self._program.mixed, self._changes(epoch)
        sources = files_of(program)
        if not how.is_shuffled:
            return mixed(how, changes, lambda source, _: sources[source])
        data = mixture_of(replace(program, collate="objects", bad=frozenset()), self._folder, changes)
        data.set_epoch(epoch)
        found = list(data)

        def turn_of(source: int, turn: int) -> Samples:
            numbers = sources[source]
            came = [number for number in found if number in numbers][turn * len(numbers) : (turn + 1) * len(numbers)]
            assert Counter(came) <= Counter(numbers), f"turn {turn} of source {source} is {came}"
            return came + [number for number in numbers if number not in came]

        assert found == mixed(how, changes, turn_of)
        for source, numbers in enumerate(sources):
            turns = {tuple(turn_of(source, turn)) for turn in range(3)}
            assert len(turns) > 1 or sum(number in numbers for number in found) < 3 * len(numbers) or len(numbers) < 6
        return found

    def _read(self, epoch: int) -> list[Samples]:
        program = self._program
        if program.is_ready:
            return ready_batches(program.sizes)
        if program.data == "mixture":
            return batched(self._mixed(epoch), program.batch, drop_last=program.drop_last)
        if program.data == "files":
            if program.files.is_shuffled:  # by a keyed permutation, which is the library's
                self._files.set_epoch(epoch)
                samples = list(self._files)
                check_windows(program, samples)
            else:
                samples = interleaved(parts_of(program)[0], program.files.cycle_length, program.files.block_length)
            return batched(samples, program.batch, drop_last=program.drop_last)
        if self._held.sampler is not None:
            self._held.sampler.set_epoch(epoch)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._default)
            draw_from(self._held.generator, *[self._drawn.get(epoch, 0)] * 2)
            batches: list[Samples] = [
                ids_in(program, batch) if program.data == "subset" else batch for batch in self._loader
            ]
            self._default = torch.get_rng_state()
        if program.order == "tokens":
            assert all(len(batch) * max(map(cost_of, batch)) <= 7 + program.batch for batch in batches)
        if program.order == "buckets":
            assert all(len({bisect(BUCKETS, cost_of(each)) for each in batch}) == 1 for batch in batches)
            assert sorted(chain(*batches)) == program.numbers
        return batches


def check_windows(program: Program, samples: Samples) -> None:
    """Checks that each window of a file, or part, comes before the next one, and not all in one order."""
    size = max(1, program.files.shuffle_buffer)
    parts, _ = parts_of(program)
    for part in parts:
        orders = []
        came = [number for number in samples if number in part]
        assert len(came) == len(part)
        for start in range(0, len(part), size):
            window = came[start : start + size]
            assert sorted(window) == part[start : start + size], f"the window from {start} on is {window}"
            orders += [tuple(number - part[start] for number in window)] if len(window) == size else []
        assert size < 4 or len(orders) < 6 or len(set(orders)) > 1, f"all windows are in the order {orders[0]}"


# What comes back


def numbers_of(samples: Iterable[Any]) -> Samples:
    """The numbers of samples, as ``samples_of`` tells them."""
    found = []
    for each in samples:
        if isinstance(each, SourceSample):
            own = each.sample
            found.append(1000 * int(each.source) + (own.record if isinstance(own, FileRecord) else own))
        elif isinstance(each, FileRecord):
            found.append(1000 * int(Path(each.file).name[:2]) + each.record)
        else:
            found.append(each)
    return found


def structure_of(element: Any) -> Any:
    """The nesting of an element, with the kind of each leaf."""
    if isinstance(element, tdi.PerReplica):
        kinds = {str(structure_of(each)) for each in element.values}
        return f"PerReplica of {' or '.join(sorted(kinds))}"
    if isinstance(element, torch.Tensor):
        return f"{str(element.dtype).removeprefix('torch.')} of {element.dim()} dims"
    if isinstance(element, Mapping):
        return {key: structure_of(each) for key, each in element.items()}
    if isinstance(element, tuple):
        return [type(element).__name__, *map(structure_of, element)]
    if (
        isinstance(element, list)
        and element
        and all(isinstance(each, torch.Tensor | tdi.PerReplica) for each in element)
    ):
        return ["list", *map(structure_of, element)]
    return type(element).__name__
