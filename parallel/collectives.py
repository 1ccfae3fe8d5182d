"""The process group: who am I, and what all ranks agree on. The one room that speaks torch.distributed."""

import errno
import gc
import hashlib
import json
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, Optional, Protocol, TypeVar

import torch
import torch.distributed as dist

from common import errors
from common.errors import HangError, PaddockError, SettingsError
from common.heartbeat import HEARTBEAT
from common.text import print_safely
from parallel.exit_report import JOB_TOKEN, SECOND_SIGNAL_SECONDS, stop_signals, tell_joined, write_error_file
from parallel.network import keep_to_interface, listen_at
from parallel.watchdog import Board, HangWatchdog

T = TypeVar("T")
JOIN_SECONDS = 25  # that ranks may start apart, where no launcher has gathered them
LATER_SECONDS = 86_400  # after DISTRIBUTED_TIMEOUT the group would end a wait, also one for a rank that moves; the watch does not


@dataclass(frozen=True)
class Ranks:
    """This process's place among all, and the few collectives that the trainer needs.

    The default is a single process, for which every collective is the identity.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add the values of all ranks, element by element, in float64. Collective: every rank must call it."""
        if self.world_size == 1:
            return [float(value) for value in values]
        with HEARTBEAT.waiting():
            total = torch.tensor(values, dtype=torch.float64, device=self.device)
            dist.all_reduce(total)
            return total.tolist()

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, with the sum of every rank's; waits for no GPU. Collective: every rank must call it."""
        if self.world_size > 1:
            with HEARTBEAT.waiting():
                dist.all_reduce(tensor)
        return tensor

    def read(self, tensor: torch.Tensor) -> list[float]:
        """What the device computes, when it has done so; after an exchange of a GPU, it is here that one waits for the others."""
        with HEARTBEAT.waiting():
            return tensor.tolist()

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's tensor, on the CPU. Collective: every rank must call it."""
        if self.world_size == 1:
            return tensor
        with HEARTBEAT.waiting():
            total = tensor.to(self.device)
            dist.all_reduce(total)
            return total.cpu()

    def all_agree(self, ok: bool) -> bool:
        """Whether `ok` holds on every rank. Collective: every rank must call it."""
        return self.sum([float(not ok)])[0] == 0

    def broadcast(self, value):
        """Rank 0's JSON-like value, on every rank. Collective: every rank must call it."""
        if self.world_size == 1:
            return value
        data = json.dumps(value).encode() if self.is_main else b""
        size = int(self.sum([len(data)])[0])
        with HEARTBEAT.waiting():
            buffer = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8).to(self.device)
            dist.broadcast(buffer, src=0)
            return json.loads(bytes(buffer.tolist()))

    def all_gather_json(self, value) -> list:
        """Every rank's JSON-like value, in rank order, on every rank. Collective: every rank must call it."""
        if self.world_size == 1:
            return [value]
        data = json.dumps(value).encode()
        size = int(max(self.sum([len(data) * (rank == self.rank) for rank in range(self.world_size)])))
        with HEARTBEAT.waiting():
            mine = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8).to(self.device)
            everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
            dist.all_gather(everyone, mine)
            return [json.loads(bytes(buffer.tolist())) for buffer in everyone]

    def raise_on_all(self, make: Callable[[], T]) -> T:
        """What make() gives on this rank. A PaddockError on any rank is raised on all of them.

        Collective: every rank must call it.
        """
        value, failure = None, None
        try:
            value = make()
        except PaddockError as error:
            failure = [type(error).__name__, str(error)]
        for rank, failed in enumerate(self.all_gather_json(failure)):
            if failed is not None:
                name, text = failed
                error = getattr(errors, name)(*(f"rank {rank}: {text}" if rank else text).split("\n"))
                error.shared = True
                raise error
        return value

    def on_rank0(self, make: Callable[[], T]) -> Optional[T]:
        """What make() gives, on rank 0; None on the others. Its PaddockError is raised on every rank.

        Collective: every rank must call it.
        """
        return self.raise_on_all(lambda: make() if self.is_main else None)

    def barrier(self) -> None:
        """Wait for every rank. Collective: every rank must call it."""
        self.sum([0])


