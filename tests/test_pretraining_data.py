"""data/pretraining.py on rows that the tests make: what is masked, how often, and what is never touched."""

import itertools
import pickle

import numpy as np
import pytest
from scipy.stats import ks_2samp
from transformers import BertTokenizer, RobertaTokenizer, XLNetTokenizer

from data.pretraining import MaskedText, PermutedText, segments
from errors import InputError

WORDS, PIECES = 60, 40
PAD, UNK, CLS, SEP, MASK = range(5)  # of the BERT tokenizer below
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FIRST = 5  # its first ordinary token


def bert_tokenizer() -> BertTokenizer:
    """Special tokens 0 to 4, then whole words, then pieces that continue a word."""
    tokens = [*SPECIAL, *(f"w{number}" for number in range(WORDS)), *(f"##p{number}" for number in range(PIECES))]
    return BertTokenizer(vocab={token: number for number, token in enumerate(tokens)})


def xlnet_tokenizer() -> XLNetTokenizer:
    """XLNet's special tokens 0 to 8 (<cls> 3, <sep> 4, <pad> 5), then words, pieces, and two marks."""
    tokens = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    tokens += [f"▁w{number}" for number in range(WORDS)] + [f"p{number}" for number in range(PIECES)] + [".", ","]
    return XLNetTokenizer(vocab=[(token, -1.0) for token in tokens], unk_id=0)


