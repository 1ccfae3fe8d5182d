"""Measurements during training: time by phase, utilization and power; profiles of single steps.

Rank 0 writes torch.profiler's trace (PROFILE_STEPS) and the CUDA allocator's history (MEMORY_SNAPSHOT) into
`profile/` in the run's folder. Measuring does not change the results.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from common.activity import COMMUNICATION, foreign_call
from common.errors import SettingsError
from dataloaders import Batch
from extensions.cost import StepFlops, Work
from extensions.phases import Phases
from extensions.power import SLOWDOWNS, Reading, power_metrics, start_sampler
from extensions.settings import step_window
from parallel.process import number_of
from parallel.ranks import collective
from run.extensions import Extension
from run.run import Run, StepResult

ROWS = 25  # rows of each table
SNAPSHOT_EVENTS = 200_000  # the last allocations of a step to keep; each takes a few KB
# Dense bf16 TFLOP/s with float32 accumulation, from the vendors' data sheets. B300, GB300, H20 and RTX PRO
# 6000 are from secondary sources (figures with sparsity are halved), its Max-Q edition is computed.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835, "H200": 989, "GH200": 989,
               "H800 PCIe": 756, "H800": 989, "H20": 148, "B200": 2250, "GB200": 2250, "B300": 2250,
               "GB300": 2500, "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A10G": 70,
               "A10": 125, "RTX 3090": 71, "RTX 4090": 165, "RTX 5090": 210,
               "RTX PRO 6000 Blackwell Max-Q": 439, "RTX PRO 6000": 504, "V100-PCIE": 112, "V100": 125}
ANOTHER_PEAK = re.compile(r"\b(MIG|Laptop|Ti|D|NVL)\b")  # a part of a card, or another card


def peak_flops(device: torch.device, override_tflops: Optional[float] = None) -> Optional[float]:
    """Return the device's dense bf16 FLOP/s, or None if unknown."""
    if override_tflops is not None:
        return override_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    matching = (known for known in PEAK_TFLOPS if re.search(rf"\b{known}\b", name))
    if (known := next(matching, None)) is None or ANOTHER_PEAK.search(name.replace(known, "")):
        return None
    return PEAK_TFLOPS[known] * 1e12


@collective
def total_peak(run: Run) -> Optional[float]:
    """Return the sum of `peak_flops` over all ranks, whose cards may differ; None if one is unknown."""
    device, is_gpu = run.ranks.device, run.ranks.device.type == "cuda"
    cards = run.ranks.all_gather_json([peak_flops(device, run.config.peak_tflops),
                                       torch.cuda.get_device_name(device) if is_gpu else ""])
    unknown = sorted({name for peak, name in cards if peak is None})
    if is_gpu and unknown:
        run.log.info(f"MFU is not measured: the peak of {', '.join(unknown)} is not in our table; set "
                     "PEAK_TFLOPS to the dense bf16 TFLOP/s of a GPU (of different ones, the mean)")
    return None if unknown else sum(peak for peak, _ in cards)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":  # torch counts no peak there
        return torch.mps.driver_allocated_memory()
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Measurements(Extension):
    """Measures the steps and their phases. Steps count from 1."""

    phases: Optional[Phases] = None

    @collective
    def run_start(self, run: Run) -> None:
        if run.config.memory_snapshot and run.ranks.device.type != "cuda":
            raise SettingsError(f"MEMORY_SNAPSHOT={run.config.memory_snapshot} records CUDA allocations, but "
                                "torch sees no GPU here; remove it")
        self.run, self.peak = run, total_peak(run)
        self.flops = StepFlops(run.config, run.model, run.objective, run.inputs.tokenizer.vocab_size,
                               run.ranks.device.type)
        self.work, self.warned_of = Work(), 0
        self.sampler = start_sampler(run)
        self.is_sampled = not run.ranks.all_agree(self.sampler is None)  # true if any rank samples
        self.profiling = Profiling(run)
        self.phases = Phases(run)
        self.current = "other", False
        self._mark(*self.current)

    def run_end(self, run: Run, error: Optional[BaseException]) -> None:
        if self.phases:
            self.phases = None
            self.profiling.close(failed=error is not None)
            if self.sampler:
                self.sampler.stop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.phases is None:  # the run has not started, or has ended
            yield
            return
        before = self.current
        self._mark(*((before[0], True) if name == COMMUNICATION else (name, False)))
        yield
        self._mark(*before)  # not after a device error, which a mark would raise again

    def _mark(self, name: str, waits: bool) -> None:
        self.current = name, waits
        self.phases.mark(name, waits)
        self.profiling.mark(name)

    def step_begin(self, run: Run) -> None:
        if self.sampler:
            self.sampler.begin()
        self.phases.begin_step()
        self.profiling.begin(run.progress.step + 1)

    def step_end(self, run: Run, batches: list[Batch], result: StepResult) -> None:
        if run.config.training_stage == "grpo":
            batches = batches * run.config.grpo_updates
        self.work = Work(*map(sum, zip(self.work, self.flops.read(batches))))
        if self.sampler:
            self.sampler.end()
        self.profiling.end(run.progress.step + 1)

    @collective
    def metrics(self, run: Run) -> dict[str, float]:
        """Return the metrics of the steps since the last reading: speed, phases, utilization, power."""
        seconds = self.phases.read_steps()
        rate = run.config.total_batch_size / seconds["step_seconds"]
        return {"tokens_per_second": rate, **seconds, **self.read_utilization(rate),
                "peak_memory_bytes": peak_memory_bytes(run.ranks.device)}

    def evaluate(self, run: Run) -> dict[str, float]:
        return self.phases.read_pauses() if run.progress.pending_metrics else {}

    def summary(self, run: Run) -> list[str]:
        return [f"Time: {self.phases.describe()}."]

    @collective
    def read_utilization(self, tokens_per_second: float) -> dict[str, float]:
        """Return the metrics of utilization and power since the last reading, over all ranks."""
        reading = self.sampler.read() if self.sampler else Reading()
        size, ranks = len(Work._fields), self.run.ranks
        gathered = ranks.all_gather_json([*self.work, *(reading if self.is_sampled else ())])
        work = Work(*(int(sum(column)) for column in zip(*(row[:size] for row in gathered))))
        self.work, metrics = Work(), {}
        if self.peak:
            for name, flops in zip(("mfu", "hfu"), self.flops.of(work)):
                share = sum(flops) * ranks.world_size / (work.steps * self.run.config.total_batch_size)
                metrics[name] = tokens_per_second * share / self.peak
        if self.is_sampled:
            readings = [Reading(*row[size:]) for row in gathered]
            metrics |= power_metrics(readings, tokens_per_second)
            self._warn_of_slowdowns(readings)
        return metrics

    def _warn_of_slowdowns(self, readings: list[Reading]) -> None:
        for bit, cause in SLOWDOWNS.items():
            slow = [rank for rank, reading in enumerate(readings)
                    if reading.slowdowns == reading.slowdowns and int(reading.slowdowns) & bit]
            if slow and not self.warned_of & bit:
                self.warned_of |= bit
                first = readings[slow[0]]
                names = ", ".join(f"GPU{number_of(rank)}" for rank in slow)
                self.run.log.warn(f"{names}: slowed down by {cause}, to {first.sm_clock_mhz:,.0f} MHz at "
                                  f"{first.watts:,.0f} W and {first.temperature:.0f} °C; reported once")
                self.run.log.event("throttled", self.run.progress.step, ranks=slow, cause=cause)


