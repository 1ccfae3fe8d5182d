import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from config import ModelConfig
from learn.cost import forward_flops, parameter_count
from model import Transformer
from observe import guards
from observe.guards import FirstBad, bad_gradients, banner, describe_tensors, write_dump
from run.diagnostics import peak_flops, peak_memory_bytes

VOCAB = 256


def make_model(**settings) -> Transformer:
    config = ModelConfig(**{"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 160, **settings})
    model = Transformer(config, VOCAB)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


# FLOPs


def test_flops_of_a_small_model_counted_by_hand():
    config = ModelConfig(dim=8, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=20)
    block = 8 * 8 + 4 * 8 + 4 * 8 + 8 * 8 + 3 * 8 * 20  # wq wk wv wo, w1 w2 w3
    scores_and_values = 3 * 2 * (2 * 8 * 16)  # 3 layers, QK' and AV, 2 FLOPs x width 8 x 16 tokens
    assert 3 * sum(forward_flops(config, 100, seq_len=16)) == 3 * (2 * (3 * block + 800) + scores_and_values)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flops_equal_what_torch_counts_in_the_matmuls(tie, kv_heads):
    # Of attention, torch counts only what is written out as matmuls.
    model, rows, length = make_model(tie_embeddings=tie, n_kv_heads=kv_heads, attention_backend="math"), 2, 32
    tokens = torch.randint(VOCAB, (rows, length))
    model.hidden(tokens)  # the kernel of attention is tried at the first forward
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens, reduction="none").sum().backward()
    per_token = counter.get_total_flops() / tokens.numel()
    assert per_token == pytest.approx(3 * sum(forward_flops(model.config, VOCAB, length)), rel=1e-6)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("ffn", [{"ffn_dim": 160}, {"ffn_dim": None, "multiple_of": 32, "ffn_dim_multiplier": 1.3}])
def test_the_forecast_counts_every_parameter(tie, ffn):
    model = make_model(tie_embeddings=tie, **ffn)
    assert parameter_count(model.config, VOCAB) == sum(parameter.numel() for parameter in model.parameters())


def test_the_peak_is_known_or_set_or_unknown(monkeypatch):
    assert peak_flops(torch.device("cpu")) is None
    assert peak_flops(torch.device("cpu"), override_tflops=2) == 2e12
    for name, tflops in (("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A10G", 70),
                         ("NVIDIA L40S", 362), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GeForce RTX 4090", 165),
                         ("NVIDIA B300 SXM6 AC", 2250), ("NVIDIA GB300", 2500), ("NVIDIA H20", 148), ("NVIDIA H20-3e", 148),
                         ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 504),
                         ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 439)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda")) == tflops * 1e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L400")
    assert peak_flops(torch.device("cuda")) is None


