"""Several steps in one program (train/common/many_steps.py): the same numbers as single steps, whatever a call has."""

import gc
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, on_mesh, update

from train import dlrm
from train.common import device, loading, many_steps
from train.common.mesh import GraphError


def train_step(state, batch, scale):
    model, optimizer = state
    loss = update(F.mse_loss(model(batch["x"]), scale * batch["x"]), optimizer)
    return {"loss": loss, "more": (batch["x"].mean(), None, scale)}


def make(mesh, optimizer, dropout=0.0):
    torch.manual_seed(0)
    return on_mesh(mesh, Net(dropout), optimizer)


def uploaded(mesh, count):
    torch.manual_seed(1)
    return [{"x": device.upload(torch.randn(8, 6), mesh)} for _ in range(count)]


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)  # its rate is a number of the host
adamw = partial(torch.optim.AdamW, lr=0.1, foreach=False)  # its rate is a tensor on the device


@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=lambda one: one.func.__name__)
def test_calls_of_several_steps_are_the_same_steps(mesh, optimizer):
    found = []
    for most in (1, 4):
        state = make(mesh, optimizer)
        step_fn, rows, batches = many_steps.compiled(train_step, mesh, most), [], []
        for step, batch in enumerate(uploaded(mesh, 19), 1):
            batches.append(batch)
            if not many_steps.ends_call(step, most, 19, single_steps=2):
                continue
            device.set_lr(state[1], 0.1 / (1 + (step - 1) // 4))
            metrics = step_fn(state, batches, 0.5)
            if many_steps.is_due(4, step, len(batches)) or step == 19:
                mean, *others = metrics["more"]
                rows.append((step, *device.fetch([metrics["loss"], mean])))
                assert others == [None, 0.5]
            batches = []
        tensors = [*state[0].state_dict().values(), *(t for each in state[1].state.values() for t in each.values())]
        found.append((rows, device.read([tensor.detach() for tensor in tensors])))
    (rows, state), (looped_rows, looped_state) = found
    assert [row[0] for row in rows] == [4, 8, 12, 16, 19]
    assert sum(looped_rows, ()) == pytest.approx(sum(rows, ()), rel=1e-5)  # a mean may add up in another order
    assert all(map(torch.equal, looped_state, state))
    report = device.graph_report()
    assert report["recompilations"] == [] and report["traced"] == 6 and report["repeated"] == 17 + (5 + 1), report


def test_what_a_loop_would_change_or_cannot_hold_is_refused(mesh, refused):
    refused(dlrm, "tiny --steps-a-call 1001", "--steps-a-call is 1001; at most 1000, since all batches")
    step_fn, state = many_steps.compiled(train_step, mesh, 2), make(mesh, torch.optim.SGD, dropout=0.5)
    with pytest.raises(GraphError, match="draws random numbers .* would be the same in every round"):
        step_fn(state, uploaded(mesh, 2), 0.5)
    kept = []
    step_fn = many_steps.compiled(lambda state, batch: kept.append(batch["x"] + 1) or {"sum": kept[-1].sum()}, mesh, 2)
    with pytest.raises(GraphError, match="keeps 1 tensors"):
        step_fn(state, uploaded(mesh, 2))


@pytest.mark.parametrize(
    ("start", "most", "alone", "expected"),
    [
        (0, 4, 0, [4, 8, 10]),
        (3, 4, 0, [4, 8, 12, 13]),  # a resumed run
        (0, 4, 5, [1, 2, 3, 4, 5, 8, 10]),
    ],
)
def test_where_calls_end_and_what_is_due_there(start, most, alone, expected):
    total = start + 10
    ends = [step for step in range(start + 1, total + 1) if many_steps.ends_call(step, most, total, alone)]
    assert ends == expected
    for before, end in itertools.pairwise([start, *ends]):
        due = any(number % 3 == 0 for number in range(before + 1, end + 1))
        assert many_steps.is_due(3, end, end - before) == due


@pytest.mark.parametrize(("plan", "model_devices", "optimizer"), [("exchange", 2, "lazy_adam"), ("auto", 0, "adagrad")])
def test_tables_are_updated_as_by_single_steps(mesh, monkeypatch, plan, model_devices, optimizer):
    small = {"SYNTHETIC_TRAIN": 12 * 64, "SYNTHETIC_ROWS": (400, 8_000, 30_000), "SYNTHETIC_LOOKUPS": (3, 1, 1)}
    for name, value in small.items():  # of these rows "auto" makes both plans
        monkeypatch.setattr(dlrm, name, value)
    config = replace(dlrm.TINY, plan=plan, model_devices=model_devices, optimizer=optimizer, lr=0.1, batch_size=64)
    data = dlrm.open_data(config)

    def trained(most: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        state, step_fn = dlrm.build(config, data, mesh), many_steps.compiled(dlrm.train_step, mesh, most)
        with loading.parallel_loader(data.train, 64, mesh, train=True, stop=12) as loader:
            for _ in range(12 // most):
                metrics = step_fn(state, [next(loader) for _ in range(most)], config, mesh)
        found = {"loss": metrics["loss"], **dict(state.model.named_parameters()), **state.embeddings.pieces()}
        return {name: tensor.detach().cpu() for name, tensor in found.items()}

    one = trained(1)
    gc.collect()  # its arrays, so that those of the next have their sizes, and their pieces
    looped = trained(4)
    assert one.keys() == looped.keys() and len(one) > 10
    assert [name for name in one if not torch.equal(one[name], looped[name])] == []
