"""The numbers of the five recipes, without compiled steps: optimizers, learning rates, seeds,
losses and metrics, against what papers and authors' code say, PyTorch, scikit-learn and scipy."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
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
from train.common import accumulate, best, device, embedding, loading, many_steps


# ---- optimizers ----------------------------------------------------------------------------------
def assert_numbers(
    optimizer: torch.optim.Optimizer, weight_decays: list[float], **numbers: Any
) -> None:
    """Asserts the weight decay of each group of parameters, and numbers that all groups have."""
    groups = optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == weight_decays
    for group in groups:
        assert {name: group[name] for name in numbers} == numbers


@dataclass(frozen=True)
class FineTuning:
    """A published recipe."""

    lr: float
    warmup: float
    weight_decay: float
    epochs: int
    beta2: float
    clip: float = 1.0


# google-research/bert's run_classifier.py; Liu et al. 2019, table 10; zihangdai/xlnet's
# run_classifier.py
FINE_TUNING = {
    "bert": FineTuning(lr=2e-5, warmup=0.1, weight_decay=0.01, epochs=3, beta2=0.999),
    "distilbert": FineTuning(lr=5e-5, warmup=0.1, weight_decay=0.01, epochs=3, beta2=0.999),
    "roberta": FineTuning(
        lr=2e-5, warmup=0.06, weight_decay=0.1, epochs=10, beta2=0.98, clip=math.inf
    ),
    "xlnet": FineTuning(lr=3e-5, warmup=0.1, weight_decay=0.0, epochs=3, beta2=0.999),
}
FINE_TUNING["fairseq-roberta"] = FINE_TUNING["roberta"]
FINE_TUNING["auto"] = FINE_TUNING["bert"]


def own_sentences(model: str) -> glue.Config:
    return glue.Config(model=model, data="own.csv", text=("text",), label="label", checkpoint="a/b")


@pytest.mark.parametrize("model", encoders.NAMES)
def test_fine_tuning_has_the_optimizer_of_its_recipe(model, mesh):
    """That of the model alone, which the user's own sentences get."""
    recipe = FINE_TUNING[model]

    config = glue.validate(own_sentences(model))
    data = glue.open_data(glue.validate(replace(glue.TINY, model=model)))
    optimizer = glue.build(config, data, mesh).optimizer

    for name in ("lr", "warmup", "weight_decay", "epochs", "clip"):
        assert getattr(config, name) == getattr(recipe, name), name
    assert config.batch_size == 32
    assert config.best == ""
    assert type(optimizer) is torch.optim.AdamW
    decays = [recipe.weight_decay, 0.0]
    assert_numbers(optimizer, decays, betas=(0.9, recipe.beta2), eps=1e-6, amsgrad=False)


@dataclass(frozen=True)
class TaskRecipe:
    """What is published of fine-tuning on one task of GLUE."""

    batch_size: int
    lr: float
    updates: int
    warmup_updates: int
    best: str


# The files in examples/roberta/config/finetuning of fairseq. All have weight_decay 0.1, clip_norm
# 0.0 and max_epoch 10. That of STS-B has no best_checkpoint_metric, whose default is "loss", with
# maximize_best_checkpoint_metric false (fairseq/dataclass/configs.py).
FAIRSEQ = {
    "cola": TaskRecipe(16, lr=1e-5, updates=5336, warmup_updates=320, best="accuracy"),
    "mnli": TaskRecipe(32, lr=1e-5, updates=123_873, warmup_updates=7432, best="accuracy"),
    "mrpc": TaskRecipe(16, lr=1e-5, updates=2296, warmup_updates=137, best="accuracy"),
    "qnli": TaskRecipe(32, lr=1e-5, updates=33_112, warmup_updates=1986, best="accuracy"),
    "qqp": TaskRecipe(32, lr=1e-5, updates=113_272, warmup_updates=28_318, best="accuracy"),
    "rte": TaskRecipe(16, lr=2e-5, updates=2036, warmup_updates=122, best="accuracy"),
    "sst2": TaskRecipe(32, lr=1e-5, updates=20_935, warmup_updates=1256, best="accuracy"),
    "stsb": TaskRecipe(16, lr=2e-5, updates=3598, warmup_updates=214, best="-loss"),
}
# zihangdai/xlnet, issue 96. eval_all_ckpt=True: run_classifier.py then takes the checkpoint of the
# highest eval_accuracy, of a regression that of the highest eval_pearsonr.
XLNET = {
    "cola": TaskRecipe(128, lr=3e-5, updates=3000, warmup_updates=500, best="accuracy"),
    "mnli": TaskRecipe(128, lr=3e-5, updates=10_000, warmup_updates=1000, best="accuracy"),
    "mrpc": TaskRecipe(32, lr=5e-5, updates=800, warmup_updates=200, best="accuracy"),
    "qqp": TaskRecipe(128, lr=3e-5, updates=14_000, warmup_updates=1000, best="accuracy"),
    "rte": TaskRecipe(32, lr=3e-5, updates=800, warmup_updates=200, best="accuracy"),
    "sst2": TaskRecipe(32, lr=2e-5, updates=10_000, warmup_updates=1000, best="accuracy"),
    "stsb": TaskRecipe(32, lr=5e-5, updates=1200, warmup_updates=120, best="pearson"),
}
# Training examples of nyu-mll/glue.
SIZES = {
    "cola": 8551,
    "mnli": 392_702,
    "mrpc": 3668,
    "qqp": 363_846,
    "rte": 2490,
    "sst2": 67_349,
    "stsb": 5749,
}


def recipe_of(model: str, task: str) -> glue.Config:
    """Returns the numbers with which a task is trained where no flag gives others."""
    return glue.validate(glue.Config(model=model, task=task, data="x/y", checkpoint="a/b"))


def assert_recipe(config: glue.Config, expected: TaskRecipe) -> None:
    assert config.batch_size == expected.batch_size
    assert config.lr == expected.lr
    assert config.warmup == pytest.approx(expected.warmup_updates / expected.updates, rel=0.01)
    assert config.best == expected.best
    assert config.patience == 0


