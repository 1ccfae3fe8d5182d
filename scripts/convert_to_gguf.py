"""Convert a model to GGUF for llama.cpp and Ollama, and compare the file with the model.

    ./paddock export first --to gguf --type q8_0 --output first.gguf

This needs the package gguf. It writes first.gguf, first.Modelfile for Ollama (ollama create first -f
first.Modelfile) and first.md, a model card. Nothing is written unless every tensor in the file, read again,
is that of the model, or within the rounding of q8_0. For smaller types, run llama.cpp's llama-quantize on a
file of f16.

llama.cpp rotates neighboring pairs of a head in Llama, Mistral and SmolLM 3, as Paddock does, and its halves
in Qwen, as Hugging Face does.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import huggingface, model_json
from checkpoint.huggingface import permuted
from checkpoint.tensors import LazyTensor, lazy
from common.command_line import CommandParser
from common.errors import CheckpointError, DataError, local_path, requires_package, run_script
from common.files import disk_errors
from common.text import show, status_line
from config import ModelConfig
from data_pipeline.templates import load_chat_format
from extensions.card import read_card
from extensions.inference.weights import export_dtype, find_model, load_model, rounded
from model_kernels.attention import precompute_freqs
from tokenizer import CHAT_TEMPLATE, PATTERN

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "smollm3": "smollm3", "qwen2": "qwen2",
                 "qwen3": "qwen3"}
HALVES = ("qwen2", "qwen3")
NAMES = {
    "tok_embeddings": "token_embd", "norm": "output_norm", "output": "output", "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm", "w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up", "wq": "attn_q",
    "wk": "attn_k", "wv": "attn_v", "wo": "attn_output", "bq": "attn_q", "bk": "attn_k", "bv": "attn_v",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
# llama.cpp's pre-tokenizers, by their regular expressions and whether a piece that is a token stays whole.
PRE_TOKENIZERS = {
    (PATTERN, True): "llama-bpe", (PATTERN, False): "smaug-bpe",
    (PATTERN.replace("{1,3}", ""), False): "qwen2", ("digits gpt2", False): "smollm",
    ("gpt2", False): "gpt-2"}
TYPES = ("f32", "f16", "bf16", "q8_0")
# Chat formats in Ollama's template language, by a token of the format.
OLLAMA = {"<|start_header_id|>": """{{ range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>

{{ .Content }}<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>

""", "<|im_start|>": """{{ range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""}


class Source(NamedTuple):
    """A model to convert."""

    name: str
    config: ModelConfig
    tokenizer: Any
    context: int  # in tokens
    tensors: Mapping[str, LazyTensor]  # under GGUF's names and in its layout


def import_gguf(feature: str = "--to gguf") -> Any:
    with requires_package("gguf>=0.18", feature):
        import gguf
    return gguf


def gguf_name(name: str) -> str:
    *place, module, _ = name.split(".")
    if module not in NAMES:
        raise CheckpointError(f"llama.cpp's models have no {name}; use --to hf")
    block = f"blk.{place[1]}." if len(place) > 1 else ""
    return f"{block}{NAMES[module]}.{'bias' if module in ('bq', 'bk', 'bv') else 'weight'}"


def rope_factors(config: ModelConfig) -> torch.Tensor:
    """Return what Llama 3's scaling divides the frequency of each pair by."""
    unscaled = config.model_copy(update={"rope_scaling_factor": None})
    pairs = [precompute_freqs(each, torch.ones(1, 1)) for each in (unscaled, config)]
    before, after = (torch.atan2(sin[..., 1::2], cos[..., ::2]).flatten() for cos, sin in pairs)
    return before / after


def read_source(folder: Path, name: str, config: ModelConfig, tokenizer: Any) -> Source:
    """Return the model in a folder; CheckpointError if llama.cpp computes something else."""
    no_rope_every = 4 if config.model_type == "smollm3" else None
    if config.no_rope_every != no_rope_every:
        raise CheckpointError(f"llama.cpp runs {config.model_type} only with NO_ROPE_EVERY={no_rope_every}, "
                              f"and this model has {config.no_rope_every}; use --to hf")
    stored, tensors = huggingface.load_model_weights(folder), {}
    rows = huggingface.vocabulary_rows(stored)
    for parameter, tensor in huggingface.from_huggingface(stored, config, rows).items():
        if config.model_type in HALVES:
            tensor = permuted(parameter, tensor, config, to_huggingface=True)
        tensors[gguf_name(parameter)] = tensor
    if config.rope_scaling_factor is not None and config.rope_scaling_type == "llama3":
        tensors["rope_freqs.weight"] = lazy(rope_factors(config))
    context = model_json.context_length(model_json.read_model_json(folder / "config.json"))
    # Up to its length, a sliding window changes nothing, and llama.cpp has none.
    return Source(name, config, tokenizer, min(context, config.sliding_window or context), tensors)


def pre_tokenizer_name(document: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a tokenizer.json's pre-tokenizer."""
    before, model = document.get("pre_tokenizer") or {}, document.get("model") or {}
    steps = before.get("pretokenizers", [before])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    patterns += ["digits" for step in steps if step.get("type") == "Digits" and step.get("individual_digits")]
    patterns += ["gpt2" for step in steps if step.get("type") == "ByteLevel" and step.get("use_regex", True)]
    name = PRE_TOKENIZERS.get((" ".join(map(str, patterns)), model.get("ignore_merges") is True))
    normalizer = (document.get("normalizer") or {"type": "NFC"}).get("type")
    if name is None or normalizer != "NFC" or '"ByteLevel"' not in json.dumps(document.get("decoder")):
        raise CheckpointError("llama.cpp has no pre-tokenizer that splits text like this tokenizer.json; "
                              "supported are byte-level ones of Llama 3, Qwen, SmolLM and GPT-2")
    if not model.get("merges"):
        raise CheckpointError("its tokenizer.json has no merges, which llama.cpp requires; train a tokenizer "
                              "with a larger vocabulary")
    return name


def add_tokenizer(writer: Any, tokenizer: Any, rows: int) -> None:
    """Write the tokens, merges, control tokens and chat template. Ids without a token are filled."""
    kinds = import_gguf().TokenType
    document = json.loads(tokenizer.tokenizer_json)
    tokens, types = [f"[PAD{number}]" for number in range(rows)], [kinds.UNUSED] * rows
    for token, number in document["model"]["vocab"].items():
        tokens[number], types[number] = token, kinds.NORMAL
    for added in document.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        types[added["id"]] = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(document))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = document["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_add_bos_token(tokenizer.adds_start)
    # llama.cpp also ends at eot and eom; two of the model's further ends can be stored as these.
    more = sorted(tokenizer.stop_ids - {tokenizer.eos_id, tokenizer.eot_id})
    ends = [tokenizer.eot_id, *more] if tokenizer.eot_id != tokenizer.eos_id or not more else more
    for role, number in zip(("bos", "pad", "eos", "eot", "eom"),
                            (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id, *ends)):
        if number is not None:
            getattr(writer, f"add_{role}_token_id")(number)
    if lost := ends[2:]:
        show(f"GGUF stores three tokens that end texts; it leaves out {tokenizer.decode(lost)}")
    if (template := getattr(tokenizer, "chat_template", CHAT_TEMPLATE)) is not None:
        writer.add_chat_template(template)


def write_gguf(path: Path, source: Source, kind: str) -> None:
    """Write a GGUF file whose matrices have the type `kind`, one tensor in memory at a time."""
    gguf, config, tensors = import_gguf(), source.config, source.tensors
    writer, rows = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type]), tensors["token_embd.weight"].rows
    file_type = "ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"
    fields = {
        "name": source.name, "context_length": source.context, "embedding_length": config.dim,
        "block_count": config.n_layers, "feed_forward_length": config.hidden_dim,
        "head_count": config.n_heads, "head_count_kv": config.n_kv_heads, "key_length": config.head_dim,
        "value_length": config.head_dim, "rope_dimension_count": config.head_dim, "vocab_size": rows,
        "layer_norm_rms_eps": config.norm_eps, "rope_freq_base": config.rope_theta,
        "file_type": gguf.LlamaFileType[file_type], "quantization_version": gguf.GGML_QUANT_VERSION}
    if config.rope_scaling_factor is not None and config.rope_scaling_type != "llama3":
        fields |= {"rope_scaling_type": gguf.RopeScalingType(config.rope_scaling_type),
                   "rope_scaling_factor": config.rope_scaling_factor}
        if config.rope_scaling_type == "yarn":
            fields |= {"rope_scaling_orig_ctx_len": config.rope_original_max_len,
                       "rope_scaling_yarn_beta_slow": config.rope_low_freq_factor,
                       "rope_scaling_yarn_beta_fast": config.rope_high_freq_factor}
    for field, value in fields.items():
        getattr(writer, f"add_{field}")(value)
    add_tokenizer(writer, source.tokenizer, rows)

    types = {}
    for name, tensor in tensors.items():
        # Vectors are f32; rows that q8_0 cannot divide into blocks are f16.
        odd = "f16" if kind == "q8_0" and tensor.shape[-1] % 32 else kind
        stored = "f32" if len(tensor.shape) == 1 else odd
        types[name] = gguf.GGMLQuantizationType[stored.upper()]
        size = int(np.prod(gguf.quant_shape_to_byte_shape(tensor.shape, types[name])))
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), size, raw_dtype=types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for name, tensor in tqdm(tensors.items(), "Writing", disable=None, leave=False, unit="tensor"):
            values = tensor.full().float()
            if types[name] == gguf.GGMLQuantizationType["F16"]:
                rounded(name, values, torch.float16)
            writer.write_tensor_data(gguf.quants.quantize(values.numpy(), types[name]))
    finally:
        writer.close()


def compare(path: Path, source: Source) -> None:
    """Raise CheckpointError unless the tensors in a GGUF file are those that it was made from."""
    gguf = import_gguf()
    for stored in tqdm(gguf.GGUFReader(path).tensors, "Comparing", disable=None, leave=False, unit="tensor"):
        tensor, kind = source.tensors[stored.name], stored.tensor_type
        read = torch.from_numpy(gguf.quants.dequantize(stored.data, kind).reshape(tensor.shape).copy())
        expected = tensor.full().float()
        if kind == gguf.GGMLQuantizationType.Q8_0:  # half a step, which is stored as f16
            largest = expected.reshape(-1, 32).abs().amax(dim=1, keepdim=True)
            allowed = largest * (0.5 / 127 + 2**-11) + 127 * 2**-25
            is_equal = bool(((read - expected).reshape(-1, 32).abs() <= allowed).all())
        else:
            dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind.name, torch.float32)
            is_equal = torch.equal(read, expected.to(dtype).float())
        if not is_equal:
            raise CheckpointError(f"the model was not exported: tensor {stored.name} of the file differs")


