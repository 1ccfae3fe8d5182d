"""The start of a run: `open_run` locates a checkpoint, adopts its model shape, builds and restores the run.

Training, replay and --check share this path. It writes nothing into the run's folder except the lock.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

import dataloaders
import lora
import model_utils
from checkpoint import huggingface, peft, store
from checkpoint.manifest import examine, fault_in, fault_of
from checkpoint.resume_rules import assignments, check_changes
from common.activity import ACTIVITY
from common.errors import CheckpointError, DataError, SettingsError
from common.text import ROOT, command, counted
from config import (
    FEED_FORWARD,
    MODEL_SETTINGS,
    SAMPLE,
    Config,
    extension_module,
    mps_rules,
    numeric_rules,
    rules,
    shape_rules,
)
from data_pipeline.templates import text_tokenizer
from hellaswag_utils import read_choice_set
from learn import objectives
from learn.optim import Optimizer
from learn.reference_cache import OutputStore, with_reference
from learn.teacher import find_teacher, load_teacher
from model import Transformer, evaluation_mode, padded
from model_kernels.attention import choose_kernel
from model_kernels.head import choose_head_chunk
from parallel.ranks import Interrupted, Ranks, RunContext, StopSignals, collective, joined_ranks
from plan.derived import RECIPE_WIDTH, SMALL_MODEL, settings_of_data
from plan.layers import Settings, assigned
from run.extensions import load_extensions
from run.folder import RunFolder, earlier_runs, is_inside, open_run_folder
from run.log import RunLog
from run.run import Inputs, Progress, Run, trained_bytes
from tokenizer import SUPPRESSED, load_tokenizer, read_generation

MOST_READ_TOKENS = 5 * 10**9  # about 20 seconds; in more tokens, each control token counts as seen
# The checkpoint that a run starts from (None = initial weights), whether this run wrote it, and warnings.
Found = tuple[Optional[str], bool, list[str]]


class Start(NamedTuple):
    """The settings and files that a run starts with."""

    config: Config  # with the shape of the start model
    folder: Optional[Path]  # a checkpoint or model folder; None = initial weights
    is_own: bool  # written by this run
    state: dict[str, Any]  # the trainer state to resume; empty if optimizer and step restart
    notes: list[str]
    warnings: list[str]
    base: Optional[Path] = None  # current location of the model that the run started from
    remembered: Mapping[str, Any] = {}  # fields of Progress that let a later start find it


def provide_sample(config: Config, may_write: bool) -> None:
    """Create the sample if the settings name its files and it is missing. Local rank 0 does so for all."""
    named = (config.tokenizer_path, config.hellaswag_path, config.data_path)
    if os.path.exists(SAMPLE) or not any(path and Path(path).is_relative_to(SAMPLE) for path in named):
        return
    if not may_write:
        raise DataError(f"the sample data is not in {SAMPLE} yet; start the run, which creates it, or run "
                        f"{command('scripts/make_sample.py', '--folder', SAMPLE)}")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        script = ROOT / "scripts" / "make_sample.py"
        if subprocess.run([sys.executable, str(script), "--folder", SAMPLE]).returncode:
            raise DataError(f"could not create the sample data in {SAMPLE}; see the error above")


@contextmanager
@collective
def open_run(loaded: Settings) -> Iterator[Run]:
    """Yield a run that is ready for its next step. Raises Interrupted if a rank received a stop signal."""
    device = prepare_device(loaded.config)
    extension_module("hang_report")  # before there can be a hang
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        ranks = stack.enter_context(joined_ranks(device.type, loaded.config.distributed_timeout))
        loaded = ranks.raise_on_all(lambda: decide_by_data(loaded))
        config = loaded.config
        verified = ranks.on_rank0(lambda: read_inputs(config, verify=True))
        inputs = ranks.raise_on_all(lambda: verified or read_inputs(config, verify=False))
        warnings = [*loaded.warnings]
        folder = stack.enter_context(open_run_folder(config, ranks, warnings.append))
        ACTIVITY.stacks_folder = folder.path / "log"
        start = find_start(loaded, inputs, folder.path, ranks)
        log = RunLog(start.config, ranks.rank, device.type)
        stack.push(lambda error, *_: log.close(finished=error is None and signals.received is None))
        for message in (*warnings, *start.warnings):
            log.warn(message)
        for message in (*loaded.notes, *start.notes):
            log.info(message)
        context = RunContext(ranks, signals, log)
        try:
            run = build_run(start, context, inputs, folder)
            for extension in run.extensions:
                stack.push(lambda _, error, trace, each=extension: each.run_end(run, error))
            context.leave_if_stopped()
        except Interrupted:
            log.info("Stopped by a signal before the first step; nothing was changed.")
            raise
        stack.push(lambda _, error, trace: log.event("end", run.progress.step, reason=run.why_ended(error)))
        yield run


def prepare_device(config: Config) -> torch.device:
    """Return the compute device, after applying DETERMINISTIC to torch's kernels."""
    device = torch.device(model_utils.choose_device(config))
    if device.type == "mps" and (refused := [*mps_rules(config)]):
        raise SettingsError(*refused)
    model_utils.make_deterministic(config, device.type)
    return device


