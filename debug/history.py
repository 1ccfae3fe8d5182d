"""Past steps of a run: compare two runs, re-create any step with proof, find the step that changed an answer.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from checkpoint import store
from checkpoint.manifest import MANIFEST
from checkpoint.schema import read_entries, segment_files
from common import __version__
from common.errors import CheckpointError, PaddockError, SettingsError
from common.files import disk_errors, read_json
from common.text import ROOT, duration, last_line
from config import Config
from data_pipeline.templates import load_chat_format
from dataloaders import MixedRows
from debug.inspect import DataReport
from debug.replay import backward_of_row, open_run, read_ledger, read_settings, replay_before
from evaluation.during_run import evaluations
from evaluation.standalone import open_model, settings_for
from hellaswag_utils import evaluate_batches
from inference.generate import generate
from inference.text import text_prompt
from model_utils import choose_device
from observe.guards import checksums
from parallel.ranks import Ranks, RunContext, StopSignals
from run.card import commit, device_name
from run.start import read_inputs
from settings.load import Layer

NO_FLAGS = Layer({}, [])
# What the repeated steps do not need. Validation stays: it counts for early stopping.
UNNEEDED = {"PRESET": "", "EPOCHS": None, "DEPTH": None, "SAVE_EVERY": 0, "KEEP_EVERY": 0, "KEEP_LAST": 1,
            "KEEP_BEST": 0, "HELLASWAG_EVERY": 0, "GENERATION_EVAL_EVERY": 0, "SAMPLE_EVERY": 0,
            "REPORT": False, "POWER_HZ": 0, "PROFILE_STEPS": None, "POWER_STEPS": None,
            "MEMORY_SNAPSHOT": None, "WANDB_ENABLED": False, "TENSORBOARD_ENABLED": False,
            "TRACKIO_ENABLED": False}
FIELDS = ("rows_crc32", "loss", "grad_norm", "updated", "weights", "tensors")  # of the ledger
Info = Callable[[str], Any]

# ------------------------------------------------------------------------------------------- a past step


class Leg(NamedTuple):
    """Steps that one process, or one group of ranks, took."""

    begins: int  # its first step
    first: int  # the first step to repeat
    last: int
    settings: dict[str, Any]
    start: dict[str, Any]  # its event


def read_legs(run_dir: Path, first: int, last: int) -> list[Leg]:
    """Return the processes that took these steps of a run, in order."""
    starts = {entry["step"]: entry for entry in read_entries(run_dir / "events.jsonl")
              if entry["event"] == "start"}
    segments = segment_files(run_dir) or [(1, run_dir / "config.json")]
    ends = [begins - 1 for begins, _ in segments[1:]] + [last]
    return [Leg(begins, max(first, begins), min(last, end), read_json(path), starts.get(begins - 1, {}))
            for (begins, path), end in zip(segments, ends) if max(first, begins) <= min(last, end)]


class Machine(NamedTuple):
    """How steps are repeated."""

    force: bool = False  # do not compare code, torch and device with the recorded ones
    ranks: Optional[int] = None  # instead of the recorded number, with REPRODUCIBLE


def check_same_place(run_dir: Path, legs: Sequence[Leg]) -> None:
    """Raise CheckpointError if code, torch or device are not those of the recorded steps."""
    for leg in legs:
        device = device_name(torch.device(choose_device(read_settings(run_dir, NO_FLAGS, leg.first)[0])))
        now = {"paddock": (__version__, "check out that version"), "device": (device, "use such a machine"),
               "commit": (commit(), "check it out"), "torch": (torch.__version__, "install that version")}
        for name, (value, advice) in now.items():
            then = str(leg.start.get(name) or value)
            if then.partition(",")[0] != value.partition(",")[0]:  # a CPU's threads are set below
                raise CheckpointError(f"step {leg.first} of {run_dir} was taken with {name} {then}, but this "
                                      f"is {value}; {advice}, or add --force: the ledger decides anyway")


def take_steps(leg: Leg, folder: Path, resume: str) -> None:
    """Repeat the steps of a leg in `folder`/run, by train.py in new processes."""
    world_size = leg.settings["WORLD_SIZE"]
    changes = {"OUTPUT_DIR": str(folder), "RUN_NAME": "run", "STOP_STEP": leg.last, "RESUME": resume}
    (folder / "settings.json").write_text(json.dumps(leg.settings | UNNEEDED | changes))
    script = ["train.py"] if world_size == 1 else ["scripts/launch.py", f"--nproc-per-node={world_size}"]
    environ = {name: value for name, value in os.environ.items()
               if name.lower() not in Config.model_fields and name not in ("RANK", "LOCAL_RANK")}
    if threads := re.search(r"(\d+) threads", leg.start.get("device", "")):
        environ["OMP_NUM_THREADS"] = threads[1]
    with open(folder / "output.txt", "w+", errors="replace") as output:
        command = [sys.executable, ROOT / script[0], *script[1:], "--config", folder / "settings.json"]
        code = subprocess.run([*map(str, command)], env=environ, stdin=subprocess.DEVNULL, stdout=output,
                              stderr=subprocess.STDOUT).returncode
        output.seek(0)
        if code:
            raise PaddockError(f"steps {leg.first} to {leg.last} could not be repeated: "
                               f"{last_line(output.read()).removeprefix('error: ')}")


def compare_ledgers(ledger: dict[int, dict], other: dict[int, dict]) -> tuple[Optional[int], list[str]]:
    """Return the first common step at which two ledgers differ, and the fields that differ."""
    for step in sorted(ledger.keys() & other.keys()):
        one, two = ledger[step], other[step]
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
             machine: Machine = Machine(), info: Info = print) -> None:
    """Write the checkpoint of a past step to the folder `output`, once the ledger has proved it.

    Args:
        kept: checkpoints to begin from, by step; None = the run's, which must have one; {} = the run's start.
    """
    ledger = read_ledger(run_dir, step)
    if os.path.lexists(output) or run_dir.resolve() in output.resolve().parents:
        raise SettingsError(f"--output {output} exists, or is inside the run; choose a new folder elsewhere")
    if kept is None and not (kept := kept_checkpoints(run_dir, step)):
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step} or an earlier one; add "
                              "--from-start to repeat all steps, or set KEEP_EVERY in later runs")
    nearest = max((saved for saved in kept if saved <= step), default=None)
    base, begin = (None, min(ledger)) if nearest is None else (kept[nearest], nearest + 1)
    if base:
        store.verify(base)

    # Print the time that it takes, and check that the result can be the same.
    legs = read_legs(run_dir, begin, step)
    if not machine.force:
        check_same_place(run_dir, legs)
    for leg in legs if machine.ranks else ():
        if not leg.settings.get("REPRODUCIBLE"):
            raise SettingsError(f"--ranks {machine.ranks}: without REPRODUCIBLE, which this run did not set, "
                                "the weights depend on the number of ranks; remove it")
        leg.settings.update(WORLD_SIZE=machine.ranks, SHARD_DEGREE=0)
    seconds = [entry["step_seconds"] for entry in read_entries(run_dir / "metrics.jsonl")
               if isinstance(entry.get("step_seconds"), float)]
    needed = (step + 1 - begin) * statistics.median(seconds or [0])
    needed += sum(leg.start.get("seconds") or 0 for leg in legs)  # to load
    ranks = ", ".join(str(leg.settings["WORLD_SIZE"]) for leg in legs)
    info(f"Step {step} of {run_dir}: {step + 1 - begin} steps from {base.name if base else 'the start'}"
         + f", number of ranks: {ranks}, about {duration(needed)}" * bool(legs))

    with disk_errors(output, CheckpointError, "choose another folder with --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tmp-steps-", dir=output.parent) as temporary:
            again = Path(temporary) / "run"
            (again / "checkpoints").mkdir(parents=True)
            if base:
                for log in run_dir.glob("*.jsonl"):
                    shutil.copy(log, again)
                (again / "checkpoints" / f"step-{nearest:08d}").symlink_to(base.resolve())
            for leg in legs:
                begins_anew = base is None and leg is legs[0] and leg.settings["RESUME"] != "never"
                take_steps(leg, Path(temporary), leg.settings["RESUME"] if begins_anew else "auto")
                check_ledger(ledger, read_ledger(again), leg)
            publish(again / "checkpoints" / f"step-{step:08d}", output, legs[-1].settings if legs else None)
    proof = "the checksum of its weights is" if ledger[step]["weights"] else (
        "there are no checksums (LEDGER_CHECKSUM), but losses and gradient norms of all repeated steps are")
    info(f"{output}: {proof} that of the ledger" if legs else f"{output}: a verified copy of {base}")


def check_ledger(ledger: dict[int, dict], repeated: dict[int, dict], leg: Leg) -> None:
    """Raise CheckpointError unless all steps of a leg are those of the ledger."""
    lines = {step: line for step, line in repeated.items() if step >= leg.first}
    step, fields = compare_ledgers(ledger, lines)
    if step is not None:
        now, then = lines[step][fields[0]], ledger[step][fields[0]]
        raise CheckpointError(f"step {step} is not the recorded step: {fields[0]} is {now}, not {then}. "
                              "Data, code, machine or threads have changed since; nothing was written")


def publish(made: Path, output: Path, settings: Optional[dict[str, Any]]) -> None:
    """Copy a checkpoint, with the settings that the run had."""
    manifest, state = store.read_manifest(made), read_json(made / store.STATE)

    def write_files(folder: Path) -> None:
        shutil.copytree(made, folder, dirs_exist_ok=True)
        (folder / MANIFEST).unlink()
        if settings:
            (folder / store.STATE).write_text(json.dumps(state | {"settings": settings}, indent=1) + "\n")

    details = {name: manifest[name] for name in ("step", "world_size", "val_loss")}
    store.publish(output, write_files, details, sum(file["size"] for file in manifest["files"].values()))


# --------------------------------------------------------------------------------- when an answer changed


def read_metric(text: str) -> tuple[str, Callable[[float], bool]]:
    """Return name and test of a condition such as "val_loss > 2"."""
    parts = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([-+.\deE]+)\s*", text)
    try:
        name, sign, limit = parts[1], parts[2], float(parts[3])
    except (TypeError, ValueError) as error:
        raise SettingsError(f"--metric {text!r} is not of the form 'val_loss > 2'") from error
    return name, lambda value: value > limit if sign == ">" else value < limit


def judge(folder: Path, question: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a checkpoint answers as asked, and its answer.

    Args:
        question: `item` (counted from 1) and perhaps `set`; or `prompt` and `expect`; or `metric`.
    """
    measured = bool(question.get("metric"))
    flags = {"validate_every": int(measured), "generation_eval_every": 0,
             "hellaswag_every": int("prompt" not in question)}
    config = settings_for(folder, Layer({name: (value, "") for name, value in flags.items()}, []), None)
    context = RunContext(Ranks(), StopSignals(), SimpleNamespace(info=lambda text: None, warn=print))
    run = open_model(folder, config, None, context)
    if measured:
        name, holds = read_metric(question["metric"])
        values = {key: value for each in evaluations(run) for key, value in each.measure().metrics.items()}
        if name not in values:
            raise SettingsError(f"--metric {name}: an evaluation of this run gives {', '.join(values)}")
        return holds(values[name]), f"{name} = {values[name]:.4f}"
    if "prompt" in question:
        tokenizer = run.inputs.tokenizer
        prompt = text_prompt(tokenizer, question["prompt"])
        if config.training_stage != "pretrain":
            chat = load_chat_format(tokenizer)
            messages = [{"role": "user", "content": question["prompt"]}]
            prompt = prompt._replace(ids=chat.encode_prompt(messages), stop_ids=chat.stop_ids)
        ids, = generate(run.model, [prompt.ids], config.sample_tokens, stop_ids=prompt.stop_ids)
        answer = tokenizer.decode(ids)
        return question["expect"] in answer, repr(answer[:100])
    sets = {each.name: each.tasks for each in run.inputs.choice_sets}
    tasks = sets.get(question.get("set") or next(iter(sets), ""), [])
    if not 1 <= question["item"] <= len(tasks):
        known = ", ".join(f"{name} (items 1 to {len(tasks)})" for name, tasks in sets.items()) or "none"
        raise SettingsError(f"--item {question['item']}: no such item; the run's sets: {known}")
    (_, correct_B2), = evaluate_batches(run.model, [tasks[question["item"] - 1]], device=run.ranks.device,
                                        batch_tokens=config.hellaswag_batch_tokens)
    return bool(correct_B2[0, 0]), "right" if correct_B2[0, 0] else "wrong"


