"""Continuous batching: requests join and leave a running batch. Each gets the tokens that it would get alone.

Shape suffixes as in model.py: B rows, T new tokens, S tokens of a row, K key/value heads, H head, V
vocabulary; R rows that get a token, W the most likely tokens, sorted.
"""

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Optional
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.activity import tick
from common.text import print_safely
from config import ModelConfig
from model import Transformer, evaluation_mode
from model_kernels.attention import AttentionPlan, by_layer, choose_kernel, precompute_freqs, window_mask
from parallel.fsdp import is_sharded, same_on_all
from parallel.ranks import widened

# Attention reads a multiple of this many tokens: few distinct lengths suit a GPU's allocator and kernels.
LENGTH_MULTIPLE = {"cuda": 128}
TOP_CANDIDATES = 512  # tokens sorted first; sorting the whole vocabulary takes ten times longer
FIXED_POINT, UNNORMALIZED_POINT = 2.0**52, 2.0**42  # scales for sums of probabilities, and of numbers below 1
EAGER_STEPS = 4  # take about as long as the capture of a CUDA graph
CAPTURING = threading.Lock()  # a stream captures one graph at a time
PREFILL_TOKENS = 256  # default prefill budget of a step; a larger one delays requests that are decoding
SUPPRESSED_IDS: WeakKeyDictionary[Transformer, Tensor] = WeakKeyDictionary()


def never_sample(model: Transformer, ids: Iterable[int]) -> None:
    """Exclude ids from all samples of a model."""
    known = [each for each in ids if 0 <= each < model.vocab_size]
    SUPPRESSED_IDS[model] = torch.tensor(known, dtype=torch.int64, device=model.norm.weight.device)


