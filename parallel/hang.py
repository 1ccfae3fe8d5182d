"""The watchdog: ranks exchange their status, so that a hang ends with a report."""

import faulthandler
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
from typing import Any

from common.errors import HangError
from common.heartbeat import Heartbeat
from common.text import print_safely
from parallel.process import write_error_file

PUBLISH_SECONDS = 0.5  # between publications of this rank's status
POLL_SECONDS = 2.0  # between reads of other ranks' statuses
ALARM_SECONDS = 0.1  # the interval of both after an alarm
# Statuses that a rank reads at once. If each read all, the load of the store would grow quadratically.
POLLED_RANKS = 64
RESPONSE_SECONDS = 4.0  # for a rank to write its stacks, and for the store to respond
# Patience for an exited rank: a CPU collective with it fails by itself, a wait on a GPU does not.
EXITED_RANK_SECONDS = 5.0
ALARM_KEY = "alarm"  # in the store: the newest status of a rank that raised the alarm


class HangWatchdog:
    """Two threads in every rank: one exchanges statuses, the other ends this process if a rank hangs.

    A rank hangs if it makes no progress for too long. While it waits, progress of any rank counts, because a
    save may take long. A rank also exits if it waits in a GPU kernel for an exited rank of the same machine.
    The threads are separate because the store, which may be in rank 0's process or a launcher, can hang too.
    `world` is this rank and the number of ranks.
    """

    def __init__(self, heartbeat: Heartbeat, store: Any, world: tuple[int, int], timeout_seconds: float,
                 store_on_rank0: bool):
        self.heartbeat, self.store, self.store_on_rank0 = heartbeat, store, store_on_rank0
        self.rank, count = world
        self.timeout, self.interval = timeout_seconds, min(POLL_SECONDS, timeout_seconds / 10)
        # Each read covers the next ranks; a round over all ranks takes at most a fifth of the time-out.
        seconds = self.interval + PUBLISH_SECONDS
        self.polled = min(count, max(POLLED_RANKS, math.ceil(5 * count * seconds / timeout_seconds)))
        self.next_polled = self.rank - self.polled // 2  # first the neighbours, which run on this machine
        self.extra_reads = math.ceil(count / self.polled) - 1  # per round
        self.place = {"host": socket.gethostname(), "pid": os.getpid(), "rank": self.rank}
        heartbeat.beat()
        unread = {**heartbeat.status(), **self.place, "sent_at": -math.inf, "stacks_written": False,
                  "last_beat": heartbeat.last_beat}
        self.statuses: list[dict[str, Any]] = [unread.copy() for _ in range(count)]
        self.local_ranks: set[int] = set()  # other ranks seen on this machine
        self.store_answered_at = -math.inf
        self.stacks_written = False
        self.alarm = self.reported = False  # of any rank
        self.resumed_at = -math.inf  # end of the last detected suspension of this process
        self.stopped = threading.Event()
        store.set(ALARM_KEY, b"")
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange, self._watch)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Stop both threads; after an alarm, wait instead for the watching thread to end this process."""
        while self.alarm and self.threads[1].is_alive():
            time.sleep(ALARM_SECONDS)
        self.stopped.set()
        for thread in self.threads:
            thread.join(POLL_SECONDS)

    def _exchange(self) -> None:
        # The store ends with its host process; other ranks then fail in a collective, or hang.
        with suppress(RuntimeError):
            while True:
                status = {**self.heartbeat.status(), **self.place, "stacks_written": self.stacks_written,
                          "alarm": self.alarm, "reported": self.reported, "sent_at": time.monotonic()}
                for key in (f"rank-{self.rank}", ALARM_KEY)[:1 + self.alarm]:
                    self.store.set(key, json.dumps(status).encode())
                if self.alarm or time.monotonic() - self.store_answered_at >= self.interval:
                    self._poll()
                if self.stopped.wait(ALARM_SECONDS if self.alarm else PUBLISH_SECONDS):
                    return

    def _poll(self) -> None:
        polled = [(self.next_polled + index) % len(self.statuses) for index in range(self.polled)]
        self.next_polled += self.polled
        # Blocks until each of these has published its first status.
        texts = self.store.multi_get([*(f"rank-{rank}" for rank in polled), ALARM_KEY])
        now = self.store_answered_at = time.monotonic()
        for status in map(json.loads, filter(None, texts)):
            rank = status["rank"]
            if status["sent_at"] <= self.statuses[rank]["sent_at"]:
                continue  # already read, or older than the alarm
            self.statuses[rank] = {**status, "last_beat": now - status["idle_seconds"]}  # on this clock
            if rank != self.rank and self._runs_here(rank):
                self.local_ranks.add(rank)
            self.alarm, self.reported = self.alarm or status["alarm"], self.reported or status["reported"]

    def _watch(self) -> None:
        last_look = all_ran_at = time.monotonic()
        while not self.stopped.wait(self.interval / 2):
            now = time.monotonic()
            if now - last_look > 1 + 3 * self.interval:  # suspended, perhaps with the whole job
                self.resumed_at = now
            last_look = now

            if self.alarm or now - max(self._last_progress(), self.resumed_at) > self.timeout:
                self._end_process()

            exited = [rank for rank in self.local_ranks if not self._runs_here(rank)]
            if not (exited and self.heartbeat.is_waiting):
                all_ran_at = now
            elif now - max(all_ran_at, self.resumed_at) > EXITED_RANK_SECONDS:
                self._report(1, f"rank {self.rank} stops, because rank {min(exited)} has exited; see that "
                                "rank's output for the cause")
                os._exit(1)

    def _last_progress(self) -> float:
        """Return the last time of this rank's progress; while it waits, of any rank's known progress."""
        if not self.heartbeat.is_waiting:
            return self.heartbeat.last_beat
        unknown_seconds = self.extra_reads * (self.interval + PUBLISH_SECONDS)
        known = max(status["last_beat"] for status in self.statuses)
        return max(self.heartbeat.last_beat, known + unknown_seconds)

    def _runs_here(self, rank: int) -> bool:
        """Return whether a rank's process is running on this machine."""
        with suppress(PermissionError):
            try:
                os.kill(self.statuses[rank]["pid"], 0)
            except ProcessLookupError:
                return False
        return self.statuses[rank]["host"] == self.place["host"]

    def _end_process(self) -> None:
        """Write the stacks, wait for those of other ranks, report unless another rank does, and exit."""
        self.alarm = True
        folder, stream = self.heartbeat.stacks_folder, sys.stderr
        try:
            if folder is not None:
                folder.mkdir(exist_ok=True)
                stream = open(folder / f"stacks-rank-{self.rank}.txt", "w", encoding="utf-8")
            faulthandler.dump_traceback(stream)
        except OSError as error:
            print_safely(f"no stacks of rank {self.rank}: {error}", sys.stderr)
        self.stacks_written = True
        wait_seconds = self.interval + PUBLISH_SECONDS + RESPONSE_SECONDS + self.extra_reads * ALARM_SECONDS
        self._wait(wait_seconds, lambda: all(status["stacks_written"] for status in self.statuses))

        # The lowest responding rank speaks for all; without the store, the lowest of this machine.
        connected = time.monotonic() - self.store_answered_at < RESPONSE_SECONDS
        silent = {0} if self.store_on_rank0 else set()
        if connected:
            silent = {rank for rank, status in enumerate(self.statuses) if not status["stacks_written"]}
        silent -= {self.rank}
        speaker = min(rank for rank, status in enumerate(self.statuses) if rank not in silent
                      and (connected or status["host"] == self.place["host"]))
        self.statuses[self.rank] |= {**self.heartbeat.status(), "last_beat": self.heartbeat.last_beat}
        was_suspended = time.monotonic() - self.resumed_at < self.timeout  # so it knows less than the others
        if self.rank != speaker or was_suspended:
            self._wait(wait_seconds, lambda: self.reported)
        speaks = not self.reported and not was_suspended and (connected or self.rank == speaker)
        self._report(HangError.exit_code, *self._describe(silent, connected), speaks)

        # Publish the report, so that a silent rank that was only suspended can exit by itself.
        reported_at, self.reported = time.monotonic(), True
        # The store's host waits until the others know, because the store ends with it.
        hosts_store = self.store_on_rank0 and self.rank == 0
        must_know = {*range(len(self.statuses))} - silent - {self.rank} if hosts_store else set()
        self._wait(wait_seconds if connected else 0,
                   lambda: self.store_answered_at > reported_at + ALARM_SECONDS
                   and all(self.statuses[rank]["reported"] for rank in must_know))
        for rank in silent:
            if self.statuses[rank]["host"] == self.place["host"]:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self.statuses[rank]["pid"], signal.SIGCONT)
        os._exit(HangError.exit_code)

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            time.sleep(ALARM_SECONDS / 2)

    def _report(self, code: int, sentence: str, table: str = "", speaks: bool = True) -> None:
        """Report why this process ends to the launcher, or on stderr if this rank speaks for all."""
        if not write_error_file(code, sentence, table, is_secondary=not table) and speaks:
            print_safely(f"{table}\nerror: {sentence}".lstrip(), sys.stderr)

    def _describe(self, silent: set[int], connected: bool) -> tuple[str, str]:
        """Return a sentence about the hanging ranks and the remedy, and a table of all ranks."""
        lines, groups = ["Status of each rank:"], {}
        for rank, status in enumerate(self.statuses):
            lines.append(f"  rank {rank}: {status['phase']}, step {status['step']}"
                         f"{', waits for others' * status['waiting']}"
                         f"{', does not respond' * (rank in silent)}; "
                         f"{time.monotonic() - status['last_beat']:.0f} s without progress")
            # Suspects sort first.
            key = (rank not in silent, status["waiting"], status["phase"], status["step"])
            groups.setdefault(key, []).append(rank)
        who = ", ".join(describe_ranks(ranks, *key) for key, ranks in sorted(groups.items()))
        host = "rank 0" if self.store_on_rank0 else "the first launcher"
        unknown = "" if connected else f" as far as is known (the status store in {host} does not respond)"
        folder = self.heartbeat.stacks_folder
        where = "above" if folder is None else f"in {folder / 'stacks-rank-*.txt'}"
        return (f"hang: {who}{unknown}, and no rank made progress for DISTRIBUTED_TIMEOUT={self.timeout:g} "
                f"s. The stack traces are {where}. The same command resumes from the last checkpoint; if a "
                "phase is merely slow, raise DISTRIBUTED_TIMEOUT", "\n".join(lines))


def describe_ranks(ranks: list[int], responds: bool, waits: bool, phase: str, step: int) -> str:
    """Return a clause such as "ranks 0, 2-7 wait in save (step 500)"."""
    runs = [[rank for _, rank in run]
            for _, run in groupby(enumerate(ranks), key=lambda item: item[1] - item[0])]
    names = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    one = len(ranks) == 1
    noun, wait, be, do = ("rank", "waits", "is", "does") if one else ("ranks", "wait", "are", "do")
    silence = "" if responds else f" and {do} not respond"
    return f"{noun} {names} {wait if waits else be} in {phase} (step {step}){silence}"
