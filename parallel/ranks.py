"""The process group and its collectives, stop signals, and what an error means for the whole job."""

import errno
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple, Optional, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from common import errors, interrupts
from common.activity import ACTIVITY, tick, waiting
from common.errors import HangError, PaddockError, SettingsError
from common.text import counted, duration
from parallel import process
from parallel.process import HangWatchdog, listen_at, restrict_interface

T = TypeVar("T")
PROGRESS_SECONDS = 30  # between progress lines of a long computation
START_SECONDS = 600  # without progress, until the plan has a DISTRIBUTED_TIMEOUT
JOIN_SECONDS = 25  # allowed delay between starts of ranks without a launcher
# Added to torch's own timeout, which must not fire first: the watchdog decides.
GROUP_TIMEOUT_MARGIN_SECONDS = 86_400
watchdog: Optional[HangWatchdog] = None  # of this process's group
left_groups: list[Any] = []  # see stop_ranks


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64; on MPS, which has none, in float32."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def collective(function: Callable[..., T]) -> Callable[..., T]:
    """Mark a function that every rank must call."""
    return function


class Interrupted(Exception):
    """A stop signal arrived during a long phase; all ranks raise it together."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank and device, and the trainer's collectives. The default is a single process.

    Objects are sent as JSON, because torch's object collectives use pickle.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    on_first_machine: int = 1  # number of ranks on rank 0's machine, which write checkpoints

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @collective
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the tensor over all ranks in place, without waiting for a GPU."""
        if self.world_size > 1:
            with waiting():
                dist.all_reduce(tensor)
        return tensor

    @collective
    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's tensor, on the CPU."""
        if self.world_size == 1:
            return tensor
        total = self.all_reduce(tensor.to(self.device))
        with waiting():
            return total.cpu()

    def tolist(self, tensor: torch.Tensor) -> list[float]:
        """Return tensor.tolist(). On a GPU this is where the host waits for the other ranks."""
        with waiting():
            return tensor.tolist()

    @collective
    def all_agree(self, ok: bool) -> bool:
        if self.world_size == 1:
            return ok
        return self.tolist(self.all_reduce(torch.tensor([float(not ok)], device=self.device))) == [0]

    @collective
    def all_gather_json(self, value, senders: Optional[int] = None) -> list:
        """Return the JSON-like values of all ranks, or of the first `senders`, in rank order."""
        if self.world_size == 1:
            return [value]
        senders = senders or self.world_size
        data = json.dumps(value).encode() if self.rank < senders else b""
        longest = torch.tensor(len(data), device=self.device)
        with waiting():
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            # Not an all-gather, whose number of hops grows with the number of ranks.
            padded = bytearray(data.ljust(int(longest)))
            rows = torch.zeros(senders, len(padded), dtype=torch.uint8)
            rows[self.rank:self.rank + 1] = torch.frombuffer(padded, dtype=torch.uint8)  # none without data
            rows = rows.to(self.device)
            dist.all_reduce(rows)
            return [json.loads(row.tobytes()) for row in rows.cpu().numpy()]

    @collective
    def raise_on_all(self, make: Callable[[], T]) -> T:
        """Return make(). If it raises an error on any rank, all ranks raise it."""
        value, failure = attempt(make)
        if not self.all_agree(failure is None):
            raise first_error(self.all_gather_json(failure))
        return value

    @collective
    def gather_or_raise(self, make: Callable[[], Any]) -> list:
        """Return the JSON-like make() of every rank, in rank order. If one raises an error, all ranks do."""
        values, failures = zip(*self.all_gather_json(attempt(make)))
        if any(failures):
            raise first_error(failures)
        return [*values]

    @collective
    def on_rank0(self, make: Callable[[], T]) -> T:
        """Return rank 0's JSON-like make() on every rank. If it raises an error, all ranks do."""
        value, failure = self.all_gather_json(attempt(make) if self.is_rank0 else None, senders=1)[0]
        if failure:
            raise first_error([failure])
        return value

    @collective
    def barrier(self) -> None:
        self.tolist(self.all_reduce(torch.zeros(1, device=self.device)))


