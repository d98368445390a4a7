"""Predicts new pictures, sentences, pairs of sentences or clicks, finds entities in sentences, or
answers questions, with what a script has exported: one input after the other in, one line of JSON
each out.

model     the export of train/resnet50.py, train/glue.py, train/squad.py, train/tagging.py or
          train/dlrm.py (runs/<name>/export), or another model of transformers that classifies
          sentences, tags words or answers questions; what it has decides what the inputs are
data      pictures: a file, a folder, a pattern, or - for paths from the standard input
          sentences: a file with one a line, or - for the standard input; named columns of CSV, TSV,
          JSONL or parquet, two of which are pairs
          answers: SQuAD's JSON, or a table with the columns question and context
          clicks: CSV or parquet with the columns of the training
run       make predict MODEL_DIR=runs/<name>/export DATA=new.csv > predictions.jsonl
          python -m train.predict new --model-dir runs/<name>/export --data new.csv
Python    for answer in predict.answers(config):
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit(
        "error: in the project's folder run it as a module: python -m train.predict new"
    )

import contextlib
import glob
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import optional
from errors import InputError
from train.common import cli, device, files, hooks, precision
from train.common.mesh import PRECISIONS, Mesh
from train.prediction.pieces import Piece, in_order


@dataclass(frozen=True)
class Config:
    model_dir: str = ""  # folder or URL of an export, or of a classifier of transformers
    data: str = ""  # what to predict; pictures: file, folder, pattern, URL; "-": standard input
    out: str = ""  # file or URL of the predictions; "": standard output; with --task a folder
    text: tuple[str, ...] = ()  # columns of --data with the text, two of pairs; (): the export's
    task: str = ""  # of GLUE: predicts its test sets, for the benchmark's server
    labels: str = ""  # with --task: the model's classes in their order, a,b,…, where it names none
    top: int = 5  # most probable classes, or answers, that are given
    null_threshold: float | None = None  # of answers, as of train/squad.py; None: the run's
    image_size: int = 0  # pixels, of exports that do not say them; 0: the export's
    skip_broken: bool = False  # inputs that cannot be read get an error, and are counted; else stop
    max_length: int = 0  # tokens that a text is cut to; 0: those of the run's evaluation
    batch_size: int = 0  # inputs per batch, over all devices; 0: 64 pictures, 32 texts, 4096 clicks
    lengths: tuple[int, ...] = (32, 64, 128)  # tokens: a compiled shape each; then they double
    precision: Literal["", *PRECISIONS] = ""  # train/common/device.py; "": the run's evaluation's
    device: Literal["xla", "cpu", "cuda", "tpu"] = "xla"  # xla: TPU, CPU; tpu: TorchTPU, never run
    workers: int = -1  # processes that decode pictures; -1: one per core, 0: none
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes: docs/tpu.md


EXPORT = "expected the export of a run, runs/<name>/export"
# Kind of export -> the part of optional.py, a module of prediction/, that predicts it.
PARTS = {
    "pictures": "predict_pictures",
    "sentences": "predict_sentences",
    "answers": "predict_answers",
    "entities": "predict_entities",
    "clicks": "predict_clicks",
    "test sets": "predict_submission",
}


def validate(config: Config) -> None:
    """Raises InputError where a value is missing or outside its range."""
    if not config.model_dir:
        raise InputError(
            "--model-dir is missing: give the folder of an export, such as runs/<name>/export"
        )
    cli.at_least(config, 1, "top")
    cli.at_least(config, 0, "batch_size")
    cli.at_least(config, -1, "workers")
    if config.image_size:
        cli.at_least(config, 32, "image_size")
    if config.max_length:
        cli.at_least(config, 8, "max_length")
    if config.null_threshold is not None and not math.isfinite(config.null_threshold):
        raise InputError(f"--null-threshold is {config.null_threshold}; it must be a number")
    rising = list(config.lengths) == sorted(set(config.lengths))
    if not config.lengths or not rising or config.lengths[0] < 8:
        raise InputError(f"--lengths are {config.lengths}; they must rise and be at least 8")

    if config.labels and not config.task:
        raise InputError(f"--labels is {config.labels}; it is for --task")
    if config.task and config.text:
        raise InputError(
            f"--text is {' '.join(config.text)}; leave it out: the columns are those of --task"
        )
    if config.task and config.skip_broken:
        raise InputError(
            "--skip-broken is not for --task: the benchmark's server takes no file in which a "
            "prediction is missing"
        )
    if not config.data and not config.task and sys.stdin.isatty():
        raise InputError("--data is missing: give what to predict, or - for the standard input")
    if config.out:
        _check_out(config)


def _check_out(config: Config) -> None:
    """Raises InputError where predictions could not be written, which would show at their end, or
    would take the place of what is predicted."""
    out = config.out
    if out == config.data:
        raise InputError(f"--out is {out}, and so is --data; give another")
    if "://" in out:
        return
    if config.task:
        folder = out
        if os.path.exists(out) and not os.path.isdir(out):
            raise InputError(f"--out is the file {out}; with --task give a folder")
    else:
        folder = os.path.dirname(out) or "."
        _check_out_file(out, config.data)

    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise InputError(f"--out is {out}, and {folder} cannot be written; give another")


def _check_out_file(out: str, data: str) -> None:
    """Raises InputError where --out is no file, or one that is read."""
    if os.path.isdir(out):
        raise InputError(f"--out is the folder {out}; give a file")
    if not os.path.exists(out):
        return
    if not os.path.isfile(out):
        raise InputError(
            f"--out is {out}, which is no file and would be replaced by one; leave --out out and "
            f"write > {out}"
        )
    if _is_read(os.stat(out), data):
        raise InputError(f"--out is {out}, a file of --data, which it would replace; give another")


def _check_standard_output(config: Config) -> None:
    """Raises InputError where predictions would be appended to the file that is read."""
    with contextlib.suppress(OSError):  # a notebook's has no file
        status = os.fstat(sys.stdout.fileno())
        if stat.S_ISREG(status.st_mode) and _is_read(status, config.data):
            raise InputError(
                f"the standard output is a file of --data, {config.data or '-'}; give another"
            )


def _is_read(status: os.stat_result, data: str) -> bool:
    """Returns whether the file of this status is one of --data."""
    if data in ("", "-"):
        with contextlib.suppress(OSError):
            return os.path.samestat(status, os.fstat(sys.stdin.fileno()))
        return False

    path = os.path.expanduser(data.removeprefix("file://"))
    paths = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    existing = filter(os.path.exists, paths)  # and no link to nowhere
    return any(os.path.samestat(status, os.stat(one)) for one in existing)


def kind_of(folder: str, given: str) -> str:
    """Returns the kind of an export by what it has, a key of PARTS.

    Args:
        folder: local.
        given: as the user gave it, for messages.
    Raises:
        InputError: it is none of these.
    """
    names = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    if "export" in names:
        raise InputError(f"{given} is a run; give its export, {given.rstrip('/')}/export")
    if "checkpoints" in names:
        raise InputError(
            f"{given} is a run that is not finished and has no export yet; finish it by the "
            "command that began it"
        )
    if "config.json" in names:
        return _kind_of_encoder(os.path.join(folder, "config.json"))
    if "model.safetensors" in names:
        about = files.read_metadata(os.path.join(folder, "model.safetensors"))
        if "features" in about and "num_dense" in about:
            return "clicks"
        if "model" in about and "classes" in about:
            return "pictures"
        raise InputError(
            f"{given} has no config.json, and its model.safetensors names neither classes nor "
            f"features; {EXPORT}"
        )

    if "model.pt" in names:
        raise InputError(
            f"{given} has a Transformer, which translates: use make translate MODEL_DIR={given}"
        )
    if not names:
        raise InputError(f"there is nothing in {given}; {EXPORT}")
    found = ", ".join(sorted(names)[:10])
    raise InputError(f"{given} has neither config.json nor model.safetensors but {found}; {EXPORT}")


# End of the name of an encoder's class with its head -> the kind of its export; of all others it is
# sentences, which refuses what it does not know.
KIND_OF_HEAD = {
    "ForTokenClassification": "entities",
    "ForQuestionAnswering": "answers",
    "ForQuestionAnsweringSimple": "answers",
}


def _kind_of_encoder(path: str) -> str:
    """Returns the kind of an encoder's export, by its config.json."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}; copy the export again") from error
    names = content.get("architectures") if isinstance(content, dict) else None
    for name in names or ():
        for head, kind in KIND_OF_HEAD.items():
            if str(name).endswith(head):
                return kind
    return "sentences"


