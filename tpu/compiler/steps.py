"""The train step of each script, with inputs of the right shapes, for tpu/compiler/compile.py.

Config, `build` and `train_step` are the script's own. The published recipe stands for what a data set or a checkpoint
would say: classes, words, rows of tables.

Each function takes a script's Config, whose batch is that of all devices; a mesh of tpu/compiler/staging.py; and
the script, or another object with functions of the same names (bench/stock.py). A test compares names, shapes and types
of the inputs with what the data sets give.
"""

from collections import namedtuple
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from data import glue, pretraining
from errors import InputError
from models import encoders, objectives
from tpu.compiler import staging
from train import dlrm, pretrain, resnet50, transformer
from train import glue as glue_script
from train.common import accumulate, device
from train.common.xla.step_loop import StepLoop
from train.translate import Translator, rows

U8, I32, I64, F32 = torch.uint8, torch.int32, torch.int64, torch.float32


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


def step(script: Any, config: Any, data: Any, batch: dict, mesh: device.Mesh, what: str, unit: str, sums=()) -> Step:
    """Returns the script's step on this batch; of an update in parts, the step of one part, which adds to `sums`."""
    parts = getattr(config, "update_every", 1)
    if parts > 1 and not hasattr(script, "forward"):
        raise InputError(f"--update-every is {parts}; the usual step has no parts: give --update-every 1")
    state = script.build(config, data, mesh)
    state.model.train()
    examples = next(iter(batch.values())).shape[0]
    if parts == 1:
        return Step(script.train_step, (state, batch, config, mesh), what, examples, unit)
    totals = accumulate.gradient_buffers(state.model, sums, mesh)
    arguments = script.forward, state, batch, totals, config, mesh
    return Step(accumulate.gradient_step, arguments, f"{what}, 1/{parts} of an update", examples, unit)


