"""Prepare chats for supervised fine-tuning: read and tokenize them, and write them as token shards.

The columns of a record determine its format: messages [{role, content}], conversations [{from, value}]
(ShareGPT), instruction, input and output (Alpaca), prompt and completion, or question and answer. A column
system holds the system message.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import common  # noqa: F401  # isort: skip (reports a package that is missing)
from scripts.prepare import run_preparation

if __name__ == "__main__":
    run_preparation("chats", __doc__, "⟦ and ⟧ enclose the target tokens. ")
