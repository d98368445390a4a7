"""The numbers of the five recipes, without compiled steps: optimizers, learning rates, seeds, losses and metrics,
against what papers and authors' code say, PyTorch, scikit-learn and scipy."""

import itertools
import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import timm
import torch
import torch.nn.functional as F
import torchvision
from helpers import fewer_sentences
from torch import Tensor, nn

from data import criteo, wmt
from models import architectures, encoders, objectives
from train import dlrm, glue, pretrain, resnet50, transformer, translate
from train.common import accumulate, device, embedding, loading, many_steps

# ---- optimizers ------------------------------------------------------------------------------------------------------


def settings(optimizer: torch.optim.Optimizer, *names: str) -> list[tuple]:
    """Returns these numbers of each group of parameters."""
    return [tuple(group[name] for name in names) for group in optimizer.param_groups]


# google-research/bert's run_classifier.py; Liu et al. 2019, table 10; Yang et al. 2019, table 8
FINE_TUNING = {
    "bert": {"lr": 2e-5, "warmup": 0.1, "weight_decay": 0.01, "epochs": 3, "beta2": 0.999},
    "distilbert": {"lr": 5e-5, "warmup": 0.1, "weight_decay": 0.01, "epochs": 3, "beta2": 0.999},
    "roberta": {"lr": 2e-5, "warmup": 0.06, "weight_decay": 0.1, "epochs": 10, "beta2": 0.98},
    "xlnet": {"lr": 3e-5, "warmup": 0.1, "weight_decay": 0.0, "epochs": 3, "beta2": 0.999},
}
FINE_TUNING["fairseq-roberta"] = FINE_TUNING["roberta"]
FINE_TUNING["auto"] = FINE_TUNING["bert"]


@pytest.mark.parametrize("model", encoders.NAMES)
def test_fine_tuning_has_the_optimizer_of_its_recipe(model, mesh):
    recipe = FINE_TUNING[model]
    config = glue.validate(glue.Config(model=model, data="x/y", checkpoint="a/b"))
    found = {name: getattr(config, name) for name in ("lr", "warmup", "weight_decay", "epochs")}
    assert found | {"beta2": recipe["beta2"]} == recipe
    assert (config.batch_size, config.clip) == (32, 1.0)
    data = glue.open_data(glue.validate(replace(glue.TINY, model=model)))
    optimizer = glue.build(config, data, mesh).optimizer
    assert type(optimizer) is torch.optim.AdamW
    numbers = (0.9, recipe["beta2"]), 1e-6, False
    expected = [(recipe["weight_decay"], *numbers), (0.0, *numbers)]
    assert settings(optimizer, "weight_decay", "betas", "eps", "amsgrad") == expected


# Devlin et al. 2019, A.2; Liu et al. 2019, table 9; Yang et al. 2019, table 7; huggingface's distillation/train.py
PRETRAINING = {
    "bert": (256, 1_000_000, 1e-4, 10_000, 0.01, 0.999, 1.0),
    "roberta": (8192, 500_000, 6e-4, 24_000, 0.01, 0.98, math.inf),
    "xlnet": (8192, 500_000, 4e-4, 40_000, 0.01, 0.999, 1.0),
    "distilbert": (4096, 100_000, 5e-4, 5_000, 0.0, 0.98, 5.0),
}
PRETRAINING["fairseq-roberta"] = PRETRAINING["roberta"]


@pytest.mark.parametrize("model", encoders.PRETRAINED)
def test_pretraining_has_the_optimizer_of_its_recipe(model, mesh):
    *sizes, weight_decay, beta2, _ = PRETRAINING[model]
    config = pretrain.validate(pretrain.Config(model=model, data="somewhere", teacher="there"))
    assert [config.batch_size, config.steps, config.lr, config.warmup_steps] == sizes
    tiny = replace(pretrain.TINY, model="bert" if model == "distilbert" else model)
    optimizer = pretrain.build(replace(config, size="tiny"), pretrain.open_data(tiny), mesh).optimizer
    assert type(optimizer) is torch.optim.AdamW
    numbers = (0.9, beta2), 1e-6
    assert settings(optimizer, "weight_decay", "betas", "eps") == [(weight_decay, *numbers), (0.0, *numbers)]


