"""Train on the GPUs of one or several machines, with one rank per GPU.

    ./paddock train --gpus idle:2 --preset 1.3b
    ./paddock train --max-restarts 0 --preset 1.3b
    ./paddock train --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 \\
        --master-port 29500 --preset 1.3b

`./paddock train` prepares data and starts this launcher; schedulers start scripts/launch.py, which restarts
nothing by default. All other flags are settings. This is torchrun (torch's elastic launcher) with readable
errors. Invalid settings are reported once, before the ranks start. Signals are passed on to the ranks, which
then save. The last line names the rank that failed first, and the reason. Exit codes: 0 finished, 1 crash, 2
settings, 3 data, 4 non-finite, 5 checkpoint or disk, 6 hang, 143 preempted and saved.

With --max-restarts, a crash or a hang (1, 6) starts the job again from the newest verified checkpoint, unless
two starts in a row have saved no new one. A single rank shares the launcher's terminal.
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
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint.manifest import read_manifest_bytes
from checkpoint.schema import read_entries
from common import interrupts
from common.command_line import CommandParser
from common.errors import CheckpointError, HangError, SettingsError, run_script
from common.files import disk_errors, plain
from common.text import counted, print_safely, show, silence_unread_streams
from config import Config
from parallel import process
from parallel.process import LOOPBACK, RESOLVE_SECONDS, is_loopback, listen_at
from plan.command_line import exit_with, export
from plan.make import make_plan, peek
from plan.names import assignments
from scripts.gpus import GpuRequest, take_gpus
from scripts.machines import Machines, node_names

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
KEPT_FOLDERS = 10  # logs of earlier launches
LOCK = "lock"  # a file in each of these folders, locked by its launcher
CODES = range(1, 7)
RESTARTED = (1, HangError.exit_code)  # codes of failures that need not recur
IDLE_STARTS = 2  # starts in a row without a new checkpoint that end a job
START_SECONDS = 15 * 60  # for all machines to start their launcher
AGREE_SECONDS = 60  # beyond DISTRIBUTED_TIMEOUT, for other machines to notice a failure
REPORT_SECONDS = 60  # for other machines to report a failure after which no restart is due
SEND_SECONDS = 5  # for the others to read the last reports
TAIL_BYTES = 1 << 18  # contain the last line of a ledger
HINTS = {"SIGKILL": " (out of memory? see dmesg)",
         "SIGABRT": " (NCCL does this after an error of a GPU or the network: see its output, and dmesg)",
         "SIGBUS": " (a data file truncated while it was read, or a full disk or /dev/shm?)"}


def make_parser() -> CommandParser:
    parser = CommandParser(__doc__, "python train.py --help lists the settings.", allow_abbrev=False,
                           prog="scripts/launch.py", usage="%(prog)s [flags] [train.py] [settings]")
    group = parser.add_argument_group("this machine")
    group.add_argument("--nproc-per-node", "--nproc_per_node", type=int, metavar="N",
                       help="number of ranks (default: one per GPU, or 1)")
    group.add_argument("--gpus", type=GpuRequest.parse, metavar="WHICH",
                       help="GPU numbers as in nvidia-smi, such as 3,5; idle:2 or least:2: two idle or least "
                            "used ones, among CUDA_VISIBLE_DEVICES if it is set (default: all)")
    group.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int, default=600, metavar="S",
                       help="seconds the ranks have to save after a signal (default: %(default)s)")
    group.add_argument("--max-restarts", "--max_restarts", type=int, default=0, metavar="N",
                       help="restarts of the job after a crash or a hang (default: %(default)s)")
    group = parser.add_argument_group(
        "several machines", "NODE_RANK, MASTER_ADDR and MASTER_PORT can also be set in the environment, the "
                            "last two also in .env.")
    group.add_argument("--nnodes", type=int, default=1, metavar="N",
                       help="number of machines (default: %(default)s)")
    group.add_argument("--node-rank", "--node_rank", type=int, metavar="R",
                       help="number of this machine, counted from 0")
    group.add_argument("--master-addr", "--master_addr", metavar="HOST",
                       help="address of the first machine, where it listens (default: loopback)")
    group.add_argument("--master-port", "--master_port", type=int, metavar="P",
                       help="free port on the first machine (default with one machine: any)")
    return parser


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the launcher's flags and train.py's flags."""
    parser = make_parser()
    args, flags = parser.parse_known_args()
    if flags and not flags[0].startswith("-"):  # the script, as for torchrun
        if Path(flags[0]).name != TRAIN.name or os.path.exists(flags[0]) and not TRAIN.samefile(flags[0]):
            parser.error(f"{flags[0]} is not Paddock's train.py; to start another script, use torchrun")
        del flags[0]
    elif flags[:1] == ["--"]:
        del flags[0]
    # Ignore these variables on one machine: without a flag, it listens on loopback only.
    environ = peek(flags)[1] if args.nnodes > 1 else {}
    for name in ("node_rank", "master_addr", "master_port"):
        if getattr(args, name) is None and environ.get(name.upper()):
            parser.parse_args([f"--{name}={environ[name.upper()]}"], args)
    own = {"node_rank": args.node_rank, "master_addr": args.master_addr, "master_port": args.master_port}
    if missing := [name for name, value in own.items() if args.nnodes > 1 and value in (None, "")]:
        check_settings(flags, args.nnodes, args)  # one may be misspelled
        needed = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        variables = " and ".join(name.upper() for name in missing)
        raise SettingsError(f"--nnodes {args.nnodes} also needs {needed}, or {variables} in the environment; "
                            "address and port are those of the first machine, on each")
    args.node_rank, args.master_port = args.node_rank or 0, args.master_port or 0
    if args.gpus and args.nproc_per_node is None:
        args.nproc_per_node = args.gpus.count
    if args.nproc_per_node is not None and args.nproc_per_node < 1:
        parser.error("--nproc-per-node must be 1 or more")
    if args.nnodes < 1 or not 0 <= args.node_rank < args.nnodes:
        parser.error("--nnodes must be 1 or more, and --node-rank below --nnodes")
    if min(args.shutdown_timeout, args.max_restarts) < 0:
        parser.error("--shutdown-timeout and --max-restarts must be 0 or more")
    if not 0 <= args.master_port < 2**16:
        parser.error("--master-port must be from 1 to 65535")
    return args, flags


