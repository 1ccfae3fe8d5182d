"""Train on the GPUs of one or several machines, with a rank for each. All other flags are train.py's.

    python scripts/launch.py --preset 1.3b
    python scripts/launch.py --nproc-per-node 2 train.py --max-steps 100
    python scripts/launch.py --gpus idle:2 --preset 1.3b
    python scripts/launch.py --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 \\
        --master-port 29500 --preset 1.3b

It runs torch's elastic launcher, reports a settings error once before the ranks start, and passes signals to
the ranks, which then save. The last line names the rank that failed first and why. Exit codes: 0 done, 1
crash, 2 settings, 3 data, 4 non-finite, 5 checkpoint or disk, 6 hang, 143 preempted and saved.
"""

import argparse
import errno
import fcntl
import itertools
import json
import logging
import os
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

from common.command_line import CommandParser
from common.errors import CheckpointError, SettingsError, run_script
from common.files import disk_errors
from common.http_server import is_loopback
from common.text import print_safely, silence_unread_streams
from config import Config
from parallel import process
from parallel.process import LOOPBACK, GpuRequest, listen_at
from settings.load import exit_with, export, load_config, peek

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
KEPT_FOLDERS = 10  # of earlier launches
LOCK = "lock"  # a file in such a folder, locked by its launcher
CODES = range(1, 7)
HINTS = {"SIGKILL": " (out of memory? see dmesg)",
         "SIGBUS": " (data that was truncated while it was read? else a full disk or /dev/shm)"}


def make_parser() -> CommandParser:
    """Return the parser of the launcher's own flags."""
    parser = CommandParser(__doc__, "python train.py --help lists the settings.", allow_abbrev=False,
                           usage="%(prog)s [flags below] [train.py] [settings]")
    group = parser.add_argument_group("on this machine")
    group.add_argument("--nproc-per-node", "--nproc_per_node", type=int, metavar="N",
                       help="number of ranks (default: one per GPU, or 1)")
    group.add_argument("--gpus", type=GpuRequest.parse, metavar="WHICH",
                       help="GPU numbers as in nvidia-smi, such as 3,5, or idle:2 for two idle GPUs, among "
                            "those in CUDA_VISIBLE_DEVICES if it is set (default: all)")
    group.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int, default=600, metavar="S",
                       help="seconds that ranks get to save after a signal (default: %(default)s)")
    group = parser.add_argument_group(
        "several machines", "With --nnodes the environment may give NODE_RANK, MASTER_ADDR and MASTER_PORT, "
                            "and .env the last two.")
    group.add_argument("--nnodes", type=int, default=1, metavar="N", help="machines (default: %(default)s)")
    group.add_argument("--node-rank", "--node_rank", type=int, metavar="R",
                       help="the number of this machine, from 0")
    group.add_argument("--master-addr", "--master_addr", metavar="HOST",
                       help="the first machine's address, where it listens (default: loopback)")
    group.add_argument("--master-port", "--master_port", type=int, metavar="P",
                       help="a free port there (default on one machine: any)")
    return parser


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the launcher's own flags, and train.py's."""
    parser = make_parser()
    args, flags = parser.parse_known_args()
    if flags and not flags[0].startswith("-"):  # the script, as torchrun's first word
        if Path(flags[0]).name != TRAIN.name or os.path.exists(flags[0]) and not TRAIN.samefile(flags[0]):
            parser.error(f"{flags[0]} is not Paddock's train.py, and no other script can be started here; "
                         "use torchrun")
        del flags[0]
    elif flags[:1] == ["--"]:
        del flags[0]
    # On one machine these do not count: nothing listens beyond loopback unless a flag says so.
    environ = peek(flags)[1] if args.nnodes > 1 else {}
    for name in ("node_rank", "master_addr", "master_port"):
        if getattr(args, name) is None and environ.get(name.upper()):
            parser.parse_args([f"--{name}={environ[name.upper()]}"], args)
    args.node_rank, args.master_port = args.node_rank or 0, args.master_port or 0
    if args.nnodes > 1 and not (args.master_addr and args.master_port):
        parser.error("--nnodes needs --master-addr, --master-port (the same everywhere) and --node-rank")
    if args.gpus and args.nproc_per_node is None:
        args.nproc_per_node = args.gpus.count
    counts = [args.nnodes, 1 if args.nproc_per_node is None else args.nproc_per_node]
    if min(counts) < 1 or args.shutdown_timeout < 0 or not 0 <= args.node_rank < args.nnodes:
        parser.error("--nproc-per-node and --nnodes must be 1 or more, and --node-rank below --nnodes")
    if not 0 <= args.master_port < 2**16:
        parser.error("--master-port must be from 1 to 65535")
    return args, flags


def check_settings(flags: list[str], world_size: int) -> Config:
    """Return the configuration that each rank will read, and export `.env`'s keys; exits on a mistake."""
    try:
        loaded = load_config(flags, {**os.environ, "RANK": "0", "WORLD_SIZE": str(world_size)})
    except SettingsError as error:
        exit_with(error)
    export(loaded)
    return loaded.config