# -------------------------------------------------------------------------------------------- inputs


def decide_by_data(loaded: Settings) -> Settings:
    """Return the settings, completed by those that depend on the hardware and the size of the data."""
    config, deferred, notes = loaded.config, {*loaded.deferred} - {"compile", "learning_rate"}, []
    if deferred and config.data_path and config.tokenizer_path and not config.data_grows:
        rows = dataloaders.count_rows(config, load_tokenizer(config.tokenizer_path, config.tokenizer_backend))
        chosen = settings_of_data(config, rows, deferred)
        config = config.model_copy(update=chosen)
        if conflicts := [*numeric_rules(config)]:
            raise SettingsError(*conflicts)
        also = f" and EPOCHS={config.epochs:g}" if "max_steps" in chosen else ""
        text = assigned(chosen)
        notes = [f"The {counted(rows, 'training row')}{also} set {text}"] if text else []
    if config.named_checkpoint is None:  # otherwise `adopt` knows the model's shape first
        config = decide_compile(config, loaded)
    return replace(loaded, config=config, notes=(*loaded.notes, *notes))


def decide_compile(config: Config, loaded: Settings) -> Config:
    """Return the settings with COMPILE off for a small model on a CPU, unless COMPILE is set."""
    on_cpu = not config.device_memory and model_utils.choose_device(config) == "cpu"
    is_small = config.matrix_count < SMALL_MODEL and config.activation_checkpointing != "selective"
    if "compile" in loaded.deferred and on_cpu and is_small:
        return config.model_copy(update={"compile": False})
    return config


def read_inputs(config: Config, verify: bool) -> Inputs:
    """Open the tokenizer, the data and the evaluation sets; one rank verifies the data for all."""
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer_backend)
    if config.training_stage != "pretrain":
        text_tokenizer(tokenizer)  # finds the end of turn, which saved folders name
    if verify:
        dataloaders.cache_of(config).check()
    mode = config.verify_data if verify else "never"
    train = dataloaders.open_rows(config, "train", tokenizer, mode)
    is_kto = config.preference_objective == "kto"
    if config.training_stage == "dpo" and any(
            is_kto == (rows.example_set.labels is None) for rows in dataloaders.rows_by_source(train)):
        content, other = ("pairs", "unpaired answers") if is_kto else ("unpaired answers", "pairs")
        remedy = "dpo, orpo or simpo" if is_kto else "kto"
        raise DataError(f"{config.data_path} has {content}, but PREFERENCE_OBJECTIVE="
                        f"{config.preference_objective} needs {other}; set PREFERENCE_OBJECTIVE={remedy}, or "
                        f"name {other} in DPO_DATA_PATH (prepare pairs makes both)")
    evaluated = open_evaluation_inputs(config, tokenizer, mode)
    rows = evaluated["validation_rows"]
    held_out, own = f", {rows.describe()} held out" if rows else "", config.validation_data_path
    held_out += (f" ({own})" if rows else f" ({own} is not read: VALIDATE_EVERY=0)") if own else ""
    return Inputs(tokenizer, train, **evaluated, fingerprint=train.fingerprint,
                  description=f"{train.describe()}{held_out} from {config.data_path}")


def open_evaluation_inputs(config: Config, tokenizer, verify: str) -> dict[str, Any]:
    """Return the fields of `Inputs` for evaluations; `verify` is "auto", "always" or "never"."""
    rows = dataloaders.open_rows(config, "validation", tokenizer, verify) if config.validate_every else None
    choice_sets = config.choice_sets if config.hellaswag_every else ()
    return {"validation_rows": rows, "validation_fingerprint": rows.fingerprint if rows else "",
            "choice_sets": [read_choice_set(choices, tokenizer, config) for choices in choice_sets]}


