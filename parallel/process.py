"""A process of a job: how it ends, also after a hang; where it listens; which GPUs it uses. Without torch.

On one machine a job listens only on loopback; across machines, on MASTER_ADDR and its interface. By default,
torch listens on all interfaces and trusts every client.
"""

import ctypes
import faulthandler
import fcntl
import ipaddress
import json
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Optional

from common import interrupts
from common.activity import ACTIVITY, tick
from common.errors import HangError, leave_compilers
from common.text import print_safely, print_traceback

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
EXIT_PREEMPTED = 143
# Environment variables of the processes that scripts/launch.py starts.
LAUNCHER_PID = "PADDOCK_LAUNCHER_PID"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # path where torch's launchers expect a process's error report
RESTART = "PADDOCK_RESTART"  # JSON: see scripts/launch.py
# Files beside a rank's error file: it has state to save; the folder into which the run writes; settings of
# `.env`, presets and files, which an automatic restart uses again.
JOINED, RUN_FOLDER, SETTINGS = "joined", "run-folder", "settings"
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # set by launchers
STUCK: set[str] = set()  # what failed or did not finish in a thread, and may never end
MARKERS: set[str] = set()  # names of the markers that this process has written


def stop_signals() -> list[signal.Signals]:
    """Return the signals that mean "save and exit"; under nohup, all but SIGHUP."""
    return [number for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def open_missing_streams() -> None:
    """Open /dev/null for closed standard streams, whose descriptors other files would get."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)


def exit_at_signals() -> None:
    """Make stop signals exit immediately, while there is nothing to save: a run with EXIT_PREEMPTED."""
    for number in stop_signals():
        signal.signal(number, lambda number, _: interrupts.leave(
            128 + number if "--check" in sys.argv else EXIT_PREEMPTED))
    interrupts.hold(False)  # if `common` was imported before this script began


def exit_with_launcher() -> None:
    """Ask Linux to send this process SIGTERM (save and exit) when its launcher dies."""
    launcher = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    if "RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it died before the call
            print_safely(f"error: the launcher, {LAUNCHER_PID}={launcher}, has ended", sys.stderr)
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def leaving_what_is_stuck() -> Iterator[None]:
    """A `with` block around a program that ends at once if something is STUCK: wandb would wait forever."""
    try:
        yield
    finally:
        leave_compilers()
        if STUCK:
            error = sys.exc_info()[1]
            if error is not None and not isinstance(error, SystemExit):
                print_traceback(*sys.exc_info())
            with suppress(OSError):
                sys.stdout.flush()
            exits = isinstance(error, SystemExit) and isinstance(error.code, int)
            os._exit(error.code if exits else int(error is not None))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_note() -> str:
    """Return what makes this process a rank, and the remedy, until it has found a launcher or other ranks."""
    names = [name for name in RANK_VARIABLES if name in os.environ]
    if names in ([], ["WORLD_SIZE"]) or ERROR_FILE in os.environ or JOINED in MARKERS:
        return ""
    values = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return (f"the environment has {values}, as for one rank of a job, which also needs MASTER_ADDR and "
            f"MASTER_PORT. If an earlier job left this there: unset {' '.join(names)}")


def restart_info() -> dict[str, Any]:
    """Return what a launcher says about this start: its number `restart`, else 0, and more."""
    return {"restart": 0, **json.loads(os.environ.get(RESTART, "{}"))}


def write_marker(name: str, text: str = "") -> None:
    """Write a file beside this process's error file, which a launcher reads."""
    MARKERS.add(name)
    if file := os.environ.get(ERROR_FILE):
        with suppress(OSError):  # a full disk is reported when something is saved
            Path(file).with_name(name).write_text(text, encoding="utf-8")


def write_error_file(code: int, sentence: str = "", trace: str = "", is_secondary: bool = False) -> bool:
    """Report why this process ends, in torch's format; return whether Paddock's launcher will print it."""
    if not os.environ.get(ERROR_FILE):
        return False
    path, now = Path(os.environ[ERROR_FILE]), time.time()
    message = {"message": sentence, "errorCode": code, "is_secondary": is_secondary, "at": now,
               "extraInfo": {"py_callstack": trace, "timestamp": str(int(now))}}
    temporary = path.with_suffix(".tmp")
    with suppress(OSError):  # on a full disk only the exit code is left
        path.parent.mkdir(parents=True, exist_ok=True)  # a user may have deleted it
        temporary.write_text(json.dumps({"message": message}), encoding="utf-8")
        temporary.replace(path)
    return LAUNCHER_PID in os.environ and path.exists()


@contextmanager
def first_on_machine() -> Iterator[bool]:
    """A `with` block for output that every rank of this machine would print; yields True in the first rank.

    The others wait until the first has printed, because torchrun ends all ranks when one exits. They share a
    lock file of torch's launchers; without it, LOCAL_RANK 0 is the first, and each rank until it has joined.
    """
    first, file = JOINED not in MARKERS or os.environ.get("LOCAL_RANK", "0") == "0", None
    with ExitStack() as stack:
        if os.environ.get(ERROR_FILE):
            first = True  # even if the file cannot be opened: twice is better than never
            with suppress(OSError):
                path = Path(os.environ[ERROR_FILE]).parent.with_name("reported")
                file = stack.enter_context(open(path, "ab", buffering=0))
                fcntl.flock(file, fcntl.LOCK_EX)
                first = os.fstat(file.fileno()).st_size == 0
        yield first
        if first and file:
            with suppress(OSError):
                file.write(b"reported")


# ------------------------------------------------------------------------------------ the watchdog

# Ranks add up their progress in a store; if the sum stands still, the job hangs, and each rank exits.
POLL_SECONDS = 2.0  # between additions to the sum; at most a tenth of the time-out
ALARM_SECONDS = 0.05  # between looks after an alarm
PROGRESS, ALARM = "progress", "alarm"  # keys in the store: the sum, and whether a rank has seen a hang
HANG_REMEDY = "The same command resumes from the last save; if a phase is slow, raise DISTRIBUTED_TIMEOUT"
# Set by extensions/hang_report.py: writes this rank's stacks, and reports for all ranks together.
report_hang: Optional[Callable[["HangWatchdog"], None]] = None


class HangWatchdog:
    """Two threads in every rank: one adds its progress to the sum, the other ends this process after a hang.

    A job hangs if no rank makes progress for too long: a rank that waits depends on others, whose save may
    take long. There are two because the store, which may be in rank 0's process or a launcher, can hang too.
    """

    def __init__(self, store: Any, rank: int, count: int, timeout_seconds: float, store_on_rank0: bool):
        self.store, self.rank, self.count, self.store_on_rank0 = store, rank, count, store_on_rank0
        self.set_timeout(timeout_seconds)
        self.sum = 0  # of all ranks' progress, as this rank knows it
        self.alarm = False
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange, self._watch)]
        for thread in self.threads:
            thread.start()

    def set_timeout(self, seconds: float) -> None:
        self.timeout, self.interval = seconds, min(POLL_SECONDS, seconds / 10)

    def stop(self) -> None:
        """Stop both threads; after an alarm, wait instead for the watching thread to end this process."""
        while self.alarm and self.threads[1].is_alive():
            time.sleep(ALARM_SECONDS)
        self.stopped.set()
        for thread in self.threads:
            thread.join(POLL_SECONDS)

    def _exchange(self) -> None:
        added = 0
        # The store ends with its host process; other ranks then fail in a collective, or hang.
        with suppress(RuntimeError):
            while not self.stopped.wait(self.interval):
                if ACTIVITY.in_foreign_call:
                    tick()
                ticks = ACTIVITY.ticks
                self.sum, added = self.store.add(PROGRESS, ticks - added), ticks
                self.alarm = self.alarm or self.store.check([ALARM])

    def _progress(self) -> Any:
        return self.sum, ACTIVITY.ticks

    def _watch(self) -> None:
        before, idle_seconds, looked_at = None, 0.0, time.monotonic()
        while not self.stopped.wait(self.interval / 2):
            seconds, looked_at = time.monotonic() - looked_at, time.monotonic()
            if seconds < 1 + 3 * self.interval:  # else suspended, perhaps with the whole job
                idle_seconds += seconds
            if (progress := self._progress()) != before:
                before, idle_seconds = progress, 0.0
            if self.alarm or idle_seconds > self.timeout:
                self._end_process()

    def _end_process(self) -> None:
        self.alarm = True
        if report_hang:
            report_hang(self)
        else:
            faulthandler.dump_traceback(sys.stderr)
            report_sentence(f"hang: rank {self.rank} is in {ACTIVITY.phase} (step {ACTIVITY.step}); no rank "
                            f"made progress for DISTRIBUTED_TIMEOUT={self.timeout:g} s. {HANG_REMEDY}")
        os._exit(HangError.exit_code)


