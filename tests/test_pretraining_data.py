"""data/pretraining.py on rows that the tests make: what is masked, how often, and what never is."""

import dataclasses
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import ks_2samp
from transformers import BertTokenizer, RobertaTokenizer, XLNetTokenizer

from data.pretraining import MaskedText, PermutedText, segments
from errors import InputError

WORDS = 60
PIECES = 40

# Ids of the BERT tokenizer below: special tokens, whole words, pieces that continue a word.
PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FIRST_WORD = 5
FIRST_PIECE = FIRST_WORD + WORDS
BERT_SIZE = FIRST_PIECE + PIECES

# Ids of the XLNet tokenizer below.
XLNET_SPECIAL = (
    "<unk>",
    "<s>",
    "</s>",
    "<cls>",
    "<sep>",
    "<pad>",
    "<mask>",
    "<eod>",
    "<eop>",
)
XLNET_CLS = 3
XLNET_SEP = 4
XLNET_PAD = 5
XLNET_FIRST_WORD = 9


def bert_tokenizer() -> BertTokenizer:
    tokens = list(SPECIAL)
    tokens += [f"w{number}" for number in range(WORDS)]
    tokens += [f"##p{number}" for number in range(PIECES)]
    return BertTokenizer(vocab={token: number for number, token in enumerate(tokens)})


def xlnet_tokenizer() -> XLNetTokenizer:
    """Returns a tokenizer with special tokens, words, pieces, and two punctuation marks."""
    tokens = list(XLNET_SPECIAL)
    tokens += [f"▁w{number}" for number in range(WORDS)]
    tokens += [f"p{number}" for number in range(PIECES)]
    tokens += [".", ","]
    return XLNetTokenizer(vocab=[(token, -1.0) for token in tokens], unk_id=0)


class Rows:
    """Rows given as lists of sentences, each a list of tokens."""

    def __init__(self, tokenizer, length: int, rows: list[list[list[int]]], pairs: bool = False):
        self.tokenizer = tokenizer
        self.length = length
        self.pairs = pairs
        self.rows = []
        for sentences in rows:
            sizes = [len(sentence) for sentence in sentences]
            starts = np.cumsum([0, *sizes[:-1]], dtype=np.int32)
            self.rows.append((np.concatenate(sentences).astype(np.uint16), starts))

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.rows[index]


def random_rows(tokenizer, length: int, rows: int = 200, pairs: bool = False) -> Rows:
    """Returns random sentences of 4 to 12 tokens, as many in a row as fit; now and then the end of
    a document ends the row."""
    rng = np.random.default_rng(0)
    ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    capacity = length - 2 - pairs
    made = [[]]
    while len(made) <= rows:
        sentence = rng.choice(ordinary, rng.integers(4, 13)).tolist()
        row = made[-1]
        is_full = sum(map(len, row)) + len(sentence) > capacity
        if is_full or (len(row) > 1 and rng.random() < 0.01):
            made.append([])
        made[-1].append(sentence)
    return Rows(tokenizer, length, made[:rows], pairs)


def generator(index: int, epoch: int = 0) -> np.random.Generator:
    """Returns the random numbers of an example, as the loader makes them."""
    return np.random.default_rng((0, epoch, index))


def examples(dataset, epochs: int = 1) -> list[dict[str, np.ndarray]]:
    """Returns all examples of some epochs."""
    made = []
    for epoch in range(epochs):
        for index in range(len(dataset)):
            made.append(dataset.example(index, generator(index, epoch)))
    return made


def predicted(example: dict[str, np.ndarray], name: str = "positions") -> np.ndarray:
    """Returns the positions of the predictions, or their labels."""
    return example[name][example["weights"] > 0]


