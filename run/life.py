"""The state of a run: what it reads, how far it is, its folder, and how a checkpoint of it is saved.

The objective of a stage, and what it needs besides the model: a reference model, or a teacher.

How a run is set up, up to its first step; training, replay and --check all go this way.

Nothing in the run's folder is written here except its lock.
"""

import math
import shlex
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

import lora
from checkpoint import huggingface, peft, store
from checkpoint.resume_rules import identity
from checkpoint.schema import SavedProgress
from checkpoint.tensors import LazyTensor
from common import __version__
from common.errors import CheckpointError, SettingsError, requires_package
from common.heartbeat import HEARTBEAT
from config import Config, is_plain_name
from dataloaders import (
    HeldOut,
    MixedRows,
    RowOrder,
    Rows,
    cache_of,
    load_steps,
    map_parts,
    open_rows,
    parts_of,
    read_held_out,
    rows_at,
    validation_batches,
)
from hellaswag_utils import ChoiceSet, read_choice_set
from learn.objectives import (
    PREFERENCE_OBJECTIVES,
    Distillation,
    NextToken,
    Objective,
    Reference,
    frozen_logprobs,
    reference_is_stored,
    stored_reference,
)
from learn.optim import Optimizer
from learn.stored import OutputStore, with_reference, with_teacher
from learn.teacher import find_teacher, load_teacher, teacher_facts
from model import Transformer, padded
from model_utils import (
    allocate_model,
    build_model,
    check_vocabulary,
    choose_device,
    choose_dtype,
    compile_where_possible,
    load_weights,
    make_deterministic,
    model_on_meta,
    read_parameters,
    restore_padding,
    trim_padding,
)
from parallel.fsdp import RowServer, is_sharded, named_parameters, own
from parallel.ranks import Interrupted, Ranks, RunContext, StopSignals, classify_exception, joined_ranks
from run import diagnostics
from run import folder as run_folder
from run.card import BackgroundReport, commit, run_card, write_card
from run.folder import SEGMENTS, RunFolder, open_run_folder
from run.log import FINISH_SECONDS, LEAVE_SECONDS, REPORT, RunLog, disk_errors
from run.start import (
    Start,
    find_base_on_rank0,
    find_checkpoint,
    is_inside,
    on_each_machine,
    start_from,
    weights_sha256,
)
from settings.load import Loaded
from tokenizer import load_tokenizer


@dataclass(frozen=True)
class Inputs:
    """What a run reads."""

    tokenizer: Any
    rows: Rows  # of the training split
    validation_rows: Optional[Rows]
    choice_sets: list[ChoiceSet]  # HellaSwag and EVAL_TASKS
    held_out: list[HeldOut]  # chats or pairs to answer; empty without GENERATION_EVAL_EVERY
    validation_fingerprint: str
    fingerprint: str  # of the training split
    description: str

    def order(self, config: Config, ranks: Ranks) -> RowOrder:
        """Which rows this rank reads in each step."""
        mixing = self.rows.mixing if isinstance(self.rows, MixedRows) else None
        return RowOrder(len(self.rows), config.rows_per_step, config.micro_batch_size, config.seed,
                        ranks.rank, ranks.world_size, mixing)

    def sources(self, config: Config) -> list[dict[str, Any]]:
        """A mixture's table of its sources, as JSON; empty for other data."""
        rows = config.max_steps * config.rows_per_step
        return self.rows.facts(rows) if isinstance(self.rows, MixedRows) else []

    def identity(self, config: Config, saved: Mapping[str, Any] = {}) -> dict[str, Any]:
        """The hashes of what is read, which a resumed run compares with its checkpoint's, `saved`.

        An equal tokenizer in another file has the hash that is saved.
        """
        before = saved.get("TOKENIZER_PATH", self.tokenizer.sha256)
        sha256 = before if self.tokenizer.is_same(before) else self.tokenizer.sha256
        return identity(config, self.fingerprint, sha256)

    def used_ids(self) -> list[int]:
        """The token ids that occur in the training split, ascending; reads all of it."""
        used = np.zeros(self.tokenizer.vocab_size, bool)
        for part in parts_of(self.rows):
            for block in part.token_set.blocks():
                used[block] = True
        return np.flatnonzero(used).tolist()

    def training_batches(self, config: Config, ranks: Ranks, objective: Objective,
                         first_step: int):
        """This rank's micro-batches of each step from `first_step` on, and the units in them."""
        return load_steps(self.rows, self.order(config, ranks), ranks.device, objective.count, first_step,
                          config.prefetch_steps)

    def validation_batches(self, config: Config, ranks: Ranks):
        """This rank's share of the fixed validation rows."""
        rows = min(config.validation_rows, len(self.validation_rows))
        return validation_batches(self.validation_rows, rows, config.micro_batch_size, ranks.device,
                                  ranks.rank, ranks.world_size)


