"""Weights that are laid out for a CPU write what the plain ones write, and int8 errs as little as its rounding allows."""

import copy

import pytest
import torch

from config import LoraConfig, ModelConfig
from extensions.inference import weights
from extensions.inference.engine import generate
from extensions.inference.weights import INT8_ROWS, Int8Linear, add_products, pack_weights, packed_weights
from lora import add_adapters, cast_base
from model import Transformer
from model_kernels.matmul import CPU_MULTIPLIES_BF16

PROMPTS = [[1, 2, 3], [7] * 12, [30]]


def new_model(dtype: torch.dtype, tie: bool = True) -> Transformer:
    model = Transformer(ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16, init_std=0.15,
                                    tie_embeddings=tie), 61, dtype)
    model.init_weights(torch.Generator().manual_seed(0))
    cast_base(model.requires_grad_(False), dtype)
    return model.eval()


@pytest.mark.parametrize("tie", [True, False])
def test_packed_weights_write_the_same_tokens(tie):
    plain, packed = new_model(torch.float32, tie), new_model(torch.float32, tie)
    pack_weights(packed)
    assert packed.layers[0].attention.wq.weight.is_mkldnn and packed.head_matrix.as_head().values_VD.is_mkldnn
    assert generate(packed, PROMPTS, 30) == generate(plain, PROMPTS, 30)
    tokens = torch.tensor(PROMPTS[1:2])
    with torch.no_grad():
        torch.testing.assert_close(packed(tokens, mode="logits"), plain(tokens, mode="logits"), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(packed(tokens, tokens), plain(tokens, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_training_is_packed_for_a_while(dtype):
    """In bf16, since in float32 packing pays for large matrices only."""
    model = Transformer(new_model(dtype).config, 61, dtype)
    model.init_weights(torch.Generator().manual_seed(0))
    before, tokens = dict(model.named_parameters()), torch.tensor(PROMPTS[1:2])
    with torch.no_grad():
        expected = model(tokens, mode="logits")
        with pytest.raises(KeyError), packed_weights(model):
            assert model.layers[0].feed_forward.w1.weight.is_mkldnn == (dtype == torch.bfloat16 and CPU_MULTIPLIES_BF16)
            torch.testing.assert_close(model(tokens, mode="logits"), expected, rtol=2e-2, atol=2e-2)
            raise KeyError
        assert torch.equal(model(tokens, mode="logits"), expected)
    after = dict(model.named_parameters())
    assert [*after] == [*before] and all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("adapters", [None, {}, {"lora_train_head": True}, {"ids": [3, 5]}], ids=str)
def test_what_is_rounded_once_instead_of_for_every_token_writes_the_same(adapters, monkeypatch):
    """As on a GPU, where matrices keep their layout: equal to the bit, also with a head that adapters train."""
    monkeypatch.setattr(weights, "pack", lambda weight: weight)
    model = Transformer(new_model(torch.bfloat16, tie=False).config, 61, torch.bfloat16)
    model.init_weights(torch.Generator().manual_seed(0))
    if adapters is not None:
        ids = {"output": adapters["ids"]} if "ids" in adapters else None
        config = LoraConfig(lora_enabled=True, lora_rank=2, lora_train_head=adapters.get("lora_train_head", False))
        add_adapters(model, config, torch.Generator().manual_seed(1), ids)
        cast_base(model, torch.bfloat16)
    expected = generate(model, PROMPTS, 20)
    with packed_weights(model):
        assert generate(model, PROMPTS, 20) == expected
    assert not model.head_matrix.as_head().values_VD.is_mkldnn


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_adapters_are_added_to_matrices_that_are_not_quantized(quantization):
    model, tokens = new_model(torch.float32), torch.tensor(PROMPTS[1:2])
    add_adapters(model, LoraConfig(lora_enabled=True, lora_rank=2, lora_base_quantization=quantization), torch.Generator().manual_seed(1))
    with torch.no_grad():
        alone = model(tokens, mode="logits")
        for name, factor in model.named_parameters():
            if name.endswith("lora_B"):
                factor.normal_(generator=torch.Generator().manual_seed(2))
        expected = model(tokens, mode="logits")
        add_products(model)
        torch.testing.assert_close(model(tokens, mode="logits"), expected, rtol=1e-4, atol=1e-4)
    assert float((expected - alone).abs().max()) > 0.01
    assert any("lora_" in name for name in model.state_dict()) == (quantization != "none")
    assert not any(weight.requires_grad for name, weight in model.named_parameters() if "lora_" not in name)


def test_an_int8_model_is_close_to_its_bf16_model():
    model = new_model(torch.bfloat16)
    quantized, tokens = copy.deepcopy(model), torch.arange(60)[None]
    pack_weights(quantized, int8=True)
    assert quantized.layers[0].feed_forward.w1.weight.dtype == torch.int8
    with torch.no_grad():
        expected, found = (each(tokens, mode="logits")[0].log_softmax(-1) for each in (model, quantized))
    divergence = (expected.exp() * (expected - found)).sum(-1)
    assert 0 < float(divergence.mean()) < 0.02
    assert [len(written) for written in generate(quantized, PROMPTS, 5)] == [5, 5, 5]


@pytest.mark.parametrize("rows", [1, INT8_ROWS, INT8_ROWS + 1])
def test_int8_weights_are_within_a_step(rows):
    weight = (torch.randn(32, 64) * torch.logspace(-3, 0, 32)[:, None]).bfloat16()  # each output has a scale
    layer, x = Int8Linear(weight), torch.randn(1, rows, 64).bfloat16()
    restored = layer.weight.double() * layer.scales.double()[:, None]
    step = weight.double().abs().amax(1, keepdim=True) / 127
    assert bool(((restored - weight.double()).abs() <= step * 0.76).all()), "half a step; at the largest weight, the scale's rounding"
    expected = x.double() @ restored.T
    assert float((layer(x) - expected).norm() / expected.norm()) < 1e-2
    assert layer(x).shape == (1, rows, 32) and layer(x).dtype == torch.bfloat16