@pytest.mark.parametrize("model", ["roberta", "fairseq-roberta"])
@pytest.mark.parametrize("task", FAIRSEQ)
def test_robertas_recipe_of_a_task_is_fairseqs_file(task, model):
    config = recipe_of(model, task)

    assert_recipe(config, FAIRSEQ[task])
    assert config.epochs == 10
    assert config.weight_decay == 0.1
    assert config.clip == math.inf


@pytest.mark.parametrize("task", XLNET)
def test_xlnets_recipe_of_a_task_is_its_authors(task):
    config = recipe_of("xlnet", task)

    assert_recipe(config, XLNET[task])
    updates = config.epochs * SIZES[task] / config.batch_size
    assert updates == pytest.approx(XLNET[task].updates)
    assert config.weight_decay == 0.0
    assert config.clip == 1.0


def test_distilberts_recipe_of_sst2_is_that_of_its_card():
    """distilbert-base-uncased-finetuned-sst-2-english: learning_rate = 1e-5, batch_size = 32,
    warmup = 600, num_train_epochs = 3.0."""
    config = recipe_of("distilbert", "sst2")

    updates = 3 * SIZES["sst2"] / 32
    assert_recipe(config, TaskRecipe(32, 1e-5, updates, warmup_updates=600, best=""))
    assert config.epochs == 3


def test_a_recipe_names_tasks_of_glue_and_metrics_that_they_have():
    for model in encoders.NAMES:
        for task in encoders.by_name(model).fine_tuning.tasks:
            recipe = encoders.by_name(model).fine_tuning.of_task(task)
            metrics = (*glue.glue.TASKS[task].metrics, "loss")
            best.criterion(recipe.best, 0, metrics)  # raises


def test_a_flag_comes_before_the_recipe():
    config = glue.Config(model="roberta", task="cola", data="x/y", checkpoint="a/b")
    given = {"batch_size": 64, "lr": 3e-5, "clip": 0.5, "best": ""}

    found = glue.validate(replace(config, **given))

    assert {name: getattr(found, name) for name in given} == given


@dataclass(frozen=True)
class Pretraining:
    """A published recipe."""

    batch_size: int
    steps: int
    lr: float
    warmup_steps: int
    weight_decay: float
    beta2: float
    clip: float


# Devlin et al. 2019, A.2; Liu et al. 2019, table 9; Yang et al. 2019, table 7; huggingface's
# distillation/train.py
PRETRAINING = {
    "bert": Pretraining(
        batch_size=256,
        steps=1_000_000,
        lr=1e-4,
        warmup_steps=10_000,
        weight_decay=0.01,
        beta2=0.999,
        clip=1.0,
    ),
    "roberta": Pretraining(
        batch_size=8192,
        steps=500_000,
        lr=6e-4,
        warmup_steps=24_000,
        weight_decay=0.01,
        beta2=0.98,
        clip=math.inf,
    ),
    "xlnet": Pretraining(
        batch_size=8192,
        steps=500_000,
        lr=4e-4,
        warmup_steps=40_000,
        weight_decay=0.01,
        beta2=0.999,
        clip=1.0,
    ),
    "distilbert": Pretraining(
        batch_size=4096,
        steps=100_000,
        lr=5e-4,
        warmup_steps=5_000,
        weight_decay=0.0,
        beta2=0.98,
        clip=5.0,
    ),
}
PRETRAINING["fairseq-roberta"] = PRETRAINING["roberta"]


@pytest.mark.parametrize("model", encoders.PRETRAINED)
def test_pretraining_has_the_optimizer_of_its_recipe(model, mesh):
    recipe = PRETRAINING[model]

    config = pretrain.validate(pretrain.Config(model=model, data="somewhere", teacher="there"))
    tiny = replace(pretrain.TINY, model="bert" if model == "distilbert" else model)
    data = pretrain.open_data(tiny)
    optimizer = pretrain.build(replace(config, size="tiny"), data, mesh).optimizer

    for name in ("batch_size", "steps", "lr", "warmup_steps"):
        assert getattr(config, name) == getattr(recipe, name), name
    assert type(optimizer) is torch.optim.AdamW
    decays = [recipe.weight_decay, 0.0]
    assert_numbers(optimizer, decays, betas=(0.9, recipe.beta2), eps=1e-6)


def test_lamb_has_the_numbers_of_its_authors(mesh):
    """You et al. 2020, table 4, of batches of 32k."""
    config = pretrain.validate(replace(pretrain.LAMB, data="somewhere"))
    data = pretrain.open_data(pretrain.TINY)
    optimizer = pretrain.build(replace(config, size="tiny"), data, mesh).optimizer

    assert config.batch_size == 32_768
    assert config.steps == 15_625
    assert config.lr == 5e-3
    assert config.warmup_steps == 3_125
    assert type(optimizer) is timm.optim.Lamb
    assert_numbers(
        optimizer,
        weight_decays=[0.01, 0.0],
        betas=(0.9, 0.999),
        eps=1e-6,
        bias_correction=False,
        max_grad_norm=None,
    )


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("lars", timm.optim.Lars)])
def test_resnet_has_the_optimizer_of_its_recipe(name, kind, mesh):
    """Goyal et al. 2017: momentum 0.9, weight decay 1e-4."""
    config = resnet50.validate(resnet50.Config(data="somewhere", optimizer=name))
    tiny = replace(config, model="resnet_tiny", image_size=32)
    data = resnet50.open_data(resnet50.TINY)
    optimizer = resnet50.build(tiny, data, mesh).optimizer

    assert config.epochs == 90
    assert config.lr == 0.1
    assert config.warmup_epochs == 5.0
    assert config.label_smoothing == 0.1
    assert type(optimizer) is kind
    assert_numbers(optimizer, weight_decays=[1e-4, 0.0], momentum=0.9, nesterov=False)
    matrices, vectors = (group["params"] for group in optimizer.param_groups)
    assert all(parameter.dim() > 1 for parameter in matrices)
    assert all(parameter.dim() == 1 for parameter in vectors)


