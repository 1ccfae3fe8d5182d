"""How well a run uses its hardware: FLOPs against the peak, and power, clocks and temperature of the GPUs."""

import math
from collections.abc import Sequence
from typing import Optional

import torch

from common.heartbeat import HEARTBEAT
from config import Config, step_window
from data_pipeline.batch import Batch
from parallel.gpus import number_of
from parallel.power import SLOWDOWNS, CpuMeter, GpuMeter, PowerSampler, Reading, RotatedFile, packages
from training.diagnostics import peak_flops
from training.flops import StepFlops, Work
from training.state import Run


class Utilization:
    """The metrics of utilization.

    Collective: every rank must call it.
    """

    def __init__(self, run: Run):
        config, ranks = run.config, run.ranks
        self.run, self.peak = run, peak_flops(ranks.device, config.peak_tflops)
        self.flops = step_flops(run)
        self.work, self.told = Work(), 0
        self.sampler = start_sampler(run)
        self.is_sampled = not ranks.all_agree(self.sampler is None)

    def begin(self, step: int) -> None:
        """A step begins, counted from 1."""
        if self.sampler:
            self.sampler.begin(step)

    def end(self, batches: Sequence[Batch]) -> None:
        """A step of these micro-batches ends."""
        self.work = Work(*map(sum, zip(self.work, self.flops.read(batches))))
        if self.sampler:
            self.sampler.end()

    def mark(self, at: float, phase: str, step: int) -> None:
        """Record when a phase of a step began (Unix seconds) beside the samples of power."""
        if self.sampler:
            self.sampler.mark(at, phase, step)

    def read(self, tokens_per_second: float) -> dict[str, float]:
        """The metrics since the last call, over all ranks. Collective: every rank must call it.

        Args:
            tokens_per_second: of all ranks since the last call.
        """
        own = self.sampler.read() if self.sampler else Reading()
        size, ranks = len(Work._fields), self.run.ranks
        gathered = ranks.all_gather_floats([*self.work, *(own if self.is_sampled else ())])
        work = Work(*(int(sum(column)) for column in zip(*(row[:size] for row in gathered))))
        self.work, metrics = Work(), {}
        if self.peak:
            for name, flops in zip(("mfu", "hfu"), self.flops.of(work)):
                share = sum(flops) / work.tokens
                metrics[name] = tokens_per_second * share / (self.peak * ranks.world_size)
        if self.is_sampled:
            readings = [Reading(*row[size:]) for row in gathered]
            metrics |= power_metrics(readings, tokens_per_second)
            self._warn_of_slowdowns(readings)
        return metrics

    def _warn_of_slowdowns(self, readings: list[Reading]) -> None:
        for bit, cause in SLOWDOWNS.items():
            slow = [rank for rank, reading in enumerate(readings)
                    if not math.isnan(reading.slowdowns) and int(reading.slowdowns) & bit]
            if slow and not self.told & bit:
                self.told |= bit
                one = readings[slow[0]]
                names = ", ".join(f"GPU{number_of(rank)}" for rank in slow)
                self.run.log.warn(f"{names}: slowed down by {cause}, to {one.sm_clock_mhz:,.0f} MHz at "
                                  f"{one.watts:,.0f} W and {one.temperature:.0f} °C; this is said once")
                self.run.log.event("throttled", HEARTBEAT.step, ranks=slow, cause=cause)

    def close(self) -> None:
        """End the sampling of power."""
        if self.sampler:
            self.sampler.stop()


def step_flops(run: Run, config: Optional[Config] = None) -> StepFlops:
    """The FLOPs of a run's steps, or with other settings."""
    return StepFlops(config or run.config, run.model, run.objective, run.inputs.tokenizer.vocab_size,
                     run.ranks.device.type)


def start_sampler(run: Run) -> Optional[PowerSampler]:
    """Sample the rank's GPU; on CPUs, the first rank of each machine samples all of them, if it can."""
    config, ranks = run.config, run.ranks
    on_gpu = ranks.device.type == "cuda"
    if not config.power_hz or not (on_gpu or (ranks.local_rank == 0 and any(packages()))):
        return None
    open_meter, name = CpuMeter, "cpu"
    if on_gpu:
        uuid, name = str(torch.cuda.get_device_properties(ranks.device).uuid), str(number_of(ranks.rank))
        open_meter = lambda: GpuMeter(uuid)
    file = RotatedFile(lambda: run.folder, f"power-rank-{ranks.rank}.csv" if ranks.rank else "power.csv",
                       run.log.warn)
    window = step_window(config.power_steps)
    if window is None and config.power_hz > 1:
        window = range(1, config.max_steps + 1)
    return PowerSampler(open_meter, name, window, config.power_hz, file, run.log.info)


def power_metrics(readings: Sequence[Reading], tokens_per_second: float) -> dict[str, float]:
    """The metrics of the readings of all ranks; without those that no rank knows."""
    def over(name: str, combine) -> float:
        known = [value for reading in readings if not math.isnan(value := getattr(reading, name))]
        return combine(known) if known else math.nan

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    watts = over("watts", math.fsum)
    metrics = {"power_watts": watts, "joules_per_token": watts / tokens_per_second,
               "gpu_utilization": over("utilization", mean), "gpu_memory_bytes": over("memory_bytes", max),
               "gpu_temperature_celsius": over("temperature", max),
               "gpu_clock_mhz": over("sm_clock_mhz", min), "gpu_throttled": over("throttled", mean)}
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
