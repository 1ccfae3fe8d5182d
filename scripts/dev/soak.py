"""Kill, truncate and corrupt tiny runs, and check that each one ends like an undisturbed run.

    python scripts/dev/soak.py --kills 20 --flips 20 --seed 1  # two minutes
    python scripts/dev/soak.py --kills 200 --flips 100 --truncations 50 --seed 2
    python scripts/dev/soak.py --stage sft --kills 200       # or another stage
    python scripts/dev/soak.py --elastic --kills 0 --points 0 --flips 0 \\
        --truncations 0                                      # only elastic

Kills: `kill -9` of a single process, or of one or both of two ranks, at random times and, every second time,
during a save: while the state is copied, or while threads write it. The run is resumed, perhaps killed again,
and must end identically: SHA-256 of the weights and the optimizer state, metrics, ledger, samples,
evaluations and rollouts.

Crash points: a process, or either of two ranks, dies at each open, write, fsync, rename, unlink and rmdir of
saving in a thread, and of pruning.

Flips and truncations: a bit flips in a file of the newest checkpoint or in a shard, or the file is truncated
or deleted. The run must warn, resume from the previous checkpoint, and end identically. For a damaged shard,
it must stop with an error that names the file.

Elastic: `kill -9` of one or all ranks of a run with REPRODUCIBLE=true, of each stage in turn, in fp32 or
bf16. It resumes on another number of ranks from 1 to 4, or with another SHARDING. It must end identically to
an undisturbed run in one process.

This needs no network. The data is in a temporary folder, which is removed. The exit code is 0 if all pass.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # also for the server process that the runs are forked from
    folders = [str(ROOT / name) for name in ("", "tests", "tests/parallel", "tests/system/faults")]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH"))))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"  # of killed runs

# ruff: noqa: E402
import common  # noqa: F401  # isort: skip (reports a package that is missing)
import argparse
import contextlib
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import count
from random import Random
from typing import Any, NamedTuple, Optional

import faults
from factories import PATIENCE, UNMEASURED, Job, Prepared, TinyRun, prepare, prepare_stages, without_clocks
from test_reproducible import reproducible_run
from tqdm import tqdm

from checkpoint import store
from common.command_line import CommandParser
from common.errors import run_script
from common.text import command, duration
from extensions.debug.history import compare_step_logs
from extensions.debug.replay import read_step_log

# Both save and prune at every step; the long one also validates and samples.
LONG = {"SAVE_EVERY": 1, "KEEP_LAST": 1, "MAX_STEPS": 6}
SHORT = {"SAVE_EVERY": 1, "KEEP_LAST": 2, "KEEP_BEST": 0, "MAX_STEPS": 4, **UNMEASURED}
# The mode of a stage in the factories, and the numbers of ranks on which it is killed.
STAGES = {"pretrain": ("", (1, 2)), "sharded": ("", (2,)), "sft": ("sft", (1, 2)),
          "dpo": ("dpo-live", (1, 2)), "lora": ("lora-sft", (1, 2)), "grpo": ("grpo", (1, 2))}
# Twelve rows a step; a rank's rows of an adapter must have a multiple of 16 numbers.
ROWS = 12
ELASTIC = {"TOTAL_BATCH_SIZE": ROWS * 96, "MAX_STEPS": 6, "SAVE_EVERY": 1, "KEEP_LAST": 2, "LORA_RANK": 16}
ELASTIC_FEATURES = ["pretrain", "sft", "dpo-live", "lora-sft", "distilled", "muon"]
ELASTIC_KILLS = 50
GRACE_SECONDS = 3.0  # until the other ranks are killed, as by a launcher
KILLED = -signal.SIGKILL
# Starting a process polls all earlier ones, and an exit code that two threads poll at once is lost.
PROCESSES = threading.Lock()


def results_of(run: TinyRun) -> dict[str, Any]:
    """Everything that must be the same at the end of two runs."""
    names, logs = os.listdir(run.folder / "checkpoints"), ("samples", "evaluations", "rollouts")
    return {"weights and optimizer": run.hashes(run.settings["MAX_STEPS"]),
            "temporary files": [name for name in names if not name.startswith("step-")],
            "metrics": without_clocks(run.metrics()), "ledger": (run.folder / "ledger.jsonl").read_text(),
            **{log: without_clocks(run.lines(log)) for log in logs}}


def newest_step(run: TinyRun) -> int:
    folder, messages = store.newest_verified(run.folder / "checkpoints")
    assert not messages, messages
    return -1 if folder is None else store.read_manifest(folder)["step"]


class Reference(NamedTuple):
    """An undisturbed run."""

    world_size: int
    results: dict[str, Any]
    seconds: float
    save_seconds: float  # of its longest save

    def compare(self, run: TinyRun) -> None:
        for name, result in results_of(run).items():
            expected = self.results[name]
            assert result == expected, f"{name} differ at the end:\n{result}\nexpected: {expected}"


class Setup:
    """The data, and runs that are trained only once: undisturbed ones, and templates."""

    def __init__(self, folder: Path, stage: str, elastic: bool):
        self.folder = folder
        self.prepared: Prepared = prepare(folder / "data")
        # Below the ports that the system assigns to connections, so that no other run takes them.
        self.ports = count(10_000 + os.getpid() % 10_000)
        mode, self.worlds = STAGES[stage]
        if elastic or mode:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                self.stages = prepare_stages(self.prepared, folder)
        self.settings = self.stages.settings(mode) if mode else self.prepared.settings()
        self.settings |= {"SHARDING": "full"} if stage == "sharded" else {}
        self.data = f"{self.settings.get('TRAINING_STAGE', 'pretrain').upper()}_DATA_PATH"
        self.shards = sorted(path.name for path in self.settings[self.data].glob("*.bin"))
        self.made: dict[tuple, Any] = {}
        self.one_at_a_time = threading.RLock()

    def once(self, key: tuple, make: Callable[[Path], Any]) -> Any:
        with self.one_at_a_time:
            if key not in self.made:
                self.made[key] = make(self.folder / "-".join(map(str, key)))
            return self.made[key]

    def run(self, folder: Path, changes: dict[str, Any]) -> TinyRun:
        return TinyRun(self.prepared, folder, **self.settings | changes)

    def reference(self, ranks: int, changes: dict[str, Any]) -> Reference:
        key = "undisturbed", ranks, changes["MAX_STEPS"]
        return self.once(key, lambda folder: self.measured(self.run(folder, changes), ranks))

    def template(self, ranks: int) -> TinyRun:
        """Return a run that was killed at the start of its third save."""
        def make(folder: Path) -> TinyRun:
            self.crash(run := self.run(folder, SHORT), ranks, 0, 3, 1)
            return run

        return self.once(("template", ranks), make)

    def copied(self, ranks: int, folder: Path) -> TinyRun:
        shutil.copytree(self.template(ranks).output_dir, folder, dirs_exist_ok=True)
        return self.run(folder, SHORT)

    def calls(self, ranks: int) -> list[tuple[int, int, int, str]]:
        """Return the calls of a save, each with the number of ranks, the rank, and its number from 1."""
        def make(folder: Path) -> list[tuple[int, int, int, str]]:
            into = folder / "calls"
            self.finish(self.copied(ranks, folder), ranks, partial(faults.list_calls_of_save, 1, into))
            return [(ranks, rank, number, name) for rank in range(ranks) for number, name
                    in enumerate((into / str(rank)).read_text().split(), 1)]

        return self.once(("calls", ranks), make)

    def whole_run(self, feature: str, precision: str, rows: int) -> tuple[TinyRun, Reference]:
        """Return an undisturbed run in one process, for elastic kills."""
        def make(folder: Path) -> tuple[TinyRun, Reference]:
            run = elastic_run(self, feature, precision, rows, folder)
            return run, self.measured(run, 1)

        return self.once((feature, precision, rows), make)

    def measured(self, run: TinyRun, world_size: int) -> Reference:
        marks, started = run.output_dir / "marks", time.monotonic()
        self.finish(run, world_size, partial(faults.mark_saves, marks))
        seconds, times = time.monotonic() - started, faults.saves_marked(marks)
        longest = max(end - begin for begin, end in zip(times[::2], times[1::2]))
        return Reference(world_size, results_of(run), seconds, longest)

    @contextlib.contextmanager
    def started(self, run: TinyRun, world_size: int, plant: Optional[Callable]) -> Iterator[Job]:
        """Start the run's processes, and kill the remaining ones at the end of the block."""
        with PROCESSES:
            for port in self.ports:  # the next free one
                with socket.socket() as probe, contextlib.suppress(OSError):
                    probe.bind(("127.0.0.1", port))
                    break
            job = run.start(world_size, plant, {"MASTER_PORT": str(port)})
        try:
            yield job
        finally:
            wait_for_exit(job, seconds=0)

    def finish(self, run: TinyRun, world_size: int, plant: Optional[Callable] = None,
               codes: Optional[list[int]] = None) -> str:
        """Run to the end, check the exit codes (0 unless given), and return the output."""
        expected = codes or [0] * world_size
        with self.started(run, world_size, plant) as job:
            actual = wait_for_exit(job, PATIENCE)
            assert actual == expected, f"exit codes {actual}, expected {expected}:\n{job.text()}"
            return job.text()

    def crash(self, run: TinyRun, world_size: int, rank: int, save: int, call: int) -> None:
        """Let a rank die at a call of a save; the others leave, or are killed some seconds later."""
        with self.started(run, world_size, partial(faults.die_in_save, save, call, rank)) as job:
            deadline = time.monotonic() + PATIENCE
            while is_alive(job.processes[rank]) and time.monotonic() < deadline:
                time.sleep(0.005)
            codes = wait_for_exit(job, GRACE_SECONDS)
            assert codes[rank] == KILLED and 0 not in codes, f"exit codes {codes}:\n{job.text()}"