def test_the_transformer_has_fairseqs_optimizer(mesh):
    """--optimizer adam --adam-betas '(0.9, 0.98)' of examples/scaling_nmt; --adam-eps and
    --weight-decay by default."""
    data = transformer.Data(wmt.SyntheticPairs("train", 16), {})

    optimizer = transformer.build(transformer.TINY, data, mesh).optimizer

    assert type(optimizer) is torch.optim.Adam
    assert_numbers(optimizer, weight_decays=[0], betas=(0.9, 0.98), eps=1e-8, amsgrad=False)


@dataclass(frozen=True)
class DlrmOptimizer:
    """An optimizer of DLRM's network, and the numbers that the tables' has, too."""

    kind: type
    numbers: dict[str, Any]
    of_tables: dict[str, Any]


ADAGRAD = DlrmOptimizer(
    kind=torch.optim.Adagrad,
    numbers={"eps": 1e-8, "weight_decay": 0, "lr_decay": 0},
    of_tables={"eps": 1e-8},
)
DLRM_OPTIMIZERS = {
    "sgd": DlrmOptimizer(
        kind=torch.optim.SGD,
        numbers={"momentum": 0, "weight_decay": 0, "nesterov": False},
        of_tables={},
    ),
    "rowwise_adagrad": ADAGRAD,
    "adagrad": ADAGRAD,
    "lazy_adam": DlrmOptimizer(
        kind=torch.optim.Adam,
        numbers={"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0},
        of_tables={"betas": (0.9, 0.999), "eps": 1e-8},
    ),
}


@pytest.mark.parametrize("name", embedding.OPTIMIZERS)
def test_dlrms_tables_and_network_have_the_same_numbers(name, mesh, monkeypatch):
    """facebookresearch/dlrm and MLPerf v2's reference: SGD without momentum, Adagrad with an eps of
    1e-8."""
    expected = DLRM_OPTIMIZERS[name]
    made = []
    bags = embedding.ShardedEmbeddingBags

    def recorded(tables, dim, mesh, update, lr, seed, **options):
        made.append((update, lr, seed))
        return bags(tables, dim, mesh, update, lr, seed, **options)

    monkeypatch.setattr(embedding, "ShardedEmbeddingBags", recorded)
    clicks = criteo.SyntheticClicks("train", 64, table_rows=(30, 40), lookups=(1, 2), num_dense=3)
    config = replace(dlrm.TINY, optimizer=name, lr=0.125, seed=3)

    optimizer = dlrm.build(config, dlrm.Data(clicks, clicks), mesh).optimizer

    assert type(optimizer) is expected.kind
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in expected.numbers} == expected.numbers
    ((update, lr, seed),) = made
    assert type(update) is embedding.OPTIMIZERS[name]
    assert lr == 0.125
    assert seed == 3
    assert {key: getattr(update, key) for key in expected.of_tables} == expected.of_tables


# ---- models --------------------------------------------------------------------------------------
SHARED_EMBEDDINGS = {"all": 1, "decoder": 2, "none": 3}  # tensors of the three embedding tables
every_sharing = pytest.mark.parametrize("share", SHARED_EMBEDDINGS)


def transformer_model(mesh, share: str) -> nn.Module:
    config = replace(transformer.TINY, dropout=0.25, share_embeddings=share)
    data = transformer.Data(wmt.SyntheticPairs("train", 16), {})
    return transformer.build(config, data, mesh).model


@every_sharing
def test_the_transformer_has_the_dropout_of_its_flag(share, mesh):
    model = transformer_model(mesh, share)
    layers = [module for module in model.modules() if hasattr(module, "arch")]
    assert {layer.arch.dropout for layer in layers} == {0.25}


@every_sharing
def test_the_transformer_shares_embeddings_as_its_flag_says(share, mesh):
    model = transformer_model(mesh, share)
    tables = [
        model.encoder.embed_tokens,
        model.decoder.embed_tokens,
        model.decoder.output_projection,
    ]
    assert len({id(table.weight) for table in tables}) == SHARED_EMBEDDINGS[share]


def test_resnets_images_are_normalized_as_its_export_says(mesh):
    """With ImageNet's numbers, as torchvision's weights have it."""
    state = resnet50.build(resnet50.TINY, resnet50.open_data(resnet50.TINY), mesh)
    pixels = torch.randint(256, (1, 4, 4, 3), dtype=torch.uint8)

    found = state.normalize.to("cpu")(pixels)

    image = pixels[0].permute(2, 0, 1) / 255
    mean = [0.485, 0.456, 0.406]
    deviation = [0.229, 0.224, 0.225]
    expected = torchvision.transforms.functional.normalize(image, mean, deviation)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


# ---- clipping ------------------------------------------------------------------------------------
def moved(script: Any, config: Any, gradient: Tensor) -> float:
    """Returns how far an update by plain gradient descent moves a weight of that gradient."""
    model = nn.Linear(gradient.shape[0], 1, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = gradient[None].clone()
    state = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0))

    script.update(state, config)

    return (model.weight - before).norm().item()


@pytest.mark.parametrize("norm", [0.5, 3.0, 100.0])
@pytest.mark.parametrize("model", encoders.PRETRAINED)
def test_pretraining_clips_as_its_recipe_says(model, norm):
    config = replace(pretrain.TINY, model=model)
    gradient = torch.tensor([0.6, 0.8]) * norm

    expected = min(norm, PRETRAINING[model].clip)
    assert moved(pretrain, config, gradient) == pytest.approx(expected, rel=1e-4)


GRADIENT_OF_NORM_5 = torch.tensor([3.0, 4.0])


@pytest.mark.parametrize(
    ("config", "distance"),
    [
        (glue.Config(clip=1.0), 1.0),
        (glue.Config(clip=2.5), 2.5),
        (glue.Config(clip=7.0), 5.0),
        (glue.Config(clip=math.inf), 5.0),
    ],
    ids=["1.0", "2.5", "7.0", "inf"],
)
def test_fine_tuning_clips_as_its_flag_says(config, distance):
    assert moved(glue, config, GRADIENT_OF_NORM_5) == pytest.approx(distance, rel=1e-4)


