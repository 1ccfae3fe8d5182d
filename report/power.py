"""Merge a run's power files into one trace of all GPUs, with more detail where samples are dense."""

from collections import deque
from pathlib import Path
from typing import Any, Optional

import numpy as np

from checkpoint.schema import MOST_SECONDS, LogFile
from report.curves import Curve, Points, as_json

MOST_POINTS = 8000  # over all GPUs
MOST_WATTS = 1e9
MOST_MARKS = 1000  # newest phase marks
COLUMNS = {"time", "gpu", "watts", "phase", "step"}
FAST_SECONDS = 0.3  # samples closer than this come from a POWER_STEPS window
GAP_SECONDS = 60  # a longer silence is a gap, unless the samples are as rare


class PowerTrace:
    """The power files of a run, read incrementally; fast samples keep their detail in separate curves."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._restart([])

    def _restart(self, paths: list[Path]) -> None:
        self.files = [LogFile(path) for path in paths]
        self.columns: dict[Path, list[str]] = {}  # from each file's header
        self.start: Optional[float] = None
        self.gpus: dict[str, tuple[Curve, Curve]] = {}  # slow and fast samples; x in ms since the start
        self.before: dict[str, tuple[float, float]] = {}  # each GPU's last time, and interval
        self.marks: deque = deque(maxlen=MOST_MARKS)

    def paths(self) -> list[Path]:
        """Return the power files: ..., power.1.csv, power.csv, then other ranks' files."""
        def order(path: Path) -> tuple[str, int]:
            stem, _, number = path.stem.partition(".")
            return stem, -int(number) if number.isdecimal() else 0

        return sorted(self.folder.glob("power*.csv"), key=order)

    def read(self) -> None:
        """Read new lines, or all files again if one was rotated."""
        paths = self.paths()
        if [file.path for file in self.files] != paths or any(file.is_replaced() for file in self.files):
            self._restart(paths)
        for file in self.files:
            for line in file.new_lines():
                try:
                    self._add(file.path, line.decode(errors="replace").rstrip("\r\n").split(","))
                except ValueError:
                    file.invalid += 1

    def _add(self, path: Path, values: list[str]) -> None:
        """Process a header, mark or sample line."""
        if values[0] == "time":
            self.columns[path] = values
            return
        columns = self.columns.get(path, [])
        if len(values) != len(columns) or not COLUMNS <= {*columns}:
            raise ValueError("not the columns of a trace")
        row = dict(zip(columns, values))
        time, step, watts = float(row["time"]), int(row["step"] or 0), float(row["watts"] or "0")
        if not (abs(time) < MOST_SECONDS and 0 <= step < 1 << 53 and abs(watts) < MOST_WATTS):
            raise ValueError("not a time, a step and a power")
        self.start = time if self.start is None else self.start
        gpu = row["gpu"]
        if not gpu:
            self.marks.append([round(time - self.start, 6), row["phase"], step])
            return
        if rank := path.stem.partition(".")[0].removeprefix("power").removeprefix("-rank-"):
            gpu = f"rank {rank}, GPU {gpu}" if gpu.isdecimal() else f"rank {rank}, {gpu}"
        slow, fast = self.gpus.setdefault(gpu, (Curve(), Curve()))
        before, interval = self.before.get(gpu, (-np.inf, np.inf))
        self.before[gpu] = time, time - before
        if time - before > max(GAP_SECONDS, 10 * interval):
            slow.add(round(1000 * ((before + time) / 2 - self.start)), None)
        curve = fast if time - before < FAST_SECONDS else slow
        curve.add(round(1000 * (time - self.start)), watts if row["watts"] else None)

    def data(self, share: float = 1.0) -> Optional[dict[str, Any]]:
        """Return the trace for the page's data, within this share of the limits; None without samples."""
        if not self.gpus:
            return None
        most = max(4, round(share * MOST_POINTS / 2 / len(self.gpus)))
        gpus = {}
        for gpu, pair in self.gpus.items():
            points = np.concatenate([curve.points(most) for curve in pair], axis=1)
            gpus[gpu] = as_json(Points(*points[:, points[0].argsort(kind="stable")]))
        return {"start": self.start, "gpus": gpus, "marks": [*self.marks][-round(share * MOST_MARKS):]}
