"""Plot a run's metrics.jsonl, with matplotlib.

    python scripts/plot_run.py runs/NAME -o FILE.png
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

from checkpoint.schema import number, read_entries  # noqa: E402
from common.command_line import CommandParser
from common.errors import PaddockError, requires_package, run_script
from common.text import show  # noqa: E402
from settings.load import find_run


def read_metrics(run: Path) -> list[dict]:
    """Return the logged steps of a run."""
    return list(read_entries(run / "metrics.jsonl"))


def draw(run: Path, output: Path, title: str) -> None:
    """Plot the loss, and below it HellaSwag's accuracy if it was measured."""
    with requires_package("matplotlib", "a plot"):
        import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    metrics = read_metrics(run)

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
    figure.suptitle(title, parse_math=False)  # a run's name may contain dollar signs
    figure.tight_layout()
    figure.savefig(output, dpi=110)


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("run", type=find_run, help="the run: its folder or name, or one of its checkpoints")
    parser.add_argument("-o", "--output", type=Path,
                        help="the picture (default: curves.png in the run's folder)")
    parser.add_argument("--title", help="above the picture (default: the run's name)")
    arguments = parser.parse_args()
    if not (arguments.run / "metrics.jsonl").is_file():
        raise PaddockError(f"{arguments.run} holds no metrics.jsonl; name a run's folder, such as runs/first")
    output = arguments.output or arguments.run / "curves.png"
    draw(arguments.run, output, arguments.title or arguments.run.name)
    show(str(output))


if __name__ == "__main__":
    run_script(main)