@pytest.mark.parametrize("script", [resnet50, transformer], ids=["resnet50", "transformer"])
def test_other_scripts_do_not_clip(script):
    assert moved(script, script.Config(), GRADIENT_OF_NORM_5) == pytest.approx(5.0, rel=1e-4)


# ---- learning rates ------------------------------------------------------------------------------
def rates(function: Any, config: Any, steps: list[int], *sizes: int) -> list[float]:
    return [function(config, step, *sizes) for step in steps]


def assert_close(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_resnets_rate_rises_linearly_then_falls_as_half_a_cosine():
    # The peak is 0.1 * 512 / 256.
    config = resnet50.Config(epochs=10, warmup_epochs=2.0, batch_size=512)
    rising = [0.01, 0.1, 0.2, 0.2]
    middle = [0.1 * (1 + math.sqrt(0.5)), 0.1, 0.1 * (1 - math.sqrt(0.5))]
    last = [0.1 * (1 + math.cos(math.pi * 79 / 80)), 0.0]

    found = rates(resnet50.learning_rate, config, [0, 9, 19, 20, 40, 60, 80, 99, 100], 10)
    assert_close(found, rising + middle + last)

    without_warmup = replace(config, warmup_epochs=0.0)
    found = rates(resnet50.learning_rate, without_warmup, [0, 50, 100], 10)
    assert_close(found, [0.2, 0.1, 0.0])

    part_of_a_step = replace(config, warmup_epochs=0.05)  # half a step
    assert_close(rates(resnet50.learning_rate, part_of_a_step, [0], 10), [0.2])


def test_mlperfs_rate_falls_as_a_parabola_to_its_end():
    """mlcommons/logging, rcps_resnet.json of training_4.0.0, resnet_ref_4096; closed_resnet_lars:
    opt_learning_rate_decay_poly_power 2, opt_end_learning_rate 0.0001."""
    config = resnet50.MLPERF
    steps_per_epoch = 1_281_167 / 4096
    warmup = 5 * steps_per_epoch
    middle = warmup + 13_137 / 2  # opt_learning_rate_decay_steps
    last = 47 * steps_per_epoch

    found = rates(resnet50.learning_rate, config, [warmup, middle, last], steps_per_epoch)

    assert found == pytest.approx([10, 1e-4 + (10 - 1e-4) / 4, 1e-4], rel=1e-4)
    assert config.weight_decay == 2e-4
    assert config.batch_size / config.norm_groups == 64  # model_bn_span
    no_rate = replace(config, lr=0.0)
    assert rates(resnet50.learning_rate, no_rate, [0, 9999], 313) == [0, 0]


def test_the_rate_of_pretraining_rises_and_falls_linearly():
    config = replace(pretrain.TINY, lr=0.5, steps=100, warmup_steps=20)

    found = rates(pretrain.learning_rate, config, [0, 9, 19, 20, 21, 60, 99, 100])
    assert_close(found, [0.025, 0.25, 0.5, 0.5, 0.5 * 79 / 80, 0.25, 0.5 / 80, 0])

    without_warmup = replace(config, warmup_steps=0)
    found = rates(pretrain.learning_rate, without_warmup, [0, 50, 99])
    assert_close(found, [0.5, 0.25, 0.005])

    warmup_alone = replace(config, warmup_steps=100)
    found = rates(pretrain.learning_rate, warmup_alone, [0, 99, 100])
    assert_close(found, [0.005, 0.5, 0.0])


def test_the_rate_of_fine_tuning_rises_and_falls_linearly():
    config = replace(glue.TINY, lr=0.5, warmup=0.2)

    found = rates(glue.learning_rate, config, [0, 9, 19, 20, 21, 60, 99, 100], 100)
    assert_close(found, [0.5 / 21, 5 / 21, 10 / 21, 0.5, 0.5 * 79 / 80, 0.25, 0.5 / 80, 0.0])

    without_warmup = replace(config, warmup=0.0)
    found = rates(glue.learning_rate, without_warmup, [0, 50, 99], 100)
    assert_close(found, [0.5, 0.25, 0.005])


def test_the_transformers_rate_is_fairseqs_inverse_square_root():
    config = transformer.Config(lr=7e-4, warmup_updates=4000)
    rising = [1e-7, (7e-4 + 1e-7) / 2, 1e-7 + (7e-4 - 1e-7) * 3999 / 4000]
    falling = [7e-4, 7e-4 * math.sqrt(4000 / 4001), 3.5e-4, 7e-4 * math.sqrt(4000 / 99_999)]

    steps = [0, 2000, 3999, 4000, 4001, 16_000, 99_999]
    found = rates(transformer.learning_rate, config, steps)
    assert_close(found, rising + falling)

    short_warmup = replace(config, warmup_updates=1)
    found = rates(transformer.learning_rate, short_warmup, [0, 1, 4])
    assert_close(found, [1e-7, 7e-4, 3.5e-4])


def test_dlrms_rate_rises_linearly_and_stays():
    config = dlrm.Config(lr=0.5, warmup_steps=4)

    found = rates(dlrm.learning_rate, config, [0, 1, 2, 3, 4, 10**6])
    assert_close(found, [0.125, 0.25, 0.375, 0.5, 0.5, 0.5])

    without_warmup = replace(config, warmup_steps=0)
    found = rates(dlrm.learning_rate, without_warmup, [0, 1, 10**6])
    assert_close(found, [0.5] * 3)


# ---- the training loop ---------------------------------------------------------------------------
@dataclass
class Rehearsal:
    """What a script's main did in its training loop, with stand-ins for steps, evaluations and
    exports."""

    seeds: list[tuple[int, int]] = field(default_factory=list)  # of each micro-batch
    training: list[bool] = field(default_factory=list)  # the model's mode, of each micro-batch
    rates: list[float] = field(default_factory=list)  # of the network's optimizer, of each update
    table_rates: list[float] = field(default_factory=list)  # of DLRM's tables, of each update
    logged: list[tuple[int, float]] = field(default_factory=list)  # (step, examples so far)
    evaluated: list[int] = field(default_factory=list)  # steps


LOSS = {"loss": torch.tensor(1.0)}
METRICS = {"loss": 1.0, "accuracy": 0.5, "bleu": 1.0, "ppl": 2.0, "auc": 0.6, "top1": 0.5}


class RehearsedStep:
    """Stands for a compiled step."""

    def __init__(self, step_fn: Callable, found: Rehearsal):
        self.step_fn = step_fn
        self.found = found

    def __call__(self, *arguments):
        if self.step_fn is accumulate.update_step:
            return LOSS
        if self.step_fn is accumulate.gradient_step:
            state = arguments[1]
        else:
            state = arguments[0]
        self.found.training.append(state.model.training)
        return LOSS


@pytest.fixture
def rehearse(monkeypatch) -> Callable[..., Rehearsal]:
    """rehearse(script, config, crash_at=7): runs main without a compiled program, from a model in
    evaluation mode, as `from_pretrained` returns it; with `crash_at` until that micro-batch is
    about to begin."""

    def run(script: ModuleType, config: Any, crash_at: int = 0) -> Rehearsal:
        found = Rehearsal()
        build = script.build
        log = script.Run.log
        evaluation = script.Run.evaluation

        def built(*options):
            state = build(*options)
            state.model.eval()
            return state

        def compiled(step_fn, *_, **__):
            return RehearsedStep(step_fn, found)

        def seeded(*numbers):
            if numbers[1] == crash_at:
                raise ZeroDivisionError
            found.seeds.append(numbers)

        def set_lr(optimizer, lr):
            if isinstance(optimizer, embedding.ShardedEmbeddingBags):
                found.table_rates.append(lr)
            else:
                found.rates.append(lr)

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
            patch.setattr(device, "compiled", compiled)
            patch.setattr(many_steps, "compiled", compiled)
            patch.setattr(device, "seed_step", seeded)
            patch.setattr(device, "set_lr", set_lr)
            if crash_at:
                with pytest.raises(ZeroDivisionError):
                    script.main(config)
            else:
                script.main(config)
        return found

    return run


@dataclass(frozen=True)
class Loop:
    """A script and a config of four updates of two micro-batches each."""

    script: ModuleType
    config: Any
    examples: int  # of an update


GLUE_LOOP = replace(glue.TINY, update_every=2, lengths=(32,), batch_size=16, epochs=1, eval_every=2)
PRETRAIN_LOOP = replace(pretrain.TINY, update_every=2, steps=4, warmup_steps=2, eval_every=2)
RESNET50_LOOP = replace(resnet50.TINY, update_every=2, epochs=1, norm_groups=4, warmup_epochs=0.5)
TRANSFORMER_LOOP = replace(transformer.TINY, update_every=2, lengths=(16,), updates=4, eval_every=2)
LOOPS = {
    "glue": Loop(glue, GLUE_LOOP, examples=16),
    "pretrain": Loop(pretrain, PRETRAIN_LOOP, examples=32),
    "resnet50": Loop(resnet50, RESNET50_LOOP, examples=64),
    "transformer": Loop(transformer, TRANSFORMER_LOOP, examples=0),  # it counts tokens
}


@pytest.fixture
def loop(request, monkeypatch, tmp_path) -> Loop:
    """The loop whose name parametrizes a test, with a checkpoint after two updates."""
    loop = LOOPS[request.param]
    fewer_sentences(monkeypatch, (64, 16))
    monkeypatch.setattr(resnet50, "SYNTHETIC_TRAIN", 256)
    valid = wmt.SyntheticPairs("valid", 16)
    pairs = transformer.Data(wmt.SyntheticPairs("train", 512), {"valid": valid})
    monkeypatch.setattr(transformer, "open_data", lambda config: pairs)

    config = replace(loop.config, save_every=2, log_every=1, seed=5, runs=str(tmp_path), name="run")
    return replace(loop, config=loop.script.validate(config))


every_loop = pytest.mark.parametrize("loop", LOOPS, indirect=True)


@every_loop
def test_each_micro_batch_has_its_own_seed_also_after_a_resume(loop, rehearse):
    expected = [(5, number) for number in range(1, 9)]

    whole = rehearse(loop.script, replace(loop.config, name="whole"))
    crashed = rehearse(loop.script, loop.config, crash_at=6)  # in the middle of update 3
    resumed = rehearse(loop.script, loop.config)

    assert whole.seeds == expected
    assert crashed.seeds == expected[:5]
    assert resumed.seeds == expected[4:]


@every_loop
def test_an_update_has_one_learning_rate(loop, rehearse):
    # These rates depend on the number of updates, or on that of an epoch, too.
    sizes = (4,) if loop.script in (glue, resnet50) else ()
    expected = rates(loop.script.learning_rate, loop.config, [0, 1, 2, 3], *sizes)
    assert len(set(expected)) > 1

    assert rehearse(loop.script, loop.config).rates == expected


@every_loop
def test_a_model_loaded_for_evaluation_trains_in_training_mode(loop, rehearse):
    assert rehearse(loop.script, loop.config).training == [True] * 8


@every_loop
def test_a_line_of_metrics_counts_the_examples_so_far(loop, rehearse):
    logged = rehearse(loop.script, loop.config).logged

    examples = loop.examples
    if loop.script is transformer:
        examples = logged[0][1]  # tokens: the mean of a batch
        assert 1 < examples < 2 * 1024
    assert logged == [(step, step * examples) for step in (1, 2, 3, 4)]


@every_loop
def test_it_evaluates_every_so_many_updates_and_after_the_last(loop, rehearse):
    if loop.script is resnet50:  # which counts epochs
        assert rehearse(resnet50, loop.config).evaluated == [4]
    else:
        config = replace(loop.config, eval_every=3)
        assert rehearse(loop.script, config).evaluated == [3, 4]


@pytest.fixture
def per_step(tmp_path) -> dict[str, Any]:
    """Changes of a config for a rehearsal that logs each step, in a folder of its own."""
    return {"log_every": 1, "runs": str(tmp_path)}


def test_glue_counts_epochs_of_batches_that_may_not_be_full(rehearse, per_step, monkeypatch):
    """Three batches an epoch, the last of which is not full."""
    fewer_sentences(monkeypatch, (44, 16))
    config = replace(glue.TINY, lengths=(32,), batch_size=16, epochs=1.5, **per_step)

    found = rehearse(glue, replace(glue.validate(config), name="glue"))

    assert len(found.seeds) == 5
    assert found.evaluated == [3, 5]


def test_resnet50_counts_epochs_of_full_batches(rehearse, per_step, monkeypatch):
    monkeypatch.setattr(resnet50, "SYNTHETIC_TRAIN", 128 + 63)
    config = replace(resnet50.TINY, epochs=5, eval_every=2, name="resnet50", **per_step)

    found = rehearse(resnet50, config)

    assert len(found.seeds) == 10
    assert found.evaluated == [4, 8, 10]


@pytest.mark.parametrize(
    ("changes", "evaluated"),
    [({"name": "dlrm"}, [3, 6]), ({"name": "other", "eval_every": 4}, [4, 6])],
    ids=["each epoch", "every 4 steps"],
)
def test_dlrm_counts_epochs_of_full_batches(changes, evaluated, rehearse, per_step, monkeypatch):
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 3 * 256 + 255)
    config = replace(dlrm.TINY, epochs=2, **per_step, **changes)
    assert rehearse(dlrm, config).evaluated == evaluated


