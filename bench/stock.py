"""The train steps as one would first write them: the models of torchvision, transformers and torch as they are.

    python -m bench.stock bert full --task pretrain --topology v5e:1x1 --batch 32 --effort full

takes the arguments of tpu/compiler/compile.py and compiles this step instead of the script's: the same Config, inputs,
optimizer, autocast and clipping, staged by the same code. Each class has the functions of a script that
tpu/compiler/steps.py calls. Where the usual way reads a value of the device in the middle of the step, it is kept
from it: transformers gets masks of four dimensions, which it passes on without looking at them.
"""

import os

if __name__ == "__main__":
    os.environ["XLA_IR_DEBUG"] = os.environ["XLA_HLO_DEBUG"] = "1"  # as in tpu/compiler/compile.py

import math
import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.resnet50_eager import eager_model
from data import imagenet
from errors import InputError
from models import architectures, distillation, encoders, permutation
from models.dlrm import DLRM
from models.resnet import Normalize
from models.transformer import ARCHITECTURES, PAD, sinusoids
from tpu.compiler import compile as compiling
from train import dlrm, glue, pretrain, resnet50, transformer
from train.common import device
from train.common.mesh import GraphError


class Images:
    """torchvision's ResNet-50."""

    train_step = resnet50.train_step

    @staticmethod
    def build(config: resnet50.Config, data: resnet50.Data, mesh: device.Mesh) -> resnet50.State:
        """Does what train/resnet50.py's does, with SGD."""
        if config.optimizer != "sgd":
            raise InputError(f"--optimizer is {config.optimizer}; the usual step has sgd")
        model = device.to_device(eager_model(config.model, len(data.train.classes)), mesh)
        normalize = device.to_device(Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD), mesh)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=False)
        device.init_optimizer_state(optimizer, mesh)
        return resnet50.State(model, normalize, optimizer)


def four_dimensions(attention_mask: Tensor) -> Tensor:
    """What sdpa adds to the scores, [B, 1, 1, T], of [B, T]."""
    return (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min


def adamw(model, lr: float, weight_decay: float, beta2: float, eps: float, mesh: device.Mesh) -> torch.optim.Optimizer:
    """The encoders' optimizer; moves the model to the device as it is."""
    device.to_device(model, mesh)
    groups = architectures.parameter_groups(model, weight_decay)
    optimizer = torch.optim.AdamW(groups, lr, (0.9, beta2), eps, foreach=False)
    device.init_optimizer_state(optimizer, mesh)
    return optimizer


class Sentences:
    """transformers' classifiers."""

    @staticmethod
    def build(config: glue.Config, data: glue.Data, mesh: device.Mesh) -> glue.State:
        """Does what train/glue.py's does."""
        beta2 = encoders.by_name(config.model).fine_tuning.beta2
        return glue.State(data.model, adamw(data.model, config.lr, config.weight_decay, beta2, glue.ADAM_EPS, mesh))

    @staticmethod
    def train_step(state: glue.State, batch: dict[str, Tensor], config: glue.Config, mesh) -> dict[str, Tensor]:
        """Does what train/glue.py's does."""
        if state.model.config.model_type != "xlnet":
            batch = batch | {"attention_mask": four_dimensions(batch["attention_mask"])}
        return glue.train_step(state, batch, config, mesh)


class Text:
    """transformers' pretraining heads, which score every place, predicted or not."""

    @staticmethod
    def build(config: pretrain.Config, data: pretrain.Data, mesh: device.Mesh) -> pretrain.State:
        """Does what train/pretrain.py's does, with AdamW."""
        if config.optimizer != "adamw":
            raise InputError(f"--optimizer is {config.optimizer}; the usual step has adamw")
        recipe = pretrain.recipe_of(config)
        optimizer = adamw(data.model, config.lr, recipe.weight_decay, recipe.beta2, pretrain.ADAM_EPS, mesh)
        teacher = device.to_device(data.teacher, mesh) if data.teacher is not None else None
        return pretrain.State(data.model, teacher, optimizer)

    @staticmethod
    def losses(model, teacher, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The loss and its parts. The tokens stand for the labels of all places, [B, T]."""
        inputs = {"input_ids": batch["input_ids"], "attention_mask": four_dimensions(batch["attention_mask"])}
        labels = batch["input_ids"].long()
        if model.config.model_type == "xlnet":
            length = labels.shape[1]
            targets = permutation.is_target(batch["positions"], batch["weights"], length)
            logits = model(
                batch["input_ids"],
                token_type_ids=batch["token_type_ids"],
                perm_mask=permutation.perm_mask(batch["order"], targets),
                target_mapping=permutation.target_mapping(batch["positions"], length),
                use_mems=False,
            ).logits
            return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].long().flatten())}
        if "next_sentence" in batch:
            inputs["token_type_ids"] = batch["token_type_ids"]
            return {"loss": model(**inputs, labels=labels, next_sentence_label=batch["next_sentence"].long()).loss}
        result = model(**inputs, labels=labels, output_hidden_states=teacher is not None)
        if teacher is None:
            return {"loss": result.loss}
        with torch.no_grad():
            taught = teacher(**inputs, output_hidden_states=True)
        real, temperature = batch["attention_mask"].float(), distillation.TEMPERATURE
        student = F.log_softmax(result.logits / temperature, -1)
        wanted = F.softmax(taught.logits / temperature, -1)
        apart = torch.xlogy(wanted, wanted) - wanted * student  # F.kl_div, which has no gradient on XLA
        soft = (apart.sum(-1) * real).sum() / real.sum() * temperature**2
        apart = 1 - F.cosine_similarity(result.hidden_states[-1], taught.hidden_states[-1], dim=-1)
        cosine = (apart * real).sum() / real.sum()
        loss = distillation.SOFT * soft + distillation.HARD * result.loss + distillation.COSINE * cosine
        return {"loss": loss, "words": result.loss, "soft": soft, "cosine": cosine}

    @staticmethod
    def train_step(state: pretrain.State, batch: dict[str, Tensor], config: pretrain.Config, mesh) -> dict[str, Tensor]:
        """Does what train/pretrain.py's does."""
        with mesh.autocast():
            parts = Text.losses(state.model, state.teacher, batch)
        parts["loss"].backward()
        clip = pretrain.recipe_of(config).clip
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        return {name: part.detach() for name, part in parts.items()}


class UsualTransformer(nn.Module):
    """torch's `nn.Transformer` with one matrix for source, target and output words: logits [B, T, words]."""

    def __init__(self, config: transformer.Config, words: int):
        super().__init__()
        arch = ARCHITECTURES[config.arch]
        sizes = arch.dim, arch.heads, arch.encoder_layers, arch.decoder_layers, arch.ffn_dim
        self.core = nn.Transformer(*sizes, dropout=config.dropout, norm_first=arch.pre_norm, batch_first=True)
        for module in self.core.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = arch.attention_dropout
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = arch.activation_dropout  # between the two linear layers
        self.words = nn.Embedding(words, arch.dim, PAD)
        self.dropout, self.scale = nn.Dropout(config.dropout), math.sqrt(arch.dim)
        self.register_buffer("places", sinusoids(arch.max_positions, arch.dim))

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] to [B, T, dim]."""
        return self.dropout(self.scale * self.words(tokens) + self.places[: tokens.shape[1]])

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        """Source [B, S] and the target up to each word [B, T]."""
        later = torch.ones(previous.shape[1], previous.shape[1], dtype=torch.bool, device=previous.device).triu(1)
        empty, unwritten = source == PAD, previous == PAD
        masks = {"src_key_padding_mask": empty, "memory_key_padding_mask": empty, "tgt_key_padding_mask": unwritten}
        # Without these two flags it compares the mask with a causal one, on the host.
        hints = {"src_is_causal": False, "tgt_is_causal": True}
        hidden = self.core(self.embed(source), self.embed(previous), tgt_mask=later, **masks, **hints)
        return F.linear(hidden, self.words.weight)


class Translation:
    """torch's Transformer; pairs that are packed into a row are taken for one pair."""

    @staticmethod
    def build(config: transformer.Config, data: transformer.Data, mesh: device.Mesh) -> transformer.State:
        """Does what train/transformer.py's does."""
        model = device.to_device(UsualTransformer(config, len(data.train.source_dictionary)), mesh)
        optimizer = torch.optim.Adam(model.parameters(), config.lr, foreach=False, **transformer.ADAM)
        device.init_optimizer_state(optimizer, mesh)
        return transformer.State(model, optimizer)

    @staticmethod
    def train_step(
        state: transformer.State, batch: dict[str, Tensor], config: transformer.Config, mesh
    ) -> dict[str, Tensor]:
        """Does what train/transformer.py's does."""
        with mesh.autocast():
            logits = state.model(batch["source"], batch["previous"]).flatten(0, 1)
            labels = batch["target"].long().flatten()
            loss = F.cross_entropy(logits, labels, ignore_index=PAD, label_smoothing=config.label_smoothing)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.detach()}


