"""Write a run's report: one self-contained HTML page of its curves, chronicle and settings.

    ./paddock report first
    ./paddock report first second        two runs overlaid and compared
    ./paddock report                     a table of all runs in OUTPUT_DIR
    ./paddock report first --serve       the page follows the run
    ./paddock report first --plot curves.png

For several runs, the report overlays their curves and compares settings and results. Paired tests on the same
items show whether one run is better than another.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser  # noqa: E402
from common.errors import CheckpointError, local_path, requires_package, run_script  # noqa: E402
from common.files import atomic_write, disk_errors  # noqa: E402
from common.text import print_safely, show  # noqa: E402
from parallel.process import STOP_SIGNALS  # noqa: E402
from report.page import Report, render  # noqa: E402
from settings.load import find_run, load_config  # noqa: E402

DEFAULT_PORT = 8321


def parse_args() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("run", nargs="*", help="the folder of a run, or the name of a run in OUTPUT_DIR; "
                        "without a name, all runs in OUTPUT_DIR")
    parser.add_argument("--output", metavar="FILE", type=local_path,
                        help="file to write (default: report.html in the run's folder; for several runs, in "
                             "the folder that holds the first one)")
    parser.add_argument("--plot", metavar="FILE", type=local_path,
                        help="draw the first run's loss and HellaSwag into this picture instead")
    parser.add_argument("--serve", action="store_true",
                        help="show the page on this machine only, and keep it up to date; writes nothing")
    parser.add_argument("--port", type=int, metavar="N", default=DEFAULT_PORT,
                        help="port for --serve; 0 = any free port (default: %(default)s)")
    parser.add_argument("--in-background", action="store_true",
                        help="as REPORT=true writes it: print nothing, and ignore stop signals")
    args = parser.parse_args()
    if not 0 <= args.port < 1 << 16:
        parser.error("--port must be at least 0 and at most 65535")
    if args.serve and args.output:
        parser.error("--serve writes no file; leave out --output")
    return args


def write(report: Report, path: Path) -> None:
    """Write the page, which appears completely or not at all."""
    with (disk_errors(path, CheckpointError, "name another file with --output"),
          atomic_write(path) as temporary):
        temporary.write_text(render(report.data()), encoding="utf-8")


def plot(run: Path, output: Path) -> None:
    """Plot the loss with matplotlib, and below it HellaSwag's accuracy if it was measured."""
    if not (run / "metrics.jsonl").is_file():
        raise CheckpointError(f"{run} holds no metrics.jsonl; name a run's folder, such as runs/first")
    with requires_package("matplotlib", "--plot"):
        import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from checkpoint.schema import number, read_entries

    metrics = list(read_entries(run / "metrics.jsonl"))

    def curve(name: str) -> tuple[list[float], list[float]]:
        points = [(entry["step"], value) for entry in metrics
                  if (value := number(entry.get(name))) is not None]
        return [step for step, _ in points], [value for _, value in points]

    panels = 2 if len(curve("hellaswag_acc")[0]) > 1 else 1
    figure, axes = plt.subplots(panels, 1, figsize=(7, 2.8 * panels + 0.6), sharex=True, squeeze=False)
    loss = axes[0][0]
    loss.plot(*curve("train_loss"), color="tab:grey", linewidth=1, label="training")
    loss.plot(*curve("val_loss"), color="tab:blue", marker="o", label="validation")
    loss.set_ylabel("loss (nats per token)")
    loss.legend()
    if panels == 2:
        steps, accuracy = curve("hellaswag_acc")
        known = dict(zip(*curve("hellaswag_stderr")))
        errors = [known.get(step, 0.0) for step in steps]
        panel = axes[1][0]
        panel.errorbar(steps, [100 * value for value in accuracy], [100 * value for value in errors],
                       color="tab:green", marker="o", capsize=3, label="four endings")
        panel.axhline(25, color="tab:grey", linestyle=":", label="guessing")
        panel.set_ylabel("accuracy (%)")
        panel.set_ylim(0, 100)
        panel.legend()
    axes[-1][0].set_xlabel("step")
    for row in axes:
        row[0].grid(alpha=0.3)
    figure.suptitle(run.name, parse_math=False)  # a run's name may contain dollar signs
    figure.tight_layout()
    figure.savefig(output, dpi=110)


def main() -> None:
    args = parse_args()
    if args.in_background:  # a signal to all processes of a job is for the run, which ends this one itself
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    output = Path(load_config(complete=False).config.output_dir)
    settings = sorted({*output.glob("*/config.json"), *output.glob("*/*/config.json")}, key=os.path.getmtime)
    folders = [find_run(name) for name in args.run] or [each.parent for each in settings]
    if not folders:
        raise CheckpointError(f"there is no run in {output}; name the folder of a run, or set OUTPUT_DIR")
    if args.plot:
        plot(folders[0], args.plot)
        return show(str(args.plot))
    report = Report(folders)
    report.read()
    if args.serve:
        with requires_package("starlette", "--serve"):
            import starlette  # noqa: F401
        with requires_package("uvicorn", "--serve"):
            from report.serve import serve
        return serve(report, args.port)
    several = folders[0].absolute().parent if args.run else output
    path = args.output or (folders[0] if len(args.run) == 1 else several) / "report.html"
    write(report, path)
    if not args.in_background:
        for run in report.runs:
            if bad := run.set_aside():
                print_safely(f"warning: {run.folder}: not valid and left out: {', '.join(bad)}", sys.stderr)
        show(str(path))


if __name__ == "__main__":
    run_script(main)
