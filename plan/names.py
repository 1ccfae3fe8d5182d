"""Check names and values of settings, and suggest what an unknown name means."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Optional, get_args

from pydantic import ValidationError

from common.text import printable, setting_text, suggestion
from config import EXTENSION_SECTIONS, SECRETS, Config

SWITCHES = {name for name, field in Config.model_fields.items() if isinstance(field.default, bool)}
SETTING_OF = {"HIDDEN_DIM": "FFN_DIM"}  # the setting that restores a derived value
OPTIONAL = {name for name, field in Config.model_fields.items() if field.default is None}
# Three registries, which extensions/other_trainers.py fills: other trainers' names for our settings; their
# names for what is set differently here, with a sentence about it; and their spellings of values.
ALIASES: dict[str, str] = {}
OTHER_WAYS: dict[str, str] = {}
VALUE_ALIASES: dict[str, str] = {}
NAMES_OF_OTHERS = ("model_path", "model_name", "model_id", "wandb_name")  # in other programs' environments
# Sections that can be left out of a name: --training.steps is --steps, unlike --validation.steps.
SECTIONS_OF_OTHERS = ("train", "training", "trainer", "optimizer", "lr_scheduler", "model", "job", "metrics",
                      "profiling", "parallelism", "data", "distributed", "logging", "fsdp_config",
                      "model_config")

# Messages for pydantic's types of errors.
EXPECTATIONS = {
    "int_parsing": "expected a whole number", "int_from_float": "expected a whole number",
    "float_parsing": "expected a number", "bool_parsing": "expected true or false",
    "literal_error": "expected {expected}", "greater_than": "must be greater than {gt:,.16g}",
    "greater_than_equal": "must be at least {ge:,.16g}", "less_than": "must be less than {lt:,.16g}",
    "less_than_equal": "must be at most {le:,.16g}", "string_too_short": "must not be empty"}


def forms(name: str) -> list[str]:
    """Return the forms of a name, perhaps in sections as torchtitan's --training.steps, to look up."""
    *sections, last = name.lower().replace("-", "_").split(".")
    section = next((each for each in reversed(sections) if each != "init_args"), "")  # of litgpt's classes
    alone = [last, re.sub("^(use|enable)_|_enabled$", "", last)] * (section in ("", *SECTIONS_OF_OTHERS))
    return [f"{section}_{last}".lstrip("_"), *alone]


def known_form(name: str) -> Optional[str]:
    return next((form for form in forms(name) if form in {*Config.model_fields, *ALIASES, *OTHER_WAYS}), None)


def standard(name: str, value: Any) -> Any:
    """Return our value of a setting for one of another trainer, such as bf16 for bfloat16."""
    text = str(value).strip().lower()
    ours = VALUE_ALIASES.get(text, text)
    return ours if ours in get_args(Config.model_fields[name].annotation) else value


def advice(name: str, known: Iterable[str] = Config.model_fields,
           shown: Callable[[str], str] = str.upper) -> str:
    """Return advice on an unknown name: the setting that it may mean, or how to do the same here."""
    names = (*known, *ALIASES, *OTHER_WAYS)
    way = next((form for form in forms(name) if form in names), None) or suggestion(
        name.rpartition(".")[2], (each for each in names if each in known or "_" in each))  # not short words
    if way in OTHER_WAYS and way not in known:
        return OTHER_WAYS[way]
    guess = ALIASES.get(way, way)
    no_setting = "there is no such setting (see --help; docs/coming-from.md has the names of other trainers)"
    return f"did you mean {shown(guess)}?" if guess in known else no_setting


def unknown(where: str, name: str, what: str = "setting", sentence: str = "") -> str:
    """Return the message for an unknown name; "" if it may belong to extensions/, which is missing."""
    sentence = sentence or advice(name)
    if not EXTENSION_SECTIONS and not sentence.startswith("did you mean"):
        return ""
    return f"{where}: unknown {what} {shortened(name)}; {sentence}"


