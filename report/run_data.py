"""A run's folder, read as it grows, as the part of the page's data that tells of this run."""

import shlex
import sys
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np

from checkpoint.item_scores import ItemScores, read_item_scores
from checkpoint.schema import (
    MOST_SECONDS,
    SCHEMAS,
    EventLine,
    LedgerLine,
    Line,
    RunSettings,
    SampleLine,
    number,
)
from common.errors import CheckpointError
from common.text import duration
from report.curves import Curve, as_json, rounded
from report.goodput import Measured, clock_steps, elapsed, end_of, goodput, last_sign, split_processes
from report.lines import GrowingFile, signature
from report.power import PowerTrace
from report.run_facts import parameters_in, read_fields, segments, setting_lines, sources
from report.run_state import KILLED, Ending, holder_runs, run_state

LOGS = ("events", "metrics", "ledger", "samples")  # in this order: the starts divide the metrics
MOST_SAMPLES, MOST_ALARMS = 40, 200
SAMPLE_CHARACTERS = 2000
LINES_AT_ONCE = 1000
SPEEDS = ("tokens_per_second", "mfu")
TIMES = ("time", "step_seconds")
NOT_DRAWN = {"step", "counted"}
RECENT_LINES = 50  # from which the time that is left is estimated


class RunReader:
    """A run's folder; `read` reads what is new, `data` gives it.

    Raises:
        CheckpointError: this is no run, or a file of it cannot be read.
    """

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
