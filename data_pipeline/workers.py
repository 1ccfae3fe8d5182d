"""Worker processes that are given chunks, and whose results come back in the order of the chunks."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any

from common.errors import PaddockError

# in_order(function, chunks) yields (function(items), more) for each chunk (items, more), in their order, with
# a few per worker in progress.
InOrder = Callable[[Callable[[list], Any], Iterable[tuple]], Iterator[tuple]]


@contextmanager
def open_workers(workers: int) -> Iterator[InOrder]:
    """Start workers for the `with` block, and give the function that applies another one to chunks in them.

    Workers are spawned, not forked, so that they inherit neither this process's lock nor its torch.
    """
    if workers == 1:
        yield lambda function, chunks: ((function(items), more) for items, more in chunks)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=exit_with_parent)

    def in_order(function: Callable[[list], Any], chunks: Iterable[tuple]) -> Iterator[tuple]:
        pending: deque = deque()
        try:
            for items, more in chunks:
                with interrupts_blocked():
                    pending.append((pool.submit(function, items), more))
                if len(pending) > 2 * workers:
                    future, more = pending.popleft()
                    yield future.result(), more
            while pending:
                future, more = pending.popleft()
                yield future.result(), more
        except BrokenProcessPool as error:
            raise PaddockError("a worker process was killed, maybe for lack of memory; set "
                               f"PREPARATION_WORKERS={workers // 2} and start again, it continues there"
                               ) from error

    try:
        yield in_order
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exit_with_parent() -> None:
    """Make a worker exit when the process that started it is gone, even by kill -9."""

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C. A process that is started meanwhile inherits this: only the parent handles the signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
