"""Train steps of the same models in JAX, as flax's and transformers' own examples write them.

research/jax_peers.py compiles the HloModuleProto for TPUs that this writes:

    .venv-jax/bin/python research/jax/steps.py bert --batch 32 --rng rbg --out step.pb

It runs in the environment of `make jax`, which has neither torch nor a TPU: JAX lowers a step
without running it, and no weight is allocated. All compute in bfloat16 and keep parameters and
optimizer state in float32; state is donated.

resnet50      flax/examples/imagenet: ResNet-50 v1.5, NHWC in bfloat16, batch norm, SGD with
              momentum, L2 in the loss
bert          transformers 4's FlaxBertForMaskedLM: post-norm, exact GELU, attention by flax's own
              function, AdamW, clip 1.0. The head scores the predicted positions only, which its
              example does not do, and which is quicker. With --shared-masks all rows and heads drop
              the same weights of attention, as in its example; without it each drops its own, as
              ours do. bert-large: of large's sizes
bert-glue     transformers 4's FlaxBertForSequenceClassification
transformer   flax/examples/wmt's layers with the sizes, the norms after each sub-layer, the one
              matrix of words and the dropout of Vaswani et al. 2017; transformer-big: its big
              sizes, sentences packed as in that example
dlrm          Naumov et al. 2019 with `nn.Embed` tables and a dense gradient, SGD
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, ShapeDtypeStruct

BF16 = jnp.bfloat16
F32 = jnp.float32
I32 = jnp.int32
NORMAL = nn.initializers.normal(0.02)
PAD = 1  # fairseq's
dense = partial(nn.Dense, dtype=BF16)


# ---- ResNet-50 -----------------------------------------------------------------------------------
conv = partial(nn.Conv, use_bias=False, dtype=BF16)
norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=BF16)


class Bottleneck(nn.Module):
    """Two 1x1 convolutions around a 3x3 one, which has the stride."""

    filters: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.filters, (3, 3), (self.stride, self.stride))(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.filters, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.filters, (1, 1), (self.stride, self.stride))(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """Images [B, 224, 224, 3] to logits [B, 1000]."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(norm()(conv(64, (7, 7), (2, 2), padding=[(3, 3), (3, 3)])(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = Bottleneck(64 * 2**stage, 2 if stage and not block else 1)(x)
        return dense(1000)(x.mean((1, 2))).astype(F32)


def resnet50(batch: int):
    """Returns (step, arguments, how many of them are donated)."""
    model = ResNet50()
    tx = optax.sgd(optax.constant_schedule(0.1), momentum=0.9)
    images = ShapeDtypeStruct((batch, 224, 224, 3), BF16)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def step(params, statistics, state, images, labels):
        def objective(params):
            variables = {"params": params, "batch_stats": statistics}
            logits, changed = model.apply(variables, images, mutable=["batch_stats"])
            targets = optax.smooth_labels(jax.nn.one_hot(labels, 1000), 0.1)
            decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            loss = optax.softmax_cross_entropy(logits, targets).mean() + 1e-4 / 2 * decay
            return loss, (changed["batch_stats"], (logits.argmax(-1) == labels).mean())

        (loss, (changed, accuracy)), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return params, changed, state, {"loss": loss, "accuracy": accuracy}

    params = variables["params"]
    state = jax.eval_shape(tx.init, params)
    labels = ShapeDtypeStruct((batch,), I32)
    return step, (params, variables["batch_stats"], state, images, labels), 3


# ---- BERT ----------------------------------------------------------------------------------------


def dropout(x: Array, rate: float = 0.1) -> Array:
    """Drops values; to be called inside a module."""
    return nn.Dropout(rate, deterministic=False)(x)


bert_norm = partial(nn.LayerNorm, epsilon=1e-12, dtype=BF16)
bert_dense = partial(nn.Dense, dtype=BF16, kernel_init=NORMAL)
bert_embed = partial(nn.Embed, dtype=BF16, embedding_init=NORMAL)


