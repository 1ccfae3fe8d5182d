"""Adapters held against PEFT's: forward, gradients, and the folder that both read."""

import importlib.util
import json
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import python
from factories import furthest, in_transformers, new_model, run_ranks, save_adapter_folder, tokenizer_of_pairs
from safetensors.torch import save_file
from torch import nn

import lora
from checkpoint import huggingface, model_json
from checkpoint import peft as peft_format
from checkpoint.tensors import lazy, read_all
from common.errors import CheckpointError, SettingsError
from config import Config, LoraConfig, ModelConfig
from extensions.inference.weights import merge, merged_state_dict
from extensions.report.console import describe_adapters
from learn.optim import in_ddp
from model import Linear, Transformer, choose_masks, padded
from model_kernels.matmul import FrozenProduct, quantize
from parallel.ranks import start_ranks, stop_ranks
from plan.identity import weights_sha256
from run.facts import token_ids_to_train
from tokenizer import Tokenizer, load_tokenizer

VOCAB = 300 + 256  # of the tokenizer below; padded to 640
SCRIPT = Path(lora.__file__).parent / "scripts" / "merge_lora.py"
looked_at_by_dynamo = pytest.mark.filterwarnings("ignore:The .grad attribute")


def shape(**changes) -> ModelConfig:
    return ModelConfig(**{**dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=32, init_std=0.1), **changes})


def base_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    return new_model(config, VOCAB, dtype=dtype)


ROWS = dict(token_rows=[7, 301, 555])  # of a test's adapters besides their settings: tokens whose rows learn


def settings(token_rows=(), **changes) -> LoraConfig:
    return LoraConfig(**{**dict(lora_enabled=True, lora_rank=4, lora_alpha=8.0), **changes})


def ids_of(config: ModelConfig, changes: dict) -> dict[str, list[int]]:
    layers = ["tok_embeddings"] if config.tie_embeddings else ["tok_embeddings", "output"]
    return dict.fromkeys(layers, changes["token_rows"]) if "token_rows" in changes else {}


def adapted(config: ModelConfig, changes: dict, dtype: torch.dtype = torch.float32, grown: bool = True) -> Transformer:
    """A model with adapters, after some learning (of noise) unless it is to be new."""
    model = base_model(config, dtype)
    lora.add_adapters(model, settings(**changes), torch.Generator().manual_seed(1), ids_of(config, changes))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if grown and parameter.requires_grad:
                noise = 0.05 * torch.randn(parameter.shape, generator=generator)
                if name in huggingface.VOCABULARY:
                    noise[VOCAB:] = 0
                parameter.add_(noise)
    return model


