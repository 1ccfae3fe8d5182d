"""What each rank is doing, told among all of them, so that a hang ends in a report and not in silence."""

import faulthandler
import hmac
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import Any, Optional

from common.heartbeat import Heartbeat

TELL_SECONDS = 0.5  # between two words to the others: what is known of one that is stopped is no older
HEAR_SECONDS = 2.0  # between two looks at what they said
URGENT_SECONDS = 0.1  # of both, once there is an alarm
ANSWER_SECONDS = 4.0  # that a rank has to write its stacks, and a store to answer
GONE_SECONDS = 5.0  # in vain for a rank that has ended; what waits on the CPU learns of it at once, what waits on a GPU does not


class Board:
    """Where each rank hangs out what it does, and reads of the others: a store, which any stranger who comes to its port can list
    and overwrite. So all is sealed with a secret that never goes there, and what is not as expected is left where it hangs.

    Args:
        store: like torch's TCPStore, a client that nobody else uses.
        token: the secret of this job.
    """

    LONGEST = 1000  # of what a rank says, in bytes
    FIELDS = {"step": int, "phase": str, "waits": bool, "still": float, "host": str, "pid": int, "ready": bool, "alarm": bool,
              "told": bool, "at": float, "rank": int}

    def __init__(self, store: Any, token: str, world_size: int):
        self.store, self.secret = store, token.encode()
        self.keys = [f"paddock-{self._seal(b'keys').decode()}/rank-{rank}" for rank in range(world_size)]
        self.newest = [-math.inf] * world_size

    def tell(self, state: dict[str, Any]) -> None:
        """Hang out what a rank does: FIELDS, of which `at` must grow."""
        text = json.dumps(state).encode()
        self.store.set(self.keys[state["rank"]], self._seal(text) + text)

    def hear(self) -> dict[int, dict[str, Any]]:
        """What is new, by rank; blocks until each has spoken, and where the store does not answer."""
        news = {}
        for rank, sealed in enumerate(self.store.multi_get(self.keys)):
            state = self._opened(sealed)
            if state and state["rank"] == rank and state["at"] > self.newest[rank]:  # an old one may be hung out again
                news[rank], self.newest[rank] = state, state["at"]
        return news

    def _seal(self, text: bytes) -> bytes:
        return hmac.new(self.secret, text, "sha256").hexdigest().encode()

    def _opened(self, sealed: bytes) -> Optional[dict[str, Any]]:
        seal, text = sealed[:64], sealed[64:self.LONGEST]
        if not hmac.compare_digest(seal, self._seal(text)):
            return None
        state = json.loads(text)
        as_expected = state.keys() == self.FIELDS.keys() and all(type(state[name]) is kind for name, kind in self.FIELDS.items())
        return state if as_expected and state["pid"] > 0 and state["still"] >= 0 else None


