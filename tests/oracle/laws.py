"""The laws of the design, section 3, written anew from its text: the samples of every replica at every step.

Orders that a keyed permutation of the library gives are taken from a caller, as read in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import zip_longest

from tests.oracle.program import Mixed, Program, Turn

Samples = list[int]
Row = list[Samples]
"""What each local replica of a rank gets at a step."""
Step = list[Row]
"""What each rank gets at a step."""


def sums_of(step: Step, rank: int) -> tuple[int, int]:
    """The sum of the samples of a step on a rank, and on all."""
    sums = [sum(number for piece in row for number in piece) for row in step]
    return sums[rank], sum(sums)


def split(batch: Samples, replicas: int) -> list[Samples]:
    """The split: ``c = ceil(b / N)``; replica ``k`` gets ``[k*c, min((k+1)*c, b))``."""
    most = -(-len(batch) // replicas)
    return [batch[most * replica : most * (replica + 1)] for replica in range(replicas)]


def cost_of(number: int) -> int:
    """The cost of a sample, which is also its length in tokens."""
    return 1 + number * 5 % 7


MOST_COST = 9
"""Of a micro-batch."""


def micro_batches(step: Step) -> int:
    """How many micro-batches each part of a step has: as many as the one that needs the most."""
    needed = [0]
    for piece in (piece for row in step for piece in row):
        count, load = 0, MOST_COST
        for number in piece:
            count, load = (count + 1, 0) if load + cost_of(number) > MOST_COST else (count, load)
            load += cost_of(number)
        needed.append(count)
    return max(needed)


def balanced(batch: Samples, replicas: int) -> list[Samples]:
    """The largest first to the least loaded replica, of equal ones to that with the fewest samples, then to the first.

    Each part is in the order of the batch.
    """
    parts: list[list[int]] = [[] for _ in range(replicas)]
    for place in sorted(range(len(batch)), key=lambda place: (-cost_of(batch[place]), place)):
        min(parts, key=lambda part: (sum(cost_of(batch[each]) for each in part), len(part))).append(place)
    return [[batch[place] for place in sorted(part)] for part in parts]


def evenly_balanced(batch: Samples, replicas: int) -> list[Samples]:
    """The same, each to one that has room, of equal ones to that with the most; then at most 16 swaps.

    The costliest and the cheapest replica swap the two samples whose costs differ by what is closest to half their
    difference, if that brings them together.
    """
    low, extra = divmod(len(batch), replicas)
    room, costs = [low + (replica < extra) for replica in range(replicas)], [*map(cost_of, batch)]
    parts: list[list[int]] = [[] for _ in range(replicas)]

    def load(replica: int) -> int:
        return sum(costs[place] for place in parts[replica])

    for place in sorted(range(len(batch)), key=lambda place: (-costs[place], place)):
        able = [replica for replica in range(replicas) if len(parts[replica]) < room[replica]]
        parts[min(able, key=lambda each: (load(each), len(parts[each]) - room[each], each))].append(place)
    best = max(costs, default=0) + sum(sorted(costs)[: max(0, low - 1)])
    for _ in range(16):
        loads = [*map(load, range(replicas))]
        high, least = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[high] - loads[least]
        if loads[high] * replicas * 64 <= sum(loads) * 65 or loads[high] <= best:
            break
        pairs = [(one, two) for one in parts[high] for two in parts[least]]
        one, two = min(pairs, key=lambda pair: abs(2 * (costs[pair[0]] - costs[pair[1]]) - gap), default=(0, 0))
        if not 0 < costs[one] - costs[two] < gap:
            break
        for part, out, into in ((parts[high], one, two), (parts[least], two, one)):
            part.remove(out)
            part.append(into)
            part.sort(key=lambda place: (-costs[place], place))
    return [[batch[place] for place in sorted(part)] for part in parts]


def cycle(batch: Samples, replicas: int, turned: int) -> list[Samples]:
    """A full batch of a rank's own: ``base = [lo+1]*extra + [lo]*(N-extra)``, rotated left."""
    low, extra = divmod(len(batch), replicas)
    base = [low + 1] * extra + [low] * (replicas - extra)
    rest = iter(batch)
    return [[next(rest) for _ in range(size)] for size in base[turned:] + base[:turned]]


