"""A batch of rows, as the model and the objectives read it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fused.chunked_head import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """Rows for one forward. Targets are already shifted: the target of a token is the token after it."""

    tokens_BT: torch.Tensor  # int64
    targets_BT: torch.Tensor  # int64, IGNORE_INDEX where nothing is predicted
    document_ids_BT: torch.Tensor | None = None  # int32, from 1 in each row; None = no document mask
    target_index_M: torch.Tensor | None = None  # int64, where the flattened targets are; None = everywhere
    stored: dict[str, torch.Tensor] = field(default_factory=dict)  # precomputed; the first axis is the row
    padding: int = 0  # tokens that belong to no document

    @property
    def targets(self) -> int:
        """The positions that the head predicts; known without a GPU sync."""
        return self.targets_BT.numel() if self.target_index_M is None else len(self.target_index_M)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device, without waiting for the copy of pinned memory.

        `document_ids_BT` stays on the CPU: the model derives its attention mask there, without a GPU sync.
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, document_ids_BT=self.document_ids_BT)

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, which a GPU can copy asynchronously."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        tensors = (self.tokens_BT, self.targets_BT, self.document_ids_BT, self.target_index_M)
        return Batch(*(None if tensor is None else change(tensor) for tensor in tensors),
                     stored={name: change(tensor) for name, tensor in self.stored.items()},
                     padding=self.padding)

    def ignore_from(self, row: int) -> "Batch":
        """Return the batch without targets in the rows from `row` on, which are padding."""
        targets_BT = self.targets_BT.clone()
        targets_BT[row:] = IGNORE_INDEX
        target_index_M = self.target_index_M
        if target_index_M is not None:
            target_index_M = target_index_M[target_index_M < row * targets_BT.shape[1]]
        return replace(self, targets_BT=targets_BT, target_index_M=target_index_M)


def join(batches: Sequence[Batch], order: np.ndarray) -> Batch:
    """Return the rows of several batches as one: its row i is row order[i] of all of them.

    Stored tensors that differ in their second axis (the pairs of a row) are filled up with zeros.
    """
    def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tensors)[torch.from_numpy(order)]

    def padded(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        missing = [max(other.shape[1] for other in tensors) - tensor.shape[1] for tensor in tensors]
        return [torch.cat([tensor, tensor.new_zeros(len(tensor), count, *tensor.shape[2:])], 1)
                for tensor, count in zip(tensors, missing)]

    targets_BT = joined([batch.targets_BT for batch in batches])
    document_ids_BT, target_index_M = None, None
    if batches[0].document_ids_BT is not None:
        document_ids_BT = joined([batch.document_ids_BT for batch in batches])
    if batches[0].target_index_M is not None:
        target_index_M = (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()
    stored = {name: joined(padded([batch.stored[name] for batch in batches])) for name in batches[0].stored}
    return Batch(joined([batch.tokens_BT for batch in batches]), targets_BT, document_ids_BT, target_index_M,
                 stored, sum(batch.padding for batch in batches))


ReadRows = Callable[[np.ndarray], Batch]
