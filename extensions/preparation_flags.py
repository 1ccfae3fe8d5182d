"""The flags of the scripts that prepare data, and of ./paddock train for data that is not prepared yet."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from common.command_line import CommandParser, filled, number
from common.errors import PaddockError, SettingsError, local_path
from common.text import COMMANDS, PROGRAM
from config import KINDS, START_FROM, Config, PreparationConfig
from data_pipeline import mixture
from data_pipeline.examples import describe_lengths
from data_pipeline.prepare import describe_counts, name_set, read_prepared
from data_pipeline.source_files import source_of
from data_pipeline.sources import validation_split
from data_pipeline.workers import PreparationOptions
from data_preparation_utils import NAMES, prepare_mixture, prepare_set
from plan.command_line import export
from plan.layers import read_flags
from plan.make import make_plan
from plan.names import or_run
from tokenizer import load_tokenizer

OUTPUTS = {"documents": "data/pretrain", "chats": "data/sft", "pairs": "data/dpo", "prompts": "data/prompts"}
# Flags that describe a source, and the corresponding fields of `Source`.
SOURCE_FIELDS = {"config_name": "config", "split": "split", "revision": "revision", "files": "files",
                 "map": "map", "column": "column", "documents": "documents"}
count = number(int, "with at most 15 digits", lambda value: 0 <= value < 10**15)  # the type of a flag


class FlagParser(CommandParser):
    """A parser for a script's own flags; all other flags are settings. Errors are SettingsErrors."""

    def __init__(self, description: str, **options):
        super().__init__(description, **options, allow_abbrev=False)

    def error(self, message: str):
        raise SettingsError(f"command line: {message}; --help lists every flag")

    def split(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Split a command line into the script's flags and the rest. Underscores in flags become hyphens."""
        def normalized(argument: str) -> str:
            flag, equals, value = argument.partition("=")
            return flag.lower().replace("_", "-") + equals + value if flag.startswith("--") else argument

        return self.parse_known_args([*map(normalized, argv)])

    def refuse_unused(self, argv: Sequence[str], *used: str) -> None:
        """Raise SettingsError for flags of settings other than those `used` here."""
        layer = read_flags(self.split(argv)[1])
        unused = layer.values.keys() - {"preset", *used}
        if unused and not layer.problems:  # which `parse` raises
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(unused))
            raise SettingsError(f"command line: without effect here, remove {flags} (see --help)")

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
        """Return the script's flags, and the settings; keys for libraries in `.env` are exported."""
        flags, others = self.split(argv)
        loaded = make_plan(others, own_flags=tuple(vars(flags)), complete=False)
        export(loaded)
        return flags, loaded.config


def non_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("needs a value")
    return text


def used_settings(kind: str) -> list[str]:
    names = ["tokenizer_path", "tokenizer_backend", "output_dir", *PreparationConfig.model_fields]
    # Examples are encoded by the start's tokenizer if TOKENIZER_PATH is not set.
    return [*names, *START_FROM] if kind != "documents" else [n for n in names if n != "system_prompt"]


def flag_parser(kind: str, records: str) -> FlagParser:
    """Return the parser for the script that prepares this kind of data; `records` begins its --help."""
    is_text = kind == "documents"
    items = "documents" if is_text else "examples"
    listed = "\n".join(filled(" ".join([*used_settings(kind), "hf_token"]).upper(),
                              initial_indent="  ", subsequent_indent="  "))
    parser = FlagParser(
        records, prog=f"{PROGRAM} {COMMANDS[KINDS[kind][1]]}",
        usage="%(prog)s\n         [SOURCE | --mix FILE] [--any-setting VALUE]",
        epilog=f"""settings used here, from .env, the environment or as flags:
{listed}
An interrupted preparation continues where it stopped.""")

    def add(flag: str, metavar: str, meaning: str, **options) -> None:
        group.add_argument(flag, metavar=metavar, help=meaning, **{"type": non_empty, **options})

    group = parser.add_argument_group("source of the records")
    add("--source", "SOURCE", f"{', '.join(NAMES[kind])}, the name of a dataset on the hub, or a file, "
        f"folder or glob of .jsonl .json .csv .parquet .arrow{' .txt' if is_text else ''} (also compressed), "
        f"or a folder saved by `datasets`; local or on any fsspec URL{' [fineweb-edu]' if is_text else ''}")
    add("--mix", "FILE", 'several sources by weight, as JSON: {"sources": [{"path" or "name": ..., "weight": '
        f'0.7, and any of label config split revision files map{" column documents" if is_text else ""}}}, '
        '...]}; '
        'or with weights that change during the run: {"sources": [...], "phases": [{"until": 0.8, "weights": '
        '{LABEL: 0.9, ...}}, {"weights": ...}]}, where 0.8 is a share of MAX_STEPS and a label is by default '
        "the path or name. Weights are shares of the training's tokens. Each source is prepared as a "
        "separate set")
    add("--config-name", "NAME", "the config of the hub dataset or of a folder whose README.md lists some")
    add("--split", "NAME", "the split of the hub dataset, or of a folder with files such as train.jsonl and "
        "test.jsonl [train]")
    add("--revision", "REV", "the hub dataset's branch, tag or commit [newest]")
    add("--files", "PATTERN", "only these files of the dataset, such as en/c4-train.0000?-of-01024.json.gz")
    example = {"documents": "text=body", "chats": "prompt=problem,completion=solution",
               "pairs": "prompt=question,chosen=better,rejected=worse", "prompts": "prompt=problem"}[kind]
    add("--map", "NAME=COLUMN,...", f"new names of columns, such as {example}; others keep theirs")
    if is_text:
        add("--column", "NAME", "the column that holds the text [text]")
        add("--documents", "HOW", "how to split plain text into documents: whole (one per file), line, "
            "blank (separated by blank lines), wikitext (each starts at a line like ' = Title = '), or any "
            "other separator line, such as '<|endoftext|>' [whole]")

    group = parser.add_argument_group("preparation")
    add(f"--max-{items}", "N", f"only the first N {items} of a source; 0 = all [0]", type=count, default=0)
    add("--decontaminate", "FILE", f"drop {items} that share 13 words in a row, or a whole text of 8 to 12, "
        "with an evaluation item; FILE is HELLASWAG_PATH's, or .jsonl .json .csv .parquet .arrow of any "
        "columns; also a folder or glob")
    add("--on-bad-record", "HOW", "for an unusable record: fail, or skip and list it [fail]",
        choices=("fail", "skip"), default="fail")
    add("--output", "FOLDER", f"folder for prepared sets; each gets its own subfolder [{OUTPUTS[kind]}]",
        default=OUTPUTS[kind])
    return parser