def check_settings(flags: list[str], world_size: int, args: argparse.Namespace) -> Config:
    """Return the configuration of the ranks and export `.env`'s variables; exit if a setting is invalid."""
    try:
        loaded = make_plan(flags, {**os.environ, "RANK": "0", "WORLD_SIZE": str(world_size)},
                           own_flags=(*vars(args),))
    except SettingsError as error:
        exit_with(error)
    export(loaded)
    return loaded.config


class RankExit(NamedTuple):
    """How a rank ended. The minimum over the ranks is the cause of a failure."""

    is_secondary: bool  # it failed only because another rank did
    at: float  # time in seconds
    rank: int
    code: int
    sentence: str = ""
    trace: str = ""  # details beside the sentence


class Ending(NamedTuple):
    """How one start of a job ended on this machine."""

    exits: list[RankExit]  # of the failed and the preempted ranks
    stopped: bool = False  # by a signal to the launcher
    run_folder: Optional[Path] = None  # once the ranks write into it
    settings: Optional[dict] = None  # of files, with which rank 0 started
    where: str = ""  # words that name the ranks' logs

    @property
    def cause(self) -> Optional[RankExit]:
        """The first failure, of the lowest rank if several say the same; else a preempted rank, or none."""
        failures = [each for each in self.exits if each.code not in (0, process.EXIT_PREEMPTED)]
        if not failures:
            return max(self.exits, key=lambda each: each.code, default=None)
        first = min(failures)
        return min((each for each in failures if each.sentence == first.sentence), key=lambda each: each.rank)


