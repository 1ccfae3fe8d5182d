"""Weights and configuration to and from the formats of Hugging Face, PEFT and Meta: pure functions on state dicts.

Paddock's own names are Meta's. Hugging Face names every tensor differently, rotates halves of a head where Meta rotates
neighbouring pairs (so the rows of wq and wk change places), and knows nothing of the padding of our vocabulary.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from checkpoint.schema import GONE
from checkpoint.tensor_files import write_tensors
from common.errors import CheckpointError
from common.heartbeat import HEARTBEAT
from config import ModelConfig

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
VOCABULARY = ("tok_embeddings.weight", "output.weight")  # a row for each id
# Ids whose rows learn in an adapter, ascending, of "tok_embeddings" and "output"; tied, the first means both.
TokenIds = Mapping[str, Sequence[int]]
MAX_SHARD_BYTES = 5_000_000_000

HUGGINGFACE_NAMES = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}


def huggingface_name(name: str) -> str:
    """Hugging Face's name of one of our parameters."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("layers."):
        return f"{HUGGINGFACE_NAMES[stem]}.weight"
    _, layer, part = stem.split(".", 2)
    return f"model.layers.{layer}.{HUGGINGFACE_NAMES[part]}.weight"


def unwrapped_name(name: str) -> str:
    """The parameter's name without what torch.compile and DDP put into it."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def parameter_shapes(model_config: ModelConfig, vocab_rows: int) -> dict[str, tuple[int, ...]]:
    """The name and shape of every parameter of the model, in its own order."""
    c = model_config
    kv_dim = c.n_kv_heads * c.head_dim
    block = {"attention.wq": (c.dim, c.dim), "attention.wk": (kv_dim, c.dim), "attention.wv": (kv_dim, c.dim),
             "attention.wo": (c.dim, c.dim), "feed_forward.w1": (c.hidden_dim, c.dim),
             "feed_forward.w2": (c.dim, c.hidden_dim), "feed_forward.w3": (c.hidden_dim, c.dim),
             "attention_norm": (c.dim,), "ffn_norm": (c.dim,)}
    shapes = {"tok_embeddings.weight": (vocab_rows, c.dim)}
    for layer in range(c.n_layers):
        shapes |= {f"layers.{layer}.{part}.weight": shape for part, shape in block.items()}
    shapes["norm.weight"] = (c.dim,)
    if not c.tie_embeddings:
        shapes["output.weight"] = (vocab_rows, c.dim)
    return shapes


def _rotated_heads(name: str, model_config: ModelConfig) -> int:
    """How many heads of this parameter are rotated; 0 for all but wq and wk."""
    part = name.rsplit(".", 2)[-2]
    return {"wq": model_config.n_heads, "wk": model_config.n_kv_heads}.get(part, 0)


def _pairs_to_halves(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _halves_to_pairs(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def to_huggingface(state_dict: Mapping[str, Tensor], model_config: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """Our parameters under Hugging Face's names, on the CPU, without the rows that pad the vocabulary.

    A tied head is left out; `from_huggingface` gives back the same bits.
    """
    state = {unwrapped_name(name): tensor for name, tensor in state_dict.items()}
    shapes = parameter_shapes(model_config, vocab_size)
    foreign = set(state) - set(shapes) - {"output.weight"}
    assert not foreign and set(shapes) <= set(state), f"not the parameters of this model: {foreign or set(shapes) - set(state)}"
    tensors = {}
    for name, shape in shapes.items():
        weight = state[name].detach()
        heads = _rotated_heads(name, model_config)
        if heads:
            weight = _pairs_to_halves(weight, heads)
        if len(weight) > shape[0] and name in VOCABULARY:
            weight = weight[:vocab_size]
        assert weight.shape == shape, f"{name} is {tuple(weight.shape)}, expected {shape}"
        tensors[huggingface_name(name)] = weight.cpu().contiguous()
    return tensors


def vocabulary_rows(tensors: Mapping[str, Tensor]) -> int:
    """How many ids a Hugging Face Llama's embedding has.

    Raises:
        CheckpointError: there is no embedding.
    """
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or embedding.ndim != 2 or not len(embedding):
        raise CheckpointError("the weights lack model.embed_tokens.weight, a row for each id; take another checkpoint")
    return len(embedding)


def from_huggingface(tensors: Mapping[str, Tensor], model_config: ModelConfig, padded_vocab: int,
                     finite: bool = True) -> dict[str, Tensor]:
    """A Hugging Face Llama's tensors under our names, the vocabulary padded to `padded_vocab` rows with zeros.

    Args:
        finite: refuse numbers that are not.
    Raises:
        CheckpointError: a tensor is missing, unknown, or not of the shape that the settings give.
    """
    shapes = parameter_shapes(model_config, padded_vocab)
    embedding, head = tensors.get("model.embed_tokens.weight"), tensors.get("lm_head.weight")
    if model_config.tie_embeddings and head is not None and (embedding is None or not torch.equal(embedding, head)):
        raise CheckpointError("the weights have a head of their own; set TIE_EMBEDDINGS=false")
    if not model_config.tie_embeddings and head is None:
        raise CheckpointError("the weights have no head of their own (lm_head.weight); set TIE_EMBEDDINGS=true")
    ours = {huggingface_name(name): name for name in shapes}
    unknown = [name for name in tensors if not (name in ours or name == "lm_head.weight" or name.endswith("inv_freq"))]
    missing = [name for name in ours if name not in tensors]
    if unknown or missing:
        what = f"lack {missing[0]}" if missing else f"hold {unknown[0]}, which this model has not"
        raise CheckpointError(f"the weights {what} ({len(missing)} missing, {len(unknown)} unknown); "
                              "set N_LAYERS and the other model settings as in the checkpoint's config.json")
    state = {}
    for name, shape in shapes.items():
        weight = tensors[huggingface_name(name)]
        if finite:
            _check_numbers(huggingface_name(name), weight)
            HEARTBEAT.move()  # it was read from the disk only now
        if name in VOCABULARY and weight.ndim == 2 and len(weight) < padded_vocab:
            weight = torch.cat([weight, weight.new_zeros(padded_vocab - len(weight), weight.shape[1])])
        if weight.shape != shape:
            raise CheckpointError(f"{huggingface_name(name)} is {tuple(weight.shape)} in the checkpoint, but the settings and "
                                  f"the tokenizer give {shape}; set the model settings as in the checkpoint's config.json")
        heads = _rotated_heads(name, model_config)
        state[name] = _halves_to_pairs(weight, heads) if heads else weight
    return state


def _check_numbers(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise CheckpointError(f"{name} holds numbers of {tensor.dtype}, expected floats; take another checkpoint")
    if not tensor.sum(dtype=torch.float32).isfinite():  # in one pass, without a mask of the tensor's size
        raise CheckpointError(f"{name} holds numbers that are not finite; take another checkpoint")


def peft_name(name: str) -> str:
    """PEFT's name of an adapter's factor, of some tokens' rows, or of a parameter that is trained as a whole."""
    stem, _, last = unwrapped_name(name).rpartition(".")
    theirs = {"weight": "weight", "rows": "token_adapter.trainable_tokens_delta"}.get(last, f"{last}.weight")
    return f"base_model.model.{huggingface_name(f'{stem}.weight').removesuffix('weight')}{theirs}"


