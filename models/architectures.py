"""What an encoder of transformers is, read from the model itself and not from a list of names.

`check(folder, config)` finds out, before its weights are read, whether a checkpoint's step can be
compiled. `positions(model)` returns the length of the longest row in tokens. `limits(model)` checks
batches on the host, since XLA reads the nearest row of a table where a number is outside of it.
"""

import copy
import inspect
import math
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask

from errors import InputError
from models import encoders

# Names among transformers' attention implementations. OWN: the model's own, with a mask that is
# made without reading one. PROBED: the same, but it refuses what `encoder_layers.attend` cannot do.
OWN = "own"
PROBED = "probed"
# Other arguments that models give to attention, where they change no number: either the mask has
# them already, or only other implementations need them.
IGNORED = {
    "deterministic",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "sliding_window",
    "use_cache",
}
# The shape of the batch with which an architecture is tried.
ROWS = 2
TOKENS = 8


def own_attention(module: nn.Module, *args, **options) -> tuple[Tensor, Tensor]:
    """Computes attention as the model's own file has it."""
    file = sys.modules[type(module).__module__]
    return file.eager_attention_forward(module, *args, **options)


def own_mask(**options) -> Tensor:
    """Returns transformers' mask for a model's own attention.

    It is never left out where it hides nothing, since finding that out needs a reading of it.
    """
    options["allow_is_bidirectional_skip"] = False
    return eager_mask(**options)


def refuse_more(module: nn.Module, more: Mapping) -> None:
    """Raises InputError where a model gives attention what ours lacks, such as a score bias."""
    for name, given in more.items():
        if name in IGNORED or given is None or given is False:
            continue
        model = type(module).__name__
        raise InputError(f"{model} gives its attention {name}, which models/layers.py has not")


def probed_attention(
    module: nn.Module, *args, dropout: float = 0.0, scaling: float | None = None, **more
) -> tuple[Tensor, Tensor]:
    """Computes the model's own attention; raises InputError where ours could not replace it."""
    refuse_more(module, more)
    return own_attention(module, *args, dropout=dropout, scaling=scaling, **more)


for name, attention in ((OWN, own_attention), (PROBED, probed_attention)):
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, own_mask)


class HostOperations(TorchDispatchMode):
    """Collects the names of the operations that torch_xla would leave to the host in `found`."""

    # An operation with a kernel for one of these dispatch keys runs on the device.
    KEYS = (
        "XLA",
        "CompositeImplicitAutograd",
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    )
    # PyTorch has an operation for a layer norm, but composes it of smaller ones on XLA's devices.
    DECOMPOSED = ("aten::native_layer_norm_backward",)
    # torch_xla's own kernels of these hand over to the host for some arguments, such as those of
    # Funnel or TAPAS.
    HANDED_OVER = ("aten::avg_pool2d_backward", "aten::scatter_reduce.two")

    def __init__(self):
        super().__init__()
        self.found: set[str] = set()
        # Without torch_xla no operation has a kernel for XLA, and nothing is known.
        self.xla_is_loaded = torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "XLA")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if self.xla_is_loaded and name.startswith("aten::") and not self._runs_on_device(name):
            self.found.add(name.removeprefix("aten::"))
        return function(*args, **kwargs or {})

    def _runs_on_device(self, name: str) -> bool:
        """Returns whether torch_xla runs this operation on the device."""
        if name in self.HANDED_OVER:
            return False
        if name in self.DECOMPOSED:
            return True
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        return any(has_kernel(name, key) for key in self.KEYS)


EXPECTED = "expected an encoder of text, such as a BERT"


def check(folder: str, config: PreTrainedConfig, compiled: bool = True) -> None:
    """Raises InputError for a checkpoint that is no encoder of text, or whose step cannot compile.

    A model of this configuration computes a step without numbers, on PyTorch's "meta" device. So a
    model that reads a number on the host, or needs an operation that torch_xla lacks, is found here
    and not in the first step.

    Args:
        folder: of the checkpoint, for messages.
        config: the checkpoint's.
        compiled: False for a device on which PyTorch runs operation by operation. It can do all
            that the model can, so no step is tried.
    """
    given = f"checkpoint {folder} is a {config.model_type}"
    _check_kind(given, config)

    model = _without_numbers(given, config)
    accepted = inspect.signature(model.forward).parameters
    for name in ("input_ids", "attention_mask"):
        if name not in accepted:
            raise InputError(f"{given}, which takes no {name}; {EXPECTED}")

    encoder = encoders.by_config(config)
    if encoder is not None and encoder.own_layers is not None:
        return  # transformers' layers are not those that compute its step
    if compiled:
        _try_step(given, model)


