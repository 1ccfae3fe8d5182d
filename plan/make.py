"""What a run will do, decided before it starts: `make_plan`, and `complete` once the facts are known.

Rank 0 makes the plan, from its command line, environment and files, and the other ranks get it. Nothing is
written, and torch is not needed. A plan decides in this order, and so do the functions below:

1. `take_explicit`: flags, the environment, `--config`, `.env` and presets (layers.py) give the explicit
   settings.
2. `choose_start`: they decide the start (starts.py): `new`, `continue` or `from`.
3. `keep_record`: a continued run keeps its record (resume_rules.py). These are the three rules:
   - Flags and the process environment apply to this start.
   - A run's record is next, `--config`, `.env` and presets follow, and defaults are last.
   - Exceptions: MAX_STEPS, EPOCHS and the settings that are safe on a resume come from `--config`, `.env` and
     presets before the record. So `.env` can lengthen a run, but not change its LEARNING_RATE. One line lists
     what is not used. A path counts as the same if its content is.
4. `fill_in`: unset settings follow from DEPTH, the start, the stage and the number of steps (derived.py).
5. Rules between settings are checked (config.py), and what is probably a mistake is a warning (messages.py).

`complete` adds what depends on facts: the number of rows, then the hardware. run/facts.py collects them, and
compares a continued run with its record.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from common.errors import PaddockError, SettingsError
from common.text import counted
from config import START_FROM, Config, batch_rules, input_rules, path_rules, rules
from plan import derived, messages
from plan.identity import Identity
from plan.layers import LENGTH, Layer, Values, exported, read_flags, read_layers
from plan.names import shortened, validate
from plan.resume_rules import applies, recorded_settings
from plan.starts import Asked, Known, Start, check_model, find_start, model_of_start


@dataclass(frozen=True)
class Plan:
    """What a run will do: data that prints, compares and is sent to other ranks. It holds no secret."""

    config: Config  # every setting, resolved
    sources: Mapping[str, str]  # where each explicit setting comes from
    start: Start = Start()
    identities: Mapping[str, Identity] = field(default_factory=dict)  # data, base, teacher
    generation: Mapping[str, Any] = field(default_factory=dict)  # fields of generation_config.json
    token_ids: Mapping[str, Any] = field(default_factory=dict)  # rows that LoRA trains, by matrix
    untrained_ids: Sequence[int] = ()  # ids that the base has not learned and the data does not contain
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()  # settings that follow from the data or the hardware
    check: bool = False  # only check the run
    for_other_hardware: bool = False  # data, tokenizer and base may be missing
    exports: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables for libraries; not sent

    def to_json(self) -> dict[str, Any]:
        content = {name: value for name, value in vars(self).items() if name != "exports"}
        return content | {"config": self.config.model_dump(), "start": self.start._asdict(),
                          "set": sorted(self.config.model_fields_set)}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Plan":
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
        config = Config.model_construct({*fields.pop("set")}, **fields.pop("config"))
        return Plan(config, start=Start(**fields.pop("start")), **fields)

    def of_files(self) -> dict[str, list]:
        """Return the settings of `.env`, presets and files, and their places, for an automatic restart."""
        return {name: [getattr(self.config, name), where] for name, where in self.sources.items()
                if where not in ("command line", "environment") and not where.startswith("DEPTH=")}

    def changed(self, notes: Sequence[str] = (), warnings: Sequence[str] = (), **settings: Any) -> "Plan":
        return replace(self, config=self.config.model_copy(update=settings),
                       notes=(*self.notes, *notes), warnings=(*self.warnings, *warnings))


@dataclass
class Draft:
    """A plan that is being made."""

    layers: list[Layer]  # from lowest to highest priority
    given: Values = field(default_factory=dict)  # explicit settings that apply, and where they are set
    for_this_start: frozenset[str] = frozenset()  # settings from flags and the environment
    config: Config = Config()
    asked: Optional[Asked] = None
    start: Start = Start()
    recorded: dict[str, Any] = field(default_factory=dict)  # settings that a continued run keeps
    unused: Values = field(default_factory=dict)  # of `--config`, `.env` and presets, which these override
    sources: dict[str, str] = field(default_factory=dict)  # where each setting comes from, or what implies it
    deferred: list[str] = field(default_factory=list)  # settings that follow from the data or the hardware
    invalid: dict[str, str] = field(default_factory=dict)  # messages by setting
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def make_plan(argv: Sequence[str] = (), environ: Optional[Mapping[str, str]] = None, known: Known = Known(),
              *, own_flags: Sequence[str] = (), complete: bool = True) -> Plan:
    """Return the plan of the run that a command line, the environment and files describe.

    Raises one PaddockError with all problems. A script's `own_flags` are suggested for unknown flags. Scripts
    that need only a few settings leave out the start and the rules between settings, with complete=False.
    """
    environ = os.environ if environ is None else environ
    flags = read_flags(argv, own_flags)
    layers = read_layers(flags, environ, complete)
    draft = Draft(layers)
    take_explicit(draft)
    if complete:
        choose_start(draft, known)
        keep_record(draft)
    fill_in(draft)

    # Rules. A plan for other hardware needs neither data, a tokenizer nor a base.
    config, given, start, problems = draft.config, draft.given, draft.start, faults(draft)
    elsewhere = flags.check and "RANK" not in environ and bool(config.device_memory or config.world_size > 1)
    missing = [*input_rules(config)] if elsewhere else []
    if complete:
        conflicts = [] if "max_steps" in draft.deferred else [*messages.no_step_left(start, config)]
        conflicts += [*messages.launch_problems(config, environ, flags.check),
                      *rules(config, shape_is_unknown=start.download is not None),
                      *messages.without_extension(config, given)]
        if {*LENGTH} <= given.keys():
            conflicts.append(f"EPOCHS={given['epochs'][0]} and MAX_STEPS={given['max_steps'][0]} are both "
                             "set; keep one")
        if "distillation_enabled" not in draft.unused:
            conflicts += messages.without_switch(config, layers, "teacher_model", "distillation_enabled")
        # Omit conflicts with a setting whose value is invalid, or for which an unknown name may be meant.
        unset = Config.model_fields.keys() - given.keys() if len(problems) > len(draft.invalid) else ()
        names = re.compile("|".join(rf"\b{name.upper()}\b" for name in (*draft.invalid, *unset)) or "(?!)")
        problems += [each for each in conflicts if each not in missing and not names.search(each)]
    if problems:
        raise SettingsError(*problems)

    draft.notes += messages.notes_on_layers(layers, given, environ)
    if complete:
        draft.notes += messages.notes_on_start(start, config)
        if start.kind == "from" and start.folder:
            draft.warnings += check_model(start, config, draft.sources)
    draft.warnings += [*messages.cautions(config, layers, environ, draft.deferred), *missing]
    return Plan(config, draft.sources, start, notes=tuple(draft.notes), warnings=tuple(draft.warnings),
                deferred=tuple(draft.deferred), check=flags.check, for_other_hardware=elsewhere,
                exports=exported(layers))


def faults(draft: Draft) -> list[str]:
    return [problem for layer in draft.layers for problem in layer.problems] + [*draft.invalid.values()]


def peek(argv: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings, without validation or defaults, and the environment with `.env`'s variables."""
    draft = Draft(read_layers(read_flags(argv), os.environ))
    take_explicit(draft)
    with suppress(PaddockError):
        choose_start(draft, Known())
        keep_record(draft)
    values = {name: value for name, (value, _) in draft.given.items()} | draft.recorded
    return ({name: str(value) for name, value in values.items() if value is not None},
            {**exported(draft.layers), **os.environ})


