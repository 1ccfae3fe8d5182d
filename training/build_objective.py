"""Which objective a stage has, and what it needs besides the model: a reference to be held against, or a teacher."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

import lora
from config import Config
from data_pipeline.row_order import rows_of_step
from model import Transformer
from model_utils import build_model, compile_where_possible, load_weights
from objectives.base import PREFERENCE_OBJECTIVES, NextToken, Objective, Reference, stored_reference
from objectives.distillation import Distillation
from objectives.once import Once
from objectives.reference import frozen_logprobs, is_stored, with_stored_reference
from objectives.teacher import find_teacher, load_teacher, teacher_facts
from objectives.teacher_store import with_stored_teacher
from parallel.collectives import Ranks, RunContext
from training.start import find_base_on_rank0, weights_sha256
from training.state import Inputs, Progress, cache_of


@dataclass(frozen=True)
class Base:
    """The weights that a run began with, looked for only where they are needed."""

    config: Config
    progress: Progress
    run_dir: Path
    warn: Callable[[str], None]

    def find(self, ranks: Ranks) -> Path:
        """The folder. Raises CheckpointError where it is gone. Collective: every rank must call it."""
        return find_base_on_rank0(self.config, asdict(self.progress), self.run_dir, ranks, self.warn)

    def sha256(self, ranks: Ranks) -> str:
        """The hash of the weights. Collective: every rank must call it."""
        if self.progress.base_sha256:
            return self.progress.base_sha256
        folder = self.find(ranks)  # a version before this one kept the hash for adapters alone
        return ranks.broadcast(ranks.on_rank0(lambda: weights_sha256(folder)))


def choose_objective(config: Config, inputs: Inputs, model: Transformer, dtype: torch.dtype, base: Base,
                     context: RunContext) -> tuple[Objective, Inputs]:
    """What the settings learn by, and the inputs with what was computed for it before the first step.

    Collective: every rank must call it.

    Args:
        base: whose weights the run began with.
    Raises:
        CheckpointError, DataError: what it needs is missing, or does not fit.
        Interrupted: a rank was signalled.
    """
    once = Once(cache_of(config), context.ranks, context.signals, context.log.info)
    if config.training_stage == "dpo":
        objective = PREFERENCE_OBJECTIVES[config.preference_objective]
        if not objective.needs_reference:
            return objective(config), inputs
        reference, inputs = choose_reference(config, inputs, model, dtype, base, once)
        return objective(config, reference), inputs
    if config.distillation_enabled:
        return choose_teacher(config, inputs, once)
    return NextToken(), inputs


def choose_teacher(config: Config, inputs: Inputs, once: Once) -> tuple[Objective, Inputs]:
    """Distillation from a teacher that runs along, or from what it said once. Collective: every rank must call it."""
    tokenizer, ranks = inputs.tokenizer, once.ranks
    verified = ranks.on_rank0(lambda: find_teacher(config, tokenizer))
    folder = ranks.raise_on_all(lambda: verified or find_teacher(config, tokenizer, verify=False))

    @cache
    def load():
        return load_teacher(folder, config, tokenizer.vocab_size, ranks.device)

    if not config.distillation_top_k:
        return Distillation(config, ranks.raise_on_all(load), config.compile and ranks.device.type == "cuda"), inputs
    facts = {**ranks.broadcast(ranks.on_rank0(lambda: teacher_facts(folder, config))), "data": inputs.fingerprint}

    def stored(rows, split: str, indices: np.ndarray):
        return with_stored_teacher(rows, {**facts, "split": split}, load, config, tokenizer.vocab_size, once, indices)

    in_training = rows_of_run(config, len(inputs.rows))
    rows, validation_rows = stored(inputs.rows, "train", in_training), inputs.validation_rows
    if validation_rows:
        validation_rows = stored(validation_rows, "validation", np.arange(min(config.validation_rows, len(validation_rows))))
    return Distillation(config), replace(inputs, rows=rows, validation_rows=validation_rows)


def rows_of_run(config: Config, n_rows: int) -> np.ndarray:
    """The rows that a whole run reads, whenever."""
    if config.max_steps * config.rows_per_step >= n_rows:
        return np.arange(n_rows)
    return np.unique(np.concatenate([rows_of_step(step, config.rows_per_step, n_rows, config.seed)
                                     for step in range(config.max_steps)] or [np.arange(0)]))


def choose_reference(config: Config, inputs: Inputs, model: Transformer, dtype: torch.dtype, base: Base,
                     once: Once) -> tuple[Reference, Inputs]:
    """Where the reference's log-probabilities come from. Collective: every rank must call it."""
    ranks, stored = once.ranks, is_stored(config)
    if config.lora_enabled and not stored:
        return partial(without_adapters, model), inputs

    @cache
    def frozen() -> Transformer:
        folder = base.find(ranks)
        reference = build_model(config, inputs.tokenizer.vocab_size, ranks, dtype)
        ranks.raise_on_all(lambda: load_weights(folder, reference))
        lora.keep_base_in(reference.requires_grad_(False), dtype)
        compile_where_possible(reference, config, ranks.device.type)
        return reference.eval()

    if not stored:
        return partial(frozen_logprobs, frozen()), inputs
    facts = {"weights_sha256": base.sha256(ranks), "compute_dtype": str(dtype)}

    def referenced(rows, split: str):
        return rows and with_stored_reference(rows, split, facts, frozen, config.micro_batch_size, once)

    return stored_reference, replace(inputs, rows=referenced(inputs.rows, "train"),
                                     validation_rows=referenced(inputs.validation_rows, "validation"))


def without_adapters(model: Transformer, batch) -> torch.Tensor:
    """What the model says with its adapters off: the log-probabilities of the base."""
    with lora.disable_adapters(model):
        was_training = model.training
        try:
            return frozen_logprobs(model.eval(), batch)
        finally:
            model.train(was_training)
