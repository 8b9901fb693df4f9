"""The smallest programs that showed faults: mended ones, or planted ones."""

from __future__ import annotations

from tests.oracle.program import Action, Files, Mixed, Odd, Program, Stop, Turn

SKIP, READ, ALL, DRAW = Action("skip", 1), Action("read", 1), Action("read"), Action("draw", 2)
ENDS: tuple[tuple[Stop, bool], ...] = (("first", False), ("all", True))
SOURCES = ("file", "list", "fragments")
LISTS = ("list", "list")
LONG = (40, 5, 17, 0, 3, 36, 1, 7)
MIXED = Files("txt", 2, 3, shuffle_files=True, shuffle_buffer=20)
EVEN = ((0, (1, 1)),)
KINDS = (("items", (5,), "shuffled"), ("stream", (5,), "in order"))
FOUND = [
    # The order after an epoch whose last drawn sample was left out.
    Program(
        "items",
        (4,),
        batch=1,
        order="shuffled",
        bad=frozenset({2}),
        skips=True,
        turns=(Turn(actions=(Action("read"), Action("read"))),),
    ),
    # Padded steps of several replicas had another structure.
    Program(sizes=(3,), collate="pair", extras="pad", turns=(Turn(replicas=2),)),
    # Empty parts: the count not in dim 0; numbers of another step; all replicas of a rank; vectors as long as a part.
    Program(sizes=(1,), collate="time first", turns=(Turn(replicas=2),)),
    Program(sizes=(3,), collate="counted", turns=(Turn(replicas=2),)),
    Program(sizes=(1,), collate="columns", turns=(Turn(2, 2),)),
    Program(sizes=(5,), batch=4, collate="columns", turns=(Turn(2),)),
    # A file that changed at equal size was read on.
    Program("files", (4,), turns=(Turn(actions=(Action("read", 1),)), Turn(changes="same size"))),
    # Arrays that were collated became tensors.
    Program(collate="arrays"),
    # A rank whose own data had ended before the step that was gone to, there and on the resume after.
    Program("stream", (7,), policy="HINT", batch=4, drop_last=True, turns=(Turn(2, actions=(SKIP, Action("read"))),)),
    Program("function", (1, 1), "OFF", extras="index", turns=(Turn(3, actions=(SKIP, Action("read"))),)),
    Program("function", (1, 5), turns=(Turn(3, actions=(SKIP, Action("read", 1))), Turn(3))),
    # The steps before one that was gone to, which are read where the index counts their samples, came on the resume.
    Program("function", (2, 3, 4), "OFF", extras="index", turns=(Turn(2, actions=(SKIP, READ)), Turn(2))),
    # Data that had ended in the middle of a row before a resume came once more on the resume after.
    Program("function", (1, 1, 1), turns=(Turn(3, 2, actions=(Action("read", 1),)),) * 2 + (Turn(3, 2),)),
    # A resume in the middle of a rank's own batch of records.
    Program("files", (9, 9), policy="FILE", batch=4, turns=(Turn(2, actions=(Action("read", 1),)), Turn(2))),
    # A rank left its loop alone, no further before the end than was read ahead.
    Program("items", (8,), turns=(Turn(2, prefetch=2, actions=(ALL, ALL), odd=Odd(1, "leaves", 3)),)),
    # Unlike batches in a row: one structure, or one error.
    *[
        Program("ready", (3, 3, 3), collate=collate, odd_batch=(1, how), turns=(Turn(world, replicas),))
        for how in ("dtype", "missing", "uneven", "keys")
        for collate, world, replicas in (("table", 2, 1), ("alike", 1, 2))
    ],
    Program("function", (3, 3, 2, 1), collate="noted", turns=(Turn(1, 2),)),
    Program("ready", (0, 3, 2), "HINT", collate="table", turns=(Turn(2),)),
    # Numbers of a batch that would be those of another one.
    Program("ready", (4, 4, 1), "HINT", collate="noted", turns=(Turn(2),)),
    Program("ready", (1, 4), collate="noted", turns=(Turn(2),)),
    Program("ready", (4, 1, 2), "OFF", collate="texts", turns=(Turn(2, 2),)),
    # As many samples left out as may be, and one more.
    *[
        Program(batch=2, sizes=(12,), bad=frozenset({1, 4, 5}), skips=True, max_errors=most, turns=(turn,))
        for most, turn in ((3, Turn()), (2, Turn(prefetch=2)), (3, Turn(2, prefetch=5)), (2, Turn(2, prefetch=5)))
    ],
    # A loop that was left, in which a sample was left out, counted as one that goes on.
    *(
        Program(data, (9,), batch=3, bad=frozenset({1}), skips=True, turns=(Turn(2, actions=acts),))
        for data in ("items", "together")
        for acts in ((READ, Action("break"), Action("reload", 1), ALL),)
    ),
    # Parts by cost; batches by length; a state of the data's own.
    Program("items", (9,), batch=6, balance=True, extras="index", turns=(Turn(2, actions=(READ,)), Turn(1, 3))),
    *(
        Program("items", (9,), batch=6, order=order, turns=(Turn(2, actions=(READ,)), Turn(1, 3)))
        for order in ("tokens", "buckets")
    ),
    Program("kept", (9,), turns=(Turn(2, actions=(READ, READ), save_each=True), Turn(3, prefetch=2))),
    Program("kept", (4,), turns=(Turn(1), Turn(2))),
    # Turns of files, with the places of their records; lists that are padded; short batches of a rank's own.
    *[
        Program(
            "files", sizes, policy, 3, extras="index", files=Files("txt", 2, block), turns=(Turn(world), Turn(world))
        )
        for policy, world in (("DATA", 1), ("FILE", 2))
        for sizes, block in (((5, 4), 3), ((4, 4), 2), ((6, 3, 3), 3))
    ],
    Program("items", (3,), batch=4, collate="named", extras="pad", turns=(Turn(2),)),
    Program("items", (3,), batch=4, collate="objects", extras="index and pad", turns=(Turn(2),)),
    Program("stream", (5,), "OFF", batch=4, turns=(Turn(2, 2),)),
    Program("stream", (5,), "OFF", batch=3, turns=(Turn(2, 3),)),
    # Files that were begun, dealt anew to more ranks.
    Program("files", (5, 3, 4, 2), "FILE", turns=(Turn(2, actions=(READ,)), Turn(3))),
    # A state that was changed by hand.
    Program(sizes=(5,), order="shuffled", turns=(Turn(2, actions=(READ,)), Turn(beyond=True))),
    Program("items", (1,), batch=1, order="tokens", turns=(Turn(actions=(READ,)), Turn(beyond=True))),
    Program(sizes=(9,), policy="HINT", turns=(Turn(2, actions=(Action("read", 1),)), Turn(2, beyond=True))),
    # The samples before a sought step, where each rank has a shard of its own.
    Program("items", (8,), "HINT", batch=9, turns=(Turn(3, actions=(SKIP,)),)),
    # Data that came to differ between epochs; and of which parts were without a sample only after it had grown.
    Program("items", (8,), turns=(Turn(2, actions=(ALL, ALL), odd=Odd(1, "grows")),)),
    Program("items", (8,), turns=(Turn(2, actions=(ALL, Action("grow", 1), ALL)),)),
    # A look in the middle of an epoch moved the state; before an epoch it used up random draws; it began an empty one.
    *(
        Program(data, sizes, order=order, turns=(Turn(world, actions=(READ, Action("look", how))), Turn(world)))
        for world, (data, sizes, order), how in (
            *((1, KINDS[0], 0), (2, KINDS[0], 1), (3, KINDS[0], 2)),
            *((1, KINDS[1], 1), (2, KINDS[1], 2), (3, KINDS[1], 0)),
        )
    ),
    *(
        Program("items", (5,), order="shuffled", turns=(Turn(2, actions=(READ, Action("look", how), ALL, ALL)),))
        for how in range(3)
    ),
    *(Program("items", (0,), turns=(Turn(world, actions=(Action("look", 1), ALL)),)) for world in (1, 2)),
    # The drop-in that was told an epoch in a loop, which was then left, forgot the steps of the loop.
    *(
        Program(data, (8,), drop_in=True, turns=(Turn(actions=(READ, Action("tell"), Action("break"))),))
        for data in ("items", "stream")
    ),
    # Data that had grown was saved with the length at construction.
    *(
        Program("items", (8,), order=order, turns=(Turn(world, actions=(ALL, Action("grow", 7))), Turn(2)))
        for world, order in ((1, "in order"), (2, "shuffled"), (3, "shuffled"))
    ),
    # An epoch that is read again, of data that has grown since.
    *(
        Program(
            "items", (size,), order=order, turns=(Turn(2, actions=(ALL, Action("reload", 1), Action("grow", 5), ALL)),)
        )
        for size, order in ((0, "in order"), (4, "in order"), (4, "shuffled"))
    ),
    # Parts of which none can be made without samples; a rank that is never without; numbers that are equal by chance.
    *(
        Program(data, (3,), collate=kind, turns=(Turn(2),))
        for kind in ("square", "nested")
        for data in ("items", "stream")
    ),
    *(Program(data, (3,), "DATA", 2, collate="counted", turns=(Turn(),)) for data in ("items", "stream", "ready")),
    Program(sizes=(7,), batch=4, collate="counted", turns=(Turn(replicas=2),)),
    Program("ready", (2, 1), collate="counted", fills=True, turns=(Turn(1, 2),)),
    Program("function", (3, 3, 2, 1), collate="noted", fills=True, turns=(Turn(1, 2),)),
    *(Program("ready", (3, 2), collate="table", odd_batch=(0, "uneven"), turns=(Turn(world),)) for world in (1, 2)),
    Program("items", (5,), batch=3, collate="named", extras="pad", turns=(Turn(2),)),
    *(
        Program("ready", (3, 3), collate="alike", odd_batch=(1, "layout"), turns=(turn,))
        for turn in (Turn(2), Turn(1, 2))
    ),
    # A rank that has something else than the others, from a step on; or from the begin; or has it in another order.
    *(
        Program("items", (9,), order="listed", balance=does == "weighs", turns=(Turn(2, odd=Odd(1, does, at)),))
        for does in ("draws", "weighs", "ends")
        for at in (0, 2)
    ),
    Program("stream", (5,), turns=(Turn(2, odd=Odd(1, "opens")),)),
    Program("items", (5,), order="batches", turns=(Turn(2, odd=Odd(1, "opens")),)),
    *(
        Program("items", (9,), order="batches", turns=(Turn(2, prefetch=ahead, odd=Odd(1, "breaks", 2)),))
        for ahead in (0, 2)
    ),
    Program("items", (9,), order="listed", turns=(Turn(2, prefetch=2, odd=Odd(0, "draws", 2)),)),
    *(Program(data, (5,), turns=(Turn(2, odd=Odd(1, "part")),)) for data in ("wrapped", "joined", "subset")),
    Program("subset", (5,), turns=(Turn(2, actions=(ALL, ALL), odd=Odd(0, "grows")),)),
    Program("subset", (5,), turns=(Turn(actions=(ALL, Action("grow", 2), ALL)),)),
    Program("items", (5,), turns=(Turn(2, odd=Odd(0, "wrong")),)),
    Program("items", (5,), turns=(Turn(2, odd=Odd(1, "wrong"), sharing=2),)),
    Program("stream", (5,), collate="named", turns=(Turn(2, odd=Odd(0, "keys")),)),
    *(
        Program(sizes=(4,), turns=(Turn(2, prefetch=ahead, actions=(ALL, READ), odd=Odd(0, "leaves", 2)),))
        for ahead in (0, 2)
    ),
    Program("items", (5,), bad=frozenset({2, 3}), turns=(Turn(2, odd=Odd(0, "fails")),)),
    Program("items", (6,), drop_in=True, turns=(Turn(2, prefetch=None),)),
    Program("items", (5,), batch=4, drop_in=True, turns=(Turn(2),)),
    # Another order at a resume, also of a state that was taken right after one.
    *(
        Program("items", (9,), order="listed", turns=(Turn(actions=(READ,)), *between, Turn(changes="order")))
        for between in ((), (Turn(actions=()),), (Turn(actions=(Action("look", 3),)),))
    ),
    Program("items", (9,), order="listed", bad=frozenset({4}), turns=(Turn(2, actions=(Action("read", 2),)), Turn(2))),
    Program("joined", (2, 0, 3, 4), batch=4, order="shuffled", turns=(Turn(2),)),
    # A failure behind steps that are held; files that were begun; rows of several batches; several rounds of turns.
    *(
        Program(data, (12,), bad=frozenset({9}), turns=(Turn(2, prefetch=ahead),))
        for data in ("items", "stream")
        for ahead in (2, 5)
    ),
    Program(
        "files", (6,) * 7, "FILE", files=Files(cycle_length=3), turns=(Turn(2, actions=(Action("read", 4),)), Turn())
    ),
    Program("function", (1,) * 6, "OFF", turns=(Turn(1, 2, actions=(SKIP, READ)),)),
    *(
        Program("files", (9, 9), batch=8, extras="index", files=Files("txt", 2, block), turns=(Turn(2),))
        for block in (1, 2)
    ),
    Program("items", (4,), drop_in=True, turns=(Turn(actions=(Action("tell", epochs=1), ALL, ALL)),)),
    # A look moved a sampler that counts its epochs on, which counted as told by the user.
    Program("table", (5,), order="permuted", turns=(Turn(actions=(Action("look"), ALL)),)),
    # A state after the last step of an epoch, whose successor was told to be the first one again, was refused.
    Program(sizes=(3,), batch=1, turns=(Turn(actions=(Action("read", 3), Action("tell"))), Turn())),
    # The samples before a step that was sought were not counted, where a batch sampler has batches of its own.
    Program("items", (4, 2, 3), order="batches", turns=(Turn(actions=(Action("seek", 1), READ)),)),
    # Mixtures: shares that are equal, of tokens too; ends; sources that begin again; weights that change.
    *(
        Program("mixture", (9, 7, 5), batch=4, mixed=Mixed(SOURCES, weights, stop, tokens=tokens), turns=turns)
        for weights in (((0, (1, 1, 1)),), ((0, (5, 3, 1)), (7, (1, 2, 2))))
        for stop, tokens in ENDS
        for turns in ((Turn(2, actions=(READ,)), Turn(3, prefetch=2)),)
    ),
    Program("mixture", (9, 7), batch=3, mixed=Mixed(LISTS, ((0, (2, 1)), (5, (1, 2)))), turns=(Turn(2), Turn(1, 2))),
    *(
        Program("mixture", (7, 9), batch=5, mixed=Mixed(kinds, EVEN, "repeat", 60, is_shuffled=True), turns=(Turn(2),))
        for kinds in (LISTS, ("fragments", "list"))
    ),
    Program(
        "mixture",
        (90, 15),
        batch=4,
        mixed=Mixed(("file", "list"), ((0, (6, 1)),), is_shuffled=True),
        turns=(Turn(2, actions=(Action("read", 20),)), Turn(3)),
    ),
    *(
        Program(
            "mixture",
            (9, 9),
            batch=4,
            mixed=Mixed(("file", "list"), EVEN, tokens=tokens),
            turns=(Turn(2, actions=(READ,)), Turn(1, actions=(READ,), weights=(1, 5)), Turn(3)),
        )
        for tokens in (False, True)
    ),
    # Equal counts; files by size, and parts of them; windows; ranks that read the same.
    *(
        Program(
            "items", (13,), batch=6, order=order, balance=True, equal_counts=True, extras="index", turns=(Turn(2, 2),)
        )
        for order in ("in order", "shuffled")
    ),
    Program("items", (40,), batch=20, order="shuffled", balance=True, equal_counts=True, turns=(Turn(3),)),
    *(
        Program("files", sizes, "FILE", 3, files=Files(by_size=size, part_bytes=part), turns=(Turn(2), Turn(2)))
        for sizes in ((9, 2, 5, 5), (1, 9, 1, 1))
        for size, part in ((True, 0), (True, 9), (False, 9))
    ),
    *(
        Program(
            "files", (26, 9), policy, 6, extras="index", files=Files(shuffle_buffer=4, cycle_length=slots), turns=turns
        )
        for policy in ("DATA", "FILE")
        for slots in (1, 2)
        for turns in ((Turn(2, actions=(READ,)), Turn(2)),)
    ),
    *(
        Program(data, sizes, policy, 4, turns=(Turn(2, sharing=2, prefetch=1, actions=(READ,)), Turn(2, sharing=2)))
        for data, sizes, policy in (("items", (9,), "DATA"), ("items", (9,), "OFF"), ("files", (9, 9, 9), "FILE"))
    ),
    Program("items", (9,), skips=True, bad=frozenset({2, 5}), max_errors=1, turns=(Turn(2, sharing=2),)),
    # What a sample draws is told by its number: also from the global generators, which go on as they were.
    *(
        Program(data, sizes, policy, 4, order=order, collate="seeded", turns=(Turn(2, actions=(READ,)), Turn(1, 3)))
        for data, sizes, policy, order in (
            ("items", (9,), "DATA", "shuffled"),
            ("files", (5, 6, 7), "FILE", "in order"),
        )
    ),
    *(
        Program(data, (9,), batch=4, collate="augmented", turns=(Turn(actions=(READ, READ)), Turn(1, 3, prefetch=2)))
        for data in ("items", "files")
    ),
    # A picture in a loop moved the state of the loop.
    *(Program("items", (9,), turns=(Turn(world, actions=(READ, Action("picture"))), Turn())) for world in (1, 2)),
    # Costs of records, elements and samples of a mixture; ways to give the same data.
    *(
        Program(data, (13,), "DATA", 6, balance=True, equal_counts=even, turns=(Turn(2, actions=(READ,)), Turn(1, 2)))
        for data in ("files", "stream")
        for even in (False, True)
    ),
    Program("mixture", (9, 7, 5), batch=6, mixed=Mixed(SOURCES, ((0, (5, 3, 1)),)), balance=True, turns=(Turn(2),)),
    *(
        Program(data, (5, 4), "DATA", 4, given=given, turns=(Turn(2, actions=(READ,)), Turn(3, prefetch=2)))
        for data, given in (("items", "bare"), ("table", "bare"), ("stream", "bare"), ("stream", "function"))
    ),
    *(
        Program("ready", (5, 4, 3), collate="table", given=given, turns=(Turn(2, actions=(READ,)), Turn(3)))
        for given in ("list", "function", "loader")
    ),
    # A state of what each rank read for itself, in another world; and a state of each rank's own data.
    *(
        Program(data, (9,), policy, 4, turns=(Turn(2, actions=(READ, *more)), Turn(3)))
        for data, policy in (("items", "OFF"), ("stream", "HINT"), ("kept", "HINT"))
        for more in ((), (ALL,))
    ),
    Program("items", (9,), "OFF", 4, turns=(Turn(2, actions=(READ,)), Turn(2, 2))),
    Program("items", (9,), "HINT", 4, turns=(Turn(1, 3, actions=(READ,)), Turn(1, 2))),
    Program("function", (2, 2, 2), "OFF", turns=(Turn(2, actions=(READ,)), Turn(1))),
    Program("kept", (11,), "HINT", 4, turns=(Turn(2, actions=(READ,)),) * 3),
    # Turns that are entered in the middle; files that a batch has opened; rows that were read ahead; long epochs.
    *(
        Program("files", (9, 8), batch=size, files=Files("txt", 2, 3), turns=(Turn(1, actions=(READ,)), Turn(2)))
        for size in (4, 5)
    ),
    Program("files", (4, 4), "FILE", 4, turns=(Turn(2, actions=(READ,)), Turn(2, changes="longer"))),
    Program(
        "files", (7, 7, 7, 7), "FILE", 5, turns=(Turn(2, 1, 5, save_each=True, actions=(Action("read", 4),)), Turn(2))
    ),
    *(
        Program("files", LONG, "FILE", 4, files=files, turns=(Turn(2, prefetch=ahead, save_each=True),))
        for ahead, files in ((0, Files()), (5, Files(cycle_length=3)))
    ),
    *(
        Program("files", LONG, "FILE", 4, files=MIXED, turns=(Turn(2, 1, 2, actions=(Action("read", 13),)), turn))
        for turn in (Turn(4), Turn())
    ),
    *(
        Program("lists", (11,), batch=4, order=order, turns=(Turn(2, actions=(READ,)), Turn(3)))
        for order in ("in order", "shuffled")
    ),
    # What a rank notes in its data is no difference, nor in that of another loader of it.
    *(
        Program(data, (8,), order=order, turns=(Turn(2, actions=(ALL, READ, Action("reload", 0, 1), ALL, ALL)),))
        for data, order in (
            ("items", "in order"),
            ("items", "permuted"),
            ("together", "in order"),
            ("wrapped", "in order"),
        )
    ),
    # A state that needs arguments; the end, sought; samples that are read together; steps ahead of inference mode.
    Program("stream", (9,), seed=1, turns=(Turn(1, actions=(READ,)), Turn(2))),
    *(
        Program(
            "items", (9,), batch=4, order=order, drop_last=drops, turns=(Turn(2, actions=(Action("skip", 9), ALL)),)
        )
        for order in ("in order", "shuffled", "permuted")
        for drops in (False, True)
    ),
    Program("together", (12,), batch=6, bad=frozenset({7}), turns=(Turn(2),)),
    *(
        Program(data, (9,), turns=(Turn(world, prefetch=2, actions=(Action("infer"), ALL)),))
        for data in ("items", "table", "stream")
        for world in (1, 2)
    ),
    Program("files", (7, 9), "FILE", 4, turns=(Turn(2, 2, actions=(Action("infer"), ALL)),)),
    # Groups of steps.
    *(
        Program(data, (11,), sums=True, turns=(Turn(world, prefetch=2, actions=(Action("read", 0, 4), READ)), Turn(2)))
        for data in ("items", "stream")
        for world in (1, 2)
    ),
    # Sums of steps that are voted for together.
    *(Program(data, (9,), sums=True, turns=(Turn(2, prefetch=3),)) for data in ("items", "stream")),
    # A stop behind steps that are passed over; files that are dealt anew, told; states of a long epoch; a look whose
    # epoch is not read; the state after the last step.
    Program(
        "function",
        (1,) * 6 + (0,) * 10,
        "OFF",
        turns=(Turn(2, prefetch=16, actions=(ALL, READ), odd=Odd(0, "leaves", 6)),),
    ),
    Program("files", (5, 3, 4, 2), "FILE", files=Files("fragments"), turns=(Turn(2, actions=(READ,)), Turn(3))),
    Program("stream", (90,), turns=(Turn(2, prefetch=5, save_each=True),)),
    *(
        Program("items", (4,), order="shuffled", turns=(Turn(2, actions=(act,)), Turn(3)))
        for act in (Action("look", 3), Action("read", 2))
    ),
    # Who hears of the epoch: a sampler, also inside of another; data; an iterable, whole or divided, which shows its
    # length; one that counts on by itself; and from whom: from the library, or from its owner, whose call counts.
    *(
        Program(data, (9,), policy, 4, order=order, shows=shows, drop_in=drop_in, seed=seed, turns=(turn, Turn(3)))
        for data, policy, order, shows, drop_in, seed in (
            *(("items", "DATA", "told", shows, shows == "counts", 1) for shows in ("epoch", "counts", "nothing")),
            *(("items", policy, "in order", "epoch", False, 0) for policy in ("DATA", "HINT")),
            *(("stream", "DATA", "in order", shows, shows != "counts", 0) for shows in ("epoch", "counts", "nothing")),
            ("items", "DATA", "permuted", "", False, 0),
        )
        for turn in (Turn(2, actions=(ALL, READ, Action("tell", int(shows != "nothing"), 1), READ, ALL, READ)),)
    ),
    *(
        Program(data, (5, 4), policy, 4, shows=shows, turns=(Turn(2, actions=(ALL, READ)), Turn(2)))
        for data, policy in (("stream", "HINT"), ("ready", "DATA"), ("ready", "HINT"))
        for shows in ("length", "epoch")
    ),
    *(
        Program(data, (5, 4), given=given, shows="epoch", turns=(Turn(2, actions=(ALL, READ)), Turn(2)))
        for data, given in (("stream", "bare"), ("stream", "function"), ("ready", "function"), ("ready", "plain"))
    ),
    Program("files", (5, 4), files=MIXED, turns=(Turn(actions=(READ, Action("tell", 1, 1), ALL)),)),
    # An epoch that is told, and those after it, at a resume; a place that was loaded, whose epoch is told again.
    *(
        Program("items", (9,), order="permuted", drop_in=drop_in, turns=(Turn(actions=acts), Turn(2)))
        for drop_in in (False, True)
        for acts in ((Action("tell", 0, 2), ALL, ALL), (Action("tell", 0, 2), ALL, ALL, READ))
    ),
    *(
        Program("items", (9,), order="told", shows="counts", drop_in=drop_in, turns=(Turn(2, actions=(READ,)), *turns))
        for drop_in in (False, True)
        for turns in ((Turn(3, actions=(Action("tell"),)), Turn(actions=(Action("tell", own), ALL))) for own in (0, 1))
    ),
    # Draws between ``iter`` and the first ``next``.
    *(
        Program("items", (9,), order="shuffled", drop_in=drop_in, turns=(Turn(2, actions=(DRAW, DRAW)), Turn(3)))
        for drop_in in (False, True)
    ),
    # Elements that are read again and are others.
    *(Program("stream", (9,), turns=(Turn(world, actions=(READ,)), Turn(world, changes="order"))) for world in (1, 2)),
]
