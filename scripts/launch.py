"""Train on all GPUs of this machine, or of several: one rank for each. All flags but those below are train.py's.

    python scripts/launch.py --preset 1.3b
    python scripts/launch.py --nproc-per-node 2 --max-steps 100
    python scripts/launch.py --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 -- --preset 1.3b

It is torch's elastic launcher, where a mistake in the settings is told once and at once, signals reach the ranks, which save, and
the end is understood: the last line names the rank that failed first and why, and the exit code is 0 done, 1 crash, 2 settings,
3 data, 4 non-finite, 5 checkpoint or disk, 6 hang, 143 preempted and saved.
"""

import argparse
import errno
import fcntl
import ipaddress
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Optional, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.errors import CheckpointError, SettingsError, run_script
from common.text import print_safely, silence_unread_streams
from config import Config
from parallel.exit_report import (
    EXIT_PREEMPTED,
    JOB_TOKEN,
    JOINED,
    LAUNCHER_PID,
    SECOND_SIGNAL_SECONDS,
    exit_at_signals,
    open_missing_streams,
    stop_signals,
)
from parallel.network import LOOPBACK, listen_at
from settings.load import exit_with, export, load_config

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
KEPT = 10  # folders of earlier launches
LOCK = "lock"  # in such a folder, held by its launcher
CODES = range(1, 7)
HINTS = {"SIGKILL": " (out of memory? see dmesg)",
         "SIGBUS": " (data that was shortened while it was read? else a full disk or /dev/shm)"}


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, metavar="N",
                        help="ranks on this machine (default: its GPUs, or 1)")
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="machines (default: %(default)s)")
    parser.add_argument("--node-rank", "--node_rank", type=int, default=0, metavar="R", help="which of them this is, from 0")
    parser.add_argument("--master-addr", "--master_addr", metavar="HOST",
                        help="the first machine's, which listens there and nowhere else (default on one machine: loopback)")
    parser.add_argument("--master-port", "--master_port", type=int, default=0, metavar="P",
                        help="a free one there (default on one machine: any)")
    parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int, default=600, metavar="S",
                        help="seconds that ranks have to save after a signal, before they are killed (default: %(default)s)")
    args, flags = parser.parse_known_args()
    if args.nnodes > 1 and not (args.master_addr and args.master_port):
        parser.error("--nnodes needs --master-addr and --master-port, the same on each machine, and --node-rank")
    counts = [args.nnodes, 1 if args.nproc_per_node is None else args.nproc_per_node]
    if min(counts) < 1 or args.shutdown_timeout < 0 or not 0 <= args.node_rank < args.nnodes:
        parser.error("--nproc-per-node and --nnodes must be 1 or more, and --node-rank from 0 to one less than --nnodes")
    if not 0 <= args.master_port < 2**16:
        parser.error("--master-port must be from 1 to 65535")
    return args, flags[1:] if flags[:1] == ["--"] else flags


def check_settings(flags: list[str], world_size: int) -> Config:
    """The configuration as each rank will read it, with what `.env` has for the libraries exported; a mistake in it ends this
    process, as it would end train.py."""
    try:
        loaded = load_config(flags, {**os.environ, "RANK": "0", "WORLD_SIZE": str(world_size)})
    except SettingsError as error:
        exit_with(error)
    export(loaded)
    return loaded.config


class Logs(NamedTuple):
    """Where what the ranks print, and how they end, is written."""

    folder: Path
    lock: TextIO  # held as long as it is open

    @property
    def were_deleted(self) -> bool:
        """By somebody else, while the ranks ran; a rank that ends makes its part of the folder anew."""
        return os.fstat(self.lock.fileno()).st_nlink == 0

    def of(self, local_rank: int) -> Path:
        """The part of one rank, which has its error file."""
        return next(iter(self.folder.glob("*/attempt_0")), self.folder) / str(local_rank)

    def joined(self, local_rank: int) -> bool:
        """Whether a rank had something to save, as far as is known."""
        return self.were_deleted or (self.of(local_rank) / JOINED).exists()


