"""Where a run begins: its own newest checkpoint, or what the settings name; and the base that it stands on, known by its hash."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from checkpoint import hf_format, peft_format, store
from checkpoint.resume_rules import check_changes
from common.errors import CheckpointError, SettingsError
from config import START_FROM, Config
from model_utils import check_model
from parallel.collectives import Ranks
from training.run_folder import earlier_runs


class Start(NamedTuple):
    """Where a run begins."""

    folder: Optional[Path]  # a checkpoint or a model folder; None = initial weights
    own: bool  # it is of this very run
    state: dict[str, Any]  # the trainer's, to go on with; empty where optimizer and step begin anew
    base: Optional[Path]  # whose weights the run began with, where they are read now
    base_sha256: Optional[str]  # of these weights
    remembered: dict[str, Any]  # what Progress keeps of all this
    notes: list[str]
    warnings: list[str]


def named_checkpoint(config: Config) -> Optional[str]:
    """The checkpoint that the settings name to start from, if any."""
    if config.resume not in ("auto", "never"):
        return config.resume
    return next((getattr(config, name) for name in START_FROM if getattr(config, name)), None)


def weights_sha256(folder: Path) -> str:
    """The hash of a model folder's weights; the same in whatever files they lie."""
    peft_format.refuse_adapters(folder)
    return hf_format.weights_sha256(hf_format.load_model_weights(folder))


def is_inside(folder: Path, run_dir: Path) -> bool:
    """Whether this is one of the run's own checkpoints, which may be a link to another disk."""
    return (run_dir / "checkpoints").resolve() in (folder.resolve().parent, folder.absolute().parent.resolve())


def continues(state: Mapping[str, Any], own: bool, config: Config) -> bool:
    """Whether a run goes on where this trainer's state was, or takes no more than the weights."""
    if not state or state["settings"]["TRAINING_STAGE"] != config.training_stage:
        return False
    return own or not (config.reset_optimizer or config.lora_enabled or state["settings"]["LORA_ENABLED"])


# ------------------------------------------------------------------------------------------------------------- which checkpoint


def find_checkpoint(config: Config, run_dir: Path, ranks: Ranks) -> tuple[Optional[Path], bool, list[str]]:
    """The checkpoint to start from, if any, whether it continues this very run, and warnings.

    Collective: every rank must call it.

    A run that began from the named checkpoint goes on from its own newest, so that the command which started a job also
    continues it when it was pre-empted. One of its own that is named takes it back there. Nothing else may be named for it.

    Raises:
        CheckpointError: the checkpoint that was asked for is missing or damaged, or all of the run's are; or the run has steps
            that would be lost.
        SettingsError: there is nothing to begin with.
    """
    def find() -> list:
        newest, warnings = (None, []) if config.resume == "never" else store.newest_verified(run_dir / "checkpoints")
        named = named_checkpoint(config)
        own_state = store.read_state(newest) if newest else {}
        progress = own_state.get("progress", {})
        if named is None and newest is None:
            refuse_random_weights(config, run_dir)
        if newest is None and config.resume == "auto" and (earlier := earlier_runs(run_dir)):
            warnings.append(f"{run_dir} has no checkpoint but those of a run that RESUME=never has moved aside, so this one "
                            f"begins anew; to go on with the one before, RESUME={earlier[-1].parent}")
        if named is None or (newest and began_from(named, progress, run_dir)):
            return [newest and str(newest), newest is not None, warnings]
        folder = store.locate(named, run_dir, warnings.append)
        if (folder / store.MANIFEST).exists():
            store.verify(folder)
        own = config.resume == named
        if config.resume == "never" and is_inside(folder, run_dir):
            raise CheckpointError(f"{folder} is of the very run that RESUME=never would move aside. Choose another RUN_NAME, "
                                  f"and set {start_setting(config)}={folder}")
        if newest:
            state = store.read_state(folder)
            refuse_own_weights(state, folder, run_dir, config)
            begins_anew = not own and (config.reset_optimizer or config.start_step is not None)
            own = is_inside(folder, run_dir) and not begins_anew
            if not own:
                raise CheckpointError(how_to_begin_anew(newest, folder, own_state, config))
            if newest.resolve() != folder.resolve():
                warnings.append(f"{newest} is left behind, because the settings name {folder}")
        return [str(folder), own, warnings]

    folder, own, warnings = ranks.broadcast(ranks.on_rank0(find))
    return (Path(folder) if folder else None), own, warnings