class HangWatchdog:
    """Two threads in every rank: one tells the others through a store what this rank does and hears what they do; one ends this
    process when it, or any rank, has not moved for too long. They are two, because a store can hang as well.

    A rank that waits is not what hangs as long as any rank is known to move: a save may take long. It also leaves when it waits
    in vain for one that has ended on this machine, as it does in a kernel on a GPU.

    Args:
        hosted_by_main: whether the board's store lives in the process of rank 0, and not in a launcher.
        report: leaves word of the end and returns its exit code; gets the sentence, a table of what each rank does (empty: it is
            no hang, another rank has ended), and whether this rank speaks for all.
    """

    def __init__(self, pulse: Heartbeat, board: Board, hosted_by_main: bool, rank: int, timeout_seconds: float,
                 report: Callable[[str, str, bool], int]):
        self.pulse, self.board, self.hosted_by_main, self.rank = pulse, board, hosted_by_main, rank
        self.timeout, self.report = timeout_seconds, report
        self.interval = min(HEAR_SECONDS, timeout_seconds / 10)
        self.place = {"host": socket.gethostname()[:255], "pid": os.getpid(), "rank": rank}
        self.states: list[dict[str, Any]] = [{**pulse.told(), **self.place, "ready": False} for _ in board.keys]
        self.heard = [time.monotonic()] * len(board.keys)  # when each state came
        self.neighbours: set[int] = set()  # ranks whose processes were seen on this machine
        self.answered = time.monotonic()  # when the store did
        self.alarm = False  # some rank has not moved for too long
        self.ready = False  # this rank's stacks are written
        self.told = False  # some rank has reported
        self.awake = -math.inf  # since when, if this process has overslept
        self.stopped, self.woken = False, threading.Event()
        pulse.move()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._guard)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; but where the alarm was given already, wait for the end that they make of this process."""
        while self.alarm and self.threads[1].is_alive():
            time.sleep(URGENT_SECONDS)
        self.stopped = True
        self.woken.set()
        for thread in self.threads:
            thread.join(HEAR_SECONDS)

    def _talk(self) -> None:
        # A store ends with the process that hosts it: who needs that one fails in a collective, or does not move.
        with suppress(RuntimeError):
            self._tell()
            self._hear()  # at once, so that each knows the others' processes
            while not self.stopped:
                self._tell()
                if self.alarm or time.monotonic() - self.answered >= self.interval:
                    self._hear()
                if self.alarm:
                    time.sleep(URGENT_SECONDS)
                else:
                    self.woken.wait(TELL_SECONDS)

    def _tell(self) -> None:
        """Say what this rank does."""
        self.board.tell({**self.pulse.told(), **self.place, "ready": self.ready, "alarm": self.alarm, "told": self.told,
                         "at": time.monotonic()})

    def _hear(self) -> None:
        """Read what all ranks do; blocks where the store does not answer."""
        for other, state in self.board.hear().items():
            self.states[other], self.heard[other] = state, time.monotonic()
            if other != self.rank and self._runs(other):
                self.neighbours.add(other)
            self.alarm, self.told = self.alarm or state["alarm"], self.told or state["told"]
        self.answered = time.monotonic()

    def _guard(self) -> None:
        seen = complete = time.monotonic()
        while not self.stopped:
            now = time.monotonic()
            if now - seen > 1 + 3 * self.interval:  # it was stopped itself, as with a job that is suspended for a while
                self.awake = now
            seen = now
            if self.alarm or now - max(self._moved(), self.awake) > self.timeout:
                self._end()
            gone = [rank for rank in self.neighbours if not self._runs(rank)] if self.pulse.waits else []
            if not gone:
                complete = now
            elif now - max(complete, self.awake) > GONE_SECONDS:
                os._exit(self.report(f"rank {self.rank} stops, because rank {min(gone)} has ended; the cause is in that one's "
                                     "output", "", True))
            self.woken.wait(self.interval / 2)

    def _moved(self) -> float:
        """When this rank moved, or, while it waits, any rank, as far as is known."""
        if not self.pulse.waits:
            return self.pulse.moved
        return max(self.pulse.moved, *(heard - state["still"] for heard, state in zip(self.heard, self.states)))

    def _runs(self, rank: int) -> bool:
        """Whether a rank's process is there; only for ranks of this machine."""
        try:
            os.kill(self.states[rank]["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.states[rank]["host"] == self.place["host"]

    def _end(self) -> None:
        """Write the stacks, let the others do so, report it unless another rank does, and leave."""
        self.alarm, patience = True, self.interval + ANSWER_SECONDS
        self.woken.set()
        self._write_stacks()
        self.ready = True
        self._wait(patience, lambda: all(state["ready"] for state in self.states))
        connected = time.monotonic() - self.answered < ANSWER_SECONDS
        if connected:
            silent = [rank for rank, state in enumerate(self.states) if not state["ready"] and rank != self.rank]
            speaker = min({*range(len(self.states))} - {*silent})
        else:  # nothing is known of the others but who hosts the store
            silent = [0] if self.hosted_by_main and self.rank > 0 else []
            speaker = min(rank for rank, state in enumerate(self.states)
                          if state["host"] == self.place["host"] and rank not in silent)
        self.states[self.rank] |= self.pulse.told()
        self.heard[self.rank] = time.monotonic()
        overslept = time.monotonic() - self.awake < self.timeout  # and knows least of all
        if self.rank != speaker or overslept:
            self._wait(patience, lambda: self.told)
        speaks = not self.told and not overslept and (connected or self.rank == speaker)
        exit_code = self.report(self._sentence(silent, connected), self._table(silent), speaks)
        told_at, self.told = time.monotonic(), True
        self._wait(patience if connected else 0, lambda: self.answered > told_at + URGENT_SECONDS)
        for rank in silent:  # one that was only stopped can now leave by itself
            if self.states[rank]["host"] == self.place["host"] and rank != self.rank:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self.states[rank]["pid"], signal.SIGCONT)
        os._exit(exit_code)

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            time.sleep(URGENT_SECONDS / 2)

    def _write_stacks(self) -> None:
        """Of all threads, into the folder for them; before there is one, to the error stream."""
        if self.pulse.folder is None:
            faulthandler.dump_traceback(sys.stderr)
            return
        try:
            self.pulse.folder.mkdir(exist_ok=True)
            with open(self.pulse.folder / f"stacks-rank-{self.rank}.txt", "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
        except OSError as error:
            print(f"no stacks of rank {self.rank}: {error}", file=sys.stderr, flush=True)

    def _table(self, silent: list[int]) -> str:
        """A line for each rank: what it does, and since when."""
        lines = ["A rank does not move:"]
        for rank, state in enumerate(self.states):
            still = state["still"] + time.monotonic() - self.heard[rank]
            lines.append(f"  rank {rank}: {state['phase']}, step {state['step']}{', waits for the others' * state['waits']}"
                         f"{', does not answer' * (rank in silent)}; {still:.0f} s since it moved")
        return "\n".join(lines)

    def _sentence(self, silent: list[int], connected: bool) -> str:
        """Who does not move, where, and what to do."""
        doing: dict[tuple, list[int]] = {}
        for rank, state in enumerate(self.states):
            doing.setdefault((rank not in silent, state["waits"], state["phase"], state["step"]), []).append(rank)
        who = ", ".join(clause(ranks, *what) for what, ranks in sorted(doing.items()))  # suspects first
        unknown = "" if connected else (f" as far as is known (the store through which ranks speak, in "
                                        f"{'rank 0' if self.hosted_by_main else 'the first launcher'}, does not answer)")
        where = "above" if self.pulse.folder is None else f"in {self.pulse.folder / 'stacks-rank-*.txt'}"
        return (f"hang: {who}{unknown}, and nothing moved for DISTRIBUTED_TIMEOUT={self.timeout:g} s. The stacks are {where}. "
                "The same command goes on from the last checkpoint; where a phase is merely slow, raise DISTRIBUTED_TIMEOUT")


def clause(ranks: list[int], answers: bool, waits: bool, phase: str, step: int) -> str:
    """"ranks 0, 2-7 wait in save (step 500)"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda entry: entry[1] - entry[0])]
    names = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    one = len(ranks) == 1
    verb = ("waits" if one else "wait") if waits else ("is" if one else "are")
    return (f"rank{'' if one else 's'} {names} {verb} in {phase} (step {step})"
            + ("" if answers else " and does not answer" if one else " and do not answer"))