def test_dlrms_tables_have_the_networks_rate(rehearse, per_step, monkeypatch):
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 4 * 256)
    config = replace(dlrm.TINY, warmup_steps=3, name="run", **per_step)

    found = rehearse(dlrm, config)

    expected = rates(dlrm.learning_rate, config, [0, 1, 2, 3])
    assert found.rates == expected
    assert found.table_rates == expected
    assert found.training == [True] * 4


def test_dlrm_drops_nothing_at_random(rehearse, per_step, monkeypatch):
    monkeypatch.setattr(dlrm, "SYNTHETIC_TRAIN", 4 * 256)
    config = replace(dlrm.TINY, warmup_steps=3, name="run", **per_step)
    cross_layers, cross_rank = config.cross
    model = dlrm.DLRM(
        num_dense=3,
        num_tables=2,
        dim=config.dim,
        bottom=config.bottom,
        top=config.top,
        interaction=config.interaction,
        cross_layers=cross_layers,
        cross_rank=cross_rank,
    )

    assert rehearse(dlrm, config).seeds == []
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())


def test_a_seed_depends_on_the_runs_and_on_the_batch(monkeypatch):
    made = []
    backend = SimpleNamespace(set_seed=made.append, own_seed=tuple)
    monkeypatch.setattr(device, "_backend", backend)
    keys = list(itertools.product((0, 1, 2**40), range(1, 50)))

    for key in keys:
        device.seed_step(*key)

    assert len(set(made)) == len(keys)
    assert made == [np.random.SeedSequence(key).generate_state(1)[0] for key in keys]