class Rows:
    """Rows given as lists of sentences, each a list of tokens."""

    def __init__(self, tokenizer, length: int, rows: list[list[list[int]]], pairs: bool = False):
        self.tokenizer, self.length, self.pairs = tokenizer, length, pairs
        starts = [np.cumsum([0, *map(len, row[:-1])], dtype=np.int32) for row in rows]
        self.rows = [(np.concatenate(row).astype(np.uint16), at) for row, at in zip(rows, starts, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.rows[index]


def random_rows(tokenizer, length: int, rows: int = 200, pairs: bool = False) -> Rows:
    """Random sentences of 4 to 12 tokens, as many in a row as fit; now and then a document's end ends the row."""
    rng, made = np.random.default_rng(0), [[]]
    ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    while len(made) <= rows:
        sentence = rng.choice(ordinary, rng.integers(4, 13)).tolist()
        if sum(map(len, made[-1])) + len(sentence) > length - 2 - pairs or (len(made[-1]) > 1 and rng.random() < 0.01):
            made.append([])
        made[-1].append(sentence)
    return Rows(tokenizer, length, made[:rows], pairs)


def generator(index: int, epoch: int = 0) -> np.random.Generator:
    """As the loader makes it."""
    return np.random.default_rng((0, epoch, index))


def examples(dataset, epochs: int = 1) -> list[dict[str, np.ndarray]]:
    return [dataset.example(index, generator(index, epoch)) for epoch in range(epochs) for index in range(len(dataset))]


def predicted(example: dict[str, np.ndarray], name: str = "positions") -> np.ndarray:
    """The places of the predictions, or their labels."""
    return example[name][example["weights"] > 0]


def unmasked(example: dict[str, np.ndarray]) -> np.ndarray:
    """The row before it was masked, by the labels."""
    ids = example["input_ids"].copy()
    ids[predicted(example)] = predicted(example, "labels")
    return ids


def test_a_row_is_laid_out_and_its_labels_are_what_was_there_but_for_special_tokens():
    row = [10, SEP, 11, UNK, *range(12, 40), MASK]
    dataset = MaskedText(Rows(bert_tokenizer(), 43, [[row[:12], row[12:]]]), 8, False, False)
    labels = set()
    for example in examples(dataset, epochs=100):
        assert unmasked(example).tolist() == [CLS, *row, SEP] + 8 * [PAD]
        assert example["attention_mask"].tolist() == 35 * [1] + 8 * [0]
        assert not example["token_type_ids"].any()
        count = int(example["weights"].sum())
        assert count in (4, 5)  # 15 % of 30
        assert example["weights"].tolist() == count * [1] + (8 - count) * [0]
        assert (np.diff(predicted(example)) > 0).all()
        assert not example["positions"][count:].any() and not example["labels"][count:].any()
        labels |= {*predicted(example, "labels").tolist()}
    assert labels == {*range(10, 40)}


def test_shapes_and_types_are_fixed_the_generator_decides_and_epochs_differ():
    text, permuted = (random_rows(make(), 64, 20, pairs=True) for make in (bert_tokenizer, xlnet_tokenizer))
    per_token, per_place = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (64,)), (11,)
    masked = {**per_token, "positions": per_place, "labels": per_place}
    for dataset, shapes in (
        (MaskedText(text, 11, True, False), masked),
        (MaskedText(text, 11, True, True), {**masked, "next_sentence": ()}),
        (PermutedText(permuted, 11), {**masked, "order": (64,)}),
    ):
        copy = pickle.loads(pickle.dumps(dataset))
        for first, again, other in zip(examples(dataset), examples(copy), examples(dataset, 2)[20:], strict=True):
            assert all((first[name] == again[name]).all() for name in first)
            assert (first["positions"] != other["positions"]).any()
            assert first.pop("weights").dtype == np.float32
            assert {name: array.shape for name, array in first.items()} == shapes
            assert {array.dtype for array in first.values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize("whole_words", [False, True])
def test_fifteen_percent_are_predicted_and_split_80_10_10(whole_words):
    made = examples(MaskedText(random_rows(bert_tokenizer(), 128), 24, whole_words, False), epochs=5)
    tokens = sum(int(example["attention_mask"].sum()) - 2 for example in made)
    labels = np.concatenate([predicted(example, "labels") for example in made])
    found = np.concatenate([example["input_ids"][predicted(example)] for example in made])
    # About 18,000 predictions: the standard deviation of a share of 80 % is 0.3 %, of 10 % 0.2 %.
    assert len(labels) / tokens == pytest.approx(0.15, abs=0.002)
    masked, kept = found == MASK, found == labels
    random = found[~masked & ~kept]
    # A random token is the one that was there once in 100 times.
    assert masked.mean() == pytest.approx(0.8, abs=0.012)
    assert kept.mean() == pytest.approx(0.101, abs=0.009)
    assert len(random) / len(found) == pytest.approx(0.099, abs=0.009)
    # Any ordinary token, all about as often.
    counts = np.bincount(random, minlength=FIRST + WORDS + PIECES)
    assert not counts[:FIRST].any()
    assert counts[FIRST:].min() > 0 and counts.max() < 4 * counts[FIRST:].mean()
    # Every token of a row is predicted about as often.
    dataset = MaskedText(Rows(bert_tokenizer(), 32, [[[*range(10, 40)]]]), 8, whole_words, False)
    counts = np.bincount(np.concatenate([predicted(one) for one in examples(dataset, epochs=3000)]), minlength=32)
    assert counts[0] == counts[31] == 0
    assert counts[1:31] / 3000 == pytest.approx(np.full(30, 0.15), abs=0.03)  # 4.5 standard deviations


@pytest.mark.parametrize("whole_words", [False, True])
def test_a_row_without_ordinary_tokens_has_no_prediction_and_none_more_than_the_places(whole_words):
    (example,) = examples(MaskedText(Rows(bert_tokenizer(), 8, [[[UNK, UNK]]]), 3, whole_words, False))
    assert not example["weights"].any() and example["input_ids"][:4].tolist() == [CLS, UNK, UNK, SEP]
    text = Rows(bert_tokenizer(), 128, 20 * [[[*range(10, 60), *range(10, 60)]]])  # 15 % would be 15
    for example in examples(MaskedText(text, 6, whole_words, False)):
        assert example["weights"].sum() == 6


def test_whole_words_are_predicted_whole():
    tokenizer, piece = bert_tokenizer(), FIRST + WORDS
    text = random_rows(tokenizer, 64, 100)
    # A row that begins within a word, one with a special token within a word.
    text.rows += Rows(tokenizer, 64, [[[piece, piece, *range(10, 50)]], [[piece, UNK, piece, *range(10, 50)]]]).rows
    partly = apart = 0
    for whole_words in (True, False):
        for number, example in enumerate(examples(MaskedText(text, 12, whole_words, False), epochs=10)):
            chosen, ids = np.isin(np.arange(64), predicted(example)), unmasked(example)
            apart += whole_words and number % 102 == 101 and chosen[1] != chosen[3]
            # A word begins with a whole word, or with a piece after a special token.
            begins = (ids < piece) | np.append(True, ids[:-1] < FIRST)
            words = np.split(chosen, np.flatnonzero(begins)[1:])
            broken = sum(0 < word.sum() < len(word) for word in words)
            assert not (whole_words and broken)
            partly += broken
    assert partly > 1000 and apart  # the other way of masking does break words


def test_a_word_longer_than_the_share_is_skipped():
    word = [10, *[FIRST + WORDS] * 20]
    dataset = MaskedText(Rows(bert_tokenizer(), 40, [[[*word, *range(11, 25)]], [word]]), 8, True, False)
    made = examples(dataset, epochs=50)
    for first, second in zip(made[::2], made[1::2], strict=True):
        # 15 % of 35: 5 or 6 of the other words.
        assert first["weights"].sum() in (5, 6) and predicted(first, "labels").min() > 10
        assert not second["weights"].any()


def test_a_pair_is_a_row_cut_between_sentences_or_has_as_many_tokens_of_another_row():
    text = random_rows(bert_tokenizer(), 128, 500, pairs=True)
    rows = [(row.tolist(), [*starts.tolist(), len(row)]) for row, starts in text.rows]
    spans = {}
    for number, (row, starts) in enumerate(rows):
        spans |= {tuple(row[start:end]): number for start in starts[:-1] for end in starts[1:]}
    found, cuts = [], set()
    for number, example in enumerate(examples(MaskedText(text, 22, False, True), epochs=6)):
        row, starts = rows[number % 500]
        ids = unmasked(example).tolist()
        cut = ids.index(SEP)
        end = ids.index(SEP, cut + 1)
        assert ids[0] == CLS and end <= 127 and not any(ids[end + 1 :])
        assert example["token_type_ids"].tolist() == (cut + 1) * [0] + (end - cut) * [1] + (127 - end) * [0]
        assert example["attention_mask"].tolist() == (end + 1) * [1] + (127 - end) * [0]
        first, second = ids[1:cut], ids[cut + 1 : end]
        assert first == row[: len(first)] and len(first) in starts[1:-1]
        cuts.add(starts.index(len(first)))
        if example["next_sentence"]:
            assert spans[tuple(second)] != number % 500
        else:
            assert first + second == row
        found.append((example["next_sentence"], len(first), len(second), end))
    unrelated, *lengths = np.array(found).T
    assert unrelated.mean() == pytest.approx(0.5, abs=0.03)  # three standard deviations
    assert cuts >= {1, 2, 3, 4, 5}
    for feature in lengths:
        # The greatest distance of the distributions, 1 if a threshold tells all pairs apart; chance gives 0.05.
        assert ks_2samp(feature[unrelated > 0], feature[unrelated == 0]).statistic < 0.07


def test_rows_of_one_sentence_and_sentences_that_are_too_long():
    rows = [[[*range(10, 39)]], [[40]], [[*range(10, 20)], [*range(20, 39)]], [[*range(50, 79)]]]
    text = Rows(bert_tokenizer(), 32, rows, pairs=True)
    for epoch, index in itertools.product(range(50), range(4)):
        first, second, unrelated = segments(text, index, generator(index, epoch))
        assert len(first) and len(second) and len(first) + len(second) <= 29
        assert unrelated or index == 2
        assert index or first.tolist() == [*range(10, 24)]
    # The only other row has nothing that fits: it is cut.
    text = Rows(bert_tokenizer(), 32, [[[*range(10, 30)], [5, 5, 5]], [[*range(40, 69)]]], pairs=True)
    seen = {tuple(second.tolist()) for _, second, unrelated in (segments(text, 0, generator(i)) for i in range(20))}
    assert seen == {(5, 5, 5), tuple(range(40, 49))}


def test_a_permuted_row_is_laid_out():
    first, second = [*range(20, 30)], [*range(30, 45)]
    text = Rows(xlnet_tokenizer(), 32, [[first, second], [[70, 71, 72]]], pairs=True)
    kinds = set()
    for example in examples(PermutedText(text, 6), epochs=50)[::2]:
        ids = example["input_ids"].tolist()
        b = second if 30 in ids else [70, 71, 72]
        kinds.add(len(b))
        padding = 32 - len(first) - len(b) - 3
        assert ids == padding * [5] + first + [4] + b + [4, 3]
        assert example["token_type_ids"].tolist() == padding * [3] + 11 * [0] + (len(b) + 1) * [1] + [2]
        assert example["attention_mask"].tolist() == padding * [0] + (32 - padding) * [1]

        count = int(example["weights"].sum())
        assert count in ((4, 5) if len(b) == 15 else (2, 3))  # a sixth of 28 or 16
        assert example["weights"].tolist() == count * [1] + (6 - count) * [0]
        targets = predicted(example)
        assert (np.diff(targets) > 0).all() and example["positions"][count:].tolist() == (6 - count) * [31]
        assert example["labels"].tolist() == [ids[place] for place in targets] + (6 - count) * [0]
        assert min(ids[place] for place in targets) >= 20  # neither padding nor special

        order = example["order"]
        placed = {*targets.tolist(), 30, 31, padding + 10}
        assert {place for place in range(32) if 0 <= order[place] < 32} == placed
        assert len({int(order[place]) for place in placed}) == len(placed)
        assert (order[:padding] == 32).all()
        assert (np.delete(order, sorted(placed))[padding:] == -1).all()
    assert kinds == {3, 15}


def test_a_sixth_is_predicted_and_no_more_than_the_places():
    text = random_rows(xlnet_tokenizer(), 128, pairs=True)
    text.rows[0] = (np.array([7, 20, 8, 0, 21, 7], np.uint16), np.array([0, 3], np.int32))  # <eod>, <eop>, <unk>
    made = examples(PermutedText(text, 21), epochs=5)
    assert min(predicted(example, "labels").min() for example in made) > 8
    orders = [example["order"][predicted(example)] for example in made]
    assert max(map(len, orders)) == 21
    tokens = sum(example["attention_mask"].sum() for example in made)
    assert sum(map(len, orders)) / tokens == pytest.approx(1 / 6, abs=0.003)
    # Where a token stands in the row says nothing about its place in the order.
    orders = [order for order in orders if len(order) > 10]
    assert np.mean([np.corrcoef(order, np.arange(len(order)))[0, 1] for order in orders]) == pytest.approx(0, abs=0.03)
    assert np.concatenate(orders).min() == 0 and np.concatenate(orders).max() == 127
    assert np.concatenate(orders).mean() == pytest.approx(63.5, abs=1.5)


def sample_mask(begins: np.ndarray, goal: int, rng: np.random.Generator) -> np.ndarray:
    """XLNet's data_utils._sample_mask, mask_alpha 6 and mask_beta 1, without `reverse`.

    `begins` is _is_start_piece of each token. The original looks for the end of a span at its first token, so that an
    n-gram is n tokens.
    """
    size, predict, current = len(begins), 0, 0
    mask, shares = np.zeros(size, bool), 1.0 / np.arange(1, 6)
    while current < size and predict < goal:
        n = min(rng.choice(np.arange(1, 6), p=shares / shares.sum()), goal - predict)
        left = rng.choice(n * 6)
        begin = current + left + np.append(begins[current + left :], True).argmax()
        if begin + n >= size:
            break
        mask[begin : begin + n] = True
        predict += n
        current = begin + n + n * 6 - left
    while predict < goal:
        place = rng.integers(size)
        predict += not mask[place]
        mask[place] = True
    return mask


def runs(chosen: np.ndarray) -> np.ndarray:
    """How many runs of 1, 2, … 6 and more neighbours there are, [6]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(int), [0]])))
    return np.bincount(np.minimum(edges[1::2] - edges[::2], 6), minlength=7)[1:]


def test_spans_are_those_of_xlnets_authors():
    tokenizer = xlnet_tokenizer()
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    starts = np.array([piece.startswith(("▁", "<")) or piece in ".," for piece in pieces])
    rng, found, expected = np.random.default_rng(0), [], []
    for example in examples(PermutedText(random_rows(tokenizer, 256, 100, pairs=True), 42), epochs=6):
        real = example["attention_mask"] > 0
        ids = example["input_ids"][real]
        ours = np.isin(np.arange(256), predicted(example))
        theirs = sample_mask(starts[ids], int(ours.sum()), rng) & (ids > 8)
        for lists, mask in ((found, ours[real]), (expected, theirs)):
            first = mask & ~np.append(False, mask[:-1])
            places = np.flatnonzero(mask)
            lists.append([*runs(mask), starts[ids[first]].sum(), places.mean() / len(mask), places[0]])
    found, expected = np.array(found), np.array(expected)
    error = np.sqrt((found.var(axis=0) + expected.var(axis=0)) / len(found))
    # The authors' spans may hold <sep> and <cls>, which are no targets: 1 % of the targets.
    assert (np.abs(found.mean(axis=0) - expected.mean(axis=0)) < 4 * error + 0.03 * expected.mean(axis=0)).all()


def test_what_does_not_fit_is_explained():
    bert, xlnet = bert_tokenizer(), xlnet_tokenizer()
    roberta = RobertaTokenizer(vocab={"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "<mask>": 5}, merges=[])
    pairs = random_rows(bert, 32, 3, pairs=True)
    no_mask, empty = bert_tokenizer(), BertTokenizer(vocab={name: n for n, name in enumerate(SPECIAL)})
    no_mask.mask_token = None
    for message, make, *arguments in (
        ("has no mask token", MaskedText, Rows(no_mask, 8, [[[5]]]), 2, False, False),
        ("special tokens only", MaskedText, Rows(empty, 8, [[[1]]]), 2, False, False),
        ("pads on the left.*--kind", MaskedText, random_rows(xlnet, 32, 3), 5, False, False),
        ("pads on the right.*XLNet", PermutedText, pairs, 5),
        ("XLNet needs rows with room for two", PermutedText, random_rows(xlnet, 32, 3), 5),
        ("4 special tokens around a pair", MaskedText, Rows(roberta, 8, 2 * [[[4]]], True), 2, False, True),
        ("from other rows, but the text has 1", PermutedText, random_rows(xlnet, 32, 1, True), 5),
    ):
        with pytest.raises(InputError, match=message):
            make(*arguments)
    assert len(MaskedText(pairs, 5, False, False)) == 3  # rows of pairs do as rows of one segment


def test_a_token_that_the_tokenizer_does_not_have_is_refused():
    bert, xlnet = bert_tokenizer(), xlnet_tokenizer()
    masked = MaskedText(Rows(bert, 8, [[[5]], [[6, len(bert)]]]), 2, False, False)
    permuted = PermutedText(Rows(xlnet, 12, [[[9], [10]], [[9], [len(xlnet)]]], True), 2)
    masked.example(0, generator(0))
    for rows, words in ((masked, len(bert)), (permuted, len(xlnet))):
        with pytest.raises(InputError, match=f"has the token {words}, and its tokenizer {words} tokens"):
            for epoch in range(20):
                rows.example(1, generator(1, epoch))
