"""Conversion of weights and configuration, and what is written for other programs, judged by transformers and PEFT."""

import dataclasses
import json
import pickle
import runpy
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch
from commands import python
from factories import UNMEASURED, Prepared, TinyRun, new_model, prepare, tokenizer_of_pairs

from checkpoint import huggingface, model_json, peft, store
from checkpoint.tensors import LazyTensor, lazy, read_all, read_optimizer
from common.errors import CheckpointError
from config import ModelConfig
from data_pipeline.templates import load_chat_format
from extensions.inference.text import text_prompt
from extensions.other_trainers import unused_fields
from model import Transformer, padded
from plan.identity import model_identity
from tokenizer import Tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers", reason="the oracle of these tests: pip install -r requirements-dev.txt")

VOCAB = 300 + 256  # of the tokenizer below; padded to 640
SHAPES = {
    "tied, grouped": dict(tie_embeddings=True),
    "untied, one key per query": dict(tie_embeddings=False, n_kv_heads=4),
    "untied, one key for all": dict(tie_embeddings=False, n_kv_heads=1),
    "Qwen 2, YaRN": dict(model_type="qwen2", rope_scaling_type="yarn", rope_scaling_factor=4.0, rope_high_freq_factor=32.0,
                         rope_original_max_len=64),
    "Mistral, window": dict(model_type="mistral", sliding_window=30, tie_embeddings=False),
    "SmolLM 3": dict(model_type="smollm3", n_layers=3, no_rope_every=2, rope_scaling_type="linear", rope_scaling_factor=2.0),
    "Qwen 3, some windows": dict(model_type="qwen3", sliding_window=30, sliding_every=2),
    "Qwen 3, wide heads": dict(model_type="qwen3", head_width=24, tie_embeddings=False),
    "3.1 scaling": dict(tie_embeddings=True, rope_scaling_factor=8.0, rope_original_max_len=64, rope_theta=10_000.0),
    "3.1 scaling, untied": dict(tie_embeddings=False, rope_scaling_factor=32.0, rope_low_freq_factor=1.5,
                                rope_high_freq_factor=5.0, rope_original_max_len=32),
}


def config_of(shape: str) -> ModelConfig:
    return ModelConfig(**{**dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=32, norm_eps=1e-5, init_std=0.1),
                          **SHAPES[shape]})


