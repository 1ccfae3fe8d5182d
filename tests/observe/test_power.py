"""Power is read, counted in the steps only, written beside the phases, and never stands in a run's way."""

import contextlib
import errno
import math
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from factories import PATIENCE
from nvml_stub import GIB

from extensions import power
from extensions.power import HEADER, GpuMeter, Moment, PowerSampler, Sample, UnreadableError

# NVML


def test_a_reading_that_a_gpu_lacks_is_missing_and_not_requested_again(nvml):
    silent = "FieldValues TotalEnergyConsumption UtilizationRates CurrentClocksThrottleReasons"
    module = nvml(" ".join(f"nvmlDeviceGet{name}" for name in silent.split()))
    meter = GpuMeter("10f3")
    assert meter.read() == meter.read() == Sample(299, None, None, GIB, 61, 1980, None)  # of nvmlDeviceGetPowerUsage
    assert all(module.asked.count(f"nvmlDeviceGet{name}") == 1 for name in silent.split())


@pytest.mark.parametrize(("fails", "uuid", "reason"), [
    ("nvmlInit", "10f3", "NVML Shared Library Not Found"), ("", "99", "NVML does not report it for GPU-99: Not Found"),
    ("nvmlDeviceGetFieldValues nvmlDeviceGetPowerUsage", "10f3", "NVML does not report it for GPU-10f3"),
    (None, "10f3", "pip install .*nvidia-ml-py")])
def test_without_driver_gpu_or_package_there_is_one_reason(fails, uuid, reason, nvml, monkeypatch):
    nvml(fails or "")
    if fails is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnreadableError, match=reason):
        GpuMeter(uuid)


class Meter:
    """Measures 200 W, as its counter says. The first reading may hang."""

    def __init__(self, hangs=None):
        self.hangs, self.started, self.closed = hangs, time.monotonic(), False

    def read(self) -> Sample:
        if self.hangs:
            self.hangs.wait(PATIENCE)
        return Sample(200.0, 200 * (time.monotonic() - self.started), 80, 2**30, 60, 1000, 0)

    def close(self) -> None:
        self.closed = True


def sampler_of(meter, folder: Path, hz=1.0, notes=None) -> PowerSampler:
    def open_meter():
        if isinstance(meter, Exception):
            raise meter
        return meter

    notes = [] if notes is None else notes
    return PowerSampler(open_meter, "3", hz, folder / "power.csv", notes.append, notes.append)


def test_a_file_continues_after_its_last_whole_line_and_what_a_full_disk_refuses_is_dropped(tmp_path, monkeypatch):
    notes: list[str] = []
    sampler, path = sampler_of(UnreadableError("no driver"), tmp_path, notes=notes), tmp_path / "power.csv"
    sampler.stop()
    path.write_text(f"{HEADER}\nfirst\ncut of")  # by kill -9
    room = [100, 0, 3, 100]

    def opened(*arguments, **options):
        file, bytes_left = open(*arguments, **options), room.pop(0)

        def write(content: bytes) -> int:
            if not bytes_left:
                raise OSError(errno.ENOSPC, "No space left on device")
            return file.write(content[:bytes_left])

        limited = SimpleNamespace(seek=file.seek, read=file.read, truncate=file.truncate, write=write, close=file.close)
        return contextlib.closing(limited)

    monkeypatch.setattr(power, "open", opened, raising=False)
    for line in ("second", "third", "fourth", "fifth"):
        sampler.lines.append(f"{line}\n")
        sampler._write()
    assert path.read_text() == f"{HEADER}\nfirst\nsecond\nfifth\n"
    assert len(notes) == 2 and "power.csv cannot be written" in notes[1] and "measurements are lost" in notes[1]


def test_energy_is_the_counters_and_pauses_are_left_out(tmp_path):
    sampler = sampler_of(UnreadableError("no driver"), tmp_path)
    count = lambda *moments: [sampler._count(*pair) for pair in zip(moments, moments[1:])]
    assert sampler.read().watts is not None and math.isnan(sampler.read().watts)
    # Between two samples the power is not what either of them says.
    count(Moment(Sample(100, 0), 0, 0), Moment(Sample(100, 300), 1, 0), Moment(Sample(100, 600), 2, 0.05),
          Moment(Sample(100, 50_000), 12, 9), Moment(Sample(100, 50_200), 13, 9))
    assert sampler.read().watts == pytest.approx((300 + 300 + 200) / 3)
    # Without a counter the power is integrated; a reading that failed is left out.
    count(Moment(Sample(100), 0, 0), Moment(Sample(300), 1, 0), Moment(Sample(), 2, 0), Moment(Sample(500), 3, 0), Moment(Sample(500), 5, 0))
    assert sampler.read().watts == pytest.approx((200 * 1 + 500 * 2) / 3)


def test_a_driver_that_hangs_does_not_hang_the_run(tmp_path, monkeypatch, no_hang):
    monkeypatch.setattr(power, "STOP_SECONDS", 0.05)
    answers = threading.Event()
    sampler = sampler_of(Meter(hangs=answers), tmp_path)
    sampler.begin()
    sampler.end()
    assert math.isnan(sampler.read().watts)
    sampler.stop()
    assert sampler.thread.is_alive() and sampler.thread.daemon
    answers.set()
    sampler.thread.join(60)