# ---- losses and metrics: ResNet-50 ---------------------------------------------------------------
class Stored(nn.Module):
    """Returns the logits of each example by its number, which is its input's first value."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, number: Tensor) -> Tensor:
        return self.logits[number.flatten(1)[:, 0].long()]


def images(labels: np.ndarray) -> dict[str, Tensor]:
    numbers = torch.arange(len(labels))[:, None, None, None]
    return {"image": numbers, "label": torch.from_numpy(labels)}


def resnet50_state(logits: Tensor) -> resnet50.State:
    return resnet50.State(Stored(logits), nn.Identity(), None)


@dataclass
class Classified:
    """40 images, of which about half are classified as their labels say."""

    logits: Tensor
    labels: np.ndarray


@pytest.fixture
def classified() -> Classified:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (40, 12)).astype(np.float32))
    labels = rng.integers(0, 12, 40)
    labels[:20] = logits[:20].argmax(1)
    return Classified(logits, labels)


def test_resnets_loss_is_smoothed_in_training(classified, mesh):
    logits = classified.logits
    batch = images(classified.labels)

    found = resnet50.forward(resnet50_state(logits), batch, resnet50.Config(), mesh)

    loss = F.cross_entropy(logits, batch["label"], label_smoothing=0.1)
    torch.testing.assert_close(found["loss"], loss)
    accuracy = sklearn.metrics.accuracy_score(classified.labels, logits.argmax(1))
    assert found["accuracy"].item() == pytest.approx(accuracy)


def test_resnets_loss_is_not_smoothed_in_evaluation(classified, mesh):
    logits = classified.logits
    labels = classified.labels
    batch = images(labels) | {"mask": torch.ones(40)}

    found = resnet50.eval_step(resnet50_state(logits), batch, resnet50.Config(), mesh)

    loss = sklearn.metrics.log_loss(labels, logits.double().softmax(1))
    assert found["loss"].item() / 40 == pytest.approx(loss)
    for name, k in (("top1", 1), ("top5", 5)):
        share = sklearn.metrics.top_k_accuracy_score(labels, logits, k=k, labels=range(12))
        assert found[name].item() / 40 == pytest.approx(share)
        assert 0.4 < share < 1


not_finite = pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])


@not_finite
def test_non_finite_padding_does_not_reach_resnets_metrics(nothing, mesh):
    # The third cannot be decoded, the last two are padding.
    labels = np.array([1, 2, -1, 0, 3, 3])
    logits = torch.randn(6, 12)
    batch = images(labels) | {"mask": torch.tensor([1.0, 1, 1, 1, 0, 0])}
    expected = resnet50.eval_step(resnet50_state(logits), batch, resnet50.Config(), mesh)
    assert expected["count"] == 3

    logits[[2, 4, 5]] = nothing
    found = resnet50.eval_step(resnet50_state(logits), batch, resnet50.Config(), mesh)

    assert found == expected
    assert all(value.isfinite() for value in found.values())


def sums(batches: list[dict[str, float]]) -> Callable:
    """Returns an evaluation step that returns these sums, batch by batch."""
    left = iter(batches)

    def step(*_) -> dict[str, Tensor]:
        return {name: torch.tensor(float(value)) for name, value in next(left).items()}

    return step


@pytest.fixture
def any_number(monkeypatch) -> None:
    """Leaves out that a batch is compared with what the model has: the model is a stand-in."""
    unlimited = SimpleNamespace(check=lambda batch: None)
    monkeypatch.setattr(architectures, "limits", lambda model: unlimited)


def evaluation_state() -> SimpleNamespace:
    return SimpleNamespace(model=nn.Linear(1, 1), embeddings=SimpleNamespace(check=lambda: None))


def test_resnets_metrics_are_means_over_all_images(mesh):
    """Not means of the batches' means; one of the six cannot be decoded."""
    step = sums(
        [
            {"loss": 6, "top1": 2, "top5": 3, "count": 4},
            {"loss": 9, "top1": 0, "top5": 1, "count": 1},
        ]
    )
    config = replace(resnet50.TINY, batch_size=4)
    data = resnet50.imagenet.SyntheticImages(6, 32, 10, 0, "eval")
    state = evaluation_state()

    found = resnet50.evaluate(step, state, data, config, mesh)
    assert list(found) == resnet50.metric_names(config)

    assert found == {"top1": 0.4, "top5": 0.8, "loss": 3.0}
    assert state.model.training