# The class of an error, its text, its errno and the machine; None without an error.
Failure = Optional[tuple[str, str, Optional[int], str]]


def attempt(make: Callable[[], T]) -> tuple[Optional[T], Failure]:
    """Return make() or why it failed: a PaddockError or Interrupted, which all ranks will raise."""
    try:
        return make(), None
    except (PaddockError, Interrupted) as error:
        return None, (type(error).__name__, str(error), getattr(error, "errno", None), socket.gethostname())


def first_error(failures: Iterable[Failure]) -> Exception:
    """Return the first failure, in the order of ranks, as the error that all ranks raise."""
    rank, (name, text, number, machine) = next((rank, each) for rank, each in enumerate(failures) if each)
    if name == Interrupted.__name__:
        return Interrupted()
    error = getattr(errors, name)(*(f"rank {rank} on {machine}: {text}" if rank else text).split("\n"))
    error.on_all_ranks, error.errno = True, number
    return error


def start_ranks(device_type: str, timeout_seconds: float) -> Ranks:
    """Join the process group that torchrun's environment variables describe, or stay a single process."""
    return meet(lambda: {"device": device_type, "timeout": timeout_seconds})[0]


def meet(decide: Callable[[], dict[str, Any]]) -> tuple[Ranks, dict[str, Any]]:
    """Join the process group, on the terms of rank 0; return the ranks and the terms.

    Rank 0 calls `decide`, which returns JSON with the type of `device`, the `timeout` in seconds, and more.
    If it raises a PaddockError, all ranks do. Until then, ranks only know their launcher's environment.
    """
    rank, local_rank, world_size = (int(os.environ.get(key, default)) for key, default in
                                    (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    if not 0 <= rank < world_size:
        raise SettingsError(f"RANK={rank} must be from 0 to below WORLD_SIZE={world_size}; use a launcher")
    ACTIVITY.phase, ACTIVITY.step = "start-up", 0
    ranks, store = Ranks(rank, local_rank, world_size), None
    try:
        if world_size == 1:  # a hung device or read must not wait for ever either
            watch(dist.HashStore(), ranks, START_SECONDS, store_on_rank0=True)
            terms = decide() | {"local_world_size": 1}
        else:
            store = explaining(ranks, _join_store, ranks)
            process.MARKERS.add(process.JOINED)  # an error below is one of all ranks
            terms = _terms_of_rank0(store, ranks, decide)
        device_type, on_first_machine = terms["device"], min(terms["local_world_size"], world_size)
        if device_type == "cuda":
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
            gpus = torch.cuda.device_count()
            if processes > gpus:
                raise SettingsError(f"{processes} processes of this machine share {counted(gpus, 'GPU')}; "
                                    f"start torchrun with --nproc_per_node {gpus} at most")
        number = local_rank if device_type == "cuda" else None
        ranks = replace(ranks, device=torch.device(device_type, number), on_first_machine=on_first_machine)
        watchdog.set_timeout(terms["timeout"])
        if device_type == "cuda":
            torch.cuda.set_device(ranks.device)
        if store is not None:
            explaining(ranks, _init_process_group, ranks, store, terms["timeout"])
    except BaseException:
        if world_size == 1:  # this process may go on with something else
            stop_watchdog()
        raise
    process.write_marker(process.JOINED)
    return ranks, terms


def explaining(ranks: Ranks, join: Callable[..., T], *arguments: Any) -> T:
    """Return join(*arguments); an error of torch becomes a SettingsError with what to check."""
    try:
        return join(*arguments)
    except (OSError, RuntimeError, ValueError) as error:  # torch has no narrower ones; OSError: rank 0's port
        if re.search(GPU_FAILED, str(error)):
            raise
        raise SettingsError(
            f"rank {ranks.rank} of {ranks.world_size} could not join the process group at "
            f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}: "
            f"{str(error).splitlines()[0]}; check that all ranks were started with the same address and "
            "a free port, and GLOO_SOCKET_IFNAME if it is set") from error


def watch(store: dist.Store, ranks: Ranks, timeout_seconds: float, store_on_rank0: bool) -> None:
    global watchdog
    stop_watchdog()
    watchdog = HangWatchdog(store, ranks.rank, ranks.world_size, timeout_seconds, store_on_rank0)


@contextmanager
def meeting(decide: Callable[[], dict[str, Any]]) -> Iterator[tuple[Ranks, dict[str, Any]]]:
    """A `with` block in the process group of `meet`; after an error, ranks leave it separately."""
    ranks, terms = meet(decide)
    try:
        yield ranks, terms
    except BaseException:
        if ranks.world_size == 1:  # this process may go on with something else
            stop_watchdog()
        raise
    ACTIVITY.phase = "the end"
    # When one rank exits, the launcher ends the others, which may still be closing their logs.
    ranks.barrier()
    stop_ranks()


def _join_store(ranks: Ranks) -> dist.Store:
    """Return the store of the job when all ranks are there, and start the watchdog."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ValueError("an address and a number are expected")
    restrict_interface(host, one_machine=os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.world_size))
    store_on_rank0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    join_seconds = START_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else JOIN_SECONDS
    # The store outlives a start of the job.
    attempt = "-".join(os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))

    def connect(seconds: float) -> dist.Store:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=seconds))
        return dist.PrefixStore(attempt, store)

    with ExitStack() as stack:
        # Let a stop signal end the process here: Python handlers cannot run while C++ waits.
        for number in process.stop_signals():
            stack.callback(signal.signal, number, signal.signal(number, signal.SIG_DFL))
        if store_on_rank0 and ranks.is_rank0:  # torch's own would listen on all interfaces
            store = dist.PrefixStore(attempt, host_store(listen_at([host], int(port), join_seconds)))
        else:
            store = connect(join_seconds)

        # Wait for all ranks first: the group would wait for a missing one as long as for a collective. Only
        # rank 0 waits for every rank, because the store's load would grow quadratically otherwise.
        store.set(f"here-{ranks.rank}", "yes")
        if ranks.is_rank0:
            store.wait([f"here-{rank}" for rank in range(ranks.world_size)], timedelta(seconds=join_seconds))
            store.set("complete", "yes")
        store.wait(["complete"], timedelta(seconds=join_seconds))
        # First the watchdog: with `device_id`, the group waits for all ranks in ncclCommInitRank, without a
        # time-out. Its own connection does not queue behind a collective's request.
        watch(connect(START_SECONDS), ranks, START_SECONDS, store_on_rank0)
    return store


def _terms_of_rank0(store: dist.Store, ranks: Ranks, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what decide() returns on rank 0, or raise its error on all ranks."""
    if ranks.is_rank0:
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        terms, failure = attempt(lambda: decide() | {"local_world_size": local_world_size})
        store.set("terms", json.dumps([terms, failure]))
        if failure:  # the store ends with this process
            with suppress(RuntimeError):  # a rank has died
                store.wait([f"read-{rank}" for rank in range(1, ranks.world_size)],
                           timedelta(seconds=JOIN_SECONDS))
    else:
        while not store.check(["terms"]):
            time.sleep(0.1)
        terms, failure = json.loads(store.get("terms"))
        store.set(f"read-{ranks.rank}", "yes")
    if failure:
        raise first_error([failure])
    return terms


def _init_process_group(ranks: Ranks, store: dist.Store, timeout_seconds: float) -> None:
    is_cuda = ranks.device.type == "cuda"
    with ExitStack() as stack, waiting():
        for number in process.stop_signals():  # see _join_store
            stack.callback(signal.signal, number, signal.signal(number, signal.SIG_DFL))
        dist.init_process_group("nccl" if is_cuda else "gloo", store=store, rank=ranks.rank,
                                world_size=ranks.world_size, device_id=ranks.device if is_cuda else None,
                                timeout=timedelta(seconds=timeout_seconds + GROUP_TIMEOUT_MARGIN_SECONDS))


def host_store(listening: socket.socket) -> dist.TCPStore:
    """Return a TCPStore that takes over a listening socket, and closes it when deleted."""
    host, port = listening.getsockname()[:2]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                         master_listen_fd=listening.detach())


