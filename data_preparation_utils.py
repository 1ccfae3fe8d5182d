"""The file that --mix names: several sources, and their weights in a run.

From a command to a prepared set: documents, chats or preference pairs as token shards in a folder.

The scripts load_{pretrain,instruct,dpo}_dataset.py call `run_preparation`; a program calls `prepare_pretrain`
or `prepare_examples`. The set's folder is named by a hash of its sources, tokenizer and settings, so that a
second call finds what the first one prepared. The parts are in data_pipeline/: sources (records),
chat_records and chat_templates (chats), tokenize_chats (labels), prepare
(workers, journal, manifest), shard_writer (files).
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from glob import glob
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from common.command_line import CommandParser
from common.errors import SettingsError, local_path, run_script
from common.files import read_json
from common.text import is_url, show, without_passwords
from config import Config
from data_pipeline.chats import SHORTCUTS as EXAMPLE_SHORTCUTS
from data_pipeline.chats import kind_of_examples
from data_pipeline.mixture import (
    Mixture,
    describe_sources,
    is_mixture,
    read_mixture,
    source_facts,
    write_mixture,
)
from data_pipeline.prepare import DOCUMENTS, PreparationOptions, describe_prepared, disk_errors, prepare
from data_pipeline.shards import KINDS, MANIFEST, MIXTURE, first_fault
from data_pipeline.sources import SHORTCUTS, Source, kind_of, source_of
from settings.load import export, load_config
from tokenizer import load_tokenizer

EXAMPLE = '{"sources": [{"path" or "name": ..., "weight": 0.7}, ...]}'
OLD_FIELDS = ("seed", "stop")


class Mix(NamedTuple):
    """Several sources, and the phases of a run as mixture.json has them."""

    sources: list[Source]
    labels: list[str]
    phases: list[dict]


def read_mix(path: str | Path) -> Mix:
    """Read {"sources": [{"path" or "name": ..., "weight": ..., "label": ...}, ...], "phases": [...]} as JSON.

    With phases, such as {"until": 0.8, "weights": {label: 0.9, ...}}, the sources themselves have no weights.
    A source's label is by default its path or name.
    """
    try:
        content = read_json(Path(path))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    except ValueError as error:
        raise SettingsError(f"{path}: is not a JSON object: {error}; see the example in --help") from error
    entries = content.get("sources")
    if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
        raise SettingsError(f"{path}: expected {EXAMPLE}")
    if old := next((name for name in OLD_FIELDS if name in content), None):
        raise SettingsError(f"{path}: leave out {old!r}: a mixture is no longer drawn when it is prepared, "
                            "but in training, by SEED, and a source that is used up is read again")
    _refuse_unknown_fields(f"{path}", content, {"sources", "phases"})
    sources, labels, weights = zip(*(_source(f"{path}: source {number}", entry, "phases" in content)
                                     for number, entry in enumerate(entries, 1)))
    phases = content.get("phases", [{"weights": dict(zip(labels, weights))}])
    parts = [{"label": label, "set": ""} for label in labels]
    try:
        mixture = Mixture.model_validate({"sources": parts, "phases": phases})
    except ValidationError as error:
        raise SettingsError(f"{path}: {first_fault(error)}; see the example in --help") from error
    return Mix([*sources], [*labels], [phase.model_dump() for phase in mixture.phases])


def _source(where: str, entry: dict, has_phases: bool) -> tuple[Source, str, float]:
    """Return a source, its label and its weight."""
    strings = {field.name for field in fields(Source)} | {"label"}
    _refuse_unknown_fields(where, entry, strings | {"weight"})
    if ("path" in entry) == ("name" in entry):
        raise SettingsError(f"{where}: give either a path (files) or a name (a dataset on the hub)")
    if has_phases and "weight" in entry:
        raise SettingsError(f"{where}: leave out its weight, because the phases have weights")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= 1e9:
        raise SettingsError(f"{where}: weight={weight!r:.40} must be a number above 0, 1e9 at most")
    for name in strings:
        value = entry.get(name, "")
        if not isinstance(value, str) or (name in ("path", "name", "label") and name in entry and not value):
            raise SettingsError(f"{where}: {name}={value!r:.40} must be a string that is not empty")
    source = Source(**{name: value for name, value in entry.items() if name not in ("weight", "label")})
    place = without_passwords(source.path) or "/".join(filter(None, (source.name, source.config)))
    return source, entry.get("label", place), float(weight)


def _refuse_unknown_fields(where: str, given: Iterable[str], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise SettingsError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(known))}")


NAMES = {"documents": SHORTCUTS, **EXAMPLE_SHORTCUTS}
OUTPUTS = {"documents": "data/pretrain", "chats": "data/sft", "pairs": "data/dpo"}
# Flags that describe a source: their field of `Source`.
SOURCE_FIELDS = {"config_name": "config", "split": "split", "revision": "revision", "files": "files",
                 "map": "map", "column": "column", "documents": "documents"}


def prepare_pretrain(source: str | Source, output_dir: str | Path, options: PreparationOptions) -> Path:
    """Prepare documents for pretraining, or find that they were prepared before; return the set's folder.

    Args:
        source: a path, URL, glob, shortcut or hub name; or a Source.
        output_dir: the folder for prepared sets.
    """
    tokenizer = load_tokenizer(options.tokenizer_path, options.tokenizer_backend)
    return prepare(DOCUMENTS, source, tokenizer, output_dir, options)


def prepare_examples(kind: str, source: str | Source, output_dir: str | Path,
                     options: PreparationOptions) -> Path:
    """Prepare chats or preference pairs, or find that they were prepared before; return the set's folder.

    Args:
        kind: "chats" or "pairs".
        Others: as `prepare_pretrain`; `options.validation_fraction` is of the requests (`split_key`).
    """
    if isinstance(source, str):
        source = source_of(source, EXAMPLE_SHORTCUTS[kind])
    if (source.column, source.documents) != (Source.column, Source.documents):
        raise SettingsError(f"{source.path or source.name}: column and documents are for pretraining text; "
                            "leave them out")
    tokenizer = load_tokenizer(options.tokenizer_path, options.tokenizer_backend)
    examples = kind_of_examples(kind, tokenizer, options.system_prompt)
    return prepare(examples, source, tokenizer, output_dir, options)


def prepare_set(kind: str, source: str | Source, output_dir: Path, options: PreparationOptions) -> Path:
    """Prepare documents, chats or pairs. Raises DataError or SettingsError, as the two functions above."""
    if kind == "documents":
        return prepare_pretrain(source, output_dir, options)
    return prepare_examples(kind, source, output_dir, options)


def prepare_mixture(kind: str, mix: Mix, output_dir: Path, options: PreparationOptions) -> Path:
    """Prepare each source of a mix as a set of its own, or find it; return the folder of their mixture."""
    sets = []
    for number, (source, label) in enumerate(zip(mix.sources, mix.labels), 1):
        show(f"Source {number} of {len(mix.sources)}: {label}")
        sets.append(prepare_set(kind, source, output_dir, options))
    with disk_errors(output_dir):
        return write_mixture(output_dir, mix.labels, sets, mix.phases)


def describe(folder: Path) -> list[str]:
    """Return a description of a prepared set for the user; of a mixture, of each set and the table."""
    if not is_mixture(folder):
        return describe_prepared(folder).split("\n")
    mixture = read_mixture(folder)
    lines = []
    for source in mixture.sources:
        of_set = describe_prepared(folder / source.set).split("\n")
        lines += [f"{source.label}:", *(f"  {line}" for line in of_set)]
    return [*lines, *describe_sources(mixture, source_facts(folder, mixture))]


class FlagParser(CommandParser):
    """A parser of a script's own flags, whose errors are SettingsErrors; the other flags are settings."""

    def __init__(self, description: str, **options):
        super().__init__(description, **options, allow_abbrev=False, add_help=False)
        self.add_argument("--help", action="help", help="show this help")

    def error(self, message: str):
        """Raise SettingsError."""
        raise SettingsError(f"command line: {message}; --help lists every flag")

    def split(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the script's own flags, and the others. An underscore in a flag counts as a hyphen."""
        def normalized(argument: str) -> str:
            flag, equals, value = argument.partition("=")
            return flag.lower().replace("_", "-") + equals + value if flag.startswith("--") else argument

        # Not argparse's -h, which would take secrets such as -hf-token for a group of short flags.
        return self.parse_known_args(["--help" if argument == "-h" else normalized(argument)
                                      for argument in argv])

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
        """Return the script's own flags, and the settings: from the other flags, the environment and `.env`.

        The keys of libraries in `.env` are exported.
        """
        own, others = self.split(argv)
        loaded = load_config(others, extra_flags=tuple(vars(own)), complete=False)
        export(loaded)
        return own, loaded.config


def some_text(text: str) -> str:
    """Return a flag's value, which must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("needs a value")
    return text


def count(text: str) -> int:
    """Return a flag's value as a number of items."""
    if not text.isdecimal() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text:.40} must be a whole number, 0 or more, 15 digits at most")
    return int(text)