# ------------------------------------------------------------------------------- locate and adopt


@collective
def find_start(loaded: Settings, inputs: Optional[Inputs], run_dir: Path, ranks: Ranks,
               found: Optional[Found] = None) -> Start:
    """Return the start that the settings ask for, from `found` if the checkpoint is known.

    `inputs` must equal those of the checkpoint; None skips the comparison.
    """
    name, is_own, warnings = found or ranks.broadcast(locate_together(loaded.config, run_dir, ranks))
    if name is None:
        if conflicts := [*shape_rules(loaded.config)]:  # not checked before if the settings name this run
            raise SettingsError(*conflicts)
        return Start(decide_compile(loaded.config, loaded), None, False, {}, [], warnings)
    folder = find_on_rank0(lambda: name, ranks)
    start = ranks.raise_on_all(lambda: adopt(folder, is_own, loaded, inputs, run_dir))
    warnings = [*warnings, *start.warnings]

    # Record where later starts can find the same base.
    config, named = start.config, start.config.named_checkpoint
    if not start.is_own:
        base_sha256 = None  # a plan may only have config.json
        if not loaded.is_plan:
            base_sha256 = ranks.broadcast(ranks.on_rank0(lambda: weights_sha256(folder)))
        base, remembered = folder, {"wandb_run_id": None, "begun_from": named}
    else:
        progress, base, remembered = start.state["progress"], None, {}
        home = run_dir if is_inside(folder, run_dir) else folder.resolve().parents[1]
        if progress.get("base_beside") and home != run_dir:  # a checkpoint of another run resumes here
            remembered["base_beside"] = os.path.relpath(
                (home / progress["base_beside"]).resolve(), run_dir.resolve())
        if named is not None and not names_its_start(named, progress, run_dir):
            local_steps = [place for place in store.places(named, run_dir)
                           if place.is_dir() and is_inside(place, run_dir)]
            remembered["begun_from"] = local_steps[0].name if local_steps else named
        if config.lora_enabled:
            base_sha256 = progress.get("base_sha256")
            base = find_on_rank0(lambda: find_base(config, progress, home, warnings.append), ranks)
    if base is not None:
        remembered |= {"base": str(base.resolve()), "base_sha256": base_sha256,
                       "base_beside": os.path.relpath(base.resolve(), run_dir.resolve())}
    return start._replace(base=base, remembered=remembered, warnings=warnings)


@collective
def locate_together(config: Config, run_dir: Path, ranks: Ranks) -> Optional[Found]:
    """Return what `locate` finds on rank 0, for which every rank verifies a part of each file."""
    def help_with(file: list) -> tuple[str, list[str]]:
        folder, name, expected = file
        return examine(Path(folder), name, expected, ranks.rank, ranks.world_size)

    def locate_with(ask: Callable[[Any], list]) -> Found:
        return locate(config, run_dir, lambda folder, name, expected: fault_in(
            ask([str(folder.absolute()), name, expected]), folder / name, expected))

    return ranks.on_rank0_with_help(locate_with, help_with)


