"""tpu/compiler/steps.py describes the batches that the loaders upload."""

from dataclasses import replace

import pytest

from data import batching
from tpu.compiler import steps
from train import dlrm, glue, pretrain, resnet50, transformer
from train.common import loading


def described(batch) -> dict:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}


def uploaded(dataset, plan, mesh, **options) -> dict:
    with loading.parallel_loader(dataset, plan, mesh, train=True, seed=0, stop=1, workers=0, **options) as loader:
        return described(next(iter(loader)))


def check(uploaded: dict, described: dict):
    # Every batch of the loader says which rows count; not every step asks.
    if "mask" not in described:
        uploaded.pop("mask", None)
    assert described == uploaded


def test_images(mesh):
    config = resnet50.TINY
    train_set, _ = resnet50.open_data(config)
    check(uploaded(train_set, config.batch_size, mesh), described(steps.image_batch(config, mesh)))


@pytest.mark.parametrize("task", ["sst2", "stsb"])
def test_sentences(mesh, task):
    config = glue.completed(replace(glue.TINY, task=task, lengths=(32,)))
    _, tokenizer = glue.open_model(config)
    examples = glue.glue.read("synthetic", task, "train", 0)
    encoded = glue.glue.Encoded(examples, tokenizer, 32)
    plan = batching.Buckets(encoded.lengths, [(config.batch_size, 32)])
    check(uploaded(encoded, plan, mesh), described(steps.sentence_batch(config, mesh)))


@pytest.mark.parametrize("model, next_sentence", [("bert", False), ("bert", True), ("xlnet", False)])
def test_text(mesh, model, next_sentence):
    config = pretrain.completed(replace(pretrain.TINY, model=model, next_sentence=next_sentence))
    rows, _ = pretrain.open_data(config)
    expected = described(steps.text_batch(config, mesh, pretrain.SYNTHETIC_LENGTH))
    check(uploaded(rows, config.batch_size, mesh), expected)


@pytest.mark.parametrize("pack", [False, True])
def test_translation(mesh, pack):
    config = replace(transformer.TINY, lengths=(16,), pack=pack)
    train_set, _ = transformer.open_data(config)
    check(
        uploaded(train_set, transformer.training_plan(config, train_set), mesh),
        described(steps.translation_batch(config, mesh)),
    )


def test_clicks(mesh):
    config = dlrm.TINY
    train_set, _ = dlrm.open_data(config)
    batch = uploaded(train_set, config.batch_size, mesh)
    batch.pop("present", None)  # of the synthetic twin, whose bags may lack ids; Criteo's arrays are full
    expected = described(steps.click_batch(config, mesh, sum(dlrm.SYNTHETIC_LOOKUPS)))
    assert expected.pop("dense")[0][1] == 13 and batch.pop("dense")[0][0] == config.batch_size
    check(batch, expected)