def of_one_batch(config: Any, devices: int, given: int) -> Any:
    """Returns a script's config for evaluation(), whose batch is a part of a train step's; of DLRM its own size, but
    where a number per device is given."""
    if not hasattr(config, "update_every"):
        size = config.batch_size if given else -(-dlrm.EVAL_BATCH // devices) * devices
        return replace(config, steps_a_call=1, batch_size=size)
    parts = {"batch_size": config.batch_size // config.update_every} if hasattr(config, "batch_size") else {}
    return replace(config, update_every=1, **parts)


def evaluation(train: Step, script: Any, parts: int) -> Step:
    """Returns the script's eval_step on the batch of a train step. What training keeps stays beside it: the optimizer's
    state, and of an update in parts the sums of gradients."""
    state, batch, config, mesh = train.arguments
    state.model.eval()
    if parts > 1:
        accumulate.gradient_buffers(state.model, (), mesh)
    if script is transformer:  # not packed
        batch = {name: batch[name] for name in ("source", "previous", "target")}
    else:
        batch |= staging.inputs({"mask": ((train.examples,), F32)}, mesh)
    arguments = state, batch, config, mesh
    return replace(train, function=script.eval_step, arguments=arguments, what=f"{train.what}, evaluation")


def beam_search(one: Step) -> Step:
    """Returns the Transformer's translation of the batch of an `evaluation`, which makes it for BLEU."""
    state, batch, config, mesh = one.arguments
    tokens = batch["source"].shape[1]
    count = rows(config.batch_tokens // config.beam, tokens, mesh.num_devices)
    sources, search = staging.inputs({"source": ((count, tokens), I32)}, mesh), Translator(state.model, mesh, config)

    def translate_step(state, batch):
        return search.translate_step(state.model, batch)

    what = f"{one.what}, search with {config.beam} beams"
    return Step(translate_step, (state, sources), what, count, "sentences")


def images(config: resnet50.Config, mesh: device.Mesh, script: Any = resnet50) -> Step:
    """Returns ResNet's step on ImageNet's 1,000 classes."""
    data = resnet50.Data(SimpleNamespace(classes=range(1000)), None)
    return step(
        script, config, data, image_batch(config, mesh), mesh, f"{config.model}, {config.image_size} px", "images"
    )


def image_batch(config: resnet50.Config, mesh: device.Mesh) -> dict:
    """Returns a batch of data/imagenet.py; of an update in parts, one part."""
    size, count = config.image_size, config.batch_size // config.update_every
    return staging.inputs({"image": ((count, size, size, 3), U8), "label": ((count,), I64)}, mesh)


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
    what = f"{config.model}-base on {config.task}, {config.lengths[-1]} tokens"
    data = glue_script.Data(None, None, model, None)
    return step(script, config, data, sentence_batch(config, mesh), mesh, what, "sequences")


def sentence_batch(config: glue_script.Config, mesh: device.Mesh) -> dict:
    """Returns a batch of data/glue.py; of an update in parts, one part."""
    count, tokens = config.batch_size // config.update_every, config.lengths[-1]
    shapes = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ((count, tokens), I32))
    labels = I32 if glue.TASKS[config.task].labels else F32
    return staging.inputs(shapes | {"labels": ((count,), labels), "mask": ((count,), F32)}, mesh)


def text(config: pretrain.Config, mesh: device.Mesh, script: Any = pretrain, tokens: int = 512) -> Step:
    """Returns the step of pretraining on rows of `tokens`."""
    given = replace(config, data=config.data or "text", teacher=config.teacher or "google-bert/bert-base-uncased")
    config = pretrain.validate(given)
    model = language_model(config.model, config.size, tokens, config.next_sentence)
    teacher = None
    if encoders.record(config.model).teacher:
        teacher = language_model(encoders.record(config.model).teacher, config.size, tokens).eval()
        teacher.requires_grad_(False)
    batch = text_batch(config, mesh, tokens)
    what = f"{config.model}-{config.size}, {tokens} tokens, {batch['positions'].shape[1]} predicted"
    data = pretrain.Data(None, None, model, teacher)
    return step(script, config, data, batch, mesh, what, "sequences", ("loss", "words"))


def language_model(name: str, size: str, tokens: int, next_sentence: bool = False) -> PreTrainedModel:
    """Returns a new encoder to pretrain, with as many words as the published one."""
    settings = encoders.configuration(name, size, Vocabulary(encoders.published(name)), tokens)
    return objectives.language_model(settings, next_sentence, source=None)


def text_batch(config: pretrain.Config, mesh: device.Mesh, tokens: int) -> dict:
    """Returns a batch of data/pretraining.py; of an update in parts, one part."""
    count = config.batch_size // config.update_every
    kind = encoders.record(config.model).tokenizer
    predictions = config.predictions or pretraining.usual_predictions(kind, tokens)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    if kind == "xlnet":
        names.append("order")
    shapes = dict.fromkeys(names, ((count, tokens), I32))
    shapes |= dict.fromkeys(("positions", "labels"), ((count, predictions), I32))
    shapes["weights"] = ((count, predictions), F32)
    if config.next_sentence:
        shapes["next_sentence"] = ((count,), I32)
    if config.update_every > 1:
        shapes |= dict.fromkeys(("predicted", "tokens"), ((count,), F32))
    return staging.inputs(shapes, mesh)


WORDS = 32_768  # of the joint dictionary of WMT'16 and '18: 32k pieces, and fairseq's own symbols
LONGEST = 256  # tokens of a row where the recipe takes them from the data


def translation(config: transformer.Config, mesh: device.Mesh, script: Any = transformer) -> Step:
    """Returns the Transformer's step with one dictionary, on a batch of its longest shape."""
    dictionary = range(WORDS)
    data = transformer.Data(SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary), None)
    batch = translation_batch(config, mesh)
    what = f"{config.arch}, {batch['source'].shape[1]} tokens, {WORDS:,} words{', packed' if config.pack else ''}"
    return step(script, config, data, batch, mesh, what, "rows", ("loss", "nll", "tokens"))


def translation_batch(config: transformer.Config, mesh: device.Mesh) -> dict:
    """Returns a batch of data/wmt.py."""
    tokens = config.lengths[-1] if config.lengths else LONGEST
    names = ["source", "previous", "target", *(["source_segment", "target_segment"] if config.pack else [])]
    return staging.inputs(dict.fromkeys(names, ((rows(config.batch_tokens, tokens), tokens), I32)), mesh)


Clicks = namedtuple("Clicks", "table_rows lookups num_dense features")
# Distinct values of each feature in Criteo's two data sets, as facebookresearch/dlrm and MLPerf state them; Terabyte's
# with at most 40M rows a table. The multi-hot numbers are MLPerf v2's.
KAGGLE_ROWS = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992,
    5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
TERABYTE_ROWS = (
    39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546, 403_346, 10, 2_208,
    11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36,
)  # fmt: skip
MULTI_HOT_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
    11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
MULTI_HOT_LOOKUPS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def clicks(config: dlrm.Config, mesh: device.Mesh, script: Any = dlrm) -> Step:
    """Returns DLRM's step with the tables of Criteo Kaggle or Terabyte, by its width."""
    tables, lookups, name = KAGGLE_ROWS, (1,) * 26, "Criteo Kaggle"
    if config.interaction == "dcn":
        tables, lookups, name = MULTI_HOT_ROWS, MULTI_HOT_LOOKUPS, "Criteo Terabyte, multi-hot"
    elif config.dim == dlrm.MLPERF_V1.dim:
        tables, name = TERABYTE_ROWS, "Criteo Terabyte"
    if config.hash_rows:
        tables = tuple(min(count, config.hash_rows) for count in tables)
    data = dlrm.Data(Clicks(tables, lookups, 13, [f"c{i}" for i in range(26)]), None)
    what = f"dlrm, {name}, {sum(tables):,} rows of {config.dim}"
    found = step(script, config, data, click_batch(config, mesh, sum(lookups)), mesh, what, "examples")
    plans = ", ".join(f"{count} {plan}" for plan, count in found.arguments[0].embeddings.tables_by_plan().items())
    found = replace(found, what=f"{what} ({plans})")
    return in_a_loop(found, config.steps_a_call, mesh) if config.steps_a_call > 1 else found


def in_a_loop(one: Step, count: int, mesh: device.Mesh) -> Step:
    """Returns `count` steps in one program, as train/common/many_steps.py calls them. The compiler does not tell how
    often a loop runs, so it is counted once, and the figures are still those of one step."""
    loop, (state, batch, *rest) = StepLoop(one.function, mesh), one.arguments
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}
    batches = tuple(staging.inputs(shapes, mesh) for _ in range(count))

    def train_steps(state, batches, config, mesh):
        return loop(state, batches, config, mesh)

    what = f"{one.what}, one of {count} steps in a loop"
    return replace(one, function=train_steps, arguments=(state, batches, *rest), what=what)


def click_batch(config: dlrm.Config, mesh: device.Mesh, lookups: int) -> dict:
    """Returns a batch of data/criteo.py."""
    count = config.batch_size
    shapes = {"dense": ((count, 13), F32), "ids": ((count, lookups), I32), "label": ((count,), F32)}
    return staging.inputs(shapes, mesh)
