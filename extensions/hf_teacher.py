"""Teachers of other families than Paddock's model, run by transformers.

Shapes: M positions with a target, V vocabulary, N documents of at most L tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.errors import CheckpointError, SettingsError
from common.text import pip_install
from config import Config
from dataloaders import Batch
from extensions.distillation import LogitsOfSlice, teacher_dtype
from model_kernels.head import IGNORE_INDEX


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


def load_with_transformers(folder: Path, described: Mapping[str, Any], config: Config, vocab_size: int,
                           device: torch.device) -> HFTeacher:
    """Return the teacher in a folder, after checking its configuration and its weights."""
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
        model.to(teacher_dtype(config, model.dtype, device))
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