class Logs(NamedTuple):
    """The folder with the ranks' output and error files."""

    folder: Path
    lock: Optional[TextIO] = None  # locked while it is open; none for a temporary folder

    @property
    def were_deleted(self) -> bool:
        """True if the folder was deleted during the run; exiting ranks recreate their own files only."""
        return self.lock is not None and os.fstat(self.lock.fileno()).st_nlink == 0

    def of_rank(self, local_rank: int) -> Path:
        return next(iter(self.folder.glob("*/attempt_0")), self.folder) / str(local_rank)

    def read(self, local_rank: int) -> tuple[Any, bool]:
        """Return a rank's error file (None if there is none), and whether it had something to save."""
        folder, report = self.of_rank(local_rank), None
        with suppress(OSError):
            report = json.loads((folder / "error.json").read_text(encoding="utf-8"))["message"]
        return report, self.were_deleted or (folder / process.JOINED).exists()

    def end(self, exits: list[RankExit], stopped: bool) -> Ending:
        """Return how the start with these logs ended."""
        run_folder, settings = None, None
        with suppress(OSError):
            run_folder = Path((self.of_rank(0) / process.RUN_FOLDER).read_text(encoding="utf-8"))
        with suppress(OSError, ValueError):
            settings = json.loads((self.of_rank(0) / process.SETTINGS).read_text(encoding="utf-8"))
        was = "was in" if self.were_deleted else "is in"
        deleted = ", which was deleted" * self.were_deleted
        where = f". Each rank's output {was} {self.folder}{deleted}" if self.lock else ""
        return Ending(exits, stopped, run_folder, settings, where)


def open_logs(config: Config, node_rank: int) -> Logs:
    """Create a folder for this launch; keep the KEPT_FOLDERS newest, and those that a launcher has locked."""
    parent = Path(config.output_dir) / "launch"
    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            suffix = f"-{number}" if number > 1 else ""
            folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}{suffix}-node-{node_rank}"
            with suppress(FileExistsError):  # from another launcher
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


def rank_exit(rank: int, exit_code: Optional[int], at: int, report: Any, joined: bool) -> RankExit:
    """Return how a rank ended.

    Args:
        exit_code: negative for a signal; None if a signal ended the job before the code was known.
        at: when the launcher noticed it.
        report: written by process.write_error_file; None if there is none.
        joined: the rank had something to save.
    """
    if report is not None:
        return RankExit(report["is_secondary"], report["at"], rank, report["errorCode"], report["message"],
                        report["extraInfo"]["py_callstack"])
    was_signalled = exit_code is None or -exit_code in process.stop_signals()
    if exit_code == process.EXIT_PREEMPTED or was_signalled and not joined:
        return RankExit(False, at, rank, process.EXIT_PREEMPTED)
    if exit_code is None:
        return RankExit(False, at, rank, 1, f"rank {rank} was killed before it finished saving")
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-exit_code, f"signal {-exit_code}")  # real-time signals have no name
        return RankExit(False, at, rank, 1, f"rank {rank} was killed by {name}{HINTS.get(name, '')}")
    code = exit_code if exit_code in CODES else 1
    return RankExit(False, at, rank, code, f"rank {rank} exited with code {exit_code}")


