"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): half of BERT's layers, taught by a BERT."""

from torch import Tensor
from transformers import DistilBertConfig, PreTrainedModel, PreTrainedTokenizerBase

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
) -> DistilBertConfig:
    """Returns the configuration of a new DistilBERT, with half the layers of the size."""
    return DistilBertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        n_layers=size.layers // 2,
        dim=size.width,
        n_heads=size.heads,
        hidden_dim=4 * size.width,
        max_position_embeddings=max_tokens,
    )


def token_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Returns logits [B, P, vocabulary] of hidden states [B, P, H]."""
    transformed = model.activation(model.vocab_transform(hidden))
    return model.vocab_projector(model.vocab_layer_norm(transformed))


ENCODER = Encoder(
    architecture="distilbert",
    tokenizer="distilbert",
    published=DistilBertConfig(),  # its defaults are those of distilbert-base-uncased
    new_configuration=new_configuration,
    partition=Partition(
        parameters={
            r"attention\.[qkv]_lin\.weight": OUT,
            r"attention\.[qkv]_lin\.bias": VECTOR,
            r"attention\.out_lin\.weight": IN,
            r"ffn\.lin1\.weight": OUT,
            r"ffn\.lin1\.bias": VECTOR,
            r"ffn\.lin2\.weight": IN,
            r"word_embeddings\.weight": VOCABULARY,
        },
        layer_list="distilbert.transformer.layer",
        shared=r"attention$",
    ),
    language_head=LanguageHead(
        module="vocab_projector",
        parameters={r"vocab_projector\.bias": VECTOR},
        token_logits=token_logits,
    ),
    fine_tuning=FineTuning(
        source="Sanh et al. 2019, who fine-tune as BERT; SST-2: their model card",
        checkpoint="distilbert/distilbert-base-uncased",
        lr=5e-5,
        warmup=0.1,
        weight_decay=0.01,
        epochs=3,
        tasks={
            # The card of distilbert-base-uncased-finetuned-sst-2-english: 600 updates of warm-up,
            # in 3 epochs of 67,349 examples in batches of 32.
            "sst2": {"lr": 1e-5, "warmup": 600 * 32 / (3 * 67_349)},
        },
    ),
    question_answering=QuestionAnswering(
        source="Sanh et al. 2019, who fine-tune as BERT: Devlin et al. 2019, 4.2 and 4.3",
        lr=5e-5,
        warmup=0.1,
        weight_decay=0.01,
        epochs=3,
        batch_size=32,
        no_answer={"epochs": 2, "batch_size": 48},
    ),
    objective="models.distillation",
    pretraining=Pretraining(
        source="Sanh et al. 2019, section 4: batches of up to 4,000; its distillation/train.py",
        batch_size=4096,
        steps=100_000,
        lr=5e-4,
        warmup_steps=5_000,
        weight_decay=0.0,
        beta2=0.98,
        clip=5.0,
    ),
    teacher="bert",
    berts_layers="transformer",
)
