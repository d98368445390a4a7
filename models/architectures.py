"""What an encoder of transformers is, read from the model itself and not from a list of names.

check("folder", config)                         # before its weights are read: can a step be one program for a device?
positions(model)                                # the longest row, in tokens
limits(model).check(batch)                      # on the host: XLA reads the nearest row of a table, and says nothing
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

# Names among transformers' attention implementations: the model's own, with a mask that is made without reading one;
# and the same, which refuses what `encoder_layers.attend` cannot do.
OWN, PROBED = "own", "probed"
# What models give to attention besides, where it changes no number: the mask has it, or other implementations need it.
IGNORED = {"deterministic", "output_attentions", "output_hidden_states", "position_ids", "sliding_window", "use_cache"}
ROWS, TOKENS = 2, 8  # of the rows with which an architecture is tried


def own_attention(module: nn.Module, *args, **options) -> tuple[Tensor, Tensor]:
    """Computes attention as the model's own file has it."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **options)


def own_mask(**options) -> Tensor:
    """Returns transformers' mask for a model's own attention. It is never left out: that needs to read it first."""
    return eager_mask(**options | {"allow_is_bidirectional_skip": False})


def refuse_more(module: nn.Module, more: Mapping) -> None:
    """Raises InputError where a model gives attention what ours does not have, such as a bias of its scores."""
    for name, given in more.items():
        if name not in IGNORED and given is not None and given is not False:
            raise InputError(f"{type(module).__name__} gives its attention {name}, which models/layers.py has not")


def probed_attention(module: nn.Module, *args, dropout: float = 0.0, scaling: float | None = None, **more):
    """Computes the model's own attention where ours could take its place."""
    refuse_more(module, more)
    return own_attention(module, *args, dropout=dropout, scaling=scaling, **more)


for name, attention in ((OWN, own_attention), (PROBED, probed_attention)):
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, own_mask)


class HostOperations(TorchDispatchMode):
    """Collects the operations that torch_xla would leave to the host."""

    KEYS = ("XLA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    # On XLA's devices PyTorch computes a layer norm from smaller operations; only elsewhere it has one of its own.
    DECOMPOSED = ("aten::native_layer_norm_backward",)
    # torch_xla has a kernel of its own, which hands over to the host (for some arguments, such as Funnel's or TAPAS').
    HANDED_OVER = ("aten::avg_pool2d_backward", "aten::scatter_reduce.two")

    def __init__(self):
        super().__init__()
        self.found: set[str] = set()
        self.known = torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "XLA")  # torch_xla is loaded

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        lowered = name in self.DECOMPOSED or any(has_kernel(name, key) for key in self.KEYS)
        lowered = lowered and name not in self.HANDED_OVER
        if self.known and name.startswith("aten::") and not lowered:
            self.found.add(name.removeprefix("aten::"))
        return function(*args, **kwargs or {})


def check(folder: str, config: PreTrainedConfig, compiled: bool = True) -> None:
    """Raises InputError for a checkpoint that is no encoder of text, or whose step cannot be compiled.

    A model of this configuration, without any numbers (on PyTorch's "meta" device), computes a step: what needs to read
    a number, or an operation that torch_xla has not, is found here and not in the first step.

    Args:
        folder: of the checkpoint, for messages.
        compiled: False for a device on which PyTorch runs operation by operation, which can do all that the model can.
    """
    kind, given = config.model_type, f"checkpoint {folder} is a {config.model_type}"
    classes = AutoModelForSequenceClassification._model_mapping
    expected = "expected an encoder of text, such as a BERT"
    if type(config) not in classes:
        raise InputError(f"{given}, which transformers has no text classifier of; {expected}")
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{given}, an encoder with a decoder; {expected}")
    known = kind in encoders.NAMES  # XLNet, too, which transformers takes for a causal model
    masked = known or type(config) in AutoModelForMaskedLM._model_mapping
    causal = type(config) in AutoModelForCausalLM._model_mapping and not masked
    if causal or getattr(config, "is_decoder", False) or getattr(config, "causal", False):
        raise InputError(f"{given}, in which no token sees the next; {expected}")

    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = classes[type(config)](copy.deepcopy(config))
    except Exception as error:  # a package that only this model needs, or a config.json with what it cannot be
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"{given}, of which transformers makes no model ({said}); {expected}") from error
    accepted = inspect.signature(model.forward).parameters
    for name in ("input_ids", "attention_mask"):
        if name not in accepted:
            raise InputError(f"{given}, which takes no {name}; {expected}")
    encoder = encoders.record_of(config)
    if encoder is not None and encoder.own_layers is not None:
        return  # transformers' own are not those that compute its step
    if compiled:
        _try_step(given, model)


