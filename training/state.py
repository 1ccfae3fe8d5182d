"""Where a run stands: its inputs, its folder, its progress, and the way from and to a checkpoint."""

import math
import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

import lora
from checkpoint import hf_format, peft_format, store
from checkpoint.resume_rules import identity
from checkpoint.schema import SavedProgress
from common.errors import CheckpointError
from common.heartbeat import HEARTBEAT
from config import Config, is_plain_name
from data_pipeline.row_order import RowOrder
from dataloaders import Rows, StepLoader, cache_of, open_rows, validation_batches
from hellaswag_utils import prepare_tasks, read_items
from model import Transformer, padded
from model_utils import cut_padding, load_weights, restore_padding
from objectives.base import Objective
from parallel.collectives import Ranks, StopSignals
from tokenizer import load_tokenizer
from training import diagnostics, run_folder
from training.optim import Optimizer
from training.run_folder import SEGMENTS, RunFolder
from training.run_log import RunLog, naming_refusals
from training.start import Start, find_checkpoint, is_inside, start_at


@dataclass(frozen=True)
class Inputs:
    """What a run reads: the tokenizer, rows to learn from, rows held out, and tasks."""

    tokenizer: Any
    rows: Rows
    validation_rows: Optional[Rows]
    tasks: Any  # None without HELLASWAG_PATH
    fingerprint: str
    description: str

    def order(self, config: Config, ranks: Ranks) -> RowOrder:
        """Which rows this rank reads in each step."""
        return RowOrder(len(self.rows), config.rows_per_step, config.micro_batch_size, config.seed, ranks.rank, ranks.world_size)

    def identity(self, config: Config) -> dict[str, Any]:
        """What is read, by content, for a resumed run to be held against."""
        return identity(config, self.fingerprint, self.tokenizer.sha256)

    def used_ids(self) -> list[int]:
        """The ids that occur in what is learned from, ascending; reads everything."""
        used = np.zeros(self.tokenizer.vocab_size, bool)
        for block in self.rows.token_set.blocks():
            used[block] = True
        return np.flatnonzero(used).tolist()

    def training_batches(self, config: Config, ranks: Ranks, objective: Objective, first_step: int) -> StepLoader:
        """This rank's micro-batches of every step from `first_step` on, with what the objective counts in them."""
        return StepLoader(self.rows, self.order(config, ranks), ranks.device, objective.count, first_step, config.prefetch_steps)

    def validation_batches(self, config: Config, ranks: Ranks):
        """This rank's share of the fixed validation rows."""
        rows = min(config.validation_rows, len(self.validation_rows))
        return validation_batches(self.validation_rows, rows, config.micro_batch_size, ranks.device, ranks.rank, ranks.world_size)


def read_inputs(config: Config, verify: bool) -> Inputs:
    """Open everything that the settings name.

    Args:
        verify: hash and scan the data as VERIFY_DATA says; one rank does it for all.
    Raises:
        DataError: a file cannot be used.
        SettingsError: CACHE_DIR cannot be written.
    """
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer_backend)
    if verify:
        cache_of(config).check()
    how = config.verify_data if verify else "never"
    train = open_rows(config, "train", tokenizer, how)
    validation = open_rows(config, "validation", tokenizer, how) if config.validate_every else None
    tasks = None
    if config.hellaswag_path and config.hellaswag_every:
        items = read_items(config.hellaswag_path)[:config.hellaswag_examples or None]
        tasks = prepare_tasks(items, tokenizer, config.max_seq_len)
    path = getattr(config, f"{config.training_stage}_data_path")
    held_out = f", {validation.describe()} held out" if validation else ""
    return Inputs(tokenizer, train, validation, tasks, train.fingerprint, f"{train.describe()}{held_out} from {path}")


def open_inputs(config: Config, ranks: Ranks) -> Inputs:
    """The same on every rank, verified by rank 0. Collective: every rank must call it."""
    verified = ranks.on_rank0(lambda: read_inputs(config, verify=True))
    return ranks.raise_on_all(lambda: verified or read_inputs(config, verify=False))