def report_sentence(sentence: str) -> None:
    """Report a hang to the launcher, or else on stderr."""
    if not write_error_file(HangError.exit_code, sentence):
        print_safely(f"error: {sentence}", sys.stderr)


# ---------------------------------------------------------------------------------- addresses

LOOPBACK = ("127.0.0.1", "::1")  # the second for machines without IPv4
RESOLVE_SECONDS = 25.0  # a cluster's DNS may learn names later than its machines start
SIOCGIFADDR = 0x8915  # from linux/sockios.h


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_at(hosts: Sequence[str], port: int, resolve_seconds: float = RESOLVE_SECONDS) -> socket.socket:
    """Return a socket that listens at the first available address. Waits for unknown hosts; port 0 = any."""
    deadline = time.monotonic() + resolve_seconds
    while True:
        try:
            addresses = [each for host in hosts
                         for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
            break
        except socket.gaierror:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    failures = []
    for family, *_, address in addresses:
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            failures.append(error)
    raise failures[-1]


def restrict_interface(master_addr: str, one_machine: bool) -> None:
    """Restrict gloo and NCCL, unless the user did, to loopback or to the interface towards MASTER_ADDR."""
    if one_machine or master_addr in LOOPBACK:
        interface = loopback_interface()
    else:
        interface = interface_towards(master_addr)
        if interface == loopback_interface():  # the host's name for itself: other machines could not connect
            interface = None
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" it matches prefixes


def loopback_interface() -> Optional[str]:
    return next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)), None)


