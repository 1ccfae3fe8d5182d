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
from torch.nn.utils.rnn import pad_sequence

from inference.row_cache import RowCache
from inference.sampling import Sampling, Samplings, choose, penalize
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


class Batch:
    """Rows that are run together. What a step needs of them is on the device.

    Rows that are written need nothing more from the host until another request joins or one ends.

    Args:
        width: the most tokens that are read of a row in one step.
        cache: of all rows.
    """

    def __init__(self, rows: Sequence[Row], width: int, cache: RowCache, vocab_size: int):
        device, pieces = cache.index_S.device, [row.unread[:width] for row in rows]
        self.rows, self.width = rows, width
        padded = [piece + [0] * (width - len(piece)) for piece in pieces]
        self.tokens_BT = torch.tensor(padded, device=device)
        self.last_B = torch.tensor([len(piece) - 1 for piece in pieces], device=device)
        self.cache = cache.at([row.index for row in rows], [len(row.held) for row in rows])
        # How the next token is chosen, of the rows that have nothing more to read
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
            self.seen_RV = torch.zeros(len(done), vocab_size, dtype=torch.bool, device=device)
            for seen_V, request in zip(self.seen_RV, self.requests):
                seen_V[torch.tensor([*request.prompt_ids, *request.written], device=device)] = True

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Return the next token of each of `requests`."""
        logits_RV = logits_BV if self.done_R is None else logits_BV[self.done_R]
        if self.seen_RV is not None:
            logits_RV = penalize(logits_RV, self.seen_RV, self.samplings.penalty_B1)
        return choose(logits_RV, self.draws_RN[:, self.steps], self.samplings)

    def read_next(self, tokens_R: Tensor) -> None:
        """Let the next step of rows that are written read the tokens that were chosen."""
        self.tokens_BT, self.steps = tokens_R[:, None], self.steps + 1
        if self.seen_RV is not None:
            self.seen_RV.scatter_(1, self.tokens_BT, True)


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
            changed = []
            if reading:
                longest = max(len(row.unread) for row in reading)
                width = min(longest, self.read_at_once // len(reading))
                changed += self._run(Batch(reading, width, self.cache, self.model.vocab_size))
            if writing:
                # Taken out: after an error it would not be what the rows hold.
                batch, self._writing = self._writing, None
                if batch is None or batch.requests != [row.request for row in writing]:
                    batch = Batch(writing, 1, self.cache, self.model.vocab_size)
                changed += self._run(batch)
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

    def _run(self, batch: Batch) -> list[Request]:
        """Read the next tokens of some rows; return the requests that got a token, having no more to read."""
        logits_BV = self.model.logits(batch.tokens_BT, cache=batch.cache, only_B=batch.last_B)
        for row in batch.rows:
            row.held += row.unread[:batch.width]
            del row.unread[:batch.width]
        if not batch.requests:
            return []
        next_R = same_on_all(self.model, batch.choose(logits_BV))
        batch.read_next(next_R)
        written = [row for row in batch.rows if not row.unread]
        for row, token in zip(written, next_R.tolist()):
            row.unread = [token]
            row.request.take(token)
        return batch.requests
