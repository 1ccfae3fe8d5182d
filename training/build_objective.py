"""The objective of a stage, and what it needs besides the model: a reference model, or a teacher."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import lora
from config import Config
from data_pipeline.mixed_rows import MixedRows, map_parts, parts_of
from data_pipeline.row_order import permutation
from dataloaders import Rows, cache_of
from model import Transformer
from model_utils import allocate_model, compile_where_possible, load_weights, model_on_meta
from objectives.base import NextToken, Objective
from objectives.distillation import Distillation
from objectives.precompute import ReferenceOutputs, TeacherOutputs
from objectives.preference import (
    PREFERENCE_OBJECTIVES,
    Reference,
    frozen_logprobs,
    reference_is_stored,
    stored_reference,
)
from objectives.stored_outputs import ComputeOnce
from objectives.teacher import find_teacher, load_teacher, teacher_facts
from parallel.collectives import RunContext
from training.start import find_base_on_rank0, on_each_machine, weights_sha256
from training.state import Inputs, Progress


@dataclass(frozen=True)
class Base:
    """The weights that a run began with, which are looked for only if they are needed."""

    config: Config
    progress: Progress
    run_dir: Path

    def find(self, context: RunContext) -> Path:
        """Return the folder. Raises CheckpointError if it is gone. Collective: every rank must call it."""
        progress = asdict(self.progress)
        return find_base_on_rank0(self.config, progress, self.run_dir, context.ranks, context.log.warn)

    def sha256(self, context: RunContext) -> str:
        """Return the hash of the weights. Collective: every rank must call it."""
        if self.progress.base_sha256:
            return self.progress.base_sha256
        folder = self.find(context)  # older versions stored the hash for adapters only
        return context.ranks.broadcast(context.ranks.on_rank0(lambda: weights_sha256(folder)))


def choose_objective(config: Config, inputs: Inputs, model: Transformer, dtype: torch.dtype, base: Base,
                     context: RunContext) -> tuple[Objective, Inputs]:
    """Return the objective of the settings, and the inputs with the precomputed outputs that it needs.

    Collective: every rank must call it.

    Args:
        dtype: in which the model computes.
    Raises:
        CheckpointError, DataError: what it needs is missing, or does not fit.
        Interrupted: a rank was signalled.
    """
    once = ComputeOnce(cache_of(config), context)
    if config.training_stage == "dpo":
        objective, reference = PREFERENCE_OBJECTIVES[config.preference_objective], None
        if objective.needs_reference:
            reference, inputs = choose_reference(config, inputs, model, dtype, base, once)
        return objective(config, reference), inputs
    if config.distillation_enabled:
        return choose_teacher(config, inputs, once)
    return NextToken(), inputs


def choose_teacher(config: Config, inputs: Inputs, once: ComputeOnce) -> tuple[Objective, Inputs]:
    """Return distillation from a teacher that runs in each step, or from its stored outputs.

    Collective: every rank must call it.
    """
    tokenizer, ranks = inputs.tokenizer, once.ranks
    # Rank 0 verifies the teacher's files for all.
    verified = ranks.broadcast(ranks.on_rank0(lambda: str(find_teacher(config, tokenizer))))
    folder = on_each_machine(Path(verified), ranks)

    @cache
    def load():
        return load_teacher(folder, config, tokenizer.vocab_size, ranks)

    # Live in each step, or stored for the rows that the run reads.
    if not config.distillation_top_k:
        compiled = config.compile and ranks.device.type == "cuda"
        return Distillation(config, load(), compiled), inputs
    facts = ranks.broadcast(ranks.on_rank0(lambda: teacher_facts(folder, config)))

    # Each source of a mixture has a store of its own, which does not depend on the weights.
    def stored(split: str, indices_of: Callable[[int], np.ndarray], part, source: int):
        own = {**facts, "data": parts_of(inputs.rows)[source].fingerprint, "split": split}
        indices = indices_of(source)
        return once.load_or_compute(TeacherOutputs(part, own, load, config, tokenizer.vocab_size, indices))

    rows = map_parts(inputs.rows, partial(stored, "train", partial(rows_of_run, config, inputs.rows)))
    if held_out := inputs.validation_rows:
        of_source = partial(validation_rows_of, config, held_out)
        held_out = map_parts(held_out, partial(stored, "validation", of_source))
    return Distillation(config), replace(inputs, rows=rows, validation_rows=held_out)


def rows_of_run(config: Config, rows: Rows, source: int) -> np.ndarray:
    """Return the indices of the rows that a whole run reads, of one source of a mixture, ascending."""
    count, size = config.max_steps * config.rows_per_step, len(parts_of(rows)[source])
    if isinstance(rows, MixedRows):
        count = int(rows.mixing.taken(np.array([count]))[source, 0])
    if count >= size:
        return np.arange(size)
    return np.sort(permutation(size, config.seed, 0, source)(np.arange(count)))


def validation_rows_of(config: Config, rows: Rows, source: int) -> np.ndarray:
    """Return the indices of the rows that validation reads, of one source of a mixture, ascending."""
    if not isinstance(rows, MixedRows):
        return np.arange(min(config.validation_rows, len(rows)))
    sources, within = rows.locate(np.arange(len(rows)))
    return np.unique(within[sources == source])


def choose_reference(config: Config, inputs: Inputs, model: Transformer, dtype: torch.dtype, base: Base,
                     once: ComputeOnce) -> tuple[Reference, Inputs]:
    """Return the reference, and the inputs with its stored log-probabilities if it is not run in each step.

    Collective: every rank must call it.
    """
    ranks, stored = once.ranks, reference_is_stored(config)
    # The base under the adapters is a live reference that costs no memory.
    if config.lora_enabled and not stored:
        return partial(logprobs_without_adapters, model), inputs

    @cache
    def frozen() -> Transformer:
        folder = base.find(once.context)
        reference = model_on_meta(config, inputs.tokenizer.vocab_size, dtype)
        lora.cast_base(reference.requires_grad_(False), dtype)
        allocate_model(reference, config, ranks)
        ranks.raise_on_all(lambda: load_weights(folder, reference))
        compile_where_possible(reference, config, ranks.device.type)
        return reference.eval()

    if not stored:
        return partial(frozen_logprobs, frozen()), inputs
    facts = {"weights_sha256": base.sha256(once.context), "compute_dtype": str(dtype)}

    def stored_for(split: str, part, source: int):
        return once.load_or_compute(ReferenceOutputs(part, split, facts, frozen, config.micro_batch_size))

    held_out = inputs.validation_rows and map_parts(inputs.validation_rows, partial(stored_for, "validation"))
    return stored_reference, replace(inputs, rows=map_parts(inputs.rows, partial(stored_for, "train")),
                                     validation_rows=held_out)


def logprobs_without_adapters(model: Transformer, batch) -> Tensor:
    """Return the (B, P, 2) log-probabilities by the base of a model with adapters."""
    with lora.disable_adapters(model):
        was_training = model.training
        try:
            return frozen_logprobs(model.eval(), batch)
        finally:
            model.train(was_training)
