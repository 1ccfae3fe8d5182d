"""What is measured while a run takes its steps: time by phase, utilization and power, profiles."""

from collections.abc import Sequence

from common.heartbeat import HEARTBEAT
from data_pipeline.batch import Batch
from training.phases import Phases
from training.profiling import Profiling
from training.state import Run
from training.utilization import Utilization


class Measurements:
    """Measures in a `with` block around the loop, to which the heartbeat tells which phase begins.

    The loop saves at a stop signal; a profile is written after that.
    Collective: every rank must call it, and each of its readings.
    """

    def __init__(self, run: Run):
        self.run, self.utilization, self.profiling = run, Utilization(run), Profiling(run)
        self.phases = Phases(run, self.utilization.mark)

    def __enter__(self) -> "Measurements":
        self.before, HEARTBEAT.on_mark = HEARTBEAT.on_mark, self._mark  # a run may train within another
        HEARTBEAT.begin("other")
        return self

    def __exit__(self, error, *_) -> None:
        HEARTBEAT.on_mark = self.before
        self.profiling.close(failed=error is not None)
        self.utilization.close()

    def _mark(self, phase: str, waits: bool) -> None:
        self.phases.mark(phase, waits)
        self.profiling.mark(phase)

    def begin_step(self, step: int) -> None:
        """A step begins, counted from 1, with its data."""
        self.utilization.begin(step)
        self.profiling.begin(step)
        HEARTBEAT.enter("data", step)

    def end_step(self, step: int, batches: Sequence[Batch]) -> None:
        """A step of these micro-batches ends."""
        HEARTBEAT.begin("other")
        self.utilization.end(batches)
        self.profiling.end(step, batches)

    def read_steps(self) -> dict[str, float]:
        """The metrics of the steps since the last reading: speed, seconds by phase, utilization, power."""
        seconds = self.phases.read_steps()
        rate = self.run.config.total_batch_size / seconds["step_seconds"]
        return {"tokens_per_second": rate, **seconds, **self.utilization.read(rate)}

    def read_pauses(self) -> dict[str, float]:
        """The seconds of evaluations and saves since the last reading."""
        return self.phases.read_pauses()
