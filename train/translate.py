"""Translates text with a trained Transformer: one sentence a line in, one a line out.

model     the export of train/transformer.py (runs/<name>/export), or a folder with a checkpoint of
          fairseq as model.pt and dict.<language>.txt of both languages
run       make translate MODEL_DIR=runs/<name>/export < in.en > out.de
          python -m train.translate text --model-dir runs/<name>/export < in.en > out.de
Python    model, codec = load(folder, mesh)
          translations = Translator(model, mesh, config)(codec.sentences(lines))
"""

if __name__ == "__main__" and not __package__:  # by its path: the imports below are not found
    raise SystemExit(
        "error: in the project's folder run it as a module: python -m train.translate text"
    )

import itertools
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data import batching, languages, packing, wmt
from data.fairseq_format import PIECES
from errors import InputError
from models import beam_search, fairseq, layers
from models.transformer import PAD, Transformer
from train.common import cli, device, files, loading, precision
from train.common.mesh import PRECISIONS, Mesh


@dataclass(frozen=True)
class Config:
    model_dir: str = ""  # folder or URL with model.pt, the dictionaries and the tokenizer
    lengths: tuple[int, ...] = (16, 32, 64)  # tokens: a compiled shape each; then they double
    batch_tokens: int = 16_384  # tokens of a batch: batch_tokens / (L * beam) sentences of length L
    beam: int = 4  # hypotheses per sentence
    length_penalty: float = 0.6  # exponent of the length that divides a hypothesis' log-probability
    precision: Literal["", *PRECISIONS] = ""  # train/common/device.py; "": the run's evaluation's
    device: Literal["xla", "cpu", "cuda", "tpu"] = "xla"  # xla: TPU, CPU; tpu: TorchTPU, never run
    pieces: Literal["", *PIECES] = ""  # how symbols make words; "": by the export, else by marks
    workers: int = 0  # processes that make batches
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes: docs/tpu.md


# A translation has at most a * (source tokens) + b tokens, without EOS.
MAX_LENGTH_A = 1.2
MAX_LENGTH_B = 10
# The rows of a batch are a multiple of this and of the number of devices. So batches are the same
# on 1, 2, 4 and 8 devices.
ROWS_MULTIPLE = 8
# The shapes of training batches that are chosen by the data where --lengths is empty.
AUTO_SHAPES = 4  # at most
AUTO_LONGEST = 256  # tokens; longer pairs do not count when the shapes are chosen
DEFAULT_LENGTH = 32  # tokens of the shortest evaluation batches without --lengths
UNKNOWN_SHARE = 0.2  # of the words of an input: above it a warning says so
SPLIT_WORDS = ("char", "spm", "flores101", "flores200")  # sacrebleu's tokenizers that split words
# Compiled shapes of evaluation and translation: one for each length, and smaller ones for the
# lengths that few sentences have.
MAX_SHAPES = 16