def locate(config: Config, run_dir: Path,
           find_fault: Callable[[Path, str, Mapping], Optional[str]] = fault_of) -> Found:
    """Return the verified checkpoint to start from.

    A run that started from the named checkpoint resumes its own newest one, so that the command that started
    a job also resumes it after a pre-emption. Naming one of the run's own checkpoints returns to that step. A
    run with steps cannot start from anything else.
    """
    named, newest, warnings = config.named_checkpoint, None, []
    if config.resume != "never":
        newest, warnings = store.newest_verified(run_dir / "checkpoints",
                                                 check=partial(store.verify, find_fault=find_fault))
    # A .env for all stages names this run, which has no checkpoint yet, as the start of the next stage.
    if named and newest is None and config.resume == "auto" and not [*run_dir.glob("*.safetensors")]:
        places = Path(named).expanduser(), run_dir.parent / named
        named = None if run_dir.absolute() in [place.absolute() for place in places] else named
    if newest is None:
        if named is None and config.training_stage == "sft" and not (
                config.random_init or config.distillation_enabled):
            raise SettingsError("TRAINING_STAGE=sft needs a start checkpoint, but the settings name none and "
                                f"{run_dir} has none. Set PRETRAIN_CHECKPOINT to the model to fine-tune, or "
                                "RANDOM_INIT=true to train random weights")
        if config.resume == "auto" and (earlier := earlier_runs(run_dir)):
            warnings.append(f"{run_dir} only has checkpoints of a run that RESUME=never moved aside, so this "
                            f"run starts from the beginning; to resume the earlier one, set "
                            f"RESUME={earlier[-1].parent}")
    newest_state = store.read_state(newest) if newest else {}
    if named is None or (newest and started_from(named, newest_state["progress"], run_dir)):
        return newest and str(newest), newest is not None, warnings

    # The named checkpoint is not what this run started from.
    def check(folder: Path) -> None:
        may_resume = config.resume == named or is_inside(folder, run_dir)
        store.verify(folder, lambda state: resumes_trainer_state(state, may_resume, config), find_fault)

    folder, is_own = store.locate(named, run_dir, warnings.append, check), config.resume == named
    if config.resume == "never" and is_inside(folder, run_dir):
        raise CheckpointError(f"{folder} belongs to the run that RESUME=never would move aside. Choose "
                              f"another RUN_NAME, and set {config.start_setting}={folder}")
    if newest:
        forbid_overwriting_source(store.read_state(folder), folder, run_dir, config)
        restarts = not is_own and (config.reset_optimizer or config.start_step is not None)
        is_own = is_inside(folder, run_dir) and not restarts
        if not is_own:
            raise CheckpointError(explain_other_start(newest, folder, newest_state, config))
        if newest.resolve() != folder.resolve():
            warnings.append(f"{newest} is not used, because the settings name {folder}")
    return str(folder), is_own, warnings


def adopt(folder: Path, is_own: bool, loaded: Settings, inputs: Optional[Inputs], run_dir: Path) -> Start:
    """Return the start from this checkpoint, whose model supplies settings that are not set explicitly."""
    state = store.read_state(folder)
    resumed = resumes_trainer_state(state, is_own, loaded.config)
    if resumed:
        saved = {name: state["settings"][name.upper()] for name in MODEL_SETTINGS
                 if name.upper() in state["settings"]}
        model = huggingface.checked_settings(saved, str(folder / store.STATE))
    else:
        forbid_overwriting_source(state, folder, run_dir, loaded.config)
        peft.refuse_adapters(folder)
        model = model_utils.read_model_config(folder)
    values = model.model_dump(include={*MODEL_SETTINGS})
    if not {*FEED_FORWARD}.isdisjoint(loaded.sources):  # the width may be set in another way
        values = {name: value for name, value in values.items() if name not in FEED_FORWARD}
    config = decide_compile(loaded.with_defaults(values).config, loaded)
    adopted = {name.upper(): value for name, value in values.items()
               if getattr(config, name) != getattr(loaded.config, name)}
    notes = [f"model settings from {folder}: {assignments(adopted).removeprefix('set ')}"] if adopted else []
    warnings: list[str] = []

    # Check settings and inputs against the checkpoint, and against each other.
    if resumed and inputs:
        identity = inputs.identity(config, state["identity"])
        changes = check_changes(state, config, identity, folder, is_own, loaded.sources)
        notes, warnings = notes + changes.notes, changes.warnings
    if not resumed and "learning_rate" in loaded.deferred:
        rate = float(f"{config.learning_rate * max(1, RECIPE_WIDTH / config.dim):.2g}")
        config = config.model_copy(update={"learning_rate": rate})
        notes.append(f"TRAINING_STAGE={config.training_stage} and DIM={config.dim} set LEARNING_RATE={rate}")
    if not resumed:
        warnings = model_utils.check_model(folder, config, loaded.sources)
        notes.append(f"weights from {folder}; optimizer, schedule and step restart")
        if inputs:
            notes += model_utils.check_vocabulary(folder, inputs.tokenizer, config)
    allowed = {*loaded.warnings} if loaded.is_plan else ()
    if conflicts := [conflict for conflict in rules(config, start_is_read=True) if conflict not in allowed]:
        raise SettingsError(*conflicts)
    return Start(config, folder, resumed and is_own, state if resumed else {}, notes, warnings)


def resumes_trainer_state(state: Mapping[str, Any], is_own: bool, config: Config) -> bool:
    """Return whether a run resumes this trainer state and not only the weights."""
    if not state or state["settings"]["TRAINING_STAGE"] != config.training_stage:
        return False
    weights_alone = config.reset_optimizer or config.lora_enabled
    return is_own or not (weights_alone or state["settings"]["LORA_ENABLED"])