def unmasked(example: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the row before it was masked, by the labels."""
    ids = example["input_ids"].copy()
    ids[predicted(example)] = predicted(example, "labels")
    return ids


# ---- masked text -------------------------------------------------------------------------------
def test_a_row_is_laid_out_and_special_tokens_are_no_labels():
    row = [10, SEP, 11, UNK, *range(12, 40), MASK]
    text = Rows(bert_tokenizer(), 43, [[row[:12], row[12:]]])
    dataset = MaskedText(text, 8, whole_words=False, next_sentence=False)
    labels = set()

    for example in examples(dataset, epochs=100):
        assert unmasked(example).tolist() == [CLS, *row, SEP] + 8 * [PAD]
        assert example["attention_mask"].tolist() == 35 * [1] + 8 * [0]
        assert not example["token_type_ids"].any()

        count = int(example["weights"].sum())
        assert count in (4, 5)  # 15 % of 30
        assert example["weights"].tolist() == count * [1] + (8 - count) * [0]
        assert (np.diff(predicted(example)) > 0).all()
        assert not example["positions"][count:].any()
        assert not example["labels"][count:].any()
        labels.update(predicted(example, "labels").tolist())

    assert labels == {*range(10, 40)}


def masked_text() -> MaskedText:
    text = random_rows(bert_tokenizer(), 64, 20, pairs=True)
    return MaskedText(text, 11, whole_words=True, next_sentence=False)


def masked_pairs() -> MaskedText:
    text = random_rows(bert_tokenizer(), 64, 20, pairs=True)
    return MaskedText(text, 11, whole_words=True, next_sentence=True)


def permuted_text() -> PermutedText:
    return PermutedText(random_rows(xlnet_tokenizer(), 64, 20, pairs=True), 11)


@pytest.mark.parametrize(
    ("make", "more_shapes"),
    [
        (masked_text, {}),
        (masked_pairs, {"next_sentence": ()}),
        (permuted_text, {"order": (64,)}),
    ],
)
def test_shapes_are_fixed_and_the_generator_decides(make, more_shapes):
    expected_shapes = {
        "input_ids": (64,),
        "attention_mask": (64,),
        "token_type_ids": (64,),
        "positions": (11,),
        "labels": (11,),
        **more_shapes,
    }
    dataset = make()
    copy = pickle.loads(pickle.dumps(dataset))

    first_epoch = examples(dataset)
    second_epoch = examples(dataset, epochs=2)[20:]

    for first, again, other in zip(first_epoch, examples(copy), second_epoch, strict=True):
        for name in first:
            assert (first[name] == again[name]).all()
        assert (first["positions"] != other["positions"]).any()

        assert first.pop("weights").dtype == np.float32
        assert {name: array.shape for name, array in first.items()} == expected_shapes
        for array in first.values():
            assert array.dtype == np.int32


@pytest.mark.parametrize("whole_words", [False, True])
def test_fifteen_percent_are_predicted_and_split_80_10_10(whole_words):
    text = random_rows(bert_tokenizer(), 128)
    made = examples(MaskedText(text, 24, whole_words, next_sentence=False), epochs=5)

    tokens = sum(int(example["attention_mask"].sum()) - 2 for example in made)
    labels = np.concatenate([predicted(example, "labels") for example in made])
    inputs = np.concatenate([example["input_ids"][predicted(example)] for example in made])

    # About 18,000 predictions: the standard deviation of a share of 80 % is 0.3 %, of 10 % 0.2 %.
    assert len(labels) / tokens == pytest.approx(0.15, abs=0.002)
    is_masked = inputs == MASK
    is_kept = inputs == labels
    random_tokens = inputs[~is_masked & ~is_kept]
    # A random token is the one that was there once in 100 times.
    assert is_masked.mean() == pytest.approx(0.8, abs=0.012)
    assert is_kept.mean() == pytest.approx(0.101, abs=0.009)
    assert len(random_tokens) / len(inputs) == pytest.approx(0.099, abs=0.009)
    # Any ordinary token, all about as often.
    counts = np.bincount(random_tokens, minlength=BERT_SIZE)
    assert not counts[:FIRST_WORD].any()
    assert counts[FIRST_WORD:].min() > 0
    assert counts.max() < 4 * counts[FIRST_WORD:].mean()


@pytest.mark.parametrize("whole_words", [False, True])
def test_each_token_of_a_row_is_predicted_as_often(whole_words):
    text = Rows(bert_tokenizer(), 32, [[[*range(10, 40)]]])
    dataset = MaskedText(text, 8, whole_words, next_sentence=False)

    positions = [predicted(example) for example in examples(dataset, epochs=3000)]
    counts = np.bincount(np.concatenate(positions), minlength=32)

    assert counts[0] == 0
    assert counts[31] == 0
    expected = np.full(30, 0.15)
    assert counts[1:31] / 3000 == pytest.approx(expected, abs=0.03)  # 4.5 standard deviations


@pytest.mark.parametrize("whole_words", [False, True])
def test_a_row_without_ordinary_tokens_has_no_prediction(whole_words):
    text = Rows(bert_tokenizer(), 8, [[[UNK, UNK]]])

    (example,) = examples(MaskedText(text, 3, whole_words, next_sentence=False))

    assert not example["weights"].any()
    assert example["input_ids"][:4].tolist() == [CLS, UNK, UNK, SEP]


@pytest.mark.parametrize("whole_words", [False, True])
def test_a_row_has_no_more_predictions_than_the_limit(whole_words):
    row = [[*range(10, 60), *range(10, 60)]]  # 15 % would be 15
    text = Rows(bert_tokenizer(), 128, 20 * [row])

    for example in examples(MaskedText(text, 6, whole_words, next_sentence=False)):
        assert example["weights"].sum() == 6


BEGINS_WITHIN_A_WORD = [[FIRST_PIECE, FIRST_PIECE, *range(10, 50)]]
UNKNOWN_WITHIN_A_WORD = [[FIRST_PIECE, UNK, FIRST_PIECE, *range(10, 50)]]


def chosen_words(example: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Returns for each word of a row which of its tokens are predicted, bool."""
    ids = unmasked(example)
    is_chosen = np.isin(np.arange(64), predicted(example))
    # A word begins with a whole word, or with a piece after a special token.
    after_special = np.append(True, ids[:-1] < FIRST_WORD)
    begins = (ids < FIRST_PIECE) | after_special
    return np.split(is_chosen, np.flatnonzero(begins)[1:])


def partly_chosen(example: dict[str, np.ndarray]) -> int:
    """Returns how many words of a row are predicted in part."""
    return sum(0 < word.sum() < len(word) for word in chosen_words(example))


def text_with_parted_words() -> Rows:
    tokenizer = bert_tokenizer()
    text = random_rows(tokenizer, 64, 100)
    text.rows += Rows(tokenizer, 64, [BEGINS_WITHIN_A_WORD, UNKNOWN_WITHIN_A_WORD]).rows
    return text


def test_whole_words_are_predicted_whole():
    text = text_with_parted_words()
    made = examples(MaskedText(text, 12, whole_words=True, next_sentence=False), epochs=10)

    for example in made:
        assert partly_chosen(example) == 0

    # What stands before and after an unknown token is chosen apart.
    chosen_apart = 0
    for example in made[101::102]:
        is_chosen = np.isin(np.arange(64), predicted(example))
        chosen_apart += is_chosen[1] != is_chosen[3]
    assert chosen_apart > 0


def test_tokens_alone_break_words():
    text = text_with_parted_words()
    made = examples(MaskedText(text, 12, whole_words=False, next_sentence=False), epochs=10)

    assert sum(partly_chosen(example) for example in made) > 1000


def test_a_word_longer_than_the_share_is_skipped():
    long_word = [10, *[FIRST_PIECE] * 20]
    rows = [[[*long_word, *range(11, 25)]], [long_word]]
    text = Rows(bert_tokenizer(), 40, rows)
    dataset = MaskedText(text, 8, whole_words=True, next_sentence=False)

    made = examples(dataset, epochs=50)

    for with_others in made[::2]:
        assert with_others["weights"].sum() in (5, 6)  # 15 % of 35, all of the other words
        assert predicted(with_others, "labels").min() > 10
    for alone in made[1::2]:
        assert not alone["weights"].any()


# ---- pairs -------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Pair:
    """What an example of two segments shows."""

    first: list[int]
    second: list[int]
    end: int  # of the row, where the last <sep> is
    unrelated: bool


def read_pair(example: dict[str, np.ndarray]) -> Pair:
    ids = unmasked(example).tolist()
    cut = ids.index(SEP)
    end = ids.index(SEP, cut + 1)
    return Pair(ids[1:cut], ids[cut + 1 : end], end, bool(example["next_sentence"]))


@pytest.fixture(scope="module")
def pair_text() -> Rows:
    return random_rows(bert_tokenizer(), 128, 500, pairs=True)


@pytest.fixture(scope="module")
def pair_examples(pair_text) -> list[dict[str, np.ndarray]]:
    """The examples of six epochs of `pair_text`."""
    dataset = MaskedText(pair_text, 22, whole_words=False, next_sentence=True)
    return examples(dataset, epochs=6)


def test_a_pair_is_laid_out(pair_examples):
    for example in pair_examples:
        ids = unmasked(example).tolist()
        pair = read_pair(example)
        cut = len(pair.first) + 1
        after_end = 127 - pair.end
        assert ids[0] == CLS
        assert pair.end <= 127
        assert not any(ids[pair.end + 1 :])
        types = (cut + 1) * [0] + (pair.end - cut) * [1] + after_end * [0]
        assert example["token_type_ids"].tolist() == types
        attention = (pair.end + 1) * [1] + after_end * [0]
        assert example["attention_mask"].tolist() == attention


def test_a_pair_is_a_row_cut_or_has_a_segment_of_another_row(pair_text, pair_examples):
    row_of = {}  # by all stretches of whole sentences
    borders = []  # of the sentences of each row, its end included
    for number, (row, starts) in enumerate(pair_text.rows):
        tokens = row.tolist()
        ends = [*starts.tolist(), len(tokens)]
        borders.append(ends)
        for start in ends[:-1]:
            for end in ends[1:]:
                row_of[tuple(tokens[start:end])] = number

    cuts = set()
    for number, example in enumerate(pair_examples):
        index = number % 500
        row = pair_text.rows[index][0].tolist()
        pair = read_pair(example)
        size = len(pair.first)
        assert pair.first == row[:size]
        assert size in borders[index][1:-1]
        cuts.add(borders[index].index(size))
        if pair.unrelated:
            assert row_of[tuple(pair.second)] != index
        else:
            assert pair.first + pair.second == row
    assert cuts >= {1, 2, 3, 4, 5}


def test_lengths_do_not_tell_unrelated_pairs_apart(pair_examples):
    pairs = [read_pair(example) for example in pair_examples]

    unrelated = np.array([pair.unrelated for pair in pairs])
    lengths = {
        "first": np.array([len(pair.first) for pair in pairs]),
        "second": np.array([len(pair.second) for pair in pairs]),
        "row": np.array([pair.end for pair in pairs]),
    }

    assert unrelated.mean() == pytest.approx(0.5, abs=0.03)  # three standard deviations
    for name, length in lengths.items():
        # The greatest distance of the distributions, 1 if a threshold tells all pairs apart;
        # chance gives 0.05.
        distance = ks_2samp(length[unrelated], length[~unrelated]).statistic
        assert distance < 0.07, name


def test_rows_of_one_sentence_are_cut_within_it():
    rows = [
        [[*range(10, 39)]],
        [[40]],
        [[*range(10, 20)], [*range(20, 39)]],
        [[*range(50, 79)]],
    ]
    text = Rows(bert_tokenizer(), 32, rows, pairs=True)

    for epoch in range(50):
        for index in range(4):
            first, second, unrelated = segments(text, index, generator(index, epoch))
            assert len(first) > 0
            assert len(second) > 0
            assert len(first) + len(second) <= 29
            assert unrelated or index == 2
            if index == 0:
                assert first.tolist() == [*range(10, 24)]


def test_a_segment_without_a_sentence_that_fits_is_cut():
    rows = [[[*range(10, 30)], [5, 5, 5]], [[*range(40, 69)]]]
    text = Rows(bert_tokenizer(), 32, rows, pairs=True)

    seen = set()
    for number in range(20):
        _, second, _ = segments(text, 0, generator(number))
        seen.add(tuple(second.tolist()))

    assert seen == {(5, 5, 5), tuple(range(40, 49))}


# ---- permuted text -----------------------------------------------------------------------------
def test_a_permuted_row_is_laid_out():
    first = [*range(20, 30)]
    next_segment = [*range(30, 45)]
    other_segment = [70, 71, 72]
    text = Rows(xlnet_tokenizer(), 32, [[first, next_segment], [other_segment]], pairs=True)
    sizes = set()

    for example in examples(PermutedText(text, 6), epochs=50)[::2]:
        ids = example["input_ids"].tolist()
        second = next_segment if 30 in ids else other_segment
        sizes.add(len(second))
        padding = 32 - len(first) - len(second) - 3
        row = [*first, XLNET_SEP, *second, XLNET_SEP, XLNET_CLS]
        assert ids == padding * [XLNET_PAD] + row
        types = padding * [3] + 11 * [0] + (len(second) + 1) * [1] + [2]
        assert example["token_type_ids"].tolist() == types
        assert example["attention_mask"].tolist() == padding * [0] + (32 - padding) * [1]

        count = int(example["weights"].sum())
        assert count in ((4, 5) if second == next_segment else (2, 3))  # a sixth of 28 or 16
        assert example["weights"].tolist() == count * [1] + (6 - count) * [0]
        targets = predicted(example)
        assert (np.diff(targets) > 0).all()
        assert example["positions"][count:].tolist() == (6 - count) * [31]
        target_ids = [ids[position] for position in targets]
        assert example["labels"].tolist() == target_ids + (6 - count) * [0]
        assert min(target_ids) >= 20  # neither padding nor special

        # Only targets and special tokens have a place of their own in the order.
        order = example["order"]
        special = {padding + 10, 30, 31}
        ordered = special | {*targets.tolist()}
        assert {*np.flatnonzero((order >= 0) & (order < 32)).tolist()} == ordered
        assert len({int(order[position]) for position in ordered}) == len(ordered)
        assert (order[:padding] == 32).all()
        assert (np.delete(order, sorted(ordered))[padding:] == -1).all()
    assert sizes == {3, 15}


@pytest.fixture(scope="module")
def permuted_examples() -> list[dict[str, np.ndarray]]:
    """Five epochs of random rows; the first row has special tokens."""
    text = random_rows(xlnet_tokenizer(), 128, pairs=True)
    with_special = np.array([7, 20, 8, 0, 21, 7], np.uint16)  # <eod>, <eop>, <unk>
    text.rows[0] = (with_special, np.array([0, 3], np.int32))
    return examples(PermutedText(text, 21), epochs=5)


def test_a_sixth_is_predicted_and_no_more_than_the_limit(permuted_examples):
    for example in permuted_examples:
        assert predicted(example, "labels").min() >= XLNET_FIRST_WORD
    counts = [len(predicted(example)) for example in permuted_examples]
    assert max(counts) == 21
    tokens = sum(example["attention_mask"].sum() for example in permuted_examples)
    assert sum(counts) / tokens == pytest.approx(1 / 6, abs=0.003)


def test_a_position_says_nothing_about_its_place_in_the_order(permuted_examples):
    orders = []
    for example in permuted_examples:
        order = example["order"][predicted(example)]
        if len(order) > 10:
            orders.append(order)

    correlations = [np.corrcoef(order, np.arange(len(order)))[0, 1] for order in orders]
    assert np.mean(correlations) == pytest.approx(0, abs=0.03)
    all_orders = np.concatenate(orders)
    assert all_orders.min() == 0
    assert all_orders.max() == 127
    assert all_orders.mean() == pytest.approx(63.5, abs=1.5)


def sample_mask(begins: np.ndarray, goal: int, rng: np.random.Generator) -> np.ndarray:
    """Returns XLNet's data_utils._sample_mask, mask_alpha 6 and mask_beta 1, without `reverse`.

    `begins` is _is_start_piece of each token. The original looks for the end of a span at its
    first token, so that an n-gram is n tokens.
    """
    size = len(begins)
    mask = np.zeros(size, bool)
    shares = 1.0 / np.arange(1, 6)
    predict = 0
    current = 0
    while current < size and predict < goal:
        drawn = rng.choice(np.arange(1, 6), p=shares / shares.sum())
        n = min(drawn, goal - predict)
        left = rng.choice(n * 6)
        to_next_word = np.append(begins[current + left :], True).argmax()
        begin = current + left + to_next_word
        if begin + n >= size:
            break
        mask[begin : begin + n] = True
        predict += n
        current = begin + n + n * 6 - left

    while predict < goal:
        position = rng.integers(size)
        predict += not mask[position]
        mask[position] = True
    return mask


def runs(chosen: np.ndarray) -> np.ndarray:
    """Returns how many runs of 1, 2, … 6 and more neighbours there are, [6]."""
    padded = np.concatenate([[0], chosen.astype(int), [0]])
    edges = np.flatnonzero(np.diff(padded))
    lengths = edges[1::2] - edges[::2]
    return np.bincount(np.minimum(lengths, 6), minlength=7)[1:]


def statistics(mask: np.ndarray, begins: np.ndarray) -> list[float]:
    """Returns what describes the spans of a row.

    The runs by their length, how many begin with a word, the mean position and the first.
    """
    first_of_span = mask & ~np.append(False, mask[:-1])
    positions = np.flatnonzero(mask)
    return [
        *runs(mask),
        begins[first_of_span].sum(),
        positions.mean() / len(mask),
        positions[0],
    ]


def test_spans_are_those_of_xlnets_authors():
    tokenizer = xlnet_tokenizer()
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    begins_word = np.array([name.startswith(("▁", "<")) or name in ".," for name in names])
    dataset = PermutedText(random_rows(tokenizer, 256, 100, pairs=True), 42)
    rng = np.random.default_rng(0)

    found = []
    expected = []
    for example in examples(dataset, epochs=6):
        is_real = example["attention_mask"] > 0
        ids = example["input_ids"][is_real]
        begins = begins_word[ids]
        ours = np.isin(np.arange(256), predicted(example))
        theirs = sample_mask(begins, int(ours.sum()), rng) & (ids >= XLNET_FIRST_WORD)
        found.append(statistics(ours[is_real], begins))
        expected.append(statistics(theirs, begins))

    found = np.array(found)
    expected = np.array(expected)
    mean = expected.mean(axis=0)
    error = np.sqrt((found.var(axis=0) + expected.var(axis=0)) / len(found))
    # The authors' spans may hold <sep> and <cls>, which are no targets: 1 % of the targets.
    assert (np.abs(found.mean(axis=0) - mean) < 4 * error + 0.03 * mean).all()


# ---- what does not fit -------------------------------------------------------------------------
def refused(message: str, make: Callable, *arguments) -> None:
    with pytest.raises(InputError, match=message):
        make(*arguments)


def test_a_tokenizer_that_does_not_fit_masking_is_explained():
    no_mask = bert_tokenizer()
    no_mask.mask_token = None
    text = Rows(no_mask, 8, [[[5]]])
    refused("has no mask token", MaskedText, text, 2, False, False)

    no_words = BertTokenizer(vocab={name: number for number, name in enumerate(SPECIAL)})
    text = Rows(no_words, 8, [[[1]]])
    refused("special tokens only", MaskedText, text, 2, False, False)

    text = random_rows(xlnet_tokenizer(), 32, 3)
    refused("pads on the left.*--kind", MaskedText, text, 5, False, False)

    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "<mask>": 5}
    roberta = RobertaTokenizer(vocab=vocab, merges=[])
    text = Rows(roberta, 8, 2 * [[[4]]], pairs=True)
    refused("4 special tokens around a pair", MaskedText, text, 2, False, True)


