"""Apple's GPUs and ROCm, simulated: no such device is here."""

import ast
import io
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace

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
from extensions.report.console import describe_hardware
from learn import objectives
from learn.optim import Optimizer
from model_kernels import attention, head, matmul
from model_kernels.attention import choose_kernel
from model_kernels.head import HeadGradients, slices
from parallel.process import why_no_kernels
from run.facts import prepare_device
from scripts import doctor

ROOT = Path(__file__).resolve().parents[2]
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


# Compute capability and GiB.
CARDS = {"V100": ((7, 0), 32), "T4": ((7, 5), 16), "A100": ((8, 0), 80), "RTX 4090": ((8, 9), 24), "H100": ((9, 0), 80),
         "H200": ((9, 0), 141), "B200": ((10, 0), 180), "RTX 5090": ((12, 0), 32)}
WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # of torch 2.13 for CUDA 13; a 4090 runs the code of sm_86
SHAPES = {"174M": dict(dim=768, n_layers=12, n_heads=12, n_kv_heads=4, ffn_dim=2048, micro_batch_size=32, max_seq_len=2048),
          "1B": dict(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, micro_batch_size=4, max_seq_len=4096)}


@pytest.fixture
def plug_in(monkeypatch):
    """Let torch see one of CARDS; what a wheel of torch cannot tell, a trial of a kernel, succeeds for all that it contains."""
    def plug_in(card: str) -> None:
        capability, gibibytes = CARDS[card]
        properties = SimpleNamespace(name=card, major=capability[0], minor=capability[1], total_memory=gibibytes * 2**30)
        for name, value in {"is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": capability,
                            "get_device_name": card, "get_device_properties": properties, "get_arch_list": WHEEL}.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(attention, "CHOSEN", set())
        monkeypatch.setattr(attention, "trial", lambda kernel, *_: "not installed" if kernel in ("flash-2", "flash-3") else None)
        monkeypatch.setattr(model_utils, "why_no_kernel", lambda device_type: None)
        monkeypatch.setattr(model_utils.shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
        monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
        attention._choose.cache_clear()

    yield plug_in
    attention._choose.cache_clear()


def findings_of_doctor(monkeypatch) -> list[str]:
    """The states of doctor's lines about the GPU; its probe runs in this process, which sees the card."""
    def run(command, **_):
        with redirect_stdout(io.StringIO()) as output:
            exec(command[2], {})
        return subprocess.CompletedProcess(command, 0, output.getvalue(), "")

    with monkeypatch.context() as patch:
        patch.setattr(doctor.subprocess, "run", run)
        return [finding.state for finding in doctor.check_torch() if finding.subject == "GPU"]


def row_of(card: str, monkeypatch) -> str:
    """The row of a card in docs/gpu.md: what doctor, --check and a run choose on it."""
    (major, minor), gibibytes = CARDS[card]
    cells = [card, f"{major}.{minor}, {gibibytes} GiB", findings_of_doctor(monkeypatch)[-1]]
    settings = [Config(**shape, device="cuda", total_batch_size=shape["micro_batch_size"] * shape["max_seq_len"],
                       tie_embeddings=True) for shape in SHAPES.values()]
    if cells[-1] == "FAIL":
        with pytest.raises(SettingsError, match=f"{card}: this torch has no kernels for .* 7.0, only for sm_75 .*DEVICE=cpu"):
            prepare_device(settings[0])
        return f"| {' | '.join([*cells, *6 * ['refused']])} |"
    device = prepare_device(settings[0])
    dtype = model_utils.choose_dtype(settings[0], device.type)
    chosen = {purpose: choose_kernel(purpose, settings[0], device, dtype) for purpose in ("causal", "documents", "window")}
    text = describe_hardware(settings[0], device, dtype)  # in --check and in the log of a run
    assert f"{str(dtype).removeprefix('torch.')} with" in text and f"kernel {chosen['documents']}" in text
    is_compiled = "; compiled" in text
    assert is_compiled == (model_utils.why_not_compile(settings[0], "cuda") is None)
    chunks = []
    for config in settings:
        model = SimpleNamespace(vocab_size=128_256, head=SimpleNamespace(positions=None))
        head.choose_head_chunk(model, config, dtype.itemsize, device)
        tokens = model.head.positions or head.tokens_in_chunk(config.head_chunk_tokens, 128_256, "cuda")
        chunks.append(str(len(slices(config.micro_batch_size * config.max_seq_len, tokens))))
    cells += [str(dtype).removeprefix("torch."), *chosen.values(), ", ".join(chunks), "yes" if is_compiled else "no"]
    return f"| {' | '.join(cells)} |"


def test_the_table_of_cards_agrees_with_the_code(plug_in, monkeypatch):
    """The rows of docs/gpu.md."""
    rows = []
    for card in CARDS:
        plug_in(card)
        rows.append(row_of(card, monkeypatch))
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in page, "docs/gpu.md needs these rows:\n" + "\n".join(rows)


@pytest.mark.parametrize(("built", "capability", "runs"), [
    ("sm_90", (10, 0), False), ("compute_90", (10, 0), True), ("sm_90a", (9, 0), True), ("sm_100a", (10, 3), False),
    ("sm_100f", (10, 3), True), ("sm_80", (8, 9), True), ("sm_89", (8, 0), False), ("gfx942", (9, 4), True), ("", (9, 0), True)])
def test_code_runs_on_later_minor_versions_and_ptx_on_all_later_ones(built, capability, runs):
    assert (why_no_kernels(capability, built.split()) is None) == runs


@pytest.mark.parametrize("is_fast", [True, False])
def test_bf16_on_a_cpu_that_is_slower_with_it_names_the_way_out(is_fast, monkeypatch):
    monkeypatch.setattr(model_utils, "CPU_MULTIPLIES_BF16", is_fast)
    config = Config(precision="bf16")
    text = describe_hardware(config, torch.device("cpu"), torch.bfloat16)
    assert ("bfloat16, slower than fp32 on this CPU (PRECISION=auto takes fp32), with" in text) is not is_fast
    assert "slower" not in describe_hardware(config, torch.device("cpu"), torch.float32)


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


@pytest.mark.parametrize("hip", [None, "7.0"])
def test_rocm_does_without_the_matmul_that_only_cuda_has(hip, monkeypatch):
    calls, half = [], torch.ones(4, 2, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES_BF16", True)  # as the GPU does, whose tensors are really on the CPU
    monkeypatch.setattr(torch, "addmm", lambda *_, **options: calls.append(options["out_dtype"]))
    gradients = HeadGradients(half, torch.zeros(3, 2), None)
    gradients.add(slice(0, 4), on("cuda", half.new_ones(4, 3)), half, half[:3])
    assert calls == ([] if hip else [torch.float32]) and torch.all(gradients.learned == (4 if hip else 0))


def test_nothing_calls_cuda_when_it_is_imported():
    """A torch for another device may have none of its functions."""
    def calls(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.Lambda, ast.AsyncFunctionDef)):
                continue
            if isinstance(child, ast.Call) and ast.unparse(child.func).startswith(("torch.cuda.", "torch.mps.")):
                yield ast.unparse(child)
            yield from calls(child)

    files = [path for path in (*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")) if "tests" not in path.relative_to(ROOT).parts]
    assert len(files) > 100
    assert not {str(path): found for path in files if (found := [*calls(ast.parse(path.read_text()))])}