@dataclass
class Progress(SavedProgress):
    """How far a run is. Its fields are saved in checkpoints."""

    step: int = 0

    @property
    def updates(self) -> int:
        """The steps that changed the weights; the learning-rate schedule counts these."""
        return self.step - self.skipped_steps

    @property
    def last_complete_step(self) -> int:
        """The last step whose line in metrics.jsonl is complete."""
        return self.step if self.pending_metrics is None else self.step - 1

    def spike_limit(self, config: Config) -> float:
        """The loss above which the next step counts as a loss spike."""
        return diagnostics.spike_limit(self.recent_losses, config.loss_spike_window,
                                       config.loss_spike_threshold)

    def robust_z_score(self, loss: float, config: Config) -> float:
        """How far a loss is above the recent ones, in robust standard deviations."""
        return diagnostics.robust_z_score(loss, self.recent_losses, config.loss_spike_window)

    def note_validation(self, loss: float, skip_steps: int) -> bool:
        """Record a validation loss; returns whether it is a new best. NaN never is."""
        self.val_loss = loss
        if math.isfinite(loss) and (self.best_val_loss is None or loss < self.best_val_loss):
            self.best_val_loss, self.best_step, self.validations_without_best = loss, self.step, 0
            return True
        if self.step > skip_steps:
            self.validations_without_best += 1
        return False


class StepResult(NamedTuple):
    """The result of a step, the same on every rank."""

    loss: float  # the mean over all units of the global batch
    metrics: dict[str, float]  # the objective's own, likewise
    count: int  # units in the global batch
    grad_norm: float
    finite: bool
    updated: bool  # False after an fp16 overflow, which is normal now and then, and for a skipped loss spike
    spike: float  # a loss spike's robust z-score; 0 if it is none
    stop: bool  # a rank received a stop signal


@dataclass
class Run:
    """Everything that one rank of a run holds."""

    config: Config
    context: RunContext
    inputs: Inputs
    run_folder: RunFolder
    model: Transformer
    optimizer: Optimizer
    scaler: Optional[torch.amp.GradScaler]
    progress: Progress
    objective: Objective
    started_from: Optional[Path]  # a checkpoint, which retention must keep
    saved: Optional[Path] = None  # the checkpoint of the current state
    report: BackgroundReport = field(default_factory=BackgroundReport)

    @property
    def ranks(self) -> Ranks:
        """All processes of the run."""
        return self.context.ranks

    @property
    def log(self) -> RunLog:
        """This rank's log."""
        return self.context.log

    @property
    def folder(self) -> Path:
        """The run's folder, where it was last seen."""
        return self.run_folder.path

    @property
    def finished(self) -> bool:
        """Whether no step is left to take."""
        patience = self.config.early_stopping_patience
        return (self.progress.step >= self.config.max_steps
                or 0 < patience <= self.progress.validations_without_best)

    def why_early(self) -> str:
        """Why the run ends before MAX_STEPS."""
        progress = self.progress
        best = "finite loss"
        if progress.best_step:
            best = f"loss below {progress.best_val_loss} (step {progress.best_step})"
        return (f"Early stopping: {progress.validations_without_best} validations without a {best}; to "
                "continue, raise EARLY_STOPPING_PATIENCE.")

    def why_ended(self, error: Optional[BaseException]) -> str:
        """Why this process takes no more steps.

        Args:
            error: what it raised, if it did.
        """
        if error is not None:
            report = classify_exception(error)
            return report.sentence if report else f"{type(error).__name__}: {error}"
        if not self.finished or self.progress.pending_metrics is not None:
            return "stopped by a signal"
        return "finished" if self.progress.step >= self.config.max_steps else "early stopping"

    def advance(self, result: StepResult) -> None:
        """Count a finished step."""
        self.progress.step += 1
        self.progress.tokens_seen += self.config.total_batch_size
        self.progress.skipped_steps += not result.updated
        if math.isfinite(result.loss):
            losses = [*self.progress.recent_losses, result.loss]
            self.progress.recent_losses = losses[-self.config.loss_spike_window:]
        self.progress.pending_metrics, self.progress.val_loss = {}, None
        self.saved = None


