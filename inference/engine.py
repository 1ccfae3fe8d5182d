"""Continuous batching: requests come and go while others are continued.

Shape suffixes: B rows that are run together, T tokens, R rows of which a token is chosen, V vocabulary.
"""

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor

from inference.row_cache import RowCache
from inference.sampling import Sampling, choose, penalize
from model import Transformer
from parallel.sharding import is_sharded, same_on_all

READ_AT_ONCE = 256  # tokens of prompts in one step, by default: the pause of those that are being continued


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

    def take(self, token: int) -> None:
        """Note the next token."""
        if token in self.stop_ids:
            self.finish_reason = "stop"
            return
        self.written.append(token)
        if len(self.written) == self.max_new_tokens:
            self.finish_reason = "length"


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
        """Its request, unless that is done."""
        return self.request if self.request and self.request.finish_reason is None else None


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

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
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
            return [request for rows in (reading, writing) if rows for request in self._run(rows)]

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

    def _run(self, rows: Sequence[Row]) -> list[Request]:
        """Read the next tokens of some rows; return the requests that got a token, having no more to read."""
        longest = min(max(len(row.unread) for row in rows), self.read_at_once // len(rows))
        pieces = [row.unread[:longest] for row in rows]
        padded = [piece + [0] * (longest - len(piece)) for piece in pieces]
        tokens_BT = torch.tensor(padded, device=self.device)
        last_B = torch.tensor([len(piece) - 1 for piece in pieces], device=self.device)
        cache = self.cache.at([row.index for row in rows], [len(row.held) for row in rows])
        logits_BV = self.model.logits(tokens_BT, cache=cache, only_B=last_B)
        for row, piece in zip(rows, pieces):
            row.held += piece
            del row.unread[:len(piece)]

        # The next token of those that have read everything.
        done = [index for index, row in enumerate(rows) if not row.unread]
        if not done:
            return []
        requests = [rows[index].request for index in done]
        logits_RV = logits_BV if len(done) == len(rows) else logits_BV[done]
        for index, request in enumerate(requests):
            penalty, seen = request.sampling.repetition_penalty, [*request.prompt_ids, *request.written]
            if penalty != 1:
                logits_RV[index] = penalize(logits_RV[index], seen, penalty)
        draws_R = torch.stack([request.draws[len(request.written)] for request in requests]).to(self.device)
        next_R = choose(logits_RV, draws_R, [request.sampling for request in requests])
        for index, token in zip(done, same_on_all(self.model, next_R).tolist()):
            rows[index].unread = [token]
            rows[index].request.take(token)
        return requests
