"""Describe prepared data: its sources, lengths and duplicates, and a batch as the model sees it.

    ./paddock inspect data/sample/pretrain
    ./paddock inspect data/sft/0123456789abcdef --batch 8
    ./paddock inspect --list

FOLDER is a prepared set or mixture, a folder that contains one, or a file or folder of tokens from another
trainer. The command uses the settings MAX_SEQ_LEN, TOKENIZER_PATH, DOCUMENT_MASK and SEED, from .env, the
environment or flags.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.errors import DataError, SettingsError, local_path, run_script  # noqa: E402
from common.text import aligned, command, percent, print_safely, show
from data_pipeline.mixture import read_mixture, source_table
from data_pipeline.prepare import names_of_sources, read_prepared
from data_pipeline.shards import MANIFEST, MIXTURE
from extensions.preparation_flags import FlagParser, count

MIN_SOURCE_COLUMNS = 20


def find_sets(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a summary of each prepared set and mixture below a folder."""
    files = sorted(path for name in (MANIFEST, MIXTURE) for path in folder.rglob(name)
                   if not path.parent.name.startswith(("tmp-", ".")))
    if not files:
        raise DataError(f"{folder}: contains no prepared data; prepare some with "
                        f"{command('scripts/load_pretrain_dataset.py')}, or pass the folder of its --output")
    for path in files:
        try:
            yield summarize(path)
        except DataError as error:
            print_safely(f"warning: {error}", sys.stderr)


def summarize(path: Path) -> dict[str, Any]:
    """Summarize the manifest of a set, or a mixture: its training splits, each counted once."""
    folder = path.parent
    if path.name == MIXTURE:
        kind, tokenizer, splits = "mixture", None, source_table(read_mixture(folder))
        sources = [f"{percent(split['share'], 0)} {split['source']}" for split in splits]
    else:
        manifest = read_prepared(folder)
        kind, tokenizer = manifest.get("kind", "documents"), manifest.get("tokenizer")
        sources, splits = names_of_sources(manifest), manifest["splits"].values()
    return {"folder": str(folder), "kind": kind, "documents": sum(split["documents"] for split in splits),
            "tokens": sum(split["tokens"] for split in splits), "tokenizer": tokenizer, "sources": sources}


def list_table(sets: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table of sets; the last column is cut to the terminal's width."""
    def named(folder: Path) -> str:
        links = filter(Path.is_symlink, folder.parent.iterdir())
        same = (link for link in links if link.exists() and link.samefile(folder))
        return str(min(same, default=folder))

    lines = aligned([("folder", "kind", "documents", "tokens"),
                     *((named(Path(each["folder"])), each["kind"], f"{each['documents']:,}",
                        f"{each['tokens']:,}") for each in sets)])
    sources = ["source"]
    for each in sets:
        tokenizer = f", {os.path.basename(each['tokenizer'])}" if each["tokenizer"] else ""
        sources.append(f"{', '.join(each['sources'])}{tokenizer}")
    room = max(MIN_SOURCE_COLUMNS, shutil.get_terminal_size().columns - len(lines[0]) - 2)
    return [f"{line}  {text if len(text) <= room else '...' + text[3 - room:]}"
            for line, text in zip(lines, sources)]


def split_folder(argv: list[str]) -> tuple[str | None, list[str]]:
    for number, argument in enumerate(argv):
        before = argv[number - 1] if number else ""
        has_value = before.startswith("--") and "=" not in before and before != "--json"
        if not argument.startswith("-") and not has_value:
            return argument, argv[:number] + argv[number + 1:]
    return None, argv


def main() -> None:
    parser = FlagParser(__doc__, usage="%(prog)s FOLDER [--batch N] [--json]\n"
                              "       %(prog)s FOLDER --find PATTERN [--exclude FILE]\n"
                              "       %(prog)s --list [FOLDER] [--json]")
    parser.add_argument("--list", nargs="?", const="data", metavar="FOLDER",
                        help="list all prepared sets and mixtures in a folder [data]")
    parser.add_argument("--batch", type=count, default=1, metavar="N",
                        help="show the first N rows that a run would read [1]")
    parser.add_argument("--find", metavar="PATTERN", help="show examples whose text has this regular "
                        "expression, and write a file for EXCLUDE_DATA")
    parser.add_argument("--exclude", type=local_path, default="excluded.txt", metavar="FILE",
                        help="new file for --find [excluded.txt]")
    parser.add_argument("--json", action="store_true", help="print the statistics as JSON, without rows")
    folder, rest = split_folder(sys.argv[1:])
    flags, config = parser.parse(rest)
    if (folder is None) == (flags.list is None):
        raise SettingsError("command line: pass either a FOLDER or --list; see --help")
    if flags.list is not None:
        sets = list(find_sets(Path(flags.list)))
        show(*([json.dumps(sets)] if flags.json else list_table(sets)))
        return

    from extensions.debug.inspect import open_data  # imports torch, which takes seconds

    data = open_data(Path(folder), config)
    if flags.find:
        return show(*data.find(flags.find, flags.exclude))
    facts = data.facts()
    show(*([json.dumps(facts)] if flags.json else data.describe(facts)))
    if flags.batch and not flags.json:
        show(*data.describe_rows(flags.batch))


if __name__ == "__main__":
    run_script(main)
