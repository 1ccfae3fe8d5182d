"""All ranks call the same collectives in the same order: in a start, a step, an evaluation, a save, and after an error of one rank."""

import errno
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import during
from factories import LORA, STAGE, TinyRun, do_in_step, is_rank
from faults import terminate

import dataloaders
import hellaswag_utils
import model_utils
import train
from checkpoint.tensors import TensorFile
from common.errors import CheckpointError, DataError
from learn.objectives import NextToken

ROOT = Path(train.__file__).parent
RANKS = 2
COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single", "all_gather_into_tensor", "gather", "scatter",
               "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
               "new_group", "new_subgroups_by_enumeration")
BY_RANK = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "all_to_all_single")  # tensors may have other shapes on each rank
SHORT = {"MAX_STEPS": 2, "SAVE_EVERY": 1, "VALIDATE_EVERY": 1, "HELLASWAG_EVERY": 2, "SAMPLE_EVERY": 0, "WARMUP_STEPS": 1,
         "DISTRIBUTED_TIMEOUT": 60}
KINDS = {"pretrain": {}, "sharded": {"SHARDING": "full", "OPTIMIZER": "muon"}, "reproducible": {"REPRODUCIBLE": "true"},
         "sft-lora": {**LORA}, "dpo-stored": {}, "dpo-live": {}, "kto": {}, "distilled": {}, "grpo": {}}
SLOW = ("reproducible", "dpo-live", "kto", "distilled")


def described(value: Any) -> str:
    """An argument of a collective, as far as it must be the same on all ranks."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    if isinstance(value, dist.ProcessGroup):
        return f"{value.size()} ranks"
    return str(value) if isinstance(value, int | str | dist.ReduceOp | dist.ReduceOp.RedOpType) else type(value).__name__


def record(folder: Path, then: Callable[[], Any] = int) -> None:
    """In this process: write a line for each collective that the main thread calls, and where; then plant a fault."""
    file = open(folder / f"rank-{os.environ['RANK']}.txt", "a", buffering=1)

    def recorded(name: str, function: Callable) -> Callable:
        def wrapper(*arguments, **named):
            values = [] if name in BY_RANK else [*arguments, *(named[key] for key in sorted(named))]
            frame = sys._getframe(1)
            while frame.f_back and (not (path := frame.f_code.co_filename).startswith(str(ROOT)) or path.endswith("/ranks.py")):
                frame = frame.f_back
            file.write(f"{name} {' '.join(map(described, values))}\t{Path(frame.f_code.co_filename).name}:{frame.f_lineno}\n")
            return function(*arguments, **named)

        return wrapper

    for name in COLLECTIVES:
        if function := getattr(dist, name, None):
            setattr(dist, name, recorded(name, function))
    then()


def train_and_read(run: TinyRun, codes: list[int], then: Callable[[], Any] = int, **changes) -> list[list[str]]:
    """Train on two ranks, which end with these codes; returns the collectives that each called."""
    folder = run.output_dir / "collectives"
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    run.ends(codes, partial(record, folder, then), **changes)
    return [(folder / f"rank-{rank}.txt").read_text().splitlines() for rank in range(RANKS)]


def assert_equal_order(called: list[list[str]], missing: int = 0) -> None:
    """Assert that the ranks called the same collectives; rank 1, which failed, may have missed the last ones."""
    first, second = ([line.partition("\t")[0] for line in lines] for lines in called)
    for number, (one, other) in enumerate(zip(first, second)):
        assert one == other, (f"collective {number} of rank 0 and rank 1", [lines[max(0, number - 2):number + 2] for lines in called])
    assert 0 <= len(first) - len(second) <= missing, ("only one rank calls", max(called, key=len)[min(map(len, called)):])


def run_of(kind: str, stages, folder: Path) -> TinyRun:
    if kind in ("pretrain", "sharded", "reproducible"):
        return TinyRun(stages.prepared, folder, **SHORT | KINDS[kind])
    mode = {"sft-lora": "lora-sft"}.get(kind, kind)
    return stages.run(mode, folder, **{**STAGE, **SHORT, **KINDS[kind]})


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in KINDS])
def test_ranks_call_the_same_collectives(kind, stages, tmp_path):
    """A run that starts, evaluates, takes two steps and saves; and its resume for one more."""
    run = run_of(kind, stages, tmp_path / "runs")
    new = train_and_read(run, [0] * RANKS)
    assert_equal_order(new)
    assert len(new[0]) > 30, "it records"
    resumed = train_and_read(run, [0] * RANKS, MAX_STEPS=3, ALLOW_RESUME_MISMATCH="MAX_STEPS")
    assert_equal_order(resumed)
    assert run.steps_saved() == [1, 2, 3]


def no_rows() -> None:
    raise DataError("planted")


def no_model() -> None:
    raise CheckpointError("planted")


def no_disk() -> None:
    raise OSError(errno.ENOSPC, "planted")


def bug() -> None:
    raise ZeroDivisionError("planted")


def lose_the_loss() -> None:
    """From now on, the loss of this process is not a number."""
    original = NextToken.loss_sum

    def loss_sum(self, model, batch):
        summed = original(self, model, batch)
        return summed._replace(total=summed.total * math.nan)

    NextToken.loss_sum = loss_sum


def on_rank_1(fault: str) -> None:
    if is_rank(1):
        FAULTS[fault][1]()


# What fails on rank 1: the exit codes, and how many collectives rank 0 may have called more than it.
FAULTS = {
    "reading the data": ([3, 3], partial(during, dataloaders, "open_rows", no_rows, 1), 0),
    "loading the model": ([5, 5], partial(during, model_utils, "load_weights", no_model, 1), 0),
    "writing a checkpoint": ([5, 5], partial(during, TensorFile, "write_rows", no_disk, 1), 0),
    "a step that is not finite": ([4, 4], partial(do_in_step, 2, lose_the_loss), 0),
    "a stop signal": ([train.EXIT_PREEMPTED] * 2, partial(do_in_step, 2, terminate), 0),
    # A bug is not agreed upon: the other rank waits in its next collective until the connection is lost.
    "a bug in a step": ([1, 1], partial(do_in_step, 2, bug), 1),
    "a bug in an evaluation": ([1, 1], partial(during, hellaswag_utils, "ending_logprobs", bug, 1), 1)}


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_stop_at_the_same_collective_if_one_fails(fault, stages, tiny_run):
    codes, _, missing = FAULTS[fault]
    run = tiny_run(**SHORT, PRETRAIN_CHECKPOINT=stages.base, RESET_OPTIMIZER="true")
    assert_equal_order(train_and_read(run, codes, partial(on_rank_1, fault)), missing)