def rows_per_batch(batch_tokens: int, length: int, devices: int = 1) -> int:
    """Returns the rows of a batch of sentences of this length."""
    multiple = math.lcm(ROWS_MULTIPLE, devices)
    return max(batch_tokens // length // multiple, 1) * multiple


def training_plan(
    pairs: wmt.TranslationPairs, config: Any, devices: int = 1
) -> batching.Buckets | packing.Packed:
    """Returns which pairs share a training batch, and the batches' shapes.

    Args:
        config: with data, lengths, batch_tokens, pack and seed, as train/transformer.py's.
    """
    lengths = config.lengths
    if not lengths:
        usual = pairs.lengths[pairs.lengths.max(1) <= AUTO_LONGEST]
        if not len(usual):
            raise InputError(
                f"{config.data} has no pair of at most {AUTO_LONGEST} tokens a side; give --lengths"
            )
        # propose_shapes also proposes rows, from the tokens of a batch. They are not used.
        tokens_unused = 2**30
        proposed = packing.propose_shapes(usual, tokens_unused, AUTO_SHAPES)
        lengths = [length for _, length, _ in proposed]

    shapes = []
    for length in lengths:
        rows = rows_per_batch(config.batch_tokens, length, devices)
        shapes.append((rows, length, length))
    if config.pack:
        return packing.pack(pairs.lengths, shapes[-1], config.seed)
    return batching.Buckets(pairs.lengths, shapes)


def evaluation_plan(
    lengths: np.ndarray,
    sizes: Sequence[int],
    batch_tokens: int,
    max_positions: int,
    mesh: Mesh,
    split: str = "",
    numbers: np.ndarray | None = None,
) -> batching.Buckets:
    """Returns batches that hold every sentence, however long.

    Args:
        lengths: tokens of each example, [n, k].
        sizes: lengths of the batches; beyond the last they double.
        batch_tokens: token positions of a batch on each side.
        max_positions: tokens of a sentence that the model takes.
        split: what the sentences are, for messages.
        numbers: each sentence's line in the user's input, from 0, for messages; by default its
            index.
    Raises:
        InputError: a sentence is longer than the model's positions.
    """
    longest = lengths.max(1)  # side of each sentence
    if longest.max() > max_positions:
        index = int(longest.argmax())
        number = index if numbers is None else int(numbers[index])
        of_split = f" of the split {split}" if split else ""
        raise InputError(
            f"sentence {number + 1}{of_split} has {longest[index]} tokens; "
            f"the model takes {max_positions}: cut it"
        )

    sizes = list(sizes) or [DEFAULT_LENGTH]
    while sizes[-1] < longest.max():
        sizes.append(min(2 * sizes[-1], max_positions))

    multiple = math.lcm(ROWS_MULTIPLE, mesh.num_devices)
    sides = lengths.shape[1]
    shapes = []
    for shorter, size in itertools.pairwise([0, *sizes]):
        sentences = int(((longest > shorter) & (longest <= size)).sum())
        if not sentences:
            continue
        # A length that few sentences have gets a smaller batch.
        enough = math.ceil(sentences / multiple) * multiple
        rows = min(rows_per_batch(batch_tokens, size, mesh.num_devices), enough)
        shapes.append((rows, *([size] * sides)))
    return batching.Buckets(lengths, shapes)


class Translator:
    """Beam search over sentences on the device: one compiled program for each shape of batch, and
    one read from the device for all sentences.

    Args:
        config: with lengths, batch_tokens, beam, length_penalty and workers.
    """

    def __init__(self, model: Transformer, mesh: Mesh, config: Any):
        self.model = model
        self.mesh = mesh
        self.config = config
        self._loop = None  # on plain PyTorch the search has a loop of its own, in Python
        if mesh.compiles:
            from train.common.xla.while_loop import WhileLoop

            body = partial(beam_search.step, model, length_penalty=config.length_penalty)
            self._loop = WhileLoop(body, model)
        self._step = device.compiled(self.translate_step, mesh, max_graphs=MAX_SHAPES)

    def translate_step(self, model: Transformer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the best hypothesis of each row of batch["source"] [B, S], on all devices and so
        on all hosts."""
        source = batch["source"]
        limit = ((source != PAD).sum(1) * MAX_LENGTH_A + MAX_LENGTH_B).to(torch.int32)
        longest = int(source.shape[1] * MAX_LENGTH_A + MAX_LENGTH_B)
        longest = min(longest, model.arch.max_positions - 1)
        with self.mesh.autocast():
            tokens, scores = beam_search.search(
                model,
                source,
                limit.clamp(max=longest),
                self.config.beam,
                longest + 1,  # EOS
                self.config.length_penalty,
                self._loop,
            )

        # Copies: a slice would keep all hypotheses as results of the program.
        best = {"tokens": tokens[:, 0].clone(), "score": scores[:, 0].clone()}
        return {name: device.whole_batch(tensor, self.mesh) for name, tensor in best.items()}

    def __call__(self, sentences: Any, unknown_word: str = "<unk>") -> list[str]:
        """Returns the translations of sentences, a data set of data/wmt.py, in its order.

        An empty sentence has an empty translation. It is in no batch, so it cannot change the
        others. `unknown_word` is written for words that are not in the dictionary.
        """
        lines = [""] * len(sentences)
        filled = np.flatnonzero(sentences.lengths[:, 0] > 1)  # those with more than EOS
        if not len(filled):
            return lines
        decode = sentences.decode
        if len(filled) < len(sentences):
            sentences = wmt.Chosen(sentences, filled)

        was_training = self.model.training
        self.model.eval()
        plan = evaluation_plan(
            sentences.lengths,
            self.config.lengths,
            self.config.batch_tokens // self.config.beam,  # a row for each hypothesis
            self.model.arch.max_positions,
            self.mesh,
            numbers=filled,
        )
        loader = loading.parallel_loader(
            sentences, plan, self.mesh, train=False, workers=self.config.workers
        )
        with loader:
            tokens_on_device = [self._step(self.model, batch)["tokens"] for batch in loader]
        self.model.train(was_training)

        tokens_of_batches = device.read(tokens_on_device)
        batches = plan.epoch(rng=None)  # without a generator: in the loader's order
        for tokens, (indices, _) in zip(tokens_of_batches, batches, strict=True):
            for index, ids in zip(indices.tolist(), tokens.numpy(), strict=True):
                if index >= 0:  # not a row of padding
                    lines[filled[index]] = decode(ids, unknown_word)
        return lines


class Bleu:
    """sacrebleu's BLEU of a split's translations, with the tokenizer of its target language or
    another.

    Unknown words become two different symbols in a translation and in a reference, so that they
    never match, as in fairseq's training (`_inference_with_bleu` of its translation task).

    The constructor raises InputError where BLEU cannot be computed: construct one before step 1.

    Attributes:
        references: the split's target sentences.
        unknown_word: what a translation has for a word that is not in the dictionary.
        notes: what the user should know of the tokenizer and the references, a sentence each.
    """

    def __init__(self, pairs: wmt.TranslationPairs, tokenizer: str = ""):
        scoring = languages.scoring(pairs.target_language, tokenizer)
        self.split = pairs.split
        self.unknown_word = "UNKNOWNTOKENINHYP"
        unknown_in_reference = "UNKNOWNTOKENINREF"
        if scoring.tokenizer in SPLIT_WORDS:  # these two would have pieces in common
            self.unknown_word = "\ue000"
            unknown_in_reference = "\ue001"
        self._unknown_words = (self.unknown_word, unknown_in_reference)
        self.references = pairs.references(unknown_in_reference)

        self.notes = [scoring.note] if scoring.note else []
        lacking = sum(unknown_in_reference in line for line in self.references)
        if lacking:
            self.notes.append(
                f"{lacking:,} of {len(self.references):,} references of the split {pairs.split} "
                "have unknown words, which match nothing; put the original text into the folder "
                f"as {pairs.split}.{pairs.target_language} for BLEU on it"
            )
        self._metric = _open_metric(scoring, pairs.target_language, self.references[:1])

    @property
    def signature(self) -> str:
        """sacrebleu's signature: how the number was computed."""
        return str(self._metric.get_signature())

    def __call__(self, hypotheses: list[str], mesh: Mesh) -> float:
        """Returns BLEU of translations, in the split's order; prints it, and the first of them."""
        score = self._metric.corpus_score(hypotheses, [self.references])
        if mesh.main_process:
            print(f"{self.split}: {score} {self.signature}", flush=True)
            first = f"  {hypotheses[0]}\n  {self.references[0]} (reference)"
            for unknown in self._unknown_words:
                first = first.replace(unknown, "<unk>")
            print(first, flush=True)
        return score.score


def _open_metric(scoring: languages.Scoring, language: str, sample: list[str]) -> Any:
    """Returns sacrebleu's BLEU.

    Args:
        language: of the split, for messages.
        sample: sentences to try the tokenizer on: some load it when they are first used.
    Raises:
        InputError: the tokenizer is not installed, or cannot be loaded.
    """
    from sacrebleu.metrics import BLEU

    # What the tokenizers raise: a package is missing, or a download fails, which may even exit.
    unusable = (ImportError, OSError, RuntimeError, ValueError, AssertionError, SystemExit)
    try:
        metric = BLEU(trg_lang=scoring.language, tokenize=scoring.tokenizer)
        metric.corpus_score(sample, [sample])
    except unusable as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"BLEU of the target language {language} cannot be computed: "
            f"the tokenizer {scoring.tokenizer} says {reason!r}; "
            "install what is missing, or give --bleu-tokenizer char for BLEU of characters"
        ) from error
    return metric


@dataclass(frozen=True)
class Export:
    """An export, or files of fairseq, as they are read.

    Attributes:
        folder: path or URL.
        path: of its checkpoint.
        settings: of fairseq, and of train/transformer.py: "pieces", "precision".
        weights: by fairseq's names, on the host.
    """

    folder: str
    path: str
    settings: dict[str, Any]
    weights: dict[str, Tensor]


def read_export(folder: str) -> Export:
    """Reads an export or files of fairseq in a folder or at a URL.

    Raises:
        InputError: there is no checkpoint, or it cannot be read.
    """
    path = f"{folder.rstrip('/')}/model.pt"
    settings, weights = fairseq.read_checkpoint(files.read_file(path), path)
    return Export(folder, path, settings, weights)


def load(folder: str, mesh: Mesh, pieces: str = "") -> tuple[Transformer, wmt.Codec]:
    """Returns `restore` of what `read_export` reads."""
    return restore(read_export(folder), mesh, pieces)


def restore(export: Export, mesh: Mesh, pieces: str = "") -> tuple[Transformer, wmt.Codec]:
    """Returns the model, on the device, and the codec, which turns text into its tokens and back.

    Args:
        pieces: see wmt.Codec; "": what the export says, if it does.
    Raises:
        InputError: files are missing, or do not belong together.
    """
    # For the whole process: how layers are written. Clamped attention weights compile to faster
    # programs, but some versions of the TPU's compiler crash on them (docs/tpu.md).
    layers.use_forms(clamp_weights=not mesh.safe_forms)
    settings = export.settings
    weights = export.weights
    path = export.path
    source_language = settings.get("source_lang")
    target_language = settings.get("target_lang")
    if source_language is None or target_language is None:
        raise InputError(
            f"{path} does not say its languages: its settings have no source_lang and target_lang"
        )

    pieces = pieces or settings.get("pieces", "")
    if pieces not in PIECES:  # of another version's export
        pieces = ""
    codec = wmt.Codec(files.local_folder(export.folder), source_language, target_language, pieces)
    model = Transformer(
        fairseq.architecture(settings, weights, path),
        len(codec.source_dictionary),
        len(codec.target_dictionary),
    )
    fairseq.load_weights(model, weights, path)
    return device.to_device(model, mesh).eval(), codec


def validate(config: Config) -> None:
    """Raises InputError where a value is outside its range."""
    if not config.model_dir:
        raise InputError(
            "--model-dir is missing: give the folder of an export, such as runs/<name>/export"
        )
    cli.at_least(config, 1, "batch_tokens", "beam")
    rising = list(config.lengths) == sorted(set(config.lengths))
    if not rising or min(config.lengths, default=2) < 2:
        raise InputError(f"--lengths are {config.lengths}; they must rise and be at least 2")


def read_input(mesh: Mesh) -> list[str]:
    """Returns the lines of the standard input.

    Raises:
        InputError: it is not UTF-8, or not the same on all hosts of a pod.
    """
    content = sys.stdin.buffer.read()
    fingerprints = device.over_hosts(mesh, zlib.crc32(content))
    if fingerprints.low != fingerprints.high:
        raise InputError(
            f"the {mesh.process_count} hosts have different lines on their standard inputs; "
            "translation is for one host: "
            "run it on a TPU with one, or give all of them the same lines"
        )

    try:
        text = content.decode("utf-8-sig")  # Windows' editors begin with a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"the input is not UTF-8 (byte {error.start}); convert it") from error
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def main(config: Config) -> None:
    """Reads lines from the standard input and writes their translations to the standard output, in
    the same order."""
    validate(config)
    export = read_export(config.model_dir)
    exported = export.settings.get("precision", "")
    chosen = precision.choose(config.precision, exported, config.model_dir)
    mesh = device.setup(0, chosen, config.strict, config.device, safe_forms=config.safe_forms)
    if mesh.parts > 1:
        raise InputError(f"text is translated by one process, not {mesh.parts}: leave out torchrun")
    model, codec = restore(export, mesh, config.pieces)
    del export  # its weights are on the device now
    # The property raises InputError where the dictionary does not show what its pieces are: here
    # before any input is read, else only after the translation.
    _ = codec.pieces

    lines = read_input(mesh)
    sentences = codec.sentences(lines)
    if sentences.unknown_share > UNKNOWN_SHARE and mesh.main_process:
        reason = ""
        if not codec.tokenizer:
            reason = ": the folder has no tokenizer, so lines must be split as its text was"
        print(
            f"warning: {sentences.unknown_share:.0%} of the words of the input "
            f"are not in the dictionary{reason}",
            file=sys.stderr,
            flush=True,
        )

    translations = Translator(model, mesh, config)(sentences)
    if mesh.main_process:
        sys.stdout.writelines(f"{line}\n" for line in translations)


if __name__ == "__main__":
    cli.run(main, {"text": ("reads lines from the standard input", Config())})
