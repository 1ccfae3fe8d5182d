"""Import a Llama model from Hugging Face, Meta or llama.cpp, as a checkpoint to start training from.

    ./paddock import models/Llama-3.2-1B models/start
    ./paddock import meta-llama/Llama-3.2-1B models/start
    ./paddock import ~/.llama/Llama3.2-1B models/start
    ./paddock import model.gguf models/start

PRETRAIN_CHECKPOINT accepts Hugging Face folders and names directly, but only an imported copy is verified at
each start. A Hugging Face folder must contain safetensors. Meta's consolidated.00.pth is read without running
code. A GGUF file needs the package gguf; its weights become float32, and its tokenizer a tokenizer.json.
"""

import json
import os
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

import numpy as np
import tokenizers
import torch
from torch import Tensor

from checkpoint import huggingface, model_json
from checkpoint.model_json import read_model_json, refuse_adapters
from checkpoint.store import check_new
from checkpoint.tensors import LazyTensor, lazy
from common.command_line import CommandParser
from common.errors import CheckpointError, SettingsError, local_path, run_script, unreadable
from common.files import WrongContentError, plain
from common.text import command, counted, show
from config import ModelConfig
from extensions.card import code, derived_card, hub_name_of, inherited, run_and_step, write_card
from extensions.inference.weights import find_model, publish_model
from extensions.other_trainers import unused_fields
from plan.identity import weights_sha256  # noqa: E402
from scripts.convert_to_gguf import (
    ARCHITECTURES,
    HALVES,
    PRE_TOKENIZERS,
    gguf_name,
    import_gguf,
    rope_factors,
)
from tokenizer import BaseTokenizer, load_tokenizer, read_generation

# Fields of a GGUF file, below the name of its architecture, and of config.json.
GGUF_FIELDS = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "rope.freq_base": "rope_theta",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "context_length": "max_position_embeddings"}
NOT_READ = {"vocab_size", "rope.dimension_count", "attention.value_length", "tensor_data_layout"}


