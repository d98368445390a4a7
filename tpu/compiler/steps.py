"""The train step of each script, with inputs of the right shapes, for tpu/compiler/compile.py.

Config, `build` and `train_step` are the script's own. The published recipe stands for what a data
set or a checkpoint would say: classes, words, rows of tables.

Each function takes a script's Config, whose batch is that of all devices; a mesh of
tpu/compiler/staging.py; and the script, or another object with functions of the same names
(bench/stock.py). A test compares names, shapes and types of the inputs with what the data sets
give.
"""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from data import glue, pretraining
from errors import InputError
from models import encoders, objectives, question_answering
from tpu.compiler import staging
from train import dlrm, pretrain, resnet50, squad, transformer
from train import glue as glue_script
from train import tagging as tagging_script
from train.common import accumulate, device
from train.common.xla.step_loop import StepLoop
from train.translate import Translator, rows_per_batch

U8 = torch.uint8
I32 = torch.int32
I64 = torch.int64
F32 = torch.float32
CONLL_CLASSES = 9  # O, and B- and I- of four types


@dataclass(frozen=True)
class Step:
    """A step to compile: `function(*arguments)`, and what it works on.

    Attributes:
        what: model and shapes, for people.
        examples: of all devices.
        unit: what an example is.
    """

    function: Any
    arguments: tuple
    what: str
    examples: int
    unit: str


def step(
    script: Any,
    config: Any,
    data: Any,
    batch: dict,
    mesh: device.Mesh,
    what: str,
    unit: str,
    sums: tuple[str, ...] = (),
) -> Step:
    """Returns the script's step on this batch; with gradient accumulation the step of one
    micro-batch.

    Args:
        sums: names of the metrics that a micro-batch adds to.
    """
    micro_batches = getattr(config, "update_every", 1)
    if micro_batches > 1 and not hasattr(script, "forward"):
        raise InputError(
            f"--update-every is {micro_batches}; the usual step has no parts: give --update-every 1"
        )

    state = script.build(config, data, mesh)
    state.model.train()
    examples = next(iter(batch.values())).shape[0]
    if micro_batches == 1:
        return Step(script.train_step, (state, batch, config, mesh), what, examples, unit)

    totals = accumulate.allocate_gradients_and_totals(state.model, sums, mesh)
    return Step(
        function=accumulate.gradient_step,
        arguments=(script.forward, state, batch, totals, config, mesh),
        what=f"{what}, 1/{micro_batches} of an update",
        examples=examples,
        unit=unit,
    )


def of_one_batch(config: Any, devices: int, given: int) -> Any:
    """Returns a script's config for evaluation(), whose batch is a micro-batch of a train step.

    DLRM's batch is its own, dlrm.EVAL_BATCH, unless a number per device is given.

    Args:
        given: examples per device; 0: none are given.
    """
    if not hasattr(config, "update_every"):  # DLRM
        size = config.batch_size
        if not given:
            size = math.ceil(dlrm.EVAL_BATCH / devices) * devices
        return replace(config, steps_a_call=1, batch_size=size)
    if not hasattr(config, "batch_size"):  # the Transformer's batch_tokens are a micro-batch's
        return replace(config, update_every=1)
    micro_batch = config.batch_size // config.update_every
    config = replace(config, update_every=1, batch_size=micro_batch)
    if hasattr(config, "image_size"):
        size = resnet50.evaluated_size(config)
        return replace(config, image_size=size, augmentation="crop")
    return config


def evaluation(train: Step, script: Any, micro_batches: int) -> Step:
    """Returns the script's eval_step on the batch of a train step.

    What training keeps stays beside it: the optimizer's state, and with gradient accumulation the
    sums of gradients.
    """
    state, batch, config, mesh = train.arguments
    state.model.eval()
    if micro_batches > 1:
        accumulate.allocate_gradients_and_totals(state.model, (), mesh)
    if script is transformer:  # not packed
        batch = {name: batch[name] for name in ("source", "previous", "target")}
    else:
        batch = batch | staging.inputs({"mask": ((train.examples,), F32)}, mesh)

    return replace(
        train,
        function=script.eval_step,
        arguments=(state, batch, config, mesh),
        what=f"{train.what}, evaluation",
    )


