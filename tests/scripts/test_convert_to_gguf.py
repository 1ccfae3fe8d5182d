"""convert_to_gguf.py: what a GGUF file contains is the model, as transformers reads it."""

import json
import math
import re
import struct
import unicodedata

import pytest
import torch
from factories import new_model

from checkpoint import huggingface
from checkpoint.tensors import lazy, read_all, write_files
from common.errors import CheckpointError, SettingsError
from config import ModelConfig
from extensions.inference.weights import load_model
from scripts import convert_to_gguf as script
from scripts.export import cast_weights
from scripts.import_checkpoint import import_checkpoint, read_gguf
from tokenizer import Tokenizer, load_tokenizer

MODELS = {"llama": {"tie_embeddings": False}, "llama3 scaling": {"rope_scaling_factor": 8.0, "rope_original_max_len": 64, "rope_theta": 10_000.0},
          "llama 3.1": {"rope_scaling_factor": 8.0}, "linear": {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}, "narrow": {"dim": 48, "head_width": 12},
          "qwen2": {"model_type": "qwen2"}, "qwen3": {"model_type": "qwen3", "head_width": 24},
          "yarn": {"model_type": "qwen2", "rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_high_freq_factor": 32.0,
                   "rope_original_max_len": 64}, "mistral": {"model_type": "mistral", "sliding_window": 100},
          "smollm3": {"model_type": "smollm3", "n_layers": 4, "no_rope_every": 4}}


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf", reason="GGUF files need the package: pip install -r requirements-extras.txt")