class Logs(NamedTuple):
    """The folder with the ranks' output and error files."""

    folder: Path
    lock: TextIO  # locked as long as it is open

    @property
    def were_deleted(self) -> bool:
        """Whether somebody deleted the folder while the ranks ran; an exiting rank makes its part again."""
        return os.fstat(self.lock.fileno()).st_nlink == 0

    def read(self, local_rank: int) -> tuple[Any, bool]:
        """Return a rank's error file, None if it left none; and whether it had something to save."""
        folder, report = next(iter(self.folder.glob("*/attempt_0")), self.folder) / str(local_rank), None
        with suppress(OSError):
            report = json.loads((folder / "error.json").read_text(encoding="utf-8"))["message"]
        return report, self.were_deleted or (folder / process.JOINED).exists()


def open_logs(config: Config, node_rank: int) -> Logs:
    """Create a folder for this launch; delete older ones that no launcher locks, except for the newest."""
    parent = Path(config.output_dir) / "launch"
    with disk_errors(parent, CheckpointError, "set OUTPUT_DIR to a folder that can be written"):
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            suffix = f"-{number}" if number > 1 else ""
            folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}{suffix}-node-{node_rank}"
            with suppress(FileExistsError):  # another launcher's
                folder.mkdir()
                break
        lock = open(folder / LOCK, "w", encoding="utf-8")
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for old in sorted(parent.glob(f"*-node-{node_rank}"))[:-KEPT_FOLDERS]:
        with suppress(OSError), open(old / LOCK, "a", encoding="utf-8") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError if it is locked
            shutil.rmtree(old)
    return Logs(folder, lock)


class RankExit(NamedTuple):
    """How a rank ended; the smallest of several is the cause."""

    is_secondary: bool  # it only lost another rank
    at: float  # seconds
    rank: int
    code: int
    sentence: str = ""
    trace: str = ""  # details beside the sentence


def rank_exit(rank: int, exit_code: Optional[int], at: int, report: Any, joined: bool) -> RankExit:
    """Return how a rank ended; `at` is when that was noticed, `joined` whether it had something to save.

    An exit code is negative for a signal, and None if a signal ended the job before it was known. The report
    is what process.write_error_file wrote, None without it.
    """
    if report is not None:
        return RankExit(report["is_secondary"], report["at"], rank, report["errorCode"], report["message"],
                        report["extraInfo"]["py_callstack"])
    was_signalled = exit_code is None or -exit_code in process.stop_signals()
    if exit_code == process.EXIT_PREEMPTED or was_signalled and not joined:  # there was nothing to save
        return RankExit(False, at, rank, process.EXIT_PREEMPTED)
    if exit_code is None:
        return RankExit(False, at, rank, 1, f"rank {rank} was killed before it had saved")
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-exit_code, f"signal {-exit_code}")  # real-time signals have no name
        return RankExit(False, at, rank, 1, f"rank {rank} was killed by {name}{HINTS.get(name, '')}")
    code = exit_code if exit_code in CODES else 1
    return RankExit(False, at, rank, code, f"rank {rank} exited with code {exit_code}")


def meeting_point(args: argparse.Namespace) -> tuple[str, int, Optional[socket.socket]]:
    """Return the address and port where all meet, and on the first machine the listening socket."""
    if args.node_rank > 0:
        return args.master_addr, args.master_port, None
    try:
        listening = listen_at([args.master_addr] if args.master_addr else LOOPBACK, args.master_port)
    except OSError as error:
        reason = errno.errorcode.get(error.errno, str(error))
        raise SettingsError(
            f"cannot listen at {args.master_addr or LOOPBACK[0]}:{args.master_port} ({reason}); "
            "--master-addr must be an address of this machine, the first (0.0.0.0: all of them), and "
            "--master-port free") from error
    host, port = listening.getsockname()[:2]
    if args.nnodes > 1 and is_loopback(host) and not is_loopback(args.master_addr):
        raise SettingsError(f"--master-addr {args.master_addr} is {host} on this machine, which other "
                            "machines cannot reach; give an address that they can")
    return host, port, listening


