"""The train steps as one would first write them: with the models of torchvision, transformers and
torch as they are.

    python -m bench.stock bert full --task pretrain --topology v5e:1x1 --batch 32 --effort full

takes the arguments of tpu/compiler/compile.py and compiles this step instead of the script's: the
same Config, inputs, optimizer, autocast and clipping, staged by the same code. Each class has the
functions of a script that tpu/compiler/steps.py calls. Where such a step would read a value of the
device in the middle, it is kept from it: transformers gets masks of four dimensions, which it
passes on without looking at them.
"""

import os

if __name__ == "__main__":
    os.environ["XLA_IR_DEBUG"] = "1"  # both as in tpu/compiler/compile.py
    os.environ["XLA_HLO_DEBUG"] = "1"

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
        normalize = Normalize(imagenet.IMAGENET_MEAN, imagenet.IMAGENET_STD)
        normalize = device.to_device(normalize, mesh)

        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=False)
        device.init_optimizer_state(optimizer, mesh)
        return resnet50.State(model, normalize, optimizer)


def four_dimensions(attention_mask: Tensor) -> Tensor:
    """Returns what sdpa adds to the scores, [B, 1, 1, T], from a mask [B, T]."""
    hidden = 1.0 - attention_mask[:, None, None, :].float()
    return hidden * torch.finfo(torch.float32).min


def adamw(
    model, lr: float, weight_decay: float, beta2: float, eps: float, mesh: device.Mesh
) -> torch.optim.Optimizer:
    """Returns the encoders' optimizer; moves the model to the device as it is."""
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
        optimizer = adamw(data.model, config.lr, config.weight_decay, beta2, glue.ADAM_EPS, mesh)
        return glue.State(data.model, optimizer)

    @staticmethod
    def train_step(
        state: glue.State, batch: dict[str, Tensor], config: glue.Config, mesh: device.Mesh
    ) -> dict[str, Tensor]:
        """Does what train/glue.py's does."""
        if state.model.config.model_type != "xlnet":
            batch = batch | {"attention_mask": four_dimensions(batch["attention_mask"])}
        return glue.train_step(state, batch, config, mesh)


class Text:
    """transformers' pretraining heads, which score every position, predicted or not."""

    @staticmethod
    def build(config: pretrain.Config, data: pretrain.Data, mesh: device.Mesh) -> pretrain.State:
        """Does what train/pretrain.py's does, with AdamW."""
        if config.optimizer != "adamw":
            raise InputError(f"--optimizer is {config.optimizer}; the usual step has adamw")

        recipe = pretrain.recipe_of(config)
        optimizer = adamw(
            data.model, config.lr, recipe.weight_decay, recipe.beta2, pretrain.ADAM_EPS, mesh
        )
        teacher = None
        if data.teacher is not None:
            teacher = device.to_device(data.teacher, mesh)
        return pretrain.State(data.model, teacher, optimizer)

    @staticmethod
    def losses(model, teacher, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns "loss", and with a teacher the terms that it is the sum of.

        The tokens stand for the labels of all positions, [B, T].
        """
        inputs = {
            "input_ids": batch["input_ids"],
            "attention_mask": four_dimensions(batch["attention_mask"]),
        }
        labels = batch["input_ids"].long()
        if model.config.model_type == "xlnet":
            return Text.permuted_loss(model, batch)
        if "next_sentence" in batch:
            inputs["token_type_ids"] = batch["token_type_ids"]
            next_sentence = batch["next_sentence"].long()
            result = model(**inputs, labels=labels, next_sentence_label=next_sentence)
            return {"loss": result.loss}

        result = model(**inputs, labels=labels, output_hidden_states=teacher is not None)
        if teacher is None:
            return {"loss": result.loss}
        with torch.no_grad():
            taught = teacher(**inputs, output_hidden_states=True)
        return Text.distilled_losses(result, taught, batch["attention_mask"].float())

    @staticmethod
    def permuted_loss(model, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns XLNet's "loss"."""
        length = batch["input_ids"].shape[1]
        targets = permutation.is_target(batch["positions"], batch["weights"], length)
        logits = model(
            batch["input_ids"],
            token_type_ids=batch["token_type_ids"],
            perm_mask=permutation.perm_mask(batch["order"], targets),
            target_mapping=permutation.target_mapping(batch["positions"], length),
            use_mems=False,
        ).logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].long().flatten())}

    @staticmethod
    def distilled_losses(result, taught, real: Tensor) -> dict[str, Tensor]:
        """Returns DistilBERT's "loss" and its terms.

        Args:
            result: what the student gives, with its own loss.
            taught: what the teacher gives.
            real: 1 for each token, 0 for padding [B, T].
        """
        temperature = distillation.TEMPERATURE
        student = F.log_softmax(result.logits / temperature, -1)
        wanted = F.softmax(taught.logits / temperature, -1)
        # Written out, since F.kl_div has no gradient on XLA.
        divergence = torch.xlogy(wanted, wanted) - wanted * student
        soft = (divergence.sum(-1) * real).sum() / real.sum() * temperature**2

        similarity = F.cosine_similarity(result.hidden_states[-1], taught.hidden_states[-1], dim=-1)
        distance = 1 - similarity
        cosine = (distance * real).sum() / real.sum()

        loss = (
            distillation.SOFT * soft
            + distillation.HARD * result.loss
            + distillation.COSINE * cosine
        )
        return {"loss": loss, "words": result.loss, "soft": soft, "cosine": cosine}

    @staticmethod
    def train_step(
        state: pretrain.State, batch: dict[str, Tensor], config: pretrain.Config, mesh: device.Mesh
    ) -> dict[str, Tensor]:
        """Does what train/pretrain.py's does."""
        with mesh.autocast():
            losses = Text.losses(state.model, state.teacher, batch)
        losses["loss"].backward()
        clip = pretrain.recipe_of(config).clip
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        return {name: loss.detach() for name, loss in losses.items()}


