"""Measure what a job of many ranks costs beside the model, with as many processes on this machine.

    python scripts/simulate_ranks.py --ranks 1 4 16 64 --preset sample

Other flags are settings of train.py. The processes join a real process group (gloo) and go through the
trainer's own code, without a model. They share this machine's cores, so the seconds of many ranks are an
upper bound: see the row "CPU, all ranks". The row "hang" is how much later than DISTRIBUTED_TIMEOUT a rank
that was stopped is reported, and all have left. Results: docs/scaling.md.
"""

import argparse
import gc
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import DataError, run_script  # noqa: E402
from common.text import show  # noqa: E402

ROWS_PER_RANK, ROWS = 8, 10**8  # of a step, and of the data
HANG_TIMEOUT = 20.0
PATIENCE = 600.0
Seconds = dict[str, float]


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser(__doc__, allow_abbrev=False)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 16, 64],
                        help="numbers of ranks (default: 1 2 4 16 64); 256 need about 10 GB of memory")
    parser.add_argument("--idle-seconds", type=float, default=10, metavar="S",
                        help="how long the watchdog is watched (default: 10)")
    parser.add_argument("--skip-hang", action="store_true", help="stop no rank")
    args, flags = parser.parse_known_args()
    if min(args.ranks) < 1 or not args.idle_seconds > 0:
        parser.error("all numbers must be above 0")
    return args, flags


def timed(work: Callable[[], Any], calls: int = 1) -> float:
    started = time.monotonic()
    for _ in range(calls):
        work()
    return (time.monotonic() - started) / calls


def cost_of_a_job(config, tasks, idle_seconds: float, folder: Path) -> Seconds:
    """The seconds of each part, on one of the ranks."""
    import numpy as np
    import torch
    import torch.distributed as dist

    import hellaswag_utils
    from checkpoint import store
    from checkpoint.tensors import write_tensors
    from dataloaders import RowOrder
    from evaluation import during_run
    from parallel.ranks import RunContext, StopSignals, joined_ranks
    from run import start

    world_size = int(os.environ["WORLD_SIZE"])
    seconds: Seconds = {}
    connect, started = dist.init_process_group, time.monotonic()
    dist.init_process_group = lambda *arguments, **options: seconds.update(
        {"join: torch connects each pair (gloo)": timed(lambda: connect(*arguments, **options))})
    with joined_ranks("cpu", PATIENCE) as ranks:
        ranks.barrier()
        own = time.monotonic() - started - seconds.get("join: torch connects each pair (gloo)", 0)
        seconds["join: the rest"] = own
        seconds["barrier"] = timed(ranks.barrier, 10)
        seconds["raise_on_all"] = timed(lambda: ranks.raise_on_all(lambda: None), 10)
        seconds["broadcast"] = timed(lambda: ranks.broadcast("x" * 100), 10)
        seconds["gather a number of each (drift check)"] = timed(lambda: ranks.all_gather_json(2**32 - 1), 10)
        seconds["inputs: rank 0 verifies"] = timed(
            lambda: ranks.on_rank0(lambda: start.read_inputs(config, verify=True)))

        order = RowOrder(ROWS, ROWS_PER_RANK * world_size, ROWS_PER_RANK, 1, ranks.rank, world_size)
        seconds["loader: rows of a step"] = timed(lambda: order.micro_batches(1000), 10)
        ranks.barrier()

        hellaswag_utils.ending_logprobs = lambda model, batch, device: np.zeros((len(batch), 4))
        log = SimpleNamespace(info=show, warn=show)
        run = SimpleNamespace(config=config, ranks=ranks, log=log, model=torch.nn.Identity(),
                              context=RunContext(ranks, StopSignals(), log))
        if tasks:
            choices = hellaswag_utils.ChoiceSet("hellaswag", "HellaSwag", tasks, 0.25, "")
            name = f"HellaSwag: {len(tasks):,} items"
            seconds[name] = timed(lambda: during_run.multiple_choice(run, choices))

        def write(place: Path) -> None:
            write_tensors(place / store.OPTIMIZER, {"moment": torch.zeros(2**20)})

        facts = {"step": 1, "world_size": world_size, "val_loss": None}
        seconds["save 4 MB"] = timed(
            lambda: ranks.on_rank0(lambda: store.publish(Path(folder) / "step-00000001", write, facts)))

        # The store's thread is in rank 0's process; the ranks sleep, and only their watchdogs work.
        before = time.process_time()
        time.sleep(idle_seconds)
        seconds["watchdog: CPU of rank 0, a second"] = (time.process_time() - before) / idle_seconds
        seconds["watchdog: CPU of a rank, a second"] = ranks.all_reduce_floats(
            [(time.process_time() - before) / idle_seconds])[0] / world_size
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds["CPU, all ranks"] = ranks.all_reduce_floats([usage.ru_utime + usage.ru_stime])[0]
    return seconds