def test_lamb_has_the_numbers_of_its_authors(mesh):
    """You et al. 2020, table 4, of batches of 32k."""
    config = pretrain.validate(replace(pretrain.LAMB, data="somewhere"))
    found = config.batch_size, config.steps, config.lr, config.warmup_steps
    assert found == (32_768, 15_625, 5e-3, 3_125)
    optimizer = pretrain.build(replace(config, size="tiny"), pretrain.open_data(pretrain.TINY), mesh).optimizer
    assert type(optimizer) is timm.optim.Lamb
    numbers = (0.9, 0.999), 1e-6, False, None
    names = "weight_decay", "betas", "eps", "bias_correction", "max_grad_norm"
    assert settings(optimizer, *names) == [(0.01, *numbers), (0.0, *numbers)]


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("lars", timm.optim.Lars)])
def test_resnet_has_the_optimizer_of_its_recipe(name, kind, mesh):
    """Goyal et al. 2017: momentum 0.9, weight decay 1e-4."""
    config = resnet50.validate(resnet50.Config(data="somewhere", optimizer=name))
    found = config.epochs, config.lr, config.warmup_epochs, config.label_smoothing
    assert found == (90, 0.1, 5.0, 0.1)
    tiny = replace(config, model="resnet_tiny", image_size=32)
    optimizer = resnet50.build(tiny, resnet50.open_data(resnet50.TINY), mesh).optimizer
    assert type(optimizer) is kind
    assert settings(optimizer, "weight_decay", "momentum", "nesterov") == [(1e-4, 0.9, False), (0.0, 0.9, False)]
    matrices, vectors = (group["params"] for group in optimizer.param_groups)
    assert all(each.dim() > 1 for each in matrices) and all(each.dim() == 1 for each in vectors)


def test_the_transformer_has_fairseqs_optimizer(mesh):
    """--optimizer adam --adam-betas '(0.9, 0.98)' of examples/scaling_nmt; --adam-eps and --weight-decay by default."""
    pairs = wmt.SyntheticPairs("train", 16)
    optimizer = transformer.build(transformer.TINY, transformer.Data(pairs, {}), mesh).optimizer
    assert type(optimizer) is torch.optim.Adam
    assert settings(optimizer, "betas", "eps", "weight_decay", "amsgrad") == [((0.9, 0.98), 1e-8, 0, False)]


# What the network's optimizer is, its numbers, and those of the tables'.
SPARSE = {
    "sgd": (torch.optim.SGD, {"momentum": 0, "weight_decay": 0, "nesterov": False}, {}),
    "rowwise_adagrad": (torch.optim.Adagrad, {"eps": 1e-8, "weight_decay": 0, "lr_decay": 0}, {"eps": 1e-8}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-8, "weight_decay": 0, "lr_decay": 0}, {"eps": 1e-8}),
    "lazy_adam": (
        torch.optim.Adam,
        {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0},
        {"betas": (0.9, 0.999), "eps": 1e-8},
    ),
}


@pytest.mark.parametrize("name", embedding.OPTIMIZERS)
def test_tables_and_network_of_dlrm_have_optimizers_with_the_same_numbers(name, mesh, monkeypatch):
    """facebookresearch/dlrm and MLPerf v2's reference: SGD without momentum, Adagrad with an eps of 1e-8."""
    kind, numbers, of_tables = SPARSE[name]
    made = []
    bags = embedding.ShardedEmbeddingBags

    def recorded(tables, dim, mesh, update, *options):
        made.append((update, options[:2]))
        return bags(tables, dim, mesh, update, *options)

    monkeypatch.setattr(embedding, "ShardedEmbeddingBags", recorded)
    clicks = criteo.SyntheticClicks("train", 64, table_rows=(30, 40), lookups=(1, 2), num_dense=3)
    config = replace(dlrm.TINY, optimizer=name, lr=0.125, seed=3)
    optimizer = dlrm.build(config, dlrm.Data(clicks, clicks), mesh).optimizer
    assert type(optimizer) is kind
    assert settings(optimizer, *numbers) == [tuple(numbers.values())]
    ((update, (lr, seed)),) = made
    assert type(update) is embedding.OPTIMIZERS[name] and (lr, seed) == (0.125, 3)
    assert {name: getattr(update, name) for name in of_tables} == of_tables


# ---- models ----------------------------------------------------------------------------------------------------------


def test_the_transformer_has_the_dropout_and_the_embeddings_that_its_flags_say(mesh):
    pairs = wmt.SyntheticPairs("train", 16)
    for share, tensors in (("all", 1), ("decoder", 2), ("none", 3)):
        config = replace(transformer.TINY, dropout=0.25, share_embeddings=share)
        model = transformer.build(config, transformer.Data(pairs, {}), mesh).model
        assert {module.arch.dropout for module in model.modules() if hasattr(module, "arch")} == {0.25}
        tables = model.encoder.embed_tokens, model.decoder.embed_tokens, model.decoder.output_projection
        assert len({id(table.weight) for table in tables}) == tensors