EXTENSION = Measurements


class Profiling:
    """Profiles the steps given by the settings. Called at the start and end of each step."""

    def __init__(self, run: Run):
        config, self.run = run.config, run
        self.window = step_window(config.profile_steps) or range(0)
        self.snapshot, self.profiler, self.recorded = config.memory_snapshot, None, []
        self.phase = None
        left = range(run.progress.step + 1, config.max_steps + 1)
        for name, steps in (("PROFILE_STEPS", self.window),
                            ("MEMORY_SNAPSHOT", self.snapshot and [self.snapshot])):
            if steps and (steps[-1] < left.start or steps[0] >= left.stop):
                run.log.info(f"{name} has no effect: this run takes steps {left.start:,} to "
                             f"{config.max_steps:,}")
        if not run.ranks.is_rank0:
            self.window, self.snapshot = range(0), None

    def begin(self, step: int) -> None:
        if step == self.snapshot:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        if self.window and self.window[0] - 1 <= step <= self.window[-1]:
            if self.profiler:
                self.profiler.step()
            else:
                self._start(step)
            if step in self.window:
                self.recorded.append(step)

    def mark(self, phase: str) -> None:
        """Begin a named phase in the trace; an empty name only ends the current one."""
        if self.phase and self.phase.name == phase:
            return
        if self.phase:
            self.phase.__exit__(None, None, None)
            self.phase = None
        if self.profiler and phase:
            self.phase = record_function(phase).__enter__()

    def end(self, step: int) -> None:
        if step == self.snapshot:
            self._write(f"memory-step-{step}.pickle", torch.cuda.memory._dump_snapshot,
                        "open it at pytorch.org/memory_viz")
            torch.cuda.memory._record_memory_history(enabled=None)
        if self.profiler and step == self.window[-1]:
            self.close(failed=False)

    def _start(self, step: int) -> None:
        """Start the profiler, if possible one step early to warm up."""
        def action(number: int) -> ProfilerAction:
            if (number := max(number, step)) < self.window[0]:
                return ProfilerAction.WARMUP
            return ProfilerAction.RECORD if number < self.window[-1] else ProfilerAction.RECORD_AND_SAVE

        cuda = [ProfilerActivity.CUDA] if self.run.ranks.device.type == "cuda" else []
        self.profiler = profile(activities=[ProfilerActivity.CPU, *cuda], schedule=action,
                                profile_memory=True, acc_events=True)  # acc_events avoids a warning in 2.11
        self.profiler.step_num = step  # our step numbers in the trace
        self.profiler.start()

    def close(self, failed: bool) -> None:
        """Write trace and tables of the recorded steps, unless the run `failed`."""
        self.mark("")
        profiler, self.profiler = self.profiler, None
        if not (profiler and self.recorded):  # torch 2.11 crashes if stopped in a warm-up
            return
        profiler.stop()
        if failed:
            return
        name = f"rank-{self.run.ranks.rank}-steps-{self.recorded[0]}-{self.recorded[-1]}"
        self._write(f"{name}.trace.json.gz", profiler.export_chrome_trace,
                    "open it in Perfetto, or in chrome://tracing")
        kind, averages = self.run.ranks.device.type, profiler.key_averages()
        tables = [f"Top {ROWS} by {order}\n{averages.table(sort_by=column, row_limit=ROWS)}"
                  for order, column in (("time", f"self_{kind}_time_total"),
                                        ("memory", f"self_{kind}_memory_usage"))]
        self._write(f"{name}.txt", lambda path: Path(path).write_text("\n".join(tables)),
                    f"the top {ROWS} by time and by memory")

    def _write(self, name: str, write: Callable[[str], object], hint: str) -> None:
        path = self.run.folder / "profile" / name
        try:
            with foreign_call():
                path.parent.mkdir(exist_ok=True)
                write(str(path))
        except (OSError, RuntimeError) as error:
            self.run.log.warn(f"{path} cannot be written: {error}; the run continues")
        else:
            self.run.log.info(f"Wrote {path}; {hint}")
