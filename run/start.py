"""Where a run starts: its own newest checkpoint, or the one that the settings name; and its base model."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from checkpoint import huggingface, peft, store
from checkpoint.resume_rules import assignments, check_changes
from common.errors import CheckpointError, SettingsError
from config import FEED_FORWARD, MODEL_SETTINGS, START_FROM, Config, rules
from model_utils import check_model, read_model_config
from parallel.ranks import Ranks
from run.folder import earlier_runs
from settings.load import Loaded

START_SETTINGS = {"pretrain": "pretrain_checkpoint", "sft": "pretrain_checkpoint",
                  "dpo": "instruct_checkpoint"}


class Found(NamedTuple):
    """The checkpoint that a run starts from."""

    folder: Optional[Path]  # None: initial weights
    own: bool  # it was written by this run
    warnings: list[str]


class Start(NamedTuple):
    """How a run starts."""

    config: Config  # the settings, with the shape of the model that the run starts from
    folder: Optional[Path]  # a checkpoint or a model folder; None: initial weights
    own: bool  # it was written by this run
    state: dict[str, Any]  # the trainer's state to resume; empty if optimizer and step start anew
    base: Optional[Path]  # the model that the run began with, where it is now
    base_sha256: Optional[str]  # of its weights
    remembered: dict[str, Any]  # the fields of Progress that record all this
    notes: list[str]
    warnings: list[str]


def named_checkpoint(config: Config) -> Optional[str]:
    """The checkpoint that the settings name to start from, if any."""
    if config.resume not in ("auto", "never"):
        return config.resume
    return next((getattr(config, name) for name in START_FROM if getattr(config, name)), None)


def start_setting(config: Config) -> str:
    """The setting that names what this stage starts from: the one that is set, or the one to set."""
    named = (name for name in START_FROM if getattr(config, name))
    return next(named, START_SETTINGS[config.training_stage]).upper()


def weights_sha256(folder: Path) -> str:
    """The hash of a model folder's weights, independent of how they are split into files."""
    peft.refuse_adapters(folder)
    return huggingface.weights_sha256(huggingface.load_model_weights(folder))


def is_inside(folder: Path, run_dir: Path) -> bool:
    """Whether a folder is one of the run's own checkpoints, which may be a link to another disk."""
    parents = folder.resolve().parent, folder.absolute().parent.resolve()
    return (run_dir / "checkpoints").resolve() in parents


def continues(state: Mapping[str, Any], own: bool, config: Config) -> bool:
    """Whether a run resumes this trainer state; if not, it takes the weights alone."""
    if not state or state["settings"]["TRAINING_STAGE"] != config.training_stage:
        return False
    weights_alone = config.reset_optimizer or config.keep_layers or config.lora_enabled
    return own or not (weights_alone or state["settings"]["LORA_ENABLED"])


# --------------------------------------------------------------------------------------- which checkpoint


def find_checkpoint(config: Config, run_dir: Path, ranks: Ranks) -> Found:
    """The checkpoint to start from. Collective: every rank must call it.

    A run that began from the named checkpoint resumes its own newest one, so that the command which started
    a job also resumes it after a pre-emption. Naming one of its own goes back to that step. A run that has
    steps cannot start from anything else.
    """
    def find() -> list:
        newest, warnings = None, []
        if config.resume != "never":
            newest, warnings = store.newest_verified(run_dir / "checkpoints")
        named = named_checkpoint(config)
        own_state = store.read_state(newest) if newest else {}
        if named is None and newest is None:
            refuse_random_weights(config, run_dir)
        if newest is None and config.resume == "auto" and (earlier := earlier_runs(run_dir)):
            warnings.append(f"{run_dir} has no checkpoint except those of a run that RESUME=never moved "
                            f"aside, so this run starts from the beginning; to resume the earlier one, "
                            f"RESUME={earlier[-1].parent}")
        if named is None or (newest and began_from(named, own_state.get("progress", {}), run_dir)):
            return [newest and str(newest), newest is not None, warnings]

        # Something is named that this run did not begin from.
        folder = store.locate(named, run_dir, warnings.append)
        if (folder / store.MANIFEST).exists():
            store.verify(folder)
        own = config.resume == named
        if config.resume == "never" and is_inside(folder, run_dir):
            raise CheckpointError(f"{folder} belongs to the run that RESUME=never would move aside. Choose "
                                  f"another RUN_NAME, and set {start_setting(config)}={folder}")
        if newest:
            refuse_own_weights(store.read_state(folder), folder, run_dir, config)
            starts_anew = not own and (config.reset_optimizer or config.start_step is not None)
            own = is_inside(folder, run_dir) and not starts_anew
            if not own:
                raise CheckpointError(how_to_start_anew(newest, folder, own_state, config))
            if newest.resolve() != folder.resolve():
                warnings.append(f"{newest} is not used, because the settings name {folder}")
        return [str(folder), own, warnings]

    folder, own, warnings = ranks.broadcast(ranks.on_rank0(find))
    return Found(Path(folder) if folder else None, own, warnings)


