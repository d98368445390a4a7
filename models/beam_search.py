"""Beam search of fixed shapes with a key and value cache; equal to fairseq's `SequenceGenerator`.

It is plain PyTorch. A search is a state (a dict of tensors) and `step`, which returns the next
state in the same shapes and reads nothing back from the device. `search` runs it in a Python loop.
A compiler runs the same step in a loop on the device, so that a batch is one program that ends with
its last sentence.

Hypotheses are not copied when beams change places. Slot (t, k) of the cache keeps what beam k wrote
at time t. Each hypothesis lists its ancestors, the slots that hold its words; all other slots are
masked in its attention. A step writes one column and moves nothing else, where fairseq's generator
copies all keys and values in each step.

The cost of a step grows with the length of the cache, most of which short sentences never fill.
`search` therefore starts with a cache of FIRST_LENGTH words and enlarges it while a sentence is
unfinished. Each length has a loop of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import MASKED, NATIVE_DEVICES
from models.transformer import EOS, PAD, Transformer, score_mask

State = dict[str, Tensor]
FIRST_LENGTH = 16  # words that the cache of a search has room for at first
CHUNK = 128  # scores whose maximum stands for them in `top_k`; a row of a TPU's registers


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Returns x[b, rows[b, m]], [B, M, L], for x [B, N, L] and int64 rows [B, M]."""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[2]))


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest scores of each row of [B, N], sorted, and their indices.

    XLA sorts the whole row for `torch.topk`. The k largest lie in the k chunks with the largest
    maxima, so it is enough to sort N / 128 maxima and k * 128 scores. The result is exact.
    """
    batch, size = scores.shape
    if size <= 2 * k * CHUNK:
        return scores.topk(k, 1)

    if size % CHUNK:
        scores = F.pad(scores, (0, -size % CHUNK), value=-math.inf)
    chunks = scores.view(batch, -1, CHUNK)
    best_chunks = chunks.amax(2).topk(k, 1).indices

    candidates = _take_rows(chunks, best_chunks).flatten(1)
    values, indices = candidates.topk(k, 1)
    chunk_of_value = best_chunks.gather(1, indices // CHUNK)
    return values, chunk_of_value * CHUNK + indices % CHUNK


def start(model: Transformer, source: Tensor, beam: int, max_length: int) -> tuple[State, State]:
    """Encodes source [B, S] and allocates the cache.

    Args:
        model: of any device.
        source: [B, S] tokens.
        beam: hypotheses of a sentence.
        max_length: most words of a hypothesis, its EOS included.

    Returns:
        The state of the search before its first step, and the tensors that its steps only read.
    """
    batch = len(source)
    device = source.device
    memory, memory_mask = model.encode(source)

    # Of the hypotheses, which are all equal at first, only the first counts.
    first_beam = torch.zeros(1, dtype=torch.int64, device=device)
    scores = torch.full((batch, beam), MASKED, device=device).index_fill(1, first_beam, 0.0)
    token_shape = (batch, beam, max_length)
    empty = (source == PAD).all(1)
    state = {
        "running": ~empty.all(),
        "time": torch.zeros((), dtype=torch.int32, device=device),
        "last": torch.full((batch, beam), EOS, dtype=torch.int32, device=device),
        "tokens": torch.full(token_shape, PAD, dtype=torch.int32, device=device),
        "ancestors": torch.zeros(token_shape, dtype=torch.int32, device=device),
        "scores": scores,
        "finished": torch.where(empty, beam, 0).to(torch.int32)[:, None],
        "finished_tokens": torch.full(token_shape, PAD, dtype=torch.int32, device=device),
        "finished_scores": torch.full((batch, beam), MASKED, device=device),
    }

    reads = {"memory_mask": memory_mask}
    head_dim = model.arch.dim // model.arch.heads
    cache_shape = (batch, model.arch.heads, max_length, beam, head_dim)
    for i, layer in enumerate(model.decoder.layers):
        keys, values = layer.encoder_attn.keys_and_values(memory)
        reads[f"memory_keys.{i}"] = keys
        reads[f"memory_values.{i}"] = values
        state[f"keys.{i}"] = torch.zeros(cache_shape, dtype=memory.dtype, device=device)
        state[f"values.{i}"] = torch.zeros(cache_shape, dtype=memory.dtype, device=device)
    return state, reads


def _write(cache: Tensor, column: Tensor, value: Tensor) -> Tensor:
    """Returns the cache [B, H, times, beam, D] with value [B, beam, H, D] at time `column`.

    NATIVE_DEVICES write into the cache itself: a copy of it would cost more than the step.
    """
    value = value.transpose(1, 2)[:, :, None]
    if cache.device.type in NATIVE_DEVICES:
        return cache.index_copy_(2, column, value)
    return cache.index_copy(2, column, value)


def _first_slots(cache: Tensor, times: int) -> Tensor:
    """Returns what a cache [B, H, T, beam, D] has of the first times, [B, times * beam, H, D]."""
    return cache[:, :, :times].flatten(2, 3).transpose(1, 2)


def decode_last(
    model: Transformer, state: State, reads: State, mask: Tensor, column: Tensor
) -> tuple[Tensor, State]:
    """Runs the decoder on the last word of each hypothesis.

    Args:
        model: of the search.
        state, reads: of the search, see `start`.
        mask: [B, 1, beam, times * beam], which slots of the first times a hypothesis sees, see
            `score_mask`.
        column: int64 [1], the time whose column of the cache is written.

    Returns:
        Logits [B, beam, words], float32, and the new keys and values of the state.
    """
    last = state["last"]
    times = mask.shape[3] // last.shape[1]
    position = (state["time"] + PAD + 1).expand(last.shape)
    x = model.decoder.embed(last, position)
    caches = {}
    for i, layer in enumerate(model.decoder.layers):
        # The defaults of both functions bind what they have of this layer.

        def attend_to_history(y: Tensor, i: int = i, attention=layer.self_attn) -> Tensor:
            new_keys, new_values = attention.keys_and_values(y)
            keys = _write(state[f"keys.{i}"], column, new_keys)
            values = _write(state[f"values.{i}"], column, new_values)
            caches[f"keys.{i}"] = keys
            caches[f"values.{i}"] = values
            return attention.attend(y, _first_slots(keys, times), _first_slots(values, times), mask)

        def attend_to_source(y: Tensor, i: int = i, attention=layer.encoder_attn) -> Tensor:
            keys = reads[f"memory_keys.{i}"]
            values = reads[f"memory_values.{i}"]
            return attention.attend(y, keys, values, reads["memory_mask"])

        x = layer.residual(x, layer.self_attn_layer_norm, attend_to_history)
        x = layer.residual(x, layer.encoder_attn_layer_norm, attend_to_source)
        x = layer.feed_forward(x)
    logits = model.logits(model.decoder.normalized(x)).float()
    return logits, caches


def continued(logits: Tensor, scores: Tensor, time: Tensor, limit: Tensor) -> Tensor:
    """Returns the log-probability of each hypothesis with each next word, [B, beam, words].

    PAD never follows, EOS is not the first word, and after `limit` words only EOS follows.

    Args:
        logits: [B, beam, words].
        scores: log-probabilities of the hypotheses, [B, beam].
        time: words that they have, a number.
        limit: most words of a sentence's hypotheses before EOS, [B].
    """
    word = torch.arange(logits.shape[2], device=logits.device)
    at_limit = (time >= limit)[:, None, None]
    too_early = (word == EOS) & (time < 1)
    too_late = (word != EOS) & at_limit
    forbidden = (word == PAD) | too_early | too_late

    if logits.device.type in NATIVE_DEVICES:
        log_probabilities = logits.log_softmax(2)
        return log_probabilities.masked_fill_(forbidden, MASKED).add_(scores[:, :, None])

    largest = logits.amax(2, keepdim=True)
    normalizer = (logits - largest).exp().sum(2, keepdim=True).log() + largest
    log_probabilities = torch.where(forbidden, MASKED, logits - normalizer)
    return log_probabilities + scores[:, :, None]


@dataclass(frozen=True)
class Candidates:
    """The 2 * beam best continuations of each sentence's hypotheses by one word, best first.

    With so many there are always `beam` that do not end.
    """

    scores: Tensor  # log-probabilities, [B, 2 * beam]
    parents: Tensor  # which hypothesis each continues, int32 [B, 2 * beam]
    words: Tensor  # the next words, int32 [B, 2 * beam]
    tokens: Tensor  # all words, int32 [B, 2 * beam, max_length]
    ends: Tensor  # whether the next word is EOS, bool [B, 2 * beam]
    rank: Tensor  # 0, 1, …, int32 [2 * beam]


def step(model: Transformer, state: State, reads: State, length_penalty: float) -> State:
    """Returns the state one word later.

    Args:
        model: of the search.
        state: as `start` or an earlier step returned it. NATIVE_DEVICES write into its cache.
        reads: tensors of `start`, and "limit", int32 [B]: most words of a sentence's hypotheses
            before EOS.
        length_penalty: exponent of the length by which a finished hypothesis' log-probability is
            divided.
    """
    time = state["time"]
    beam, max_length = state["tokens"].shape[1:]
    now = torch.arange(max_length, device=time.device, dtype=torch.int32) == time
    beams = torch.arange(beam, device=time.device, dtype=torch.int32)
    ancestors = torch.where(now, beams[:, None], state["ancestors"])  # each beam writes its slot

    mask = _mask_of_ancestors(ancestors, beams, time)
    column = time.to(torch.int64)[None]
    logits, caches = decode_last(model, state, reads, mask, column)
    log_probabilities = continued(logits, state["scores"], time, reads["limit"])
    candidates = _best_candidates(log_probabilities, state["tokens"], now)

    new = state | caches
    new |= _finished(state, candidates, length_penalty)
    new |= _continuing(candidates, ancestors)
    new["time"] = time + 1
    new["running"] = (new["finished"] < beam).any() & (new["time"] < max_length)
    return new


def _mask_of_ancestors(ancestors: Tensor, beams: Tensor, time: Tensor) -> Tensor:
    """Returns the mask of `decode_last`: a hypothesis sees its ancestors up to now.

    On NATIVE_DEVICES, where shapes may vary, it covers the times up to now only.

    Args:
        ancestors: int32 [B, beam, max_length].
        beams: 0, 1, …, int32 [beam].
        time: a number.
    """
    times = ancestors.shape[2]
    if time.device.type in NATIVE_DEVICES:
        times = int(time) + 1
    past = torch.arange(times, device=time.device, dtype=torch.int32) <= time
    allowed = (ancestors[:, :, :times, None] == beams) & past[:, None]  # [B, beam, times, beam]
    return score_mask(allowed.flatten(2))


def _best_candidates(log_probabilities: Tensor, tokens: Tensor, now: Tensor) -> Candidates:
    """Returns the best continuations.

    Args:
        log_probabilities: of each hypothesis with each word, [B, beam, words].
        tokens: of the hypotheses, int32 [B, beam, max_length].
        now: true at the time of the next word, bool [max_length].
    """
    count = 2 * tokens.shape[1]
    scores, indices = top_k(log_probabilities.flatten(1), count)
    words = log_probabilities.shape[2]
    parents = (indices // words).to(torch.int32)
    next_words = (indices % words).to(torch.int32)

    tokens_of_parents = _take_rows(tokens, parents.to(torch.int64))
    return Candidates(
        scores=scores,
        parents=parents,
        words=next_words,
        tokens=torch.where(now, next_words[:, :, None], tokens_of_parents),
        ends=(next_words == EOS) & (scores > MASKED / 2),
        rank=torch.arange(count, device=scores.device, dtype=torch.int32),
    )


def _finished(state: State, candidates: Candidates, length_penalty: float) -> State:
    """Returns the finished hypotheses with the candidates that end now.

    A candidate ends here if it is among the best `beam` and there is room. Hypotheses that finished
    earlier stay.
    """
    beam = state["tokens"].shape[1]
    ending = candidates.ends & (candidates.rank < beam)
    ending &= ending.int().cumsum(1) + state["finished"] <= beam

    length = (state["time"] + 1).float()
    normalized = torch.where(ending, candidates.scores / length**length_penalty, MASKED)
    all_scores = torch.cat([state["finished_scores"], normalized], 1)
    all_tokens = torch.cat([state["finished_tokens"], candidates.tokens], 1)

    scores, best = all_scores.topk(beam, 1)
    return {
        "finished_scores": scores,
        "finished_tokens": _take_rows(all_tokens, best),
        "finished": state["finished"] + ending.int().sum(1, keepdim=True, dtype=torch.int32),
    }


def _continuing(candidates: Candidates, ancestors: Tensor) -> State:
    """Returns the hypotheses of the next step: the best `beam` candidates that do not end.

    Args:
        candidates: of this step.
        ancestors: of this step's hypotheses, int32 [B, beam, max_length].
    """
    beam = ancestors.shape[1]
    # The ranks of those that end come after all others.
    order = candidates.ends.int() * 2 * beam + candidates.rank
    alive = order.topk(beam, 1, largest=False).indices
    scores = torch.where(candidates.ends, MASKED, candidates.scores)
    parents = candidates.parents.gather(1, alive).to(torch.int64)
    return {
        "scores": scores.gather(1, alive),
        "last": candidates.words.gather(1, alive),
        "tokens": _take_rows(candidates.tokens, alive),
        "ancestors": _take_rows(ancestors, parents),
    }


def grown(state: State, max_length: int) -> State:
    """Returns the state with room for `max_length` words per hypothesis.

    It is "running" again if a sentence is unfinished.
    """
    new = dict(state)
    for name, tensor in state.items():
        has_words = name in ("tokens", "finished_tokens", "ancestors")
        if has_words or name.startswith(("keys.", "values.")):
            # Words are dimension 2 of all of these; `F.pad` counts dimensions from the last.
            dimensions_after = tensor.dim() - 3
            padding = [0, 0] * dimensions_after + [0, max_length - tensor.shape[2]]
            filler = PAD if name.endswith("tokens") else 0
            new[name] = F.pad(tensor, padding, value=filler)

    beam = state["tokens"].shape[1]
    new["running"] = (state["finished"] < beam).any()
    return new


class Found:
    """The finished hypotheses of a search, also of sentences that its state no longer has."""

    def __init__(self, max_length: int):
        self.max_length = max_length
        self.rows: Tensor | None = None  # of the sentences in the state; None: all

    def take(self, state: State) -> None:
        """Takes what the sentences of a state have found so far."""
        tokens = state["finished_tokens"]
        length = tokens.shape[2]
        if self.rows is None:
            self.tokens = F.pad(tokens, [0, self.max_length - length], value=PAD)
            self.scores = state["finished_scores"]
        else:
            self.tokens[self.rows, :, :length] = tokens
            self.scores[self.rows] = state["finished_scores"]

    def dropped(self, state: State, reads: State) -> tuple[State, State]:
        """Returns a state, and what it reads, without the finished sentences.

        They are kept until they are an eighth of the state: moving the others costs as much as a
        step.
        """
        beam = state["tokens"].shape[1]
        unfinished = (state["finished"] < beam)[:, 0]
        left = unfinished.nonzero()[:, 0]
        if 8 * len(left) > 7 * len(unfinished):
            return state, reads

        self.take(state)
        self.rows = left if self.rows is None else self.rows[left]
        return _sentences(state, left), _sentences(reads, left)


def _sentences(tensors: State, rows: Tensor) -> State:
    """Returns the tensors of these sentences only; numbers are of all sentences."""
    chosen = {}
    for name, tensor in tensors.items():
        chosen[name] = tensor[rows] if tensor.dim() else tensor
    return chosen


@torch.no_grad()
def search(
    model: Transformer,
    source: Tensor,
    limit: Tensor,
    beam: int = 5,
    max_length: int = 200,
    length_penalty: float = 1.0,
    loop: Callable[[State, State], State] | None = None,
) -> tuple[Tensor, Tensor]:
    """Finds the best hypotheses of source [B, S].

    Args:
        model: in evaluation mode.
        source: [B, S] tokens.
        limit: int32 [B], most words before EOS in the hypotheses of each sentence, below
            max_length.
        beam: hypotheses of a sentence.
        max_length: most words of a hypothesis, its EOS included.
        length_penalty: see `step`.
        loop: runs `step` with this model and length_penalty while the state is "running". None: a
            Python loop, for devices that run operation by operation. It reads that flag in every
            round, and drops sentences that have all their hypotheses.

    Returns:
        Best first: tokens int32 [B, beam, max_length], EOS included, then PAD; and scores
        [B, beam], log-probability / length ** length_penalty. Where there are fewer than `beam`
        hypotheses (a row of PAD has none), the others are PAD only, with the score MASKED.
    """
    positions = model.arch.max_positions
    if max_length > positions:  # a compiler would clamp the position without an error
        raise ValueError(f"hypotheses of {max_length} words; the model has {positions} positions")

    length = min(FIRST_LENGTH, max_length)
    state, reads = start(model, source, beam, length)
    reads["limit"] = limit
    found = Found(max_length)
    while True:
        if loop is not None:
            state = loop(state, reads)
        else:
            while bool(state["running"]):
                state = step(model, state, reads, length_penalty)
                state, reads = found.dropped(state, reads)
        if length == max_length:
            break
        length = _next_length(length, max_length)
        state = grown(state, length)
    found.take(state)

    # Tokens after EOS, and those of hypotheses that did not end, are left over from other beams.
    is_eos = (found.tokens == EOS).int()
    after_eos = is_eos.cumsum(2) - is_eos > 0
    missing = (found.scores == MASKED)[:, :, None]
    tokens = torch.where(after_eos | missing, PAD, found.tokens)
    return tokens, found.scores


def _next_length(length: int, max_length: int) -> int:
    """Returns twice the length, or the whole where little more than that is left."""
    if 3 * length < max_length:
        return 2 * length
    return max_length
