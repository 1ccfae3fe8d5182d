"""--gpus: which GPUs of this machine a job takes. Without torch."""

import os
from argparse import ArgumentTypeError
from typing import NamedTuple

from common.errors import SettingsError, requires_package
from common.text import counted
from parallel.process import VISIBLE

# Limits of an idle GPU: the driver uses memory, and a job that just ended shows utilization.
IDLE_MEMORY_SHARE, IDLE_PERCENT = 0.05, 10


class GpuRequest(NamedTuple):
    """The value of --gpus: these numbers, or if empty, `count` GPUs, idle or at least the least used ones."""

    count: int
    numbers: tuple[int, ...] = ()
    may_be_busy: bool = False

    @classmethod
    def parse(cls, text: str) -> "GpuRequest":
        """Parse "3,5", "idle:2" or "least:2". Raises ArgumentTypeError for argparse."""
        kind, _, count = text.partition(":")
        if kind in ("idle", "least") and count.isdecimal() and int(count):
            return cls(int(count), may_be_busy=kind == "least")
        numbers = text.split(",")
        if not all(number.isdecimal() for number in numbers) or len({*map(int, numbers)}) < len(numbers):
            raise ArgumentTypeError(f"{text:.40}: expected different GPU numbers, such as 3,5, idle:2 or "
                                    "least:2")
        return cls(len(numbers), tuple(map(int, numbers)))


class Gpu(NamedTuple):
    """The current state of a GPU, from NVML."""

    number: int
    uuid: str
    is_partitioned: bool  # by MIG
    processes: int  # compute processes
    used: int  # bytes
    total: int
    percent: int  # recent utilization

    @property
    def is_idle(self) -> bool:
        """Whether the GPU seems unused; processes of other containers show only in its memory."""
        return not (self.processes or self.is_partitioned) and self.percent < IDLE_PERCENT \
            and self.used < IDLE_MEMORY_SHARE * self.total

    def __str__(self) -> str:
        if self.is_partitioned:
            return f"GPU {self.number} is partitioned (MIG)"
        return (f"GPU {self.number} has {counted(self.processes, 'process')}, is {self.percent} % busy, and "
                f"has {self.used / 2**30:.1f} of {self.total / 2**30:.0f} GiB in use")


def read_gpus() -> list[Gpu]:
    """Return all GPUs of this machine, in the order of nvidia-smi."""
    with requires_package("nvidia-ml-py", "--gpus"):
        import pynvml as nvml

    def ask(question: str, otherwise=None):
        try:
            return getattr(nvml, f"nvmlDeviceGet{question}")(handle)
        except nvml.NVMLError_NotSupported:
            return otherwise

    gpus = []
    try:
        nvml.nvmlInit()
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            memory, load = nvml.nvmlDeviceGetMemoryInfo(handle), ask("UtilizationRates")
            gpus.append(Gpu(number, nvml.nvmlDeviceGetUUID(handle), ask("MigMode", [0])[0] != 0,
                            len(ask("ComputeRunningProcesses", [])), memory.used, memory.total,
                            load.gpu if load else 0))
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise SettingsError(f"--gpus: NVML does not work ({error}); check that nvidia-smi works here, or "
                            f"leave --gpus out and set {VISIBLE}") from error
    return gpus


def choose_gpus(wanted: GpuRequest) -> list[int]:
    """Return the numbers of the chosen GPUs, among CUDA_VISIBLE_DEVICES if it is set."""
    gpus, visible, place = read_gpus(), os.environ.get(VISIBLE), "this machine"
    if visible is not None:
        place, names = f"{VISIBLE}={visible}", [name.strip() for name in visible.split(",")]
        if any(name.startswith("MIG") for name in names):
            raise SettingsError(f"--gpus needs whole GPUs, but {place} contains MIG partitions; omit --gpus")
        gpus = [gpu for gpu in gpus for name in names
                if name == str(gpu.number) or name.startswith("GPU-") and gpu.uuid.startswith(name)]
    by_number = {gpu.number: gpu for gpu in gpus}
    for number in wanted.numbers:
        if number not in by_number:
            raise SettingsError(f"--gpus: there is no GPU {number} in {place}; choose from "
                                f"{', '.join(map(str, by_number)) or 'none'}")
        if by_number[number].is_partitioned:
            raise SettingsError(f"--gpus: GPU {number} is partitioned (MIG); set {VISIBLE} to the UUID of a "
                                "partition (nvidia-smi -L), and omit --gpus")
    gpus.sort(key=lambda gpu: (not gpu.is_idle, gpu.used, gpu.percent) if wanted.may_be_busy else ())
    idle = [gpu.number for gpu in gpus if gpu.is_idle or wanted.may_be_busy and not gpu.is_partitioned]
    if not wanted.numbers and len(idle) < wanted.count:
        busy = "; ".join(str(gpu) for gpu in gpus if not gpu.is_idle)
        raise SettingsError(f"--gpus {'least' if wanted.may_be_busy else 'idle'}:{wanted.count}: "
                            f"{'whole' if wanted.may_be_busy else 'idle'} GPUs: {len(idle)} of {len(gpus)}"
                            f"{f' ({busy})' if busy else ''}; wait, or choose some with --gpus, or "
                            "the least used with least:N")
    return [*wanted.numbers] or idle[:wanted.count]


def take_gpus(wanted: GpuRequest) -> None:
    numbers = ",".join(map(str, choose_gpus(wanted)))
    os.environ |= {VISIBLE: numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # nvidia-smi's order
