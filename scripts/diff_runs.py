"""Compare two runs step by step: name the first step at which they part, and the tensor.

    ./paddock diff runs/first runs/second
    ./paddock diff runs/first runs/second --replay

With LEDGER_CHECKSUM in both runs, the weights are compared after each step. Without it, rows, losses and
gradient norms are. --replay repeats that step of both runs on this machine, row by row, and names the ranks
whose rows give other gradients. The runs are not changed. The exit code is 1 if the runs differ.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser
from common.errors import run_script
from plan.command_line import find_run


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("runs", nargs=2, metavar="RUN", help="two runs' folders or names")
    parser.add_argument("--replay", action="store_true", help="also replay the first step that differs")
    args = parser.parse_args()

    from extensions.debug.history import diff  # imports torch, which takes seconds

    sys.exit(int(diff(*map(find_run, args.runs), args.replay)))


if __name__ == "__main__":
    run_script(main)
