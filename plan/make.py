"""What a run will do, decided before it starts: `make_plan`, and `complete` once the facts are known.

Rank 0 makes the plan, from its command line, environment and files, and the other ranks get it. Nothing is
written, and torch is not needed. A plan decides in this order:

1. Flags, the environment, `--config`, `.env` and presets (layers.py) give the explicit settings.
2. They decide the start (starts.py): `new`, `continue` or `from`.
3. A continued run keeps its record. These are the three rules:
   - Flags and the process environment apply to this start.
   - A run's record is next, `--config`, `.env` and presets follow, and defaults are last.
   - Settings that are safe on a resume, MAX_STEPS and EPOCHS still come from `--config`, `.env` and presets.
     One line lists what else of them is not used. A path counts as the same if its content is.
4. Unset settings follow from DEPTH, the start, the stage and the number of steps (derived.py).
5. Rules between settings (config.py) and the record (resume_rules.py) are checked.

`complete` adds what depends on facts: the number of rows, then the hardware.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional

from common.errors import CheckpointError, PaddockError, SettingsError
from common.remote import is_hub_name
from common.text import counted
from config import (
    FEED_FORWARD,
    MODEL_SETTINGS,
    START_FROM,
    Config,
    batch_rules,
    input_rules,
    on_resume,
    path_rules,
    rules,
)
from plan import derived
from plan.identity import Identity
from plan.layers import Layer, Values, exported, read_flags, read_layers
from plan.messages import (
    assigned,
    both_lengths,
    cautions,
    launch_problems,
    no_step_left,
    notes_on_layers,
    notes_on_names,
    notes_on_start,
    without_extension,
    without_switch,
)
from plan.model_rules import check_model, model_of_start
from plan.names import shortened, validate
from plan.starts import Asked, Known, Start, find_start, started_from

LENGTH = ("max_steps", "epochs")  # two ways to set the length of a run
# Settings of one start, which a record does not pass on.
FOR_ONE_START = {
    "preset", "output_dir", "run_name", "resume", "stop_step", "epochs", "allow_resume_mismatch", "cache_dir",
    "device", "world_size", "device_memory", "debug", "extensions", "profile_steps", "memory_snapshot"}
RESTARTS = ("reset_optimizer", "start_step", "random_init")  # of the first start of a run


@dataclass(frozen=True)
class Plan:
    """What a run will do: data that prints, compares and is sent to other ranks. It holds no secret."""

    config: Config  # every setting, resolved
    sources: Mapping[str, str]  # where each explicit setting comes from
    start: Start = Start()
    identities: Mapping[str, Identity] = field(default_factory=dict)  # data, base, teacher
    generation: Mapping[str, Any] = field(default_factory=dict)  # fields of generation_config.json
    token_ids: Mapping[str, Any] = field(default_factory=dict)  # rows that LoRA trains, by matrix
    untrained_ids: Sequence[int] = ()  # that the base has not learned, and that the data lacks
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()  # settings that follow from the data or the hardware
    check: bool = False  # only check the run
    for_other_hardware: bool = False  # data, tokenizer and base may be missing
    exports: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables for libraries; not sent

    def to_json(self) -> dict[str, Any]:
        names = ("sources", "identities", "generation", "token_ids", "untrained_ids", "notes", "warnings",
                 "deferred", "check", "for_other_hardware")
        return {"config": self.config.model_dump(), "set": sorted(self.config.model_fields_set),
                "start": self.start._asdict(), **{name: getattr(self, name) for name in names}}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Plan":
        fields = {name: tuple(value) if isinstance(value, list) else value
                  for name, value in content.items()}
        config = Config.model_construct({*fields.pop("set")}, **fields.pop("config"))
        return Plan(config, start=Start(**fields.pop("start")), **fields)

    def to_record(self) -> dict[str, Any]:
        """Return what a run's folder keeps of the plan beside the settings."""
        return {"sources": dict(self.sources), "start": self.start._asdict(), "identities": self.identities}

    def of_files(self) -> dict[str, list]:
        """Return the settings of `.env`, presets and files, and their places, for an automatic restart."""
        return {name: [getattr(self.config, name), where] for name, where in self.sources.items()
                if where not in ("command line", "environment") and not where.startswith("DEPTH=")}

    def changed(self, notes: Sequence[str] = (), warnings: Sequence[str] = (), **settings: Any) -> "Plan":
        """Return the plan with other values of settings, and with further messages."""
        return replace(self, config=self.config.model_copy(update=settings),
                       notes=(*self.notes, *notes), warnings=(*self.warnings, *warnings))