def beam_search(one: Step) -> Step:
    """Returns the Transformer's translation of the batch of an `evaluation`, as evaluating BLEU
    runs it."""
    state, batch, config, mesh = one.arguments
    tokens = batch["source"].shape[1]
    sentences = rows_per_batch(config.batch_tokens // config.beam, tokens, mesh.num_devices)
    sources = staging.inputs({"source": ((sentences, tokens), I32)}, mesh)
    search = Translator(state.model, mesh, config)

    def translate_step(state, batch):
        return search.translate_step(state.model, batch)

    what = f"{one.what}, search with {config.beam} beams"
    return Step(translate_step, (state, sources), what, sentences, "sentences")


# ---- images --------------------------------------------------------------------------------------


IMAGE_CLASSES = 1000  # of ImageNet
FINETUNED_IMAGES = 100_000  # for which the preset finetune chooses its batch here


def images(config: resnet50.Config, mesh: device.Mesh, script: Any = resnet50) -> Step:
    """Returns ResNet's step on ImageNet's 1,000 classes; in multilabel on so many labels."""
    outputs = 1 if config.objective == "regression" else IMAGE_CLASSES
    data = resnet50.Data(SimpleNamespace(classes=range(outputs)), None)
    batch = image_batch(config, mesh)
    what = f"{config.model}, {config.image_size} px"
    return step(script, config, data, batch, mesh, what, "images")


def image_batch(config: resnet50.Config, mesh: device.Mesh) -> dict:
    """Returns a micro-batch of data/imagenet.py."""
    size = config.image_size
    count = config.batch_size // config.update_every
    labels = {
        "classes": ((count,), I64),
        "multilabel": ((count, IMAGE_CLASSES), F32),
        "regression": ((count,), F32),
    }
    shapes = {"image": ((count, size, size, 3), U8), "label": labels[config.objective]}
    if config.augmentation == "strong":
        boxes = ((count, 4), I32)
        shapes |= {"erased": boxes, "pasted": boxes, "share": ((count,), F32)}
    return staging.inputs(shapes, mesh)


# ---- text ----------------------------------------------------------------------------------------


class Vocabulary:
    """The stand-in for a tokenizer: how many tokens there are, and which are special."""

    def __init__(self, config: PreTrainedConfig):
        self.size = config.vocab_size
        self.pad_token_id = config.pad_token_id
        self.bos_token_id = config.bos_token_id
        self.eos_token_id = config.eos_token_id

    def __len__(self) -> int:
        return self.size


def sentences(config: glue_script.Config, mesh: device.Mesh, script: Any = glue_script) -> Step:
    """Returns the step of fine-tuning on a task of GLUE, on a batch of the longest bucket."""
    config = glue_script.validate(replace(config, data=config.data or "nyu-mll/glue"))
    settings = encoders.published(config.model)
    settings.num_labels = max(len(glue.TASKS[config.task].labels), 1)
    model = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
    data = glue_script.Data(None, None, model, None)
    batch = sentence_batch(config, mesh)
    what = f"{config.model}-base on {config.task}, {config.lengths[-1]} tokens"
    return step(script, config, data, batch, mesh, what, "sequences")


def sentence_batch(config: glue_script.Config, mesh: device.Mesh) -> dict:
    """Returns a micro-batch of data/glue.py."""
    count = config.batch_size // config.update_every
    tokens = config.lengths[-1]
    is_regression = not glue.TASKS[config.task].labels
    shapes = {
        "input_ids": ((count, tokens), I32),
        "attention_mask": ((count, tokens), I32),
        "token_type_ids": ((count, tokens), I32),
        "labels": ((count,), F32 if is_regression else I32),
        "mask": ((count,), F32),
    }
    return staging.inputs(shapes, mesh)


def questions(config: squad.Config, mesh: device.Mesh, script: Any = squad) -> Step:
    """Returns the step of question answering on SQuAD."""
    config = squad.validate(replace(config, data=config.data or "rajpurkar/squad"))
    settings = encoders.published(config.model)
    model = question_answering.span_model(settings, source=None).model
    data = squad.Data(None, {}, {}, None, model, None, may_be_none=False)
    batch = question_batch(config, mesh)
    what = f"{config.model}-base on squad, {config.max_length} tokens"
    return step(script, config, data, batch, mesh, what, "sequences", sums=("loss",))


def question_batch(config: squad.Config, mesh: device.Mesh) -> dict:
    """Returns a micro-batch of data/squad.py."""
    count = config.batch_size // config.update_every
    tokens = config.max_length
    shapes = {
        "input_ids": ((count, tokens), I32),
        "attention_mask": ((count, tokens), I32),
        "token_type_ids": ((count, tokens), I32),
        "start": ((count,), I32),
        "end": ((count,), I32),
    }
    return staging.inputs(shapes, mesh)


def tags(config: tagging_script.Config, mesh: device.Mesh, script: Any = tagging_script) -> Step:
    """Returns the step of finding the four types of entities of CoNLL-2003, on a batch of the
    longest windows."""
    config = tagging_script.validate(replace(config, data=config.data or "conll2003"))
    settings = encoders.published(config.model)
    settings.num_labels = CONLL_CLASSES
    model = AutoModelForTokenClassification.from_config(settings, dtype=torch.float32)
    data = tagging_script.Data(None, None, model, None, None)
    rows = (config.batch_size // config.update_every, config.lengths[-1])
    shapes = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "labels"), (rows, I32))
    shapes["mask"] = (rows[:1], F32)
    batch = staging.inputs(shapes, mesh)
    what = f"{config.model}-base on entities, {config.lengths[-1]} tokens"
    return step(script, config, data, batch, mesh, what, "sequences")


