"""Prepare preference pairs: read, tokenize, and write them as token shards.

A record has the columns chosen and rejected, which are texts or lists of messages. The prompt is in the
column prompt (text or messages), or else it is the common beginning of both answers. A column system comes
first.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import common  # noqa: F401  # isort: skip (reports a package that is missing)
from data_preparation_utils import run_preparation

if __name__ == "__main__":
    run_preparation("pairs", __doc__, "The prompt, then between ⟦ and ⟧ the chosen and the rejected answer. ")