def from_meta(tensors: Mapping[str, Tensor],
              params: Mapping[str, Any]) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Return parameters and model settings from Meta's Llama 3 files, consolidated.00.pth and params.json.

    Meta's files store the tied head of the 1B and 3B models separately, and omit their rotary scaling factor,
    which is 32; Llama 3.1's is 8. Source: the models' published configurations.
    """
    state = {name: huggingface.checked(name, lazy(tensor)) for name, tensor in tensors.items()
             if name != "rope.freqs"}
    required = ("dim", "n_layers", "n_heads", "norm_eps")
    gate = "layers.0.feed_forward.w1.weight"
    missing = [key for key in required if key not in params]
    missing += [name for name in (*huggingface.VOCABULARY, gate) if name not in state]
    if missing:
        raise CheckpointError(f"not Meta's Llama 3 files: they lack {', '.join(missing)}; use others")
    tied = state["tok_embeddings.weight"].equals(state["output.weight"])
    if tied:
        del state["output.weight"]
    settings = {key: params[key] for key in required} | {
        "n_kv_heads": params.get("n_kv_heads") or params["n_heads"], "ffn_dim": state[gate].rows,
        "rope_theta": params.get("rope_theta", 10_000.0), "tie_embeddings": tied}
    if params.get("use_scaled_rope"):
        settings["rope_scaling_factor"] = params.get("rope_scaling_factor") or (32.0 if tied else 8.0)
        settings["rope_high_freq_factor"] = params.get("rope_high_freq_factor") or 4.0
    rows = state["tok_embeddings.weight"].rows
    config = model_json.checked_settings(settings, "params.json")
    expected = config.parameter_shapes(rows)
    wrong = [name for name in sorted(expected.keys() | state.keys(), key=str)
             if name not in state or state[name].shape != expected.get(name)]
    if wrong:
        raise CheckpointError(f"{wrong[0]} does not fit params.json ({len(wrong)} such tensors); use "
                              "the one of this model")
    return state, settings


def read_meta(file: Path,
              rope_scaling_factor: Optional[float]) -> tuple[dict[str, LazyTensor], ModelConfig, int]:
    """Read consolidated.00.pth and params.json; return weights under our names, settings, context length."""
    if len(shards := sorted(file.parent.glob("consolidated.*.pth"))) > 1:
        raise CheckpointError(f"the model in {file.parent} is split into {len(shards)} files; download it in "
                              "Hugging Face's format")
    params = read_model_json(file.parent / "params.json")
    try:
        with open(file, "rb", opener=plain):  # refuses a git-lfs pointer
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except WrongContentError as error:
        raise CheckpointError(f"{file} {unreadable(error, '')}") from error
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} is damaged, or contains more than plain weights "
                              f"({str(error).splitlines()[0]:.60} ...); download it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file} is not a dictionary of tensors; download it again")
    state, settings = from_meta(tensors, params)
    if rope_scaling_factor is not None:
        settings["rope_scaling_factor"] = rope_scaling_factor
    return state, model_json.checked_settings(settings, "--rope-scaling-factor"), 8192


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, LazyTensor], dict[str, Any]]:
    """Read a GGUF file; return config.json's content, tensors under Hugging Face's names, and all fields."""
    gguf = import_gguf(f"the import of {file.name}")

    class Reader(gguf.GGUFReader):
        """Refuses lengths beyond the end of the file, of which the package would make lists."""

        def _get(self, offset, dtype, count=1, **options):
            values = super()._get(offset, dtype, count, **options)
            if len(values) < count:
                raise ValueError("its header has a length that exceeds the file")
            return values

    try:
        with open(file, "rb", opener=plain) as stream:
            reader = Reader(stream)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        stored = {each.name: dequantized(gguf, each) for each in reader.tensors}
        types = Counter(each.tensor_type.name for each in reader.tensors)
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError,
            NotImplementedError) as error:
        raise CheckpointError(f"{file} {unreadable(error, 'use another file')}") from error
    kind = fields.get("general.architecture")
    given = {name.removeprefix(f"{kind}."): float(str(np.float32(value))) if type(value) is float else value
             for name, value in fields.items() if name.startswith(f"{kind}.")}  # 1e-05, not 9.9999997e-06
    content = {field: given[name] for name, field in GGUF_FIELDS.items() if name in given}
    content |= {"model_type": kind, "tie_word_embeddings": "output.weight" not in stored}
    unlike = sorted(given.keys() - GGUF_FIELDS.keys() - NOT_READ)
    unlike += ["tensors in other files"] * (fields.get("split.count", 1) > 1)
    if (factors := stored.pop("rope_freqs.weight", None)) is not None:  # with Llama 3's other numbers
        content["rope_scaling"] = {"rope_type": "llama3", "factor": round(float(factors.full().max()), 3),
                                   "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                   "original_max_position_embeddings": 8192}
    if kind in ARCHITECTURES.values() and not unlike:
        config = ModelConfig(**model_json.model_settings_from_huggingface(content))
        if given.get("rope.dimension_count", config.head_dim) != config.head_dim or (
                factors is not None and not torch.allclose(rope_factors(config), factors.full(), rtol=1e-3)):
            unlike = ["another rotary embedding"]
    if kind not in ARCHITECTURES.values() or unlike:
        raise CheckpointError(f"{file} has a {kind} model{' with ' * bool(unlike)}{', '.join(unlike)}, which "
                              "is not supported; import the model's Hugging Face folder")
    for name in config.parameter_shapes(1):
        if (tensor := stored.pop(gguf_name(name), None)) is not None:
            rotated = tensor if kind in HALVES else huggingface.permuted(name, tensor, config, True)
            stored[huggingface.huggingface_name(name)] = rotated
    stored_as = " and ".join(f"{number:,} as {name}" for name, number in types.most_common())
    show(f"Reading {file.name} ({file.stat().st_size / 1e6:,.0f} MB): its tensors, {stored_as}, become "
         "float32.")
    return content, stored, fields


def dequantized(gguf: Any, stored: Any) -> LazyTensor:
    """Return a tensor of a GGUF file in float32."""
    def read(start: int, stop: int) -> Tensor:
        rows = gguf.quants.dequantize(stored.data[start:max(stop, start + 1)], stored.tensor_type)
        return torch.tensor(rows[:stop - start])

    read(0, 1)  # NotImplementedError for some types
    return LazyTensor(tuple(map(int, reversed(stored.shape))), torch.float32, read)


def splits_of(regex: str, merges: list[str]) -> dict[str, Any]:
    """Return the parts of a byte-level tokenizer.json that splits text as in PRE_TOKENIZERS."""
    by_library = regex.endswith("gpt2")  # whose pattern it is
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": by_library}
    steps = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}]
    if by_library:
        steps = [{"type": "Digits", "individual_digits": True}] * regex.startswith("digits")
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, bytes_]}, "decoder": bytes_,
            "merges": [merge.split(" ") for merge in merges]}


def pieces_of(scores: Mapping[str, float], vocab: Mapping[str, int], is_prefixed: bool) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that joins the pair whose token has the highest score first."""
    pairs = [(-score, vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
             for token, score in scores.items() for cut in range(1, len(token))
             if token[:cut] in vocab and token[cut:] in vocab]
    space, scheme = "\u2581", "first" if is_prefixed else "never"
    steps = [{"type": "Replace", "pattern": {"String": space}, "content": " "}, {"type": "ByteFallback"},
             {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return {"pre_tokenizer": {"type": "Metaspace", "replacement": space, "split": False,
                              "prepend_scheme": scheme},
            "decoder": {"type": "Sequence", "decoders": steps},
            "merges": [pair[-2:] for pair in sorted(pairs)]}


def write_tokenizer(fields: Mapping[str, Any], file: Path, folder: Path) -> None:
    """Write the tokenizer in a GGUF file's fields as a tokenizer.json: byte-level BPE, or SentencePiece's."""
    def field(name: str, default: Any = None) -> Any:
        return fields.get(f"tokenizer.ggml.{name}", default)

    kinds, tokens, scores = import_gguf().TokenType, field("tokens", []), field("scores", [])
    types = field("token_type", [kinds.NORMAL] * len(tokens))
    is_pieces, splits = field("model") == "llama", {name: how for how, name in PRE_TOKENIZERS.items()}
    regex, ignore_merges = splits.get(field("pre"), ("", False))
    if not (is_pieces and scores or field("model") == "gpt2" and regex and field("merges")):
        raise CheckpointError(f"{file} has a tokenizer that is not supported (model {field('model')!r}, pre "
                              f"{field('pre')!r}); name the model's own with --tokenizer: a tokenizer.json, "
                              "its folder, or a hub name")
    last = max(number for number, kind in enumerate(types) if kind == kinds.NORMAL)
    vocab = {token: number for number, token in enumerate(tokens[:last + 1]) if types[number] != kinds.UNUSED}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": number, "content": tokens[number], "special": kind != kinds.USER_DEFINED, **flags}
             for number, kind in enumerate(types)
             if kind in (kinds.UNKNOWN, kinds.CONTROL, kinds.USER_DEFINED)]
    if is_pieces:
        usual = {token: scores[number] for token, number in vocab.items() if types[number] == kinds.NORMAL}
        parts = pieces_of(usual, vocab, field("add_space_prefix", True))
    else:
        parts = splits_of(regex, field("merges"))
    roles = {"bos_token": "bos", "eos_token": "eos", "eot_token": "eot", "pad_token": "padding"}
    names = {role: tokens[number] for role, name in roles.items()
             if (number := field(f"{name}_token_id")) is not None}
    starts = None
    if field("add_bos_token", is_pieces) and (bos := names.get("bos_token")):
        single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        starts = {"type": "TemplateProcessing", "single": single,
                  "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
                  "special_tokens": {bos: {"id": bos, "ids": [field("bos_token_id")], "tokens": [bos]}}}
    unknown = next((token for token, kind in zip(tokens, types) if kind == kinds.UNKNOWN), None)
    model = {"type": "BPE", "vocab": vocab, "merges": parts.pop("merges"), "ignore_merges": ignore_merges,
             "byte_fallback": is_pieces, "fuse_unk": is_pieces, "unk_token": unknown}
    document = {"version": "1.0", "added_tokens": added, "post_processor": starts, "model": model, **parts,
                "normalizer": {"type": "NFC"} if field("pre") == "qwen2" else None}
    names["chat_template"] = fields.get("tokenizer.chat_template")
    ends = {field(f"{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    for name, content in (("tokenizer", document), ("tokenizer_config", names),
                          ("generation_config", {"eos_token_id": sorted(ends)})):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def check_tokens(tokenizer: BaseTokenizer, tokens: list[str], file: Path) -> None:
    """Raise CheckpointError unless a tokenizer's ids stand for the tokens in a GGUF file."""
    vocab = tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json).get_vocab()
    if wrong := [token for token, number in vocab.items() if tokens[number:number + 1] != [token]]:
        raise CheckpointError(f"{len(wrong)} tokens of --tokenizer, such as {wrong[0]!r}, have other ids in "
                              f"{file}; name this model's own tokenizer")


def import_checkpoint(source: Path, output: Path, tokenizer_path: Optional[str] = None,
                      rope_scaling_factor: Optional[float] = None) -> None:
    check_new(output)
    meta_file = source if source.suffix == ".pth" else source / "consolidated.00.pth"
    if os.path.isfile(meta_file) and not os.path.isfile(source / "config.json"):
        state, config, max_seq_len = read_meta(meta_file, rope_scaling_factor)
        tokenizer = load_tokenizer(tokenizer_path or str(meta_file.parent / "tokenizer.model"))
    else:
        if rope_scaling_factor is not None:
            raise SettingsError("--rope-scaling-factor is for Meta's format only; remove it")
        if source.suffix == ".gguf":
            content, tensors, fields = read_gguf(source)
            with tempfile.TemporaryDirectory() as folder:
                if tokenizer_path is None:
                    write_tokenizer(fields, source, Path(folder))
                tokenizer = load_tokenizer(tokenizer_path or folder)
            check_tokens(tokenizer, fields.get("tokenizer.ggml.tokens", []), source)
        else:
            source = find_model(str(source))
            refuse_adapters(source)
            content, tensors = read_model_json(source / "config.json"), huggingface.load_model_weights(source)
            tokenizer = load_tokenizer(tokenizer_path or str(source))
            tokenizer.generation = read_generation(source)
        config = ModelConfig(**model_json.model_settings_from_huggingface(content))
        max_seq_len = model_json.context_length(content)
        for message in unused_fields(source) if source.is_dir() else ():
            show(message)
        state = huggingface.from_huggingface(tensors, config, huggingface.vocabulary_rows(tensors))
    rows = state["tok_embeddings.weight"].rows
    if tokenizer.vocab_size > rows:
        raise CheckpointError(f"the tokenizer has {tokenizer.vocab_size:,} ids, but the model only {rows:,}; "
                              "pass the model's own tokenizer with --tokenizer")
    if tokenizer.vocab_size < rows:
        dropped = counted(rows - tokenizer.vocab_size, "row")
        show(f"Dropping {dropped} at the end of the embedding, without a token.")

    def complete(folder: Path) -> None:
        digest = weights_sha256(folder)
        name, rest = hub_name_of(str(source)), "Its card describes the data."
        if inherited(source):
            rest = "The sections below are from its card."
        where = f"[{name}](https://huggingface.co/{name})" if name else code(run_and_step(str(source)))
        write_card(folder, derived_card(output.name, source, source, (
            f"The weights of {where}, imported unchanged. {rest}\n\n"
            f"- context length: {max_seq_len:,} tokens\n- SHA-256 of the weights: {code(digest)}")))

    publish_model(output, state, config, tokenizer, max_seq_len, complete)


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("source", type=Path,
                        help="a Hugging Face folder or name, a run, Meta's folder or .pth file, or a .gguf "
                             "file")
    parser.add_argument("output", type=local_path, help="folder of the new checkpoint")
    parser.add_argument("--tokenizer", metavar="PATH",
                        help="the model's tokenizer (default: the one next to the weights, or in the .gguf "
                             "file)")
    parser.add_argument("--rope-scaling-factor", type=float, metavar="X",
                        help="RoPE scaling factor for Meta's format, where params.json may lack it (default: "
                             "8, or 32 with tied embeddings)")
    args = parser.parse_args()
    import_checkpoint(args.source.expanduser(), args.output.expanduser(), args.tokenizer,
                      args.rope_scaling_factor)
    output = args.output.expanduser()
    is_meta = args.source.suffix == ".pth" or (args.source.expanduser() / "params.json").exists()
    line = f"Generate text with it: {command('scripts/generate.py', output)}"
    if (output / "chat_template.jinja").exists() and not is_meta:  # Meta's base models get our template, too
        line = f"Chat with it: {command('scripts/chat.py', output)}"
    show(f"Imported into {args.output}. Add to .env:", f"PRETRAIN_CHECKPOINT={args.output}",
         f"TOKENIZER_PATH={args.output}", line)


if __name__ == "__main__":
    run_script(main)