def flag_parser(kind: str, records: str) -> FlagParser:
    """Return the parser of the script that prepares this kind of data; `records` is for its --help."""
    is_text = kind == "documents"
    items = "documents" if is_text else "examples"
    parser = FlagParser(
        records, prog=f"python {KINDS[kind][1]}",
        usage="%(prog)s\n         [--source SOURCE | --mix FILE] [--any-setting VALUE]",
        epilog=f"""settings that count here, from .env, the environment or as flags:
  TOKENIZER_PATH TOKENIZER_BACKEND SHARD_TOKENS VALIDATION_FRACTION
  PREPARATION_WORKERS {'' if is_text else 'SYSTEM_PROMPT '}HF_TOKEN
A preparation that was stopped continues where it was.""")

    def add(flag: str, metavar: str, meaning: str, **options) -> None:
        group.add_argument(flag, metavar=metavar, help=meaning, **{"type": some_text, **options})

    group = parser.add_argument_group("where the records are")
    add("--source", "SOURCE", f"{', '.join(NAMES[kind])}, the name of a dataset on the hub, or a file, "
        f"folder or glob of .jsonl .json .parquet .arrow{' .txt' if is_text else ''} (also compressed), a "
        f"folder that `datasets` saved; local or on any fsspec URL{' [fineweb-edu]' if is_text else ''}")
    add("--mix", "FILE", 'several sources by weight, as JSON: {"sources": [{"path" or "name": ..., "weight": '
        f'0.7, and any of label config split revision files map{" column documents" if is_text else ""}}}, '
        '...]}; '
        'or with weights that change during the run: {"sources": [...], "phases": [{"until": 0.8, "weights": '
        '{LABEL: 0.9, ...}}, {"weights": ...}]}, where 0.8 is a share of MAX_STEPS and a label is by default '
        "the path or name. Weights are shares of the training's tokens; each source is prepared as a set of "
        "its own")
    add("--config-name", "NAME", "the hub dataset's config")
    add("--split", "NAME", "the split of the hub dataset or of a folder that `datasets` saved [train]")
    add("--revision", "REV", "the hub dataset's branch, tag or commit [newest]")
    add("--files", "PATTERN", "only these files of the dataset, such as en/c4-train.0000?-of-01024.json.gz")
    example = {"documents": "text=body", "chats": "prompt=problem,completion=solution",
               "pairs": "prompt=question,chosen=better,rejected=worse"}[kind]
    add("--map", "NAME=COLUMN,...", f"other names of the columns, such as {example}; no others are read then")
    if is_text:
        add("--column", "NAME", "the column that holds the text [text]")
        add("--documents", "HOW", "how plain text is split into documents: whole (a file is one), line, "
            "blank (separated by blank lines), wikitext (each begins at a line like ' = Title = '), or a "
            "separator line of your own, such as '<|endoftext|>' [whole]")

    group = parser.add_argument_group("what is done with them")
    add(f"--max-{items}", "N", f"only the first N {items} of a source; 0 = all [0]", type=count, default=0)
    add("--near-duplicates", "SIMILARITY", f"leave out {items} at least this similar to an earlier one, from "
        "0.5 to 1, such as 0.8: the share of their runs of 5 words that both have (Jaccard, by MinHash)",
        type=float, default=0.0)
    add("--decontaminate", "FILE", f"leave out {items} with 13 words in a row of an evaluation item; FILE is "
        "HELLASWAG_PATH's, or .jsonl .json .parquet .arrow of any columns; also a folder or glob")
    add("--on-bad-record", "HOW", "fail, or skip to count and list records that cannot be used [fail]",
        default="fail")
    add("--output", "FOLDER", f"the folder for prepared sets, which have a folder each [{OUTPUTS[kind]}]",
        default=OUTPUTS[kind])
    return parser