def started_from(named: str, progress: Mapping[str, Any], run_dir: Path) -> bool:
    """Return whether the settings name the checkpoint that this run started from, by name, path or hash."""
    if names_its_start(named, progress, run_dir):
        return True
    if wanted := progress.get("base_sha256"):
        with suppress(CheckpointError):
            folder = store.locate(named, run_dir, lambda _: None, store.read_manifest)
            return not is_inside(folder, run_dir) and weights_sha256(folder) == wanted
    return False


def names_its_start(named: str, progress: Mapping[str, Any], run_dir: Path) -> bool:
    """Return whether this name or path is what the run started from or returned to."""
    def places(name: str) -> set[Path]:
        return {place.resolve() for place in store.places(name, run_dir)}

    start = progress.get("begun_from")
    # The name may mean the checkpoint, the folder of checkpoints, or the run.
    bases = [place for base in base_places(progress, run_dir)
             for place in (base.resolve(), *base.resolve().parents[:2])]
    return start is not None and (start == named or not places(named).isdisjoint([*places(start), *bases]))


def explain_other_start(newest: Path, folder: Path, state: Mapping[str, Any], config: Config) -> str:
    """Return the error for a start that would lose the steps of a run up to `newest`, with alternatives."""
    run_dir, by_path = newest.parent.parent, config.resume == config.named_checkpoint
    start = state["progress"].get("begun_from")
    setting = "RESUME" if by_path else config.start_setting
    ways = []
    if resumes_trainer_state(state, True, config):
        change = f"set {setting}={start}" if start and not by_path else f"remove {setting}"
        ways.append(f"to resume it, {change}")
    if not (is_inside(folder, run_dir) and config.lora_enabled):
        ways.append(f"to start a new run, choose another RUN_NAME with {setting}={folder}")
        if not by_path and not is_inside(folder, run_dir):
            ways.append("RESUME=never moves the old one aside")
    advice = "; or ".join(ways)
    return (f"{run_dir} has a run at {newest.name} that started from {start or 'initial weights'}, but the "
            f"settings would restart it from {folder}. {advice[0].upper()}{advice[1:]}")


def forbid_overwriting_source(state: Mapping[str, Any], folder: Path, run_dir: Path, config: Config) -> None:
    """Raise CheckpointError if a stage would write into the run whose weights it starts from."""
    is_other_stage = bool(state) and state["settings"]["TRAINING_STAGE"] != config.training_stage
    whole = not state.get("settings", {}).get("LORA_ENABLED")
    if is_inside(folder, run_dir) and (is_other_stage or (config.lora_enabled and whole)):
        raise CheckpointError(f"{folder} is in the folder of RUN_NAME={run_dir.name}, which this run would "
                              f"overwrite. Choose another RUN_NAME, and set {config.start_setting}={folder}")


# ---------------------------------------------------------------------------------------------- the base


def weights_sha256(folder: Path) -> str:
    """Return the hash of a model folder's weights, independent of their division into files."""
    peft.refuse_adapters(folder)
    return huggingface.weights_sha256(huggingface.load_model_weights(folder))


def base_places(progress: Mapping[str, Any], run_dir: Path) -> list[Path]:
    """Return where a run's base was when the run started, as a path and relative to the run's folder."""
    places = (progress.get("base"), progress.get("base_beside"))
    return [run_dir / place for place in places if place]  # an absolute path stays absolute


def find_base(config: Config, progress: Mapping[str, Any], run_dir: Path, warn: store.Warn) -> Path:
    """Return the folder of the model that a run started from, identified by its hash.

    It may be where the settings now say, where it was, or at the same path relative to the run's folder.
    """
    names = [config.named_checkpoint, *(getattr(config, setting) for setting in config.start_settings)]
    advice = f"set {config.start_setting} to the folder where it is now, by a flag"
    return find_by_hash(names, progress, run_dir, warn, advice)


