"""A run after its start: its state, its progress, its folder and its checkpoints."""

import json
import math
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Optional

import numpy as np
import torch

import lora
from checkpoint import huggingface, peft, store
from checkpoint.schema import Progress
from checkpoint.store import CHECKPOINT_NAME
from checkpoint.tensors import LazyTensor, TensorFile
from common import __version__
from common.activity import ACTIVITY, Background, phase
from common.errors import CheckpointError
from common.files import commit, disk_errors, sync, sync_folder
from common.text import counted
from config import Config
from dataloaders import RowOrder, Rows
from hellaswag_utils import ChoiceSet
from learn.objectives import Objective
from learn.optim import Optimizer
from model import Transformer
from model_utils import device_name
from parallel import process
from parallel.fsdp import is_divided, local_rows, named_parameters, ranks_per_copy
from parallel.ranks import Ranks, RunContext, classify_exception, collective
from plan.make import Plan
from plan.starts import is_inside
from run import folder as run_folder
from run.extensions import Extension
from run.folder import RunFolder
from run.saving import PendingSave, RankShard, saved_rows


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run: tokenizer, rows and evaluation sets."""

    tokenizer: Any
    rows: Rows  # training split
    validation_rows: Optional[Rows]
    choice_sets: list[ChoiceSet]  # HellaSwag and EVAL_TASKS
    description: str

    def order(self, config: Config, ranks: Ranks) -> RowOrder:
        micro_batch_size = config.micro_batch_size // config.answers_per_prompt
        return RowOrder(self.rows.mixing, config.rows_read, micro_batch_size, config.row_seed, ranks.rank,
                        ranks.world_size)

    def identity(self, config: Config, plan: Optional[Plan] = None, saved: Mapping[str, Any] = {}
                 ) -> dict[str, Any]:
        """Return what checkpoints record of a run's identities, to compare with those `saved` before.

        If the saved hash is that of the same tokenizer in another file format, it is kept, and so is that of
        token files of another program if only their samples can be compared.
        """
        saved_sha256 = saved.get("TOKENIZER_PATH", self.tokenizer.sha256)
        sha256 = saved_sha256 if self.tokenizer.is_same(saved_sha256) else self.tokenizer.sha256
        data = f"{config.training_stage.upper()}_DATA_PATH"
        tokens = "".join(source.token_set.content for source in self.rows.sources) + self.rows.fingerprint
        if (before := saved.get(data, ""))[-64:] == tokens[-64:] and 64 in (len(before), len(tokens)):
            tokens = before
        identity = {"HIDDEN_DIM": config.hidden_dim, data: tokens, "TOKENIZER_PATH": sha256}
        if plan and "teacher" in plan.identities:
            identity["TEACHER_MODEL"] = plan.identities["teacher"]["model"]
        if plan and "reference_adapters" in plan.identities:
            identity["REFERENCE_ADAPTERS"] = plan.identities["reference_adapters"]["sha256"]
        return identity

    def used_ids(self) -> list[int]:
        """Return the token ids that occur in the training split, ascending."""
        used = np.zeros(self.tokenizer.vocab_size, bool)
        for source in self.rows.sources:
            used[source.token_set.used_ids()] = True
        return np.flatnonzero(used).tolist()


class StepResult(NamedTuple):
    """The result of a step, the same on every rank."""

    loss: float  # the mean over all units of the global batch
    metrics: dict[str, float]  # means of the objective's metrics
    count: int  # units in the global batch
    grad_norm: float
    finite: bool
    updated: bool  # False after an fp16 overflow (occasionally normal) or a skipped loss spike
    spike: float  # robust z-score of a loss spike, else 0
    stop: bool  # a rank received a stop signal
    log_fields: Mapping[str, Any] = {}  # of extensions, for the step log
    is_written: bool = False  # every rank has written its part of the checkpoint that is being saved
    misfit: float = 0.0  # if not 0, the largest gradient, which did not fit the scale of `Reducer.reduce`


@dataclass
class Run:
    """The state of a run on one rank."""

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
    saving: Optional[PendingSave] = None  # the checkpoint that is being written
    pruning: Optional[Background] = None  # on rank 0, the deletion of old checkpoints
    shard: Optional[RankShard] = None  # of the rows that this rank saves
    undo: Optional[Callable[[], None]] = None  # restores the state before a step with several updates
    extensions: Sequence[Extension] = ()
    # Of extensions: doubles on the device after the update, and fields of the step log from their values.
    measures: list[tuple[Callable, Callable]] = field(default_factory=list)
    plan: Optional[Plan] = None  # None outside training
    order: Optional[RowOrder] = None  # of the training rows; none for evaluations
    is_past_best: bool = False  # the validation loss has risen above its best, as an extension finds
    facts: dict[str, Any] = field(default_factory=dict)  # what extensions add to config.json, in lower case

    ranks = property(lambda self: self.context.ranks)
    log = property(lambda self: self.context.log)
    folder = property(lambda self: self.run_folder.path)

    @property
    def has_written(self) -> bool:
        """Whether this rank has written its part of the checkpoint that is being saved."""
        return self.saving is not None and not (self.saving.thread and self.saving.thread.is_alive())

    @property
    def saves_best(self) -> bool:
        """Whether the last validation is the best so far, and KEEP_BEST saves its state."""
        is_best = self.progress.step == self.progress.best_step > 0
        return is_best and self.config.keep_best > 0 < self.config.save_every

    @property
    def finished(self) -> bool:
        patience = self.config.early_stopping_patience
        return (self.progress.step >= self.config.max_steps
                or 0 < patience <= self.progress.validations_without_best)

    @property
    def takes_no_step(self) -> bool:
        """Whether the run is finished, or STOP_STEP ends it here."""
        stop_step = self.config.stop_step
        return self.finished or stop_step is not None and self.progress.step >= stop_step

    def how_to_continue(self) -> str:
        """Return why the run takes no more steps, and what continues it."""
        progress, config = self.progress, self.config
        if progress.step >= config.max_steps:
            epochs = f"raise EPOCHS={config.epochs:g}" if config.epochs else ""
            return (f"To continue, {epochs or f'set MAX_STEPS above {progress.step}'}; for a new run, set "
                    "another RUN_NAME.")
        if not self.finished:
            return f"STOP_STEP={config.stop_step}: to continue, remove it or set it above {progress.step}."
        step = progress.best_step
        best = f"{progress.best_val_loss:.3f} (step {step})" if step else "the first"
        return (f"Early stopping: {counted(progress.validations_without_best, 'validation')} without a "
                f"loss below {best}; to continue, raise EARLY_STOPPING_PATIENCE.")

    def why_ended(self, error: Optional[BaseException]) -> str:
        """Return why this process takes no more steps; `error` is the exception that it raised, if any."""
        if error is not None:
            report = classify_exception(error)
            # The launcher records the cause on another rank; a lost connection is its effect.
            effect = report and report.is_secondary
            sentence = report.sentence if report else f"{type(error).__name__}: {error}"
            return sentence.partition(" (")[0] if effect else sentence
        if not self.takes_no_step or self.progress.pending_metrics is not None:
            return "stopped by a signal"
        early = "early stopping" if self.finished else "STOP_STEP"
        return "finished" if self.progress.step >= self.config.max_steps else early

    def advance(self, result: StepResult) -> None:
        self.progress.step += 1
        self.progress.tokens_seen += self.config.total_batch_size
        self.progress.skipped_steps += not result.updated and result.count > 0
        if result.updated:
            self.progress.last_norm = result.grad_norm if self.config.update_in_backward else None
        if math.isfinite(result.loss) and self.config.has_loss_curve:
            losses = [*self.progress.recent_losses, result.loss]
            self.progress.recent_losses = losses[-self.config.loss_spike_window:]
        self.progress.pending_metrics, self.progress.val_loss = {}, None
        self.saved = None


def due(every: int, step: int, last: bool = False) -> bool:
    return every > 0 and (step % every == 0 or last)


@collective
def start_writing(run: Run) -> None:
    """Move an earlier run aside (RESUME=never), clean up after a crash, and open the logs."""
    config, progress, identities = run.config, run.progress, run.plan.identities
    resumes = run.started_from is not None and is_inside(run.started_from, run.folder)

    def clear() -> None:
        with disk_errors(run.folder):
            store.check_room(run.folder, 0)
            (run.folder / "tmp-probe").mkdir(exist_ok=True)  # what saving needs, before the first step
            (run.folder / "tmp-probe").rename(run.folder / "tmp-renamed").rmdir()
            sync(run.folder / run_folder.LOCK)
            sync_folder(run.folder)
            if aside := run_folder.archive_run(run.folder, config.resume == "never"):
                run.log.warn(f"RESUME=never: the earlier run in {run.folder} was moved into {aside.name}")
        store.delete_leftovers(run.folder / "checkpoints", run.log.warn, run.started_from)
        if run.started_from and not run.started_from.exists():  # delete_leftovers renamed it back
            run.started_from = run.started_from.with_name(run.started_from.name.removeprefix("replaced-"))
        if not resumes:  # the settings of a run that never saved a checkpoint
            (run.folder / "config.json").unlink(missing_ok=True)
            shutil.rmtree(run.folder / run_folder.SEGMENTS, ignore_errors=True)
        # The checkpoints that this run needs to continue: teacher, base or reference.
        needed = [identities[name]["folder"] for name in ("teacher", "reference_adapters")
                  if name in identities]
        if progress.base and (config.lora_enabled or config.training_stage in ("dpo", "grpo")):
            needed.append(progress.base)
        for place in map(Path, needed):
            if CHECKPOINT_NAME.fullmatch(place.name) and not is_inside(place, run.folder):
                try:
                    store.note_need(place, run.folder)
                except OSError as error:
                    run.log.warn(f"{place} is needed by this run, but that cannot be noted there "
                                 f"({error.strerror}); do not delete it")
        commit()  # cached now: the checkout may have changed when the first card is written

    step, pending = progress.step, progress.pending_metrics
    # The last step that is complete in metrics.jsonl, and the last one that was taken.
    steps = (step - (pending is not None), step) if resumes else (-1, 0)
    progress.wandb_run_id = progress.wandb_run_id or uuid.uuid4().hex[:8]
    run.ranks.on_rank0(clear)
    measured = pending or {} if resumes else {}
    run.ranks.raise_on_all(lambda: run.log.open(run.folder, *steps, measured))
    process.write_marker(process.RUN_FOLDER, str(run.folder.absolute()))
    restarted = {key: value for key, value in process.restart_info().items() if value and key != "settings"}
    run.log.event("start", step, world_size=run.ranks.world_size,
                  device=device_name(run.ranks.device), host=socket.gethostname(),
                  torch=torch.__version__, paddock=__version__, commit=commit() if run.ranks.is_rank0 else "",
                  seconds=time.time() - ACTIVITY.started, **run.log.previous, **restarted)


@collective
def is_folder_lost(run: Run) -> bool:
    return run.ranks.on_rank0(lambda: run.run_folder.is_lost)


def how_to_resume(run: Run) -> str:
    """Return the command that resumes this run in a later job."""
    flags = [" --resume auto"] * (run.config.resume == "never")
    if run.folder.name != run.config.run_name:
        flags.append(f" --run-name {run.folder.name}")
    return "the same command" + (f" with{''.join(flags)}" if flags else "")


@collective
def record_settings(run: Run) -> None:
    """Write the settings of this process's steps into the run's folder."""
    plan, first, settings = run.plan, run.progress.step + 1, run.config.public() | run.facts
    sources = run.inputs.rows.source_table(run.config.max_steps * run.config.rows_read)
    kept = {"sources": dict(plan.sources), "start": plan.start._asdict(), "identities": plan.identities}
    run.ranks.on_rank0(lambda: None if run.run_folder.is_lost else run_folder.write_segment(
        run.folder, first, settings, sources, kept))


@collective
def tensors_to_save(run: Run) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Return the weights and the optimizer's state, as tensors that read this rank's share of the rows."""
    model = run.model
    shard = run.shard = run.shard or RankShard(run.ranks, ranks_per_copy(model), model.config.head_dim,
                                               run.log.warn)
    trained = {name: parameter for name, parameter in named_parameters(model).items()
               if parameter.requires_grad or not run.config.lora_enabled}
    unused = model.source.unused_rows if model.source else {}
    weights = {name: shard.tensor(local_rows(parameter), parameter, saved_rows(name, parameter, model),
                                  unused.get(name, ())) for name, parameter in trained.items()}
    moments = {}
    for name, rows in run.optimizer.state_tensors().items():
        like = trained[name.rpartition(".")[0]]
        like = like if rows.ndim and is_divided(like) else rows
        moments[name] = shard.tensor(rows, like, saved_rows(name, like, model))
    return weights, moments