def began_from(named: str, progress: Mapping[str, Any], run_dir: Path) -> bool:
    """Whether a run was started, or taken back, from what the settings name now, however it is spelt.

    Compares the names, then the places that they mean (a run named there may have continued since), and only
    then the weights.
    """
    if names_its_start(named, progress, run_dir):
        return True
    if not progress.get("base_sha256"):
        return False
    try:
        folder = store.locate(named, run_dir, lambda _: None)
        return not is_inside(folder, run_dir) and weights_sha256(folder) == progress["base_sha256"]
    except CheckpointError:
        return False


def names_its_start(named: str, progress: Mapping[str, Any], run_dir: Path) -> bool:
    """Whether a run was started, or taken back, from what has this name or lies at this place."""
    def places(name: str) -> set[Path]:
        return {place.resolve() for place in store.places(name, run_dir)}

    before = progress.get("begun_from")
    # The name may mean the checkpoint, the folder of checkpoints, or the run.
    bases = [place for base in base_places(progress, run_dir)
             for place in (base.resolve(), *base.resolve().parents[:2])]
    return before is not None and (before == named or not places(named).isdisjoint([*places(before), *bases]))


def how_to_start_anew(newest: Path, folder: Path, own_state: Mapping[str, Any], config: Config) -> str:
    """The refusal of a start that would lose a run's steps, up to `newest`, with what to do instead."""
    run_dir, by_path = newest.parent.parent, config.resume not in ("auto", "never")
    begun = own_state["progress"].get("begun_from")
    setting = "RESUME" if by_path else start_setting(config)
    ways = []
    if continues(own_state, True, config):
        how = f"set {setting}={begun}" if begun and not by_path else f"remove {setting}"
        ways.append(f"to resume it, {how}")
    if not (is_inside(folder, run_dir) and config.lora_enabled):
        ways.append(f"to start anew, choose another RUN_NAME with {setting}={folder}")
        if not by_path and not is_inside(folder, run_dir):
            ways.append("RESUME=never moves the old one aside")
    advice = "; or ".join(ways)
    return (f"{run_dir} has a run at {newest.name} that began from {begun or 'initial weights'}, and the "
            f"settings would start it anew from {folder}. {advice[0].upper()}{advice[1:]}")


# ------------------------------------------------------------------------------------------------ the base


def base_places(progress: Mapping[str, Any], run_dir: Path) -> list[Path]:
    """Where a run's base model was when the run began, and the same relative to the run's folder."""
    places = (progress.get("base"), progress.get("base_beside"))
    return [run_dir / place for place in places if place]  # an absolute path stays absolute


def relative_to_run(base: Path, run_dir: Path) -> str:
    """The path from a run's folder to its base model."""
    return os.path.relpath(base.resolve(), run_dir.resolve())


def find_base(config: Config, progress: Mapping[str, Any], run_dir: Path,
              warn: Callable[[str], None]) -> Path:
    """The model that a run began with, found by its hash: where the settings name it now, where it was, or at
    the same place relative to the run's folder.
    """
    names = (named_checkpoint(config), *(getattr(config, setting) for setting in START_FROM))
    advice = f"set {start_setting(config)} to the folder where it is now"
    return find_by_hash([*filter(None, names)], progress, run_dir, warn, advice)