def added_system_message(tokenizer: Any, template: str) -> str:
    """Return the system message that the chat template adds to chats without one, or ""."""
    message = re.search("{{ range .Messages }}(.*){{ end }}", template, re.DOTALL)
    if message is None:
        return ""
    form = re.escape(message[1]).replace(re.escape("{{ .Role }}"), "system")
    form = form.replace(re.escape("{{ .Content }}"), "(.*?)")
    with suppress(DataError):  # a template that Paddock cannot use
        chat = load_chat_format(tokenizer).encode_prompt([{"role": "user", "content": "?"}])
        found = re.search(form, tokenizer.decode(chat), re.DOTALL)
        return found[1] if found else ""
    return ""


def modelfile(output: Path, source: Source) -> str:
    """Return Ollama's Modelfile. Without a known chat format, the model continues text."""
    tokenizer = source.tokenizer
    chat = getattr(tokenizer, "chat_template", CHAT_TEMPLATE) or ""
    template = next((OLLAMA[token] for token in OLLAMA if token in chat), "{{ .Prompt }}")
    ends = [each["content"] for each in json.loads(tokenizer.tokenizer_json)["added_tokens"]
            if each["id"] in tokenizer.stop_ids | {tokenizer.eot_id}]
    lines = [f"FROM ./{output.name}", f'TEMPLATE """{template}"""', f"PARAMETER num_ctx {source.context}"]
    if chat and (system := added_system_message(tokenizer, template)):
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join([*lines, *(f'PARAMETER stop "{end}"' for end in ends), ""])


