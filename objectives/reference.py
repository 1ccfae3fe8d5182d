"""What preferences are held against: the log-probabilities of a reference model, live or computed once and stored.

Shapes: as in objectives.py; E examples of the whole set.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from checkpoint.tensor_files import write_tensors
from common.files import sync
from common.heartbeat import HEARTBEAT
from config import Config
from data_pipeline.batch import Batch
from data_pipeline.packed_rows import ExampleRows
from objectives.base import PREFERENCE_OBJECTIVES, pair_logprobs
from objectives.once import Once


def is_stored(config: Config) -> bool:
    """Whether a run is held against a reference that is computed before its first step, and kept."""
    return (config.training_stage == "dpo" and PREFERENCE_OBJECTIVES[config.preference_objective].needs_reference
            and config.dpo_reference in (("stored",) if config.lora_enabled else ("stored", "auto")))


@torch.no_grad()
def frozen_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """(B, P, 2) log-probabilities of a batch's answers by a model that does not learn."""
    return pair_logprobs(model, batch)


class ReferencedRows:
    """Rows of pairs whose batches carry what was stored: `stored["reference_BP2"]`.

    Args:
        logprob_E2: of each example's chosen and rejected answer.
    """

    def __init__(self, rows: ExampleRows, logprob_E2: Tensor):
        self.rows, self.logprob_E2 = rows, logprob_E2

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, indices: np.ndarray) -> Batch:
        batch = self.rows(indices)
        reference_BP2 = torch.zeros(len(indices), int(batch.document_ids_BT.max()) // 2, 2)
        for row, index in enumerate(indices.tolist()):
            stored = self.logprob_E2[torch.from_numpy(self.rows.examples_in(index)).long()]
            reference_BP2[row, :len(stored)] = stored
        batch.stored["reference_BP2"] = reference_BP2
        return batch


def with_stored_reference(rows: ExampleRows, split: str, facts: dict[str, str], make_model: Callable[[], nn.Module],
                          micro_batch_size: int, once: Once) -> ReferencedRows:
    """The rows with their reference log-probabilities, which are computed by all ranks where they are not stored yet, or where
    what is stored is damaged or was made of something else.

    They lie in a file named by the reference's weights. Collective: every rank must call it.

    Args:
        facts: what they follow from; `weights_sha256` is the reference's.
        make_model: the reference, in case that they are to be computed.
    Raises:
        DataError: there is no place for them.
        Interrupted: a rank was signalled.
    """
    ranks = once.ranks
    facts = {**facts, "data": rows.fingerprint, "max_seq_len": str(rows.row_tokens)}
    precision = facts["compute_dtype"].removeprefix("torch.")
    name = f"reference-{facts['weights_sha256'][:16]}-{split}-{rows.row_tokens}-{precision}.safetensors"

    def find(tell: Callable[[str], None] = lambda text: None) -> Optional[Tensor]:
        """What is stored, on every rank, whether it sees rank 0's disk or not."""
        def look() -> Optional[Tensor]:
            for path in (place / name for place in once.cache.places(rows.folder, rows.fingerprint)):
                logprob_E2, why_not = read(path, facts)
                if logprob_E2 is not None:
                    return logprob_E2
                if why_not:
                    tell(f"{path} {why_not}; it is computed again")
            return None

        found = ranks.on_rank0(look)
        if not ranks.broadcast(found is not None):
            return None
        return ranks.all_reduce_sum(torch.zeros(len(rows.example_set), 2) if found is None else found)

    logprob_E2 = find()
    if logprob_E2 is None:
        path = once.place_to_write(rows) / name
        with once.one_writer(path.with_name(f".{name}.lock")):
            logprob_E2 = find(once.info)  # the one that was waited for may have stored it
            if logprob_E2 is None:
                logprob_E2 = compute(rows, make_model(), micro_batch_size, once)
                if why_not := ranks.broadcast(ranks.on_rank0(lambda: write(path, logprob_E2, facts))):
                    once.info(f"{path} {why_not}; the run goes on with what it has computed, the next computes it again")
    return ReferencedRows(rows, logprob_E2)


@torch.no_grad()
def compute(rows: ExampleRows, model: nn.Module, micro_batch_size: int, once: Once) -> Tensor:
    """(E, 2) float32 log-probabilities of all pairs, 0 for those left out. Collective: every rank must call it."""
    HEARTBEAT.enter("reference")
    ranks, logprob_E2 = once.ranks, torch.zeros(len(rows.example_set), 2)
    batches = -(-len(rows) // (micro_batch_size * ranks.world_size))  # of each rank
    once.info(f"Reference: the log-probabilities of {rows.examples:,} pairs are computed once")
    for batch_number in once.blocks(range(batches), "Reference"):
        first = (ranks.rank * batches + batch_number) * micro_batch_size
        indices = np.arange(first, min(first + micro_batch_size, len(rows)))
        if len(indices):
            batch = rows(indices).to(ranks.device)
            logprob_BP2 = pair_logprobs(model, batch).float().cpu()
            for row, index in enumerate(indices.tolist()):
                examples = torch.from_numpy(rows.examples_in(index)).long()
                logprob_E2[examples] = logprob_BP2[row, :len(examples)]
    return ranks.all_reduce_sum(logprob_E2)


def write(path: Path, logprob_E2: Tensor, facts: dict[str, str]) -> str:
    """Write them whole or not at all; why that could not be, in words: empty = they are there."""
    unfinished = path.with_name(f"tmp-{path.name}")
    try:
        write_tensors(unfinished, {"logprob_E2": logprob_E2}, {**facts, "sha256": digest(logprob_E2)})
        sync(unfinished)
        unfinished.replace(path)
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return ""


def read(path: Path, facts: dict[str, str]) -> tuple[Optional[Tensor], str]:
    """What is stored, when it was made of all that it would be made of now; else None and why not: empty = nothing is there."""
    try:
        if not path.is_file():
            return None, ""
        content = path.read_bytes()  # not mapped into memory, where a file that is cut short ends the process
        logprob_E2 = safetensors.torch.load(content)["logprob_E2"]
        found = json.loads(content[8:8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    except (OSError, SafetensorError, KeyError) as error:
        return None, f"cannot be read: {error}"
    stale = [name for name in facts if found.get(name) != facts[name]]
    if stale:
        return None, f"is stale: its {stale[0]} was {found.get(stale[0])}, is {facts[stale[0]]}"
    sound = logprob_E2.dtype == torch.float32 and found.get("sha256") == digest(logprob_E2)
    return (logprob_E2, "") if sound else (None, "is damaged")


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