def batched(samples: Samples, size: int, *, drop_last: bool) -> list[Samples]:
    """The batches of one reader."""
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]


def interleaved(files: Sequence[Samples], cycle_length: int, block_length: int) -> Samples:
    """Slots take turns of up to ``block_length`` records; one whose file ended takes the next file at its next turn."""
    waiting, found = [list(file) for file in files], []
    slots: list[Samples | None] = [None] * cycle_length
    while waiting or any(slot is not None for slot in slots):
        for place in range(cycle_length):
            slot = waiting.pop(0) if slots[place] is None and waiting else slots[place]
            if slot is not None:
                found += slot[:block_length]
                slots[place] = slot[block_length:] if len(slot) >= block_length else None
    return found


Changes = Sequence[tuple[int, tuple[int, ...]]]
"""The weights of a mixture from positions on."""


def mixed(how: Mixed, changes: Changes, turn_of: Callable[[int, int], Samples]) -> Samples:
    """The source with the smallest used/weight is next, ties by place; where weights change they count anew.

    Args:
      how: the sources are mixed.
      changes: the weights.
      turn_of: the samples of a source, each time that it begins.
    """
    count = len(how.kinds)
    used, taken, turns, ended = [0] * count, [0] * count, [0] * count, set[int]()
    found: Samples = []
    weights: tuple[int, ...] = ()
    while len(found) != how.num_samples:
        for at, those in changes:
            if at == len(found) and those is not weights:
                used, weights = [0] * count, those
        able = [source for source in range(count) if source not in ended]
        if not able:
            break
        source = min(able, key=lambda each: (Fraction(used[each], weights[each]), each))
        samples = turn_of(source, turns[source])
        if taken[source] == len(samples):
            if how.stop == "first":
                break
            if how.stop == "all":
                ended.add(source)
            else:
                taken[source], turns[source] = 0, turns[source] + 1
            continue
        found.append(samples[taken[source]])
        taken[source] += 1
        used[source] += cost_of(found[-1]) if how.tokens else 1
    return found


