"""tpu/compiler/steps.py describes the batches that the loaders upload."""

from dataclasses import replace

import pytest

from models import objectives
from tpu.compiler import steps
from train import dlrm, glue, pretrain, resnet50, squad, transformer, translate
from train.common import loading


def described(batch) -> dict:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}


def check(dataset, plan, mesh, batch, ignored=("mask",), **options) -> None:
    """Asserts that the loader uploads what steps.py describes.

    Args:
        batch: the description.
        ignored: fields that not every step asks for, such as the mask of rows that count.
    """
    options = {"train": True, "seed": 0, "stop": 1, "workers": 0, **options}
    with loading.parallel_loader(dataset, plan, mesh, **options) as loader:
        uploaded = described(next(iter(loader)))

    expected = described(batch)
    for name in ignored:
        if name not in expected:
            uploaded.pop(name, None)
    assert uploaded == expected


@pytest.mark.parametrize("augmentation", ["crop", "strong"])
def test_images(mesh, augmentation):
    config = replace(resnet50.TINY, augmentation=augmentation)
    images = resnet50.open_data(config).train
    check(images, config.batch_size, mesh, steps.image_batch(config, mesh))


@pytest.mark.parametrize("task", ["sst2", "stsb"])
def test_sentences(mesh, task):
    config = glue.validate(replace(glue.TINY, task=task, lengths=(32,)))
    examples = glue.open_data(config).train
    plan = glue.batch_plan(config, examples, mesh, train=True)
    check(examples, plan, mesh, steps.sentence_batch(config, mesh))


@pytest.mark.parametrize("update_every", [1, 2])
def test_questions(mesh, update_every):
    config = squad.validate(replace(squad.TINY, update_every=update_every))
    expected = steps.question_batch(config, mesh)
    windows = squad.open_data(config).train
    check(windows, config.batch_size, mesh, expected, micro_batches=update_every)


@pytest.mark.parametrize(
    "model, next_sentence", [("bert", False), ("bert", True), ("xlnet", False)]
)
def test_text(mesh, model, next_sentence):
    config = replace(pretrain.TINY, model=model, next_sentence=next_sentence)
    config = pretrain.validate(config)
    expected = steps.text_batch(config, mesh, pretrain.SYNTHETIC_LENGTH)
    check(pretrain.open_data(config).train, config.batch_size, mesh, expected)


def test_a_micro_batch_of_text(mesh):
    config = pretrain.validate(replace(pretrain.TINY, update_every=2))
    expected = steps.text_batch(config, mesh, pretrain.SYNTHETIC_LENGTH)
    text = pretrain.open_data(config).train
    check(
        text, config.batch_size, mesh, expected, micro_batches=2, counts_per_row=objectives.counts
    )


@pytest.mark.parametrize("pack", [False, True])
def test_translation(mesh, pack):
    config = replace(transformer.TINY, lengths=(16,), pack=pack)
    pairs = transformer.open_data(config).train
    plan = translate.training_plan(pairs, config, mesh.num_devices)
    check(pairs, plan, mesh, steps.translation_batch(config, mesh))


def test_clicks(mesh):
    config = dlrm.TINY
    expected = steps.click_batch(config, mesh, sum(dlrm.SYNTHETIC_LOOKUPS))
    # Not "present" of the synthetic twin, whose bags may lack ids; Criteo's arrays are full, and
    # have 13 numbers.
    assert expected.pop("dense").shape == (config.batch_size, 13)
    ignored = ("mask", "present", "dense")
    check(dlrm.open_data(config).train, config.batch_size, mesh, expected, ignored)
