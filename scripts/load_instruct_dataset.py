"""Prepare chats for supervised fine-tuning: read them from files or the hub, tokenise them, and write token shards."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chats import CHAT_SHORTCUTS
from data_preparation_utils import describe_prepared
from errors import run_script
from example_preparation import FLAGS_USAGE, prepare_by_flags

USAGE = f"""usage: python scripts/load_instruct_dataset.py --source SOURCE | --mix FILE [--any-setting VALUE]

A record is a chat by its columns: messages [{{role, content}}], conversations [{{from, value}}] (ShareGPT), instruction,
input and output (Alpaca), or prompt and completion; a column system is put in front.

  --source SOURCE         {', '.join(CHAT_SHORTCUTS)}, the name of a dataset on the hub, or a file, folder or
                          glob of .jsonl .parquet (also compressed), local or on any fsspec URL
  --output FOLDER         where prepared sets lie, each in a folder named by what it is made of  [data/sft]
{FLAGS_USAGE}"""


def main(argv: list[str]) -> None:
    folder = prepare_by_flags("chats", argv, "data/sft")
    print(describe_prepared(folder))
    print("Ready. What stands between ⟦ and ⟧ is learned from. The line for .env:")
    print(f"SFT_DATA_PATH={folder}")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE)
    else:
        run_script(lambda: main(sys.argv[1:]), "Stopped. The same command goes on where it was.")
