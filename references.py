"""What preferences are held against: the log-probabilities of a reference model, live or computed once and stored.

Shapes: as in objectives.py; E examples of the whole set.
"""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dataloaders import Batch
from errors import DataError
from example_rows import ExampleRows
from objectives import pair_logprobs
from pulse import PULSE
from ranks import Ranks, StopSignals, leave_if_stopped
from run_log import duration
from tensor_files import sync, write_tensors

PROGRESS_SECONDS = 15


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
        reference_BP2 = torch.zeros(len(indices), int(batch.documents_BT.max()) // 2, 2)
        for row, index in enumerate(indices.tolist()):
            stored = self.logprob_E2[torch.from_numpy(self.rows.examples_in(index)).long()]
            reference_BP2[row, :len(stored)] = stored
        batch.stored["reference_BP2"] = reference_BP2
        return batch


def with_stored_reference(rows: ExampleRows, split: str, facts: dict[str, str], make_model: Callable[[], nn.Module],
                          micro_batch_size: int, ranks: Ranks, signals: StopSignals,
                          say: Callable[[str], None]) -> ReferencedRows:
    """The rows with their reference log-probabilities, which are computed by all ranks where they are not stored yet.

    They lie beside the shards in a file named by the reference's weights. Collective: every rank must call it.

    Args:
        facts: what they follow from; `weights_sha256` is the reference's.
        make_model: the reference, in case that they are to be computed.
    Raises:
        DataError: what is stored was made of other data or in another way, is damaged, or cannot be written.
        Interrupted: a rank was signalled.
    """
    facts = {**facts, "data": rows.example_set.fingerprint, "max_seq_len": str(rows.row_tokens)}
    precision = facts["compute_dtype"].removeprefix("torch.")
    path = rows.folder / f"reference-{facts['weights_sha256'][:16]}-{split}-{rows.row_tokens}-{precision}.safetensors"
    if not ranks.broadcast(path.exists()):
        logprob_E2 = compute(rows, make_model(), micro_batch_size, ranks, signals, say)
        ranks.main_first(lambda: write(path, logprob_E2, facts))
    return ReferencedRows(rows, ranks.together(lambda: read(path, facts)))


@torch.no_grad()
def compute(rows: ExampleRows, model: nn.Module, micro_batch_size: int, ranks: Ranks, signals: StopSignals,
            say: Callable[[str], None]) -> Tensor:
    """(E, 2) float32 log-probabilities of all pairs, 0 for those left out. Collective: every rank must call it."""
    PULSE.enter("reference")
    logprob_E2 = torch.zeros(len(rows.example_set), 2)
    batches = -(-len(rows) // (micro_batch_size * ranks.world_size))  # of each rank
    started = told = time.perf_counter()
    say(f"Reference: the log-probabilities of {rows.examples:,} pairs are computed once")
    for batch_number in range(batches):
        leave_if_stopped(ranks, signals)
        first = (ranks.rank * batches + batch_number) * micro_batch_size
        indices = np.arange(first, min(first + micro_batch_size, len(rows)))
        if len(indices):
            batch = rows(indices).to(ranks.device)
            logprob_BP2 = pair_logprobs(model, batch).float().cpu()
            for row, index in enumerate(indices.tolist()):
                examples = torch.from_numpy(rows.examples_in(index)).long()
                logprob_E2[examples] = logprob_BP2[row, :len(examples)]
        now, share = time.perf_counter(), (batch_number + 1) / batches
        if now - told > PROGRESS_SECONDS:
            say(f"Reference: {share:.0%} | ETA: {duration((now - started) * (1 - share) / share)}")
            told = now
    return ranks.add_up(logprob_E2)


def write(path: Path, logprob_E2: Tensor, facts: dict[str, str]) -> None:
    """Write them whole or not at all.

    Raises:
        DataError: the folder cannot be written to.
    """
    unfinished = path.with_name(f"tmp-{os.getpid()}-{path.name}")
    try:
        write_tensors(unfinished, {"logprob_E2": logprob_E2}, {**facts, "sha256": digest(logprob_E2)})
        sync(unfinished)
        unfinished.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}; make the folder writable, or set DPO_REFERENCE=live") from error


def read(path: Path, facts: dict[str, str]) -> Tensor:
    """What is stored, when it was made of all that it would be made of now.

    Raises:
        DataError: it was not, or is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found, logprob_E2 = file.metadata(), file.get_tensor("logprob_E2")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}; delete it, and it is computed anew") from error
    stale = [name for name in facts if found.get(name) != facts[name]]
    if stale or found.get("sha256") != digest(logprob_E2):
        what = f"is stale: its {stale[0]} was {found.get(stale[0])}, is {facts[stale[0]]}" if stale else "is damaged"
        raise DataError(f"{path} {what}; delete it, and it is computed anew")
    return logprob_E2


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