def find_by_hash(names: Sequence[str], progress: Mapping[str, Any], run_dir: Path,
                 warn: Callable[[str], None], advice: str) -> Path:
    """`find_base` among these names first.

    Args:
        advice: what to do if it is in none of the places.
    """
    remembered, wanted = base_places(progress, run_dir), progress.get("base_sha256")
    named, failures = [], []
    for name in dict.fromkeys(names):
        try:
            folder = store.locate(name, run_dir, warn)
        except CheckpointError as error:
            failures.append(str(error))
            continue
        # If a run is named that has continued since, its newest checkpoint is no longer the base.
        sibling = remembered and folder.parent / remembered[0].name
        named += [sibling, folder] if sibling and sibling.is_dir() else [folder]

    if wanted is None:  # older versions stored no hash
        place = next((place for place in (*remembered, *named) if place.is_dir()), None)
        if place in named and place not in remembered:
            warn(f"{place} is assumed to be the model that this run began with; its hash was not stored")
        if place:
            return place
    for place in dict.fromkeys(path.resolve() for path in (*named, *remembered)):
        if not place.is_dir():
            failures.append(f"{place} does not exist")
            continue
        try:
            found = weights_sha256(place)
        except CheckpointError as error:
            failures.append(str(error))
            continue
        if found == wanted:
            return place
        failures.append(f"{place} is another model, whose weights have SHA-256 {found}")
    raise CheckpointError("the base of this "
                          f"run{f', whose weights have SHA-256 {wanted},' if wanted else ''} was not found: "
                          f"{'; '.join(failures) or 'no place is known'}. Bring it back, or {advice}")


def find_base_on_rank0(config: Config, progress: Mapping[str, Any], run_dir: Path, ranks: Ranks,
                       warn: Callable[[str], None]) -> Path:
    """`find_base` by rank 0 for all. Collective: every rank must call it."""
    found = ranks.broadcast(ranks.on_rank0(lambda: str(find_base(config, progress, run_dir, warn))))
    return on_each_machine(Path(found), ranks)


def on_each_machine(folder: Path, ranks: Ranks) -> Path:
    """The folder that rank 0 found; of a model of the hub, each machine's own copy, which one rank downloads.

    Collective: every rank must call it.
    """
    name = huggingface.name_of_download(folder)
    if name is None or ranks.world_size == 1:
        return folder
    ranks.raise_on_all(lambda: None if ranks.local_rank else huggingface.hub_model(name))
    return ranks.raise_on_all(lambda: huggingface.hub_model(name))


# ------------------------------------------------------------------------------------------- how it starts


