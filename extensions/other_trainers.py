"""Names, values and files of other trainers: what they mean here, or why they do not carry over."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

import yaml

from checkpoint import model_json
from common.text import command, counted, without_passwords
from config import Config, on_resume
from plan.names import (
    ALIASES,
    OTHER_WAYS,
    SWITCHES,
    VALUE_ALIASES,
    known_form,
    shortened,
    standard,
    validate,
)

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# Names of these settings in other trainers, with the same meaning and unit.
ALIASES |= {alias: name for name, aliases in _TABLES["same"].items() for alias in aliases.split()}
# Names in other trainers of what is set in another way here, or needs no setting, with a sentence about it.
OTHER_WAYS |= {alias.partition("=")[0]: sentence for aliases, sentence in _TABLES["other"].items()
               for alias in aliases.split()}
# Those that need no setting with the values after "=", separated by "|"; without "=", with any value.
HARMLESS = {name: values.split("|") for aliases, sentence in _TABLES["other"].items()
            for name, equals, values in (alias.partition("=") for alias in aliases.split())
            if equals or sentence.startswith("nothing to set")}
# Names whose values are converted: value -> the settings; the first is meant, and others go with it. A list
# has the settings of a list of values.
CONVERTED = {alias: table for aliases, table in _TABLES["converted"].items() for alias in aliases.split()}
TRUTH = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
# Names of numbers from which a setting is computed: the setting, and the factor.
COMPUTED = {alias: entry for aliases, entry in _TABLES["computed"].items() for alias in aliases.split()}
# Names for the data of TRAINING_STAGE, and for its validation data.
DATA, VALIDATION = _TABLES["data"].split(), _TABLES["validation_data"].split()
OTHER_WAYS |= dict.fromkeys(VALIDATION, "VALIDATION_DATA_PATH names the validation data of the stage")
BETAS = _TABLES["by_objective"].split()  # names for DPO_BETA, or what replaces it in another objective
LENGTHS = {"max_steps", "epochs"}
UNLIMITED = _TABLES["unlimited_if_null"].split()  # null there and 0 here mean no limit
MAY_REPEAT = _TABLES["may_repeat"].split()  # beside another name of the setting with the same value
SHARES = ("warmup_ratio", "warmup_fraction", "lr_warmup_fraction")  # unlike WARMUP_STEPS, never steps
PERIODS = {alias: name for alias, name in ALIASES.items()  # which may be a share of the steps
           if name in ("save_every", "validate_every", "log_every")}
# For each trainer: its names (some are also ours), those of its schedule, and its defaults: for all stages,
# for one stage or objective, and for adapters. `shown` and `note` are only printed; a note is left out if a
# name of `unless` is given.
TRAINERS: dict[str, dict[str, str]] = {}
for _name, _entry in _TABLES["trainers"].items():
    _base = TRAINERS.get(_entry.pop("like", ""), {})
    TRAINERS[_name] = _base | {key: text if key == "shown" else f"{text} {_base.get(key, '')}"
                               for key, text in _entry.items()}
NAMES = {word for trainer in TRAINERS.values() for word in trainer["names"].split()}
FIXED = {pair: setting for pairs, setting in _TABLES["fixed"].items() for pair in pairs.split()}
ENOUGH = 3  # names that make a trainer of a file certain
LEARNING = {name for name in Config.model_fields if on_resume(name) in ("curve", "fixed")} | {
    "epochs", "micro_batch_size", *COMPUTED} - {"eval_iters", "eval_max_iters", "max_eval_step"}
SCHEDULE = ("lr_schedule", "decay_fraction", "min_learning_rate", "warmup_steps")
# Names for environment variables of libraries.
VARIABLES = {alias: name for name, aliases in _TABLES["variables"].items() for alias in aliases.split()}
MOST_YAML_VALUES = 100_000
# Files in the folders of other tools, as patterns of their paths, and how to get a model that can be read.
OTHER_FORMATS: dict[str, str] = _TABLES["files"]
VALUE_ALIASES |= _TABLES["values"]
# Fields of config.json that change nothing here: others decide, or only other programs read them.
WITHOUT_EFFECT = {*_TABLES["without_effect"].split()}


def translate(name: str, value: Any) -> Optional[Union[dict[str, Any], str]]:
    """Return the settings that another trainer's name stands for, or why its value does not carry over.

    A name that needs no setting gives an empty dictionary; one without a counterpart gives None.
    """
    form = known_form(name)
    if form is None or form in Config.model_fields and "." not in name and form not in SWITCHES:
        return None
    text, table = str(value).strip().lower(), CONVERTED.get(form, {})
    words = [str(part).lower() for part in value] if isinstance(value, list) else [text]
    if form in (*DATA, *VALIDATION) and (path := data_path(value)):
        return {"data_path" if form in DATA else "validation_data": (form, path)}
    if isinstance(table, list):
        is_whole = isinstance(value, list) and len(value) == len(table)
        return dict(zip(table, value)) if is_whole else shortened(f"{name}={value}") + f"; {OTHER_WAYS[form]}"
    if form in SHARES and re.match(r"0*[1-9]", text):
        return f"{shortened(f'{name}={value}')} is not a share below 1; for steps, use WARMUP_STEPS"
    if form in PERIODS and re.fullmatch(r"0?\.\d*[1-9]\d*", text):
        return {PERIODS[form]: (form, text)}
    if form in PERIODS and re.fullmatch(r"-1|\d+\.0+", text):  # -1 is never, as in nanochat
        return {PERIODS[form]: str(max(0, int(float(text))))}
    star = None if isinstance(value, list) else table.get("*")
    translations = [table.get(word, table.get(TRUTH.get(word), star)) for word in words]
    if translations and None not in translations:
        pairs = (pair.split("=") for each in translations for pair in each.split())
        settings = {each.lower(): str(value).strip() if given == "*" else given for each, given in pairs}
        return settings if settings.keys() <= Config.model_fields.keys() else None  # without extensions/
    if form in COMPUTED or form in BETAS:
        return {COMPUTED.get(form, ("dpo_beta",))[0]: (form, text)}
    if {"", text, TRUTH.get(text)} & {*HARMLESS.get(form, ())}:
        return {}
    setting = ALIASES.get(form, form)
    if table and "*" not in table or form in HARMLESS:
        sentence = OTHER_WAYS.get(form, f"see {setting.upper()}")
        return f"{shortened(f'{name}={value}')} does not carry over, so remove it; {sentence}"
    if setting not in Config.model_fields:
        return None
    return {setting: text if isinstance(value, str) and setting == "preset" else standard(setting, value)}


def data_path(value: Any) -> Optional[str]:
    """Return the path in another trainer's setting for data: a text, or axolotl's list of one set."""
    if not isinstance(value, list):
        return str(value).strip()
    is_one = len(value) == 1 and isinstance(value[0], tuple)
    fields = {name: each for name, each, *_ in value[0]} if is_one else {}
    is_read = fields.pop("field_messages", "messages") in ("messages", "conversations")
    is_whole = fields.pop("split", "train") == "train" and fields.keys() <= {"path", "type", "ds_type"}
    return fields.get("path") if is_read and is_whole else None


def merge_yaml(node: Any, left: Optional[Iterator[int]] = None) -> Any:
    """Replace each `<<` in a YAML document by the names that it merges; return the document.

    As many values are `left`, with those of aliases: a few lines may stand for gigabytes.
    Source: YAML 1.1, "Merge Key Language-Independent Type" (PyYAML 6.0.4 lets the last mapping override).
    """
    left = left or iter(range(MOST_YAML_VALUES))
    if node is not None and next(left, None) is None:
        raise yaml.MarkedYAMLError(problem=f"its aliases stand for more than {MOST_YAML_VALUES:,} values; "
                                   "write them out", problem_mark=node.start_mark)
    if node is not None and node.id == "mapping":
        merged: dict[str, tuple] = {}
        for key, value in filter(lambda pair: is_merge(pair[0]), node.value):
            for each in reversed(value.value) if value.id == "sequence" else [value]:  # the first overrides
                if each.id != "mapping":
                    raise yaml.MarkedYAMLError(problem="<< needs a mapping", problem_mark=key.start_mark)
                merged |= {str(pair[0].value): pair for pair in merge_yaml(each, left).value}
        own = [pair for pair in node.value if not is_merge(pair[0])]
        names = {str(key.value) for key, _ in own}
        node.value = [*(pair for name, pair in merged.items() if name not in names), *own]
    for each in node.value if node is not None and node.id != "scalar" else ():
        merge_yaml(each[1] if node.id == "mapping" else each, left)
    return node


def is_merge(key: Any) -> bool:
    return key.tag.endswith(":merge")


def accept(layer, alias: str, value: Any, where: str) -> bool:
    """Use an exact name of another trainer, such as max_iters, in a layer; return whether it is one."""
    if re.sub("-", "_", alias.rpartition(".")[2].lower()) == "resume":  # litgpt's, which is true or false
        alias = "resume_from_checkpoint"
    form = known_form(alias)
    setting = ALIASES.get(form, form)
    if value is None and form in UNLIMITED:
        layer.put(setting, "0", where)
        layer.named[form] = ("0", where)
        layer.notes[setting] = f"{shortened(alias)} without a value means no limit: {setting.upper()}=0"
    elif value is None and setting in LEARNING:
        before = layer.notes.get("null", "Without a value, so that other layers or defaults decide:")
        layer.notes["null"] = f"{before} {shortened(alias)}"
    if value in (None, ""):
        return form is not None
    value = str(value).lower() if isinstance(value, bool) else value
    settings, shown = translate(alias, value), shortened(alias)
    if form is not None:
        layer.named[form] = (str(value).lower(), where)
    if form in SHARES and isinstance(settings, dict):  # 0 steps, or the share 0, means the other there
        layer.notes["warmup_steps"] = f"{shown} is our WARMUP_STEPS: {shortened(str(value))}"
        return True
    if variable := VARIABLES.get(form):
        value = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        layer.exports[variable] = value
        layer.notes[shown] = f"{shown} is {variable}: {shortened(value)}"
        return True
    if isinstance(settings, str):
        layer.problems.append(f"{where}: {settings}")
        return True
    if settings == {}:
        sentence = OTHER_WAYS[form].removeprefix("nothing to set: ")
        layer.notes[shown] = f"{shortened(f'{alias}={value}')} needs no setting here: {sentence}"
    for number, (name, value) in enumerate((settings or {}).items()):
        if name == "sharding" and name in layer.notes and "hybrid" in (value, layer.values[name][0]):
            del layer.values[name]  # use_fsdp, and the size of its groups
            value = "hybrid"
        if name in ("data_path", "validation_data"):  # of several names, an explicit one of ours counts
            layer.values[name] = (value, where)
            continue
        is_implied = number > 0 or form in MAY_REPEAT
        layer.put(name, value, where, f": {shown}, our {name.upper()},", is_implied)
        layer.notes[name] = f"{shown} is our {name.upper()}: {shortened(without_passwords(str(value)))}"
    return settings is not None


def compute(layers: Sequence) -> None:
    """Set what depends on the settings of all layers: defaults, numbers of rows, and the data of a stage."""
    for layer in layers:
        if layer.for_this_start and str(layer.values.get("run_name", ("",))[0]).lower() in ("none", "null"):
            layer.notes["run_name="] = "RUN_NAME=none means no name: the run is named by its stage and date"
        if layer.for_this_start and str(layer.values.get("debug", ("",))[0]).lower() == "true" and not any(
                "debug" in str(each.values.get("preset", ("",))[0]) for each in layers):
            layer.notes["debug="] = ("DEBUG=true looks for the first module whose output is not finite; a "
                                     "small run is --preset debug")
        stage, where = layer.values.get("training_stage", ("", ""))
        if pairs := _TABLES["stages"].get(str(stage).lower()):
            settings = dict(pair.lower().split("=") for pair in pairs.split())
            layer.values |= {name: (value, where) for name, value in settings.items()}
            layer.notes[f"training_stage={stage}"] = f"TRAINING_STAGE={stage} is our {pairs}"
    theirs = [layer for layer in layers
              if layer.named or str(layer.values.get("max_steps", ("",))[0]) == "-1"]
    for layer in theirs:
        take_names(layer)
    if theirs and not any("training_stage" in layer.values for layer in layers):
        for layer in theirs:
            if layer.values.get("data_path", ("",))[0][:1] == ("datasets",):
                layer.values["training_stage"] = ("sft", layer.values["data_path"][1])
                layer.notes["training_stage"] = "datasets without a stage is TRAINING_STAGE=sft"
    for layer in theirs:
        imply_defaults(layer, layers)
    given = {name: pair for layer in layers for name, pair in layer.values.items()
             if not isinstance(pair[0], tuple)}
    at = {name: number for number, layer in enumerate(layers) for name in layer.values}
    if LENGTHS <= given.keys():  # the one in the higher layer counts
        del given[min(LENGTHS, key=at.__getitem__)]
    for number, layer in enumerate(layers):
        for name, (value, where) in [*layer.values.items()]:
            if isinstance(value, tuple) and at[name] > number and name in Config.model_fields:  # replaced
                layer.values[name] = (value[1], where)
                layer.notes[name] = f"{value[0]} is our {name.upper()}: {shortened(value[1])}"
            elif isinstance(value, tuple):
                compute_setting(layer, name, given)


def take_names(layer) -> None:
    """Give names of transformers that set nothing, or that replace others, their meaning there."""
    if layer.named.get("fp16", ("",))[0] == "true":  # the other half of bf16=false
        layer.problems[:] = [each for each in layer.problems if ": bf16=false " not in each]
    steps = str(layer.values.get("max_steps", ("",))[0])
    if steps == "-1":
        del layer.values["max_steps"]
        layer.notes["max_steps=-1"] = "max_steps=-1 sets nothing: EPOCHS decides, or the default"
    elif steps and (epochs := {"num_train_epochs", "num_epochs"} & layer.named.keys()):
        layer.values.pop("epochs", None)
        layer.notes["max_steps="] = f"{epochs.pop()} sets nothing beside max_steps, as in transformers"
    for form in SHARES & layer.named.keys():  # 0 steps, or the share 0, leaves the warm-up to the other name
        value, where = layer.named[form]
        steps, first = layer.values.get("warmup_steps", (0, ""))
        if re.fullmatch(r"0*\.?0*", str(steps)):
            layer.values["warmup_steps"] = (value, where)
        elif re.search("[1-9]", str(value)):
            layer.problems.append(f"{where}: {form}, our WARMUP_STEPS, is set a second time (first at "
                                  f"{first}); keep one")
        else:
            layer.notes["warmup_steps"] = f"{form}={value} sets nothing beside WARMUP_STEPS={steps}"
    for form, (value, where) in layer.named.items():
        if pair := FIXED.get(f"{form}={value}"):
            name, is_set, number = pair.lower().partition("=")
            layer.notes.pop(form, None)
            layer.notes[name] = f"{form}={value}{' sets' * bool(is_set)} {pair}"
            layer.values |= {name: (number, where)} if is_set else {}


def compute_setting(layer, name: str, given: Mapping[str, tuple]) -> None:
    """Compute a setting of a layer from another trainer's name for it and the settings of all layers."""
    (alias, value), where = layer.values.pop(name)
    config = validate(given)[0]
    if name in ("data_path", "validation_data"):
        name = "validation_data_path" if name == "validation_data" else f"{config.training_stage}_data_path"
        layer.values.setdefault(name, (value, where))
        layer.notes[name] = f"{alias} is our {name.upper()}: {shortened(layer.values[name][0])}"
    elif alias in BETAS:
        del layer.notes[name]
        name = {"orpo": "orpo_lambda", "simpo": "simpo_beta"}.get(config.preference_objective, name)
        name = "grpo_beta" if config.training_stage == "grpo" else name
        layer.put(name, value, where, f": {alias}, our {name.upper()},")
        layer.notes[name] = f"{alias} is our {name.upper()}: {shortened(value)}"
    elif alias in PERIODS:
        layer.notes[name] = f"{alias}={value} is a share of MAX_STEPS={config.max_steps}"
        if "max_steps" in given and "epochs" not in given:
            layer.values[name] = (str(math.ceil(float(value) * config.max_steps)), where)
        else:
            layer.problems.append(f"{where}: {alias}={value} is a share of the steps, which follow from "
                                  f"the data; set {name.upper()} to a number of steps, or set MAX_STEPS")
    else:
        factors = COMPUTED[alias][1]
        if alias == "gradient_accumulation_steps" and owners_of(layer)[1] == ["nanoGPT"]:  # of all ranks
            factors = {factor: unit for factor, unit in factors.items() if factor != "world_size"}
        missing = [factor.upper() for factor in factors if factor not in given and factor != "world_size"]
        form = r"\d*\.?\d+" if "learning_rate" in factors else r"[1-9]\d{0,9}"
        if missing or not re.fullmatch(form, value):
            reason = f"needs {' and '.join(missing)}" if missing else "is not a valid number"
            layer.problems.append(f"{where}: {alias}={shortened(value)} {reason}; {OTHER_WAYS[alias]}")
            return
        listed = [value, *(counted(getattr(config, factor), unit) if unit else factor.upper()
                           for factor, unit in factors.items())]
        layer.values[name] = (product([value, *factors], config), where)
        layer.notes[name] = f"{alias}: {' x '.join(listed)} = {name.upper()}={layer.values[name][0]}"


