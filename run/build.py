"""`build` constructs the run that a plan describes, on every rank; it makes no decisions.

`open_run` is the start: rank 0 completes the plan (facts.py), the others get it, and all build. Training,
replay and --check share these functions. Only the lock is written into the run's folder.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

import dataloaders
import lora
import model_utils
from checkpoint import peft, store
from checkpoint.manifest import MANIFEST
from checkpoint.model_json import hub_model, name_of_download
from checkpoint.schema import Progress
from checkpoint.tensors import read_optimizer
from common.activity import ACTIVITY
from common.errors import CheckpointError, DataError, PaddockError
from config import extension_module
from learn import objectives
from learn.optim import Optimizer
from learn.reference_cache import StoredReference
from model import Transformer, evaluation_mode, padded
from model_kernels.attention import choose_kernel
from model_kernels.head import CHUNK_CHOICES
from parallel.fsdp import DeviceMesh
from parallel.ranks import Interrupted, Ranks, RunContext, StopSignals, collective, meeting
from plan.identity import differences, model_identity
from plan.make import Plan
from plan.starts import is_inside, names_its_start
from run import facts
from run.extensions import find, load_extensions
from run.folder import RunFolder
from run.log import RunLog
from run.run import Inputs, Run, trained_bytes
from run.saving import restore_padding


class Base(NamedTuple):
    """The model that a run started from: the base of its adapters, the reference for preferences."""

    find: Callable[[], Path]  # if its outputs are stored, only on rank 0, which may hash its weights
    sha256: Optional[str] = None  # of its weights
    layers: Optional[int] = None
    adapters: Mapping[str, str] = {}  # folder and hash of those with which the run started


@contextmanager
@collective
def open_run(planned: Optional[Plan | PaddockError], remake: facts.Remake) -> Iterator[Run]:
    """Yield a run that is ready for its next step. Raises Interrupted if a rank received a stop signal.

    `planned` is what make_plan returned or raised on rank 0; it is not used on other ranks.
    """
    extension_module("hang_report")  # before there can be a hang
    decided: list[tuple[Plan, RunFolder, facts.Opened]] = []  # on rank 0
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())

        def decide_here() -> dict[str, Any]:
            if not isinstance(planned, Plan):
                raise planned
            decided.append(facts.decide(planned, remake, stack))
            plan, folder, _ = decided[0]
            device = facts.prepare_device(plan.config)
            return {"plan": plan.to_json(), "folder": str(folder.path), "device": device.type,
                    "timeout": plan.config.distributed_timeout}

        ranks, terms = stack.enter_context(meeting(decide_here))
        if decided:
            plan, folder, opened = decided[0]
        else:
            plan = on_this_machine(Plan.from_json(terms["plan"]))
            folder, opened = RunFolder(Path(terms["folder"])), None
        ACTIVITY.stacks_folder = folder.path / "log"
        log = RunLog(plan.config, ranks.rank, ranks.device.type)
        stack.push(lambda error, *_: log.close(finished=error is None and signals.received is None))
        for message in plan.warnings:
            log.warn(message)
        for message in plan.notes:
            log.info(message)
        context = RunContext(ranks, signals, log)
        if ranks.local_rank == 0 and not ranks.is_rank0:
            facts.provide_sample(plan.config)
        try:
            run = build(plan, context, folder, opened)
            for extension in run.extensions:
                stack.push(lambda _, error, trace, each=extension: each.run_end(run, error))
            context.leave_if_stopped()
        except Interrupted:
            log.info("Stopped by a signal before the first step; nothing was changed.")
            raise
        stack.push(lambda _, error, trace: log.event("end", run.progress.step, reason=run.why_ended(error)))
        yield run


@collective
def build(plan: Plan, context: RunContext, folder: RunFolder, opened: Optional[facts.Opened] = None,
          for_replay: bool = False) -> Run:
    """Return the run of a plan in memory. All errors of the ranks meet in one agreement.

    With `for_replay`, the run is never saved, and its weights may not be finite.
    """
    config, start, ranks = plan.config, plan.start, context.ranks
    facts.prepare_device(config)  # on every rank
    mesh = model_utils.make_mesh(config, ranks)

    def construct() -> tuple[Run, Base]:
        inputs, extensions = opened or open_on_this_machine(plan, ranks, context.log.warn)
        inputs.tokenizer.generation = dict(plan.generation)
        dtype = model_utils.choose_dtype(config, ranks.device.type)
        for purpose in ("documents" if config.document_mask else "causal", "mask"):
            choose_kernel(purpose, config, ranks.device, dtype)  # refuse a kernel before anything is written
        if config.lora_enabled:
            generator = torch.Generator().manual_seed(config.seed)
            model, adapter = adapted_on_meta(plan, inputs.tokenizer.vocab_size, dtype, generator)
            model_utils.allocate_model(model, config, ranks, mesh)
            model_utils.load_weights(Path(start.base), model, layers=start.layers)
            lora.init_adapters(model, generator)
            if adapter:
                lora.load_adapter_state_dict(model, adapter.state)
        else:
            model = model_utils.build_model(config, inputs.tokenizer.vocab_size, ranks, dtype, mesh)
            if start.folder is not None:
                finite = not (for_replay and start.kind == "continue")
                model_utils.load_weights(Path(start.folder), model, finite, start.layers)
        if config.train_only:
            trained = {f"layers.{layer}" for layer in config.train_only.split(",")}
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(".".join(name.split(".")[:2]) in trained)
        optimizer = Optimizer(model, config, ranks)
        scaler = torch.amp.GradScaler("cuda") if dtype == torch.float16 else None
        state = start.state
        progress = restore(plan, state, folder.path, model, optimizer, scaler)
        for each in extensions:
            each.load_state_dict(state.get("extensions", {}).get(type(each).__name__, {}))
        if ranks.is_rank0 and not for_replay and progress.step < config.max_steps:
            size = trained_bytes(model)  # AdamW keeps two more values of each parameter, Muon one
            store.check_room(folder.path / "checkpoints", 3 * size, 2 * size)
        run = Run(config, context, inputs, folder, model, optimizer, scaler, progress,
                  objectives.NextToken(), start.folder and Path(start.folder),
                  extensions=() if for_replay else extensions, plan=plan)

        def find() -> Path:
            known = start.base or start.kind == "from" and start.folder
            return Path(known or facts.find_base(config, asdict(progress), folder.path, context.log.warn))

        base = Base(find, progress.base_sha256, start.layers, plan.identities.get("reference_adapters", {}))
        run.objective = choose_objective(run, base, mesh)
        return run, base

    run, base = ranks.raise_on_all(construct)
    if config.training_stage == "dpo" and objectives.reference_is_stored(config):
        run.inputs = with_stored_reference(run, base, mesh)
    if reason := model_utils.compile_where_possible(run.model, config, ranks.device.type):
        context.log.warn(f"no torch.compile: {reason}")
    for choose in CHUNK_CHOICES if ranks.device.type == "cuda" else ():
        choose(run.model, config, run.model.compute_dtype.itemsize, ranks.device)
    run.order = run.inputs.order(config, ranks)
    return run


def on_this_machine(plan: Plan) -> Plan:
    """Return the plan with the local folders of hub models, which each machine downloads once."""
    def local(folder: Optional[str]) -> Optional[str]:
        name = folder and not os.path.exists(folder) and name_of_download(Path(folder))
        return str(hub_model(name)) if name else folder

    teacher = plan.identities.get("teacher")
    identities = dict(plan.identities)
    if teacher:
        identities["teacher"] = {**teacher, "folder": local(teacher["folder"])}
    start = plan.start._replace(folder=local(plan.start.folder), base=local(plan.start.base))
    return replace(plan, start=start, identities=identities)


def open_on_this_machine(plan: Plan, ranks: Ranks, warn: Callable[[str], Any]) -> facts.Opened:
    """Open the inputs of a rank; the first one of each machine verifies that its copies are the plan's."""
    verifies = ranks.local_rank == 0
    opened = facts.open_inputs(plan.config, verifies, load_extensions(plan.config, warn))
    if other := differences(plan.identities["data"], facts.identity_of_data(opened.inputs)):
        raise DataError(f"{plan.config.data_path} is not the data of the first machine (other "
                        f"{', '.join(other)}); copy it to this machine")
    if verifies and plan.start.folder:
        folder, expected = Path(plan.start.folder), plan.identities.get("start", {})
        if (folder / MANIFEST).exists():
            store.verify(folder, plan.start.kind == "continue")
        if expected and differences(expected, facts.identity_of_start(folder)):
            raise CheckpointError(f"{folder} is another checkpoint than on the first machine; copy it to "
                                  "this machine")
    return opened