# ---------------------------------------------------------------------------------------- its folder


def begin(run: Run) -> None:
    """Write into the run's folder for the first time, now that nothing can refuse the start any more: move
    aside what RESUME=never asks for, clean up after a crash, and open the logs.

    Collective: every rank must call it.
    """
    resumes = run.started_from is not None and is_inside(run.started_from, run.folder)

    def clear() -> None:
        with disk_errors(run.folder):
            store.check_writable(run.folder, 0)
            if aside := run_folder.move_aside(run.folder, run.config.resume == "never"):
                run.log.warn(f"RESUME=never: the earlier run in {run.folder} was moved into {aside.name}")
        store.sweep(run.folder / "checkpoints", run.log.warn, run.started_from)
        if run.started_from and not run.started_from.exists():  # the sweep gave it its name back
            run.started_from = run.started_from.with_name(run.started_from.name.removeprefix("replaced-"))
        if not resumes:  # the settings of a run that never saved a checkpoint
            (run.folder / "config.json").unlink(missing_ok=True)
            shutil.rmtree(run.folder / SEGMENTS, ignore_errors=True)

    steps = (run.progress.last_complete_step, run.progress.step) if resumes else (-1, 0)
    run.progress.wandb_run_id = run.progress.wandb_run_id or uuid.uuid4().hex[:8]
    run.ranks.on_rank0(clear)
    run.ranks.on_rank0(commit)  # of this code, which may be another one when the first card is written
    measured = run.progress.pending_metrics or {} if resumes else {}
    run.ranks.raise_on_all(lambda: run.log.open(run.folder, *steps, run.progress.wandb_run_id, measured))
    run.log.event("start", run.progress.step, world_size=run.ranks.world_size,
                  device=diagnostics.device_name(run.ranks.device), host=socket.gethostname(),
                  torch=torch.__version__, paddock=__version__, seconds=time.time() - HEARTBEAT.started,
                  **run.log.previous)


def follow_folder(run: Run) -> bool:
    """Whether the run's folder still exists; if it was renamed, the run continues in it under the new name.

    Collective: every rank must call it.
    """
    before, found = run.folder, run.ranks.broadcast(str(run.run_folder.find() or ""))
    if found in ("", str(before)):
        return found != ""
    run.run_folder.path = Path(found)
    for name in ("saved", "started_from"):
        path = getattr(run, name)
        if path and path.is_relative_to(before):
            setattr(run, name, run.folder / path.relative_to(before))
    HEARTBEAT.stacks_folder = run.folder / "log"
    run.log.follow(run.folder, run.progress.step)
    run.log.warn(f"{before} was renamed to {run.folder} during the run, which continues there. To resume it "
                 f"later: {how_to_resume(run)}")
    return True


def how_to_resume(run: Run) -> str:
    """The command with which a later job resumes this run."""
    config, flags = run.config, []
    if config.resume == "never":
        flags.append("--resume auto")
    if run.folder.name != config.run_name:
        flags.append(f"--run-name {shlex.quote(run.folder.name)}")
    if run.folder.absolute().parent != Path(config.output_dir).absolute():
        flags.append(f"--output-dir {shlex.quote(str(run.folder.parent))}")
    plain = "" if is_plain_name(run.folder.name) else ", after giving the folder a plain name"
    return "the same command" + (f" with {' '.join(flags)}{plain}" if flags else "")


def keep_settings(run: Run) -> None:
    """Write the settings of the steps that this process takes. Collective: every rank must call it."""
    follow_folder(run)
    config, first = run.config, run.progress.step + 1
    run.ranks.on_rank0(lambda: run_folder.write_segment(run.folder, first, config.public(),
                                                        run.inputs.sources(config)))