def test_resnets_images_are_normalized_as_its_export_says(mesh):
    """With ImageNet's numbers, as torchvision's weights have it."""
    normalize = resnet50.build(resnet50.TINY, resnet50.open_data(resnet50.TINY), mesh).normalize
    pixels = torch.randint(256, (1, 4, 4, 3), dtype=torch.uint8)
    found = normalize.to("cpu")(pixels)
    expected = torchvision.transforms.functional.normalize(
        pixels[0].permute(2, 0, 1) / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


# ---- clipping --------------------------------------------------------------------------------------------------------


def moved(script: Any, config: Any, gradient: Tensor) -> float:
    """Returns how far an update by plain gradient descent moves a weight of that gradient."""
    model = nn.Linear(gradient.shape[0], 1, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = gradient[None].clone()
    state = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0))
    script.update(state, config)
    return (model.weight - before).norm().item()


@pytest.mark.parametrize("model", encoders.PRETRAINED)
def test_pretraining_clips_as_its_recipe_says(model):
    clip = PRETRAINING[model][-1]
    for norm in (0.5, 3.0, 100.0):
        found = moved(pretrain, replace(pretrain.TINY, model=model), torch.tensor([0.6, 0.8]) * norm)
        assert found == pytest.approx(min(norm, clip), rel=1e-4)


def test_fine_tuning_clips_and_the_others_do_not():
    gradient = torch.tensor([3.0, 4.0])
    assert moved(glue, glue.Config(), gradient) == pytest.approx(1.0, rel=1e-4)
    assert moved(glue, glue.Config(clip=2.5), gradient) == pytest.approx(2.5, rel=1e-4)
    assert moved(glue, glue.Config(clip=7.0), gradient) == pytest.approx(5.0, rel=1e-4)
    for script in (resnet50, transformer):
        assert moved(script, script.Config(), gradient) == pytest.approx(5.0, rel=1e-4)


# ---- learning rates --------------------------------------------------------------------------------------------------


def rates(function: Any, config: Any, steps: list[int], *sizes: int) -> list[float]:
    return [function(config, step, *sizes) for step in steps]


def close(found: list[float], expected: list[float]) -> bool:
    return found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_resnets_rate_rises_linearly_then_falls_as_half_a_cosine():
    config = resnet50.Config(epochs=10, warmup_epochs=2.0, batch_size=512)  # the peak is 0.1 * 512 / 256
    steps = [0, 9, 19, 20, 40, 60, 80, 99, 100]
    last = 0.1 * (1 + math.cos(math.pi * 79 / 80))
    middle = [0.1 * (1 + math.sqrt(0.5)), 0.1, 0.1 * (1 - math.sqrt(0.5))]
    assert close(rates(resnet50.learning_rate, config, steps, 10), [0.01, 0.1, 0.2, 0.2, *middle, last, 0.0])
    assert close(rates(resnet50.learning_rate, replace(config, warmup_epochs=0.0), [0, 50, 100], 10), [0.2, 0.1, 0.0])


def test_the_rate_of_pretraining_rises_and_falls_linearly():
    config = replace(pretrain.TINY, lr=0.5, steps=100, warmup_steps=20)
    steps = [0, 9, 19, 20, 21, 60, 99, 100]
    assert close(
        rates(pretrain.learning_rate, config, steps), [0.025, 0.25, 0.5, 0.5, 0.5 * 79 / 80, 0.25, 0.5 / 80, 0]
    )
    assert close(
        rates(
            pretrain.learning_rate,
            replace(config, warmup_steps=0),
            [0, 50, 99],
        ),
        [0.5, 0.25, 0.005],
    )
    assert close(rates(pretrain.learning_rate, replace(config, warmup_steps=100), [0, 99, 100]), [0.005, 0.5, 0.0])


def test_the_rate_of_fine_tuning_rises_and_falls_linearly():
    config = replace(glue.TINY, lr=0.5, warmup=0.2)
    found = rates(glue.learning_rate, config, [0, 9, 19, 20, 21, 60, 99, 100], 100)
    assert close(found, [0.5 / 21, 5 / 21, 10 / 21, 0.5, 0.5 * 79 / 80, 0.25, 0.5 / 80, 0.0])
    assert close(rates(glue.learning_rate, replace(config, warmup=0.0), [0, 50, 99], 100), [0.5, 0.25, 0.005])