class Facts(NamedTuple):
    """What a plan does not know before the data and the hardware have been looked at."""

    device: str = "cpu"  # cuda, mps or cpu
    rows: Optional[int] = None  # of the training split


class Settled(NamedTuple):
    """The explicit settings that apply, the record that a continued run keeps, and the start."""

    config: Config
    given: Values
    unused: Values  # of `--config`, `.env` and presets, which the record overrides
    recorded: dict[str, Any]
    start: Start
    explicit: frozenset[str]  # settings from flags and the environment
    invalid: dict[str, str]  # messages by setting
    notes: list[str]
    warnings: list[str]
    error: Optional[PaddockError] = None  # there is no such start


def make_plan(argv: Sequence[str] = (), environ: Optional[Mapping[str, str]] = None, known: Known = Known(),
              *, own_flags: Sequence[str] = (), complete: bool = True) -> Plan:
    """Return the plan of the run that a command line, the environment and files describe.

    Raises one PaddockError with all problems. A script's `own_flags` are suggested for unknown flags. Without
    `complete`, there is no start, and the rules between settings are not checked, for scripts that need only
    a few settings.
    """
    environ = os.environ if environ is None else environ
    flags = read_flags(argv, own_flags)
    layers = read_layers(flags, environ, complete)
    problems = [problem for layer in layers for problem in layer.problems]
    settled = settle(layers, known, complete)
    config, given, unused, recorded, start = settled[:5]
    notes, warnings = settled.notes, settled.warnings
    problems += settled.invalid.values()

    # Unset settings, in order of precedence: DEPTH, the start, the stage, the number of steps.
    decided = {*given, *recorded, *({"max_steps"} if config.epochs else ())}
    by_depth = derived.settings_of_depth(config, decided) if "depth" in given else {}
    config = config.model_copy(update=by_depth)
    sources = {name: where for name, (_, where) in given.items()}
    by_start = derived.settings_of_start(config, decided, start)  # its row length limits DEPTH's
    sources |= dict.fromkeys(by_depth.keys() - by_start.keys(), f"DEPTH={config.depth}")
    start, of_model, model_notes = model_of_start(start, config, sources, settled.explicit)
    config = config.model_copy(update=by_start | of_model)
    by_heads = {}
    if "n_kv_heads" not in decided | of_model.keys() and config.n_heads % config.n_kv_heads:
        by_heads = {"n_kv_heads": config.n_heads}
        config = config.model_copy(update=by_heads)
    by_stage, deferred = derived.settings_of_stage(config, decided | by_depth.keys(), start)
    config = config.model_copy(update=by_stage)
    unset = Config.model_fields.keys() - decided - {*deferred}
    by_length = derived.settings_of_length(config.max_steps, unset)
    config = derived.with_all_rows(config.model_copy(update=by_length))

    # Errors. A plan for other hardware needs neither data, a tokenizer nor a base.
    elsewhere = flags.check and "RANK" not in environ and bool(config.device_memory or config.world_size > 1)
    missing = [*input_rules(config)] if elsewhere else []
    if complete and not settled.error:
        no_step = () if "max_steps" in deferred else no_step_left(start, config)
        messages = (*no_step, *launch_problems(config, environ, flags.check),
                    *rules(config, shape_is_unknown=start.download is not None),
                    *both_lengths(given), *without_extension(config, given),
                    *(without_switch(config, layers, "teacher_model", "distillation_enabled")
                      if "distillation_enabled" not in unused else ()))
        # Omit conflicts with a setting whose value is invalid.
        names = re.compile("|".join(rf"\b{name.upper()}\b" for name in settled.invalid) or "(?!)")
        problems += (message for message in messages if message not in missing and not names.search(message))
    if settled.error:  # a start may complete the settings: only what conflicts in any case is reported first
        problems = [*problems, *path_rules(config)]
    if problems or settled.error:
        raise SettingsError(*problems) if problems else settled.error
    if complete and start.kind == "from" and start.folder:
        warnings += check_model(start, config, sources)

    by_stage = {name: value for name, value in by_stage.items() if name not in deferred}
    width = f" and DIM={config.dim}" if start.kind == "from" and "learning_rate" in by_stage else ""
    stage = f"TRAINING_STAGE={config.training_stage}{' with LoRA' if config.lora_enabled else ''}{width}"
    chosen = {f"Kept from {start.folder}:": recorded, f"DEPTH={config.depth} sets": by_depth,
              f"{stage} {'set' if width else 'sets'}": by_stage,
              "From the prepared data or the start checkpoint:": by_start,
              f"MAX_STEPS={config.max_steps} sets": by_length, f"N_HEADS={config.n_heads} sets": by_heads}
    notes += [f"{how} {text}" for how, values in chosen.items() if (text := assigned(values))]
    notes += notes_on_layers(layers, given, environ)
    if complete:
        notes += [*model_notes, *notes_on_start(start, config)]
    warnings += [*cautions(config, layers, environ, deferred), *missing]
    return Plan(config, sources, start, notes=tuple(notes), warnings=tuple(warnings),
                deferred=tuple(deferred), check=flags.check, for_other_hardware=elsewhere,
                exports=exported(layers))


