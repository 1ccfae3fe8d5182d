"""Read a run's folder incrementally, and build its part of the page's data."""

import math
import os
import re
import shlex
import socket
import sys
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Optional

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from checkpoint import schema
from common.errors import CheckpointError
from common.files import LARGEST_TEXT, plain, read_json, read_text
from common.text import PROGRAM, counted, duration, setting_text
from config import Config
from extensions.report.curves import Curve, as_json, rounded
from extensions.report.goodput import KILLED, Process, goodput
from extensions.report.health import HEADLINES, LOSS, alarms_and_downtime, learning
from extensions.report.items import item_scores, trends
from extensions.report.numbers import number_text, without_control_tokens
from plan.command_line import describe_settings
from run.folder import segment_files

TAIL_BYTES = 256  # compared to detect that a log was replaced
NOT_COMPARED = ("WORLD_SIZE", "RUN_NAME", "OUTPUT_DIR", "RESUME", "PRESET", "ALLOW_RESUME_MISMATCH")


class LogFile:
    """A log to which another process may append, or which it replaces when it resumes the run.

    A missing file has no lines. A last line without a line end is incomplete.
    """

    def __init__(self, path: Path):
        self.path, self.offset, self.tail = path, 0, b""
        self.invalid = 0  # number of invalid lines so far

    def is_replaced(self) -> bool:
        """Return whether the file no longer contains what was read from it."""
        with self._open() as file:
            file.seek(self.offset - len(self.tail))
            return file.read(len(self.tail)) != self.tail

    def new_lines(self) -> Iterator[tuple[bytes, Optional[schema.Line]]]:
        """Yield the complete lines since the last call, as `schema.read_lines` does. Raises OSError."""
        most = schema.MAX_LINE_BYTES
        with self._open() as file:
            file.seek(self.offset)
            while (line := file.readline(most)).endswith(b"\n") or len(line) == most:
                self.offset, self.tail = self.offset + len(line), line[-TAIL_BYTES:]
                entry = schema.parse_line(line, self.path.name)
                self.invalid += entry is None
                yield line, entry

    def _open(self) -> BinaryIO:
        try:
            return open(self.path, "rb", opener=plain)
        except FileNotFoundError:
            return BytesIO()


class RunSettings(schema.Open):
    """Settings in a run's config.json that the report reads."""

    TRAINING_STAGE: str = ""
    MAX_STEPS: schema.Count = 0
    WORLD_SIZE: Optional[schema.WorldSize] = None
    HELLASWAG_NAME: str = "HellaSwag"
    LORA_ENABLED: bool = False
    DISTILLATION_ENABLED: bool = False


class Source(schema.Open):
    """An entry of `sources` in a run's data.json."""

    source: str
    share: Optional[schema.Number] = None
    tokens: Optional[schema.Number] = None
    documents: Optional[schema.Number] = None
    passes: Optional[schema.Number] = None


class RunData(schema.Open):
    """A run's data.json."""

    sources: Optional[list[Source]] = None


class Tensor(schema.Open):
    """A tensor in the header of a safetensors file."""

    shape: list[schema.Count] = []


TENSORS = TypeAdapter(dict[str, Tensor])


def read_fields(path: Path, model: type[BaseModel], aside: Counter[str]) -> dict[str, Any]:
    """Return the valid fields of a run's JSON file, and count the others in `aside`. It may be missing."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        aside[f"{path.name} ({error})"] += 1
        return {}
    try:
        model.model_validate(content)
    except ValidationError as error:
        for name in {fault["loc"][0] for fault in error.errors(include_url=False, include_context=False)}:
            aside[f"{name} in {path.name}"] += 1
            del content[name]
    return content


def setting_lines(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every recorded setting with its current default and meaning."""
    known = {line.name: line for line in describe_settings()}
    lines = []
    # Facts, in lower case, are no settings.
    others = sorted(filter(str.isupper, settings.keys() - known.keys()))
    for name in [*filter(settings.__contains__, known), *others]:
        default = Config.model_fields[name.lower()].default if name in known else None
        lines.append({"name": name, "value": setting_text(settings[name]), "default": setting_text(default),
                      "changed": name in known and settings[name] != default,
                      "meaning": known[name].meaning if name in known else "from another version of Paddock"})
    return lines