def parts_of(program: Program) -> tuple[list[Samples], list[int]]:
    """The files, or the equal parts of them in bytes, each with the lines that begin in it; and their bytes."""
    parts, sizes = [], []
    for records in files_of(program):
        starts = [sum(len(f"{record}\n") for record in records[:place]) for place in range(len(records) + 1)]
        size, most = starts[-1], program.files.part_bytes
        count = max(1, -(-size // most)) if most else 1
        for number in range(count):
            low, end = size * number // count, size * (number + 1) // count
            lines = zip(starts, records, strict=False)
            parts.append([record for start, record in lines if low <= start < end])
            sizes.append(end - low)
    return parts, sizes


def dealt(program: Program, world: int) -> list[list[Samples]]:
    """The files, or parts, of each rank: every so many; or the largest first to who has the fewest bytes."""
    parts, sizes = parts_of(program)
    if not program.files.by_size:
        return [parts[rank::world] for rank in range(world)]
    owns: list[list[int]] = [[] for _ in range(world)]
    for number in sorted(range(len(parts)), key=lambda number: -sizes[number]):
        min(owns, key=lambda own: sum(sizes[each] for each in own)).append(number)
    return [[parts[number] for number in sorted(own)] for own in owns]


def files_of(program: Program) -> list[Samples]:
    return [[1000 * file + record for record in range(size)] for file, size in enumerate(program.sizes)]


def rows_of(program: Program, turn: Turn, rank: int, batches: Iterable[Samples]) -> list[Row]:
    """The rows of a rank that has batches of its own: FILE, OFF, HINT with several ranks."""
    replicas, local, rows = turn.num_replicas, turn.replicas, []
    for batch in batches:
        if program.is_ready or program.has_batches:  # no G
            pieces = split(batch, replicas)
        elif len(batch) == program.batch:
            pieces = cycle(batch, replicas, rank * local)
        else:
            pieces = [piece for piece in split(batch, replicas) if piece]
            pieces += [[] for _ in range(-len(pieces) % local)]
        rows += [pieces[start : start + local] for start in range(0, len(pieces), local)]
    return rows


def reader_batches(program: Program, turn: Turn, samples: Samples) -> list[Samples]:
    """The batches of a reader: loader workers that share an iterable of samples batch their shares, and take turns."""
    if program.data != "stream" or turn.loader_workers < 2:
        return batched(samples, program.batch, drop_last=program.drop_last)
    shares = [samples[worker :: turn.loader_workers] for worker in range(turn.loader_workers)]
    turns = zip_longest(*(batched(share, program.batch, drop_last=program.drop_last) for share in shares))
    return [batch for row in turns for batch in row if batch is not None]


def ready_batches(sizes: Sequence[int]) -> list[Samples]:
    """Ready batches of these sizes, numbered through."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def function_batches(program: Program, rank: int) -> list[Samples]:
    """What a dataset function makes for a rank: the lengths differ."""
    sizes = program.sizes[: max(0, len(program.sizes) - rank)]
    return [[1000 * rank + number for number in batch] for batch in ready_batches(sizes)]


def own_batches(program: Program, turn: Turn, rank: int, order: Sequence[Samples]) -> list[Samples]:
    """The batches of a rank that reads its own data; ``order``: the batches of one process in this epoch."""
    if program.data == "function":
        return function_batches(program, rank)
    if program.policy == "OFF":
        return reader_batches(program, turn, program.numbers) if program.data == "stream" else list(order)
    if program.data == "ready":  # HINT
        return ready_batches(program.sizes)[rank :: turn.world]
    if program.data == "files":
        samples = interleaved(dealt(program, turn.world)[rank], program.files.cycle_length, program.files.block_length)
    else:
        samples = program.numbers[rank :: turn.world]
    return reader_batches(program, turn, samples)


def steps_of(program: Program, turn: Turn, order: Sequence[Samples]) -> list[Step]:
    """The steps of an epoch.

    Args:
      program: the program.
      turn: who reads it.
      order: the batches of one process in this epoch.
    """
    local = turn.replicas
    if program.data == "function":
        own = [function_batches(program, rank) for rank in range(turn.world)]
        columns = [[batches[at : at + local] for at in range(0, len(batches), local)] for batches in own]
        return _together([[row + [[] for _ in range(local - len(row))] for row in rows] for rows in columns], local)
    if not program.is_shared(turn):
        return steps_of_own(program, turn, [own_batches(program, turn, rank, order) for rank in range(turn.world)])
    if program.data == "stream":
        order = reader_batches(program, turn, program.numbers)
    divide = (evenly_balanced if program.equal_counts else balanced) if program.balance else split
    cuts = [divide(batch, turn.num_replicas) for batch in order]
    return _together([[cut[rank * local : (rank + 1) * local] for cut in cuts] for rank in range(turn.world)], local)


def steps_of_own(program: Program, turn: Turn, batches: Sequence[Sequence[Samples]]) -> list[Step]:
    """The steps of ranks that each have batches of their own."""
    return _together([rows_of(program, turn, rank, own) for rank, own in enumerate(batches)], turn.replicas)


def turned(program: Program, epoch: int, step: Step) -> Step:
    """What data gives that is turned by the epoch that it is told."""
    by, count = program.turned_by(epoch), len(program.numbers)
    return [[[(number + by) % count for number in piece] for piece in row] for row in step] if by else step


def _together(columns: Sequence[Sequence[Row]], local: int) -> list[Step]:
    """The steps of these rows of each rank; a rank without a row has empty parts, and no step is empty on all ranks."""
    steps = [[row or [[] for _ in range(local)] for row in step] for step in zip_longest(*columns)]
    return [step for step in steps if any(any(row) for row in step)]