def product(factors: Iterable[str], config: Config) -> str:
    """Return the product of numbers and settings."""
    return f"{math.prod(float(getattr(config, factor, factor)) for factor in factors):.15g}"


def owners_of(layer) -> tuple[set[str], list[str]]:
    """Return the names in a layer that trainers have, if one is not ours, and the trainers that have all."""
    theirs = layer.named.keys() & NAMES
    ours = {name for name, (value, _) in layer.values.items() if not isinstance(value, tuple)}  # else, theirs
    ours -= layer.notes.keys() | layer.implied
    names = theirs | ours if theirs else set()
    return names, [name for name, trainer in TRAINERS.items() if names <= {*trainer["names"].split()}]


def imply_defaults(layer, layers: Sequence) -> None:
    """Set the defaults of the trainer whose names a layer has, or print those that are not set.

    They are set if the names are several, one of them for a rate or a length, and if the trainers that have
    all of them agree. A name of a schedule alone sets those of the schedule. What any layer sets is kept.
    """
    names, owners = owners_of(layer)
    is_whole = (len(names) >= ENOUGH and owners not in ([], ["other trainers"])
                and not layer.values.keys().isdisjoint(("learning_rate", "max_steps", "epochs")))
    has_schedule = [name for name, trainer in TRAINERS.items()
                    if not layer.named.keys().isdisjoint(trainer.get("schedule", "").split())]
    theirs = names & layer.named.keys()
    if theirs == {"lr"} and layer.for_this_start:  # an abbreviation on the command line
        return
    if not is_whole and not has_schedule and LEARNING.isdisjoint(ALIASES.get(name, name) for name in theirs):
        return
    counts = {name: len(theirs & {*trainer["names"].split()}) for name, trainer in TRAINERS.items()}
    if not is_whole:
        owners = has_schedule or [name for name in counts if counts[name] == max(counts.values())][:3]
    given = {name: pair for each in layers for name, pair in each.values.items()}
    if isinstance(given.get("dpo_beta", ("",))[0], tuple):  # or that of another objective
        given |= dict.fromkeys(("simpo_beta", "orpo_lambda", "grpo_beta"), given["dpo_beta"])
    defaults = [defaults_of(owner, given) for owner in owners]
    where, applied, others = next(iter(layer.named.values()))[1], [], []
    notes = [trainer["note"].strip() for trainer in map(TRAINERS.get, owners) if "note" in trainer
             and {*trainer.get("unless", "").split()}.isdisjoint((*given, *layer.named))]
    for name in dict.fromkeys(name for each in defaults for name in each):
        values = [*dict.fromkeys(each.get(name, "") for each in defaults)]
        is_of_start = name == "n_kv_heads" and "n_heads" not in given
        if name in given or is_of_start or name in LENGTHS and LENGTHS & given.keys():
            continue
        may_be_set = len(values) == 1 and (is_whole or has_schedule and name in SCHEDULE)
        if settings := resolved(name, values[0], given) if may_be_set else {}:
            applied.append(f"{name.upper()}={values[0]}")
            pairs = {each: (value, where) for each, value in settings.items()}
            layer.values, given = layer.values | pairs, given | pairs
            layer.implied |= pairs.keys()
        elif values != [str(Config.model_fields[name].default)]:
            others.append(f"{name.upper()}={' or '.join(filter(None, values))}")
    others += notes
    shown = f"{' or '.join(owners)} ({shortened(', '.join(sorted(theirs)))})"
    if applied:
        layer.notes[f"{where} set"] = f"Defaults of {shown} that apply: {', '.join(applied)}"
    if others:
        layer.notes[f"{where} other"] = (f"Defaults of {shown} that are not used: {', '.join(others)}. "
                                         "Set those that you need")