def text(
    config: pretrain.Config,
    mesh: device.Mesh,
    script: Any = pretrain,
    tokens: int = 512,
) -> Step:
    """Returns the step of pretraining on rows of `tokens`."""
    teacher_id = config.teacher or "google-bert/bert-base-uncased"
    config = pretrain.validate(replace(config, data=config.data or "text", teacher=teacher_id))
    model = language_model(config.model, config.size, tokens, config.next_sentence)
    teacher = None
    if encoders.by_name(config.model).teacher:
        teacher = language_model(encoders.by_name(config.model).teacher, config.size, tokens)
        teacher = teacher.eval()
        teacher.requires_grad_(False)

    batch = text_batch(config, mesh, tokens)
    predicted = batch["positions"].shape[1]
    what = f"{config.model}-{config.size}, {tokens} tokens, {predicted} predicted"
    data = pretrain.Data(None, None, model, teacher)
    return step(script, config, data, batch, mesh, what, "sequences", sums=("loss", "words"))


def language_model(
    name: str,
    size: str,
    tokens: int,
    next_sentence: bool = False,
) -> PreTrainedModel:
    """Returns a new encoder to pretrain, with as many words as the published one."""
    vocabulary = Vocabulary(encoders.published(name))
    settings = encoders.new_configuration(name, size, vocabulary, tokens)
    return objectives.language_model(settings, next_sentence, source=None)


def text_batch(config: pretrain.Config, mesh: device.Mesh, tokens: int) -> dict:
    """Returns a micro-batch of data/pretraining.py."""
    count = config.batch_size // config.update_every
    kind = encoders.by_name(config.model).tokenizer
    predictions = config.predictions or pretraining.usual_predictions(kind, tokens)

    shapes = {
        "input_ids": ((count, tokens), I32),
        "attention_mask": ((count, tokens), I32),
        "token_type_ids": ((count, tokens), I32),
    }
    if kind == "xlnet":
        shapes["order"] = ((count, tokens), I32)
    shapes["positions"] = ((count, predictions), I32)
    shapes["labels"] = ((count, predictions), I32)
    shapes["weights"] = ((count, predictions), F32)
    if config.next_sentence:
        shapes["next_sentence"] = ((count,), I32)
    if config.update_every > 1:
        shapes["predicted"] = ((count,), F32)
        shapes["tokens"] = ((count,), F32)
    return staging.inputs(shapes, mesh)


# ---- translation ---------------------------------------------------------------------------------

WORDS = 32_768  # of the joint dictionary of WMT'16 and '18: 32k pieces, and fairseq's own symbols
LONGEST = 256  # tokens of a row where the recipe takes them from the data


def longest_row(config: transformer.Config) -> int:
    """Returns the tokens of the longest rows."""
    return config.lengths[-1] if config.lengths else LONGEST