def prepare_from_flags(kind: str, argv: Sequence[str], records: str = "", only_plan: bool = False,
                       holds_out: bool = True) -> Path:
    """Prepare the data that a command line and the settings describe, or `only_plan`; return its folder."""
    flags, config = flag_parser(kind, records).parse(argv)
    if config.tokenizer_path is None:
        raise SettingsError("TOKENIZER_PATH is not set; set it to a tokenizer.model or .json, or a hub name")
    if kind != "documents":  # a text may be for another model than `.env` names
        compare_with_start(config)
    given = {flag: value for flag, value in vars(flags).items() if value is not None}
    fields = {field: given[flag] for flag, field in SOURCE_FIELDS.items() if flag in given}
    options = PreparationOptions(
        config.tokenizer_path, config.tokenizer_backend, config.shard_tokens,
        config.validation_fraction if holds_out else 0.0,
        workers=config.preparation_workers, on_bad_record=flags.on_bad_record,
        max_documents=given.get("max_documents", given.get("max_examples")),
        system_prompt=config.system_prompt, decontaminate=flags.decontaminate or "",
        ahead=config.prepare_ahead, only_plan=only_plan)
    output = local_path(flags.output)
    if flags.mix:
        if fields or flags.source:
            raise SettingsError("--mix contains its sources; remove --source and the flags of a source")
        return name_set(prepare_mixture(kind, flags.mix, output, options), flags.mix)
    if not flags.source and kind != "documents":
        raise SettingsError("--source is not set; give a file, folder or glob, the name of a dataset on the "
                            f"hub, or one of {', '.join(NAMES[kind])}")
    source = flags.source or "fineweb-edu"
    described = source_of(source, NAMES[kind], **fields)
    if not holds_out:
        described = validation_split(described)
    folder = prepare_set(kind, described, output, options)
    return folder if only_plan else name_set(folder, source)


def compare_with_start(config: Config) -> None:
    """Raise SettingsError if the model that the settings name has other tokens than TOKENIZER_PATH."""
    named, own = config.named_checkpoint, None
    with suppress(PaddockError):  # the model may not be here yet, or have no tokenizer
        own = named and load_tokenizer(or_run(named, config.output_dir))
    used = load_tokenizer(config.tokenizer_path, config.tokenizer_backend)
    if own and (difference := own.differing_id(used)):
        number, there, here = difference
        raise SettingsError(f"TOKENIZER_PATH={config.tokenizer_path} is not the tokenizer of {named}: id "
                            f"{number} is {there!r} there and {here!r} here; remove it, or name its model")


def describe(folder: Path) -> list[str]:
    """Describe a prepared set for the user, or each set of a mixture and the mixture's table."""
    if mixture.is_mixture(folder):
        mixed, lines = mixture.read_mixture(folder), []
        for source in mixed.sources:
            lines += [f"{source.label}:", *(f"  {line}" for line in describe(Path(source.set)))]
        return [*lines, *mixture.describe_sources(mixed, mixture.source_table(mixed))]
    manifest = read_prepared(folder)
    lines = describe_counts(folder, manifest)
    if manifest.get("kind") in ("chats", "pairs"):
        lines.append(describe_lengths(folder, manifest))
    for index, example in enumerate(manifest["examples"], 1):
        # Further lines are indented to set them off.
        first, *further = (example if manifest.get("kind") else repr(example[:300])).split("\n")
        lines += [f"Example {index}: {first}", *(f"    {line}" for line in further)]
    return lines
