"""Look into one step of a run: its rows, its loss beside the ledger's, and what in it was bad or hard.

    python scripts/replay_step.py runs/first --step 512
    python scripts/replay_step.py runs/first --step 512 --at-checkpoint --rows 10 --compile false

The run's folder stays as it is, and the run may go on meanwhile. Further flags are settings that differ from the run's.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.errors import PaddockError, SettingsError, run_script  # noqa: E402
from settings.load import read_flags  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, metavar="K", help="the step, as the console counts them")
    parser.add_argument("--rows", type=int, default=3, metavar="N",
                        help="how many of its rows to show, the worst first (default: %(default)s)")
    parser.add_argument("--at-checkpoint", action="store_true",
                        help="look with the weights of the last checkpoint before it; the steps in between are not taken again")
    args, rest = parser.parse_known_args()
    flags = read_flags(rest)
    if flags.env_file or flags.config_files or flags.check:
        raise SettingsError("command line: the run's own folder has its settings; name those that are to differ, one by one")

    # These take seconds, as they bring torch.
    from debug.replay import read_settings, replay
    from parallel.collectives import classify_exception

    config, world_size = read_settings(args.run, flags.layer, args.step)
    try:
        replay(args.run, args.step, config, world_size, args.rows, args.at_checkpoint)
    except (MemoryError, RuntimeError) as error:
        ending = classify_exception(error)
        if ending is None:
            raise
        raise PaddockError(ending.sentence) from error


if __name__ == "__main__":
    run_script(main)
