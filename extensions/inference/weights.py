"""Models opened for generation; their weights in the compute dtype, packed for a CPU's matmuls, or int8."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from checkpoint import peft, store
from checkpoint.huggingface import context_length, read_model_json
from common.errors import PaddockError, SettingsError
from common.text import print_safely
from data_pipeline.shards import prepared_folder
from extensions.inference.text import LanguageModel
from fused.matmul import linear, pack
from model import Linear, Transformer
from model_utils import DTYPES, device_and_dtype, find_model
from parallel.fsdp import is_sharded
from run.adapters import base_of_adapters, load_for_use
from tokenizer import GENERATION_IDS, SUPPRESSED

INT8_ROWS = 16  # above this many rows of x, torch's int8 kernel is slower than the matmul in x's dtype


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, rounded to nearest, and one scale per output."""

    def __init__(self, weight: Tensor):
        super().__init__()
        scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
        rounded = (weight.float() / scales.float()[:, None]).round().clamp(-127, 127)
        self.weight = nn.Parameter(rounded.to(torch.int8), requires_grad=False)
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if len(rows) > INT8_ROWS:
            return linear(x, self.weight) * self.scales
        return torch._weight_int8pack_mm(rows, self.weight, self.scales).unflatten(0, x.shape[:-1])


@torch.no_grad()
def pack_weights(model: Transformer, int8: bool = False) -> None:
    """Lay out a frozen model's matrices for `fused.matmul.linear`; with `int8`, quantize the blocks'."""
    for name, layer in [*model.named_modules()]:
        if type(layer) is Linear and int8:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Int8Linear(layer.weight))
        elif type(layer) is Linear:
            layer.weight = nn.Parameter(pack(layer.weight.to(model.compute_dtype)), requires_grad=False)
    head = model.head_matrix
    head.packed = pack(head.as_head().values_VD.detach().to(model.compute_dtype))


@contextmanager
def packed_weights(model: Transformer) -> Iterator[None]:
    """Round and lay out the matrices of a model in training, once for all tokens; restore them at the end."""
    # In float32, packing pays for large matrices only. Sharded ones are gathered in the compute dtype.
    if model.compute_dtype == torch.float32 or is_sharded(model):
        return (yield)
    before = [(layer, layer.weight) for layer in model.modules() if type(layer) is Linear]
    try:
        pack_weights(model)
        yield
    finally:
        for layer, weight in before:
            layer.weight = weight
        model.head_matrix.packed = None


def load_to_generate(folder: Path, base: Optional[str] = None,
                     weights: Optional[str] = None) -> tuple[Transformer, Any]:
    """Return the model of `load_for_use`, laid out to generate in fp32, bf16 or int8, and its tokenizer."""
    dtype = DTYPES.get("bf16" if weights == "int8" else weights)
    if weights == "int8" and device_and_dtype(None, dtype)[0].type != "cpu":
        raise SettingsError("--weights int8 is for a CPU; choose bf16 on a GPU")
    model, tokenizer = load_for_use(folder, base, dtype=dtype)
    pack_weights(model, weights == "int8")
    unused = {key: value for key, value in tokenizer.generation.items()
              if key not in (*GENERATION_IDS, SUPPRESSED, "transformers_version", "use_cache")
              and not key.startswith(("_", "output_"))}  # those do not change the text
    if unused:
        print_safely("The model's generation_config.json also has "
                     f"{', '.join(f'{key}={value!r:.40}' for key, value in unused.items())}, which is not "
                     "applied; set what you need by flags, or by the fields of requests.", sys.stderr)
    return model, tokenizer


def open_model(name: str, base: Optional[str] = None, weights: Optional[str] = None) -> LanguageModel:
    """Return a model, given a run, checkpoint, Hugging Face folder or name, with any adapters applied."""
    shape_folder = folder = find_model(name)
    if (folder / peft.CONFIG_FILE).exists():
        shape_folder = base_of_adapters(folder, base)
        base = str(shape_folder)
    model, tokenizer = load_to_generate(folder, base, weights)
    longest = context_length(read_model_json(shape_folder / "config.json"))
    settings = store.read_state(folder).get("settings", {})
    stage = settings.get("TRAINING_STAGE")
    opened = LanguageModel(name, model, tokenizer, longest, stage == "pretrain")
    opened.prompts = prompts_to_try(opened, settings.get(f"{stage}_DATA_PATH".upper()))
    return opened


def prompts_to_try(model: LanguageModel, data_path: Optional[str]) -> list[str]:
    """Return the beginnings of examples from a run's training data, if it still exists."""
    try:
        examples = read_model_json(prepared_folder(Path(data_path)) / "manifest.json")["examples"]
        prompt = model.chat_format and model.chat_prompt([{"role": "user", "content": "?"}])
    except (TypeError, OSError, ValueError, KeyError, PaddockError):
        return []
    decode = model.tokenizer.decode
    if prompt is None:
        start = decode([model.tokenizer.document_start_id])
        return [" ".join(text.removeprefix(start).split()[:8]) for text in examples]
    # User messages of single-turn examples that the manifest does not shorten
    before, after = decode(prompt.ids).split("?", 1)
    message = rf"{re.escape(before)}([^\u27e6]*?){re.escape(after.strip())}\s*(\u27e6|\nchosen: |$)"
    messages = dict.fromkeys(match[1] for text in examples if (match := re.match(message, text.strip())))
    return [text for text in messages if " tokens ...] " not in text]