def meeting_point(args: argparse.Namespace) -> tuple[str, int, Optional[socket.socket]]:
    """Return the address and port where the ranks meet, and on the first machine the listening socket."""
    if args.node_rank > 0:
        return args.master_addr, args.master_port, None
    hosts = [args.master_addr] if args.master_addr else LOOPBACK
    try:
        try:
            listening = listen_at(hosts, args.master_port, 0)
        except socket.gaierror as error:  # a cluster's DNS may learn names later than its machines start
            show(f"Waiting for the address of {hosts[0]} (up to {RESOLVE_SECONDS:g} s): {error.strerror}")
            listening = listen_at(hosts, args.master_port, RESOLVE_SECONDS)
    except OSError as error:
        reason = errno.errorcode.get(error.errno, str(error))
        raise SettingsError(
            f"cannot listen on {args.master_addr or LOOPBACK[0]}:{args.master_port} ({reason}); "
            "--master-addr must be an address of this machine, the first one (0.0.0.0 = all addresses), and "
            "--master-port must be free (is --node-rank 0 used twice?)") from error
    host, port = listening.getsockname()[:2]
    if args.nnodes > 1 and is_loopback(host) and not is_loopback(args.master_addr):
        raise SettingsError(f"--master-addr {args.master_addr} resolves to {host} on this machine, which "
                            "other machines cannot reach; use an address that they can reach")
    return host, port, listening


def newest_checkpoint(run_folder: Optional[Path]) -> list[int]:
    """Return [order of writing, step] of a run's newest checkpoint, or [0, 0]."""
    found = [[0, 0]]
    for folder in run_folder.glob("checkpoints/step-*") if run_folder else ():
        with suppress(CheckpointError, KeyError):
            manifest = json.loads(read_manifest_bytes(folder))
            found.append([manifest["written"], manifest["step"]])
    return max(found)


def record_cause(ending: Ending) -> None:
    """Write a failure that began on this machine into the run's events: rank 0 may know only its effect."""
    cause = ending.cause
    if not (ending.run_folder and cause) or cause.is_secondary or cause.code == process.EXIT_PREEMPTED:
        return
    path = ending.run_folder / "events.jsonl"
    with suppress(OSError, CheckpointError, IndexError):
        last, step = [*read_entries(path)][-1], 0
        with suppress(OSError, ValueError, LookupError, TypeError):
            with open(path.with_name("ledger.jsonl"), "rb") as ledger:
                ledger.seek(max(0, os.fstat(ledger.fileno()).st_size - TAIL_BYTES))
                step = int(json.loads(ledger.read().splitlines()[-1])["step"])
        if last.get("reason") != cause.sentence:
            step = max(step, last["step"])
            line = {"time": time.time(), "step": step, "event": "end", "reason": cause.sentence}
            with open(path, "ab", opener=plain) as file:
                file.write(json.dumps(line).encode() + b"\n")