def bisect(run_dir: Path, question: dict[str, Any], force: bool = False, rows_shown: int = 16,
           info: Info = print) -> int:
    """Return a step whose update changed the answer, and print its rows.

    An answer may change several times. This finds one change, between the last two kept checkpoints whose
    answers differ.
    """
    kept = dict(sorted(kept_checkpoints(run_dir, max(read_ledger(run_dir))).items()))
    answers = {}
    for step, folder in kept.items():
        answers[step] = judge(folder, question)
        info(f"after step {step}: {answers[step][1]}")
    pairs = [pair for pair in zip([*kept], [*kept][1:]) if answers[pair[0]][0] != answers[pair[1]][0]]
    if not pairs:
        raise SettingsError(f"the answer is the same at the {len(kept)} kept checkpoints of {run_dir}; ask "
                            "something else, or keep more checkpoints with KEEP_EVERY")
    low, high = pairs[-1]
    with tempfile.TemporaryDirectory(prefix="paddock-bisect-") as temporary:
        while high - low > 1:
            middle = (low + high) // 2
            folder = Path(temporary) / f"step-{middle:08d}"
            recreate(run_dir, middle, folder, kept, Machine(force), info)
            kept[middle], answers[middle] = folder, judge(folder, question)
            info(f"after step {middle}: {answers[middle][1]}")
            low, high = (low, middle) if answers[middle][0] != answers[low][0] else (middle, high)
    info(f"Step {high} changed the answer: {answers[low][1]} after step {low}, {answers[high][1]} after step "
         f"{high}. Its rows:")
    config = read_settings(run_dir, NO_FLAGS, high)[0].model_copy(
        update={"validate_every": 0, "hellaswag_every": 0, "generation_eval_every": 0})
    inputs = read_inputs(config, verify=False)
    describe = DataReport(Path(config.data_path), {}, config, inputs.tokenizer).describe_row
    for row in inputs.order(config, Ranks()).all_rows(high - 1)[:rows_shown]:
        source, mixed = inputs.rows, isinstance(inputs.rows, MixedRows)
        if mixed:
            source = inputs.rows.source_rows[inputs.rows.locate(np.array([row]))[0][0]]
        for line in describe(f"row {row:,}", source, inputs.rows(np.array([row]))):
            info(line)
    return high


