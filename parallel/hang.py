"""Ranks exchange what they are doing, so that a hang ends with a report and not in silence."""

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

PUBLISH_SECONDS = 0.5  # between two publications of this rank's status
POLL_SECONDS = 2.0  # between two reads of the others' statuses
ALARM_SECONDS = 0.1  # between both after an alarm
# The statuses that a rank reads at once. If each read all, the store would answer their number squared.
POLLED_RANKS = 64
RESPONSE_SECONDS = 4.0  # for a rank to write its stacks, and for a store to answer
# How long to wait for an exited rank: a CPU collective fails at once by itself, a wait on a GPU does not.
EXITED_RANK_SECONDS = 5.0


class HangWatchdog:
    """Two threads in every rank: one exchanges statuses, one ends this process if any rank hangs.

    A hang is a rank that makes no progress for too long. A rank that waits does not hang while any rank makes
    progress: a save may take long. A rank also exits if it waits, in a GPU kernel, for a rank of this machine
    that has exited. There are two threads, because the store can hang as well.

    Args:
        store: like torch's TCPStore; a client that nothing else uses.
        world: this rank, and the number of ranks.
        store_on_rank0: the store lives in the process of rank 0, not in a launcher.
    """

    def __init__(self, heartbeat: Heartbeat, store: Any, world: tuple[int, int], timeout_seconds: float,
                 store_on_rank0: bool):
        self.heartbeat, self.store, self.store_on_rank0 = heartbeat, store, store_on_rank0
        self.rank, count = world
        prefix = f"paddock-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        self.keys, self.alarm_key = [f"{prefix}/rank-{rank}" for rank in range(count)], f"{prefix}/alarm"
        store.set(self.alarm_key, b"")  # later the newest status of any rank that raised the alarm
        self.timeout = timeout_seconds
        self.interval = min(POLL_SECONDS, timeout_seconds / 10)
        # Each read takes the next ranks, and a round of all takes a fifth of the time-out at most.
        seconds = self.interval + PUBLISH_SECONDS
        self.polled = min(count, max(POLLED_RANKS, math.ceil(5 * count * seconds / timeout_seconds)))
        self.next_polled = self.rank - self.polled // 2  # at first the neighbours, which run on this machine
        self.extra_reads = math.ceil(count / self.polled) - 1  # in a round
        self.place = {"host": socket.gethostname(), "pid": os.getpid(), "rank": self.rank}
        self.statuses: list[dict[str, Any]] = [{**heartbeat.status(), **self.place, "stacks_written": False}
                                               for _ in range(count)]
        self.received_at = [time.monotonic()] * count
        self.local_ranks: set[int] = set()  # other ranks whose processes were seen on this machine
        self.store_answered_at = time.monotonic()
        self.alarm = False  # some rank has made no progress for too long
        self.stacks_written = False
        self.reported = False  # by some rank
        self.resumed_at = -math.inf  # when this process was last found to have been suspended
        self.stopped, self.wake_up = False, threading.Event()
        heartbeat.beat()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange, self._watch)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Stop both threads.

        After an alarm, wait instead: the watching thread is about to end this process.
        """
        while self.alarm and self.threads[1].is_alive():
            time.sleep(ALARM_SECONDS)
        self.stopped = True
        self.wake_up.set()
        for thread in self.threads:
            thread.join(POLL_SECONDS)

    def _exchange(self) -> None:
        # A store ends with the process that hosts it; the other ranks then fail in a collective, or hang.
        with suppress(RuntimeError):
            self._publish()
            self._poll()  # at once, so that each rank knows the others' processes
            while not self.stopped:
                self._publish()
                if self.alarm or time.monotonic() - self.store_answered_at >= self.interval:
                    self._poll()
                if self.alarm:
                    time.sleep(ALARM_SECONDS)
                else:
                    self.wake_up.wait(PUBLISH_SECONDS)

    def _publish(self) -> None:
        status = {**self.heartbeat.status(), **self.place, "stacks_written": self.stacks_written,
                  "alarm": self.alarm, "reported": self.reported, "sent_at": time.monotonic()}
        for key in (self.keys[self.rank], self.alarm_key)[:1 + self.alarm]:
            self.store.set(key, json.dumps(status).encode())

    def _poll(self) -> None:
        polled = [(self.next_polled + index) % len(self.keys) for index in range(self.polled)]
        self.next_polled += self.polled
        # Blocks until each of them has published its first status.
        texts = self.store.multi_get([*(self.keys[rank] for rank in polled), self.alarm_key])
        for status in map(json.loads, filter(None, texts)):
            rank = status["rank"]
            if status["sent_at"] <= self.statuses[rank].get("sent_at", -math.inf):
                continue  # read before, or older than the alarm that was read
            self.statuses[rank], self.received_at[rank] = status, time.monotonic()
            if rank != self.rank and self._runs_here(rank):
                self.local_ranks.add(rank)
            self.alarm, self.reported = self.alarm or status["alarm"], self.reported or status["reported"]
        self.store_answered_at = time.monotonic()

    def _watch(self) -> None:
        last_look = all_ran_at = time.monotonic()
        while not self.stopped:
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
            self.wake_up.wait(self.interval / 2)

    def _last_progress(self) -> float:
        """When this rank made progress; while it waits, when any rank did, as far as is known."""
        if not self.heartbeat.is_waiting:
            return self.heartbeat.last_beat
        known = max(received - status["idle_seconds"] for received, status
                    in zip(self.received_at, self.statuses))
        unknown_seconds = self.extra_reads * (self.interval + PUBLISH_SECONDS)
        return max(self.heartbeat.last_beat, known + unknown_seconds)

    def _runs_here(self, rank: int) -> bool:
        """Whether a rank's process is running on this machine."""
        try:
            os.kill(self.statuses[rank]["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.statuses[rank]["host"] == self.place["host"]

    def _end_process(self) -> None:
        """Write the stacks, let the other ranks write theirs, report unless another rank does, and exit."""
        self.alarm, wait_seconds = True, self.interval + RESPONSE_SECONDS + self.extra_reads * ALARM_SECONDS
        self.wake_up.set()
        self._write_stacks()
        self.stacks_written = True
        self._wait(wait_seconds, lambda: all(status["stacks_written"] for status in self.statuses))

        # The lowest rank that responds speaks for all; without the store, the lowest one of this machine.
        connected = time.monotonic() - self.store_answered_at < RESPONSE_SECONDS
        if connected:
            silent = [rank for rank, status in enumerate(self.statuses)
                      if not status["stacks_written"] and rank != self.rank]
            speaker = min({*range(len(self.statuses))} - {*silent})
        else:
            silent = [0] if self.store_on_rank0 and self.rank > 0 else []
            speaker = min(rank for rank, status in enumerate(self.statuses)
                          if status["host"] == self.place["host"] and rank not in silent)
        self.statuses[self.rank] |= self.heartbeat.status()
        self.received_at[self.rank] = time.monotonic()
        was_suspended = time.monotonic() - self.resumed_at < self.timeout  # and knows less than the others
        if self.rank != speaker or was_suspended:
            self._wait(wait_seconds, lambda: self.reported)
        speaks = not self.reported and not was_suspended and (connected or self.rank == speaker)
        self._report(HangError.exit_code, self._sentence(silent, connected), self._table(silent), speaks)

        # Publish that it is reported. A silent rank that was only suspended can then exit by itself.
        reported_at, self.reported = time.monotonic(), True
        # The store ends with its process, which therefore waits until the others know, too.
        hosts_store = self.store_on_rank0 and self.rank == 0
        must_know = {*range(len(self.statuses))} - {*silent, self.rank} if hosts_store else set()
        self._wait(wait_seconds if connected else 0,
                   lambda: self.store_answered_at > reported_at + ALARM_SECONDS
                   and all(self.statuses[rank]["reported"] for rank in must_know))
        for rank in silent:
            if self.statuses[rank]["host"] == self.place["host"] and rank != self.rank:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self.statuses[rank]["pid"], signal.SIGCONT)
        os._exit(HangError.exit_code)

    def _report(self, code: int, sentence: str, table: str = "", speaks: bool = True) -> None:
        """Report why this process ends: to the launcher, or on stderr if this rank speaks for all."""
        if not write_error_file(code, sentence, table, is_secondary=not table) and speaks:
            print_safely(f"{table}\nerror: {sentence}".lstrip(), sys.stderr)

    def _wait(self, seconds: float, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            time.sleep(ALARM_SECONDS / 2)

    def _write_stacks(self) -> None:
        """Write the stacks of all threads into their folder, or to stderr while there is none."""
        if self.heartbeat.stacks_folder is None:
            faulthandler.dump_traceback(sys.stderr)
            return
        try:
            self.heartbeat.stacks_folder.mkdir(exist_ok=True)
            path = self.heartbeat.stacks_folder / f"stacks-rank-{self.rank}.txt"
            with open(path, "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
        except OSError as error:
            print_safely(f"no stacks of rank {self.rank}: {error}", sys.stderr)

    def _table(self, silent: list[int]) -> str:
        """One line for each rank: its phase, and the seconds since its last progress."""
        lines = ["Status of each rank:"]
        for rank, status in enumerate(self.statuses):
            idle_seconds = status["idle_seconds"] + time.monotonic() - self.received_at[rank]
            lines.append(f"  rank {rank}: {status['phase']}, step {status['step']}"
                         f"{', waits for others' * status['waiting']}"
                         f"{', does not respond' * (rank in silent)}; {idle_seconds:.0f} s without progress")
        return "\n".join(lines)

    def _sentence(self, silent: list[int], connected: bool) -> str:
        """Which ranks hang in which phase, and what to do."""
        groups: dict[tuple, list[int]] = {}
        for rank, status in enumerate(self.statuses):
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
                "phase is merely slow, raise DISTRIBUTED_TIMEOUT")


def describe_ranks(ranks: list[int], responds: bool, waits: bool, phase: str, step: int) -> str:
    """Return a clause such as "ranks 0, 2-7 wait in save (step 500)"."""
    runs = [[rank for _, rank in run]
            for _, run in groupby(enumerate(ranks), key=lambda item: item[1] - item[0])]
    names = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    one = len(ranks) == 1
    noun, wait, be, do = ("rank", "waits", "is", "does") if one else ("ranks", "wait", "are", "do")
    silence = "" if responds else f" and {do} not respond"
    return f"{noun} {names} {wait if waits else be} in {phase} (step {step}){silence}"
