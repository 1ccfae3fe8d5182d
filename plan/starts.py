"""Where a run starts, and the model that it starts from. There are three kinds of start:

- `new`: initial weights.
- `continue`: a checkpoint with its optimizer, step, best loss, reference and base, in the stage of its
  record. It is the newest checkpoint of RUN_NAME, the one that RESUME names, or one of the stage that the
  settings choose, which a `*_CHECKPOINT` names. TRAINING_STAGE of `.env` does not count for a run that has
  checkpoints, and a flag or environment variable that asks for another stage is an error.
- `from`: the weights of another stage, of another model or of adapters, or of any checkpoint with
  RESET_OPTIMIZER.

`find_start` decides from the settings and the files on disk. It writes nothing and needs no torch.
docs/starts.md lists its decisions in a table.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional

from checkpoint import model_json, store
from checkpoint.manifest import fault_of
from checkpoint.model_json import ADAPTERS, LORA_FIELDS, context_of, read_model_config, read_model_json
from common.errors import CheckpointError, SettingsError
from common.remote import is_hub_name
from config import FEED_FORWARD, FREE_SETTINGS, MODEL_SETTINGS, SHAPE_SETTINGS, Config, extension_module
from plan.identity import adapted_model, weights_sha256
from plan.names import SETTING_OF, assignments, in_env

MODEL_SHAPE = (*map(str.upper, SHAPE_SETTINGS), "HIDDEN_DIM")


class Start(NamedTuple):
    """The start of a run."""

    kind: Literal["new", "continue", "from"] = "new"
    folder: Optional[str] = None  # a checkpoint or model folder; None for a hub model until it is downloaded
    is_own: bool = False  # the checkpoint is in the run's folder
    named: Optional[str] = None  # the name in the settings, unless the start was found by RUN_NAME
    setting: str = ""  # the setting that names it
    step: int = 0  # of the checkpoint
    base: Optional[str] = None  # the folder of the model under the adapters, which are or will be trained
    layers: Optional[int] = None  # the model is cut to its first layers
    download: Optional[str] = None  # a hub model to download first

    @property
    def has_adapters(self) -> bool:
        return self.folder is not None and os.path.exists(os.path.join(self.folder, ADAPTERS))

    @property
    def state(self) -> dict[str, Any]:
        """The trainer state to continue with; empty for the other kinds."""
        return store.read_state(Path(self.folder)) if self.kind == "continue" else {}


@dataclass(frozen=True)
class Known:
    """Facts about the start's files that were found after a plan was made. It is then made again."""

    damaged: Mapping[str, str] = field(default_factory=dict)  # checkpoint -> what is wrong with it
    hub: Mapping[str, str] = field(default_factory=dict)  # name of a hub model -> its local folder

    def check(self, folder: Path) -> None:
        if reason := self.damaged.get(str(folder)):
            raise CheckpointError(reason)
        if (folder / store.MANIFEST).exists():
            files = store.read_manifest(folder)["files"]  # a plan reads only the state
            if store.STATE in files and (fault := fault_of(folder, store.STATE, files[store.STATE])):
                raise CheckpointError(f"{fault}; use another checkpoint")


class Asked(NamedTuple):
    """What the settings say about the start, and where."""

    config: Config  # the settings of all layers, without a record
    setting: Optional[str]  # the START_FROM setting that counts
    sources: Mapping[str, str]  # where each setting is set
    for_this_start: frozenset[str]  # settings from flags and the environment

    @property
    def named(self) -> Optional[str]:
        return self.setting and getattr(self.config, self.setting)

    @property
    def run_dir(self) -> Path:
        return Path(self.config.output_dir) / (self.config.run_name or "-")

    @property
    def usual(self) -> str:
        return self.config.usual_start.upper()

    def restarts(self, names: Iterable[str]) -> list[str]:
        """Return RESET_OPTIMIZER and START_STEP if they are set and among `names`."""
        is_set = {"reset_optimizer": self.config.reset_optimizer,
                  "start_step": self.config.start_step is not None}
        return [name for name in is_set if is_set[name] and name in names]