def test_rows_that_do_not_fit_xlnet_are_explained():
    bert_pairs = random_rows(bert_tokenizer(), 32, 3, pairs=True)
    refused("pads on the right.*XLNet", PermutedText, bert_pairs, 5)

    single = random_rows(xlnet_tokenizer(), 32, 3)
    refused("XLNet needs rows with room for two", PermutedText, single, 5)

    one_row = random_rows(xlnet_tokenizer(), 32, 1, pairs=True)
    refused("from other rows, but the text has 1", PermutedText, one_row, 5)


def test_rows_of_pairs_do_as_rows_of_one_segment():
    pairs = random_rows(bert_tokenizer(), 32, 3, pairs=True)

    assert len(MaskedText(pairs, 5, whole_words=False, next_sentence=False)) == 3


def assert_token_is_refused(dataset, size: int) -> None:
    """Asserts that the second row is refused, since a token is beyond the tokenizer's `size`."""
    message = f"has the token {size}, and its tokenizer {size} tokens"
    with pytest.raises(InputError, match=message):
        for epoch in range(20):
            dataset.example(1, generator(1, epoch))


def test_a_token_that_the_tokenizer_does_not_have_is_refused():
    bert = bert_tokenizer()
    text = Rows(bert, 8, [[[5]], [[6, len(bert)]]])
    masked = MaskedText(text, 2, whole_words=False, next_sentence=False)
    masked.example(0, generator(0))
    assert_token_is_refused(masked, len(bert))

    xlnet = xlnet_tokenizer()
    text = Rows(xlnet, 12, [[[9], [10]], [[9], [len(xlnet)]]], pairs=True)
    assert_token_is_refused(PermutedText(text, 2), len(xlnet))
