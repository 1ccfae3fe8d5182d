"""Get HellaSwag's items from the hub or a file, check each of them, and write the file for HELLASWAG_PATH."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

from tqdm import tqdm

from common.errors import DataError, local_path, run_script
from common.files import atomic_write, disk_errors
from common.text import command, show
from data_pipeline.choices import parse_item
from data_pipeline.source_files import source_of
from data_pipeline.sources import Reading, read_records
from extensions.preparation_flags import FlagParser, non_empty


def main(argv: list[str]) -> None:
    parser = FlagParser(__doc__, epilog="The only setting used here is HF_TOKEN.")
    for flag, metavar, meaning, default in (
            ("--source", "SOURCE", "a dataset on the hub, or a .jsonl, .csv or .parquet file, local or on "
             "any fsspec URL [Rowan/hellaswag]", "Rowan/hellaswag"),
            ("--split", "NAME", "the split of the hub dataset or folder [validation]", None),
            ("--revision", "REV", "the hub dataset's branch, tag or commit [newest]", None),
            ("--output", "FILE", "the items as JSON lines [data/hellaswag/SPLIT.jsonl]", None)):
        parser.add_argument(flag, metavar=metavar, help=meaning, default=default, type=non_empty)
    parser.refuse_unused(argv)
    flags, config = parser.parse(argv)
    split = flags.split or "validation"
    source = source_of(flags.source, split=flags.split, revision=flags.revision or "", column="")
    if source.name or os.path.isdir(source.path):
        source = replace(source, split=split)
    output = local_path(flags.output or f"data/hellaswag/{split}.jsonl")
    records, count = read_records(source, Reading(advice="correct or remove the line")), 0
    with disk_errors(output, DataError, "choose another --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with (atomic_write(output) as unfinished, open(unfinished, "w", encoding="utf-8") as file,
              tqdm(records, desc="Checking items", unit=" items") as bar):
            for where, record in bar:
                parse_item(record, where)
                # Values that JSON lacks are in other columns.
                file.write(json.dumps(record, default=lambda value: None) + "\n")
                count += 1
            if not count:
                raise DataError(f"{flags.source}: contains no items; choose another --source")
    runs = sorted(Path(config.output_dir).glob("*/checkpoints"), key=os.path.getmtime)
    lines = [command("scripts/evaluate.py", run.parent, "--hellaswag", output) for run in runs[-1:]]
    show(f"Wrote {count:,} valid items. Add to .env:", f"HELLASWAG_PATH={output}",
         *(f"Evaluate the newest run: {line}" for line in lines))


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]), "Stopped. Nothing was written.")
