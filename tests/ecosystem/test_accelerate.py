"""accelerate and a loader of this library: what it builds of one is divided, or refused; where it ends is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

SAMPLES, BATCH, UPDATES_OF = 17, 4, 2


def data() -> TensorDataset:
    features = torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / SAMPLES
    return TensorDataset(torch.arange(SAMPLES), features, features.sum(dim=1))


def shuffled(cls: Any, **more: Any) -> Any:
    return cls(data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3), **more)


def train(accelerator: Any, loader: Any, step: Any) -> tuple[list[float], int]:
    """One epoch with accumulation; the weights and the number of updates."""
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    updates = 0
    for _, x, y in loader:
        with accelerator.accumulate(model):
            losses = (model(x).squeeze(1) - y).square()
            accelerator.backward(step(losses))
            updates += accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.flatten().tolist(), updates


def refusal(call: Any) -> str:
    with pytest.raises(tdi.InputError) as caught:
        call()
    return str(caught.value)


def everything(folder: str) -> dict[str, Any]:
    """One rank."""
    from accelerate import Accelerator, skip_first_batches  # noqa: PLC0415 - seconds, and only here
    from accelerate.data_loader import prepare_data_loader  # noqa: PLC0415 - as above

    from torchdistinput.integrations.accelerate import prepare  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=UPDATES_OF)
    found: dict[str, Any] = {}
    # A loader that accelerate does not know.
    plain = shuffled(tdi.DataLoader)
    even = tdi.DataLoader(data(), batch_size=BATCH, drop_last=True)
    found["accumulating"] = refusal(lambda: next(iter(accelerator.prepare(even))))
    accelerator.gradient_accumulation_steps = 1
    found["uneven"] = refusal(lambda: next(iter(plain)))
    costs = tdi.InputOptions(balance=[1.0] * SAMPLES)
    by_cost = tdi.DataLoader(data(), batch_size=BATCH, drop_last=True, options=costs)
    found["by cost"] = refusal(lambda: next(iter(by_cost)))  # though the number of ranks divides the batch
    found["skipped"] = refusal(lambda: list(skip_first_batches(plain, 2)))
    found["skipped by workers"] = refusal(lambda: list(skip_first_batches(shuffled(tdi.DataLoader, num_workers=1), 2)))
    found["prepared"] = refusal(lambda: list(prepare_data_loader(plain)))
    found["even"] = [each[0].tolist() for each in even]
    accelerator.gradient_accumulation_steps = UPDATES_OF
    # One that it knows.
    loader = prepare(accelerator, shuffled(tdi.DataLoader))
    assert accelerator.prepare(loader) is loader
    found["trained"] = train(accelerator, loader, lambda losses: tdi.average_loss(losses, loader.step))
    strategy = tdi.Strategy()
    steps = prepare(accelerator, strategy.distribute_dataset(DataLoader(data(), batch_size=BATCH)))
    found["gathered"] = [accelerator.gather_for_metrics({"n": each[0]})["n"].tolist() for each in steps]
    found["scalars"] = accelerator.gather(torch.tensor(accelerator.process_index)).tolist()
    found["objects"] = accelerator.gather_for_metrics([f"of {accelerator.process_index}"], use_gather_object=True)
    found["rest"] = [each[0].tolist() for each in skip_first_batches(steps, 3)]
    fresh = prepare(accelerator, shuffled(tdi.DataLoader))
    whole = [each[0].tolist() for each in fresh]
    found["state after an epoch"] = [fresh.state_dict()[name] for name in ("epoch", "step")]
    again = prepare(accelerator, shuffled(tdi.DataLoader))
    skipped = skip_first_batches(again, 2)
    found["skip"] = whole[2:], [each[0].tolist() for each in skipped], len(skipped)
    saving = Accelerator(cpu=True)
    for step, _ in enumerate(prepare(saving, shuffled(tdi.DataLoader))):
        if step == 1:
            saving.save_state(folder)
            break
    going_on = Accelerator(cpu=True)
    rest = prepare(going_on, shuffled(tdi.DataLoader))
    going_on.load_state(folder)
    found["saved"] = whole[2:], [each[0].tolist() for each in rest]
    second = [each[0].tolist() for each in fresh]
    later = prepare(accelerator, shuffled(tdi.DataLoader))
    later.set_epoch(1)
    found["later"] = second, [each[0].tolist() for each in later]
    unknown = prepare(accelerator, tdi.DataLoader(data(), batch_size=BATCH, shuffle=True))
    found["unknown order"] = refusal(lambda: list(skip_first_batches(unknown, 2)))
    ends = []
    for _ in steps:
        ends.append(accelerator.gradient_state.end_of_dataloader)
        if len(ends) == 3:
            break  # the next epoch is told of all the same
    ends.extend(accelerator.gradient_state.end_of_dataloader for _ in steps)
    found["ends"] = ends, accelerator.gradient_state.active_dataloader is steps
    accelerator.end_training()
    return found


def in_one_process() -> tuple[list[float], int]:
    """With a loader of torch's."""
    from accelerate import Accelerator  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=UPDATES_OF)
    return train(accelerator, accelerator.prepare_data_loader(shuffled(DataLoader)), torch.Tensor.mean)


def in_one_process_with_ours() -> tuple[list[float], int]:
    from accelerate import Accelerator  # noqa: PLC0415 - as above

    from torchdistinput.integrations.accelerate import prepare  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=UPDATES_OF)
    loader = prepare(accelerator, shuffled(tdi.DataLoader))
    return train(accelerator, loader, torch.Tensor.mean)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("accelerate")
    folder = str(tmp_path_factory.mktemp("accelerate"))
    return run_ranks(2, everything, folder, init_group=False, timeout_seconds=120)


def test_what_accelerate_makes_of_a_loader_is_divided_or_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "accumulate() would never make the last update" in found["accumulating"]
        assert "of unequal size" in found["uneven"]
        assert "of unequal size" in found["by cost"]
        for name in ("skipped", "skipped by workers", "prepared"):
            assert "every rank would read whole batches" in found[name]
            assert "integrations.accelerate.prepare(accelerator, loader)" in found[name]
        assert found["gathered"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16]]
        assert found["scalars"] == [0, 1]
        assert found["objects"] == ["of 0", "of 1"]
        whole, skipped, length = found["skip"]
        assert skipped == whole
        assert length == len(whole) == 3
        assert found["state after an epoch"] == [1, 0]
        assert found["saved"][0] == found["saved"][1]
        second, later = found["later"]
        assert later == second
        assert "torch's default random state" in found["unknown order"]
        assert found["ends"] == ([False] * 3 + [False] * 4 + [True], False)
    assert [rank["rest"] for rank in ranks] == [[[12, 13], [16]], [[14, 15], []]]
    assert [rank["even"][0] for rank in ranks] == [[0, 1], [2, 3]]


def test_accumulation_makes_the_last_update_and_the_weights_are_those_of_one_process(
    ranks: list[dict[str, Any]],
) -> None:
    ((weights, updates),) = run_ranks(1, in_one_process, init_group=False, timeout_seconds=120)
    ((same, as_many),) = run_ranks(1, in_one_process_with_ours, init_group=False, timeout_seconds=120)
    assert updates == as_many == 3
    assert same == weights
    for found in ranks:
        assert found["trained"][1] == 3
        torch.testing.assert_close(torch.tensor(found["trained"][0]), torch.tensor(weights), rtol=0, atol=1e-6)
