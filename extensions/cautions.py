"""Warnings about the model that a run or a command starts from. Needs no torch."""

from collections.abc import Iterator
from pathlib import Path

from checkpoint.store import BEST, best_first, newest_first, read_state
from extensions.report.items import NOT_TRIVIAL
from plan.layers import LENGTH, PRESETS_DIR
from plan.make import Plan
from plan.names import assignments

# Values for one stage rarely suit the next.
OF_A_STAGE = (*LENGTH, "total_batch_size", "micro_batch_size", "learning_rate", "warmup_steps", "optimizer")


def past_best(checkpoint: Path) -> str:
    """Return by how much a checkpoint is clearly worse than the best one of its run; "" if it is not."""
    measured = best_first(newest_first(checkpoint.parent)[0])
    losses = {folder.name: manifest["val_loss"] for folder, manifest in measured}
    best, loss = next(iter(losses), ""), losses.get(checkpoint.name)
    if loss is None or loss - losses[best] <= NOT_TRIVIAL * abs(losses[best]):
        return ""
    return f"{checkpoint} has a validation loss of {loss:.3f}, and {best} has {losses[best]:.3f}"


def better_one(named: str, folder: Path) -> Iterator[str]:
    """Yield a warning if a name means a run's newest checkpoint, and an earlier one is clearly better."""
    names_a_run = Path(named).name == folder.absolute().parent.parent.name
    if names_a_run and (worse := past_best(folder)):
        yield f"{worse}. To use that checkpoint, name {named}{BEST}"


def cautions(plan: Plan) -> Iterator[str]:
    """Yield warnings for a run that starts from the weights in a folder."""
    start, config = plan.start, plan.config
    yield from better_one(start.named or "", Path(start.folder))
    before = read_state(Path(start.folder)).get("settings", {})
    lines = {name: where.rpartition(":") for name in OF_A_STAGE if (where := plan.sources.get(name))}
    same = {name: before[name.upper()] for name, (file, _, line) in lines.items()
            if line.isdigit() and not file.startswith(str(PRESETS_DIR))  # a file that several runs share
            and before.get(name.upper()) == getattr(config, name)}
    if same and before["TRAINING_STAGE"] != config.training_stage:
        file, earlier = lines[next(iter(same))][0], before["TRAINING_STAGE"]
        yield (f"{file} still sets {assignments(same, ', ')} from {earlier}; without these lines, "
               f"{config.training_stage} uses values that suit its data")
