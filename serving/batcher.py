"""Continues the prompts of many requests at once, in one thread per model.

The event loop gives requests and takes them back; the thread owns the engine, and sends text as it comes.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Optional

import torch

from common.text import print_safely, print_traceback
from inference.engine import Engine, Request, Sampling
from inference.generate import Part, part_of
from inference.text import LanguageModel, Prompt, TextStream
from serving.guard import ApiError

RETRY_SECONDS = 2


@dataclass(frozen=True)
class Job:
    """A prompt to continue."""

    prompt: Prompt
    max_new_tokens: int
    sampling: Sampling
    stop: Sequence[str] = ()
    top_logprobs: Optional[int] = None  # as of a `Request`


class Answer:
    """What continues the prompts of one request, part by part. Belongs to the event loop.

    What is not finished at the end of the `with` block is cancelled.
    """

    def __init__(self, batcher: "Batcher", jobs: Sequence[Job]):
        self.batcher, self.jobs, self.unfinished = batcher, jobs, len(jobs)
        self.tokens = [0] * len(jobs)  # that were written for each job
        self._queue: asyncio.Queue[Part | ApiError] = asyncio.Queue()

    def put(self, part: Part | ApiError) -> None:
        """Take a part, or the error that ends the answer unless it is finished."""
        self.unfinished -= isinstance(part, Part) and part.finish_reason is not None
        self._queue.put_nowait(part)

    async def parts(self) -> AsyncIterator[Part]:
        """Yield the parts up to the last one. Raises ApiError if it cannot be finished."""
        left = len(self.jobs)
        while left:
            part = await self._queue.get()
            if isinstance(part, ApiError):
                raise part
            left -= part.finish_reason is not None
            self.tokens[part.index] = part.tokens
            yield part

    def usage(self, n: int) -> dict[str, int]:
        """The tokens of the prompts, each of which has `n` jobs, and of the parts so far."""
        prompts, written = sum(len(job.prompt.ids) for job in self.jobs[::n]), sum(self.tokens)
        return {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_) -> None:
        self.batcher.close(self)


class Batcher:
    """A model that continues prompts of several requests at once. Raises if it cannot continue one token.

    Args:
        rows: how many prompts are continued at once.
        waiting: how many more may wait.
        length: the most tokens of a prompt with its continuation.
    """

    def __init__(self, model: LanguageModel, rows: int, waiting: int, length: int):
        self.model, self.rows, self.length, self.most = model, rows, length, rows + waiting
        self.failed = False  # the last step raised an error
        self._stopping = False
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._open: dict[Answer, asyncio.TimerHandle] = {}  # with its time limit
        self._inbox: SimpleQueue[Optional[Callable[[], None]]] = SimpleQueue()  # None ends the thread
        # These belong to the thread.
        self._engine: Optional[Engine] = None
        self._writing: dict[Request, tuple[Answer, int, TextStream]] = {}  # with the prompt's index
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(ready,), daemon=True)
        self._thread.start()
        ready.result()

    # In the event loop

    def check_room(self, prompts: int) -> None:
        """Raise ApiError if a request of so many prompts is refused now."""
        if self._stopping:
            raise stopping()
        if prompts > self.most:
            raise ApiError(400, f"at most {self.most} prompts can be continued by one request, not {prompts}",
                           "prompt")
        if sum(answer.unfinished for answer in self._open) + prompts > self.most:
            raise ApiError(429, "too many requests are waiting; try again later",
                           code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)})

    def submit(self, jobs: Sequence[Job], seconds: float) -> Answer:
        """Begin to continue prompts, each as soon as there is room.

        Args:
            seconds: the longest time that it may take.
        """
        def end() -> None:
            self._inbox.put(lambda: self._cancel(answer))
            answer.put(ApiError(504, f"the answer took longer than {seconds:g} s"))

        self.check_room(len(jobs))
        self._loop = asyncio.get_running_loop()
        answer = Answer(self, jobs)
        self._open[answer] = self._loop.call_later(seconds, end)
        self._inbox.put(lambda: self._add(answer))
        return answer

    def close(self, answer: Answer) -> None:
        """Cancel what is not finished. Called once, by the answer itself."""
        self._open.pop(answer).cancel()
        self._inbox.put(lambda: self._cancel(answer))

    def stop(self) -> None:
        """End all requests with an error now, and take no more. Also for signal handlers."""
        self._stopping = True
        self._inbox.put(None)
        self._send([(answer, stopping()) for answer in self._open])

    # In the thread

    def _work(self, ready: Future) -> None:
        try:  # a token, so that what is allocated or compiled once is, before anyone waits for it
            self._engine = Engine(self.model.model, self.rows, self.length)
            self._engine.add(Request(self.model.text_prompt("").ids, 1))
            while not self._engine.idle:
                self._engine.step()
        except BaseException as error:
            return ready.set_exception(error)
        ready.set_result(None)
        while True:
            try:
                while self._engine is None or self._engine.idle or not self._inbox.empty():
                    if (call := self._inbox.get()) is None:
                        return
                    call()
                self._continue_requests()
            except Exception as error:  # whatever it was, later requests may pass
                self._fail(error)

    def _continue_requests(self) -> None:
        changed = self._engine.step()
        self.failed, parts = False, []
        for request in changed:
            if request in self._writing:
                answer, index, stream = self._writing[request]
                parts.append((answer, part := part_of(index, request, stream)))
                if part.finish_reason:
                    del self._writing[request]
                    self._engine.cancel(request)
        self._send(parts)

    def _add(self, answer: Answer) -> None:
        requests = []
        for index, job in enumerate(answer.jobs):
            request = Request(job.prompt.ids, job.max_new_tokens, job.sampling, job.prompt.stop_ids,
                              top_logprobs=job.top_logprobs)
            stream = TextStream(self.model.tokenizer, job.stop, job.prompt.after)
            self._writing[request] = answer, index, stream
            requests.append(request)
        if self._engine is None:  # only now, when an error would end this answer
            self._engine = Engine(self.model.model, self.rows, self.length)
        for request in requests:
            self._engine.add(request)

    def _cancel(self, answer: Answer) -> None:
        for request in [request for request, (its, *_) in self._writing.items() if its is answer]:
            del self._writing[request]
            self._engine.cancel(request)

    def _fail(self, error: Exception) -> None:
        """End all requests with an error, and forget the engine, whose state is unknown."""
        print_safely(f"{self.model.name} failed; its requests are ended with an error:", sys.stderr)
        print_traceback(type(error), error, error.__traceback__)
        if is_out_of_memory(error):
            reported = ApiError(500, "the server is out of memory; a shorter prompt may fit",
                                code="out_of_memory")
        else:
            reported = ApiError(500, f"the model failed ({type(error).__name__}); see the server's output")
        answers = {answer for answer, *_ in self._writing.values()}
        self.failed, self._engine = True, None
        self._writing.clear()
        self._send([(answer, reported) for answer in answers])

    def _send(self, parts: Sequence[tuple[Answer, Part | ApiError]]) -> None:
        """Give answers their parts, in the event loop."""
        def put_all() -> None:
            for answer, part in parts:
                answer.put(part)

        if parts:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(put_all)


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping")


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; on the CPU, torch has no error class for that."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
