"""``run`` with several replicas in one process: the order, the collectives, the gradients, the ends."""

from __future__ import annotations

import contextvars
import gc
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torchdistinput as tdi
from torchdistinput import PerReplica

STRATEGY = tdi.Strategy(["cpu"])
VARIABLE = contextvars.ContextVar("variable", default="unset")


def run(num: int, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    return tdi.Strategy(["cpu"] * num).run(fn, args, kwargs)


def local_results(value: Any, num: int) -> tuple[Any, ...]:
    return tdi.Strategy(["cpu"] * num).local_results(value)


def context() -> Any:
    found = tdi.get_replica_context()
    assert found is not None
    return found


def replica_id() -> int:
    number: int = context().replica_id_in_sync_group
    return number


# ------------------------------------------------------------------------------------------------ calling and returning


def test_each_replica_gets_its_part_of_every_per_replica_and_the_rest_as_it_is() -> None:
    shared = {"a": [1, 2]}

    def step(x: int, nested: dict[str, Any], *, y: int) -> tuple[int, ...]:
        assert nested["shared"] is shared
        return replica_id(), x, nested["x"], y

    found = run(
        2, step, (PerReplica([10, 11]), {"x": PerReplica([20, 21]), "shared": shared}), {"y": PerReplica([30, 31])}
    )
    assert local_results(found, 2) == ((0, 10, 20, 30), (1, 11, 21, 31))


def test_one_replica_is_a_direct_call_on_the_callers_thread() -> None:
    def step(x: Tensor) -> Tensor:
        assert threading.current_thread() is caller
        assert context().num_replicas_in_sync == 1
        VARIABLE.set("changed")  # nothing stands between the caller and the function
        return x

    caller, x = threading.current_thread(), torch.ones(1)
    token = VARIABLE.set("before")
    try:
        assert run(1, step, (PerReplica([x]),)) is x
        assert VARIABLE.get() == "changed"
    finally:
        VARIABLE.reset(token)


def test_there_is_no_replica_context_outside_of_run() -> None:
    assert tdi.get_replica_context() is None
    run(2, replica_id)
    assert tdi.get_replica_context() is None


def test_the_same_object_from_all_replicas_comes_back_bare() -> None:
    assert local_results(run(3, lambda x: x, (5,)), 3) == (5,)
    assert run(2, lambda: None) is None


def test_the_replicas_have_the_modes_and_context_variables_of_the_caller() -> None:
    def modes() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_device().type,
            VARIABLE.get(),
        )

    token = VARIABLE.set("the caller's")
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.float16, cache_enabled=False), torch.device("meta"):
            found = local_results(run(2, modes), 2)
        assert found == ((False, torch.float16, False, False, "meta", "the caller's"),) * 2
        with torch.inference_mode(), torch.enable_grad():
            assert local_results(run(2, modes), 2) == ((True, False, True, True, "cpu", "the caller's"),) * 2
        assert local_results(run(2, modes), 2) == ((True, False, True, False, "cpu", "the caller's"),) * 2
    finally:
        VARIABLE.reset(token)


# ------------------------------------------------------------------------------------------------ the baton


def test_replicas_run_one_at_a_time_in_order_and_switch_only_at_collectives() -> None:
    def step() -> None:
        for part in range(3):
            steps.append((part, replica_id(), "begins"))
            threading.Event().wait(0.001)  # any other thread would get in here
            steps.append((part, replica_id(), "ends"))
            context().all_reduce("SUM", part)

    steps: list[tuple[int, int, str]] = []
    run(3, step)
    assert steps == [(part, k, what) for part in range(3) for k in range(3) for what in ("begins", "ends")]


def test_draws_from_global_random_state_are_the_same_in_every_run() -> None:
    def step() -> list[float]:
        draws = []
        for _ in range(3):
            draws += [torch.rand(()).item(), random.random()]
            context().all_reduce("SUM", 1)
        return draws

    def epoch() -> tuple[Any, ...]:
        torch.manual_seed(3)
        random.seed(3)
        return local_results(run(4, lambda: tuple(step())), 4)

    first = epoch()
    assert all(epoch() == first for _ in range(20))
    assert len({draw for replica in first for draw in replica}) == 4 * 6


# ------------------------------------------------------------------------------------------------ collectives


def test_all_reduce_gives_each_replica_a_result_of_its_own() -> None:
    def step(x: Tensor) -> Tensor:
        total = context().all_reduce("sum", x)
        assert isinstance(total, Tensor)
        return total.add_(replica_id())

    found = run(3, step, (PerReplica([torch.tensor([k]) for k in (1, 2, 3)]),))
    assert [total.tolist() for total in local_results(found, 3)] == [[6], [7], [8]]