def _check_kind(given: str, config: PreTrainedConfig) -> None:
    """Raises InputError where the configuration is no encoder's, or has no classifier."""
    config_class = type(config)
    if config_class not in AutoModelForSequenceClassification._model_mapping:
        raise InputError(f"{given}, which transformers has no text classifier of; {EXPECTED}")
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{given}, an encoder with a decoder; {EXPECTED}")

    # transformers takes an XLNet, which is one of ours, for a causal model.
    is_ours = config.model_type in encoders.NAMES
    predicts_masked = is_ours or config_class in AutoModelForMaskedLM._model_mapping
    predicts_next = config_class in AutoModelForCausalLM._model_mapping
    causal = (
        (predicts_next and not predicts_masked)
        or getattr(config, "is_decoder", False)
        or getattr(config, "causal", False)
    )
    if causal:
        raise InputError(f"{given}, in which no token sees the next; {EXPECTED}")


def _without_numbers(given: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a classifier of a configuration on the meta device.

    Raises:
        InputError: transformers cannot make it, since the model needs a package that is not there,
            or its config.json has an impossible value.
    """
    model_class = AutoModelForSequenceClassification._model_mapping[type(config)]
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return model_class(copy.deepcopy(config))
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f"{given}, of which transformers makes no model ({said}); {EXPECTED}"
        ) from error


def _try_step(given: str, model: PreTrainedModel) -> None:
    """Computes a training step of a model on the meta device.

    Raises:
        InputError: no program could be compiled of it: it reads numbers on the host, fails,
            replaces a module, or has an operation that XLA lacks.
    """
    use_own_attention(model, PROBED)
    ids = torch.ones(ROWS, TOKENS, dtype=torch.long, device="meta")
    remedy = "train it with --device cpu or cuda, or give another encoder"

    before = [type(module).__name__ for module in model.modules()]
    try:
        with HostOperations() as operations:
            model.train()
            logits = model(input_ids=ids, attention_mask=ids).logits
            logits.sum().backward()
    except InputError as error:
        raise InputError(f"{given}: {error}; {remedy}") from error
    except Exception as error:
        raise InputError(f"{given}, and {_why_it_failed(error)}; {remedy}") from error
    after = [type(module).__name__ for module in model.modules()]

    for old, new in zip(before, after, strict=False):
        if old != new:
            raise InputError(
                f"{given}, and replaces {old} by {new} in its first step; let its config.json ask "
                "for the latter (of a BigBird: attention_type original_full)"
            )
    if operations.found:
        missing = ", ".join(sorted(operations.found))
        raise InputError(f"{given}, and XLA has not its operations {missing}; {remedy}")


def _why_it_failed(error: Exception) -> str:
    """Returns why a step on the meta device failed, with the line of transformers' model."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if "/transformers/models/" in frame.filename:
            place = f" in {Path(frame.filename).name}, line {frame.lineno}"  # the innermost counts

    said = f"{type(error).__name__}: {error}".splitlines()[0]
    if "meta" in said:  # the device that has no numbers
        return f"a step is no program that XLA could compile: it reads numbers on the host{place}"
    return f"a step with rows of {TOKENS} tokens fails{place} ({said})"


def use_own_attention(model: PreTrainedModel, name: str = OWN) -> None:
    """Lets a model compute its own attention, with masks that are made without reading them."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = name


def _tables(model: nn.Module, *names: str) -> list[nn.Module]:
    """Returns the modules with a 2-D weight whose path ends with one of `names`."""
    tables = []
    for path, module in model.named_modules():
        last_part = path.split(".")[-1]
        weight = getattr(module, "weight", None)
        if last_part in names and weight is not None and weight.dim() == 2:
            tables.append(module)
    return tables


def positions(model: PreTrainedModel) -> float:
    """Returns the length of the longest row in tokens; infinite where positions have no table.

    Some rows of a table may belong to no token: those up to the padding's, where positions begin
    after it (as in RoBERTa), and those beyond the positions that the model counts.
    """
    names = ("position_embeddings", "embed_positions", "wpe", "char_position_embeddings")
    longest = math.inf
    for table in _tables(model, *names):
        padding = getattr(table, "padding_idx", None)
        first = 0 if padding is None else padding + 1
        longest = min(longest, table.weight.shape[0] - first)
    if longest == math.inf:
        return longest

    for name, numbers in model.named_buffers():
        if name.split(".")[-1] == "position_ids":
            longest = min(longest, numbers.shape[-1])
    return longest


@dataclass(frozen=True)
class Limits:
    """What a batch can index in a model.

    Attributes:
        rows: for each entry of a batch how many rows its table has, or how many classes there are.
        positions: tokens of the longest row.
    """

    rows: dict[str, int]
    positions: float

    def check(self, batch: Mapping[str, Tensor]) -> None:
        """Raises InputError for a batch in host memory that the model's tables do not fit.

        Either its rows are too long, or it has a number outside of a table. On a device such a
        number would read and train another row of the table, without an error.
        """
        length = batch["input_ids"].shape[1]
        if length > self.positions:
            raise InputError(f"rows have {length} tokens; the model has {self.positions} positions")

        for name, rows in self.rows.items():
            numbers = batch.get(name)
            if numbers is None or numbers.is_floating_point() or not numbers.numel():
                continue
            lowest, highest = (int(number) for number in torch.aminmax(numbers))
            if lowest < 0:
                self._refuse(name, numbers, lowest)
            if highest >= rows:
                self._refuse(name, numbers, highest)

    def _refuse(self, name: str, numbers: Tensor, wrong: int) -> None:
        """Raises InputError for the first row of a batch that has the number `wrong`."""
        row = int((numbers == wrong).nonzero()[0][0])
        rows = self.rows[name]
        raise InputError(
            f"{name} has {wrong} (row {row} of a batch), and the model has {rows} of them, "
            f"0 to {rows - 1}: prepare the data with the model's own tokenizer"
        )


def limits(model: PreTrainedModel) -> Limits:
    """Returns what a batch can index in a model.

    The entries have the names that train/glue.py and train/pretrain.py give them.
    """
    rows = {}
    try:
        words = model.get_input_embeddings()
    except NotImplementedError:  # CANINE hashes characters: any number will do
        words = None
    if isinstance(words, nn.Embedding):
        rows["input_ids"] = words.weight.shape[0]
    elif hasattr(model.config, "vocab_size"):
        rows["input_ids"] = model.config.vocab_size

    types = _tables(model, "token_type_embeddings")
    if types and takes_types(model):
        rows["token_type_ids"] = min(table.weight.shape[0] for table in types)

    head = model.get_output_embeddings()
    rows["labels"] = model.config.num_labels if head is None else head.weight.shape[0]
    return Limits(rows, positions(model))


def takes_types(model: PreTrainedModel) -> bool:
    """Returns whether a classifier is given the types of its tokens. RoBERTa has one type only."""
    count = getattr(model.config, "type_vocab_size", None)
    if count is None:
        encoder = encoders.by_config(model.config)
        return encoder is not None and encoder.token_types  # XLNet has relations, and no table
    if count <= 1:
        return False
    return "token_type_ids" in inspect.signature(type(model).forward).parameters


def is_norm(module: nn.Module) -> bool:
    """Returns whether a module is a norm, by its type.

    These are LayerNorm, RMSNorm, and models' own, such as NoNorm.
    """
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return True
    return type(module).__name__.lower().endswith("norm")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Returns an optimizer's two groups: biases and norms do not decay.

    So it is in the code of all four papers. A norm is one by its type or by its name.
    """
    norms = set()
    for module in model.modules():
        if is_norm(module):
            norms.update(id(parameter) for parameter in module.parameters(recurse=False))

    decayed = []
    exempt = []
    for name, parameter in model.named_parameters():
        named_norm = "layernorm" in name.lower().replace("_", "")
        if "bias" in name or named_norm or id(parameter) in norms:
            exempt.append(parameter)
        else:
            decayed.append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
