"""Continuous batching: requests come and go while others are continued, each as if it were alone.

Shape suffixes as in model.py: B rows, T new tokens, S tokens of a row, K key/value heads, H head, V
vocabulary; R rows of which a token is chosen, W the most likely tokens, ordered.
"""

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from config import ModelConfig
from model import KVCache, Transformer, precompute_freqs
from parallel.fsdp import is_sharded, same_on_all

# Attention reads a multiple of so many tokens: a GPU's memory and kernels serve few lengths best.
GRAIN = {"cuda": 128}
MOST_LIKELY = 512  # tokens that are looked at first, as to order the whole vocabulary takes ten times longer
FIXED_POINT = 2.0**52  # scale of sums of probabilities
READ_AT_ONCE = 256  # tokens of prompts in one step, by default: the pause of those that are being continued


class RowCache(KVCache):
    """Keys and values of the tokens so far of many rows, in one block of memory; each row has its own length.

    Args:
        length: the most tokens of a row, prompt included.
    """

    def __init__(self, config: ModelConfig, rows: int, length: int, device: torch.device, dtype: torch.dtype):
        # The last column takes the padding that is beyond a row's end; no token attends to it.
        shape = (config.n_layers, rows, length + 1, config.n_kv_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.index_S = torch.arange(length + 1, device=device)
        self.cos_1S1H, self.sin_1S1H = precompute_freqs(config, self.index_S[None])
        self.rows, self.used = range(rows), [0] * rows
        self.rows_B = self.used_B = None  # the same on the device, where slices do not suffice

    def at(self, rows: Sequence[int], used: Sequence[int]) -> "RowCache":
        """Return the cache of some rows, in the same memory, which hold so many tokens each."""
        part = copy(self)
        part.rows, part.used, part.rows_B, part.used_B = rows, used, None, None
        return part

    def begin(self, tokens: int) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """The first tokens of all rows need no mask."""
        device, length, longest = self.index_S.device, len(self.index_S), max(self.used)
        block = slice(self.rows[0], self.rows[0] + len(self.rows))
        adjacent = [*self.rows] == [*range(block.start, block.stop)]
        new = slice(longest, longest + tokens)
        if adjacent and min(self.used) == longest and new.stop <= length:
            self.to_write, self.to_read = (block, new), block  # by slices nothing is copied
            cos, sin, places_BT = self.cos_1S1H[:, new], self.sin_1S1H[:, new], self.index_S[None, new]
        else:
            if self.used_B is None:
                self.used_B, self.rows_B = torch.tensor([self.used, [*self.rows]], device=device)
            places_BT = (self.used_B[:, None] + self.index_S[:tokens]).clamp(max=length - 1)
            self.used_B = self.used_B + tokens
            self.to_write = (self.rows_B[:, None], places_BT)
            self.to_read = block if adjacent else self.rows_B
            cos, sin = self.cos_1S1H[0, places_BT], self.sin_1S1H[0, places_BT]
        grain = GRAIN.get(device.type, 1) if longest else 1
        self.end = min(-(-new.stop // grain) * grain, length)
        self.used = [used + tokens for used in self.used]
        return cos, sin, (self.index_S[:self.end] <= places_BT[..., None])[:, None] if longest else None

    def store(self, layer: int, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        keys[self.to_write], values[self.to_write] = k_BTKH, v_BTKH
        return keys[self.to_read, :self.end], values[self.to_read, :self.end]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: as by transformers' logits processors, in their order."""

    temperature: float = 0.0  # 0 = always the most likely token
    top_p: float = 1.0  # sample from the smallest set of tokens with this probability
    top_k: int = 0  # sample from at most this many tokens; 0 = all
    min_p: float = 0.0  # sample from tokens at least this times as probable as the most likely
    repetition_penalty: float = 1.0  # makes what is in the prompt or was written less likely, if above 1
    seed: int = 0
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were written
    frequency_penalty: float = 0.0  # subtracted once for each time that a token was written


class Samplings:
    """How the next tokens of several rows are chosen: columns on the device, which serve many steps."""

    def __init__(self, samplings: Sequence[Sampling], device: torch.device | str = "cpu"):
        def column(name: str, rows: Sequence[Sampling]) -> Tensor:
            return torch.tensor([getattr(sampling, name) for sampling in rows], device=device)[:, None]

        self.penalty_B1 = None
        if any(sampling.repetition_penalty != 1 for sampling in samplings):
            self.penalty_B1 = column("repetition_penalty", samplings)
        self.presence_B1, self.frequency_B1 = None, column("frequency_penalty", samplings)
        if any(sampling.presence_penalty or sampling.frequency_penalty for sampling in samplings):
            self.presence_B1 = column("presence_penalty", samplings)
        rows = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
        self.drawn_R = torch.tensor(rows, device=device) if rows else None  # rows that are sampled
        if rows:
            drawn = [samplings[row] for row in rows]
            self.temperature_R1, self.top_k_R1 = column("temperature", drawn), column("top_k", drawn)
            self.top_p_R1, self.min_p_R1 = column("top_p", drawn), column("min_p", drawn)
            self.highest_top_k = max(sampling.top_k for sampling in drawn)


def penalize(logits_BV: Tensor, seen_BV: Tensor, penalty_B1: Tensor) -> Tensor:
    """Return logits in which seen ids are less likely. Source: Keskar et al. 2019 (arXiv:1909.05858)."""
    penalized_BV = torch.where(logits_BV < 0, logits_BV * penalty_B1, logits_BV / penalty_B1)
    return torch.where(seen_BV, penalized_BV, logits_BV)


def choose(logits_BV: Tensor, draws_B: Tensor, samplings: Samplings) -> Tensor:
    """Return (B,) ids: the most likely, or where the cumulative probability of what is kept passes the draw.

    Args:
        draws_B: uniform in [0, 1).
    """
    drawn_R = samplings.drawn_R
    if drawn_R is not None and len(drawn_R) == len(logits_BV):
        return sample(logits_BV, draws_B, samplings)
    chosen_B = logits_BV.argmax(dim=-1)
    if drawn_R is not None:
        chosen_B[drawn_R] = sample(logits_BV[drawn_R], draws_B[drawn_R], samplings)
    return chosen_B


def running_sum(share_RW: Tensor) -> Tensor:
    """Return the sums of a row up to each number in [0, 1], added in fixed point.

    A GPU adds floats in an order that varies, which DETERMINISTIC=true does not allow.
    """
    return (share_RW * FIXED_POINT).long().cumsum(dim=-1) / FIXED_POINT


def sample(logits_RV: Tensor, draws_R: Tensor, samplings: Samplings) -> Tensor:
    """Return (R,) ids by temperature, top-k, top-p and min-p.

    Source: Holtzman et al. 2020 (arXiv:1904.09751): top-p; Nguyen et al. 2024 (arXiv:2407.01082): min-p.
    """
    # The maximum is subtracted first: divided by a small temperature, logits would overflow.
    scaled_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / samplings.temperature_R1
    top_k_R1, top_p_R1, min_p_R1 = samplings.top_k_R1, samplings.top_p_R1, samplings.min_p_R1
    uncut_R1 = (top_k_R1 == 0) & (top_p_R1 == 1) & (min_p_R1 == 0)
    vocabulary = scaled_RV.shape[1]
    # A GPU orders all tokens sooner than the host could ask it whether the first ones are enough.
    first = max(MOST_LIKELY, samplings.highest_top_k) if logits_RV.device.type == "cpu" else vocabulary
    for width in (min(first, vocabulary), vocabulary):
        if width < vocabulary:
            sorted_RW, ids_RW = scaled_RV.topk(width, dim=-1)
        else:
            sorted_RW, ids_RW = scaled_RV.sort(dim=-1, descending=True, stable=True)
        in_top_k_RW = (torch.arange(width, device=ids_RW.device) < top_k_R1) | (top_k_R1 == 0)
        weights_RW = sorted_RW.exp() * in_top_k_RW
        whole_R1 = torch.where(top_k_R1 == 0, scaled_RV.exp(), 0).sum(dim=-1, keepdim=True)
        probability_RW = weights_RW / torch.where(top_k_R1 == 0, whole_R1, weights_RW.sum(-1, keepdim=True))
        before_RW = running_sum(probability_RW) - probability_RW
        kept_RW = in_top_k_RW & (before_RW < top_p_R1) & (probability_RW >= min_p_R1 * probability_RW[:, :1])
        cumulative_RW = running_sum(probability_RW * kept_RW)
        mass_R1 = torch.where(uncut_R1 & (width < vocabulary), 1, cumulative_RW[:, -1:])
        passed_R = (cumulative_RW <= draws_R[:, None] * mass_R1).sum(dim=-1)
        # Enough if all that is kept was looked at, or if all tokens are kept and the draw lies among these.
        if width == vocabulary or bool((~kept_RW[:, -1] | (uncut_R1[:, 0] & (passed_R < width))).all()):
            break
    # Rounding in the sums must not lead out of what is kept.
    index_R = passed_R.minimum(kept_RW.sum(dim=-1) - 1)
    return ids_RW.gather(1, index_R[:, None])[:, 0]


class Score(NamedTuple):
    """A written token, and log-probabilities before penalties and temperature."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]


@dataclass(eq=False)
class Request:
    """A prompt to continue, and what has been written so far."""

    prompt_ids: Sequence[int]  # at least one
    max_new_tokens: int  # at least one
    sampling: Sampling = Sampling()
    stop_ids: Collection[int] = ()
    draws: Optional[Tensor] = None  # random numbers in [0, 1), one for each token; None = of the seed
    written: list[int] = field(default_factory=list)  # without the stop token
    finish_reason: Optional[str] = None  # "stop", "length" or "cancelled" once it is done
    top_logprobs: Optional[int] = None  # how many likely tokens a score lists; None = no scores
    scores: list[Score] = field(default_factory=list)  # one for each token in `written`


@dataclass(eq=False)
class Row:
    """A row of the cache."""

    index: int
    held: list[int] = field(default_factory=list)  # the tokens whose keys and values are in the cache
    unread: list[int] = field(default_factory=list)  # those of the request that come next
    request: Optional[Request] = None  # None = free; then `held` is kept for what begins with it
    since: int = 0  # the step in which it became free

    @property
    def running(self) -> Optional[Request]:
        return self.request if self.request and self.request.finish_reason is None else None


class Batch:
    """Rows that are run together. What a step needs of them is on the device.

    Rows that are written need nothing more from the host until another request joins or one ends.

    Args:
        width: the most tokens that are read of a row in one step.
        cache: of all rows.
    """

    def __init__(self, model: Transformer, rows: Sequence[Row], width: int, cache: RowCache):
        self.model, self.rows, self.width = model, rows, width
        device, pieces = cache.index_S.device, [row.unread[:width] for row in rows]
        padded = [piece + [0] * (width - len(piece)) for piece in pieces]
        self.tokens_BT = torch.tensor(padded, device=device)
        self.last_B = torch.tensor([len(piece) - 1 for piece in pieces], device=device)
        self.cache = cache.at([row.index for row in rows], [len(row.held) for row in rows])

        # How the next token is chosen, for the rows that have nothing more to read
        done = [index for index, row in enumerate(rows) if len(row.unread) <= width]
        self.requests = [rows[index].request for index in done]
        if not done:
            return
        self.done_R = None if len(done) == len(rows) else torch.tensor(done, device=device)
        self.samplings = Samplings([request.sampling for request in self.requests], device)
        draws = [request.draws[len(request.written):] for request in self.requests]
        self.draws_RN, self.steps = pad_sequence(draws, batch_first=True).to(device), 0
        self.seen_RV = None
        if self.samplings.penalty_B1 is not None:
            self.seen_RV = torch.zeros(len(done), model.vocab_size, dtype=torch.bool, device=device)
            for seen_V, request in zip(self.seen_RV, self.requests):
                seen_V[torch.tensor([*request.prompt_ids, *request.written], device=device)] = True
        self.counts_RV = None  # how often each token was written
        if self.samplings.presence_B1 is not None:
            counts = [torch.tensor(request.written).long().bincount(minlength=model.vocab_size)
                      for request in self.requests]
            self.counts_RV = torch.stack(counts).to(device, torch.float32)
        self.top = max(-1 if each.top_logprobs is None else each.top_logprobs for each in self.requests)

    def run(self) -> list[Request]:
        """Read the next tokens of the rows; return the requests that got a token, having no more to read."""
        logits_RV = self.model.logits(self.tokens_BT, cache=self.cache, only_B=self.last_B)
        for row in self.rows:
            row.held += row.unread[:self.width]
            del row.unread[:self.width]
        if not self.requests:
            return []
        if self.done_R is not None:
            logits_RV = logits_RV[self.done_R]
        scores_RV = None if self.top < 0 else logits_RV.float().log_softmax(dim=-1)
        if self.seen_RV is not None:
            logits_RV = penalize(logits_RV, self.seen_RV, self.samplings.penalty_B1)
        if self.counts_RV is not None:
            logits_RV = logits_RV - self.samplings.frequency_B1 * self.counts_RV
            logits_RV = logits_RV - self.samplings.presence_B1 * (self.counts_RV > 0)
        next_R = same_on_all(self.model, choose(logits_RV, self.draws_RN[:, self.steps], self.samplings))

        # The next step of rows that are written reads the tokens that were chosen.
        self.tokens_BT, self.steps = next_R[:, None], self.steps + 1
        if self.seen_RV is not None:
            self.seen_RV.scatter_(1, self.tokens_BT, True)
        if self.counts_RV is not None:
            self.counts_RV.scatter_add_(1, self.tokens_BT, torch.ones_like(self.counts_RV[:, :1]))
        if scores_RV is not None:
            best = scores_RV.topk(min(self.top, scores_RV.shape[1]), dim=-1)
            chosen, ids, values = (each.tolist() for each in (
                scores_RV.gather(1, self.tokens_BT)[:, 0], best.indices, best.values))
        done = [row for row in self.rows if not row.unread]
        for index, (row, token) in enumerate(zip(done, next_R.tolist())):
            request, row.unread = row.request, [token]
            if token in request.stop_ids:
                request.finish_reason = "stop"
                continue
            request.written.append(token)
            if request.top_logprobs is not None:
                likeliest = [*zip(ids[index], values[index])]
                request.scores.append(Score(token, chosen[index], likeliest[:request.top_logprobs]))
            if len(request.written) == request.max_new_tokens:
                request.finish_reason = "length"
        return self.requests


class Engine:
    """Continues many prompts with one model, each as if it were alone. Not thread-safe.

    A free row keeps its tokens. A prompt that begins as any row does takes over keys and values from there.
    Collective if the model is sharded: every rank must add the same requests, and step.

    Args:
        model: is put into evaluation mode.
        rows: how many requests are continued at once; the others wait.
        length: the most tokens of a request, prompt and continuation.
        read_at_once: the most tokens of prompts that are read in one step.
    """

    def __init__(self, model: Transformer, rows: int, length: int, read_at_once: int = READ_AT_ONCE):
        self.model, self.length, self.read_at_once = model.eval(), length, max(rows, read_at_once)
        self.device = model.norm.weight.device
        self.cache = RowCache(model.config, rows, length, self.device, model.compute_dtype)
        self.steps = 0
        self._rows = [Row(index) for index in range(rows)]
        self._waiting: deque[Request] = deque()
        self._writing: Optional[Batch] = None

    @property
    def idle(self) -> bool:
        return not self._waiting and not any(row.running for row in self._rows)

    def add(self, request: Request) -> None:
        """Take a request; it begins in a later `step`, first come, first served."""
        assert request.prompt_ids and request.max_new_tokens > 0
        assert len(request.prompt_ids) + request.max_new_tokens <= self.length
        if request.draws is None:
            generator = torch.Generator().manual_seed(request.sampling.seed)
            request.draws = torch.rand(request.max_new_tokens, generator=generator)
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request now, unless it is done."""
        if request.finish_reason is None:
            request.finish_reason = "cancelled"
            if request in self._waiting:
                self._waiting.remove(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Write one more token of each request that is running; return those that changed.

        A changed request has one more token in `written`, or a `finish_reason`, or both. A request whose
        prompt is still being read does not change.
        """
        self.steps += 1
        for row in self._rows:
            if row.request and not row.running:
                row.request, row.unread, row.since = None, [], self.steps
        while self._waiting and any(row.request is None for row in self._rows):
            self._admit(self._waiting.popleft())

        # In inference mode sharded parameters would be gathered as tensors that training cannot use.
        with nullcontext() if is_sharded(self.model) else torch.inference_mode():
            running = [row for row in self._rows if row.request]
            writing = [row for row in running if len(row.unread) == 1]
            reading = [row for row in running if row not in writing]
            changed = []
            if reading:
                longest = max(len(row.unread) for row in reading)
                width = min(longest, self.read_at_once // len(reading))
                changed += Batch(self.model, reading, width, self.cache).run()
            if writing:
                # Taken out: after an error it would not be what the rows hold.
                batch, self._writing = self._writing, None
                if batch is None or batch.requests != [row.request for row in writing]:
                    batch = Batch(self.model, writing, 1, self.cache)
                changed += batch.run()
                self._writing = batch
            return changed

    def _admit(self, request: Request) -> None:
        """Give a request a row, with as much of its prompt as some row has read already."""
        prompt = [*request.prompt_ids]

        def begins_alike(row: Row) -> int:
            pairs = zip(row.held, prompt[:-1])  # the last token is read in any case, for its logits
            return next((n for n, (one, other) in enumerate(pairs) if one != other),
                        min(len(row.held), len(prompt) - 1))

        source = max(self._rows, key=begins_alike)
        known = begins_alike(source)
        row = source
        if source.request or known < len(source.held):
            row = min((row for row in self._rows if row.request is None), key=lambda row: row.since)
            for of_all in (self.cache.keys, self.cache.values):
                of_all[:, row.index, :known] = of_all[:, source.index, :known]
        row.held, row.unread, row.request = prompt[:known], prompt[known:], request