class Job:
    """This machine's part of a job, which starts again after a crash or a hang."""

    def __init__(self, args: argparse.Namespace, flags: list[str], config: Config, ranks: int):
        self.args, self.flags, self.config, self.ranks = args, flags, config, ranks
        self.endpoint, self.store = None, None
        self.machines: Optional[Machines] = None  # if there are several

    def start(self, number: int, flags: list[str]) -> Ending:
        """Start the ranks, wait for them, and return how they ended."""
        if self.args.nnodes * self.ranks == 1:
            return start_here(flags)
        if self.endpoint is None:
            *self.endpoint, listening = meeting_point(self.args)
            if listening:
                from parallel.ranks import host_store

                # We host the store ourselves, because torch's would listen on all interfaces.
                self.store = host_store(listening)
            if self.args.nnodes > 1:
                self.wait_for_machines()
        if self.machines:
            self.machines.watch_start(f"ended-{number}", f"paddock-{number}-0/complete")
        logs = open_logs(self.config, self.args.node_rank)
        exits, stopped = launch(self, number, flags, logs)
        if stopped and self.machines and self.machines.missing is not None:
            exits, stopped = [self.exit_elsewhere(number, self.machines.missing)], False
        return logs.end(exits, stopped)

    def exit_elsewhere(self, number: int, node: int) -> RankExit:
        """Return how a machine ended this start before all ranks joined; of a lost one, `agree` tells."""
        with suppress(ValueError, TypeError, KeyError):  # of a lost machine, or a stranger
            return RankExit(*self.machines.states[node][f"ended-{number}"]["cause"])
        return RankExit(True, time.time(), node * self.ranks, 1, f"node {node} is lost")

    def wait_for_machines(self) -> None:
        """Wait until every machine's launcher has connected to the first machine's store."""
        (host, port), node = self.endpoint, self.args.node_rank
        if node == 0:
            self.store.set("settings", json.dumps(self.config.model_dump(mode="json")))
        self.machines = Machines(host, port, node, self.args.nnodes, self.store)
        self.machines.publish(ranks=self.ranks, nnodes=self.args.nnodes)
        self.machines.start()
        _, problem = self.machines.wait("ranks", f"start at {host}:{port}", START_SECONDS, True)
        if problem:
            raise SettingsError(
                f"{problem}; check that each machine was started with its own --node-rank and the same "
                f"--nnodes, --master-addr and --master-port, and that it can reach {host}:{port}")
        counts = [state["ranks"] for state in self.machines.states]
        if {*counts} != {self.ranks}:
            raise SettingsError(f"the machines start {', '.join(map(str, counts))} ranks; start as many on "
                                "each, with --nproc-per-node")
        if node:
            first = self.machines.settings
            ours = self.config.model_dump(mode="json", include={*peek(self.flags)[0]})
            unused = assignments({name: value for name, value in ours.items() if value != first[name]})
            show(f"All {self.args.nnodes} machines are here; the first one decides, and prints the "
                 f"progress.{f' Not used here: {unused}' * bool(unused)}")

    def agree(self, number: int, ending: Ending, again: bool,
              newest: list[int]) -> tuple[Ending, bool, list[int]]:
        """Exchange with the other machines how this start ended; return how it ended on all of them together,
        whether all start again, and the first machine's newest checkpoint."""
        machines, cause, key = self.machines, ending.cause, f"ended-{number}"
        if machines is None:
            return ending, again, newest
        node = self.args.node_rank
        sent = cause and cause._replace(trace="")
        report = {"again": again, "cause": sent, "newest": newest, "stopped": ending.stopped}
        machines.publish(**{key: report})
        patience = self.config.distributed_timeout + AGREE_SECONDS
        others = [other for other in range(self.args.nnodes) if other != node]
        if cause is None and node == 0:  # the ranks of the others still use its store
            machines.wait(key, "finish", patience)
        if cause is None or ending.stopped or cause.code == process.EXIT_PREEMPTED:
            if cause and not ending.stopped:
                self.say_who_stopped(key, others)
            if cause:
                self.wait_for_readers(number, others)
            return ending, False, newest
        missing, problem = machines.wait(key, "report how the ranks ended",
                                         patience if again else REPORT_SECONDS)
        others = [other for other in others if other not in missing]
        try:
            reports = {other: machines.states[other][key] for other in others}
            causes = [RankExit(*each["cause"]) for each in reports.values() if each["cause"]]
            all_again = again and not missing and all(each["again"] is True for each in reports.values())
            if 0 in reports:
                newest = [int(count) for count in reports[0]["newest"]]
        except (ValueError, TypeError, KeyError) as error:  # of a stranger
            causes, all_again, problem = [], False, f"a machine's report is not valid ({error})"
        if problem and min([cause, *causes]).is_secondary:
            lost = missing[0] if missing else node
            causes.append(RankExit(False, time.time(), lost * self.ranks, 1, problem))
        if again and problem:
            print_safely(f"warning: no restart, because {problem}", sys.stderr)
        ending = ending._replace(exits=ending.exits + causes)
        if node == 0:
            record_cause(ending)
        self.wait_for_readers(number, others)
        return ending, all_again, newest

    def wait_for_readers(self, number: int, others: list[int]) -> None:
        """Wait until the other machines have read the reports: the first one's process has the store."""
        self.machines.publish(**{f"read-{number}": True})
        if self.args.node_rank == 0:
            self.machines.wait(f"read-{number}", "read the reports", SEND_SECONDS, nodes=others)

    def say_who_stopped(self, key: str, others: list[int]) -> None:
        """Name the machine whose launcher got the signal that stopped the job, or is lost."""
        began, machines = time.monotonic(), self.machines
        missing, _ = machines.wait(key, "report how the ranks ended", SEND_SECONDS, nodes=others)
        lost = [each for each in missing
                if key not in machines.states[each] and machines.heard[each] < began]
        reports = {node: machines.states[node].get(key) for node in others}
        signalled = [node for node, report in reports.items() if isinstance(report, dict)
                     and report.get("stopped") is True]
        if lost:
            show(f"Stopped because {node_names(lost)} is gone: the launcher was killed, or the machine is "
                 "lost.")
        elif signalled:
            show(f"Stopped by a signal to {node_names(signalled)}.")

    def run(self) -> tuple[Ending, str]:
        """Run the job; return the ending to report, and words about restarts."""
        config, flags, folder, cause, words = self.config, self.flags, None, "", ""
        settings: dict = {}  # of the first start; its files may be edited for another run meanwhile
        resumes = config.run_name and config.resume != "never"
        newest = newest_checkpoint(Path(config.output_dir, config.run_name) if resumes else None)
        idle: list[Ending] = []  # the last starts, if they saved no checkpoint
        number = 0
        while True:
            launcher = os.getpid() if number < self.args.max_restarts else None  # which may restart
            os.environ[process.RESTART] = json.dumps(
                {"restart": number, "cause": cause, "settings": settings, "launcher": launcher})
            ending = self.start(number, flags)
            record_cause(ending)
            folder, settings = ending.run_folder or folder, settings or ending.settings or {}
            may_recover = ending.cause and ending.cause.code in RESTARTED and not ending.stopped
            again = bool(may_recover and number < self.args.max_restarts)
            ending, again, saved = self.agree(number, ending, again, newest_checkpoint(folder))
            if ending.cause is None or not self.args.max_restarts:
                return ending, words
            idle = [] if saved > newest else [*idle, ending]
            newest = max(newest, saved)
            if may_recover and len(idle) == IDLE_STARTS:
                return idle[0], f"{IDLE_STARTS} starts in a row saved no checkpoint"
            if not again:
                return ending, words

            # The next start resumes what this one wrote, whatever RUN_NAME and RESUME the job started with.
            if folder:
                flags = [*self.flags, f"--run-name={folder.name}"]
                if folder.parent != Path(config.output_dir).absolute():
                    flags.append(f"--output-dir={folder.parent}")
                if config.resume == "never" or Path(config.resume).absolute().is_relative_to(folder):
                    flags.append("--resume=auto")
            number, cause = number + 1, ending.cause.sentence
            words = f"restarted {counted(number, 'time')}"
            place = f"step {newest[1]}" if newest[0] else "the beginning"
            print_safely(f"warning: {self.describe(ending)}. Restart {number} of {self.args.max_restarts} "
                         f"from {place}", sys.stderr)

    def describe(self, ending: Ending, words: str = "") -> str:
        """Return a sentence about a failure; print its details, unless a rank's output showed them."""
        cause = ending.cause
        on_console = cause.rank % self.ranks == 0 or self.config.log_all_ranks
        if cause.trace and not (on_console and cause.code == 1):
            print_safely(cause.trace, sys.stderr)
        names_rank = cause.sentence.startswith(("rank", "hang", "node")) or not ending.where
        sentence = cause.sentence if names_rank else f"rank {cause.rank}: {cause.sentence}"
        node = cause.rank // self.ranks
        is_there = self.args.nnodes > 1 and node != self.args.node_rank and not sentence.startswith("node")
        where = f". Its output is on node {node}" if is_there else ending.where
        return f"{sentence}{words and f'; {words}'}{where}"