def _try_step(given: str, model: PreTrainedModel) -> None:
    """Computes a step of a model on the meta device; raises InputError where a compiler could not."""
    use_own_attention(model, PROBED)
    ids = torch.ones(ROWS, TOKENS, dtype=torch.long, device="meta")
    before = [type(module).__name__ for module in model.modules()]
    instead = "train it with --device cpu or cuda, or give another encoder"
    try:
        with HostOperations() as operations:
            model.train()(input_ids=ids, attention_mask=ids).logits.sum().backward()
    except InputError as error:
        raise InputError(f"{given}: {error}; {instead}") from error
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/transformers/models/" in frame[0]]
        place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        if "meta" in said:  # the device that has no numbers
            reason = f"a step is no program that XLA could compile: it reads numbers on the host{place}"
        else:
            reason = f"a step with rows of {TOKENS} tokens fails{place} ({said})"
        raise InputError(f"{given}, and {reason}; {instead}") from error
    after = [type(module).__name__ for module in model.modules()]
    if changed := [f"{old} by {new}" for old, new in zip(before, after, strict=False) if old != new]:
        raise InputError(
            f"{given}, and replaces {changed[0]} in its first step; let its config.json ask for the latter (of a "
            "BigBird: attention_type original_full)"
        )
    if operations.found:
        missing = ", ".join(sorted(operations.found))
        raise InputError(f"{given}, and XLA has not its operations {missing}; {instead}")


def use_own_attention(model: PreTrainedModel, name: str = OWN) -> None:
    """Lets a model compute its own attention, with masks that are made without reading them."""
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._attn_implementation = name


def _tables(model: nn.Module, *names: str) -> list[nn.Module]:
    """Returns the embeddings whose names end in one of these."""
    return [
        module
        for path, module in model.named_modules()
        if path.split(".")[-1] in names and getattr(module, "weight", None) is not None and module.weight.dim() == 2
    ]


def positions(model: PreTrainedModel) -> float:
    """Returns the length of the longest row in tokens; infinite where positions have no table.

    A table whose positions begin after the padding's (RoBERTa's and its kin's) has rows that no token uses; so has one
    with more rows than the model counts positions.
    """
    longest = math.inf
    for table in _tables(model, "position_embeddings", "embed_positions", "wpe", "char_position_embeddings"):
        padding = getattr(table, "padding_idx", None)
        longest = min(longest, table.weight.shape[0] - (0 if padding is None else padding + 1))
    if longest < math.inf:
        for name, numbers in model.named_buffers():
            if name.split(".")[-1] == "position_ids":
                longest = min(longest, numbers.shape[-1])
    return longest


@dataclass(frozen=True)
class Limits:
    """What a batch can index in a model.

    Attributes:
        rows: of the table, or the classes, that an entry of a batch chooses from.
        positions: the longest row.
    """

    rows: dict[str, int]
    positions: float

    def check(self, batch: Mapping[str, Tensor]) -> None:
        """Raises InputError for a batch in host memory with a number that is outside of the model's table, or with rows
        that are too long. On a device such a number would read and train another row of the table, in silence."""
        length = batch["input_ids"].shape[1]
        if length > self.positions:
            raise InputError(f"rows have {length} tokens; the model has {self.positions} positions")
        for name, rows in self.rows.items():
            numbers = batch.get(name)
            if numbers is None or numbers.is_floating_point() or not numbers.numel():
                continue
            lowest, highest = (int(number) for number in torch.aminmax(numbers))
            if lowest < 0 or highest >= rows:
                wrong = lowest if lowest < 0 else highest
                row = int((numbers == wrong).nonzero()[0][0])
                raise InputError(
                    f"{name} has {wrong} (row {row} of a batch), and the model has {rows} of them, 0 to {rows - 1}: "
                    "prepare the data with the model's own tokenizer"
                )


def limits(model: PreTrainedModel) -> Limits:
    """Returns what a batch can index in a model, with the names of the entries that glue and pretrain give it."""
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
    """Says whether a classifier is given the types of its tokens. RoBERTa has one type only."""
    count = getattr(model.config, "type_vocab_size", None)
    if count is None:
        encoder = encoders.record_of(model.config)
        return encoder is not None and encoder.token_types  # XLNet has relations, and no table
    return count > 1 and "token_type_ids" in inspect.signature(type(model).forward).parameters


def is_norm(module: nn.Module) -> bool:
    """Says whether a module is a norm, by its type: LayerNorm, RMSNorm, and models' own, such as NoNorm."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.lower().endswith("norm")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Returns an optimizer's two groups: biases and norms do not decay, as in the code of all four papers.

    A norm is one by its type or by its name.
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