def stop_ranks() -> None:
    """Leave the process group, if one was joined."""
    stop_watchdog()
    if dist.is_initialized():
        left_groups.append(dist.group.WORLD)  # a DDP model that outlives it can hang when it is freed
        dist.destroy_process_group()


def stop_watchdog() -> None:
    """Stop the watchdog; if it is reporting a hang, wait until that ends this process."""
    global watchdog
    if watchdog is not None:
        watchdog.stop()
        watchdog = None


class ExitReport(NamedTuple):
    """Why this process ends, and its exit code."""

    sentence: str
    code: int
    is_secondary: bool = False  # the cause is on another rank
    on_all_ranks: bool = False


# torch, gloo and nccl have no error classes for these.
NOT_DETERMINISTIC = r"(\S+) does not have a deterministic implementation"
TIMED_OUT = ("Timed out waiting", "Watchdog caught collective operation timeout")
# Texts of cudaGetErrorString for errors of the hardware or the driver, as torch and NCCL quote them.
GPU_FAILED = (r"(?:CUDA error: |Cuda failure (?:\d+ )?')((?:uncorrectable|unspecified launch failure|unknown "
              r"error|hardware stack|no CUDA-capable|CUDA-capable device|system not yet|driver)[^\n']*)")
CONNECTION_LOST = "by peer", "Failed to recv", "Broken pipe", "remote process exited"


