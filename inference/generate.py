"""The continuations of a batch of prompts: all at the end, or as texts that grow."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from common.heartbeat import HEARTBEAT
from inference.engine import READ_AT_ONCE, Engine, Request, Sampling, Score
from inference.text import Prompt, TextStream
from model import Transformer


def generate(model: Transformer, prompts: Sequence[Sequence[int]], max_new_tokens: int,
             sampling: Sampling = Sampling(), stop_ids: Collection[int] = ()) -> list[list[int]]:
    """Continue each prompt; return the new tokens, without the stop token that ended them.

    The result depends on the arguments only. It does not depend on the other prompts, except that a prompt's
    random numbers go with its index. Collective if the model is sharded: every rank must call it.

    Args:
        prompts: token ids, at least one each.
    """
    if not prompts or max_new_tokens == 0:
        return [[] for _ in prompts]
    with_stop = [Prompt(ids, frozenset(stop_ids)) for ids in prompts]
    read_at_once, was_training = len(prompts) * max(map(len, prompts)), model.training
    try:
        engine, requests = start(model, with_stop, max_new_tokens, sampling, len(prompts), read_at_once)
        while not engine.idle:
            HEARTBEAT.beat()
            engine.step()
    finally:
        model.train(was_training)
    return [request.written for request in requests]


def start(model: Transformer, prompts: Sequence[Prompt], max_new_tokens: int, sampling: Sampling, rows: int,
          read_at_once: int) -> tuple[Engine, list[Request]]:
    """Return an engine with so many rows, and the requests that wait in it to continue the prompts."""
    # Drawn on the CPU and in advance, so that they depend neither on the device nor on when prompts stop.
    generator = torch.Generator().manual_seed(sampling.seed)
    requests = [Request(prompt.ids, max_new_tokens, sampling, prompt.stop_ids,
                        torch.rand(max_new_tokens, generator=generator)) for prompt in prompts]
    length = max(len(prompt.ids) for prompt in prompts) + max_new_tokens
    engine = Engine(model, rows, length, read_at_once)
    for request in requests:
        engine.add(request)
    return engine, requests


class Part(NamedTuple):
    """What was written at once after one of several prompts."""

    index: int  # of the prompt
    text: str
    tokens: int  # so far
    finish_reason: str | None  # "stop" or "length" in the last part
    scores: Sequence[Score] = ()  # of its tokens, if the request asks for them


def part_of(index: int, request: Request, stream: TextStream) -> Part:
    """Return what a step of the engine added to a request that changed, as text."""
    is_token = request.finish_reason != "stop"
    text = stream.add(request.written[-1]) if is_token else ""
    if request.finish_reason:
        text += stream.finish()
    reason = "stop" if stream.stopped else request.finish_reason
    return Part(index, text, len(request.written), reason, request.scores[-1:] if is_token else ())


@dataclass
class Writer:
    """Continues prompts with a model, as texts."""

    model: Transformer
    tokenizer: Any
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: Sequence[str] = ()  # strings that end a text
    batch_size: int = 8  # prompts that are continued at once

    def write(self, prompts: Sequence[Prompt]) -> Iterator[Part]:
        """Yield the parts of all texts as they are written; the last one of a text has a finish reason."""
        if not prompts or self.max_new_tokens == 0:
            yield from (Part(index, "", 0, "length") for index in range(len(prompts)))
            return
        rows = min(self.batch_size, len(prompts))
        engine, requests = start(self.model, prompts, self.max_new_tokens, self.sampling, rows, READ_AT_ONCE)
        streams = {request: (index, TextStream(self.tokenizer, self.stop, prompts[index].after))
                   for index, request in enumerate(requests)}
        while not engine.idle:
            for request in engine.step():
                index, stream = streams[request]
                part = part_of(index, request, stream)
                if part.finish_reason:
                    engine.cancel(request)
                yield part
