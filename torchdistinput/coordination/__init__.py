"""All communication with other ranks. This page is the protocol; it names the module of each part.

**Meeting.** The ranks that train together have one tree of connections over TCP, for the life of the process: each rank
one to its parent and one to each child; up to 8 ranks it is a star around the first one (``tree``). It is made in the
first ``Strategy()`` (``meeting``): a parent listens, and writes its address to the store of the default group, where
its children read it, and connect. The ports are closed then, and the store is not asked again. A later ``Strategy()``
of the same ranks has the same connections. There is one collective (``channel``): a value goes up the tree, joined at
each parent, and comes down, the same for all. Votes, texts, sums and broadcasts are functions that join values. The
calls of a strategy, and each live iterator, are a *channel*: a number in the frames.

**Before an epoch.** ``distribute_dataset``, the first ``next`` of an epoch, ``reduce`` and ``gather`` are collective.
Each rank brings the facts that must be equal everywhere, or the error that keeps it from going on (``fingerprints``);
equal ones travel as one. Then all ranks go on, or all raise the same error, which names the fact, the values and the
ranks. The number of the exchange that agreed on an epoch is that of its channel.

**The agreed path.** A rank votes for a step when it holds the step: read, checked, on its way to the device
(``step_sync``). A vote is a *report*: samples and draws of the steps that the rank holds, whether it failed or stopped,
how long it waited. The reports of all ranks are joined into one. It says which steps are agreed, where the end is, and
how many steps are read ahead; the laws are in ``plan.step_agreement``. As every rank sees the same report, every rank
decides the same at the same step. Only where the report calls for it, each rank gives an *account*: of its failure, of
why it stopped, of what it read, of the schema for ranks that have seen no sample. That is one exchange, and one verdict
follows from it, the same on every rank (``failures.error_of_accounts``). During an epoch, ranks that can still
communicate use the votes, and nothing else; but for a state, which all ranks ask for (``state_dict``) where each has a
position of its own.

**The abort path.** Where a rank can take part in no further vote, the channel ends: after a death, an interruption, an
exception of this library, or when its loop was left for good. The rank that leaves says so in an *abort*, with its
reason; where a process dies, the system closes its connections, which ends all channels. Each rank passes it on, behind
the results that came before. So every survivor raises an error that names the rank that left first, and why. There is
no third path.

**Waiting.** Each wait for another rank is bounded by ``timeout_seconds`` (``timeouts``) and sees signals. Whoever waits
reads for all channels of the process. A rank that waits tells its neighbours whom it waits for, so the error at the end
of the time names the rank that is really late. A network that is away for less than that ends nothing: only waits have
a bound, no connection has one. A connection that is reset is not made again. A forked process inherits none of it
(``fork_safety``).

A rank in its training code reads no message, and may wait there for a rank that has gone. So a rank that leaves its
loop also sends a *notice*, which ends nothing, and a thread looks twice a second for those of ranks that have gone, to
log them (``watch``).

Collectives on users' tensors (``reduce``, ``gather_ordered``) run on the caller's thread: on the user's group where
all ranks can send tensors of that device, else over the strategy's own channel.

The modules:

- ``launch``: The launcher, the default group, meshes.
- ``store``: The store at which the ranks find each other, asked on a thread.
- ``addresses``: The addresses by which other hosts reach this one.
- ``meeting``: How the ranks connect, while ``Strategy()`` is made.
- ``tree``: The connections to the parent and the children, and the frames on them.
- ``channel``: The exchanges of one live iterator, or of the calls of one strategy.
- ``exchanges``: An exchange that can be begun, polled, and waited for in short naps.
- ``calls``: The exchanges that all ranks make together on the caller's thread.
- ``process_group``: Agreements and sums of the ranks of a strategy.
- ``private_names``: The lookup of private names of torch and CPython, and the names that are used here.
- ``fork_safety``: Leaves connections and iterators to the parent process after a fork.
- ``fingerprints``: Compares the arguments of a call on all ranks.
- ``failures``: The description of a failure that is sent to the other ranks, and the error that all ranks raise.
- ``timeouts``: The bound of a wait, and the names of late ranks.
- ``watch``: The thread that looks for ranks that have gone, where an iterator is left alone for long.
- ``batch_digests``: Digests of batches, for ranks that must read the same data.
- ``step_sync``: The vote: all ranks agree on the steps, the end, errors and stops.
- ``reduce``: Reduce and gather.
- ``gather_ordered``: The outputs of all replicas in the order of the data.
"""
