"""The memory forecast is what autograd, the compiler and the optimizer really keep."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lora
from config import Config, ModelConfig, rules
from extensions import cost
from extensions.cost import activation_bytes, estimate_memory
from extensions.forecast import GIB, TIGHT, forecast_memory, memory_advice
from model import AttentionPlan, Dropout, Transformer
from model_kernels import head, matmul
from model_utils import DTYPES
from plan.make import make_plan

FULL = {"world_size": 8, "sharding": "full"}
HYBRID = {"world_size": 8, "sharding": "hybrid", "shard_degree": 4}
BLOCK, UNTIED, LONG = {"activation_checkpointing": "block"}, {"tie_embeddings": False}, {"max_seq_len": 2048, "micro_batch_size": 1}
ONE = {"total_batch_size": 2048, "micro_batch_size": 2}  # a single micro-batch: no gradients are there when it begins
DPO = {"training_stage": "dpo", "dpo_reference": "live"}
EXACT = {"reproducible": True}
HALF = {"weight_dtype": "bf16", "optimizer_dtype": "bf16"}
IN_BACKWARD = {"update_in_backward": True, "max_grad_norm": 0.0, "total_batch_size": 32768}
LORA = {"lora_enabled": True, "lora_rank": 8}
SHALLOW = {"n_layers": 1}
B8 = {"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336, "n_layers": 32, **UNTIED, **LONG}
B1 = {"dim": 2048, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192, "n_layers": 4, **LONG}
SMALL, LARGE = 1000, 128_256
slow = pytest.mark.slow

# The settings, the vocabulary, and the dtype.
TRACED = [
    ({}, SMALL, "bf16"), (HYBRID | BLOCK, SMALL, "fp32"), (LORA | FULL | SHALLOW, SMALL, "bf16"), (DPO | FULL | SHALLOW, SMALL, "bf16"),
    (EXACT | SHALLOW, SMALL, "fp32"), (HALF | SHALLOW, SMALL, "bf16"), (HALF | FULL | IN_BACKWARD | SHALLOW, SMALL, "bf16"),
    *(pytest.param(*each, marks=slow) for each in (
        (HALF | ONE, LARGE, "bf16"), (HALF | UNTIED | BLOCK, LARGE, "bf16"), (HALF | HYBRID, SMALL, "bf16"),
        (HALF | {"optimizer": "muon"}, SMALL, "bf16"), (HALF | EXACT, SMALL, "bf16"), (B8 | HALF | IN_BACKWARD | BLOCK, LARGE, "bf16"),
        ({"optimizer_dtype": "bf16"}, SMALL, "bf16"), ({"distillation_enabled": True}, SMALL, "bf16"),
        ({"attention_backend": "auto", "max_seq_len": 512}, SMALL, "bf16"), ({"model_type": "qwen3", "head_width": 96}, SMALL, "bf16"),
        ({"model_type": "qwen2"}, 32_000, "fp32"), (FULL | BLOCK | LONG | UNTIED, LARGE, "bf16"), (LONG | {"attention_backend": "auto"}, LARGE, "fp32"),
        (EXACT | HYBRID, 32_000, "bf16"), (EXACT | B1 | FULL, LARGE, "bf16"), (EXACT | LORA, SMALL, "fp32"),
        ({"world_size": 4, "document_mask": True}, SMALL, "bf16"), (FULL | {"world_size": 64, "optimizer": "muon"}, SMALL, "bf16"),
        (LORA | BLOCK | {"lora_target_modules": "wq,wv"}, 32_000, "bf16"), (LORA | FULL | UNTIED | {"lora_train_head": True}, 32_000, "bf16"),
        (DPO | FULL | LONG | UNTIED, LARGE, "bf16"), (DPO | LORA, 32_000, "bf16"),
        (FULL | BLOCK | {"cpu_offload": True}, 32_000, "bf16"), (B1 | BLOCK, LARGE, "bf16"), (B8 | HYBRID, LARGE, "bf16")))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes, vocab_size, dtype", TRACED)
def test_the_forecast_is_what_torch_traces(changes, vocab_size, dtype):
    from memory_trace import trace  # whose import takes seconds

    config = Config(**{"dim": 512, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 1536, "micro_batch_size": 4,
                       "max_seq_len": 1024, "total_batch_size": 2**20, "compile": False, "document_mask": False,
                       "async_save": False, "attention_backend": "sdpa"} | changes)
    teacher = ModelConfig(dim=1024, n_layers=2, n_heads=8) if config.distillation_enabled else None
    traced = trace(config, vocab_size, DTYPES[dtype], teacher)
    forecast = estimate_memory(config, vocab_size, DTYPES[dtype].itemsize, "cpu", traced.frozen if teacher else 0)
    assert forecast.total + forecast.offloaded == pytest.approx(traced.peak, rel=0.05)
    held = forecast.parameters + forecast.optimizer + (forecast.offloaded - traced.gradients if config.cpu_offload else 0)
    # The weights of the norms, with their moments, are whole on each rank; the forecast divides them too.
    norms = config.dim * (2 * config.n_layers + 1) * (DTYPES[dtype].itemsize if config.lora_enabled else 12)
    held += norms * (1 - 1 / config.ranks_per_copy)
    assert held == pytest.approx(traced.parameters + traced.optimizer, rel=0.01)


# Peak resident memory in GiB of train.py in fp32, eager, with a save after each step, measured on 2026-11-26 on two AVX2 cores
# (kernel 6.18, glibc 2.36, torch 2.13): shape, rows and their length, vocabulary. The last saved once, and had no huge pages.
RESIDENT = [((128, 3, 2, 2, 352), 8, 256, 49_152, {}, 0.769), ((256, 6, 8, 4, 768), 4, 256, 49_152, {}, 1.128),
            ((256, 6, 8, 4, 768), 4, 256, 128_256, {}, 1.785), ((576, 8, 9, 3, 1536), 2, 512, 49_152, {}, 2.445),
            ((576, 30, 9, 3, 1536), 2, 512, 49_152, {"lora_enabled": True, "training_stage": "sft", "save_every": 0}, 2.576)]


@pytest.mark.parametrize("shape, rows, length, vocab_size, changes, measured", RESIDENT)
def test_the_forecast_on_a_cpu_is_the_resident_memory_of_real_processes(shape, rows, length, vocab_size, changes, measured):
    named = dict(zip(("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"), shape)) | changes
    config = Config(**named, micro_batch_size=rows, max_seq_len=length, total_batch_size=rows * length, compile=False)
    assert forecast_memory(config, vocab_size, 4, "cpu").total == pytest.approx(measured * GIB, rel=0.1)
    on_gpu = forecast_memory(config, vocab_size, 4)
    assert on_gpu == estimate_memory(config, vocab_size, 4) and not on_gpu.process


# Settings that do not fit: a preset, its changes, and the memory of a GPU in GB
TOO_LARGE = [
    *((preset, {"world_size": 8}, memory) for preset in ("8b", "3b") for memory in (24, 40)), ("llama3-8b", {"world_size": 64, "sharding": "none"}, 141),
    ("1.3b", {"compile": "false", "world_size": 8}, 48), ("1.3b", {"micro_batch_size": 64}, 80)]


@pytest.mark.parametrize("preset, changes, memory", TOO_LARGE)
def test_what_is_proposed_fits_and_is_accepted(preset, changes, memory):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ({"preset": preset} | changes).items()]
    config = make_plan(flags, {}, complete=False).config
    known = (128_256, 2, "cuda")
    assert estimate_memory(config, *known).total > memory * 1e9
    advice = memory_advice(config, int(memory * 1e9), *known)
    (proposed, forecast), *roomy = re.findall(r"with ([A-Z_]+=.*?) \(about ([\d.]+) GiB", advice)
    is_tight = float(forecast) > (1 - TIGHT) * memory * 1e9 / GIB
    assert advice.startswith("With the same global batch, it would fit with ") and (is_tight or not roomy) and len(roomy) < 2
    assert all(float(needed) <= (1 - TIGHT) * memory * 1e9 / GIB for _, needed in roomy)
    better = make_plan([*flags, *(f"--{part.lower().replace('_', '-')}" for part in proposed.split())], {}, complete=False).config
    total = estimate_memory(better, *known).total
    assert total <= memory * 1e9 and f"{total / GIB:.2f}" == forecast
    assert better.total_batch_size == config.total_batch_size
    assert [*rules(better)] == [*rules(config)]
    assert better.accumulation_steps * better.micro_batch_size == config.accumulation_steps * config.micro_batch_size


def kept_by_the_compiler(config: Config, budget: float, gathered: bool = False) -> tuple[float, float]:
    """What a block's compiled graph saves for its backward, in bf16, as the partitioner decides: the bytes per token, and those
    of copies of weights.

    Args:
        gathered: the matrices are in bf16 already, as FSDP gathers them.
    """
    # Here, because each worker of pytest imports all test files.
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    torch._dynamo.reset()
    rows, length, kept = 3, 1100, []  # no weight has this many rows

    def partition(graph, joint, **options):
        forward, backward = min_cut_rematerialization_partition(graph, joint, compiler="inductor", **{
            name: value for name, value in options.items() if name != "compiler"})
        (output,) = [node for node in forward.graph.nodes if node.op == "output"]
        tokens, copies = {}, {}
        for node in output.args[0][1:]:
            if isinstance(value := node.meta["val"], torch.Tensor):
                of_tokens = rows * length in value.shape or (length in value.shape and value.shape[0] == rows)
                if of_tokens or node.op != "placeholder":
                    (tokens if of_tokens else copies)[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        kept.append((sum(tokens.values()) / (rows * length), sum(copies.values())))
        return forward, backward

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=partition, decompositions=select_decomp_table)
    with FakeTensorMode(allow_non_fake_inputs=True), torch._functorch.config.patch(activation_memory_budget=budget):
        model = Transformer(config, 128, torch.bfloat16)
        if config.lora_enabled:
            lora.add_adapters(model, config, torch.Generator())
            lora.cast_base(model, torch.bfloat16)
        (block,) = model.layers
        if gathered:
            lora.cast_base(block.requires_grad_(False), torch.bfloat16)
            block.requires_grad_(True)
        for module in block.modules():
            if isinstance(module, Dropout):
                module.keys_B = torch.zeros(rows, dtype=torch.int32)
        angles = torch.empty(1, length, 1, config.head_dim)
        x_BTD = torch.empty(rows, length, config.dim, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(block, backend=backend, fullgraph=True)(x_BTD, AttentionPlan("sdpa", angles, angles)).sum().backward()
    return kept[0]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("shape", [{"dim": 768, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 2048},
                                   pytest.param({"dim": 512, "n_heads": 16, "n_kv_heads": 4, "ffn_dim": 1536},
                                                marks=pytest.mark.slow)])
def test_the_forecast_of_a_compiled_block_is_what_the_partitioner_keeps(shape, monkeypatch):
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES_BF16", True)  # as a GPU does

    def forecast(budget: float, **changes) -> tuple[float, float]:
        config = Config(**shape, n_layers=1, activation_checkpointing="selective", activation_memory_budget=budget, **changes)
        return activation_bytes(config, 2), cost.sizes_of(config, 128, 2, "cuda").copies

    config = Config(**shape, n_layers=1)
    for budget in (1.0, 0.9):
        assert kept_by_the_compiler(config, budget) == pytest.approx(forecast(budget), rel=0.01), budget
    assert kept_by_the_compiler(config, 0.9, gathered=True) == pytest.approx(forecast(0.9, sharding="full"), rel=0.01)
    assert forecast(0.9)[0] < 0.75 * forecast(1.0)[0] and forecast(0.9)[1] < forecast(1.0)[1]
    tokens, copies = kept_by_the_compiler(config, 0.0)  # it saves whole tensors, and views of larger ones
    assert tokens < 1.15 * forecast(0.0)[0] and copies == forecast(0.0)[1] == 0


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("changes", [{}, {"model_type": "qwen3"}, *(pytest.param(each, marks=slow) for each in (
    {"model_type": "qwen2"}, {"lora_target_modules": "wq,wv"}, {"lora_target_modules": "w1,w2,w3"}, {"lora_dropout": 0.1}))])
def test_the_forecast_of_a_compiled_block_with_adapters_is_what_the_partitioner_keeps(changes, monkeypatch):
    """Without a joint q k v, the projected ones are not kept, and each adapter keeps its product with the rank."""
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES_BF16", True)  # as a GPU does
    config = Config(**LORA | {"dim": 768, "n_layers": 1, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 2048} | changes)
    tokens, copies = kept_by_the_compiler(config, 1.0)
    assert tokens == pytest.approx(activation_bytes(config, 2), rel=0.03 if config.lora_dropout else 1e-3)
    assert copies == pytest.approx(cost.sizes_of(config, 128, 2, "cuda").copies, rel=0.03)


@pytest.mark.parametrize("changes, gigabytes, factor", [
    ({}, 80, 4), ({}, 18, 2), ({}, 15, None), ({"reproducible": True, "micro_batch_size": 8}, 80, None), ({"head_chunk_tokens": 100}, 80, None),
    ({"training_stage": "dpo"}, 80, None), ({"compile": False}, 18, None), ({"compile": False}, 80, 4)])
def test_the_head_takes_larger_chunks_where_their_forecast_fits_the_gpu(changes, gigabytes, factor, monkeypatch):
    config = Config(**{"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 2048, "max_seq_len": 2048,
                       "micro_batch_size": 8, "total_batch_size": 2**17} | changes)
    # A GPU without a compiler needs more memory, whatever COMPILE is.
    is_compiled, config = config.compile, config.model_copy(update={"compile": True})
    monkeypatch.setattr(cost, "why_not_compile", lambda *_: None if is_compiled else "no C compiler was found")
    chosen = cost.with_head_chunk(config, LARGE, 2, gigabytes * 10**9)
    assert chosen.head_chunk_tokens == (factor * (2**31 // 4 // LARGE) if factor else config.head_chunk_tokens)
    # A run and the benchmarks set a model's chunk by the same rule, on a GPU.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gigabytes * 10**9))
    model = SimpleNamespace(vocab_size=LARGE, head=SimpleNamespace(positions=config.head_chunk_tokens))
    cost.choose_head_chunk(model, config, 2, torch.device("cuda"))
    assert model.head.positions == chosen.head_chunk_tokens
    assert factor is None or estimate_memory(chosen, LARGE, 2).total < gigabytes * 10**9


def test_the_forecast_without_a_compiler_counts_a_chunk_three_times_on_a_gpu():
    """Logits, their float32 copy and their gradient, as torch traces them; a CPU overwrites the logits."""
    from memory_trace import Tracker

    config = Config(dim=128, n_layers=1, n_heads=2, max_seq_len=4096, micro_batch_size=4, total_batch_size=2**14, compile=False,
                    head_chunk_tokens=2**13)
    with FakeTensorMode():
        rows = torch.zeros(2**13, LARGE, dtype=torch.bfloat16), torch.zeros(2**13, dtype=torch.int64)
        with (tracker := Tracker()):
            tracker.track_external(rows[0])
            head.logprob_and_gradient(*rows, LARGE)
    traced = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    half = config.model_copy(update={"head_chunk_tokens": 2**12})
    forecast = 2 * (estimate_memory(config, LARGE, 2).total - estimate_memory(half, LARGE, 2).total)
    assert forecast == pytest.approx(traced, rel=0.001) and forecast == 8 * rows[0].numel()


def test_a_start_records_the_forecast_and_warns_if_it_exceeds_the_memory(tiny_run, monkeypatch, capsys):
    from extensions import forecast

    run = tiny_run(MAX_STEPS=1, EXTENSIONS="default", HELLASWAG_EVERY=0)
    assert run.train() == 0
    needed = json.loads((run.folder / "config.json").read_text())["memory_forecast_gib"]
    assert 0.3 < needed < 2 and "the run needs about" not in capsys.readouterr().err
    monkeypatch.setattr(forecast, "memory_of", lambda config, device: (2**40, 2**28, "this machine"))
    assert tiny_run(MAX_STEPS=1, EXTENSIONS="default", HELLASWAG_EVERY=0, RUN_NAME="small").train() == 0
    assert f"the run needs about {needed:.2f} GiB, but this machine has 0.2 GiB. " in capsys.readouterr().err