def is_alive(process) -> bool:
    with PROCESSES:
        return process.is_alive()


def send(process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def wait_for_exit(job: Job, seconds: float) -> list[int]:
    """Wait for a job, kill the processes remaining after some seconds, and return the exit codes."""
    deadline = time.monotonic() + seconds
    while any(is_alive(process) for process in job.processes):
        if time.monotonic() >= deadline:
            for process in job.processes:
                send(process, signal.SIGKILL)
        time.sleep(0.005)
    return [process.exitcode for process in job.processes]


def pause_in_save(process, marks: Path, rank: int, save_seconds: float, rng: Random) -> None:
    """Pause a process at a random time inside one of its saves, or return when it has ended."""
    for save in count(rng.randrange(3)):
        while len(faults.saves_marked(marks, rank)) <= 2 * save:
            if not is_alive(process):
                return
            time.sleep(0.001)
        time.sleep(rng.uniform(0, save_seconds))
        send(process, signal.SIGSTOP)
        if len(faults.saves_marked(marks, rank)) % 2:
            return
        send(process, signal.SIGCONT)


def kill_once(setup: Setup, run: TinyRun, reference: Reference, aimed: bool, marks: Path,
              rng: Random) -> Optional[Counter]:
    """Start a run and kill it, inside a save if `aimed`. Return None if it ended first.

    The run writes the times of its saves into the folder `marks`.
    """
    world_size = reference.world_size
    killed_ranks = rng.choice([[0], [world_size - 1], [*range(world_size)]])
    before = newest_step(run)
    with setup.started(run, world_size, partial(faults.mark_saves, marks)) as job:
        if aimed:
            first = killed_ranks[0]
            pause_in_save(job.processes[first], marks, first, reference.save_seconds, rng)
        else:
            time.sleep(rng.uniform(0, 1.2 * reference.seconds))
        for rank in killed_ranks:
            send(job.processes[rank], signal.SIGKILL)
        codes = wait_for_exit(job, GRACE_SECONDS)
        if KILLED not in [codes[rank] for rank in killed_ranks]:
            assert codes == [0] * world_size, f"exit codes {codes}:\n{job.text()}"
            return None
    assert newest_step(run) >= before, "a checkpoint is lost"
    inside = any(len(faults.saves_marked(marks, rank)) % 2 for rank in killed_ranks)
    return Counter({"kills": 1, "inside saves": int(inside), "of two ranks": int(world_size == 2)})


def kill_trial(setup: Setup, number: int, kills: int, rng: Random, folder: Path) -> Counter:
    """Kill runs this many times in total, resume each until it ends, and compare it."""
    done, world_size = Counter(), setup.worlds[number // 2 % len(setup.worlds)]
    reference = setup.reference(world_size, LONG)
    for attempt in count():
        run = setup.run(folder / str(attempt), LONG)
        while done["kills"] < kills:
            aimed = (number + done["kills"]) % 2 == 0
            marks = folder / f"marks-{attempt}-{done['kills']}"
            if (killed := kill_once(setup, run, reference, aimed, marks, rng)) is None:
                break
            done += killed
        setup.finish(run, world_size)
        reference.compare(run)
        if done["kills"] == kills:
            return done


def crash_trial(setup: Setup, ranks: int, rank: int, call: int, rng: Random, folder: Path) -> None:
    """Let a rank die at the given call of its save (counted from 1), and resume the run."""
    run = setup.copied(ranks, folder)
    setup.crash(run, ranks, rank, 1, call)
    assert newest_step(run) >= 2, "a checkpoint is lost"
    setup.finish(run, ranks)
    setup.reference(ranks, SHORT).compare(run)


def damage_trial(setup: Setup, number: int, name: str, damage: Callable[[Path, Random], str],
                 rng: Random, folder: Path) -> None:
    """Damage a file of the newest checkpoint, which must be skipped, or a shard, which must be an error."""
    ranks = setup.worlds[number % len(setup.worlds)]
    if name in setup.shards:
        shards = Path(shutil.copytree(setup.settings[setup.data], folder / "shards"))
        done = damage(shards / name, rng)
        changes = {setup.data: shards, "VERIFY_DATA": "always", "VALIDATE_EVERY": 1}
        output = setup.finish(setup.run(folder, SHORT | changes), ranks, codes=[3] * ranks)
        assert f"error: {shards / name}: " in output, f"{done}, but the error does not name it:\n{output}"
        return
    run = setup.copied(ranks, folder)
    done = damage(run.checkpoint(2) / name, rng)
    output = setup.finish(run, ranks)
    # One warning names the checkpoint and the file.
    warnings = [line for line in output.splitlines() if "warning: " in line and "step-00000002" in line]
    assert len(warnings) == 1 and name in warnings[0], f"{done}, but the output is:\n{output}"
    setup.reference(ranks, SHORT).compare(run)


def elastic_run(setup: Setup, feature: str, precision: str, rows: int, folder: Path) -> TinyRun:
    run = reproducible_run(setup.stages, feature, precision, folder)
    run.settings |= {**ELASTIC, "MICRO_BATCH_SIZE": rows}
    return run


def random_layout(rows: int, rng: Random) -> tuple[int, dict[str, Any]]:
    """Return 1 to 4 ranks, and a SHARDING that they can have with micro-batches of so many rows."""
    world_size = rng.choice((1, 2, 3, 4))
    shardings = ("none", "none", "full", "hybrid") if ROWS % (rows * world_size) == 0 else ("none",)
    degree = rng.choice([n for n in (1, 2, 3, 4) if world_size % n == 0])
    return world_size, {"SHARDING": rng.choice(shardings), "SHARD_DEGREE": degree}


def elastic_trial(setup: Setup, feature: str, kills: int, rng: Random, folder: Path) -> Counter:
    """Kill a run this many times, resume it each time with another layout, and compare its end."""
    kind = rng.choice(("fp32", "bf16")), rng.choice((1, 2))
    whole, reference = setup.whole_run(feature, *kind)
    done = 0
    for attempt in count():
        run, layout = elastic_run(setup, feature, *kind, folder / str(attempt)), random_layout(kind[1], rng)
        layouts: list[str] = []
        while True:
            world_size, settings = layout
            layouts.append(f"{world_size} x {' '.join(map(str, settings.values()))}")
            run.settings |= settings
            if done == kills:
                break
            seconds, marks = reference.seconds * (1 + world_size) / 2, folder / f"marks-{attempt}-{done}"
            expected = reference._replace(world_size=world_size, seconds=seconds)
            if kill_once(setup, run, expected, rng.random() < 0.3, marks, rng) is None:
                break
            done += 1
            while (layout[0], layout[1]["SHARDING"]) == (world_size, settings["SHARDING"]):
                layout = random_layout(kind[1], rng)
        setup.finish(run, world_size)
        try:
            reference.compare(run)
        except AssertionError as error:
            step, fields = compare_step_logs(*(read_step_log(each.folder) for each in (whole, run)))
            raise AssertionError(f"{kind} on {', '.join(layouts)}: the first difference in the ledger is "
                                 f"in step {step}: {', '.join(fields)}\n{error}") from None
        if done == kills:
            return Counter({"elastic kills": kills})


class Trial(NamedTuple):
    """A trial, its name, and what it counts as if it passes."""

    name: str
    work: Callable[[Random, Path], Optional[Counter]]  # returns what it counts, if that is more
    worth: Counter


def plan(setup: Setup, args: argparse.Namespace) -> list[Trial]:
    trials = []
    left = args.kills
    while left:
        kills, number = min(left, Random(f"{args.seed} {left}").choice((1, 1, 2, 3))), len(trials)
        work = partial(kill_trial, setup, number, kills)
        trials.append(Trial(f"kill {number}", work, Counter(kills=kills)))
        left -= kills
    points = [point for ranks in setup.worlds if args.points != "0" for point in setup.calls(ranks)]
    if args.points == "borders":
        names = [None, *(name for *_, name in points), None]
        points = [point for number, point in enumerate(points) if len({*names[number:number + 3]}) > 1]
    elif args.points != "all":
        points = sorted(Random(args.seed).sample(points, min(int(args.points), len(points))))
    trials += [Trial(f"point {call} of rank {rank} of {ranks} ({name})",
                     partial(crash_trial, setup, ranks, rank, call), Counter({"crash points": 1}))
               for ranks, rank, call, name in points]
    damaged = setup.template(setup.worlds[0]).checkpoint(2) if args.flips + args.truncations else None
    files = sorted({path.name for path in damaged.iterdir()} - {store.CARD}) if damaged else []
    files += setup.shards
    for kind, count_of_kind, ways in (("bit flips", args.flips, [faults.flip_bit]),
                                      ("truncations", args.truncations, [faults.cut, faults.delete])):
        for number in range(count_of_kind):  # every file in turn, and in every way
            name, damage = files[number % len(files)], ways[(number + number // len(files)) % len(ways)]
            work = partial(damage_trial, setup, number + number // len(files), name, damage)
            trials.append(Trial(f"{kind} {number} ({name})", work, Counter({kind: 1})))
    left = args.elastic
    while left:
        rng = Random(f"{args.seed} elastic {left}")
        kills = min(left, rng.choice((1, 1, 2, 3)))
        feature = ELASTIC_FEATURES[len(trials) % len(ELASTIC_FEATURES)]
        trials.append(Trial(f"elastic {left} ({feature})", partial(elastic_trial, setup, feature, kills),
                            Counter({"elastic kills": kills})))
        left -= kills
    return [trial for trial in trials if args.only in (None, trial.name)]


def run_all(trials: list[Trial], args: argparse.Namespace, folder: Path) -> tuple[Counter, int]:
    """Return what passed and the number of failures; print each failure with a command to repeat it."""
    passed, failed = Counter(), 0
    names = "stage", "kills", "points", "flips", "truncations", "elastic", "seed"
    flags = " ".join(f"--{name} {getattr(args, name)}" for name in names)

    def run_trial(trial: Trial, folder: Path) -> Counter:
        folder.mkdir()
        try:
            return trial.work(Random(f"{args.seed} {trial.name}"), folder) or trial.worth
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    pool = ThreadPoolExecutor(args.jobs)
    try:
        futures = {pool.submit(run_trial, trial, folder / f"trial-{number}"): trial
                   for number, trial in enumerate(trials)}
        with tqdm(total=len(trials), desc="soak", unit="trial", mininterval=1) as bar:
            for future in as_completed(futures):
                try:
                    passed += future.result()
                except Exception as error:  # count and print any failure, and continue
                    failed += 1
                    is_check = isinstance(error, AssertionError)
                    reason = error if is_check else "".join(traceback.format_exception(error))
                    bar.write(f"FAILED: {futures[future].name}: {reason}\n"
                              f"to repeat: {command('scripts/dev/soak.py')} {flags} "
                              f"--only {futures[future].name!r}")
                bar.update()
    finally:
        pool.shutdown(cancel_futures=True)
    return passed, failed


def main(argv: Optional[list[str]] = None) -> int:
    parser = CommandParser(__doc__)
    for flag, default, meaning in (("--kills", 20, "number of kills with kill -9"),
                                   ("--flips", 20, "number of flipped bits"),
                                   ("--truncations", 10, "number of truncated or deleted files"),
                                   ("--seed", 1, "seed of all random choices"),
                                   ("--jobs", os.cpu_count(), "number of parallel trials")):
        parser.add_argument(flag, type=int, default=default, metavar="N",
                            help=f"{meaning} (default: %(default)s)")
    parser.add_argument("--elastic", type=int, nargs="?", const=ELASTIC_KILLS, default=0, metavar="N",
                        help="number of kills of runs with REPRODUCIBLE, with other ranks or another "
                             f"SHARDING after each (default: 0; {ELASTIC_KILLS} without a number)")
    parser.add_argument("--points", default="all", metavar="N",
                        help="number of crash points, all, or borders: the first and the last of equal calls "
                             "in a row (default: all)")
    parser.add_argument("--stage", choices=STAGES, default="pretrain", help="what is trained, except by "
                        "--elastic; sharded is pretraining with SHARDING=full (default: %(default)s)")
    parser.add_argument("--only", metavar="TRIAL", help="run one trial, named as in a failure's message")
    args, started = parser.parse_args(argv), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paddock-soak-") as folder:
        setup = Setup(Path(folder), args.stage, args.elastic > 0)
        trials = plan(setup, args)
        passed, failed = run_all(trials, args, Path(folder))
    total, seconds = sum((trial.worth for trial in trials), Counter()), time.monotonic() - started

    def share(kind: str) -> str:
        return f"{passed[kind]}/{total[kind]} {kind}"

    print(f"soak: {share('kills')} identical ({passed['inside saves']} inside saves, "
          f"{passed['of two ranks']} of two ranks), {share('crash points')} recovered, "
          f"{share('bit flips')} found, {share('truncations')} found, {share('elastic kills')} identical; "
          f"{args.stage}, seed {args.seed}; {duration(seconds)}", flush=True)
    return 1 if failed or not trials else 0


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