def find_start(asked: Asked, known: Known = Known(), warn: store.Warn = store.warn_on_console) -> Start:
    """Return the start that the settings ask for. An impossible one raises SettingsError or CheckpointError.

    A run's own record comes first: the command that started it, from a checkpoint, also continues it.
    """
    config, newest = asked.config, None
    if config.resume != "never":
        newest, messages = store.newest_verified(asked.run_dir / "checkpoints", check=known.check)
        for message in messages:
            warn(message)
    if config.resume not in ("auto", "never"):
        return find_resumed(asked, newest, known, warn)
    if newest:
        return find_own(asked, newest, known, warn)
    if config.resume == "auto" and (asked.run_dir / "events.jsonl").exists():  # it would be overwritten
        store.refuse_lost(asked.run_dir, "Restore it, or start again with RESUME=never or another RUN_NAME")
    return find_first(asked, known, warn)


def find_own(asked: Asked, newest: Path, known: Known, warn: store.Warn) -> Start:
    """Return the start of a run that has checkpoints, of which `newest` is the last."""
    config, run_dir, named, state = asked.config, asked.run_dir, asked.named, store.read_state(newest)
    # Flags and the environment may not ask for another stage in this folder, or for a restart.
    stage = state["settings"]["TRAINING_STAGE"]
    if "training_stage" in asked.for_this_start and config.training_stage != stage:
        names_no_other = named is None or run_dir.name in (named, Path(named).name)
        way = "; or RESUME=never moves the old run aside"
        if names_no_other:
            way = f", and set {asked.usual}={newest}"
        raise CheckpointError(f"{run_dir} has a run of TRAINING_STAGE={stage} at {newest.name}, which "
                              f"TRAINING_STAGE={config.training_stage} would overwrite. Choose another "
                              f"RUN_NAME{way}")
    for name in asked.restarts(asked.for_this_start):
        if (value := getattr(config, name)) != state["settings"].get(name.upper()):
            raise SettingsError(f"{in_env(name, value)} would restart the run in {run_dir}, which is at step "
                                f"{state['progress']['step']}. Choose another RUN_NAME, and set "
                                f"{asked.usual}={run_dir.name}, or remove {name.upper()}")

    # A flag may name the run's start, or one of its steps to go back to; a line of `.env` stays there.
    own = Start("continue", str(newest), True, named, step=state["progress"]["step"])
    if named is None or started_from(named, state["progress"], run_dir):
        return own
    if asked.setting not in asked.for_this_start:
        return own._replace(named=None)  # the plan lists what of .env is not used
    folder = locate(asked, known, warn)
    if not (folder and is_inside(folder, run_dir)):
        raise CheckpointError(explain_other_start(newest, folder or named, asked, asked.setting.upper()))
    refuse_lora_on_full(asked, folder)
    if folder.resolve() == newest.resolve():
        return own
    warn(f"{newest} is not used, because the settings name {folder}")
    step = store.read_state(folder)["progress"]["step"]
    return Start("continue", str(folder), True, named, asked.setting, step)


