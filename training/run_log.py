"""The log of a run: console, a text file for each rank, JSON lines, wandb and TensorBoard."""

import errno
import json
import math
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Optional, TextIO

from checkpoint.item_scores import measured_as
from checkpoint.schema import Line, read_lines
from common.errors import CheckpointError, requires_package
from common.files import NotAFileError, plain
from common.text import duration, print_safely, print_traceback, printable
from config import Config
from parallel.gpus import number_of

LOGS = ("metrics", "samples", "evaluations", "ledger")  # the JSON-lines files of a run
FINISH_SECONDS = 60  # for a tracker at the end of a run
LEAVE_SECONDS = 10  # for a tracker at an early end, when a scheduler may be waiting
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def keep_lines_up_to(path: Path, step: int, warn: Callable[[str], None],
                     stays: Callable[[Line], bool] = lambda line: False) -> None:
    """Drop the lines of steps after `step`, which are written again, and a line that a crash has cut.

    Unreadable lines move into a file beside it, `NAME.bad`.

    Args:
        stays: tells of a line of a later step whether it is kept too.
    Raises:
        OSError: the file cannot be read or written, or is no regular file.
    """
    if not path.exists():
        return
    beside, aside, bad_lines = path.with_suffix(".tmp"), path.with_name(f"{path.name}.bad"), 0
    with ExitStack() as stack:
        kept, bad = stack.enter_context(open(beside, "wb", opener=plain)), None
        for line, entry in read_lines(path):
            if entry is None:
                bad_lines += 1
                bad = bad or stack.enter_context(open(aside, "ab", opener=plain))
            if entry is None or entry.step <= step or stays(entry):
                (bad if entry is None else kept).write(line + b"\n")
    os.replace(beside, path)
    if bad_lines:
        warn(f"{path}: {bad_lines} unreadable line{'s' if bad_lines > 1 else ''} moved to {aside.name}")


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """The values with null in place of NaN and infinity, which JSON does not have."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()}


class LineFile:
    """A file to which lines are appended. What a full disk refuses is kept in memory and written later.

    The first failure causes one warning; losing log lines must not end a run.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]):
        self.path, self.warn, self.unwritten, self.warned = path, warn, b"", False
        self.lock = threading.RLock()  # trackers warn from their own threads, and a warning is a line too
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, because nobody can say how much of a buffer a full disk has taken.
            self.file = open(path, "ab", buffering=0, opener=plain)

    def write(self, line: str) -> None:
        """Append a line, unless the file is closed: a tracker may warn after the end."""
        with self.lock:
            if self.file.closed:
                return
            self.unwritten += line.encode("utf-8", errors="replace") + b"\n"
            try:
                while self.unwritten:
                    self.unwritten = self.unwritten[self.file.write(self.unwritten):]
            except OSError as error:
                if not self.warned:
                    self.warned = True
                    self.warn(f"{self.path} cannot be written: {error.strerror}; the run continues, and the "
                              "lines are written as soon as possible")

    def close(self) -> None:
        """Close the file."""
        with self.lock:
            self.file.close()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A `with` block in which an OSError becomes a CheckpointError that names the path."""
    try:
        yield
    except NotAFileError as error:
        raise CheckpointError(f"{error.filename} {error.strerror}; move it away") from error
    except OSError as error:
        there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
        room = ";"
        if error.errno in NO_ROOM:
            room = f", {shutil.disk_usage(there).free:,} bytes are free; make room, or"
        raise CheckpointError(f"{error.filename or path} cannot be written: {error.strerror or error}{room} "
                              "set OUTPUT_DIR to a folder that can be written") from error


# ------------------------------------------------------------------------------------------- trackers


class Tracker:
    """A service that also gets the metrics, in its own thread, so that it can be slow, fail or hang.

    After its first error there is one warning, and it is not called again.

    Args:
        start: returns an object with log(values, step=...) and finish().
    """

    broken: set[str] = set()  # the names of trackers that failed or did not finish

    def __init__(self, name: str, start: Callable[[], Any], warn: Callable[[str], None]):
        self.name, self.start, self.warn, self.given_up = name, start, warn, False
        self.waiting: queue.Queue[Optional[tuple[dict[str, float], int]]] = queue.Queue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            run = self.start()
            while (entry := self.waiting.get()) is not None:
                run.log(entry[0], step=entry[1])
            run.finish()
        # Whatever a tracker raises, SystemExit included, must not end the run.
        except BaseException as error:
            self._give_up(f"{self.name} is off for the rest of this run: {type(error).__name__}: "
                          f"{str(error)[:200]}")

    def log(self, values: dict[str, float], step: int) -> None:
        """Queue a step's metrics; returns at once."""
        if self.thread.is_alive():
            self.waiting.put((values, step))

    def close(self, timeout_seconds: float) -> None:
        """Let it finish, for at most so long."""
        self.waiting.put(None)
        self.thread.join(timeout_seconds)
        if self.thread.is_alive():
            self._give_up(f"{self.name} did not finish within {timeout_seconds:.0f} s and is abandoned; "
                          "metrics.jsonl is complete")

    def _give_up(self, why: str) -> None:
        if not self.given_up:  # one that did not finish may still fail later
            self.given_up = True
            Tracker.broken.add(self.name)
            self.warn(why)


