"""Goodput: the share of a run's total time spent on steps that count.

In events.jsonl, each `start` begins a process. Its last sign of life is its `end` event. After a kill, it is
the latest of its other events, its lines in metrics.jsonl and the `previous_time` of the next start. The
total time runs from the first `start` to the last sign of life, except the time between a finished run and
its continuation. It is divided into:

- steps: the sum of `step_seconds` * steps since the previous line, over all lines of a process;
- evaluation, saving: the `seconds` of these events;
- repeated steps: if the next process resumes from a step before the last logged one, the time from the save
  of that step (or the last kept line) to the last sign of life;
- start-up: the time from the `start` event to the first step, plus the event's `seconds`, the time before it
  (imports, verification, building the model);
- downtime: the time from a process's last sign of life to the next start;
- other: the rest.

goodput = steps / total time. An interruption's `downtime_seconds` are those from the last sign of life to the
first step of the next process: downtime and start-up.

Clocks can be set back and differ between machines, so the order of lines and steps determines what came
first. Negative times count as zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

Event = dict[str, Any]
RESTARTED = "restarted by the launcher"
KILLED = "exited without reporting a reason (killed, or machine failure)"
PARTS = ("steps", "evaluation", "saving", "start-up", "repeated steps", "downtime", "other")


@dataclass
class Process:
    """The events of a process, starting with `start`, and totals of its lines in metrics.jsonl."""

    events: list[Event]
    following: Optional[Event] = None  # the start of the next process
    steps_seconds: float = 0.0
    first_time: Optional[float] = None  # time of the first line with steps
    first_seconds: float = 0.0  # duration of the steps up to that line
    last_time: Optional[float] = None
    last_step: int = 0

    def add_line(self, step: int, time: float, step_seconds: float) -> None:
        if self.last_time is None:
            self.last_time, self.last_step = self.started, self.events[0]["step"]
        seconds = max(0.0, step_seconds) * max(0, step - self.last_step)
        self.steps_seconds += seconds
        if self.first_time is None and seconds:
            self.first_time, self.first_seconds = time, seconds
        self.last_time, self.last_step = time, step

    @property
    def started(self) -> float:
        return self.events[0]["time"]

    @property
    def end(self) -> Event:  # empty if the process was killed or is running; the launcher's comes last
        return next((event for event in reversed(self.events) if event["event"] == "end"), {})

    @property
    def last_sign(self) -> float:
        if self.end:  # the launcher's may be much later than the rank's own
            return next(event["time"] for event in self.events if event["event"] == "end")
        previous = (self.following or {}).get("previous_time") or 0.0
        return max([event["time"] for event in self.events] + [self.last_time or 0.0, previous])

    def parts(self) -> dict[str, float]:
        """Return the seconds spent on each of PARTS except `downtime`."""
        # Work after the step from which the next process resumed is lost.
        last_sign, kept, kept_until = self.last_sign, self.events, self.last_sign
        previous = (self.following or {}).get("previous_step")
        if previous is not None and self.following["step"] < previous:
            kept = [event for event in self.events if event["step"] <= self.following["step"]]
            saved = [event["time"] for event in kept if event["event"] == "save"]
            reached = max([*saved[-1:], self.last_time or self.started])
            kept_until = min(max(self.started, reached), last_sign)

        sums = {"evaluation": 0.0, "saving": 0.0}
        before_first_line = self.first_seconds
        for event in kept:
            if name := {"evaluation": "evaluation", "save": "saving"}.get(event["event"]):
                seconds = max(0.0, event.get("seconds") or 0.0)
                sums[name] += seconds
                if self.first_time and event["time"] <= self.first_time:
                    before_first_line += seconds

        left = max(0.0, kept_until - self.started - self.steps_seconds - sum(sums.values()))
        start_up = 0.0
        if self.first_time:
            start_up = min(left, max(0.0, self.first_time - before_first_line - self.started))
        set_up = self.started - set_up_from(self.events[0])
        return {"steps": self.steps_seconds, **sums, "start-up": start_up + set_up,
                "repeated steps": max(0.0, last_sign - kept_until), "other": left - start_up}


def set_up_from(start: Event) -> float:
    """Return when a process started: `seconds` before its start event, if the event has them."""
    return start["time"] - max(0.0, start.get("seconds") or 0.0)


def goodput(processes: Sequence[Process]) -> Optional[dict[str, Any]]:
    """Return the goodput for the page's data, or None without timed steps and interruptions."""
    parts = dict.fromkeys(PARTS, 0.0)
    interruptions, divided = [], [process.parts() for process in processes]
    for number, process in enumerate(processes):
        for name, seconds in divided[number].items():
            parts[name] += seconds
        following, last_sign, reason = process.following, process.last_sign, process.end.get("reason")
        if not following or reason == "finished":
            continue
        downtime = max(0.0, set_up_from(following) - last_sign)
        parts["downtime"] += downtime
        step = max(following.get("previous_step") or 0, process.last_step, following["step"])
        if cause := following.get("cause"):
            reason = f"{cause} ({RESTARTED})"
        interruptions.append({
            "time": last_sign, "step": step, "resumed_from": following["step"],
            "resumed_time": following["time"], "reason": reason or KILLED,
            "downtime_seconds": downtime + divided[number + 1]["start-up"],
            "repeated_steps": step - following["step"]})
    seconds = sum(parts.values())
    if not seconds or not (interruptions or parts["steps"]):
        return None
    return {"share": parts["steps"] / seconds, "seconds": seconds,
            "parts": [{"name": name, "seconds": part} for name, part in parts.items()],
            "interruptions": interruptions}