def launch(args: argparse.Namespace, flags: list[str], ranks_here: int, logs: Logs,
           all_on_console: bool) -> list[RankExit]:
    """Start the ranks, wait for them, and return how each one ended that failed or was preempted."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from parallel.ranks import host_store

    # The static rendezvous, because the dynamic one unpickles the content of its store. It finds our store at
    # the port; its own would listen on all interfaces.
    host, port, listening = meeting_point(args)
    _hosted = listening and host_store(listening)
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    newer = {"shutdown_timeout": args.shutdown_timeout, "signals_to_handle": ""}
    known = {field.name for field in fields(LaunchConfig)}
    if "shutdown_timeout" not in known:
        print_safely("warning: this torch kills ranks that have not saved 30 s after a signal", sys.stderr)
    config = LaunchConfig(
        min_nodes=args.nnodes, max_nodes=args.nnodes, nproc_per_node=ranks_here, run_id="paddock",
        max_restarts=0, rdzv_backend="static", rdzv_endpoint=endpoint, rdzv_configs={"rank": args.node_rank},
        logs_specs=DefaultLogsSpecs(str(logs.folder), redirects=Std.ALL,
                                    tee=Std.ALL if all_on_console else {0: Std.ALL}),
        role="", log_line_prefix_template="${role_name}",  # empty: the ranks' lines have their own prefix
        **{name: value for name, value in newer.items() if name in known})

    stop_twice(SignalException)
    try:
        elastic_launch(config, sys.executable)("-u", str(TRAIN), *flags)
    except ChildFailedError as error:
        return [rank_exit(rank, failure.exitcode, int(failure.timestamp), *logs.read(failure.local_rank))
                for rank, failure in error.failures.items()]
    except SignalException:
        return [rank_exit(args.node_rank * ranks_here + local_rank, None, int(time.time()),
                          *logs.read(local_rank)) for local_rank in range(ranks_here)]
    except (DistError, RendezvousError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingsError(
            f"the {args.nnodes} machine(s) could not connect at {endpoint}: {reason}; check --master-addr, "
            "--nnodes, and that --master-port is free on the first machine") from error
    return []


def stop_twice(error: type[Exception]) -> None:
    """Make a stop signal, and a later second one, raise error(sentence, signal), which stops the ranks.

    All further signals are ignored: torch's launcher would exit at a third one without waiting, and hang.
    """
    received: list[float] = []

    def handle(number: int, frame: Any) -> None:
        now = time.monotonic()
        if not received or len(received) < 2 and now - received[0] > process.SECOND_SIGNAL_SECONDS:
            received.append(now)
            raise error(f"got {signal.Signals(number).name}", signal.Signals(number))

    for number in process.stop_signals():
        signal.signal(number, handle)


def main() -> None:
    process.open_missing_streams()
    args, flags = parse_args()
    process.exit_at_signals()
    # Whether the ranks can hold a model together is checked below, when their number is known.
    replicated = [*flags, "--sharding=none", "--cpu-offload=false"]
    config = check_settings(replicated, args.nnodes * (args.nproc_per_node or 1))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is reported in our words
    logging.disable(logging.CRITICAL)  # so are the messages of torch's launcher
    if args.gpus:
        if config.device == "cpu":
            raise SettingsError("--gpus and DEVICE=cpu contradict each other; leave one of them out")
        process.take_gpus(args.gpus)

    import torch  # only now: it takes seconds, and mistakes in the settings are reported at once

    # The ranks of this machine, checked as the settings of each, and what they inherit.
    ranks_here = args.nproc_per_node or (torch.cuda.device_count() if config.device != "cpu" else 0) or 1
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_here)  # on which SHARDING=hybrid depends
    check_settings(flags, args.nnodes * ranks_here)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks_here)))
    os.environ[process.LAUNCHER_PID] = str(os.getpid())
    sys.stdout.reconfigure(line_buffering=True)
    logs = open_logs(config, args.node_rank)
    exits = launch(args, flags, ranks_here, logs, config.log_all_ranks)

    # Report the first cause. A signal, or a console that was closed, no longer changes how the job ended.
    for number in process.stop_signals():
        signal.signal(number, signal.SIG_IGN)
    silence_unread_streams()
    failures = [each for each in exits if each.code not in (0, process.EXIT_PREEMPTED)]
    if not failures:
        raise SystemExit(max((each.code for each in exits), default=0))
    cause = min(failures)
    on_console = cause.rank % ranks_here == 0 or config.log_all_ranks
    if cause.trace and not (on_console and cause.code == 1):
        print_safely(cause.trace, sys.stderr)
    names_rank = cause.sentence.startswith(("rank", "hang"))
    sentence = cause.sentence if names_rank else f"rank {cause.rank}: {cause.sentence}"
    where = f"was in {logs.folder}, which was deleted" if logs.were_deleted else f"is in {logs.folder}"
    print_safely(f"error: {sentence}. The output of each rank {where}", sys.stderr)
    raise SystemExit(cause.code)


if __name__ == "__main__":
    run_script(main)
