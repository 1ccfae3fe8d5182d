"""Which GPUs of this machine a job takes: by their numbers in nvidia-smi, or whichever are idle.

Needs no torch. `--gpus` of scripts/launch.py asks NVML (the package nvidia-ml-py).
"""

import os
from argparse import ArgumentTypeError
from typing import NamedTuple, Optional

from common.errors import SettingsError, requires_package

# What an idle GPU may show: the driver's own memory, and the utilization of a job that has just ended.
IDLE_MEMORY_SHARE, IDLE_PERCENT = 0.05, 10
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # new and old names


def configure_allocator() -> None:
    """Let segments of torch's CUDA allocator grow, so that less memory is lost to gaps; call it before CUDA.

    A setting of the user's takes precedence. Child processes inherit it.
    """
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


class Wanted(NamedTuple):
    """What --gpus asks for: these numbers, or, if there are none, so many idle ones."""

    count: int
    numbers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Wanted":
        """Return the meaning of "3,5" or "idle:2". Raises ArgumentTypeError, as argparse wants it."""
        kind, _, count = text.partition(":")
        if kind == "idle" and count.isdecimal() and int(count):
            return cls(int(count))
        numbers = text.split(",")
        if not all(number.isdecimal() for number in numbers) or len({*map(int, numbers)}) < len(numbers):
            raise ArgumentTypeError(f"{text:.40}: give different numbers of nvidia-smi, such as 3,5, or "
                                    "idle:2")
        return cls(len(numbers), tuple(map(int, numbers)))


class Gpu(NamedTuple):
    """A GPU as NVML sees it now."""

    number: int
    uuid: str
    is_partitioned: bool  # by MIG
    processes: int  # that compute on it
    used: int  # bytes
    total: int
    percent: int  # of the last moments in which a kernel ran

    @property
    def is_idle(self) -> bool:
        """Whether nobody seems to use it; the processes of other containers show in its memory only."""
        return not (self.processes or self.is_partitioned) and self.percent < IDLE_PERCENT \
            and self.used < IDLE_MEMORY_SHARE * self.total

    def __str__(self) -> str:
        if self.is_partitioned:
            return f"GPU {self.number} is partitioned (MIG)"
        return (f"GPU {self.number} has {self.processes} processes, "
                f"{self.used / 2**30:.1f} of {self.total / 2**30:.0f} GiB in use, is {self.percent} % busy")


def read_gpus() -> list[Gpu]:
    """Return all GPUs of this machine, in the order of nvidia-smi.

    Raises:
        SettingsError: nvidia-ml-py or the driver is missing.
    """
    with requires_package("nvidia-ml-py", "--gpus"):
        import pynvml
    try:
        pynvml.nvmlInit()
        try:
            return [_read_gpu(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise SettingsError(f"--gpus: NVML cannot be asked ({error}); check that nvidia-smi works here, or "
                            f"leave --gpus out and set {VISIBLE}") from error


def _read_gpu(nvml, number: int) -> Gpu:
    def ask(question: str, otherwise=None):
        try:
            return getattr(nvml, question)(handle)
        except nvml.NVMLError_NotSupported:
            return otherwise

    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    memory, load = nvml.nvmlDeviceGetMemoryInfo(handle), ask("nvmlDeviceGetUtilizationRates")
    is_partitioned = ask("nvmlDeviceGetMigMode", [0])[0] != 0
    processes = ask("nvmlDeviceGetComputeRunningProcesses", [])
    return Gpu(number, nvml.nvmlDeviceGetUUID(handle), is_partitioned, len(processes), memory.used,
               memory.total, load.gpu if load else 0)


def choose(wanted: Wanted, gpus: list[Gpu], visible: Optional[str]) -> list[int]:
    """Return the numbers of the chosen GPUs, among those that CUDA_VISIBLE_DEVICES names, if it is set.

    Raises:
        SettingsError: there are not as many, or a number is not there, not visible or partitioned.
    """
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        if any(name.startswith("MIG") for name in names):
            raise SettingsError(f"--gpus takes whole GPUs, but {VISIBLE}={visible} names parts of them; "
                                "leave --gpus out")
        gpus = [gpu for gpu in gpus for name in names
                if name == str(gpu.number) or name.startswith("GPU-") and gpu.uuid.startswith(name)]
    if wanted.numbers:
        found = {gpu.number: gpu for gpu in gpus}
        for number in wanted.numbers:
            if number not in found:
                of_these = f"{VISIBLE}={visible}" if visible is not None else "this machine"
                raise SettingsError(f"--gpus: there is no GPU {number} in {of_these}; choose from "
                                    f"{', '.join(map(str, found)) or 'none'}")
            if found[number].is_partitioned:
                raise SettingsError(f"--gpus: GPU {number} is partitioned (MIG); set {VISIBLE} to the UUID "
                                    "of a part (nvidia-smi -L), and leave --gpus out")
        return list(wanted.numbers)
    idle = [gpu.number for gpu in gpus if gpu.is_idle]
    if len(idle) < wanted.count:
        busy = "; ".join(str(gpu) for gpu in gpus if not gpu.is_idle)
        raise SettingsError(f"--gpus idle:{wanted.count}: of {len(gpus)} GPUs {len(idle)} are idle"
                            f"{f' ({busy})' if busy else ''}; wait, or name some with --gpus")
    return idle[:wanted.count]


def take(wanted: Wanted) -> None:
    """Make the chosen GPUs the only ones that this process and its children see.

    Raises:
        SettingsError: as `read_gpus` and `choose`.
    """
    numbers = choose(wanted, read_gpus(), os.environ.get(VISIBLE))
    os.environ |= {VISIBLE: ",".join(map(str, numbers)), ORDER: "PCI_BUS_ID"}  # nvidia-smi's order


def number_of(rank: int) -> int:
    """Return the number in nvidia-smi of this rank's GPU, if CUDA_VISIBLE_DEVICES tells it.

    Otherwise, and on several machines, where such a number is not unique, it is the rank.
    """
    names = os.environ.get(VISIBLE, "").split(",")
    name = names[rank].strip() if rank < len(names) else ""
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return int(name) if name.isdecimal() and on_one_machine else rank