# ---- losses and metrics: pretraining -------------------------------------------------------------
@not_finite
def test_non_finite_padding_does_not_reach_pretrainings_metrics(nothing, monkeypatch):
    """Neither that of rows, nor that of positions without a prediction."""
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
    logits = result["logits"][:3][counted]
    labels = batch["labels"][:3][counted]
    nll = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(expected["loss"], nll)
    assert expected["predicted"] == 6
    assert expected["rows"] == 3

    result["logits"][batch["weights"] * batch["mask"][:, None] == 0] = nothing
    result["related"][3] = nothing
    assert objectives.scores(None, batch) == expected


class Rows:
    """Rows of which each draws one number."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"draw": np.float64(rng.random()), "weights": np.ones(3, np.float32)}


def test_pretrainings_metrics_are_means_over_tokens_and_rows(mesh, any_number):
    step = sums(
        [
            {"loss": 6, "accuracy": 1, "next_sentence_accuracy": 1, "predicted": 8, "rows": 4},
            {"loss": 9, "accuracy": 1, "next_sentence_accuracy": 1, "predicted": 2, "rows": 1},
        ]
    )
    config = replace(pretrain.TINY, batch_size=16, next_sentence=True)
    state = evaluation_state()

    found = pretrain.evaluate(step, state, Rows(20), config, mesh)
    assert list(found) == pretrain.metric_names(config)

    assert found == {"loss": 1.5, "accuracy": 0.2, "next_sentence_accuracy": 0.4}
    assert state.model.training


def draws_of(batch: dict[str, Tensor]) -> list[float]:
    """Returns what the rows of a batch have drawn, without padding."""
    return batch["draw"][batch["mask"] > 0].tolist()


def expected_draws(seed: int) -> list[float]:
    return [np.random.default_rng((seed, 0, row)).random() for row in range(20)]


def test_masks_of_an_evaluation_are_those_of_the_runs_seed(mesh, any_number):
    """The same each time, and another for another --seed."""
    drawn = []

    def step(state, batch, *_):
        drawn.extend(draws_of(batch))
        return {name: torch.tensor(1.0) for name in ("loss", "accuracy", "predicted")}

    for seed in (0, 7, 7):
        config = replace(pretrain.TINY, batch_size=16, seed=seed)
        drawn.clear()
        pretrain.evaluate(step, evaluation_state(), Rows(20), config, mesh)
        assert drawn == pytest.approx(expected_draws(seed), rel=1e-6)


def test_what_is_checked_before_step_1_has_the_evaluations_masks(mesh, monkeypatch, any_number):
    config = replace(pretrain.TINY, batch_size=16, seed=7)
    checked = []
    first_and_last = loading.first_and_last

    def recorded(*arguments, **options):
        checked.extend(first_and_last(*arguments, **options))
        return checked

    monkeypatch.setattr(loading, "first_and_last", recorded)
    pretrain.check_evaluation(pretrain.Data(None, Rows(20), None, None), config, mesh)

    drawn = []
    for batch in checked:
        drawn += draws_of(batch)
    assert drawn == pytest.approx(expected_draws(7), rel=1e-6)


def test_an_update_of_other_micro_batches_is_refused(mesh):
    """The mean of its gradients would be divided by the wrong number."""
    state = SimpleNamespace(model=device.to_device(nn.Linear(2, 1), mesh))
    step = accumulate.AccumulatedStep(None, None, state, ("loss",), mesh)
    one_micro_batch = SimpleNamespace(left=1, first=1)

    with pytest.raises(ValueError, match="yields 1 micro-batches.*update_every is 2"):
        step(state, one_micro_batch, SimpleNamespace(update_every=2), mesh)


# ---- losses and metrics: the Transformer ---------------------------------------------------------
@pytest.fixture
def number_as_bleu(monkeypatch) -> None:
    """Gives the number of translations in place of their BLEU."""

    def count(bleu, translations, mesh) -> int:
        return len(translations)

    monkeypatch.setattr(translate.Bleu, "__call__", count)


VALID_SUMS = {"loss": 60, "nll": 20, "tokens": 10}
TEST_SUMS = {"loss": 80, "nll": 30, "tokens": 10}


def test_perplexity_is_of_the_loss_without_smoothing(mesh, number_as_bleu):
    """And both are means over all tokens, not over batches."""
    sets = {"valid": wmt.SyntheticPairs("valid", 16)}
    config = replace(transformer.TINY, lengths=(16,), batch_tokens=128)
    step = sums([VALID_SUMS | {"nll": 11}, {"loss": 5, "nll": 9, "tokens": 2}])
    state = evaluation_state()

    def translations(pairs, unknown) -> list[str]:
        return ["a"] * 7

    found = transformer.evaluate(step, translations, state, sets, config, mesh)

    assert tuple(found) == transformer.METRICS
    assert found == pytest.approx({"bleu": 7, "loss": 65 / 12, "ppl": math.exp(20 / 12)})
    assert state.model.training


def test_metrics_of_the_transformers_test_split_have_its_name(mesh, number_as_bleu):
    pairs = wmt.SyntheticPairs("valid", 16)
    sets = {"valid": pairs, "test": pairs}
    config = replace(transformer.TINY, lengths=(16,), batch_tokens=256)
    step = sums([VALID_SUMS, TEST_SUMS])
    state = evaluation_state()

    def translations(pairs, unknown) -> list[str]:
        return ["a"]

    found = transformer.evaluate(step, translations, state, sets, config, mesh)

    expected = {
        "bleu": 1,
        "loss": 6.0,
        "ppl": math.exp(2),
        "test_bleu": 1,
        "test_loss": 8.0,
        "test_ppl": math.exp(3),
    }
    assert found == pytest.approx(expected)
    assert state.model.training


def test_the_transformers_losses_are_pytorchs(form):
    """With and without smoothing. fairseq's gives the right word none of the share of all:
    PyTorch's of another strength."""
    logits = torch.randn(3, 7, 11)
    target = torch.randint(4, 11, (3, 7))
    target[1, 4:] = wmt.PAD

    found = transformer.label_smoothed_loss(logits, target, 0.1)

    real = (target != wmt.PAD).flatten()
    assert found["tokens"] == real.sum() == 18
    words = logits.flatten(0, 1)[real]
    labels = target.flatten()[real]
    nll = F.cross_entropy(words, labels, reduction="sum")
    strength = 0.1 * 11 / 10
    smooth = F.cross_entropy(words, labels, reduction="sum", label_smoothing=strength)
    torch.testing.assert_close(found["nll"], nll, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["loss"], smooth, rtol=1e-5, atol=1e-5)


