"""The runs of a sweep or a comparison: train.py in new processes, one at a time on each GPU."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Optional

from common.errors import SettingsError
from common.text import ROOT, duration, show
from config import KIND_OF_STAGE, START_FROM, Config
from data_pipeline.shards import KINDS
from extensions.preparation import is_source
from extensions.preparation_flags import prepare_from_flags
from extensions.report.data import RunReader
from parallel.process import EXIT_PREEMPTED, STOP_SIGNALS, VISIBLE
from plan.make import make_plan

FAILED_ALONE = {1, 4, 6}  # exit codes after which the other runs continue: crash, non-finite loss, hang


class Trial(NamedTuple):
    """A run, which may not exist yet, and the flags with which train.py trains it."""

    folder: Path
    flags: list[str]

    @property
    def name(self) -> str:
        return self.folder.name

    def reader(self) -> Optional[RunReader]:
        """Return the run as far as it is, or None before its start."""
        if not (self.folder / "config.json").is_file():
            return None
        reader = RunReader(self.folder, self.name)
        reader.read()
        return reader


def parse_vary(given: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the names and values of --vary NAME=VALUE,VALUE."""
    varied = [(name.strip().lower().replace("-", "_"), [*filter(None, map(str.strip, values.split(",")))])
              for name, _, values in (each.partition("=") for each in given)]
    if empty := [name for name, values in varied if not values]:
        raise SettingsError(f"--vary {empty[0]} has no values; write --vary LEARNING_RATE=1e-3,3e-3")
    return varied


def as_flags(settings: Mapping[str, object]) -> list[str]:
    return [f"--{setting.replace('_', '-')}={value}" for setting, value in settings.items()]


def slug_of(words: Iterable[str]) -> str:
    """Return a name of a run."""
    return re.sub(r"[^\w.-]", "-", ".".join(words))


def make_trial(folder: Path, flags: Sequence[str], chosen: Mapping[str, object]) -> Trial:
    """Return the run in this folder with these flags and settings; raise if one is invalid."""
    chosen = {**chosen, "output_dir": folder.parent, "run_name": folder.name}
    flags = [*flags, *as_flags(chosen)]
    settings = make_plan(flags).config
    for setting in (*START_FROM, "teacher_model", "tokenizer_path"):  # a run beside the folder of these
        if (named := getattr(settings, setting)) and (folder.parent.parent / named).is_dir():
            flags += as_flags({setting: folder.parent.parent / named})
    return Trial(folder, flags)


def prepared_once(config: Config, flags: Sequence[str]) -> list[str]:
    """Prepare data that the settings name as a source, once for all runs; return the flag that names it."""
    kind = KIND_OF_STAGE[config.training_stage]
    data = os.path.expanduser(config.data_path or "")
    if not is_source(kind, data):
        return []
    prepared = prepare_from_flags(kind, [*flags, "--source", data])
    return [f"--{KINDS[kind][0].lower().replace('_', '-')}={prepared}"]


def gpus_of(config: Config) -> list[Optional[str]]:
    """Return the GPUs that train a run each; None for the device that the settings name."""
    import torch

    visible = os.environ.get(VISIBLE, "").split(",")
    gpus = [visible[place] if visible[0] else str(place) for place in range(torch.cuda.device_count())]
    return [None] if config.device == "cpu" or len(gpus) < 2 else gpus


class Fleet:
    """Runs, and the processes that train them."""

    def __init__(self, gpus: Sequence[Optional[str]], quiet: bool = False):
        self.gpus, self.quiet = gpus, quiet or len(gpus) > 1
        self.processes: list[subprocess.Popen] = []
        self.failed: dict[str, int] = {}
        self.received: Optional[int] = None  # a stop signal
        self.seconds: list[float] = []
        for stop in STOP_SIGNALS:
            signal.signal(stop, self.stop)

    def train(self, trials: Sequence[Trial], done: int = 0) -> None:
        """Train these runs, one at a time on each GPU; `done` others were trained before."""
        waiting, total = iter([*enumerate(trials, 1 + done)]), done + len(trials)
        threads = [threading.Thread(target=self.work, args=(waiting, total, gpu), daemon=True)
                   for gpu in self.gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)  # with a timeout, so that signals are handled in between

    def stop(self, received: int, frame) -> None:
        self.received = received
        for process in self.processes:  # those that have ended get no signal
            process.send_signal(signal.SIGTERM)

    def work(self, waiting: Iterator[tuple[int, Trial]], total: int, gpu: Optional[str]) -> None:
        for position, trial in waiting:  # which the threads share
            if self.received is not None or not {*self.failed.values()} <= FAILED_ALONE:
                return
            where, rounds = f" on GPU {gpu}" if gpu else "", 1 + (total - position) / len(self.gpus)
            left = f", about {duration(fmean(self.seconds) * rounds)} left" if self.seconds else ""
            show(f"=== {position}/{total} {trial.name}{where}{left}")
            started = time.monotonic()
            # A separate session, so that Ctrl-C reaches the run only once, through `stop`.
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *trial.flags], start_new_session=True,
                env=os.environ | ({VISIBLE: gpu} if gpu else {}),
                stdout=subprocess.DEVNULL if self.quiet else None)
            self.processes.append(process)
            if self.received is not None:
                process.send_signal(signal.SIGTERM)
            code = process.wait()
            self.seconds.append(time.monotonic() - started)
            if code == EXIT_PREEMPTED:
                self.received = self.received or signal.SIGTERM  # the run itself was stopped
            elif code:
                self.failed[trial.name] = code
                show(f"{trial.name} failed with exit code {code}; see {trial.folder / 'log'}")