def test_all_reduce_follows_the_laws_of_reduce_and_takes_structures() -> None:
    def step() -> Any:
        k = replica_id()
        fields = {"n": k, "x": [torch.tensor(float(k)), torch.tensor([k, k], dtype=torch.int32)]}
        return context().all_reduce("MEAN", dict(reversed(fields.items())) if k else fields)

    for found in local_results(run(2, step), 2):
        torch.testing.assert_close(found["n"], torch.tensor(0.5, dtype=torch.float64))
        torch.testing.assert_close(found["x"][0], torch.tensor(0.5))
        torch.testing.assert_close(found["x"][1], torch.full((2,), 0.5, dtype=torch.float64))


def test_all_gather_concatenates_uneven_parts_in_replica_order() -> None:
    def step() -> Any:
        k = replica_id()
        return context().all_gather({"ids": torch.full((2, k), k)}, axis=1)

    for found in local_results(run(3, step), 3):
        assert found["ids"].tolist() == [[1, 2, 2], [1, 2, 2]]


def test_the_collectives_of_one_replica_change_nothing() -> None:
    def step(x: Tensor) -> tuple[Any, Any]:
        return context().all_reduce("MEAN", x), context().all_gather(x, 0)

    x = torch.ones(2, dtype=torch.int32)
    reduced, gathered = run(1, step, (x,))
    assert reduced is x
    assert gathered.tolist() == [1, 1]


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_the_gradient_of_all_reduce_is_the_all_reduce_of_the_gradients(op: str) -> None:
    def step(x: Tensor) -> Tensor:
        y = context().all_reduce(op, {"square": x * x})["square"]
        torch.autograd.backward(y * (replica_id() + 1))
        assert isinstance(x.grad, Tensor)
        return x.grad

    xs = [torch.tensor(float(k + 1), requires_grad=True) for k in range(3)]
    upstream = (1 + 2 + 3) / (3 if op == "MEAN" else 1)
    found = local_results(run(3, step, (PerReplica(xs),)), 3)
    assert [grad.item() for grad in found] == [2 * x.item() * upstream for x in xs]


def test_the_gradient_of_all_gather_is_the_sum_of_the_gradients_of_the_own_part() -> None:
    def step(x: Tensor) -> Tensor:
        whole = context().all_gather(x, 1)
        (whole.cumsum(1) * (replica_id() + 1)).sum().backward()
        assert isinstance(x.grad, Tensor)
        return x.grad

    parts = [torch.ones(2, size, dtype=torch.float64, requires_grad=True) for size in (3, 0, 1)]
    whole = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.backward((whole.cumsum(1) * 6).sum())
    found = local_results(run(3, step, (PerReplica(parts),)), 3)
    torch.testing.assert_close(torch.cat(found, 1), whole.grad)


def test_a_replica_whose_value_needs_no_gradient_takes_part_in_the_backward_of_the_others() -> None:
    def step(x: Tensor) -> Tensor:
        y = context().all_reduce("SUM", x)
        y.backward()
        assert isinstance(y, Tensor)
        return y.detach()

    leaf = torch.tensor(2.0, requires_grad=True)
    run(2, step, (PerReplica([leaf, torch.tensor(3.0)]),))
    assert leaf.grad is not None
    assert leaf.grad.item() == 2.0


def test_without_gradients_nothing_is_linked() -> None:
    def step(x: Tensor) -> bool:
        with torch.no_grad():
            y = context().all_reduce("SUM", x)
        return bool(y.requires_grad)

    assert local_results(run(2, step, (PerReplica([torch.ones(1, requires_grad=True)] * 2),)), 2) == (False,)


def test_a_backward_after_the_end_of_run_is_an_error_not_a_hang() -> None:
    losses = run(2, lambda x: context().all_reduce("SUM", x), (PerReplica([torch.ones(1, requires_grad=True)] * 2),))
    with pytest.raises(RuntimeError, match="has returned already"):
        local_results(losses, 2)[0].backward()


def test_gradients_of_several_replicas_on_one_module_are_those_of_the_whole_batch() -> None:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum() / 6
        loss.backward()
        assert isinstance(loss, Tensor)
        return loss.detach()

    torch.manual_seed(0)
    model, whole = torch.nn.Linear(3, 2).double(), torch.randn(6, 3, dtype=torch.float64)
    model(whole).square().sum().div(6).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    run(3, step, (PerReplica([whole[:4], whole[4:], whole[6:]]),))
    for parameter, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------ the ends


def test_an_exception_of_one_replica_is_raised_once_and_unwinds_the_others() -> None:
    def step() -> None:
        try:
            context().all_reduce("SUM", 1)
            if replica_id() == 1:
                raise LookupError("replica 1 has lost it")
            context().all_reduce("SUM", 1)
        finally:
            left.append(replica_id())

    left: list[int] = []
    with pytest.raises(LookupError, match="replica 1 has lost it"):
        run(3, step)
    assert sorted(left) == [0, 1, 2]
    begun: list[int] = []

    def begin() -> None:
        begun.append(replica_id())
        raise LookupError("at once")

    with pytest.raises(LookupError, match="at once"):
        run(3, begin)
    assert begun == [0]
    assert not [thread for thread in threading.enumerate() if "replica" in thread.name]


