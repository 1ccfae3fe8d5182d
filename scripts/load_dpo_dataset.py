"""Prepare preference pairs: read and tokenize them, and write them as token shards.

A record has the columns chosen and rejected, each a text, a message or a list of messages. The prompt is the
column prompt (text or messages), instruction, question, messages or conversations or, without them, the
common beginning of chosen and rejected. Or it has the columns of a chat and a label, true or false. A column
system holds the system message.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import common  # noqa: F401  # isort: skip (reports a package that is missing)
from scripts.prepare import run_preparation

if __name__ == "__main__":
    run_preparation("pairs", __doc__, "⟦ and ⟧ enclose the chosen and the rejected answer. ")