def test_peak_memory_on_a_cpu_is_resident_and_never_shrinks():
    before = peak_memory_bytes(torch.device("cpu"))
    held = torch.ones(before // 4 + 16 * 2**20)
    assert peak_memory_bytes(torch.device("cpu")) >= max(before, held.nbytes)
    del held
    assert peak_memory_bytes(torch.device("cpu")) > before > 2**20


# What went wrong


def test_bad_parameters_and_gradients_are_described():
    model = make_model()
    tokens = torch.randint(VOCAB, (1, 8))
    (-model(tokens, tokens, reduction="sum")).backward()
    assert describe_tensors(model) == []
    with torch.no_grad():
        model.norm.weight.grad[3] = math.nan
        model.layers[1].attention.wq.weight[0, :2] = math.inf
    assert describe_tensors(model) == [
        {"tensor": "layers.1.attention.wq.weight", "kind": "parameter", "shape": [64, 64], "non_finite": 2,
         "first_values": ["inf", "inf", *map(str, model.layers[1].attention.wq.weight[0, 2:4].tolist())]},
        {"tensor": "norm.weight", "kind": "gradient", "shape": [64], "non_finite": 1,
         "first_values": [str(value) for value in model.norm.weight.grad[:4].tolist()]}]
    json.dumps(describe_tensors(model), allow_nan=False)


def test_the_bad_gradients_are_kept_as_far_as_there_is_room_the_least_spoilt_first(monkeypatch):
    model = make_model()
    tokens = torch.randint(VOCAB, (1, 8))
    (-model(tokens, tokens, reduction="sum")).backward()
    assert bad_gradients(model, "gradient") == {}
    spoilt = {"norm.weight": slice(None), "layers.1.attention.wq.weight": (slice(1), 5), "layers.0.attention.wo.weight": slice(9)}
    for name, place in spoilt.items():
        model.get_parameter(name).grad[place] = math.nan
    kept = bad_gradients(model, "own")
    assert [*kept] == ["own.layers.1.attention.wq.weight", "own.layers.0.attention.wo.weight", "own.norm.weight"]
    for name in spoilt:
        gradient = model.get_parameter(name).grad
        assert kept[f"own.{name}"].data_ptr() != gradient.data_ptr()
        torch.testing.assert_close(kept[f"own.{name}"], gradient, equal_nan=True)
    matrix, vector = model.layers[0].attention.wo.weight.nbytes, model.norm.weight.nbytes
    monkeypatch.setattr(guards, "KEPT_BYTES", matrix + vector)
    assert [*bad_gradients(model, "own")] == ["own.layers.1.attention.wq.weight", "own.norm.weight"]


@pytest.mark.parametrize("planted, found", [
    ("layers.0.feed_forward.w2", "layers.0.feed_forward.w2"), ("layers.1.attention.wo", "layers.1.attention.wo"),
    ("layers.1.ffn_norm", "layers.1.ffn_norm"), ("tok_embeddings", "tok_embeddings"), (None, None)])
def test_the_first_module_whose_output_went_bad_is_named(planted, found):
    model = make_model()
    first_bad = FirstBad(model)
    tokens = torch.randint(VOCAB, (1, 8))
    if planted:
        with torch.no_grad():
            model.get_submodule(planted).weight[:] = math.nan
    model(tokens, tokens, reduction="sum")
    assert first_bad.module == found


REPORT = {"step": 7, "rank": 1, "finite": False, "loss": "nan", "grad_norm": "nan", "rows": [[3, 5], [8, 1]],
          "first_bad_module": "layers.0.feed_forward.w2", "tensors": [
              {"tensor": "norm.weight", "kind": "gradient", "shape": [64], "non_finite": 2, "first_values": ["nan", "0.5"]}]}


def test_a_dump_is_read_without_pickle(tmp_path):
    tensors = {"tokens_BT.0": torch.arange(12).view(3, 4).T, "grad": torch.tensor([math.nan, 1.0]),
               "half": torch.ones(2, dtype=torch.bfloat16)}
    write_dump(tmp_path / "debug" / "step-00000007", REPORT, tensors)
    folder = tmp_path / "debug" / "step-00000007"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-1.json", "rank-1.safetensors"]
    assert json.loads((folder / "rank-1.json").read_text()) == REPORT
    loaded = load_file(folder / "rank-1.safetensors")
    for name, tensor in tensors.items():
        torch.testing.assert_close(loaded[name], tensor, equal_nan=True)


def test_the_banner_tells_step_rank_rows_and_tensors_and_does_not_flood_the_screen():
    healthy = {**REPORT, "rank": 0, "finite": True, "tensors": [], "first_bad_module": None}
    lines = banner([healthy, REPORT])
    assert "in step 7, from rank 1:" in lines[1] and lines[2].endswith("rows of rank 1: [[3, 5], [8, 1]]")
    assert lines[3].endswith("layers.0.feed_forward.w2") and "norm.weight (64,): 2 non-finite, first values nan, 0.5" in lines[4]
    # A transient fault: finite on every rank when computed again.
    lines = banner([healthy, {**REPORT, "finite": True}])
    assert "finite when computed again" in lines[1] and "rows of rank 0" in lines[2]
    many = {**REPORT, "rank": 0, "tensors": REPORT["tensors"] * 50}
    lines = banner([many, {**many, "rank": 1}])
    assert len(lines) < 30 and "... and 30 more" in lines[-2] and "from rank 0, 1" in lines[1]
