"""Power, utilization, clocks and temperature of this rank's GPU, from NVML.

A daemon thread does all queries, because a driver may answer late or never.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Optional

import torch

from common.activity import ACTIVITY
from common.files import plain
from common.text import once, pip_install
from parallel.process import number_of
from run.run import Run

HEADER = "time,gpu,watts,utilization,memory_bytes,temperature,sm_clock_mhz,throttle_reasons,phase,step"
STOP_SECONDS = 2  # time for the thread to end before it is abandoned
WRITE_SECONDS = 1  # between writes, and between readings of slowly changing values
PAUSE_SHARE = 0.1  # an interval with a larger share of pauses does not count as training
IDLE = 1  # nvmlClocksEventReasonGpuIdle; the other bits are reasons for a lower clock
# The nvmlClocksEventReason bits that slow down a busy GPU.
SLOWDOWNS = {0x4: "its power limit", 0x8: "a hardware slowdown (heat or power)", 0x20: "heat",
             0x40: "heat (hardware slowdown)", 0x80: "the power brake"}


class Sample(NamedTuple):
    """One reading; None if a value is not available."""

    watts: Optional[float] = None
    joules: Optional[float] = None  # from a counter that only grows
    utilization: Optional[int] = None  # percent of recent time in which a kernel ran
    memory_bytes: Optional[int] = None  # used on the device by all processes
    temperature: Optional[int] = None  # degrees Celsius
    sm_clock_mhz: Optional[int] = None
    throttle_reasons: Optional[int] = None  # bits of nvmlClocksEventReason...


class UnreadableError(Exception):
    """The power of this device cannot be read."""


class GpuMeter:
    """Reads a GPU through NVML (package nvidia-ml-py). `uuid` lacks the prefix "GPU-", like torch's.

    Power is NVML_FI_DEV_POWER_INSTANT where available, because since Ampere nvmlDeviceGetPowerUsage is the
    mean of a second. Energy is the driver's counter, which covers the time between samples.
    """

    def __init__(self, uuid: str):
        try:
            import pynvml
        except ImportError as error:
            raise UnreadableError(f"it needs {pip_install('nvidia-ml-py')}") from error
        self.nvml, self.unknown, self.slow = pynvml, set(), (-math.inf, {})
        try:
            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            raise UnreadableError(f"NVML does not report it for GPU-{uuid}: {error}") from error
        if self._watts() is None:
            raise UnreadableError(f"NVML does not report it for GPU-{uuid}")

    def _ask(self, question: str, *arguments) -> Any:
        """Query NVML; return None if it fails. Unsupported queries are not repeated."""
        if question in self.unknown:
            return None
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{question}")(self.handle, *arguments)
        except (self.nvml.NVMLError_NotSupported, self.nvml.NVMLError_FunctionNotFound):
            self.unknown.add(question)
        except self.nvml.NVMLError:  # may be temporary
            pass
        return None

    def _watts(self) -> Optional[float]:
        fields = self._ask("FieldValues", [self.nvml.NVML_FI_DEV_POWER_INSTANT])
        if fields is not None:
            if fields[0].nvmlReturn == self.nvml.NVML_SUCCESS:
                return fields[0].value.uiVal / 1000
            self.unknown.add("FieldValues")
        milliwatts = self._ask("PowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    def read(self) -> Sample:
        """Return a reading; utilization, memory and temperature are at most WRITE_SECONDS old."""
        if time.monotonic() - self.slow[0] >= WRITE_SECONDS:
            load, memory = self._ask("UtilizationRates"), self._ask("MemoryInfo")
            self.slow = time.monotonic(), {
                "utilization": load and load.gpu, "memory_bytes": memory and memory.used,
                "temperature": self._ask("Temperature", self.nvml.NVML_TEMPERATURE_GPU)}
        millijoules = self._ask("TotalEnergyConsumption")
        return Sample(self._watts(), None if millijoules is None else millijoules / 1000, **self.slow[1],
                      sm_clock_mhz=self._ask("ClockInfo", self.nvml.NVML_CLOCK_SM),
                      throttle_reasons=self._ask("CurrentClocksThrottleReasons"))

    def close(self) -> None:
        with suppress(self.nvml.NVMLError):
            self.nvml.nvmlShutdown()


class Reading(NamedTuple):
    """A device since the last reading; NaN if a value is unknown."""

    watts: float = math.nan  # mean
    utilization: float = math.nan  # mean
    throttled: float = math.nan  # share of samples with a reason other than idle
    slowdowns: float = math.nan  # bits of SLOWDOWNS set in at least half of the samples
    memory_bytes: float = math.nan  # maximum
    temperature: float = math.nan  # maximum
    sm_clock_mhz: float = math.nan  # minimum


def over(rows: Sequence[Sample | Reading], name: str, combine: Callable[[list], float]) -> float:
    """Combine the known values of a field; NaN if there are none."""
    known = [value for row in rows if (value := getattr(row, name)) is not None and not math.isnan(value)]
    return combine(known) if known else math.nan


def summarize(samples: Sequence[Sample], watts: float) -> Reading:
    """Return a reading of these samples and this mean power."""
    def slowdowns(reasons: list[int]) -> float:
        return sum(bit for bit in SLOWDOWNS if 2 * sum(bit & each > 0 for each in reasons) >= len(reasons))

    def throttled(reasons: list[int]) -> float:
        return fmean(each & ~IDLE > 0 for each in reasons)

    fields = {"utilization": fmean, "memory_bytes": max, "temperature": max, "sm_clock_mhz": min}
    return Reading(watts, throttled=over(samples, "throttle_reasons", throttled),
                   slowdowns=over(samples, "throttle_reasons", slowdowns),
                   **{name: over(samples, name, combine) for name, combine in fields.items()})


def power_metrics(readings: Sequence[Reading], tokens_per_second: float) -> dict[str, float]:
    """Return the known metrics over all ranks."""
    watts = over(readings, "watts", math.fsum)
    metrics = {"power_watts": watts, "joules_per_token": watts / tokens_per_second,
               "gpu_utilization": over(readings, "utilization", fmean),
               "gpu_memory_bytes": over(readings, "memory_bytes", max),
               "gpu_temperature_celsius": over(readings, "temperature", max),
               "gpu_clock_mhz": over(readings, "sm_clock_mhz", min),
               "gpu_throttled": over(readings, "throttled", fmean)}
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


class Moment(NamedTuple):
    """A sample with its time."""

    sample: Sample
    monotonic: float
    pauses: float  # total seconds of pauses until then


class PowerSampler:
    """A thread that samples a meter into a file `hz` times per second.

    The thread calls `open_meter`, `note` if that fails, and `warn` if lines cannot be written.
    """

    def __init__(self, open_meter: Callable[[], Any], gpu: str, hz: float, path: Path,
                 note: Callable[[str], None], warn: Callable[[str], None]):
        self.open_meter, self.gpu, self.hz, self.path, self.note = open_meter, gpu, hz, path, note
        self.warn = once(warn)
        self.stopping, self.lock = threading.Event(), threading.Lock()
        self.pauses, self.paused_at = 0.0, time.monotonic()  # finished pauses, and the start of a current one
        self.lines: list[str] = []  # not written yet
        self.samples: list[Sample] = []  # during steps since the last `read`
        self.joules = self.seconds = 0.0  # of these samples
        self.last = Reading()
        self.thread = threading.Thread(target=self._work, name="power", daemon=True)
        self.thread.start()

    # Called by the training thread. These methods never wait for the driver or a disk.

    def begin(self) -> None:
        if self.paused_at is not None:
            self.pauses, self.paused_at = self.pauses + time.monotonic() - self.paused_at, None

    def end(self) -> None:
        self.paused_at = time.monotonic()  # evaluation and saving do not count

    def read(self) -> Reading:
        """Return a reading of the steps since the last call, or the last reading if there is no sample."""
        with self.lock:
            samples, joules, seconds = self.samples, self.joules, self.seconds
            self.samples, self.joules, self.seconds = [], 0.0, 0.0
        if samples:
            self.last = summarize(samples, joules / seconds)
        return self.last

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(STOP_SECONDS)

    # Called by its own thread.

    def _work(self) -> None:
        try:
            meter = self.open_meter()
        except UnreadableError as error:
            self.note(f"Power is not measured: {error}")
            return
        try:
            self._sample(meter)
        finally:
            meter.close()
            self._write()

    def _sample(self, meter: Any) -> None:
        before, due, written = None, time.monotonic(), time.monotonic()
        while not self.stopping.is_set():
            sample, at, now = meter.read(), time.time(), time.monotonic()
            paused_at = self.paused_at
            moment = Moment(sample, now, self.pauses + (now - paused_at if paused_at else 0))
            if before:
                self._count(before, moment)
            before = moment
            watts = "" if sample.watts is None else f"{sample.watts:.3f}"
            reasons = None if sample.throttle_reasons is None else hex(sample.throttle_reasons)
            values = ["" if value is None else str(value) for value in (watts, *sample[2:-1], reasons)]
            self.lines.append(",".join((f"{at:.6f}", self.gpu, *values, ACTIVITY.phase,
                                        str(ACTIVITY.step))) + "\n")
            if now >= written + WRITE_SECONDS:
                written = now
                self._write()
            # If a reading took longer than its period, the missed ones are skipped.
            due = max(due + 1 / self.hz, now)
            self.stopping.wait(due - time.monotonic())

    def _count(self, before: Moment, now: Moment) -> None:
        """Add the energy and time between two samples, unless too much of it was a pause."""
        seconds, (old, new) = now.monotonic - before.monotonic, (before.sample, now.sample)
        if now.pauses - before.pauses > PAUSE_SHARE * seconds:
            return
        if None not in (new.joules, old.joules):
            joules = new.joules - old.joules
        elif None not in (new.watts, old.watts):
            joules = seconds * (new.watts + old.watts) / 2
        else:
            return
        with self.lock:
            self.samples.append(new)
            self.joules, self.seconds = self.joules + joules, self.seconds + seconds

    def _write(self) -> None:
        """Append the lines to the file; lines that cannot be written are dropped."""
        lines, self.lines = self.lines, []
        try:
            with open(self.path, "a+b", buffering=0, opener=plain) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 4096))
                cut = len(file.read().rpartition(b"\n")[2])  # of a killed process, or from a full disk
                file.truncate(size - cut)
                content = "".join([f"{HEADER}\n"] * (size == cut) + lines).encode()
                if file.write(content) < len(content):
                    raise OSError("not enough space")
        except OSError as error:
            self.warn(f"{self.path.name} cannot be written: {error.strerror or error}; the run continues, "
                      "and these measurements are lost")


def start_sampler(run: Run) -> Optional[PowerSampler]:
    """Start sampling this rank's GPU, if it has one and POWER_HZ is not 0."""
    config, ranks = run.config, run.ranks
    if not config.power_hz or ranks.device.type != "cuda":
        if config.power_hz and "power_hz" in config.model_fields_set:  # who did not ask needs no answer
            run.log.warn(f"POWER_HZ={config.power_hz:g}: power is measured on NVIDIA GPUs only")
        return None
    uuid = str(torch.cuda.get_device_properties(ranks.device).uuid)
    file = f"power-rank-{ranks.rank}.csv" if ranks.rank else "power.csv"
    return PowerSampler(lambda: GpuMeter(uuid), str(number_of(ranks.rank)), config.power_hz,
                        run.folder / file, run.log.info, run.log.warn)