def start_here(flags: list[str]) -> Ending:
    """Start the only rank in this terminal, pass signals on to it, and return how it ended."""
    received: list[int] = []
    children: list[subprocess.Popen] = []

    def pass_on(number: int, frame: Any = None) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    with tempfile.TemporaryDirectory(prefix="paddock-", ignore_cleanup_errors=True) as folder:
        error_file = Path(folder, "0", "error.json")
        error_file.parent.mkdir()
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        for number in process.stop_signals():
            signal.signal(number, pass_on)
        environ = {**os.environ, **place, process.ERROR_FILE: str(error_file)}
        interrupts.hold()
        children.append(subprocess.Popen([sys.executable, "-u", str(TRAIN), *flags], env=environ))
        interrupts.hold(False)
        for number in [*received]:  # while it was started
            pass_on(number)
        code = children[0].wait()
        process.exit_at_signals()
        ended = rank_exit(0, code, int(time.time()), *Logs(Path(folder)).read(0))
        if code > 0:
            ended = ended._replace(code=code)
        return Logs(Path(folder)).end([ended] if code else [], bool(received))


def launch(job: Job, number: int, flags: list[str], logs: Logs) -> tuple[list[RankExit], bool]:
    """Start several ranks, wait for them, and return how those that failed or were preempted ended, and
    whether a signal ended them all."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousInfo,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # All machines are here. Torch's static rendezvous and its barrier at the end may block and delay signals,
    # and its dynamic rendezvous unpickles what is in its store.
    args, name = job.args, f"paddock-{number}"
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # each starts as many ranks: no exchange
    passed = SimpleNamespace(timeout=None, set_timeout=lambda timeout: None, add=lambda key, count: 0,
                             wait=lambda keys: None)
    info = RendezvousInfo(passed, args.node_rank, args.nnodes, RendezvousStoreInfo(*job.endpoint))
    rendezvous_handler_registry.register(name, lambda parameters: SimpleNamespace(
        use_agent_store=True, next_rendezvous=lambda: info, num_nodes_waiting=lambda: 0,
        get_backend=lambda: name, get_run_id=lambda: name, shutdown=lambda: True))
    newer = {"shutdown_timeout": args.shutdown_timeout, "signals_to_handle": "",
             "numa_options": numa_options(job.config, job.ranks)}
    known = {field.name for field in fields(LaunchConfig)}
    if "shutdown_timeout" not in known:
        print_safely("warning: this version of torch kills the ranks 30 s after a signal", sys.stderr)
    config = LaunchConfig(
        min_nodes=args.nnodes, max_nodes=args.nnodes, nproc_per_node=job.ranks, run_id=name,
        max_restarts=0, rdzv_backend=name,
        logs_specs=DefaultLogsSpecs(str(logs.folder), redirects=Std.ALL,
                                    tee=Std.ALL if job.config.log_all_ranks else {0: Std.ALL}),
        role="", log_line_prefix_template="${role_name}",  # no prefix: the ranks write their own
        **{name: value for name, value in newer.items() if name in known})

    def rank_exits(failures: Any) -> list[RankExit]:
        return [rank_exit(args.node_rank * job.ranks + local_rank, failure.exitcode, int(failure.timestamp),
                          *logs.read(local_rank)) for local_rank, failure in failures.items()]

    def close_saying_why(context: Any, *arguments: Any, **options: Any) -> None:
        """Torch's `close`, which stops the ranks that are left; before, name the one that failed."""
        marker = logs.of_rank(0).with_name(interrupts.FAILED)
        cause = Ending(rank_exits(getattr(context, "_failures", {}))).cause
        if cause and cause.code != process.EXIT_PREEMPTED and not marker.exists():
            with suppress(OSError):
                marker.touch()
            if "was killed" in cause.sentence and job.ranks > 1:
                print_safely(f"warning: {cause.sentence}; the other ranks of this machine stop", sys.stderr)
        close(context, *arguments, **options)

    exits, close = [], SubprocessContext.close
    try:
        SubprocessContext.close = close_saying_why
        stop_twice(SignalException)
        try:
            elastic_launch(config, sys.executable)("-u", str(TRAIN), *flags)
        except ChildFailedError as error:
            exits = rank_exits({each.local_rank: each for each in error.failures.values()})
        process.exit_at_signals()  # no rank is left
        return exits, False
    except SignalException:
        return exits or [rank_exit(args.node_rank * job.ranks + local_rank, None, int(time.time()),
                                   *logs.read(local_rank)) for local_rank in range(job.ranks)], True
    finally:
        SubprocessContext.close = close