def tokens(rows: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


def learn(model: nn.Module, batch: torch.Tensor | None = None, mode: str = "sum") -> dict[str, torch.Tensor]:
    """The gradients of a mean next-token loss, of what learns."""
    batch = tokens() if batch is None else batch
    model.zero_grad()
    (-model(batch[:, :-1], batch[:, 1:], mode=mode).sum() / batch[:, 1:].numel()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of_pairs()


def test_the_base_in_bf16_changes_nothing_that_is_computed_in_bf16():
    model = adapted(shape(), ROWS, torch.bfloat16)
    with torch.no_grad():
        before = model(tokens(), mode="logits")
        lora.cast_base(model, torch.bfloat16)
        assert torch.equal(model(tokens(), mode="logits"), before)
    kept = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert kept["layers.0.attention.wq.weight"] == kept["tok_embeddings.weight"] == torch.bfloat16
    assert kept["layers.0.attention.wq.lora_A"] == kept["norm.weight"] == torch.float32
    gradients = learn(model)
    assert all(gradient.dtype == torch.float32 and gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("besides", [dict(lora_train_head=True, lora_train_embeddings=True), ROWS])
def test_adapters_off_is_the_base_and_on_again_is_what_it_was(besides, tied):
    config = shape(tie_embeddings=tied)
    model = adapted(config, besides)
    with torch.no_grad():
        learnt, base = model(tokens(), mode="logits"), base_model(config)(tokens(), mode="logits")
        assert (learnt - base).abs().max() > 0.1
        with pytest.raises(KeyError):
            with lora.disable_adapters(model):
                assert torch.equal(model(tokens(), mode="logits"), base)
                raise KeyError
        assert torch.equal(model(tokens(), mode="logits"), learnt)
    learned = "rows" if besides is ROWS else "weight"
    assert {name for name in learn(model) if "lora" not in name} == (
        {f"tok_embeddings.{learned}"} if tied else {f"tok_embeddings.{learned}", f"output.{learned}"})


def test_dropout_is_on_the_adapters_branch_only():
    layer = lora.LoRALinear(Linear(64, 32), settings(lora_dropout=0.5))
    lora.init_adapters(layer, torch.Generator().manual_seed(0))
    x = torch.randn(4, 3, 64)
    choose_masks(layer, 1, 2, 0, 4)
    with torch.no_grad():
        layer.weight.normal_()
        base = x @ layer.weight.T
        assert torch.equal(layer(x), base)  # at birth, whatever is dropped
        layer.lora_B.normal_()
        dropped = layer.dropout(x)
        assert 0.3 < (dropped == 0).float().mean() < 0.7
        torch.testing.assert_close(layer(x), base + 2.0 * dropped @ layer.lora_A.T @ layer.lora_B.T)
        layer.eval()
        torch.testing.assert_close(layer(x), base + 2.0 * x @ layer.lora_A.T @ layer.lora_B.T)
        layer.enabled = False
        assert torch.equal(layer.train()(x), base)


HEAD_AND_ROWS = dict(lora_train_head=True, **ROWS)


def check_gradients() -> None:
    """In each of two ranks, with two micro-batches each: DDP without find_unused_parameters, with recomputation."""
    ranks = start_ranks("cpu", 60)
    model = adapted(shape(activation_checkpointing="block", tie_embeddings=False), HEAD_AND_ROWS)
    trained = in_ddp(model)
    halves = tokens(rows=8).chunk(4)[2 * ranks.rank:2 * ranks.rank + 2]
    for part, last in zip(halves, (False, True)):
        with nullcontext() if last else trained.no_sync():
            (-trained(part[:, :-1], part[:, 1:], mode="sum")).backward()
    with torch.no_grad(), lora.disable_adapters(trained):
        assert torch.equal(model(tokens(), mode="logits"), base_model(model.config)(tokens(), mode="logits"))
    shared = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    alone = learn(adapted(shape(tie_embeddings=False), HEAD_AND_ROWS), tokens(rows=8))
    assert {"output.weight", "tok_embeddings.rows"} <= shared.keys()
    mean = {name: gradient * 2 / (8 * 23) for name, gradient in shared.items()}  # DDP has halved it
    assert mean.keys() == alone.keys() and furthest(mean, alone) < 1e-5
    ranks.barrier()
    stop_ranks()


def test_two_ranks_have_the_gradients_of_one(tmp_path):
    run_ranks(check_gradients, world_size=2, folder=tmp_path)


RESERVED = {f"<|reserved_{number}|>": 20 + number for number in range(20)}
CONTROL = {"<|header|>": 1, "<|end|>": 2}
USED = [1, 2, 7, 50]  # 7 is an ordinary token


def untrained_in_data(special_ids, weight_VD):
    return [number for number in lora.untrained_tokens(USED, special_ids, weight_VD) if number in USED]


@pytest.mark.parametrize("drift", [0.0, 1.0])  # untied, decayed towards zero; tied, driven away by every softmax
@pytest.mark.parametrize("met, expected", [((), [1, 2, 7]), ((2, 7), [1]), ((1, 2, 7), [])])
def test_a_token_is_untrained_where_its_row_stayed_among_the_reserved(met, expected, drift):
    weight_VD = torch.randn(100, 32, generator=torch.Generator().manual_seed(0))
    never = [number for number in (1, 2, 7, *range(20, 40)) if number not in met]
    weight_VD[never] = 0.01 * weight_VD[never] + drift
    assert untrained_in_data(RESERVED | CONTROL, weight_VD) == expected
    if not drift:
        weight_VD[never] = 0.0
        assert untrained_in_data(CONTROL, weight_VD) == expected, "nothing reserved, but nearly zero"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("by", ["transformers", "transformers, padded", "paddock", "transformers, bf16"])
def test_rows_that_resizing_added_are_untrained(by, tied, tmp_path, transformers):
    """transformers draws them around the mean of the others, with a billionth of their covariance; Paddock takes the mean."""
    transformers.set_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=tied))
    with torch.no_grad():
        for matrix in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            matrix.copy_(torch.randn(300, 32) * torch.rand(300, 1) + 0.3)  # rare tokens have small rows
    if by != "paddock":
        model.resize_token_embeddings(305, pad_to_multiple_of=64 if "padded" in by else None)
    model.to(torch.bfloat16 if "bf16" in by else torch.float32).save_pretrained(tmp_path)
    if by == "paddock":
        stored = huggingface.with_rows(huggingface.load_model_weights(tmp_path), 305)
        save_file({name: tensor.full().contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"vocab_size": 300', '"vocab_size": 305'))
    config = Config(lora_enabled=True, **model_json.read_model_config(tmp_path).model_dump())
    inputs = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=306, special_ids={"<a>": 300, "<b>": 302}, pieces_of_added=lambda: {299: [1]}), used_ids=lambda: [1, 5, 299, 300, 302])
    ids, others, learned = token_ids_to_train(config, inputs, tmp_path)
    assert learned == [299]
    # Of a padded base, the last row is one that it has; otherwise the base lacks it.
    assert ids == dict.fromkeys(["tok_embeddings"] + ["output"] * (not tied), [300, 302] + [305] * ("padded" not in by))
    assert others == [301, 303, 304] + [305] * ("padded" in by)


def test_tokens_can_be_named():
    assert lora.named_tokens("<|reserved_3|>, <|end|>", RESERVED | CONTROL) == [2, 23]
    with pytest.raises(SettingsError, match=r"LORA_TRAIN_TOKENS=<\|end\|>,x: 'x' is not a control token.*auto or none"):
        lora.named_tokens("<|end|>,x", RESERVED | CONTROL)


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft", reason="the oracle of these tests: pip install -r requirements-dev.txt")


def in_peft(peft, config: ModelConfig, changes: dict):
    described = peft_format.peft_config(settings(**changes), config.tie_embeddings, "", ids_of(config, changes))
    described |= {"inference_mode": False, "base_model_name_or_path": None}
    return peft.get_peft_model(in_transformers(base_model(config)), peft.LoraConfig(**described))


def test_new_adapters_are_drawn_as_pefts_are(peft):
    config = shape()
    reference = in_peft(peft, config, dict(lora_rank=16))
    actual = adapted(config, dict(lora_rank=16), grown=False)

    def spread(named) -> dict[int, tuple[float, float]]:
        by_width: dict[int, list] = {}
        for name, factor in named:
            if "lora_A" in name:
                by_width.setdefault(factor.shape[1], []).append(factor.detach().flatten())
        return {width: (float(torch.cat(each).abs().max()), float(torch.cat(each).std())) for width, each in by_width.items()}

    drawn, expected = spread(actual.named_parameters()), spread(reference.named_parameters())
    assert len(drawn) == 2 and {*drawn} == {*expected}
    for width in drawn:
        assert drawn[width] == pytest.approx(expected[width], rel=0.05)


@pytest.mark.parametrize("tied, changes", [
    (False, {}), (False, dict(lora_rslora=True)), (False, dict(lora_target_modules="wk,w2", lora_rank=3, lora_alpha=5.0)),
    (False, ROWS), (True, ROWS)])
def test_forward_and_gradients_are_pefts(peft, tied, changes):
    config = shape(tie_embeddings=tied, rope_scaling_factor=8.0, rope_original_max_len=64)
    actual, reference = adapted(config, changes), in_peft(peft, config, changes)
    tensors = read_all(peft_format.to_peft(lora.adapter_state_dict(actual), config, VOCAB))
    peft.set_peft_model_state_dict(reference, tensors)
    with torch.no_grad():
        expected = reference(tokens()).logits
        assert (actual(tokens(), mode="logits") - expected).abs().max() < 1e-5 * expected.abs().max()
        with lora.disable_adapters(actual), reference.disable_adapter():
            assert (actual(tokens(), mode="logits") - reference(tokens()).logits).abs().max() < 1e-4
    reference(tokens(), labels=tokens()).loss.backward()
    of_theirs = {name.replace(".default", ""): parameter.grad for name, parameter in reference.named_parameters()
                 if parameter.requires_grad}
    for mode in ("sum", "logprobs"):
        of_ours = read_all(peft_format.to_peft(learn(actual, mode=mode), config, VOCAB))
        assert of_ours.keys() == of_theirs.keys() and furthest(of_ours, of_theirs) < 1e-5


@pytest.mark.parametrize("changes", [{}, dict(lora_rank=3, lora_target_modules="wk,w2"), dict(lora_train_head=True), ROWS])
def test_trainable_parameters_are_counted_as_peft_counts_them(peft, changes, tokenizer):
    config = shape(tie_embeddings=False)
    trained, whole = in_peft(peft, config, changes).get_nb_trainable_parameters()
    model = adapted(config, changes, grown=False)
    expected = f"{trained:,} trainable parameters of {whole:,} ({100 * trained / whole:.2f} %)"
    assert describe_adapters(model, tokenizer).startswith(expected)


def saved(folder: Path, model: Transformer, changes: dict, tokenizer: Tokenizer) -> tuple[Path, Path]:
    for name in ("base", "adapter"):
        (folder / name).mkdir()
    huggingface.save_model_folder(folder / "base", base_model(model.config).state_dict(), model.config, tokenizer, 256)
    adapter = peft_format.Adapter(lora.adapter_state_dict(model), settings(**changes), str(folder / "base"), weights_sha256(folder / "base"),
                                  lora.trained_token_ids(model))
    save_adapter_folder(folder / "adapter", adapter, model.config, tokenizer)
    return folder / "adapter", folder / "base"


WHOLE = [dict(), dict(lora_train_head=True), dict(lora_train_embeddings=True),
         dict(lora_train_head=True, lora_train_embeddings=True)]


@pytest.mark.parametrize("changes", [dict(lora_rslora=True, lora_target_modules="wk,wo,w3"), *WHOLE, ROWS])
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_load_in_peft_and_here_to_the_bit(peft, changes, tied, tokenizer, tmp_path, transformers):
    model = adapted(shape(tie_embeddings=tied), changes)
    folder, base = saved(tmp_path, model, changes, tokenizer)
    reference = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), folder)
    with torch.no_grad():
        expected = reference(tokens()).logits
        assert (model(tokens(), mode="logits") - expected).abs().max() < 1e-5
    adapter = peft_format.load_adapter_folder(folder, model.config, padded(VOCAB))
    again = base_model(model.config)
    lora.add_adapters(again, adapter.config, torch.Generator(), adapter.token_ids)
    lora.load_adapter_state_dict(again, adapter.state)
    before, after = (lora.adapter_state_dict(each) for each in (model, again))
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    fields = {"lora_rank", "lora_alpha", "lora_rslora", "lora_dropout"}
    assert adapter.config.model_dump(include=fields) == settings(**changes).model_dump(include=fields)
    assert transformers.AutoTokenizer.from_pretrained(folder).decode(tokenizer.encode("the heat")) == "the heat"


