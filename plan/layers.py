"""Read settings from all layers; start with `load_config`. Importing this module reads nothing."""

import io
import json
import os
import re
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Optional, get_args, get_origin

import yaml
from dotenv.parser import parse_stream
from dotenv.variables import Variable, parse_variables

from common.command_line import VERSION, filled, suggestion
from common.errors import SettingsError
from common.files import read_text
from common.text import command, counted, exit_if_unread, print_safely, show, without_passwords
from config import (
    CORE_SECTIONS,
    DROPPED,
    EXTENSION_SECTIONS,
    KIND_OF_STAGE,
    SECTIONS,
    Config,
    base_rules,
    extension_module,
    input_rules,
    on_resume,
    rules,
)
from parallel.process import configure_allocator, first_on_machine
from plan import derived
from plan.derived import PRESETS_DIR
from plan.names import (
    OPTIONAL,
    forms,
    may_stand_alone,
    misspelled,
    shortened,
    standard,
    unknown,
    unknown_flag,
    validate,
)

OTHER_TRAINERS = extension_module("other_trainers")  # None without extensions/
# The separators of settings with several values, which may be lists in JSON and YAML.
SEPARATORS = {name: field.json_schema_extra["separator"] for name, field in Config.model_fields.items()}
# Environment variables for libraries, also allowed in `.env`.
LIBRARIES = re.compile(
    "(HF|HUGGINGFACE|HUGGING_FACE|TRANSFORMERS|TOKENIZERS|RAYON|TIKTOKEN|WANDB|TENSORBOARD|TRACKIO|MLFLOW|CUDA"
    "|CUBLAS|CUDNN|NVIDIA|NCCL|GLOO|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|OMP|KMP|GOMP|MKL|OPENBLAS"
    "|ONEDNN|DNNL|ATEN|BNB)_[A-Z0-9_]+|MASTER_(ADDR|PORT)|(HTTPS?|NO)_PROXY")
PRODUCTION_DEPTH = "24"  # of --preset production without a size: 0.8 billion parameters
LENGTHS = {"max_steps", "epochs", "max_seq_len", "total_batch_size", "micro_batch_size", "learning_rate"}
Values = dict[str, tuple[Any, str]]  # name -> (value, location)


@dataclass
class Layer:
    """Settings from one source, and what is wrong with it."""

    values: Values = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # names that extensions/ may know, which is missing
    exports: dict[str, str] = field(default_factory=dict)  # the libraries' variables in `.env`
    notes: dict[str, str] = field(default_factory=dict)  # on names of other trainers, by setting or name
    implied: set[str] = field(default_factory=set)  # settings that go with such a name
    named: dict[str, tuple[str, str]] = field(default_factory=dict)  # such names that imply defaults
    is_env: bool = False  # `.env`, or a preset that it names
    # Of the command line only:
    env_file: Optional[str] = None
    config_files: list[str] = field(default_factory=list)
    check: bool = False

    def refuse(self, name: str, message: str) -> None:
        """Record an unknown name; it has no message if an extension may know it."""
        if message:
            self.problems.append(message)
        else:
            self.unused.append(name)

    def put(self, name: str, value: Any, where: str, shown: str = "", is_implied: bool = False) -> None:
        """Set a value; a second one for a setting is an error, unless another trainer's name implies it."""
        is_list = isinstance(value, list) and all(isinstance(part, str) for part in value)
        value = SEPARATORS[name].join(value) if is_list and SEPARATORS[name] else value
        if (ours := standard(name, value)) != value and isinstance(value, str):
            self.notes[f"{name}={value}"] = f"{name.upper()}={shortened(value)} is our {ours}"
            value = ours
        first, before = self.values.get(name, (value, ""))
        if before and not ((is_implied or name in self.implied) and str(first).lower() == str(value).lower()):
            self.problems.append(f"{where}{shown} is set a second time (first at {before}); keep one")
        else:
            self.implied |= {name} if is_implied and not before else set()
            self.values[name] = (value, where)


def accept(layer: Layer, name: str, value: Any, where: str) -> bool:
    """Set what another trainer's name stands for, such as max_iters; return whether it is known."""
    return OTHER_TRAINERS is not None and OTHER_TRAINERS.accept(layer, name, value, where)