def hang_of_the_last_rank(folder: Path) -> Seconds:
    """Stop the last rank; the others wait for it until the watchdog ends them."""
    from common.heartbeat import HEARTBEAT
    from parallel.ranks import joined_ranks

    with joined_ranks("cpu", HANG_TIMEOUT) as ranks:
        HEARTBEAT.stacks_folder = folder
        ranks.barrier()
        time.sleep(5)
        ranks.barrier()
        if ranks.rank == ranks.world_size - 1:
            time.sleep(2)  # until the others know where it is
            (folder / f"hangs-{time.monotonic()}").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        ranks.barrier()
    return {}


def as_rank(rank: int, place: dict[str, str], output: Path, talk: tuple, work: tuple) -> None:
    """A rank's process.

    Args:
        talk: an event at which to begin, and the queue for what rank 0 measured.
        work: a function and its arguments.
    """
    released, answers = talk
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ |= {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    released.wait()
    seconds = work[0](*work[1:])
    if rank == 0:
        answers.put(seconds)


def run_ranks(world_size: int, work: Callable[..., Seconds], *arguments: Any) -> Seconds:
    """Call a function on each of so many ranks; returns what rank 0 measured."""
    from parallel.process import listen_at

    context = multiprocessing.get_context("fork")  # which takes milliseconds, and shares torch's memory
    released, answers = context.Event(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        with listen_at(["127.0.0.1"], 0) as probe:
            port = probe.getsockname()[1]
        place = {**dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size)),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                 "TORCHELASTIC_RUN_ID": "simulated"}  # the ranks of a launcher wait longer for each other
        output = Path(folder) / "output.txt"
        shared = (place, output, (released, answers), (work, *arguments, Path(folder)))
        processes = [context.Process(target=as_rank, args=(rank, *shared)) for rank in range(world_size)]
        for process in processes:
            process.start()
        released.set()
        try:
            for process in processes:
                process.join(PATIENCE)
            left_at = time.monotonic()
            text = output.read_text(errors="replace")
            for path in Path(folder).glob("hangs-*"):
                stopped_at = float(path.name.removeprefix("hangs-"))
                named = f"error: hang: rank {world_size - 1} is in" in text
                seconds = left_at - stopped_at - HANG_TIMEOUT
                return {f"hang: {'' if named else 'not '}named, and all left": seconds}
            if any(process.exitcode for process in processes):
                errors = re.findall(r"^(?:[\w.]*(?:Error|Exception)|error:).*", text, re.MULTILINE)
                raise DataError(f"a rank failed: {[*errors, text[:500]][0]}")
            return answers.get(timeout=10)
        finally:
            for process in processes:
                process.kill()


def main() -> None:
    args, flags = parse_args()
    import torch._dynamo  # noqa: F401  once, before the processes are forked

    from observe import check
    from parallel import ranks as collectives  # noqa: F401
    from run import start
    from settings.load import load_config

    config = load_config(flags).config
    check.provide_sample(config, may_write=True)
    started = time.monotonic()
    inputs = start.read_inputs(config, verify=False)
    table = {"inputs: then each rank reads": dict.fromkeys(args.ranks, time.monotonic() - started)}
    # What a process touches of the parent's objects is copied: little of the items, and no collector's marks.
    tasks = [task._replace(tokens_T=range(len(task.tokens_T)), documents_T=None, targets_T=None)
             for choices in inputs.choice_sets[:1] for task in choices.tasks]
    del inputs
    gc.collect()
    gc.freeze()
    for world_size in args.ranks:
        jobs = [(cost_of_a_job, config, tasks, args.idle_seconds)]
        if world_size > 1 and not args.skip_hang:
            jobs.append((hang_of_the_last_rank,))
        for job in jobs:
            for name, value in run_ranks(world_size, *job).items():
                table.setdefault(name, {})[world_size] = value
                show(f"{world_size} ranks: {name}: {value:.2g}")
    show("", "| seconds | " + " | ".join(map(str, args.ranks)) + " |", "|---|" + "---|" * len(args.ranks))
    for name, row in table.items():
        cells = (f"{row[ranks]:.2g}" if ranks in row else "-" for ranks in args.ranks)
        show(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    run_script(main)
