"""Power, utilization, clocks and temperature of this rank's GPU, from NVML; the power of a CPU, from RAPL.

Everything is asked by a daemon thread: a driver may take long to answer, or never do.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Optional

import torch

from common.files import plain
from common.heartbeat import HEARTBEAT
from common.text import once, pip_install
from config import step_window
from parallel.process import number_of
from run.life import Run

HEADER = "time,gpu,watts,utilization,memory_bytes,temperature,sm_clock_mhz,throttle_reasons,phase,step"
RAPL = Path("/sys/class/powercap")
STOP_SECONDS = 2  # for the thread to end; afterwards it is abandoned
WRITE_SECONDS = 1  # between writes, and between readings of what changes slowly
MOST_BYTES, KEPT_FILES = 2**26, 8  # of one file, and of those before it
PAUSE_SHARE = 0.1  # of the time between two readings, from which on it is not taken for training
IDLE = 1  # nvmlClocksEventReasonGpuIdle; the other bits are reasons for a lower clock
# Of nvmlClocksEventReason..., those that slow down a GPU which has work.
SLOWDOWNS = {0x4: "its power limit", 0x8: "a hardware slowdown (heat or power)", 0x20: "heat",
             0x40: "heat (hardware slowdown)", 0x80: "the power brake"}


class Sample(NamedTuple):
    """One reading; None: it cannot be read here."""

    watts: Optional[float] = None
    joules: Optional[float] = None  # of a counter that only grows
    utilization: Optional[int] = None  # percent of the last moments in which a kernel ran
    memory_bytes: Optional[int] = None  # used on the device, by any process
    temperature: Optional[int] = None  # degrees Celsius
    sm_clock_mhz: Optional[int] = None
    throttle_reasons: Optional[int] = None  # bits of nvmlClocksEventReason...


class UnreadableError(Exception):
    """The power of this device cannot be read."""


class GpuMeter:
    """A GPU through NVML (the package nvidia-ml-py).

    Power is the field NVML_FI_DEV_POWER_INSTANT where the driver has it, because nvmlDeviceGetPowerUsage is
    the mean of a second since Ampere. Energy is the driver's counter, which sees what lies between samples.
    `uuid` has no "GPU-", as torch spells it. Raises UnreadableError, also for a part of a GPU (MIG).
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
        """The answer; None if there is none. What is not supported is not asked again."""
        if question in self.unknown:
            return None
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{question}")(self.handle, *arguments)
        except (self.nvml.NVMLError_NotSupported, self.nvml.NVMLError_FunctionNotFound):
            self.unknown.add(question)
        except self.nvml.NVMLError:  # for this moment only, perhaps
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


class CpuMeter:
    """All packages of a machine's CPUs, through RAPL; their cores and memory are parts of them.

    Raises UnreadableError if there is no such counter, or only root may read it.
    """

    def __init__(self) -> None:
        self.counters = [*packages()]
        if not self.counters:
            raise UnreadableError("no RAPL counter can be read")
        self.last, self.total, self.time = None, 0, 0.0

    def read(self) -> Sample:
        """Return the energy since the first reading, and, after that, the power since the last."""
        now, before, earlier = time.monotonic(), self.total, self.time
        try:
            values = [int(file.read_text()) for file, _ in self.counters]
        except (OSError, ValueError):
            return Sample()
        for value, last, (_, wraps_at) in zip(values, self.last or values, self.counters):
            self.total += value - last + (wraps_at if value < last else 0)
        watts = (self.total - before) / 1e6 / (now - earlier) if self.last and now > earlier else None
        self.last, self.time = values, now
        return Sample(watts, self.total / 1e6)

    def close(self) -> None:
        pass


def packages() -> Iterator[tuple[Path, int]]:
    """Yield each readable package counter of RAPL, and the microjoules at which it restarts."""
    for folder in sorted(RAPL.glob("intel-rapl:*")):
        with suppress(OSError, ValueError):
            # A counter of the whole system (psys) would count the packages twice.
            if (folder / "name").read_text().startswith("package"):
                int((folder / "energy_uj").read_text())
                yield folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())