def model_of(config: ModelConfig) -> Transformer:
    model = new_model(config, VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms that do something
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of_pairs()


@pytest.fixture(params=SHAPES)
def config(request) -> ModelConfig:
    return config_of(request.param)


def test_a_saved_folder_gives_the_same_logits_in_transformers(config, tokenizer, tmp_path, recwarn):
    """Unit-scale logits, within 1e-4; 200 positions, beyond the original length of the scaled ones."""
    model = model_of(config)
    huggingface.save_model_folder(tmp_path, model.state_dict(), config, tokenizer, max_seq_len=256)
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert reference.dtype == torch.float32
    # The rows' 256, unless the scaling is for more: 8 times 64, 32 times 32.
    assert reference.config.max_position_embeddings == {None: 256, 2.0: 256, 4.0: 256, 8.0: 512, 32.0: 1024}[config.rope_scaling_factor]
    tokens_BT = torch.randint(VOCAB, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours_BTV, theirs_BTV = model(tokens_BT, mode="logits"), reference(tokens_BT).logits
    assert ours_BTV.shape == theirs_BTV.shape == (2, 200, VOCAB)
    assert 0.3 < ours_BTV.std() < 3
    assert (ours_BTV - theirs_BTV).abs().max() < 1e-4
    assert not recwarn.list


def test_rows_are_those_of_the_whole_and_few_others_are_read(config, tokenizer, tmp_path):
    """From folders of ours and of transformers; cut within a head, between heads, and in the padding."""
    state, requests = model_of(config).state_dict(), []
    (tmp_path / "ours").mkdir()
    huggingface.save_model_folder(tmp_path / "ours", state, config, tokenizer, max_seq_len=256)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")

    def counted(tensor: LazyTensor) -> LazyTensor:
        return replace(tensor, read=lambda start, stop: requests.append(stop - start) or tensor.read(start, stop))

    for folder in ("ours", "theirs"):
        requests.clear()
        tensors = {name: counted(tensor) for name, tensor in huggingface.load_model_weights(tmp_path / folder).items()}
        actual = huggingface.from_huggingface(tensors, config, padded(VOCAB))
        assert not requests and list(actual) == list(state) and ("lm_head.weight" in tensors) == (not config.tie_embeddings)
        for name, whole in state.items():
            cuts = [cut for cut in (0, 1, 5, 16, 23, 32, 63, 64, VOCAB - 3, VOCAB, VOCAB + 9, padded(VOCAB)) if cut <= len(whole)]
            for start, stop in (*pairwise(cuts), *pairwise(cuts[::3]), (0, cuts[-1]), (5, 5)):
                requests.clear()
                assert torch.equal(actual[name].read(start, stop), whole[start:stop]), (name, start, stop)
                allowed = stop - start + (config.head_dim if name.split(".")[-2] in huggingface.ROTATED else 0)
                if name in huggingface.VOCABULARY:
                    allowed = min(stop, VOCAB) - min(start, VOCAB)
                assert sum(requests) <= (allowed if start < stop else 0)


@pytest.mark.parametrize("name", [name for name, field in ModelConfig.model_fields.items() if field.json_schema_extra["on_resume"] == "fixed"])
def test_every_setting_of_a_model_is_in_its_config(name):
    """So a setting that somebody adds to the model must be written, and read again."""
    family = {"no_rope_every": "smollm3", "sliding_window": "qwen3", "sliding_every": "qwen3"}.get(name, "llama")
    before = dict(model_type=family, dim=96, n_layers=4, n_heads=8, n_kv_heads=2, multiple_of=32,
                  sliding_window=30 if name == "sliding_every" else None, rope_scaling_factor=2.0 if name.startswith("rope_") else None)
    default = ModelConfig.model_fields[name].default
    others = [choice for choice in get_args(ModelConfig.model_fields[name].annotation) if isinstance(choice, str) and choice != default]
    other = others[0] if others else not default if isinstance(default, bool) else 2 * (default or 2)
    config = ModelConfig(**{**before, name: other})
    written = model_json.huggingface_config(config, VOCAB, 128, 1, 2, torch.float32)
    read = ModelConfig(**model_json.model_settings_from_huggingface(json.loads(json.dumps(written))))
    assert model_identity("", read) == model_identity("", config) != model_identity("", ModelConfig(**before))


SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}


def config_json(**changes) -> dict:
    """A config.json of 64 dimensions that says nothing of the rotary embedding."""
    written = model_json.huggingface_config(config_of("tied, grouped"), VOCAB, 128, 1, 2, torch.float32)
    return {key: value for key, value in written.items() if not key.startswith("rope_")} | changes


@pytest.mark.parametrize("rope, expected", [
    (dict(rope_theta=7e3), 7e3), (dict(rope_parameters={"rope_theta": 7e3}), 7e3),
    (dict(rope_theta=7e3, rope_parameters={"rope_type": "default"}), 7e3),
    (dict(rope_theta=7e3, rope_parameters={"rope_theta": 7e3, **SCALING}, rope_scaling=None), 7e3),
    (dict(rope_scaling={"rope_theta": 7e3, **SCALING}), 7e3), ({}, 1e4), (dict(rope_scaling=SCALING), 1e4),
    (dict(rope_scaling={"type" if name == "rope_type" else name: value for name, value in SCALING.items()}), 1e4),  # as in old files
    (dict(rope_theta=7e3, rope_parameters={"rope_theta": 5e5}), "rope_theta is 7000.0, and 500000.0 elsewhere"),
    (dict(rope_theta=7e3, rope_scaling={"rope_theta": 5e5, **SCALING}), "rope_theta is 7000.0, and 500000.0 elsewhere"),
    (dict(rope_theta=7e3, rope_scaling=SCALING, rope_parameters={"rope_type": "default"}), "rope_parameters.rope_type is 'default'"),
    (dict(rope_scaling=SCALING, rope_parameters={**SCALING, "factor": 32.0}), "rope_parameters.factor is 32.0, and 8.0"),
    (dict(rope_scaling=SCALING, rope_parameters={"rope_theta": 5e5}), "rope_parameters.rope_theta is 500000.0, and 10000.0"),
])
def test_the_rotary_embedding_is_transformers_or_a_contradiction(rope, expected):
    content = json.loads(json.dumps(config_json(**rope)))
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=f"contradicts itself: {expected}"):
            model_json.model_settings_from_huggingface(content)
        return
    settings = model_json.model_settings_from_huggingface(content)
    reference = transformers.LlamaConfig(**content).rope_parameters
    assert settings["rope_theta"] == reference["rope_theta"] == expected
    assert settings["rope_scaling_factor"] == reference.get("factor")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("full", [0, 1, 28])
