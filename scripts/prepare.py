"""Prepare data for training: read and tokenize it, and write it as token shards.

    ./paddock prepare text corpus/
    ./paddock prepare chats 'chats/*.jsonl' --on-bad-record skip
    ./paddock prepare pairs pairs.parquet --map chosen=better,rejected=worse
    ./paddock prepare tokenizer corpus/ --vocab-size 32000 --output my.model

KIND is text (for pretraining), chats (SFT), pairs (DPO), prompts (GRPO), tokenizer (train a tokenizer on
your text), hellaswag (download HellaSwag's items) or sample (create the sample data). SOURCE is a file,
folder, glob or URL, or the name of a dataset on the hub. For a kind's flags, run for example `./paddock
prepare text --help`.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402

SCRIPTS = {"text": "load_pretrain_dataset.py", "chats": "load_instruct_dataset.py",
           "pairs": "load_dpo_dataset.py", "prompts": "load_prompts_dataset.py",
           "tokenizer": "train_tokenizer.py", "hellaswag": "load_hellaswag_dataset.py",
           "sample": "make_sample.py"}


def main() -> None:
    parser = CommandParser(__doc__, usage="%(prog)s KIND [SOURCE] [flags]")
    parser.add_argument("kind", choices=SCRIPTS)
    kind, flags = parser.parse_args(sys.argv[1:2] or ["--help"]).kind, sys.argv[2:]
    if flags and not flags[0].startswith("-") and kind != "tokenizer":  # which takes several sources
        if any(flag.split("=")[0] == "--source" for flag in flags):
            parser.error(f"the source is given twice, as {flags[0]} and by --source; remove one")
        flags.insert(0, "--source")
    os.environ["PADDOCK_COMMAND"] = f"./paddock prepare {kind}"
    script = str(Path(__file__).with_name(SCRIPTS[kind]))
    os.execv(sys.executable, [sys.executable, script, *flags])


if __name__ == "__main__":
    run_script(main)