def write_report(run: Run, wait_seconds: float = 0) -> None:
    """Begin to write the run's report, on rank 0, once the run's folder may be written.

    Args:
        wait_seconds: at the end of the run, how long to wait at most until it is written.
    """
    if run.config.report and run.log.lines:
        if not wait_seconds:
            run.report.start(run.folder, run.log.warn)
        elif run.report.finish(run.folder, wait_seconds, run.log.warn):
            run.log.info(f"Look at the run: {run.folder.absolute() / REPORT}, in a browser")


# --------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(run: Run) -> None:
    """Save the state after the last finished step, and delete what retention does not keep.

    Collective: every rank must call it.
    """
    def report_lost_folder() -> None:
        raise CheckpointError(f"{run.folder} was deleted during the run, or moved to where this job cannot "
                              f"see it. The state after step {run.progress.step} is saved in a new folder of "
                              f"that name, without the earlier logs. To resume: {how_to_resume(run)}")

    HEARTBEAT.enter("save", run.progress.step)
    if follow_folder(run):
        write_checkpoint(run)
        return write_report(run)
    with ExitStack() as stack:
        run.ranks.on_rank0(lambda: stack.enter_context(run_folder.make_again(run.folder)))
        write_checkpoint(run)
    run.ranks.on_rank0(report_lost_folder)


def write_checkpoint(run: Run) -> None:
    """`save_checkpoint` into a folder that exists. Collective: every rank must call it."""
    config, progress, started = run.config, run.progress, time.perf_counter()
    state = {"progress": asdict(progress), "identity": run.inputs.identity(config),
             "world_size": run.ranks.world_size, "settings": config.public(),
             "scaler": run.scaler.state_dict() if run.scaler else None, "val_loss": progress.val_loss}

    # Rank 0 writes one tensor after the other; of a sharded model, it gathers each when its turn comes.
    parameters, optimizer_state = named_parameters(run.model), run.optimizer.state_tensors()
    if config.lora_enabled:
        parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    tensors = {name: (own(parameter), parameter) for name, parameter in parameters.items()}
    for name, rows in optimizer_state.items():
        tensors[name] = (rows, parameters[name.rpartition(".")[0]] if rows.ndim else rows)
    server = RowServer(tensors, run.ranks)
    streamed = {name: LazyTensor(tuple(like.shape), rows.dtype, partial(server.read, name))
                for name, (rows, like) in tensors.items()}

    def write_model(folder: Path) -> None:
        weights, tokenizer = {name: streamed[name] for name in parameters}, run.inputs.tokenizer
        if config.lora_enabled:
            adapter = peft.Adapter(weights, config, progress.base, progress.base_sha256,
                                          lora.trained_token_ids(run.model))
            peft.save_adapter_folder(folder, adapter, config, tokenizer)
        else:
            huggingface.save_model_folder(folder, weights, run.model.config, tokenizer, config.max_seq_len)
        write_card(folder, lambda: run_card(run), run.log.warn)

    checkpoints_dir = run.folder / "checkpoints"
    of_optimizer = trim_padding({name: streamed[name] for name in optimizer_state}, run.model)
    contents = store.Contents(progress.step, write_model, state, of_optimizer, trained_bytes(run.model),
                              server if is_sharded(run.model) else None)
    run.saved = store.save(checkpoints_dir, contents, run.ranks, run.log.warn)
    protected = [run.started_from] if run.started_from else []
    run.ranks.on_rank0(lambda: store.prune(checkpoints_dir, config.keep_last, config.keep_best, protected,
                                           run.log.warn))
    seconds = time.perf_counter() - started
    run.log.info(f"Saved {run.saved} in {seconds:.1f} s")
    run.log.event("save", progress.step, seconds=seconds, checkpoint=run.saved.name)


def trained_bytes(model: Transformer) -> int:
    """The size of the parameters that are trained, which a checkpoint contains."""
    return sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)


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
    outputs = OutputStore(cache_of(config), context)
    if config.training_stage == "dpo":
        objective, reference = PREFERENCE_OBJECTIVES[config.preference_objective], None
        if objective.needs_reference:
            reference, inputs = choose_reference(config, inputs, model, dtype, base, outputs)
        return objective(config, reference), inputs
    if config.distillation_enabled:
        return choose_teacher(config, inputs, outputs)
    return NextToken(), inputs


