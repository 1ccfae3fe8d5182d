"""Everything a run tells: the console, one file a rank, metrics.jsonl, samples.jsonl, wandb, TensorBoard."""

import errno
import json
import math
import os
import queue
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Optional, TextIO

from checkpoint.schema import read_lines
from common.errors import CheckpointError, requires_package
from common.files import NotAFileError, plain
from common.text import duration, print_safely, print_traceback, printable
from config import Config

FINISH_SECONDS = 60  # that a tracker has at the end of a run
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LEAVE_SECONDS = 10  # that it has where the run ends before its time, and something may be waiting to go on


def keep_lines_up_to(path: Path, step: int, warn: Callable[[str], None]) -> None:
    """Drop the lines of steps after `step`, which a resumed run will write again, and a line that a crash has torn.

    Others that cannot be read are set aside, in a file beside it.
    Raises:
        OSError: it cannot be read or written, or is no file.
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
            if entry is None or entry.step <= step:
                (bad if entry is None else kept).write(line + b"\n")
    os.replace(beside, path)
    if bad_lines:
        warn(f"{path}: {bad_lines} line{'s' if bad_lines > 1 else ''} of it cannot be read; set aside in {aside.name}")


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """The values with null in place of numbers that JSON does not know."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()}


class LineFile:
    """A file that grows line by line. What a full disk refuses is kept, and written as soon as there is room again.

    The first refusal costs one warning: what a run tells is worth less than the run.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]):
        self.path, self.warn, self.unwritten, self.warned = path, warn, b"", False
        self.lock = threading.RLock()  # trackers warn in threads of their own, and a warning is a line too
        with naming_refusals(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: of what is buffered, nobody can say how much a full disk took.
            self.file = open(path, "ab", buffering=0, opener=plain)

    def write(self, line: str) -> None:
        """Append a line, unless the file is closed: a tracker may speak after the end."""
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
                    self.warn(f"{self.path} cannot be written: {error.strerror}; the run goes on, its lines come when they can")

    def close(self) -> None:
        """Let go of the file."""
        with self.lock:
            self.file.close()


@contextmanager
def naming_refusals(path: Path) -> Iterator[None]:
    """Turn what the system refuses into a CheckpointError with the path, and the free space where that is why."""
    try:
        yield
    except NotAFileError as error:
        raise CheckpointError(f"{error.filename} {error.strerror}; move it away") from error
    except OSError as error:
        there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
        room = f", {shutil.disk_usage(there).free:,} bytes are free; make room, or" if error.errno in NO_ROOM else ";"
        raise CheckpointError(f"{error.filename or path} cannot be written: {error.strerror or error}{room} set OUTPUT_DIR to a "
                              "folder that can be") from error


class Tracker:
    """A service that gets the metrics too, in a thread of its own: it can be slow, fail or hang, and training does not notice.

    After the first error there is one warning and no further call.

    Args:
        start: gives an object with log(values, step=...) and finish().
    """

    broken: set[str] = set()  # the names of those that failed, or were left behind

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
        # Whatever a tracker raises, SystemExit included, is not worth a run.
        except BaseException as error:
            self._give_up(f"{self.name} is off for the rest of this run: {type(error).__name__}: {str(error)[:200]}")

    def log(self, values: dict[str, float], step: int) -> None:
        """Hand over a step's metrics, at once."""
        if self.thread.is_alive():
            self.waiting.put((values, step))

    def close(self, timeout_seconds: float) -> None:
        """Let it finish, for so long and no longer."""
        self.waiting.put(None)
        self.thread.join(timeout_seconds)
        if self.thread.is_alive():
            self._give_up(f"{self.name} did not finish within {timeout_seconds:.0f} s and is left behind; "
                          "metrics.jsonl has everything")

    def _give_up(self, why: str) -> None:
        if not self.given_up:  # one that was left behind may fail later
            self.given_up = True
            Tracker.broken.add(self.name)
            self.warn(why)


@contextmanager
def leaving_trackers_behind() -> Iterator[None]:
    """Around a whole program: where a tracker is broken, end the process at once, with the exit code that it would have had.

    What wandb has left to be done at the end of the process would wait for what does not come.
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
            os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else int(error is not None))


def start_wandb(config: Config, run_dir: Path, run_id: str):
    """A wandb run: online where there is a key, offline otherwise, unless WANDB_MODE says what it should be."""
    with requires_package("wandb", "WANDB_ENABLED=true"):
        import wandb
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    return wandb.init(project=config.wandb_project, name=run_dir.name, id=run_id, resume="allow", dir=run_dir,
                      config=config.public(), mode=mode,
                      settings=wandb.Settings(init_timeout=30, finish_timeout=45, console="off", silent=True))


class TensorBoard:
    """TensorBoard's files in the run's folder."""

    def __init__(self, run_dir: Path, step: int):
        with requires_package("tensorboard", "TENSORBOARD_ENABLED=true"):
            from torch.utils.tensorboard import SummaryWriter

        # Its thread dies of a full disk with a traceback, and what comes next raises the same error once more, to be told.
        show = threading.excepthook
        threading.excepthook = lambda death: type(death.thread).__module__.startswith("tensorboard.") or show(death)
        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)

    def log(self, values: dict[str, float], step: int) -> None:
        """Write a step's metrics."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Close the files."""
        self.writer.close()