def interface_towards(host: str) -> Optional[str]:
    """Return the interface that leads to a host, or None if it cannot be found. Sends nothing."""
    with suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            local = probe.getsockname()[0]
            if family == socket.AF_INET6:
                lines = map(str.split, Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines())
                return next((line[-1] for line in lines
                             if socket.inet_ntop(family, bytes.fromhex(line[0])) == local), None)
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # the interface has no IPv4 address
                    reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                    if socket.inet_ntoa(reply[20:24]) == local:  # of several addresses, the first
                        return name
    return None


# --------------------------------------------------------------------------------------- GPUs

VISIBLE = "CUDA_VISIBLE_DEVICES"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # new and old names
# Shapes of matmuls of which oneDNN keeps code, 0.4 MB each; its 1,024 fill memory if rows' lengths vary. What
# it keeps also lies between freed blocks, so that large models' memory doubles, unless it keeps fewer shapes.
KEPT_SHAPES, KEPT_BY_LARGE = 256, 64
SHAPE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
WAITING = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")  # GNU's OpenMP, LLVM's (in ms), both


def configure_allocator(huge_pages: bool = True, is_large: bool = False) -> None:
    """On a GPU, use expandable segments; on a CPU, huge pages if asked, and small caches of matmuls' code."""
    if huge_pages:
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    for name in SHAPE_CACHES:
        os.environ.setdefault(name, str(KEPT_BY_LARGE if is_large else KEPT_SHAPES))
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def choose_waiting(statistics: Path = Path("/proc/self/schedstat")) -> None:
    """Keep OpenMP's threads from spinning while they wait for each other if the machine is busy.

    GNU's default is 300,000 turns. On a busy machine, a spinning thread keeps the one that it waits for from
    running: training took ten times as long. On an idle one, spinning is faster. Results do not depend on it.
    What the user sets is kept. Call it before importing torch.
    """
    try:
        ran, waited, _ = map(int, statistics.read_text().split())
    except (OSError, ValueError):  # not Linux
        ran, waited = 1, 0
    is_busy = waited > 0.15 * ran  # with two other programs on two cores, it is 0.3 to 0.6; idle, 0.01
    if is_busy and not any(name in os.environ for name in WAITING):
        os.environ.update(dict.fromkeys(WAITING[:2], "0"))


def why_no_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> Optional[str]:
    """Return why a torch built for these `architectures` cannot use a GPU, or None if it can.

    Code (sm_86) runs on later minor versions of its major version, with the suffix "a" on no other, and PTX
    (compute_90) on all later versions. Source: CUDA C++ Programming Guide, "Application Compatibility".
    """
    found = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", each) for each in architectures]
    for kind, major, minor, suffix in (match.groups() for match in found if match):
        built = int(major), int(minor)
        is_related = built[0] == capability[0] and suffix != "a" or kind == "compute" and not suffix
        if built == capability or built <= capability and is_related:
            return None
    if not any(found):  # unknown, or a torch for ROCm
        return None
    return (f"this torch has no kernels for its compute capability {capability[0]}.{capability[1]}, only for "
            f"{' '.join(architectures)}; install a torch built for it, or set DEVICE=cpu")


def number_of(rank: int) -> int:
    """Return nvidia-smi's number of this rank's GPU, if it is known on one machine, else the rank."""
    names = os.environ.get(VISIBLE, "").split(",")
    name = names[rank].strip() if rank < len(names) else ""
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return int(name) if name.isdecimal() and on_one_machine else rank
