"""Measure the share of a run's time that goes into checksums, fsync and the comparison of replicas.

    python scripts/benchmark_reliability.py --preset sample

Takes a few steps, with a save and a comparison after each, in a temporary folder in OUTPUT_DIR, and relates
the medians to the intervals that the settings name (SAVE_EVERY, DRIFT_CHECK_EVERY).
"""

import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

import torch

import train
from checkpoint import store
from common.errors import run_script
from observe import guards
from settings.load import load_or_exit

USAGE = "python scripts/benchmark_reliability.py [settings as for train.py]"
STEPS = 6
CHANGES = {"run_name": "run", "resume": "auto", "max_steps": STEPS, "save_every": 1, "keep_last": 1,
           "drift_check_every": 1, "validate_every": 0, "hellaswag_every": 0, "sample_every": 0,
           "wandb_enabled": False}
SECONDS: dict[str, list[float]] = defaultdict(list)  # of each call of a timed function


def time_calls(module, name: str) -> None:
    """From now on, record the seconds of each call of a module's function."""
    function = getattr(module, name)

    def wait_for_gpu() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def timed(*args, **kwargs):
        wait_for_gpu()
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            wait_for_gpu()
            SECONDS[name].append(time.perf_counter() - started)

    setattr(module, name, timed)


def main() -> None:
    """Take the steps, and print the shares."""
    loaded = load_or_exit(sys.argv[1:], USAGE)
    config = loaded.config
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    for name in ("_sync_and_hash", "sync_folder", "save"):
        time_calls(store, name)
    time_calls(train, "train_step")
    time_calls(guards, "checksums")
    # One process has no replicas to compare; the cost is that of reading every weight and moment.
    train.check_replicas = lambda run: guards.checksums(
        (*run.model.parameters(), *run.optimizer.state_tensors().values()))
    with tempfile.TemporaryDirectory(dir=config.output_dir, prefix="benchmark-") as folder:
        changed = config.model_copy(update={**CHANGES, "output_dir": folder})
        train.train(replace(loaded, config=changed, notes=[], warnings=[], check=False))
        size = sum(path.stat().st_size for path in Path(folder).rglob("checkpoints/*/*"))

    # The first call of each warms up.
    step, drift, save = (median(SECONDS[name][1:]) for name in ("train_step", "checksums", "save"))
    safe = (sum(SECONDS["_sync_and_hash"]) + sum(SECONDS["sync_folder"])) / len(SECONDS["save"])
    print(f"a step: {step:.3f} s; a checkpoint: {size / 1e9:.2f} GB in {save:.2f} s, of which checksums and "
          f"fsync {safe:.2f} s")
    share = 100 * safe / step / (config.save_every or config.max_steps)
    print(f"checksums and fsync: {share:.3f} % of the time between saves (SAVE_EVERY={config.save_every})")
    if every := config.drift_check_every:
        print(f"comparing replicas: {1000 * drift:.1f} ms, {100 * drift / step / every:.4f} % of the time "
              f"between comparisons (DRIFT_CHECK_EVERY={every})")


if __name__ == "__main__":
    run_script(main)