def complete(plan: Plan, facts: Facts) -> Plan:
    """Return the plan with the settings that follow from facts: the number of rows, then the hardware."""
    config, deferred = plan.config, {*plan.deferred} - {"compile", "learning_rate"}
    if deferred and facts.rows is not None:
        chosen = derived.settings_of_data(config, facts.rows, deferred)
        also = f" and EPOCHS={config.epochs:g}" if "max_steps" in chosen else ""
        text = assigned(chosen)
        plan = plan.changed([f"The {counted(facts.rows, 'training row')}{also} set {text}"] if text else [],
                            **chosen)
        if conflicts := [*batch_rules(plan.config), *no_step_left(plan.start, plan.config)]:
            raise SettingsError(*conflicts)
    on_cpu = not config.device_memory and facts.device == "cpu"
    is_small = (config.matrix_count < derived.SMALL_MODEL
                and config.activation_checkpointing != "selective")
    if "compile" in plan.deferred and on_cpu and is_small:
        plan = plan.changed(compile=False)
    return plan


# ------------------------------------------------------------------ explicit settings and the record


def settle(layers: Sequence[Layer], known: Known, complete: bool = True) -> Settled:
    """Return the explicit settings that apply, the start, and the record."""
    at = {name: number for number, layer in enumerate(layers) for name in layer.values}
    given = {name: layers[number].values[name] for name, number in at.items()}
    explicit = frozenset(name for name, number in at.items() if layers[number].for_this_start)
    notes, warnings = [*notes_on_names(layers, given)], []

    # MAX_STEPS and EPOCHS are one setting: the one in the higher layer counts.
    if validate(given)[0].epochs is None:
        given.pop("epochs", None)
    elif "max_steps" in given and at["max_steps"] != at["epochs"]:
        lower, higher = sorted(LENGTH, key=at.__getitem__)
        value, where = given.pop(lower)
        notes.append(f"{higher.upper()} ({given[higher][1]}) replaces {lower.upper()}={value} ({where})")
    config, invalid = validate(given)
    if not complete:
        return Settled(config, given, {}, {}, Start(), explicit, invalid, notes, warnings)

    # The START_FROM setting of the highest layer counts; in one layer, the usual one of the stage. `none`
    # replaces what a lower layer names, and names nothing.
    for name in [name for name in START_FROM if name in given and getattr(config, name) is None]:
        del given[name]
    named = sorted(config.start_settings, key=at.__getitem__, reverse=True)
    named = [name for name in config.start_settings if at[name] == at[named[0]]] if named else []
    replaced = [name for name in config.start_settings if name not in named]
    config = config.model_copy(update=dict.fromkeys(replaced))
    if others := [*named[1:], *replaced]:
        places = [f"{name.upper()} ({given[name][1]})" for name in (named[0], *others)]
        notes.append(f"The start is {places[0]}, not {' or '.join(places[1:])}")
    for name in replaced:
        del given[name]
    asked = Asked(config, named[0] if named else None, explicit, frozenset(given))
    start, failure = Start(), None
    try:
        start = find_start(asked, known, warnings.append)
    except PaddockError as error:
        failure = error
    if not start.continues:
        return Settled(config, given, {}, {}, start, explicit, invalid, notes, warnings, failure)

    record = start.state["settings"]
    unused = {name: pair for name, pair in given.items() if not applies(name, asked, start)}
    given = {name: pair for name, pair in given.items() if name not in unused}
    config, invalid = validate(given)
    recorded = recorded_settings(record, config, given, start)
    if unused:
        files = dict.fromkeys(where.rpartition(":")[0] or where for _, where in unused.values())
        values = ", ".join(f"{name.upper()}={shortened(str(value))}" for name, (value, _) in unused.items())
        notes.append(f"Not used from {' and '.join(files)}, because a flag would be needed to change a run "
                     f"that has started (for a new run, set another RUN_NAME): {values}")
    config = config.model_copy(update=recorded)
    config.model_fields_set.difference_update(  # a recorded default is not one that somebody chose
        name for name in {*recorded} - {"max_steps"} if recorded[name] == Config.model_fields[name].default)
    return Settled(config, given, unused, recorded, start, explicit, invalid, notes, warnings)