def take_explicit(draft: Draft) -> None:
    """Take the value of the highest layer for each setting."""
    layers = draft.layers
    at = {name: number for number, layer in enumerate(layers) for name in layer.values}
    given = draft.given = {name: layers[number].values[name] for name, number in at.items()}
    draft.for_this_start = frozenset(name for name, number in at.items() if layers[number].for_this_start)
    for layer in layers:  # what names of other trainers set
        for name, note in layer.notes.items():
            if name not in Config.model_fields or name in given and given[name] is layer.values.get(name):
                draft.notes.append(note)
            elif name in given:
                value, where = given[name]
                draft.notes.append(f"{note}, replaced by {shortened(str(value))} ({where})")

    # MAX_STEPS and EPOCHS are one setting: the one in the higher layer counts.
    length, invalid = validate(given)
    if length.epochs is None and "epochs" not in invalid:
        given.pop("epochs", None)
    elif "max_steps" in given and at["max_steps"] != at["epochs"]:
        lower, higher = sorted(LENGTH, key=at.__getitem__)
        value, where = given.pop(lower)
        draft.notes.append(f"{higher.upper()} ({given[higher][1]}) replaces {lower.upper()}={value} "
                           f"({where})")
    draft.config, draft.invalid = validate(given)


def choose_start(draft: Draft, known: Known) -> None:
    """Find the start that the settings name.

    The START_FROM setting of the highest layer counts; in one layer, the usual one of the stage. `none`
    replaces what a lower layer names, and names nothing.
    """
    given, config = draft.given, draft.config
    at = {name: number for number, layer in enumerate(draft.layers) for name in layer.values}
    for name in [name for name in START_FROM if name in given and getattr(config, name) is None]:
        del given[name]
    highest = max((at[name] for name in config.start_settings), default=0)
    named = [name for name in config.start_settings if at[name] == highest]
    replaced = [name for name in config.start_settings if name not in named]
    if others := [*named[1:], *replaced]:
        places = [f"{name.upper()} ({given[name][1]})" for name in (named[0], *others)]
        draft.notes.append(f"The start is {places[0]}, not {' or '.join(places[1:])}")
    for name in replaced:
        del given[name]
    draft.config = config.model_copy(update=dict.fromkeys(replaced))
    places = {name: where for name, (_, where) in given.items()}
    draft.asked = Asked(draft.config, named[0] if named else None, places, draft.for_this_start)
    try:
        draft.start = find_start(draft.asked, known, draft.warnings.append)
    except PaddockError:
        if problems := [*faults(draft), *path_rules(draft.config)]:  # which may be why
            raise SettingsError(*problems) from None
        raise