def start_ranks(device_type: str, timeout_seconds: float) -> Ranks:
    """Join the process group that torchrun describes in the environment; without torchrun, be alone.

    Args:
        device_type: "cuda" (nccl) or "cpu" (gloo).
    Raises:
        SettingsError: the environment describes a group that cannot be joined.
    """
    rank, local_rank, world_size = (int(os.environ.get(key, default)) for key, default in
                                    (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    if not 0 <= rank < world_size:
        raise SettingsError(f"RANK={rank} must be from 0 to one less than WORLD_SIZE={world_size}; a launcher sets both")
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1)), torch.cuda.device_count()
        if processes > gpus:
            raise SettingsError(f"{processes} processes were started on this machine, which shows {gpus} GPUs; "
                                f"start torchrun with --nproc_per_node {gpus} at most")
        torch.cuda.set_device(device)
    HEARTBEAT.enter("start-up", 0)
    ranks = Ranks(rank, local_rank, world_size, device)
    if world_size > 1:
        where = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        try:
            join(ranks, timeout_seconds)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise SettingsError(f"rank {rank} of {world_size} could not join the process group at {where}: {reason}; "
                                "check that all were started, with the same address and a free port, and GLOO_SOCKET_IFNAME "
                                "where that is set") from error
    tell_joined()
    return ranks


@contextmanager
def joined_ranks(device_type: str, timeout_seconds: float) -> Iterator[Ranks]:
    """A `with` block in the process group of `start_ranks`. All leave it together; after an error each by itself."""
    ranks = start_ranks(device_type, timeout_seconds)
    yield ranks
    HEARTBEAT.enter("the end")
    ranks.barrier()  # the first to leave with a code has the launcher end those that are still closing their logs
    stop_ranks()


def join(ranks: Ranks, timeout_seconds: float) -> None:
    """Join the group, and begin to watch over it.

    Raises:
        OSError, RuntimeError, ValueError: of torch, which has no narrower ones, and of the port at which rank 0 listens.
    """
    global watch
    device, place = ranks.device, {"rank": ranks.rank, "world_size": ranks.world_size}
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ValueError("an address and a number are expected")
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    hosted_by_main = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timeout_seconds if launched else min(timeout_seconds, JOIN_SECONDS)
    keep_to_interface(host, one_machine=os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.world_size))
    with dying_at_signals():
        _hosted = host_store(listen_at([host], int(port), patience)) if hosted_by_main and ranks.is_main else None
        store, *_ = next(dist.rendezvous("env://", **place, timeout=timedelta(seconds=patience)))
        # By the token's hash, not the token: anyone can list the keys. Without a launcher there is none yet.
        job = f"{os.environ.get(JOB_TOKEN, '')}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        here = [f"paddock-{hashlib.sha256(job.encode()).hexdigest()}/here-{rank}" for rank in range(ranks.world_size)]
        store.set(here[ranks.rank], "yes")
        store.wait(here, timedelta(seconds=patience))  # the group would wait as long as for any collective
        dist.init_process_group(backend, store=store, **place, device_id=device_id,
                                timeout=timedelta(seconds=timeout_seconds + LATER_SECONDS))
        own_client = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_seconds))
        # Where no launcher hands one to all, the group does, and not the store.
        token = os.environ.pop(JOB_TOKEN, "") or ranks.broadcast(secrets.token_hex())
    watch = HangWatchdog(HEARTBEAT, Board(own_client, token, ranks.world_size), hosted_by_main, ranks.rank, timeout_seconds, report_end)


def host_store(listening: socket.socket) -> dist.TCPStore:
    """A store behind a socket, which it takes over. It lives as long as this object, or another that is opened at that port:
    torch's own stores, which would listen everywhere, find it there."""
    host, port = listening.getsockname()[:2]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                         master_listen_fd=listening.detach())


watch: Optional[HangWatchdog] = None  # of this process's group