def choose_teacher(config: Config, inputs: Inputs, outputs: OutputStore) -> tuple[Objective, Inputs]:
    """Return distillation from a teacher that runs in each step, or from its stored outputs.

    Collective: every rank must call it.
    """
    tokenizer, ranks = inputs.tokenizer, outputs.context.ranks
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
    facts["vocab_size"] = tokenizer.vocab_size

    # Each source of a mixture has a store of its own, which does not depend on the weights.
    def stored(split: str, indices_of: Callable[[int], np.ndarray], part, source: int):
        own = {**facts, "data": parts_of(inputs.rows)[source].fingerprint, "split": split}
        return with_teacher(outputs, part, own, load, config, indices_of(source))

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
    return np.sort(rows_at(np.arange(count), size, config.seed, source))


def validation_rows_of(config: Config, rows: Rows, source: int) -> np.ndarray:
    """Return the indices of the rows that validation reads, of one source of a mixture, ascending."""
    if not isinstance(rows, MixedRows):
        return np.arange(min(config.validation_rows, len(rows)))
    sources, within = rows.locate(np.arange(len(rows)))
    return np.unique(within[sources == source])


def choose_reference(config: Config, inputs: Inputs, model: Transformer, dtype: torch.dtype, base: Base,
                     outputs: OutputStore) -> tuple[Reference, Inputs]:
    """Return the reference, and the inputs with its stored log-probabilities if it is not run in each step.

    Collective: every rank must call it.
    """
    context, ranks, stored = outputs.context, outputs.context.ranks, reference_is_stored(config)
    # The base under the adapters is a live reference that costs no memory.
    if config.lora_enabled and not stored:
        return partial(logprobs_without_adapters, model), inputs

    @cache
    def frozen() -> Transformer:
        folder = base.find(context)
        reference = model_on_meta(config, inputs.tokenizer.vocab_size, dtype)
        lora.cast_base(reference.requires_grad_(False), dtype)
        allocate_model(reference, config, ranks)
        ranks.raise_on_all(lambda: load_weights(folder, reference))
        compile_where_possible(reference, config, ranks.device.type)
        return reference.eval()

    if not stored:
        return partial(frozen_logprobs, frozen()), inputs
    facts = {"weights_sha256": base.sha256(context), "compute_dtype": str(dtype)}

    def stored_for(split: str, part, source: int):
        return with_reference(outputs, part, split, facts, frozen, config.micro_batch_size)

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


def prepare_device(config: Config) -> torch.device:
    """The device to compute on, with torch's kernels chosen as DETERMINISTIC says."""
    device = torch.device(choose_device(config))
    if config.memory_snapshot and device.type != "cuda":
        raise SettingsError(f"MEMORY_SNAPSHOT={config.memory_snapshot} records CUDA allocations, and torch "
                            "sees no GPU here; remove it")
    make_deterministic(config, device.type)
    return device


# -------------------------------------------------------------------------------------------- inputs


def read_inputs(config: Config, verify: bool) -> Inputs:
    """Open everything that the settings name.

    Args:
        verify: verify the data as VERIFY_DATA says; one rank does it for all.
    """
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer_backend)
    if verify:
        cache_of(config).check()
    how = config.verify_data if verify else "never"
    train = open_rows(config, "train", tokenizer, how)
    measured = read_measured(config, tokenizer, how)
    path = getattr(config, f"{config.training_stage}_data_path")
    rows = measured["validation_rows"]
    held_out = f", {rows.describe()} held out" if rows else ""
    return Inputs(tokenizer, train, **measured, fingerprint=train.fingerprint,
                  description=f"{train.describe()}{held_out} from {path}")


