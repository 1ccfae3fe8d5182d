"""Where a run starts. There are three kinds of start, and no fourth:

- `new`: initial weights.
- `continue`: a checkpoint of the same stage, with its optimizer, step, best loss, reference and base. It is
  the newest checkpoint of RUN_NAME, the one that RESUME names, or one that a `*_CHECKPOINT` names.
- `from`: the weights of another stage, of another model or of adapters, or of any checkpoint with
  RESET_OPTIMIZER.

`find_start` decides by the settings and the files that are there. It writes nothing and needs no torch.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional

from checkpoint import store
from checkpoint.manifest import fault_of
from checkpoint.model_json import ADAPTERS, read_model_json
from common.errors import CheckpointError, SettingsError
from common.remote import is_hub_name
from config import Config
from plan.identity import weights_sha256


class Start(NamedTuple):
    """The start of a run."""

    kind: Literal["new", "continue", "from"] = "new"
    folder: Optional[str] = None  # a checkpoint or model folder; none for a hub model that is not here yet
    is_own: bool = False  # the checkpoint is in the run's folder
    named: Optional[str] = None  # what the settings name, unless the start was found by RUN_NAME
    setting: str = ""  # the setting that names it
    step: int = 0  # of the checkpoint
    base: Optional[str] = None  # the folder of the model under the adapters, which are or will be trained
    layers: Optional[int] = None  # the model is cut to its first layers
    download: Optional[str] = None  # a model of the hub that is needed first

    @property
    def continues(self) -> bool:
        return self.kind == "continue"

    @property
    def keeps_record(self) -> bool:
        """Whether the run's record overrides files: it is the run's own, or RESUME names it."""
        return self.is_own or self.setting == "resume"

    @property
    def has_adapters(self) -> bool:
        return self.folder is not None and os.path.exists(os.path.join(self.folder, ADAPTERS))

    @property
    def state(self) -> dict[str, Any]:
        """The trainer state to continue with; empty for the other kinds."""
        return store.read_state(Path(self.folder)) if self.continues else {}


@dataclass(frozen=True)
class Known:
    """What was found out about the start's files after a plan was made, with which it is made again."""

    damaged: Mapping[str, str] = field(default_factory=dict)  # checkpoint -> what is wrong with it
    hub: Mapping[str, str] = field(default_factory=dict)  # name of a hub model -> its local folder

    def check(self, folder: Path) -> None:
        if reason := self.damaged.get(str(folder)):
            raise CheckpointError(reason)
        if (folder / store.MANIFEST).exists():
            files = store.read_manifest(folder)["files"]  # of which the plan reads the state
            if store.STATE in files and (fault := fault_of(folder, store.STATE, files[store.STATE])):
                raise CheckpointError(f"{fault}; use another checkpoint")


class Asked(NamedTuple):
    """What the settings say about the start, and how."""

    config: Config  # of all layers, without a record
    setting: Optional[str]  # the START_FROM setting that counts: of the highest layer, this stage's usual one
    explicit: frozenset[str]  # settings from flags and the environment
    given: frozenset[str]  # settings from any layer

    @property
    def named(self) -> Optional[str]:
        return self.setting and getattr(self.config, self.setting)

    @property
    def run_dir(self) -> Path:
        return Path(self.config.output_dir) / (self.config.run_name or "-")


def find_start(asked: Asked, known: Known = Known(), warn: store.Warn = store.warn_on_console) -> Start:
    """Return the start that the settings ask for. An impossible one raises SettingsError or CheckpointError.

    A run's own record comes first: the command that started it also continues it, although it names the
    checkpoint that it started from.
    """
    config, run_dir, named = asked.config, asked.run_dir, asked.named
    newest = None
    if config.resume != "never":
        newest, messages = store.newest_verified(run_dir / "checkpoints", check=known.check)
        for message in messages:
            warn(message)
    if config.resume not in ("auto", "never"):
        return find_resumed(asked, newest, known, warn)
    if newest is None:
        return find_first(asked, known, warn)

    state = store.read_state(newest)
    own = Start("continue", str(newest), True, named, step=state["progress"]["step"])
    refuse_other_stage(asked, newest, state)
    refuse_restart(asked, state)
    if named is None or started_from(named, state["progress"], run_dir):
        return own
    try:
        folder = locate(named, run_dir, known, warn)
    except CheckpointError:
        if asked.setting in asked.explicit:
            raise
        folder = None
    if folder and is_inside(folder, run_dir):  # back to one of its steps
        check_fits(asked, folder)
        if folder.resolve() == newest.resolve():
            return own
        warn(f"{newest} is not used, because the settings name {folder}")
        step = store.read_state(folder)["progress"]["step"]
        return Start("continue", str(folder), True, named, asked.setting, step)
    if asked.setting in asked.explicit:
        raise CheckpointError(explain_other_start(newest, folder or named, state, asked,
                                                  asked.setting.upper()))
    return own._replace(named=None)  # the plan lists what of .env is not used