def adapted_on_meta(plan: Plan, vocab_size: int, dtype: torch.dtype, generator: torch.Generator
                    ) -> tuple[Transformer, Optional[peft.Adapter]]:
    """Return a base with adapters on the meta device, and the adapters of the start, if any."""
    config, start, token_ids = plan.config, plan.start, plan.token_ids
    model, adapter = model_utils.model_on_meta(config, vocab_size, dtype), None
    model.unused_untrained_ids = list(plan.untrained_ids)
    if start.has_adapters:
        ids = model.vocab_size
        adapter = peft.load_adapter_folder(Path(start.folder), config, padded(ids), ids)
        adapter.check_base(plan.identities["base"]["weights"], start.base)
        token_ids = adapter.token_ids
    lora.add_adapters(model, config, generator, token_ids)
    lora.cast_base(model, dtype)
    return model, adapter


def restore(plan: Plan, state: dict[str, Any], run_dir: Path, model: Transformer, optimizer: Optimizer, scaler
            ) -> Progress:
    """Restore the state of optimizer and loss scaler; return the progress, and where the run started."""
    config, start, progress = plan.config, plan.start, Progress(0)
    if state:
        progress = Progress(**state["progress"])
        tensors = read_optimizer(Path(start.folder))
        optimizer.load_state_tensors(restore_padding(tensors, model))
        if scaler is not None and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
    if not start.is_own and config.start_step is not None:  # restart all counters that depend on the step
        progress = Progress(step=config.start_step, tokens_seen=config.start_step * config.total_batch_size,
                            recent_losses=progress.recent_losses, base=progress.base,
                            base_sha256=progress.base_sha256, base_beside=progress.base_beside)

    # By these fields, a later start finds the model that the run started from.
    found, base = {}, None
    if start.kind == "from":
        found, base = {"wandb_run_id": None, "begun_from": start.named}, Path(start.base or start.folder)
    elif start.kind == "continue":
        recorded, folder = state["progress"], Path(start.folder)
        home = run_dir if is_inside(folder, run_dir) else folder.resolve().parents[1]
        if recorded.get("base_beside") and home != run_dir:  # a checkpoint of another run
            found["base_beside"] = os.path.relpath(
                (home / recorded["base_beside"]).resolve(), run_dir.resolve())
        if start.named is not None and not names_its_start(start.named, recorded, run_dir):
            local_steps = [place for place in store.places(start.named, run_dir)
                           if place.is_dir() and is_inside(place, run_dir)]
            found["begun_from"] = local_steps[0].name if local_steps else start.named
        base = start.base and Path(start.base)
    if base is not None:
        found |= {"base": str(base.resolve()), "base_sha256": plan.identities["base"]["weights"],
                  "base_beside": os.path.relpath(base.resolve(), run_dir.resolve())}
    return replace(progress, **found)


