"""All communication with other ranks. This page is the protocol; it names the module of each part.

**Meeting.** When a ``Strategy`` is made, each rank writes its address to the store of the default group, and waits
until all have signed in (``store``). Each rank then connects with ``log2 W`` others over TCP
(``endpoint``, ``connections``). The store is not asked again; at its exit a process writes there that it has ended. The
connections serve two kinds of *channel*: one for the calls of the strategy, on the caller's thread (``process_group``),
and one for each live iterator (``channel``). A message is an array of fixed size. Sums and texts of all ranks take
``log2 W`` rounds (``recursive_doubling``).

**Before an epoch.** ``distribute_dataset``, ``iter``, ``load_state_dict``, ``reduce`` and ``gather`` are collective.
Each rank brings the facts that must be equal everywhere, or the error that keeps it from going on (``fingerprints``).
The ranks compare one digest; only where digests differ are the facts themselves exchanged. Then all ranks go on, or
all raise the same error, which names the fact, the values and the ranks.

**The agreed path.** A rank votes for a step when it holds the step: read, checked, on its way to the device
(``step_sync``). The votes of all ranks are summed. The sums say which steps are agreed, where the end is, whether a
rank failed or stopped, and whether schemas or digests differ; the laws are in ``plan.step_agreement``. As every rank
sees the same sums, every rank draws the same conclusion at the same step. Texts follow only where the sums call for
them: the description of a failure (``failures``), a schema for a rank that has seen no sample, positions and
measurements from time to time. During an epoch, ranks that can still communicate use the votes, and nothing else.

**The abort path.** Where a rank can take part in no further vote, the channel ends: after a death, an interruption, an
exception of this library, or when its loop was left for good. The rank that leaves sends an *abort message* with its
reason over each connection, and closes them; where a process dies, the system closes them. A rank that misses a message
passes the abort message on. So every survivor raises an error that names the rank that left first, and why. There is no
third path.

**Waiting.** Each wait for another rank is bounded by ``timeout_seconds`` (``timeouts``) and sees signals. A rank that
waits tells its neighbours whom it waits for, so the error at the end of the time names the rank that is really late. A
network that is away for less than that ends nothing: connections are kept alive, what fails to connect is tried again,
and a lost connection of the strategy's own calls, silent for whole epochs, is opened again (``endpoint``). A forked
process inherits none of it (``fork_safety``).

A rank in its training code reads no message, and may wait there for a rank that has gone. So a rank that leaves its
loop also sends a *notice*, which ends nothing, and a thread looks twice a second for those of ranks that have gone, to
log them (``watch``).

Collectives on users' tensors (``reduce``, ``gather_ordered``) run on the caller's thread: on the user's group where
all ranks can send tensors of that device, else over the strategy's own channel.

The modules:

- ``launch``: The launcher, the default group, meshes.
- ``store``: The store at which all ranks sign in when a strategy is made, asked in few requests.
- ``process_group``: Agreements and sums of the ranks of a strategy.
- ``endpoint``: The port of a rank; how two ranks connect, and connect again.
- ``addresses``: The addresses by which other hosts reach this one.
- ``dial``: The attempts to connect to a rank, at all its addresses side by side.
- ``connections``: Messages from rank to rank, over sockets.
- ``channel``: The messages of one live iterator.
- ``recursive_doubling``: Sums and texts of all ranks in log2 W rounds.
- ``exchanges``: An exchange that can be begun, polled, and waited for in short naps.
- ``private_names``: The lookup of private names of torch and CPython, and the names that are used here.
- ``fork_safety``: Leaves connections and iterators to the parent process after a fork.
- ``fingerprints``: Compares the arguments of a call on all ranks.
- ``failures``: The description of a failure that is sent to the other ranks, and the error that all ranks raise.
- ``timeouts``: The bound of an iterator's waits, and the names of late ranks.
- ``watch``: The thread that looks for ranks that have gone, where an iterator is left alone for long.
- ``batch_digests``: Digests of batches, for ranks that must read the same data.
- ``step_sync``: The vote: all ranks agree on the steps, the end, errors and stops.
- ``reduce``: Reduce and gather.
- ``gather_ordered``: The outputs of all replicas in the order of the data.
"""