def segments(folder: Path, aside: Optional[Counter[str]] = None) -> Iterator[dict[str, Any]]:
    """Yield the first step, number of ranks and changed settings of each start of a run."""
    before: dict[str, Any] = {}
    for first, path in segment_files(folder):
        fields = read_fields(path, RunSettings, Counter() if aside is None else aside)
        settings = {name: value for name, value in fields.items() if name.isupper()}  # and not the plan
        changes = [{"name": name, "before": setting_text(before[name]), "after": setting_text(value)}
                   for name, value in settings.items()
                   if name in before and before[name] != value and name not in NOT_COMPARED]
        yield {"step": first, "world_size": settings.get("WORLD_SIZE"), "changes": changes}
        before = settings


def sources(folder: Path, settings: dict[str, Any], aside: Counter[str]) -> list[dict[str, Any]]:
    """Return the sources of a mixture, or a single source."""
    fields = {"label": "source", "share": "share", "tokens": "tokens", "documents": "documents",
              "epochs": "passes"}
    table = read_fields(folder / "data.json", RunData, aside).get("sources")
    if table:
        return [{label: source.get(name) for label, name in fields.items()} for source in table]
    data = settings.get(f"{settings.get('TRAINING_STAGE', '').upper()}_DATA_PATH")
    return [{"label": str(data), "share": 1.0}] if data else []


def parameters_in(checkpoint: Optional[Path]) -> Optional[int]:
    """Return the number of parameters in a checkpoint, from its safetensors headers; None without files."""
    total = 0
    for path in checkpoint.glob("*model*.safetensors") if checkpoint else ():
        try:
            with open(path, "rb", opener=plain) as file:
                size = int.from_bytes(file.read(8), "little")
                header = TENSORS.validate_json(file.read(min(LARGEST_TEXT, size)))
        except (OSError, ValueError):  # deleted while reading, or damaged
            return None
        total += sum(math.prod(tensor.shape) for name, tensor in header.items() if name != "__metadata__")
    return total or None


# ------------------------------------------------------------------------------------------- the run

# Events first: starts divide the metrics.
LOGS = ("events", "metrics", "ledger", "samples", "rollouts", "evaluations")
FRESH_SECONDS = 900  # since the last sign of life of a run on another machine, which may be evaluating
MOST_SAMPLES, MOST_ALARMS = 40, 200
SAMPLE_CHARACTERS = 2000
SPEEDS = ("tokens_per_second", "mfu")
TIMES = ("time", "step_seconds")
NOT_DRAWN = {"counted"}
RECENT_LINES = 50  # for the estimate of the remaining time


def holder_runs(lock: Path) -> Optional[bool]:
    """Return whether the process named in a lock file is running; None if it is on another machine.

    This does not try the lock, because a job that starts at the same time would find it taken.
    """
    try:
        holder = re.fullmatch(r"process (\d+) on (.+)", read_text(lock).strip())
    except (OSError, ValueError):
        return False
    if not holder:
        return False
    if holder[2] != socket.gethostname():
        return None
    try:
        for descriptor in Path("/proc", holder[1], "fd").iterdir():  # its number may have been reused
            with suppress(OSError):
                if descriptor.samefile(lock):
                    return True
    except PermissionError:  # another user's process
        return True
    except OSError:
        pass
    return False


def launcher_runs(start: dict[str, Any]) -> bool:
    """Return whether the launcher that may start a run again, according to its `start` event, is running."""
    if start.get("host") == socket.gethostname() and start.get("launcher"):
        with suppress(OSError):
            return b"launch.py" in Path("/proc", str(start["launcher"]), "cmdline").read_bytes()
    return False


def shown_prompt(line: Any) -> str:
    """Return a line's recorded prompt as a page shows it."""
    return without_control_tokens(line.prompt)[:SAMPLE_CHARACTERS]


