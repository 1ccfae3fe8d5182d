"""Replay a training step: compare its loss with the step log's, and find rows with a high or non-finite loss.

    ./paddock replay runs/first --step 512
    ./paddock replay runs/first --step 512 --rows 9 --at-checkpoint

The run's folder is not changed, and the run may be running. Other flags change settings for the replay.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser  # noqa: E402
from common.errors import PaddockError, SettingsError, run_script  # noqa: E402
from plan.command_line import find_run  # noqa: E402
from plan.layers import read_flags  # noqa: E402


def main() -> None:
    parser = CommandParser(__doc__, allow_abbrev=False)
    parser.add_argument("run", help="a run's folder or name, or one of its checkpoints")
    parser.add_argument("--step", type=int, required=True, metavar="K", help="step number as in the log")
    parser.add_argument("--rows", type=int, default=3, metavar="N",
                        help="number of rows to describe, worst first (default: %(default)s)")
    parser.add_argument("--at-checkpoint", action="store_true",
                        help="use the weights of the last checkpoint, without replaying the steps after it")
    args, rest = parser.parse_known_args()
    flags = read_flags(rest)
    if flags.env_file or flags.config_files or flags.check:
        raise SettingsError("command line: only settings that should differ from the run's can be given here")

    # Imported here, because torch takes seconds.
    from extensions.debug.replay import replay
    from parallel.ranks import classify_exception

    try:
        replay(find_run(args.run), args.step, flags, args.rows, args.at_checkpoint)
    except (MemoryError, RuntimeError) as error:
        report = classify_exception(error)
        if report is None:
            raise
        raise PaddockError(report.sentence) from error


if __name__ == "__main__":
    run_script(main)
