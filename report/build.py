"""The page's data: one or several runs, their charts and comparison, in less than a page may have."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report.charts import charts
from report.compare import comparison
from report.curves import FEWEST_POINTS, points_per_curve
from report.run_data import RunReader

FORMAT = 1
MOST_BYTES = 800_000  # of the million that a page may have
MOST_POINTS = 40_000  # of all curves together
MOST_RUNS = 4  # of which all settings are listed


class Report:
    """One or several runs; `read` reads what is new, `data` gives the page's data.

    Raises:
        CheckpointError: a folder is no run, or cannot be read.
    """

    def __init__(self, folders: Sequence[Path]):
        self.runs = [RunReader(folder, name) for folder, name in zip(folders, distinct_names(folders))]

    def read(self) -> None:
        """Read what is new. Raises CheckpointError if a file cannot be read."""
        for run in self.runs:
            run.read()

    def signature(self) -> tuple:
        """What differs when a run has written something, or has ended."""
        return tuple(run.signature() for run in self.runs)

    def data(self, live: bool = False) -> dict[str, Any]:
        """The page's data, as JSON; docs/contracts.md describes it."""
        last = {name: run.value(name) for run in self.runs for name in run.curves}
        made = {"format": FORMAT, "title": " and ".join(run.name for run in self.runs),
                "generated": time.time(), "live": live, "runs": [],
                "charts": charts(last, self.runs[0].settings.get("HELLASWAG_NAME", "HellaSwag")),
                "comparison": comparison(self.runs)}
        lengths = [len(curve) for run in self.runs for curve in run.curves.values()]
        share, all_settings, budget = 1 / len(self.runs), len(self.runs) <= MOST_RUNS, MOST_POINTS
        while True:
            most = points_per_curve(lengths, budget)
            made["runs"] = [run.data(most, share, all_settings) for run in self.runs]
            if most <= FEWEST_POINTS or len(as_text(made).encode()) <= MOST_BYTES:
                return made
            budget = budget * 2 // 3


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, with as many parents as make them distinct."""
    parts = [Path(folder).absolute().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({number})" for number, part in enumerate(parts, 1)]


def as_text(data: dict[str, Any]) -> str:
    """The page's data as JSON, in which everything is finite and Unicode."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()  # a folder's name may be no Unicode
