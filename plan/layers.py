"""Read the settings of each source, a layer: `.env`, presets, files, the environment, the command line."""

import io
import json
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import yaml
from dotenv.parser import parse_stream
from dotenv.variables import Variable, parse_variables

from common.files import read_text
from common.text import suggestion
from config import DROPPED, MODEL_SETTINGS, START_FROM, Config, extension_module
from parallel.process import RESTART
from plan import names

OTHER_TRAINERS = extension_module("other_trainers")  # None without extensions/
# The separators of settings with several values, which may be lists in JSON and YAML.
SEPARATORS = {name: field.json_schema_extra["separator"] for name, field in Config.model_fields.items()}
# Environment variables for libraries, also allowed in `.env`.
LIBRARIES = re.compile(
    "(HF|HUGGINGFACE|HUGGING_FACE|TRANSFORMERS|TOKENIZERS|RAYON|TIKTOKEN|WANDB|TENSORBOARD|TRACKIO|MLFLOW"
    "|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|GLOO|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|OMP|KMP|GOMP|MKL"
    "|OPENBLAS|ONEDNN|DNNL|ATEN|BNB)_[A-Z0-9_]+|MASTER_(ADDR|PORT)|(HTTPS?|NO)_PROXY")
PRODUCTION_DEPTH = "24"  # of --preset production without a size: 0.8 billion parameters
SIZES = {"depth", *START_FROM, *MODEL_SETTINGS}  # with one of these, a run has its own size
PRESETS_DIR = Path(__file__).parent / "presets"
LENGTH = ("max_steps", "epochs")  # two ways to set the length of a run
LENGTHS = {"max_steps", "epochs", "max_seq_len", "total_batch_size", "micro_batch_size", "learning_rate"}
# Values with a meaning in other trainers: anywhere, and as flags only.
ELSEWHERE = {("max_steps", "-1"), *(("training_stage", stage) for stage in ("lora", "qlora", "distillation"))}
TYPED_ELSEWHERE = {("run_name", "none"), ("run_name", "null"), ("debug", "true")}
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
    for_this_start: bool = False  # flags or the environment, which a run's record does not override
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
        if (ours := names.standard(name, value)) != value and isinstance(value, str):
            self.notes[f"{name}={value}"] = f"{name.upper()}={names.shortened(value)} is our {ours}"
            value = ours
        first, before = self.values.get(name, (value, ""))
        may_repeat = is_implied or name in self.implied or before == where and where[-1].isdigit()  # YAML
        if before and not (may_repeat and str(first).lower() == str(value).lower()):
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
            layer.problems.append(f"{where}: {names.shortened(key)} uses a variable that is set neither in "
                                  "the environment nor in an earlier line; set it, or write "
                                  "${NAME:-default}")
        elif name not in Config.model_fields and (not LIBRARIES.fullmatch(name) or names.misspelled(name)):
            if not accept(layer, key, value, where):
                layer.refuse(key, names.unknown(where, key))
        elif name in set_at:
            layer.problems.append(f"{where}: {key} is set a second time (first at {set_at[name]}); keep one")
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
        for event in yaml.parse(text) if is_yaml and not OTHER_TRAINERS else ():
            if isinstance(event, yaml.AliasEvent):  # a few lines may stand for gigabytes
                raise yaml.MarkedYAMLError(None, None, f"write out *{event.anchor}", event.start_mark)
        merge = OTHER_TRAINERS.merge_yaml if OTHER_TRAINERS else lambda node: node
        content = yaml_content(merge(yaml.compose(text, yaml.SafeLoader))) if is_yaml else json.loads(
            comment.sub(r"\1", text), object_pairs_hook=tuple)
    except OSError as error:
        return Layer(problems=[f"{path}: cannot be read: {error.strerror or error}; check --config"])
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
            name, where = key.lower().replace("-", "_"), f"{path}: {names.shortened(section + key)}"
            is_section_of_ours = names.forms(section + key)[0] in Config.model_fields  # data.seed
            where = f"{path}:{line[0]}" if line else where
            if isinstance(value, tuple):
                add(value, f"{section}{key}.")
            elif name in DROPPED and str(value).lower() == str(DROPPED[name]).lower():
                continue
            elif (name not in Config.model_fields or section and is_section_of_ours
                  or value is None and line and name not in names.OPTIONAL  # such as `max_grad_norm:` in YAML
                  or name == "resume" and str(value).lower() in ("true", "false")):  # litgpt's
                file = f"{path} in {names.shortened(section[:-1])}" if section else str(path)
                if not accept(layer, section + key, value, where) and value is not None:
                    advice = names.advice(section + key)
                    layer.refuse(name.upper(), names.unknown(where if line else file, key, "setting", advice))
            else:
                layer.put(name, value, where, f": {key}" * bool(line))

    add(content)
    return layer


