"""The command line of the scripts that prepare data: the same flags and last words for documents, chats and pairs."""

import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import SettingsError, local_path, run_script
from common.text import show
from data_pipeline.mixes import read_mix
from data_pipeline.prepare import describe_prepared, prepare_pretrain
from data_pipeline.shard_reader import KINDS
from data_pipeline.sources import SHORTCUTS, source_of
from data_pipeline.tokenize_chats import SHORTCUTS as EXAMPLE_SHORTCUTS
from data_pipeline.tokenize_chats import prepare_examples
from settings.load import export, load_config

NAMES = {"documents": SHORTCUTS, **EXAMPLE_SHORTCUTS}
OUTPUTS = {"documents": "data/pretrain", "chats": "data/sft", "pairs": "data/dpo"}
SOURCE_FLAGS = {"config-name": "config", "split": "split", "revision": "revision", "files": "files"}
TEXT_FLAGS = {"column": "column", "documents": "documents"}
TEXT_USAGE = """
  --column NAME           where the text stands                                                  [text]
  --documents HOW         how plain text becomes documents: whole (a file is one), line, blank (blank lines lie
                          between), wikitext (each begins at a line like ' = Title = '), or a line of your own
                          that lies between, such as '<|endoftext|>'                             [whole]"""


def usage(kind: str, records: str) -> str:
    """What --help prints of the script that prepares a kind of data; `records` says what it takes for one."""
    is_text = kind == "documents"
    things = "documents" if is_text else "examples"
    source = "[--source SOURCE | --mix FILE]" if is_text else "--source SOURCE | --mix FILE"
    readable = ".jsonl .parquet .txt" if is_text else ".jsonl .parquet"
    default = f"{'':<5}[fineweb-edu]" if is_text else ""
    system_prompt = "" if is_text else "SYSTEM_PROMPT "
    return f"""usage: python {KINDS[kind][1]} {source} [--any-setting VALUE]
{records}
  --source SOURCE         {', '.join(NAMES[kind])}, the name of a dataset on the hub, or a file, folder or glob of
                          {readable} (also compressed), local or on any fsspec URL{default}
  --mix FILE              several sources by weight, as JSON: {{"sources": [{{"path" or "name": ..., "weight": 0.7,
                          and any of config split revision files{" column documents" if is_text else ""}}}, ...], "seed": 0,
                          "stop": "first_exhausted" | "all_exhausted"}}; weights are shares of {things}
  --config-name NAME      the hub dataset's config
  --split NAME            the hub dataset's split                                                [train]
  --revision REV          the hub dataset's branch, tag or commit                                [newest]
  --files PATTERN         only these files of the hub dataset, such as 'en/c4-train.0000?-of-01024.json.gz'\
{TEXT_USAGE if is_text else ""}
  {f"--max-{things} N":<24}{f"only the first N {things}; 0 = all":<70} [0]
  --on-bad-record HOW     fail, or skip to count and list records that cannot be used            [fail]
  --output FOLDER         where prepared sets lie, each in a folder named by what it is made of  [{OUTPUTS[kind]}]

Settings that count here, from .env, the environment or as flags: TOKENIZER_PATH TOKENIZER_BACKEND SHARD_TOKENS
VALIDATION_FRACTION PREPARATION_WORKERS {system_prompt}HF_TOKEN. A preparation that was stopped goes on where it was."""


def prepare_by_flags(kind: str, argv: Sequence[str]) -> Path:
    """Prepare what the command line and the settings ask for; returns the folder.

    Args:
        kind: "documents", "chats" or "pairs".
    Raises:
        SettingsError: a flag or setting is unknown, missing or impossible.
        DataError: a source, record, tokenizer or chat template cannot be used, or the disk refuses.
    """
    is_text = kind == "documents"
    limit_flag = "max-documents" if is_text else "max-examples"
    source_flags = SOURCE_FLAGS | (TEXT_FLAGS if is_text else {})
    loaded = load_config(argv, extra_flags=("source", "mix", limit_flag, "on-bad-record", "output", *source_flags),
                         complete=False)
    config, flags = loaded.config, {name.replace("_", "-"): value for name, value in loaded.rest.items()}
    export(loaded)
    if config.tokenizer_path is None:
        raise SettingsError("TOKENIZER_PATH is not set; point it at Llama 3's tokenizer.model, a tokenizer.json or a hub name")
    fields = {field: flags[flag] for flag, field in source_flags.items() if flag in flags}
    if "mix" in flags and (fields or "source" in flags):
        raise SettingsError("--mix describes its sources itself; give no --source or flags of a source beside it")
    if is_text:
        flags.setdefault("source", "fineweb-edu")
    elif not {"mix", "source"} & set(flags):
        raise SettingsError(f"--source is not set; give a file, folder or glob, the name of a dataset on the hub, or one of "
                            f"{', '.join(NAMES[kind])}")
    limit = flags.get(limit_flag, "0")
    if not limit.isdecimal() or len(limit) > 15:
        raise SettingsError(f"--{limit_flag} {limit:.40}: must be a whole number, 0 or more, of 15 digits at most")
    source = read_mix(flags["mix"]) if "mix" in flags else source_of(flags["source"], NAMES[kind], **fields)
    where = config.tokenizer_path, config.tokenizer_backend, local_path(flags.get("output", OUTPUTS[kind]))
    options = dict(shard_tokens=config.shard_tokens, validation_fraction=config.validation_fraction,
                   workers=config.preparation_workers, max_documents=int(limit), on_bad_record=flags.get("on-bad-record", "fail"))
    if is_text:
        return prepare_pretrain(source, *where, **options)
    return prepare_examples(kind, source, *where, system_prompt=config.system_prompt, **options)


def run_preparation(kind: str, records: str = "", legend: str = "") -> None:
    """Be the script that prepares a kind of data: tell the flags, or prepare and give the line for .env.

    Args:
        records: what the script takes for a record, for --help.
        legend: how to read the examples that are shown.
    """
    argv = sys.argv[1:]

    def main() -> None:
        if {"-h", "--help"} & set(argv):
            show(*usage(kind, records).split("\n"))
            return
        folder = prepare_by_flags(kind, argv)
        show(*describe_prepared(folder).split("\n"), f"Ready. {legend}The line for .env:", f"{KINDS[kind][0]}={folder}")

    run_script(main, "Stopped. The same command goes on where it was.")