def test_the_transformers_rate_is_fairseqs_inverse_square_root():
    config = transformer.Config(lr=7e-4, warmup_updates=4000)
    found = rates(transformer.learning_rate, config, [0, 2000, 3999, 4000, 4001, 16_000, 99_999])
    rising = [1e-7, (7e-4 + 1e-7) / 2, 1e-7 + (7e-4 - 1e-7) * 3999 / 4000]
    falling = [7e-4, 7e-4 * math.sqrt(4000 / 4001), 3.5e-4, 7e-4 * math.sqrt(4000 / 99_999)]
    assert close(found, rising + falling)
    assert close(rates(transformer.learning_rate, replace(config, warmup_updates=1), [0, 1, 4]), [1e-7, 7e-4, 3.5e-4])


def test_dlrms_rate_rises_linearly_and_stays():
    config = dlrm.Config(lr=0.5, warmup_steps=4)
    found = rates(dlrm.learning_rate, config, [0, 1, 2, 3, 4, 10**6])
    assert close(found, [0.125, 0.25, 0.375, 0.5, 0.5, 0.5])
    assert close(rates(dlrm.learning_rate, replace(config, warmup_steps=0), [0, 1, 10**6]), [0.5] * 3)


# ---- the training loop -----------------------------------------------------------------------------------------------


@dataclass
class Rehearsal:
    """What a script's main did in its training loop, where steps, evaluations and exports are stand-ins."""

    seeds: list[tuple[int, int]] = field(default_factory=list)  # of each micro-batch
    rates: list[float] = field(default_factory=list)  # of the network's optimizer, of each update
    tables: list[float] = field(default_factory=list)  # of DLRM's tables
    training: list[bool] = field(default_factory=list)  # whether the model was in training mode, of each micro-batch
    logged: list[tuple[int, float]] = field(default_factory=list)  # (step, examples so far)
    evaluated: list[int] = field(default_factory=list)  # steps


LOSS = {"loss": torch.tensor(1.0)}
METRICS = {"loss": 1.0, "accuracy": 0.5, "bleu": 1.0, "ppl": 2.0, "auc": 0.6, "top1": 0.5}


@pytest.fixture
def rehearse(monkeypatch):
    """rehearse(script, config, crash_at=7): runs main without a compiled program, from a model in evaluation mode, as
    `from_pretrained` returns it; with `crash_at` until that micro-batch is about to begin."""
    found = Rehearsal()

    class Step:
        """Stands for a compiled step."""

        def __init__(self, step_fn, *_, **__):
            self.step_fn = step_fn

        def __call__(self, *arguments):
            if self.step_fn is not accumulate.update_step:
                state = arguments[1] if self.step_fn is accumulate.gradient_step else arguments[0]
                found.training.append(state.model.training)
            return LOSS

    def run(script, config, crash_at=0):
        found.__init__()
        build, log, evaluation = script.build, script.Run.log, script.Run.evaluation

        def built(*options):
            state = build(*options)
            state.model.eval()
            return state

        def seeded(*numbers):
            if numbers[1] == crash_at:
                raise ZeroDivisionError
            found.seeds.append(numbers)

        def set_lr(optimizer, lr):
            of_tables = isinstance(optimizer, embedding.ShardedEmbeddingBags)
            (found.tables if of_tables else found.rates).append(lr)

        def logged(self, step, **values):
            found.logged.append((step, values["examples"]))
            log(self, step, **values)

        def evaluated(self, step, **metrics):
            found.evaluated.append(step)
            evaluation(self, step, **metrics)

        with monkeypatch.context() as patch:
            patch.setattr(script, "build", built)
            patch.setattr(script, "evaluate", lambda *_, **__: METRICS)
            patch.setattr(script, "export", lambda *_, **__: None)
            patch.setattr(script.Run, "log", logged)
            patch.setattr(script.Run, "evaluation", evaluated)
            patch.setattr(device, "compiled", Step)
            patch.setattr(many_steps, "compiled", Step)
            patch.setattr(device, "seed_step", seeded)
            patch.setattr(device, "set_lr", set_lr)
            if crash_at:
                with pytest.raises(ZeroDivisionError):
                    script.main(config)
            else:
                script.main(config)
        return found

    return run


# Four updates of two parts each, and the number of examples of an update; a checkpoint after two.
LOOPS = {
    "glue": (glue, replace(glue.TINY, update_every=2, lengths=(32,), batch_size=16, epochs=1, eval_every=2), 16),
    "pretrain": (pretrain, replace(pretrain.TINY, update_every=2, steps=4, warmup_steps=2, eval_every=2), 32),
    "resnet50": (resnet50, replace(resnet50.TINY, update_every=2, epochs=1, norm_groups=4, warmup_epochs=0.5), 64),
    "transformer": (transformer, replace(transformer.TINY, update_every=2, lengths=(16,), updates=4, eval_every=2), 0),
}