def test_without_layer_types_the_layers_from_max_window_layers_on_have_a_window(kind, full):
    content = config_json(model_type=kind, num_hidden_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=full, layer_types=None)
    read = ModelConfig(**model_json.model_settings_from_huggingface(content))
    theirs = transformers.CONFIG_MAPPING[kind](**content).layer_types
    assert ["sliding_attention" if slides else "full_attention" for slides, _ in read.layer_kinds] == theirs


# Another value of each field that transformers' classes read, besides those that two layers of 64 dimensions need.
OTHER_VALUES = {
    "vocab_size": 600, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 4, "hidden_act": "gelu", "max_position_embeddings": 99, "initializer_range": 0.5, "rms_norm_eps": 0.1,
    "use_cache": False, "pad_token_id": 7, "bos_token_id": 9, "eos_token_id": 11, "pretraining_tp": 2, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "attention_bias": True, "attention_dropout": 0.3, "mlp_bias": True,
    "head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": ["sliding_attention"] * 2,
    "no_rope_layers": [0, 0], "no_rope_layer_interval": 1, "output_hidden_states": True, "return_dict": False, "dtype": "bfloat16",
    "chunk_size_feed_forward": 4, "is_encoder_decoder": True, "id2label": {"0": "no"}, "label2id": {"no": 0},
    "problem_type": "regression", "architectures": ["LlamaForSequenceClassification"], "transformers_version": "4.1"}