@pytest.mark.parametrize("tied, extra", [
    (False, {}), (False, dict(modules_to_save=["lm_head"])), (False, dict(modules_to_save=["embed_tokens", "lm_head"])),
    (True, dict(target_modules="all-linear", use_rslora=True)), (True, dict(target_modules=r".*\.(q_proj|up_proj)")),
    (True, dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    (True, dict(layers_to_transform=[0, 1], layers_pattern=["layers"])), (False, dict(exclude_modules=["k_proj"])),
    (True, dict(target_modules="all-linear", exclude_modules=r".*\.(up|down)_proj")),
    (True, dict(trainable_token_indices=[3, 400])), (False, dict(trainable_token_indices=[3, 400])),
    (True, dict(trainable_token_indices={"model.embed_tokens": [3], "lm_head": [3]})),
    (False, dict(trainable_token_indices={"embed_tokens": [3, 400], "lm_head": [9]})),
])
def test_adapters_made_by_peft_load_here(peft, tied, extra, tmp_path, recwarn):
    config = shape(tie_embeddings=tied)
    reference = peft.get_peft_model(in_transformers(base_model(config)), peft.LoraConfig(
        **{**dict(r=5, lora_alpha=7, target_modules=["q_proj", "k_proj", "down_proj"], init_lora_weights=False,
                  task_type="CAUSAL_LM"), **extra}))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "modules_to_save" in name or "trainable_tokens" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path)
    adapter = peft_format.load_adapter_folder(tmp_path, config, padded(VOCAB))
    assert adapter.base_sha256 is None
    actual = base_model(config)
    lora.add_adapters(actual, adapter.config, torch.Generator(), adapter.token_ids)
    lora.load_adapter_state_dict(actual, adapter.state)
    with torch.no_grad():
        expected = reference.eval()(tokens()).logits
        assert (actual(tokens(), mode="logits") - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_head_beside_an_embedding_does_not_fit_a_tied_base():
    config = shape(tie_embeddings=True)
    tensors = peft_format.to_peft(lora.adapter_state_dict(adapted(config, WHOLE[1])), config, VOCAB)
    without_head = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
    for change in ({}, {"base_model.model.lm_head.weight": lazy(torch.zeros(VOCAB, 64))}):
        with pytest.raises(CheckpointError, match="untie head and embeddings, which the base ties"):
            peft_format.from_peft(without_head | change, config, padded(VOCAB), 4, {})


@pytest.mark.parametrize("damage, match", [
    (dict(peft_type="IA3"), "IA3.*merge_and_unload"),
    (dict(r=8), r"q_proj.lora_A.weight is \(4, 64\).*\(8, 64\)"), (dict(lora_alpha=-1), "lora_alpha"),
    (dict(layers_to_transform=0), "layers_to_transform=0, which omits model.layers.1"),
    (dict(a_field_of_tomorrow=True), "a_field_of_tomorrow=True; only plain LoRA"),
    (dict(use_dora=True, alpha_pattern={"k_proj": 1}), "only plain LoRA.*merge_and_unload"),
    (dict(trainable_token_indices={"norm": [3]}), "norm.*embed_tokens and lm_head"),
    (dict(trainable_token_indices=[3, padded(VOCAB)]), f"below {padded(VOCAB)}"),
    (dict(trainable_token_indices=[3]), r"^adapter_config.json has trainable_token_indices=\[3\], but .* lacks .*embed_tokens.token_adapter"),
    (dict(modules_to_save=["lm_head"]), r"^adapter_config.json has modules_to_save=\['lm_head'\], but .* lacks base_model.model.lm_head.weight"),
    ])
def test_adapters_of_another_kind_are_refused(damage, match, tokenizer, tmp_path):
    folder, _ = saved(tmp_path, adapted(shape(), {}), {}, tokenizer)
    content = model_json.read_model_json(folder / "adapter_config.json")
    (folder / "adapter_config.json").write_text(json.dumps({**content, **damage}))
    with pytest.raises(CheckpointError, match=match):
        peft_format.load_adapter_folder(folder, shape(), padded(VOCAB))


@pytest.mark.parametrize("tied, changes", [(True, WHOLE[1]), (False, {**ROWS, "lora_rslora": True}), (False, WHOLE[3])])
def test_the_merged_folder_gives_the_unmerged_logits_in_transformers(tied, changes, tokenizer, tmp_path, transformers):
    model = adapted(shape(tie_embeddings=tied), changes)
    adapter, _ = saved(tmp_path, model, changes, tokenizer)
    merge(adapter, tmp_path / "merged")
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        expected = model(tokens(), mode="logits")
        assert (reference(tokens()).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_script_merges_and_can_round_to_bf16(tokenizer, tmp_path):
    adapter, _ = saved(tmp_path, adapted(shape(), {}), {}, tokenizer)
    done = python(SCRIPT, adapter, "--output", tmp_path / "merged", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    assert 0 < float(re.search(r"differ by at most (\S+) from", done.stdout)[1]) < 0.2
    assert {tensor.dtype for tensor in huggingface.load_model_weights(tmp_path / "merged").values()} == {torch.bfloat16}


few_bits = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs pip install bitsandbytes")


@few_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, smallest, error", [("int8", 1.0, 0.01), ("nf4", 0.5, 0.12)])
def test_a_quantised_base_is_near_and_its_adapters_learn(kind, smallest, error, dtype):
    changes = dict(lora_target_modules="wq,w2", lora_base_quantization=kind)
    model, plain = adapted(shape(), changes, dtype), adapted(shape(), dict(lora_target_modules="wq,w2"), dtype)
    lora.cast_base(model, dtype)
    for name in ("attention.wq", "attention.wo", "feed_forward.w2"):
        layer, whole = (each.layers[1].get_submodule(name) for each in (model, plain))
        assert layer.weight.nbytes == smallest * whole.weight.numel() and not layer.weight.requires_grad
        x = torch.randn(50, layer.in_features).to(dtype).requires_grad_()
        got, expected = layer(x), whole(x)
        assert (got - expected).norm() < error * expected.norm()
        upstream = torch.randn_like(got)
        actual, reference = (torch.autograd.grad(output, x, upstream)[0] for output in (got, expected))
        assert (actual - reference).norm() < error * reference.norm()
    gradients, expected = learn(model), learn(plain)
    assert gradients.keys() == expected.keys()
    one, other = (torch.cat([gradient.flatten() for gradient in each.values()]) for each in (gradients, expected))
    assert torch.cosine_similarity(one, other, dim=0) > 0.9


@few_bits
@looked_at_by_dynamo
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_base_compiles_recomputes_merges_and_is_not_saved(kind):
    changes = dict(lora_base_quantization=kind, lora_target_modules="wq,wk,w1")
    config = shape(activation_checkpointing="block", n_layers=1)  # each block takes seconds to compile
    model, compiled = adapted(config, changes), adapted(config, changes)
    for block in compiled.layers:
        block.compile(fullgraph=True, backend="aot_eager")
    assert furthest(learn(compiled), learn(model)) < 1e-5
    merged = Transformer(shape(n_layers=1), VOCAB)
    merged.load_state_dict(merged_state_dict(model))
    with torch.no_grad():
        expected = model(tokens(), mode="logits")
        assert (merged(tokens(), mode="logits") - expected).abs().max() < 1e-5 * expected.abs().max()
        with lora.disable_adapters(model):
            assert not torch.equal(model(tokens(), mode="logits"), expected)
    assert all("lora_" in name for name in lora.adapter_state_dict(model))


@few_bits
@looked_at_by_dynamo
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_compiled_forward_does_not_keep_the_dequantised_base(kind):
    """The compiler would take the backward's dequantisation for the forward's, and keep its result."""
    shape, kept = (256, 128), []
    packed, scales = quantize(torch.randn(shape), kind)
    compiled = torch.compile(lambda x: FrozenProduct.apply(x.sin(), packed, scales, shape).sin(), backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = compiled(torch.randn(8, 128, requires_grad=True))
    assert packed.data_ptr() in [tensor.data_ptr() for tensor in kept]
    assert not [tensor for tensor in kept if tensor.dtype.is_floating_point and tensor.shape == shape]
    output.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_the_mean_of_their_texts_pieces_are_untrained(dtype, tokenizer, tmp_path, transformers):
    """As people initialise new tokens in transformers, control tokens and others; a row that has moved since is a learned one."""
    tokenizer.save_huggingface(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    names = ["<|tool_call|>", "<|tool_end|>", "[cite]", "[verse]"]
    pieces = [theirs(name, add_special_tokens=False).input_ids for name in names]
    theirs.add_special_tokens({"additional_special_tokens": names[:2]})
    theirs.add_tokens(names[2:])
    theirs.save_pretrained(tmp_path)
    first, here = tokenizer.vocab_size, load_tokenizer(str(tmp_path))
    assert here.pieces_of_added().items() >= dict(zip(range(first, first + 4), pieces)).items()
    weight_VD = torch.randn(here.vocab_size, 32, generator=torch.Generator().manual_seed(0)) + 0.2
    for number, ids in enumerate(pieces, first):
        weight_VD[number] = weight_VD[ids].mean(dim=0)
    weight_VD[first + 1] += 0.05 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    find = partial(lora.untrained_tokens, [], {}, weight_VD.to(dtype))
    assert find(here.pieces_of_added()) == [first, first + 2, first + 3] and find() == []