def choose_objective(run: Run, base: Base, mesh: Optional[DeviceMesh] = None) -> objectives.Objective:
    """Return the objective with the models that run in each step, such as a reference."""
    config, stage, reference = run.config, run.config.training_stage, None
    may_compare = stage in ("dpo", "grpo")
    if may_compare and objectives.reference_is_stored(config):
        reference = objectives.stored_reference
    elif may_compare and objectives.reference_is_live(config):
        compute = objectives.pair_logprobs if stage == "dpo" else objectives.token_logprobs
        if config.lora_enabled and not base.adapters:  # their base is a reference without extra memory
            reference = partial(logprobs_without_adapters, run.model, compute=compute)
        else:
            frozen = load_reference(base.find(), run, base, mesh)
            reference = partial(objectives.frozen_logprobs, frozen, compute=compute)
    if stage == "dpo":
        objective = objectives.PREFERENCE_OBJECTIVES[config.preference_objective]
        return objective(config, reference, run.model, run.ranks.all_gather_json)
    if config.distillation_enabled or stage == "grpo":
        extension = "distillation" if config.distillation_enabled else "online"
        return find(extension, f"TRAINING_STAGE={stage}").objective_of(run, reference, mesh)
    return objectives.NextToken()


def load_reference(folder: Path, run: Run, base: Base, mesh: Optional[DeviceMesh]) -> Transformer:
    """Return the model that a run started from, frozen."""
    config, dtype, adapter = run.config, run.model.compute_dtype, None
    reference = model_utils.model_on_meta(config, run.inputs.tokenizer.vocab_size, dtype)
    reference.requires_grad_(False)
    if base.adapters:
        adapter = peft.load_adapter_folder(Path(base.adapters["folder"]), config,
                                           padded(reference.vocab_size), reference.vocab_size)
        lora.add_adapters(reference, config, torch.Generator(), adapter.token_ids)
    lora.cast_base(reference, dtype)
    model_utils.allocate_model(reference, config, run.ranks, mesh)
    model_utils.load_weights(folder, reference, layers=base.layers)
    if adapter:
        lora.load_adapter_state_dict(reference, adapter.state)
    model_utils.compile_where_possible(reference, config, run.ranks.device.type)
    return reference.requires_grad_(False).eval()