def files_of(run: Run, weights: Mapping[str, LazyTensor], moments: Mapping[str, LazyTensor]
             ) -> dict[str, TensorFile]:
    """Return the files of weights and optimizer state. Blocks of hashed rows contain whole heads."""
    config, vocab_size = run.model.config, run.inputs.tokenizer.vocab_size
    if run.config.lora_enabled:
        unused = max(map(len, run.model.source.unused_rows.values()), default=0)
        tensors = peft.to_peft(weights, config, vocab_size + unused)
        files = {peft.WEIGHTS_FILE: TensorFile(tensors, {"format": "pt"}, config.head_dim)}
    else:
        tensors = huggingface.to_huggingface(weights, config, vocab_size)
        files = huggingface.weight_files(tensors, config.head_dim)
    return files | {store.OPTIMIZER: TensorFile(moments, block_multiple=config.head_dim)}


@phase("save")
@collective
def save_checkpoint(run: Run, wait: bool = False) -> None:
    """Save the state after the last finished step, and delete old checkpoints.

    Unless `wait` or ASYNC_SAVE=false, training only stops for a copy of the state. A thread writes it, and
    `finish_saving` completes the checkpoint.
    """
    started, step = time.perf_counter(), run.progress.step
    finish_saving(run)
    config, progress, ranks, tokenizer = run.config, run.progress, run.ranks, run.inputs.tokenizer
    weights, moments = tensors_to_save(run)
    files, source, model_config = files_of(run, weights, moments), run.model.source, run.model.config
    state = {"progress": asdict(progress), "identity": run.inputs.identity(config, run.plan),
             "world_size": ranks.world_size, "settings": config.public(),
             "scaler": run.scaler.state_dict() if run.scaler else None, "val_loss": progress.val_loss}
    if source and source.dtype not in (None, "float32"):
        state["base_dtype"] = source.dtype
    if states := {type(each).__name__: content for each in run.extensions if (content := each.state_dict())}:
        state["extensions"] = states
    texts = {name: text for each in run.extensions for name, text in each.checkpoint_texts(run).items()}
    texts[store.STATE] = json.dumps(state, indent=1) + "\n"
    checkpoint = run.folder / "checkpoints" / f"step-{step:08d}"
    context = max(config.max_seq_len, source.context if source else 0)
    adapter = config.lora_enabled and peft.Adapter(
        {}, config, progress.base, progress.base_sha256, lora.trained_token_ids(run.model))

    def write_others(folder: Path) -> None:
        if adapter:
            peft.save_settings(folder, adapter, config, tokenizer)
        else:
            of_model = {name: file for name, file in files.items() if name != store.OPTIMIZER}
            huggingface.save_settings(folder, of_model, model_config, tokenizer, context)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")

    def begin() -> Optional[str]:
        if run.pruning:
            run.pruning.result(run.log.warn)
        size = sum(file.nbytes for file in files.values())
        return None if run.run_folder.is_lost else str(store.retrying(
            lambda: store.start_writing(checkpoint, files, size), run.log.warn))

    if (temporary := ranks.on_rank0(begin)) is None:
        save_in_new_folder(run)
    manifest = {name: state["progress"][name] for name in ("step", "val_loss", "val_items")}
    manifest["world_size"] = ranks.world_size
    run.saving = PendingSave(step, started, run.shard, files, write_others, manifest, checkpoint,
                             Path(temporary), run.saves_best)
    if wait or not config.async_save or not run.shard.allocate(weights | moments):
        return finish_saving(run)
    run.saving.start(files_of(run, run.shard.copy(weights), run.shard.copy(moments)))
    run.saving.blocked = time.perf_counter() - started
    run.log.event("save", step, seconds=run.saving.blocked, checkpoint=checkpoint.name)