def contents(gguf, file) -> dict:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def save(folder, pairs=b"etaoinsh", **settings):
    """A folder of a random model with large weights, whose tokenizer has merges."""
    folder.mkdir()
    pairs = [bytes([a, b]) for a in pairs for b in pairs][:44]
    tokenizer = Tokenizer({token: rank for rank, token in enumerate([bytes([i]) for i in range(256)] + pairs)})
    config = ModelConfig(**{"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32, "init_std": 0.1, **settings})
    model = new_model(config, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases that do something
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    huggingface.save_model_folder(folder, model.state_dict(), config, tokenizer, 256)
    return folder


def test_a_number_beyond_float16_is_refused_with_a_way(gguf, tmp_path):
    """It would become infinite, without a word."""
    folder = save(tmp_path / "large", init_std=1e6)
    with pytest.raises(CheckpointError, match="beyond those of float16; choose bf16, or fp32"):
        script.convert(folder, tmp_path / "model.gguf", "f16")
    weights = cast_weights(folder, [], "fp16")
    with pytest.raises(CheckpointError, match="beyond those of float16; choose bf16, or fp32"):
        write_files(tmp_path, weights)
    script.convert(folder, tmp_path / "model.gguf", "bf16")


@pytest.mark.parametrize("field, words", [
    (struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, "use another file"), (struct.pack("<IIQ", 9, 8, 2**40), "exceeds the file"),
    (struct.pack("<IIQ", 9, 0, 2**40), "exceeds the file"), (struct.pack("<IQ", 8, 2**40), "exceeds the file"), (struct.pack("<I", 99), "use another file")])
def test_a_header_that_does_not_fit_its_file_is_refused(field, words, gguf, tmp_path):
    """Before the package gguf would make a list of 2^40 elements of it."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + field + bytes(64))
    with pytest.raises(CheckpointError, match=words):
        read_gguf(tmp_path / "bad.gguf")


@pytest.mark.parametrize("name", MODELS)
def test_every_type_is_the_model(name, gguf, tmp_path, transformers):
    """transformers reads the architecture and the settings from the file; it ignores scaling, and Qwen 3's head width."""
    folder = save(tmp_path / "model", **MODELS[name])
    for kind in ("f32", "bf16", "q8_0"):
        script.convert(folder, tmp_path / f"{kind}.gguf", kind)
    fields = contents(gguf, tmp_path / "f32.gguf")
    if name == "narrow":
        kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "q8_0.gguf").tensors}
        assert kinds["blk.0.attn_q.weight"] == "F16" and kinds["blk.0.ffn_down.weight"] == "Q8_0"
    assert fields["tokenizer.ggml.pre"] == "llama-bpe" and fields["tokenizer.ggml.add_bos_token"] is True
    context = fields[f"{fields['general.architecture']}.context_length"]
    if name == "yarn":  # which neither Paddock nor transformers reads
        scaling = {key.removeprefix("qwen2.rope.scaling."): value for key, value in fields.items()
                   if "rope.scaling" in key}
        assert scaling == {"type": "yarn", "factor": 4.0, "original_context_length": 64,
                           "yarn_beta_slow": 1.0, "yarn_beta_fast": 32.0}
    assert context == {"mistral": 100, "llama3 scaling": 512, "llama 3.1": 65_536}.get(name, 256)
    assert "compared with the model's: within the rounding of q8_0" in (tmp_path / "q8_0.md").read_text()
    assert "FROM ./q8_0.gguf" in (modelfile := (tmp_path / "q8_0.Modelfile").read_text()) and 'PARAMETER stop "<|eot_id|>"' in modelfile
    if name in ("llama3 scaling", "linear", "yarn"):  # a file of the first does not have its parameters
        with pytest.raises(CheckpointError, match="with (another|rope.scaling.factor, ).* is not supported; import the model's Hugging Face folder"):
            import_checkpoint(tmp_path / "f32.gguf", tmp_path / "f32", str(folder))
        return
    for kind in ("f32", "q8_0"):
        import_checkpoint(tmp_path / f"{kind}.gguf", tmp_path / kind, str(folder))
        assert json.loads((tmp_path / kind / "config.json").read_text())["max_position_embeddings"] == context
    before, after = (read_all(huggingface.load_model_weights(each)) for each in (folder, tmp_path / "f32"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((folder / "tokenizer.json").read_text()) == json.loads((tmp_path / "f32" / "tokenizer.json").read_text())
    tokens = torch.arange(0, 400, 7)[None]

    def logits(folder, **file):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **file)(tokens).logits

    assert torch.allclose(logits(folder), logits(tmp_path / "f32"), atol=1e-5)
    if name in ("llama", "narrow", "qwen2"):
        for kind in ("f32", "q8_0"):
            assert (logits(tmp_path / kind) - logits(folder, gguf_file=str(tmp_path / f"{kind}.gguf"))).abs().max() < 1e-4


def test_a_file_is_imported_with_the_tokens_of_its_own_tokenizer_only(gguf, tmp_path, capsys):
    folder, file, output = save(tmp_path / "model"), tmp_path / "f16.gguf", tmp_path / "out"
    script.convert(folder, file, "f16")
    other = save(tmp_path / "other", pairs=b"hsnioate")
    with pytest.raises(CheckpointError, match=r"\d+ tokens of --tokenizer, such as '..', have other ids in .*f16.gguf; name this model's own"):
        import_checkpoint(file, output, str(other))
    with pytest.raises(SettingsError, match="--rope-scaling-factor is for Meta's format only; remove it"):
        import_checkpoint(file, output, str(folder), 8.0)
    import_checkpoint(file, output, str(folder))
    assert re.search(r"Reading f16.gguf \(\d+ MB\): its tensors, \d+ as F16 and \d+ as F32, become float32\.", capsys.readouterr().out)
    assert {tensor.dtype for tensor in huggingface.load_model_weights(output).values()} == {torch.float32}
    content = file.read_bytes()
    for damaged in (content[:-1000], content[:5000], b"", b"version https://git-lfs.github.com/spec/v1"):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="f16.gguf cannot be read: "):
            import_checkpoint(file, tmp_path / "damaged", str(folder))


TEXTS = ("She sat in the tent.", "  In 1234567 there was 1 ant,\n\n\tthe tan hat isn't hers!", "na\u00efve \u00e9t\u00e9 \u4f60\u597d \U0001f600", " ", "<|eot_id|> is text",
         "a\u0301 is one letter, or two", "aaaa1 22 333 4444", "the hen\r\nsat")


def assert_equal_ids(ours, theirs, texts=TEXTS):
    """Of texts, whose control tokens are text, as in a record."""
    for text in texts:
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == theirs.decode(expected, clean_up_tokenization_spaces=False), text


@pytest.mark.parametrize("pre", ["llama-bpe", "smaug-bpe", "qwen2", "smollm", "gpt-2"])
def test_a_file_is_imported_with_the_tokenizer_that_it_holds(pre, gguf, tmp_path, transformers):
    """It has the ids of the model's own, which was exported, and of transformers' conversion of the file."""
    folder, file = save(tmp_path / "model"), tmp_path / "f16.gguf"
    content = json.loads((folder / "tokenizer.json").read_text())
    parts, (regex, ignores) = content["pre_tokenizer"]["pretokenizers"], next(how for how, name in script.PRE_TOKENIZERS.items() if name == pre)
    content["model"]["ignore_merges"], parts[0]["pattern"]["Regex"] = ignores, regex
    if regex.endswith("gpt2"):
        parts[:] = [{"type": "Digits", "individual_digits": True}, {**parts[1], "use_regex": True}][pre == "gpt-2":]
    content["normalizer"] = {"type": "NFC"} if pre == "qwen2" else None
    marked = next(each for each in content["added_tokens"] if "reserved" in each["content"])
    marked |= {"content": "<mark>", "special": False}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    script.convert(folder, file, "f16")
    fields, kinds = contents(gguf, file), gguf.TokenType
    tokens = fields["tokenizer.ggml.tokens"]
    types = dict(zip(tokens, fields["tokenizer.ggml.token_type"]))
    assert types["a"] == kinds.NORMAL and types["<mark>"] == kinds.USER_DEFINED
    assert types["<|eot_id|>"] == kinds.CONTROL
    assert {kind for token, kind in types.items() if token.startswith("[PAD")} <= {kinds.UNUSED}
    ends = {role: tokens[fields[f"tokenizer.ggml.{role}_token_id"]] for role in ("bos", "eos", "eot")}
    assert ends == {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "eot": "<|eot_id|>"}
    import_checkpoint(file, tmp_path / "out")
    own, ours = load_tokenizer(str(folder)), load_tokenizer(str(tmp_path / "out"))
    assert [ours.encode(text) for text in (*TEXTS, "a <mark>")] == [own.encode(text) for text in (*TEXTS, "a <mark>")]
    for name in ("vocab_size", "special_ids", "bos_id", "eos_id", "eot_id", "pad_id", "stop_ids", "adds_start", "chat_template", "byte_lengths"):
        assert getattr(ours, name) == getattr(own, name), name
    assert_equal_ids(own, transformers.AutoTokenizer.from_pretrained(folder))
    if pre in ("llama-bpe", "smaug-bpe", "qwen2", "gpt-2"):  # transformers splits others like GPT-2
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
        assert_equal_ids(ours, theirs, [text for text in TEXTS if pre != "qwen2" or unicodedata.is_normalized("NFC", text)])  # as Qwen's own
        assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)


