"""What the hosts of a pod do in tests/test_multi_host.py: the scripts with small data, what stands
for their steps, and what goes wrong on a host.

It is imported by the tests and by the process whose forks the hosts are (pod_server.py).
"""

import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import best_runs
import numpy as np
import torch
from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem
from helpers import fewer_sentences
from pod_host import Host, Meeting

from data import tagging as tagging_data
from data import text, vocabulary, wmt
from train import dlrm, glue, pretrain, resnet50, tagging, transformer, translate
from train.common import checkpoint
from train.common.run_folder import RunFolder
from train.common.sharding import gather

# ---- stand-ins for the models --------------------------------------------------------------------
# They give numbers that differ between examples and do not depend on the hosts.

# In the order of the numbers that `of_step` gives them: each is less than the one before.
STEP_METRICS = ("loss", "accuracy", "gradient_norm", "nll", "words", "top1", "top5")
STEP_COUNTS = ("count", "tokens", "predicted")


def rows_of(batch: dict) -> slice | torch.Tensor | np.ndarray:
    """Returns the rows that are examples; what the others hold is of no account."""
    mask = batch.get("mask")
    if mask is None or len(mask.shape) != 1:
        return slice(None)
    return mask > 0


def fewer_tagged(monkeypatch, sizes: tuple[int, int]) -> None:
    """Gives so many sentences with tags for training and for evaluation."""
    open_splits = tagging_data.open_splits

    def some(sentences: tagging_data.Sentences, size: int) -> tagging_data.Sentences:
        return replace(sentences, words=sentences.words[:size], tags=sentences.tags[:size])

    def open_some(*arguments) -> tagging_data.Splits:
        opened = open_splits(*arguments)
        evaluated = {name: some(one, sizes[1]) for name, one in opened.eval.items()}
        return replace(opened, train=some(opened.train, sizes[0]), eval=evaluated)

    monkeypatch.setattr(tagging_data, "open_splits", open_some)


def digest(batch: dict) -> torch.Tensor:
    """Returns a number between 0 and 1 of all of a batch's examples, in their order."""
    rows = rows_of(batch)
    content = b""
    for key in sorted(batch):
        content += np.ascontiguousarray(batch[key][rows]).tobytes()
    return torch.tensor(zlib.crc32(content) / 2**32)


def of_step(name: str, batch: dict | None) -> dict | None:
    """Stands for a step of training, or for one of evaluation that returns sums over a batch."""
    if name == "gradient_step":
        return None

    number = digest(batch or {})
    sums = {}
    for divisor, metric in enumerate(STEP_METRICS, 1):
        sums[metric] = number / divisor
    for count in STEP_COUNTS:
        sums[count] = torch.tensor(1.0)
    return sums


def of_resnet50(name: str, batch: dict) -> dict:
    sums = of_step(name, batch)
    if name == "eval_step":
        decoded = batch["label"] >= 0
        sums["count"] = (batch["mask"] * decoded).sum()
    return sums


def of_glue(name: str, batch: dict) -> dict | torch.Tensor:
    """Gives logits of MNLI's three labels in evaluation."""
    if name != "eval_step":
        return of_step(name, batch)
    positions = torch.arange(1, batch["input_ids"].shape[1] + 1)
    sums = (batch["input_ids"] * batch["attention_mask"] * positions).sum(1)
    return torch.sin(0.37 * sums[:, None] * torch.arange(1, 4))


def of_tagging(name: str, batch: dict) -> dict | torch.Tensor:
    """Gives each token a class by its number in evaluation."""
    if name != "eval_step":
        return of_step(name, batch)
    classes = batch["input_ids"] % 7
    return {"classes": classes.int(), "loss": torch.sin(batch["input_ids"].sum(1))}


def of_transformer(name: str, batch: dict | None) -> dict | None:
    if name != "translate_step":
        return of_step(name, batch)
    wrong = batch["source"].sum(1, keepdim=True) % 3 == 0  # every third sentence
    return {"tokens": torch.where(wrong, batch["source"], batch["target"])}


# ---- the scripts ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Script:
    """A script with a small configuration."""

    module: object
    config: object
    results: Callable | None  # see Job
    sizes: tuple[int, int]  # examples for training and evaluation; 7 or 13 more than whole batches
    patch: Callable  # makes the data sets of these sizes
    # Batches after which two resumed runs are stopped, both within the second epoch.
    first_stop: int
    second_stop: int