# Flags that count for some kinds of export only.
OF_KIND = {
    "text": ("sentences", "answers", "entities"),
    "max_length": ("sentences", "answers", "entities"),
    "null_threshold": ("answers",),
    "image_size": ("pictures",),
}


def _check_kind(config: Config, kind: str) -> None:
    """Raises InputError where a flag is given that the export has no use for."""
    for name, own_kinds in OF_KIND.items():
        value = getattr(config, name)
        is_given = value is not None if name == "null_threshold" else bool(value)
        if is_given and kind not in own_kinds:
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise InputError(
                f"--{name.replace('_', '-')} is {shown}; it is for {' and '.join(own_kinds)}, and "
                f"{config.model_dir} is a model of {kind}: leave it out"
            )


def set_up(config: Config, chosen_precision: str, vmem_kib: int) -> Mesh:
    """Returns the devices of this host.

    Raises:
        InputError: it is one of several of a pod.
    """
    mesh = device.setup(
        0,
        chosen_precision,
        config.strict,
        config.device,
        vmem_kib=vmem_kib,
        safe_forms=config.safe_forms,
    )
    if mesh.process_count > 1:
        raise InputError(
            f"predictions are made on one host, by one process, not {mesh.process_count}; "
            "run it on a TPU with one host, or without torchrun, a part of the data in each run"
        )
    return mesh


