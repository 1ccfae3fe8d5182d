"""Past steps of a run: compare two runs, and re-create any step with proof.

train.py itself repeats the steps, with the recorded settings and number of ranks, in a temporary folder.
Nothing is written into the run's folder, so that a run can be examined while it continues.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch

from checkpoint import store
from checkpoint.manifest import MANIFEST
from checkpoint.schema import read_entries
from checkpoint.tensors import read_optimizer
from common import __version__
from common.errors import CheckpointError, PaddockError, SettingsError
from common.files import commit, disk_errors, read_json
from common.text import ROOT, counted, duration, last_line, show
from config import Config
from extensions.debug.replay import examine_rows, open_run, read_settings, read_step_log, replay_before
from model_utils import choose_device, device_name
from plan.layers import Layer
from run.folder import segment_files

NO_FLAGS = Layer()
# What the repeated steps do not need. Validation stays: it counts for early stopping.
UNNEEDED = {"PRESET": "", "EPOCHS": None, "DEPTH": None, "SAVE_EVERY": 0, "KEEP_EVERY": 0, "KEEP_LAST": 1,
            "KEEP_BEST": 0, "HELLASWAG_EVERY": 0, "GENERATION_EVAL_EVERY": 0, "METRIC": "", "SAMPLE_EVERY": 0,
            "REPORT": False, "POWER_HZ": 0, "PROFILE_STEPS": None,
            "MEMORY_SNAPSHOT": None, "WANDB_ENABLED": False, "TENSORBOARD_ENABLED": False,
            "TRACKIO_ENABLED": False, "MLFLOW_ENABLED": False}
# Decide in which order gradients are added.
SUMMED = ("WORLD_SIZE", "SHARDING", "SHARD_DEGREE", "MICRO_BATCH_SIZE")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
FIELDS = ("rows_crc32", "loss", "grad_norm", "updated", "weights", "tensors")  # of the step log


class Segment(NamedTuple):
    """The steps that a run took from one start to the next."""

    first: int
    last: int
    settings: dict[str, Any]
    start: dict[str, Any]  # its event

    @property
    def threads(self) -> str:  # on a CPU, if recorded
        return "".join(re.findall(r"(\d+) threads?$", self.start.get("device", "")))


def read_segments(run_dir: Path, first: int, last: int) -> list[Segment]:
    """Return the processes that took these steps of a run, in order."""
    starts = {entry["step"]: entry for entry in read_entries(run_dir / "events.jsonl")
              if entry["event"] == "start"}
    files = segment_files(run_dir) or [(1, run_dir / "config.json")]
    ends = [begins - 1 for begins, _ in files[1:]] + [last]
    return [Segment(max(first, begins), min(last, end), recorded_settings(path), starts.get(begins - 1, {}))
            for (begins, path), end in zip(files, ends) if max(first, begins) <= min(last, end)]


def recorded_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a file of configs/, which has more of the plan beside them."""
    return {name: value for name, value in read_json(path).items() if name.isupper()}


def differences(segment: Segment) -> Iterator[str]:
    """Yield what differs from the recorded steps: code, torch, device. A CPU's threads can be set."""
    device = torch.device(choose_device(SimpleNamespace(device=segment.settings["DEVICE"])))
    now = {"paddock": (__version__, "check out that version"), "commit": (commit(), "check it out"),
           "torch": (torch.__version__, "install that version"),
           "device": (device_name(device).partition(",")[0], "use such a machine")}
    for name, (value, advice) in now.items():
        then = str(segment.start.get(name) or value).partition(",")[0]
        if then != value:
            yield f"step {segment.first} was taken with {name} {then}, but this is {value}; {advice}"