def read_flags(argv: Sequence[str], script_flags: Sequence[str] = ()) -> Layer:
    """Return the settings among the flags. `script_flags` are also suggested for unknown flags."""
    # argparse would stop at the first error, print values, which may be secrets, and read -1e-3 as a flag.
    layer = Layer(for_this_start=True)
    known = (*Config.model_fields, "env_file", "config", "check")
    arguments = [*argv]
    while arguments:
        flag, has_value, value = arguments.pop(0).partition("=")
        name = flag.lstrip("-").lower().replace("-", "_")
        if not flag.startswith("-"):
            # Do not quote the text after "=": it may be a secret.
            layer.problems.append(f"command line: {names.shortened(flag + has_value)} has no name; write "
                                  "--name before it, such as --config FILE.yaml or --run-name RUN")
            continue
        # The next argument is the value, unless it is a flag or this flag needs no value.
        has_next = arguments and not arguments[0].startswith("--")
        if not has_value and has_next and name != "check":
            value, has_value = arguments.pop(0), "="
        elif not has_value:
            form = names.known_form(name)
            if name == "check" or form in names.OTHER_WAYS or names.ALIASES.get(form, form) in names.SWITCHES:
                value, has_value = "true", "="

        is_ours = name in known or name in script_flags or not has_value
        if not is_ours and flag.startswith("--") and accept(layer, name, value, "command line"):
            continue
        if not flag.startswith("--") or name not in known:
            layer.refuse(flag, names.unknown_flag(flag, (*known, *script_flags)))
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


def read_preset(listed: str, where: str) -> Layer:
    """Return the settings of one or several comma-separated presets."""
    layer, known = Layer(), {file.stem: file for file in sorted(PRESETS_DIR.glob("*.env"))}
    for name in filter(None, map(str.strip, listed.split(","))):
        if name in known:
            preset = read_env_file(known[name])
            layer.values |= preset.values
            layer.problems += preset.problems
            layer.unused += preset.unused
        else:
            guess = suggestion(name, known)
            advice = f"did you mean {guess}? " if guess else ""
            layer.problems.append(
                f"{where}: unknown preset {names.shortened(name)}; {advice}known: {', '.join(known)}")
    return layer


def read_layers(flags: Layer, environ: Mapping[str, str], is_run: bool = True) -> list[Layer]:
    """Return all layers, from lowest to highest priority; a new run with DEBUG alone gets its preset."""
    env_path = Path(flags.env_file or ".env")
    exists = flags.env_file or env_path.is_file()
    environment = {name: (environ[name.upper()], "environment")
                   for name in Config.model_fields if environ.get(name.upper(), "") != ""}
    env = read_env_file(env_path, environ) if exists else Layer()
    env.is_env = True
    # An automatic restart keeps the settings of files that the first start had: they may have been edited.
    if restarted := json.loads(environ.get(RESTART, "{}")).get("settings"):
        env, flags.config_files = Layer({name: (*pair,) for name, pair in restarted.items()}, is_env=True), []
    layers = [env, *map(read_config_file, map(Path, flags.config_files)),
              Layer(environment, for_this_start=True), flags]
    given = {name: pair for layer in layers for name, pair in layer.values.items()
             if not isinstance(pair[0], tuple)}
    config, preset_pair = names.validate(given)[0], given.get("preset")
    own = Path(config.output_dir) / (config.run_name or "-") / "checkpoints"
    is_new = (is_run and config.training_stage == "pretrain" and not SIZES & given.keys()
              and (config.debug or config.preset)
              and (config.resume == "never" or config.resume == "auto" and not any(own.glob("step-*"))))
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
    # A name of another trainer may need all layers; its max_steps=-1 leaves the length to the epochs.
    if OTHER_TRAINERS and any(map(means_elsewhere, layers)):
        OTHER_TRAINERS.compute(layers)
    return layers


def means_elsewhere(layer: Layer) -> bool:
    values = {(name, str(value).lower()) for name, (value, _) in layer.values.items()}
    is_theirs = layer.named or any(isinstance(value, tuple) for value, _ in layer.values.values())
    return bool(is_theirs or values & ELSEWHERE or layer.for_this_start and values & TYPED_ELSEWHERE)


def exported(layers: Iterable[Layer]) -> dict[str, str]:
    return {name: value for layer in layers for name, value in layer.exports.items()}
