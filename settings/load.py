"""The layers that settings are read from: defaults < `.env` < preset < JSON file < environment < flags; a preset that `.env`
itself names lies below it.

Everything that is wrong in any of them is told at once, with file and line. Nothing is read at import.
"""

import difflib
import io
import json
import os
import re
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Optional

from dotenv.parser import parse_stream
from dotenv.variables import Variable, parse_variables
from pydantic import ValidationError

from common.errors import SettingsError
from common.files import read_text
from common.text import ending_with_reader, print_safely, printable, show, without_passwords
from config import SECRETS, Config, describe_settings, rules
from parallel.exit_report import first_here

PRESETS_DIR = Path(__file__).parent / "presets"


class Layer(NamedTuple):
    """Settings from one place: name -> (value, where it stands); and what `.env` has for the libraries beside us."""

    values: dict[str, tuple[Any, str]]
    problems: list[str]
    exports: Mapping[str, str] = {}


# What other trainers call these settings.
FOREIGN_NAMES = {
    "max_lr": "learning_rate", "lr": "learning_rate", "max_learning_rate": "learning_rate", "peak_lr": "learning_rate",
    "min_lr": "min_learning_rate", "batch_size": "micro_batch_size", "max_batch_size": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size", "global_batch_size": "total_batch_size",
    "grad_accum_steps": "total_batch_size", "gradient_accumulation_steps": "total_batch_size", "block_size": "max_seq_len",
    "context_length": "max_seq_len", "seq_len": "max_seq_len", "seq_length": "max_seq_len", "max_length": "max_seq_len",
    "max_iters": "max_steps", "num_iterations": "max_steps", "epochs": "max_steps", "num_epochs": "max_steps",
    "num_train_epochs": "max_steps", "warmup_iters": "warmup_steps", "lr_scheduler": "lr_schedule",
    "lr_scheduler_type": "lr_schedule", "grad_clip": "max_grad_norm", "clip_grad": "max_grad_norm", "dtype": "precision",
    "bf16": "precision", "fp16": "precision", "eval_interval": "validate_every", "eval_every": "validate_every",
    "eval_steps": "validate_every", "save_interval": "save_every", "save_steps": "save_every", "log_interval": "log_every",
    "logging_steps": "log_every", "out_dir": "output_dir", "data_path": "pretrain_data_path", "data_dir": "pretrain_data_path",
    "n_layer": "n_layers", "num_layers": "n_layers", "num_hidden_layers": "n_layers", "n_head": "n_heads",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "n_embd": "dim", "d_model": "dim",
    "hidden_size": "dim", "intermediate_size": "ffn_dim", "hidden_dim": "ffn_dim", "vocab_size": "tokenizer_path",
    "gradient_checkpointing": "activation_checkpointing", "resume_from": "resume", "use_wandb": "wandb_enabled"}
# Settings that hold several values, which JSON may write as a list, and what stands between the values elsewhere.
LISTS = {"preset": ",", "allow_resume_mismatch": ",", "lora_target_modules": ",", "sample_prompts": "|"}
# Keys of the libraries beside us, which `.env` may hold too.
LIBRARIES = re.compile(
    "(HF|HUGGINGFACE|HUGGING_FACE|TRANSFORMERS|TOKENIZERS|RAYON|TIKTOKEN|WANDB|TENSORBOARD|CUDA|CUBLAS|CUDNN|NVIDIA|NCCL|GLOO|TORCH"
    "|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|OMP|KMP|GOMP|MKL|OPENBLAS|ONEDNN|DNNL|ATEN|BNB)_[A-Z0-9_]+"
    "|MASTER_(ADDR|PORT)|(HTTPS?|NO)_PROXY")
OPTIONAL = {name for name, field in Config.model_fields.items() if field.default is None}
SWITCHES = {name for name, field in Config.model_fields.items() if field.annotation is bool}
OWN_FLAGS = ("env_file", "config", "check")