def keep_record(draft: Draft) -> None:
    """Leave out what a continued run's record overrides, and add what it keeps."""
    if (start := draft.start).kind != "continue":
        return
    used = {name: pair for name, pair in draft.given.items() if applies(name, draft.asked, start)}
    record = start.state["settings"]
    draft.unused = {name: pair for name, pair in draft.given.items() if name not in used and not (
        name.endswith("_data_path") and derived.is_source_of(record.get(name.upper()), pair[0]))}
    draft.given = used
    config, draft.invalid = validate(used)
    draft.recorded, warnings = recorded_settings(config, used, start)
    draft.warnings += warnings
    if draft.unused:
        files = dict.fromkeys(where.rpartition(":")[0] or where for _, where in draft.unused.values())
        values = ", ".join(f"{name.upper()}={shortened(str(value))}" + name.endswith("_data_path")
                           * f" (it reads {record.get(name.upper())})"
                           for name, (value, _) in draft.unused.items())
        draft.notes.append(f"Not used from {' and '.join(files)}, because a flag would be needed to change a "
                           f"run that has started (for a new run, set another RUN_NAME): {values}")
    draft.config = config.model_copy(update=draft.recorded)
    draft.config.model_fields_set.difference_update(  # nobody chose a default in the record
        name for name in {*draft.recorded} - {"max_steps"}
        if draft.recorded[name] == Config.model_fields[name].default)