def synthetic(script, **changes) -> Callable:
    """Returns a patch for a script that makes its own examples."""

    def patch(monkeypatch, sizes) -> None:
        constants = {"SYNTHETIC_TRAIN": sizes[0], "SYNTHETIC_EVAL": sizes[1], **changes}
        for name, value in constants.items():
            monkeypatch.setattr(script, name, value)

    return patch


def sentence_pairs(monkeypatch, sizes) -> None:
    synthetic_pairs = wmt.SyntheticPairs

    def of_size(split, seed):
        size = sizes[0] if split == "train" else sizes[1]
        return synthetic_pairs(split, size, seed)

    monkeypatch.setattr(wmt, "SyntheticPairs", of_size)


def rows_of_text(monkeypatch, sizes) -> None:
    synthetic_text = text.SyntheticText

    def of_size(split, *rest):
        size = sizes[0] if split == "train" else sizes[1]
        return synthetic_text(split, *rest, rows=size)

    monkeypatch.setattr(text, "SyntheticText", of_size)


RESNET50 = replace(resnet50.TINY, batch_size=16, epochs=3, log_every=1, save_every=2)
DLRM = replace(
    dlrm.TINY,
    device="cpu",
    plan="exchange",
    shuffle="batches",
    batch_size=16,
    epochs=3,
    log_every=1,
    save_every=2,
)
GLUE = replace(
    glue.TINY,
    task="mnli",
    batch_size=8,
    lengths=(24, 32),
    epochs=3,
    group_by_length=True,
    log_every=1,
    eval_every=5,
)
TAGGING = replace(
    tagging.TINY,
    batch_size=8,
    lengths=(16,),
    epochs=3,
    group_by_length=True,
    log_every=1,
    eval_every=5,
)
TRANSFORMER = replace(
    transformer.TINY,
    batch_tokens=128,
    updates=21,
    warmup_updates=5,
    log_every=1,
    eval_every=10,
    save_every=2,
)
PACKED = replace(TRANSFORMER, pack=True, lengths=(16,), update_every=2, updates=12)
PRETRAIN = replace(
    pretrain.TINY,
    model="xlnet",
    update_every=2,
    batch_size=16,
    steps=12,
    warmup_steps=3,
    log_every=1,
    eval_every=5,
)

CLICKS = synthetic(dlrm, SYNTHETIC_ROWS=(20, 50, 100, 400, 60, 60, 80, 300), EVAL_BATCH=16)

SCRIPTS = {
    "resnet50": Script(
        module=resnet50,
        config=RESNET50,
        results=of_resnet50,
        sizes=(61, 23),
        patch=synthetic(resnet50),
        first_stop=4,
        second_stop=5,
    ),
    "dlrm": Script(
        module=dlrm,
        config=DLRM,
        results=None,
        sizes=(61, 23),
        patch=CLICKS,
        first_stop=4,
        second_stop=5,
    ),
    "glue": Script(
        module=glue,
        config=GLUE,
        results=of_glue,
        sizes=(61, 45),
        patch=fewer_sentences,
        first_stop=10,
        second_stop=13,
    ),
    "tagging": Script(
        module=tagging,
        config=TAGGING,
        results=of_tagging,
        sizes=(61, 45),
        patch=fewer_tagged,
        first_stop=10,
        second_stop=13,
    ),
    "transformer": Script(
        module=transformer,
        config=TRANSFORMER,
        results=of_transformer,
        sizes=(77, 29),
        patch=sentence_pairs,
        first_stop=10,
        second_stop=12,
    ),
    "transformer-packed": Script(
        module=transformer,
        config=PACKED,
        results=of_transformer,
        sizes=(77, 29),
        patch=sentence_pairs,
        first_stop=8,
        second_stop=10,
    ),
    "pretrain": Script(
        module=pretrain,
        config=PRETRAIN,
        results=of_step,
        sizes=(55, 29),
        patch=rows_of_text,
        first_stop=8,
        second_stop=10,
    ),
}