def find_by_hash(names: Iterable[Optional[str]], progress: Mapping[str, Any], run_dir: Path, warn: store.Warn,
                 advice: str) -> Path:
    """Like `find_base`, but try these names first. If all fail, the error ends with `advice`."""
    remembered, wanted = base_places(progress, run_dir), progress["base_sha256"]
    named, failures = [], []
    for name in dict.fromkeys(filter(None, names)):
        try:  # the hash of the weights verifies them
            folder = store.locate(name, run_dir, warn, store.read_manifest)
        except CheckpointError as error:
            failures.append(str(error))
            continue
        # The newest checkpoint of a run that has continued since is no longer the base.
        sibling = remembered and folder.parent / remembered[0].name
        named += [sibling, folder] if sibling and sibling.is_dir() else [folder]

    for place in dict.fromkeys(path.resolve() for path in (*named, *remembered)):
        try:
            if not place.is_dir():
                raise CheckpointError(f"{place} does not exist")
            if (sha256 := weights_sha256(place)) == wanted:
                return place
            failures.append(f"{place} is another model, whose weights have SHA-256 {sha256}")
        except CheckpointError as error:
            failures.append(str(error))
    raise CheckpointError(f"the base of this run, whose weights have SHA-256 {wanted}, was not found: "
                          f"{'; '.join(failures) or 'no place is known'}. Restore it, or {advice}")


@collective
def find_on_rank0(find: Callable[[], Path], ranks: Ranks) -> Path:
    """Return the folder that rank 0 finds; for a hub model, the copy that each machine downloads once."""
    folder = Path(ranks.broadcast(ranks.on_rank0(lambda: str(find()))))
    name = huggingface.name_of_download(folder)
    if name and ranks.world_size > 1:
        ranks.raise_on_all(lambda: None if ranks.local_rank else huggingface.hub_model(name))
        folder = ranks.raise_on_all(lambda: huggingface.hub_model(name))
    return folder


# ---------------------------------------------------------------------------------- build and restore


@collective
def build_run(start: Start, context: RunContext, inputs: Inputs, folder: RunFolder,
              for_replay: bool = False) -> Run:
    """Build a run in memory. A run for a replay is never saved, and its weights may be non-finite."""
    config, ranks = start.config, context.ranks
    extensions = load_extensions(config, context.log.warn)
    for each in extensions:
        inputs = each.inputs(config, inputs, ranks)
    dtype = model_utils.choose_dtype(config, ranks.device.type)
    for purpose in ("documents" if config.document_mask else "causal", "mask"):
        choose_kernel(purpose, config, ranks.device, dtype)  # refuse a kernel before anything is written
    if config.lora_enabled:  # new adapters, or those of the start
        generator = torch.Generator().manual_seed(config.seed)
        model, adapter = adapted_on_meta(config, start, inputs, dtype, generator, ranks)
        model_utils.allocate_model(model, config, ranks)
        ranks.raise_on_all(lambda: model_utils.load_weights(start.base, model))
        lora.init_adapters(model, generator)
        if adapter:
            ranks.raise_on_all(lambda: lora.load_adapter_state_dict(model, adapter.state))
    else:
        model = model_utils.build_model(config, inputs.tokenizer.vocab_size, ranks, dtype)
        if start.folder is not None:
            finite = not (for_replay and start.is_own)
            ranks.raise_on_all(lambda: model_utils.load_weights(start.folder, model, finite))
    if source := start.base if config.lora_enabled else start.folder:
        own = start.folder if start.is_own else source
        inputs.tokenizer.generation = ranks.raise_on_all(
            lambda: read_generation(source) | read_generation(own))
    generation = inputs.tokenizer.generation
    if start.folder is None or SUPPRESSED in generation and not start.is_own:
        unseen = unseen_tokens(inputs, start.folder is None, config.training_stage, ranks)
        inputs.tokenizer.generation = generation = {**generation, SUPPRESSED: unseen}
    model.suppress(generation.get(SUPPRESSED, ()))
    if config.train_only:
        trained = {f"layers.{layer}" for layer in config.train_only.split(",")}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".".join(name.split(".")[:2]) in trained)
    optimizer = Optimizer(model, config, ranks)
    scaler = torch.amp.GradScaler("cuda") if dtype == torch.float16 else None
    progress = restore(start, model, optimizer, scaler)
    for each in extensions:
        each.load_state_dict(start.state.get("extensions", {}).get(type(each).__name__, {}))
    if not for_replay and progress.step < config.max_steps:
        size = trained_bytes(model)  # AdamW keeps two more values of each parameter, Muon one
        ranks.on_rank0(lambda: store.check_room(folder.path / "checkpoints", 3 * size, 2 * size))

    def base() -> Path:  # located earlier, unless a run without adapters resumes
        return start.base or find_base(config, asdict(progress), folder.path, context.log.warn)

    objective, inputs = choose_objective(config, inputs, model, base, progress.base_sha256, context)
    run = Run(config, context, inputs, folder, model, optimizer, scaler, progress, objective, start.folder,
              extensions=() if for_replay else extensions)
    if reason := model_utils.compile_where_possible(model, config, ranks.device.type):
        context.log.warn(f"no torch.compile: {reason}")
    choose_head_chunk(model, config, dtype.itemsize, ranks.device)
    return run


