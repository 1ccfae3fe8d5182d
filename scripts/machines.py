"""The launchers of a job on several machines: whether they are alive, and what each has published."""

import atexit
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Optional

from common.text import show
from parallel.process import RESOLVE_SECONDS

BEAT_SECONDS = 0.5  # between signs of life
SILENT_SECONDS = 30  # without one, a launcher or its machine is lost
QUIET_SECONDS = 2  # of a wait, before a line says what it waits for
STORE_SECONDS = 5  # for an answer of the store


def node_names(nodes: Sequence[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"


def time_text(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:g} s"


class Machines(threading.Thread):
    """What every machine's launcher publishes, as JSON in a store on the first machine.

    Only this thread uses the store: torch's calls can block if a machine is lost, and then delay signals.

    Args:
        store: like torch's TCPStore, on the first machine; the others connect to it.
    """

    def __init__(self, host: str, port: int, node: int, count: int, store: Any = None):
        from torch.distributed import TCPStore

        super().__init__(daemon=True)
        self.connect = TCPStore
        self.host, self.port, self.node, self.store = host, port, node, store
        self.keys = [f"machine-{number}" for number in range(count)]
        self.settings: dict[str, Any] = {}  # of the first machine, on the others
        self.ours: dict[str, Any] = {}
        self.states: list[dict[str, Any]] = [{} for _ in self.keys]
        self.texts: list[Optional[bytes]] = [None for _ in self.keys]
        self.heard = [0.0 for _ in self.keys]  # when each text was last seen to change
        self.refused = False  # another launcher is this node
        self.starting: Optional[tuple[str, str]] = None  # the keys of `watch_start`
        self.missing: Optional[int] = None  # the machine that ended, or is lost, before all ranks joined
        self.error: Optional[Exception] = None
        self.failing_since = 0.0  # with errors of this type
        self.woken, self.stopped = threading.Event(), False

    def run(self) -> None:
        atexit.register(self.stop)  # a thread that comes out of torch after Python's end would abort
        beat = 0
        while not self.stopped:
            beat, error = beat + 1, None
            try:
                self._exchange(beat)
            except (OSError, RuntimeError, ValueError, TypeError) as caught:
                error = caught
            if type(error) is not type(self.error):
                self.failing_since = time.monotonic()
            self.error = error
            self.woken.wait(BEAT_SECONDS)
            self.woken.clear()

    def stop(self) -> None:
        self.stopped = True
        self.woken.set()
        self.join(STORE_SECONDS)

    def _exchange(self, beat: int) -> None:
        if self.store is None:
            socket.create_connection((self.host, self.port), timeout=1).close()
            self.store = self.connect(self.host, self.port, is_master=False,
                                      timeout=timedelta(seconds=STORE_SECONDS))
            self.settings = json.loads(self.store.get("settings"))
            self._register()
        if self.refused:
            return
        self.store.set(self.keys[self.node], json.dumps([beat, self.ours]))
        known = [node for node, key in enumerate(self.keys) if self.texts[node] or self.store.check([key])]
        for node, text in zip(known, self.store.multi_get([self.keys[node] for node in known])):
            if text != self.texts[node]:
                self.states[node] = dict(json.loads(text)[1])
                self.texts[node], self.heard[node] = text, time.monotonic()
        if self.starting:
            self._check_start(*self.starting)

    def watch_start(self, ended: str, joined: str) -> None:
        """Until all ranks have joined, stop this launcher by SIGTERM if another machine's ranks will not: its
        own would wait for them. `missing` is then that machine.

        Args:
            ended: the key that a machine publishes at the end of this start.
            joined: the key of the store that parallel/ranks.py sets, with torch's prefix.
        """
        self.missing, self.starting = None, (ended, joined)

    def _check_start(self, ended: str, joined: str) -> None:
        silent = time.monotonic() - SILENT_SECONDS
        absent = []
        for node, state in enumerate(self.states):
            failed = isinstance(state.get(ended), dict) and state[ended].get("cause")  # --check joins nothing
            if node != self.node and (failed or ended not in state and self.heard[node] < silent):
                absent.append(node)
        if self.store.check([joined]):
            self.starting = None
        elif absent:
            self.starting, self.missing = None, absent[0]
            os.kill(os.getpid(), signal.SIGTERM)

    def _register(self) -> None:
        """Become this node, unless another launcher that gives signs of life is it already."""
        name, holder = str(uuid.uuid4()), f"holder-{self.node}"
        key, store = self.keys[self.node], self.store
        if store.compare_set(holder, "", name).decode() != name:
            before = store.get(key) if store.check([key]) else b""
            time.sleep(3 * BEAT_SECONDS)
            self.refused = store.check([key]) and store.get(key) != before

    def publish(self, **values: Any) -> None:
        """Let the other machines read values; wait until they can, or the store is lost."""
        self.ours = {**self.ours, **values}
        self.woken.set()
        deadline = time.monotonic() + STORE_SECONDS
        while (self.is_alive() and not self.error and time.monotonic() < deadline
               and not values.keys() <= self.states[self.node].keys()):
            time.sleep(BEAT_SECONDS / 10)

    def wait(self, key: str, purpose: str, seconds: float, is_start: bool = False,
             nodes: Optional[Sequence[int]] = None) -> tuple[list[int], str]:
        """Wait until these machines (default: all) have published `key`; say so after QUIET_SECONDS.

        Returns:
            The machines that have not, and a sentence about them.
        """
        nodes = range(len(self.keys)) if nodes is None else nodes
        started, said = time.monotonic(), None
        while True:
            missing = [node for node in nodes if key not in self.states[node]]
            counts = {node: state.get("nnodes", len(self.keys)) for node, state in enumerate(self.states)}
            other = next((node for node in counts if counts[node] != len(self.keys)), None)
            if other is not None:
                return missing, (f"node {other} was started with --nnodes {counts[other]}, this one with "
                                 f"--nnodes {len(self.keys)}")
            if self.refused:
                return missing, f"node {self.node} is here already"
            if not missing:
                return [], ""
            now, error, limit, deadline = time.monotonic(), self.error, seconds, started + seconds
            if self.store is None or error and self.node:  # the first machine has the store
                missing = [0]
            if isinstance(error, socket.gaierror):
                limit, deadline = RESOLVE_SECONDS, self.failing_since + RESOLVE_SECONDS
            reason = f" ({(str(error).splitlines() or [type(error).__name__])[0]:.200})" if error else ""
            silent = [node for node in missing if now - self.heard[node] > SILENT_SECONDS and not is_start]
            if silent:
                return missing, (f"{node_names(silent)} did not answer for {time_text(SILENT_SECONDS)} "
                                 "(the launcher, machine or network failed)")
            if now > deadline:
                return missing, f"{node_names(missing)} did not {purpose} within {time_text(limit)}{reason}"
            minutes = (now - started) // 60
            if now - started > QUIET_SECONDS and said != (missing, reason, minutes):
                said = missing, reason, minutes
                left = f"{time_text(round(deadline - now))} left" if minutes else f"up to {time_text(limit)}"
                if not is_start and limit > SILENT_SECONDS:
                    left += f", or {time_text(SILENT_SECONDS)} without a sign of life"
                show(f"Waiting for {node_names(missing)} to {purpose} ({left}){reason * is_start}")
            time.sleep(BEAT_SECONDS / 5)
