"""Merge a run's power files into one trace of all GPUs, with more detail where samples are dense."""

from collections import deque
from pathlib import Path
from typing import Any, Optional

import numpy as np

from checkpoint.schema import MOST_SECONDS, LogFile
from report.curves import Curve, rounded

MOST_VALUES = 12_000  # over all GPUs
MOST_WATTS = 1e9
MOST_MARKS = 1000  # newest phase marks
COLUMNS = {"time", "gpu", "watts", "phase", "step"}
FAST_SECONDS = 0.3  # samples closer than this come from a POWER_STEPS window


class PowerTrace:
    """The power files of a run, read incrementally. Long traces keep the extremes of each time bucket.

    Fast samples have separate buckets, so they keep their detail in a trace of several days.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._restart([])

    def _restart(self, paths: list[Path]) -> None:
        self.files = [LogFile(path) for path in paths]
        self.columns: dict[Path, list[str]] = {}  # from each file's header
        self.start: Optional[float] = None
        self.gpus: dict[str, tuple[Curve, Curve]] = {}  # slow and fast samples; x in ms since the start
        self.before: dict[str, float] = {}  # time of each GPU's previous sample
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
            samples: dict[tuple[str, bool], list[tuple[int, float]]] = {}
            for line in file.new_lines():
                try:
                    self._add(file.path, line.decode(errors="replace").rstrip("\r\n").split(","), samples)
                except ValueError:
                    file.invalid += 1
            for (gpu, is_fast), points in samples.items():
                x, y = zip(*sorted(points))
                self.gpus[gpu][is_fast].add(x, np.array(y))

    def _add(self, path: Path, values: list[str],
             samples: dict[tuple[str, bool], list[tuple[int, float]]]) -> None:
        """Process a header, mark or sample line; append a sample to `samples`."""
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
        self.gpus.setdefault(gpu, (Curve(), Curve()))
        is_fast = time - self.before.get(gpu, -np.inf) < FAST_SECONDS
        self.before[gpu] = time
        point = round(1000 * (time - self.start)), watts if row["watts"] else np.nan
        samples.setdefault((gpu, is_fast), []).append(point)

    def data(self, share: float = 1.0) -> Optional[dict[str, Any]]:
        """Return the trace for the page's data, within this share of the limits; None without samples."""
        if not self.gpus:
            return None
        most = max(4, round(share * MOST_VALUES / 2 / len(self.gpus)))
        rows = sorted((*self._rows(False, most), *self._rows(True, most)), key=lambda row: row[0])
        columns = {gpu: [rounded(row[number]) for row in rows] for number, gpu in enumerate(self.gpus, 1)}
        return {"files": [file.path.name for file in self.files], "start": self.start,
                "time": [round(row[0] / 1000, 3) for row in rows], "gpus": columns,
                "marks": [*self.marks][-round(share * MOST_MARKS):]}

    def _rows(self, fast: bool, most: int) -> list[list[float]]:
        """Return (ms, watts of each GPU) for slow or fast samples, with one or two rows per bucket."""
        points = [pair[fast].points(most) for pair in self.gpus.values()]
        width = max([1.0, *(2 * np.ptp(each.x) / most for each in points if len(each.x))])
        buckets: dict[int, list[list[tuple[float, float]]]] = {}  # (ms, watts) of each GPU
        for gpu, each in enumerate(points):
            for x, low, high in np.stack((each.x, each.low, each.high), 1).tolist():
                samples = buckets.setdefault(int(x // width), [[] for _ in points])[gpu]
                samples += [(x, low), (x, high)] if low < high else [(x, low)]

        rows = []
        for index, samples in buckets.items():
            first = min(x for of_gpu in samples for x, _ in of_gpu)
            kept = [_extremes(of_gpu) for of_gpu in samples]
            rows.append((first, *(pair[0] for pair in kept)))
            if max(map(len, samples)) > 1:
                rows.append(((first + (index + 1) * width) / 2, *(pair[1] for pair in kept)))
        if not rows:
            return []

        # Interpolate where only other GPUs have a sample, except in long gaps.
        table = np.array(sorted(rows))
        time = table[:, 0]
        for watts in table.T[1:]:
            known = np.isfinite(watts)
            if known.sum() < 2:
                continue
            at = time[known]
            after = np.searchsorted(at, time).clip(1, len(at) - 1)
            gaps = np.diff(at)
            inside = (time >= at[0]) & (time <= at[-1]) & (gaps[after - 1] <= 3 * np.median(gaps))
            watts[:] = np.where(known | ~inside, watts, np.interp(time, at, watts[known]))
        return table.tolist()


def _extremes(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the lowest and highest value in chronological order, or NaN without finite values."""
    finite = [(x, y) for x, y in points if y == y]
    if not finite:
        return np.nan, np.nan
    (_, first), (_, last) = sorted((min(finite, key=lambda point: point[1]),
                                    max(finite, key=lambda point: point[1])))
    return first, last
