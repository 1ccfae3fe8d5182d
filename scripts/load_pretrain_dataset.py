"""Prepare text for pretraining: read and tokenize it, and write it as token shards.

A record is one document: the text of one row, or one plain text file.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import common  # noqa: F401  # isort: skip (reports a package that is missing)
from scripts.prepare import run_preparation

if __name__ == "__main__":
    run_preparation("documents", __doc__)
