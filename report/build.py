"""The page's data: one or several runs, their charts and comparison, in less than a page may have."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report.charts import charts
from report.compare import comparison
from report.curves import points_per_curve
from report.run_data import RunReader

FORMAT = 1
BYTES_OF_CURVES = 620_000  # of the million that a page may have
BYTES_PER_POINT = 17  # of JSON: a step and a value of six digits, rarely more


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
        curves = {name: curve for run in self.runs for name, curve in run.curves.items()}
        lengths = [len(curve) for run in self.runs for curve in run.curves.values()]
        most = points_per_curve(lengths, BYTES_OF_CURVES // BYTES_PER_POINT)
        last = {name: curve.last() for name, curve in curves.items()}
        return {"format": FORMAT, "title": " and ".join(run.name for run in self.runs),
                "generated": time.time(), "live": live, "runs": [run.data(most) for run in self.runs],
                "charts": charts(curves, last, self.runs[0].settings.get("HELLASWAG_NAME", "HellaSwag")),
                "comparison": comparison(self.runs)}


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The names of the folders, with as many parents as make them distinct."""
    parts = [Path(folder).absolute().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({number})" for number, part in enumerate(parts, 1)]


def as_text(data: dict[str, Any]) -> str:
    """The page's data as JSON, in which everything is finite."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
