"""Restarts of a job that failed: the rules, and the agreement of several machines. Without torch."""

import json
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Optional

from checkpoint.manifest import read_manifest_bytes
from checkpoint.schema import read_entries
from common.errors import CheckpointError, HangError
from common.files import plain
from common.text import counted, print_safely
from config import Config
from parallel import process

RESTARTED = (1, HangError.exit_code)  # codes of failures that need not recur
IDLE_STARTS = 2  # starts in a row without a new checkpoint that end a job
AGREE_SECONDS = 60  # beyond DISTRIBUTED_TIMEOUT, for other machines to notice a failure


class RankExit(NamedTuple):
    """How a rank ended. The minimum over the ranks is the cause of a failure."""

    is_secondary: bool  # it failed only because another rank did
    at: float  # time in seconds
    rank: int
    code: int
    sentence: str = ""
    trace: str = ""  # details beside the sentence


class Ending(NamedTuple):
    """How one start of a job ended on this machine."""

    exits: list[RankExit]  # of the failed and the preempted ranks
    stopped: bool = False  # by a signal to the launcher
    run_folder: Optional[Path] = None  # once the ranks write into it
    where: str = ""  # words that name the ranks' logs

    @property
    def cause(self) -> Optional[RankExit]:
        """The first failure, else a preempted rank; none if all ranks finished."""
        failures = [each for each in self.exits if each.code not in (0, process.EXIT_PREEMPTED)]
        return min(failures) if failures else max(self.exits, key=lambda each: each.code, default=None)


def newest_checkpoint(run_folder: Optional[Path]) -> list[int]:
    """Return [order of writing, step] of a run's newest checkpoint, or [0, 0]."""
    found = [[0, 0]]
    for folder in run_folder.glob("checkpoints/step-*") if run_folder else ():
        with suppress(CheckpointError, KeyError):
            manifest = json.loads(read_manifest_bytes(folder))
            found.append([manifest["written"], manifest["step"]])
    return max(found)


def agree(store: Any, keys: list[str], node: int, state: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the state of a whole job after a failure, from the states of its machines, exchanged as JSON.

    Without an answer of each, this machine does not start its ranks again.

    Args:
        store: like torch's TCPStore.
        keys: one for each machine.
        node: number of this machine.
    """
    try:
        store.set(keys[node], json.dumps(state))
        if state["again"]:
            store.wait(keys, timedelta(seconds=seconds))
            every = [json.loads(store.get(key)) for key in keys]
            return {"again": all(each["again"] is True for each in every),
                    "cause": min(RankExit(*each["cause"]) for each in every),
                    "newest": [int(number) for number in every[0]["newest"]]}
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        print_safely("warning: no restart, because another machine does not answer "
                     f"({(str(error).splitlines() or [''])[0]:.200})", sys.stderr)
    return {**state, "again": False}


def record_cause(ending: Ending) -> None:
    """Write a failure that began on this machine into the run's events: rank 0 may know only its effect."""
    cause = ending.cause
    if not (ending.run_folder and cause) or cause.is_secondary or cause.code == process.EXIT_PREEMPTED:
        return
    path = ending.run_folder / "events.jsonl"
    with suppress(OSError, CheckpointError, IndexError):
        last = [*read_entries(path)][-1]
        if last.get("reason") != cause.sentence:
            line = {"time": time.time(), "step": last["step"], "event": "end", "reason": cause.sentence}
            with open(path, "ab", opener=plain) as file:
                file.write(json.dumps(line).encode() + b"\n")


class Job:
    """A job that starts again after a crash or a hang. scripts/launch.py defines how it starts."""

    def __init__(self, config: Config, flags: list[str], most_restarts: int, ranks: int):
        self.config, self.flags, self.most, self.ranks = config, flags, most_restarts, ranks

    def start(self, number: int, flags: list[str]) -> Ending:
        """Start the ranks, wait for them, and return how they ended."""
        raise NotImplementedError

    def agree(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of all machines."""
        return state

    def run(self) -> tuple[Ending, str]:
        """Run the job; return the ending to report, and words about restarts."""
        config, flags, folder, cause, words = self.config, self.flags, None, "", ""
        resumes = config.run_name and config.resume != "never"
        newest = newest_checkpoint(Path(config.output_dir, config.run_name) if resumes else None)
        idle: list[Ending] = []  # the last starts, if they saved no checkpoint
        number = 0
        while True:
            os.environ[process.RESTART] = json.dumps({"restart": number, "cause": cause})
            ending = self.start(number, flags)
            record_cause(ending)
            if ending.cause is None or not self.most:
                return ending, words
            folder = ending.run_folder or folder
            may_recover = ending.cause.code in RESTARTED and not ending.stopped
            again = may_recover and number < self.most
            state = self.agree(number, {"again": again, "cause": ending.cause,
                                        "newest": newest_checkpoint(folder)})
            idle = [] if state["newest"] > newest else [*idle, ending]
            newest = max(newest, state["newest"])
            if may_recover and len(idle) == IDLE_STARTS:
                return idle[0], f"{IDLE_STARTS} starts in a row saved no checkpoint"
            if not state["again"]:
                return ending, words

            # The next start resumes what this one wrote, whatever RUN_NAME and RESUME the job started with.
            if folder:
                flags = [*self.flags, f"--run-name={folder.name}"]
                if folder.parent != Path(config.output_dir).absolute():
                    flags.append(f"--output-dir={folder.parent}")
                if config.resume == "never" or Path(config.resume).absolute().is_relative_to(folder):
                    flags.append("--resume=auto")
            number, cause = number + 1, RankExit(*state["cause"]).sentence
            words = f"restarted {counted(number, 'time')}"
            place = f"step {newest[1]}" if newest[0] else "the beginning"
            print_safely(f"warning: {self.describe(ending)}. Restart {number} of {self.most} from {place}",
                         sys.stderr)

    def describe(self, ending: Ending, words: str = "") -> str:
        """Return a sentence about a failure; print its details, unless a rank's output showed them."""
        cause = ending.cause
        on_console = cause.rank % self.ranks == 0 or self.config.log_all_ranks
        if cause.trace and not (on_console and cause.code == 1):
            print_safely(cause.trace, sys.stderr)
        names_rank = cause.sentence.startswith(("rank", "hang")) or not ending.where
        sentence = cause.sentence if names_rank else f"rank {cause.rank}: {cause.sentence}"
        return f"{sentence}{words and f'; {words}'}{ending.where}"