@contextmanager
def dying_at_signals() -> Iterator[None]:
    """A `with` block in C++, where a Python handler would have to wait: a stop signal ends the process, which has nothing to
    save."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def report_end(sentence: str, table: str, speaks: bool) -> int:
    """Leave word of an end that the watch makes, print it where this rank speaks for all and no launcher will say it, and return
    the exit code: of a hang, or, without a table, of a rank that has lost another."""
    code = HangError.exit_code if table else 1
    if not write_error_file(code, sentence, table, victim=not table) and speaks:
        print_safely(f"{table}\nerror: {sentence}".lstrip(), sys.stderr)
    return code


def stop_ranks() -> None:
    """Leave the process group, if one was joined."""
    stop_watch()
    if dist.is_initialized():
        gc.collect()  # a model that is wrapped for the group must not outlive it: its end can hang then
        dist.destroy_process_group()


def stop_watch() -> None:
    """No more look for hangs. Where one is being reported, wait: this process ends with the report."""
    global watch
    if watch is not None:
        watch.stop()
        watch = None


class ExitReport(NamedTuple):
    """How a process ends: what to say of it, and its exit code."""

    sentence: str
    code: int
    victim: bool = False  # another rank is the cause
    shared: bool = False  # by every rank


def classify_exception(error: Exception) -> Optional[ExitReport]:
    """How a process ends that was ended by this error; None for one that is nobody's but ours, and needs its traceback."""
    rank, reason = os.environ.get("RANK", "0"), (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, PaddockError):
        return ExitReport(str(error), error.exit_code, shared=error.shared)
    if out_of_memory(error):
        return ExitReport(f"rank {rank} is out of memory ({reason or type(error).__name__}); lower MICRO_BATCH_SIZE (the step stays "
                      "the same), set ACTIVATION_CHECKPOINTING=block, or lower MAX_SEQ_LEN; --check forecasts what is needed", 1)
    if isinstance(error, RuntimeError) and (found := re.search(NOT_DETERMINISTIC, str(error))):
        return ExitReport(f"DETERMINISTIC=true, but {found[1]} has no deterministic kernel here; set it to false",
                      SettingsError.exit_code)
    if isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_TIME):
        return ExitReport(f"hang: rank {rank} waited in {HEARTBEAT.phase} (step {HEARTBEAT.step}) for another that did not come within "
                      f"DISTRIBUTED_TIMEOUT ({reason}); where a phase is merely slow, raise it", HangError.exit_code)
    if isinstance(error, RuntimeError) and any(words in str(error) for words in LOST):
        return ExitReport(f"rank {rank} stops, because another has ended; the cause is in that one's output ({reason})", 1,
                      victim=True)
    return None


# What torch, gloo and nccl say of it; there is no class for any.
NOT_DETERMINISTIC = r"(\S+) does not have a deterministic implementation"
OUT_OF_TIME = ("Timed out waiting", "Watchdog caught collective operation timeout")
LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")


def out_of_memory(error: Exception) -> bool:
    """Whether a device, or the machine, had no more memory to give."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


class StopSignals:
    """Remembers TERM, INT, USR1 and HUP, for the loop to save and leave; a second one, a moment later, quits at once.

    They mean what they meant before when the `with` block is left.
    """

    def __init__(self) -> None:
        self.received: Optional[int] = None
        self.at = 0.0

    def __enter__(self) -> "StopSignals":
        self.before = {number: signal.signal(number, self._handle) for number in stop_signals()}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame) -> None:
        now = time.monotonic()
        if self.received is not None and now - self.at > SECOND_SIGNAL_SECONDS:
            write_error_file(1, f"rank {os.environ.get('RANK', 0)} left at a second {signal.Signals(number).name}, without saving")
            os._exit(128 + number)
        if self.received is None:
            self.received, self.at = number, now


class Interrupted(Exception):
    """A stop signal came in the middle of something long; all ranks raise it together."""


def leave_if_stopped(ranks: Ranks, signals: StopSignals) -> None:
    """Collective: every rank must call it, and all raise Interrupted when one of them was signalled."""
    if not ranks.all_agree(signals.received is None):
        raise Interrupted


class Log(Protocol):
    """Where messages for the user go."""

    def info(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """What every part of a run shares."""

    ranks: Ranks
    signals: StopSignals
    log: Log

    def leave_if_stopped(self) -> None:
        """Raise Interrupted on all ranks if one was signalled. Collective: every rank must call it."""
        leave_if_stopped(self.ranks, self.signals)