def classify_exception(error: Exception) -> Optional[ExitReport]:
    """Return how the process ends after an error; None for a bug, which needs a traceback."""
    rank, text, is_from_torch = os.environ.get("RANK", "0"), str(error), isinstance(error, RuntimeError)
    reason = re.sub(r"^\[\S+:\d+\] ", "", (text.splitlines() or [""])[0])[:200]  # without torch's file
    if isinstance(error, PaddockError):
        return ExitReport(text, error.exit_code, on_all_ranks=error.on_all_ranks)
    if (isinstance(error, (MemoryError, torch.OutOfMemoryError))
            or getattr(error, "errno", None) == errno.ENOMEM
            or is_from_torch and "can't allocate memory" in text):
        return ExitReport(f"rank {rank} is out of memory ({reason or type(error).__name__}); set "
                          "ACTIVATION_CHECKPOINTING=selective (needs COMPILE=true) or block, lower "
                          "MICRO_BATCH_SIZE (the step stays the same), or lower MAX_SEQ_LEN; --check "
                          "estimates the memory needed", 1)
    if not is_from_torch:
        return None
    if operation := re.search(NOT_DETERMINISTIC, text):
        return ExitReport(f"DETERMINISTIC=true or REPRODUCIBLE=true, but {operation[1]} has no deterministic "
                          "kernel here; set both to false", SettingsError.exit_code)
    if failed := re.search(GPU_FAILED, text):
        gpu = process.number_of(int(os.environ.get("LOCAL_RANK", "0")))
        return ExitReport(f"rank {rank} lost GPU {gpu} of {socket.gethostname()} ({failed[1]}); `dmesg | "
                          "grep Xid` there has the driver's reason. The same command resumes from the last "
                          "checkpoint; if the GPU fails again, leave it out with --gpus", 1)
    if any(words in text for words in TIMED_OUT):
        return ExitReport(f"hang: rank {rank} waited in {ACTIVITY.phase} (step {ACTIVITY.step}) for "
                          f"another rank longer than DISTRIBUTED_TIMEOUT ({reason}); raise it if that is "
                          "merely slow", HangError.exit_code)
    if any(words in text for words in CONNECTION_LOST):
        return ExitReport(f"rank {rank} stops, because another rank has exited; see that rank's output for "
                          f"the cause ({reason.partition('. ')[0]})", 1, is_secondary=True)
    return None


