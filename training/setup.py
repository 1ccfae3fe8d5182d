"""How a run is set up, up to its first step; training, replay and --check all go this way.

Nothing in the run's folder is written here except its lock.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import torch

import lora
from checkpoint import hf_format, peft_format, store
from common.errors import SettingsError
from common.heartbeat import HEARTBEAT
from config import Config
from data_pipeline.held_out import read_held_out
from dataloaders import cache_of, open_rows
from hellaswag_utils import read_choice_set
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
    read_head,
    restore_padding,
)
from parallel.collectives import Interrupted, Ranks, RunContext, StopSignals, joined_ranks
from settings.load import Loaded
from tokenizer import load_tokenizer
from training.build_objective import Base, choose_objective
from training.optim import Optimizer
from training.run_folder import RunFolder, open_run_folder
from training.run_log import FINISH_SECONDS, LEAVE_SECONDS, RunLog
from training.start import Start, find_checkpoint, start_from
from training.state import Inputs, Progress, Run, trained_bytes, write_report
from training.text_scores import import_scorers


def prepare_device(config: Config) -> torch.device:
    """The device to compute on, with torch's kernels chosen as DETERMINISTIC says.

    Raises:
        SettingsError: the settings need another device.
    """
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
    Raises:
        DataError: a file cannot be used.
        SettingsError: CACHE_DIR cannot be written.
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
    Raises:
        DataError: a file cannot be used.
        SettingsError: GENERATION_EVAL_EVERY needs a package that is not installed.
    """
    rows, held_out = None, []
    if config.validate_every or config.generation_eval_every:
        rows = open_rows(config, "validation", tokenizer, verify)
    if config.generation_eval_every:
        if verify != "never":  # one rank scores for all
            import_scorers()
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
    Raises:
        CheckpointError: the checkpoint is missing, damaged, or belongs to a run with other settings.
        SettingsError: there is nothing to start from.
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

    Raises:
        CheckpointError: the base has another shape than the settings, or the adapters belong to another base.
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
                    ) -> tuple[Transformer, Optional[peft_format.Adapter]]:
    """The same without memory, and the adapters of the start, if any. Collective: every rank must call it."""
    model = model_on_meta(config, inputs.tokenizer.vocab_size, dtype)
    adapter, token_ids = None, {}
    if start.own:
        rows = padded(model.vocab_size)
        adapter = ranks.raise_on_all(lambda: peft_format.load_adapter_folder(start.folder, config, rows))
        ranks.raise_on_all(lambda: adapter.check_base(start.base_sha256, start.base))
        token_ids = adapter.token_ids
    elif config.lora_train_tokens != "none":
        token_ids = ranks.broadcast(ranks.on_rank0(lambda: token_ids_to_train(config, inputs, start.base)))
    ranks.raise_on_all(lambda: lora.add_adapters(model, config, generator, token_ids))
    lora.cast_base(model, dtype)
    return model, adapter


def token_ids_to_train(config: Config, inputs: Inputs, base: Path) -> hf_format.TokenIds:
    """The rows that LORA_TRAIN_TOKENS selects, of the embedding and of an untied head."""
    used_ids = inputs.used_ids() if config.lora_train_tokens == "auto" else []
    head = read_head(base, config, inputs.tokenizer.vocab_size)
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
