"""Several steps in one program (train/common/many_steps.py): the same numbers as single steps,
whatever a call has."""

import gc
import itertools
from dataclasses import dataclass, replace
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
    x = batch["x"]
    loss = update(F.mse_loss(model(x), scale * x), optimizer)
    return {"loss": loss, "more": (x.mean(), None, scale)}


def make(mesh, optimizer, dropout=0.0):
    """Returns a model and its optimizer, the same in each call."""
    torch.manual_seed(0)
    return on_mesh(mesh, Net(dropout), optimizer)


def uploaded(mesh, count):
    """Returns so many batches on the device, the same in each call."""
    torch.manual_seed(1)
    return [{"x": device.upload(torch.randn(8, 6), mesh)} for _ in range(count)]


@dataclass
class Trained:
    """What a training has logged, and how it ended."""

    steps: list[int]  # those that were logged
    values: list[float]  # of these: loss, mean; loss, mean; …
    tensors: list[torch.Tensor]  # of model and optimizer, on the host


def trained_on_19_batches(mesh, optimizer, most: int) -> Trained:
    """Trains in calls of at most `most` steps; the first two are alone, every fourth is logged."""
    state = make(mesh, optimizer)
    step_fn = many_steps.compiled(train_step, mesh, most)
    steps = []
    values = []
    batches = []
    for step, batch in enumerate(uploaded(mesh, 19), 1):
        batches.append(batch)
        if not many_steps.ends_call(step, most, 19, single_steps=2):
            continue

        device.set_lr(state[1], 0.1 / (1 + (step - 1) // 4))
        metrics = step_fn(state, batches, 0.5)
        if many_steps.is_due(4, step, len(batches)) or step == 19:
            mean, *others = metrics["more"]
            assert others == [None, 0.5]
            steps.append(step)
            values += device.fetch([metrics["loss"], mean])
        batches = []

    model, made = state
    tensors = list(model.state_dict().values())
    for of_parameter in made.state.values():
        tensors += of_parameter.values()
    return Trained(steps, values, device.read([tensor.detach() for tensor in tensors]))


# SGD's rate is a number of the host, AdamW's a tensor on the device.
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)
adamw = partial(torch.optim.AdamW, lr=0.1, foreach=False)


@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=lambda one: one.func.__name__)
def test_calls_of_several_steps_are_the_same_steps(mesh, optimizer):
    single = trained_on_19_batches(mesh, optimizer, most=1)
    looped = trained_on_19_batches(mesh, optimizer, most=4)

    assert single.steps == looped.steps == [4, 8, 12, 16, 19]
    assert looped.values == pytest.approx(
        single.values, rel=1e-5
    )  # a mean may add in another order
    assert all(map(torch.equal, looped.tensors, single.tensors))
    report = device.graph_report()
    assert report["recompilations"] == []
    assert report["traced"] == 6, report
    assert report["repeated"] == 17 + (5 + 1), report


def test_more_steps_than_memory_holds_are_refused(refused):
    sentence = "--steps-a-call is 1001; at most 1000, since all batches"
    refused(dlrm, "tiny --steps-a-call 1001", sentence)


def test_random_numbers_inside_the_loop_are_refused(mesh):
    state = make(mesh, torch.optim.SGD, dropout=0.5)
    step_fn = many_steps.compiled(train_step, mesh, 2)
    message = "draws random numbers .* would be the same in every round"
    with pytest.raises(GraphError, match=message):
        step_fn(state, uploaded(mesh, 2), 0.5)


def test_a_step_that_keeps_a_tensor_is_refused(mesh):
    state = make(mesh, torch.optim.SGD, dropout=0.5)
    kept = []

    def keeping_step(state, batch):
        kept.append(batch["x"] + 1)
        return {"sum": kept[-1].sum()}

    step_fn = many_steps.compiled(keeping_step, mesh, 2)
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

    ends = []
    for step in range(start + 1, total + 1):
        if many_steps.ends_call(step, most, total, alone):
            ends.append(step)
    assert ends == expected

    for before, end in itertools.pairwise([start, *ends]):
        is_due = any(step % 3 == 0 for step in range(before + 1, end + 1))
        assert many_steps.is_due(3, end, end - before) == is_due


@pytest.mark.parametrize(
    ("plan", "model_devices", "optimizer"),
    [
        pytest.param("exchange", 2, "lazy_adam", marks=pytest.mark.slow),
        ("auto", 0, "adagrad"),
    ],
)
def test_tables_are_updated_as_by_single_steps(mesh, monkeypatch, plan, model_devices, optimizer):
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 12 * 64)
    # Of these rows "auto" makes both plans.
    monkeypatch.setattr(dlrm, "SYNTHETIC_ROWS", (400, 8_000, 30_000))
    monkeypatch.setattr(dlrm, "SYNTHETIC_LOOKUPS", (3, 1, 1))
    config = replace(
        dlrm.TINY,
        plan=plan,
        model_devices=model_devices,
        optimizer=optimizer,
        lr=0.1,
        batch_size=64,
    )
    data = dlrm.open_data(config)

    def trained(most: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        state = dlrm.build(config, data, mesh)
        step_fn = many_steps.compiled(dlrm.train_step, mesh, most)
        with loading.parallel_loader(data.train, 64, mesh, train=True, stop=12) as loader:
            for _ in range(12 // most):
                batches = [next(loader) for _ in range(most)]
                metrics = step_fn(state, batches, config, mesh)
        found = {"loss": metrics["loss"]}
        found |= dict(state.model.named_parameters())
        found |= state.embeddings.pieces()
        return {name: tensor.detach().cpu() for name, tensor in found.items()}

    single = trained(1)
    gc.collect()  # its arrays, so that those of the next have their sizes, and their pieces
    looped = trained(4)

    assert single.keys() == looped.keys()
    assert len(single) > 10
    different = [name for name in single if not torch.equal(single[name], looped[name])]
    assert different == []