def read_env_file(path: Path, environ: Mapping[str, str] = {}) -> Layer:
    """Return the settings and library variables in a `.env` file with line numbers; skip empty values.

    `${NAME}` and `${NAME:-default}` are expanded from the environment, then from earlier lines.
    """
    # dotenv_values of python-dotenv does not report line numbers, duplicates or errors.
    layer, set_at, earlier = Layer(), {}, {}
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, ValueError) as error:
        layer.problems.append(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")
        return layer
    known = ChainMap(environ, earlier)
    for binding in parse_stream(io.StringIO(text)):
        key, value, source = binding.key, binding.value, binding.original.string
        line = source.lstrip()  # a binding may start with blank lines
        where = f"{path}:{binding.original.line + source.count(chr(10)) - line.count(chr(10))}"
        if key is None and not binding.error:
            continue
        if binding.error or value is None:  # do not quote the line: it may contain a secret
            layer.problems.append(f"{where}: not of the form NAME=value")
            continue
        if re.match(r"[^=]*=[^\S\n]+#", line):
            value = ""  # a comment, which the parser returns as the value
        atoms = [*parse_variables(value)]
        unset = [atom for atom in atoms
                 if isinstance(atom, Variable) and atom.default is None and atom.name not in known]
        earlier[key] = value = "".join(atom.resolve(known) for atom in atoms)
        name = key.lower() if key.lower() in Config.model_fields else key
        if unset:
            layer.problems.append(f"{where}: {shortened(key)} uses a variable that is set neither in the "
                                  "environment nor in an earlier line; set it, or write ${NAME:-default}")
        elif name not in Config.model_fields and (not LIBRARIES.fullmatch(name) or misspelled(name)):
            if not accept(layer, key, value, where):
                layer.refuse(key, unknown(where, key))
        elif name in set_at:
            layer.problems.append(
                f"{where}: {key} is set a second time (first at {set_at[name]}); keep one")
        else:
            set_at[name] = where
            if value and name in Config.model_fields:
                layer.put(name, value, where, f": {key}")
            elif value:
                layer.exports[name] = value
    return layer


def yaml_content(node: Any) -> Any:
    """Return a mapping as (name, value, line) tuples, and other values as text, as in `.env`, or None."""
    if node is None or node.tag.endswith(":null"):
        return None
    if node.id == "mapping":
        return tuple((str(key.value), yaml_content(value), key.start_mark.line + 1)
                     for key, value in node.value)
    return [*map(yaml_content, node.value)] if node.id == "sequence" else node.value


def read_config_file(path: Path) -> Layer:
    """Return the settings in a JSON or YAML file, flat or grouped into sections with any names."""
    is_yaml = path.suffix in (".yaml", ".yml")
    comment = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*')  # the first group: text, which may contain //
    try:  # read objects as tuples of pairs, because a dictionary would hide duplicate names
        text = read_text(path, "utf-8-sig")
        content = yaml_content(yaml.compose(text, yaml.SafeLoader)) if is_yaml else json.loads(
            comment.sub(r"\1", text), object_pairs_hook=tuple)
    except OSError as error:
        return Layer(problems=[f"{path}: cannot be read: {error.strerror or error}"])
    except yaml.MarkedYAMLError as error:
        return Layer(problems=[f"{path}:{error.problem_mark.line + 1}: not valid YAML: {error.problem}"])
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        return Layer(problems=[f"{path}: not valid {'YAML' if is_yaml else 'JSON'}: {error}"])
    if not isinstance(content, tuple):
        example = "max_steps: 1000" if is_yaml else '{"max_steps": 1000}'
        return Layer(problems=[f"{path}: expected an object of settings, such as {example}"])
    layer = Layer()

    def add(pairs: tuple, section: str = "") -> None:
        for key, value, *line in pairs:
            name, where = key.lower().replace("-", "_"), f"{path}: {shortened(section + key)}"
            is_section_of_ours = forms(section + key)[0] in Config.model_fields  # data.seed
            where = f"{path}:{line[0]}" if line else where
            if isinstance(value, tuple):
                add(value, f"{section}{key}.")
            elif name in DROPPED and str(value).lower() == str(DROPPED[name]).lower():
                continue
            elif (name not in Config.model_fields or section and is_section_of_ours
                  or name == "resume" and str(value).lower() in ("true", "false")):  # litgpt's
                file = f"{path} in {shortened(section[:-1])}" if section else str(path)
                if value is not None and not accept(layer, section + key, value, where):
                    layer.refuse(name.upper(), unknown(where if line else file, section + key, key))
            elif value is None and line and name not in OPTIONAL:
                continue  # `lora_target_modules:` in YAML
            else:
                layer.put(name, value, where)

    add(content)
    return layer


def read_flags(argv: Sequence[str], script_flags: Sequence[str] = ()) -> Layer:
    """Return the settings among the flags. `script_flags` are also suggested for unknown flags."""
    # argparse would stop at the first error, print values, which may be secrets, and read -1e-3 as a flag.
    layer = Layer()
    known = (*Config.model_fields, "env_file", "config", "check")
    arguments = [*argv]
    while arguments:
        flag, has_value, value = arguments.pop(0).partition("=")
        name = flag.lstrip("-").lower().replace("-", "_")
        if not flag.startswith("-"):
            # Do not quote the text after "=": it may be a secret.
            layer.problems.append(f"command line: {shortened(flag + has_value)} has no name; write --name "
                                  "value, such as --pretrain-data-path book.txt")
            continue
        # The next argument is the value, unless it is a flag or this flag needs no value.
        has_next = arguments and not arguments[0].startswith("--")
        if not has_value and has_next and name != "check":
            value, has_value = arguments.pop(0), "="
        elif not has_value and (name == "check" or may_stand_alone(name)):
            value, has_value = "true", "="

        is_ours = name in known or name in script_flags or not has_value
        if not is_ours and flag.startswith("--") and accept(layer, name, value, "command line"):
            continue
        if not flag.startswith("--") or name not in known:
            layer.refuse(flag, unknown_flag(flag, (*known, *script_flags)))
        elif not has_value or (value == "" and name in ("env_file", "config")):
            layer.problems.append(f"command line: {flag} needs a value")
        elif name == "check":
            layer.check = value.lower() not in ("false", "0", "no", "off")
        elif name == "env_file":
            layer.env_file = value
        elif name == "config":
            layer.config_files.append(value)
        else:
            if name not in layer.notes:
                layer.values.pop(name, None)  # the last of our own flags counts
            layer.put(name, value, "command line", f": {flag}")
    return layer


def read_preset(names: str, where: str) -> Layer:
    """Return the settings of one or several comma-separated presets."""
    layer, known = Layer(), {file.stem: file for file in sorted(PRESETS_DIR.glob("*.env"))}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name in known:
            preset = read_env_file(known[name])
            layer.values |= preset.values
            layer.problems += preset.problems
            layer.unused += preset.unused
        else:
            guess = suggestion(name, known)
            advice = f"did you mean {guess}? " if guess else ""
            layer.problems.append(
                f"{where}: unknown preset {shortened(name)}; {advice}known: {', '.join(known)}")
    return layer


def read_layers(flags: Layer, environ: Mapping[str, str], is_run: bool = True) -> list[Layer]:
    """Return all layers, from lowest to highest priority; a new run with DEBUG alone gets its preset."""
    env_path = Path(flags.env_file or ".env")
    exists = flags.env_file or env_path.is_file()
    environment = {name: (environ[name.upper()], "environment")
                   for name in Config.model_fields if environ.get(name.upper(), "") != ""}
    env = read_env_file(env_path, environ) if exists else Layer()
    env.is_env = True
    layers = [env, *map(read_config_file, map(Path, flags.config_files)), Layer(environment), flags]
    given = {name: pair for layer in layers for name, pair in layer.values.items()
             if not isinstance(pair[0], tuple)}
    config, preset_pair = validate(given)[0], given.get("preset")
    is_new = (is_run and config.training_stage == "pretrain" and not derived.SIZES & given.keys()
              and (config.debug or config.preset) and not derived.run_to_resume(config)[1])
    if is_new and config.debug and not preset_pair and not LENGTHS & given.keys():
        has_data = config.pretrain_data_path or any("data_path" in layer.values for layer in layers)
        preset_pair = ("debug" if has_data else "sample,debug", given["debug"][1])
    if preset_pair:
        naming = max((number for number, layer in enumerate(layers) if "preset" in layer.values), default=1)
        preset = read_preset(*preset_pair) if isinstance(preset_pair[0], str) else Layer()
        preset.values["preset"] = preset_pair
        if "preset" not in given:
            preset.notes["DEBUG"] = f"DEBUG=true alone, for a new run, is --preset {preset_pair[0]}"
        if given.get("lora_base_quantization", ("none",))[0] != "none" and preset.values.pop("sharding", ()):
            preset.notes["PRESET"] = ("LORA_BASE_QUANTIZATION replaces the preset's SHARDING with none, "
                                      "since a quantized matrix cannot be divided by rows")
        if is_new and preset_pair[0] == "production":
            preset.values["depth"] = (PRODUCTION_DEPTH, "PRESET=production")
        preset.is_env = naming == 0
        # A preset on the command line overrides `.env`; a preset named in `.env` does not.
        layers.insert(min(naming, 1), preset)
    if OTHER_TRAINERS:
        OTHER_TRAINERS.compute(layers)
    return layers


def settled(layers: Sequence[Layer], is_run: bool = True) -> tuple[Values, Values]:
    """Return the settings of all layers, and those that yield to the record if `is_run` resumes."""
    given = {name: pair for layer in layers for name, pair in layer.values.items()}
    env = {name: pair for layer in layers if layer.is_env for name, pair in layer.values.items()}
    in_env = {name for name in env if env[name] is given[name]}
    stage = env.get("training_stage", (None,))[0]
    ignored = derived.yielding(validate(given)[0], given, in_env, stage) if is_run else ()
    return ({name: pair for name, pair in given.items() if name not in ignored},
            {name: pair for name, pair in given.items() if name in ignored})


def exported(layers: Iterable[Layer]) -> dict[str, str]:
    return {name: value for layer in layers for name, value in layer.exports.items()}


def peek(argv: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings, without validation or defaults, and the environment with `.env`'s variables."""
    layers = read_layers(read_flags(argv), os.environ)
    given, ignored = settled(layers)
    _, recorded = derived.recorded_settings(validate(given)[0], given, ignored)
    values = {name: value for name, (value, _) in given.items()} | recorded
    return ({name: str(value) for name, value in values.items() if value is not None},
            {**exported(layers), **os.environ})


@dataclass(frozen=True)
class Settings:
    """A valid configuration, the location of each explicit setting, and messages to print."""

    config: Config
    sources: dict[str, str]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    check: bool = False
    is_plan: bool = False  # for other hardware: data, tokenizer and base may be missing
    deferred: tuple[str, ...] = ()  # settings to be derived from data or hardware
    exports: Mapping[str, str] = field(default_factory=dict, repr=False)  # may contain secrets

    def with_defaults(self, values: Mapping[str, Any]) -> "Settings":
        """Return a copy with values for settings that no layer sets, without checking the rules again."""
        unset = {name: value for name, value in values.items() if name not in self.sources}
        return replace(self, config=self.config.model_copy(update=unset))


def load_config(argv: Sequence[str] = (), environ: Optional[Mapping[str, str]] = None, *,
                own_flags: Sequence[str] = (), complete: bool = True) -> Settings:
    """Read all layers, choose values for unset settings, and return the configuration.

    A script's `own_flags` are suggested for unknown flags. Without `complete`, the rules between settings are
    not checked, and `.env` does not yield to a run's record, for scripts that need only a few settings.
    """
    environ = os.environ if environ is None else environ
    flags = read_flags(argv, own_flags)

    # Explicit settings.
    layers = read_layers(flags, environ, complete)
    given, ignored = settled(layers, complete)
    config, invalid = validate(given)

    # Unset settings, in order of precedence: the run to resume, DEPTH, the start checkpoint, stage, steps.
    checkpoint, recorded = derived.recorded_settings(config, given, ignored)
    config = config.model_copy(update=recorded)
    config.model_fields_set.difference_update(  # a recorded default is not one that somebody chose
        name for name in {*recorded} - {"max_steps"} if recorded[name] == Config.model_fields[name].default)
    decided = {*given, *recorded, *({"max_steps"} if config.epochs else ())}
    by_depth = derived.settings_of_depth(config, decided) if "depth" in given else {}
    config = config.model_copy(update=by_depth)
    by_start = derived.settings_of_start(config, decided)  # its row length limits DEPTH's
    config = config.model_copy(update=by_start)
    is_whole = "n_kv_heads" in decided or config.n_heads % config.n_kv_heads == 0
    by_heads = {} if is_whole else {"n_kv_heads": config.n_heads}
    config = config.model_copy(update=by_heads)
    by_stage, deferred = derived.settings_of_stage(config, decided | by_depth.keys())
    config = config.model_copy(update=by_stage)
    unset = Config.model_fields.keys() - decided - {*deferred}
    by_length = derived.settings_of_length(config.max_steps, unset)
    config = derived.with_all_rows(config.model_copy(update=by_length))

    # Errors. A plan for other hardware needs neither data, a tokenizer nor a base.
    is_plan = flags.check and "RANK" not in environ and bool(config.device_memory or config.world_size > 1)
    missing = [*input_rules(config), *base_rules(config)] if is_plan else []
    problems = [*(problem for layer in layers for problem in layer.problems), *invalid.values()]
    if complete:
        both = f"EPOCHS={config.epochs or 0:g} and MAX_STEPS={config.max_steps} are both set; keep one"
        messages = (*launch_problems(config, environ, flags.check), *rules(config),
                    *([both] if config.epochs and "max_steps" in given else ()),
                    *without_extension(config, given),
                    *(without_switch(config, layers, "teacher_model", "distillation_enabled")
                      if "distillation_enabled" not in ignored else ()))
        # Omit conflicts with a setting whose value is invalid.
        names = re.compile("|".join(rf"\b{name.upper()}\b" for name in invalid) or "(?!)")
        problems += (message for message in messages if message not in missing and not names.search(message))
    if problems:
        raise SettingsError(*problems)

    sources = {name: where for name, (_, where) in given.items()}
    sources |= dict.fromkeys(by_depth.keys() - by_start.keys(), f"DEPTH={config.depth}")
    by_stage = {name: value for name, value in by_stage.items() if name not in deferred}
    stage = f"TRAINING_STAGE={config.training_stage}{' with LoRA' if config.lora_enabled else ''}"
    chosen = {f"Kept from {checkpoint}:": recorded, f"DEPTH={config.depth} sets": by_depth,
              f"{stage} sets": by_stage, "From the prepared data or the start checkpoint:": by_start,
              f"MAX_STEPS={config.max_steps} sets": by_length, f"N_HEADS={config.n_heads} sets": by_heads}
    notes = [f"{how} {text}" for how, values in chosen.items() if (text := assigned(values))]
    if ignored:
        files = dict.fromkeys(where.rpartition(":")[0] for _, where in ignored.values())
        values = ", ".join(f"{name.upper()}={shortened(str(value))}" for name, (value, _) in ignored.items())
        reason = ("the run recorded other values (to start a new run, set another RUN_NAME)" if recorded else
                  f"it does not fit TRAINING_STAGE={config.training_stage}")
        notes.append(f"Ignored from {' and '.join(files)}, because {reason}: {values}")
    notes[:0] = [text if name not in Config.model_fields or given[name] is layer.values.get(name)
                 else f"{text}, replaced by {shortened(str(given[name][0]))} ({given[name][1]})"
                 for layer in layers for name, text in layer.notes.items()
                 if name not in Config.model_fields or name in given]
    if len(config.start_settings) > 1:
        first, *others = map(str.upper, config.start_settings)
        notes.append(f"{stage} starts from {first}, not from {' or '.join(others)}")
    notes += notes_on_layers(layers, given, environ)
    warnings = (*cautions(config, layers, environ, deferred), *missing)
    return Settings(config, sources, (*notes,), warnings,
                  flags.check, is_plan, tuple(deferred), exported(layers))


def cautions(config: Config, layers: Sequence[Layer], environ: Mapping, deferred: Iterable) -> Iterator[str]:
    """Yield warnings of settings that are probably not what the user meant."""
    yield from (f"environment: {key} is not a setting; did you mean {guess.upper()}?"
                for key in environ if (guess := misspelled(key)) is not None)
    if 0 < config.max_steps < config.warmup_steps and "warmup_steps" not in deferred:
        yield (f"WARMUP_STEPS={config.warmup_steps} exceeds MAX_STEPS={config.max_steps}, so the rate never "
               "reaches LEARNING_RATE; lower it, for example to 0.1, a share of steps")
    for feature in ("lora", "distillation"):
        yield from without_switch(config, layers, f"{feature}_", f"{feature}_enabled")
    # `.env` serves all stages, but a flag is for this run.
    for stage in filter(config.training_stage.__ne__, KIND_OF_STAGE):
        at_stage = config.model_copy(update={"training_stage": stage})
        owned = [name for section in SECTIONS if section.is_used(at_stage) > section.is_used(config)
                 for name in section.model_fields]
        if idle := [name.upper() for name in layers[-1].values if name in (*owned, f"{stage}_data_path")]:
            yield (f"command line: TRAINING_STAGE={config.training_stage} ignores settings of {stage}: "
                   f"{', '.join(idle)}; remove these flags, or set that stage")
    if unused := [*dict.fromkeys(name for layer in layers for name in layer.unused)]:
        yield f"Without extensions/, these names are not settings: {', '.join(unused)}"


def assigned(values: Mapping[str, Any]) -> str:
    """Return the values that differ from the defaults as NAME=value, NAME=value."""
    return ", ".join(f"{name.upper()}={str(value).lower() if isinstance(value, bool) else value}"
                     for name, value in values.items() if value != Config.model_fields[name].default)


def notes_on_layers(layers: Sequence[Layer], given: Values, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings that a preset overrides or the environment sets, and the libraries' variables."""
    overridden = [f"{name.upper()}={value}" for name, (value, where) in given.items()
                  if where.startswith(str(PRESETS_DIR)) and layers[0].values.get(name, (value,))[0] != value]
    if overridden:
        yield f"From the preset, which overrides .env: {', '.join(overridden)}"
    in_environment = [f"{name.upper()}={shortened(without_passwords(value))}"
                      for name, (value, where) in given.items()
                      if where == "environment" and name != "world_size"]  # set by torchrun
    if in_environment:
        yield f"From the environment: {', '.join(in_environment)}"
    for where, same in ((".env", True), ("the environment, which overrides .env", False)):
        names = [name for name, value in exported(layer for layer in layers if layer.is_env).items()
                 if (environ.get(name, value) == value) is same]
        if names:
            yield f"For the libraries, from {where}: {', '.join(names)}"


def without_switch(config: Config, layers: Sequence[Layer], prefix: str, switch: str) -> Iterator[str]:
    """Yield a message if settings have no effect, unless their feature was switched off deliberately."""
    last = {name: index for index, layer in enumerate(layers) for name in layer.values}
    idle = [name for name, value in config if name.startswith(prefix) and value is not None
            and last.get(switch, -1) < last.get(name, -1)]
    if idle and not getattr(config, switch):
        value, where = layers[last[idle[0]]].values[idle[0]]
        yield (f"{where}: {idle[0].upper()}={shortened(str(value))} has no effect without "
               f"{switch.upper()}=true; set that too, or {switch.upper()}=false to train without it")


def without_extension(config: Config, given: Values) -> Iterator[str]:
    """Yield an error for the settings of each extension that EXTENSIONS leaves out.

    That is a fixed setting with another value than the default, or one that the user sets, unless it is off.
    """
    for extension, section in EXTENSION_SECTIONS.items():
        ignored = []
        for name, info in section.model_fields.items():
            value, (_, where) = getattr(config, name), given.get(name, ("", ""))
            is_own = where and not where.startswith(str(PRESETS_DIR))
            if value and (value != info.default if on_resume(name) == "fixed" else is_own):
                shown = "true" if value is True else shortened(str(value))
                ignored.append(f"{name.upper()}={shown}" + f" ({where})" * bool(where))
        if ignored and section.is_used(config) and extension not in config.extension_names:
            listed = ",".join([*config.extension_names, extension])
            yield (f"{', '.join(ignored)} need{'s' * (len(ignored) == 1)} {extension} in EXTENSIONS; add it "
                   f"(EXTENSIONS={listed}), or remove {'it' if len(ignored) == 1 else 'them'}")


def launch_problems(config: Config, environ: Mapping[str, str], check: bool) -> Iterator[str]:
    """Yield conflicts between WORLD_SIZE and the launcher that started this process."""
    if "RANK" not in environ:
        if config.world_size > 1 and not check:
            yield (f"WORLD_SIZE={config.world_size}, but no launcher started this process; use "
                   f"{command('scripts/launch.py', '--nproc-per-node', str(config.world_size))} (or torchrun)"
                   ", or remove it")
    elif not all(environ.get(name, "0").isdecimal() for name in ("RANK", "LOCAL_RANK")):
        yield "environment: RANK and LOCAL_RANK must be whole numbers; torchrun sets them"
    elif str(config.world_size) != (started := environ.get("WORLD_SIZE") or "1").strip():
        yield f"WORLD_SIZE={config.world_size}, but the launcher started {started} processes; remove it"


class SettingLine(NamedTuple):
    """A setting as in --help and docs/settings.md."""

    section: str  # of the core, or the extension
    name: str
    default: str  # empty: none
    meaning: str
    on_resume: str  # safe | curve | fixed


def describe_settings() -> Iterator[SettingLine]:
    """Yield every setting, those of the core first."""
    titles = {section.__name__.removesuffix("Config"): section for section in CORE_SECTIONS}
    titles |= {f"Extension {name}": section for name, section in EXTENSION_SECTIONS.items()}
    for title, section in titles.items():
        for name, info in section.model_fields.items():
            default = "" if info.default is None else str(info.default)
            default = default.lower() if isinstance(info.default, bool) else default
            choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
            meaning = info.description + (f" ({' | '.join(choices)})" if choices else "")
            yield SettingLine(title, name.upper(), default, meaning, on_resume(name))


def help_text(usage: str) -> str:
    """Return the text of --help: every setting with its default and meaning."""
    lines = [*filled(f"usage: {usage}", subsequent_indent="  "), "",
             *filled("Priority: defaults < .env < preset < --config < environment < flags. A preset named in "
                     ".env has lower priority than .env. The flag for MAX_STEPS is --max-steps. Variables of "
                     "libraries (HF_TOKEN, WANDB_API_KEY, NCCL_DEBUG, ...) may be in .env too."), ""]

    def add(flag: str, meaning: str) -> None:
        lines.extend(filled(meaning, initial_indent=f"  {flag:<27} ", subsequent_indent=" " * 30))

    presets = ", ".join(sorted(file.stem for file in PRESETS_DIR.glob("*.env")))
    add("--config FILE", "read settings from a JSON or YAML file (.yaml), flat or in sections")
    add("--env-file FILE", "read this file instead of .env")
    add("--check", "check settings, data, memory and time without training; exit with 0 if a run would start")
    add("--version", "show the version and exit")
    for section, settings in groupby(describe_settings(), key=lambda line: line.section):
        lines += ["", section]
        for _, name, default, meaning, _ in settings:
            known = f": {presets}" if name == "PRESET" else ""
            add(f"--{name.lower().replace('_', '-')}",
                f"{meaning}{known} [{default.replace(',', ', ') or 'none'}]")
    return "\n".join(lines)


def find_run(name: str) -> Path:
    """Return a run's folder by its path, its name in OUTPUT_DIR, or one of its checkpoints."""
    path = Path(name).expanduser()
    if not os.path.exists(path):
        inside = Path(load_config(complete=False).config.output_dir) / path
        path = inside if os.path.exists(inside) else path
    if re.fullmatch(r"step-\d+", path.name):
        path = path.parent
    return path.parent if path.name == "checkpoints" else path


def load_or_exit(argv: Sequence[str], usage: str) -> Settings:
    """Return the configuration and export `.env`'s variables; exits after --help, --version and errors."""
    if {"--help", "-h", "--version"} & set(argv):
        with first_on_machine() as first, exit_if_unread():
            if first:
                show(*(VERSION if "--version" in argv else help_text(usage)).split("\n"))
        raise SystemExit(0)
    try:
        loaded = load_config(argv)
    except SettingsError as error:
        exit_with(error)
    export(loaded)
    return loaded


def exit_with(error: SettingsError) -> NoReturn:
    """Print the errors, once per machine, and exit with code 2."""
    lines = str(error).splitlines()
    with first_on_machine() as first:
        if first:
            title = f"{counted(len(lines), 'error')} in the settings:"
            print_safely("\n  ".join([title, *lines]), sys.stderr)
    raise SystemExit(error.exit_code)


def export(loaded: Settings) -> None:
    """Export `.env`'s library variables, before the libraries are imported."""
    for name, value in loaded.exports.items():
        os.environ.setdefault(name, value)
    configure_allocator(derived.huge_pages_pay(loaded.config))