class RotatedFile:
    """A CSV file to which lines are appended. At MOST_BYTES it becomes number 1, which becomes number 2 ...

    What cannot be written, on a full disk for example, is dropped with one warning. `folder` is a function,
    because the folder may be renamed.
    """

    def __init__(self, folder: Callable[[], Path], name: str, warn: Callable[[str], None]):
        self.folder, self.name, self.warn, self.file = folder, name, once(warn), None

    def append(self, lines: str) -> None:
        try:
            if self.file is None:
                self._open()
            size, content = os.fstat(self.file.fileno()).st_size, lines.encode()
            if self.file.write(content) < len(content):
                os.ftruncate(self.file.fileno(), size)
                raise OSError("there is not enough space for the whole text")
            if size + len(content) >= MOST_BYTES:
                self.close()
                stem, _, suffix = self.name.rpartition(".")
                names = [self.name, *(f"{stem}.{number}.{suffix}" for number in range(1, KEPT_FILES + 1))]
                for number in range(KEPT_FILES, 0, -1):
                    with suppress(FileNotFoundError):
                        (self.folder() / names[number - 1]).replace(self.folder() / names[number])
        except OSError as error:
            self.warn(f"{self.name} cannot be written: {error.strerror or error}; the run continues, and "
                      "these measurements are lost")

    def _open(self) -> None:
        self.file = open(self.folder() / self.name, "a+b", buffering=0, opener=plain)
        size = self.file.seek(0, os.SEEK_END)
        self.file.seek(max(0, size - 4096))
        cut = len(self.file.read().rpartition(b"\n")[2])  # of a process that was killed
        os.ftruncate(self.file.fileno(), size - cut)
        if size == cut:
            self.file.write(f"{HEADER}\n".encode())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class Reading(NamedTuple):
    """What a device did since the last reading; NaN: unknown."""

    watts: float = math.nan  # means
    utilization: float = math.nan
    throttled: float = math.nan  # share of the samples with a reason other than idle
    slowdowns: float = math.nan  # bits of SLOWDOWNS that at least half of the samples have
    memory_bytes: float = math.nan  # the highest
    temperature: float = math.nan
    sm_clock_mhz: float = math.nan  # the lowest


def over(rows: Sequence[Sample | Reading], name: str, combine: Callable[[list], float]) -> float:
    """Return what combines the known values of a field; NaN if there is none."""
    known = [value for row in rows if (value := getattr(row, name)) is not None and not math.isnan(value)]
    return combine(known) if known else math.nan


def summarize(samples: Sequence[Sample], watts: float) -> Reading:
    """Return the reading of some samples, with this mean power."""
    def slowdowns(reasons: list[int]) -> float:
        return sum(bit for bit in SLOWDOWNS if 2 * sum(bit & each > 0 for each in reasons) >= len(reasons))

    def throttled(reasons: list[int]) -> float:
        return fmean(each & ~IDLE > 0 for each in reasons)

    fields = {"utilization": fmean, "memory_bytes": max, "temperature": max, "sm_clock_mhz": min}
    return Reading(watts, throttled=over(samples, "throttle_reasons", throttled),
                   slowdowns=over(samples, "throttle_reasons", slowdowns),
                   **{name: over(samples, name, combine) for name, combine in fields.items()})


def power_metrics(readings: Sequence[Reading], tokens_per_second: float) -> dict[str, float]:
    """Return the metrics of the readings of all ranks; without those that no rank knows."""
    watts = over(readings, "watts", math.fsum)
    metrics = {"power_watts": watts, "joules_per_token": watts / tokens_per_second,
               "gpu_utilization": over(readings, "utilization", fmean),
               "gpu_memory_bytes": over(readings, "memory_bytes", max),
               "gpu_temperature_celsius": over(readings, "temperature", max),
               "gpu_clock_mhz": over(readings, "sm_clock_mhz", min),
               "gpu_throttled": over(readings, "throttled", fmean)}
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


