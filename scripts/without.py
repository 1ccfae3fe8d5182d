"""Train a run's other arm: without some data, or with other settings from a step on. Write a page on both.

    ./paddock without runs/first --find "\\bTim\\b" --seeds 3 --prompt "Tim went"
    ./paddock without runs/first --exclude excluded.txt
    ./paddock without runs/first --set LEARNING_RATE=0.003 --from-step 200
    ./paddock without runs/first --prompt "Who has it?" --answer Mia

The arm continues a copy of the newest kept checkpoint before the first step that differs (KEEP_EVERY), with
the recorded settings, threads and ranks. The page shows what was left out, where the runs part, and paired
differences. --seeds trains both arms with more seeds, from the start; six or more can tell an effect from
chance. With --answer, all examples are ranked by their estimated influence on the answer to the prompt; the
top ones are left out, each and together.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser, number
from common.errors import SettingsError, local_path, run_script
from common.text import show
from extensions.settings import read_selectors, selector_of
from plan.command_line import find_run
from plan.layers import read_flags
from plan.names import validate

at_least_1 = number(int, "from 1 on", lambda value: value >= 1)
at_least_2 = number(int, "from 2 on", lambda value: value >= 2)


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("run", help="a run's folder or name")
    parser.add_argument("--find", metavar="PATTERN", help="leave out examples whose text has this pattern")
    parser.add_argument("--source", metavar="NAME", help="leave out a source of a mixture, or a file")
    parser.add_argument("--exclude", metavar="FILE", help="leave out what a file names, as EXCLUDE_DATA")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another setting")
    parser.add_argument("--from-step", type=at_least_1, metavar="N", help="first step with --set")
    parser.add_argument("--seeds", type=at_least_1, default=1, metavar="N",
                        help="number of seeds [1]; a verdict takes 6")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT",
                        help="show both models' continuations or answers; can be repeated")
    parser.add_argument("--answer", default="", metavar="TEXT", help="rank examples by their influence on it")
    parser.add_argument("--verify", type=at_least_2, default=3, metavar="N", help="examples to verify [3]")
    parser.add_argument("--output", type=local_path, metavar="FOLDER", help="new folder [RUN-without]")
    args = parser.parse_args()
    selectors = read_selectors(args.exclude) if args.exclude else []
    selectors += [selector_of(f"{kind} {value}", f"--{kind}") for kind, value in
                  (("find", args.find), ("source", args.source)) if value]
    if bool(selectors) + bool(args.set) + bool(args.answer) != 1:
        raise SettingsError("command line: name either what to leave out (--find, --source, --exclude), or "
                            "--set with --from-step, or --answer")
    if bool(args.set) != bool(args.from_step) or args.answer and len(args.prompt) != 1:
        raise SettingsError("command line: --set needs --from-step, and --answer needs one --prompt")
    layer = read_flags([f"--{name.lower().replace('_', '-')}={value}" for name, _, value in
                        (each.partition("=") for each in args.set)])
    config, invalid = validate(layer.values)
    if problems := [*layer.problems, *invalid.values()]:
        raise SettingsError(*problems)
    settings = {name.upper(): config.public()[name.upper()] for name in layer.values}

    from extensions.debug.without import Experiment  # imports torch, which takes seconds

    run_dir = find_run(args.run)
    folder = args.output or run_dir.with_name(f"{run_dir.name}-without")
    show(str(Experiment(run_dir, folder, selectors, settings, args.from_step, args.seeds, args.prompt,
                        args.answer, args.verify).run()))


if __name__ == "__main__":
    run_script(main)
