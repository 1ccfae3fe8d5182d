"""Completions of a batch of prompts, at once or streamed."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from common.activity import tick
from extensions.inference.engine import Engine, Request, Sampling, Score
from extensions.inference.text import Prompt, TextStream
from model import Transformer


def generate(model: Transformer, prompts: Sequence[Sequence[int]], max_new_tokens: int,
             sampling: Sampling = Sampling(), stop_ids: Collection[int] = ()) -> list[list[int]]:
    """Return the completion of each prompt (at least one token id), without its stop token.

    A completion does not depend on the other prompts, apart from the index that selects its random numbers.
    If the model is sharded, every rank must call this.
    """
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    with_stop = [Prompt(ids, frozenset(stop_ids)) for ids in prompts]
    longest, was_training = max(map(len, prompts)), model.training
    try:
        engine = Engine(model, len(prompts), longest + max_new_tokens, len(prompts) * longest)
        requests = add_all(engine, with_stop, max_new_tokens, sampling)
        while not engine.idle:
            tick()
            engine.step()
    finally:
        model.train(was_training)
    return [request.output_ids for request in requests]


def add_all(engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int,
            sampling: Sampling) -> list[Request]:
    """Queue a request for each prompt in an engine, and return the requests."""
    # Draw on the CPU and in advance, so that the numbers do not depend on the device or on stop tokens.
    generator = torch.Generator().manual_seed(sampling.seed)
    requests = [Request(prompt.ids, max_new_tokens, sampling, prompt.stop_ids,
                        torch.rand(max_new_tokens, generator=generator)) for prompt in prompts]
    for request in requests:
        engine.add(request)
    return requests


class TextChunk(NamedTuple):
    """A piece of a streamed completion."""

    index: int  # position of the prompt
    text: str
    tokens: int  # length of the completion so far
    finish_reason: str | None  # "stop" or "length" in the last chunk, else None
    scores: Sequence[Score] = ()  # log-probabilities of its tokens, if requested


def next_chunk(index: int, request: Request, stream: TextStream) -> TextChunk:
    """Return what the engine's last step added to a request, as text."""
    is_token = request.finish_reason != "stop"
    text = stream.add(request.output_ids[-1]) if is_token else ""
    if request.finish_reason:
        text += stream.finish()
    reason = "stop" if stream.stopped else request.finish_reason
    return TextChunk(index, text, len(request.output_ids), reason, request.scores[-1:] if is_token else ())


@dataclass
class TextGenerator:
    """Streams completions as text."""

    model: Transformer
    tokenizer: Any
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: Sequence[str] = ()  # stop strings
    batch_size: int = 8  # prompts that run concurrently

    def stream(self, prompts: Sequence[Prompt]) -> Iterator[TextChunk]:
        """Yield the chunks of all completions. The last chunk of each has a finish reason."""
        if not prompts or self.max_new_tokens == 0:
            yield from (TextChunk(index, "", 0, "length") for index in range(len(prompts)))
            return
        length = max(len(prompt.ids) for prompt in prompts) + self.max_new_tokens
        engine = Engine(self.model, min(self.batch_size, len(prompts)), length)
        requests = add_all(engine, prompts, self.max_new_tokens, self.sampling)
        streams = {request: (index, TextStream(self.tokenizer, self.stop, prompts[index].prefix))
                   for index, request in enumerate(requests)}
        while not engine.idle:
            for request in engine.step():
                index, stream = streams[request]
                chunk = next_chunk(index, request, stream)
                if chunk.finish_reason:
                    engine.cancel(request)
                yield chunk