def settings_in(given: Mapping[str, tuple]) -> Config:
    return validate({name: pair for name, pair in given.items() if not isinstance(pair[0], tuple)})[0]


def defaults_of(owner: str, given: Mapping[str, tuple]) -> dict[str, str]:
    """Return a trainer's defaults for the stage and for adapters: setting -> value, or a product."""
    config = settings_in(given)
    is_lora = config.lora_enabled or ("LORA_ENABLED=true" in TRAINERS[owner]["all"]
                                      and config.named_checkpoint and "lora_enabled" not in given)
    objective = config.preference_objective if config.training_stage == "dpo" else ""
    keys = ("all", config.training_stage, objective, "lora" if is_lora else "", "shown")
    pairs = (pair.partition("=") for key in keys for pair in TRAINERS[owner].get(key, "").split())
    return {name.lower(): value for name, _, value in pairs if name.lower() in Config.model_fields}


def resolved(name: str, value: str, given: Mapping[str, tuple]) -> dict[str, str]:
    """Return the settings of a default; none if it is only printed, lacks a factor, or has no effect."""
    config, factors = settings_in(given), value.lower().split("*")
    needed = {*factors} & Config.model_fields.keys()
    total = given.get("total_batch_size", ((),))[0]  # not known yet if it is a tuple
    is_idle = {"micro_batch_size": "max_seq_len" not in given or not isinstance(total, tuple),
               "lora_enabled": not config.named_checkpoint, "decay_fraction": config.lr_schedule != "wsd",
               "min_learning_rate": config.lr_schedule == "constant"}
    if is_idle.get(name, name in ("keep_last", "depth", "precision")) or needed - {*given, "world_size"}:
        return {}
    value = product(factors, config) if needed else value
    if name == "min_learning_rate" and float(value) >= config.learning_rate:
        return {}
    return translate("lr_scheduler", value) if name == "lr_schedule" else {name: value}


