"""XLNet (Yang et al. 2019, arXiv:1906.08237): two streams of attention with relative positions."""

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, XLNetConfig

from models import two_streams
from models.encoders.record import (
    Encoder,
    FineTuning,
    LanguageHead,
    Partition,
    Pretraining,
    Size,
)
from models.partition import IN, OUT, VECTOR, VOCABULARY


def new_configuration(
    size: Size, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> XLNetConfig:
    """Returns the configuration of a new XLNet, whose rows may be of any length."""
    return XLNetConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        n_layer=size.layers,
        d_model=size.width,
        n_head=size.heads,
        d_inner=4 * size.width,
    )


def token_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Returns logits [B, P, vocabulary] of hidden states [B, P, H]."""
    return model.lm_loss(hidden)


ENCODER = Encoder(
    architecture="xlnet",
    tokenizer="xlnet",
    published=XLNetConfig(d_model=768, n_layer=12, n_head=12, d_inner=3072),  # xlnet-base-cased
    new_configuration=new_configuration,
    partition=Partition(
        parameters={
            r"rel_attn\.[qkvor]": (None, "model", None),  # [H, heads, D]
            r"rel_attn\.r_[wrs]_bias": IN,  # [heads, D], along D
            r"rel_attn\.seg_embed": (None, "model", None),  # [2, heads, D]
            r"ff\.layer_1\.weight": OUT,
            r"ff\.layer_1\.bias": VECTOR,
            r"ff\.layer_2\.weight": IN,
            r"word_embedding\.weight": VOCABULARY,
        },
        layer_list="transformer.layer",
        time_major=r"transformer\.",
    ),
    language_head=LanguageHead(
        module="lm_loss",
        parameters={r"lm_loss\.bias": VECTOR},
        token_logits=token_logits,
    ),
    fine_tuning=FineTuning(
        source="Yang et al. 2019, table 8: lr 2e-5 to 5e-5, 800 (MRPC) to 12,000 (MNLI) steps",
        checkpoint="xlnet/xlnet-base-cased",
        lr=3e-5,
        warmup=0.1,
        weight_decay=0.0,
        epochs=3,
    ),
    objective="models.permutation",
    pretraining=Pretraining(
        source="Yang et al. 2019, table 7, of the large model",
        batch_size=8192,
        steps=500_000,
        lr=4e-4,
        warmup_steps=40_000,
        weight_decay=0.01,
        beta2=0.999,
        clip=1.0,
    ),
    vmem_kib=32_768,  # other encoders would pay with memory: docs/tpu/findings.md
    token_types=True,
    classifier_inputs={"use_mems": False},
    own_layers=two_streams.own_layers,
)
