"""Learns the vocabularies of encoders from text.

The result is transformers' tokenizer of a BERT, DistilBERT, RoBERTa or XLNet:

    tokenizer = learn(lines, "bert", 30_522)
    tokenizer.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)  # the same, without a network

Only the pieces are learnt. The rest is that of the model's published vocabulary: how text is
normalised and split, the special tokens and where they stand, the side of padding.

    bert        WordPiece of lower case, without accents; [PAD] 0 [UNK] 1 [CLS] 2 [SEP] 3 [MASK] 4
    distilbert  the same
    roberta     byte-level byte-pair encoding; <s> 0 <pad> 1 </s> 2 <unk> 3, and <mask> as the last
    xlnet       Unigram with ▁ for a space; <unk> 0 <s> 1 </s> 2 <cls> 3 <sep> 4 <pad> 5 <mask> 6
                <eod> 7 <eop> 8
"""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertTokenizer,
    DistilBertTokenizer,
    PreTrainedTokenizerBase,
    RobertaTokenizer,
    XLNetTokenizer,
)

from errors import InputError

__all__ = ["KINDS", "continues_word", "learn"]

KINDS = ("bert", "distilbert", "roberta", "xlnet")
PARALLELISM = "TOKENIZERS_PARALLELISM"  # the variable that tokenizers reads
# In a text: positions of the published models, and what XLNet was pretrained with.
MAX_TOKENS = 512
MOST_CHARACTERS = 1000  # of the alphabet, as in BertWordPieceTokenizer of tokenizers
BATCH = 1000  # lines given to the trainer at once

# Characters of a word that is learnt from, as in clean-corpus-n.perl of Moses.
LONGEST_WORD = 1000
# Characters of a word that WordPiece divides (its max_input_chars_per_word); a longer one is [UNK].
MAX_INPUT_CHARS_PER_WORD = 100


def _long_word(letter: str) -> re.Pattern:
    """Returns the pattern of more than LONGEST_WORD letters, or other signs, in a row.

    Args:
        letter: pattern of one letter of a word.
    """
    too_many = f"{{{LONGEST_WORD + 1},}}"
    return re.compile(rf"{letter}{too_many}|[^\w\s]{too_many}")


LONG_WORD = _long_word(r"\w")
# Each ideograph is a word to BERT, however many stand side by side.
IDEOGRAPHS = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f"
LONG_WORD_BERT = _long_word(rf"[^\W{IDEOGRAPHS}]")
UNIGRAM_STEP = 1e-4  # of scores: Unigram's trainer counts characters without a piece up by it

BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")  # and <mask>, after all others
XLNET_SPECIALS = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
# Smallest vocabularies: the special tokens, and all 256 bytes or a small alphabet.
SMALLEST = {"bert": 64, "distilbert": 64, "roberta": len(ROBERTA_SPECIALS) + 1 + 256, "xlnet": 64}


