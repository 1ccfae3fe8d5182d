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
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Optional

import torch

from common.text import print_safely, print_traceback
from inference.engine import Engine, Request, Sampling
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


class Piece(NamedTuple):
    """More text after one of a request's prompts."""

    index: int  # of the prompt
    text: str
    tokens: int  # that it took
    finish_reason: Optional[str]  # "stop" or "length" in the last piece


class Answer:
    """What continues the prompts of one request, piece by piece. Belongs to the event loop.

    What is not finished at the end of the `with` block is cancelled.
    """

    def __init__(self, batcher: "Batcher", jobs: Sequence[Job]):
        self.jobs, self.unfinished, self.tokens = jobs, len(jobs), 0
        self._batcher, self._error = batcher, None
        self._pending: dict[int, Piece] = {}
        self._changed = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """Take a piece; what a slow client has not got yet is joined to one."""
        earlier = self._pending.get(piece.index, Piece(piece.index, "", 0, None))
        self._pending[piece.index] = piece._replace(text=earlier.text + piece.text,
                                                    tokens=earlier.tokens + piece.tokens)
        self.unfinished -= piece.finish_reason is not None
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End it with an error, unless it is finished."""
        self._error = error
        self._changed.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces up to the last one.

        Raises:
            ApiError: it cannot be finished.
        """
        while self.unfinished or self._pending:
            await self._changed.wait()
            self._changed.clear()
            pending, self._pending = self._pending, {}
            for piece in pending.values():
                self.tokens += piece.tokens
                yield piece
            if self._error and self.unfinished:
                raise self._error

    def usage(self) -> dict[str, int]:
        """The tokens of the prompts, and of the pieces so far."""
        prompts = sum(len(job.prompt.ids) for job in self.jobs)
        return {"prompt_tokens": prompts, "completion_tokens": self.tokens,
                "total_tokens": prompts + self.tokens}

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_) -> None:
        self._batcher.close(self)


@dataclass(eq=False)
class _Writing:
    """A job whose text is being written."""

    answer: Answer
    index: int
    text: TextStream
    told: int = 0  # tokens


class Batcher:
    """A model that continues prompts of several requests at once.

    Args:
        rows: how many prompts are continued at once.
        waiting: how many more may wait.
        length: the most tokens of a prompt with its continuation.
    Raises:
        Exception: the model cannot continue a prompt of one token.
    """

    def __init__(self, model: LanguageModel, rows: int, waiting: int, length: int):
        self.model, self.length, self.most = model, length, rows + waiting
        self.failed = False  # the last step raised an error
        self._rows, self._stopping = rows, False
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._open: dict[Answer, asyncio.TimerHandle] = {}  # with its time limit
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # These belong to the thread.
        self._engine: Optional[Engine] = None
        self._writing: dict[Request, _Writing] = {}
        self._ended = False
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
        self.check_room(len(jobs))
        self._loop = asyncio.get_running_loop()
        answer = Answer(self, jobs)
        late = ApiError(504, f"the answer took longer than {seconds:g} s")
        self._open[answer] = self._loop.call_later(seconds, answer.fail, late)
        self._inbox.put(lambda: self._add(answer))
        return answer

    def close(self, answer: Answer) -> None:
        """Cancel what is not finished. Called once, by the answer itself."""
        self._open.pop(answer).cancel()
        self._inbox.put(lambda: self._cancel(answer))

    def stop(self) -> None:
        """End all requests with an error now, and take no more. Also for signal handlers."""
        self._stopping = True
        self._inbox.put(self._end)
        self._in_loop([self._fail_open] if self._loop else [])

    def _fail_open(self) -> None:
        for answer in self._open:
            answer.fail(stopping())

    # In the thread

    def _work(self, ready: Future) -> None:
        try:
            self._warm_up()
        except BaseException as error:
            return ready.set_exception(error)
        ready.set_result(None)
        while not self._ended:
            try:
                self._continue_requests()
            except Exception as error:  # whatever it was, later requests may pass
                self._fail(error)

    def _warm_up(self) -> None:
        """Continue a token, so that what is allocated or compiled once is, before anyone waits for it."""
        self._engine = Engine(self.model.model, self._rows, self.length)
        self._engine.add(Request(self.model.text_prompt("").ids, 1))
        while not self._engine.idle:
            self._engine.step()

    def _continue_requests(self) -> None:
        while True:
            while self._engine is None or self._engine.idle or not self._inbox.empty():
                self._inbox.get()()
                if self._ended:
                    return
            changed = self._engine.step()
            self.failed = False
            self._in_loop([self._piece(request) for request in changed if request in self._writing])

    def _add(self, answer: Answer) -> None:
        writings = {}
        for index, job in enumerate(answer.jobs):
            request = Request(job.prompt.ids, job.max_new_tokens, job.sampling, job.prompt.stop_ids)
            stream = TextStream(self.model.tokenizer, job.stop, job.prompt.after)
            writings[request] = _Writing(answer, index, stream)
        self._writing |= writings  # known before anything can fail
        if self._engine is None:
            self._engine = Engine(self.model.model, self._rows, self.length)
        for request in writings:
            self._engine.add(request)

    def _cancel(self, answer: Answer) -> None:
        for request in [request for request, writing in self._writing.items() if writing.answer is answer]:
            del self._writing[request]
            self._engine.cancel(request)

    def _end(self) -> None:
        self._ended = True

    def _piece(self, request: Request) -> Callable[[], None]:
        writing, reason = self._writing[request], request.finish_reason
        text, first = [], writing.told
        while writing.told < len(request.written) and not writing.text.stopped:
            text.append(writing.text.add(request.written[writing.told]))
            writing.told += 1
        if reason or writing.text.stopped:
            text.append(writing.text.finish())
            reason = "stop" if writing.text.stopped else reason
            del self._writing[request]
            self._engine.cancel(request)
        return partial(writing.answer.put, Piece(writing.index, "".join(text), writing.told - first, reason))

    def _fail(self, error: Exception) -> None:
        """End all requests with an error, and forget the engine, whose state is unknown."""
        print_safely(f"{self.model.name} failed; its requests are ended with an error:", sys.stderr)
        print_traceback(type(error), error, error.__traceback__)
        if is_out_of_memory(error):
            told = ApiError(500, "the server is out of memory; a shorter prompt may pass",
                            code="out_of_memory")
        else:
            told = ApiError(500, f"the model failed ({type(error).__name__}); the server's output says more")
        answers = {writing.answer for writing in self._writing.values()}
        self.failed, self._engine = True, None
        self._writing.clear()
        self._in_loop([partial(answer.fail, told) for answer in answers])

    def _in_loop(self, calls: Sequence[Callable[[], None]]) -> None:
        def call_all() -> None:
            for call in calls:
                call()

        if calls:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(call_all)


def stopping() -> ApiError:
    """The error of a server that ends."""
    return ApiError(503, "the server is stopping")


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; on the CPU, torch has no error class for that."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
