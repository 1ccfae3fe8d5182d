"""The power trace of a run, power.csv, on one time axis with the marks of the phases."""

from collections import deque
from pathlib import Path
from typing import Any, Optional

import numpy as np

from checkpoint.schema import MOST_SECONDS
from report.curves import Curve, rounded
from report.lines import GrowingFile, signature

MOST_VALUES = 12_000  # of all GPUs together
MOST_WATTS = 1e9
MOST_MARKS = 1000  # the newest
COLUMNS = ("time", "gpu", "watts", "phase", "step")
FAST_SECONDS = 0.3  # samples that are closer than this belong to a window of POWER_HZ


class PowerTrace:
    """The power files of a run, read as they grow; of a long trace, each bucket of time keeps its extremes.

    Windows of fast samples have buckets of their own, so that they stay sharp in a trace of days.
    """

    def __init__(self, folder: Path):
        self.folder, self.files, self.found = folder, {}, ()
        self._restart()

    def _restart(self) -> None:
        self.start: Optional[float] = None
        self.gpus: dict[str, tuple[Curve, Curve]] = {}  # slow and fast samples; x in ms since the start
        self.before: dict[str, float] = {}  # the time of each GPU's last sample
        self.marks: deque = deque(maxlen=MOST_MARKS)
        self.waiting: dict[tuple[str, bool], list[tuple[int, float]]] = {}  # not in the curves yet

    def paths(self) -> list[Path]:
        """The power files, oldest first: ..., power.1.csv, power.csv, then those of other ranks."""
        def order(path: Path) -> tuple[str, int]:
            stem, _, number = path.stem.partition(".")
            return stem, -int(number) if number.isdecimal() else 0

        return sorted(self.folder.glob("power*.csv"), key=order)

    def read(self) -> None:
        """Read what is new; everything again if a file was rotated. Raises CheckpointError."""
        paths = self.paths()
        found = signature(paths, contents=False)
        if self.found != found:
            self.found = found
            self._restart()
            self.files = {path: self._file(path) for path in paths}
        for file in self.files.values():
            file.read()
            for (gpu, is_fast), points in self.waiting.items():
                x, y = zip(*sorted(points))
                self.gpus[gpu][is_fast].add(x, np.array(y))
            self.waiting = {}

    def _file(self, path: Path) -> GrowingFile:
        rank = path.stem.partition(".")[0].removeprefix("power").removeprefix("-rank-")
        columns: list[str] = []

        def add(line: bytes) -> None:
            values = line.decode(errors="replace").rstrip("\r\n").split(",")
            if values[0] == "time":
                columns[:] = values
            elif len(values) != len(columns) or not {*COLUMNS} <= {*columns}:
                raise ValueError("not the columns of a trace")
            else:
                self._add(dict(zip(columns, values)), rank)

        def restart() -> None:
            columns.clear()

        return GrowingFile(path, restart, add)

    def _add(self, row: dict[str, str], rank: str) -> None:
        time, step, watts = float(row["time"]), int(row["step"] or 0), float(row["watts"] or "0")
        if not (abs(time) < MOST_SECONDS and 0 <= step < 1 << 53 and abs(watts) < MOST_WATTS):
            raise ValueError("not a time, a step and a power")
        watts = watts if row["watts"] else np.nan
        self.start = time if self.start is None else self.start
        if not row["gpu"]:
            self.marks.append([round(time - self.start, 6), row["phase"], step])
            return
        device = f"GPU {row['gpu']}" if row["gpu"].isdecimal() else row["gpu"]
        gpu = f"rank {rank}, {device}" if rank else row["gpu"]
        self.gpus.setdefault(gpu, (Curve(), Curve()))
        is_fast = time - self.before.get(gpu, -np.inf) < FAST_SECONDS
        self.before[gpu] = time
        self.waiting.setdefault((gpu, is_fast), []).append((round(1000 * (time - self.start)), watts))

    def data(self, share: float = 1.0) -> Optional[dict[str, Any]]:
        """The trace as in the page's data; None without a sample.

        Args:
            share: of the values and marks that a page may have.
        """
        if not self.gpus:
            return None
        most = max(4, round(share * MOST_VALUES / 2 / len(self.gpus)))
        rows = sorted((*self._rows(False, most), *self._rows(True, most)), key=lambda row: row[0])
        columns = {gpu: [rounded(row[number]) for row in rows] for number, gpu in enumerate(self.gpus, 1)}
        return {"files": [path.name for path in self.files], "start": self.start,
                "time": [round(row[0] / 1000, 3) for row in rows], "gpus": columns,
                "marks": [*self.marks][-round(share * MOST_MARKS):]}

    def _rows(self, fast: bool, most: int) -> list[list[float]]:
        """(ms, watts of each GPU) of the slow or the fast samples: of a bucket one row, or its extremes."""
        curves = [pair[fast] for pair in self.gpus.values()]
        points = [curve.points(most) for curve in curves]
        spans = [np.ptp(each.x) for each in points if len(each.x)]
        width = max([1.0, *(2 * span / most for span in spans)])
        buckets: dict[int, list[list]] = {}
        for gpu, each in enumerate(points):
            for x, low, high in np.stack((each.x, each.low, each.high), 1).tolist():
                inside = buckets.setdefault(int(x // width), [[] for _ in curves])[gpu]
                inside += [(x, low), (x, high)] if low < high else [(x, low)]
        rows = []
        for number, inside in buckets.items():
            first = min(x for own in inside for x, _ in own)
            several = max(map(len, inside)) > 1
            kept = [_extremes(own) for own in inside]
            rows.append((first, *(pair[0] for pair in kept)))
            if several:
                rows.append(((first + (number + 1) * width) / 2, *(pair[1] for pair in kept)))
        if not rows:
            return []
        table = np.array(sorted(rows))
        for column in table.T[1:]:
            _fill(table[:, 0], column)
        return table.tolist()


def _fill(time: np.ndarray, watts: np.ndarray) -> None:
    """Interpolate where only other GPUs have a sample, but not where this one was not sampled for longer."""
    known = np.isfinite(watts)
    if known.sum() < 2:
        return
    at = time[known]
    after = np.searchsorted(at, time).clip(1, len(at) - 1)
    inside = (time >= at[0]) & (time <= at[-1]) & (np.diff(at)[after - 1] <= 3 * np.median(np.diff(at)))
    watts[:] = np.where(known | ~inside, watts, np.interp(time, at, watts[known]))


def _extremes(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The lowest and the highest value in the order of time, twice the same of one, NaN of none."""
    finite = [(x, y) for x, y in points if y == y]
    if not finite:
        return np.nan, np.nan
    pair = sorted((min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])))
    return pair[0][1], pair[1][1]
