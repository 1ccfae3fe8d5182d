"""The memory forecast is what autograd, the compiler and the optimizer really keep."""

import re

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

from config import Config
from fused import chunked_head
from model import AttentionMeta, Transformer, TransformerBlock
from settings.help import PRESETS_DIR
from settings.load import load_config
from training import memory_estimate
from training.memory_estimate import activation_bytes, estimate_memory, parameter_count
from training.preflight import GIB, memory_advice


def test_the_advice_on_memory_keeps_the_step_and_fits():
    config = Config(micro_batch_size=32)
    forecast = lambda **changes: estimate_memory(config.model_copy(update=changes), 128_256, 2).total
    for rows in (16, 4, 1):
        assert f"MICRO_BATCH_SIZE={rows} (" in memory_advice(config, forecast(micro_batch_size=rows), 128_256, 2)
    rows = {"micro_batch_size": 1}
    assert "ACTIVATION_CHECKPOINTING=selective (" in memory_advice(config, forecast(**rows) - 1, 128_256, 2)
    selective = forecast(**rows, activation_checkpointing="selective")
    assert "ACTIVATION_CHECKPOINTING=block (" in memory_advice(config, selective - 1, 128_256, 2)
    eager = config.model_copy(update={"compile": False})
    assert "ACTIVATION_CHECKPOINTING=block (" in memory_advice(eager, forecast(**rows, compile=False) - 1, 128_256, 2)
    assert "smaller model" in memory_advice(config, GIB, 128_256, 2)


@pytest.mark.parametrize("shape", [{"dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 768},
                                   {"dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 1, "ffn_dim": 512}])
def test_the_forecast_of_activations_is_near_what_autograd_keeps(shape):
    config, vocab = Config(**shape, micro_batch_size=4, max_seq_len=128, compile=False), 512
    transformer = Transformer(config, vocab)
    transformer.init_weights(torch.Generator().manual_seed(0))
    weights = {parameter.untyped_storage().data_ptr() for parameter in transformer.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(vocab, (4, 128))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        transformer.hidden(tokens, torch.ones(4, 128, dtype=torch.int32))
    measured = sum(storage.nbytes() for storage in kept.values())
    assert 0.75 < estimate_memory(config, vocab, 4).activations / measured < 1.35


def kept_by_the_compiler(config: Config, budget: float) -> float:
    """The bytes per token that a block's compiled graph saves for its backward, in bf16, as the partitioner decides."""
    torch._dynamo.reset()
    rows, length, kept = 3, 1100, []  # no weight has this many rows

    def partition(graph, joint, **options):
        forward, backward = min_cut_rematerialization_partition(graph, joint, compiler="inductor", **{
            name: value for name, value in options.items() if name != "compiler"})
        (output,) = [node for node in forward.graph.nodes if node.op == "output"]
        storages = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in
                    (node.meta["val"] for node in output.args[0][1:]) if isinstance(value, torch.Tensor)
                    and (rows * length in value.shape or (length in value.shape and value.shape[0] == rows))}
        kept.append(sum(storages.values()) / (rows * length))
        return forward, backward

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=partition, decompositions=select_decomp_table)
    with FakeTensorMode(allow_non_fake_inputs=True), torch._functorch.config.patch(activation_memory_budget=budget):
        block = TransformerBlock(config)
        angles = torch.empty(1, length, 1, config.head_dim)
        x_BTD = torch.empty(rows, length, config.dim, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(block, backend=backend, fullgraph=True)(x_BTD, AttentionMeta("sdpa", angles, angles)).sum().backward()
    return kept[0]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("shape", [{"dim": 768, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 2048},
                                   pytest.param({"dim": 512, "n_heads": 16, "n_kv_heads": 4, "ffn_dim": 1536},
                                                marks=pytest.mark.slow)])
def test_the_forecast_of_a_compiled_block_is_what_the_partitioner_keeps(shape):
    config = Config(**shape, activation_checkpointing="selective")

    def forecast(budget: float) -> float:
        return activation_bytes(config.model_copy(update={"activation_memory_budget": budget}), 2)

    for budget in (1.0, 0.9):
        assert kept_by_the_compiler(config, budget) == pytest.approx(forecast(budget), rel=0.01), budget
    assert forecast(0.9) < 0.75 * forecast(1.0)
    for budget in (0.5, 0.0):  # it saves whole tensors, and views of larger ones
        assert kept_by_the_compiler(config, budget) < 1.15 * forecast(budget), budget


def test_recomputation_saves_most_of_the_activations_of_a_deep_model():
    config = Config(n_layers=32)
    forecast = lambda recompute: estimate_memory(config.model_copy(update={"activation_checkpointing": recompute}), 128, 2)
    assert forecast("block").activations < 0.2 * forecast("none").activations
    assert forecast("block")._replace(activations=0) == forecast("none")._replace(activations=0)


def test_the_forecast_knows_how_many_logits_exist_at_a_time():
    assert memory_estimate.HEAD_CHUNK_BYTES == chunked_head.CHUNK_BYTES
    long = Config(micro_batch_size=64)
    assert estimate_memory(long, 128_256, 4, "cpu").head < estimate_memory(long, 128_256, 4, "cuda").head


def test_the_forecast_of_weights_gradients_and_state_is_exact():
    config = Config(dim=64, n_layers=2, n_heads=4, n_kv_heads=2)
    count = parameter_count(config, 256)
    forecast = estimate_memory(config, 256, 4)
    assert (forecast.parameters, forecast.gradients, forecast.optimizer) == (4 * count, 4 * count, 8 * count)
    assert estimate_memory(config, 256, 2).parameters == 6 * count


@pytest.mark.parametrize("preset", [file for file in sorted(PRESETS_DIR.glob("*.env")) if " billion parameters" in file.read_text()],
                         ids=lambda file: file.stem)
def test_the_comment_of_a_preset_says_what_the_forecast_says(preset):
    comment = preset.read_text().partition("\n")[0]
    config = load_config(["--preset", preset.stem], {}, complete=False).config
    assert f"bout {estimate_memory(config, 128_256, 2).total / GIB:.0f} GiB a GPU" in comment
    billions = re.search(r"([\d.]+) billion", comment)[1]
    digits = len(billions.partition(".")[2])
    assert f"{parameter_count(config, 128_256) / 1e9:.{digits}f}" == billions