class RowCache:
    """A KV cache in one block of memory, in which each row holds up to `length` tokens, prompt included.

    `Transformer.forward` asks it for the plan of the next tokens, which adds these to the cache.
    """

    def __init__(self, config: ModelConfig, rows: int, length: int, device: torch.device, dtype: torch.dtype):
        # The extra column absorbs writes of padding past a row's capacity; no token attends to it.
        shape = (config.n_layers, rows, length + 1, config.n_kv_heads, config.head_dim)
        # On a CPU, a head's tokens lie together; bf16 matmuls read keys faster if transposed in memory.
        keys_order = (0, 1, 3, 4, 2) if dtype == torch.bfloat16 else (0, 1, 3, 2, 4)
        orders = (keys_order, (0, 1, 3, 2, 4)) if device.type == "cpu" else ((0, 1, 2, 3, 4),) * 2
        self.keys, self.values = (torch.empty_permuted(shape, order, device=device, dtype=dtype).zero_()
                                  for order in orders)
        self.index_S = torch.arange(length + 1, device=device)
        self.cos_1S1H, self.sin_1S1H = precompute_freqs(config, self.index_S[None])
        self.config, self.rows, self.used = config, range(rows), [0] * rows
        self.kinds = config.layer_kinds
        self.static = device.type == "cuda"  # kernels read the place of a single token, as a graph needs
        self.rows_B = self.used_B = None  # copies on the device, for rows that slices cannot address

    def at(self, rows: Sequence[int], used: Sequence[int]) -> "RowCache":
        """Return a view of some rows, given the number of tokens that each of them holds."""
        view = copy(self)
        view.rows, view.used, view.rows_B, view.used_B = rows, used, None, None
        return view

    def plan(self, tokens: int) -> list[AttentionPlan]:
        """Make room for this many tokens of each row; return the plan of each layer."""
        device, length, longest = self.index_S.device, len(self.index_S), max(self.used)
        block = slice(self.rows[0], self.rows[0] + len(self.rows))
        adjacent = [*self.rows] == [*range(block.start, block.stop)]
        new = slice(longest, longest + tokens)
        if (tokens > 1 or not self.static) and adjacent and min(self.used) == longest and new.stop <= length:
            self.to_write, self.to_read = (block, new), block  # slices avoid a copy
            cos, sin, places_BT = self.cos_1S1H[:, new], self.sin_1S1H[:, new], self.index_S[None, new]
        else:
            if self.used_B is None:
                self.used_B, self.rows_B = torch.tensor([self.used, [*self.rows]], device=device)
            places_BT = (self.used_B[:, None] + self.index_S[:tokens]).clamp(max=length - 1)
            self.used_B += tokens
            self.to_write = (self.rows_B[:, None], places_BT)
            self.to_read = block if adjacent else self.rows_B
            cos, sin = self.cos_1S1H[0, places_BT], self.sin_1S1H[0, places_BT]
        multiple = LENGTH_MULTIPLE.get(device.type, 1) if longest else 1
        self.end = min(-(-new.stop // multiple) * multiple, length)
        self.used = [used + tokens for used in self.used]
        mask = window = None  # causal, or a single token that attends to all
        if longest and (tokens > 1 or multiple > 1 or self.end != min(self.used)):
            mask = (self.index_S[:self.end] <= places_BT[..., None])[:, None]
        if self.config.sliding_window is not None and self.end > self.config.sliding_window:
            window = window_mask(self.config, places_BT, self.index_S[None, :self.end])
        choose = partial(choose_kernel, config=self.config, device=device, dtype=self.keys.dtype)
        # On a GPU, kernels for causal attention plan every new length.
        kernel = choose("causal" if mask is None and tokens > 1 and device.type == "cpu" else "mask")
        full = windowed = AttentionPlan(kernel, cos, sin, mask)
        if window is not None:
            windowed = full._replace(kernel=choose("mask"), mask_B1TS=window)
        return [plan._replace(store=partial(self._store, layer))
                for layer, plan in enumerate(by_layer(self.kinds, full, windowed))]

    def _store(self, layer: int, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        keys[self.to_write], values[self.to_write] = k_BTKH, v_BTKH
        return keys[self.to_read, :self.end], values[self.to_read, :self.end]


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. The order of operations is that of transformers' logits processors."""

    temperature: float = 0.0  # 0 = always the most likely token
    top_p: float = 1.0  # sample from the smallest set of tokens with this probability
    top_k: int = 0  # sample from at most this many tokens; 0 = all
    min_p: float = 0.0  # sample from tokens at least this times as probable as the most likely
    repetition_penalty: float = 1.0  # above 1: tokens of the prompt and the completion become less likely
    seed: int = 0
    presence_penalty: float = 0.0  # subtracted from the logit of each token in the completion
    frequency_penalty: float = 0.0  # the same, once per occurrence
    by_id: bool = False  # order tokens by id instead of by probability: fast, but no token can be cut


class SamplingTensors:
    """The sampling parameters of several rows, as columns on the device."""

    def __init__(self, samplings: Sequence[Sampling], device: torch.device | str = "cpu"):
        def column(name: str, rows: Sequence[Sampling]) -> Tensor:
            return torch.tensor([getattr(sampling, name) for sampling in rows], device=device)[:, None]

        self.penalty_B1 = None
        if any(sampling.repetition_penalty != 1 for sampling in samplings):
            self.penalty_B1 = column("repetition_penalty", samplings)
        self.presence_B1 = None
        if any(sampling.presence_penalty or sampling.frequency_penalty for sampling in samplings):
            self.presence_B1, self.frequency_B1 = (column(f"{name}_penalty", samplings)
                                                   for name in ("presence", "frequency"))
        self.by_id = all(sampling.by_id for sampling in samplings)  # no batch has both kinds
        rows = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
        self.sampled_R = torch.tensor(rows, device=device) if rows else None  # None = all greedy
        if rows:
            sampled = [samplings[row] for row in rows]
            self.temperature_R1 = column("temperature", sampled)
        if rows and not self.by_id:
            self.top_k_R1 = column("top_k", sampled)
            self.top_p_R1, self.min_p_R1 = column("top_p", sampled), column("min_p", sampled)
            self.highest_top_k = max(sampling.top_k for sampling in sampled)


def penalize(logits_BV: Tensor, seen_BV: Tensor, penalty_B1: Tensor) -> Tensor:
    """Make seen ids less likely. Source: Keskar et al. 2019 (arXiv:1909.05858)."""
    penalized_BV = torch.where(logits_BV < 0, logits_BV * penalty_B1, logits_BV / penalty_B1)
    return torch.where(seen_BV, penalized_BV, logits_BV)


def choose(logits_BV: Tensor, draws_B: Tensor, samplings: SamplingTensors) -> Tensor:
    """Return (B,) ids: the most likely, or one sampled by inverting the CDF at the draw, from [0, 1)."""
    sampled_R = samplings.sampled_R
    if sampled_R is not None and len(sampled_R) == len(logits_BV):
        return sample(logits_BV, draws_B, samplings)
    chosen_B = logits_BV.argmax(dim=-1)
    if sampled_R is not None:
        chosen_B[sampled_R] = sample(logits_BV[sampled_R], draws_B[sampled_R], samplings)
    return chosen_B


def running_sum(probability_RW: Tensor) -> Tensor:
    """Return each row's cumulative sums, in fixed point: a GPU adds floats in a varying order."""
    return (probability_RW * FIXED_POINT).long().cumsum(dim=-1) / FIXED_POINT


def sample(logits_RV: Tensor, draws_R: Tensor, samplings: SamplingTensors) -> Tensor:
    """Sample (R,) ids with temperature, top-k, top-p and min-p.

    Source: Holtzman et al. 2020 (arXiv:1904.09751): top-p; Nguyen et al. 2024 (arXiv:2407.01082): min-p.
    """
    # Subtract the maximum first: logits divided by a small temperature would overflow.
    scaled_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)).div_(samplings.temperature_R1)
    if samplings.by_id:
        cumulative_RV = scaled_RV.exp_().mul_(UNNORMALIZED_POINT).long().cumsum(dim=-1)
        threshold_R1 = (widened(draws_R[:, None]) * cumulative_RV[:, -1:]).long()
        chosen_R = torch.searchsorted(cumulative_RV, threshold_R1, right=True)[:, 0]
        return chosen_R.clamp(max=scaled_RV.shape[1] - 1)  # NaN logits have no sum
    top_k_R1, top_p_R1, min_p_R1 = samplings.top_k_R1, samplings.top_p_R1, samplings.min_p_R1
    uncut_R1 = (top_k_R1 == 0) & (top_p_R1 == 1) & (min_p_R1 == 0)
    vocabulary = scaled_RV.shape[1]
    # On a GPU, sorting all tokens is faster than asking the device whether the first ones suffice.
    first = max(TOP_CANDIDATES, samplings.highest_top_k) if logits_RV.device.type == "cpu" else vocabulary
    for width in (min(first, vocabulary), vocabulary):
        if width < vocabulary:
            sorted_RW, ids_RW = scaled_RV.topk(width, dim=-1)
        else:
            sorted_RW, ids_RW = scaled_RV.sort(dim=-1, descending=True, stable=True)
        in_top_k_RW = (torch.arange(width, device=ids_RW.device) < top_k_R1) | (top_k_R1 == 0)
        weights_RW = sorted_RW.exp() * in_top_k_RW
        total_R1 = torch.where(top_k_R1 == 0, scaled_RV.exp(), 0).sum(dim=-1, keepdim=True)
        probability_RW = weights_RW / torch.where(top_k_R1 == 0, total_R1, weights_RW.sum(-1, keepdim=True))
        before_RW = running_sum(probability_RW) - probability_RW
        kept_RW = in_top_k_RW & (before_RW < top_p_R1) & (probability_RW >= min_p_R1 * probability_RW[:, :1])
        cumulative_RW = running_sum(probability_RW * kept_RW)
        mass_R1 = torch.where(uncut_R1 & (width < vocabulary), 1, cumulative_RW[:, -1:])
        passed_R = (cumulative_RW <= draws_R[:, None] * mass_R1).sum(dim=-1)
        # Enough if the nucleus ends within these, or if nothing is cut and the draw falls on one of these.
        if width == vocabulary or bool((~kept_RW[:, -1] | (uncut_R1[:, 0] & (passed_R < width))).all()):
            break
    # Rounding in the sums must not select a token outside the nucleus.
    index_R = passed_R.minimum(kept_RW.sum(dim=-1) - 1).clamp(min=0)  # NaN logits keep none
    return ids_RW.gather(1, index_R[:, None])[:, 0]


class Score(NamedTuple):
    """A token of the completion, with log-probabilities before penalties and temperature."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]


@dataclass(eq=False)
class Request:
    """A prompt, and its completion so far."""

    prompt_ids: Sequence[int]  # at least one
    max_new_tokens: int  # at least one
    sampling: Sampling = Sampling()
    stop_ids: Collection[int] = ()
    draws: Optional[Tensor] = None  # random numbers in [0, 1), one per token; None = drawn from the seed
    output_ids: list[int] = field(default_factory=list)  # the completion, without its stop token
    finish_reason: Optional[str] = None  # "stop", "length" or "cancelled"; None = unfinished
    top_logprobs: Optional[int] = None  # number of alternatives in each score; None = no scores
    scores: list[Score] = field(default_factory=list)  # one per token in `output_ids`

    def take(self, token: int) -> None:
        """Add the next token, or end the request if it is a stop token."""
        if token in self.stop_ids:
            self.finish_reason = "stop"
            return
        self.output_ids.append(token)
        if len(self.output_ids) == self.max_new_tokens:
            self.finish_reason = "length"


@dataclass(eq=False)
class Row:
    """A slot for one request: a row of the cache."""

    index: int
    cached: list[int] = field(default_factory=list)  # tokens whose keys and values are in the cache
    pending: list[int] = field(default_factory=list)  # the request's next input tokens
    request: Optional[Request] = None  # None = free; `cached` then serves prompts with the same prefix
    freed_at: int = 0  # step

    @property
    def running(self) -> Optional[Request]:
        return self.request if self.request and self.request.finish_reason is None else None


class ThreadGraphs(threading.local):
    """The first CUDA graph of a thread. All its graphs share the memory that this one keeps."""

    first: Optional[torch.cuda.CUDAGraph] = None


GRAPHS = ThreadGraphs()


def capture(compute: Callable[[], None]) -> Callable[[], None]:
    """Record the kernels of a function as a CUDA graph, without running them; return how to run them.

    A graph with separate memory would reserve more in each call. Graphs of one thread can share memory,
    because the thread reads one graph's results before it runs another.
    """
    graph, pool = torch.cuda.CUDAGraph(), GRAPHS.first and GRAPHS.first.pool()
    # Only its stream, for which cuBLAS keeps memory: torch.cuda.graph returns free memory to the driver.
    with CAPTURING, torch.cuda.stream(torch.cuda.graph(graph).capture_stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads save, or watch NCCL
        try:
            compute()
        finally:
            graph.capture_end()
    GRAPHS.first = GRAPHS.first or graph
    return graph.replay


class Batch:
    """Rows that share a forward pass of up to `width` tokens each, with their state on the device.

    A decoding batch needs no further data from the host until a request joins or ends. On a GPU, one that
    lasts becomes a CUDA graph, because the host needs longer to start a step's kernels than they run.
    """

    captures = True  # whether CUDA graphs work, in this process

    def __init__(self, model: Transformer, rows: Sequence[Row], width: int, cache: RowCache):
        self.model, self.rows, self.width, self.eager_steps, self.replay = model, rows, width, 0, None
        device, pieces = cache.index_S.device, [row.pending[:width] for row in rows]
        padded = [piece + [0] * (width - len(piece)) for piece in pieces]
        self.tokens_BT = torch.tensor(padded, device=device)
        last = [number * width + len(piece) - 1 for number, piece in enumerate(pieces)]
        self.last_M = torch.tensor(last, device=device)  # among the flattened tokens
        self.cache = cache.at([row.index for row in rows], [len(row.cached) for row in rows])

        # Sampling state of the rows whose input ends in this step
        ready = [index for index, row in enumerate(rows) if len(row.pending) <= width]
        self.requests = [rows[index].request for index in ready]
        if not ready:
            return
        self.ready_R = None if len(ready) == len(rows) else torch.tensor(ready, device=device)
        self.samplings = SamplingTensors([request.sampling for request in self.requests], device)
        draws = [request.draws[len(request.output_ids):] for request in self.requests]
        self.draws_RN = pad_sequence(draws, batch_first=True).to(device)
        self.step_R1 = torch.zeros(len(ready), 1, dtype=torch.int64, device=device)
        self.seen_RV = None
        if self.samplings.penalty_B1 is not None:
            self.seen_RV = torch.zeros(len(ready), model.vocab_size, dtype=torch.bool, device=device)
            for seen_V, request in zip(self.seen_RV, self.requests):
                seen_V[torch.tensor([*request.prompt_ids, *request.output_ids], device=device)] = True
        self.counts_RV = None  # occurrences of each token in the completion
        if self.samplings.presence_B1 is not None:
            counts = [torch.tensor(request.output_ids).long().bincount(minlength=model.vocab_size)
                      for request in self.requests]
            self.counts_RV = torch.stack(counts).to(device, torch.float32)
        counts = (request.top_logprobs for request in self.requests)
        self.top_logprobs = max(-1 if count is None else count for count in counts)

    def compute(self) -> None:
        """Run the model on the next tokens of the rows, and choose the tokens that follow, on the device."""
        logits_RV = self.model(self.tokens_BT, target_index_M=self.last_M, mode="logits", cache=self.cache)
        if not self.requests:
            return
        if self.ready_R is not None:
            logits_RV = logits_RV[self.ready_R]
        if len(suppressed := SUPPRESSED_IDS.get(self.model, ())):
            logits_RV = logits_RV.index_fill(1, suppressed, -math.inf)
        scores_RV = None if self.top_logprobs < 0 else logits_RV.float().log_softmax(dim=-1)
        if self.seen_RV is not None:
            logits_RV = penalize(logits_RV, self.seen_RV, self.samplings.penalty_B1)
        if self.counts_RV is not None:
            logits_RV = logits_RV - self.samplings.frequency_B1 * self.counts_RV
            logits_RV = logits_RV - self.samplings.presence_B1 * (self.counts_RV > 0)
        draws_R = self.draws_RN.gather(1, self.step_R1)[:, 0]
        self.next_R1 = same_on_all(self.model, choose(logits_RV, draws_R, self.samplings))[:, None]
        self.step_R1 += 1
        if self.seen_RV is not None:
            self.seen_RV.scatter_(1, self.next_R1, True)
        if self.counts_RV is not None:
            self.counts_RV.scatter_add_(1, self.next_R1, torch.ones_like(self.counts_RV[:, :1]))
        if scores_RV is not None:
            best = scores_RV.topk(min(self.top_logprobs, scores_RV.shape[1]), dim=-1)
            self.scores = scores_RV.gather(1, self.next_R1)[:, 0], best.indices, best.values
        if self.width == 1:  # a decoding batch feeds the chosen tokens to its next step
            self.tokens_BT.copy_(self.next_R1)

    def compute_or_replay(self) -> None:
        """Do what `compute` does, by a CUDA graph once a batch has run as long as a capture takes."""
        cache, used = self.cache, self.cache.used
        if self.replay and max(used) < cache.end:  # else attention reads more keys than the graph does
            cache.used = [each + 1 for each in used]
            return self.replay()
        self.eager_steps += 1
        if Batch.captures and cache.static and self.eager_steps > EAGER_STEPS and not is_sharded(self.model):
            try:
                self.replay = capture(self.compute)
                return self.replay()
            except RuntimeError as error:
                cache.used, self.replay, Batch.captures = used, None, False
                print_safely(f"generating without CUDA graphs ({str(error).splitlines()[0]})", sys.stderr)
        self.compute()

    def run(self) -> list[Request]:
        """Advance the rows by a step; return the requests that got a token."""
        self.compute_or_replay()
        for row in self.rows:
            row.cached += row.pending[:self.width]
            del row.pending[:self.width]
        if not self.requests:
            return []
        if self.top_logprobs >= 0:
            chosen, ids, values = (each.tolist() for each in self.scores)
        ready = [row for row in self.rows if not row.pending]
        for index, (row, token) in enumerate(zip(ready, self.next_R1[:, 0].tolist())):
            request, row.pending = row.request, [token]
            request.take(token)
            if request.top_logprobs is not None and request.finish_reason != "stop":
                likeliest = [*zip(ids[index], values[index])]
                request.scores.append(Score(token, chosen[index], likeliest[:request.top_logprobs]))
        return self.requests


class Engine:
    """Completes up to `rows` prompts at a time with a model, switched to evaluation mode. Not thread-safe.

    A free row keeps its keys and values, which prompts with the same prefix reuse. If the model is sharded,
    every rank must add the same requests and call `step` equally often.

    `length` is the most tokens of a request, prompt and completion together; `prefill_tokens` of a step.
    """

    def __init__(self, model: Transformer, rows: int, length: int, prefill_tokens: int = PREFILL_TOKENS):
        self.model, self.length, self.prefill_tokens = model.eval(), length, max(rows, prefill_tokens)
        self.device = model.norm.weight.device
        self.cache = RowCache(model.config, rows, length, self.device, model.compute_dtype)
        self.steps = 0
        self._rows = [Row(index) for index in range(rows)]
        self._waiting: deque[Request] = deque()
        self._decode_batch: Optional[Batch] = None

    @property
    def idle(self) -> bool:
        return not self._waiting and not any(row.running for row in self._rows)

    def add(self, request: Request) -> None:
        """Queue a request. Later steps start requests in order of arrival."""
        assert request.prompt_ids and request.max_new_tokens > 0
        assert len(request.prompt_ids) + request.max_new_tokens <= self.length
        if request.draws is None:
            generator = torch.Generator().manual_seed(request.sampling.seed)
            request.draws = torch.rand(request.max_new_tokens, generator=generator)
        self._waiting.append(request)

    def add_all(self, prompts: Iterable[tuple[Sequence[int], Collection[int]]], max_new_tokens: int,
                sampling: Sampling) -> list[Request]:
        """Queue a request for each prompt and its stop tokens; return the requests."""
        # Draw on the CPU and in advance, so that the numbers do not depend on the device or on stop tokens.
        generator = torch.Generator().manual_seed(sampling.seed)
        requests = [Request(ids, max_new_tokens, sampling, stop_ids,
                            torch.rand(max_new_tokens, generator=generator)) for ids, stop_ids in prompts]
        for request in requests:
            self.add(request)
        return requests

    def cancel(self, request: Request) -> None:
        if request.finish_reason is None:
            request.finish_reason = "cancelled"
            if request in self._waiting:
                self._waiting.remove(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Advance each running request by one token, or by a piece of its prompt; return those that changed.

        A changed request has one more token in `output_ids`, a `finish_reason`, or both.
        """
        self.steps += 1
        for row in self._rows:
            if row.request and not row.running:
                row.request, row.pending, row.freed_at = None, [], self.steps
        while self._waiting and any(row.request is None for row in self._rows):
            self._admit(self._waiting.popleft())
        self._move_together()

        # In inference mode, FSDP would gather parameters as tensors that training cannot use.
        with nullcontext() if is_sharded(self.model) else torch.inference_mode():
            running = [row for row in self._rows if row.request]
            decoding = [row for row in running if len(row.pending) == 1]
            prefilling = [row for row in running if len(row.pending) > 1]
            changed = []
            if prefilling:
                longest = max(len(row.pending) for row in prefilling)
                width = min(longest, self.prefill_tokens // len(prefilling))
                changed += Batch(self.model, prefilling, width, self.cache).run()
            if decoding:
                # Removed while it runs: after an error it would not match the rows.
                batch, self._decode_batch = self._decode_batch, None
                if batch is None or batch.requests != [row.request for row in decoding]:
                    batch = Batch(self.model, decoding, 1, self.cache)
                changed += batch.run()
                self._decode_batch = batch
            return changed

    def _move_together(self) -> None:
        """Exchange rows so that the first ones are those with a request: slices of the cache avoid copies."""
        count = sum(row.request is not None for row in self._rows)
        free = [row.index for row in self._rows[:count] if row.request is None]
        for one, other in zip(free, [row.index for row in self._rows[count:] if row.request]):
            for block in (self.cache.keys, self.cache.values):
                block[:, [one, other]] = block[:, [other, one]]
            rows, self._decode_batch = self._rows, None
            rows[one], rows[other] = rows[other], rows[one]
            rows[one].index, rows[other].index = one, other

    def _admit(self, request: Request) -> None:
        """Assign a row to a request, and reuse the longest cached prefix of its prompt."""
        prompt = [*request.prompt_ids]

        def shared_prefix(row: Row) -> int:
            pairs = zip(row.cached, prompt[:-1])  # the last token always runs, for its logits
            return next((n for n, (one, other) in enumerate(pairs) if one != other),
                        min(len(row.cached), len(prompt) - 1))

        whole = (row for row in self._rows if row.cached and shared_prefix(row) == len(prompt) - 1)
        source = next(whole, None) or max(self._rows, key=shared_prefix)
        shared = shared_prefix(source)
        row = source
        if source.request or shared < len(source.cached):
            row = min((row for row in self._rows if row.request is None), key=lambda row: row.freed_at)
            for block in (self.cache.keys, self.cache.values):
                block[:, row.index, :shared] = block[:, source.index, :shared]
        row.cached, row.pending, row.request = prompt[:shared], prompt[shared:], request


def generate(model: Transformer, prompts: Sequence[Sequence[int]], max_new_tokens: int,
             sampling: Sampling = Sampling(), stop_ids: Collection[int] = ()) -> list[list[int]]:
    """Return the completion of each prompt (at least one token id), without its stop token.

    A completion does not depend on the other prompts, apart from the index that selects its random numbers.
    If the model is sharded, every rank must call this.
    """
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    longest = max(map(len, prompts))
    with evaluation_mode(model):
        engine = Engine(model, len(prompts), longest + max_new_tokens, len(prompts) * longest)
        requests = engine.add_all([(ids, stop_ids) for ids in prompts], max_new_tokens, sampling)
        while not engine.idle:
            tick()
            engine.step()
    return [request.output_ids for request in requests]