def prepare_from_flags(kind: str, argv: Sequence[str], records: str = "") -> Path:
    """Prepare what a command line and the settings ask for; return the set's folder.

    Args:
        kind: "documents", "chats" or "pairs".
    """
    flags, config = flag_parser(kind, records).parse(argv)
    if config.tokenizer_path is None:
        raise SettingsError("TOKENIZER_PATH is not set; set it to Llama 3's tokenizer.model, a "
                            "tokenizer.json or a hub name")
    given = {flag: value for flag, value in vars(flags).items() if value is not None}
    fields = {field: given[flag] for flag, field in SOURCE_FIELDS.items() if flag in given}
    if flags.mix:
        if fields or flags.source:
            raise SettingsError("--mix describes its sources itself; give no --source or flags of a source")
    elif flags.source or kind == "documents":
        source = source_of(flags.source or "fineweb-edu", NAMES[kind], **fields)
    else:
        raise SettingsError("--source is not set; give a file, folder or glob, the name of a dataset on the "
                            f"hub, or one of {', '.join(NAMES[kind])}")
    # How it is prepared.
    options = PreparationOptions(
        config.tokenizer_path, config.tokenizer_backend, config.shard_tokens, config.validation_fraction,
        workers=config.preparation_workers, on_bad_record=flags.on_bad_record,
        max_documents=given.get("max_documents", given.get("max_examples")),
        system_prompt=config.system_prompt, near_duplicates=flags.near_duplicates,
        decontaminate=flags.decontaminate or "")
    output = local_path(flags.output)
    if flags.mix:
        return prepare_mixture(kind, read_mix(flags.mix), output, options)
    return prepare_set(kind, source, output, options)


