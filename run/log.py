"""The log of a run: console, a text file for each rank, JSON lines, trackers."""

import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, TextIO

from checkpoint.schema import GENERATION, MOST_SECONDS, REWARD, SCHEMAS, VALIDATION, Line, number, read_lines
from common.activity import tick
from common.files import disk_errors, plain
from common.text import WIDTH, counted, duration, once, print_safely, printable
from config import Config
from parallel.process import number_of

EVALUATED = re.compile(r"(val|generation)_|.*_(acc|acc_norm|n|stderr|chance)$")  # metrics of an evaluation
# Metrics that differ between two equal runs.
CLOCKS = re.compile(r"time|tokens_per_second|.*_seconds|(slow|fast)est_rank|peak_memory_bytes|[mh]fu|"
                    r"power_.*|joules_.*|gpu_.*")
# The metric with the result of an evaluation; that of a multiple-choice set is NAME_acc.
METRIC_OF = {VALIDATION: "val_loss", GENERATION: "generation_n", REWARD: "val_reward"}
REPORT = "report.html"
SLOWER = 1.1  # ratio of the slowest rank's seconds to the fastest's from which a step's line has both
FINISH_SECONDS = 60  # for a tracker at the end of a run
LEAVE_SECONDS = 10  # for a tracker at an early end, when a scheduler may be waiting
CLOSE_RETRY_SECONDS = (0.1, 0.4, 1.5)  # for lines that a disk has refused


def keep_lines(path: Path, keeps: Callable[[Line], bool], warn: Callable[[str], None]) -> Iterator[Line]:
    """Yield each readable line of a log, and leave only those in the file that it `keeps`.

    Unreadable lines move into a file beside it, `NAME.bad`. A line that a crash has cut is dropped.
    """
    if not path.exists():
        return
    beside, aside, bad_lines = path.with_suffix(".tmp"), path.with_name(f"{path.name}.bad"), 0
    with open(beside, "wb", opener=plain) as kept:
        for line, entry in read_lines(path):
            if entry is None:
                bad_lines += 1
                with open(aside, "ab", opener=plain) as bad:
                    bad.write(line.rstrip(b"\n") + b"\n")
                continue
            if keeps(entry):
                kept.write(line)
            yield entry
    os.replace(beside, path)
    if bad_lines:
        warn(f"{path}: {counted(bad_lines, 'unreadable line')} moved to {aside.name}")


def finite(values: dict[str, Any]) -> dict[str, Any]:  # JSON has no NaN and infinity
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()}


class LineFile:
    """A file for lines. What a full disk refuses is written later: with one warning, the run continues."""

    def __init__(self, warn: Callable[[str], None]):
        self.warn, self.file, self.unwritten = once(warn), None, b""
        self.lock = threading.RLock()  # trackers warn from their own threads, and a warning is a line too

    def open(self, path: Path) -> "LineFile":
        """Open the file, with the lines that wait for it. Raises CheckpointError."""
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, because nobody can say how much of a buffer a full disk has taken.
            self.file = open(path, "ab", buffering=0, opener=plain)
        self.write()
        return self

    def write(self, *lines: str) -> None:
        """Append lines, unless the file is closed: a tracker may warn after the end."""
        with self.lock:
            if self.file and self.file.closed:
                return
            self.unwritten += b"".join(line.encode("utf-8", errors="replace") + b"\n" for line in lines)
            try:
                while self.file and self.unwritten:
                    self.unwritten = self.unwritten[self.file.write(self.unwritten):]
                    if threading.current_thread() is threading.main_thread():  # a slow disk is not a hang
                        tick()
            except OSError as error:
                self.warn(f"{self.file.name} cannot be written: {error.strerror}; the run continues, and the "
                          "lines are written as soon as possible")

    def close(self) -> None:
        """Close the file; try again to write what the disk has refused so far."""
        with self.lock:
            for seconds in CLOSE_RETRY_SECONDS:
                if self.file and self.unwritten:
                    time.sleep(seconds)
                    self.write()
            if self.file:
                self.file.close()


