"""A reference's log-probabilities of what a run reads, computed once before the first step, and stored.

Shapes: B rows, P pairs of a row, E examples of the data.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Optional, TypeVar

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from checkpoint.tensors import write_tensors
from common.activity import ACTIVITY
from common.errors import DataError
from common.files import FileLock, atomic_write, disk_errors
from common.text import counted
from data_pipeline.shards import Cache
from dataloaders import Batch, ExampleRows, WrappedRows
from learn.objectives import frozen_logprobs
from parallel.ranks import RunContext, collective

T = TypeVar("T")
WAIT_SECONDS = 1.0  # between attempts to take a lock that another job holds


@dataclass(frozen=True)
class OutputStore:
    """Keeps outputs beside their data or in CACHE_DIR. Only one of several jobs computes the same outputs."""

    cache: Cache
    context: RunContext
    announced: set[str] = field(default_factory=set)

    @collective
    def get_or_compute(self, key: str, rows, compute: Callable[[Path, bool], Optional[T]]) -> T:
        """Return the rows with their outputs.

        Args:
            key: name of the file or folder with the outputs.
            compute: collective; compute(path, may_write) returns the rows with the outputs at this path. If
                some are missing or damaged, it recomputes and stores them if it may write, and else returns
                None.
        """
        ranks, context, folder = self.context.ranks, self.context, rows.token_set.folder
        for place in self.cache.folders(folder, rows.fingerprint):
            if (stored := compute(place / key, False)) is not None:
                return stored

        def take_lock() -> tuple[str, str, str]:
            """Return where rank 0 stores the outputs, why not elsewhere, and another holder of the lock."""
            nonlocal lock, place, why
            if lock is None:
                place, why = self.cache.folder_to_write(folder, rows.fingerprint, key)
                with disk_errors(place, DataError, "make it writable, or set CACHE_DIR to another folder"):
                    place.mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context(FileLock(place / f".{key}.lock"))
            return str(place / key), why, lock.take(lambda why: context.log.info(
                f"{why}; make sure that no other job computes the same outputs at the same time"))

        with ExitStack() as stack:
            lock, place, why, is_waiting = None, folder, "", False
            while True:  # polled, so that a signal can end the wait
                path, refused, holder = ranks.on_rank0(take_lock)
                if refused and refused not in self.announced:
                    self.announced.add(refused)
                    context.log.info(f"{refused}; storing the results in {self.cache.fallback} (set "
                                     "CACHE_DIR to choose another folder)")
                if not holder:
                    return compute(Path(path), True)
                if not is_waiting:
                    context.log.info(f"waiting for {holder}, which is computing {path}")
                is_waiting = True
                context.leave_if_stopped()
                time.sleep(WAIT_SECONDS)


@dataclass(frozen=True)
class ReferencedRows(WrappedRows):
    """Rows of pairs; their batches contain `stored["reference_BP2"]`."""

    rows: ExampleRows
    logprob_E2: Tensor  # of the chosen and the rejected answer; NaN for pairs that the run does not read

    def __call__(self, indices: np.ndarray) -> Batch:
        batch = self.rows(indices)
        reference_BP2 = torch.zeros(len(indices), int(batch.document_ids_BT.max()) // 2, 2)
        for row, index in enumerate(indices.tolist()):
            stored = self.logprob_E2[torch.from_numpy(self.rows.examples_in(index)).long()]
            reference_BP2[row, :len(stored)] = stored
        batch.stored["reference_BP2"] = reference_BP2
        return batch


class CachedModel(NamedTuple):
    """A model whose outputs are stored."""

    provenance: Mapping[str, str]  # its `weights_sha256` and `compute_dtype`
    find: Callable[[], Path]  # its folder, on rank 0; called only if outputs are missing
    load: Callable[[Path], nn.Module]


@collective
def with_reference(store: OutputStore, rows: ExampleRows, batches: Sequence[np.ndarray], split: str,
                   reference: CachedModel) -> ReferencedRows:
    """Return the rows with the reference's log-probabilities, stored in a file named after its weights.

    Args:
        batches: the rows that the run reads. The file grows if another run reads more.
    """
    ranks, log = store.context.ranks, store.context.log
    provenance = {**reference.provenance, "data": rows.fingerprint, "max_seq_len": str(rows.row_tokens)}

    def rows_missing(logprob_E2: Tensor) -> list[int]:
        is_nan_E = logprob_E2[:, 0].isnan().numpy()
        return [row for row in np.concatenate(batches).tolist() if is_nan_E[rows.examples_in(row)].any()]

    def compute(path: Path, may_write: bool) -> Optional[ReferencedRows]:
        # Rank 0 reads the file for all ranks, which may not see its disk.
        stored_E2 = torch.full((len(rows.example_set), 2), 0.0 if ranks.rank else torch.nan)

        def read() -> tuple[str, str]:
            nonlocal stored_E2
            found_E2, fault = _read_reference(path, provenance)
            stored_E2 = stored_E2 if found_E2 is None else found_E2
            return fault, str(reference.find()) if may_write and rows_missing(stored_E2) else ""

        why_not, folder = ranks.on_rank0(read)
        logprob_E2 = ranks.all_reduce_sum(stored_E2)
        missing = rows_missing(logprob_E2)
        if not missing:
            return ReferencedRows(rows, logprob_E2)
        if not may_write:
            return None
        if why_not:
            log.info(f"{path} {why_not}; recomputing it")

        model = ranks.raise_on_all(lambda: reference.load(Path(folder)))
        ACTIVITY.phase = "reference"
        # Every rank computes equally many batches.
        size, pairs = len(batches[0]), np.concatenate([*map(rows.examples_in, missing)])
        count = -(-len(missing) // (size * ranks.world_size))
        log.info(f"Reference: the log-probabilities of {counted(len(pairs), 'pair')}, computed once")
        computed_E2 = torch.zeros_like(logprob_E2)
        for number in store.context.progress(range(count), count, "Reference"):
            first = (ranks.rank * count + number) * size
            indices = missing[first:first + size]
            # A rank without rows left still runs: every forward of a sharded model needs all ranks.
            batch = rows(np.array(indices or missing[:1]))
            logprob_BP2 = frozen_logprobs(model, batch.to(ranks.device)).float().cpu()
            for row, index in enumerate(indices):
                examples = torch.from_numpy(rows.examples_in(index)).long()
                computed_E2[examples] = logprob_BP2[row, :len(examples)]
        logprob_E2[pairs] = ranks.all_reduce_sum(computed_E2)[pairs]
        if ranks.is_rank0 and (error := write(path, logprob_E2)):
            log.info(f"{path} cannot be written: {error}; this run keeps the results in memory, and the next "
                     "run recomputes them")
        return ReferencedRows(rows, logprob_E2)

    def write(path: Path, logprob_E2: Tensor) -> str:
        try:
            with atomic_write(path) as temporary:
                metadata = {**provenance, "sha256": _digest(logprob_E2)}
                write_tensors(temporary, {"logprob_E2": logprob_E2}, metadata)
        except OSError as error:
            return error.strerror
        return ""

    weights, precision = provenance["weights_sha256"][:16], provenance["compute_dtype"].removeprefix("torch.")
    key = f"reference-{weights}-{split}-{rows.row_tokens}-{precision}.safetensors"
    return store.get_or_compute(key, rows, compute)


def _read_reference(path: Path, provenance: Mapping[str, str]) -> tuple[Optional[Tensor], str]:
    """Return the stored values, or None and the fault of the file, "" if it does not exist."""
    try:
        if not path.is_file():
            return None, ""
        content = path.read_bytes()  # not memory-mapped: truncating a mapped file kills the process
        logprob_E2 = safetensors.torch.load(content)["logprob_E2"]
        stored = json.loads(content[8:8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    except (OSError, SafetensorError, KeyError) as error:
        return None, f"cannot be read: {error}"
    for name, value in provenance.items():
        if stored.get(name) != value:
            return None, f"is stale: its {name} was {stored.get(name)}, is {value}"
    if logprob_E2.dtype != torch.float32 or stored.get("sha256") != _digest(logprob_E2):
        return None, "is damaged"
    return logprob_E2, ""


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