@contextmanager
def abandoning_trackers() -> Iterator[None]:
    """A `with` block around a program: if a tracker is broken, end the process at once with its exit code.

    What wandb has registered to run at the end of the process would wait for ever.
    """
    try:
        yield
    finally:
        if Tracker.broken:
            error = sys.exc_info()[1]
            if error is not None and not isinstance(error, SystemExit):
                print_traceback(*sys.exc_info())
            with suppress(OSError):
                sys.stdout.flush()
            exits = isinstance(error, SystemExit) and isinstance(error.code, int)
            os._exit(error.code if exits else int(error is not None))


def start_wandb(config: Config, run_dir: Path, run_id: str):
    """A wandb run: online if there is a key, else offline, unless WANDB_MODE is set."""
    with requires_package("wandb", "WANDB_ENABLED=true"):
        import wandb
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    return wandb.init(project=config.wandb_project, name=run_dir.name, id=run_id, resume="allow", dir=run_dir,
                      config=config.public(), mode=mode,
                      settings=wandb.Settings(init_timeout=30, finish_timeout=45, console="off", silent=True))


class TensorBoard:
    """TensorBoard's event files in the run's folder."""

    def __init__(self, run_dir: Path, step: int):
        with requires_package("tensorboard", "TENSORBOARD_ENABLED=true"):
            from torch.utils.tensorboard import SummaryWriter

        # On a full disk its thread dies with a traceback; the next call raises the same error, which counts.
        show = threading.excepthook
        threading.excepthook = lambda death: (type(death.thread).__module__.startswith("tensorboard.")
                                              or show(death))
        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)

    def log(self, values: dict[str, float], step: int) -> None:
        """Write a step's metrics."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Close the files."""
        self.writer.close()


# ----------------------------------------------------------------------------------------------- log