def to_peft(state_dict: Mapping[str, Tensor], model_config: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """What LoRA trains, under PEFT's names, on the CPU; PEFT has a tied matrix twice, as embedding and as head."""
    tensors = {}
    for name, tensor in state_dict.items():
        heads = _rotated_heads(name, model_config) if name.endswith(".lora_B") else 0
        tensor = _pairs_to_halves(tensor.detach(), heads) if heads else tensor.detach()
        if name in VOCABULARY:
            tensor = tensor[:vocab_size]
        tensors[peft_name(name)] = tensor.cpu().contiguous()
    if model_config.tie_embeddings and (tied := tensors.get(peft_name("tok_embeddings.weight"))) is not None:
        tensors[peft_name("output.weight")] = tied.clone()
    return tensors


def from_peft(tensors: Mapping[str, Tensor], model_config: ModelConfig, padded_vocab: int, rank: int,
              token_ids: TokenIds) -> dict[str, Tensor]:
    """PEFT's tensors under our names; the inverse of `to_peft`.

    Args:
        token_ids: whose rows they hold.
    Raises:
        CheckpointError: they train what this model has not, or are not of its shapes.
    """
    left, state, shapes = dict(tensors), {}, {}
    for name, shape in parameter_shapes(model_config, padded_vocab).items():
        if name in VOCABULARY:
            shapes[name] = shape
            if ids := token_ids.get(stem := name.removesuffix(".weight")):
                shapes[f"{stem}.rows"] = (len(ids), shape[1])
        elif len(shape) == 2:
            stem = name.removesuffix(".weight")
            shapes |= {f"{stem}.lora_A": (rank, shape[1]), f"{stem}.lora_B": (shape[0], rank)}
    if model_config.tie_embeddings:
        embedding, head = tensors.get(peft_name("tok_embeddings.weight")), left.pop(peft_name("output.weight"), None)
        if (embedding is None) != (head is None) or (head is not None and not torch.equal(embedding, head)):
            raise CheckpointError("the adapters train head and embeddings apart, which are one matrix in their base")
    for name, shape in shapes.items():
        tensor = left.pop(peft_name(name), None)
        if tensor is None:
            continue
        _check_numbers(peft_name(name), tensor)
        if name in VOCABULARY and tensor.ndim == 2 and len(tensor) < padded_vocab:
            tensor = torch.cat([tensor, tensor.new_zeros(padded_vocab - len(tensor), *tensor.shape[1:])])
        if tensor.shape != shape:
            raise CheckpointError(f"{peft_name(name)} is {tuple(tensor.shape)}, and rank and base give {shape}; "
                                  "take the base that the adapters were made for")
        heads = _rotated_heads(name, model_config) if name.endswith(".lora_B") else 0
        state[name] = _halves_to_pairs(tensor, heads) if heads else tensor
    if left:
        raise CheckpointError(f"the adapters hold {min(left)}, which this model has not ({len(left)} such tensors); take the "
                              "base that the adapters were made for")
    return state


def from_meta(tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parameters and the model settings of one of Meta's Llama 3 checkpoints (consolidated.00.pth, params.json).

    Meta's file holds the tied head of the 1B and 3B models as a second matrix and does not name their factor of the
    rotary scaling, which is 32; Llama 3.1's is 8. Source: the models' published configurations.
    Raises:
        CheckpointError: the file or the parameters are not a Llama 3's.
    """
    state = {name: tensor for name, tensor in tensors.items() if name != "rope.freqs"}
    for name, tensor in state.items():
        _check_numbers(name, tensor)
    wanted = ("dim", "n_layers", "n_heads", "norm_eps")
    lacking = [key for key in wanted if key not in params] + [
        name for name in ("tok_embeddings.weight", "output.weight", "layers.0.feed_forward.w1.weight") if name not in state]
    if lacking:
        raise CheckpointError(f"not a Llama 3 checkpoint of Meta's: no {', '.join(lacking)} in params.json and the weights; "
                              "take another")
    tied = torch.equal(state["tok_embeddings.weight"], state["output.weight"])
    if tied:
        del state["output.weight"]
    rows, ffn_dim = (state[name].shape[:1].numel() for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"))
    settings = {key: params[key] for key in wanted} | {
        "n_kv_heads": params.get("n_kv_heads") or params["n_heads"], "ffn_dim": ffn_dim,
        "rope_theta": params.get("rope_theta", 10_000.0), "tie_embeddings": tied}
    if params.get("use_scaled_rope"):
        settings["rope_scaling_factor"] = params.get("rope_scaling_factor") or (32.0 if tied else 8.0)
        settings["rope_high_freq_factor"] = params.get("rope_high_freq_factor") or 4.0
    expected = parameter_shapes(checked_settings(settings, "params.json"), rows)
    wrong = [name for name in sorted(expected.keys() | state.keys(), key=str)
             if name not in state or tuple(state[name].shape) != expected.get(name)]
    if wrong:
        raise CheckpointError(f"{wrong[0]} does not fit params.json ({len(wrong)} such tensors); take both from one download")
    return state, settings


def huggingface_config(model_config: ModelConfig, vocab_size: int, max_seq_len: int, bos: Optional[int], eos: int,
                       dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json, understood alike by transformers 4.57 and 5.

    Version 5 reads `rope_parameters` and `dtype`, version 4 reads `rope_theta`, `rope_scaling` and `torch_dtype`, and
    neither complains of the other's.
    """
    c = model_config
    scaling = None
    if c.rope_scaling_factor is not None:
        scaling = {"rope_type": "llama3", "factor": c.rope_scaling_factor, "low_freq_factor": c.rope_low_freq_factor,
                   "high_freq_factor": c.rope_high_freq_factor, "original_max_position_embeddings": c.rope_original_max_len}
        # The scaling was made for this length, however short the rows of this run are.
        max_seq_len = max(max_seq_len, int(c.rope_original_max_len * c.rope_scaling_factor))
    dtype_name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size,
        "hidden_size": c.dim, "intermediate_size": c.hidden_dim, "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim,
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
        "rms_norm_eps": c.norm_eps, "initializer_range": c.init_std, "tie_word_embeddings": c.tie_embeddings,
        "max_position_embeddings": max_seq_len, "rope_theta": c.rope_theta, "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": c.rope_theta, **(scaling or {"rope_type": "default"})},
        "bos_token_id": bos, "eos_token_id": eos, "use_cache": True, "dtype": dtype_name, "torch_dtype": dtype_name,
    }