def test_a_file_with_sentencepieces_is_imported_with_the_ids_of_transformers(gguf, tmp_path, transformers):
    kinds, file = gguf.TokenType, tmp_path / "pieces.gguf"
    words = ["\u2581t", "he", "\u2581the", "in", "an", "\u2581s", "at", "\u2581sat", "\u2581a", "en", "ten", "\u2581ten", "nt", "ent", "\u2581tent", "\u2581h", "aa", "aaaa", "\u2581\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *"\u2581etaoinshrdlu.,'0123SIT"]
    scores = [0.0] * 259 + [-float(place) for place in range(len(tokens) - 259)]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * (len(tokens) - 259)]
    config = ModelConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=32)
    source = script.Source("pieces", config, None, 256, {script.gguf_name(name): tensor for name, tensor in
                                                         new_model(config, len(tokens)).state_dict().items()})

    def add_tokenizer(writer, *_):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "add_tokenizer", add_tokenizer)
        source = source._replace(tensors={name: lazy(tensor[:len(tokens)] if "token_embd" in name or name == "output.weight" else tensor)
                                          for name, tensor in source.tensors.items()})
        script.write_gguf(file, source, "f32")
    import_checkpoint(file, tmp_path / "out")
    ours, theirs = load_tokenizer(str(tmp_path / "out")), transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert_equal_ids(ours, theirs)
    assert (ours.bos_id, ours.eos_id, ours.adds_start) == (1, 2, True) and theirs.encode("at")[0] == 1
    assert tokens.index("\u2581tent") in ours.encode("the tent")


@pytest.mark.parametrize("kind, error", [("f32", 1e-3), ("q8_0", 1e-2)])
def test_a_file_that_differs_is_not_exported(kind, error, gguf, tmp_path, monkeypatch):
    folder, output, quantize = save(tmp_path / "model"), tmp_path / "out.gguf", gguf.quants.quantize
    monkeypatch.setattr(gguf.quants, "quantize", lambda data, kind: quantize(data * (1 + error * (data.ndim == 2)), kind))
    with pytest.raises(CheckpointError, match="not exported: tensor .* differs"):
        script.convert(folder, output, kind)
    assert [*tmp_path.iterdir()] == [folder]


def test_llama_cpp_divides_the_frequencies_of_pairs_by_the_factors(tmp_path):
    """Llama 3.1's factors: 1 for pairs that rotate often, the scaling's for those that rotate rarely, and between them a mixture."""
    folder = save(tmp_path / "model", **MODELS["llama3 scaling"])
    model, tokenizer = load_model(folder, torch.device("cpu"), torch.float32)
    factors = script.read_source(folder, "model", model.config, tokenizer).tensors["rope_freqs.weight"].full().tolist()
    rotations = [64 / (2 * math.pi) * 10_000.0 ** (-pair / 8) for pair in range(8)]
    shares = [min(1.0, max(0.0, (each - 1) / (4 - 1))) for each in rotations]
    assert factors == pytest.approx([1 / ((1 - share) / 8 + share) for share in shares], rel=1e-4)
    assert (factors[0], factors[-1]) == pytest.approx((1, 8)) and 1 < factors[2] < 8
