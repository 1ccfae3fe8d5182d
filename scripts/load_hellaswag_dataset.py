"""Get HellaSwag's items from the hub or a file, check every one, and write them where HELLASWAG_PATH can point."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tqdm import tqdm

from common.errors import DataError, local_path, run_script
from common.text import show
from data_pipeline.sources import Reading, read_records, source_of
from hellaswag_utils import parse_item
from settings.load import export, load_config

USAGE = """usage: python scripts/load_hellaswag_dataset.py [--source SOURCE] [--split NAME] [--revision REV] [--output FILE]

  --source SOURCE   a dataset on the hub, or a .jsonl or .parquet file, local or on any fsspec URL   [Rowan/hellaswag]
  --split NAME      the hub dataset's split                                                          [validation]
  --revision REV    the hub dataset's branch, tag or commit                                          [newest]
  --output FILE     the items as JSON lines                                                          [data/hellaswag/SPLIT.jsonl]

Of the settings only HF_TOKEN counts here."""


def main(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return
    loaded = load_config(argv, extra_flags=("source", "split", "revision", "output"), complete=False)
    export(loaded)
    flags = {"source": "Rowan/hellaswag", "split": "validation", "revision": "", **loaded.rest}
    source = source_of(flags["source"], split=flags["split"], revision=flags["revision"], column="")
    output = local_path(flags.get("output", f"data/hellaswag/{flags['split']}.jsonl"))
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    records = read_records(source, Reading(way_out="mend the line, or leave it out"))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            with tqdm(records, desc="Checking items", unit=" items") as bar:
                count = write_items(bar, unfinished)
            if not count:
                raise DataError(f"{flags['source']}: holds no items; give another --source")
            unfinished.replace(output)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{output}: cannot be written: {error.strerror}; choose another --output") from error
    show(f"{count:,} items, every one checked. The line for .env:", f"HELLASWAG_PATH={output}")


def write_items(records, path: Path) -> int:
    """Write records that are items of HellaSwag's schema, one a line; returns their number."""
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for where, record in records:
            line = json.dumps(record)
            parse_item(line.encode(), where)
            file.write(line + "\n")
            count += 1
    return count


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]), "Stopped. Nothing was written.")