def open_model(config: Config) -> tuple[Any, Mesh]:
    """Opens the devices, then model and data.

    Returns:
        A Predictor of prediction/pieces.py, or with --task a Submission; and the devices.
    Raises:
        InputError: one of them cannot be used.
    """
    validate(config)
    folder = files.local_folder(config.model_dir)
    kind = kind_of(folder, config.model_dir)
    if config.task and kind != "sentences":
        raise InputError(
            f"--task is {config.task}, and {config.model_dir} is no model of sentences"
        )

    _check_kind(config, kind)

    part = optional.load(PARTS["test sets" if config.task else kind])
    exported = part.exported_precision(folder)
    chosen = precision.choose(config.precision, exported, config.model_dir)
    mesh = set_up(config, chosen, part.VMEM_KIB)
    return part.open_model(folder, config), mesh


def answers(config: Config) -> Iterator[dict[str, Any]]:
    """Yields the answer of each input, in order.

    {"input": …} and
        classes      "label", "probability", and "top": [{"label": …, "probability": …}, …]
        multilabel   "labels", those with a probability of at least 0.5; "probabilities" by label
        regression   "score"; of several numbers "scores", by name
        answers      "answer", "probability", "score", "start", "end", and "n_best": a list of
                     these; where there may be none, "null_difference"
        entities     "entities", in the order of the text: [{"type": …, "text": …, "start": …,
                     "end": …, "probability": …}, …]; characters start to end - 1 of "input"
        clicks       "probability"
        broken       "error", with skip_broken

    Raises:
        InputError: model or data cannot be used; or an input is broken, without skip_broken, after
            the answers of those before; or --task is given, which writes files: `main`.
    """
    if config.task:
        raise InputError(f"--task is {config.task}, which writes files: call predict.main(config)")
    model, mesh = open_model(config)
    yield from in_order(model.pieces(mesh), model.to_answers, config.skip_broken)


def json_line(answer: dict[str, Any]) -> bytes:
    """Returns an answer as a line of JSON. Bytes of a path that are not UTF-8 are escaped."""
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode("utf-8", "backslashreplace")


