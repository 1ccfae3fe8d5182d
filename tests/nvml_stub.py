"""NVML's functions that are used, with the signatures and types of nvidia-ml-py, for a made-up machine."""

from types import ModuleType, SimpleNamespace

GIB = 2**30


class NVMLError(Exception):
    """As pynvml's, like the classes below."""


NVMLError_NotSupported, NVMLError_FunctionNotFound, NVMLError_NotFound = (
    type(f"NVMLError_{name}", (NVMLError,), {}) for name in ("NotSupported", "FunctionNotFound", "NotFound"))

# What nvidia-smi shows of a machine: processes, GiB in use, percent, partitioned.
MACHINE = [(0, 1, 0, False), (2, 1, 0, False), (0, 1, 3, False), (0, 70, 0, False), (0, 1, 55, False), (0, 1, 0, True)]


class Pynvml(ModuleType):
    """The module pynvml, for MACHINE.

    Args:
        fails: the function that raises an error; "not supported", where that is possible.
    """

    NVMLError, NVMLError_NotSupported, NVMLError_FunctionNotFound = NVMLError, NVMLError_NotSupported, NVMLError_FunctionNotFound
    NVML_SUCCESS, NVML_FI_DEV_POWER_INSTANT, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 186, 0, 1

    def __init__(self, fails: str = ""):
        super().__init__("pynvml")
        self.is_open, self.fails, self.asked = False, fails, []
        self.milliwatts, self.millijoules, self.reasons = 300_000, 0, 0

    def _answer(self, name: str, value):
        assert self.is_open
        self.asked.append(name)
        if name in self.fails.split():
            raise NVMLError_NotSupported("Not Supported")
        return value

    def nvmlInit(self):
        if self.fails == "nvmlInit":
            raise NVMLError("NVML Shared Library Not Found")
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount(self):
        assert self.is_open
        return len(MACHINE)

    def nvmlDeviceGetHandleByIndex(self, index):
        return MACHINE[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for handle in MACHINE:
            if self.nvmlDeviceGetUUID(handle) == uuid:
                return handle
        raise NVMLError_NotFound("Not Found")

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{MACHINE.index(handle)}0f3"

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        return SimpleNamespace(total=80 * GIB, free=(80 - handle[1]) * GIB, used=handle[1] * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self._answer("nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=handle[2], memory=0))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=1, usedGpuMemory=None)] * handle[0]

    def nvmlDeviceGetMigMode(self, device):
        return [int(device[3]), int(device[3])]

    def nvmlDeviceGetFieldValues(self, handle, fieldIds):
        assert fieldIds == [self.NVML_FI_DEV_POWER_INSTANT]
        unknown = "nvmlDeviceGetFieldValues" in self.fails  # an error of the field, not of the call
        self.asked.append("nvmlDeviceGetFieldValues")
        return [SimpleNamespace(nvmlReturn=3 * unknown, value=SimpleNamespace(uiVal=0 if unknown else self.milliwatts))]

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer("nvmlDeviceGetPowerUsage", self.milliwatts - 1000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._answer("nvmlDeviceGetTotalEnergyConsumption", self.millijoules)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer("nvmlDeviceGetTemperature", 61)

    def nvmlDeviceGetClockInfo(self, handle, type):
        assert type == self.NVML_CLOCK_SM
        return self._answer("nvmlDeviceGetClockInfo", 1980)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self._answer("nvmlDeviceGetCurrentClocksThrottleReasons", self.reasons)
