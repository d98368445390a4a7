"""Translates text with a trained Transformer: one sentence a line in, one a line out.

model     the export of train/transformer.py (runs/<name>/export), or a folder with a checkpoint of fairseq as model.pt
          and dict.<language>.txt of both languages
run       make translate MODEL_DIR=runs/<name>/export < in.en > out.de
          python -m train.translate text --model-dir runs/<name>/export < in.en > out.de
Python    load(folder, mesh) makes the model; Translator(model, mesh, config)(text) translates
"""

if (
    __name__ == "__main__" and not __package__
):  # by its path, from which the imports below are not found
    raise SystemExit(
        "error: in the project's folder run it as a module: python -m train.translate text"
    )

import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data import batching, languages, packing, wmt
from data.fairseq_format import PIECES
from errors import InputError
from models import beam_search, fairseq, layers
from models.transformer import PAD, Transformer
from train.common import checkpoint, cli, device, files, loading


@dataclass(frozen=True)
class Config:
    model_dir: str = ""  # folder or URL with model.pt, the dictionaries and the tokenizer
    lengths: tuple[int, ...] = (16, 32, 64)  # tokens: a compiled shape each; then they double
    batch_tokens: int = 16_384  # tokens of a batch: batch_tokens / (L * beam) sentences of length L
    beam: int = 4  # hypotheses per sentence
    length_penalty: float = 0.6  # exponent of the length that divides a hypothesis' log-probability
    precision: Literal["bfloat16", "float32", "fast_float32"] = "bfloat16"  # train/common/device.py
    device: Literal["xla", "cpu", "cuda"] = "xla"  # xla: a TPU or XLA on CPUs; else plain PyTorch
    pieces: Literal["", *PIECES] = ""  # a dictionary's symbols; "": by the export or their marks
    workers: int = 0  # processes that make batches
    strict: bool = True  # a recompilation or a host fall-back stops the run
    safe_forms: bool = False  # slower forms for a TPU whose compiler crashes: docs/tpu.md


MAX_LENGTH_A, MAX_LENGTH_B = 1.2, 10  # a translation has at most a * (source tokens) + b words
ROWS_MULTIPLE = (
    8  # batches divide by it and by the devices: on 1, 2, 4 and 8 of them they are the same
)
AUTO_SHAPES, AUTO_LONGEST = (
    4,
    256,
)  # of a training plan without --lengths: shapes, and tokens of the longest
UNKNOWN_SHARE = 0.2  # of the words of an input, from which on a line says it
SPLIT_WORDS = ("char", "spm", "flores101", "flores200")  # tokenizers of sacrebleu that divide words
MAX_SHAPES = 16  # compiled shapes of evaluation and translation: lengths, and what is left over when rows are few


