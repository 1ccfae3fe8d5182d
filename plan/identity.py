"""What a thing is: the identity of a model, and of prepared data. Needs no torch.

A model is the hash of its weights, its resolved configuration and its tokenizer. Prepared data is the hash of
its tokens, its tokenizer, its chat template, its system prompt and what was held out. Caches, starts, bases,
references, teachers and resumed runs compare identities as a whole, and name the parts that differ.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Optional

from checkpoint import store
from checkpoint.manifest import DTYPES, tensors_in
from checkpoint.model_json import SCALING_FIELDS, read_model_config, refuse_adapters, weight_files
from common.activity import tick
from common.errors import CheckpointError, unreadable
from common.files import LARGEST_TEXT, json_sha256, plain
from config import FREE_SETTINGS, SCALING_SETTINGS, ModelConfig, on_resume

TORCH_NAMES = {code: f"torch.{name}" for name, code in DTYPES.items()}  # which the hashes contain
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")
Identity = Mapping[str, Any]  # parts of a thing by name; JSON


def differences(one: Identity, other: Identity) -> list[str]:
    """Return the names of the parts that differ; a part that one of them lacks is not compared."""
    return sorted(name for name in one.keys() & other.keys() if one[name] != other[name])


def model_identity(weights: str, c: ModelConfig, tokenizer_sha256: str = "") -> dict[str, str]:
    """Return the identity of a model with this hash of its weights, as a run with this config uses it."""
    # The settings that decide what a model computes, in a normal form, and the shapes of a block.
    scaling = {"rope_scaling_type", *SCALING_FIELDS[c.rope_scaling_type]}
    varying = {"head_width", *SCALING_SETTINGS}
    varying -= scaling if c.rope_scaling_factor else {"rope_scaling_factor"}
    fixed = [name for name in ModelConfig.model_fields if on_resume(name) == "fixed" and name not in varying]
    described = {name.upper(): getattr(c, name) for name in fixed} | c.block_shapes | {
        "HEAD_WIDTH": c.head_dim, "FFN_DIM": c.hidden_dim, "SLIDING_EVERY": None,
        "SLIDING_WINDOW": [c.sliding_window if slides else None for slides, _ in c.layer_kinds],
        "NO_ROPE_EVERY": [rotates for _, rotates in c.layer_kinds]}
    tokenizer = {"tokenizer": tokenizer_sha256} if tokenizer_sha256 else {}
    return {"weights": weights, "config": json_sha256(described), **tokenizer}


def adapted_model(adapters: Path, base: Path) -> ModelConfig:
    """Return the settings with which adapters were trained on a base, such as a run's own ROPE_THETA."""
    recorded = store.read_state(adapters).get("settings", {})
    return read_model_config(base).model_copy(update={
        name: recorded[name.upper()] for name in FREE_SETTINGS if name.upper() in recorded})


class StoredTensor(NamedTuple):
    """The place of a tensor in a safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def blocks(self) -> Iterator[bytes]:
        with open(self.path, "rb", opener=plain) as file:
            file.seek(self.offset)
            left = self.nbytes
            while left:
                if not (block := file.read(min(1 << 20, left))):
                    raise CheckpointError(f"{self.path} is shorter than its header says; download it again")
                left -= len(block)
                tick()
                yield block


def weights_sha256(folder: str | Path, layers: Optional[int] = None) -> str:
    """Return the hash of a model's weights, independent of their division into files.

    It ignores a stored copy of a tied head, and buffers in old files. With `layers`, it is of the first ones.
    """
    folder = Path(folder)
    refuse_adapters(folder)
    stamps = []
    for path in weight_files(folder):
        try:
            status = os.stat(path)
        except OSError as error:
            raise CheckpointError(f"{path} {unreadable(error, 'copy or download it again')}") from error
        stamps.append((str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return _weights_sha256(tuple(stamps), layers)


@lru_cache(maxsize=16)
def _weights_sha256(stamps: tuple, layers: Optional[int]) -> str:
    tensors: dict[str, StoredTensor] = {}
    for path, *_ in stamps:
        tensors |= stored_tensors(Path(path))
    digest, embedding = hashlib.sha256(), tensors.get(EMBEDDING)
    for name, tensor in sorted(tensors.items()):
        is_cut = layers is not None and is_beyond(name, layers)
        if is_cut or name.endswith(".inv_freq") or name == HEAD and is_equal(tensor, embedding):
            continue
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        for block in tensor.blocks():
            digest.update(block)
    return digest.hexdigest()


def is_beyond(name: str, layers: int) -> bool:
    """Return whether a tensor, by Hugging Face's name, belongs to a layer beyond the first ones."""
    layer = LAYER.match(name)
    return layer is not None and int(layer[1]) >= layers


def is_equal(one: StoredTensor, other: Optional[StoredTensor]) -> bool:
    return other is not None and (one.dtype, one.shape) == (other.dtype, other.shape) and all(
        here == there for here, there in zip(one.blocks(), other.blocks()))


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the places of a file's tensors by name."""
    try:
        with open(path, "rb", opener=plain) as file:
            header = file.read(8)
            header += file.read(min(int.from_bytes(header, "little"), LARGEST_TEXT))
            entries = json.loads(header[8:])
            entries.pop("__metadata__", None)
            places = tensors_in(header, os.fstat(file.fileno()).st_size)
            in_order = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
            return {name: StoredTensor(path, TORCH_NAMES.get(entry["dtype"], entry["dtype"]),
                                       tuple(entry["shape"]), offset, rows * row_bytes)
                    for (name, entry), (offset, rows, row_bytes) in zip(in_order, places)}
    except OSError as error:
        raise CheckpointError(f"{path} {unreadable(error, 'copy or download it again')}") from error
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a safetensors file; copy or download it again") from error