def read_measured(config: Config, tokenizer, verify: str) -> dict[str, Any]:
    """Open what the evaluations read: the fields of `Inputs` that they need.

    Args:
        verify: "auto", "always" or "never".
    """
    rows, held_out = None, []
    if config.validate_every or config.generation_eval_every:
        rows = open_rows(config, "validation", tokenizer, verify)
    if config.generation_eval_every:
        if verify != "never":  # one rank scores for all
            with requires_package("rouge-score", "GENERATION_EVAL_EVERY"):
                import rouge_score.rouge_scorer  # noqa: F401
            with requires_package("sacrebleu", "GENERATION_EVAL_EVERY"):
                import sacrebleu  # noqa: F401
        held_out = read_held_out(rows, config.generation_eval_examples)
    named_sets = config.choice_sets if config.hellaswag_every else ()
    return {"validation_rows": rows if config.validate_every else None,
            "validation_fingerprint": rows.fingerprint if rows else "", "held_out": held_out,
            "choice_sets": [read_choice_set(named, tokenizer, config) for named in named_sets]}


def open_inputs(config: Config, ranks: Ranks) -> Inputs:
    """The same inputs on every rank, verified by rank 0. Collective: every rank must call it."""
    verified = ranks.on_rank0(lambda: read_inputs(config, verify=True))
    return ranks.raise_on_all(lambda: verified or read_inputs(config, verify=False))


# ----------------------------------------------------------------------------------------- the start


def find_start(loaded: Loaded, inputs: Optional[Inputs], run_dir: Path, ranks: Ranks) -> Start:
    """Where the settings start the run. Collective: every rank must call it.

    Args:
        inputs: what the run reads, which a checkpoint must have read too; None: unknown, and not compared.
    """
    found = find_checkpoint(loaded.config, run_dir, ranks)
    start = start_from(found, loaded, inputs and inputs.identity, run_dir, ranks)
    if inputs and start.folder and not start.state and not store.read_state(start.folder):
        vocab_size = inputs.tokenizer.vocab_size  # a model from elsewhere may have another
        start.notes.extend(ranks.raise_on_all(lambda: check_vocabulary(start.folder, vocab_size)))
    return start


def build_adapted(config: Config, start: Start, inputs: Inputs, dtype: torch.dtype,
                  ranks: Ranks) -> Transformer:
    """The start's base with adapters: new ones, or those of the start. Collective: every rank must call it.
    """
    generator = torch.Generator().manual_seed(config.seed)
    model, adapter = adapted_on_meta(config, start, inputs, dtype, generator, ranks)
    allocate_model(model, config, ranks)
    ranks.raise_on_all(lambda: load_weights(start.base, model))
    lora.init_adapters(model, generator)
    if adapter:
        ranks.raise_on_all(lambda: lora.load_adapter_state_dict(model, adapter.state))
    return model


def adapted_on_meta(config: Config, start: Start, inputs: Inputs, dtype: torch.dtype,
                    generator: torch.Generator, ranks: Ranks
                    ) -> tuple[Transformer, Optional[peft.Adapter]]:
    """The same without memory, and the adapters of the start, if any. Collective: every rank must call it."""
    model = model_on_meta(config, inputs.tokenizer.vocab_size, dtype)
    adapter, token_ids = None, {}
    if start.own:
        rows = padded(model.vocab_size)
        adapter = ranks.raise_on_all(lambda: peft.load_adapter_folder(start.folder, config, rows))
        ranks.raise_on_all(lambda: adapter.check_base(start.base_sha256, start.base))
        token_ids = adapter.token_ids
    elif config.lora_train_tokens != "none":
        token_ids = ranks.broadcast(ranks.on_rank0(lambda: token_ids_to_train(config, inputs, start.base)))
    ranks.raise_on_all(lambda: lora.add_adapters(model, config, generator, token_ids))
    lora.cast_base(model, dtype)
    return model, adapter


def token_ids_to_train(config: Config, inputs: Inputs, base: Path) -> huggingface.TokenIds:
    """The rows that LORA_TRAIN_TOKENS selects, of the embedding and of an untied head."""
    used_ids = inputs.used_ids() if config.lora_train_tokens == "auto" else []
    parameters = read_parameters(base, config, inputs.tokenizer.vocab_size)
    head = parameters["tok_embeddings.weight" if config.tie_embeddings else "output.weight"].whole()
    ids = lora.tokens_to_train(config.lora_train_tokens, used_ids, inputs.tokenizer.special_ids, head)
    return dict.fromkeys(["tok_embeddings"] + ([] if config.tie_embeddings else ["output"]), ids)