def find_resumed(asked: Asked, newest: Optional[Path], known: Known, warn: store.Warn) -> Start:
    """Return the start from the checkpoint that RESUME names."""
    path, run_dir = asked.config.resume, asked.run_dir
    try:
        folder = store.locate(path, run_dir, warn, known.check, only_local=True)
    except CheckpointError as error:
        raise CheckpointError(f"RESUME={path} ({asked.sources['resume']}): {error}") from error
    state = store.read_state(folder)
    setting = (asked.setting or asked.config.usual_start).upper()
    stage = state.get("settings", {}).get("TRAINING_STAGE")
    wanted = asked.config.training_stage if "training_stage" in asked.for_this_start else stage
    if newest and not is_inside(folder, run_dir):
        setting = "RESUME" if state and stage == wanted else f"RESUME=auto and {setting}"
        raise CheckpointError(explain_other_start(newest, folder, asked, setting))
    if not state or stage != wanted:
        what = f"a checkpoint of TRAINING_STAGE={stage}" if state else "a model without a trainer state"
        raise CheckpointError(f"RESUME={path} names {what}, which TRAINING_STAGE={wanted or 'pretrain'} "
                              f"cannot continue. To start from its weights, set {setting}={path} and "
                              "RESUME=auto")
    for name in asked.restarts(asked.for_this_start):
        raise SettingsError(f"{name.upper()} conflicts with RESUME={path}, which continues with the "
                            f"optimizer and the step of the checkpoint; set {setting}={path} and "
                            "RESUME=auto instead, or remove it")
    if asked.setting in asked.for_this_start and not started_from(asked.named, state["progress"], run_dir):
        origin = state["progress"].get("begun_from") or "initial weights"
        raise SettingsError(f"{setting}={asked.named} conflicts with RESUME={path}, a checkpoint of a run "
                            f"that started from {origin}; remove one of them")
    refuse_lora_on_full(asked, folder)
    if newest and newest.resolve() != folder.resolve():
        warn(f"{newest} is not used, because the settings name {folder}")
    return Start("continue", str(folder), is_inside(folder, run_dir), path, "resume",
                 state["progress"]["step"])


def find_first(asked: Asked, known: Known, warn: store.Warn) -> Start:
    """Return the first start of a run that has no checkpoint yet."""
    config, run_dir, named = asked.config, asked.run_dir, asked.named
    # A .env for all stages names this run, which has no checkpoint yet, as the start of the next stage.
    if named and config.resume == "auto" and not [*run_dir.glob("*.safetensors")]:
        places = Path(named).expanduser(), run_dir.parent / named
        named = None if run_dir.absolute() in [place.absolute() for place in places] else named
    if named is None:
        for name in asked.restarts(asked.sources):
            raise SettingsError(f"{in_env(name, getattr(config, name))} needs a start checkpoint, but the "
                                f"settings name none; set {asked.usual}, or remove it")
        if asked.named and config.training_stage != "pretrain" and not config.random_init:
            raise SettingsError(f"{asked.setting.upper()}={asked.named} names this run, which has no "
                                "checkpoint to start from; set it to the model to fine-tune")
        return Start()
    if (folder := locate(asked, known, warn)) is None:
        return Start("from", None, False, named, asked.setting, download=named)
    if config.resume == "never" and is_inside(folder, run_dir):
        raise CheckpointError(f"{folder} belongs to the run that RESUME=never would move aside. Choose "
                              f"another RUN_NAME, and set {asked.setting.upper()}={folder}")
    # A checkpoint of the same stage is continued. LoRA on a full checkpoint starts from its weights. Adapters
    # are continued unless LORA_ENABLED=false asks for full training, for which they must be merged.
    state = store.read_state(folder)
    recorded = state.get("settings", {})
    has_adapters = recorded.get("LORA_ENABLED")
    fits = has_adapters == config.lora_enabled or has_adapters and "lora_enabled" not in asked.sources
    if fits and recorded["TRAINING_STAGE"] == config.training_stage and not config.reset_optimizer:
        return Start("continue", str(folder), False, named, asked.setting, state["progress"]["step"])
    start = Start("from", str(folder), False, named, asked.setting)
    if not config.lora_enabled:
        return start
    base = base_of_adapters(folder, known) if start.has_adapters else folder
    if isinstance(base, Path):
        return start._replace(base=str(base))
    return start._replace(folder=None, download=base)


def base_of_adapters(folder: Path, known: Known) -> Path | str:
    """Return the folder in which the base of these adapters should be; its hash is compared later.

    For a hub model that is not downloaded yet, return its name.
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


def refuse_lora_on_full(asked: Asked, folder: Path) -> None:
    """Raise CheckpointError if LoRA would start from a full checkpoint in the run's own folder."""
    is_full = not store.read_state(folder).get("settings", {}).get("LORA_ENABLED")
    asks_for_lora = "lora_enabled" in asked.for_this_start and asked.config.lora_enabled
    if is_inside(folder, asked.run_dir) and asks_for_lora and is_full:
        raise CheckpointError(f"{folder} is in the folder of RUN_NAME={asked.run_dir.name}, which this run "
                              f"would overwrite. Choose another RUN_NAME, and set {asked.usual}={folder}")


