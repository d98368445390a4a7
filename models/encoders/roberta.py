"""RoBERTa (Liu et al. 2019, arXiv:1907.11692): BERT's layers with byte-level tokens of one type."""

import math

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, RobertaConfig

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
) -> RobertaConfig:
    """Returns the configuration of a new RoBERTa. Its positions start after the padding's id."""
    return RobertaConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=max_tokens + tokenizer.pad_token_id + 1,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )


def token_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Returns logits [B, P, vocabulary] of hidden states [B, P, H]."""
    return model.lm_head(hidden)


ENCODER = Encoder(
    architecture="roberta",
    tokenizer="roberta",
    published=RobertaConfig(  # of FacebookAI/roberta-base
        vocab_size=50_265,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=1,
    ),
    new_configuration=new_configuration,
    partition=Partition(
        parameters={
            r"attention\.self\.(query|key|value)\.weight": OUT,
            r"attention\.self\.(query|key|value)\.bias": VECTOR,
            r"attention\.output\.dense\.weight": IN,
            r"intermediate\.dense\.weight": OUT,
            r"intermediate\.dense\.bias": VECTOR,
            r"\d+\.output\.dense\.weight": IN,
            r"word_embeddings\.weight": VOCABULARY,
        },
        layer_list="roberta.encoder.layer",
        shared=r"attention\.self$",
    ),
    language_head=LanguageHead(
        module="lm_head",
        parameters={r"lm_head\.bias": VECTOR},
        token_logits=token_logits,
    ),
    fine_tuning=FineTuning(
        source="Liu et al. 2019, table 10: lr 1e-5, 2e-5 or 3e-5; each task: its authors' file in "
        "fairseq, examples/roberta/config/finetuning",
        checkpoint="FacebookAI/roberta-base",
        lr=2e-5,
        warmup=0.06,
        weight_decay=0.1,
        epochs=10,
        beta2=0.98,
        clip=math.inf,  # clip_norm 0.0 in all files
        tasks={
            "cola": {"lr": 1e-5, "batch_size": 16, "best": "accuracy"},
            "mnli": {"lr": 1e-5, "best": "accuracy"},
            "mrpc": {"lr": 1e-5, "batch_size": 16, "best": "accuracy"},
            "qnli": {"lr": 1e-5, "best": "accuracy"},
            # 28,318 of 113,272 updates. The other files have 6 % as the paper does.
            "qqp": {"lr": 1e-5, "warmup": 0.25, "best": "accuracy"},
            # Its file has 2,036 updates, of which 10 epochs make 1,556: there the rate is 0 here.
            "rte": {"batch_size": 16, "best": "accuracy"},
            "sst2": {"lr": 1e-5, "best": "accuracy"},
            # Its file names no metric; fairseq's default is the lowest loss.
            "stsb": {"batch_size": 16, "best": "-loss"},
        },
    ),
    question_answering=QuestionAnswering(
        source="Liu et al. 2019, table 10",
        lr=1.5e-5,
        warmup=0.06,
        weight_decay=0.01,
        epochs=2,
        batch_size=48,
        beta2=0.98,
        clip=math.inf,
    ),
    objective="models.masked_words",
    pretraining=Pretraining(
        source="Liu et al. 2019, table 9",
        batch_size=8192,
        steps=500_000,
        lr=6e-4,
        warmup_steps=24_000,
        weight_decay=0.01,
        beta2=0.98,
        clip=math.inf,  # no clipping
    ),
    pretraining_of_size={
        "large": Pretraining(
            source="Liu et al. 2019, table 9",
            batch_size=8192,
            steps=500_000,
            lr=4e-4,
            warmup_steps=30_000,
            weight_decay=0.01,
            beta2=0.98,
            clip=math.inf,
        ),
        "1.3b": Pretraining(
            source="Shoeybi et al. 2019, section 4.2, of BERT",
            batch_size=1024,
            steps=2_000_000,
            lr=1e-4,
            warmup_steps=10_000,
            weight_decay=0.01,
            beta2=0.999,
            clip=1.0,
        ),
    },
    berts_layers="encoder",
)