def restore(config: Config, start: Start, model: Transformer, optimizer: Optimizer, scaler) -> Progress:
    """The progress to resume from; also restores the optimizer's and the loss scaler's state."""
    progress = Progress(**start.state["progress"]) if start.state else Progress()
    if start.state:
        optimizer.load_state_tensors(restore_padding(store.read_optimizer(start.folder), model))
        if scaler is not None and start.state["scaler"]:
            scaler.load_state_dict(start.state["scaler"])
    if not start.own and config.start_step is not None:  # all counters that go with the step start anew
        progress = Progress(step=config.start_step, tokens_seen=config.start_step * config.total_batch_size,
                            recent_losses=progress.recent_losses)
    return replace(progress, **start.remembered)


# ------------------------------------------------------------------------------------------- the run


def build_run(config: Config, context: RunContext, inputs: Inputs, folder: RunFolder, start: Start,
              for_replay: bool = False) -> Run:
    """The run in memory: model, optimizer, progress, and the objective with all that it needs.

    Collective: every rank must call it.

    Args:
        for_replay: the run will not be saved, and its own weights may be non-finite.
    Raises:
        CheckpointError, DataError: something that it needs is missing, or does not fit.
        Interrupted: a rank received a stop signal.
    """
    ranks, dtype = context.ranks, choose_dtype(config, context.ranks.device.type)
    if config.lora_enabled:
        model = build_adapted(config, start, inputs, dtype, ranks)
    else:
        model = build_model(config, inputs.tokenizer.vocab_size, ranks, dtype)
        if start.folder is not None:
            finite = not (for_replay and start.own)
            ranks.raise_on_all(lambda: load_weights(start.folder, model, finite))
    optimizer = Optimizer(model, config, ranks)
    scaler = torch.amp.GradScaler("cuda") if dtype == torch.float16 else None
    progress = restore(config, start, model, optimizer, scaler)
    if not for_replay and progress.step < config.max_steps:
        size = trained_bytes(model)  # AdamW keeps two more values of each parameter, Muon one
        ranks.on_rank0(lambda: store.check_room(folder.path / "checkpoints", 3 * size, 2 * size))
    base = Base(config, progress, folder.path)
    objective, inputs = choose_objective(config, inputs, model, dtype, base, context)
    run = Run(config, context, inputs, folder, model, optimizer, scaler, progress, objective, start.folder)
    if reason := compile_where_possible(model, config, ranks.device.type):
        context.log.warn(f"no torch.compile: {reason}")
    return run


@contextmanager
def open_run(loaded: Loaded) -> Iterator[Run]:
    """A run that is ready for its next step, on every rank. Collective: every rank must call it.

    Raises:
        PaddockError: the settings, the data, the checkpoint or the machine do not allow the run.
        Interrupted: a rank received a stop signal; nothing is changed.
    """
    config = loaded.config
    device = prepare_device(config)
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        ranks = stack.enter_context(joined_ranks(device.type, config.distributed_timeout))
        inputs = open_inputs(config, ranks)
        folder = stack.enter_context(open_run_folder(config, ranks, loaded.warnings.append))
        HEARTBEAT.stacks_folder = folder.path / "log"
        start = find_start(loaded, inputs, folder.path, ranks)
        config = start.config
        log = RunLog(config, ranks.rank, device.type)
        stack.push(lambda error, *_: log.close(finished=error is None and signals.received is None))
        for message in (*loaded.warnings, *start.warnings):
            log.warn(message)
        for message in (*loaded.notes, *start.notes):
            log.info(message)
        context = RunContext(ranks, signals, log)
        try:
            run = build_run(config, context, inputs, folder, start)
            stack.push(lambda error, *_: write_report(
                run, FINISH_SECONDS if error is None and signals.received is None else LEAVE_SECONDS))
            context.leave_if_stopped()
        except Interrupted:
            log.info("Stopped by a signal before the first step; nothing is changed. The same command starts "
                     "again.")
            raise
        stack.push(lambda _, error, trace: log.event("end", run.progress.step, reason=run.why_ended(error)))
        yield run