class DenseTables(nn.Module):
    """Embedding tables as parameters, cut by rows among the devices; every step makes a gradient as large as they are.

    A table has as many rows as its data, rounded up to a multiple of the devices.
    """

    def __init__(self, rows: list[int], dim: int, mesh: device.Mesh):
        super().__init__()
        count = mesh.num_devices
        with torch.device(mesh.device):
            self.tables = nn.ParameterList([nn.Parameter(torch.zeros(-(-n // count) * count, dim)) for n in rows])
        for table in self.tables:
            device.annotate(table, mesh.spmd, ("data", None))
        self.plan = SimpleNamespace(counts=lambda: {"by rows, dense gradient": len(rows)})

    def forward(self, ids: Tensor, present: Tensor | None = None) -> Tensor:
        """[B, tables] to [B, tables, dim]."""
        return torch.stack([F.embedding(ids[:, i], table) for i, table in enumerate(self.tables)], 1)

    def step(self) -> dict[str, Tensor]:
        """Does nothing, since the optimizer has the tables; returns no metrics."""
        return {}


class Clicks:
    """DLRM with tables as parameters, SGD."""

    train_step = dlrm.train_step

    @staticmethod
    def build(config: dlrm.Config, data: dlrm.Data, mesh: device.Mesh) -> dlrm.State:
        """Does what train/dlrm.py's does."""
        dataset = data.train
        if config.optimizer != "sgd" or max(dataset.lookups) > 1:
            raise InputError(f"{config.optimizer}, {max(dataset.lookups)} ids a bag: the usual step has sgd and one id")
        tables = DenseTables([table.rows for table in dlrm.table_list(config, dataset)], config.dim, mesh)
        sizes = config.dim, config.bottom, config.top, config.interaction, *config.cross
        model = DLRM(dataset.num_dense, len(dataset.table_rows), *sizes)
        device.to_device(model, mesh)
        # Without state, none of which has to be made: device.init_optimizer_state does a step on the host.
        optimizer = torch.optim.SGD([*model.parameters(), *tables.parameters()], config.lr, foreach=False)
        return dlrm.State(model, tables, optimizer)


FUNCTIONS = {resnet50: Images, glue: Sentences, pretrain: Text, transformer: Translation, dlrm: Clicks}

if __name__ == "__main__":
    try:
        sys.exit(0 if compiling.main(functions=FUNCTIONS).get("fits", True) else 1)
    except (InputError, GraphError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