def learn(
    lines: Iterable[str], kind: str, size: int, repeatable: bool = False
) -> PreTrainedTokenizerBase:
    """Learns a tokenizer from lines of text.

    Uses all cores; memory grows with the number of different words.

    Words of more than LONGEST_WORD characters (base64, ruled lines) are not learnt from; how many
    there are is printed. Nor is WordPiece learnt from words that it would encode as [UNK].

    The same lines give the same vocabulary, but for XLNet: the Unigram trainer adds numbers up in
    an order that changes from run to run, so that pieces of almost equal scores may change places.
    On one core (`repeatable`) it does not.

    Args:
        lines: text, read once; their order has no effect.
        kind: one of KINDS.
        size: tokens of the vocabulary, special tokens included. It becomes smaller where the text
            has too few words.
        repeatable: learns on one core, so that XLNet's is the same in each run, too.

    Raises InputError: an unknown kind, a size too small for it (XLNet's: for the characters of the
    text), no text.
    """
    if kind not in KINDS:
        raise InputError(f"kind is {kind}; expected one of {', '.join(KINDS)}")
    if size < SMALLEST[kind]:
        raise InputError(
            f"the vocabulary size is {size}; expected {SMALLEST[kind]} or more for {kind}"
        )

    long_word = LONG_WORD_BERT if kind in ("bert", "distilbert") else LONG_WORD
    short_words = _ShortWords(lines, long_word)
    first = next((line for line in short_words if line.strip()), None)
    if first is None:
        raise InputError("there is no text to learn a vocabulary from; expected lines with words")

    batches = _batches(itertools.chain([first], short_words))
    with _one_core() if repeatable else contextlib.nullcontext():
        tokenizer = _learn(batches, kind, size)
    if short_words.left_out:
        print(
            f"{short_words.left_out:,} words of more than {LONGEST_WORD:,} characters "
            "are not learnt from",
            flush=True,
        )
    return tokenizer


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """Makes tokenizers use one core, by its own variable, which it asks at each use."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = before


def _learn(batches: Iterator[list[str]], kind: str, size: int) -> PreTrainedTokenizerBase:
    """Learns a tokenizer from batches of lines, see `learn`."""
    if kind == "roberta":
        vocabulary, merges = _learn_bytes(batches, size)
        # As in the published vocabulary: the mask takes the space before it.
        mask = AddedToken("<mask>", lstrip=True, special=True)
        return RobertaTokenizer(
            vocab=vocabulary, merges=merges, mask_token=mask, model_max_length=MAX_TOKENS
        )

    if kind == "xlnet":
        scores = _learn_unigrams(batches, size)
        return XLNetTokenizer(vocab=scores, model_max_length=MAX_TOKENS)

    pieces = _learn_wordpieces(batches, size)
    ids = {piece: number for number, piece in enumerate(pieces)}
    tokenizer_class = BertTokenizer if kind == "bert" else DistilBertTokenizer
    return tokenizer_class(vocab=ids, model_max_length=MAX_TOKENS)


def continues_word(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Returns which tokens continue the word of the token before, bool [vocabulary].

    Special tokens never do. Of WordPiece's tokens those do that have its prefix ("##"). Of
    byte-level tokens those do that have no "Ġ" in front, and of sentencepiece's those without "▁";
    so in these two, punctuation after a word is a part of it. A byte-level token that begins a text
    has no "Ġ" either, and seems to continue a word: a caller that joins texts must know where each
    of them begins.

    Raises InputError: a tokenizer of another sort.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    prefix = model.get("continuing_subword_prefix")
    if prefix:
        continues = np.array([token.startswith(prefix) for token in tokens])
    else:
        sign = _sign_of_beginning(tokens)
        if sign is None:
            raise InputError(
                f"{type(tokenizer).__name__} marks neither beginnings nor continuations of words; "
                "expected WordPiece (##), byte-level (Ġ) or sentencepiece (▁) tokens"
            )
        continues = np.array([not token.startswith(sign) for token in tokens])
    continues[tokenizer.all_special_ids] = False
    return continues


def _sign_of_beginning(tokens: list[str]) -> str | None:
    """Returns the sign in front of tokens that begin a word; None where no token has one."""
    for sign in "Ġ▁":
        if any(token.startswith(sign) for token in tokens):
            return sign
    return None


class _ShortWords:
    """Iterates over lines without their long words, and counts these in `left_out`."""

    def __init__(self, lines: Iterable[str], long_word: re.Pattern):
        self._lines = iter(lines)
        self._long_word = long_word
        self.left_out = 0

    def __iter__(self) -> "_ShortWords":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        if len(line) > LONGEST_WORD:
            line, count = self._long_word.subn(" ", line)
            self.left_out += count
        return line


def _batches(lines: Iterator[str]) -> Iterator[list[str]]:
    """Yields lists of BATCH lines, the last one of fewer."""
    while batch := list(itertools.islice(lines, BATCH)):
        yield batch


def _learn_wordpieces(batches: Iterator[list[str]], size: int) -> list[str]:
    """Returns the pieces in the order of their ids.

    The WordPiece trainer of tokenizers gives another vocabulary in every run. Between pairs of
    equal counts, the numbers of their characters decide, and it numbers the characters within words
    in the order of a hash map. The BPE trainer of tokenizers makes the same merges, but sorts the
    characters first. So the BPE trainer is used, on words that begin with a sign: "▁the" becomes
    "the", and "ing" becomes "##ing".
    """
    bert = BertTokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = bert.normalizer
    sign = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    # Words that WordPiece would encode as [UNK] are removed.
    too_long = Regex(rf"\S{{{MAX_INPUT_CHARS_PER_WORD + 1},}}")
    without_long_words = pre_tokenizers.Split(too_long, "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [bert.pre_tokenizer, without_long_words, sign]
    )

    # A character may become two pieces (a, ##a), and half of the vocabulary should be left for
    # longer ones.
    alphabet = min(MOST_CHARACTERS, size // 4)
    # More than `size` are learnt, since some give no new piece: "▁a" is "a", which is there.
    trainer = trainers.BpeTrainer(
        vocab_size=size + alphabet, min_frequency=2, limit_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(batches, trainer)

    vocabulary = tokenizer.get_vocab()
    learnt = sorted(vocabulary, key=vocabulary.get)
    characters = []
    longer = []
    for piece in learnt:
        if len(piece) > 1:
            is_beginning = piece.startswith("▁")
            longer.append(piece[1:] if is_beginning else f"##{piece}")
        elif piece != "▁":
            characters.append(piece)
    characters.sort()

    # Signs that are always words of their own never continue one.
    within_words = []
    for character in characters:
        if len(bert.pre_tokenizer.pre_tokenize_str(f"a{character}")) == 1:
            within_words.append(f"##{character}")
    pieces = dict.fromkeys([*BERT_SPECIALS, *characters, *within_words, *longer])  # each once
    return list(pieces)[:size]


def _learn_bytes(
    batches: Iterator[list[str]], size: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the ids of the pieces, and the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = RobertaTokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,  # without <mask>
        min_frequency=2,
        special_tokens=list(ROBERTA_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(batches, trainer)

    learnt = json.loads(tokenizer.to_str())["model"]
    ids = learnt["vocab"] | {"<mask>": len(learnt["vocab"])}
    merges = [tuple(merge) for merge in learnt["merges"]]
    return ids, merges


def _learn_unigrams(batches: Iterator[list[str]], size: int) -> list[tuple[str, float]]:
    """Returns the pieces with their logarithmic probabilities, in the order of their ids."""
    xlnet = XLNetTokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = xlnet.normalizer
    tokenizer.pre_tokenizer = xlnet.pre_tokenizer
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=list(XLNET_SPECIALS),
        unk_token="<unk>",
        show_progress=False,
    )
    try:
        tokenizer.train_from_iterator(batches, trainer)
    except Exception as error:  # tokenizers raises nothing more exact
        if "not large enough" not in str(error):
            raise
        raise InputError(
            f"the vocabulary size is {size}, and the text has more different characters; "
            "expected a larger vocabulary, or text without rare characters"
        ) from error

    learnt = json.loads(tokenizer.to_str())["model"]["vocab"]
    score_of = {piece: score for piece, score in learnt if piece not in XLNET_SPECIALS}
    score_of |= _scores_of_single_characters(score_of)
    pieces = [(piece, round(score, 4)) for piece, score in score_of.items()]

    def likeliest_first(piece_and_score: tuple[str, float]) -> tuple[float, str]:
        piece, score = piece_and_score
        return -score, piece

    pieces.sort(key=likeliest_first)

    # A special token scores so low that text which spells it is always encoded by its characters,
    # as long as these are pieces.
    _, worst_score = pieces[-1]
    special_score = worst_score * 100
    specials = [(special, special_score) for special in XLNET_SPECIALS]
    return specials + pieces


def _scores_of_single_characters(score_of: dict[str, float]) -> dict[str, float]:
    """Returns scores of the characters that are needed but were not learnt as pieces.

    The trainer gives them the lowest score of all, and UNIGRAM_STEP more from one to the next, in
    the order of a hash map, which is another one in each call. Here they have the same scores in
    the order of the characters.
    """
    characters = [piece for piece in score_of if len(piece) == 1]
    characters.sort(key=score_of.get)
    counted_up = characters[:1]
    for character in characters[1:]:
        step = score_of[character] - score_of[counted_up[-1]]
        if step > 1.5 * UNIGRAM_STEP:
            break
        counted_up.append(character)

    scores = [score_of[character] for character in counted_up]
    return dict(zip(sorted(counted_up), scores, strict=True))