def nearest(name: str, known: Iterable[str] = Config.model_fields) -> Optional[str]:
    """The known name that a misspelt one most likely means, or None."""
    name = name.lower().replace("-", "_")
    if name in FOREIGN_NAMES:
        return FOREIGN_NAMES[name]
    matches = difflib.get_close_matches(name[:60], known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown(where: str, name: str) -> str:
    """What to say of a name in a file that is no setting."""
    guess = nearest(name)
    return (f"{where}: unknown setting {shown(name)}"
            + (f"; did you mean {guess.upper()}?" if guess else "; --help lists every setting"))


def shown(text: str) -> str:
    """Text from a user on one line, not longer than what a line of a report can bear."""
    text = printable(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_env_file(path: Path, environ: Mapping[str, str] = {}) -> Layer:
    """The settings of a `.env` file, each with its line, and the libraries' keys in it. Empty values count as not given.

    `${NAME}` and `${NAME:-default}` are expanded as python-dotenv does: from the environment, else from the lines above.
    """
    values, problems, above = {}, [], {}
    known = ChainMap(environ, above)
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, ValueError) as error:
        return Layer({}, [f"{path}: cannot be read: {reason(error)}"])
    for binding in parse_stream(io.StringIO(text)):
        # A binding's text may begin with blank and comment lines; its own line is the first with something in it.
        blank = len(binding.original.string) - len(binding.original.string.lstrip())
        where = f"{path}:{binding.original.line + binding.original.string[:blank].count(chr(10))}"
        key, value = binding.key, binding.value
        if re.match(r"[^=]*=[^\S\n]+#", binding.original.string[blank:]):
            value = ""  # nothing but a comment, which the parser takes for the value
        if key is None and not binding.error:
            continue
        # The line itself is not repeated: it may hold a secret.
        if binding.error or value is None:
            problems.append(f"{where}: not of the form NAME=value")
            continue
        atoms = [*parse_variables(value)]
        unset = [atom for atom in atoms if isinstance(atom, Variable) and atom.default is None and atom.name not in known]
        above[key] = value = "".join(atom.resolve(known) for atom in atoms)
        name = key.lower() if key.lower() in Config.model_fields else key
        if unset:
            problems.append(f"{where}: {shown(key)} needs a variable that is neither set in the environment nor above; "
                            "set it, or write ${NAME:-default}")
        elif name not in Config.model_fields and (not LIBRARIES.fullmatch(name) or misspelt(name)):
            problems.append(unknown(where, key))
        elif name in values:
            problems.append(f"{where}: {key} is set a second time (first at {values[name][1]}); keep one")
        else:
            values[name] = (value, where)
    given = {name: pair for name, pair in values.items() if pair[0] != ""}
    return Layer({name: pair for name, pair in given.items() if name in Config.model_fields}, problems,
                 {name: value for name, (value, _) in given.items() if name not in Config.model_fields})


def read_json_file(path: Path) -> Layer:
    """The settings of a JSON file, flat or grouped in sections of any name."""
    values, problems = {}, []
    try:
        # As pairs, because a dictionary would hide a name that is there twice.
        content = json.loads(read_text(path, "utf-8-sig"), object_pairs_hook=Pairs)
    except OSError as error:
        return Layer({}, [f"{path}: cannot be read: {reason(error)}"])
    except (ValueError, RecursionError) as error:
        return Layer({}, [f"{path}: not valid JSON: {reason(error)}"])
    if not isinstance(content, Pairs):
        return Layer({}, [f"{path}: expected an object of settings, such as {{\"max_steps\": 1000}}"])
    for section, key, value in leaves(content):
        name, where = key.lower().replace("-", "_"), f"{path}: {shown(section + key)}"
        if name not in Config.model_fields:
            problems.append(unknown(str(path) + (f" in {shown(section[:-1])}" if section else ""), key))
        elif name in values:
            problems.append(f"{where} is set a second time (first at {values[name][1]}); keep one")
        elif isinstance(value, list) and name in LISTS and all(isinstance(part, str) for part in value):
            values[name] = (LISTS[name].join(value), where)
        else:
            values[name] = (value, where)
    return Layer(values, problems)


class Pairs(tuple):
    """A JSON object, as the pairs that it is written with."""


def leaves(content: Pairs, section: str = "") -> Iterator[tuple[str, str, Any]]:
    """(section with a dot behind it, key, value) of everything that is not a section."""
    for key, value in content:
        if isinstance(value, Pairs):
            yield from leaves(value, f"{section}{key}.")
        else:
            yield section, key, value


def reason(error: Exception) -> str:
    """Why a file cannot be read, without its path."""
    return getattr(error, "strerror", None) or str(error)


def read_environment(environ: Mapping[str, str]) -> tuple[Layer, list[str]]:
    """The settings of the process environment, and warnings of keys that look like a misspelt setting."""
    values = {name: (environ[name.upper()], "environment")
              for name in Config.model_fields if environ.get(name.upper(), "") != ""}
    warnings = [f"environment: {key} is no setting; did you mean {guess.upper()}?"
                for key in environ if (guess := misspelt(key)) is not None]
    return Layer(values, []), warnings


def misspelt(key: str) -> Optional[str]:
    """The setting that a key of the process environment seems to mean, or None.

    The environment is full of other programs' keys: COMPILER, DEVICES, LOCAL_WORLD_SIZE are nobody's mistake.
    """
    name = key.lower()
    if key != key.upper():
        return name if name in Config.model_fields and "_" in name else None
    if name in Config.model_fields or len(name) < 6:
        return None
    if name in FOREIGN_NAMES:
        return FOREIGN_NAMES[name]
    match = next(iter(difflib.get_close_matches(name, Config.model_fields, n=1, cutoff=0.88)), None)
    return None if match is None or ("_" not in match and name.startswith(match)) else match


class Flags(NamedTuple):
    """What stands on the command line."""

    layer: Layer
    env_file: Optional[str]
    config_files: list[str]
    check: bool
    rest: dict[str, str]


def read_flags(argv: Sequence[str], extra: Sequence[str] = ()) -> Flags:
    """The settings among the flags. `extra` names flags of a script of its own, handed back in `rest`."""
    values, problems, rest, config_files = {}, [], {}, []
    env_file, check = None, False
    own = {name.replace("-", "_") for name in extra}
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        flag, has_value, value = argument.partition("=")
        name = flag.lstrip("-").lower().replace("-", "_")
        if not flag.startswith("-"):
            # What follows the sign is not repeated: it may be a secret.
            problems.append(f"command line: {shown(flag + has_value)} has no name; write --name value")
            continue
        # What follows is the value, unless it is a flag, or the flag needs none.
        if not has_value and arguments and not arguments[0].startswith("--") and name != "check":
            value, has_value = arguments.pop(0), "="
        elif not has_value and (name == "check" or name in SWITCHES):
            value, has_value = "true", "="
        if not flag.startswith("--") or (name not in Config.model_fields and name not in own and name not in OWN_FLAGS):
            problems.append(unknown_flag(flag, [*Config.model_fields, *own, *OWN_FLAGS]))
        elif name in SECRETS:
            problems.append(f"command line: {flag} is a secret, which a flag would show to everyone; "
                            f"set {name.upper()} in .env or the environment")
        elif not has_value or (value == "" and name in (*own, "env_file", "config")):
            problems.append(f"command line: {flag} needs a value")
        elif name == "check":
            check = value.lower() not in ("false", "0", "no", "off")
        elif name == "env_file":
            env_file = value
        elif name == "config":
            config_files.append(value)
        elif name in own:
            rest[name] = value
        else:
            values[name] = (value, "command line")
    return Flags(Layer(values, problems), env_file, config_files, check, rest)


def unknown_flag(flag: str, known: Sequence[str]) -> str:
    """What to say of a flag that is none."""
    name = flag.lstrip("-").lower().replace("-", "_")
    if name.removeprefix("no_") in SWITCHES:
        return f"command line: unknown flag {flag}; did you mean --{name.removeprefix('no_').replace('_', '-')} false?"
    guess = name if name in known else nearest(name, known)
    return f"command line: unknown flag {shown(flag)}" + (
        f"; did you mean --{guess.replace('_', '-')}?" if guess else "; --help lists every setting")


def read_preset(names: str, where: str) -> Layer:
    """The settings of one preset, or of several with commas."""
    values, problems = {}, []
    known = {file.stem: file for file in sorted(PRESETS_DIR.glob("*.env"))}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name in known:
            layer = read_env_file(known[name])
            values.update(layer.values)
            problems += layer.problems
        else:
            guess = nearest(name, known)
            problems.append(f"{where}: unknown preset {shown(name)}; " + (f"did you mean {guess}? " if guess in known else "")
                            + f"there are {', '.join(known)}")
    return Layer(values, problems)


@dataclass(frozen=True)
class Loaded:
    """A valid configuration, where each setting that is not at its default was read, and what to tell and warn of."""

    config: Config
    sources: dict[str, str]
    notes: list[str]
    warnings: list[str]
    check: bool
    rest: dict[str, str]
    exports: Mapping[str, str] = field(repr=False)  # may hold secrets


def read_layers(flags: Flags, environ: Mapping[str, str], environment: Layer) -> list[Layer]:
    """All layers, the lowest first."""
    env_path = Path(flags.env_file or ".env")
    there = flags.env_file or env_path.is_file()
    layers = [read_env_file(env_path, environ) if there else Layer({}, []), *map(read_json_file, map(Path, flags.config_files)),
              environment, flags.layer]
    naming = max((number for number, layer in enumerate(layers) if "preset" in layer.values), default=None)
    if naming is not None:
        names, where = layers[naming].values["preset"]
        # Whoever names one on the command line wants it whatever `.env` holds; what `.env` holds beside its own changes that.
        layers.insert(min(naming, 1), read_preset(names, where) if isinstance(names, str) else Layer({}, []))
    return layers


def peek(argv: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What run.sh needs before there is anything to check: the presets that a command line leads to, and the environment with
    what `.env` has for the libraries. What is wrong is told by the program that it starts."""
    layers = read_layers(read_flags(argv), os.environ, read_environment(os.environ)[0])
    preset = next((layer.values["preset"][0] for layer in reversed(layers) if "preset" in layer.values), "")
    return str(preset), {**exported(layers), **os.environ}


def exported(layers: Iterable[Layer]) -> dict[str, str]:
    """What the layers have for the libraries."""
    return {name: value for layer in layers for name, value in layer.exports.items()}


def load_config(argv: Sequence[str] = (), environ: Optional[Mapping[str, str]] = None, *, extra_flags: Sequence[str] = (),
                complete: bool = True) -> Loaded:
    """Read all layers and return the configuration.

    Args:
        argv: flags, without the program's name.
        environ: the process environment; None = os.environ.
        extra_flags: names of flags that are a script's own, returned in `rest`.
        complete: also check what holds between settings; scripts that need only a few settings pass False.
    Raises:
        SettingsError: everything that is wrong in any layer, one line each.
    """
    environ = os.environ if environ is None else environ
    flags = read_flags(argv, extra_flags)
    environment, warnings = read_environment(environ)
    layers = read_layers(flags, environ, environment)
    merged: dict[str, tuple[Any, str]] = {}
    for layer in layers:
        merged.update(layer.values)
    problems = [problem for layer in layers for problem in layer.problems]
    config, invalid = validate(merged)
    if config.micro_batch_size == 0:
        config = config.model_copy(update={"micro_batch_size": max(1, config.rows_per_step // config.world_size)})
    problems += invalid.values()
    if complete:
        if "world_size" not in invalid:
            problems += launch_problems(config, environ, flags.check)
        problems += [problem.message for problem in rules(config) if not set(problem.settings) & set(invalid)]
    if problems:
        raise SettingsError(*problems)
    return Loaded(config, {name: where for name, (_, where) in merged.items()}, [*notes(layers, merged, environ)], warnings,
                  flags.check, flags.rest, exported(layers))


def notes(layers: Sequence[Layer], merged: Mapping[str, tuple[Any, str]], environ: Mapping[str, str]) -> Iterator[str]:
    """What may surprise: what a preset changes of `.env`, what the environment decides, where names without a prefix may be
    meant for another program, and what is handed on."""
    beaten = [f"{name.upper()}={value}" for name, (value, where) in merged.items()
              if where.startswith(str(PRESETS_DIR)) and layers[0].values.get(name, (value,))[0] != value]
    if beaten:
        yield f"From the preset, which overrules .env: {', '.join(beaten)}"
    given = [f"{name.upper()}={shown(without_passwords(value))}" for name, (value, where) in merged.items()
             if where == "environment" and name not in (*SECRETS, "world_size")]  # torchrun sets the latter
    if given:
        yield f"From the environment: {', '.join(given)}"
    for where, same in ((".env", True), ("the environment, which overrules .env", False)):
        if names := [name for name, value in exported(layers).items() if (environ.get(name, value) == value) is same]:
            yield f"For the libraries, from {where}: {', '.join(names)}"


def launch_problems(config: Config, environ: Mapping[str, str], check: bool) -> Iterator[str]:
    """What is wrong between WORLD_SIZE and the launcher that started this process."""
    if "RANK" not in environ:
        if config.world_size > 1 and not check:
            yield (f"WORLD_SIZE={config.world_size}, but this process was not started by a launcher; start it with "
                   f"python scripts/launch.py --nproc-per-node {config.world_size} (or torchrun), or leave WORLD_SIZE out")
    elif not all(environ.get(name, "0").isdecimal() for name in ("RANK", "LOCAL_RANK")):
        yield "environment: RANK and LOCAL_RANK must be whole numbers; torchrun sets them"
    elif str(config.world_size) != (started := environ.get("WORLD_SIZE") or "1").strip():
        yield f"WORLD_SIZE={config.world_size}, but the launcher started {started} processes; leave the setting out"


def validate(merged: Mapping[str, tuple[Any, str]]) -> tuple[Config, dict[str, str]]:
    """The configuration, with defaults in place of values that are invalid, and one message for each of those."""
    nothing = ("", "none", "null")
    values = {name: None if name in OPTIONAL and isinstance(value, str) and value.strip().lower() in nothing else value
              for name, (value, _) in merged.items()}
    invalid = {name: "expected one value, not a list" for name, value in values.items() if isinstance(value, list)}
    # JSON's true is no number, although Python counts with it.
    invalid |= {name: "expected a number or text" for name, value in values.items()
                if isinstance(value, bool) and name not in SWITCHES}
    invalid |= {name: "holds a NUL or half a character; take it out" for name, value in values.items()
                if isinstance(value, str) and not is_sound(value)}
    try:
        Config(**values)
    except ValidationError as error:
        for detail in error.errors():
            invalid.setdefault(str(detail["loc"][0]), detail["msg"][0].lower() + detail["msg"][1:])
    messages = {name: f"{merged[name][1]}: {name.upper()}={'***' if name in SECRETS else shown(str(merged[name][0]))}: {message}"
                for name, message in invalid.items()}
    return Config(**{name: value for name, value in values.items() if name not in invalid}), messages


def is_sound(text: str) -> bool:
    """Whether a text could be a file's name: without a NUL, and nothing but characters and a system's undecodable bytes."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def help_text(usage: str) -> str:
    """What --help prints: every setting with its default and meaning."""
    lines = [usage, "",
             "Order: defaults < .env < preset < JSON < environment < flags; a preset that .env itself names lies below it.",
             "MAX_STEPS in .env is --max-steps as a flag.", "",
             f"  --preset NAME        one of {', '.join(sorted(file.stem for file in PRESETS_DIR.glob('*.env')))}",
             "  --config FILE.json   settings from a JSON file, flat or in sections",
             "  --env-file FILE      settings from this file instead of .env",
             "  --check              tell everything that can be known before the run, and end"]
    section = None
    for group, name, default, meaning, _ in describe_settings():
        if group != section:
            lines += ["", group]
            section = group
        flag = f"{name} in .env" if name.lower() in SECRETS else f"--{name.lower().replace('_', '-')}"
        lines.append(f"  {flag:<30} [{default or 'none'}] {meaning}")
    return "\n".join(lines)


def load_or_exit(argv: Sequence[str], usage: str) -> Loaded:
    """The configuration, with what `.env` has for the libraries exported; or the end of the process, after --help or with what
    is wrong."""
    if "--help" in argv or "-h" in argv:
        with first_here() as first, ending_with_reader():
            if first:
                show(*help_text(usage).split("\n"))
        raise SystemExit(0)
    try:
        loaded = load_config(argv)
    except SettingsError as error:
        exit_with(error)
    export(loaded)
    return loaded


def exit_with(error: SettingsError) -> NoReturn:
    """Print what is wrong, once on each machine, and exit with code 2."""
    lines = str(error).splitlines()
    with first_here() as first:
        if first:
            print_safely("\n  ".join([f"{len(lines)} thing{'s' if len(lines) > 1 else ''} to mend in the settings:", *lines]), sys.stderr)
    raise SystemExit(error.exit_code)


def export(loaded: Loaded) -> None:
    """Put secrets and libraries' keys that came from `.env` where the libraries look for them: before they are imported."""
    for name, value in loaded.exports.items():
        os.environ.setdefault(name, value)
    for name in SECRETS:
        secret = getattr(loaded.config, name)
        if secret is not None:
            os.environ[name.upper()] = secret.get_secret_value()