def rows(batch_tokens: int, length: int, devices: int = 1) -> int:
    """Rows of a batch of sentences of this length."""
    multiple = math.lcm(ROWS_MULTIPLE, devices)
    return max(batch_tokens // length // multiple, 1) * multiple


def training_plan(pairs, config, devices: int = 1) -> batching.Buckets | packing.Packed:
    """Returns which pairs share a training batch, and the batches' shapes."""
    lengths = config.lengths
    if not lengths:
        usual = pairs.lengths[pairs.lengths.max(1) <= AUTO_LONGEST]
        if not len(usual):
            raise InputError(
                f"{config.data} has no pair of at most {AUTO_LONGEST} tokens a side; give --lengths"
            )
        lengths = [length for _, length, _ in packing.propose_shapes(usual, 2**30, AUTO_SHAPES)]
    shapes = [(rows(config.batch_tokens, length, devices), length, length) for length in lengths]
    if config.pack:
        return packing.pack(pairs.lengths, shapes[-1], config.seed)
    return batching.Buckets(pairs.lengths, shapes)


def evaluation_plan(
    lengths: np.ndarray,
    sizes: Sequence[int],
    batch_tokens: int,
    max_positions: int,
    mesh: device.Mesh,
    split: str = "",
    numbers: np.ndarray | None = None,
) -> batching.Buckets:
    """Batches that hold every sentence, however long.

    Args:
        lengths: tokens of each example, [n, k].
        sizes: lengths of the batches; beyond the last they double.
        batch_tokens: places of a batch on each side.
        max_positions: tokens of a sentence that the model takes.
        split: what the sentences are, for messages.
        numbers: of the sentences in what the user gave, from 0, for messages; by default their
            order.
    Raises:
        InputError: a sentence is longer than the model's positions.
    """
    longest = lengths.max(1)
    if longest.max() > max_positions:
        number = int(longest.argmax())
        shown = number if numbers is None else int(numbers[number])
        which = f"sentence {shown + 1}{f' of the split {split}' if split else ''}"
        raise InputError(
            f"{which} has {longest[number]} tokens; the model takes {max_positions}: cut it"
        )
    sizes = [*sizes] or [32]
    while sizes[-1] < longest.max():
        sizes.append(min(2 * sizes[-1], max_positions))
    shapes = []
    for shorter, size in zip([0, *sizes], sizes, strict=False):
        sentences = int(((longest > shorter) & (longest <= size)).sum())
        if sentences:  # no more rows than there are sentences
            multiple = math.lcm(ROWS_MULTIPLE, mesh.num_devices)
            few = -(-sentences // multiple) * multiple
            shapes.append(
                (min(rows(batch_tokens, size, mesh.num_devices), few), *(size,) * lengths.shape[1])
            )
    return batching.Buckets(lengths, shapes)


class Translator:
    """Beam search over sentences on the device: one compiled program a shape of batch, one read in
    all.

    Args:
        config: with lengths, batch_tokens, beam, length_penalty and workers.
    """

    def __init__(self, model: Transformer, mesh: device.Mesh, config):
        self.model, self.mesh, self.config = model, mesh, config
        self._loop = None  # on plain PyTorch the search's own loop in Python
        if mesh.compiles:
            from train.common.xla.while_loop import WhileLoop

            self._loop = WhileLoop(
                partial(beam_search.step, model, length_penalty=config.length_penalty), model
            )
        self._step = device.compiled(self.translate_step, mesh, MAX_SHAPES)

    def translate_step(self, model: Transformer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the best hypothesis of each row of batch["source"] [B, S], on every device and so on every host."""
        source, config = batch["source"], self.config
        limit = ((source != PAD).sum(1) * MAX_LENGTH_A + MAX_LENGTH_B).to(torch.int32)
        most = int(source.shape[1] * MAX_LENGTH_A + MAX_LENGTH_B)
        most = min(most, model.arch.max_positions - 1)
        with self.mesh.autocast():
            tokens, scores = beam_search.search(
                model,
                source,
                limit.clamp(max=most),
                config.beam,
                most + 1,
                config.length_penalty,
                self._loop,
            )
        # Copies: a slice would keep all hypotheses as results of the program.
        best = {"tokens": tokens[:, 0].clone(), "score": scores[:, 0].clone()}
        for tensor in best.values():
            device.replicate(tensor, self.mesh)
        return best

    def __call__(self, sentences, unknown: str = "<unk>") -> list[str]:
        """Returns the translations of sentences, a data set of data/wmt.py, in its order.

        An empty sentence has an empty translation. It is in no batch, so that the others are
        translated as without it. `unknown` is written for words that are not in the dictionary.
        """
        lines = [""] * len(sentences)
        there = np.flatnonzero(sentences.lengths[:, 0] > 1)  # more than EOS
        if not len(there):
            return lines
        decode = sentences.decode
        if len(there) < len(sentences):
            sentences = wmt.Chosen(sentences, there)
        training = self.model.training
        self.model.eval()
        lengths = sentences.lengths
        places = self.config.batch_tokens // self.config.beam
        positions = self.model.arch.max_positions
        plan = evaluation_plan(
            lengths, self.config.lengths, places, positions, self.mesh, numbers=there
        )
        with loading.parallel_loader(
            sentences, plan, self.mesh, train=False, workers=self.config.workers
        ) as loader:
            best = {
                str(number): self._step(self.model, batch)["tokens"]
                for number, batch in enumerate(loader)
            }
        self.model.train(training)
        tokens = checkpoint.to_host(best)
        for number, (indices, _) in enumerate(plan.epoch(None)):
            for index, ids in zip(indices.tolist(), tokens[str(number)].numpy(), strict=True):
                if index >= 0:
                    lines[there[index]] = decode(ids, unknown)
        return lines


class Bleu:
    """sacrebleu's BLEU of a split's translations, with the tokenizer of its target language or
    another.

    Unknown words are written as fairseq's training writes them (`_inference_with_bleu` of its
    translation task): those of a translation and those of a reference are words that match nothing.

    Attributes:
        references: the split's target sentences.
        unknown: what a translation has for a word that is not in the dictionary.
        notes: what the user should know of the tokenizer and the references, a sentence each.

    Raises InputError where it cannot be computed: call it before step 1.
    """

    def __init__(self, pairs, tokenizer: str = ""):
        from sacrebleu.metrics import BLEU

        scoring = languages.scoring(pairs.target_language, tokenizer)
        self.split = pairs.split
        self.unknown, of_reference = "UNKNOWNTOKENINHYP", "UNKNOWNTOKENINREF"
        if scoring.tokenizer in SPLIT_WORDS:  # these two would have pieces in common
            self.unknown, of_reference = "\ue000", "\ue001"
        self.references = pairs.references(of_reference)
        self._shown = (self.unknown, of_reference)
        self.notes = [scoring.note] if scoring.note else []
        lacking = sum(of_reference in line for line in self.references)
        if lacking:
            path = f"{pairs.split}.{pairs.target_language}"
            self.notes.append(
                f"{lacking:,} of {len(self.references):,} references of the split {pairs.split} have unknown words, "
                f"which match nothing; BLEU is of the whole text where that lies in the folder as {path}"
            )
        try:
            self._metric = BLEU(trg_lang=scoring.language, tokenize=scoring.tokenizer)
            # Some tokenizers are loaded when they are first used.
            self._metric.corpus_score(self.references[:1], [self.references[:1]])
        except (
            ImportError,
            OSError,
            RuntimeError,
            ValueError,
            AssertionError,
            SystemExit,
        ) as error:
            what = f"BLEU of the target language {pairs.target_language} cannot be computed: the tokenizer "
            what += f"{scoring.tokenizer} says {' '.join(str(error).split())!r}"
            remedy = "install what is missing, or give --bleu-tokenizer char for BLEU of characters"
            raise InputError(f"{what}; {remedy}") from error

    @property
    def signature(self) -> str:
        """sacrebleu's, which says how the number was computed."""
        return str(self._metric.get_signature())

    def __call__(self, hypotheses: list[str], mesh: device.Mesh) -> float:
        """Returns BLEU of translations, in the split's order; prints it, and the first of them."""
        score = self._metric.corpus_score(hypotheses, [self.references])
        if mesh.main_process:
            print(f"{self.split}: {score} {self.signature}", flush=True)
            first = f"  {hypotheses[0]}\n  {self.references[0]} (reference)"
            for unknown in self._shown:
                first = first.replace(unknown, "<unk>")
            print(first, flush=True)
        return score.score


def load(folder: str, mesh: device.Mesh, pieces: str = "") -> tuple[Transformer, wmt.Codec]:
    """Returns (model on the device, what turns text into its tokens and back) from an export or
    files of fairseq.

    Args:
        folder: path or URL.
        pieces: see wmt.Codec; "": what the export says, if it does.
    Raises:
        InputError: files are missing, or do not belong together.
    """
    layers.use_forms(clamp_weights=not mesh.safe_forms)
    path = f"{folder.rstrip('/')}/model.pt"
    settings, weights = fairseq.read_checkpoint(files.read_file(path), path)
    settled = [settings.get("source_lang"), settings.get("target_lang")]
    if None in settled:
        raise InputError(
            f"{path} does not say its languages: its settings have no source_lang and target_lang"
        )
    pieces = pieces or settings.get("pieces", "")
    text = wmt.Codec(files.local_folder(folder), *settled, pieces if pieces in PIECES else "")
    model = Transformer(
        fairseq.architecture(settings, weights, path),
        len(text.source_dictionary),
        len(text.target_dictionary),
    )
    fairseq.load_weights(model, weights, path)
    return device.to_device(model, mesh).eval(), text


def main(config: Config) -> None:
    """Reads lines from the standard input and writes their translations to the standard output, in the same order."""
    if not config.model_dir:
        raise InputError(
            "--model-dir is missing: give the folder of an export, such as runs/<name>/export"
        )
    for field in ("batch_tokens", "beam"):
        if getattr(config, field) < 1:
            raise InputError(
                f"--{field.replace('_', '-')} is {getattr(config, field)}; it must be at least 1"
            )
    if list(config.lengths) != sorted(set(config.lengths)) or min(config.lengths, default=2) < 2:
        raise InputError(f"--lengths are {config.lengths}; they must rise and be at least 2")
    mesh = device.setup(
        0, config.precision, config.strict, config.device, safe_forms=config.safe_forms
    )
    model, text = load(config.model_dir, mesh, config.pieces)
    _ = text.pieces  # a dictionary of which that cannot be told is refused now
    content = sys.stdin.buffer.read()
    low, high, _ = device.over_hosts(mesh, zlib.crc32(content))
    if low != high:
        raise InputError(
            f"the {mesh.process_count} hosts have different lines on their standard inputs; translation is for one "
            "host: run it on a TPU with one, or give all of them the same lines"
        )
    try:
        lines = content.decode("utf-8-sig").split(
            "\n"
        )  # Windows' editors begin with a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"the input is not UTF-8 (byte {error.start}); convert it") from error
    lines = lines[:-1] if lines[-1] == "" else lines
    sentences = text.sentences(lines)
    if sentences.unknown_share > UNKNOWN_SHARE and mesh.main_process:
        split = (
            ""
            if text.tokenizer
            else ": the folder has no tokenizer, so lines must be split as its text was"
        )
        share = f"{sentences.unknown_share:.0%} of the words of the input are not in the dictionary"
        print(f"warning: {share}{split}", file=sys.stderr, flush=True)
    translations = Translator(model, mesh, config)(sentences)
    if mesh.main_process:
        sys.stdout.writelines(f"{line}\n" for line in translations)


if __name__ == "__main__":
    cli.run(main, {"text": ("reads lines from the standard input", Config())})
