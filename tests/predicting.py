"""Exports without a training, and what train/predict.py answers, for its tests."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from image_files import picture
from model_helpers import randomized
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data import glue, imagenet, vocabulary
from errors import InputError
from models import classification, encoder_files, encoder_layers, encoders
from models.resnet import resnet
from train import glue as glue_script
from train import predict, resnet50
from train.common import files

POSITIONS = 32  # tokens that the small classifiers take
# Of the words that their tokenizers know, with unlike lengths.
TEXTS = [
    "the dog in a big house.",
    "two",
    "here a very old cat sits over ten green fish and one long river, quite near the tree there.",
    "a red bird, then nine blue cars.",
    "from the house by the river at five.",
    "zebra Ünïcode \u2028 words",
    "this horse was very small.",
]


def answers_of(folder: Path | str, data: Path | str, **flags) -> list[dict]:
    """Returns what train/predict.py answers in float32 on plain PyTorch, or as flags say."""
    options = {"precision": "float32", "device": "cpu", "workers": 0, **flags}
    config = predict.Config(model_dir=str(folder), data=str(data), **options)
    return list(predict.answers(config))


def answers_before(folder: Path | str, data: Path | str, **flags) -> tuple[list[dict], str]:
    """Returns the answers that come before an error, and what it says; flags as of `answers_of`."""
    options = {"precision": "float32", "device": "cpu", "workers": 0, **flags}
    config = predict.Config(model_dir=str(folder), data=str(data), **options)
    found = []
    with pytest.raises(InputError) as refused:
        for answer in predict.answers(config):
            found.append(answer)
    return found, str(refused.value)


class _Chosen(Exception):
    """Ends a prediction where its precision is known."""


def precision_of(folder: Path | str, data: Path | str, **flags) -> str:
    """Returns the precision in which train/predict.py computes."""

    def setup(seed: int, precision: str, *_, **__) -> None:
        raise _Chosen(precision)

    config = predict.Config(model_dir=str(folder), data=str(data), **flags)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Chosen) as chosen:
        patch.setattr(predict.device, "setup", setup)
        next(predict.answers(config))
    return str(chosen.value)


def lines_of(output: str) -> list[dict]:
    """Returns the answers that a command has written."""
    assert output.endswith("\n") or not output
    return [json.loads(line) for line in output.split("\n")[:-1]]


# Pictures


def write_network(
    folder: Path, mesh, model: str = "resnet_tiny", size: int = 32, precision: str = "float32"
) -> None:
    """Writes the export of a network that looks at everything, of twelve classes."""
    network = resnet(model, 12)
    for module in network.modules():
        if hasattr(module, "running_var"):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
    for name, parameter in network.named_parameters():
        if name.endswith("bn3.weight"):
            parameter.data.fill_(0.5)
    images = imagenet.SyntheticImages(1, size, 12, 0, "train")
    state = resnet50.State(network, None, None)
    config = replace(resnet50.TINY, model=model, image_size=size, precision=precision)
    resnet50.export(str(folder), state, resnet50.Data(images, images), config, mesh)


def without_precision(folder: Path, old: Path) -> Path:
    """Copies an export to a folder as an older version wrote it, without its precision; returns
    that folder."""
    shutil.copytree(folder, old)
    columns = old / "columns.json"
    if columns.exists():
        content = json.loads(columns.read_text())
        del content["precision"]
        columns.write_text(json.dumps(content))
        return old

    path = str(old / "model.safetensors")
    weights, metadata = files.load_with_metadata(path)
    del metadata["precision"]
    files.save_weights(path, weights, metadata)
    return old


def write_pictures(folder: Path, names: Sequence[str]) -> list[str]:
    """Writes pictures of unlike sizes; returns their paths."""
    paths = []
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(40 + 7 * number, 60 - 5 * number, seed=number).save(path)
        paths.append(str(path))
    return paths


def pixels_of(path: str, resize: int, size: int) -> PIL.Image.Image:
    """Returns a picture as torchvision's classification reference prepares it, before scaling."""
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    prepare = v2.Compose([v2.Resize(resize), v2.CenterCrop(size)])
    return prepare(decode_image(path, ImageReadMode.RGB))


# Sentences


def tokenizer_of_texts() -> PreTrainedTokenizerBase:
    """Returns a tokenizer that knows the words of GLUE's synthetic twins."""
    return vocabulary.learn(glue.read("synthetic", "mrpc", "train").first, "bert", 400)


def small_classifier(labels: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Returns a small BERT with random weights for these classes; (): a regression."""
    settings = encoders.new_configuration("bert", "tiny", tokenizer, POSITIONS)
    model = randomized(classification.classifier(settings, labels, None).model)
    inputs = tokenizer(
        TEXTS, padding=True, truncation=True, max_length=POSITIONS, return_tensors="pt"
    )
    with torch.no_grad():
        model.classifier.weight.mul_(10)
        model.classifier.bias.sub_(model(**inputs).logits.mean(0))  # texts have unlike classes
    return model


def write_classifier(
    folder: Path,
    labels: Sequence[str],
    problem: str = "",
    columns: Sequence[str] = (),
    max_length: int = POSITIONS,
) -> None:
    """Writes the export of a small BERT.

    Args:
        problem: transformers' problem_type, if it is not that of the labels.
        columns: with the text, as the export names them; (): it names none, as older ones.
        max_length: tokens to which the evaluation cut a text, as it says beside these.
    """
    tokenizer = tokenizer_of_texts()
    model = small_classifier(labels, tokenizer)
    if problem:
        model.config.problem_type = problem
    folder.mkdir(parents=True, exist_ok=True)
    encoder_files.save(str(folder), model, model.state_dict(), tokenizer)
    if columns:
        content = {"text": list(columns), "label": "y", "objective": "classes", "separator": ""}
        content["max_length"] = max_length
        (folder / "columns.json").write_text(json.dumps(content))


def write_trial(
    run: Path, mesh, task: str, lengths: Sequence[int], precision: str = "float32"
) -> Path:
    """Writes a finished run of train/glue.py, a trial of a task of GLUE whose weights are random;
    returns its export. The model takes POSITIONS tokens, whatever the lengths are."""
    trial = replace(glue_script.TINY, task=task, lengths=tuple(lengths), precision=precision)
    config = glue_script.validate(trial)
    data = glue_script.open_data(replace(config, lengths=(POSITIONS,)))
    model = encoder_layers.fast_layers(randomized(data.model))
    state = glue_script.State(model, optimizer=None)
    glue_script.export(f"{run}/export", state, data, config, mesh)
    (run / "config.json").write_text(json.dumps({"config": asdict(config)}))
    (run / "summary.json").write_text("{}")
    return run / "export"


def write_lines(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def command(folder: Path | str, data: Path | str, *flags: str) -> list[str]:
    """Returns the command line of train/predict.py on plain PyTorch."""
    words = ["--model-dir", str(folder), "--data", str(data), "--device", "cpu"]
    words += ["--precision", "float32", "--workers", "0", *flags]
    return [sys.executable, "-m", "train.predict", "new", *words]


def random_texts(count: int) -> list[str]:
    """Returns texts of 1 to 25 known words, all different."""
    rng = np.random.default_rng(0)
    words = [
        "the",
        "a",
        "dog",
        "cat",
        "bird",
        "one",
        "two",
        "red",
        "house",
        "river",
        "over",
        "very",
    ]
    texts = set()
    while len(texts) < count:
        length = int(rng.integers(1, 26))
        texts.add(" ".join(rng.choice(words, length)))
    return sorted(texts)