def unused_fields(folder: Path) -> list[str]:
    """Return a message if a model's config.json has fields that are not used, and so are not saved."""
    config = model_json.read_model_json(folder / "config.json")
    kind, rope = config["model_type"], model_json.rope_parameters_of(config)
    fixed = model_json.fixed_fields(kind, rope)
    used = {*model_json.REQUIRED, *model_json.defaults_of(config), *fixed, *WITHOUT_EFFECT}
    plain = {"architectures": [model_json.FAMILIES[kind]], "attention_dropout": 0,
             "attention_bias": kind == "qwen2"}
    unused = [f"{name}={value!r:.80}" for name, value in config.items()
              if name not in used and value not in (None, plain.get(name))]
    used = {"rope_type", "rope_theta", *model_json.SCALING_FIELDS.get(rope["rope_type"], {}).values(), *fixed}
    unused += [f"{name}={value!r:.80} for RoPE" for name, value in rope.items() if name not in used]
    return [f"{folder / 'config.json'} has {', '.join(unused)}, which Paddock neither uses nor "
            "saves"] if unused else []


def advice_on_folder(folder: Path) -> str:
    """Return the end of a message: what a folder of another tool contains, and what to do."""
    names = sorted(str(path.relative_to(folder)) for pattern in ("*", "*/*") for path in folder.glob(pattern))
    for pattern, advice in OTHER_FORMATS.items():
        if name := next(filter(re.compile(pattern).fullmatch, names), None):
            return "; " + advice.format(name, command("scripts/import_checkpoint.py", folder))
    return "; name another folder"
