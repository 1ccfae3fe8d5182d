"""Create the sample data in data/sample: stories, items, questions, preferences, a tokenizer, and prepared
data for each stage.

This needs no network and takes a minute or two. If the sample exists, the command returns immediately. For
a smaller sample in another folder, use --stories and --folder.
"""

import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import DataError, run_script  # noqa: E402
from common.text import command, show  # noqa: E402

FOLDER = Path("data/sample")
STAMP = "made-from.json"
STORIES = 40_000
RANKS = 1024
VALIDATION_FRACTION = 0.005
EXAMPLES_HELD_OUT = 0.02  # of chats, pairs and prompts, which are fewer
# The files that determine the sample's bytes: when one of them changes, the sample is created again.
SOURCES = ("scripts/sample/stories.py", "scripts/sample/plots.json", "scripts/make_sample.py", "tokenizer.py",
           "data_preparation_utils.py", "data_pipeline/vocabulary.py", "data_pipeline/prepare.py",
           "data_pipeline/source_files.py", "data_pipeline/sources.py", "data_pipeline/shards.py",
           "data_pipeline/chats.py", "data_pipeline/examples.py", "data_pipeline/templates.py")


def made_from(stories: int) -> dict[str, str | int]:
    hashes = {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in SOURCES}
    return {"stories": stories, **hashes}


def is_up_to_date(folder: Path, stories: int) -> bool:
    stamp = folder / STAMP
    return stamp.is_file() and json.loads(stamp.read_text()) == made_from(stories)


def make(folder: Path, stories: int) -> None:
    from data_pipeline.vocabulary import train_bpe, write_tiktoken
    from data_preparation_utils import PreparationOptions, prepare_set
    from scripts.sample.stories import parts, texts, write_jsonl

    for name, records in parts(stories).items():
        show(f"  {name}: {write_jsonl(folder / name, records):,} records")
    tokenizer = folder / "tokenizer.model"
    write_tiktoken(train_bpe(islice(texts(), stories // 4), RANKS), tokenizer)
    options = PreparationOptions(str(tokenizer), "tiktoken", shard_tokens=100_000_000,
                                 validation_fraction=VALIDATION_FRACTION)
    prepare_set("documents", str(folder / "stories.jsonl"), folder / "pretrain", options)
    for kind, name, output, held_out in (("chats", "questions", "sft", EXAMPLES_HELD_OUT),
                                         ("pairs", "preferences", "dpo", EXAMPLES_HELD_OUT),
                                         ("prompts", "prompts", "prompts", EXAMPLES_HELD_OUT),
                                         ("pairs", "preferences-held-out", "dpo-held-out", 0.0)):
        prepare_set(kind, str(folder / f"{name}.jsonl"), folder / output,
                         replace(options, validation_fraction=held_out))
    (folder / STAMP).write_text(json.dumps(made_from(stories), indent=1))


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--stories", type=int, default=STORIES,
                        help="number of training texts; other counts scale with it (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="output folder (default: %(default)s)")
    arguments = parser.parse_args()
    folder, stories = arguments.folder.absolute(), arguments.stories
    if is_up_to_date(folder, stories):
        return
    from data_pipeline.prepare import wait_for_lock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        is_foreign = any(folder.iterdir()) if folder.exists() else False
    except OSError as error:
        raise DataError(f"{folder} cannot be created, because {error.filename} is not a folder that you may "
                        f"use ({error.strerror}); move that, or choose another --folder") from error
    if is_foreign and not (folder / STAMP).exists():
        raise DataError(f"{folder} has files that are not the sample's; move them, or set another --folder")
    with wait_for_lock(folder.with_name(f".{folder.name}.lock")):
        if is_up_to_date(folder, stories):
            return
        show(f"Creating the sample data in {folder} (only once; it takes a minute or two) ...")
        unfinished = folder.with_name(f".sample-{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        make(unfinished, stories)
        name = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        for manifest in unfinished.rglob("manifest.json"):  # these contain paths in the folder renamed below
            before, after = (json.dumps(str(path))[1:-1] for path in (unfinished, name))
            manifest.write_text(manifest.read_text().replace(before, after))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    if arguments.folder == FOLDER and os.environ.get("PADDOCK_COMMAND", "").endswith("sample"):  # not a start
        show(f"Train on it: {command('scripts/run.py', '--preset', 'sample')}")


if __name__ == "__main__":
    run_script(main)