class Moment(NamedTuple):
    """A sample and when it was taken."""

    sample: Sample
    monotonic: float
    pauses: float  # seconds of all pauses until then


class PowerSampler:
    """A thread that samples a meter into a file: once a second, or `hz` times in the steps of the window.

    Phases are marked in the window only. `open_meter` is called in the thread and may raise UnreadableError;
    then `note` is called once. `gpu` is the name in the file.
    """

    def __init__(self, open_meter: Callable[[], Any], gpu: str, window: Optional[Container[int]], hz: float,
                 file: RotatedFile, note: Callable[[str], None]):
        self.open_meter, self.gpu, self.file, self.note = open_meter, gpu, file, note
        self.window, self.hz, self.in_window = window or (), hz, False
        self.stopping, self.wake, self.lock = False, threading.Event(), threading.Lock()
        self.pauses, self.paused_at = 0.0, time.monotonic()  # seconds until the last began, which may go on
        self.lines: deque[str] = deque()
        self.samples: list[Sample] = []  # since the last `read`, of steps
        self.joules = self.seconds = 0.0  # of these
        self.last = Reading()
        self.thread = threading.Thread(target=self._work, name="power", daemon=True)
        self.thread.start()

    # Called by the training thread; none of these waits for the driver or a disk.

    def begin(self, step: int) -> None:
        if self.paused_at is not None:
            self.pauses, self.paused_at = self.pauses + time.monotonic() - self.paused_at, None
        if self.in_window != (step in self.window):
            self.in_window = not self.in_window
            self.wake.set()

    def end(self) -> None:
        self.paused_at = time.monotonic()  # what follows (evaluation, saving) is not counted

    def mark(self, at: float, phase: str, step: int) -> None:
        """Record when a phase began (Unix seconds), if the step is in the window."""
        if step in self.window and self.thread.is_alive():
            self.lines.append(f"{at:.6f},,,,,,,,{phase},{step}\n")

    def read(self) -> Reading:
        """Return what was measured in steps since the last call; if that is nothing, the same as then."""
        with self.lock:
            samples, joules, seconds = self.samples, self.joules, self.seconds
            self.samples, self.joules, self.seconds = [], 0.0, 0.0
        if samples:
            self.last = summarize(samples, joules / seconds)
        return self.last

    def stop(self) -> None:
        """End the thread, or abandon it if the driver does not answer."""
        self.stopping = True
        self.wake.set()
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
            self.file.close()

    def _sample(self, meter: Any) -> None:
        before, due, written = None, time.monotonic(), time.monotonic()
        while not self.stopping:
            sample, at, now = meter.read(), time.time(), time.monotonic()
            paused_at = self.paused_at
            moment = Moment(sample, now, self.pauses + (now - paused_at if paused_at else 0))
            if before:
                self._count(before, moment)
            before = moment
            watts = "" if sample.watts is None else f"{sample.watts:.3f}"
            reasons = None if sample.throttle_reasons is None else hex(sample.throttle_reasons)
            values = ["" if value is None else str(value) for value in (watts, *sample[2:-1], reasons)]
            self.lines.append(",".join((f"{at:.6f}", self.gpu, *values, HEARTBEAT.subphase,
                                        str(HEARTBEAT.step))) + "\n")
            if now >= written + WRITE_SECONDS:
                written = now
                self._write()
            # A reading that took longer than its period is not made up for.
            due = max(due + 1 / (self.hz if self.in_window else min(self.hz, 1)), now)
            if self.wake.wait(due - time.monotonic()):
                self.wake.clear()
                due = time.monotonic()

    def _count(self, before: Moment, now: Moment) -> None:
        """Add what lies between two samples, unless it was mostly a pause."""
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
        if lines := [self.lines.popleft() for _ in range(len(self.lines))]:
            self.file.append("".join(lines))


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
