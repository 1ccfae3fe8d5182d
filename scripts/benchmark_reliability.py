"""What it costs to lose nothing: the share of a run's time that goes into checksums, fsync and the comparison of replicas.

    python scripts/benchmark_reliability.py --preset sample [settings as for train.py]

Takes a few steps with a save and a comparison after each, in a temporary folder in OUTPUT_DIR, and puts the medians in
relation to the intervals of the settings (SAVE_EVERY, DRIFT_CHECK_EVERY).
"""

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import train
from checkpoint import store
from common.errors import run_script
from settings.load import load_or_exit
from training import diagnostics

USAGE = "python scripts/benchmark_reliability.py [settings as for train.py]"
STEPS = 6


class Clock:
    """How long each call of some functions takes, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def watch(self, module, function: str, name: str) -> None:
        """From now on, time the calls of a module's function."""
        original = getattr(module, function)
        taken = self.seconds.setdefault(name, [])

        def timed(*arguments, **keywords):
            wait_for_gpu()
            started = time.perf_counter()
            try:
                return original(*arguments, **keywords)
            finally:
                wait_for_gpu()
                taken.append(time.perf_counter() - started)

        setattr(module, function, timed)


def wait_for_gpu() -> None:
    """Until what was asked of it is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Take the steps, and print the shares."""
    loaded = load_or_exit(sys.argv[1:], USAGE)
    config = loaded.config
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    clock = Clock()
    clock.watch(store, "_sync_and_hash", "hash")
    clock.watch(store, "sync_folder", "folders")
    clock.watch(store, "save", "save")
    clock.watch(train, "train_step", "step")
    clock.watch(diagnostics, "checksums", "drift")
    # A single process has no replicas to compare; what it costs is the reading of every weight and moment.
    train.check_replicas = lambda run: diagnostics.checksums((*run.model.parameters(), *run.optimizer.state_tensors().values()))
    with tempfile.TemporaryDirectory(dir=config.output_dir, prefix="benchmark-") as folder:
        changes = {"output_dir": folder, "run_name": "run", "resume": "auto", "max_steps": STEPS, "save_every": 1, "keep_last": 1,
                   "drift_check_every": 1, "validate_every": 0, "hellaswag_every": 0, "sample_every": 0, "wandb_enabled": False}
        train.train(replace(loaded, config=config.model_copy(update=changes), notes=[], warnings=[], check=False))
        size = sum(path.stat().st_size for path in Path(folder).rglob("checkpoints/*/*"))
    seconds = clock.seconds
    step, drift, save = (statistics.median(seconds[name][1:]) for name in ("step", "drift", "save"))  # the first one warms up
    safe = (sum(seconds["hash"]) + sum(seconds["folders"])) / len(seconds["save"])
    between_saves, between_checks = (every * step for every in (config.save_every or config.max_steps, config.drift_check_every))
    print(f"a step: {step:.3f} s; a checkpoint: {size / 1e9:.2f} GB in {save:.2f} s, of which checksums and fsync {safe:.2f} s")
    print(f"checksums and fsync: {100 * safe / between_saves:.3f} % of the time between saves (SAVE_EVERY={config.save_every})")
    if config.drift_check_every:
        print(f"comparing replicas: {1000 * drift:.1f} ms, {100 * drift / between_checks:.4f} % of the time between comparisons "
              f"(DRIFT_CHECK_EVERY={config.drift_check_every})")


if __name__ == "__main__":
    run_script(main)