def start_from(found: Found, loaded: Loaded,
               identity_of: Optional[Callable[[Config, Mapping[str, Any]], Mapping[str, Any]]], run_dir: Path,
               ranks: Ranks) -> Start:
    """How a run starts from the checkpoint that was found. Collective: every rank must call it.

    Args:
        identity_of: `Inputs.identity`; None: what the run reads is unknown, and not compared.
    """
    folder, own, warnings = found
    if folder is None:
        return Start(loaded.config, None, False, {}, None, None, {}, [], warnings)
    folder = on_each_machine(folder, ranks)
    state = ranks.raise_on_all(lambda: store.read_state(folder))
    if not (resumed := continues(state, own, loaded.config)):
        refuse_own_weights(state, folder, run_dir, loaded.config)
    config, notes = ranks.raise_on_all(lambda: adopt_model(loaded, state if resumed else {}, folder))
    if not resumed:
        warnings += ranks.raise_on_all(lambda: check_model(folder, config, loaded.sources))
        part = f"the first {config.keep_layers} layers of " if config.keep_layers else ""
        notes.append(f"weights from {part}{folder}; optimizer, schedule and step start anew")
        state, own = {}, False
    elif identity_of is not None:
        identity = ranks.raise_on_all(lambda: identity_of(config, state["identity"]))
        changes = ranks.raise_on_all(lambda: check_changes(state, config, identity, folder, own,
                                                           loaded.sources))
        notes, warnings = notes + changes.notes, warnings + changes.warnings
    allowed = {*loaded.warnings} if loaded.is_plan else ()
    if conflicts := [conflict for conflict in rules(config, start_is_read=True) if conflict not in allowed]:
        raise SettingsError(*conflicts)

    # What a later start needs to find the same base again.
    named, base, base_sha256, remembered = named_checkpoint(config), None, None, {}
    if not own:
        base, base_sha256 = folder, ranks.broadcast(ranks.on_rank0(lambda: weights_sha256(folder)))
        remembered = {"wandb_run_id": None, "begun_from": named}
    else:
        progress = state["progress"]
        home = run_dir if is_inside(folder, run_dir) else folder.resolve().parents[1]
        if progress.get("base_beside") and home != run_dir:  # the checkpoint of another run is resumed here
            remembered["base_beside"] = relative_to_run(home / progress["base_beside"], run_dir)
        if named is not None and not names_its_start(named, progress, run_dir):
            own_steps = [place for place in store.places(named, run_dir)
                         if place.is_dir() and is_inside(place, run_dir)]
            remembered["begun_from"] = own_steps[0].name if own_steps else named
        if config.lora_enabled:
            base_sha256 = progress.get("base_sha256")
            base = find_base_on_rank0(config, progress, home, ranks, warnings.append)
    if base is not None:
        remembered |= {"base": str(base.resolve()), "base_sha256": base_sha256,
                       "base_beside": relative_to_run(base, run_dir)}
    return Start(config, folder, own, state, base, base_sha256, remembered, notes, warnings)


def adopt_model(loaded: Loaded, state: Mapping[str, Any], folder: Path) -> tuple[Config, list[str]]:
    """The settings, with those of the model that no layer sets from the run's start; and what to say of it.

    Args:
        state: the trainer's state that is resumed; empty: the start is the model in the folder alone.
    """
    if state:
        saved = {name: state["settings"][name.upper()] for name in MODEL_SETTINGS
                 if name.upper() in state["settings"]}
        model = huggingface.checked_settings(saved, str(folder / store.STATE))
    else:
        peft.refuse_adapters(folder)
        model = read_model_config(folder)
    values = model.model_dump(include={*MODEL_SETTINGS})
    if not {*FEED_FORWARD}.isdisjoint(loaded.sources):  # another of them may set the same width
        values = {name: value for name, value in values.items() if name not in FEED_FORWARD}
    if loaded.config.keep_layers:
        del values["n_layers"]
    config = loaded.with_defaults(values).config
    taken = {name.upper(): value for name, value in values.items()
             if getattr(config, name) != getattr(loaded.config, name)}
    return config, [f"model settings from {folder}: {assignments(taken).removeprefix('set ')}"] * bool(taken)


def refuse_random_weights(config: Config, run_dir: Path) -> None:
    """Raise SettingsError if supervised fine-tuning would start from random weights without RANDOM_INIT."""
    if config.training_stage == "sft" and not (config.random_init or config.distillation_enabled):
        raise SettingsError(f"TRAINING_STAGE=sft has nothing to start from: {run_dir} has no checkpoint, and "
                            "the settings name none. Set PRETRAIN_CHECKPOINT to the model to fine-tune, or "
                            "RANDOM_INIT=true to train random weights")


def refuse_own_weights(state: Mapping[str, Any], folder: Path, run_dir: Path, config: Config) -> None:
    """Raise CheckpointError if a stage would overwrite the run whose weights it starts from."""
    of_another_stage = bool(state) and state["settings"]["TRAINING_STAGE"] != config.training_stage
    whole = not state.get("settings", {}).get("LORA_ENABLED")
    if is_inside(folder, run_dir) and (of_another_stage or (config.lora_enabled and whole)):
        raise CheckpointError(f"{folder} lies in the folder of RUN_NAME={run_dir.name}, which this run would "
                              f"overwrite. Choose another RUN_NAME, and set {start_setting(config)}={folder}")