class Writer:
    """Writes answers to the standard output, or whole to the file --out.

    Attributes:
        count: answers so far.
        broken: those of them that are errors.
        timed: answers after those of the first piece of inputs, which wait for the compiler.
        seconds: from the last answer of the first piece to the last of all.
    """

    def __init__(self, config: Config, output: Any):
        self.config = config
        self.output = output
        self.count = 0
        self.broken = 0
        self.timed = 0
        self.seconds = 0.0
        self._first_piece = 0  # its inputs
        self._first_piece_at = 0.0  # when their answers were written

    def count_first(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yields the pieces, and notes how many inputs the first one has."""
        for piece in pieces:
            if not self._first_piece:
                self._first_piece = len(piece.inputs)
            yield piece

    def write(self, found: Iterator[dict[str, Any]]) -> None:
        """Writes all answers.

        Raises:
            BrokenPipeError: nobody reads the standard output any more.
            InputError: they cannot be written; or what making them raises.
        """
        if not self.config.out:
            try:
                self._write_to(self.output, found)
            except BrokenPipeError:  # an OSError, too; `main` ends quietly
                raise
            except OSError as error:
                _leave_standard_output()
                raise InputError(
                    f"the standard output cannot be written: {error.strerror}"
                ) from error
            return

        folder, name = os.path.split(self.config.out)

        def save(local: str) -> None:
            with open(os.path.join(local, name), "wb") as file:
                self._write_to(file, found)

        files.write_folder(folder or ".", save)

    def _write_to(self, file: Any, found: Iterator[dict[str, Any]]) -> None:
        for answer in _made(found):
            self.count += 1
            self.broken += "error" in answer
            file.write(json_line(answer))
            file.flush()
            self._time()

    def _time(self) -> None:
        """Notes the time after an answer."""
        if self.count == self._first_piece:
            self._first_piece_at = time.monotonic()
        elif self.count > self._first_piece:
            self.timed = self.count - self._first_piece
            self.seconds = time.monotonic() - self._first_piece_at

    def say(self, notes: list[str]) -> None:
        """Tells the user, on the standard error, what the answers do not show."""
        if not self.count:
            data = "the standard input" if self.config.data in ("", "-") else self.config.data
            notes = [f"{data} has no inputs, so there are no predictions", *notes]
        if self.broken:
            notes = [f"{self.broken:,} of {self.count:,} inputs are broken", *notes]
        for note in notes:
            print(note, file=sys.stderr, flush=True)


def _made(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields answers. What fails in making them is not taken for a failure to write them, as a
    closed pipe is."""
    try:
        yield from found
    except OSError as error:
        raise RuntimeError("predicting failed") from error


def main(config: Config) -> None:
    """Predicts what --data has, and writes a line for each input to the standard output or to
    --out."""
    output = sys.stdout.buffer
    if not config.out:
        _check_standard_output(config)
    with contextlib.redirect_stdout(sys.stderr):  # the standard output has nothing but answers
        model, mesh = open_model(config)
        hooks.tell(
            "start",
            pid=os.getpid(),
            kind=mesh.kind,
            devices=mesh.num_devices,
            hosts=mesh.process_count,
        )
        writer = Writer(config, output)
        if config.task:
            writer.count = model.write(mesh)
        else:
            pieces = writer.count_first(model.pieces(mesh))
            found = in_order(pieces, model.to_answers, config.skip_broken)
            try:
                with contextlib.closing(found):
                    writer.write(found)
            except BrokenPipeError:  # `| head` has what it wants
                _leave_standard_output()
                return
            except InputError:
                if writer.count:
                    writer.say(model.notes)  # on the answers before
                raise
        writer.say(model.notes)
        hooks.tell(
            "end",
            count=writer.count,
            broken=writer.broken,
            timed=writer.timed,
            seconds=writer.seconds,
            graphs=device.graph_report(),
        )


def _leave_standard_output() -> None:
    """Keeps Python from writing to the standard output once more when it ends: it is closed, or
    full, and Python would report that."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno())


PRESETS = {"new": ("predicts what --data has", Config())}

if __name__ == "__main__":
    cli.run(main, PRESETS)