@dataclass
class Progress(SavedProgress):
    """How far a run is, and what follows from that."""

    step: int = 0  # a run that begins

    @property
    def updates(self) -> int:
        """Steps that changed the weights, by which the schedule goes."""
        return self.step - self.skipped_steps

    @property
    def last_complete_step(self) -> int:
        """The last step whose line in metrics.jsonl is complete."""
        return self.step if self.pending_metrics is None else self.step - 1

    def spike_limit(self, config: Config) -> float:
        """The loss above which the next step's stands out from the recent ones."""
        return diagnostics.spike_limit(self.recent_losses, config.loss_spike_window, config.loss_spike_threshold)

    def robust_z_score(self, loss: float, config: Config) -> float:
        """How far a loss is above the recent ones, in robust standard deviations."""
        return diagnostics.robust_z_score(loss, self.recent_losses, config.loss_spike_window)

    def note_validation(self, loss: float, skip_steps: int) -> bool:
        """Whether this validation loss is a new best; NaN never is."""
        self.val_loss = loss
        if math.isfinite(loss) and (self.best_val_loss is None or loss < self.best_val_loss):
            self.best_val_loss, self.best_step, self.validations_without_best = loss, self.step, 0
            return True
        if self.step > skip_steps:
            self.validations_without_best += 1
        return False


class StepResult(NamedTuple):
    """What came of a step, the same on every rank."""

    loss: float  # the mean over all that the objective counts in the whole batch
    metrics: dict[str, float]  # the objective's own, likewise
    count: int
    grad_norm: float
    finite: bool
    updated: bool  # False where fp16 overflowed, as it does now and then by design, and where a loss spike is skipped
    spike: float  # how far the loss stands out, in robust standard deviations; 0 where it does not
    stop: bool  # a rank was signalled


@dataclass
class Run:
    """Everything that one rank of a run holds."""

    config: Config
    ranks: Ranks
    signals: StopSignals
    inputs: Inputs
    place: RunFolder
    model: Transformer
    optimizer: Optimizer
    scaler: Optional[torch.amp.GradScaler]
    progress: Progress
    objective: Objective
    started_from: Optional[Path]  # a checkpoint, which retention leaves alone
    log: RunLog
    saved: Optional[Path] = None  # the checkpoint of the state as it is now

    @property
    def folder(self) -> Path:
        """The run's folder, where it was last seen."""
        return self.place.path

    @property
    def finished(self) -> bool:
        """Whether no step is left to take."""
        patience = self.config.early_stopping_patience
        return self.progress.step >= self.config.max_steps or 0 < patience <= self.progress.validations_without_best

    def why_early(self) -> str:
        """Why the run ends before MAX_STEPS, in words."""
        progress = self.progress
        best = f"loss below {progress.best_val_loss} (step {progress.best_step})" if progress.best_step else "finite loss"
        return (f"Early stopping: {progress.validations_without_best} validations without a {best}; to go on, raise "
                "EARLY_STOPPING_PATIENCE.")

    def advance(self, result: StepResult) -> None:
        """Count a step, which is finished but for what is due after it."""
        self.progress.step += 1
        self.progress.tokens_seen += self.config.total_batch_size
        self.progress.skipped_steps += not result.updated
        if math.isfinite(result.loss):
            self.progress.recent_losses = [*self.progress.recent_losses, result.loss][-self.config.loss_spike_window:]
        self.progress.pending_metrics, self.progress.val_loss = {}, None
        self.saved = None