# ---- metrics of fine-tuning ----------------------------------------------------------------------
TASKS = glue.glue.TASKS


def of_sentences(task: str, batch: dict[str, Tensor]) -> Tensor:
    """Returns logits [B, labels] that depend on the tokens of each sentence alone; NaN for a row of
    padding."""
    tokens = batch["input_ids"].double() * batch["attention_mask"]
    number = tokens.sum(1)
    columns = []
    for column in range(len(TASKS[task].labels) or 1):
        columns.append(torch.sin(number * (column + 1)))
    logits = torch.stack(columns, 1).float()

    is_example = batch["attention_mask"].sum(1, keepdim=True) > 0
    return torch.where(is_example, logits, math.nan)


def of_split(metrics: dict[str, float], split: str) -> dict[str, float]:
    """Returns the metrics of a split; the names of MNLI's second begin with "mismatched_"."""
    matched = {}
    mismatched = {}
    for name, value in metrics.items():
        if name.startswith("mismatched_"):
            mismatched[name.removeprefix("mismatched_")] = value
        else:
            matched[name] = value
    return mismatched if split.endswith("mismatched") else matched


def expected_metrics(task: str, logits: Tensor, labels: np.ndarray) -> dict[str, float]:
    """Returns the metrics of Wang et al. 2019, table 1, of CoLA also the accuracy, and the loss."""
    if task == "stsb":
        scores = logits[:, 0].numpy()
        return {
            "pearson": scipy.stats.pearsonr(labels, scores)[0],
            "spearman": scipy.stats.spearmanr(labels, scores)[0],
            "loss": np.mean((scores - labels) ** 2),
        }

    chances = logits.double().softmax(1)
    predicted = logits.argmax(1).numpy()
    values = {"loss": sklearn.metrics.log_loss(labels, chances, labels=range(logits.shape[1]))}
    if task == "cola":
        values["mcc"] = sklearn.metrics.matthews_corrcoef(labels, predicted)
    values["accuracy"] = sklearn.metrics.accuracy_score(labels, predicted)
    if task in ("mrpc", "qqp"):
        values["f1"] = sklearn.metrics.f1_score(labels, predicted)
    return values


@pytest.mark.parametrize("task", TASKS)
def test_metrics_of_fine_tuning_are_scikit_learns_and_scipys(task, mesh, monkeypatch, any_number):
    """Of all examples in their order, whatever order they are evaluated in, and without padding."""
    fewer_sentences(monkeypatch, (64, 45))
    config = glue.validate(replace(glue.TINY, task=task, lengths=(16, 32), batch_size=16))
    data = glue.open_data(config)
    state = evaluation_state()

    def step(state, batch, *_):
        return of_sentences(task, {name: values.cpu() for name, values in batch.items()})

    found = glue.evaluate(step, state, data, config, mesh)
    assert list(found) == glue.metric_names(data)

    assert state.model.training
    count = 0
    for split, examples in data.eval.items():
        batch = loading.as_tensors(examples.batch(np.arange(45), (32,)))
        expected = expected_metrics(task, of_sentences(task, batch), examples.labels)
        values = of_split(found, split)
        assert values == pytest.approx(expected, rel=1e-5)
        count += len(values)
    assert count == len(found)


# ---- metrics of DLRM -----------------------------------------------------------------------------
def test_dlrms_metrics_are_scikit_learns_without_padding(mesh, monkeypatch):
    monkeypatch.setattr(dlrm, "EVAL_BATCH", 64)
    clicks = criteo.SyntheticClicks("eval", 203, table_rows=(30, 40), lookups=(1, 2), num_dense=3)
    state = evaluation_state()

    def step(state, batch, *_):
        batch = {name: values.cpu() for name, values in batch.items()}
        logit = batch["dense"].sum(1) + 0.5 * batch["label"]
        logit = torch.where(batch["mask"] > 0, logit, math.nan)
        return torch.stack([logit, batch["label"], batch["mask"]], 1)

    found = dlrm.evaluate(step, state, clicks, dlrm.TINY, mesh)
    assert tuple(found) == dlrm.METRICS

    whole = clicks.batch(np.arange(203))
    labels = whole["label"]
    logits = whole["dense"].sum(1) + 0.5 * labels
    chances = 1 / (1 + np.exp(-logits.astype(np.float64)))
    rate = np.full(203, labels.mean())
    loss = sklearn.metrics.log_loss(labels, chances)
    expected = {
        "auc": sklearn.metrics.roc_auc_score(labels, logits),
        "loss": loss,
        "ne": loss / sklearn.metrics.log_loss(labels, rate),
    }
    assert found == pytest.approx(expected, rel=1e-5)
    assert state.model.training