def is_source(kind: str, path: str) -> bool:
    """Whether a data setting names something to prepare, and no prepared set, token files or missing path."""
    if os.path.isdir(path):
        inside = [name for depth in ("*", "*/*") for name in glob(os.path.join(path, depth))]
        if any(name.endswith((MANIFEST, MIXTURE, ".bin", ".npy")) for name in inside):
            return False
        found = [name for _, _, files in os.walk(path) for name in files if not name.startswith((".", "_"))]
    else:
        found = [path] if os.path.exists(path) else glob(path, recursive=True)
    if not found and source_of(path, NAMES[kind]).name:  # or a missing path
        owner, _, name = path.partition("/")
        return path in NAMES[kind] or bool(name) and not os.path.exists(owner)
    return is_url(path) or any(kind_of(name)[0] for name in found)


def run_preparation(kind: str, records: str = "", legend: str = "") -> None:
    """Run the script that prepares a kind of data; print the set's counts, examples, and the line for `.env`.

    Args:
        records: which records the script takes, for --help.
        legend: how to read the examples.
    """
    def main() -> None:
        folder = prepare_from_flags(kind, sys.argv[1:], records)
        show(*describe(folder), f"Ready. {legend}The line for .env:",
             f"{KINDS[kind][0]}={folder}")

    run_script(main, "Stopped. Run the same command again to continue.")