def test_a_replica_that_catches_everything_or_fails_while_it_is_ended_is_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def step() -> None:
        if replica_id() == 2:
            raise LookupError("replica 2 has lost it")
        for _ in range(3):
            try:
                context().all_reduce("SUM", 1)
            except BaseException:
                if replica_id() == 1:
                    raise LookupError("the broom is gone") from None

    with pytest.raises(LookupError, match="replica 2 has lost it"):
        run(3, step)
    assert "raised while it was being ended" in caplog.text
    assert "the broom is gone" in caplog.text
    assert not [thread for thread in threading.enumerate() if "replica" in thread.name]


def test_the_error_of_a_collective_is_raised_where_it_was_called_and_can_be_caught_there() -> None:
    def step() -> str:
        try:
            context().all_reduce("MAX", 1)
        except ValueError as error:
            return f"{error}"[:5]
        return ""

    assert local_results(run(2, step), 2) == ("'MAX'", "'MAX'")


def test_a_failed_run_is_freed_without_the_garbage_collector() -> None:
    class Payload:
        pass

    def step(payload: Payload) -> None:
        context().all_reduce("SUM", 1)
        context().all_reduce("SUM", torch.ones(replica_id() + 1))

    payload = Payload()
    alive = weakref.ref(payload)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="one shape"):
            run(2, step, (payload,))
        del payload
        assert alive() is None
    finally:
        gc.enable()


def test_ctrl_c_in_the_collective_ends_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchdistinput.replicas.run.perform", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(2, lambda: context().all_reduce("SUM", 1))
    assert not [thread for thread in threading.enumerate() if "replica" in thread.name]


def differently(other: Callable[[Any], Any]) -> Callable[[], Any]:
    """The first replica is in a reduction, the others do otherwise."""
    return lambda: context().all_reduce("SUM", 1) if replica_id() == 0 else other(context())


def backward_of_the_first(x: Tensor) -> None:
    y = context().all_reduce("SUM", x)
    if replica_id() == 0:
        y.backward()


def summed(x: Any) -> Any:
    return context().all_reduce("SUM", x)


Call = Callable[[], Any]
GIVEN: list[Any] = [torch.ones(2), {"x": 1}, "ab"]
OF_ONE: Any = [1]
REFUSED: list[tuple[Call, type[Exception], str]] = [
    *(
        (partial(run, num, call), RuntimeError, said)
        for num in (1, 2)
        for call, said in (
            (lambda: STRATEGY.reduce("SUM", 1), "reduce was called inside a function given to run"),
            (lambda: STRATEGY.run(replica_id), "run was called inside"),
        )
    ),
    *((partial(run, 1, str, args), TypeError, r"write args=\(value,\)") for args in GIVEN),
    (partial(run, 1, str, (), OF_ONE), TypeError, "kwargs as a dict"),
    *(
        (
            partial(run, num, lambda: context().all_gather("text", 0)),
            TypeError,
            "takes tensors, arrays and numbers, got",
        )
        for num in (1, 2)
    ),
    (
        partial(run, 3, lambda: replica_id() == 1 or summed(1)),
        RuntimeError,
        r"replica\(s\) 1 returned .* replica 0 in all_reduce, replica 2 in all_reduce",
    ),
    (
        partial(run, 2, backward_of_the_first, (PerReplica([torch.ones(1, requires_grad=True) for _ in range(2)]),)),
        RuntimeError,
        r"replica\(s\) 1 returned .* replica 0 in the gradient of all_reduce",
    ),
    *(
        (partial(run, 2, differently(other)), RuntimeError, said)
        for other, said in (
            (lambda one: one.all_gather(torch.ones(1), 0), "the first is in all_reduce, number 1 in all_gather"),
            (lambda one: one.all_reduce("MEAN", 1), "different ops or axes"),
            (lambda one: one.all_reduce("SUM", {"x": 1}), r"number 1 in all_reduce of \[\"\['x'\]\"\]"),
        )
    ),
    *(
        (partial(run, 2, summed, (PerReplica([torch.ones(2), other]),)), ValueError, said)
        for other, said in (
            (torch.ones(3), r"all_reduce needs one shape on all replicas, found \[2\] on replica 0, \[3\] on"),
            (torch.ones(2).double(), "float32 on replica 0, float64 on replica 1"),
        )
    ),
]


@pytest.mark.parametrize(("call", "error", "said"), REFUSED)
def test_what_no_replica_can_do_is_refused_and_said(call: Call, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()
