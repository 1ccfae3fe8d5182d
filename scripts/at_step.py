"""Re-create the checkpoint of any past step of a run, and prove it by the run's step log.

    ./paddock at-step runs/first 1234 --output models/step-1234

The steps after the nearest kept checkpoint (KEEP_EVERY) are repeated with the recorded settings, threads and
ranks, beside the output. Another version, data set or device is an error. The run's folder is not changed.
With LEDGER_CHECKSUM, the checksum of the weights is the proof; without it, losses and gradient norms are.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser, number
from common.errors import local_path, run_script
from common.text import command, show
from plan.command_line import find_run


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("run", help="a run's folder or name")
    parser.add_argument("step", type=int, help="step number as in the log")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER",
                        help="new folder for the checkpoint")
    parser.add_argument("--from-start", action="store_true", help="repeat all steps of the run")
    parser.add_argument("--force", action="store_true",
                        help="also with another version of the code or torch, or on another device")
    parser.add_argument("--ranks", type=number(int, "from 1 on", lambda value: value >= 1), metavar="N",
                        help="number of ranks, for a run with REPRODUCIBLE (default: as recorded)")
    args = parser.parse_args()

    from extensions.debug.history import recreate  # imports torch, which takes seconds

    kept = {} if args.from_start else None
    recreate(find_run(args.run), args.step, args.output, kept, args.force, args.ranks)
    show(f"Generate text with it: {command('scripts/generate.py', args.output)}")


if __name__ == "__main__":
    run_script(main)