class RunLog:
    """The log of one rank: on the console until `open`, then also in the run's folder.

    Ranks other than 0 have only their text file, and the console with LOG_ALL_RANKS.
    """

    def __init__(self, config: Config, rank: int, device_type: str):
        self.config, self.rank = config, rank
        self.prefix = f"[{f'GPU{number_of(rank)}' if device_type == 'cuda' else f'CPU{rank}'}]"
        self.on_console = rank == 0 or config.log_all_ranks
        self.early: list[str] = []  # lines that wait for `open`
        self.file: Optional[LineFile] = None
        self.lines: dict[str, LineFile] = {}  # by their names in LOGS
        self.trackers: list[Tracker] = []

    def open(self, run_dir: Path, step: int = 0, steps_taken: int = 0, wandb_run_id: str = "",
             measured: Collection[str] = ()) -> None:
        """Write into the run's folder from now on, and what was logged before.

        Args:
            step: the last one whose metrics are complete.
            steps_taken: may be one more, if a signal interrupted what follows the last step.
            measured: the metrics of that step which are complete already.
        Raises:
            CheckpointError: it cannot be written.
        """
        self.file = LineFile(run_dir / "log" / f"rank-{self.rank}.txt", self.warn)
        for line in self.early:
            self.file.write(line)
        if self.rank > 0:
            return
        # Of an incomplete step, the ledger's line stays, and those of evaluations that are not made again.
        stays = {"ledger": lambda line: line.step == steps_taken,
                 "evaluations": lambda line: line.step == steps_taken and measured_as(line.name) in measured}
        for name in LOGS:
            path = run_dir / f"{name}.jsonl"
            with disk_errors(path):
                keep_lines_up_to(path, step, self.warn, stays.get(name, lambda line: False))
            self.lines[name] = LineFile(path, self.warn)
        if self.config.wandb_enabled:
            start = lambda: start_wandb(self.config, run_dir, wandb_run_id)
            self.trackers.append(Tracker("wandb", start, self.warn))
        self._start_tensorboard(run_dir, step)

    def _start_tensorboard(self, run_dir: Path, step: int) -> None:
        if self.config.tensorboard_enabled:
            self.trackers.append(Tracker("TensorBoard", lambda: TensorBoard(run_dir, step), self.warn))

    def follow(self, run_dir: Path, step: int) -> None:
        """Continue in a renamed folder: open files move with it, TensorBoard opens its own by path."""
        if self.rank == 0:
            self.trackers = [tracker for tracker in self.trackers if tracker.name != "TensorBoard"]
            self._start_tensorboard(run_dir, step)

    def info(self, text: str) -> None:
        """Log a line."""
        self._write(f"{self.prefix} {text}", sys.stdout)

    def warn(self, text: str) -> None:
        """Log a warning, on the error stream."""
        self._write(f"{self.prefix} warning: {text}", sys.stderr)

    def _write(self, line: str, console: TextIO) -> None:
        line = printable(line)
        error = print_safely(line, console) if self.on_console else None
        if self.file:
            self.file.write(line)
        else:
            self.early.append(line)
        if error:
            self.warn(f"the console cannot be written: {error.strerror}; the run continues, and its log "
                      "folder has every line")

    def _write_json(self, name: str, entry: dict[str, Any]) -> None:
        if name in self.lines:
            self.lines[name].write(json.dumps(entry, ensure_ascii=name != "samples"))

    def step(self, metrics: dict[str, Any]) -> None:
        """Log a step's metrics to metrics.jsonl and the trackers; NaN and infinity become null."""
        metrics = finite(metrics)
        self._write_json("metrics", metrics)
        values = {name: value for name, value in metrics.items()
                  if isinstance(value, (int, float)) and name != "step"}
        for tracker in self.trackers:
            tracker.log(values, metrics["step"])

    def entry(self, step: int, facts: dict[str, Any]) -> None:
        """Log a step's line in ledger.jsonl: which rows it read, and its result."""
        self._write_json("ledger", {"step": step, **finite(facts)})

    def evaluation(self, step: int, facts: dict[str, Any]) -> None:
        """Log the results of an evaluation item by item, in evaluations.jsonl."""
        self._write_json("evaluations", {"step": step, **facts})

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Log generated text to samples.jsonl and the console."""
        self._write_json("samples", {"step": step, "prompt": prompt, "text": text})
        between = " -> " if prompt and self.config.training_stage != "pretrain" else ""
        self.info(f"Sample: {prompt}{between}{text}" if text else f"Sample: {prompt} (end of text at once)")

    def close(self, finished: bool = True) -> None:
        """Finish the trackers, which get less time if the run is not finished, and close the files."""
        for tracker in self.trackers:
            tracker.close(FINISH_SECONDS if finished else LEAVE_SECONDS)
        # The text file last: closing the others may cause a warning.
        for file in (*self.lines.values(), self.file):
            if file:
                file.close()


def console_line(step: int, max_steps: int, metrics: dict[str, Any], seconds_left: float) -> str:
    """The console's line of a logged step, in a fixed form that tools can search."""
    parts = [f"Step [{step}/{max_steps}]", f"Loss: {metrics['train_loss']:.4f}",
             f"LR: {metrics['learning_rate']:.2e}", f"Grad Norm: {metrics['grad_norm']:.4f}",
             f"Tok/s: {metrics['tokens_per_second']:,.0f}"]
    if "mfu" in metrics:
        parts.append(f"MFU: {100 * metrics['mfu']:.1f}%")
    return " | ".join([*parts, f"ETA: {duration(seconds_left)}"])
