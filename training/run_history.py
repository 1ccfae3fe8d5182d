"""What a run's logs add up to: scores, energy and the ledger's digest for its model card; divergence."""

import hashlib
import math
import re
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Optional

EVALUATED = re.compile(r"(val|generation)_|.*_(acc|acc_norm|n|stderr|chance)$")  # metrics of an evaluation
DIVERGED_LOSS, DIVERGED_STEPS = 1.5, 5  # times the initial loss, in so many consecutive steps


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


class Divergence:
    """Recognizes a run that diverges or no longer learns, from the losses and gradient norms of its steps.

    The initial loss is the median of the first DIVERGED_STEPS, but at most twice the first one: noise in a
    small batch does not decide, and neither do losses that diverged within these steps.
    """

    def __init__(self):
        self.first_losses: list[float] = []
        self.recent: deque[tuple[float, Optional[float]]] = deque(maxlen=DIVERGED_STEPS)
        self.reported: set[str] = set()

    def add(self, loss: Optional[float], grad_norm: Optional[float]) -> dict[str, str]:
        """Add a step; return what it shows for the first time, as {kind of event: sentence}."""
        if loss is None or not math.isfinite(loss):
            return {}
        if len(self.first_losses) < DIVERGED_STEPS:
            self.first_losses.append(loss)
        self.recent.append((loss, grad_norm))
        if len(self.recent) < DIVERGED_STEPS:
            return {}
        initial = min(statistics.median(self.first_losses), 2 * self.first_losses[0])
        shown = {}
        if all(loss > DIVERGED_LOSS * initial for loss, _ in self.recent):
            shown["divergence"] = (f"the loss has been above {DIVERGED_LOSS} times the initial loss for "
                                   f"{DIVERGED_STEPS} steps ({self.first_losses[0]:.4f} in the first step, "
                                   f"now {loss:.4f}): the run diverges")
        if all(norm == 0 for _, norm in self.recent):
            shown["no gradient"] = (f"the gradient norm has been exactly 0 for {DIVERGED_STEPS} steps: the "
                                    "model no longer learns")
        shown = {kind: sentence for kind, sentence in shown.items() if kind not in self.reported}
        self.reported |= shown.keys()
        return shown