def explain_other_start(newest: Path, folder: Path | str, asked: Asked, setting: str) -> str:
    """Return the error for a start that would lose the steps of a run up to `newest`, with alternatives."""
    run_dir, origin = newest.parent.parent, store.read_state(newest)["progress"].get("begun_from")
    new = f"to start a new run, choose another RUN_NAME with {setting}={folder}"
    if asked.config.resume in ("auto", "never"):
        change = f"set {setting}={origin}" if origin else f"remove {setting}"
        new += "; or RESUME=never moves the old one aside"
    else:
        change = "remove RESUME"
    return (f"{run_dir} has a run at {newest.name} that started from {origin or 'initial weights'}, but "
            f"the settings would restart it from {folder}. To resume it, {change}; or {new}")


def locate(asked: Asked, known: Known, warn: store.Warn) -> Optional[Path]:
    """Return the folder that the setting names; None for a model of the hub that `known` does not have."""
    name = asked.named
    is_local = any(os.path.isdir(place) for place in store.places(name, asked.run_dir))
    if not is_local and "/" in name and is_hub_name(name.partition("@")[0]):
        return Path(known.hub[name]) if name in known.hub else None
    try:
        return store.locate(name, asked.run_dir, warn, known.check)
    except CheckpointError as error:
        where = asked.sources[asked.setting]
        raise CheckpointError(f"{asked.setting.upper()}={name} ({where}): {error}") from error


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
    """Return whether the run started from this name or path, returned to it, or has it as its base."""
    if names_its_start(named, progress, run_dir):
        return True
    if wanted := progress.get("base_sha256"):
        with suppress(CheckpointError):
            folder = store.locate(named, run_dir, lambda _: None, store.read_manifest)
            return not is_inside(folder, run_dir) and weights_sha256(folder) == wanted
    return False


def names_its_start(named: str, progress: Mapping[str, Any], run_dir: Path) -> bool:
    """Return whether the run started from this name or path, or returned to it."""
    def places(name: str) -> set[Path]:
        return {place.resolve() for place in store.places(name, run_dir)}

    origin = progress.get("begun_from")
    # The name may mean the checkpoint, the folder of checkpoints, or the run.
    bases = [place for base in base_places(progress, run_dir)
             for place in (base.resolve(), *base.resolve().parents[:2])]
    return origin is not None and (origin == named or not places(named).isdisjoint([*places(origin), *bases]))