def find_resumed(asked: Asked, newest: Optional[Path], known: Known, warn: store.Warn) -> Start:
    """Return the start from the checkpoint that RESUME names."""
    path, run_dir = asked.config.resume, asked.run_dir
    folder = store.locate(path, run_dir, warn, known.check, only_local=True)
    state = store.read_state(folder)
    setting = (asked.setting or asked.config.usual_start).upper()
    stage = state.get("settings", {}).get("TRAINING_STAGE")
    wanted = asked.config.training_stage if "training_stage" in asked.explicit else stage
    if newest and not is_inside(folder, run_dir):
        setting = "RESUME" if state and stage == wanted else f"RESUME=auto and {setting}"
        raise CheckpointError(explain_other_start(newest, folder, store.read_state(newest), asked, setting))
    if not state or stage != wanted:
        what = f"a checkpoint of TRAINING_STAGE={stage}" if state else "a model without a trainer state"
        raise CheckpointError(f"RESUME={path} names {what}, which TRAINING_STAGE={wanted or 'pretrain'} "
                              f"cannot continue. To start from its weights, set {setting}={path} and "
                              "RESUME=auto")
    for name in ("reset_optimizer", "start_step"):
        if name in asked.explicit and is_set(getattr(asked.config, name)):
            raise SettingsError(f"{name.upper()} conflicts with RESUME={path}, which continues with the "
                                f"optimizer and the step of the checkpoint; set {setting}={path} and "
                                "RESUME=auto instead, or remove it")
    if asked.setting in asked.explicit and not started_from(asked.named, state["progress"], run_dir):
        begun = state["progress"].get("begun_from") or "initial weights"
        raise SettingsError(f"{setting}={asked.named} conflicts with RESUME={path}, a checkpoint of a run "
                            f"that started from {begun}; remove one of them")
    check_fits(asked, folder)
    own = is_inside(folder, run_dir)
    if newest and newest.resolve() != folder.resolve():
        warn(f"{newest} is not used, because the settings name {folder}")
    return Start("continue", str(folder), own, path, "resume", state["progress"]["step"])


def find_first(asked: Asked, known: Known, warn: store.Warn) -> Start:
    """Return the first start of a run that has no checkpoint yet."""
    config, run_dir, named = asked.config, asked.run_dir, asked.named
    # A .env for all stages names this run, which has no checkpoint yet, as the start of the next stage.
    if named and config.resume == "auto" and not [*run_dir.glob("*.safetensors")]:
        places = Path(named).expanduser(), run_dir.parent / named
        named = None if run_dir.absolute() in [place.absolute() for place in places] else named
    if named is None:
        for name in ("reset_optimizer", "start_step"):
            if name in asked.given and is_set(getattr(config, name)):
                raise SettingsError(
                    f"{name.upper()}={str(getattr(config, name)).lower()} needs a start checkpoint, but the "
                    f"settings name none; set {config.usual_start.upper()}, or remove it")
        if asked.named and config.training_stage != "pretrain" and not config.random_init:
            raise SettingsError(f"{asked.setting.upper()}={asked.named} names this run, which has no "
                                "checkpoint to start from; set it to the model to fine-tune")
        return Start()
    folder = locate(named, run_dir, known, warn)
    if folder is None:
        return Start("from", None, False, named, asked.setting, download=named)
    if config.resume == "never" and is_inside(folder, run_dir):
        raise CheckpointError(f"{folder} belongs to the run that RESUME=never would move aside. Choose "
                              f"another RUN_NAME, and set {asked.setting.upper()}={folder}")
    state = store.read_state(folder)
    if not config.reset_optimizer and continues(state, asked):
        return Start("continue", str(folder), False, named, asked.setting, state["progress"]["step"])
    start = Start("from", str(folder), False, named, asked.setting)
    if config.lora_enabled:
        base = base_of_adapters(folder, known) if start.has_adapters else folder
        if isinstance(base, Path):
            start = start._replace(base=str(base))
        else:
            start = start._replace(folder=None, download=base)
    return start


def base_of_adapters(folder: Path, known: Known) -> Path | str:
    """Return where the base of these adapters, of a run or of PEFT, should be; its hash is compared later.

    It is a name if it is a model of the hub that `known` does not have.
    """
    state, content = store.read_state(folder), read_model_json(folder / ADAPTERS)
    name = content.get("base_model_name_or_path") or ""
    if content.get("revision"):  # a model of the hub
        name = f"{name}@{content['revision']}"
    run_dir = folder.resolve().parents[1]
    places = [*base_places(state.get("progress", {}), run_dir), *store.places(name, run_dir)]
    if name in known.hub:
        places.insert(0, Path(known.hub[name]))
    for place in places:
        if (place / "config.json").is_file():
            return place
    if is_hub_name(name.partition("@")[0]):
        return name
    raise CheckpointError(f"the base of the adapters in {folder} was not found: {name or 'none is named'}; "
                          f"restore it there, or correct base_model_name_or_path in {folder / ADAPTERS}")


