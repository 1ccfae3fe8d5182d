"""A run's folder, read as it grows, as the part of the page's data that tells of this run."""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np

from common.errors import CheckpointError
from common.text import duration
from report.curves import Curve, as_json
from report.goodput import Measured, end_of, goodput, last_sign, split_processes
from report.lines import GrowingFile, entry_of, signature
from report.power import PowerTrace
from report.run_facts import parameters_in, read_or_none, segments, setting_lines, sources
from report.run_state import Ending, holder_runs, run_state

LOGS = ("events", "metrics", "ledger", "samples")  # in this order: the starts divide the metrics
MOST_SAMPLES, MOST_ALARMS = 40, 200
SAMPLE_CHARACTERS = 2000
LINES_AT_ONCE = 1000
NOT_DRAWN = {"step", "time", "counted"}
RECENT_LINES = 50  # from which the time that is left is estimated


class RunReader:
    """A run's folder; `read` reads what is new, `data` gives it.

    Raises:
        CheckpointError: this is no run, or a file of it cannot be read.
    """

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = Path(folder), name
        self.check_folder()
        if not (self.folder / "metrics.jsonl").exists() and "TRAINING_STAGE" not in self.settings:
            raise CheckpointError(f"{folder} is no run: it has neither a metrics.jsonl nor a config.json "
                                  "with the settings of a run")
        self.files = [GrowingFile(self.folder / f"{log}.jsonl", getattr(self, f"_restart_{log}"),
                                  getattr(self, f"_add_{log}")) for log in LOGS]
        self.power = PowerTrace(self.folder)

    def check_folder(self) -> None:
        """Raise CheckpointError if there is no such folder (any more)."""
        if not self.folder.is_dir():
            raise CheckpointError(f"there is no run {str(self.folder)!r}: name the folder of a run, or a run "
                                  "in OUTPUT_DIR")

    def read(self) -> None:
        """Read what is new. Raises CheckpointError if a file cannot be read."""
        self.check_folder()
        for file in self.files:
            file.read()
        self._fill_curves()
        self.power.read()

    def signature(self) -> tuple:
        """What differs when the run has written something, or has ended."""
        others = [self.folder / "config.json", self.folder / "data.json", self.folder / "evaluations.jsonl"]
        logs = [file.path for file in self.files]
        return holder_runs(self.folder / "run.lock"), signature([*logs, *others, *self.power.paths()])

    # ------------------------------------------------------------------------------------- the logs

    def _restart_events(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.starts: list[float] = []

    def _add_events(self, line: bytes) -> None:
        event = entry_of(line)
        if event and isinstance(event.get("time"), (int, float)) and isinstance(event.get("event"), str):
            self.events.append(event)
            if event["event"] == "start":
                self.starts.append(event["time"])

    def _restart_metrics(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.newest, self.measured = -1, {}  # the newest step; by the number of the process
        self.recent: deque = deque(maxlen=RECENT_LINES)  # (step, time)
        self.waiting: list[dict[str, Any]] = []  # lines that are not in the curves yet

    def _add_metrics(self, line: bytes) -> None:
        entry = entry_of(line)
        if entry is None or entry["step"] <= self.newest:
            return
        self.newest = entry["step"]
        if isinstance(at := entry.get("time"), (int, float)):
            self._measure(self.newest, at, entry.get("step_seconds"))
        self.waiting.append(entry)
        if len(self.waiting) >= LINES_AT_ONCE:
            self._fill_curves()

    def _fill_curves(self) -> None:
        names = dict.fromkeys(name for entry in self.waiting for name in entry if name not in NOT_DRAWN)
        for name in names:
            having = [entry for entry in self.waiting if name in entry]
            try:
                values = np.array([entry[name] for entry in having], np.float64)
            except (TypeError, ValueError):  # no number
                continue
            self.curves.setdefault(name, Curve()).add([entry["step"] for entry in having], values)
        self.waiting = []

    def _measure(self, step: int, at: float, step_seconds: Optional[float]) -> None:
        process = bisect_right(self.starts, at) - 1
        measured = self.measured.get(process)
        if process >= 0 and measured is None:
            self.recent.clear()
            start = [event for event in self.events if event["event"] == "start"][process]
            measured = self.measured[process] = Measured(last_step=start["step"])
        self.recent.append((step, at))
        if measured is None:
            return
        steps = max(0, step - measured.last_step)
        measured.add(step, at, (step_seconds or 0.0) * steps)

    def _restart_ledger(self) -> None:
        self.bad_steps: deque = deque(maxlen=MOST_ALARMS)

    def _add_ledger(self, line: bytes) -> None:
        if b'"spike"' in line or b'"updated": false' in line:  # the others need not be parsed
            if entry := entry_of(line):
                self.bad_steps.append(entry)

    def _restart_samples(self) -> None:
        self.samples: list[dict[str, Any]] = []

    def _add_samples(self, line: bytes) -> None:
        if entry := entry_of(line):
            texts = {name: str(entry.get(name, ""))[:SAMPLE_CHARACTERS] for name in ("prompt", "text")}
            self.samples.append({"step": entry["step"], **texts})

    # ------------------------------------------------------------------------------------- its parts

    @property
    def step(self) -> int:
        """The newest logged step."""
        return max(0, self.newest)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the newest steps."""
        return read_or_none(self.folder / "config.json")

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
        samples = self.chosen_samples(max(4, round(MOST_SAMPLES * share)))
        alarms = self.alarms()[-max(10, round(MOST_ALARMS * share)):]
        settings = [line for line in setting_lines(self.settings) if all_settings or line["changed"]]
        return {"name": self.name, "state": state, "sentence": sentence, "step": self.step,
                "max_steps": self.max_steps, "eta_seconds": eta, "facts": [*self.facts()], "curves": curves,
                "samples": samples, "settings": settings, "segments": [*segments(self.folder)],
                "sources": sources(self.folder, self.settings), "goodput": goodput(*self.processes()),
                "alarms": alarms, "power": self.power.data(share)}

    def facts(self) -> Iterator[list[str]]:
        """Yield what describes the run in a word each: label and text."""
        settings, start = self.settings, next((event for event in reversed(self.events)
                                               if event["event"] == "start"), {})
        stage = settings.get("TRAINING_STAGE", "")
        adapted = ", LoRA" if settings.get("LORA_ENABLED") else ""
        distilled = ", distillation" if settings.get("DISTILLATION_ENABLED") else ""
        yield ["stage", f"{stage}{adapted}{distilled}"]
        if count := parameters_in(self.newest_checkpoint()):
            yield ["trained parameters" if adapted else "parameters", f"{count:,}"]
        if (tokens := self.curves.get("tokens_seen")) and tokens.last():
            yield ["tokens", f"{tokens.last():,.0f}"]
        if begun := self.starts[:1]:
            yield ["started", time.strftime("%Y-%m-%d %H:%M", time.localtime(begun[0]))]
            processes, measured = self.processes()
            yield ["time", duration(last_sign(processes[-1], measured[-1], None) - begun[0])]
        start = {"world_size": settings.get("WORLD_SIZE"), **start}
        for label, name in (("device", "device"), ("host", "host"), ("ranks", "world_size"),
                            ("torch", "torch"), ("Paddock", "paddock")):
            if start.get(name):
                yield [label, str(start[name])]
        if checkpoint := self.newest_checkpoint():
            yield ["newest checkpoint", checkpoint.name]

    def newest_checkpoint(self) -> Optional[Path]:
        """The newest checkpoint; None if there is none."""
        return max((self.folder / "checkpoints").glob("step-*"), default=None)

    def chosen_samples(self, most: int) -> list[dict[str, Any]]:
        """At most so many samples, of evenly distributed steps, those of the last one among them."""
        steps = sorted({sample["step"] for sample in self.samples}, reverse=True)
        most_steps = max(1, most * len(steps) // max(1, len(self.samples)))
        chosen = {*steps[::-(-len(steps) // most_steps) or 1]}
        return [sample for sample in self.samples if sample["step"] in chosen][-most:]

    def alarms(self) -> list[dict[str, Any]]:
        """What went wrong, in the order of the steps."""
        found = [*map(alarm_of_step, self.bad_steps), *filter(None, map(alarm_of_event, self.events))]
        return sorted(found, key=lambda alarm: alarm["step"])


def alarm_of_step(entry: dict[str, Any]) -> dict[str, Any]:
    """What the ledger says of a step that was not as the others."""
    loss = entry.get("loss")
    left_out = "" if entry.get("updated") else "; its update was left out"
    if "spike" in entry:
        score = ""
        if isinstance(entry["spike"], (int, float)):
            score = f", {entry['spike']:.1f} robust standard deviations above the recent ones"
        return {"step": entry["step"], "kind": "loss spike", "text": f"the loss was {loss}{score}{left_out}"}
    what = "the gradient was not finite" if entry.get("grad_norm") is None else f"the loss was {loss}"
    return {"step": entry["step"], "kind": "update left out", "text": f"{what}{left_out}"}


def alarm_of_event(event: dict[str, Any]) -> Optional[dict[str, Any]]:
    """The alarm that an event is; None if it is none."""
    kind = event["event"]
    if kind in ("start", "end", "save", "evaluation"):
        return None
    rank = f"rank {event.get('rank')}" + (f" on {event['host']}" if event.get("host") else "")
    if kind == "slow rank" and isinstance(event.get("ratio"), (int, float)):
        text = f"{rank} takes {event['ratio']:.2f} times as long as the others in {event.get('phase')}"
    elif kind == "slow rank ended":
        text = f"{rank} is as fast as the others again in {event.get('phase')}"
    else:
        facts = [f"{name}: {value}" for name, value in event.items() if name not in ("time", "step", "event")]
        text = event.get("text") or ", ".join(facts) or kind
    return {"step": event["step"], "kind": kind, "text": str(text)}