def open_logs(config: Config, node_rank: int) -> Logs:
    """A new folder. Older ones that no launcher holds are deleted, but for the last few.

    Raises:
        CheckpointError: there can be none.
    """
    parent = Path(config.output_dir) / "launch"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}{f'-{number}' * (number > 1)}-node-{node_rank}"
            with suppress(FileExistsError):  # another launcher's
                folder.mkdir()
                break
        lock = open(folder / LOCK, "w", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{parent} cannot be written: {error.strerror}; set OUTPUT_DIR to a folder that can") from error
    take(lock)
    for old in sorted(parent.glob(f"*-node-{node_rank}"))[:-KEPT]:
        with suppress(OSError), open(old / LOCK, "a", encoding="utf-8") as other:
            if take(other):
                shutil.rmtree(old)
    return Logs(folder, lock)


def take(lock: TextIO) -> bool:
    """Whether this process now holds a lock: not where another does, nor on a file system that has none."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


class ExitReport(NamedTuple):
    """How a rank ended; the smallest of several is the cause."""

    victim: bool  # it only lost another
    at: float  # seconds
    rank: int
    code: int
    sentence: str = ""
    trace: str = ""  # what its sentence does not tell


def ending(rank: int, exit_code: Optional[int], at: int, word: Any, joined: bool) -> ExitReport:
    """How a rank ended.

    Args:
        exit_code: below 0 for a signal; None = not known, because the job was ended by a signal.
        at: when it was seen to have ended.
        word: what its error file says (see launched.write_error_file); anything else where it left none.
        joined: whether it had something to save.
    """
    if isinstance(word, dict):
        trace = word["extraInfo"]["py_callstack"]
        return ExitReport(word["victim"], word["at"], rank, word["errorCode"], word["message"], trace)
    if exit_code == EXIT_PREEMPTED or not joined and (exit_code is None or -exit_code in stop_signals()):
        return ExitReport(False, at, rank, EXIT_PREEMPTED)  # before there was anything to save
    if exit_code is None:
        return ExitReport(False, at, rank, 1, f"rank {rank} was killed before it had saved")
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-exit_code, f"signal {-exit_code}")  # the real-time ones have none
        return ExitReport(False, at, rank, 1, f"rank {rank} was killed by {name}{HINTS.get(name, '')}")
    return ExitReport(False, at, rank, exit_code if exit_code in CODES else 1, f"rank {rank} ended with code {exit_code}")


def meeting_point(args: argparse.Namespace) -> tuple[str, int, Optional[socket.socket]]:
    """Where the ranks and launchers meet: address, port, and on the first machine the socket that listens there and nowhere else.

    Raises:
        SettingsError: nothing can listen there.
    """
    if args.node_rank > 0:
        return args.master_addr, args.master_port, None
    try:
        listening = listen_at([args.master_addr] if args.master_addr else LOOPBACK, args.master_port)
    except OSError as error:
        reason = errno.errorcode.get(error.errno, str(error))
        raise SettingsError(f"nothing can listen at {args.master_addr or LOOPBACK[0]}:{args.master_port} ({reason}); "
                            "--master-addr must be an address of this machine, the first (0.0.0.0: all of them), and "
                            "--master-port free") from error
    host, port = listening.getsockname()[:2]
    if args.nnodes > 1 and ipaddress.ip_address(host).is_loopback and args.master_addr not in (*LOOPBACK, "localhost"):
        raise SettingsError(f"--master-addr {args.master_addr} is {host} on this machine, which no other can reach; give an "
                            "address by which they can")
    return host, port, listening


def launch(args: argparse.Namespace, flags: list[str], ranks_here: int, logs: Logs, all_on_console: bool) -> list[ExitReport]:
    """Start the ranks, wait for their end, and tell how each ended that did not end well.

    They meet by torch's static rendezvous, because the dynamic one unpickles what its store holds. Its store, which would listen
    everywhere, finds ours at the port.

    Raises:
        SettingsError: the machines do not come together.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from parallel.collectives import host_store

    host, port, listening = meeting_point(args)
    _hosted = listening and host_store(listening)
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    newer = {"shutdown_timeout": args.shutdown_timeout, "signals_to_handle": ""}
    known = {field.name for field in fields(LaunchConfig)}
    if "shutdown_timeout" not in known:
        print_safely("warning: this torch kills ranks that have not saved 30 s after a signal", sys.stderr)
    config = LaunchConfig(
        min_nodes=args.nnodes, max_nodes=args.nnodes, nproc_per_node=ranks_here, run_id="paddock", max_restarts=0,
        rdzv_backend="static", rdzv_endpoint=endpoint, rdzv_configs={"rank": args.node_rank},
        logs_specs=DefaultLogsSpecs(str(logs.folder), redirects=Std.ALL, tee=Std.ALL if all_on_console else {0: Std.ALL}),
        role="", log_line_prefix_template="${role_name}",  # no prefix: ranks have their own
        **{name: value for name, value in newer.items() if name in known})

    def word_of(local_rank: int) -> Any:
        with suppress(OSError):
            return json.loads((logs.of(local_rank) / "error.json").read_text(encoding="utf-8"))["message"]

    stop_twice(SignalException)
    try:
        elastic_launch(config, sys.executable)("-u", str(TRAIN), *flags)
    except ChildFailedError as error:
        return [ending(rank, failure.exitcode, int(failure.timestamp), failure.error_file_data["message"],
                       logs.joined(failure.local_rank)) for rank, failure in error.failures.items()]
    except SignalException:
        return [ending(args.node_rank * ranks_here + local_rank, None, int(time.time()), word_of(local_rank),
                       logs.joined(local_rank)) for local_rank in range(ranks_here)]
    except (DistError, RendezvousError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingsError(f"the {args.nnodes} machine(s) did not come together at {endpoint}: {reason}; check "
                            "--master-addr and --nnodes, and that --master-port is free on the first machine") from error
    return []


def stop_twice(error: type[Exception]) -> None:
    """From now on a stop signal raises an error, at which torch's launcher stops the ranks, and so does a second one that comes
    more than a moment later, at which they leave at once. All others mean nothing: that launcher, which would hear each, would
    leave at the third without having waited for anybody, and hang.

    Args:
        error: gets a sentence and the signal.
    """
    heard: list[float] = []

    def handle(number: int, frame: Any) -> None:
        now = time.monotonic()
        if len(heard) < 2 and (not heard or now - heard[0] > SECOND_SIGNAL_SECONDS):
            heard.append(now)
            raise error(f"got {signal.Signals(number).name}", signal.Signals(number))

    for number in stop_signals():
        signal.signal(number, handle)


def main() -> None:
    open_missing_streams()
    args, flags = parse_args()
    exit_at_signals()
    config = check_settings(flags, args.nnodes * (args.nproc_per_node or 1))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what a lost connection means is told in words
    logging.disable(logging.CRITICAL)  # so is what torch's launcher has to say

    import torch  # after what can be told at once

    ranks_here = args.nproc_per_node or (torch.cuda.device_count() if config.device != "cpu" else 0) or 1
    check_settings(flags, args.nnodes * ranks_here)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks_here)))
    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ[JOB_TOKEN] = secrets.token_hex() if args.nnodes == 1 else ""
    sys.stdout.reconfigure(line_buffering=True)
    logs = open_logs(config, args.node_rank)
    endings = launch(args, flags, ranks_here, logs, config.log_all_ranks)
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)  # all is over
    silence_unread_streams()  # who has left the console does not change how the run ended
    failures = [each for each in endings if each.code not in (0, EXIT_PREEMPTED)]
    if not failures:
        raise SystemExit(max((each.code for each in endings), default=0))
    cause = min(failures)
    on_console = cause.rank % ranks_here == 0 or config.log_all_ranks
    if cause.trace and not (on_console and cause.code == 1):
        print_safely(cause.trace, sys.stderr)
    named = cause.sentence if cause.sentence.startswith(("rank", "hang")) else f"rank {cause.rank}: {cause.sentence}"
    printed = f"was in {logs.folder}, which was deleted meanwhile" if logs.were_deleted else f"is in {logs.folder}"
    print_safely(f"error: {named}. What each rank printed {printed}", sys.stderr)
    raise SystemExit(cause.code)


if __name__ == "__main__":
    run_script(main)