class BertLayer(nn.Module):
    """Attention and feed-forward of BERT, [B, T, dim].

    `shared_masks`: all rows and heads drop the same weights of attention.
    """

    shared_masks = False

    @nn.compact
    def __call__(self, x: Array, bias: Array) -> Array:
        dim = x.shape[-1]
        query, key, value = (
            bert_dense(dim)(x).reshape(*x.shape[:2], dim // 64, 64) for _ in range(3)
        )
        options = {
            "dropout_rate": 0.1,
            "broadcast_dropout": self.shared_masks,
            "deterministic": False,
            "dtype": BF16,
        }
        weights = nn.dot_product_attention_weights(
            query, key, bias=bias, dropout_rng=self.make_rng("dropout"), **options
        )
        mixed = jnp.einsum("...hqk,...khd->...qhd", weights, value).reshape(x.shape)
        x = bert_norm()(x + dropout(bert_dense(dim)(mixed)))
        wide = nn.gelu(bert_dense(4 * dim)(x), approximate=False)
        return bert_norm()(x + dropout(bert_dense(dim)(wide)))


class Bert(nn.Module):
    """BERT: logits of words at `places` [B, P], or of two classes where there are none."""

    layers: int = 12
    dim: int = 768

    @nn.compact
    def __call__(
        self, tokens: Array, mask: Array, types: Array, places: Array | None = None
    ) -> Array:
        words = bert_embed(30_522, self.dim)
        position = bert_embed(512, self.dim)(jnp.arange(tokens.shape[1])[None])
        x = dropout(bert_norm()(words(tokens) + position + bert_embed(2, self.dim)(types)))
        bias = jnp.where(mask[:, None, None, :] > 0, 0.0, jnp.finfo(BF16).min).astype(BF16)
        for _ in range(self.layers):
            x = BertLayer()(x, bias)
        if places is None:
            pooled = jnp.tanh(bert_dense(self.dim)(x[:, 0]))
            return bert_dense(2)(dropout(pooled)).astype(F32)
        x = jnp.take_along_axis(x, places[..., None], 1)
        x = bert_norm()(nn.gelu(bert_dense(self.dim)(x), approximate=False))
        scores = words.attend(x)
        word_bias = self.param("bias", nn.initializers.zeros, (30_522,), F32)
        return (scores + word_bias.astype(BF16)).astype(F32)


def with_dropout(
    model: nn.Module,
    tx: optax.GradientTransformation,
    inputs: tuple,
    loss_of: Callable,
    labels: tuple,
):
    """Returns (step, arguments, how many of them are donated) of a model with dropout.

    Args:
        loss_of: takes logits and the labels.
    """
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(model.init, keys, *inputs)["params"]

    def step(params, state, key, inputs, labels):
        key, drawn = jax.random.split(key)

        def objective(params):
            logits = model.apply({"params": params}, *inputs, rngs={"dropout": drawn})
            return loss_of(logits, *labels)

        loss, gradients = jax.value_and_grad(objective)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, key, loss

    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(tx.init, params)
    arguments = (params, state, key, inputs, labels)
    donated = 3  # params, state and key
    return step, arguments, donated


def adamw(eps: float) -> optax.GradientTransformation:
    """Returns BERT's optimizer: no decay of biases and norms, gradients clipped to a norm of 1."""
    decayed = partial(jax.tree.map, lambda x: x.ndim > 1)
    rate = optax.linear_schedule(1e-4, 0.0, 1_000_000)
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(clip, optax.adamw(rate, eps=eps, weight_decay=0.01, mask=decayed))


def bert(batch: int, tokens: int = 512, predicted: int = 79, **sizes):
    """Returns (step, arguments, how many of them are donated)."""
    row = ShapeDtypeStruct((batch, tokens), I32)
    of_predicted = ShapeDtypeStruct((batch, predicted), I32)  # positions, and labels
    weights = ShapeDtypeStruct((batch, predicted), F32)

    def loss_of(logits, labels, weights):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return (losses * weights).sum() / weights.sum()

    inputs = (row, row, row, of_predicted)
    labels = (of_predicted, weights)
    return with_dropout(Bert(**sizes), adamw(1e-6), inputs, loss_of, labels)


def bert_glue(batch: int, tokens: int = 128):
    """Returns (step, arguments, how many of them are donated)."""
    row = ShapeDtypeStruct((batch, tokens), I32)
    labels = ShapeDtypeStruct((batch,), I32)

    def loss_of(logits, labels):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return with_dropout(Bert(), adamw(1e-6), (row, row, row), loss_of, (labels,))


# ---- Transformer ---------------------------------------------------------------------------------
class TransformerLayer(nn.Module):
    """A layer of the encoder, or of the decoder where there is a `memory`.

    Dropout follows each sub-layer.
    """

    heads: int
    wide: int
    rate: float

    @nn.compact
    def __call__(
        self, x: Array, mask: Array, memory: Array | None = None, memory_mask: Array | None = None
    ) -> Array:
        def normed(x, y):
            return nn.LayerNorm(epsilon=1e-5, dtype=BF16)(x + dropout(y, self.rate))

        def attention(x, memory, mask):
            return nn.MultiHeadDotProductAttention(self.heads, dtype=BF16, deterministic=True)(
                x, memory, mask=mask
            )

        x = normed(x, attention(x, x, mask))
        if memory is not None:
            x = normed(x, attention(x, memory, memory_mask))
        return normed(x, dense(x.shape[-1])(nn.relu(dense(self.wide)(x))))


def sinusoids(count: int, dim: int) -> np.ndarray:
    """Returns the embeddings of positions [count, dim]."""
    frequency = np.exp(np.arange(dim // 2) * -(np.log(10_000) / (dim // 2 - 1)))
    angle = np.arange(count)[:, None] * frequency
    return np.concatenate([np.sin(angle), np.cos(angle)], 1)


class Transformer(nn.Module):
    """Source and target up to each word [B, T] to logits [B, T, words]; of packed rows also the
    numbers of their sentences [B, T]."""

    dim: int = 512
    heads: int = 8
    wide: int = 2048
    rate: float = 0.1
    words: int = 32_768

    @nn.compact
    def __call__(self, source, previous, source_segment=None, target_segment=None) -> Array:
        table = nn.Embed(
            self.words, self.dim, dtype=BF16, embedding_init=nn.initializers.normal(self.dim**-0.5)
        )
        places = jnp.asarray(sinusoids(source.shape[1], self.dim), BF16)[None]
        sizes = (self.heads, self.wide, self.rate)

        def embedded(tokens):
            return dropout(table(tokens) * np.sqrt(self.dim).astype(BF16) + places, self.rate)

        def mask(one, other, one_segment, other_segment):
            mask = nn.make_attention_mask(jnp.ones_like(one), other != PAD, dtype=BF16)
            if one_segment is None:
                return mask
            same = nn.make_attention_mask(one_segment, other_segment, jnp.equal, dtype=BF16)
            return nn.combine_masks(mask, same, dtype=BF16)

        memory = embedded(source)
        for _ in range(6):
            memory = TransformerLayer(*sizes)(
                memory, mask(source, source, source_segment, source_segment)
            )
        causal = nn.combine_masks(
            mask(previous, previous, target_segment, target_segment),
            nn.make_causal_mask(previous),
            dtype=BF16,
        )
        across = mask(previous, source, target_segment, source_segment)
        x = embedded(previous)
        for _ in range(6):
            x = TransformerLayer(*sizes)(x, causal, memory, across)
        return table.attend(x).astype(F32)


def transformer(batch: int, tokens: int = 64, packed: bool = False, **sizes):
    """Returns (step, arguments, how many of them are donated)."""
    row = ShapeDtypeStruct((batch, tokens), I32)

    def loss_of(logits, target, smoothing=0.1):
        """Returns the loss of smoothed labels, without making one-hot targets."""
        log = jax.nn.log_softmax(logits)
        real = target != PAD
        chosen = jnp.take_along_axis(log, target[..., None], -1)[..., 0]
        losses = -(1 - smoothing) * chosen - smoothing * log.mean(-1)
        return (losses * real).sum() / real.sum()

    tx = optax.adam(optax.linear_schedule(0.0, 5e-4, 4000), b2=0.98, eps=1e-8)
    inputs = (row, row, row, row) if packed else (row, row)
    return with_dropout(Transformer(**sizes), tx, inputs, loss_of, (row,))


# ---- DLRM ----------------------------------------------------------------------------------------
TERABYTE_ROWS = (
    39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546,
    403_346, 10, 2_208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935,
    12_972, 108, 36,
)  # fmt: skip


class Dlrm(nn.Module):
    """Dense features [B, 13] and ids [B, tables] to logits [B]."""

    rows: tuple[int, ...]

    @nn.compact
    def __call__(self, features: Array, ids: Array) -> Array:
        x = features
        for size in (512, 256, 128):
            x = nn.relu(dense(size)(x))
        vectors = [x]
        for number, rows in enumerate(self.rows):
            vectors.append(nn.Embed(rows, 128)(ids[:, number]).astype(BF16))
        vectors = jnp.stack(vectors, 1)
        first, second = np.tril_indices(vectors.shape[1], -1)
        pairs = jnp.einsum("bsd,btd->bst", vectors, vectors)[:, first, second]
        x = jnp.concatenate([x, pairs], 1)
        for size in (1024, 1024, 512, 256):
            x = nn.relu(dense(size)(x))
        return dense(1)(x)[:, 0].astype(F32)


def dlrm(batch: int, most: int = 1_000_000):
    """Returns (step, arguments, how many of them are donated).

    Args:
        most: rows of a table.
    """
    model = Dlrm(tuple(min(rows, most) for rows in TERABYTE_ROWS))
    tx = optax.sgd(optax.constant_schedule(1.0))
    features = ShapeDtypeStruct((batch, 13), F32)
    ids = ShapeDtypeStruct((batch, 26), I32)
    labels = ShapeDtypeStruct((batch,), F32)
    params = jax.eval_shape(model.init, jax.random.key(0), features, ids)["params"]

    def step(params, state, features, ids, labels):
        def objective(params):
            logits = model.apply({"params": params}, features, ids)
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

        loss, gradients = jax.value_and_grad(objective)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.eval_shape(tx.init, params)
    return step, (params, state, features, ids, labels), 2


STEPS = {
    "resnet50": resnet50,
    "bert": bert,
    "bert-large": partial(bert, layers=24, dim=1024),
    "bert-glue": bert_glue,
    "transformer": transformer,
    "transformer-big": partial(
        transformer, tokens=256, packed=True, dim=1024, heads=16, wide=4096, rate=0.3
    ),
    "dlrm": dlrm,
}


def main() -> None:
    """Writes a step's HloModuleProto."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument(
        "--rng", choices=("threefry2x32", "rbg", "unsafe_rbg"), default="threefry2x32"
    )
    parser.add_argument(
        "--shared-masks", action="store_true", help="of BERT's attention, as in its example"
    )
    parser.add_argument("--out", type=Path, required=True, help="the HloModuleProto")
    options = parser.parse_args()
    jax.config.update("jax_default_prng_impl", options.rng)
    BertLayer.shared_masks = options.shared_masks
    step, arguments, donated = STEPS[options.step](options.batch)
    traced = jax.jit(step, donate_argnums=tuple(range(donated))).trace(*arguments)
    module = traced.lower(lowering_platforms=("tpu",)).compiler_ir("hlo")
    options.out.write_bytes(module.as_serialized_hlo_module_proto())


if __name__ == "__main__":
    main()