def continues(state: Mapping[str, Any], asked: Asked) -> bool:
    """Return whether a checkpoint that a `*_CHECKPOINT` names is continued, because it is of the same kind.

    LoRA on a full checkpoint of the stage starts from its weights. Adapters are continued unless
    LORA_ENABLED=false asks for full training, for which they must be merged.
    """
    if not state or state["settings"]["TRAINING_STAGE"] != asked.config.training_stage:
        return False
    has_adapters = state["settings"]["LORA_ENABLED"]
    return has_adapters == asked.config.lora_enabled or has_adapters and "lora_enabled" not in asked.given


# ------------------------------------------------------------------------------------------ refusals


def refuse_other_stage(asked: Asked, newest: Path, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a flag asks for another stage in the folder of a run."""
    config, stage, named = asked.config, state["settings"]["TRAINING_STAGE"], asked.named
    if "training_stage" not in asked.explicit or config.training_stage == stage:
        return
    is_own = named is None or asked.run_dir.name in (named, Path(named).name)
    ways = [f"Choose another RUN_NAME{f', and set {config.usual_start.upper()}={newest}' if is_own else ''}"]
    ways += [] if is_own else ["RESUME=never moves the old run aside"]
    raise CheckpointError(f"{asked.run_dir} has a run of TRAINING_STAGE={stage} at {newest.name}, which "
                          f"TRAINING_STAGE={config.training_stage} would overwrite. {'; or '.join(ways)}")


def refuse_restart(asked: Asked, state: Mapping[str, Any]) -> None:
    """Raise SettingsError if a flag would restart a run that has steps."""
    for name in ("reset_optimizer", "start_step"):
        value, recorded = getattr(asked.config, name), state["settings"].get(name.upper())
        if name in asked.explicit and is_set(value) and value != recorded:
            raise SettingsError(
                f"{name.upper()}={str(value).lower()} would restart the run in {asked.run_dir}, which is at "
                f"step {state['progress']['step']}. Choose another RUN_NAME, and set "
                f"{asked.config.usual_start.upper()}={asked.run_dir.name}, or remove {name.upper()}")


def check_fits(asked: Asked, folder: Path) -> None:
    """Raise CheckpointError if LoRA would start from a full checkpoint in the run's own folder."""
    state, config = store.read_state(folder), asked.config
    whole = not state.get("settings", {}).get("LORA_ENABLED")
    asks_for_lora = "lora_enabled" in asked.explicit and config.lora_enabled
    if is_inside(folder, asked.run_dir) and asks_for_lora and whole:
        raise CheckpointError(f"{folder} is in the folder of RUN_NAME={asked.run_dir.name}, which this run "
                              f"would overwrite. Choose another RUN_NAME, and set "
                              f"{config.usual_start.upper()}={folder}")


def explain_other_start(newest: Path, folder: Path | str, state: Mapping[str, Any], asked: Asked, setting: str
                        ) -> str:
    """Return the error for a start that would lose the steps of a run up to `newest`, with alternatives."""
    run_dir, by_path = newest.parent.parent, asked.config.resume not in ("auto", "never")
    begun = state["progress"].get("begun_from")
    change = "remove RESUME" if by_path else f"set {setting}={begun}" if begun else f"remove {setting}"
    ways = [f"to resume it, {change}",
            f"to start a new run, choose another RUN_NAME with {setting}={folder}"]
    if not by_path:
        ways.append("RESUME=never moves the old one aside")
    advice = "; or ".join(ways)
    return (f"{run_dir} has a run at {newest.name} that started from {begun or 'initial weights'}, but the "
            f"settings would restart it from {folder}. {advice[0].upper()}{advice[1:]}")


# --------------------------------------------------------------------------------- places and names


def is_set(value: Any) -> bool:
    return value is not None and value is not False  # START_STEP=0 is set


def locate(name: str, run_dir: Path, known: Known, warn: store.Warn) -> Optional[Path]:
    """Return the folder that a setting names; None for a model of the hub that `known` does not have."""
    is_local = any(os.path.isdir(place) for place in store.places(name, run_dir))
    is_on_hub = "/" in name and is_hub_name(name.partition("@")[0])
    if not is_local and is_on_hub:
        return Path(known.hub[name]) if name in known.hub else None
    return store.locate(name, run_dir, warn, known.check)


def is_inside(folder: Path, run_dir: Path) -> bool:
    """Return whether a folder is one of the run's checkpoints, which may be a link to another disk."""
    parents = folder.resolve().parent, folder.absolute().parent.resolve()
    return (run_dir / "checkpoints").resolve() in parents


def base_places(progress: Mapping[str, Any], run_dir: Path) -> Iterator[Path]:
    """Yield where a run's base was when the run started, as a path and relative to the run's folder."""
    for place in (progress.get("base"), progress.get("base_beside")):
        if place:
            yield run_dir / place  # an absolute path stays absolute


def started_from(named: str, progress: Mapping[str, Any], run_dir: Path) -> bool:
    """Return whether this name or path is what the run started from or returned to, or has its weights."""
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

    begun = progress.get("begun_from")
    # The name may mean the checkpoint, the folder of checkpoints, or the run.
    bases = [place for base in base_places(progress, run_dir)
             for place in (base.resolve(), *base.resolve().parents[:2])]
    return begun is not None and (begun == named or not places(named).isdisjoint([*places(begun), *bases]))