@pytest.fixture
def loop(request, monkeypatch, tmp_path):
    """The script, its config, and the number of examples of an update, of the name that parametrizes a test."""
    script, config, examples = LOOPS[request.param]
    fewer_sentences(monkeypatch, (64, 16))
    monkeypatch.setattr(resnet50, "SYNTHETIC_TRAIN", 256)
    pairs = transformer.Data(wmt.SyntheticPairs("train", 512), {"valid": wmt.SyntheticPairs("valid", 16)})
    monkeypatch.setattr(transformer, "open_data", lambda config: pairs)
    changes = {"save_every": 2, "log_every": 1, "seed": 5, "runs": str(tmp_path), "name": "run"}
    return script, script.validate(replace(config, **changes)), examples


every_loop = pytest.mark.parametrize("loop", LOOPS, indirect=True)


@every_loop
def test_each_part_of_an_update_has_a_seed_of_its_own_also_after_a_resume(loop, rehearse):
    script, config, _ = loop
    expected = [(5, number) for number in range(1, 9)]
    assert rehearse(script, replace(config, name="whole")).seeds == expected
    assert rehearse(script, config, crash_at=6).seeds == expected[:5]  # in the middle of update 3
    assert rehearse(script, config).seeds == expected[4:]


@every_loop
def test_an_update_has_one_learning_rate(loop, rehearse):
    script, config, _ = loop
    sizes = {"glue": (4,), "resnet50": (4,)}.get(script.__name__.removeprefix("train."), ())
    expected = [script.learning_rate(config, step, *sizes) for step in range(4)]
    assert len(set(expected)) > 1
    assert rehearse(script, config).rates == expected


@every_loop
def test_a_model_trains_in_training_mode_also_where_it_was_loaded_for_evaluation(loop, rehearse):
    script, config, _ = loop
    assert rehearse(script, config).training == [True] * 8


@every_loop
def test_a_line_of_metrics_counts_the_examples_so_far(loop, rehearse):
    script, config, examples = loop
    found = rehearse(script, config).logged
    if script is transformer:
        examples = found[0][1]  # tokens: the mean of a batch
        assert 1 < examples < 2 * 1024
    assert found == [(step, step * examples) for step in (1, 2, 3, 4)]


@every_loop
def test_it_evaluates_every_so_many_updates_and_after_the_last(loop, rehearse):
    script, config, _ = loop
    if script is not resnet50:  # which counts epochs
        config = replace(config, eval_every=3)
    assert rehearse(script, config).evaluated == ([4] if script is resnet50 else [3, 4])


def test_scripts_that_count_epochs_train_and_evaluate_for_so_many(rehearse, tmp_path, monkeypatch):
    fewer_sentences(monkeypatch, (44, 16))
    monkeypatch.setattr(resnet50, "SYNTHETIC_TRAIN", 128 + 63)
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 3 * 256 + 255)
    options = {"log_every": 1, "runs": str(tmp_path)}
    config = glue.validate(replace(glue.TINY, lengths=(32,), batch_size=16, epochs=1.5, **options))
    found = rehearse(glue, replace(config, name="glue"))  # three batches an epoch, the last of which is not full
    assert len(found.seeds) == 5 and found.evaluated == [3, 5]
    found = rehearse(resnet50, replace(resnet50.TINY, epochs=5, eval_every=2, name="resnet50", **options))
    assert len(found.seeds) == 10 and found.evaluated == [4, 8, 10]
    config = replace(dlrm.TINY, epochs=2, **options)
    assert rehearse(dlrm, replace(config, name="dlrm")).evaluated == [3, 6]
    assert rehearse(dlrm, replace(config, eval_every=4, name="other")).evaluated == [4, 6]


def test_dlrm_drops_nothing_at_random_and_its_tables_have_the_networks_rate(rehearse, tmp_path, monkeypatch):
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 4 * 256)
    config = replace(dlrm.TINY, warmup_steps=3, log_every=1, runs=str(tmp_path), name="run")
    found = rehearse(dlrm, config)
    assert found.rates == found.tables == [dlrm.learning_rate(config, step) for step in range(4)]
    assert found.training == [True] * 4 and found.seeds == []
    model = dlrm.DLRM(3, 2, config.dim, config.bottom, config.top, config.interaction, *config.cross)
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())


