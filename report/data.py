"""Text files that grow: each call reads what was appended since the last one.

Whether a run goes on, without touching its lock.

Goodput: which share of all time since a run's first start went into steps that count.

Of the chronicle `events.jsonl`, each `start` begins a *process*. Its last sign of life is its `end` event;
after a kill, it is the latest of its other events, its lines in metrics.jsonl and the `previous_time` of the
next start. All time is that from the first `start` to the last sign of life, but not that between a run which
had finished and its continuation. It is divided into:

- steps: the sum over the logged lines of `step_seconds` * steps since the line before, of the same process;
- evaluation, saving: the `seconds` of these events;
- repeated steps: if the next process resumes from an older step than the last logged one, all time between
  the save of that step (or the last line that was kept) and the last sign of life;
- start-up: from the `start` event to the first step, with the `seconds` that the event may name for what came
  before it (imports, reading and verifying, building the model);
- away: between the last sign of life of a process and the start of the next one;
- other: what is left.

goodput = steps / all time.

Clocks can be set back, and those of two machines differ. So the order of lines and steps decides what came
first, and a negative time counts as zero; `clock_steps` lists these places.


The power trace of a run, power.csv, on one time axis with the marks of the phases.

What a run's folder says besides its logs: settings, segments, sources, and the size of its model.

A run's folder, read as it grows, as the part of the page's data that tells of this run."""

import math
import os
import re
import shlex
import socket
import sys
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from checkpoint.item_scores import ItemScores, read_item_scores
from checkpoint.schema import (
    MAX_LINE_BYTES,
    MOST_SECONDS,
    SCHEMAS,
    EventLine,
    LedgerLine,
    Line,
    RunData,
    RunSettings,
    SampleLine,
    Tensor,
    number,
)
from common.errors import CheckpointError
from common.files import LARGEST_TEXT, plain, read_json, read_text
from common.text import duration
from config import Config
from report.curves import Curve, as_json, rounded
from settings.load import describe_settings

TAIL_BYTES = 256  # compared, to notice that a file was replaced


class GrowingFile:
    """A text file that another process appends to, and that a resumed run replaces by a shorter one.

    Args:
        restart: called before the first line, and again before the first line of a file that was replaced.
        add: called with each complete line; a line that is being written is left for the next call. A line
            for which it raises a ValueError is set aside and counted.
    """

    def __init__(self, path: Path, restart: Callable[[], None], add: Callable[[bytes], None]):
        self.path, self.restart, self.add = path, restart, add
        self.offset, self.tail, self.set_aside = 0, b"", 0

    def read(self) -> None:
        """Read what is new."""
        try:
            with open(self.path, "rb", opener=plain) as file:
                file.seek(self.offset - len(self.tail))
                if not self.offset or file.read(len(self.tail)) != self.tail:
                    self._begin()
                    file.seek(0)
                while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                    self.offset += len(line)
                    self.tail = line[-TAIL_BYTES:]
                    try:
                        self.add(line)
                    except ValueError:
                        self.set_aside += 1
        except FileNotFoundError:
            self._begin()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}; check what is at "
                                  "this path") from error

    def _begin(self) -> None:
        self.offset, self.tail, self.set_aside = 0, b"", 0
        self.restart()


def signature(paths: list[Path], contents: bool = True) -> tuple:
    """Return what changes when one of these files is replaced or removed, and, with `contents`, written."""
    found = []
    for path in paths:
        try:
            facts = os.stat(path)
            found.append((str(path), facts.st_ino, contents and (facts.st_size, facts.st_mtime_ns)))
        except OSError:
            found.append((str(path), None))
    return tuple(found)


FRESH_SECONDS = 900  # since the last sign of life of a run on another machine, which may be evaluating
KILLED = "ended without a word (killed, or the machine failed)"


def holder_runs(lock: Path) -> Optional[bool]:
    """Whether the process whose name is in a run's lock runs; None if that is another machine's.

    The lock is not tried, because a job that starts at that moment would find it taken.
    """
    try:
        named = re.fullmatch(r"process (\d+) on (.+)", read_text(lock).strip())
    except (OSError, ValueError):
        return False
    if not named:
        return False
    if named[2] != socket.gethostname():
        return None
    try:
        opened = os.listdir(f"/proc/{named[1]}/fd")
    except PermissionError:  # another user's process
        return True
    except OSError:
        return False
    for descriptor in opened:  # another process may have its number by now
        with suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{named[1]}/fd/{descriptor}"), os.stat(lock)):
                return True
    return False