@collective
def with_stored_reference(run: Run, base: Base, mesh: Optional[DeviceMesh] = None) -> Inputs:
    """Return the inputs with the reference's log-probabilities, which are computed now if they are missing.

    Raises Interrupted if a rank received a stop signal.
    """
    config, inputs = run.config, run.inputs
    identity = model_identity(base.sha256, config)
    provenance = {"weights_sha256": base.sha256, "config_sha256": identity["config"],
                  "compute_dtype": str(run.model.compute_dtype)}
    if base.adapters:
        provenance["adapters"] = f"{base.adapters['sha256']} {config.lora_alpha:g} {config.lora_rslora}"
    load = cache(lambda folder: load_reference(folder, run, base, mesh))
    reference = StoredReference(provenance, base.find, load, dataloaders.cache_of(config), run.context)

    def attach(split: str, rows: Optional[dataloaders.Rows], count: int, seed: Optional[int] = None):
        read = iter(rows.first_batches(count, seed, config.micro_batch_size) if rows else ())
        return rows and rows.map(lambda source: reference.of_rows(source, next(read), split))

    rows = attach("train", inputs.rows, config.max_steps * config.rows_read, config.row_seed)
    held_out = attach("validation", inputs.validation_rows, config.validation_rows)
    return replace(inputs, rows=rows, validation_rows=held_out)


def logprobs_without_adapters(model: Transformer, batch, compute: Callable) -> Tensor:
    """Return the log-probabilities that `compute` returns for a model without its adapters."""
    with lora.disable_adapters(model), evaluation_mode(model):
        return objectives.frozen_logprobs(model, batch, compute)