@phase("save")
@collective
def finish_saving(run: Run) -> None:
    """Wait for the checkpoint that is being written, if there is one, complete it, and delete old ones.

    If writing it failed, every rank raises the error.
    """
    saving, run.saving = run.saving, None
    if saving is None:
        return
    config, checkpoint, warn = run.config, saving.folder, run.log.warn
    protected = [run.started_from] if run.started_from else []
    prune = partial(store.prune, checkpoint.parent, config.keep_last, config.keep_best, protected,
                    keep_every=config.keep_every)

    def finish() -> None:
        if run.run_folder.is_lost:
            raise CheckpointError(f"{run.folder} was renamed or deleted")
        store.finish_writing(saving.temporary, checkpoint, saving.details, hashed, warn)
        if saving.in_background:
            run.pruning = Background(prune)
        else:
            prune(warn)

    try:
        hashed = saving.written(warn)
        run.ranks.on_rank0(finish)
    except Exception as error:
        saving.remove()
        if not isinstance(error, CheckpointError) or not is_folder_lost(run):
            raise
        if not saving.in_background:
            save_in_new_folder(run)
        return  # the run stops after this step, and saves its state elsewhere
    if saving.step == run.progress.step:
        run.saved = checkpoint
    seconds = time.perf_counter() - saving.started
    waited = f"; training stopped for {saving.blocked:.1f} s" if saving.in_background else ""
    # On a terminal, the line of the validation says it.
    best, shown = (" (the best so far)", "") if saving.is_best else ("", None)
    run.log.info(f"Saved {checkpoint} in {seconds:.1f} s{waited}{best}", shown)
    if not saving.in_background:
        run.log.event("save", saving.step, seconds=seconds, checkpoint=checkpoint.name)
    run.log.event("saved", saving.step, seconds=seconds, checkpoint=checkpoint.name)
    for extension in run.extensions:
        extension.saved(run)