class Ending(NamedTuple):
    """What the newest process of a run left."""

    reason: Optional[str]  # of its end; None: it runs, was killed, or is of an older version
    has_events: bool  # so that an end would have been recorded
    last_sign: Optional[float]  # the time of its last sign of life


def run_state(folder: Path, ending: Ending, step: int, max_steps: int) -> tuple[str, str]:
    """The state of a run as in the page's data, and the sentence that tells it."""
    reason, last_sign = ending.reason, ending.last_sign
    done = f"{step:,} of {max_steps:,} steps"
    running = holder_runs(folder / "run.lock") if reason is None else False
    if running:
        return "running", f"running: {done} are done"
    if reason is None and running is None and last_sign:
        silent = time.time() - last_sign
        if silent < FRESH_SECONDS:
            return "running", f"running on another machine: {done} are done"
        return "unknown", (f"no sign of life for {duration(silent)} after {done}; it ran on another machine, "
                           "where it may go on")
    if reason == "finished" or (reason is None and step >= max_steps > 0):
        return "finished", f"finished after {done}"
    if reason == "early stopping":
        return "finished", f"stopped early after {done}"
    if reason == "stopped by a signal":
        return "stopped", f"stopped by a signal after {done}"
    if reason:
        return "failed", f"failed after {done}: {reason}"
    if ending.has_events:
        return "failed", f"{KILLED} after {done}"
    return "stopped", f"not running; {done} are done"


Event = dict[str, Any]
CLOCK_SECONDS = 1.0  # a smaller step back of the clock is not reported
PARTS = ("steps", "evaluation", "saving", "start-up", "repeated steps", "away", "other")


@dataclass
class Measured:
    """What the lines of metrics.jsonl say of one process."""

    steps_seconds: float = 0.0
    first_time: Optional[float] = None  # of the first line with steps
    first_seconds: float = 0.0  # of the steps before that line
    last_time: Optional[float] = None
    last_step: int = 0
    clock_steps: list[tuple[int, float]] = field(default_factory=list)  # see `clock_steps`

    def add(self, step: int, time: float, step_seconds: float) -> None:
        """Count a logged line."""
        seconds = max(0.0, step_seconds) * max(0, step - self.last_step)
        self.steps_seconds += seconds
        if self.first_time is None and seconds:
            self.first_time, self.first_seconds = time, seconds
        if self.last_time is not None and time < self.last_time - CLOCK_SECONDS:
            self.clock_steps.append((step, self.last_time - time))
        self.last_time, self.last_step = time, step


def split_processes(events: list[Event]) -> list[list[Event]]:
    """The events of each process, its start first."""
    processes: list[list[Event]] = []
    for event in events:
        if event["event"] == "start":
            processes.append([])
        if processes:
            processes[-1].append(event)
    return processes


def end_of(process: list[Event]) -> Optional[Event]:
    """The event that says why a process ended; None if it was killed, or runs."""
    return next((event for event in process if event["event"] == "end"), None)


def last_sign(process: list[Event], measured: Measured, following: Optional[Event]) -> float:
    """The time of the last sign of life of a process."""
    if end := end_of(process):
        return end["time"]
    previous = (following or {}).get("previous_time") or 0.0
    return max([event["time"] for event in process] + [measured.last_time or 0.0, previous])


def elapsed(processes: list[list[Event]], measured: list[Measured]) -> float:
    """The seconds from a run's first start to its last sign of life."""
    seconds, before = 0.0, None
    for index, process in enumerate(processes):
        following = processes[index + 1][0] if index + 1 < len(processes) else None
        start, lasted = process[0]["time"], last_sign(process, measured[index], following)
        seconds += max(0.0, lasted - start) + max(0.0, start - (start if before is None else before))
        before = lasted
    return seconds


def clock_steps(processes: list[list[Event]], measured: list[Measured]) -> Iterator[tuple[int, float]]:
    """Yield where the clock stepped back: the step that followed, and by how many seconds at least."""
    for index, (process, lines) in enumerate(zip(processes, measured)):
        events = [(after["step"], before["time"] - after["time"]) for before, after in pairwise(process)]
        yield from lines.clock_steps or [back for back in events if back[1] > CLOCK_SECONDS]
        if index + 1 < len(processes):
            following = processes[index + 1][0]
            back = last_sign(process, lines, following) - following["time"]
            if back > CLOCK_SECONDS:
                yield following["step"], back


