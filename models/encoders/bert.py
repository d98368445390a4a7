"""BERT (Devlin et al. 2019, arXiv:1810.04805)."""

from torch import Tensor
from transformers import BertConfig, PreTrainedModel, PreTrainedTokenizerBase

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
) -> BertConfig:
    """Returns the configuration of a new BERT."""
    return BertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=max_tokens,
    )


def token_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Returns logits [B, P, vocabulary] of hidden states [B, P, H]."""
    return model.cls.predictions(hidden)


def next_sentence_logits(model: PreTrainedModel, pooled: Tensor) -> Tensor:
    """Returns logits [B, 2] of pooled outputs [B, H].

    Index 0 is for a second half that follows the first, 1 for one from elsewhere.
    """
    return model.cls.seq_relationship(pooled)


ENCODER = Encoder(
    architecture="bert",
    tokenizer="bert",
    published=BertConfig(),  # its defaults are those of google-bert/bert-base-uncased
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
        layer_list="bert.encoder.layer",
        shared=r"attention\.self$",
    ),
    language_head=LanguageHead(
        module="cls",
        parameters={r"cls\.predictions\.bias": VECTOR},
        token_logits=token_logits,
        next_sentence_logits=next_sentence_logits,
    ),
    fine_tuning=FineTuning(
        # Which of the rates was the best on each task's development set is not published. 2e-5 is
        # that of MRPC in the README of its authors.
        source="Devlin et al. 2019, 4.1: batches of 32, 3 epochs, lr 5e-5, 4e-5, 3e-5 or 2e-5; "
        "google-research/bert, run_classifier.py and optimization.py",
        checkpoint="google-bert/bert-base-uncased",
        lr=2e-5,
        warmup=0.1,
        weight_decay=0.01,
        epochs=3,
    ),
    question_answering=QuestionAnswering(
        source="Devlin et al. 2019, 4.2 and 4.3; google-research/bert, run_squad.py",
        lr=5e-5,
        warmup=0.1,
        weight_decay=0.01,
        epochs=3,
        batch_size=32,
        no_answer={"epochs": 2, "batch_size": 48},
    ),
    tagging=FineTuning(
        # Which values were the best for CoNLL-2003 is not published.
        source="Devlin et al. 2019, 5.3: a cased model; A.3: batches of 16 or 32, lr 5e-5, 3e-5 or "
        "2e-5, 2, 3 or 4 epochs; google-research/bert, optimization.py",
        checkpoint="google-bert/bert-base-cased",
        lr=5e-5,
        warmup=0.1,
        weight_decay=0.01,
        epochs=4,
    ),
    objective="models.masked_words",
    pretraining=Pretraining(
        source="Devlin et al. 2019, A.2",
        batch_size=256,
        steps=1_000_000,
        lr=1e-4,
        warmup_steps=10_000,
        weight_decay=0.01,
        beta2=0.999,
        clip=1.0,
    ),
    pretraining_of_size={
        "1.3b": Pretraining(
            source="Shoeybi et al. 2019, section 4.2",
            batch_size=1024,
            steps=2_000_000,
            lr=1e-4,
            warmup_steps=10_000,
            weight_decay=0.01,
            beta2=0.999,
            clip=1.0,
        )
    },
    token_types=True,
    berts_layers="encoder",
)