def train(host: Host, name: str, goes_wrong: Callable | None, changes: dict[str, Any]) -> dict:
    """Trains a script on a host; returns its metrics.

    Args:
        goes_wrong: called with the host before, one of those below.
        changes: of the script's config. {host} in `runs` is the host's number.
    """
    script = SCRIPTS[name]
    script.patch(host.patch, script.sizes)
    if goes_wrong is not None:
        goes_wrong(host)
    values = {"runs": f"{host.job.folder}/runs", **changes}
    values["runs"] = values["runs"].format(host=host.index)
    return script.module.main(replace(script.config, **values))


def train_with_patience(host: Host, config: best_runs.Config, stops_at: int) -> dict:
    """Trains as the scripts do, with --best and --patience; an error ends it at a step."""
    if stops_at:
        best_runs.stopping_at(stops_at, host.patch)
    return best_runs.train(config, host.mesh(), best_runs.EVALUATIONS)


def translate_lines(host: Host, lines: list[bytes]) -> None:
    """Translates the lines of this host, until the model is needed."""
    export = SimpleNamespace(settings={"precision": "float32"})
    host.patch.setattr(translate, "read_export", lambda _: export)
    host.patch.setattr(translate, "restore", lambda *_: (None, SimpleNamespace(pieces="")))
    host.patch.setattr(sys, "stdin", SimpleNamespace(buffer=BytesIO(lines[host.index])))
    translate.main(translate.Config(model_dir="export"))


# ---- a bucket ------------------------------------------------------------------------------------
class Bucket(LocalFileSystem):
    """A store that all processes of this machine see, bucket:///FOLDER/…"""

    protocol = "bucket"

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("bucket://"))


register_implementation("bucket", Bucket)


# ---- what goes wrong on a host -------------------------------------------------------------------
def weights_are_cut_over_hosts(host: Host) -> None:
    """Records where hosts would run the program that joins a tensor's shards: thousands of
    times."""

    def on_every_device(tensor):
        host.pass_by(Meeting("whole", tuple(tensor.shape)))
        return tensor

    host.patch.setattr(gather, "on_every_device", on_every_device)


def last_checkpoint_is_late(host: Host) -> None:
    """Writes it when the main process waits for it, and the other hosts for the main process."""
    save = checkpoint.Checkpointer.save
    wait = checkpoint.Checkpointer.wait
    write = checkpoint.Checkpointer._write
    saved = []
    is_awaited = threading.Event()

    def save_and_note(self, step, *state):
        save(self, step, *state)
        saved.append(step)

    def wait_and_note(self):
        if TRANSFORMER.updates in saved:
            is_awaited.set()
        wait(self)

    def write_late(self, step, *state):
        if step == TRANSFORMER.updates:
            assert is_awaited.wait(host.job.seconds)
            host.wait_for_others()
        write(self, step, *state)

    host.patch.setattr(checkpoint.Checkpointer, "save", save_and_note)
    host.patch.setattr(checkpoint.Checkpointer, "wait", wait_and_note)
    host.patch.setattr(checkpoint.Checkpointer, "_write", write_late)


def others_do_not_see_the_last_checkpoint(host: Host) -> None:
    """A listing of a network file system may be a minute old."""
    average = transformer.average_checkpoints

    def behind(checkpoints, *arguments):
        known = checkpoints.complete_steps()[:-1]
        checkpoints.complete_steps = lambda: known
        return average(checkpoints, *arguments)

    if host.index != 0:
        host.patch.setattr(transformer, "average_checkpoints", behind)


def export_is_late(host: Host) -> None:
    export = pretrain.export

    def export_late(*arguments):
        if host.index == 0:
            host.wait_for_others()
        export(*arguments)

    host.patch.setattr(pretrain, "export", export_late)


def config_is_seen_late(host: Host) -> None:
    """A network file system may remember for a while that there was no such file; a note for each
    look at it."""
    read = RunFolder.read

    def read_late(self, name):
        if name == "config.json":
            host.report.notes.append(name)
            if len(host.report.notes) < 5:
                return None
        return read(self, name)

    if host.index == 1:
        host.patch.setattr(RunFolder, "read", read_late)


def words_are_learnt_from_fewer_lines(host: Host) -> None:
    learn = vocabulary.learn

    def learn_from_fewer(lines, *rest, **options):
        return learn(lines[:20], *rest, **options)

    if host.index == 1:
        host.patch.setattr(vocabulary, "learn", learn_from_fewer)


def host_comes_too_late(host: Host) -> None:
    if host.index == 1:
        time.sleep(2 * host.job.seconds)