def goodput(processes: list[list[Event]], measured: list[Measured]) -> Optional[dict[str, Any]]:
    """The goodput of a run as in the page's data; None if nothing is known of its time.

    Args:
        measured: what the lines of metrics.jsonl that are left say of each process.
    """
    if not any(each.steps_seconds for each in measured):
        return None
    parts = dict.fromkeys(PARTS, 0.0)
    interruptions = []
    for index, process in enumerate(processes):
        following = processes[index + 1][0] if index + 1 < len(processes) else None
        lasted = last_sign(process, measured[index], following)
        own = parts_of(process, measured[index], following, lasted)
        for name, seconds in own.items():
            parts[name] += seconds
        reason = (end_of(process) or {}).get("reason")
        if following and reason != "finished":
            parts["away"] += max(0.0, began(following) - lasted)
            interruptions.append(interruption(following, lasted, reason, measured[index].last_step))
    seconds = sum(parts.values())
    return {"share": parts["steps"] / seconds if seconds else 0.0, "seconds": seconds,
            "parts": [{"name": name, "seconds": part} for name, part in parts.items()],
            "interruptions": interruptions}


def began(start: Event) -> float:
    """When a process began: before its start event, if that says how long its set-up took."""
    return start["time"] - max(0.0, start.get("seconds") or 0.0)


def parts_of(process: list[Event], measured: Measured, following: Optional[Event],
             lasted: float) -> dict[str, float]:
    """How a process spent its time.

    Args:
        following: the start of the next one.
        lasted: the time of its last sign of life.
    """
    start = process[0]
    kept_until, kept = lasted, process
    previous = (following or {}).get("previous_step")
    if previous is not None and following["step"] < previous:
        kept = [event for event in process if event["step"] <= following["step"]]
        saved = [event["time"] for event in kept if event["event"] == "save"]
        reached = max([*saved[-1:], measured.last_time or start["time"]])
        kept_until = min(max(start["time"], reached), lasted)
    sums = {"evaluation": 0.0, "saving": 0.0}
    before_first_line = measured.first_seconds
    for event in kept:
        if name := {"evaluation": "evaluation", "save": "saving"}.get(event["event"]):
            seconds = max(0.0, event.get("seconds") or 0.0)
            sums[name] += seconds
            if measured.first_time and event["time"] <= measured.first_time:
                before_first_line += seconds
    left = max(0.0, kept_until - start["time"] - measured.steps_seconds - sum(sums.values()))
    start_up = 0.0
    if measured.first_time:
        start_up = min(left, max(0.0, measured.first_time - before_first_line - start["time"]))
    return {"steps": measured.steps_seconds, **sums, "start-up": start_up + start["time"] - began(start),
            "repeated steps": max(0.0, lasted - kept_until), "other": left - start_up}


def interruption(following: Event, lasted: float, reason: Optional[str], last_step: int) -> dict[str, Any]:
    """An interruption as in the page's data, from the start that followed it."""
    step = max(following.get("previous_step") or 0, last_step, following["step"])
    is_back = following["time"] < lasted - CLOCK_SECONDS
    return {"time": lasted, "step": step, "resumed_from": following["step"],
            "resumed_time": following["time"], "reason": reason or KILLED,
            "away_seconds": None if is_back else max(0.0, began(following) - lasted),
            "repeated_steps": max(0, step - following["step"])}


MOST_VALUES = 12_000  # of all GPUs together
MOST_WATTS = 1e9
MOST_MARKS = 1000  # the newest
COLUMNS = ("time", "gpu", "watts", "phase", "step")
FAST_SECONDS = 0.3  # samples that are closer than this belong to a window of POWER_HZ