def generation_config(tokenizer) -> dict[str, Any]:
    """The content of generation_config.json: the ids at which a text begins and ends, a turn's end included."""
    ends = [tokenizer.eos_id] + [tokenizer.eot_id] * (tokenizer.eot_id != tokenizer.eos_id)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends, "pad_token_id": tokenizer.pad_id}
    return {name: value for name, value in ids.items() if value is not None}


def checked_settings(settings: Mapping[str, Any], file_name: str) -> ModelConfig:
    """Model settings that came from a file.

    Raises:
        CheckpointError: no model can have them.
    """
    try:
        return ModelConfig(**settings)
    except ValidationError as error:
        fault = error.errors()[0]
        raise CheckpointError(f"{file_name} gives {'.'.join(map(str, fault['loc'])).upper()}={str(fault['input']):.40}: "
                              f"{fault['msg'][0].lower() + fault['msg'][1:]}; get it anew") from error


def model_settings_from_huggingface(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig that describe the model of a config.json.

    Raises:
        CheckpointError: it is not a Llama, or has a part that this model has not.
    """
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    if not isinstance(rope, Mapping) or not isinstance(scaling, Mapping):
        raise CheckpointError("config.json: rope_parameters and rope_scaling must be objects; get it anew")
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    lacking = [key for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
               if key not in config]
    if config.get("model_type") != "llama" or lacking:
        raise CheckpointError(f"config.json describes a {config.get('model_type')!r} model"
                              f"{' without ' + ', '.join(lacking) if lacking else ''}; only Llama models can be read")
    settings = {"dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "n_heads": config["num_attention_heads"],
                "n_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
                "ffn_dim": config["intermediate_size"], "norm_eps": config.get("rms_norm_eps", 1e-6),
                "init_std": config.get("initializer_range", 0.02),
                "rope_theta": config.get("rope_theta") or rope.get("rope_theta", 10_000.0),
                "rope_scaling_factor": None, "tie_embeddings": config.get("tie_word_embeddings", False)}
    if rope_type == "llama3":
        settings |= {"rope_scaling_factor": scaling.get("factor", "missing"),
                     "rope_low_freq_factor": scaling.get("low_freq_factor", "missing"),
                     "rope_high_freq_factor": scaling.get("high_freq_factor", "missing"),
                     "rope_original_max_len": scaling.get("original_max_position_embeddings", "missing")}
    checked = checked_settings(settings, "config.json")
    fixed = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "head_dim": checked.head_dim, "pretraining_tp": 1}
    unlike = [f"{key}={config[key]!r}" for key, value in fixed.items() if config.get(key) not in (value, None)]
    if rope_type not in ("default", "llama3"):
        unlike.append(f"rope_type={rope_type!r}")
    if checked.dim % checked.n_heads or checked.n_heads % checked.n_kv_heads:
        unlike.append(f"{checked.n_heads} heads and {checked.n_kv_heads} of keys in a width of {checked.dim}")
    if unlike:
        raise CheckpointError(f"config.json has {', '.join(unlike)}, which this model cannot represent; take another")
    return settings


def save_weights(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write tensors as model.safetensors, or as several files and their index where one would be too large."""
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS_FILE, shards[0], {"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file_name, shard, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def load_model_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a model folder under Hugging Face's names, for `from_huggingface`; only safetensors are read.

    Raises:
        CheckpointError: there are none, or a file of them is missing or damaged.
    """
    folder = Path(folder)
    names = [WEIGHTS_FILE]
    if not os.path.exists(folder / WEIGHTS_FILE):
        if not os.path.isdir(folder):
            raise CheckpointError(f"{folder} {GONE}")
        if not os.path.exists(folder / INDEX_FILE):
            raise CheckpointError(f"{folder} holds no {WEIGHTS_FILE}; pickled weights (.bin, .pth) are not read: "
                                  "save the model as safetensors first")
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX_FILE} does not say which file holds which tensor; get it anew")
        names = sorted(set(weight_map.values()))
    tensors = {}
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{folder / INDEX_FILE} points outside its folder: {name!r}; get it anew")
        tensors |= read_tensors(folder / name)
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, on the CPU.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
            raise CheckpointError(f"{path} is no file; copy or download it again")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy or download it again") from error


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """A hash of a model's weights under Hugging Face's names, the same however they are divided into files.

    What follows from the rest (a tied head that is stored all the same, buffers of old files) does not count.
    """
    digest, embedding = hashlib.sha256(), tensors.get("model.embed_tokens.weight")
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        if name.endswith("inv_freq") or (name == "lm_head.weight" and embedding is not None and torch.equal(tensor, embedding)):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
        HEARTBEAT.move()
    return digest.hexdigest()


def save_model_folder(folder: Path, state_dict: Mapping[str, Tensor], model_config: ModelConfig, tokenizer,
                      max_seq_len: int) -> None:
    """Write a Hugging Face model folder: config.json, generation_config.json, the weights, and the tokenizer's files."""
    folder = Path(folder)
    tensors = to_huggingface(state_dict, model_config, tokenizer.vocab_size)
    config = huggingface_config(model_config, tokenizer.vocab_size, max_seq_len, tokenizer.bos_id, tokenizer.eos_id,
                                tensors["model.embed_tokens.weight"].dtype)
    save_weights(folder, tensors)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(tokenizer))
    tokenizer.save_huggingface(folder)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file as the folders of Hugging Face have them."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: it cannot be read, or holds no object.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
            raise CheckpointError(f"{path} is no file; get the folder anew")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; name a folder with a sound one") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; get it anew")
    return content