def in_env(name: str, value: Any) -> str:
    """Return NAME=value as it would be written in `.env`."""
    return f"{SETTING_OF.get(name.upper(), name.upper())}={'none' if value is None else setting_text(value)}"


def assignments(values: Mapping[str, Any], separator: str = " ") -> str:
    return separator.join(in_env(name, value) for name, value in values.items())


def shortened(text: str) -> str:
    text = printable(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


@cache
def misspelled(key: str) -> Optional[str]:
    """Return the setting that an environment variable probably misspells, or None.

    Stricter than `advice`, because the environment contains other programs' variables, such as COMPILER,
    DEVICES and LOCAL_WORLD_SIZE.
    """
    name = key.lower()
    if key != key.upper():
        return name if name in Config.model_fields and "_" in name else None
    if name in Config.model_fields or key in SECRETS or len(name) < 6:
        return None
    if name in ALIASES and "_" in name and name not in NAMES_OF_OTHERS:
        return ALIASES[name]
    match = suggestion(name, (*Config.model_fields, *map(str.lower, SECRETS)))
    return None if match is None or ("_" not in match and name.startswith(match)) else match


def unknown_flag(flag: str, known: Sequence[str]) -> str:
    """Return the message for an unknown flag, or "" as in `unknown`."""
    name = flag.lstrip("-").lower().replace("-", "_")
    if " " in flag:
        what_to_do = "the shell passed these words as one; in zsh, first type setopt sh_word_split"
    elif name.removeprefix("no_") in SWITCHES:
        what_to_do = f"did you mean --{name.removeprefix('no_').replace('_', '-')} false?"
    else:
        what_to_do = advice(name, known, lambda guess: f"--{guess.replace('_', '-')}")
    return unknown("command line", flag, "flag", what_to_do)


def validate(merged: Mapping[str, tuple[Any, str]]) -> tuple[Config, dict[str, str]]:
    """Return the configuration, with defaults instead of invalid values, and an error for each of them."""
    nothing = ("", "none", "null")
    values = {name: None if name in OPTIONAL and isinstance(value, str) and value.strip().lower() in nothing
              else value for name, (value, _) in merged.items()}
    invalid = {}
    for name, value in values.items():
        if isinstance(value, list):
            invalid[name] = "expected one value, not a list"
        elif isinstance(value, bool) and name not in SWITCHES:  # JSON's true, which equals 1 in Python
            invalid[name] = "expected a number or text"
        elif isinstance(value, str) and re.search(r"[\0\ud800-\udc7f\udd00-\udfff]", value):
            # os.fsencode fails: it accepts only surrogates that stand for undecodable bytes.
            invalid[name] = "contains a NUL or an invalid character; remove it"

    while True:
        try:
            config = Config(**{name: value for name, value in values.items() if name not in invalid})
            break
        except ValidationError as error:
            for detail in error.errors():
                message = EXPECTATIONS.get(detail["type"], detail["msg"][0].lower() + detail["msg"][1:])
                name, facts = str(detail["loc"][0]), detail.get("ctx", {})
                choices = re.findall("'(.+?)'", facts.get("expected", ""))
                guess = suggestion(str(values[name]), choices, VALUE_ALIASES)
                invalid[name] = message.format(**facts) + f"; did you mean {guess}?" * bool(guess)
    messages = {}
    for name, message in invalid.items():
        value, where = merged[name]
        messages[name] = f"{where}: {name.upper()}={shortened(str(value))}: {message}"
    if path := config.tokenizer_path:
        config = config.model_copy(update={"tokenizer_path": or_run(path, config.output_dir)})
    return config, messages


def or_run(path: str, output_dir: str) -> str:
    """Return a path, or the folder of the run in OUTPUT_DIR that has this name."""
    run = os.path.join(output_dir, path)
    return run if os.path.isdir(run) and not os.path.lexists(os.path.expanduser(path)) else path
