"""The time of a step by phase, and ranks that are slower than the others."""

import socket
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from parallel.ranks import collective
from run.run import Run

ONLINE_PHASES = ("generate", "reward")  # of a step that trains on answers of the model
STEP_PHASES = ("data", *ONLINE_PHASES, "forward", "backward", "optimizer", "communication")
PHASES = (*STEP_PHASES, "save", "other")  # all other phases are evaluations
PAUSES = ("evaluation", "save", "other")
# Without the backward: it includes waiting for slower ranks, so that the fast ones look slow.
COMPARED = ("data", "forward", "evaluation", "save")
MOST_STEPS = 10_000  # steps kept for the next reading
COMPARED_STEPS = 10  # minimum number of steps in a comparison of the ranks
SLOWER = 1.15  # ratio of a slow rank's time to the median of the others
# Minimum loss of a slow rank in each phase: as a share of a step (or of all time), and in seconds.
LOST_SHARE, LOST_SECONDS = np.array([0.02, 0.02, 0.05, 0.05]), np.array([0.0, 0.0, 1.0, 0.2])
# A comparison adds the excess in standard errors, at most MOST, or subtracts MOST if the rank is not slow. A
# rank is reported at ENOUGH: after at least two comparisons, or one for saves.
ENOUGH, MOST = 8.0, np.array([5.0, 5.0, 5.0, 8.0])


