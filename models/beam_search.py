"""Beam search of fixed shapes with a key and value cache, in plain PyTorch; equal to fairseq's
`SequenceGenerator` where the limits of the lengths are: fairseq has one for a batch, from its
padded width, so that what it finds depends on the batch.

A search is a state (a dict of tensors) and `step`, which returns the next state in the same shapes
and reads nothing back from the device. `search` runs it in a Python loop; a compiler runs the same
step in a loop on the device, so that a batch is one program that ends with its last sentence.

Hypotheses are not copied when beams change places. Slot (t, k) of the cache keeps what beam k wrote
at time t. Each hypothesis lists its ancestors, the slots that hold its words; all others are masked
in its attention. A step writes one column and moves nothing else (fairseq's generator copies all
keys and values in each step).

The cost of a step grows with the length of the cache, most of which short sentences never fill.
`search` therefore starts with a cache of FIRST_LENGTH words and enlarges it while a sentence is
unfinished; each length is its own loop.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from models.layers import MASKED, NATIVE_DEVICES
from models.transformer import EOS, PAD, Transformer, score_mask

State = dict[str, Tensor]
FIRST_LENGTH = 16  # words in the cache of a search at first
CHUNK = 128  # scores whose maximum stands for them in `top_k`; a row of a TPU's registers


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest of each row of [B, N], sorted, and their indices: exact, without
    sorting the row.

    XLA sorts the whole row for `torch.topk`. The k largest lie in the k chunks with the largest
    maxima, so it is enough to sort N / 128 maxima and k * 128 scores.
    """
    batch, size = scores.shape
    if size <= 2 * k * CHUNK:
        return scores.topk(k, 1)
    if size % CHUNK:
        scores = torch.nn.functional.pad(scores, (0, -size % CHUNK), value=-math.inf)

    chunks = scores.view(batch, -1, CHUNK)
    chosen = chunks.amax(2).topk(k, 1).indices
    candidates = chunks.gather(1, chosen[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    values, indices = candidates.topk(k, 1)
    chunk = chosen.gather(1, indices // CHUNK)
    return values, chunk * CHUNK + indices % CHUNK


def start(model: Transformer, source: Tensor, beam: int, max_length: int) -> tuple[State, State]:
    """Encodes source [B, S]; returns (state of the search before its first step, tensors that its
    steps only read).

    Args:
        max_length: most words of a hypothesis, its EOS included.
    """
    batch = len(source)
    device = source.device
    memory, mask = model.encode(source)
    reads = {"memory_mask": mask}
    empty = (source == PAD).all(1)

    words = (batch, beam, max_length)
    scores = torch.full((batch, beam), MASKED, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    state = {
        "running": ~empty.all(),
        "time": torch.zeros((), dtype=torch.int32, device=device),
        "last": torch.full((batch, beam), EOS, dtype=torch.int32, device=device),
        "tokens": torch.full(words, PAD, dtype=torch.int32, device=device),
        "ancestors": torch.zeros(words, dtype=torch.int32, device=device),
        # One hypothesis at first: the others would be equal to it.
        "scores": scores.index_fill(1, first, 0.0),
        "finished": torch.where(empty, beam, 0).to(torch.int32)[:, None],
        "finished_tokens": torch.full(words, PAD, dtype=torch.int32, device=device),
        "finished_scores": torch.full((batch, beam), MASKED, device=device),
    }

    heads = model.arch.heads
    cache = (batch, heads, max_length, beam, model.arch.dim // heads)
    for i, layer in enumerate(model.decoder.layers):
        keys, values = layer.encoder_attn.keys_and_values(memory)
        reads[f"memory_keys.{i}"] = keys
        reads[f"memory_values.{i}"] = values
        state[f"keys.{i}"] = torch.zeros(cache, dtype=memory.dtype, device=device)
        state[f"values.{i}"] = torch.zeros(cache, dtype=memory.dtype, device=device)
    return state, reads


def decode_last(
    model: Transformer, state: State, reads: State, mask: Tensor, column: Tensor
) -> tuple[Tensor, State]:
    """Runs the decoder on the last word of each hypothesis.

    Args:
        mask: [B, 1, beam, times * beam], which slots of the first times a hypothesis sees, see
            `score_mask`.
        column: int64 [1], the time whose slots in the cache are written.

    Returns:
        Logits [B, beam, words], float32, and the new keys and values of the state.
    """
    last = state["last"]
    times = mask.shape[3] // last.shape[1]
    position = (state["time"] + PAD + 1).expand(last.shape)
    written = {}

    x = model.decoder.embed(last, position)
    for i, layer in enumerate(model.decoder.layers):

        def attend_to_history(y: Tensor, i: int = i, attention=layer.self_attn) -> Tensor:
            own_keys, own_values = attention.keys_and_values(y)
            keys = _write(state[f"keys.{i}"], column, own_keys)
            values = _write(state[f"values.{i}"], column, own_values)
            written[f"keys.{i}"] = keys
            written[f"values.{i}"] = values
            return attention.attend(y, _slots(keys, times), _slots(values, times), mask)

        def attend_to_source(y: Tensor, i: int = i, attention=layer.encoder_attn) -> Tensor:
            keys = reads[f"memory_keys.{i}"]
            values = reads[f"memory_values.{i}"]
            return attention.attend(y, keys, values, reads["memory_mask"])

        x = layer.residual(x, layer.self_attn_layer_norm, attend_to_history)
        x = layer.residual(x, layer.encoder_attn_layer_norm, attend_to_source)
        x = layer.feed_forward(x)
    return model.logits(model.decoder.normalized(x)).float(), written


def _write(cache: Tensor, column: Tensor, own: Tensor) -> Tensor:
    """Returns a cache [B, H, T, beam, D] with the keys or values [B, beam, H, D] of the last words
    in a column."""
    slots = own.transpose(1, 2)[:, :, None]
    if cache.device.type in NATIVE_DEVICES:
        # In place: a copy of the cache would cost more than the step.
        return cache.index_copy_(2, column, slots)
    return cache.index_copy(2, column, slots)


def _slots(cache: Tensor, times: int) -> Tensor:
    """Returns the slots of the first times of a cache, as `attend` takes them: [B, times * beam, H,
    D]."""
    return cache[:, :, :times].flatten(2, 3).transpose(1, 2)


def continued(logits: Tensor, scores: Tensor, time: Tensor, limit: Tensor) -> Tensor:
    """Returns the log-probability [B, beam, words] of each hypothesis with each next word: never
    PAD, EOS not first, only EOS at the end."""
    word = torch.arange(logits.shape[2], device=logits.device)
    last_step = (time >= limit)[:, None, None]
    forbidden = (word == PAD) | ((word == EOS) & (time < 1)) | ((word != EOS) & last_step)
    if logits.device.type in NATIVE_DEVICES:
        return logits.log_softmax(2).masked_fill_(forbidden, MASKED).add_(scores[:, :, None])

    largest = logits.amax(2, keepdim=True)
    normalizer = (logits - largest).exp().sum(2, keepdim=True).log() + largest
    return torch.where(forbidden, MASKED, logits - normalizer) + scores[:, :, None]


def step(model: Transformer, state: State, reads: State, length_penalty: float) -> State:
    """Returns the state one word later.

    Args:
        reads: tensors of `start`, and "limit", int32 [B]: most words of a sentence's hypotheses
            before EOS.
        length_penalty: exponent of the length by which a finished hypothesis' log-probability is
            divided.
    """
    time = state["time"]
    device = time.device
    beam, max_length = state["tokens"].shape[1:]
    now = torch.arange(max_length, device=device, dtype=torch.int32) == time
    column = time.to(torch.int64)[None]
    beams = torch.arange(beam, device=device, dtype=torch.int32)
    ancestors = torch.where(now, beams[:, None], state["ancestors"])

    # A hypothesis sees its ancestors among all slots up to now: [B, beam, times * beam].
    if device.type in NATIVE_DEVICES:  # shapes may vary there
        times = int(time) + 1
    else:
        times = max_length
    past = torch.arange(times, device=device, dtype=torch.int32) <= time
    allowed = (ancestors[:, :, :times, None] == beams) & past[:, None]
    mask = score_mask(allowed.flatten(2))
    logits, written = decode_last(model, state, reads, mask, column)
    new = state | written

    # The best words after all hypotheses of a sentence: [B, 2 * beam], best first.
    next_scores = continued(logits, state["scores"], time, reads["limit"])
    candidate_scores, index = top_k(next_scores.flatten(1), 2 * beam)
    words = logits.shape[2]
    parent = (index // words).to(torch.int32)
    chosen = (index % words).to(torch.int32)
    histories = _select(state["tokens"], parent.to(torch.int64))
    candidates = torch.where(now, chosen[:, :, None], histories)

    # Hypotheses end here if they are among the best `beam` candidates and there is room: earlier
    # ones stay.
    ends = (chosen == EOS) & (candidate_scores > MASKED / 2)
    rank = torch.arange(2 * beam, device=device, dtype=torch.int32)
    ending = ends & (rank < beam)
    ending &= ending.int().cumsum(1) + state["finished"] <= beam
    divisor = (time + 1).float() ** length_penalty
    normalized = torch.where(ending, candidate_scores / divisor, MASKED)

    all_scores = torch.cat([state["finished_scores"], normalized], 1)
    best_scores, best = all_scores.topk(beam, 1)
    all_tokens = torch.cat([state["finished_tokens"], candidates], 1)
    new["finished_scores"] = best_scores
    new["finished_tokens"] = _select(all_tokens, best)
    new["finished"] = state["finished"] + ending.int().sum(1, keepdim=True, dtype=torch.int32)

    # The best `beam` that continue.
    alive = (ends.int() * 2 * beam + rank).topk(beam, 1, largest=False).indices
    new["scores"] = torch.where(ends, MASKED, candidate_scores).gather(1, alive)
    new["last"] = chosen.gather(1, alive)
    new["tokens"] = _select(candidates, alive)
    parents = parent.gather(1, alive).to(torch.int64)
    new["ancestors"] = _select(ancestors, parents)
    new["time"] = time + 1
    new["running"] = (new["finished"] < beam).any() & (new["time"] < max_length)
    return new


def _select(hypotheses: Tensor, indices: Tensor) -> Tensor:
    """Returns [B, m, T], the hypotheses of [B, n, T] at indices int64 [B, m]."""
    length = hypotheses.shape[2]
    return hypotheses.gather(1, indices[:, :, None].expand(-1, -1, length))


def grown(state: State, max_length: int) -> State:
    """Returns the state with space for `max_length` words per hypothesis; it is running while a
    sentence is unfinished."""
    new = dict(state)
    for name, tensor in state.items():
        has_words = name in ("tokens", "finished_tokens", "ancestors")
        if not has_words and not name.startswith(("keys.", "values.")):
            continue
        # Words are dimension 2 of all of them; padding is given for the last dimension first.
        padding = [0, 0] * (tensor.dim() - 3) + [0, max_length - tensor.shape[2]]
        filler = PAD if name.endswith("tokens") else 0
        new[name] = torch.nn.functional.pad(tensor, padding, value=filler)
    new["running"] = (state["finished"] < state["tokens"].shape[1]).any()
    return new


class Found:
    """The finished hypotheses of all sentences of a search, also of those that its state no longer
    has."""

    def __init__(self, max_length: int):
        self.max_length = max_length
        self.rows: Tensor | None = None  # of the sentences in the state; None: all

    def take(self, state: State) -> None:
        """Takes what the sentences of a state have found so far."""
        tokens = state["finished_tokens"]
        length = tokens.shape[2]
        if self.rows is None:
            missing = self.max_length - length
            self.tokens = torch.nn.functional.pad(tokens, [0, missing], value=PAD)
            self.scores = state["finished_scores"]
        else:
            self.tokens[self.rows, :, :length] = tokens
            self.scores[self.rows] = state["finished_scores"]

    def dropped(self, state: State, reads: State) -> tuple[State, State]:
        """Returns a state and what it reads without the sentences that are finished, once they are
        an eighth of it: moving the others costs as much as a step."""
        left = (state["finished"] < state["tokens"].shape[1])[:, 0].nonzero()[:, 0]
        if 8 * len(left) > 7 * len(state["finished"]):
            return state, reads

        self.take(state)
        self.rows = left if self.rows is None else self.rows[left]
        return _rows(state, left), _rows(reads, left)


def _rows(tensors: State, rows: Tensor) -> State:
    """Returns these rows of all tensors; "running" and "time", which have none, as they are."""
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
        limit: int32 [B], most words before EOS in the hypotheses of each sentence, below
            max_length.
        loop: runs `step` with this model and length_penalty while the state is "running"; None: a
            Python loop for devices that run operation by operation: it reads that flag in every
            round, and drops sentences that have all their hypotheses.

    Returns:
        Best first: tokens int32 [B, beam, max_length], EOS included, then PAD; scores [B, beam],
        log-probability / length ** length_penalty. Where there are fewer than `beam` hypotheses (a
        row of PAD has none), the others are PAD only, with the score MASKED.
    """
    if max_length > model.arch.max_positions:  # a compiler would clamp the position and say nothing
        positions = f"the model has {model.arch.max_positions} positions"
        raise ValueError(f"hypotheses of {max_length} words; {positions}")

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

        # The last few words have no loop of their own.
        if 3 * length < max_length:
            length = 2 * length
        else:
            length = max_length
        state = grown(state, length)

    # Candidates carry words of the hypothesis whose place they took: after their EOS, and where no
    # hypothesis has ended.
    found.take(state)
    tokens = found.tokens
    scores = found.scores
    ends_so_far = (tokens == EOS).int().cumsum(2)
    has_ended = ends_so_far - (tokens == EOS).int() > 0
    is_none = (scores == MASKED)[:, :, None]
    return torch.where(has_ended | is_none, PAD, tokens), scores