def began_from(named: str, progress: Mapping[str, Any], run_dir: Path) -> bool:
    """Whether a run was begun, or taken up again, from what the settings name now, however that is spelt.

    Held against each other are the names, the places that they stand for (which may be those of a run that has gone on since),
    and only then the weights themselves.
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
    """Whether a run was begun, or taken up again, from what has this name or lies in this place."""
    def places(name: str) -> set[Path]:
        return {place.resolve() for place in store.places(name, run_dir)}

    then = progress.get("begun_from")
    # What is named may be the checkpoint, the folder of checkpoints, or the run.
    bases = [place for base in remembered_places(progress, run_dir) for place in (base.resolve(), *base.resolve().parents[:2])]
    return then is not None and (then == named or not places(named).isdisjoint([*places(then), *bases]))


def how_to_begin_anew(newest: Path, folder: Path, own_state: Mapping[str, Any], config: Config) -> str:
    """What to tell of a start that would cost a run its steps, of which `newest` has the last."""
    run_dir, by_path = newest.parent.parent, config.resume not in ("auto", "never")
    begun, setting = own_state["progress"].get("begun_from"), "RESUME" if by_path else start_setting(config)
    ways = []
    if continues(own_state, True, config):
        ways.append(f"to go on with it, {f'set {setting}={begun}' if begun and not by_path else f'leave {setting} away'}")
    if not (is_inside(folder, run_dir) and config.lora_enabled):
        ways.append(f"to begin anew, choose another RUN_NAME with {setting}={folder}")
        if not by_path and not is_inside(folder, run_dir):
            ways.append("RESUME=never moves the old one aside")
    text = "; or ".join(ways)
    return (f"{run_dir} has a run at {newest.name} that began from {begun or 'initial weights'}, and the settings would begin it "
            f"anew from {folder}. {text[0].upper()}{text[1:]}")


def start_setting(config: Config) -> str:
    """The setting that names what this stage begins with: the one that is set, or the one that would be."""
    fitting = {"pretrain": "pretrain_checkpoint", "sft": "pretrain_checkpoint", "dpo": "instruct_checkpoint"}
    return next((name for name in START_FROM if getattr(config, name)), fitting[config.training_stage]).upper()


# --------------------------------------------------------------------------------------------------------------------- the base


def remembered_places(progress: Mapping[str, Any], run_dir: Path) -> list[Path]:
    """Where a run's base was when it began, and where that is from the run's folder on, if the two were moved together."""
    places = (progress.get("base"), progress.get("base_beside"))
    return [run_dir / place for place in places if place]  # what is absolute stays so


def beside(base: Path, run_dir: Path) -> str:
    """The way from a run's folder to its base."""
    return os.path.relpath(base.resolve(), run_dir.resolve())


def find_base(config: Config, progress: Mapping[str, Any], run_dir: Path, warn: Callable[[str], None]) -> Path:
    """The weights that a run began with: wherever the settings name them now, where they were, or where they lie from the run's
    folder on. They are known by their hash.

    Raises:
        CheckpointError: they are at none of these places; names each.
    """
    remembered, wanted = remembered_places(progress, run_dir), progress.get("base_sha256")
    named, told = [], []
    for name in dict.fromkeys(filter(None, (named_checkpoint(config), *(getattr(config, each) for each in START_FROM)))):
        try:
            folder = store.locate(name, run_dir, warn)
        except CheckpointError as error:
            told.append(str(error))
            continue
        # Where a run is named that has gone on since, its newest checkpoint is no longer the one.
        named += [folder.parent / base.name for base in remembered[:1] if (folder.parent / base.name).is_dir()] + [folder]
    if wanted is None:  # a version before this one kept no hash
        place = next((place for place in (*remembered, *named) if place.is_dir()), None)
        if place in named and place not in remembered:
            warn(f"{place} is taken on trust for what this run began with, whose hash was not kept")
        if place:
            return place
    for place in dict.fromkeys(path.resolve() for path in (*named, *remembered)):
        if not place.is_dir():
            told.append(f"{place} is gone")
            continue
        try:
            found = weights_sha256(place)
        except CheckpointError as error:
            told.append(str(error))
            continue
        if found == wanted:
            return place
        told.append(f"{place} is another base, whose weights have SHA-256 {found}")
    raise CheckpointError(f"the base of this run{f', whose weights have SHA-256 {wanted},' if wanted else ''} is not there: "
                          f"{'; '.join(told) or 'no place is known'}. Bring it back, or set {start_setting(config)} to the "
                          "folder where it is now")