def translation(config: transformer.Config, mesh: device.Mesh, script: Any = transformer) -> Step:
    """Returns the Transformer's step with one dictionary, on a batch of its longest shape."""
    words = range(WORDS)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    data = transformer.Data(task, None)
    batch = translation_batch(config, mesh)
    what = f"{config.arch}, {batch['source'].shape[1]} tokens, {WORDS:,} words"
    if config.pack:
        what += ", packed"
    return step(script, config, data, batch, mesh, what, "rows", sums=("loss", "nll", "tokens"))


def translation_batch(config: transformer.Config, mesh: device.Mesh) -> dict:
    """Returns a batch of data/wmt.py."""
    names = ["source", "previous", "target"]
    if config.pack:
        names += ["source_segment", "target_segment"]
    tokens = longest_row(config)
    count = rows_per_batch(config.batch_tokens, tokens)
    return staging.inputs(dict.fromkeys(names, ((count, tokens), I32)), mesh)


# ---- clicks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clicks:
    """What DLRM's step asks of its data set.

    Attributes:
        table_rows: distinct values of each feature.
        lookups: values of each feature in an example.
        num_dense: numbers in an example.
        features: their names.
    """

    table_rows: tuple[int, ...]
    lookups: tuple[int, ...]
    num_dense: int
    features: list[str]


# Distinct values of each feature in Criteo's two data sets, as facebookresearch/dlrm and MLPerf
# state them; Terabyte's with at most 40M rows a table. The multi-hot numbers are MLPerf v2's.
KAGGLE_ROWS = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27,
    14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
TERABYTE_ROWS = (
    39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546, 403_346,
    10, 2_208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108,
    36,
)  # fmt: skip
MULTI_HOT_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282,
    10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108,
    36,
)  # fmt: skip
MULTI_HOT_LOOKUPS = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip
NUM_DENSE = 13


def clicks(config: dlrm.Config, mesh: device.Mesh, script: Any = dlrm) -> Step:
    """Returns DLRM's step with the tables of Criteo Kaggle or Terabyte, by its width."""
    lookups = (1,) * 26
    if config.interaction == "dcn":
        name = "Criteo Terabyte, multi-hot"
        tables = MULTI_HOT_ROWS
        lookups = MULTI_HOT_LOOKUPS
    elif config.dim == dlrm.MLPERF_V1.dim:
        name = "Criteo Terabyte"
        tables = TERABYTE_ROWS
    else:
        name = "Criteo Kaggle"
        tables = KAGGLE_ROWS
    if config.hash_rows:
        tables = tuple(min(count, config.hash_rows) for count in tables)

    features = [f"c{i}" for i in range(26)]
    data = dlrm.Data(Clicks(tables, lookups, NUM_DENSE, features), None)
    batch = click_batch(config, mesh, sum(lookups))
    what = f"dlrm, {name}, {sum(tables):,} rows of {config.dim}"
    found = step(script, config, data, batch, mesh, what, "examples")

    tables_by_plan = found.arguments[0].embeddings.tables_by_plan()
    plans = ", ".join(f"{count} {plan}" for plan, count in tables_by_plan.items())
    found = replace(found, what=f"{what} ({plans})")
    if config.steps_a_call > 1:
        return in_a_loop(found, config.steps_a_call, mesh)
    return found


def in_a_loop(one: Step, count: int, mesh: device.Mesh) -> Step:
    """Returns `count` steps in one program, as train/common/many_steps.py calls them.

    The compiler does not say how often a loop runs, so its body is counted once, and the figures
    are still those of one step.
    """
    loop = StepLoop(one.function, mesh)
    state, batch, *rest = one.arguments
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}
    batches = tuple(staging.inputs(shapes, mesh) for _ in range(count))

    def train_steps(state, batches, config, mesh):
        return loop(state, batches, config, mesh)

    return replace(
        one,
        function=train_steps,
        arguments=(state, batches, *rest),
        what=f"{one.what}, one of {count} steps in a loop",
    )


def click_batch(config: dlrm.Config, mesh: device.Mesh, lookups: int) -> dict:
    """Returns a batch of data/criteo.py."""
    count = config.batch_size
    shapes = {
        "dense": ((count, NUM_DENSE), F32),
        "ids": ((count, lookups), I32),
        "label": ((count,), F32),
    }
    return staging.inputs(shapes, mesh)