def median_of_others(values: np.ndarray) -> np.ndarray:
    """Return for each row the median of all other rows, by column."""
    in_order, place, others = np.sort(values, 0), values.argsort(0).argsort(0), len(values) - 1

    def other(k: int) -> np.ndarray:
        return np.where(place > k, in_order[k], in_order[k + 1])

    return (other((others - 1) // 2) + other(others // 2)) / 2


class SlowRanks:
    """Detects when a rank becomes slow in a phase, and when it no longer is; the same on all ranks.

    Arrays have a row for each rank (R) and a column for each phase of COMPARED (P).
    """

    def __init__(self):
        self.evidence_RP = np.zeros((1, len(COMPARED)))
        self.is_named_RP = self.evidence_RP > 0

    def compare(self, own_RP: np.ndarray, variance_RP: np.ndarray,
                seconds_P: np.ndarray) -> list[tuple[int, str, float]]:
        """Return (rank, phase, ratio) for each rank that becomes slow in a phase, or with ratio 0, recovers.

        `own_RP` has the seconds without waiting: of a step, or of all evaluations or saves since the last
        comparison; `variance_RP` the variances of these means. LOST_SHARE is a share of `seconds_P`.
        """
        if len(own_RP) < 2:
            return []
        others_RP = median_of_others(own_RP)
        error_RP = np.sqrt(variance_RP + median_of_others(variance_RP))
        lost_RP, ratio_RP = own_RP - others_RP, own_RP / np.maximum(others_RP, 1e-6)
        least_P = np.maximum(LOST_SHARE * seconds_P, LOST_SECONDS)
        is_slow_RP = (own_RP > SLOWER * others_RP) & (lost_RP > least_P)
        is_slow_RP[0, COMPARED.index("save")] = False  # rank 0 writes while the others wait
        added_RP = np.where(is_slow_RP, np.minimum(lost_RP / np.maximum(error_RP, 1e-9), MOST), -MOST)
        added_RP[:, ~own_RP.any(0)] = 0  # no evaluation or save
        self.evidence_RP = np.clip(self.evidence_RP + added_RP, 0, ENOUGH)
        before_RP = np.broadcast_to(self.is_named_RP, own_RP.shape)
        self.is_named_RP = before_RP & (self.evidence_RP > 0) | is_slow_RP & (self.evidence_RP >= ENOUGH)
        return [(rank, COMPARED[phase], ratio_RP[rank, phase] * self.is_named_RP[rank, phase])
                for rank, phase in np.argwhere(self.is_named_RP != before_RP).tolist()]


class HostClock:
    """Times of marks on the host."""

    now = staticmethod(time.perf_counter)

    def between(self, start: float, end: float, wait: bool) -> float:
        return end - start


class CudaClock:
    """Times of marks on the GPU: events in the current stream, read after the GPU has passed them."""

    def __init__(self) -> None:
        self.pool: list[Any] = []

    def now(self) -> Any:
        event = self.pool.pop() if self.pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any, wait: bool) -> Optional[float]:
        """Return the seconds between two events and recycle the first; None if not known yet."""
        if wait:
            end.synchronize()
        elif not end.query():
            return None
        self.pool.append(start)
        return start.elapsed_time(end) / 1000


class Mark(NamedTuple):
    """The start of a phase, or of waiting for other ranks within it."""

    at: Any
    name: str
    waits: bool
    step: int
    begins_step: bool


class Phases:
    """The seconds that a run's steps spend in each phase, without the phases within it.

    Waiting for other ranks outside the backward counts as "communication". On a GPU, marks are read without
    waiting when the next step begins.
    """

    def __init__(self, run: Run):
        self.run, self.started = run, time.perf_counter()
        self.clock = CudaClock() if run.ranks.device.type == "cuda" else HostClock()
        self.marks: deque[Mark] = deque()
        self.step_begins = False
        self.steps: list[Counter[str]] = []  # the seconds of each step since the last reading
        self.pauses: Counter[tuple[str, int]] = Counter()  # seconds by phase and step
        self.totals: Counter[str] = Counter()
        self.slow_ranks, self.compared_at = SlowRanks(), self.started
        self.to_compare: list[Counter[str]] = []  # without the first step, which compiles
        self.own_pauses: Counter[str] = Counter()  # since the last comparison
        self.is_first_step = True

    def mark(self, name: str, waits: bool) -> None:
        """Record that a phase begins, or that waiting for other ranks begins or ends."""
        waits = waits and self.run.ranks.world_size > 1
        if self.marks and not self.step_begins and self.marks[-1][1:3] == (name, waits):
            return
        self.marks.append(Mark(self.clock.now(), name, waits, self.run.progress.step, self.step_begins))
        self.step_begins = False

    def begin_step(self) -> None:
        """Read the marks that a GPU has passed; the next mark begins a step."""
        self._read_marks()
        self.step_begins = True

    def _read_marks(self, wait: bool = False) -> None:
        while len(self.marks) > 1:
            mark, following = self.marks[0], self.marks[1]
            seconds = self.clock.between(mark.at, following.at, wait)
            if seconds is None:
                return
            self.marks.popleft()
            phase = mark.name if mark.name in PHASES else "evaluation"
            is_in_step = phase in STEP_PHASES
            key = "communication" if is_in_step and mark.waits else phase
            self.totals[key] += seconds
            if mark.begins_step:
                self.steps.append(Counter())
                del self.steps[:-MOST_STEPS]
            if is_in_step:
                self.steps[-1][key] += seconds
            elif phase != "other":
                self.pauses[mark.name, mark.step] += seconds
                self.own_pauses[phase] += seconds * (not mark.waits)

    @collective
    def read_steps(self) -> dict[str, float]:
        """Return the mean seconds of the steps since the last reading, over all ranks; log slow ranks."""
        self._read_marks(wait=True)
        steps, self.steps = self.steps, []
        self.to_compare += steps[self.is_first_step:]
        self.is_first_step = False

        # Exchange the means of these steps, and the means and variances of the steps to compare.
        compared = table_of(self.to_compare, COMPARED)  # of its last two phases, `own_pauses` are compared
        count, pauses = len(compared), [self.own_pauses[phase] for phase in COMPARED]
        variances = compared.var(0, ddof=1) / count if count > 1 else np.zeros(len(COMPARED))
        local = [*table_of(steps, STEP_PHASES).sum(0) / max(1, len(steps)),
               *compared.sum(0) / max(1, count) + pauses, *variances, time.perf_counter() - self.compared_at]
        every = np.array(self.run.ranks.all_gather_json(local))
        means = dict(zip(STEP_PHASES, every[:, :len(STEP_PHASES)].mean(0).tolist()))
        step_seconds = sum(means.values())
        if count >= COMPARED_STEPS - 1:  # the first step is excluded
            self._compare(every[:, len(STEP_PHASES):], step_seconds)
        left_out = ["communication"] * (self.run.ranks.world_size == 1)
        left_out += [phase for phase in ONLINE_PHASES if not means[phase]]
        means = {phase: seconds for phase, seconds in means.items() if phase not in left_out}
        metrics = {"step_seconds": step_seconds,
                   **{f"{phase}_seconds": seconds for phase, seconds in means.items()}}
        if len(every) > 1:  # the ranks that need least and most for what they do without waiting in a step
            seconds_R = every[:, :STEP_PHASES.index("backward")].sum(1)
            for name, rank in (("fastest", seconds_R.argmin()), ("slowest", seconds_R.argmax())):
                metrics |= {f"{name}_rank": int(rank), f"{name}_rank_seconds": float(seconds_R[rank])}
        return metrics

    def _compare(self, every: np.ndarray, step_seconds: float) -> None:
        own_RP, variance_RP = every[:, :len(COMPARED)], every[:, len(COMPARED):-1]
        since = every[:, -1].mean()
        whole_P = np.array([step_seconds, step_seconds, since, since])
        news = self.slow_ranks.compare(own_RP, variance_RP, whole_P)
        self.compared_at, self.to_compare, self.own_pauses = time.perf_counter(), [], Counter()
        if not news:
            return
        log, step = self.run.log, self.run.progress.step
        hosts = self.run.ranks.all_gather_json(socket.gethostname())
        for rank, phase, ratio in news:
            label = f"rank {rank}{f' on {hosts[rank]}' if len(set(hosts)) > 1 else ''}"
            if ratio:
                log.warn(f"{label} is slow: its {phase} takes {ratio:.2f} times as long as on other ranks")
                log.event("slow rank", step, rank=rank, phase=phase, ratio=round(ratio, 3), host=hosts[rank])
            else:
                log.info(f"{label} is no longer slow in {phase}")
                log.event("slow rank ended", step, rank=rank, phase=phase)

    def read_pauses(self) -> dict[str, float]:
        """Return the seconds of evaluations and saves since the last reading; log each evaluation."""
        self._read_marks(wait=True)
        pauses, self.pauses, sums = self.pauses, Counter(), Counter()
        for (name, step), seconds in pauses.items():
            phase = "save" if name == "save" else "evaluation"
            sums[f"{phase}_seconds"] += seconds
            if phase == "evaluation":
                self.run.log.event("evaluation", step, what=name, seconds=seconds)
        return dict(sums)

    def describe(self) -> str:
        """Return the time spent in each phase since the start, in percent."""
        self.mark("other", waits=False)
        self._read_marks(wait=True)
        seconds = {phase: self.totals[phase] for phase in (*STEP_PHASES, *PAUSES[:-1])}
        seconds["other"] = max(0.0, time.perf_counter() - self.started - sum(seconds.values()))
        percent = {phase: 100 * value / sum(seconds.values()) for phase, value in seconds.items()}
        in_steps = [f"{phase} {percent[phase]:.1f}" for phase in STEP_PHASES if seconds[phase]]
        steps = sum(percent[phase] for phase in STEP_PHASES)
        pauses = [f"{phase} {percent[phase]:.1f} %" for phase in PAUSES if seconds[phase]]
        return ", ".join([f"steps {steps:.1f} % ({', '.join(in_steps)})", *pauses])


def table_of(steps: Sequence[Counter[str]], phases: Sequence[str]) -> np.ndarray:
    return np.array([[step[phase] for phase in phases] for step in steps]).reshape(len(steps), len(phases))
