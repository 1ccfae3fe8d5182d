"""A reference's log-probabilities of what a run reads, computed once before the first step, and stored.

Shapes: B rows, P pairs of a row, E examples of the data.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

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

WAIT_SECONDS = 1.0  # between attempts to take a lock that another job holds


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


@dataclass(frozen=True)
class StoredReference:
    """A model whose log-probabilities are stored beside the data or in CACHE_DIR.

    Only one of several jobs computes those of the same rows.
    """

    provenance: Mapping[str, str]  # its `weights_sha256` and `compute_dtype`
    find: Callable[[], Path]  # its folder, on rank 0; called only if log-probabilities are missing
    load: Callable[[Path], nn.Module]
    cache: Cache
    context: RunContext
    announced: set[str] = field(default_factory=set)

    @collective
    def of_rows(self, rows: ExampleRows, batches: Sequence[np.ndarray], split: str) -> ReferencedRows:
        """Return the rows with their log-probabilities, stored in a file named after the model's weights.

        Args:
            batches: the rows that the run reads. The file grows if another run reads more.
        """
        ranks, log = self.context.ranks, self.context.log
        provenance = {**self.provenance, "data": rows.fingerprint, "max_seq_len": str(rows.row_tokens)}
        weights, dtype = provenance["weights_sha256"][:16], provenance["compute_dtype"].removeprefix("torch.")
        key = f"reference-{weights}-{split}-{rows.row_tokens}-{dtype}.safetensors"

        def missing_in(logprob_E2: Tensor) -> list[int]:
            is_nan_E = logprob_E2[:, 0].isnan().numpy()
            return [row for row in np.concatenate(batches).tolist() if is_nan_E[rows.examples_in(row)].any()]

        def read(path: Path, may_compute: bool) -> tuple[Tensor, str, str]:
            """Return what is stored, the fault of the file, and the model's folder if it is needed."""
            # Rank 0 reads the file for all ranks, which may not see its disk.
            stored_E2 = torch.full((len(rows.example_set), 2), 0.0 if ranks.rank else torch.nan)

            def read_here() -> tuple[str, str]:
                nonlocal stored_E2
                found_E2, fault = _read_reference(path, provenance)
                stored_E2 = stored_E2 if found_E2 is None else found_E2
                return fault, str(self.find()) if may_compute and missing_in(stored_E2) else ""

            fault, folder = ranks.on_rank0(read_here)
            return ranks.all_reduce_sum(stored_E2), fault, folder

        for place in self.cache.folders(rows.token_set.folder, rows.fingerprint):
            logprob_E2, _, _ = read(place / key, may_compute=False)
            if not missing_in(logprob_E2):
                return ReferencedRows(rows, logprob_E2)
        with self.locked(rows, key) as path:
            logprob_E2, fault, folder = read(path, may_compute=True)  # another job may have completed it
            if missing := missing_in(logprob_E2):
                if fault:
                    log.info(f"{path} {fault}; recomputing it")
                model = ranks.raise_on_all(lambda: self.load(Path(folder)))
                self.compute(model, rows, missing, len(batches[0]), logprob_E2)
                if ranks.is_rank0 and (error := _write_reference(path, logprob_E2, provenance)):
                    log.info(f"{path} cannot be written: {error}; this run keeps the results in memory, and "
                             "the next run recomputes them")
        return ReferencedRows(rows, logprob_E2)

    @collective
    def compute(self, model: nn.Module, rows: ExampleRows, missing: list[int], size: int, logprob_E2: Tensor
                ) -> None:
        """Fill in the log-probabilities of the missing rows, in batches of `size` rows."""
        ACTIVITY.phase, ranks = "reference", self.context.ranks
        pairs, computed_E2 = np.concatenate([*map(rows.examples_in, missing)]), torch.zeros_like(logprob_E2)
        count = -(-len(missing) // (size * ranks.world_size))  # every rank computes equally many batches
        self.context.log.info(f"Reference: the log-probabilities of {counted(len(pairs), 'pair')}, computed "
                              "once")
        for number in self.context.progress(range(count), count, "Reference"):
            first = (ranks.rank * count + number) * size
            indices = missing[first:first + size]
            # A rank without rows left still runs: every forward of a sharded model needs all ranks.
            batch = rows(np.array(indices or missing[:1]))
            logprob_BP2 = frozen_logprobs(model, batch.to(ranks.device)).float().cpu()
            for row, index in enumerate(indices):
                examples = torch.from_numpy(rows.examples_in(index)).long()
                computed_E2[examples] = logprob_BP2[row, :len(examples)]
        logprob_E2[pairs] = ranks.all_reduce_sum(computed_E2)[pairs]

    @contextmanager
    @collective
    def locked(self, rows: ExampleRows, key: str) -> Iterator[Path]:
        """Yield the path for the file `key` of the rows, after waiting for another job that computes it."""
        ranks, log, is_waiting = self.context.ranks, self.context.log, False
        lock: Optional[FileLock] = None
        place, why = rows.token_set.folder, ""

        def take_lock() -> tuple[str, str, str]:
            """Return where rank 0 stores the file, why not elsewhere, and another holder of the lock."""
            nonlocal lock, place, why
            if lock is None:
                place, why = self.cache.folder_to_write(place, rows.fingerprint, key)
                with disk_errors(place, DataError, "make it writable, or set CACHE_DIR to another folder"):
                    place.mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context(FileLock(place / f".{key}.lock"))
            return str(place / key), why, lock.take(lambda why: log.info(
                f"{why}; make sure that no other job computes the same outputs at the same time"))

        with ExitStack() as stack:
            while True:  # polled, so that a signal can end the wait
                path, refused, holder = ranks.on_rank0(take_lock)
                if refused and refused not in self.announced:
                    self.announced.add(refused)
                    log.info(f"{refused}; storing the results in {self.cache.fallback} (set CACHE_DIR to "
                             "choose another folder)")
                if not holder:
                    break
                if not is_waiting:
                    log.info(f"waiting for {holder}, which is computing {path}")
                is_waiting = True
                self.context.leave_if_stopped()
                time.sleep(WAIT_SECONDS)
            yield Path(path)


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


def _write_reference(path: Path, logprob_E2: Tensor, provenance: Mapping[str, str]) -> str:
    """Store the values; return why they cannot be written, or ""."""
    try:
        with atomic_write(path) as temporary:
            metadata = {**provenance, "sha256": _digest(logprob_E2)}
            write_tensors(temporary, {"logprob_E2": logprob_E2}, metadata)
    except OSError as error:
        return error.strerror
    return ""


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
