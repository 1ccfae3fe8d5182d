"""Experiment trackers for a run's metrics, samples and report: wandb, TensorBoard, trackio and mlflow."""

import os
import queue
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

from common.errors import PaddockError, requires_package
from common.text import once, without_passwords
from config import Config
from parallel.process import STUCK
from run.extensions import Extension
from run.log import RunLog
from run.run import Run

Rows = Sequence[Sequence[Any]]


class Trackers(Extension):
    """Sends what rank 0 logs to the trackers that are enabled."""

    def run_start(self, run: Run) -> None:
        if run.ranks.is_rank0:
            run.log.trackers = start_trackers(run.log, run.progress.wandb_run_id)


EXTENSION = Trackers


def start_trackers(log: RunLog, run_id: str) -> list["Tracker"]:
    """Start the trackers that the settings of an open log enable."""
    config, folder, step = log.config, log.run_dir, log.complete
    logged = log.previous["previous_step"] if step >= 0 else None  # by the run that is resumed
    services = {"wandb": (config.wandb_enabled, lambda: Wandb(config, folder, run_id)),
                "TensorBoard": (config.tensorboard_enabled, lambda: TensorBoard(folder, step)),
                "trackio": (config.trackio_enabled, lambda: Trackio(config, folder, run_id, logged)),
                "mlflow": (config.mlflow_enabled, lambda: Mlflow(config, folder, run_id, logged))}
    return [Tracker(name, start, log.warn) for name, (enabled, start) in services.items() if enabled]


class Tracker:
    """Runs a service like `Wandb` in a thread, where it may hang. Its first error switches it off."""

    def __init__(self, name: str, start: Callable[[], Any], warn: Callable[[str], None]):
        self.name, self.start = name, start
        self.warn = once(warn)  # a service that did not finish may still fail later
        self.note: Optional[str] = None  # printed at the end of the run
        self.waiting: queue.Queue[tuple] = queue.Queue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            service, call = self.start(), ""
            while call != "finish":
                call, *arguments = self.waiting.get()
                self.note = getattr(service, call)(*arguments)
        except BaseException as error:  # even SystemExit from a tracker must not end the run
            kind = "" if isinstance(error, PaddockError) else f"{type(error).__name__}: "
            self._give_up(f"{self.name} is off for the rest of this run: {kind}{str(error)[:200]}")

    def send(self, call: str, *arguments: Any) -> None:
        """Queue a call of one of the service's methods without waiting for it."""
        if self.thread.is_alive():
            self.waiting.put((call, *arguments))

    def close(self, run_dir: Path, timeout_seconds: float) -> None:
        self.send("finish", run_dir)
        self.thread.join(timeout_seconds)
        if self.thread.is_alive():
            self._give_up(f"{self.name} did not finish in {timeout_seconds:.0f} s; metrics.jsonl is complete")

    def _give_up(self, why: str) -> None:
        STUCK.add(self.name)
        self.warn(why)


def project() -> str:
    return os.environ.get("WANDB_PROJECT", "paddock")


class Wandb:
    """A wandb run: WANDB_MODE if set, else online with an API key and offline without."""

    last_step = -1  # earlier steps are not logged again; wandb itself skips those that it has

    def __init__(self, config: Config, run_dir: Path, run_id: str):
        with requires_package("wandb", "WANDB_ENABLED=true"):
            import wandb
        # wandb copies tables and artifacts there; the default is in the home folder, which may be read-only.
        os.environ.setdefault("WANDB_DATA_DIR", str(run_dir.absolute() / "wandb"))
        default_mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self.mode = os.environ.get("WANDB_MODE") or default_mode
        settings = wandb.Settings(init_timeout=30, finish_timeout=45, console="off", silent=True)
        self.module, given = wandb, sys.argv
        sys.argv = [*map(without_passwords, given)]  # which wandb writes into a file
        try:
            self.run = wandb.init(project=project(), name=run_dir.name, id=run_id, resume="allow",
                                  dir=run_dir, config=config.public(), mode=self.mode, settings=settings)
        finally:
            sys.argv = given

    def log(self, values: dict[str, Any], step: int) -> None:
        if step > self.last_step:
            self.run.log(values, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        self.log({name: self.module.Table(columns=[*columns], data=[*rows])}, step)

    def report(self, path: Path) -> None:
        artifact = self.module.Artifact(f"report-{self.run.id}", "report")
        artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    def finish(self, run_dir: Path) -> Optional[str]:
        """Finish the run; return how to upload it if it is offline."""
        self.run.finish()
        if self.mode != "offline":
            return None
        sync = shlex.join([str(Path(sys.executable).parent / "wandb"), "sync", str(run_dir.absolute())])
        return f"Upload to wandb: {sync}/wandb/offline-run-*"


class Trackio(Wandb):
    """A trackio run, stored locally unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

    mode = "local"

    def __init__(self, config: Config, run_dir: Path, run_id: str, last_step: Optional[int]):
        with requires_package("trackio", "TRACKIO_ENABLED=true"):
            import trackio
        self.module, self.run_id = trackio, run_id
        self.last_step = -1 if last_step is None else last_step  # trackio would show repeated steps twice
        # trackio finds a run only by this name.
        self.run = trackio.init(project=project(), name=f"{run_dir.name}-{run_id}", resume="allow",
                                config=config.public(), embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def report(self, path: Path) -> None:
        self.run.log_artifact(path, name=f"report-{self.run_id}", type="report")


class Mlflow(Wandb):
    """An mlflow run, stored where MLFLOW_TRACKING_URI says."""

    def __init__(self, config: Config, run_dir: Path, run_id: str, last_step: Optional[int]):
        with requires_package("mlflow", "MLFLOW_ENABLED=true"):
            from mlflow import MlflowClient
        self.client, self.last_step = MlflowClient(), -1 if last_step is None else last_step
        known = self.client.get_experiment_by_name(project())
        experiment = known.experiment_id if known else self.client.create_experiment(project())
        runs = self.client.search_runs([experiment], f"tags.paddock_run = '{run_id}'")
        run = runs[0] if runs else self.client.create_run(
            experiment, run_name=run_dir.name, tags={"paddock_run": run_id})
        self.id = run.info.run_id
        for name, value in {} if runs else config.public().items():  # mlflow refuses to change them
            self.client.log_param(self.id, name, str(value)[:500])

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items() if step > self.last_step else ():
            self.client.log_metric(self.id, name, value, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        if step > self.last_step:  # the table's earlier rows stay
            data = {column: [*cells] for column, cells in zip(columns, zip(*rows))}
            self.client.log_table(self.id, data, f"{name}.json")

    def report(self, path: Path) -> None:
        self.client.log_artifact(self.id, str(path))

    def finish(self, run_dir: Path) -> None:
        self.client.set_terminated(self.id)


class TensorBoard:
    """TensorBoard event files in the run's folder."""

    def __init__(self, run_dir: Path, step: int):
        with requires_package("tensorboard", "TENSORBOARD_ENABLED=true"):
            from torch.utils.tensorboard import SummaryWriter

        # On a full disk its thread dies with a traceback. Hide it: the next call raises the same error.
        show = threading.excepthook
        threading.excepthook = lambda death: (type(death.thread).__module__.startswith("tensorboard.")
                                              or show(death))
        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def table(self, name: str, columns: Sequence[str], rows: Rows, step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def report(self, path: Path) -> None:
        """Do nothing: TensorBoard cannot store reports."""

    def finish(self, run_dir: Path) -> None:
        self.writer.close()
