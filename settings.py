"""The layers that settings are read from: defaults < preset < `.env` / JSON file < environment < flags.

Everything that is wrong in any of them is told at once, with file and line. Nothing is read at import.
"""

import difflib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from dotenv.parser import parse_stream
from pydantic import ValidationError

from config import SECRETS, Config, describe_settings, rules
from errors import SettingsError

PRESETS_DIR = Path(__file__).parent / "presets"


class Layer(NamedTuple):
    """Settings from one place: name -> (value, where it stands)."""

    values: dict[str, tuple[Any, str]]
    problems: list[str]


# What other trainers call these settings.
FOREIGN_NAMES = {"max_lr": "learning_rate", "lr": "learning_rate", "min_lr": "min_learning_rate", "batch_size": "micro_batch_size",
                 "block_size": "max_seq_len", "max_batch_size": "micro_batch_size", "context_length": "max_seq_len",
                 "seq_len": "max_seq_len", "max_iters": "max_steps", "grad_clip": "max_grad_norm", "dtype": "precision",
                 "warmup_iters": "warmup_steps", "n_layer": "n_layers", "n_head": "n_heads", "n_embd": "dim",
                 "grad_accum_steps": "total_batch_size", "gradient_accumulation_steps": "total_batch_size"}


def nearest(name: str, known: Sequence[str] = (*Config.model_fields, "env-file", "config", "check")) -> Optional[str]:
    """The known name that a misspelt one most likely means, or None."""
    name = name.lower()
    if name in FOREIGN_NAMES:
        return FOREIGN_NAMES[name]
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown(where: str, shown: str, name: str, as_flag: bool = False) -> str:
    guess = nearest(name)
    if guess:
        guess = f"--{guess.replace('_', '-')}" if as_flag else guess.upper()
    return f"{where}: unknown setting {shown}" + (f"; did you mean {guess}?" if guess else "; --help lists every setting")


def read_env_file(path: Path) -> Layer:
    """The settings of a `.env` file, each with its line. Empty values count as not given."""
    values, problems = {}, []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        return Layer({}, [f"{path}: cannot be read: {error}"])
    for binding in parse_stream(io.StringIO(text)):
        # A binding's text may begin with blank and comment lines; its own line is the first with something in it.
        blank = len(binding.original.string) - len(binding.original.string.lstrip())
        where = f"{path}:{binding.original.line + binding.original.string[:blank].count(chr(10))}"
        if binding.error:
            problems.append(f"{where}: not of the form NAME=value: {binding.original.string.strip()[:60]!r}")
        elif binding.key is not None:
            name = binding.key.lower()
            if name not in Config.model_fields:
                problems.append(unknown(where, binding.key, name))
            elif name in values:
                problems.append(f"{where}: {binding.key} is set a second time (first at {values[name][1]}); keep one")
            elif binding.value is None:
                problems.append(f"{where}: {binding.key} has no '=' and no value")
            else:
                values[name] = (binding.value, where)
    return Layer({name: pair for name, pair in values.items() if pair[0] != ""}, problems)


def read_json_file(path: Path) -> Layer:
    """The settings of a JSON file, flat or grouped in sections of any name."""
    values, problems = {}, []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return Layer({}, [f"{path}: cannot be read: {error}"])
    except ValueError as error:
        return Layer({}, [f"{path}: not valid JSON: {error}"])
    if not isinstance(content, dict):
        return Layer({}, [f"{path}: expected an object of settings, got {type(content).__name__}"])

    def walk(group: Mapping[str, Any], prefix: str) -> None:
        for key, value in group.items():
            name, where = key.lower().replace("-", "_"), f"{path}: {prefix}{key}"
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            elif name not in Config.model_fields:
                problems.append(unknown(str(path), prefix + key, name))
            elif name in values:
                problems.append(f"{where} is set a second time (first at {values[name][1]}); keep one")
            else:
                values[name] = (",".join(map(str, value)) if isinstance(value, list) else value, where)

    walk(content, "")
    return Layer(values, problems)


def read_environment(environ: Mapping[str, str]) -> tuple[Layer, list[str]]:
    """The settings of the process environment, and warnings of keys that look like a misspelt setting."""
    values = {name: (environ[name.upper()], f"environment: {name.upper()}")
              for name in Config.model_fields if environ.get(name.upper(), "") != ""}
    warnings = []
    for key in environ:
        name = key.lower()
        if key != key.upper() or name in Config.model_fields or len(name) < 6:
            continue
        match = difflib.get_close_matches(name, Config.model_fields, n=1, cutoff=0.88)
        if match:
            warnings.append(f"environment: {key} is no setting; did you mean {match[0].upper()}?")
    return Layer(values, []), warnings


