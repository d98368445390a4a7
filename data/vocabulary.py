"""Vocabularies of encoders, learnt from text: tokenizers as transformers has them for BERT,
DistilBERT, RoBERTa, XLNet.

    tokenizer = learn(lines, "bert", 30_522)
    tokenizer.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)  # the same, without a network

What is learnt are the pieces; the rest (how text is normalised and split, special tokens and where
they stand, the side of padding) is that of the model's published vocabulary:

    bert        WordPiece of lower case, without accents; [PAD] 0 [UNK] 1 [CLS] 2 [SEP] 3 [MASK] 4
    distilbert  the same
    roberta     byte-level byte-pair encoding; <s> 0 <pad> 1 </s> 2 <unk> 3, and <mask> as the last
    xlnet       Unigram with ▁ for a space; <unk> 0 <s> 1 </s> 2 <cls> 3 <sep> 4 <pad> 5 <mask> 6
                <eod> 7 <eop> 8
"""

import itertools
import json
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
VARYING = ("xlnet",)  # the same lines may give another vocabulary in the next run, see `learn`
LONGEST = (
    512  # tokens of a text: positions of the published models, and what XLNet was pretrained with
)
MOST_CHARACTERS = 1000  # of the alphabet, as in BertWordPieceTokenizer of tokenizers
BATCH = 1000  # lines given to the trainer at once
LONGEST_WORD = 1000  # characters of a word that is learnt from, as in clean-corpus-n.perl of Moses
LONG_WORD = re.compile(rf"\w{{{LONGEST_WORD + 1},}}|[^\w\s]{{{LONGEST_WORD + 1},}}")
IDEOGRAPHS = (
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f"  # each is a word to BERT
)
LONG_WORD_BERT = re.compile(LONG_WORD.pattern.replace(r"\w{", rf"[^\W{IDEOGRAPHS}]{{"))
LONGEST_WORDPIECES = 100  # characters of a word that WordPiece divides; a longer one is [UNK]

BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")  # and <mask>, after all others
XLNET_SPECIALS = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
# Smallest vocabularies: the special tokens, and all 256 bytes or a small alphabet.
SMALLEST = {"bert": 64, "distilbert": 64, "roberta": len(ROBERTA_SPECIALS) + 1 + 256, "xlnet": 64}


def learn(lines: Iterable[str], kind: str, size: int) -> PreTrainedTokenizerBase:
    """Learns a tokenizer for these lines of text. Uses all cores; memory grows with the number of
    different words.

    Words of more than LONGEST_WORD characters (base64, ruled lines) are not learnt from; how many
    is printed. Nor are those that WordPiece takes for [UNK].

    The same lines give the same vocabulary, but for XLNet: the Unigram trainer adds numbers up in
    an order that changes from run to run, so that pieces of almost equal scores may change places.

    Args:
        lines: text, read once; the order counts for nothing.
        kind: one of KINDS.
        size: tokens of the vocabulary, special tokens included. It becomes smaller where the text
            has too few words.

    Raises InputError: an unknown kind, a size too small for it (XLNet's: for the characters of the
    text), no text.
    """
    if kind not in KINDS:
        raise InputError(f"kind is {kind}; expected one of {', '.join(KINDS)}")
    if size < SMALLEST[kind]:
        raise InputError(
            f"the vocabulary size is {size}; expected {SMALLEST[kind]} or more for {kind}"
        )
    lines = short = _ShortWords(
        lines, LONG_WORD_BERT if kind in ("bert", "distilbert") else LONG_WORD
    )
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        raise InputError("there is no text to learn a vocabulary from; expected lines with words")
    tokenizer = _learn(_batches(itertools.chain([first], lines)), kind, size)
    if short.left_out:
        what = f"{short.left_out:,} words of more than {LONGEST_WORD:,} characters"
        print(f"{what} are not learnt from", flush=True)
    return tokenizer


def _learn(batches: Iterator[list[str]], kind: str, size: int) -> PreTrainedTokenizerBase:
    if kind == "roberta":
        vocabulary, merges = _learn_bytes(batches, size)
        mask = AddedToken(
            "<mask>", lstrip=True, special=True
        )  # as published: the mask takes the space before it
        return RobertaTokenizer(
            vocab=vocabulary, merges=merges, mask_token=mask, model_max_length=LONGEST
        )
    if kind == "xlnet":
        return XLNetTokenizer(vocab=_learn_unigrams(batches, size), model_max_length=LONGEST)
    pieces = {piece: number for number, piece in enumerate(_learn_wordpieces(batches, size))}
    return (BertTokenizer if kind == "bert" else DistilBertTokenizer)(
        vocab=pieces, model_max_length=LONGEST
    )


