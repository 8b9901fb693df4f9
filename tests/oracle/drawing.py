"""Random programs, by hypothesis, which shrinks those that fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.oracle.data import COLLATES
from tests.oracle.program import LOOKS, Action, Files, Mixed, Odd, OddKind, Program, Turn

POLICIES = {
    "items": ["DATA", "DATA", "OFF", "HINT"],
    "together": ["DATA", "OFF", "HINT"],
    "wrapped": ["DATA"],
    "lists": ["DATA", "DATA", "OFF"],
    "table": ["DATA", "OFF"],
    "joined": ["DATA", "OFF"],
    "subset": ["DATA"],
    "stream": ["DATA", "OFF", "HINT"],
    "kept": ["DATA", "DATA", "HINT"],
    "ready": ["DATA", "OFF", "HINT"],
    "function": ["OFF"],
    "files": ["DATA", "FILE", "FILE", "OFF"],
    "mixture": ["DATA", "DATA", "OFF"],
}
MOST_FILES = 7
ORDERS = [
    *(
        "in order",
        *["shuffled"] * 3,
        "permuted",
        "repeated",
        "weighted",
        "subset",
        "listed",
        "told",
        "tokens",
        "buckets",
        "batches",
    ),
]
DRAWN = ("seeded", "augmented")
READY = [name for name, kind in COLLATES.items() if kind.ready]
TORCHS = [name for name, kind in COLLATES.items() if not kind.only_ready and name not in DRAWN]
FILES = st.builds(
    Files,
    st.sampled_from(["txt", "txt", "txt.gz", "fragments"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0, 0, 2, 4]),
    st.sampled_from([True, True, False]),
)


@st.composite
def all_files(draw: st.DrawFn, policy: str) -> Files:
    """How files are read; those in parts, or by size, must be read by bytes, and marked."""
    files = draw(FILES)
    if files.format != "txt" or not files.marked:
        return files
    by_size = policy == "FILE" and draw(st.booleans())
    return replace(files, by_size=by_size, part_bytes=draw(st.sampled_from([0, 0, 5, 12])))


@st.composite
def mixtures(draw: st.DrawFn, sizes: tuple[int, ...]) -> Mixed:
    """How sources of these sizes are mixed."""
    count = len(sizes)
    shares = st.tuples(*[st.integers(1, 5)] * count)
    weights: list[tuple[int, tuple[int, ...]]] = [(0, draw(shares))]
    if draw(st.booleans()):
        weights.append((draw(st.integers(1, 9)), draw(shares)))
    stop: Any = draw(st.sampled_from(["first", "all", "all", "repeat"]))
    return Mixed(
        tuple(draw(st.sampled_from(["file", "list", "fragments"])) for _ in sizes),
        tuple(weights),
        stop,
        draw(st.integers(1, 2 * sum(sizes))) if stop == "repeat" or draw(st.integers(0, 3)) == 3 else None,
        *draw(st.sampled_from([(False, False), (True, False), (False, True)])),
    )


def _passes_over(program: Program) -> bool:
    """Whether a row may have no sample on any rank."""
    if program.skips and program.bad:
        return True
    if program.data == "function":
        return 0 in program.sizes
    if program.is_ready or program.has_batches:
        return 0 in program.sizes or not all(map(program.is_shared, program.turns))
    return any(not program.is_shared(turn) and program.batch < turn.num_replicas for turn in program.turns)


def _grows(program: Program) -> bool:
    """Whether its data grows between epochs."""
    is_list = program.data in {"items", "together"} and program.order in {"in order", "shuffled"}
    return is_list and program.policy in {"DATA", "OFF"} and program.seed % 4 == 3 and not program.shows


def _is_reweighed(program: Program) -> bool:
    """Whether a mixture may get other weights at a resume."""
    return program.data == "mixture" and program.policy == "DATA" and program.seed % 2 == 0


def _reads(program: Program) -> st.SearchStrategy[Action]:
    """Reads, and looks where none of them fails."""
    reads = st.builds(Action, st.just("read"), st.integers(0, 5))
    if program.bad or program.odd_batch[1] or program.data == "kept":
        return reads
    if program.order == "shuffled" and program.seed % 3 == 1 and not _grows(program):
        return st.one_of(reads, st.builds(Action, st.just("draw"), st.integers(1, 3)))
    groups = st.builds(Action, st.just("read"), st.just(0), st.integers(1, 4))
    reads = st.one_of(*[reads] * 6, st.just(Action("infer")), groups)
    return st.one_of(reads, reads, reads, st.builds(Action, st.just("look"), st.integers(0, len(LOOKS) - 1)))


def actions(program: Program) -> st.SearchStrategy[Action]:
    reads = _reads(program)
    if program.odd_batch[1]:  # unlike those that were read
        return st.just(Action("read"))
    if not program.is_exact or program.data == "kept":
        return reads
    if program.order == "shuffled" and _grows(program):
        return st.one_of(reads, reads, st.builds(Action, st.just("grow"), st.integers(1, 5)))
    is_shown = program.seed == 5 and program.order in {"in order", "permuted"} and program.is_map_style
    is_shown = is_shown or (program.seed == 5 and program.data == "files" and program.policy == "DATA")
    # What was left out is counted by the iterator that delivered last.
    if is_shown and not program.shows and not program.skips:
        return st.one_of(reads, reads, st.builds(Action, st.just("picture")))
    if program.order == "shuffled":  # torch draws once more at an epoch's end, so no loop is left before it
        return reads
    return _ways(program, reads)


def _ways(program: Program, reads: st.SearchStrategy[Action]) -> st.SearchStrategy[Action]:
    """These and what else is right at any place of an epoch."""
    breaks = st.just(Action("break"))
    reads = st.one_of(reads, reads, reads, st.builds(Action, st.just("reload"), *[st.integers(0, 1)] * 2))
    # These go on from draw to draw, whatever the number.
    if program.order not in {"repeated", "weighted", "subset", "tokens", "buckets"} and not program.drop_in:
        reads = st.one_of(reads, reads, reads, st.builds(Action, st.just("tell"), epochs=st.integers(0, 2)))
    if program.shows_epoch:
        own = st.builds(Action, st.just("tell"), st.just(1), st.integers(0, 2))
        reads = st.one_of(reads, reads, reads, own)
    if _grows(program):
        return st.one_of(reads, reads, breaks, st.builds(Action, st.just("grow"), st.integers(1, 5)))
    if _passes_over(program):  # ``seek`` counts these rows; see tests/sources/test_skipping.py
        return st.one_of(reads, breaks)
    if program.policy == "HINT" and program.is_map_style:  # an order of its own
        return st.one_of(reads, breaks)
    if _is_reweighed(program):  # what is sought has the new weights from its front on
        return st.one_of(reads, breaks)
    skips = st.builds(Action, st.just("skip"), st.integers(0, 4))
    if program.policy == "HINT" or program.data == "function":  # the order is a rank's own: no other epoch is sought
        return st.one_of(reads, reads, breaks, skips)
    seeks = st.builds(Action, st.just("seek"), st.integers(0, 4), st.integers(0, 2))
    return st.one_of(reads, reads, reads, breaks, seeks, skips)


@st.composite
def programs(draw: st.DrawFn, *, processes: bool = False, most_ranks: int = 3) -> Program:
    """A random program.

    Args:
      draw: of hypothesis.
      processes: whether each rank is a process, and so may have loader workers and a default generator.
      most_ranks: of a turn.
    """
    data = draw(st.sampled_from([*POLICIES, "items", "files", "files", "files"]))
    policy = draw(st.sampled_from(POLICIES[data]))
    worlds = [(draw(st.integers(1, most_ranks)), draw(st.integers(1, 3))) for _ in range(draw(st.integers(1, 3)))]
    files, order = draw(all_files(policy)) if data == "files" else Files(), "in order"
    most_world = max(world for world, _ in worlds)
    least = most_world if data == "files" and policy == "FILE" else 0
    sizes = tuple(draw(st.lists(st.integers(0, 9), min_size=max(least, 1), max_size=MOST_FILES)))
    if data == "mixture":
        sizes = tuple(max(1, size) for size in sizes[:4])
    if Program(data).is_map_style and policy != "HINT" and any(sizes):
        order = draw(st.sampled_from(ORDERS))
    if data == "lists" and any(sizes):  # torch's sampler refuses to shuffle nothing
        order = draw(st.sampled_from(["in order", "shuffled"]))
    loads = data not in {"ready", "function"}
    program = Program(
        data,
        sizes,
        policy,
        draw(st.integers(1, 9)),
        loads and order not in {"batches", "tokens", "buckets"} and draw(st.booleans()),
        order,
        "default",
        files,
        draw(mixtures(sizes)) if data == "mixture" else Mixed(),
        seed=draw(st.integers(0, 9)),
        turns=tuple(Turn(*world) for world in worlds),
    )
    if not program.is_in_memory:
        kinds = [*TORCHS, *_drawn(program, processes=processes)] if loads else [*READY]
        kinds = [*TORCHS[:5]] if data == "lists" else kinds
        program = replace(program, collate=draw(st.sampled_from(kinds)))
    extras = ["plain", "plain", *([] if data in {"kept", "lists"} else ["index"])]
    if loads and data != "lists" and order not in {"batches", "tokens", "buckets"} and COLLATES[program.collate].pads:
        extras += ["pad", "index and pad"]
    program = replace(program, extras=draw(st.sampled_from(extras)))
    program = draw(faulty(program))
    has_costs = program.is_map_style or (data in {"files", "mixture", "stream"} and program.collate == "default")
    if has_costs and policy == "DATA" and "pad" not in program.extras:
        program = replace(program, balance=draw(st.integers(0, 5)) == 5)
        program = replace(program, equal_counts=program.balance and draw(st.booleans()))
    if loads and (program.skips or not program.bad):  # else the drop-in raises it as torch does in one process
        program = replace(program, drop_in=draw(st.booleans()))
    if not (program.drop_last or program.drop_in) and (loads or policy != "HINT"):
        program = replace(program, given=draw(st.sampled_from(["", "", *_ways_to_give(program)])))
    program = draw(showing(program))
    if processes and order in {"shuffled", "weighted", "subset", "repeated"} and policy == "DATA":
        program = replace(program, own_generator=program.seed % 2 == 0)
    fills = program.collate in {"boxed", "counted", "square", "noted"}
    program = replace(program, sums=draw(st.booleans()), fills=fills and draw(st.booleans()))
    return replace(program, turns=draw(all_turns(program, processes=processes)))


def _ways_to_give(program: Program) -> list[str]:
    if program.data == "ready":
        return ["list", "function", "plain", "loader"]
    ways = {
        "stream": ["bare", "function", "plain"],
        "files": ["bare"],
        "items": ["bare"],
        "table": ["bare"],
        "mixture": ["bare"],
    }
    is_hint = program.data == "stream" and program.policy == "HINT"
    return ways.get(program.data, [])[: 1 if is_hint else 3] if program.order == "in order" else []


@st.composite
def showing(draw: st.DrawFn, program: Program) -> Program:
    """The program, maybe with an object that hears of its epoch, or shows its length."""
    program = replace(program, shows=draw(st.sampled_from(_shows(program))))
    if program.order == "told" and not program.shows:  # nobody tells that sampler its epoch
        program = replace(program, order="in order")
    if program.shows and program.order != "told" and "index" in program.extras:  # it is that of what is turned
        program = replace(program, extras="plain")
    return program


def _shows(program: Program) -> list[Any]:
    """See ``Program.shows``; what is turned has other costs than are known before."""
    told = ["epoch", "counts", "nothing"]
    if program.order == "told":
        return [""] if program.balance or not program.numbers else told
    if program.balance or program.bad or program.odd_batch[1]:
        return [""]
    told = told[: 2 if program.policy == "HINT" else 3]  # a part that divided data gives is not its owner's
    if program.data in {"stream", "ready"} and program.given in {"function", "plain"}:
        return ["", *told[:2]]
    if (program.data, program.given) in {("stream", ""), ("stream", "bare"), ("ready", ""), ("ready", "loader")}:
        return ["", "length", *told]
    return ["", *told[::2]] if program.data == "items" and program.order == "in order" else [""]


def _drawn(program: Program, *, processes: bool) -> list[str]:
    """The kinds of batches whose samples draw, where each has a number and threads do not share generators."""
    if program.data not in {"items", "wrapped", "files", "mixture"} or program.policy not in {"DATA", "FILE"}:
        return []
    alone = processes or all(turn.world == 1 for turn in program.turns)
    return [] if program.mixed.stop == "repeat" else [*DRAWN][: 1 + alone]


@st.composite
def faulty(draw: st.DrawFn, program: Program) -> Program:
    """The program, maybe with samples that cannot be read, or with an unlike batch."""
    data, sizes = program.data, program.sizes
    if (
        data == "ready"
        and program.collate == "table"
        and len(sizes) > 1
        and 0 not in sizes
        and program.policy == "DATA"
    ):
        how = draw(st.sampled_from(["", "dtype", "missing", "uneven", "keys"]))
        return replace(program, odd_batch=(draw(st.integers(1, len(sizes) - 1)), how), turns=program.turns[:1])
    if program.draws_numbers:
        return program
    if not (data in {"items", "together"} or (data == "files" and not program.files.is_shuffled)):
        return program
    if not program.numbers or draw(st.integers(0, 3)) < 3:
        return program
    bad = draw(st.sets(st.sampled_from(program.numbers), max_size=4))
    program = replace(program, bad=frozenset(bad), skips=draw(st.booleans()))
    if bad and program.skips and program.is_shared(program.turns[0]):
        most = draw(st.sampled_from([None, 0, 1, 2, 3]))
        program = replace(program, max_errors=most, turns=program.turns if most is None else program.turns[:1])
    return program


@st.composite
def all_turns(draw: st.DrawFn, program: Program, *, processes: bool) -> tuple[Turn, ...]:
    """The turns of a program, which has their worlds."""
    if program.policy in {"OFF", "HINT"} and (program.data == "files" or draw(st.integers(0, 3)) < 3):
        program = replace(program, turns=program.turns[:1] * len(program.turns))
    done = [draw(turns(program, turn, processes=processes)) for turn in program.turns]
    if any(each.changes for each in done):  # a state that is gone on from later meets the files as they are then
        done = [replace(each, save_each=False) for each in done]
    if program.data == "stream":  # what its loader workers share out
        workers = done[0].loader_workers
        done = [replace(each, loader_workers=workers, persistent=each.persistent and workers > 0) for each in done]
    if program.is_exact and draw(st.integers(0, 9)) == 9:
        done = draw(odd_turns(program, done))
    if not program.is_exact:  # only of a whole epoch anything is known
        done[-1] = replace(done[-1], actions=(*done[-1].actions, Action("read")))
    return tuple(done)


def _unlike(program: Program, turn: int) -> list[OddKind]:
    """How what a rank is given may be unlike that of the others, beside its options."""
    if program.bad or program.odd_batch[1]:
        return []
    fits: dict[OddKind, bool] = {
        "draws": program.order == "listed" and not turn and program.policy == "DATA",
        "ends": program.order == "listed" and not turn and program.policy == "DATA" and not program.drop_last,
        "weighs": program.balance and program.order == "in order" and not turn,
        "breaks": program.order == "batches" and not turn and program.policy == "DATA",
        "opens": program.data == "stream" or program.order == "batches",
        "part": program.data in {"wrapped", "joined", "subset"} and program.policy == "DATA",
        "wrong": not program.drop_in and not program.is_ready and not program.given,
        "keys": program.collate == "named",
    }
    return [kind for kind, does in fits.items() if does and len(program.numbers) > 2]


@st.composite
def odd_turns(draw: st.DrawFn, program: Program, done: list[Turn]) -> list[Turn]:
    """The turns up to the first one of several ranks, of which one does otherwise."""
    first = next((place for place, turn in enumerate(done) if turn.world > 1), None)
    if first is None:
        return done
    turn, rank = done[first], draw(st.integers(0, done[first].world - 1))
    kinds: list[Any] = ["slow", "differs", *(["fails"] if program.bad and not program.skips else [])]
    if not program.bad:
        kinds += [
            "leaves",
            "tells",
            *(["forgets"] if first and any(each.kind == "read" for each in turn.actions) else []),
        ]
    kinds += _unlike(program, first)
    does = draw(st.sampled_from(kinds))
    if does not in {"slow", "fails", "differs"}:
        turn = replace(turn, actions=(Action("read"), Action("read", 1)), lost=0, changes="", save_each=False)
    others: dict[str, Any] = {"sums": not program.sums, "extras": "plain" if program.extras == "index" else "index"}
    if not program.is_ready and not program.has_batches:
        others |= {"batch": program.batch + 1}
        if not program.given and program.data != "lists":  # whose sampler makes the batches: all that counts is drawn
            others |= {"drop_last": not program.drop_last}
    gives = (draw(st.sampled_from(sorted(others.items()))),) if does == "differs" else ()
    return [*done[:first], replace(turn, odd=Odd(rank, does, draw(st.integers(1, 4)), gives), beyond=False)]


@st.composite
def turns(draw: st.DrawFn, program: Program, turn: Turn, *, processes: bool) -> Turn:
    """A turn at a given world."""
    loads = processes and not program.is_ready and not program.given and program.data != "kept"
    workers = draw(st.sampled_from([0, 0, 1, 2])) if loads else 0
    done = tuple(draw(st.lists(actions(program), min_size=1, max_size=6)))
    if any(each.kind == "grow" for each in done):  # the element of an ``element_spec`` is that of the data before
        done = tuple(each for each in done if each != Action("look", LOOKS.index("element_spec")))
    if _grows(program) and program.order == "shuffled":
        # A state that was saved after the last step, and before the end was asked for, draws the epoch once more: of
        # data that has grown since, other numbers.
        done = (*done, Action("read"))
    prefetch = draw(st.sampled_from([0, 0, 1, 2, 5, None]))
    written = program.data == "files" and program.files.format != "fragments" and program.is_exact
    later = written and turn is not program.turns[0]
    kinds: list[Literal["", "longer", "same size"]] = ["", "", "", "", "", "longer", "same size"]
    changes = draw(st.sampled_from(kinds if later else kinds[:1]))
    lost = 0 if _grows(program) else draw(st.integers(0, 3))  # an epoch that was begun does not grow
    resumes = turn is not program.turns[0] and program.is_exact and not changes
    has_end = program.is_map_style and program.is_shared(turn)  # a rank's own position counts, not the step
    if resumes and has_end and draw(st.integers(0, 15)) == 15:
        return replace(turn, beyond=True)
    saves = program.is_exact and draw(st.integers(0, 5)) == 5
    kinds_of = {each.kind for each in done}
    saves = saves and not (replace(turn, actions=done).has_groups or kinds_of & {"picture", "draw"})
    shares = not processes and turn.world < 3 and program.collate != "augmented"
    sharing = 2 if shares and draw(st.integers(0, 5)) == 5 else 1
    weights: tuple[int, ...] = ()
    if resumes and _is_reweighed(program) and draw(st.booleans()):
        weights = draw(st.tuples(*[st.integers(1, 5)] * len(program.sizes)))
    # Where they persist, torch draws less from the generator, and their copies of the data do not grow.
    can_persist = program.order in {"in order", "permuted", "listed", "told"} and not _grows(program)
    can_persist = can_persist and (program.shows != "nothing" or program.order == "told")  # copies have no owner
    persists = workers > 0 and can_persist and draw(st.booleans())
    turn = replace(turn, prefetch=prefetch, loader_workers=workers, persistent=persists)
    turn = replace(turn, sharing=sharing, save_each=saves)
    return replace(turn, actions=done, lost=lost, changes=changes, weights=weights)


def settings_of(*, all_cells: bool) -> settings:
    """How many programs are drawn in one process."""
    return settings(
        max_examples=10_000 if all_cells else 120,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )


@st.composite
def torch_programs(draw: st.DrawFn) -> Program:
    """A random program of one process, for torch's own loader and the drop-in."""
    data = draw(st.sampled_from(["items", "together", "table", "stream"]))
    order = "in order"
    if data != "stream":
        order = draw(st.sampled_from(["in order", "shuffled", "repeated", "weighted", "subset", "drawn", "batches"]))
    size = draw(st.integers(1, 9))
    acts = st.builds(Action, st.sampled_from(["read", "read", "draw", "break"]), st.integers(0, 4))
    program = Program(
        *(data, (size,)),
        batch=draw(st.integers(1, 5)),
        drop_last=order not in {"batches", "tokens", "buckets"} and draw(st.booleans()),
        order=order,
        collate="default" if data == "table" else draw(st.sampled_from([*TORCHS])),
        shows=draw(st.sampled_from(["", "length"])) if data == "stream" else "",
        draws=draw(st.booleans()),
        own_generator=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
        turns=(Turn(actions=tuple(draw(st.lists(acts, max_size=6)))),),
    )
    bad = draw(st.sets(st.integers(0, size - 1), max_size=2)) if draw(st.integers(0, 3)) == 3 else ()
    return replace(program, bad=frozenset(bad))