@collective
def unseen_tokens(inputs: Inputs, is_new: bool, stage: str, ranks: Ranks) -> list[int]:
    """Return the control tokens that no training has seen: those of new weights, or of the start's generation
    config, that the data lacks."""
    tokenizer = inputs.tokenizer
    unseen = {*tokenizer.special_ids.values()} - {*tokenizer.stop_ids, tokenizer.eot_id}
    unseen = unseen if is_new else {*tokenizer.generation[SUPPRESSED]}
    if sum(rows.token_set.tokens for rows in dataloaders.rows_by_source(inputs.rows)) > MOST_READ_TOKENS:
        return []
    if unseen and stage != "grpo":  # whose records are stored among the tokens, as bytes
        unseen -= {*ranks.broadcast(ranks.on_rank0(inputs.used_ids))}
    return sorted(unseen)


@collective
def adapted_on_meta(config: Config, start: Start, inputs: Inputs, dtype: torch.dtype,
                    generator: torch.Generator, ranks: Ranks
                    ) -> tuple[Transformer, Optional[peft.Adapter]]:
    """Return a base with adapters on the meta device, and the adapters of the start, if any."""
    model = model_utils.model_on_meta(config, inputs.tokenizer.vocab_size, dtype)
    adapter, token_ids = None, {}
    if start.is_own:
        rows = padded(model.vocab_size)
        adapter = ranks.raise_on_all(lambda: peft.load_adapter_folder(start.folder, config, rows))
        ranks.raise_on_all(lambda: adapter.check_base(start.remembered["base_sha256"], start.base))
        token_ids = adapter.token_ids
    elif config.lora_train_tokens != "none":
        token_ids, model.unused_untrained_ids = ranks.broadcast(ranks.on_rank0(
            lambda: token_ids_to_train(config, inputs, start.base)))
    ranks.raise_on_all(lambda: lora.add_adapters(model, config, generator, token_ids))
    lora.cast_base(model, dtype)
    return model, adapter


def token_ids_to_train(config: Config, inputs: Inputs, base: Path) -> tuple[huggingface.TokenIds, list[int]]:
    """Return the rows of the embedding and of an untied head that LORA_TRAIN_TOKENS selects.

    `auto` selects tokens of the data that the base has not learned, and the rows that it lacks. Also return
    the other tokens that it has not learned.
    """
    layers = ["tok_embeddings"] + ([] if config.tie_embeddings else ["output"])
    setting, tokenizer, others = config.lora_train_tokens, inputs.tokenizer, []
    if setting != "auto":
        ids = lora.named_tokens(setting, tokenizer.special_ids)
    else:
        used, rows = inputs.used_ids(), huggingface.vocabulary_rows(huggingface.load_model_weights(base))
        head = model_utils.read_parameters(base, config, rows)[f"{layers[-1]}.weight"].first_rows(rows)
        untrained = {*lora.untrained_tokens(used, tokenizer.special_ids, head.full())}
        ids = sorted(untrained.intersection(used).union(range(rows, tokenizer.vocab_size)))
        others = sorted(untrained.difference(used, range(tokenizer.vocab_size, rows)))
    return dict.fromkeys(layers, ids), others


def restore(start: Start, model: Transformer, optimizer: Optimizer, scaler) -> Progress:
    """Restore the state of optimizer and loss scaler, and return the progress to resume from."""
    config, progress = start.config, Progress()
    if start.state:
        progress = Progress(**start.state["progress"])
        tensors = store.read_optimizer(start.folder)
        optimizer.load_state_tensors(model_utils.restore_padding(tensors, model))
        if scaler is not None and start.state["scaler"]:
            scaler.load_state_dict(start.state["scaler"])
    if not start.is_own and config.start_step is not None:  # restart all counters that depend on the step
        progress = Progress(step=config.start_step, tokens_seen=config.start_step * config.total_batch_size,
                            recent_losses=progress.recent_losses)
    return replace(progress, **start.remembered)


# ------------------------------------------------------------------------------------------ the objective


