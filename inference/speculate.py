"""Speculative decoding: a smaller draft model proposes tokens, of which the model checks several at once.

Source: Leviathan et al. 2023 (arXiv:2211.17192). Instead of their rejection rule, both models choose with the
same random numbers, and a proposal is accepted if the model chooses the same token. So a text is the one that
the model writes alone with this seed, up to rounding: a matmul of more rows may add in another order.
"""

from collections import deque

import torch
from torch import Tensor

from inference.engine import PREFILL_TOKENS, Engine, Request, RowCache, SamplingTensors, choose
from model import Transformer

PROPOSED = 4  # tokens that the draft proposes at a time


class Speculator(Engine):
    """An engine of one row with a draft model of the same vocabulary. It ignores penalties and scores."""

    def __init__(self, model: Transformer, draft: Transformer, length: int):
        super().__init__(model, 1, length)
        cache = RowCache(draft.config, 1, length, self.device, draft.compute_dtype)
        self._readers = {"draft": (draft.eval(), cache), "model": (self.model, self.cache)}
        self._read = {"draft": 0, "model": 0}  # tokens of the request in each cache
        self._checked: deque[int] = deque()  # tokens that `step` returns next
        self.proposed = self.accepted = 0

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Add one token to the request; see `Engine.step`."""
        row, = self._rows
        if row.running is None:
            row.request, self._read = self._waiting.popleft(), dict.fromkeys(self._read, 0)
            self._checked.clear()
        if not self._checked:
            self._checked.extend(self._propose_and_check(row.request))
        row.request.take(self._checked.popleft())
        return [row.request]

    def _propose_and_check(self, request: Request) -> list[int]:
        """Return the next tokens: the accepted proposals, and the model's choice after them."""
        tokens, written = [*request.prompt_ids, *request.output_ids], len(request.output_ids)
        count = min(PROPOSED, request.max_new_tokens - written - 1)
        draws, proposals = request.draws[written:written + count + 1].to(self.device), []
        for index in range(count):
            proposals += self._choose("draft", tokens + proposals, draws[index:index + 1], request)
        chosen = self._choose("model", tokens + proposals, draws, request)
        accepted = next((index for index, token in enumerate(proposals) if token != chosen[index]), count)
        kept = len(tokens) + accepted
        self._read = {name: min(read, kept) for name, read in self._read.items()}
        self.proposed, self.accepted = self.proposed + count, self.accepted + accepted
        return chosen[:accepted + 1]

    def _choose(self, name: str, tokens: list[int], draws_R: Tensor, request: Request) -> list[int]:
        """Let a model read its new tokens, and return its choices after each of the last R tokens."""
        model, cache = self._readers[name]
        while self._read[name] < len(tokens):
            # A long prompt is read in pieces, the last R tokens together.
            read, end = self._read[name], len(tokens)
            if end - read > PREFILL_TOKENS:
                end = min(read + PREFILL_TOKENS, end - len(draws_R))
            hidden_1TD = model.hidden(torch.tensor([tokens[read:end]], device=self.device),
                                      cache=cache.at([0], [read]))
            self._read[name] = end
        logits_RV = model.head_logits(hidden_1TD[0, -len(draws_R):])
        samplings = SamplingTensors([request.sampling] * len(draws_R), self.device)
        return choose(logits_RV, draws_R, samplings).tolist()