def continues_word(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Returns, as bool [vocabulary], which tokens continue the word of the token before; special
    ones never do.

    WordPiece's have its prefix ("##"); byte-level encoding's have no "Ġ" in front, and
    sentencepiece's no "▁". (So punctuation after a word belongs to the word in these two, and the
    first word of a text, which has no space in front, is no beginning in byte-level encoding: who
    has several texts in a row knows where each begins.)

    Raises InputError: a tokenizer of another sort.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    prefix = model.get("continuing_subword_prefix")
    if prefix:
        continues = np.array([token.startswith(prefix) for token in tokens])
    else:
        sign = next(
            (sign for sign in "Ġ▁" if any(token.startswith(sign) for token in tokens)), None
        )
        if sign is None:
            what = f"{type(tokenizer).__name__} marks neither beginnings nor continuations of words"
            raise InputError(
                f"{what}; expected WordPiece (##), byte-level (Ġ) or sentencepiece (▁) tokens"
            )
        continues = np.array([not token.startswith(sign) for token in tokens])
    continues[tokenizer.all_special_ids] = False
    return continues


class _ShortWords:
    """Iterates over lines without their long words, and counts these in `left_out`."""

    def __init__(self, lines: Iterable[str], long_word: re.Pattern):
        self._lines, self._long_word, self.left_out = iter(lines), long_word, 0

    def __iter__(self) -> "_ShortWords":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        if len(line) > LONGEST_WORD:
            line, count = self._long_word.subn(" ", line)
            self.left_out += count
        return line


def _batches(lines: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(itertools.islice(lines, BATCH)):
        yield batch


def _learn_wordpieces(batches: Iterator[list[str]], size: int) -> list[str]:
    """Pieces in the order of their ids.

    The WordPiece trainer of tokenizers gives another vocabulary in every run: it numbers the
    characters within words as a hash map returns them, and the numbers decide between pairs of
    equal counts. Its BPE trainer, which does the same merges, sorts its characters. So that one is
    used, on words that a sign begins: "▁the" becomes "the", and "ing", "##ing".
    """
    bert = BertTokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = bert.normalizer
    sign = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    unknown = pre_tokenizers.Split(Regex(rf"\S{{{LONGEST_WORDPIECES + 1},}}"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([bert.pre_tokenizer, unknown, sign])
    # A character can take two places (a, ##a), and half of the vocabulary should be left for longer
    # pieces.
    alphabet = min(MOST_CHARACTERS, size // 4)
    # More than `size`, since a merge such as "▁a" gives no piece that the characters have not
    # given.
    trainer = trainers.BpeTrainer(
        vocab_size=size + alphabet, min_frequency=2, limit_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(batches, trainer)
    vocabulary = tokenizer.get_vocab()
    learnt = sorted(vocabulary, key=vocabulary.get)
    characters = sorted(piece for piece in learnt if len(piece) == 1 and piece != "▁")
    # Signs that are always words of their own never continue one.
    within = [
        f"##{c}" for c in characters if len(bert.pre_tokenizer.pre_tokenize_str(f"a{c}")) == 1
    ]
    longer = [
        piece[1:] if piece.startswith("▁") else f"##{piece}" for piece in learnt if len(piece) > 1
    ]
    return list(dict.fromkeys([*BERT_SPECIALS, *characters, *within, *longer]))[:size]


def _learn_bytes(
    batches: Iterator[list[str]], size: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the ids of the pieces, and the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = RobertaTokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        min_frequency=2,
        special_tokens=list(ROBERTA_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(batches, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    return learnt["vocab"] | {"<mask>": len(learnt["vocab"])}, [
        tuple(merge) for merge in learnt["merges"]
    ]


def _learn_unigrams(batches: Iterator[list[str]], size: int) -> list[tuple[str, float]]:
    """Returns the pieces with their logarithmic probabilities, in the order of their ids."""
    xlnet = XLNetTokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = xlnet.normalizer, xlnet.pre_tokenizer
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
        what = f"the vocabulary size is {size}, and the text has more different characters"
        raise InputError(
            f"{what}; expected a larger vocabulary, or text without rare characters"
        ) from error
    learnt = json.loads(tokenizer.to_str())["model"]["vocab"]
    pieces = [(piece, round(score, 4)) for piece, score in learnt if piece not in XLNET_SPECIALS]
    pieces.sort(key=lambda pair: (-pair[1], pair[0]))
    # The special tokens are no choice for text that spells one, as long as its characters are
    # pieces.
    never = pieces[-1][1] * 100
    return [(special, never) for special in XLNET_SPECIALS] + pieces