def numa_options(config: Config, ranks: int) -> Any:
    """Return how torch binds each rank to the cores near its GPU; None where it cannot, or on a CPU."""
    import torch

    if config.device == "cpu" or torch.cuda.device_count() != ranks or not shutil.which("numactl"):
        return None
    try:
        from torch.numa.binding import AffinityMode, NumaOptions
    except ImportError:  # an older torch
        return None
    return NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)


def stop_twice(error: type[Exception]) -> None:
    """Make the first stop signal, and a second one some seconds later, stop the ranks by raising `error`.

    Further signals are ignored, because at a third one torch's launcher would stop waiting and hang.
    """
    received: list[float] = []

    def handle(number: int, frame: Any) -> None:
        now = time.monotonic()
        if not received or len(received) < 2 and now - received[0] > interrupts.REPEAT_SECONDS:
            received.append(now)
            raise error(f"got {signal.Signals(number).name}", signal.Signals(number))

    for number in process.stop_signals():
        signal.signal(number, handle)


def main() -> None:
    process.open_missing_streams()
    for name in (*process.RANK_VARIABLES, process.ERROR_FILE, process.LAUNCHER_PID):
        os.environ.pop(name, None)  # left by an earlier job
    args, flags = parse_args()
    process.exit_at_signals()
    # Whether SHARDING=hybrid fits is checked below, when the number of ranks is known.
    config = check_settings([*flags, "--shard-degree=1"], args.nnodes * (args.nproc_per_node or 1), args)
    # Silence torch's messages about lost connections and failed ranks: we report the cause.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.CRITICAL)
    if args.gpus:
        if config.device == "cpu":
            raise SettingsError("--gpus conflicts with DEVICE=cpu; remove one of them")
        take_gpus(args.gpus)

    ranks = args.nproc_per_node
    if ranks is None:
        import torch  # imported here, because it takes seconds and invalid settings are reported first

        ranks = torch.cuda.device_count() if config.device != "cpu" else 0
    ranks = ranks or 1
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)  # used by SHARDING=hybrid
    check_settings(flags, args.nnodes * ranks, args)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, process.cores() // ranks)))
    os.environ[process.LAUNCHER_PID] = str(os.getpid())
    sys.stdout.reconfigure(line_buffering=True)
    job = Job(args, flags, config, ranks)
    ending, words = job.run()

    # Report the cause. From here on, signals and a closed console must not change the exit code.
    for number in process.stop_signals():
        signal.signal(number, signal.SIG_IGN)
    silence_unread_streams()
    code = ending.cause.code if ending.cause else 0
    if code not in (0, process.EXIT_PREEMPTED):
        written, step = newest_checkpoint(ending.run_folder)
        saved = ""
        if written and code in RESTARTED:
            how = "the same command" if config.run_name else f"--run-name {ending.run_folder.name}"
            saved = f"step {step} is saved, and {how} resumes"
        words = "; ".join(filter(None, (words, saved)))
        print_safely(f"error: {job.describe(ending, words)}", sys.stderr)
    elif words or args.node_rank:  # rank 0 says it on the first machine
        written, step = newest_checkpoint(ending.run_folder)
        saved = code and written and f"step {step} is saved"
        how = "Stopped by a signal" if code else "Finished"
        print_safely("; ".join(filter(None, (how, words, saved))), sys.stdout)
    raise SystemExit(code)


if __name__ == "__main__":
    run_script(main)