@collective
def choose_objective(config: Config, inputs: Inputs, model: Transformer, locate_base: Callable[[], Path],
                     base_sha256: Optional[str], context: RunContext) -> tuple[objectives.Objective, Inputs]:
    """Return the objective, and the inputs with the precomputed outputs that it needs.

    Rank 0 calls `locate_base` for the model that the run started from, whose weights may have a known hash.
    Raises Interrupted if a rank received a stop signal.
    """
    outputs = OutputStore(dataloaders.cache_of(config), context)
    if config.training_stage == "dpo":
        objective, reference = objectives.PREFERENCE_OBJECTIVES[config.preference_objective], None
        if objective.needs_reference:
            reference, inputs = choose_reference(config, inputs, model, locate_base, base_sha256, outputs)
        return objective(config, reference, model, context.ranks.all_gather_json), inputs
    is_online = config.training_stage == "grpo"
    if is_online and not objectives.ONLINE:
        raise SettingsError("TRAINING_STAGE=grpo needs extensions/online.py, and its name in EXTENSIONS")
    rollouts = objectives.ONLINE["rollouts"](model, config, inputs.tokenizer, context) if is_online else None
    context.ranks.raise_on_all(lambda: rollouts and rollouts.check(inputs))
    if is_online and not config.distillation_enabled:
        reference = None
        if config.grpo_beta:
            reference, _ = choose_reference(config, inputs, model, locate_base, base_sha256, outputs)
        return objectives.ONLINE["grpo"](config, rollouts, reference), inputs
    if not config.distillation_enabled:
        return objectives.NextToken(), inputs

    # Rank 0 verifies the teacher's files for all.
    tokenizer, ranks = inputs.tokenizer, context.ranks
    folder = find_on_rank0(lambda: find_teacher(config, tokenizer), ranks)
    teacher = load_teacher(folder, config, tokenizer.vocab_size, ranks)
    compiled = config.compile and ranks.device.type == "cuda"
    if is_online:
        return objectives.ONLINE["distillation"](config, teacher, rollouts, compiled), inputs
    return objectives.Distillation(config, teacher, compiled), inputs


@collective
def choose_reference(config: Config, inputs: Inputs, model: Transformer, locate_base: Callable[[], Path],
                     base_sha256: Optional[str], outputs: OutputStore) -> tuple[objectives.Reference, Inputs]:
    """Return the reference, and the inputs, which include its log-probabilities if they are stored."""
    is_stored, dtype = objectives.reference_is_stored(config), model.compute_dtype
    ranks = outputs.context.ranks
    by_pair = config.training_stage == "dpo"
    compute = objectives.pair_logprobs if by_pair else objectives.token_logprobs
    # With adapters, their base is a live reference without extra memory.
    if config.lora_enabled and not is_stored:
        return partial(logprobs_without_adapters, model, compute=compute), inputs

    base = cache(partial(find_on_rank0, locate_base, ranks))

    @cache
    def frozen() -> Transformer:
        folder = base()
        reference = model_utils.model_on_meta(config, inputs.tokenizer.vocab_size, dtype)
        lora.cast_base(reference.requires_grad_(False), dtype)
        model_utils.allocate_model(reference, config, ranks)
        ranks.raise_on_all(lambda: model_utils.load_weights(folder, reference))
        model_utils.compile_where_possible(reference, config, ranks.device.type)
        return reference.eval()

    if not is_stored:
        return partial(objectives.frozen_logprobs, frozen(), compute=compute), inputs
    provenance = {"weights_sha256": base_sha256, "compute_dtype": str(dtype)}

    def attach(split: str, rows: Optional[dataloaders.Rows], count: int, seed: Optional[int] = None):
        read = iter(dataloaders.first_batches(rows, count, seed, config.micro_batch_size) if rows else ())
        return rows and dataloaders.map_sources(rows, lambda source_rows: with_reference(
            outputs, source_rows, next(read), split, provenance, frozen))

    rows = attach("train", inputs.rows, config.max_steps * config.rows_read, config.row_seed)
    held_out = attach("validation", inputs.validation_rows, config.validation_rows)
    return objectives.stored_reference, replace(inputs, rows=rows, validation_rows=held_out)


def logprobs_without_adapters(model: Transformer, batch, compute: Callable) -> Tensor:
    """Return the log-probabilities that `compute` returns for a model without its adapters."""
    with lora.disable_adapters(model), evaluation_mode(model):
        return objectives.frozen_logprobs(model, batch, compute)