def test_a_seed_depends_on_the_runs_and_on_the_batch(monkeypatch):
    made = []
    monkeypatch.setattr(device, "_backend", SimpleNamespace(set_seed=made.append))
    keys = list(itertools.product((0, 1, 2**40), range(1, 50)))
    for key in keys:
        device.seed_step(*key)
    assert len(set(made)) == len(keys)
    assert made == [np.random.SeedSequence(key).generate_state(1)[0] for key in keys]


# ---- losses and metrics ----------------------------------------------------------------------------------------------


class Stored(nn.Module):
    """Returns the logits of each example by its number, which is its input's first value."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, number: Tensor) -> Tensor:
        return self.logits[number.flatten(1)[:, 0].long()]


def images(labels: np.ndarray) -> dict[str, Tensor]:
    return {"image": torch.arange(len(labels))[:, None, None, None], "label": torch.from_numpy(labels)}


def test_resnets_loss_is_smoothed_in_training_and_not_in_evaluation(mesh):
    rng = np.random.default_rng(0)
    logits, labels = torch.from_numpy(rng.normal(0, 2, (40, 12)).astype(np.float32)), rng.integers(0, 12, 40)
    labels[:20] = logits[:20].argmax(1)
    state, batch = resnet50.State(Stored(logits), nn.Identity(), None), images(labels)
    found = resnet50.forward(state, batch, resnet50.Config(), mesh)
    expected = F.cross_entropy(logits, batch["label"], label_smoothing=0.1)
    torch.testing.assert_close(found["loss"], expected)
    assert found["accuracy"].item() == pytest.approx(sklearn.metrics.accuracy_score(labels, logits.argmax(1)))
    found = resnet50.eval_step(state, batch | {"mask": torch.ones(40)}, resnet50.Config(), mesh)
    assert found["loss"].item() / 40 == pytest.approx(sklearn.metrics.log_loss(labels, logits.double().softmax(1)))
    for name, k in (("top1", 1), ("top5", 5)):
        expected = sklearn.metrics.top_k_accuracy_score(labels, logits, k=k, labels=range(12))
        assert found[name].item() / 40 == pytest.approx(expected) and 0.4 < expected < 1


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_padding_does_not_reach_resnets_metrics(nothing, mesh):
    labels = np.array([1, 2, -1, 0, 3, 3])  # the third cannot be decoded, the last two are padding
    logits = torch.randn(6, 12)
    batch = images(labels) | {"mask": torch.tensor([1.0, 1, 1, 1, 0, 0])}
    expected = resnet50.eval_step(resnet50.State(Stored(logits), nn.Identity(), None), batch, None, mesh)
    assert expected["count"] == 3
    logits[[2, 4, 5]] = nothing
    found = resnet50.eval_step(resnet50.State(Stored(logits), nn.Identity(), None), batch, None, mesh)
    assert found == expected and all(value.isfinite() for value in found.values())


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_padding_does_not_reach_the_metrics_of_pretraining(nothing, monkeypatch):
    """Neither that of rows, nor that of places without a prediction."""
    batch = {
        "labels": torch.randint(11, (4, 3)),
        "weights": torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]),
        "next_sentence": torch.tensor([0, 1, 0, 1]),
        "mask": torch.tensor([1.0, 1, 1, 0]),
    }
    result = {"logits": torch.randn(4, 3, 11), "related": torch.randn(4, 2)}
    monkeypatch.setattr(objectives, "forward", lambda model, batch: result)
    expected = objectives.scores(None, batch)
    counted = batch["weights"][:3] > 0
    nll = F.cross_entropy(result["logits"][:3][counted], batch["labels"][:3][counted], reduction="sum")
    torch.testing.assert_close(expected["loss"], nll)
    assert (expected["predicted"], expected["rows"]) == (6, 3)
    result["logits"][batch["weights"] * batch["mask"][:, None] == 0] = nothing
    result["related"][3] = nothing
    assert objectives.scores(None, batch) == expected


def sums(values: list[dict[str, float]]) -> Any:
    """Returns an evaluation step that returns these sums, batch by batch."""
    left = iter(values)
    return lambda *_: {name: torch.tensor(float(value)) for name, value in next(left).items()}


@pytest.fixture
def any_number(monkeypatch):
    """Leaves out that a batch is compared with what the model has: the model is a stand-in."""
    monkeypatch.setattr(architectures, "limits", lambda model: SimpleNamespace(check=lambda batch: None))


def evaluation_state() -> SimpleNamespace:
    return SimpleNamespace(model=nn.Linear(1, 1), embeddings=SimpleNamespace(check=lambda: None))


def test_resnets_metrics_are_means_over_all_images(mesh):
    """Not means of the batches' means; one of the six cannot be decoded."""
    batches = [{"loss": 6, "top1": 2, "top5": 3, "count": 4}, {"loss": 9, "top1": 0, "top5": 1, "count": 1}]
    config = replace(resnet50.TINY, batch_size=4)
    state, data = evaluation_state(), resnet50.imagenet.SyntheticImages(6, 32, 10, 0, "eval")
    assert resnet50.evaluate(sums(batches), state, data, config, mesh) == {"top1": 0.4, "top5": 0.8, "loss": 3.0}
    assert state.model.training


