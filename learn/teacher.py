"""Teachers: locate one, compare its vocabulary with the student's, and run it in each step.

Shapes: M positions with a target, V vocabulary, N documents of at most L tokens.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import model_utils
from checkpoint import store
from checkpoint.huggingface import load_model_weights
from checkpoint.model_json import hub_model, read_model_config, read_model_json
from common.errors import CheckpointError, SettingsError
from common.remote import is_hub_name
from common.text import command, pip_install
from config import Config
from dataloaders import Batch
from model import Transformer
from model_kernels.head import IGNORE_INDEX
from model_kernels.matmul import linear
from parallel.fsdp import is_sharded
from parallel.ranks import Ranks, collective
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


class HFTeacher:
    """Any causal language model of transformers. It reads documents separately.

    The logits of all targets of a micro-batch are held in memory, in the model's dtype.
    """

    def __init__(self, model: nn.Module, vocab_size: int):
        self.model, self.vocab_size = model.requires_grad_(False).eval(), vocab_size

    @torch.no_grad()
    def logits(self, batch: Batch) -> LogitsOfSlice:
        tokens, device = batch.tokens_BT.flatten(), batch.tokens_BT.device
        target_index_M = batch.target_index_M
        if target_index_M is None:
            target_index_M = torch.arange(len(tokens), device=device)
        # Index of each flattened position among the targets; -1 = not a target.
        target_of = torch.full_like(tokens, -1)
        target_of[target_index_M] = torch.arange(len(target_index_M), device=device)
        logits_MV = torch.zeros(len(target_index_M), self.vocab_size, dtype=self.model.dtype, device=device)
        for starts, lengths in group_documents(batch):
            # Padding on the right is invisible to a causal model.
            offset_L = torch.arange(max(lengths))
            inside_NL = (offset_L < torch.tensor(lengths)[:, None]).to(device)
            index_NL = (torch.tensor(starts)[:, None] + offset_L).clamp(max=len(tokens) - 1).to(device)
            logits_NLV = self.model(tokens[index_NL], attention_mask=inside_NL.long(), use_cache=False).logits
            wanted_NL = inside_NL & (target_of[index_NL] >= 0)
            logits_MV[target_of[index_NL[wanted_NL]]] = logits_NLV[wanted_NL][:, :self.vocab_size]
        return lambda chunk: logits_MV[chunk].float()


Teacher = LlamaTeacher | HFTeacher


def group_documents(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return (starts, lengths) of documents with targets in the flattened batch, grouped by similar length.

    A padded group has at most as many tokens as the batch.
    """
    is_target_BT = (batch.targets_BT != IGNORE_INDEX).cpu()
    is_start_BT = torch.zeros_like(is_target_BT)
    if batch.document_ids_BT is not None:
        is_start_BT[:, 1:] = batch.document_ids_BT.cpu().diff(dim=1) != 0
    is_start_BT[:, 0] = True
    starts = is_start_BT.flatten().nonzero().flatten()
    lengths = torch.diff(starts, append=torch.tensor([is_target_BT.numel()])).tolist()
    used = [document.any() for document in is_target_BT.flatten().split(lengths)]

    groups: list[tuple[list[int], list[int]]] = []
    for length, start, is_used in sorted(zip(lengths, starts.tolist(), used), reverse=True):
        if not is_used:
            continue
        if not groups or (len(groups[-1][0]) + 1) * groups[-1][1][0] > is_target_BT.numel():
            groups.append(([], []))
        groups[-1][0].append(start)
        groups[-1][1].append(length)
    return groups


@collective
def load_teacher(folder: Path, config: Config, vocab_size: int, ranks: Ranks) -> Teacher:
    """Load the model in a folder of `find_teacher`: with Paddock's code if it is a Llama, else transformers.

    A Llama is sharded like the student.
    """
    described = read_model_json(folder / "config.json")
    try:
        shape = read_model_config(folder)
        shape = shape.model_copy(update={"attention_backend": config.attention_backend})
    except CheckpointError:  # not a Llama, or one that Paddock does not support
        return ranks.raise_on_all(lambda: _load_with_transformers(folder, described, config, vocab_size,
                                                                  ranks.device))
    stored = ranks.raise_on_all(lambda: next(iter(load_model_weights(folder).values())).dtype)
    dtype = _dtype(config, stored, ranks.device)
    model = model_utils.model_on_meta(shape, described["vocab_size"], dtype)
    model.requires_grad_(False).to(dtype)
    model_utils.allocate_model(model, config, ranks)
    ranks.raise_on_all(lambda: model_utils.load_weights(folder, model))
    model_utils.compile_where_possible(model, config, ranks.device.type)
    return LlamaTeacher(model, vocab_size)


def _dtype(config: Config, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype for TEACHER_PRECISION; float32 in place of float16 on a CPU, where that is slow."""
    dtype = model_utils.DTYPES.get(config.teacher_precision, stored)
    return torch.float32 if dtype == torch.float16 and device.type == "cpu" else dtype


def _load_with_transformers(folder: Path, described: Mapping[str, Any], config: Config, vocab_size: int,
                            device: torch.device) -> HFTeacher:
    name, kind = f"TEACHER_MODEL={config.teacher_model}", described.get("model_type")
    longest = described.get("max_position_embeddings", described.get("n_positions"))
    try:
        import transformers
    except ImportError as error:
        raise SettingsError(f"{name} is a {kind!r} model, which needs the package transformers; install it "
                            f"with {pip_install('transformers')}, or choose a Llama") from error
    # Check its configuration.
    if isinstance(longest, int) and longest < config.max_seq_len:
        raise SettingsError(f"{name} reads {longest} tokens at most; lower MAX_SEQ_LEN={config.max_seq_len}, "
                            "or choose another teacher")
    if kind not in transformers.CONFIG_MAPPING:
        raise SettingsError(f"{name}: transformers {transformers.__version__} does not support {kind!r} "
                            "models, and a model's own code is never run; choose another teacher")
    # Check its weights: from_pretrained initializes missing ones randomly.
    try:
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, use_safetensors=True, output_loading_info=True)
    except Exception as error:  # transformers' libraries raise errors of any class
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{name}: {folder} cannot be loaded: {reason}; download it again, or choose "
                              "another teacher") from error
    if lacking := sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]])):
        raise CheckpointError(f"{name}: {folder} lacks weights of a causal language model, such as "
                              f"{lacking[0]}; choose another teacher")
    if "quantization_config" not in described:  # quantized weights keep their dtypes
        model.to(_dtype(config, model.dtype, device))
    model.to(device)
    teacher = HFTeacher(model, vocab_size)
    if not is_causal(model, vocab_size):
        raise SettingsError(f"{name} is not a causal language model: it sees the tokens that it should "
                            "predict; choose another teacher")
    return teacher


@torch.no_grad()
def is_causal(model: nn.Module, vocab_size: int) -> bool:
    """Test whether a change of later tokens leaves a model's earlier logits unchanged."""
    tokens_BT = (torch.arange(16, device=model.device).repeat(2, 1) * 7) % vocab_size
    tokens_BT[1, 8:] = (tokens_BT[1, 8:] + 1) % vocab_size
    logits_BTV = model(tokens_BT, attention_mask=torch.ones_like(tokens_BT), use_cache=False).logits
    one, other = logits_BTV[:, :8].float()
    return bool((one - other).abs().max() <= 1e-3 * one.abs().max())
