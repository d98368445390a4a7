"""tpu/compiler/steps.py describes the batches that the loaders upload."""

from dataclasses import replace

import pytest

from tpu.compiler import steps
from train import dlrm, glue, pretrain, resnet50, transformer, translate
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
    images = resnet50.open_data(config).train
    check(uploaded(images, config.batch_size, mesh), described(steps.image_batch(config, mesh)))


@pytest.mark.parametrize("task", ["sst2", "stsb"])
def test_sentences(mesh, task):
    config = glue.validate(replace(glue.TINY, task=task, lengths=(32,)))
    examples = glue.open_data(config).train
    check(uploaded(examples, glue.batches(config, examples), mesh), described(steps.sentence_batch(config, mesh)))


@pytest.mark.parametrize("model, next_sentence", [("bert", False), ("bert", True), ("xlnet", False)])
def test_text(mesh, model, next_sentence):
    config = pretrain.validate(replace(pretrain.TINY, model=model, next_sentence=next_sentence))
    expected = described(steps.text_batch(config, mesh, pretrain.SYNTHETIC_LENGTH))
    check(uploaded(pretrain.open_data(config).train, config.batch_size, mesh), expected)


@pytest.mark.parametrize("pack", [False, True])
def test_translation(mesh, pack):
    config = replace(transformer.TINY, lengths=(16,), pack=pack)
    pairs = transformer.open_data(config).train
    plan = translate.training_plan(pairs, config, mesh.num_devices)
    check(uploaded(pairs, plan, mesh), described(steps.translation_batch(config, mesh)))


def test_clicks(mesh):
    config = dlrm.TINY
    batch = uploaded(dlrm.open_data(config).train, config.batch_size, mesh)
    batch.pop("present", None)  # of the synthetic twin, whose bags may lack ids; Criteo's arrays are full
    expected = described(steps.click_batch(config, mesh, sum(dlrm.SYNTHETIC_LOOKUPS)))
    assert expected.pop("dense")[0][1] == 13 and batch.pop("dense")[0][0] == config.batch_size
    check(batch, expected)
