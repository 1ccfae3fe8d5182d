"""What the lines of a run's logs add up to, for its model card: scores, energy, the digest of the ledger."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Optional

EVALUATED = re.compile(r"(val|generation)_|.*_(acc|acc_norm|n|stderr|chance)$")  # metrics of an evaluation


class RunHistory:
    """Takes each line of ledger.jsonl and metrics.jsonl, of a step the ledger's first.

    Args:
        tokens_per_step: TOTAL_BATCH_SIZE.
    """

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step
        self.logged_step: Optional[int] = None  # of the newest metrics; first, the step before the ledger
        self.first_val_loss: Optional[float] = None
        self.scores: dict[str, tuple[int, float]] = {}  # the newest of each metric, with its step
        self.joules, self.measured_tokens, self.all_tokens = 0.0, 0, 0
        self.ledger_step, self.ledger = 0, hashlib.sha256()
        self.before = 0, self.ledger.copy()

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        for name, value in metrics.items():
            if EVALUATED.match(name) and isinstance(value, (int, float)):
                self.scores[name] = step, value
        if self.first_val_loss is None and isinstance(metrics.get("val_loss"), float):
            self.first_val_loss = metrics["val_loss"]
        if "train_loss" in metrics:
            steps = step - self.logged_step if self.logged_step is not None else 0
            tokens = max(0, steps) * self.tokens_per_step
            self.logged_step, self.all_tokens = step, self.all_tokens + tokens
            if isinstance(joules := metrics.get("joules_per_token"), float):
                self.joules += joules * tokens
                self.measured_tokens += tokens

    def add_ledger(self, step: int, line: bytes) -> None:
        """Add a line of ledger.jsonl, with its line end."""
        if self.logged_step is None:
            self.logged_step = step - 1
        self.before = self.ledger_step, self.ledger.copy()
        self.ledger_step = step
        self.ledger.update(line)

    def ledger_sha256(self, step: int) -> str:
        """Return the SHA-256 of the ledger's lines up to a step, which is the newest or the one before it."""
        last, digest = self.before if self.ledger_step > step else (self.ledger_step, self.ledger)
        return digest.hexdigest() if last == step else ""
