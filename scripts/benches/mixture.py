"""``tdi.Mixture`` beside the mixtures of Grain, Hugging Face, MosaicML, torchtitan: speed, shares, a far position."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, largest, rate
from benches.peers import peer
from benches.timing import seconds_of

__all__ = ["tables"]

WEIGHTS = {"web": 0.7, "code": 0.2, "books": 0.1}
RATE, SHARES = "thousand samples a second", "largest error of a share at 100 places, samples"
SEEK = "a far sample, ms"
NOTE = (
    "MosaicML reads its samples from files, and a tenth as many; all others make them. Only by position a far sample "
    "needs no state."
)


class Numbers:
    """Samples that cost nothing: ``offset + index``."""

    def __init__(self, source: int, size: int) -> None:
        self._first, self._size = source * 2**40, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return self._first + index


def sources(size: int) -> dict[str, Numbers]:
    """As many samples in each."""
    return {name: Numbers(number, size) for number, name in enumerate(WEIGHTS)}


def measured(samples: Callable[[], Iterable[int]], count: int, seek: float) -> Measured:
    """Reads ``count`` samples, and looks at the shares of the first ones."""
    order = [number >> 40 for number in islice(samples(), count)]
    seconds = seconds_of(lambda: sum(1 for _ in islice(samples(), count)))
    error = 0.0
    for part in range(1, 101):
        seen = Counter(order[: len(order) * part // 100])
        place = len(order) * part // 100
        error = max(error, *(abs(seen[each] - place * share) for each, share in enumerate(WEIGHTS.values())))
    return {"samples": count / 1e3, "seconds": seconds, "error": error, "seek": seek}


def indexed(count: int, size: int) -> Measured:
    """By position, as plain torch reads it; the far sample is one of an epoch of 10^9, in a new mixture."""
    far = tdi.Mixture(sources(size), WEIGHTS, stop="repeat", num_samples=10**9)
    began = time.perf_counter()
    far.__getitems__([987_654_321])
    seek = 1e3 * (time.perf_counter() - began)
    mixture = tdi.Mixture(sources(size), WEIGHTS, stop="repeat", num_samples=count)
    places = [range(start, min(start + 256, count)) for start in range(0, count, 256)]
    return measured(lambda: (number for each in places for number in mixture.__getitems__(each)), count, seek)


def stream(count: int, size: int, unit: Any) -> Measured:
    """From front to end; there is no far sample without a state."""
    lengths = dict.fromkeys(WEIGHTS, _one)
    mixture = tdi.StreamMixture(sources(size), WEIGHTS, stop="repeat", unit=unit, lengths=lengths)
    return measured(lambda: mixture, count, float("nan"))


def _one(_index: int) -> int:
    return 1


def grain(count: int, size: int) -> Measured:
    """``MapDataset.mix`` of shuffled and repeated sources."""
    of = peer("grain")
    parts = [of.MapDataset.source(each).seed(1).shuffle().repeat(None) for each in sources(size).values()]
    mixed = of.MapDataset.mix(parts, weights=list(WEIGHTS.values()))
    began = time.perf_counter()
    mixed[987_654_321]
    seek = 1e3 * (time.perf_counter() - began)
    return measured(lambda: (mixed[place] for place in range(count)), count, seek)


def hugging_face(count: int, size: int) -> Measured:
    """``interleave_datasets`` of streams, each shuffled in a buffer."""
    of = peer("datasets")

    def numbers(source: int) -> Iterable[dict[str, int]]:
        return ({"x": source * 2**40 + index} for index in range(size))

    parts = [
        of.IterableDataset.from_generator(numbers, gen_kwargs={"source": source}).shuffle(seed=1, buffer_size=256)
        for source in range(len(WEIGHTS))
    ]
    mixed = of.interleave_datasets(parts, probabilities=list(WEIGHTS.values()), seed=1)
    return measured(lambda: (each["x"] for each in mixed), count, float("nan"))


def mosaic(count: int, folder: str) -> Measured:
    """An epoch of ``count`` samples of three ``Stream``s, shuffled; they are read from shards on the disk."""
    of = peer("streaming")
    made = [Path(folder) / name for name in WEIGHTS]
    for number, (path, share) in enumerate(zip(made, WEIGHTS.values(), strict=True)):
        if not path.exists():
            with of.MDSWriter(out=str(path), columns={"x": "int"}) as writer:
                for index in range(round(count * share)):
                    writer.write({"x": number * 2**40 + index})
    streams = [of.Stream(local=str(path), proportion=WEIGHTS[path.name]) for path in made]
    mixed = of.StreamingDataset(streams=streams, epoch_size=count, shuffle=True, batch_size=1, num_canonical_nodes=1)
    return measured(lambda: (each["x"] for each in mixed), count, float("nan"))


class Stateful:
    """A source as torchtitan's mixture takes them."""

    def __init__(self, source: Numbers) -> None:
        self._source = source

    def __iter__(self) -> Iterator[int]:
        return map(self._source.__getitem__, range(len(self._source)))

    def state_dict(self) -> dict[str, int]:
        """Nothing: it is not saved here."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """See ``state_dict``."""


def torchtitan(count: int, size: int) -> Measured:
    """``InterleavedDataset``: each sample is of a source that is drawn at random."""
    of = peer("torchtitan.hf_datasets.interleaved")

    def mixed() -> Iterable[int]:
        found: Iterable[int] = of.InterleavedDataset([*map(Stateful, sources(size).values())], [*WEIGHTS.values()], 1)
        return found

    return measured(mixed, count, float("nan"))


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """One table."""
    count, size = (2_000, 4_000) if small else (200_000, 1_000_000)
    contenders = (
        Contender("tdi.Mixture by position", "ours", indexed, (count, size)),
        Contender("tdi.StreamMixture, samples", "ours", stream, (count, size, "samples")),
        Contender("tdi.StreamMixture, tokens", "ours", stream, (count, size, "tokens")),
        Contender("grain MapDataset.mix", "peer", grain, (count, size), ("grain",)),
        Contender("datasets.interleave_datasets", "peer", hugging_face, (count, size), ("datasets",)),
        Contender(
            "MosaicML, Stream(proportion=)", "peer", mosaic, (count // 10, str(folder)), ("mosaicml-streaming",),
            once=True, apart=True,
        ),
        Contender("torchtitan InterleavedDataset", "peer", torchtitan, (count, size), ("torchtitan",), apart=True),
    )  # fmt: skip
    columns = (
        Column(RATE, "more", rate("samples", "seconds")),
        Column(SHARES, "less", largest("error")),
        Column(SEEK, "less", largest("seek")),
    )
    targets = (Target(SEEK, "tdi.Mixture by position", 10.0, better_by=False),)
    return [Table("A mixture of three sources", columns, contenders, 1, 1 if small else 3, targets, NOTE)]