# ------------------------------------------------------------------------------------ where two runs part


def names_of_tensors(run_dir: Path, count: int) -> list[str]:
    """Return the names of the trained tensors, in the order of the ledger's checksums."""
    for folder, _ in store.newest_first(run_dir / "checkpoints")[0]:
        names = sorted({name.rpartition(".")[0] for name in store.read_optimizer(folder)})
        if len(names) == count:
            return names
    return [f"tensor {number} of {count}" for number in range(1, count + 1)]


def diff(run_dir: Path, other_dir: Path, replays: bool = False, info: Info = print) -> bool:
    """Print the first step and tensor at which two runs part; return whether they do.

    Args:
        replays: also replay that step of both runs row by row, to name the rank.
    """
    ledgers = [read_ledger(folder) for folder in (run_dir, other_dir)]
    common = sorted(ledgers[0].keys() & ledgers[1].keys())
    if not common:
        raise SettingsError(f"{run_dir} and {other_dir} have no step in common")
    step, fields = compare_ledgers(*ledgers)
    proof = "weights included" if all(lines[common[-1]]["weights"] for lines in ledgers) else (
        "by loss and gradient norm, as LEDGER_CHECKSUM was not on in both")
    if step is None:
        info(f"The {len(common)} common steps, {common[0]} to {common[-1]}, are equal: {proof}")
        return False
    info(f"The first difference is in step {step} ({proof}).")
    lines = [ledger[step] for ledger in ledgers]
    for name in fields if fields != ["weights"] else []:
        if name != "tensors":
            info(f"{name}: {lines[0][name]} and {lines[1][name]}")
    if "tensors" in fields:
        sums = [re.findall(".{8}", line["tensors"]) for line in lines]
        differing = [name for name, *values in zip(names_of_tensors(run_dir, len(sums[0])), *sums)
                     if values[0] != values[1]]
        info(f"{len(differing)} of {len(sums[0])} tensors differ after it, the first is {differing[0]}")
    settings = [read_legs(folder, step, step)[0].settings for folder in (run_dir, other_dir)]
    changed = [f"{name} is {settings[0][name]} and {settings[1].get(name)}" for name in settings[0]
               if settings[0][name] != settings[1].get(name) and name not in ("OUTPUT_DIR", "RUN_NAME")]
    info(f"Settings: {', '.join(changed) or 'equal'}")
    if replays:
        replayed = [replay_rows(folder, step, info) for folder in (run_dir, other_dir)]
        for name, rows, others in ((run_dir, *replayed), (other_dir, *replayed[::-1])):
            ranks = sorted({rank for row, (rank, *_) in rows.items()
                            if row not in others or rows[row][1:] != others[row][1:]})
            info(f"{name}: replayed here, the rows of rank {', '.join(map(str, ranks))} give other gradients"
                 if ranks else f"{name}: replayed here, each row gives the other run's gradient, so settings "
                               "and data are not the cause: a machine, its kernels or the order of sums is")
    return True


def replay_rows(run_dir: Path, step: int, info: Info) -> dict[int, tuple[int, float, list[int]]]:
    """Return rank, loss and checksums of the gradients of each row of a step, without dropout."""
    config, world_size = read_settings(run_dir, NO_FLAGS, step)
    run = open_run(run_dir, config, step, info)
    info(f"{run_dir}: weights of {replay_before(run, step, world_size, read_ledger(run_dir, step))[0]}")
    run.model.eval()
    rows, found = run.inputs.order(config, run.ranks).all_rows(step - 1).tolist(), {}
    for number, row in enumerate(rows):
        loss, *_ = backward_of_row(run, row, 1)
        gradients = [each.grad for each in run.model.parameters() if each.grad is not None]
        found[row] = number * world_size // len(rows), loss, checksums(gradients).tolist()
    return found