class RunLog:
    """The voice of one rank. Metrics go to every place that the settings name; only rank 0 has more than its file.

    Args:
        run_dir: the run's folder; None = console only, until it is opened.
    """

    def __init__(self, config: Config, rank: int, device_type: str, run_dir: Optional[Path] = None,
                 wandb_run_id: Optional[str] = None, step: int = 0, steps_taken: int = 0):
        self.config, self.rank, self.prefix = config, rank, f"[{'GPU' if device_type == 'cuda' else 'CPU'}{rank}]"
        self.early: list[str] = []  # what was told before there was a file
        self.on_console = rank == 0 or config.log_all_ranks
        self.file: Optional[LineFile] = None
        self.metrics: Optional[LineFile] = None
        self.samples: Optional[LineFile] = None
        self.ledger: Optional[LineFile] = None
        self.trackers: list[Tracker] = []
        self.wandb_run_id = wandb_run_id or uuid.uuid4().hex[:8]
        if run_dir is not None:
            self.open(run_dir, step, steps_taken)

    def open(self, run_dir: Path, step: int = 0, steps_taken: int = 0) -> None:
        """Write into the run's folder from now on, and what was told before.

        Args:
            step: the last one that is logged already.
            steps_taken: of a resumed run, whose last one may still be to be logged.
        Raises:
            CheckpointError: it cannot be written.
        """
        self.file = LineFile(run_dir / "log" / f"rank-{self.rank}.txt", self.warn)
        for line in self.early:
            self.file.write(line)
        if self.rank > 0:
            return
        for name, kept in (("metrics", step), ("samples", step), ("ledger", steps_taken)):
            with naming_refusals(run_dir / f"{name}.jsonl"):
                keep_lines_up_to(run_dir / f"{name}.jsonl", kept, self.warn)
            setattr(self, name, LineFile(run_dir / f"{name}.jsonl", self.warn))
        if self.config.wandb_enabled:
            self.trackers.append(Tracker("wandb", lambda: start_wandb(self.config, run_dir, self.wandb_run_id), self.warn))
        self._start_tensorboard(run_dir, step)

    def _start_tensorboard(self, run_dir: Path, step: int) -> None:
        if self.config.tensorboard_enabled:
            self.trackers.append(Tracker("TensorBoard", lambda: TensorBoard(run_dir, step), self.warn))

    def follow(self, run_dir: Path, step: int) -> None:
        """Go on in a folder that was renamed: open files are there already, TensorBoard opens its own anew for each write."""
        if self.rank == 0:
            self.trackers = [tracker for tracker in self.trackers if tracker.name != "TensorBoard"]
            self._start_tensorboard(run_dir, step)

    def info(self, text: str, everywhere: bool = False) -> None:
        """A line to this rank's file, and to the console where this rank speaks there."""
        self._tell(f"{self.prefix} {text}", sys.stdout, self.on_console or everywhere)

    def warn(self, text: str) -> None:
        """A warning, to the error stream and the file."""
        self._tell(f"{self.prefix} warning: {text}", sys.stderr, self.on_console)

    def _tell(self, line: str, console: TextIO, on_console: bool) -> None:
        line = printable(line)
        error = print_safely(line, console) if on_console else None
        if self.file:
            self.file.write(line)
        else:
            self.early.append(line)
        if error:
            self.warn(f"the console cannot be written: {error.strerror}; the run goes on, and what it tells is in its log folder")

    def step(self, metrics: dict[str, Any]) -> None:
        """One logged step: an object in metrics.jsonl, and the trackers. What is not finite is null."""
        metrics = finite(metrics)
        if self.metrics:
            self.metrics.write(json.dumps(metrics))
        values = {name: value for name, value in metrics.items() if isinstance(value, (int, float)) and name != "step"}
        for tracker in self.trackers:
            tracker.log(values, metrics["step"])

    def entry(self, step: int, facts: dict[str, Any]) -> None:
        """A step's line in ledger.jsonl: what it read, and what came of it."""
        if self.ledger:
            self.ledger.write(json.dumps({"step": step, **finite(facts)}))

    def sample(self, step: int, prompt: str, text: str) -> None:
        """One written sample: an object in samples.jsonl, and a line on the console."""
        if self.samples:
            self.samples.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False))
        self.info(f"Sample: {prompt}{text}")

    def close(self, finished: bool = True) -> None:
        """Finish the trackers, for which there is less time where the run is not finished, and close the files."""
        for tracker in self.trackers:
            tracker.close(FINISH_SECONDS if finished else LEAVE_SECONDS)
        # In this order: the first may have something to say in the last.
        for file in (self.metrics, self.samples, self.ledger, self.file):
            if file:
                file.close()


def console_line(step: int, max_steps: int, metrics: dict[str, Any], seconds_left: float) -> str:
    """The greppable line of a logged step."""
    parts = [f"Step [{step}/{max_steps}]", f"Loss: {metrics['train_loss']:.4f}", f"LR: {metrics['learning_rate']:.2e}",
             f"Grad Norm: {metrics['grad_norm']:.4f}", f"Tok/s: {metrics['tokens_per_second']:,.0f}"]
    if "mfu" in metrics:
        parts.append(f"MFU: {100 * metrics['mfu']:.1f}%")
    return " | ".join([*parts, f"ETA: {duration(seconds_left)}"])
