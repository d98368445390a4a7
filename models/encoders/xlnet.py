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
    QuestionAnswering,
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
        source="zihangdai/xlnet: run_classifier.py; each task: its author in issue 96, for the "
        "numbers of Yang et al. 2019, table 4",
        checkpoint="xlnet/xlnet-base-cased",
        lr=3e-5,
        warmup=0.1,
        weight_decay=0.0,
        epochs=3,
        # Issue 96 gives updates: times the batch, over the task's training examples, these are
        # epochs. All tasks have eval_all_ckpt=True, for which run_classifier.py takes the
        # checkpoint with the highest accuracy, of a regression that with the highest correlation.
        tasks={
            "cola": {
                "batch_size": 128,
                "epochs": 3_000 * 128 / 8_551,
                "warmup": 500 / 3_000,
                "best": "accuracy",
            },
            "mnli": {
                "batch_size": 128,
                "epochs": 10_000 * 128 / 392_702,
                "warmup": 1_000 / 10_000,
                "best": "accuracy",
            },
            "mrpc": {
                "lr": 5e-5,
                "epochs": 800 * 32 / 3_668,
                "warmup": 200 / 800,
                "best": "accuracy",
            },
            "qqp": {
                "batch_size": 128,
                "epochs": 14_000 * 128 / 363_846,
                "warmup": 1_000 / 14_000,
                "best": "accuracy",
            },
            "rte": {
                "epochs": 800 * 32 / 2_490,
                "warmup": 200 / 800,
                "best": "accuracy",
            },
            "sst2": {
                "lr": 2e-5,
                "epochs": 10_000 * 32 / 67_349,
                "warmup": 1_000 / 10_000,
                "best": "accuracy",
            },
            "stsb": {
                "lr": 5e-5,
                "epochs": 1_200 * 32 / 5_749,
                "warmup": 120 / 1_200,
                "best": "pearson",
            },
        },
    ),
    question_answering=QuestionAnswering(
        # Without two things of its authors: their rate falls by 0.75 from layer to layer, and their
        # head searches for the last token by each first one. Their 8,000 updates of 48 are so many
        # epochs of the 130,319 questions of SQuAD 2.0.
        source="zihangdai/xlnet: scripts/tpu_squad_large.sh and run_squad.py",
        lr=3e-5,
        warmup=1_000 / 8_000,
        weight_decay=0.0,
        epochs=8_000 * 48 / 130_319,
        batch_size=48,
        max_length=512,
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
    token_types=True,
    classifier_inputs={"use_mems": False},
    own_layers=two_streams.own_layers,
)