def begin(run: Run) -> None:
    """Write into the run's folder for the first time, where nothing is left that could refuse the start: move aside what
    RESUME=never asks for, clean up after a crash, and open the logs. Collective: every rank must call it.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    def clear() -> None:
        with naming_refusals(run.folder):
            store.check_writable(run.folder, 0)
            if aside := run_folder.move_aside(run.folder, run.config.resume == "never"):
                run.log.warn(f"the run that was in {run.folder} is moved aside into {aside.name}, for RESUME=never")
        store.sweep(run.folder / "checkpoints", run.log.warn, run.started_from)
        if run.started_from and not run.started_from.exists():  # it has got back its name
            run.started_from = run.started_from.with_name(run.started_from.name.removeprefix("replaced-"))
        if not goes_on:  # the settings of a run that has come to no checkpoint
            (run.folder / "config.json").unlink(missing_ok=True)
            shutil.rmtree(run.folder / SEGMENTS, ignore_errors=True)

    goes_on = run.started_from is not None and is_inside(run.started_from, run.folder)
    taken = (run.progress.last_complete_step, run.progress.step) if goes_on else (-1, 0)
    run.ranks.on_rank0(clear)
    run.ranks.raise_on_all(lambda: run.log.open(run.folder, *taken))


def follow_folder(run: Run) -> bool:
    """Whether the run's folder is still there; where somebody has renamed it, the run goes on in it under its new name.

    Collective: every rank must call it.
    """
    before, found = run.folder, run.ranks.broadcast(str(run.place.find() or ""))
    if found in ("", str(before)):
        return found != ""
    run.place.path = Path(found)
    for name in ("saved", "started_from"):
        path = getattr(run, name)
        if path and path.is_relative_to(before):
            setattr(run, name, run.folder / path.relative_to(before))
    HEARTBEAT.folder = run.folder / "log"
    run.log.follow(run.folder, run.progress.step)
    run.log.warn(f"{before} was renamed to {run.folder} while the run goes on, and it goes on there. A later job goes on with "
                 f"{how_to_go_on(run)}")
    return True


def how_to_go_on(run: Run) -> str:
    """The command with which a later job goes on with this run."""
    config, flags = run.config, []
    if config.resume == "never":
        flags.append("--resume auto")
    if run.folder.name != config.run_name:
        flags.append(f"--run-name {shlex.quote(run.folder.name)}")
    if run.folder.absolute().parent != Path(config.output_dir).absolute():
        flags.append(f"--output-dir {shlex.quote(str(run.folder.parent))}")
    plain = "" if is_plain_name(run.folder.name) else ", once the folder has a plain name"
    return "the same command" + (f" with {' '.join(flags)}{plain}" if flags else "")


def keep_settings(run: Run) -> None:
    """Write down what the step that follows is taken with, the first one of this process. Collective: every rank must call it."""
    follow_folder(run)
    run.ranks.on_rank0(lambda: run_folder.write_segment(run.folder, run.progress.step + 1, run.config.public()))


def check_room(run_dir: Path, model: Transformer, ranks: Ranks) -> None:
    """See that there is room for a checkpoint, before hours are spent on it. Collective: every rank must call it.

    Raises:
        CheckpointError: it cannot; names the folder, the bytes needed and the bytes free.
    """
    weights = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    # AdamW's two moments, of which Muon has one.
    ranks.on_rank0(lambda: store.check_room(run_dir / "checkpoints", 3 * weights, 2 * weights))


def find_start(config: Config, inputs: Inputs, run_dir: Path, ranks: Ranks) -> Start:
    """What RESUME and the checkpoint settings ask for. Collective: every rank must call it.

    Raises:
        CheckpointError: it is missing, damaged, or belongs to another run than the settings describe.
        SettingsError: there is nothing to begin with.
    """
    return start_at(*find_checkpoint(config, run_dir, ranks), config, inputs.identity(config), run_dir, ranks)


def place_weights(config: Config, start: Start, model: Transformer, inputs: Inputs, dtype: torch.dtype, ranks: Ranks) -> None:
    """Put the start's weights into the model, and adapters on it if they are asked for.

    Collective: every rank must call it.

    Raises:
        CheckpointError: they are of another shape than the settings say, or the base is not what the adapters were made for.
    """
    if not config.lora_enabled:
        if start.folder is not None:
            ranks.raise_on_all(lambda: load_weights(start.folder, model))
        return

    used_ids: list[int] = []
    if config.lora_train_tokens == "auto" and not start.own:
        used_ids = ranks.broadcast(ranks.on_rank0(inputs.used_ids))

    def place() -> None:
        load_weights(start.base, model)
        adapter = start.own and peft_format.load_adapter_folder(start.folder, config, padded(model.vocab_size))
        token_ids = adapter.token_ids if adapter else token_ids_to_train(config, inputs, model, used_ids)
        lora.add_adapters(model, config, torch.Generator().manual_seed(config.seed), token_ids)
        lora.keep_base_in(model, dtype)
        if adapter:
            adapter.check_base(start.base_sha256, start.base)
            lora.load_adapter_state_dict(model, adapter.state)

    ranks.raise_on_all(place)


def token_ids_to_train(config: Config, inputs: Inputs, model: Transformer, used_ids: Sequence[int]) -> hf_format.TokenIds:
    """What LORA_TRAIN_TOKENS asks for, of the embedding and of the head where that is another matrix."""
    ids = lora.tokens_to_train(config.lora_train_tokens, used_ids, inputs.tokenizer.special_ids, model.tok_embeddings.weight)
    return dict.fromkeys(["tok_embeddings"] + (["output"] if model.output is not None else []), ids)


def resume(config: Config, start: Start, model: Transformer, optimizer: Optimizer, scaler) -> Progress:
    """The progress to go on from, with the optimizer as it was."""
    progress = Progress(**start.state["progress"]) if start.state else Progress()
    if start.state:
        optimizer.load_state_tensors(restore_padding(store.read_optimizer(start.folder), model))
        if scaler is not None and start.state["scaler"]:
            scaler.load_state_dict(start.state["scaler"])
    if not start.own and config.start_step is not None:  # what was counted along with the steps is counted anew
        progress = Progress(step=config.start_step, tokens_seen=config.start_step * config.total_batch_size,
                            recent_losses=progress.recent_losses)
    return replace(progress, **start.remembered)


def save_checkpoint(run: Run) -> None:
    """Write a checkpoint of the last finished step, and drop what retention lets go. Collective: every rank must call it.

    Raises:
        CheckpointError: it could not be written; or it is, but the run's folder was gone, and it lies in a new one.
    """
    def lost() -> None:
        raise CheckpointError(f"{run.folder} was deleted while the run went on, or moved to where this job cannot see it. The "
                              f"state after step {run.progress.step} is saved in a new folder of that name, without what was "
                              f"told before. To go on: {how_to_go_on(run)}")

    HEARTBEAT.enter("save", run.progress.step)
    if follow_folder(run):
        return write_checkpoint(run)
    with ExitStack() as stack:
        run.ranks.on_rank0(lambda: stack.enter_context(run_folder.make_again(run.folder)))
        write_checkpoint(run)
    run.ranks.on_rank0(lost)


def write_checkpoint(run: Run) -> None:
    """The same in a folder that is there. Collective: every rank must call it."""
    config, progress, started = run.config, run.progress, time.perf_counter()
    state = {"progress": asdict(progress), "identity": run.inputs.identity(config), "world_size": run.ranks.world_size,
             "settings": config.public(), "scaler": run.scaler.state_dict() if run.scaler else None,
             "val_loss": progress.val_loss}

    def write_model(folder: Path) -> None:
        if config.lora_enabled:
            peft_format.save_adapter_folder(folder, lora.adapter_state_dict(run.model), config, config, progress.base,
                                              progress.base_sha256, run.inputs.tokenizer, lora.trained_token_ids(run.model))
            return
        hf_format.save_model_folder(folder, run.model.state_dict(), config, run.inputs.tokenizer, config.max_seq_len)

    folder = store.save(run.folder / "checkpoints", progress.step, run.ranks, write_model, state,
                              cut_padding(run.optimizer.state_tensors(), run.model),
                              weight_bytes=sum(weight.nbytes for weight in run.model.parameters() if weight.requires_grad),
                              warn=run.log.warn)
    protected = [run.started_from] if run.started_from else []
    run.ranks.on_rank0(lambda: store.prune(run.folder / "checkpoints", config.keep_last, config.keep_best, protected,
                                                   run.log.warn))
    run.saved = folder
    run.log.info(f"Saved {folder} in {time.perf_counter() - started:.1f} s")