def take_steps(segment: Segment, folder: Path, resume: str, changes: Mapping[str, Any] = UNNEEDED) -> None:
    """Repeat the steps of a segment in `folder`/run, or RUN_NAME, by train.py in new processes."""
    ranks, output = segment.settings["WORLD_SIZE"], folder / "output.txt"
    place = {"OUTPUT_DIR": str(folder), "RUN_NAME": "run", "STOP_STEP": segment.last, "RESUME": resume}
    # As flags, because a run's record overrides files.
    flags = [f"--{name.lower().replace('_', '-')}={'none' if value is None else value}"
             for name, value in (segment.settings | place | changes).items()
             if name.lower() in Config.model_fields]
    script = [ROOT / "train.py"]
    if ranks > 1:
        script = [ROOT / "scripts/launch.py", f"--nproc-per-node={ranks}"]
    environ = {name: value for name, value in os.environ.items()
               if name.lower() not in Config.model_fields and name not in RANK_VARIABLES}
    if segment.threads:
        environ["OMP_NUM_THREADS"] = segment.threads
    with open(output, "wb") as file:
        done = subprocess.run([sys.executable, *script, *flags], env=environ,
                              stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    if done.returncode:
        reason = last_line(output.read_text(errors="replace")).removeprefix("error: ")
        raise PaddockError(f"steps {segment.first} to {segment.last} could not be repeated: {reason}")


def compare_step_logs(step_log: dict[int, dict], other: dict[int, dict]) -> tuple[Optional[int], list[str]]:
    """Return the first common step at which two step logs differ, and the fields that differ."""
    for step in sorted(step_log.keys() & other.keys()):
        one, two = step_log[step], other[step]
        if fields := [name for name in FIELDS if one[name] != two[name] and
                      (name not in ("weights", "tensors") or None not in (one[name], two[name]))]:
            return step, fields
    return None, []


def kept_checkpoints(run_dir: Path, last: int) -> dict[int, Path]:
    """Return a run's checkpoints up to step `last`, by step, without those of steps that were taken back."""
    kept: dict[int, Path] = {}
    for folder, manifest in store.newest_first(run_dir / "checkpoints")[0]:
        if manifest["step"] <= min([last, *kept]):
            kept[manifest["step"]] = folder
    return kept


def recreate(run_dir: Path, step: int, output: Path, kept: Optional[Mapping[int, Path]] = None,
             force: bool = False, ranks: Optional[int] = None) -> None:
    """Write the checkpoint of a past step to the folder `output`, once the step log has proved it.

    It begins from one of the `kept` checkpoints, by step: None = the run's, which must have one; {} = the
    run's start. With `force`, other code, torch or devices are warnings. `ranks` needs REPRODUCIBLE.
    """
    step_log = read_step_log(run_dir, step)
    if os.path.lexists(output) or run_dir.resolve() in output.resolve().parents:
        raise SettingsError(f"--output {output} exists, or is inside the run; choose a new folder elsewhere")
    if kept is None and not (kept := kept_checkpoints(run_dir, step)):
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step} or an earlier one; add "
                              "--from-start to repeat all steps, or set KEEP_EVERY in later runs")
    nearest = max((saved for saved in kept if saved <= step), default=None)
    base, first = (None, min(step_log)) if nearest is None else (kept[nearest], nearest + 1)
    if base:
        store.verify(base)
    segments = read_segments(run_dir, first, step)
    for segment in segments:
        for difference in differences(segment):
            if not force:
                raise CheckpointError(f"{difference}, or add --force: the step log decides anyway")
            show(f"Warning: {difference}")
        if ranks and not segment.settings.get("REPRODUCIBLE"):
            raise SettingsError(f"--ranks {ranks}: without REPRODUCIBLE, which this run did not set, "
                                "the weights depend on the number of ranks; remove it")
        if ranks:
            segment.settings.update(WORLD_SIZE=ranks, SHARD_DEGREE=0)

    # Print the time that it takes, and the recorded settings that the environment does not change.
    seconds = [entry["step_seconds"] for entry in read_entries(run_dir / "metrics.jsonl")
               if isinstance(entry.get("step_seconds"), float)]
    needed = (step + 1 - first) * statistics.median(seconds or [0])
    needed += sum(segment.start.get("seconds") or 0 for segment in segments)  # to load
    show(f"Step {step} of {run_dir}: {counted(step + 1 - first, 'step')} from "
         + (base.name if base else "the start") + f", about {duration(needed)}" * bool(segments))
    for segment in segments:
        names = ("WORLD_SIZE", "SHARDING", "MICRO_BATCH_SIZE")
        used = [f"{name}={segment.settings[name]}" for name in names]
        show(f"Steps {segment.first} to {segment.last}: {', '.join(used)}"
             + f", {counted(int(segment.threads or 0), 'CPU thread')} per rank" * bool(segment.threads))

    with disk_errors(output, CheckpointError, "choose another folder with --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tmp-steps-", dir=output.parent) as temporary:
            again = Path(temporary) / "run"
            (again / "checkpoints").mkdir(parents=True)
            if base:
                for log in run_dir.glob("*.jsonl"):
                    shutil.copy(log, again)
                (again / "checkpoints" / f"step-{nearest:08d}").symlink_to(base.resolve())
            for segment in segments:
                restarts = base is None and segment is segments[0] and segment.settings["RESUME"] != "never"
                take_steps(segment, Path(temporary), segment.settings["RESUME"] if restarts else "auto")
                repeated = {now: line for now, line in read_step_log(again).items() if now >= segment.first}
                wrong, fields = compare_step_logs(step_log, repeated)
                if wrong:
                    values = f"{repeated[wrong][fields[0]]}, not {step_log[wrong][fields[0]]}"
                    raise CheckpointError(f"step {wrong} is not the recorded step: {fields[0]} is {values}. "
                                          "Data, code, machine or threads have changed. Nothing was written")
            settings = segments[-1].settings if segments else {}
            publish(again / "checkpoints" / f"step-{step:08d}", output, settings)
    proof = "the checksum of its weights is" if step_log[step]["weights"] else (
        "there are no checksums (LEDGER_CHECKSUM), but losses and gradient norms of all repeated steps are")
    show(f"{output}: {proof} that of the step log" if segments else f"{output}: a verified copy of {base}")