class RunLog:
    """The log of one rank: on the console until `open`, then also in the run's folder.

    Ranks other than 0 have only their text file, and the console with LOG_ALL_RANKS.
    """

    def __init__(self, config: Config, rank: int, device_type: str):
        self.config, self.rank = config, rank
        self.prefix = f"[{f'GPU{number_of(rank)}' if device_type != 'cpu' else f'CPU{rank}'}]"
        self.shown_prefix = f"{self.prefix} " * (config.world_size > 1)  # on a terminal
        self.on_console = rank == 0 or config.log_all_ranks
        self.file = LineFile(self.warn)
        self.warn_without_targets = once(self.warn)
        self.lines: dict[str, LineFile] = {}  # by the name of the file
        self.run_dir = Path()
        self.previous: dict[str, Any] = {"previous_step": None, "previous_time": None}  # before `open`
        self.complete = -1  # the last step in metrics.jsonl when it was opened, of a run that is resumed
        self.trackers: list[Any] = []  # of rank 0: each has `send`, `close` and a `note`
        # A module of an extension: `step_columns` and `evaluation_columns` return what a terminal shows.
        self.columns: Optional[ModuleType] = None
        self.ending: list[str] = []  # the last lines
        self.pace: Optional[tuple[int, float]] = None  # the first step that was shown, and when
        self.latest: dict[str, Any] = {}  # the newest line of metrics

    def open(self, run_dir: Path, step: int = 0, steps_taken: int = 0,
             measured: Collection[str] = ()) -> None:
        """Write into the run's folder from now on, and what was logged before.

        The metrics of `step` are complete. `steps_taken` may be one more, if a signal interrupted what
        follows the last step, of which the `measured` metrics are complete.
        """
        self.file.open(run_dir / "log" / f"rank-{self.rank}.txt")
        if self.rank > 0:
            return
        self.run_dir, self.complete, last = run_dir, step, {}

        # Of an incomplete step, the ledger's line stays, and those of evaluations that are not made again.
        def stays(name: str, entry: Line) -> bool:
            is_measured = name == "evaluations" and METRIC_OF.get(entry.name, f"{entry.name}_acc") in measured
            return (entry.step <= step or name == "events"
                    or entry.step == steps_taken and (name in ("ledger", "rollouts") or is_measured))

        for file in SCHEMAS:
            path, name = run_dir / file, file.removesuffix(".jsonl")
            if name == "rollouts" and self.config.training_stage != "grpo":
                continue
            with disk_errors(path):
                for entry in keep_lines(path, partial(stays, name), self.warn):
                    last[name] = entry
            self.lines[name] = LineFile(self.warn).open(path)
        for name in ("ledger", "metrics"):
            known = last[name].step if name in last else 0
            if known < step and (name == "ledger" or not known and 0 < self.config.log_every <= step):
                self.warn(f"{run_dir}/{name}.jsonl lacks lines of steps {known + 1} to {step}")
        if newest := last.get("metrics"):
            at, each = (number(newest.model_extra.get(key), MOST_SECONDS) or 0.0
                        for key in ("time", "step_seconds"))
            later = max(0, last.get("ledger", newest).step - newest.step)  # steps that were not logged
            self.previous = {"previous_step": newest.step + later, "previous_time": at + later * each or None}

    def warn(self, text: str) -> None:
        self.info(f"warning: {text}", console=sys.stderr)

    def info(self, text: str, shown: Optional[str] = None, console: Optional[TextIO] = None) -> None:
        """Log a line. A terminal shows `shown` instead, of printable lines, if it is given."""
        text, console = printable(text), console or sys.stdout
        line = lines = f"{self.prefix} {text}"
        if console.isatty():
            shown = [text] if shown is None else shown.splitlines()
            lines = "\n".join(f"{self.shown_prefix}{part}" for part in shown)
        error = print_safely(lines, console, True) if self.on_console and lines else None
        self.file.write(line)
        if error:
            self.warn(f"the console cannot be written: {error.strerror}; the log folder has every line")

    def append(self, name: str, entry: dict[str, Any]) -> None:
        """Append a line to `name`.jsonl once the run's folder is open; NaN and infinity become null."""
        if name in self.lines:
            self.lines[name].write(json.dumps(finite(entry), ensure_ascii=name != "samples"))

    def step(self, metrics: dict[str, Any]) -> None:
        """Log a step's metrics to metrics.jsonl, where NaN and infinity become null, and the trackers."""
        self.latest, step = metrics, metrics["step"]
        self.append("metrics", {"step": step, "time": time.time(), **metrics})
        values = {name: value for name, value in metrics.items()
                  if isinstance(value, (int, float)) and name != "step"}
        self.send("log", values, step)
        evaluated = [(step, name, value) for name, value in values.items() if EVALUATED.match(name)]
        if evaluated:
            self.send("table", "evaluation", ("step", "metric", "value"), evaluated, step)

    def send(self, call: str, *arguments: Any) -> None:
        for tracker in self.trackers:
            tracker.send(call, *arguments)

    def event(self, event: str, step: int, **facts: Any) -> None:
        """Log what happened to the run, and when, to events.jsonl."""
        # Not the escape of a lone surrogate, as in a path that is not Unicode: the line would not be valid.
        texts = {name: value.encode(errors="replace").decode() for name, value in facts.items()
                 if isinstance(value, str)}
        self.append("events", {"time": time.time(), "step": step, "event": event, **facts, **texts})

    def progress(self, step: int, metrics: Mapping[str, Any], seconds: float) -> None:
        """Show a step that took so long. The time left counts what follows steps, such as evaluations."""
        first, at = self.pace = self.pace or (step, time.perf_counter())
        seconds = (time.perf_counter() - at) / (step - first) if step > first else seconds
        facts = (step, self.config.max_steps, metrics, (self.config.max_steps - step) * seconds)
        room = WIDTH - len(self.shown_prefix)
        self.info(console_line(*facts), self.columns and self.columns.step_columns(*facts, room))

    def evaluation(self, step: int, title: str, summary: str, best: str) -> None:
        facts = (step, self.config.max_steps, title, summary, best)
        self.info(f"{title} [{step}/{self.config.max_steps}] | {summary}{' | best so far' * bool(best)}",
                  self.columns and self.columns.evaluation_columns(*facts))

    def close(self, finished: bool = True) -> None:
        """Finish the trackers, which get less time if the run is not finished, and close the files."""
        for line in self.ending:
            self.info(line)
        for tracker in self.trackers:
            tracker.close(self.run_dir, FINISH_SECONDS if finished else LEAVE_SECONDS)
            if tracker.note:
                self.info(tracker.note)
        # The text file last: closing the others may cause a warning.
        for file in (*self.lines.values(), self.file):
            file.close()


def ranks_differ(metrics: Mapping[str, Any]) -> bool:
    fastest = metrics.get("fastest_rank_seconds", 0)
    return fastest > 0 and metrics["slowest_rank_seconds"] > SLOWER * fastest


def console_line(step: int, max_steps: int, metrics: dict[str, Any], seconds_left: float) -> str:
    """Return the console's line of a logged step, in a fixed form that tools can search."""
    parts = [f"Step [{step}/{max_steps}]", f"Loss: {metrics['train_loss']:.4f}",
             f"LR: {metrics['learning_rate']:.2e}", f"Grad Norm: {metrics['grad_norm']:.4f}",
             f"Tok/s: {metrics['tokens_per_second']:,.0f}"]
    if "mfu" in metrics:
        parts.append(f"MFU: {100 * metrics['mfu']:.1f} %")
    if ranks_differ(metrics):
        fastest, slowest = (f"{metrics[f'{which}_rank_seconds']:.3f} s (rank {metrics[f'{which}_rank']})"
                            for which in ("fastest", "slowest"))
        parts.append(f"Ranks: {fastest} to {slowest}")
    return " | ".join([*parts, f"ETA: {duration(seconds_left)}"])
