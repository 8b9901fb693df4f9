"""The plan of a loader before the first read: what its source says, with the options, the policy and the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchdistinput.plan.options import BYTES_AHEAD, InputOptions
from torchdistinput.plan.topology import AutoShardPolicy, Topology
from torchdistinput.sources.contract import SourceFacts
from torchdistinput.sources.kernel.explanation import HERE, Explanation, counted, in_bytes


def explain(
    plan: Explanation,
    facts: SourceFacts,
    options: InputOptions,
    topology: Topology,
    policy: str,
    *,
    epoch: int,
    devices: Sequence[str],
) -> Explanation:
    """The plan of a loader. Local.

    Args:
      plan: what its source says.
      facts: of its source.
      options: the user's.
      topology: the ranks that are asked for.
      policy: the name of the policy in force.
      epoch: the number of the epoch.
      devices: of this rank.
    """
    ranks, size = topology.num_workers, facts.fingerprint.get("batch size")
    copies = options.fetch_to_device and any(device != "cpu" for device in devices)
    code, unchecked = plan.user_code, plan.unchecked
    if options.sums:
        where = "in a thread of this library" if options.least_ahead and plan.loader_workers else HERE
        code = (*code, (f"sums ({', '.join(options.sum_names)})", where))
    if is_off := ranks > 1 and options.coordination == "off":
        unchecked = (*unchecked, "anything, as coordination is off")
    ahead = _read_ahead(options, plan, ranks)
    if copies:
        ahead += f"; copied to {', '.join(sorted(set(devices)))} ahead"
    return replace(
        plan,
        epoch=epoch,
        world_size=ranks,
        num_replicas=topology.num_replicas,
        policy=policy,
        policy_reason=_reason(options.auto_shard_policy, policy, facts, ranks),
        batch_size=size if isinstance(size, int) else None,
        read_ahead=ahead,
        user_code=code,
        state=_state(facts, plan, is_off=is_off),
        state_is_collective=plan.state_is_collective and not is_off,
        unchecked=unchecked,
    )


def _reason(asked: AutoShardPolicy | None, policy: str, facts: SourceFacts, ranks: int) -> str:
    what = {
        "DATA": "each rank takes its parts of the same global batches",
        "FILE": "each rank reads files of its own",
        "OFF": "each rank reads everything",
        "HINT": "the data divides itself",
    }[policy]
    if facts.fingerprint.get("kind") == "from function":
        return "the dataset function has divided the data"
    if ranks == 1:
        what = "one rank reads everything"
    if asked in {None, AutoShardPolicy.AUTO}:
        return f"{what}. AUTO chose it, as the data has {'' if policy == 'FILE' else 'no '}files to deal out"
    return what


def _read_ahead(options: InputOptions, plan: Explanation, ranks: int) -> str:
    workers = ""
    if plan.loader_workers:
        workers = f"; {plan.batches_ahead} more in {counted(plan.loader_workers, 'loader worker')} of each rank"
    if not options.least_ahead:
        return f"no step: each is made where next() asks for it{workers}"
    if options.prefetch is not None:
        return f"{counted(options.least_ahead, 'step')} of any size (prefetch={options.prefetch}){workers}"
    if ranks == 1:
        return f"{options.least_ahead} steps of any size{workers}"
    most = f"growing to {options.most_ahead} while they fit into {in_bytes(BYTES_AHEAD)}"
    return f"{options.least_ahead} steps ready, {most}{workers}"


def _state(facts: SourceFacts, plan: Explanation, *, is_off: bool) -> str:
    if is_off:
        return 'none: state_dict() and load_state_dict() are refused with coordination="off"'
    holds = (
        "epoch, step and the place in each open file" if facts.fingerprint.get("kind") == "files" else "epoch and step"
    )
    if plan.state_has_random is False:
        holds += "; no random states, as its code draws from those of each rank"
    elif plan.state_has_random or facts.needs_default_state or facts.draws_alone:
        holds += (
            f", and the random states that {'the order is' if facts.draws_order else 'its code may have'} drawn from"
        )
    where = "of as many ranks only" if plan.bound_to_world else "of any number of ranks"
    call = "is collective: every rank calls it" if plan.state_is_collective else "is local"
    return f"{holds}. For a run {where}. state_dict() {call}"