class StopSignals:
    """Records TERM, INT, USR1 or HUP, at which the loop saves and exits; a second signal exits immediately.

    One rank of each machine announces this on stderr. The end of the `with` block restores the handlers.
    """

    received: Optional[int] = None

    def __enter__(self) -> "StopSignals":
        self.handlers = {number: signal.signal(number, self._handle) for number in process.stop_signals()}
        # Python's handlers wait until the main thread leaves C++, perhaps seconds. This pipe has it at once.
        readable, self.writable = os.pipe()
        os.set_blocking(self.writable, False)
        self.earlier = signal.set_wakeup_fd(self.writable, warn_on_full_buffer=False)
        threading.Thread(target=self._answer, args=(readable,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.earlier)
        os.close(self.writable)

    def _handle(self, number: int, frame) -> None:
        self.received = self.received or number

    def _answer(self, readable: int) -> None:
        first_at = None
        while number := int.from_bytes(os.read(readable, 1), "little"):
            if number not in self.handlers:
                continue
            now, name = time.monotonic(), "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            if first_at is None:
                first_at = now
                if os.environ.get("LOCAL_RANK", "0") == "0" and not interrupts.is_stopped_by_failure():
                    # Not by print: the main thread may be printing. A new line after "^C" on a terminal.
                    line_end = "\n" if os.isatty(2) else ""
                    with suppress(OSError):
                        os.write(2, f"{line_end}{name}: {what_follows_a_signal()}\n".encode())
            elif now - first_at > interrupts.REPEAT_SECONDS:
                rank = os.environ.get("RANK", 0)
                process.write_error_file(1, f"rank {rank} exited at a second {name}, without saving")
                os._exit(128 + number)
        os.close(readable)


BEFORE_UPDATE = ("data", "generate", "reward", "forward", "backward")  # before ranks exchange their signals


def what_follows_a_signal() -> str:
    """Return what this process will do if the first stop signal arrives now."""
    if ACTIVITY.phase in ("start-up", "reference"):
        return "stopping before the first step; repeat to exit immediately"
    if ACTIVITY.phase in BEFORE_UPDATE:
        return f"finishing step {ACTIVITY.step}, then saving; repeat to exit without saving"
    if ACTIVITY.phase == "the end":
        return "everything is saved; closing the logs; repeat to exit immediately"
    return "saving after at most one more step; repeat to exit without saving"


@dataclass(frozen=True)
class RunContext:
    """Shared by all parts of a run."""

    ranks: Ranks
    signals: StopSignals
    log: Any  # has info(text) and warn(text)

    @collective
    def leave_if_stopped(self) -> None:
        """Raise Interrupted on all ranks if one received a signal."""
        if not self.ranks.all_agree(self.signals.received is None):
            raise Interrupted

    def progress(self, parts: Iterable[T], count: int, title: str) -> Iterator[T]:
        """Yield as many parts as on every rank, log progress, and raise Interrupted at a stop signal."""
        started = logged = time.perf_counter()
        is_hidden = None if self.ranks.is_rank0 else True  # None: unless this is a terminal
        for done, part in enumerate(tqdm(parts, title, count, delay=1, leave=False, disable=is_hidden)):
            tick()  # a single process never waits for others
            self.leave_if_stopped()
            now = time.perf_counter()
            if done and now - logged > PROGRESS_SECONDS:
                left = (now - started) * (count - done) / done
                self.log.info(f"{title}: {100 * done // count} % | ETA: {duration(left)}")
                logged = now
            yield part