def find_base_on_rank0(config: Config, progress: Mapping[str, Any], run_dir: Path, ranks: Ranks,
                       warn: Callable[[str], None]) -> Path:
    """The same, looked for by rank 0. Collective: every rank must call it."""
    return Path(ranks.broadcast(ranks.on_rank0(lambda: str(find_base(config, progress, run_dir, warn)))))


# ---------------------------------------------------------------------------------------------------------------- how it begins


def start_at(folder: Optional[Path], own: bool, warnings: list[str], config: Config, identity: Optional[Mapping[str, Any]],
             run_dir: Path, ranks: Ranks) -> Start:
    """How a run begins with what `find_checkpoint` has found. Collective: every rank must call it.

    Args:
        identity: what the run reads (`resume_rules.identity`); None where that is not known, and not compared.
    Raises:
        CheckpointError: it belongs to another run than the settings describe.
    """
    if folder is None:
        return Start(None, False, {}, None, None, {}, [], warnings)
    state, notes = ranks.raise_on_all(lambda: store.read_state(folder)), []
    if continues(state, own, config):
        if identity is not None:
            notes, more = ranks.raise_on_all(lambda: check_changes(state, config, identity, folder, own))
            warnings += more
    else:
        refuse_own_weights(state, folder, run_dir, config)
        warnings += ranks.raise_on_all(lambda: check_model(folder, config))
        notes = [f"weights from {folder}; optimizer, schedule and step begin anew"]
        state, own = {}, False
    named, base, base_sha256, remembered = named_checkpoint(config), None, None, {}
    if not own:
        base, base_sha256 = folder, ranks.broadcast(ranks.on_rank0(lambda: weights_sha256(folder)))
        remembered = {"wandb_run_id": None, "begun_from": named}
    else:
        progress, home = state["progress"], run_dir if is_inside(folder, run_dir) else folder.resolve().parents[1]
        if progress.get("base_beside") and home != run_dir:  # another run goes on here
            remembered["base_beside"] = beside(home / progress["base_beside"], run_dir)
        if named is not None and not names_its_start(named, progress, run_dir):
            own_steps = [place for place in store.places(named, run_dir) if place.is_dir() and is_inside(place, run_dir)]
            remembered["begun_from"] = own_steps[0].name if own_steps else named
        if config.lora_enabled:
            base_sha256 = progress.get("base_sha256")
            base = find_base_on_rank0(config, progress, home, ranks, warnings.append)
    if base is not None:
        remembered |= {"base": str(base.resolve()), "base_sha256": base_sha256, "base_beside": beside(base, run_dir)}
    return Start(folder, own, state, base, base_sha256, remembered, notes, warnings)


def refuse_random_weights(config: Config, run_dir: Path) -> None:
    """Raises SettingsError where a model that can do nothing yet would be taught to answer, and nobody has said so."""
    if config.training_stage == "sft" and not (config.random_init or config.distillation_enabled):
        raise SettingsError(f"TRAINING_STAGE=sft has nothing to begin with: {run_dir} has no checkpoint, and the settings name "
                            "none. Set PRETRAIN_CHECKPOINT to the model that is to learn to answer, or RANDOM_INIT=true to train "
                            "random weights")


def refuse_own_weights(state: Mapping[str, Any], folder: Path, run_dir: Path, config: Config) -> None:
    """Raises CheckpointError where a stage would write over the very weights that it begins with, or what the last one told."""
    of_another_stage = bool(state) and state["settings"]["TRAINING_STAGE"] != config.training_stage
    whole = not state.get("settings", {}).get("LORA_ENABLED")
    if is_inside(folder, run_dir) and (of_another_stage or (config.lora_enabled and whole)):
        raise CheckpointError(f"{folder} lies in the folder of RUN_NAME={run_dir.name}, and this run would write over it. Choose "
                              f"another RUN_NAME, and set {start_setting(config)}={folder}")