def test_the_metrics_of_pretraining_are_means_over_all_predicted_tokens_and_rows(mesh, any_number):
    counts = {"predicted": 8, "rows": 4}, {"predicted": 2, "rows": 1}
    batches = [{"loss": 6, "accuracy": 1, "next_sentence_accuracy": 1}, {"loss": 9, "accuracy": 1}]
    batches[1]["next_sentence_accuracy"] = 1
    step = sums([batch | count for batch, count in zip(batches, counts, strict=True)])
    config = replace(pretrain.TINY, batch_size=16)
    state = evaluation_state()
    found = pretrain.evaluate(step, state, Rows(20), config, mesh)
    assert found == {"loss": 1.5, "accuracy": 0.2, "next_sentence_accuracy": 0.4}
    assert state.model.training


class Rows:
    """Rows of which each draws one number."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"draw": np.float64(rng.random()), "weights": np.ones(3, np.float32)}


def test_the_masks_of_pretrainings_evaluation_are_those_of_the_runs_seed(mesh, monkeypatch, any_number):
    """The same each time, and another for another --seed; what is checked before step 1 has the same."""
    rows, drawn = Rows(20), []

    def step(state, batch, *_):
        drawn.extend(batch["draw"][batch["mask"] > 0].tolist())
        return {name: torch.tensor(1.0) for name in ("loss", "accuracy", "predicted")}

    for seed in (0, 7, 7):
        config = replace(pretrain.TINY, batch_size=16, seed=seed)
        drawn.clear()
        pretrain.evaluate(step, evaluation_state(), rows, config, mesh)
        expected = [np.random.default_rng((seed, 0, row)).random() for row in range(20)]
        assert drawn == pytest.approx(expected, rel=1e-6)

    checked, first_and_last = [], loading.first_and_last

    def recorded(*args, **options):
        checked.extend(first_and_last(*args, **options))
        return checked

    monkeypatch.setattr(loading, "first_and_last", recorded)
    pretrain.check_evaluation(pretrain.Data(None, rows, None, None), config, mesh)
    draws = torch.cat([batch["draw"][batch["mask"] > 0] for batch in checked])
    assert draws.tolist() == pytest.approx(expected, rel=1e-6)


def test_the_transformers_perplexity_is_that_of_the_loss_without_smoothing(mesh, monkeypatch):
    """And both are means over all tokens, not over batches."""
    pairs = wmt.SyntheticPairs("valid", 16)
    monkeypatch.setattr(translate.Bleu, "__call__", lambda bleu, translations, mesh: len(translations))
    values = {"valid": {"loss": 60, "nll": 20, "tokens": 10}, "test": {"loss": 80, "nll": 30, "tokens": 10}}
    state = evaluation_state()
    config = replace(transformer.TINY, lengths=(16,), batch_tokens=128)
    batches = [values["valid"] | {"nll": 11}, {"loss": 5, "nll": 9, "tokens": 2}]
    found = transformer.evaluate(sums(batches), lambda pairs, unknown: ["a"] * 7, state, {"valid": pairs}, config, mesh)
    assert found == pytest.approx({"bleu": 7, "loss": 65 / 12, "ppl": math.exp(20 / 12)})
    config = replace(config, batch_tokens=256)
    sets = {"valid": pairs, "test": pairs}
    found = transformer.evaluate(sums(list(values.values())), lambda pairs, unknown: ["a"], state, sets, config, mesh)
    expected = {"bleu": 1, "loss": 6.0, "ppl": math.exp(2), "test_bleu": 1, "test_loss": 8.0, "test_ppl": math.exp(3)}
    assert found == pytest.approx(expected) and state.model.training


def test_the_transformers_losses_are_pytorchs_with_and_without_smoothing(form):
    """fairseq's smoothing gives the right word none of the share of all: PyTorch's of another strength."""
    logits, target = torch.randn(3, 7, 11), torch.randint(4, 11, (3, 7))
    target[1, 4:] = wmt.PAD
    found = transformer.label_smoothed(logits, target, 0.1)
    real, flat = (target != wmt.PAD).flatten(), logits.flatten(0, 1)
    nll = F.cross_entropy(flat[real], target.flatten()[real], reduction="sum")
    smooth = F.cross_entropy(flat[real], target.flatten()[real], reduction="sum", label_smoothing=0.1 * 11 / 10)
    assert found["tokens"] == real.sum() == 18
    torch.testing.assert_close((found["nll"], found["loss"]), (nll, smooth), rtol=1e-5, atol=1e-5)


def of_sentences(task: str, batch: dict[str, Tensor]) -> Tensor:
    """Returns logits of each sentence that depend on its tokens alone; NaN for a row of padding."""
    tokens = batch["input_ids"].double() * batch["attention_mask"]
    number = tokens.sum(1)
    columns = len(glue.glue.TASKS[task].labels) or 1
    logits = torch.stack([torch.sin(number * (column + 1)) for column in range(columns)], 1).float()
    return torch.where(batch["attention_mask"].sum(1, keepdim=True) > 0, logits, math.nan)


@pytest.mark.parametrize("task", glue.glue.TASKS)
def test_the_metrics_of_fine_tuning_are_scikit_learns_and_scipys(task, mesh, monkeypatch, any_number):
    """Of all examples in their order, whatever order they are evaluated in, and without padding."""
    fewer_sentences(monkeypatch, (64, 45))
    config = glue.validate(replace(glue.TINY, task=task, lengths=(16, 32), batch_size=16))
    data, state = glue.open_data(config), evaluation_state()

    def step(state, batch, *_):
        return of_sentences(task, {name: values.cpu() for name, values in batch.items()})

    found = glue.evaluate(step, state, data.eval, config, mesh)
    assert state.model.training
    count = 0
    for split, examples in data.eval.items():
        prefix = "mismatched_" if split.endswith("mismatched") else ""
        values = {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}
        if not prefix:
            values = {name: value for name, value in values.items() if not name.startswith("mismatched_")}
        batch = loading.as_tensors(examples.batch(np.arange(45), (32,)))
        logits, labels = of_sentences(task, batch), examples.labels
        assert values == pytest.approx(expected_metrics(task, logits, labels), rel=1e-5)
        count += len(values)
    assert count == len(found)


def expected_metrics(task: str, logits: Tensor, labels: np.ndarray) -> dict[str, float]:
    """Wang et al. 2019, table 1."""
    if task == "stsb":
        scores = logits[:, 0].numpy()
        return {
            "pearson": scipy.stats.pearsonr(labels, scores)[0],
            "spearman": scipy.stats.spearmanr(labels, scores)[0],
            "loss": np.mean((scores - labels) ** 2),
        }
    loss = sklearn.metrics.log_loss(labels, logits.double().softmax(1), labels=range(logits.shape[1]))
    found, values = logits.argmax(1).numpy(), {"loss": loss}
    if task == "cola":
        return values | {"mcc": sklearn.metrics.matthews_corrcoef(labels, found)}
    values["accuracy"] = sklearn.metrics.accuracy_score(labels, found)
    if task in ("mrpc", "qqp"):
        values["f1"] = sklearn.metrics.f1_score(labels, found)
    return values


def test_dlrms_metrics_are_scikit_learns_and_padding_does_not_reach_them(mesh, monkeypatch):
    monkeypatch.setattr(dlrm, "EVAL_BATCH", 64)
    clicks = criteo.SyntheticClicks("eval", 203, table_rows=(30, 40), lookups=(1, 2), num_dense=3)
    whole = clicks.batch(np.arange(203))
    logits = whole["dense"].sum(1) + 0.5 * whole["label"]

    def step(state, batch, *_):
        batch = {name: values.cpu() for name, values in batch.items()}
        logit = batch["dense"].sum(1) + 0.5 * batch["label"]
        logit = torch.where(batch["mask"] > 0, logit, math.nan)
        return torch.stack([logit, batch["label"], batch["mask"]], 1)

    state = evaluation_state()
    found = dlrm.evaluate(step, state, clicks, dlrm.TINY, mesh)
    chance = 1 / (1 + np.exp(-logits.astype(np.float64)))
    loss = sklearn.metrics.log_loss(whole["label"], chance)
    rate = np.full(203, whole["label"].mean())
    expected = {
        "auc": sklearn.metrics.roc_auc_score(whole["label"], logits),
        "loss": loss,
        "ne": loss / sklearn.metrics.log_loss(whole["label"], rate),
    }
    assert found == pytest.approx(expected, rel=1e-5) and state.model.training
