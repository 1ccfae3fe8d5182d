"""Goodput: which share of all time since a run's first start went into steps that count.

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
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Optional

from report.run_state import KILLED

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
    for number, process in enumerate(processes):
        following = processes[number + 1][0] if number + 1 < len(processes) else None
        start, lasted = process[0]["time"], last_sign(process, measured[number], following)
        seconds += max(0.0, lasted - start) + max(0.0, start - (start if before is None else before))
        before = lasted
    return seconds


def clock_steps(processes: list[list[Event]], measured: list[Measured]) -> Iterator[tuple[int, float]]:
    """Yield where the clock stepped back: the step that followed, and by how many seconds at least."""
    for number, (process, lines) in enumerate(zip(processes, measured)):
        events = [(after["step"], before["time"] - after["time"]) for before, after in pairwise(process)]
        yield from lines.clock_steps or [back for back in events if back[1] > CLOCK_SECONDS]
        if number + 1 < len(processes):
            following = processes[number + 1][0]
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
    for number, process in enumerate(processes):
        following = processes[number + 1][0] if number + 1 < len(processes) else None
        lasted = last_sign(process, measured[number], following)
        own = parts_of(process, measured[number], following, lasted)
        for name, seconds in own.items():
            parts[name] += seconds
        reason = (end_of(process) or {}).get("reason")
        if following and reason != "finished":
            parts["away"] += max(0.0, began(following) - lasted)
            interruptions.append(interruption(following, lasted, reason, measured[number].last_step))
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