# Fields that no class declares, but that code or the rotary embedding of transformers reads; and one that nothing reads.
UNDECLARED = {
    "is_causal": False, "per_layer_config": {"0": {"hidden_act": "gelu"}}, "partial_rotary_factor": 0.5, "rope_theta": 77.0,
    "quantization_config": {"quant_method": "fp8"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16",
    "rope_parameters.finetuned": True, "rope_parameters.partial_rotary_factor": 0.5, "rope_parameters.full_attention": {"rope_theta": 7.0},
    "original_max_position_embeddings": 32, "attention_chunk_size": 4, "residual_scale": 0.0, "is_llama_config": True}


def logits_of(content: dict) -> torch.Tensor:
    """What transformers computes in training and in use from weights that depend on their names and shapes only."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[content["model_type"]](**content)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 4 + (parameter.ndim == 1))
        tokens_BT = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
        torch.manual_seed(2)
        results = [each if isinstance(each, tuple) else each.to_tuple() for each in (model.train()(tokens_BT), model.eval()(tokens_BT))]
    return torch.stack([result[0] for result in results])


@pytest.mark.parametrize("kind", model_json.FAMILIES)
def test_every_field_that_transformers_reads_is_used_refused_or_told(kind, tmp_path):
    """A field that is neither changes no logit in transformers. What is used is saved, what is not used is not."""
    of_class = [field.name for field in dataclasses.fields(transformers.CONFIG_MAPPING[kind])]
    config = ModelConfig(**{**dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=32), "model_type": kind})
    plain = model_json.huggingface_config(config, VOCAB, 128, 1, 2, torch.float32)
    plain = {name: value for name, value in plain.items() if not name.startswith("rope_") and name not in (
        "torch_dtype", "layer_types", "no_rope_layers")}
    settings, context, outcomes = model_json.model_settings_from_huggingface(plain), model_json.context_length(plain), {}
    for field, value in [(field, OTHER_VALUES[field]) for field in of_class] + [*UNDECLARED.items()]:
        place, _, name = field.rpartition(".")
        content = json.loads(json.dumps({**plain, **({place: {"rope_type": "default", name: value}} if place else {name: value})}))
        model_json.write_json(tmp_path / "config.json", content)
        try:
            read = model_json.model_settings_from_huggingface(content)
        except CheckpointError as error:
            assert name in str(error) or name in ("num_attention_heads", "layer_types"), (field, str(error))
            outcomes[field] = "refused"
            continue
        written = model_json.huggingface_config(ModelConfig(**read), VOCAB, model_json.context_length(content), 1, 2, torch.float32)
        if told := unused_fields(tmp_path):
            assert f"{name}={value!r:.80}" in told[0] and len(told) == 1 and written.get(name) != value, (field, told)
            outcomes[field] = "told"
        elif read != settings or model_json.context_length(content) != context:
            same = written["rope_parameters"] if name in ("rope_theta", "rope_scaling") else written
            expected = {name: value} if name != "rope_scaling" else value
            assert {each: same.get(each) for each in expected} == expected, field
            outcomes[field] = "used"
        else:
            assert name in ("vocab_size", "return_dict") or torch.equal(logits_of(content), logits_of(plain)), field
            outcomes[field] = "no effect"
    assert {"told", "refused", "used", "no effect"} == {*outcomes.values()}
    assert outcomes["attention_dropout"] == outcomes["residual_scale"] == outcomes["architectures"] == "told"
    assert outcomes["is_causal"] == outcomes["per_layer_config"] == outcomes["rope_parameters.full_attention"] == "refused"


@pytest.mark.parametrize("kind", model_json.FAMILIES)
def test_a_missing_field_has_transformers_default(kind):
    theirs = transformers.CONFIG_MAPPING[kind]()
    whole = json.loads(theirs.to_json_string(use_diff=False))
    content = {name: whole[name] for name in ("model_type", *model_json.REQUIRED)}
    expected = model_json.model_settings_from_huggingface(whole)
    assert model_json.model_settings_from_huggingface(content) == expected
    assert model_json.context_length(content) == theirs.max_position_embeddings


def test_integers_fp8_and_pickled_adapters_are_refused_with_a_way(tmp_path):
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(CheckpointError, match="w has dtype torch.*8.*; use another checkpoint"):
            huggingface.checked("w", lazy(torch.zeros(2, 2).to(dtype)))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match="has no adapter_model.safetensors; adapter_model.bin has pickled weights.*PEFT's from_pretrained"):
        peft.load_adapter_folder(tmp_path, config_of("tied, grouped"), padded(VOCAB))


def test_large_weights_are_split_and_read_by_both(tokenizer, tmp_path, monkeypatch):
    config = config_of("untied, one key for all")
    model = model_of(config)
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", 100_000)
    huggingface.save_model_folder(tmp_path, model.state_dict(), config, tokenizer, max_seq_len=256)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    tensors = read_all(huggingface.load_model_weights(tmp_path))
    expected = read_all(huggingface.to_huggingface(model.state_dict(), config, VOCAB))
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(reference[name], expected[name]) for name in expected)


IMPORT_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "import_checkpoint.py"


def test_all_ends_of_texts_and_other_generation_settings_are_read_and_kept(tokenizer, tmp_path):
    """generation_config.json wins over config.json, as in transformers; what is imported or saved again keeps every id."""
    config, source = config_of("3.1 scaling"), tmp_path / "source"
    source.mkdir()
    huggingface.save_model_folder(source, model_of(config).state_dict(), config, tokenizer, 256)
    third = tokenizer.special_ids["<|eom_id|>"]
    content = model_json.read_model_json(source / "config.json")
    model_json.write_json(source / "config.json", {**content, "eos_token_id": [5, third], "pad_token_id": -1})
    (source / "generation_config.json").unlink()
    read = load_tokenizer(str(source))
    assert read.stop_ids == {5, third, tokenizer.eos_id} and "pad_token_id" not in read.generation
    model_json.write_json(source / "generation_config.json", {"eos_token_id": [third, tokenizer.eos_id, 99_999], "temperature": 0.6})
    read = load_tokenizer(str(source))
    assert read.stop_ids == {third, tokenizer.eos_id} == text_prompt(read, "a").stop_ids - {read.document_start_id}
    assert load_chat_format(read).stop_ids == {third, tokenizer.eos_id, tokenizer.eot_id}
    for output in (tmp_path / "start", tmp_path / "again"):
        import_checkpoint(source, output)
        kept, source = model_json.read_model_json(output / "generation_config.json"), output
        assert kept["eos_token_id"] == [third, tokenizer.eos_id, 99_999, tokenizer.eot_id] and kept["temperature"] == 0.6
        assert model_json.read_model_json(output / "config.json")["eos_token_id"] == kept["eos_token_id"]
        assert transformers.GenerationConfig.from_pretrained(output).eos_token_id == kept["eos_token_id"]


def test_pickled_weights_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match="pickled weights"):
        huggingface.load_model_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        huggingface.load_model_weights(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_metas_weights_need_no_change(tied):
    """Meta's format has no padding, a separate head even if tied, a buffer, and params.json."""
    config = config_of("3.1 scaling").model_copy(update=dict(tie_embeddings=tied, rope_scaling_factor=32.0 if tied else 8.0,
                                                             rope_original_max_len=8192))
    state = {name: tensor[:VOCAB] if len(tensor) == padded(VOCAB) else tensor
             for name, tensor in model_of(config).state_dict().items()}
    head = state.get("output.weight", state["tok_embeddings.weight"])
    params = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCAB, "multiple_of": 32,
              "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 10_000.0, "use_scaled_rope": True}
    meta = {**state, "output.weight": head.clone(), "rope.freqs": torch.ones(8)}
    read, settings = from_meta(meta, params)
    assert read.keys() == state.keys() and all(torch.equal(read[name].full(), state[name]) for name in state)
    assert settings["ffn_dim"] == config.hidden_dim and settings["tie_embeddings"] == tied
    assert settings["rope_scaling_factor"] == (32.0 if tied else 8.0)
    with pytest.raises(CheckpointError, match="wk.weight"):
        from_meta(meta, {**params, "n_kv_heads": 4})


from_meta, import_checkpoint = map(runpy.run_path(str(IMPORT_SCRIPT)).get, ("from_meta", "import_checkpoint"))


def test_a_huggingface_folder_is_imported(tokenizer, tmp_path):
    """From a model that transformers saved in bf16, with vocabulary rows that no token uses."""
    source, output = tmp_path / "source", tmp_path / "start"
    config = config_of("3.1 scaling, untied")
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **model_json.huggingface_config(config, VOCAB + 84, 256, tokenizer.bos_id, tokenizer.eos_id, torch.float32)))
    reference.bfloat16().save_pretrained(source)
    tokenizer.save_huggingface(source)
    done = python(IMPORT_SCRIPT, source, output)
    assert done.returncode == 0, done.stderr
    assert "84 rows" in done.stdout
    assert f"PRETRAIN_CHECKPOINT={output}\n" in done.stdout
    tokens_BT = torch.randint(VOCAB, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        expected = reference(tokens_BT).logits[..., :VOCAB]
    # Verified as training does.
    assert store.verify(store.locate(str(output), tmp_path / "run"))["step"] == 0 and store.read_state(output) == read_optimizer(output) == {}
    model = Transformer(model_json.read_model_config(output), VOCAB)
    model.load_state_dict(read_all(huggingface.from_huggingface(huggingface.load_model_weights(output), model.config, padded(VOCAB))))
    with torch.no_grad():
        assert (model(tokens_BT, mode="logits") - expected).abs().max() < 1e-4
    assert model_json.read_model_json(output / "config.json")["dtype"] == "bfloat16"
    assert load_tokenizer(str(output)).encode("the heat") == tokenizer.encode("the heat")


UNUSED, CONTEXT = 27, 512


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("data"), vocab_size=280)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def base(request, prepared: Prepared, tmp_path) -> Path:
    tokenizer, folder = load_tokenizer(str(prepared.tokenizer)), tmp_path / "base"
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size + UNUSED, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.2, tie_word_embeddings=request.param,
        attention_dropout=0.1, bos_token_id=None, eos_token_id=tokenizer.eos_id)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_huggingface(folder)
    return folder