@torch.no_grad()
def convert(folder: Path, output: Path, kind: str) -> None:
    """Write the GGUF file, a Modelfile and a card, unless the comparison fails."""
    modelfile_, card = output.with_suffix(".Modelfile"), output.with_suffix(".md")
    for file in (output, modelfile_, card):
        if os.path.lexists(file):
            raise CheckpointError(f"{file} already exists; choose a new file")
    model, tokenizer = load_model(folder, torch.device("cpu"))
    source = read_source(folder, output.stem, model.config, tokenizer)
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        write_gguf(temporary, source, kind)
        compare(temporary, source)
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    modelfile_.write_text(modelfile(output, source), encoding="utf-8")
    before = read_card(folder).rstrip() or f"# {output.stem}"
    tensors = "within the rounding of q8_0" if kind == "q8_0" else "equal"
    described = (f"`{output.name}` ({kind}), its tensors compared with the model's: {tensors}. The rest of "
                 "this page is about that model, and the code above needs its folder.")
    card.write_text(f"{before}\n\n## GGUF\n\n{described}\n", encoding="utf-8")


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("model", help="a run, a checkpoint, or a Hugging Face folder or name")
    parser.add_argument("--output", type=local_path, required=True, metavar="FILE",
                        help=".gguf file to write")
    parser.add_argument("--type", "--dtype", choices=TYPES,
                        help="type of the matrices (default: bf16 if training began with bf16, else f16)")
    args = parser.parse_args()
    output, folder = args.output.expanduser(), find_model(args.model)
    kind = args.type or ("bf16" if export_dtype(folder) == torch.bfloat16 else "f16")
    with (status_line(lambda: f"exporting {output.name} ({kind})"),
          disk_errors(output, CheckpointError, "choose another --output")):
        convert(folder, output, kind)
    file, name, described = (shlex.quote(str(each)) for each in
                             (output, output.stem, output.with_suffix(".Modelfile")))
    show(f"{output} is ready ({kind}, {output.stat().st_size / 1e6:,.0f} MB, its tensors compared with the "
         f"model's). In llama.cpp: llama-cli -m {file}",
         f"For a model that was only pretrained: llama-completion -m {file} -no-cnv -p Once",
         f"In Ollama: ollama create {name} -f {described}")


if __name__ == "__main__":
    run_script(main)