def model_of_start(start: Start, config: Config, sources: Mapping[str, str], for_this_start: Iterable[str]
                   ) -> tuple[Start, dict[str, Any], list[str]]:
    """Return the start, with `layers` if the model is cut, the settings that its weights bring, and notes.

    A continued run has these settings in its record.
    """
    if start.kind != "from" or start.folder is None:
        return start, {}, []
    if not config.lora_enabled:
        remedy = "train them with LORA_ENABLED=true, or merge them first"
        model_json.refuse_adapters(Path(start.folder), remedy)
    folder = Path(start.base or start.folder)
    model = adapted_model(Path(start.folder), folder) if start.has_adapters else read_model_config(folder)
    values, notes = model.model_dump(include={*MODEL_SETTINGS}), []
    if start.has_adapters:
        content = read_model_json(Path(start.folder) / ADAPTERS)
        values |= {name: content[key] for name, key in LORA_FIELDS.items() if content.get(key) is not None}
        for name in ("lora_rank", "lora_alpha", "lora_rslora"):
            theirs, asked = values.get(name, Config.model_fields[name].default), getattr(config, name)
            if name in sources and theirs != asked:
                raise SettingsError(f"{in_env(name, asked)} ({sources[name]}) does not fit the adapters in "
                                    f"{start.folder}, with {in_env(name, theirs)}; set that, or nothing")
        if isinstance(layers := content.get("target_modules"), list):
            values["lora_target_modules"] = Config(lora_target_modules=",".join(layers)).lora_target_modules
    if not {*FEED_FORWARD}.isdisjoint(sources):  # the width may be set in another way
        values = {name: value for name, value in values.items() if name not in FEED_FORWARD}
    is_cut = "n_layers" in sources and config.n_layers < model.n_layers and (
        "n_layers" in for_this_start or config.training_stage == "pretrain")
    if is_cut and config.lora_enabled:
        raise SettingsError(f"N_LAYERS={config.n_layers} cuts the {model.n_layers} layers of {folder}, but "
                            "other programs would open adapters with the whole model; remove N_LAYERS, or "
                            "set LORA_ENABLED=false")
    if is_cut:
        start = start._replace(layers=config.n_layers)
        notes.append(f"N_LAYERS={config.n_layers} keeps the first {config.n_layers} of the {model.n_layers} "
                     f"layers of {folder}, with its embedding, norm and head")
    values = {name: value for name, value in values.items() if name not in sources}
    adopted = {name: value for name, value in values.items() if value != getattr(config, name)}
    if adopted:
        notes.insert(0, f"model settings from {folder}: {assignments(adopted)}")
    return start, values, notes


def check_model(start: Start, config: Config, sources: Mapping[str, str] = {}) -> list[str]:
    """Compare the settings, which come from `sources`, with the model of a start; return warnings."""
    folder = Path(start.base or start.folder)
    saved = read_model_config(folder)
    if start.layers:
        saved = saved.model_copy(update={"n_layers": start.layers})

    def compare(names: Iterable[str]) -> tuple[dict[str, Any], str]:
        """Return the saved values of settings that differ, and a description."""
        saved_values, differences = {}, []
        for name in names:
            there, here = getattr(saved, name.lower()), getattr(config, name.lower())
            if there == here or name == "HEAD_WIDTH" and saved.head_dim == config.head_dim:
                continue
            setting = SETTING_OF.get(name, name)
            causes = FEED_FORWARD if name == "HIDDEN_DIM" else (name.lower(),)
            cause = next((cause for cause in causes if cause in sources), "")
            by = f" by {cause.upper()}" * (cause not in ("", setting.lower()))
            where = f"{by} ({sources[cause]})" if cause else ""
            saved_values[name] = there
            differences.append(f"{setting} is {there} there and {here} here{where}")
        return saved_values, "; ".join(differences)

    saved_values, description = compare(MODEL_SHAPE)
    if saved_values:
        fewer = saved_values.keys() == {"N_LAYERS"} and config.n_layers < saved.n_layers
        cut = f", or use its first layers alone with the flag --n-layers {config.n_layers}" if fewer else ""
        raise CheckpointError(f"{folder} contains a different model: {description}. To start from it, remove "
                              f"these settings, or set {assignments(saved_values)}{cut}")
    # Different values may be intended, for example to learn longer contexts.
    names = FREE_SETTINGS if saved.rope_scaling_factor else FREE_SETTINGS[:-4]  # those of a scaling
    saved_values, description = compare(map(str.upper, names))
    other_trainers = extension_module("other_trainers")
    warnings = other_trainers.unused_fields(folder) if other_trainers else []
    if saved_values:
        merge = "; other programs open the adapters with its settings: merge them" * config.lora_enabled
        warnings.append(f"the model in {folder} was trained with other settings: {description}{merge}")
    if (context := context_of(folder, config)) < config.max_seq_len:
        warnings.append(f"MAX_SEQ_LEN={config.max_seq_len} is longer than the {context:,} positions of the "
                        f"model in {folder} (max_position_embeddings): those beyond are untrained. "
                        "Lower MAX_SEQ_LEN, or set ROPE_SCALING_FACTOR or a larger ROPE_THETA")
    return warnings
