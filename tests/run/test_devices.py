"""Apple's GPUs and ROCm, simulated: no such device is here."""

import pytest
import torch
from factories import TinyRun
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import model_utils
import train
from common.errors import SettingsError
from config import Config, RunConfig, mps_rules
from evaluation import during_run
from learn import objectives
from learn.optim import Optimizer
from parallel.process import why_no_kernels
from run.facts import prepare_device

MPS = torch.device("mps")


@pytest.mark.parametrize("seen, chosen", [("cuda mps", "cuda"), ("mps", "mps"), ("", "cpu")])
def test_auto_takes_cuda_then_mps_then_the_cpu(seen, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in seen)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in seen)
    monkeypatch.setattr(model_utils, "why_no_kernels", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert model_utils.choose_device(RunConfig()) == chosen
    if "mps" not in seen:
        with pytest.raises(SettingsError, match="DEVICE=mps, but torch sees no such GPU"):
            model_utils.choose_device(RunConfig(device="mps"))


@pytest.mark.parametrize(("built", "capability", "runs"), [
    ("sm_90", (10, 0), False), ("compute_90", (10, 0), True), ("sm_90a", (9, 0), True), ("sm_100a", (10, 3), False),
    ("sm_100f", (10, 3), True), ("sm_80", (8, 9), True), ("sm_89", (8, 0), False), ("gfx942", (9, 4), True), ("", (9, 0), True)])
def test_code_runs_on_later_minor_versions_and_ptx_on_all_later_ones(built, capability, runs):
    assert (why_no_kernels(capability, built.split()) is None) == runs


def test_what_mps_cannot_do_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    unable = {"world_size": 2, "sharding": "full", "precision": "fp16", "reproducible": True, "deterministic": True,
              "ledger_checksum": True, "lora_base_quantization": "nf4"}
    for name, value in unable.items():
        shown = f"{name.upper()}={str(value).lower()}"
        with pytest.raises(SettingsError, match=f"{shown} does not work on an Apple GPU; .*DEVICE=cpu"):
            prepare_device(Config(device="mps", **{name: value}))
    assert not [*mps_rules(Config())] and prepare_device(Config(device="mps")) == MPS
    assert "prototype" in model_utils.why_not_compile(Config(), "mps")
    assert model_utils.choose_dtype(RunConfig(), "mps") == torch.float32


class OnCpu(TorchFunctionMode):
    """Computes on the CPU what is asked of an Apple GPU; what its driver cannot do or may get wrong is an error."""

    asked = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def place(value):
            self.asked += value == MPS if isinstance(value, torch.device) else 0
            return torch.device("cpu") if isinstance(value, torch.device) else value

        before, kwargs = self.asked, kwargs or {}
        args, kwargs = tree_map(place, args), tree_map(place, kwargs)
        assert self.asked == before or not (kwargs.get("non_blocking") or kwargs.get("pin_memory")), function
        if function is torch.Tensor.double or (self.asked > before and kwargs.get("dtype") is torch.float64):
            assert hasattr(args[0], "left"), "an Apple GPU has no float64"
        result = function(*args, **kwargs)
        if function is torch.Tensor.cpu:
            result = result.clone()
            result.left = True
        return result


def test_a_run_on_a_simulated_apple_gpu_saves_resumes_and_learns_as_on_a_cpu(prepared, tmp_path, monkeypatch):
    settings = {"PRECISION": "bf16", "SAVE_EVERY": 1, "MAX_STEPS": 4, "SAMPLE_EVERY": 0}
    expected = TinyRun(prepared, tmp_path / "cpu", **settings).trained()
    calls, generator = [], torch.Generator
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name, value in {"manual_seed": calls.append, "synchronize": lambda: calls.append("synchronize"),
                        "driver_allocated_memory": lambda: 1, "recommended_max_memory": lambda: 2**40}.items():
        monkeypatch.setattr(torch.mps, name, value)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    for module in (train, during_run, objectives):
        monkeypatch.setattr(module, "widened", torch.Tensor.float)
    run = TinyRun(prepared, tmp_path / "mps", DEVICE="auto", **settings)
    with OnCpu() as mode:
        assert run.train(STOP_STEP=2) == 0 and run.train() == 0
    assert mode.asked > 20 and "synchronize" in calls and len(calls) > 4 and run.steps_saved()[-1] == 4
    assert run.lines("events")[0]["device"] == "Apple GPU (mps)"
    assert run.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)


def on(device: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that says that it is on another device."""
    return tensor.as_subclass(type("Moved", (torch.Tensor,), {"device": torch.device(device)}))


def test_an_update_on_mps_is_scaled_and_skipped_although_its_kernel_ignores_both():
    results = []
    for found_inf in (torch.zeros(()), on("mps", torch.zeros(())), on("mps", torch.ones(()))):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 4)
        before = layer.weight.detach().clone()
        optimizer = Optimizer(layer, Config())
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step(0.1, torch.tensor(2.0), found_inf)
        state = optimizer.optimizers[0].state[layer.weight]
        results.append((layer.weight.detach() - before, state.get("exp_avg")))
    (expected, moment), (scaled, its_moment), (skipped, none) = results
    assert torch.equal(scaled, expected) and torch.equal(its_moment, moment) and moment.any()
    assert none is None and not skipped.any()