def test_merged_adapters_have_the_rope_that_they_were_trained_with(base, prepared, tmp_path):
    """PEFT opens adapters with the base's config.json, so only a merged model can have another ROPE_THETA."""
    peft = pytest.importorskip("peft")
    run = run_from(base, prepared, tmp_path / "run", LORA_ENABLED="true", ROPE_THETA=9, ROPE_SCALING_TYPE="linear", ROPE_SCALING_FACTOR=2,
                   LEARNING_RATE=0.05).trained()
    done = python("scripts/export.py", run.folder, "--to", "merged", "--dtype", "fp32", "--output", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    assert "ROPE_THETA=9" in python("scripts/export.py", run.folder, "--to", "hf", "--output", tmp_path / "hf").stderr
    corrected, merged = tmp_path / "corrected", opened(tmp_path / "merged")
    shutil.copytree(base, corrected)
    content, before = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "merged", base))
    (corrected / "config.json").write_text(json.dumps(content | {"vocab_size": before["vocab_size"]}))
    theirs = peft.PeftModel.from_pretrained(opened(corrected, dtype=torch.float32), run.checkpoint(4))
    assert (merged.config.rope_parameters["rope_theta"], merged.config.max_position_embeddings) == (9, 2 * CONTEXT)
    tokens_BT = torch.randint(200, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens_BT).logits[..., :merged.config.vocab_size], merged(tokens_BT).logits, atol=1e-4)


