"""Kill, cut and corrupt tiny runs for minutes, and see that each ends as the one that nothing has touched.

    python scripts/soak.py --kills 20 --flips 20 --seed 1               # about two minutes on two cores
    python scripts/soak.py --kills 200 --flips 100 --truncations 50 --seed 2

* Kills: `kill -9` at random instants, every second one aimed at a save; one process, or a group of two of which one or all die.
  The run is resumed, perhaps killed again, and its end must be identical: SHA-256 of weights and optimizer state, metrics,
  ledger and samples.
* Crash points: a run dies at an open, write, fsync, rename, unlink or rmdir of saving and pruning, each in its turn.
* Bit flips, truncations and deletions: each file of the newest checkpoint, and the shards, in turn. The checkpoint before is
  taken, with a warning, and the end is identical; a damaged shard is refused by name.

Needs no network; makes its data in a temporary folder, which is removed. Exits 0 only if everything held.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # for the server that the runs come from, too
    places = (str(ROOT), str(ROOT / "tests"))
    sys.path[:0] = places
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*places, os.environ.get("PYTHONPATH"))))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"  # of what the killed leave behind

# ruff: noqa: E402
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
from factories import PATIENCE, UNMEASURED, Job, Prepared, TinyRun, prepare, without_clocks
from tqdm import tqdm

from checkpoint import store
from common.errors import run_script
from common.text import duration

# Saved and pruned at every step. The long one measures, too.
LONG = {"SAVE_EVERY": 1, "KEEP_LAST": 1, "MAX_STEPS": 6}
SHORT = {"SAVE_EVERY": 1, "KEEP_LAST": 2, "KEEP_BEST": 0, "MAX_STEPS": 3, **UNMEASURED}
GRACE_SECONDS = 3.0  # that the others have to leave by themselves before they are killed, as a launcher does
KILLED = -signal.SIGKILL
# To start a process is to look after all that were started before, and an exit code that two threads read at once one misses.
PROCESSES = threading.Lock()


def evidence(run: TinyRun) -> dict[str, Any]:
    """All that must be the same at the end of two runs."""
    left_over = [path.name for path in (run.folder / "checkpoints").iterdir() if not path.name.startswith("step-")]
    samples = run.folder / "samples.jsonl"
    return {"weights and optimizer": run.hashes(run.settings["MAX_STEPS"]), "metrics": without_clocks(run.metrics()),
            "ledger": (run.folder / "ledger.jsonl").read_text(), "samples": samples.read_text() if samples.exists() else "",
            "left over": left_over}


def sound_step(run: TinyRun) -> int:
    """The step of the newest checkpoint, -1 where there is none; none of them is bad."""
    folder, messages = store.newest_verified(run.folder / "checkpoints")
    assert not messages, messages
    return -1 if folder is None else store.read_manifest(folder)["step"]


class Reference(NamedTuple):
    """A run that nothing has touched."""

    evidence: dict[str, Any]
    seconds: float
    save_seconds: float  # the longest of its saves

    def compare(self, run: TinyRun) -> None:
        """Raises AssertionError with the name of what differs."""
        for name, found in evidence(run).items():
            assert found == self.evidence[name], f"the end differs in {name}:\n{found}\n{self.evidence[name]} was expected"


class Ground:
    """What all trials start from: data, runs to be held against, and a run that was killed when it began its third save."""

    def __init__(self, folder: Path, kills: bool):
        self.folder = folder
        self.prepared: Prepared = prepare(folder / "data")
        # Beside the ports that the system hands out, so that no connection of another run takes it first.
        self.ports = count(10_000 + os.getpid() % 10_000)
        self.short = self.reference(SHORT, 1)
        self.template = self.run(folder / "template", SHORT)
        self.start(self.template, 1, partial(faults.die_in_save, 3, 1), [KILLED])
        self.start(self.copied(folder / "counted"), 1, partial(faults.list_calls_of_save, 1, folder / "calls.txt"), [0])
        self.calls = (folder / "calls.txt").read_text().split()
        self.files = sorted(path.name for path in self.template.checkpoint(2).iterdir())
        self.shards = sorted(path.name for path in self.prepared.shards.glob("*.bin"))
        self.long = {world_size: self.reference(LONG, world_size) for world_size in (1, 2)} if kills else {}

    def run(self, folder: Path, settings: dict[str, Any], **changes) -> TinyRun:
        """A run that is still to be started, in a folder of its own."""
        return TinyRun(self.prepared, folder, **settings | changes)

    def copied(self, folder: Path) -> TinyRun:
        """The run that was killed when it began its third save."""
        shutil.copytree(self.template.output_dir, folder, dirs_exist_ok=True)
        return self.run(folder, SHORT)

    def reference(self, settings: dict[str, Any], world_size: int) -> Reference:
        """What becomes of a run that nothing touches."""
        run = self.run(self.folder / f"reference-{settings['MAX_STEPS']}-{world_size}", settings)
        marks, started = run.output_dir / "marks", time.monotonic()
        self.start(run, world_size, partial(faults.mark_saves, marks), [0] * world_size)
        seconds, instants = time.monotonic() - started, faults.saves_marked(marks)
        return Reference(evidence(run), seconds, max(end - begin for begin, end in zip(instants[::2], instants[1::2])))

    def port(self) -> str:
        """One that nobody listens at."""
        for port in self.ports:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return str(port)

    @contextlib.contextmanager
    def started(self, run: TinyRun, world_size: int, plant: Optional[Callable], **changes) -> Iterator[Job]:
        """A job, of which nothing is left afterwards."""
        with PROCESSES:
            job = run.start(world_size, plant, {"MASTER_PORT": self.port()}, **changes)
        try:
            yield job
        finally:
            codes_of(job, patience=0)

    def start(self, run: TinyRun, world_size: int, plant: Optional[Callable], codes: list[int], **changes) -> str:
        """Start a run, and see it end with these exit codes; what it said."""
        with self.started(run, world_size, plant, **changes) as job:
            found = codes_of(job, PATIENCE)
            assert found == codes, f"exit codes {found}, expected {codes}:\n{job.text()}"
            return job.text()


def is_alive(process) -> bool:
    with PROCESSES:
        return process.is_alive()


def codes_of(job: Job, patience: float) -> list[int]:
    """The exit codes of a job; whoever is still there after so many seconds is killed."""
    deadline = time.monotonic() + patience
    while any(is_alive(process) for process in job.processes):
        if time.monotonic() >= deadline:
            for process in job.processes:
                send(process, signal.SIGKILL)
        time.sleep(0.005)
    return [process.exitcode for process in job.processes]


def send(process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def wait_for_a_save(process, marks: Path, rank: int, save_seconds: float, dice: Random) -> None:
    """Stop a process at a random instant inside one of its saves; return, too, when it has ended."""
    for save in count(dice.randrange(3)):
        while len(faults.saves_marked(marks, rank)) <= 2 * save:
            if not is_alive(process):
                return
            time.sleep(0.001)
        time.sleep(dice.uniform(0, save_seconds))
        send(process, signal.SIGSTOP)
        if len(faults.saves_marked(marks, rank)) % 2:
            return
        send(process, signal.SIGCONT)


def kill_once(ground: Ground, run: TinyRun, world_size: int, aimed: bool, marks: Path, dice: Random) -> Optional[Counter]:
    """Start a run and kill it; None where it was over before."""
    reference, victims = ground.long[world_size], dice.choice([[0], [world_size - 1], [*range(world_size)]])
    before = sound_step(run)
    with ground.started(run, world_size, partial(faults.mark_saves, marks)) as job:
        if aimed:
            wait_for_a_save(job.processes[victims[0]], marks, victims[0], reference.save_seconds, dice)
        else:
            time.sleep(dice.uniform(0, 1.2 * reference.seconds))
        for victim in victims:
            send(job.processes[victim], signal.SIGKILL)
        codes = codes_of(job, GRACE_SECONDS)
        if KILLED not in [codes[victim] for victim in victims]:
            assert codes == [0] * world_size, f"exit codes {codes}:\n{job.text()}"
            return None
    assert sound_step(run) >= before, "a checkpoint is lost"
    inside = any(len(faults.saves_marked(marks, victim)) % 2 for victim in victims)
    return Counter({"kills": 1, "inside saves": int(inside), "of two ranks": int(world_size == 2)})


def kill_trial(ground: Ground, number: int, kills: int, dice: Random, folder: Path) -> Counter:
    """Runs that are killed so often in all; each is resumed until it is finished."""
    done, world_size = Counter(), 1 + number // 2 % 2
    for attempt in count():
        run = ground.run(folder / str(attempt), LONG)
        while done["kills"] < kills:
            aimed = (number + done["kills"]) % 2 == 0
            marks = folder / f"marks-{attempt}-{done['kills']}"
            if (killed := kill_once(ground, run, world_size, aimed, marks, dice)) is None:
                break
            done += killed
        ground.start(run, world_size, None, [0] * world_size)
        ground.long[world_size].compare(run)
        if done["kills"] == kills:
            return done


def point_trial(ground: Ground, call: int, dice: Random, folder: Path) -> Counter:
    """A run that dies at one call of its save, counted from 1."""
    run = ground.copied(folder)
    ground.start(run, 1, partial(faults.die_in_save, 1, call), [KILLED])
    assert sound_step(run) >= 2, "a checkpoint is lost"
    ground.start(run, 1, None, [0])
    ground.short.compare(run)
    return Counter({"crash points": 1})


def damage_trial(ground: Ground, kind: str, name: str, damage: Callable[[Path, Random], str], dice: Random,
                 folder: Path) -> Counter:
    """A damaged file of the newest checkpoint, which is passed over; or of the data, which is refused."""
    if name in ground.shards:
        shards = Path(shutil.copytree(ground.prepared.shards, folder / "shards"))
        done = damage(shards / name, dice)
        run = ground.run(folder, SHORT, PRETRAIN_DATA_PATH=shards, VERIFY_DATA="always", VALIDATE_EVERY=1)
        told = ground.start(run, 1, None, [3])
        assert f"error: {shards / name}: " in told, f"{done}, but it is not named:\n{told}"
        return Counter({kind: 1})
    run = ground.copied(folder)
    done = damage(run.checkpoint(2) / name, dice)
    told = ground.start(run, 1, None, [0])
    warnings = [line for line in told.splitlines() if "warning: skipping a checkpoint" in line]
    # A checkpoint without its manifest is called so by its folder.
    assert len(warnings) == 1 and name in warnings[0] and "step-00000002" in warnings[0], f"{done}, but it says:\n{told}"
    ground.short.compare(run)
    return Counter({kind: 1})


class Trial(NamedTuple):
    """Something to try, what it is called, and what it counts for."""

    name: str
    work: Callable[[Random, Path], Counter]
    worth: Counter


def plan(ground: Ground, args: argparse.Namespace) -> list[Trial]:
    """Everything that the command line asks for."""
    trials = []
    left = args.kills
    while left:
        kills, number = min(left, Random(f"{args.seed} {left}").choice((1, 1, 2, 3))), len(trials)
        trials.append(Trial(f"kill {number}", partial(kill_trial, ground, number, kills), Counter(kills=kills)))
        left -= kills
    points = range(1, len(ground.calls) + 1)
    if args.points != "all":
        points = sorted(Random(args.seed).sample(points, min(int(args.points), len(points))))
    trials += [Trial(f"point {call} ({ground.calls[call - 1]})", partial(point_trial, ground, call),
                     Counter({"crash points": 1})) for call in points]
    targets = [*ground.files, *ground.shards]
    for kind, wanted, ways in (("bit flips", args.flips, [faults.flip_bit]),
                               ("truncations", args.truncations, [faults.cut, faults.delete])):
        for number in range(wanted):
            name = targets[number % len(targets)]
            # Every file in every way, in turn.
            way = ways[(number + number // len(targets)) % len(ways)]
            trials.append(Trial(f"{kind} {number} ({name})", partial(damage_trial, ground, kind, name, way), Counter({kind: 1})))
    return [trial for trial in trials if args.only in (None, trial.name)]


def attempt(trial: Trial, seed: int, folder: Path) -> Counter:
    folder.mkdir()
    try:
        return trial.work(Random(f"{seed} {trial.name}"), folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parse_args(argv: Optional[list[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="kill -9s (default: 20)")
    parser.add_argument("--points", default="all", help="crash points: all, or so many drawn from them (default: all)")
    parser.add_argument("--flips", type=int, default=20, help="flipped bits (default: 20)")
    parser.add_argument("--truncations", type=int, default=10, help="files cut short or deleted (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default: 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials at a time (default: one a core)")
    parser.add_argument("--only", metavar="TRIAL", help="just the one of this name, as a failure is told")
    return parser.parse_args(argv)


def try_all(trials: list[Trial], args: argparse.Namespace, folder: Path) -> tuple[Counter, int]:
    """What held, and how many trials failed, each of which is told with what is needed to repeat it."""
    held, failed = Counter(), 0
    pool = ThreadPoolExecutor(args.jobs)
    try:
        futures = {pool.submit(attempt, trial, args.seed, folder / f"trial-{number}"): trial
                   for number, trial in enumerate(trials)}
        with tqdm(total=len(trials), desc="soak", unit="trial", mininterval=1) as bar:
            for future in as_completed(futures):
                try:
                    held += future.result()
                except Exception as error:  # whatever it is, it is counted and told, and the others go on
                    failed += 1
                    reason = error if isinstance(error, AssertionError) else "".join(traceback.format_exception(error))
                    flags = " ".join(f"--{name} {getattr(args, name)}" for name in ("kills", "points", "flips", "truncations",
                                                                                   "seed"))
                    bar.write(f"FAILED: {futures[future].name}: {reason}\n"
                              f"to repeat: python scripts/soak.py {flags} --only {futures[future].name!r}")
                bar.update()
    finally:
        pool.shutdown(cancel_futures=True)
    return held, failed


def main(argv: Optional[list[str]] = None) -> int:
    """Try everything; 0 only if all held."""
    args, started = parse_args(argv), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paddock-soak-") as folder:
        ground = Ground(Path(folder), args.kills > 0)
        trials = plan(ground, args)
        held, failed = try_all(trials, args, Path(folder))
    total = sum((trial.worth for trial in trials), Counter())

    def share(kind: str) -> str:
        return f"{held[kind]}/{total[kind]} {kind}"

    print(f"soak: {share('kills')} identical ({held['inside saves']} inside saves, {held['of two ranks']} of two ranks), "
          f"{share('crash points')} recovered, {share('bit flips')} found, {share('truncations')} found; seed {args.seed}; "
          f"{duration(time.monotonic() - started)}", flush=True)
    return 1 if failed or not trials else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_script(lambda: sys.exit(main()))