class Flags(NamedTuple):
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
        name = flag.removeprefix("--").lower().replace("-", "_")
        if not flag.startswith("--"):
            problems.append(f"command line: {argument!r} is no flag; write --name value")
            continue
        switch = name == "check" or (name in Config.model_fields and Config.model_fields[name].annotation is bool)
        if name not in Config.model_fields and name not in own and name not in ("env_file", "config", "check"):
            problems.append(unknown("command line", flag, name, as_flag=True))
            if not has_value and arguments and not arguments[0].startswith("--"):
                arguments.pop(0)
            continue
        if not has_value:
            follows = bool(arguments) and not arguments[0].startswith("--")
            if switch and not (follows and name != "check" and arguments[0].lower() in ("true", "false", "0", "1", "yes", "no")):
                value = "true"
            elif follows:
                value = arguments.pop(0)
            else:
                problems.append(f"command line: {flag} needs a value")
                continue
        if name in SECRETS:
            problems.append(f"command line: {flag} is a secret, which a flag would show to everyone; "
                            f"set {name.upper()} in .env or the environment")
        elif name == "check":
            check = True
        elif name == "env_file":
            env_file = value
        elif name == "config":
            config_files.append(value)
        elif name in own:
            rest[name] = value
        else:
            values[name] = (value, f"command line: --{name.replace('_', '-')}")
    return Flags(Layer(values, problems), env_file, config_files, check, rest)


def read_preset(names: str) -> Layer:
    """The settings of one preset, or of several with commas."""
    values, problems = {}, []
    for name in filter(None, (part.strip() for part in names.split(","))):
        path = PRESETS_DIR / f"{name}.env"
        if not path.is_file():
            known = sorted(file.stem for file in PRESETS_DIR.glob("*.env"))
            guess = nearest(name, known)
            problems.append(f"PRESET={name} is not known" + (f"; did you mean {guess}?" if guess else "") +
                            f" There are: {', '.join(known)}")
            continue
        layer = read_env_file(path)
        values.update(layer.values)
        problems += layer.problems
    return Layer(values, problems)


@dataclass(frozen=True)
class Loaded:
    """A valid configuration, where each setting that is not at its default was read, and what to warn of."""

    config: Config
    sources: dict[str, str]
    warnings: list[str]
    check: bool
    rest: dict[str, str]


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
    env_path = Path(flags.env_file or ".env")
    files = [read_env_file(env_path)] if flags.env_file or env_path.is_file() else []
    files += [read_json_file(Path(path)) for path in flags.config_files]
    above = [*files, environment, flags.layer]
    chosen = [layer.values["preset"] for layer in above if "preset" in layer.values]
    layers = [read_preset(chosen[-1][0] if chosen else ""), *above]

    merged: dict[str, tuple[Any, str]] = {}
    for layer in layers:
        merged.update(layer.values)
    problems = [problem for layer in layers for problem in layer.problems]
    config, invalid = validate(merged)
    problems += invalid.values()
    if complete:
        if config.world_size > 1 and "RANK" not in environ and not flags.check:
            problems.append(f"WORLD_SIZE={config.world_size}, but this process was not started by torchrun; "
                            f"use torchrun --standalone --nproc_per_node {config.world_size} train.py")
        problems += [problem.message for problem in rules(config) if not set(problem.settings) & set(invalid)]
    if problems:
        raise SettingsError("\n".join(problems))
    return Loaded(config, {name: where for name, (_, where) in merged.items()}, warnings, flags.check, flags.rest)


def validate(merged: Mapping[str, tuple[Any, str]]) -> tuple[Config, dict[str, str]]:
    """The configuration, with defaults in place of values that are invalid, and one message for each of those."""
    values = {name: None if isinstance(value, str) and value.strip().lower() in ("none", "null") else value
              for name, (value, _) in merged.items()}
    try:
        return Config(**values), {}
    except ValidationError as error:
        invalid = {}
        for detail in error.errors():
            name = str(detail["loc"][0])
            got = "***" if name in SECRETS else repr(merged[name][0])
            invalid.setdefault(name, f"{merged[name][1]}: {name.upper()}={got}: {detail['msg']}")
        return Config(**{name: value for name, value in values.items() if name not in invalid}), invalid


def help_text(usage: str) -> str:
    """What --help prints: every setting with its default and meaning."""
    lines = [usage, "", "Order: defaults < preset < .env / JSON < environment < flags. MAX_STEPS in .env is --max-steps as a flag.", "",
             "  --preset NAME        " + f"one of {', '.join(sorted(file.stem for file in PRESETS_DIR.glob('*.env')))}",
             "  --config FILE.json   settings from a JSON file, flat or in sections",
             "  --env-file FILE      settings from this file instead of .env",
             "  --check              tell everything that can be known before the run, and end"]
    section = None
    for group, name, default, meaning in describe_settings():
        if group != section:
            lines += ["", group]
            section = group
        lines.append(f"  --{name.lower().replace('_', '-'):<28} [{default or 'none'}] {meaning}")
    return "\n".join(lines)


def exit_with(error: SettingsError) -> None:
    """Print what is wrong, once among all ranks, and exit with code 2."""
    if os.environ.get("RANK", "0") == "0":
        lines = str(error).splitlines()
        print(f"{len(lines)} thing{'s' if len(lines) > 1 else ''} to mend in the settings:", file=sys.stderr)
        for line in lines:
            print(f"  {line}", file=sys.stderr)
    raise SystemExit(error.exit_code)


def export_secrets(config: Config) -> None:
    """Put secrets that came from `.env` where the libraries look for them."""
    for name in SECRETS:
        secret = getattr(config, name)
        if secret is not None:
            os.environ.setdefault(name.upper(), secret.get_secret_value())
