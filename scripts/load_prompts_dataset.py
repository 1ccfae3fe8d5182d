"""Prepare prompts for GRPO: read and tokenize them, and write them as token shards.

A record has a column prompt (text or messages), instruction, question, messages or conversations, which ends
in the user's message, and whatever the reward needs, such as a column answer: REWARD's functions get the
whole record. A column system holds the system message.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import common  # noqa: F401  # isort: skip (reports a package that is missing)
from scripts.prepare import run_preparation

if __name__ == "__main__":
    run_preparation("prompts", __doc__)
