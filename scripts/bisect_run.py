"""Find a step of a run at which an answer changed, and print the rows of that step.

    ./paddock bisect runs/first --item 17
    ./paddock bisect runs/first --prompt "Once upon a" --expect time
    ./paddock bisect runs/first --metric "val_loss > 2"

All kept checkpoints (KEEP_EVERY) are asked. Between the last two whose answers differ, steps are re-created
as by at-step, each time in the middle. An answer may change several times; this finds one change. The run's
folder is not changed. Prompts are continued, or answered in a chat, greedily.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser
from common.errors import run_script
from settings.load import find_run


def main() -> None:
    parser = CommandParser(__doc__, usage="%(prog)s RUN --item N [flags below]")
    parser.add_argument("run", help="a run's folder or name")
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--item", type=int, metavar="N", help="item of a multiple-choice set, from 1")
    kinds.add_argument("--prompt", metavar="TEXT", help="text to continue or answer; needs --expect")
    kinds.add_argument("--metric", metavar="IF", help="such as 'val_loss > 2'")
    parser.add_argument("--set", metavar="NAME", help="set of --item (default: the run's first)")
    parser.add_argument("--expect", metavar="TEXT", help="text that the answer should contain")
    parser.add_argument("--rows", type=int, default=16, metavar="N",
                        help="number of rows to print (default: %(default)s)")
    parser.add_argument("--force", action="store_true",
                        help="also with another version of the code or torch, or on another device")
    args = parser.parse_args()
    if (args.prompt is None) != (args.expect is None):
        parser.error("--prompt and --expect belong together")

    from debug.history import bisect  # imports torch, which takes seconds

    names = ("item", "set", "prompt", "expect", "metric")
    question = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    bisect(find_run(args.run), question, args.force, args.rows)


if __name__ == "__main__":
    run_script(main)