def run_from(base: Path, prepared: Prepared, folder: Path, **settings) -> TinyRun:
    shape = ("DIM", "N_LAYERS", "N_HEADS", "N_KV_HEADS", "MULTIPLE_OF")
    run = TinyRun(prepared, folder, PRETRAIN_CHECKPOINT=base, **{"MAX_STEPS": 4, **UNMEASURED, **settings})
    run.settings = {name: value for name, value in run.settings.items() if name not in shape}
    return run


def opened(folder: Path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def test_an_export_has_the_dtype_and_the_context_of_the_base(base, prepared, tmp_path, capsys):
    """Checkpoints are float32. The fields that are not used are named once and not saved."""
    whole = run_from(base, prepared, tmp_path / "whole").trained()
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "attention_dropout=0.1, which Paddock neither uses nor saves" in printed
    assert "(bfloat16, as the base; checkpoints are float32, to resume exactly)" in printed
    source = whole.checkpoint(4)
    assert store.read_state(source)["base_dtype"] == "bfloat16"
    trained = read_all(huggingface.load_model_weights(source))
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}

    assert python("scripts/export.py", whole.folder, "--to", "hf", "--output", tmp_path / "hf").returncode == 0
    exported, reference = opened(tmp_path / "hf"), opened(source, dtype=torch.bfloat16)
    assert exported.dtype == torch.bfloat16 and exported.config.attention_dropout == 0 and store.verify(tmp_path / "hf")
    assert exported.config.max_position_embeddings == CONTEXT
    assert all(torch.equal(*pair) for pair in zip(exported.parameters(), reference.parameters(), strict=True))
    size = {folder: (folder / "model.safetensors").stat().st_size for folder in (source, tmp_path / "hf")}
    assert size[tmp_path / "hf"] < 0.6 * size[source]
    assert python("scripts/export.py", whole.folder, "--to", "hf", "--dtype", "fp32", "--output", tmp_path / "fp32").returncode == 0
    assert (tmp_path / "fp32" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    # A next stage begins with float32, and still remembers.
    chained = run_from(source, prepared, tmp_path / "chained", MAX_STEPS=1, RESET_OPTIMIZER="true").trained()
    assert store.read_state(chained.checkpoint(1))["base_dtype"] == "bfloat16"
