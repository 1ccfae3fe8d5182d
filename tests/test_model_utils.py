"""What a model needs to run here: seeds, deterministic and compiled kernels, and the scale of a clipped gradient."""

import math
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from factories import new_model
from torch.torch_version import TorchVersion

import model
import model_utils
from checkpoint import huggingface
from common.errors import CheckpointError
from config import LORA_LAYERS, Config, ModelConfig
from learn.optim import clip_scale


@pytest.mark.parametrize("changed, change, sentence", [
    (model.Attention, lambda self: setattr(self, "q_norm", model.RMSNorm(8, 1e-5)),
     r"\(3 such parameters\): layers.0.attention.q_norm.weight is \(8,\) in model.py and missing in"),
    (model.Attention, lambda self: setattr(self, "wv", model.Linear(32, 32)),
     r"layers.0.attention.wv.weight is \(32, 32\) in model.py and \(16, 32\) in the tables"),
    (model.TransformerBlock, lambda self: delattr(self, "ffn_norm"),
     r"layers.0.ffn_norm.weight is missing in model.py and \(32,\) in the tables"),
])
def test_a_model_that_checkpoints_could_not_store_is_refused_when_it_is_built(changed, change, sentence, monkeypatch):
    config, build = ModelConfig(dim=32, n_layers=3, n_heads=4, n_kv_heads=2), changed.__init__
    model_utils.model_on_meta(config, 500, torch.float32)
    monkeypatch.setattr(changed, "__init__", lambda self, config: [build(self, config), change(self)] and None)
    with pytest.raises(CheckpointError, match=sentence + ".*add it to block_shapes in config.py"):
        model_utils.model_on_meta(config, 500, torch.float32)


def test_every_linear_layer_can_have_adapters():
    layers = [name for name, module in model_utils.model_on_meta(ModelConfig(), 500, torch.float32).named_modules()
              if isinstance(module, model.Linear)]
    assert {name.rpartition(".")[2]: huggingface.huggingface_name(f"{name}.weight").split(".")[-2]
            for name in layers} == LORA_LAYERS


def test_gradients_that_are_not_finite_are_not_scaled():
    for norm in (math.nan, math.inf):
        assert clip_scale(torch.tensor(norm), 1.0) == 1
    assert clip_scale(torch.tensor(4.0), 0.0) is None and clip_scale(torch.tensor(0.5), 1.0) == 1


def test_an_environment_whose_path_has_a_space_trains_without_the_compiler(monkeypatch):
    monkeypatch.setattr(model_utils.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.1+cpu"))
    assert model_utils.why_not_compile(Config(), "cpu") is None or " " in torch.__file__
    monkeypatch.setattr(torch, "__file__", "/my clone/.venv/torch/__init__.py")
    assert "/my clone/.venv/torch, because its path has a space" in model_utils.why_not_compile(Config(), "cpu")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.15.0+cpu"))  # quotes it
    assert model_utils.why_not_compile(Config(), "cpu") is None


def compiler_that(raises: Exception | None = None, adds: float = 0.0):
    def compile(function):
        def compiled(numbers):
            if raises is not None:
                raise raises
            return function(numbers) + adds
        return compiled
    return compile


@pytest.mark.parametrize(("compiler", "headers", "message"), [
    (compiler_that(), "/", None), (compiler_that(adds=1), "/", "its results are wrong, or set COMPILE=false"),
    (compiler_that(RuntimeError("\nno ptxas\nmore")), "/", "RuntimeError: no ptxas, or set COMPILE=false"),
    (compiler_that(subprocess.CalledProcessError(1, ["gcc"])), "/nowhere", "Python.h.*install python3-dev, or set COMPILE")])
def test_a_kernel_that_cannot_be_compiled_is_found_before_the_first_step(compiler, headers, message, tmp_path, monkeypatch):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(model_utils.sysconfig, "get_path", lambda *_: str(tmp_path) + headers)
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(model_utils.shutil, "which", lambda name: name)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setattr(model_utils, "why_no_kernel", lambda _, real=model_utils.why_no_kernel.__wrapped__: real("cpu"))
    reason = model_utils.why_not_compile(Config(), "cuda")
    assert reason is None if message is None else re.search(message, reason) and "\n" not in reason


@pytest.mark.filterwarnings("default")
def test_blocks_compiled_under_ddp_stay_whole(tmp_path, monkeypatch):
    """torch's optimizer for DDP would split their graphs, and keep more for the backward."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    def fail(*_):
        raise AssertionError("DDPOptimizer splits a graph")

    monkeypatch.setattr(DDPOptimizer, "compile_fn", fail)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, **options, backend="eager"))
    torch._dynamo.reset()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        network = new_model(Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16), 64)
        model_utils.compile_model(network)
        parallel = torch.nn.parallel.DistributedDataParallel(network)
        tokens = torch.arange(16)[None]
        parallel(tokens, tokens, mode="sum").backward()
    finally:
        parallel = None  # destroying it after its process group can hang
        torch.distributed.destroy_process_group()
        torch._dynamo.reset()
