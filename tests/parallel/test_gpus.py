"""GPUs are chosen as asked, from those that are there, visible and not partitioned."""

import os

import pytest
from nvml_stub import GIB

from common.errors import SettingsError
from parallel import process
from scripts.gpus import Gpu, GpuRequest, choose_gpus, read_gpus, take_gpus


def test_every_gpu_is_read_as_it_is(nvml):
    module = nvml()
    found = read_gpus()
    assert not module.is_open
    assert found[1] == Gpu(1, "GPU-10f3", False, 2, 1 * GIB, 80 * GIB, 0)
    assert [gpu.number for gpu in found if gpu.is_idle] == [0, 2]
    nvml("nvmlDeviceGetUtilizationRates")  # as on some cards
    assert [gpu.number for gpu in read_gpus() if gpu.is_idle] == [0, 2, 4]


@pytest.mark.parametrize(("requested", "visible", "taken"), [
    ("idle:2", None, [0, 2]), ("idle:1", "2,1", [2]), ("idle:1", "GPU-20", [2]), ("3,1", None, [3, 1]), ("least:3", None, [0, 2, 1]), ("4", " 1, 4", [4])])
def test_those_that_are_asked_for_are_taken(requested, visible, taken, nvml, monkeypatch):
    nvml()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # so that it is as before at the end
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    take_gpus(GpuRequest.parse(requested))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, taken))
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert len(taken) == GpuRequest.parse(requested).count
    assert [process.number_of(rank) for rank in range(len(taken))] == taken


@pytest.mark.parametrize(("requested", "visible", "reason"), [
    ("idle:3", None, "idle:3: idle GPUs: 2 of 6 (GPU 1 has 2 processes, is 0 % busy, and has 1.0 of 80 GiB in use; GPU 3 has 0"),
    ("idle:1", "", "idle GPUs: 0 of 0; wait"),
    ("6", None, "there is no GPU 6 in this machine; choose from 0, 1, 2, 3, 4, 5"),
    ("1,2", "0,2", "there is no GPU 1 in CUDA_VISIBLE_DEVICES=0,2; choose from 0, 2"),
    ("5", None, "GPU 5 is partitioned (MIG); set CUDA_VISIBLE_DEVICES to the UUID"),
    ("idle:1", "MIG-7,1", "CUDA_VISIBLE_DEVICES=MIG-7,1 contains MIG partitions; omit --gpus")])
def test_what_cannot_be_taken_is_refused_with_the_reason(requested, visible, reason, nvml, monkeypatch):
    nvml()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(SettingsError) as refused:
        choose_gpus(GpuRequest.parse(requested))
    assert reason in str(refused.value)
