"""Names, values and files of other trainers: what they mean here, or why they do not carry over."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from checkpoint import model_json
from common.text import command, counted, without_passwords
from config import Config
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
# Names for a number from which a setting follows: the setting, and what the number is multiplied by.
COMPUTED = {alias: entry for aliases, entry in _TABLES["computed"].items() for alias in aliases.split()}
# Names for the data of TRAINING_STAGE, and for its validation data.
DATA, VALIDATION = _TABLES["data"].split(), _TABLES["validation_data"].split()
OTHER_WAYS |= dict.fromkeys(VALIDATION, "VALIDATION_DATA_PATH names the validation data of the stage")
BETAS = _TABLES["by_objective"].split()  # names for DPO_BETA, or what replaces it in another objective
SHARES = ("warmup_ratio", "warmup_fraction")  # unlike WARMUP_STEPS, these are never a number of steps
PERIODS = {alias: name for alias, name in ALIASES.items()  # which may be a share of the steps
           if name in ("save_every", "validate_every", "log_every")}
# What a name implies in its trainer: "set" unless it is given here, "fixed" even if given there, or printed.
DEFAULTS = [entry | {"names": entry["names"].split()} for entry in _TABLES["defaults"]]
WITH_DEFAULTS = {name.partition("=")[0] for entry in DEFAULTS for name in entry["names"]} | {*SHARES}
# Names for environment variables of libraries.
VARIABLES = {alias: name for name, aliases in _TABLES["variables"].items() for alias in aliases.split()}
# Files in the folders of other tools, as patterns of their paths, and how to get a model that can be read.
OTHER_FORMATS = {
    r"checkpoint-\d+/(config|adapter_config)\.json": "name one of the Trainer's checkpoints, as in {0}",
    r"consolidated\.\d+\.pth": "import Meta's {0} with {1} FOLDER",
    r"lit_model\.pth": "convert {0} with litgpt convert_from_litgpt",
    r"zero_to_fp32\.py": "merge DeepSpeed's shards with {0} and --safe_serialization, and copy config.json "
                         "and the tokenizer's files to the result",
    r"([^/]+/)?[^/]+\.distcp": "merge the shards of FSDP, such as {0}, with accelerate merge-weights or with "
                               "the trainer's own converter",
    r"[^/]+\.gguf": "import llama.cpp's {0} with {1}/{0} FOLDER --tokenizer NAME",
    r"[^/]+\.safetensors": "{0} needs config.json and the tokenizer's files beside it, and the name "
                           "model.safetensors",
    r"pytorch_model[^/]*\.bin": "{0} has pickled weights, which can run code; load the folder with "
                                "transformers' from_pretrained, write another with save_pretrained, and copy "
                                "the tokenizer's files to it",
    r"adapter_model\.bin": "{0} has pickled weights, which can run code; load the adapters with PEFT's "
                          "from_pretrained, and write others with save_pretrained",
    r"(?!optimizer|scheduler|scaler|rng_state)[^/]+\.(pt|pth|ckpt)": "{0} is pickled, and of another trainer "
        "(nanochat?); convert it to transformers' format with that trainer's tools"}
VALUE_ALIASES |= _TABLES["values"]
# Fields of config.json that change nothing here: others decide, or only other programs read them.
WITHOUT_EFFECT = set(
    "model_type transformers_version _name_or_path use_cache dtype torch_dtype bos_token_id eos_token_id "
    "pad_token_id return_dict output_hidden_states output_attentions chunk_size_feed_forward "
    "is_encoder_decoder id2label label2id num_labels problem_type".split())


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
        return f"{shortened(f'{name}={value}')} does not carry over; {sentence}"
    if setting not in Config.model_fields:
        return None
    return {setting: text if isinstance(value, str) and setting == "preset" else standard(setting, value)}


def data_path(value: Any) -> Optional[str]:
    """Return the path in another trainer's setting for data: a text, or axolotl's list of one set."""
    if not isinstance(value, list):
        return str(value).strip()
    is_one = len(value) == 1 and isinstance(value[0], tuple)
    fields = {name: each for name, each, *_ in value[0]} if is_one else {}
    is_whole = fields.pop("split", "train") == "train" and fields.keys() <= {"path", "type", "ds_type"}
    return fields.get("path") if is_whole else None


def accept(layer, alias: str, value: Any, where: str) -> bool:
    """Use an exact name of another trainer, such as max_iters, in a layer; return whether it is one."""
    if re.sub("-", "_", alias.rpartition(".")[2].lower()) == "resume":  # litgpt's, which is true or false
        alias = "resume_from_checkpoint"
    if value in (None, ""):
        return known_form(alias) is not None
    value = str(value).lower() if isinstance(value, bool) else value
    settings, shown, form = translate(alias, value), shortened(alias), known_form(alias)
    if form in WITH_DEFAULTS:
        layer.named[form] = (str(value).lower(), where)
    if form in SHARES and isinstance(settings, dict):  # 0 steps, or the share 0, means the other there
        layer.notes["warmup_steps"] = f"{shown} is our WARMUP_STEPS: {shortened(str(value))}"
        return True
    if variable := VARIABLES.get(known_form(alias)):
        layer.exports[variable] = str(value)
        layer.notes[shown] = f"{shown} is {variable}: {shortened(value)}"
        return True
    if isinstance(settings, str):
        layer.problems.append(f"{where}: {settings}")
        return True
    if settings == {}:
        sentence = OTHER_WAYS[known_form(alias)].removeprefix("nothing to set: ")
        layer.notes[shown] = f"{shortened(f'{alias}={value}')} needs no setting here: {sentence}"
    for number, (name, value) in enumerate((settings or {}).items()):
        if name == "sharding" and name in layer.notes and "hybrid" in (value, layer.values[name][0]):
            del layer.values[name]  # use_fsdp, and the size of its groups
            value = "hybrid"
        if name in ("data_path", "validation_data"):  # of several names, an explicit one of ours counts
            layer.values[name] = (value, where)
            continue
        layer.put(name, value, where, f": {shown}, our {name.upper()},", is_implied=number > 0)
        layer.notes[name] = f"{shown} is our {name.upper()}: {shortened(without_passwords(str(value)))}"
    return settings is not None


def take_names(layers: Sequence) -> dict[str, tuple]:
    """Return other trainers' names with their layer, value and place, and drop what means nothing there.

    transformers' max_steps=-1 leaves the length to the epochs, and its warmup_steps=0 the warm-up to a ratio.
    """
    named = {}
    for layer in layers:
        named |= {form: (layer, *pair) for form, pair in layer.named.items()}
        if str(layer.values.get("max_steps", ("",))[0]) == "-1":
            del layer.values["max_steps"]
            layer.notes["max_steps=-1"] = "max_steps=-1 sets nothing: EPOCHS decides, or the default"
    for form in SHARES & named.keys():
        layer, value, where = named[form]
        steps, first = layer.values.get("warmup_steps", (0, ""))
        if re.fullmatch(r"0*\.?0*", str(steps)):
            layer.values["warmup_steps"] = (value, where)
        elif re.search("[1-9]", str(value)):
            layer.problems.append(f"{where}: {form}, our WARMUP_STEPS, is set a second time (first at "
                                  f"{first}); keep one")
    return named


def compute(layers: Sequence) -> None:
    """Compute the settings that depend on those of all layers: numbers of rows, and the data of a stage."""
    named = take_names(layers)
    given = {name: pair for layer in layers for name, pair in layer.values.items()
             if not isinstance(pair[0], tuple)}
    waiting = [(layer, name, *pair) for layer in layers for name, pair in layer.values.items()
               if isinstance(pair[0], tuple)]
    for layer, name, (alias, value), where in waiting:
        config, units = validate(given)[0], COMPUTED.get(alias, ("", {}))[1]
        missing = [factor.upper() for factor in units if factor not in given and factor != "world_size"]
        del layer.values[name]
        if name == "validation_data":
            name = "validation_data_path"
            layer.values.setdefault(name, (value, where))
            layer.notes[name] = f"{alias} is our {name.upper()}: {shortened(layer.values[name][0])}"
        elif name == "data_path":
            stage = given.get("training_stage", ("sft" if alias == "datasets" else config.training_stage,))[0]
            if alias == "datasets" and "training_stage" not in given:
                layer.values["training_stage"] = (stage, where)
                layer.notes["training_stage"] = f"{alias} without a stage is TRAINING_STAGE={stage}"
            name = f"{stage}_data_path"
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
        elif missing or not re.fullmatch(r"[1-9]\d{0,9}", value):
            reason = f"needs {' and '.join(missing)}" if missing else "is not a valid number"
            layer.problems.append(
                f"{where}: {alias}={shortened(value)} {reason}; {OTHER_WAYS[alias]}")
        else:
            factors = [value, *(counted(getattr(config, factor), unit) for factor, unit in units.items())]
            product = int(value) * math.prod(getattr(config, factor) for factor in units)
            layer.values[name] = (str(product), where)
            layer.notes[name] = f"{alias}: {' x '.join(factors)} = {name.upper()}={product}"


    imply_defaults(layers, named)


def imply_defaults(layers: Sequence, named: Mapping[str, tuple]) -> None:
    """Set, or print, the defaults of other trainers that go with names of theirs, unless they are given."""
    given = {name: pair for layer in layers for name, pair in layer.values.items()}
    config = validate(given)[0]
    for entry in DEFAULTS:
        form = next((name for name in map(str, named)
                     if not {name, f"{name}={named[name][1]}"}.isdisjoint(entry["names"])), None)
        if form is None:
            continue
        layer, value, where = named[form]
        kind = next(key for key in ("set", "fixed", "differ") if key in entry)
        pairs = [(pair.partition("=")[0].lower(), pair.partition("=")[2]) for pair in entry[kind].split()]
        pairs = [(name, default) for name, default in pairs if name in Config.model_fields
                 and (kind == "fixed" or name not in given)]
        if kind != "differ":
            pairs = [(name, default) for name, default in pairs if name != "min_learning_rate" or (
                config.lr_schedule != "constant" and float(default) < config.learning_rate)]
            for name, default in pairs:
                layer.values[name] = given[name] = (default, where)
                layer.notes[name] = f"{form}, as in {entry['trainer']}, sets {name.upper()}={default} too"
        elif pairs or "=" not in entry[kind]:
            listed = ", ".join(f"{name.upper()}={default}" for name, default in pairs) or entry[kind]
            layer.notes[f"{form} {entry[kind]}"] = (
                f"{form} is a name of {entry['trainer']}, with other defaults: {listed}. Set what you need")


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