@collective
def save_in_new_folder(run: Run) -> NoReturn:
    """Save the state in a new folder, and end the run, whose own folder was renamed or deleted."""
    lost = run.folder
    with ExitStack() as stack:
        def choose() -> str:
            with disk_errors(lost):
                folder = run_folder.new_folder(lost)
            stack.enter_context(run_folder.lock_run(folder))
            return str(folder)

        run.run_folder = RunFolder(Path(run.ranks.on_rank0(choose)))
        save_checkpoint(run, wait=True)
    error = CheckpointError(f"{lost} was renamed or deleted during the run. The state after step "
                            f"{run.progress.step} is saved in a new folder, {run.folder}, without the "
                            f"earlier logs and checkpoints. To resume: {how_to_resume(run)}")
    error.on_all_ranks = True
    raise error


@contextmanager
def saves_end(run: Run) -> Iterator[None]:
    """A `with` block around training. An error on all ranks still completes the checkpoint being written."""
    try:
        yield
        finish_saving(run)
    except Exception as error:
        if run.ranks.world_size == 1 or getattr(error, "on_all_ranks", False):
            with suppress(CheckpointError):
                finish_saving(run)
        raise
    finally:
        for thread in (run.pruning, run.saving and run.saving.thread):
            if thread:
                thread.cancel()
        if run.saving:
            run.saving.remove()


def trained_bytes(model: Transformer) -> int:
    return sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