class UsualTransformer(nn.Module):
    """torch's `nn.Transformer` with one matrix for source, target and output words.

    Returns logits [B, T, words].
    """

    def __init__(self, config: transformer.Config, words: int):
        super().__init__()
        arch = ARCHITECTURES[config.arch]
        self.core = nn.Transformer(
            d_model=arch.dim,
            nhead=arch.heads,
            num_encoder_layers=arch.encoder_layers,
            num_decoder_layers=arch.decoder_layers,
            dim_feedforward=arch.ffn_dim,
            dropout=config.dropout,
            norm_first=arch.pre_norm,
            batch_first=True,
        )
        for module in self.core.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = arch.attention_dropout
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = arch.activation_dropout  # between the two linear layers
        self.words = nn.Embedding(words, arch.dim, PAD)
        self.dropout = nn.Dropout(config.dropout)
        self.scale = math.sqrt(arch.dim)
        self.register_buffer("positions", sinusoids(arch.max_positions, arch.dim))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds tokens [B, T] with their positions: [B, T, dim]."""
        positions = self.positions[: tokens.shape[1]]
        return self.dropout(self.scale * self.words(tokens) + positions)

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        """Takes the source [B, S] and the target up to each word [B, T]."""
        length = previous.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=previous.device).triu(1)
        empty = source == PAD
        hidden = self.core(
            self.embed(source),
            self.embed(previous),
            tgt_mask=later,
            src_key_padding_mask=empty,
            memory_key_padding_mask=empty,
            tgt_key_padding_mask=previous == PAD,
            # Without these two flags it compares the mask with a causal one, on the host.
            src_is_causal=False,
            tgt_is_causal=True,
        )
        return F.linear(hidden, self.words.weight)


class Translation:
    """torch's Transformer; sentence pairs that are packed into a row are taken for one pair."""

    @staticmethod
    def build(
        config: transformer.Config, data: transformer.Data, mesh: device.Mesh
    ) -> transformer.State:
        """Does what train/transformer.py's does."""
        words = len(data.train.source_dictionary)
        model = device.to_device(UsualTransformer(config, words), mesh)
        optimizer = torch.optim.Adam(
            model.parameters(), config.lr, foreach=False, **transformer.ADAM
        )
        device.init_optimizer_state(optimizer, mesh)
        return transformer.State(model, optimizer)

    @staticmethod
    def train_step(
        state: transformer.State,
        batch: dict[str, Tensor],
        config: transformer.Config,
        mesh: device.Mesh,
    ) -> dict[str, Tensor]:
        """Does what train/transformer.py's does."""
        with mesh.autocast():
            logits = state.model(batch["source"], batch["previous"])
            loss = F.cross_entropy(
                logits.flatten(0, 1),
                batch["target"].long().flatten(),
                ignore_index=PAD,
                label_smoothing=config.label_smoothing,
            )
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.detach()}


class DenseTables(nn.Module):
    """Embedding tables as parameters, sharded by rows over the devices.

    Every step makes a gradient as large as they are. A table has as many rows as its data, rounded
    up to a multiple of the devices.
    """

    def __init__(self, rows: list[int], dim: int, mesh: device.Mesh):
        super().__init__()
        devices = mesh.num_devices
        self.tables = nn.ParameterList()
        with torch.device(mesh.device):
            for of_table in rows:
                padded = math.ceil(of_table / devices) * devices
                self.tables.append(nn.Parameter(torch.zeros(padded, dim)))
        for table in self.tables:
            device.annotate(table, mesh.spmd, ("data", None))
        self.plan = SimpleNamespace(counts=lambda: {"by rows, dense gradient": len(rows)})

    def forward(self, ids: Tensor, present: Tensor | None = None) -> Tensor:
        """Looks up ids [B, tables]: [B, tables, dim]."""
        found = [F.embedding(ids[:, number], table) for number, table in enumerate(self.tables)]
        return torch.stack(found, 1)

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
        most = max(dataset.lookups)
        if config.optimizer != "sgd" or most > 1:
            raise InputError(
                f"{config.optimizer}, {most} ids a bag: the usual step has sgd and one id"
            )

        rows = [table.rows for table in dlrm.table_list(config, dataset)]
        tables = DenseTables(rows, config.dim, mesh)
        model = DLRM(
            dataset.num_dense,
            len(dataset.table_rows),
            config.dim,
            config.bottom,
            config.top,
            config.interaction,
            *config.cross,
        )
        device.to_device(model, mesh)
        # No device.init_optimizer_state, which runs a step on the host: SGD has no state to make.
        parameters = [*model.parameters(), *tables.parameters()]
        optimizer = torch.optim.SGD(parameters, config.lr, foreach=False)
        return dlrm.State(model, tables, optimizer)


FUNCTIONS = {
    resnet50: Images,
    glue: Sentences,
    pretrain: Text,
    transformer: Translation,
    dlrm: Clicks,
}

if __name__ == "__main__":
    try:
        fits = compiling.main(functions=FUNCTIONS).get("fits", True)
        sys.exit(0 if fits else 1)
    except (InputError, GraphError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