def publish(made: Path, output: Path, settings: dict[str, Any]) -> None:
    """Copy a checkpoint, with the settings that the run had."""
    manifest, state = store.read_manifest(made), store.read_state(made)
    state["settings"] = settings or state["settings"]

    def write_files(folder: Path) -> dict[str, dict[str, Any]]:
        for file in made.rglob("*"):  # copytree hides which error it met
            if file.is_file() and file.name != MANIFEST:
                (folder / file.relative_to(made)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / file.relative_to(made))
        (folder / store.STATE).write_text(json.dumps(state, indent=1) + "\n")
        return {name: file for name, file in manifest["files"].items() if name.endswith(".safetensors")}

    details = {name: manifest[name] for name in ("step", "world_size", "val_loss", "val_items")}
    store.publish(output, write_files, details, sum(file["size"] for file in manifest["files"].values()))
    store.verify(output)


def names_of_tensors(run_dir: Path, count: int) -> list[str]:
    """Return the names of the trained tensors, in the order of the step log's checksums."""
    for folder, _ in store.newest_first(run_dir / "checkpoints")[0]:
        names = sorted({name.rpartition(".")[0] for name in read_optimizer(folder)})
        if len(names) == count:
            return names
    return [f"tensor {number} of {count}" for number in range(1, count + 1)]


def diff(run_dir: Path, other_dir: Path, replays: bool = False) -> bool:
    """Print the first step and tensor at which two runs differ, and replay it if asked; return if they do."""
    folders = (run_dir, other_dir)
    step_logs = [read_step_log(folder) for folder in folders]
    common = sorted(step_logs[0].keys() & step_logs[1].keys())
    if not common:
        raise SettingsError(f"{run_dir} and {other_dir} have no step in common")
    step, fields = compare_step_logs(*step_logs)
    proof = "weights included" if all(lines[common[-1]]["weights"] for lines in step_logs) else (
        "by loss and gradient norm, as LEDGER_CHECKSUM was not on in both")
    if step is None:
        show(f"{counted(len(common), 'common step')}, {common[0]} to {common[-1]}: equal, {proof}")
        return False
    show(f"The first difference is in step {step} ({proof}).")
    one, two = (step_log[step] for step_log in step_logs)
    for name in fields if fields != ["weights"] else []:
        if name != "tensors":
            show(f"{name}: {one[name]} and {two[name]}")
    if "tensors" in fields:
        sums = [re.findall(".{8}", line["tensors"]) for line in (one, two)]
        differing = [name for name, *values in zip(names_of_tensors(run_dir, len(sums[0])), *sums)
                     if values[0] != values[1]]
        show(f"{len(differing)} of {len(sums[0])} tensors differ after it, the first is {differing[0]}")
    settings, others = (read_segments(folder, step, step)[0].settings for folder in folders)
    changed = [f"{name} is {value} and {others.get(name)}" for name, value in settings.items()
               if value != others.get(name) and name not in ("OUTPUT_DIR", "RUN_NAME")]
    show(f"Settings: {', '.join(changed) or 'equal'}")
    summed = [name for name in SUMMED if settings.get(name) != others.get(name)]
    cause = "settings and data are not the cause, but perhaps the machine"
    if summed:
        cause = (f"with another {' and '.join(summed)}, they are added in another order, which rounds "
                 "differently (REPRODUCIBLE=true prevents that)")
    replayed = [replay_rows(folder, step) for folder in folders if replays]
    for folder, rows, other_rows in zip(folders, replayed, replayed[::-1]):
        ranks = sorted({rank for row, (rank, report) in rows.items()
                        if row not in other_rows or report != other_rows[row][1]})
        result = f"the rows of rank {', '.join(map(str, ranks))} give other gradients" if ranks else (
            f"every row's gradient is the other run's: {cause}")
        show(f"{folder}: replayed here, {result}")
    return True


def replay_rows(run_dir: Path, step: int) -> dict[int, tuple[int, str]]:
    """Return the rank of each row of a step, and its loss and gradient norm as text, without dropout."""
    config, world_size = read_settings(run_dir, NO_FLAGS, step)
    run = open_run(run_dir, config, step, show)
    show(f"{run_dir}: weights of {replay_before(run, step, read_step_log(run_dir, step))[0]}")
    rows = run.inputs.order(config, run.ranks).all_rows(step - 1).tolist()
    reports = {report.row: str(report) for report in examine_rows(run, rows, 1)}
    return {row: (number * world_size // len(rows), reports[row]) for number, row in enumerate(rows)}
