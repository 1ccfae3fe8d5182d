"""Teachers: locate one, compare its vocabulary with the student's, and run it in each step.

Shapes: M positions with a target, V vocabulary, N documents of at most L tokens.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

import model_utils
from checkpoint import store
from checkpoint.huggingface import load_model_weights
from checkpoint.model_json import hub_model, read_model_config, read_model_json
from common.errors import CheckpointError, SettingsError
from common.remote import is_hub_name
from common.text import command
from config import Config, extension_module
from dataloaders import Batch
from model import Transformer
from model_kernels.matmul import linear
from parallel.fsdp import DeviceMesh, is_sharded
from parallel.ranks import Ranks
from tokenizer import load_tokenizer

LogitsOfSlice = Callable[[slice], Tensor]  # from a slice of a batch's target positions to (M, V) float32


def find_teacher(config: Config, tokenizer) -> Path:
    """Return the folder of TEACHER_MODEL, after comparing its vocabulary with the student's `tokenizer`.

    TEACHER_MODEL is a path, a name in OUTPUT_DIR, or a hub model. Control tokens may have other names.
    Without a tokenizer.json only the vocabulary sizes are compared; with one, the teacher's matrices may be
    padded.
    """
    name, run_dir = config.teacher_model, Path(config.output_dir) / (config.run_name or "-")
    setting = f"TEACHER_MODEL={name}"
    try:
        # Unlike a start, a teacher may be any hub model, also one without an owner such as gpt2.
        is_local = "/" in name or any(os.path.exists(place) for place in store.places(name, run_dir))
        on_hub = not is_local and is_hub_name(name.partition("@")[0])
        folder = hub_model(name) if on_hub else store.locate(name, run_dir)
    except CheckpointError as error:
        raise CheckpointError(f"{setting}: {error}") from error
    if not (folder / "config.json").exists():
        has_adapters = (folder / "adapter_config.json").exists()
        raise CheckpointError(f"{setting}: {folder} " + (
            "holds adapters only; merge them into their base with "
            f"{command('scripts/merge_lora.py', folder)} --output FOLDER" if has_adapters else
            "has no config.json; name a checkpoint or a model folder"))
    rows, student_ids = read_model_json(folder / "config.json").get("vocab_size"), tokenizer.vocab_size
    if not isinstance(rows, int):
        raise CheckpointError(f"{folder / 'config.json'} has no vocab_size; name another TEACHER_MODEL")

    def refusal(detail: str) -> SettingsError:
        return SettingsError(f"{setting} has another vocabulary: {rows:,} ids, and the student's "
                             f"tokenizer has {student_ids:,}{detail}; choose a teacher with the "
                             "student's tokenizer, or set TOKENIZER_PATH to the teacher's and prepare the "
                             "data again")

    if not (folder / "tokenizer.json").exists():
        if rows != student_ids:
            raise refusal("")
        return folder
    teacher_tokenizer = load_tokenizer(str(folder), "huggingface")
    if teacher_tokenizer.vocab_size != student_ids or rows < student_ids:
        own_ids = teacher_tokenizer.vocab_size
        raise refusal(f" (its tokenizer {own_ids:,})" if own_ids != rows else "")
    if teacher_tokenizer.sha256 == tokenizer.sha256:
        return folder
    if difference := teacher_tokenizer.differing_id(tokenizer):
        token, *words = difference
        raise refusal(f", and the id {token} is {words[0]!r} to it, {words[1]!r} to the student")
    return folder


class LlamaTeacher:
    """A Llama run by Paddock's model: packed documents in one forward, and the head in chunks."""

    def __init__(self, model: Transformer, vocab_size: int):
        self.model, self.vocab_size = model.requires_grad_(False).eval(), vocab_size

    @torch.no_grad()
    def logits(self, batch: Batch) -> LogitsOfSlice:
        hidden_MD = self.model(batch.tokens_BT, document_ids_BT=batch.document_ids_BT,
                               target_index_M=batch.target_index_M, mode="hidden").flatten(0, -2)
        if is_sharded(self.model.head_matrix):
            self.model.head_matrix.unshard()  # until its next forward ends
        weight_VD = self.model.head_matrix.as_head().values_VD
        return lambda chunk: linear(hidden_MD[chunk], weight_VD)[:, :self.vocab_size].float()


def load_teacher(folder: Path, config: Config, vocab_size: int, ranks: Ranks,
                 mesh: Optional[DeviceMesh] = None) -> Any:
    """Load the model in a folder of `find_teacher`: with Paddock's code if it is a Llama, else transformers.

    A Llama is sharded over the student's mesh.
    """
    described = read_model_json(folder / "config.json")
    try:
        shape = read_model_config(folder)
        shape = shape.model_copy(update={"attention_backend": config.attention_backend})
    except CheckpointError:  # not a Llama, or one that Paddock does not support
        if not (others := extension_module("hf_teacher")):
            raise
        return others.load_with_transformers(folder, described, config, vocab_size, ranks.device)
    stored = next(iter(load_model_weights(folder).values()))
    dtype = teacher_dtype(config, stored.dtype, ranks.device)
    model = model_utils.model_on_meta(shape, described["vocab_size"], dtype)
    model.requires_grad_(False).to(dtype)
    model_utils.allocate_model(model, config, ranks, mesh)
    model_utils.load_weights(folder, model)
    model_utils.compile_where_possible(model, config, ranks.device.type)
    return LlamaTeacher(model, vocab_size)


def teacher_dtype(config: Config, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype for TEACHER_PRECISION; float32 in place of float16 on a CPU, where that is slow."""
    dtype = model_utils.DTYPES.get(config.teacher_precision, stored)
    return torch.float32 if dtype == torch.float16 and device.type == "cpu" else dtype
