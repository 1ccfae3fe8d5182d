"""Write a run's report: one self-contained HTML page of its curves, timeline and settings.

    ./paddock report first
    ./paddock report first second        two runs overlaid and compared
    ./paddock report                     a table of all runs, newest first
    ./paddock report first --serve       the page follows the run
    ./paddock report first second --figure loss.pdf --width 3.3in

The report of several runs compares them: whether one is better, curves, results and settings.
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
from extensions.report.compare import FEWEST_AVERAGED, by_configuration, results  # noqa: E402
from extensions.report.curves import task_names  # noqa: E402
from extensions.report.page import ASSETS, Report, render  # noqa: E402
from parallel.process import STOP_SIGNALS  # noqa: E402
from plan.command_line import find_run  # noqa: E402
from plan.make import make_plan  # noqa: E402


def inches(text: str) -> float:
    return float(text.removesuffix("in"))


def parse_args() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("run", nargs="*", help="the folder of a run, or the name of a run in OUTPUT_DIR; "
                        "without a name, all runs in OUTPUT_DIR")
    parser.add_argument("--output-dir", metavar="FOLDER",
                        help="folder that contains the runs, and the page of all runs (default: OUTPUT_DIR)")
    parser.add_argument("--output", metavar="FILE", type=local_path,
                        help="file to write (default: report.html in the run's folder; beside the "
                        "runs, report.html of all of them, or comparison.html)")
    parser.add_argument("--figure", "--plot", metavar="FILE", type=local_path,
                        help="draw loss and accuracy into this .pdf, .svg or .png instead")
    parser.add_argument("--log", action="store_true", help="logarithmic losses in the figure")
    parser.add_argument("--width", metavar="INCHES", type=inches, default=5.5, help="width of the figure")
    parser.add_argument("--serve", action="store_true", help="show a live page on this machine only")
    parser.add_argument("--port", type=int, metavar="N", default=8321,
                        help="port for --serve; 0 = any free port (default: %(default)s)")
    parser.add_argument("--in-background", action="store_true", help="print nothing, ignore stop signals")
    args = parser.parse_args()
    if not 0 <= args.port < 1 << 16:
        parser.error("--port must be at least 0 and at most 65535")
    if args.serve and args.output:
        parser.error("--serve writes no file; leave out --output")
    return args


def draw(report: Report, path: Path, width: float, log: bool) -> None:
    """Draw loss and accuracy with matplotlib: of many runs that differ only in seeds, mean and range."""
    with requires_package("matplotlib", "--figure"):
        import numpy as np
        from matplotlib import style
        from matplotlib.figure import Figure

    runs = report.runs
    groups = {each["name"]: each["runs"] for each in by_configuration(runs, [*results(runs)])[0]}
    if not groups or min(map(len, groups.values())) < FEWEST_AVERAGED:
        groups = {run.name: [run.name] for run in runs}
    drawn = sorted({name for run in runs for name, curve in run.curves.items() if len(curve) > 1})
    tasks = task_names(drawn, runs[0].hellaswag)
    unit = " (nats per token)" if runs[0].main.curve == "val_loss" else ""
    panels = [(f"loss{unit}", 1, [name for name in ("val_loss", "train_loss") if name in drawn]),
              *((f"accuracy on {tasks[name]} (%)", 100, [name]) for name in [*tasks][:1])]
    style.use(ASSETS / "figure.mplstyle")
    figure = Figure(figsize=(width, 0.62 * width * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    for (title, factor, names), (axis,) in zip(panels, axes):
        axis.set(ylabel=title, yscale="log" if log and factor == 1 else "linear")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}" if log and factor == 1 else "")
        if chance := factor == 100 and runs[0].value(f"{names[0].removesuffix('_acc')}_chance"):
            axis.axhline(100 * chance, color="grey", linestyle=":")
        for number, (group, members) in enumerate(groups.items()):
            color = f"C{number}"
            labels = (group.replace("$", r"\$"), None) if len(groups) > 1 else ("validation", "training")
            chosen = [run.curves for run in runs if run.name in members]
            shared = [name for name in names if all(name in curves for curves in chosen)]
            for name, label, alpha in zip(shared, labels, (1, 0.4)):
                points = [curves[name].points(2000) for curves in chosen]
                steps = sorted(set.intersection(*({*each.x} for each in points)))
                values = factor * np.array([np.interp(steps, each.x, each.y) for each in points])
                axis.plot(steps, values.mean(0), "." * (len(steps) < 30) + "-", label=label, color=color,
                          alpha=alpha)
                axis.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
    axes[0][0].legend()
    axes[-1][0].set_xlabel("step")
    with disk_errors(path, CheckpointError, "name another file"):
        figure.savefig(path)


def main() -> None:
    args = parse_args()
    if args.in_background:  # a signal to all processes of a job is for the run, which ends this one itself
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    flags = [] if args.output_dir is None else ["--output-dir", args.output_dir]
    folders = [find_run(name, flags) for name in args.run]
    if not folders:
        output = Path(make_plan(flags, complete=False).config.output_dir)
        files = (*output.glob("*/config.json"), *output.glob("*/*/config.json"))
        # Without models, such as runs/NAME/merged.
        settings = sorted((path for path in files if not any(path.parent.glob("*.safetensors"))),
                          key=os.path.getmtime, reverse=True)
        folders = [each.parent for each in settings]
        if not folders:
            raise CheckpointError(f"{output} contains no runs; name the folder of a run, or set OUTPUT_DIR")
    report = Report(folders, is_overview=not args.run)
    report.read()
    if args.figure:
        draw(report, args.figure, args.width, args.log)
        return show(str(args.figure))
    if args.serve:
        with requires_package("starlette", "--serve"):
            import starlette  # noqa: F401
        with requires_package("uvicorn", "--serve"):
            from extensions.report.serve import serve
        return serve(report, args.port)
    path = (folders[0].absolute().parent / "comparison.html" if len(args.run) > 1
            else (folders[0] if args.run else output) / "report.html")
    path = args.output or path
    if len(args.run) > 1 and args.output is None and path.exists():
        print_safely("Replacing the earlier comparison; --output FILE keeps both.", sys.stderr)
    with (disk_errors(path, CheckpointError, "name another file with --output"),
          atomic_write(path) as temporary):
        data = report.data()
        temporary.write_text(render(data), encoding="utf-8")
    if not args.in_background:
        for run in report.runs:
            if bad := run.set_aside():
                print_safely(f"warning: {run.folder}: not valid and left out: {', '.join(bad)}", sys.stderr)
        verdicts = [sentence for _, sentence in data["runs"][0]["health"]] if len(report.runs) == 1 else []
        show(*(data["comparison"]["sentences"] if len(args.run) > 1 else verdicts), str(path))


if __name__ == "__main__":
    run_script(main)
