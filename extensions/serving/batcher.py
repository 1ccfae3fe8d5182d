"""Completes the prompts of many requests concurrently, in one thread per model.

The event loop submits and cancels requests. The thread owns the engine and sends text back.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Optional

import torch

from common.text import counted, print_safely, print_traceback
from extensions.inference.engine import Engine, Request
from extensions.inference.text import LanguageModel, TextChunk, TextStream, next_chunk
from extensions.serving.guard import ApiError

RETRY_SECONDS = 2


Job = tuple[Request, TextStream]  # one completion to compute, and the stream of its text


class Answer:
    """The chunks of all completions of one HTTP request, cancelled at the end of the `with` block."""

    def __init__(self, batcher: "Batcher", jobs: Sequence[Job]):
        self.batcher, self.jobs, self.unfinished = batcher, jobs, len(jobs)
        self.tokens = [0] * len(jobs)  # length of each completion
        self._queue: asyncio.Queue[TextChunk | ApiError] = asyncio.Queue()

    def put(self, chunk: TextChunk | ApiError) -> None:
        self.unfinished -= isinstance(chunk, TextChunk) and chunk.finish_reason is not None
        self._queue.put_nowait(chunk)

    async def chunks(self) -> AsyncIterator[TextChunk]:
        left = len(self.jobs)
        while left:
            chunk = await self._queue.get()
            if isinstance(chunk, ApiError):
                raise chunk
            left -= chunk.finish_reason is not None
            self.tokens[chunk.index] = chunk.tokens
            yield chunk

    def usage(self, n: int) -> dict[str, int]:
        """Return the token counts so far; each prompt has `n` jobs."""
        prompts, completions = sum(len(request.prompt_ids) for request, _ in self.jobs[::n]), sum(self.tokens)
        total = prompts + completions
        return {"prompt_tokens": prompts, "completion_tokens": completions, "total_tokens": total}

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_) -> None:
        self.batcher.close(self)


class Batcher:
    """A model in a thread, which serves `rows` prompts at a time. Raises if a first token fails.

    So many further prompts may wait. A prompt and its completion have at most `length` tokens.
    """

    def __init__(self, model: LanguageModel, rows: int, waiting: int, length: int):
        self.model, self.rows, self.length, self.capacity = model, rows, length, rows + waiting
        self.failed = False  # True after a step that raised an error
        self._stopping = False
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._answers: dict[Answer, asyncio.TimerHandle] = {}  # with their time limits
        self._inbox: SimpleQueue[Optional[Callable[[], None]]] = SimpleQueue()  # None ends the thread
        # Used by the thread only
        self._engine: Optional[Engine] = None
        self._streams: dict[Request, tuple[Answer, int, TextStream]] = {}  # with the prompt's index
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(ready,), daemon=True)
        self._thread.start()
        ready.result()

    # In the event loop

    def check_room(self, prompts: int) -> None:
        if self._stopping:
            raise stopping()
        if prompts > self.capacity:
            raise ApiError(400, f"a request may have at most {counted(self.capacity, 'prompt')}, "
                                f"not {prompts}", "prompt")
        if sum(answer.unfinished for answer in self._answers) + prompts > self.capacity:
            raise ApiError(429, "too many requests are waiting; try again later",
                           code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)})

    def submit(self, jobs: Sequence[Job], seconds: float) -> Answer:
        """Queue the jobs of a request, which has this time limit."""
        def time_out() -> None:
            self._inbox.put(lambda: self._cancel(answer))
            answer.put(ApiError(504, f"the answer took longer than {seconds:g} s"))

        self.check_room(len(jobs))
        self._loop = asyncio.get_running_loop()
        answer = Answer(self, jobs)
        self._answers[answer] = self._loop.call_later(seconds, time_out)
        self._inbox.put(lambda: self._add(answer))
        return answer

    def close(self, answer: Answer) -> None:
        self._answers.pop(answer).cancel()
        self._inbox.put(lambda: self._cancel(answer))

    def stop(self) -> None:
        """End all requests with an error and refuse new ones. Safe in signal handlers."""
        self._stopping = True
        self._inbox.put(None)
        self._send([(answer, stopping()) for answer in self._answers])

    # In the thread

    def _work(self, ready: Future) -> None:
        try:  # generate one token first, so that no request waits for allocation or compilation
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
                self._step()
            except Exception as error:  # later requests may succeed
                self._fail(error)

    def _step(self) -> None:
        changed = self._engine.step()
        self.failed, chunks = False, []
        for request in changed:
            if request in self._streams:
                answer, index, stream = self._streams[request]
                chunks.append((answer, chunk := next_chunk(index, request, stream)))
                if chunk.finish_reason:
                    del self._streams[request]
                    self._engine.cancel(request)
        self._send(chunks)

    def _add(self, answer: Answer) -> None:
        for index, (request, stream) in enumerate(answer.jobs):
            self._streams[request] = answer, index, stream
        if self._engine is None:  # created here, so that an error ends this answer
            self._engine = Engine(self.model.model, self.rows, self.length)
        for request, _ in answer.jobs:
            self._engine.add(request)

    def _cancel(self, answer: Answer) -> None:
        for request in [request for request, (owner, *_) in self._streams.items() if owner is answer]:
            del self._streams[request]
            self._engine.cancel(request)

    def _fail(self, error: Exception) -> None:
        """End all requests with an error, and discard the engine, whose state is unknown."""
        print_safely(f"{self.model.name} failed; its requests end with an error:", sys.stderr)
        print_traceback(type(error), error, error.__traceback__)
        if is_out_of_memory(error):
            reported = ApiError(500, "the server is out of memory; a shorter prompt may fit",
                                code="out_of_memory")
        else:
            reported = ApiError(500, f"the model failed ({type(error).__name__}); see the server's output")
        answers = {answer for answer, *_ in self._streams.values()}
        self.failed, self._engine = True, None
        self._streams.clear()
        self._send([(answer, reported) for answer in answers])

    def _send(self, chunks: Sequence[tuple[Answer, TextChunk | ApiError]]) -> None:
        def put_all() -> None:
            for answer, chunk in chunks:
                answer.put(chunk)

        if chunks:
            with suppress(RuntimeError):  # the loop is closed: the server has stopped
                self._loop.call_soon_threadsafe(put_all)


def stopping() -> ApiError:
    return ApiError(503, "the server is stopping")


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. On the CPU, torch has no error class for that."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