class RunReader:
    """A run's folder; `read` reads new lines, `data` returns the page's data."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = Path(folder), name
        self._read_settings()
        if not (self.folder / "metrics.jsonl").exists() and "TRAINING_STAGE" not in self.settings:
            bad = ", ".join(self.aside)
            raise CheckpointError(f"{folder} is not a run: it has neither metrics.jsonl nor a config.json "
                                  f"with a run's settings{bad and f'; invalid: {bad}'}")
        self._restart()

    def _read_settings(self) -> None:
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a run; {PROGRAM} runs lists the runs")
        self.aside: Counter[str] = Counter()  # invalid entries in files other than logs
        self.settings = read_fields(self.folder / "config.json", RunSettings, self.aside)
        self.hellaswag = self.settings.get("HELLASWAG_NAME", "HellaSwag")
        self.main = HEADLINES.get(self.settings.get("TRAINING_STAGE", ""), LOSS)  # the result that counts
        self.segments = [*segments(self.folder, self.aside)]
        self.sources = sources(self.folder, self.settings, self.aside)

    def _restart(self) -> None:
        self.logs = {name: LogFile(self.folder / f"{name}.jsonl") for name in LOGS}
        # events.jsonl
        self.events: list[dict[str, Any]] = []
        self.processes: list[Process] = []
        self.resumed: list[tuple[int, int]] = []  # (step, process) of starts whose lines remain
        # metrics.jsonl
        self.curves: dict[str, Curve] = {}
        self.newest = -1  # step
        self.recent: deque = deque(maxlen=RECENT_LINES)  # (step, time)
        self.bad_values: Counter[str] = Counter()  # by metric name
        self.clock: Optional[tuple[float, float]] = None  # time of the last line, seconds since the first one
        # ledger.jsonl, samples.jsonl and rollouts.jsonl
        self.bad_steps: deque[schema.LedgerLine] = deque(maxlen=MOST_ALARMS)
        self.ledger_step = 0
        self.samples: list[dict[str, Any]] = []
        self.rollout: dict[str, Any] = {}  # the newest, one of the samples
        # evaluations.jsonl
        self.trends = trends()
        self.items: dict[str, set[str]] = {}  # hashes of the items of each evaluation
        self.not_finite: list[dict[str, Any]] = []  # alarms

    def read(self) -> None:
        """Read new lines, or everything again if a resumed run replaced a log."""
        self._read_settings()
        try:
            if any(file.is_replaced() for file in self.logs.values()):
                self._restart()
            for name, file in self.logs.items():
                for _, entry in file.new_lines():
                    if entry:
                        getattr(self, f"_add_{name}")(entry)
        except OSError as error:
            raise CheckpointError(f"{error.filename or self.folder} cannot be read: "
                                  f"{error.strerror or error}; check this path") from error

    def range(self, low: int, high: int, most: int) -> dict[str, Any]:
        """Return the curves for steps `low` to `high` as JSON, with at most `most` points each."""
        return {name: as_json(curve.points(most, low, high)) for name, curve in self.curves.items()}

    def signature(self) -> tuple:
        """Return a value that changes when the run writes something or ends."""
        stamps = []
        for path in (self.folder / name for name in (*schema.SCHEMAS, "config.json", "data.json")):
            try:
                status = os.stat(path)
                stamps.append((path, status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                stamps.append((path,))
        restarts = bool(self.processes) and launcher_runs(self.processes[-1].events[0])
        return holder_runs(self.folder / "run.lock"), restarts, stamps

    def set_aside(self) -> list[str]:
        """Return descriptions of the invalid entries that were left out, with counts."""
        lines = {file.path.name: file.invalid for file in self.logs.values()}
        return [*(f"{counted(count, word)} of {name}"
                  for word, counts in (("line", lines), ("value", self.bad_values))
                  for name, count in counts.items() if count), *self.aside]

    def _add_events(self, line: schema.EventLine) -> None:
        event = line.model_dump(exclude_unset=True)
        self.events.append(event)
        if line.event == "start":
            while self.resumed and self.resumed[-1][0] >= line.step:  # its lines were written again
                self.resumed.pop()
            self.resumed.append((line.step, len(self.processes)))
            if self.processes:
                self.processes[-1].following = event
            self.processes.append(Process([event]))
        elif self.processes:
            self.processes[-1].events.append(event)

    def _add_metrics(self, line: schema.Line) -> None:
        if line.step <= self.newest:
            self.logs["metrics"].invalid += 1
            return
        self.newest, entry = line.step, {}
        for name, value in line.model_extra.items():
            entry[name] = schema.number(value, schema.MOST_SECONDS if name in TIMES else sys.float_info.max)
            if value is not None and entry[name] is None:
                self.bad_values[name] += 1
                del entry[name]
        if entry.get("counted") == 0:  # a step without targets has no loss
            entry = {name: value for name, value in entry.items()
                     if value is not None or name.startswith("val_")}
        if (at := entry.get("time")) is not None:
            before, since = self.clock or (at, 0.0)
            self.clock = at, since + max(0.0, at - before)
            entry["time"] = self.clock[1]
            self._measure(line.step, at, entry.get("step_seconds") or 0.0)
        for name, value in entry.items():
            if name not in NOT_DRAWN:
                self.curves.setdefault(name, Curve()).add(line.step, value)

    def _measure(self, step: int, at: float, step_seconds: float) -> None:
        """Add a line to the last process that started before its step; the clock may have been set back."""
        self.recent.append((step, self.clock[1]))
        index = bisect_left(self.resumed, (step, -1)) - 1
        if index < 0 and (step > 0 or not self.resumed or self.resumed[0][0] > 0):
            return  # before the first start
        process = self.processes[self.resumed[max(0, index)][1]]
        if process.last_time is None:
            self.recent = deque([self.recent[-1]], maxlen=RECENT_LINES)
        process.add_line(step, at, step_seconds)

    def _add_ledger(self, line: schema.LedgerLine) -> None:
        self.ledger_step = line.step
        if not line.updated or "spike" in line.model_extra:
            self.bad_steps.append(line)

    def _add_samples(self, line: schema.SampleLine) -> None:
        self.samples.append({"step": line.step, "prompt": shown_prompt(line), "how": "sampled",
                             "text": line.text[:SAMPLE_CHARACTERS]})

    def _add_rollouts(self, line: schema.RolloutLine) -> None:
        """Show the answers to the first prompt of each step, after their rewards, as one sample."""
        if line.group:
            return
        if self.rollout.get("step") != line.step:
            self.rollout = {"step": line.step, "prompt": "Rewards of answers to the first prompt of a step",
                            "how": "sampled", "text": shown_prompt(line)}
            self.samples.append(self.rollout)
        reward = "failed" if line.reward is None else f"{line.reward:g}"
        self.rollout["text"] += f"\n{reward}: {line.answer[:SAMPLE_CHARACTERS]}"

    def _add_evaluations(self, line: schema.EvaluationLine) -> None:
        scores = item_scores(line.model_dump())
        self.items.setdefault(line.name, set()).add(line.items)
        self.logs["evaluations"].invalid += scores is None
        if scores and scores.not_finite:
            text = f"the scores of {scores.not_finite:,} of {line.n:,} {scores.kind} are NaN or infinite"
            self.not_finite.append({"step": line.step, "kind": f"{line.name} not finite", "text": text})
        for text in line.texts:  # answers to held-out prompts
            reward = "" if text.reward is None else f"\nReward: {text.reward:g}"
            reference = f"\nReference: {text.reference}" * bool(text.reference)
            self.samples.append({"step": line.step, "prompt": shown_prompt(text), "how": "evaluated",
                                 "text": f"{text.answer}{reward}{reference}"[:SAMPLE_CHARACTERS]})
        for trend in self.trends.values() if scores else ():
            trend.add(scores)

    # ------------------------------------------------------------------------------ the page's data

    def data(self, most_points: int, share: float = 1.0, all_settings: bool = True) -> dict[str, Any]:
        """Return the run for the page's data, with so many points per curve and this share of the rest."""
        step, max_steps, eta = self.step, self.max_steps, None
        state, sentence = self.state()
        if state == "running" and len(self.recent) > 1:
            (first, began), (last, ended) = self.recent[0], self.recent[-1]
            eta = (max_steps - last) * (ended - began) / max(1, last - first)
        curves = {name: curve.as_json(most_points) for name, curve in self.curves.items()}
        recent = {name: rounded(np.median(self.curves[name].recent)) for name in SPEEDS if self.value(name)}
        main, alarms, time_spent = self.main, self.alarms(), goodput(self.processes)
        best = self.curves[main.curve].best(main.higher) if main.curve in self.curves else None
        kinds = Counter(alarm["kind"] for alarm in alarms if alarm["kind"] != "slow rank ended")
        health = [*learning(self.curves, state, kinds, self.hellaswag, main, self.trends)]
        interruptions = time_spent["interruptions"] if time_spent else []
        if state != "failed":  # the page begins with its failure
            health.append(alarms_and_downtime(state, kinds, interruptions,
                                              all(good is not False for good, _ in health)))
        settings = [line for line in setting_lines(self.settings) if all_settings or line["changed"]]
        return {"name": self.name, "stage": self.stage, "state": state, "sentence": sentence,
                "health": health, "step": step, "max_steps": max_steps, "eta_seconds": eta,
                "facts": [*self.facts()], "curves": curves, "recent": recent, "best": best,
                "headline": {"curve": main.curve, "title": main.title, "higher": main.higher},
                "failure": self.failure() if state == "failed" else None,
                "samples": self.chosen_samples(max(4, round(MOST_SAMPLES * share))), "settings": settings,
                "segments": self.segments, "sources": self.sources, "goodput": time_spent,
                "alarms": alarms[-max(10, round(MOST_ALARMS * share)):]}

    @property
    def stage(self) -> str:
        settings, method = self.settings, ""
        if settings.get("TRAINING_STAGE") == "dpo":
            method = f" ({settings.get('PREFERENCE_OBJECTIVE', 'dpo')})".replace(" (dpo)", "")
        adapted = ", LoRA" if settings.get("LORA_ENABLED") else ""
        distilled = ", distillation" if settings.get("DISTILLATION_ENABLED") else ""
        return f"{settings.get('TRAINING_STAGE', '')}{method}{adapted}{distilled}"

    def value(self, name: str) -> Optional[float]:
        """Return a metric's newest value; None if it is unknown or not finite."""
        newest = self.curves[name].newest if name in self.curves else None
        return newest[0] if newest and math.isfinite(newest[0]) else None

    @property
    def step(self) -> int:
        """The last finished step; its numbers may not be logged yet."""
        end = self.processes[-1].end if self.processes else {}
        return max(0, self.newest, end.get("step", 0))

    @property
    def max_steps(self) -> int:
        return self.settings.get("MAX_STEPS") or 0

    def state(self) -> tuple[str, str]:
        """Return a word and a sentence."""
        step, max_steps = self.step, self.max_steps
        reason, last_sign, log = None, None, self.folder / "metrics.jsonl"
        if self.processes:
            reason, last_sign = self.processes[-1].end.get("reason"), self.processes[-1].last_sign
        elif log.exists():
            last_sign = log.stat().st_mtime
        done = f"{step:,} of {counted(max_steps, 'step')}"
        running = holder_runs(self.folder / "run.lock") if reason is None else False
        if running:
            return "running", f"running: {done} done"
        if reason is None and running is None and last_sign:
            silent = time.time() - last_sign
            if silent < FRESH_SECONDS:
                return "running", f"running on another machine: {done} done"
            return "unknown", (f"no sign of life for {duration(silent)} after {done}; it may still be "
                               "running on another machine")
        if step >= max_steps and (reason == "finished" or reason is None and max_steps > 0):
            return "finished", f"finished after {done}"
        if reason == "early stopping":
            return "finished", f"stopped early after {done}"
        # A start with a smaller MAX_STEPS takes no step, and ends as "finished".
        stopped = {"stopped by a signal": reason, "STOP_STEP": "stopped by STOP_STEP", "finished": "stopped"}
        if reason in stopped:
            return "stopped", f"{stopped[reason]} after {done}"
        if self.processes and launcher_runs(self.processes[-1].events[0]):
            return "running", f"being restarted by the launcher: {done} done"
        if reason:
            return "failed", f"failed after {done}: {reason}"
        if self.processes:
            return "failed", f"{KILLED} after {done}"
        return "stopped", f"not running; {done} done"

    def failure(self) -> dict[str, Any]:
        """Return why the run failed, what it saved, and the command that repeats the step."""
        newest, end = self.newest_checkpoint(), self.processes[-1].end if self.processes else {}
        step = end["step"] if end else max(0, self.newest, self.ledger_step)
        where, command = f"after step {step:,}", None
        if (self.folder / "debug" / f"step-{step + 1:08d}").is_dir():
            where, run = f"in step {step + 1:,}", shlex.quote(str(self.folder))
            command = f"{PROGRAM} replay {run} --step {step + 1}"
        saved = f"{newest.name} in checkpoints/" if newest else "no checkpoint"
        return {"where": where, "reason": end.get("reason") or KILLED, "saved": saved, "command": command}

    def facts(self) -> Iterator[list[str]]:
        settings, checkpoint = self.settings, self.newest_checkpoint()
        yield ["stage", self.stage]
        if count := parameters_in(checkpoint):
            yield ["trained parameters" if settings.get("LORA_ENABLED") else "parameters", f"{count:,}"]
        if tokens := self.value("tokens_seen"):
            yield ["tokens", f"{tokens:,.0f}"]
        start = {"world_size": settings.get("WORLD_SIZE")}
        if self.processes:
            start |= self.processes[-1].events[0]
            yield ["started", time.strftime("%Y-%m-%d %H:%M", time.localtime(self.processes[0].started))]
        for label, name in (("device", "device"), ("host", "host"), ("ranks", "world_size"),
                            ("torch", "torch"), ("Paddock", "paddock")):
            if start.get(name):
                yield [label, str(start[name])]
        if checkpoint:
            yield ["newest checkpoint", checkpoint.name]
        if bad := self.set_aside():
            yield ["invalid, left out", ", ".join(bad)]

    def newest_checkpoint(self) -> Optional[Path]:
        folders = (self.folder / "checkpoints").glob("step-*")
        return max((path for path in folders if path.name[5:].isdecimal()), default=None)

    def chosen_samples(self, most: int) -> list[dict[str, Any]]:
        """Return at most `most` samples from evenly spaced steps, including the last step."""
        steps = sorted({sample["step"] for sample in self.samples}, reverse=True)
        most_steps = max(1, most * len(steps) // max(1, len(self.samples)))
        chosen = {*steps[::-(-len(steps) // most_steps) or 1]}
        return [sample for sample in self.samples if sample["step"] in chosen][-most:]

    def alarms(self) -> list[dict[str, Any]]:  # in the order of steps
        alarms, end = [*self.not_finite], self.processes[-1].end if self.processes else {}
        for line in self.bad_steps:
            left_out = "" if line.updated else "; its update was skipped"
            kind, text = "update left out", "the loss was "
            text += "NaN or infinite" if line.loss is None else number_text(line.loss)
            if "spike" in line.model_extra:
                kind, score = "loss spike", schema.number(line.model_extra["spike"])
                if score:
                    text += f", {score:.1f} robust standard deviations above the recent ones"
            elif line.grad_norm is None:
                text = "the gradient was NaN or infinite"
            elif line.grad_norm == 0:
                text = "the step had no targets"
            if line.step > end.get("step", line.step) and kind != "loss spike":  # it ended the run
                kind = "step not finite"
            alarms.append({"step": line.step, "kind": kind, "text": text + left_out})
        for event in self.events:
            kind = event["event"]
            if kind in ("start", "end", "save", "saved", "evaluation"):
                continue
            rank = f"rank {event.get('rank')}" + (f" on {event['host']}" if event.get("host") else "")
            phase = event.get("phase")
            if kind == "slow rank" and event.get("ratio") is not None:
                text = f"{rank} takes {event['ratio']:.2f} times as long as other ranks in {phase}"
            elif kind == "slow rank ended":
                text = f"{rank} is as fast as other ranks again in {phase}"
            else:
                fields = [f"{name}: {value}" for name, value in event.items()
                         if name not in ("time", "step", "event")]
                text = event.get("text") or ", ".join(fields) or kind
            alarms.append({"step": event["step"], "kind": kind, "text": str(text)})
        return sorted(alarms, key=lambda alarm: alarm["step"])