def fill_in(draft: Draft) -> None:
    """Set what is unset, in order of precedence: by DEPTH, the start, the stage, the number of steps."""
    config, given, recorded = draft.config, draft.given, draft.recorded
    decided = {*given, *recorded, *({"max_steps"} if config.epochs else ())}
    by_depth = derived.settings_of_depth(config, decided) if "depth" in given and config.depth else {}
    config = config.model_copy(update=by_depth)

    by_start = derived.settings_of_start(config, decided, draft.start)  # its row length limits DEPTH's
    draft.sources = {name: where for name, (_, where) in given.items()}
    draft.sources |= dict.fromkeys(by_depth.keys() - by_start.keys(), f"DEPTH={config.depth}")
    start, of_model, notes_on_model = model_of_start(draft.start, config, draft.sources, draft.for_this_start)
    draft.start, config = start, config.model_copy(update=by_start | of_model)
    by_heads = {}
    if "n_kv_heads" not in decided | of_model.keys() and config.n_heads % config.n_kv_heads:
        by_heads = {"n_kv_heads": config.n_heads}
        config = config.model_copy(update=by_heads)

    by_stage, draft.deferred = derived.settings_of_stage(config, decided | by_depth.keys(), start)
    config = config.model_copy(update=by_stage)
    by_length = derived.settings_of_length(
        config.max_steps, Config.model_fields.keys() - decided - {*draft.deferred})
    if config.micro_batch_size == 0:  # all rows of a rank
        rows = max(1, config.rows_per_step // config.planned_ranks)
        while config.reproducible and config.rows_per_step % rows:
            rows -= 1
        config = config.model_copy(update={"micro_batch_size": rows})
    draft.config = config.model_copy(update=by_length)

    by_stage = {name: value for name, value in by_stage.items() if name not in draft.deferred}
    width = f" and DIM={config.dim}" if start.kind == "from" and "learning_rate" in by_stage else ""
    stage = f"TRAINING_STAGE={config.training_stage}{' with LoRA' if config.lora_enabled else ''}{width}"
    chosen = {f"Kept from {start.folder}:": recorded, f"DEPTH={config.depth} sets": by_depth,
              f"{stage} {'set' if width else 'sets'}": by_stage,
              "From the prepared data or the start checkpoint:": by_start,
              f"MAX_STEPS={config.max_steps} sets": by_length, f"N_HEADS={config.n_heads} sets": by_heads}
    draft.notes += [f"{how} {text}" for how, values in chosen.items() if (text := messages.assigned(values))]
    draft.notes += notes_on_model


def complete(plan: Plan, device_type: str, rows: Optional[int] = None) -> Plan:
    """Return the plan with the settings that follow from facts: the training rows, then the hardware."""
    config, deferred = plan.config, {*plan.deferred} - {"compile", "learning_rate"}
    if deferred and rows is not None:
        chosen = derived.settings_of_data(config, rows, deferred)
        also = f"EPOCHS={config.epochs:g}" if "max_steps" in chosen else f"MAX_STEPS={config.max_steps}"
        text = messages.assigned(chosen)
        notes = [f"The {counted(rows, 'training row')} and {also} set {text}"] if text else []
        if chosen.get("max_steps", 10) < 10 and (where := plan.sources.get("total_batch_size")):
            notes.append(f"With TOTAL_BATCH_SIZE={config.total_batch_size} ({where}), the run takes only "
                         f"{counted(chosen['max_steps'], 'step')}; a smaller batch takes more")
        plan = plan.changed(notes, **chosen)
        if conflicts := [*batch_rules(plan.config), *messages.no_step_left(plan.start, plan.config)]:
            raise SettingsError(*conflicts)
    is_small = config.matrix_count < derived.SMALL_MODEL and config.activation_checkpointing != "selective"
    if "compile" in plan.deferred and device_type == "cpu" and not config.device_memory and is_small:
        plan = plan.changed(compile=False)
    return plan