class PowerTrace:
    """The power files of a run, read as they grow; of a long trace, each bucket of time keeps its extremes.

    Windows of fast samples have buckets of their own, so that they stay sharp in a trace of days.
    """

    def __init__(self, folder: Path):
        self.folder, self.files, self.found = folder, {}, ()
        self._restart()

    def _restart(self) -> None:
        self.start: Optional[float] = None
        self.gpus: dict[str, tuple[Curve, Curve]] = {}  # slow and fast samples; x in ms since the start
        self.before: dict[str, float] = {}  # the time of each GPU's last sample
        self.marks: deque = deque(maxlen=MOST_MARKS)
        self.waiting: dict[tuple[str, bool], list[tuple[int, float]]] = {}  # not in the curves yet

    def paths(self) -> list[Path]:
        """The power files, oldest first: ..., power.1.csv, power.csv, then those of other ranks."""
        def order(path: Path) -> tuple[str, int]:
            stem, _, number = path.stem.partition(".")
            return stem, -int(number) if number.isdecimal() else 0

        return sorted(self.folder.glob("power*.csv"), key=order)

    def read(self) -> None:
        """Read what is new; everything again if a file was rotated. Raises CheckpointError."""
        paths = self.paths()
        found = signature(paths, contents=False)
        if self.found != found:
            self.found = found
            self._restart()
            self.files = {path: self._file(path) for path in paths}
        for file in self.files.values():
            file.read()
            for (gpu, is_fast), points in self.waiting.items():
                x, y = zip(*sorted(points))
                self.gpus[gpu][is_fast].add(x, np.array(y))
            self.waiting = {}

    def _file(self, path: Path) -> GrowingFile:
        rank = path.stem.partition(".")[0].removeprefix("power").removeprefix("-rank-")
        columns: list[str] = []

        def add(line: bytes) -> None:
            values = line.decode(errors="replace").rstrip("\r\n").split(",")
            if values[0] == "time":
                columns[:] = values
            elif len(values) != len(columns) or not {*COLUMNS} <= {*columns}:
                raise ValueError("not the columns of a trace")
            else:
                self._add(dict(zip(columns, values)), rank)

        def restart() -> None:
            columns.clear()

        return GrowingFile(path, restart, add)

    def _add(self, row: dict[str, str], rank: str) -> None:
        time, step, watts = float(row["time"]), int(row["step"] or 0), float(row["watts"] or "0")
        if not (abs(time) < MOST_SECONDS and 0 <= step < 1 << 53 and abs(watts) < MOST_WATTS):
            raise ValueError("not a time, a step and a power")
        watts = watts if row["watts"] else np.nan
        self.start = time if self.start is None else self.start
        if not row["gpu"]:
            self.marks.append([round(time - self.start, 6), row["phase"], step])
            return
        device = f"GPU {row['gpu']}" if row["gpu"].isdecimal() else row["gpu"]
        gpu = f"rank {rank}, {device}" if rank else row["gpu"]
        self.gpus.setdefault(gpu, (Curve(), Curve()))
        is_fast = time - self.before.get(gpu, -np.inf) < FAST_SECONDS
        self.before[gpu] = time
        self.waiting.setdefault((gpu, is_fast), []).append((round(1000 * (time - self.start)), watts))

    def data(self, share: float = 1.0) -> Optional[dict[str, Any]]:
        """The trace as in the page's data; None without a sample.

        Args:
            share: of the values and marks that a page may have.
        """
        if not self.gpus:
            return None
        most = max(4, round(share * MOST_VALUES / 2 / len(self.gpus)))
        rows = sorted((*self._rows(False, most), *self._rows(True, most)), key=lambda row: row[0])
        columns = {gpu: [rounded(row[number]) for row in rows] for number, gpu in enumerate(self.gpus, 1)}
        return {"files": [path.name for path in self.files], "start": self.start,
                "time": [round(row[0] / 1000, 3) for row in rows], "gpus": columns,
                "marks": [*self.marks][-round(share * MOST_MARKS):]}

    def _rows(self, fast: bool, most: int) -> list[list[float]]:
        """(ms, watts of each GPU) of the slow or the fast samples: of a bucket one row, or its extremes."""
        curves = [pair[fast] for pair in self.gpus.values()]
        points = [curve.points(most) for curve in curves]
        spans = [np.ptp(each.x) for each in points if len(each.x)]
        width = max([1.0, *(2 * span / most for span in spans)])
        buckets: dict[int, list[list]] = {}
        for gpu, each in enumerate(points):
            for x, low, high in np.stack((each.x, each.low, each.high), 1).tolist():
                inside = buckets.setdefault(int(x // width), [[] for _ in curves])[gpu]
                inside += [(x, low), (x, high)] if low < high else [(x, low)]
        rows = []
        for index, inside in buckets.items():
            first = min(x for own in inside for x, _ in own)
            several = max(map(len, inside)) > 1
            kept = [_extremes(own) for own in inside]
            rows.append((first, *(pair[0] for pair in kept)))
            if several:
                rows.append(((first + (index + 1) * width) / 2, *(pair[1] for pair in kept)))
        if not rows:
            return []
        table = np.array(sorted(rows))
        for column in table.T[1:]:
            _fill(table[:, 0], column)
        return table.tolist()


def _fill(time: np.ndarray, watts: np.ndarray) -> None:
    """Interpolate where only other GPUs have a sample, but not where this one was not sampled for longer."""
    known = np.isfinite(watts)
    if known.sum() < 2:
        return
    at = time[known]
    after = np.searchsorted(at, time).clip(1, len(at) - 1)
    inside = (time >= at[0]) & (time <= at[-1]) & (np.diff(at)[after - 1] <= 3 * np.median(np.diff(at)))
    watts[:] = np.where(known | ~inside, watts, np.interp(time, at, watts[known]))


def _extremes(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The lowest and the highest value in the order of time, twice the same of one, NaN of none."""
    finite = [(x, y) for x, y in points if y == y]
    if not finite:
        return np.nan, np.nan
    pair = sorted((min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])))
    return pair[0][1], pair[1][1]


NOT_COMPARED = ("WORLD_SIZE", "RUN_NAME", "OUTPUT_DIR", "RESUME", "PRESET", "ALLOW_RESUME_MISMATCH")
TENSORS = TypeAdapter(dict[str, Tensor])  # the header of a safetensors file


def read_fields(path: Path, schema: type[BaseModel], aside: Counter[str]) -> dict[str, Any]:
    """The valid fields of the JSON object in a file of a run; empty if it is missing.

    Args:
        aside: counts what is not valid, by its description.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        aside[f"{path.name} ({error})"] += 1
        return {}
    try:
        schema.model_validate(content)
    except ValidationError as error:
        for name in {fault["loc"][0] for fault in error.errors(include_url=False, include_context=False)}:
            aside[f"{name} in {path.name}"] += 1
            del content[name]
    return content


def spelt(value: Any) -> str:
    """A setting's value as `.env` spells it; empty for none."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def setting_lines(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Every setting that the run's version had, with its default of today and its meaning."""
    known = {line.name: line for line in describe_settings()}
    order = {name: place for place, name in enumerate(known)}
    lines = []
    for name in sorted(settings, key=lambda name: order.get(name, len(order))):
        line, value = known.get(name), spelt(settings[name])
        default = Config.model_fields[name.lower()].default if line else None
        lines.append({"name": name, "value": value, "default": spelt(default),
                      "changed": line is not None and settings[name] != default,
                      "meaning": line.meaning if line else "of another version of Paddock"})
    return lines


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The settings that both have with different values; names and places are left out."""
    return [name for name in after if name in before and before[name] != after[name]
            and name not in NOT_COMPARED]


def segments(folder: Path, aside: Optional[Counter[str]] = None) -> Iterator[dict[str, Any]]:
    """Yield each part of a run: its first step, its ranks, and which settings changed there."""
    before = None
    for path in sorted((folder / "configs").glob("step-*.json")):
        first = path.stem.removeprefix("step-")
        if not first.isdecimal():
            continue
        settings = read_fields(path, RunSettings, Counter() if aside is None else aside)
        names = differing(before, settings) if before is not None else []
        yield {"step": int(first), "world_size": settings.get("WORLD_SIZE"),
               "changes": [{"name": name, "before": spelt(before[name]), "after": spelt(settings[name])}
                           for name in names]}
        before = settings


def sources(folder: Path, settings: dict[str, Any], aside: Counter[str]) -> list[dict[str, Any]]:
    """What a run reads: the table of a mixture, else one line."""
    fields = {"label": "source", "share": "share", "tokens": "tokens", "documents": "documents",
              "epochs": "passes"}
    table = read_fields(folder / "data.json", RunData, aside).get("sources")
    if table:
        return [{label: source.get(name) for label, name in fields.items()} for source in table]
    data = settings.get(f"{settings.get('TRAINING_STAGE', '').upper()}_DATA_PATH")
    return [{"label": str(data), "share": 1.0}] if data else []


def parameters_in(checkpoint: Optional[Path]) -> Optional[int]:
    """The parameters in a checkpoint's weight files, from their headers alone; None if it has none.

    Source: the format of safetensors: the header's length as 8 bytes, then the header in JSON.
    """
    total = 0
    for path in checkpoint.glob("*model*.safetensors") if checkpoint else ():
        try:
            with open(path, "rb", opener=plain) as file:
                size = int.from_bytes(file.read(8), "little")
                header = TENSORS.validate_json(file.read(min(LARGEST_TEXT, size)))
        except (OSError, ValueError):  # pruned meanwhile, or damaged
            return None
        total += sum(math.prod(tensor.shape) for name, tensor in header.items() if name != "__metadata__")
    return total or None


LOGS = ("events", "metrics", "ledger", "samples")  # in this order: the starts divide the metrics
MOST_SAMPLES, MOST_ALARMS = 40, 200
SAMPLE_CHARACTERS = 2000
LINES_AT_ONCE = 1000
SPEEDS = ("tokens_per_second", "mfu")
TIMES = ("time", "step_seconds")
NOT_DRAWN = {"step", "counted"}
RECENT_LINES = 50  # from which the time that is left is estimated


class RunReader:
    """A run's folder; `read` reads what is new, `data` gives it."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = Path(folder), name
        self.check_folder()
        self._read_settings()
        if not (self.folder / "metrics.jsonl").exists() and "TRAINING_STAGE" not in self.settings:
            bad = ", ".join(self.aside)
            raise CheckpointError(f"{folder} is not a run: it has neither a metrics.jsonl nor a config.json "
                                  f"with the settings of a run{bad and f'; these are not valid: {bad}'}")
        self.files = [self._log(name) for name in LOGS]
        self.power = PowerTrace(self.folder)
        self.bad_scores: Counter[str] = Counter()  # lines of evaluations.jsonl, if it was read

    def _log(self, name: str) -> GrowingFile:
        path, add = self.folder / f"{name}.jsonl", getattr(self, f"_add_{name}")
        schema = SCHEMAS[path.name]
        return GrowingFile(path, getattr(self, f"_restart_{name}"),
                           lambda line: add(schema.model_validate_json(line)))

    def check_folder(self) -> None:
        """Raise CheckpointError if there is no such folder (any more)."""
        if not self.folder.is_dir():
            raise CheckpointError(f"there is no run {str(self.folder)!r}: name the folder of a run, or a run "
                                  "in OUTPUT_DIR")

    def read(self) -> None:
        """Read what is new. Raises CheckpointError if a file cannot be read."""
        self.check_folder()
        self._read_settings()
        for file in self.files:
            file.read()
        self._fill_curves()
        self.power.read()

    def signature(self) -> tuple:
        """What differs when the run has written something, or has ended."""
        others = [self.folder / "config.json", self.folder / "data.json", self.folder / "evaluations.jsonl"]
        logs = [file.path for file in self.files]
        return holder_runs(self.folder / "run.lock"), signature([*logs, *others, *self.power.paths()])

    def _read_settings(self) -> None:
        self.aside: Counter[str] = Counter()  # what is not valid in files other than logs
        self.settings = read_fields(self.folder / "config.json", RunSettings, self.aside)
        self.segments = [*segments(self.folder, self.aside)]
        self.sources = sources(self.folder, self.settings, self.aside)

    def item_scores(self) -> Iterator[ItemScores]:
        """Yield the run's evaluations item by item."""
        self.bad_scores = Counter()
        return read_item_scores(self.folder / "evaluations.jsonl", self.bad_scores)

    def set_aside(self) -> list[str]:
        """What was not valid in the run's files and is left out, each with its count."""
        files = [*self.files, *self.power.files.values()]
        lines = {file.path.name: file.set_aside for file in files} | self.bad_scores
        return [*(f"{count} {word}{'s' if count > 1 else ''} of {name}"
                  for word, counts in (("line", lines), ("value", self.bad_values))
                  for name, count in counts.items() if count), *self.aside]

    # ------------------------------------------------------------------------------------- the logs

    def _restart_events(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []
        self.resumed: list[tuple[int, int]] = []  # (step, number) of the starts from which lines may be left

    def _add_events(self, line: EventLine) -> None:
        event = line.model_dump(exclude_unset=True)
        self.events.append(event)
        if line.event == "start":
            while self.resumed and self.resumed[-1][0] >= line.step:  # its lines were written again
                self.resumed.pop()
            self.resumed.append((line.step, len(self.starts)))
            self.starts.append(event)

    def _restart_metrics(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.newest, self.measured = -1, {}  # the newest step; by the number of the process
        self.recent: deque = deque(maxlen=RECENT_LINES)  # (step, time)
        self.waiting: list[dict[str, Any]] = []  # lines that are not in the curves yet
        self.bad_values: Counter[str] = Counter()  # by the metric's name
        self.clock: Optional[tuple[float, float]] = None  # time of the last line, seconds since the first one

    def _add_metrics(self, line: Line) -> None:
        if line.step <= self.newest:
            raise ValueError("the step is not behind the last one")
        self.newest, entry = line.step, {"step": line.step}
        for name, value in line.model_extra.items():
            entry[name] = number(value, MOST_SECONDS if name in TIMES else sys.float_info.max)
            if value is not None and entry[name] is None:
                self.bad_values[name] += 1
                del entry[name]
        if (at := entry.get("time")) is not None:
            before, since = self.clock or (at, 0.0)
            self.clock = at, since + max(0.0, at - before)
            entry["time"] = self.clock[1]
            self._measure(line.step, at, entry.get("step_seconds") or 0.0)
        self.waiting.append(entry)
        if len(self.waiting) >= LINES_AT_ONCE:
            self._fill_curves()

    def _fill_curves(self) -> None:
        names = dict.fromkeys(name for entry in self.waiting for name in entry if name not in NOT_DRAWN)
        for name in names:
            having = [entry for entry in self.waiting if name in entry]
            values = np.array([entry[name] for entry in having], np.float64)
            self.curves.setdefault(name, Curve()).add([entry["step"] for entry in having], values)
        self.waiting = []

    def _measure(self, step: int, at: float, step_seconds: float) -> None:
        """Count a line for the process that wrote it: the last one that began before its step.

        The order of the lines decides, because the clock may have been set back.
        """
        self.recent.append((step, self.clock[1]))
        place = bisect_left(self.resumed, (step, -1)) - 1
        if place < 0 and (step > 0 or not self.resumed or self.resumed[0][0] > 0):
            return  # of a version without events
        process = self.resumed[max(0, place)][1]
        if process not in self.measured:
            start = self.starts[process]
            self.measured[process] = Measured(last_step=start["step"], last_time=start["time"])
            self.recent = deque([self.recent[-1]], maxlen=RECENT_LINES)
        self.measured[process].add(step, at, step_seconds)

    def _restart_ledger(self) -> None:
        self.bad_steps: deque = deque(maxlen=MOST_ALARMS)
        self.ledger_step = 0

    def _add_ledger(self, line: LedgerLine) -> None:
        self.ledger_step = line.step
        if not line.updated or "spike" in line.model_extra:
            self.bad_steps.append(line)

    def _restart_samples(self) -> None:
        self.samples: list[dict[str, Any]] = []

    def _add_samples(self, line: SampleLine) -> None:
        self.samples.append({"step": line.step, "prompt": line.prompt[:SAMPLE_CHARACTERS],
                             "text": line.text[:SAMPLE_CHARACTERS]})

    # ------------------------------------------------------------------------------------- its parts

    @property
    def step(self) -> int:
        """The newest logged step."""
        return max(0, self.newest)

    @property
    def max_steps(self) -> int:
        """MAX_STEPS."""
        return self.settings.get("MAX_STEPS") or 0

    def processes(self) -> tuple[list[list[dict]], list[Measured]]:
        """The events of each process, and what metrics.jsonl says of it."""
        processes = split_processes(self.events)
        return processes, [self.measured.get(number, Measured()) for number in range(len(processes))]

    def state(self) -> tuple[str, str]:
        """The run's state and its sentence."""
        processes, measured = self.processes()
        if processes:
            end = end_of(processes[-1]) or {}
            ending = Ending(end.get("reason"), True, last_sign(processes[-1], measured[-1], None))
        else:
            path = self.folder / "metrics.jsonl"
            ending = Ending(None, False, path.stat().st_mtime if path.exists() else None)
        return run_state(self.folder, ending, self.step, self.max_steps)

    def data(self, most_points: int, share: float = 1.0, all_settings: bool = True) -> dict[str, Any]:
        """The run as in the page's data.

        Args:
            most_points: of each curve.
            share: of the samples, alarms and power values that a page may have.
            all_settings: list also those at their defaults.
        """
        state, sentence = self.state()
        eta = None
        if state == "running" and len(self.recent) > 1:
            (first, began), (last, ended) = self.recent[0], self.recent[-1]
            eta = (self.max_steps - last) * (ended - began) / max(1, last - first)
        curves = {name: as_json(curve.points(most_points)) for name, curve in self.curves.items()}
        recent = {name: rounded(np.median(self.curves[name].recent)) for name in SPEEDS if self.value(name)}
        best = self.curves["val_loss"].lowest if "val_loss" in self.curves else None
        samples = self.chosen_samples(max(4, round(MOST_SAMPLES * share)))
        alarms = self.alarms()[-max(10, round(MOST_ALARMS * share)):]
        settings = [line for line in setting_lines(self.settings) if all_settings or line["changed"]]
        return {"name": self.name, "state": state, "sentence": sentence, "step": self.step,
                "max_steps": self.max_steps, "eta_seconds": eta, "facts": [*self.facts()], "curves": curves,
                "recent": recent, "best": best, "failure": self.failure() if state == "failed" else None,
                "samples": samples, "settings": settings, "segments": self.segments,
                "sources": self.sources, "goodput": goodput(*self.processes()),
                "alarms": alarms, "power": self.power.data(share)}

    def value(self, name: str) -> Optional[float]:
        """The newest value of a curve; None if there is none."""
        newest = self.curves[name].newest if name in self.curves else None
        return newest and newest[0]

    def failure(self) -> dict[str, Any]:
        """What ended the run, what is saved, and the command that takes the step again."""
        newest, end = self.newest_checkpoint(), {}
        if self.starts:
            end = end_of(self.processes()[0][-1]) or {}
        step = end["step"] if end else max([self.step, self.ledger_step])
        where, command = f"after step {step:,}", None
        if (self.folder / "debug" / f"step-{step + 1:08d}").is_dir():
            where, run = f"in step {step + 1:,}", shlex.quote(str(self.folder))
            command = f"python scripts/replay_step.py {run} --step {step + 1}"
        saved = f"{newest.name} in checkpoints/" if newest else "no checkpoint"
        return {"where": where, "reason": end.get("reason") or KILLED, "saved": saved, "command": command}

    def facts(self) -> Iterator[list[str]]:
        """Yield what describes the run in a word each: label and text."""
        settings = self.settings
        stage = settings.get("TRAINING_STAGE", "")
        adapted = ", LoRA" if settings.get("LORA_ENABLED") else ""
        distilled = ", distillation" if settings.get("DISTILLATION_ENABLED") else ""
        yield ["stage", f"{stage}{adapted}{distilled}"]
        if count := parameters_in(self.newest_checkpoint()):
            yield ["trained parameters" if adapted else "parameters", f"{count:,}"]
        if tokens := self.value("tokens_seen"):
            yield ["tokens", f"{tokens:,.0f}"]
        if self.starts:
            yield ["started", time.strftime("%Y-%m-%d %H:%M", time.localtime(self.starts[0]["time"]))]
            yield ["time", duration(elapsed(*self.processes()))]
        start = {"world_size": settings.get("WORLD_SIZE"), **(self.starts[-1] if self.starts else {})}
        for label, name in (("device", "device"), ("host", "host"), ("ranks", "world_size"),
                            ("torch", "torch"), ("Paddock", "paddock")):
            if start.get(name):
                yield [label, str(start[name])]
        if checkpoint := self.newest_checkpoint():
            yield ["newest checkpoint", checkpoint.name]
        if bad := self.set_aside():
            yield ["not valid, left out", ", ".join(bad)]

    def newest_checkpoint(self) -> Optional[Path]:
        """The newest checkpoint; None if there is none."""
        found = (self.folder / "checkpoints").glob("step-*")
        return max((path for path in found if path.name[5:].isdecimal()), default=None)

    def chosen_samples(self, most: int) -> list[dict[str, Any]]:
        """At most so many samples, of evenly distributed steps, those of the last one among them."""
        steps = sorted({sample["step"] for sample in self.samples}, reverse=True)
        most_steps = max(1, most * len(steps) // max(1, len(self.samples)))
        chosen = {*steps[::-(-len(steps) // most_steps) or 1]}
        return [sample for sample in self.samples if sample["step"] in chosen][-most:]

    def alarms(self) -> list[dict[str, Any]]:
        """What went wrong, in the order of the steps."""
        found = [*map(alarm_of_step, self.bad_steps), *filter(None, map(alarm_of_event, self.events)),
                 *map(alarm_of_clock, clock_steps(*self.processes()))]
        return sorted(found, key=lambda alarm: alarm["step"])


def alarm_of_step(line: LedgerLine) -> dict[str, Any]:
    """What the ledger says of a step that was not like the others."""
    left_out = "" if line.updated else "; its update was left out"
    if "spike" in line.model_extra:
        score = number(line.model_extra["spike"])
        above = f", {score:.1f} robust standard deviations above the recent ones" if score else ""
        return {"step": line.step, "kind": "loss spike", "text": f"the loss was {line.loss}{above}{left_out}"}
    what = "the gradient was not finite" if line.grad_norm is None else f"the loss was {line.loss}"
    return {"step": line.step, "kind": "update left out", "text": f"{what}{left_out}"}


def alarm_of_clock(back: tuple[int, float]) -> dict[str, Any]:
    """The alarm of a clock that was set back by so many seconds before a step."""
    step, seconds = back
    text = f"the clock stepped back by {duration(seconds)}, and the time that passed meanwhile is not known"
    return {"step": step, "kind": "clock", "text": text}


def alarm_of_event(event: dict[str, Any]) -> Optional[dict[str, Any]]:
    """The alarm that an event is; None if it is none."""
    kind = event["event"]
    if kind in ("start", "end", "save", "evaluation"):
        return None
    rank = f"rank {event.get('rank')}" + (f" on {event['host']}" if event.get("host") else "")
    if kind == "slow rank" and event.get("ratio") is not None:
        text = f"{rank} takes {event['ratio']:.2f} times as long as the others in {event.get('phase')}"
    elif kind == "slow rank ended":
        text = f"{rank} is as fast as the others again in {event.get('phase')}"
    else:
        facts = [f"{name}: {value}" for name, value in event.items() if name not in ("time", "step", "event")]
        text = event.get("text") or ", ".join(facts) or kind
    return {"step": event["step"], "kind": kind, "text": str(text)}