def applies(name: str, asked: Asked, start: Start) -> bool:
    """Return whether an explicit setting applies to a run that continues (see the three rules above)."""
    record = start.state["settings"]
    kind, value, now = on_resume(name), record.get(name.upper()), getattr(asked.config, name)
    stage = record["TRAINING_STAGE"]
    if name in asked.explicit or kind == "safe" or name in LENGTH or now == value:
        return True
    if name.endswith("_data_path") and name != f"{stage}_data_path":
        return True  # of another stage
    if name in START_FROM and name == asked.setting and start.setting != "resume":
        return start.named == now or started_from(now, start.state["progress"], asked.run_dir)
    if start.keeps_record or kind == "curve":
        if not value or name not in (f"{stage}_data_path", "tokenizer_path", "teacher_model"):
            return False
        # What was moved is found by the new path, and its content is compared.
        places = [value, os.path.join(asked.config.output_dir, value)]
        is_on_hub = name != f"{stage}_data_path" and is_hub_name(value.partition("@")[0])
        return not is_on_hub and not any(map(os.path.exists, places))
    return True  # a new run may not differ from what it continues: it is compared, and refused


def recorded_settings(record: Mapping[str, Any], config: Config, given: Values, start: Start
                      ) -> dict[str, Any]:
    """Return the settings that a continued run keeps, as they were recorded; new defaults do not apply."""
    left_out = {*FOR_ONE_START, *({"max_steps"} if config.epochs else ())}
    if not start.is_own:
        left_out |= {*RESTARTS, *START_FROM}
    elif any(name in given and getattr(config, name) for name in START_FROM):
        left_out |= {*START_FROM}
    if "depth" in given and config.depth != record.get("DEPTH"):
        same_stage = config.model_copy(update={"training_stage": record["TRAINING_STAGE"]})
        left_out |= derived.settings_of_depth(same_stage, ()).keys()
    if not {*FEED_FORWARD}.isdisjoint(given):  # the width may be set in another way
        left_out |= {*FEED_FORWARD}
    if type(steps := record.get("MAX_STEPS")) is int:  # what followed from it follows from the new number
        by_length = derived.settings_of_length(steps, Config.model_fields)
        left_out |= {name for name, every in by_length.items() if every == record.get(name.upper())}
    values = {name: record[name.upper()] for name in Config.model_fields
              if name not in left_out and name not in given and name.upper() in record}
    valid, invalid = validate({name: (value, start.folder) for name, value in values.items()})
    if bad := [message for name, message in invalid.items() if name in MODEL_SETTINGS]:
        raise CheckpointError(f"{bad[0]}; use another checkpoint")
    # Keep equal values unchanged, so that 600 is not recorded as 600.0.
    return {name: value if value == getattr(valid, name) else getattr(valid, name)
            for name, value in values.items() if name not in invalid}


def peek(argv: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings, without validation or defaults, and the environment with `.env`'s variables."""
    layers = read_layers(read_flags(argv), os.environ)
    settled = settle(layers, Known())
    values = {name: value for name, (value, _) in settled.given.items()} | settled.recorded
    return ({name: str(value) for name, value in values.items() if value is not None},
            {**exported(layers), **os.environ})
