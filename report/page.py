"""A report: its data, of one or several runs, and the one HTML page that shows them.

No request leaves the page, and no text of a run is read as HTML or code. uPlot 1.6.32 draws the charts
(`assets/uPlot.*`: `dist/` and LICENSE of the npm package `uplot`, unmodified, MIT) on a canvas; what
keyboards and screen readers need (a slider, a sentence and a table for each chart) is in `assets/chart.js`.
"""

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report.compare import comparison
from report.curves import FEWEST_POINTS, charts, points_per_curve
from report.data import RunReader

ASSETS = Path(__file__).parent / "assets"
FORMAT = 1
MOST_BYTES = 800_000  # of the million that a page may have
MOST_POINTS = 40_000  # of all curves together
MOST_RUNS = 4  # of which all settings are listed


class Report:
    """One or several runs; `read` reads what is new, `data` gives the page's data."""

    def __init__(self, folders: Sequence[Path]):
        self.runs = [RunReader(folder, name) for folder, name in zip(folders, distinct_names(folders))]

    def read(self) -> None:
        for run in self.runs:
            run.read()

    def signature(self) -> tuple:
        """What differs when a run has written something, or has ended."""
        return tuple(run.signature() for run in self.runs)

    def data(self, live: bool = False) -> dict[str, Any]:
        """The page's data, as JSON; docs/contracts.md describes it."""
        last = {name: run.value(name) for run in self.runs for name in run.curves}
        names = [run.name for run in self.runs]
        made = {"format": FORMAT, "title": " and ".join(names) if len(names) < 3 else f"{len(names)} runs",
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
    return text.encode("utf-8", "replace").decode()  # a folder's name may not be Unicode


def render(data: dict[str, Any], live: bool = False) -> str:
    """Return the whole page of a report's data.

    Args:
        live: the page also listens to server-sent events at `events`, and redraws at each event `data`.
    """
    style, library = join_assets("uPlot.min.css", "base.css", "page.css"), join_assets("uPlot.iife.min.js")
    script = join_assets("elements.js", "chart.js", "export.js", "page.js", *["live.js"] * live)
    policy = (f"default-src 'none'; script-src {csp_hash(library)} {csp_hash(script)}; "
              f"style-src {csp_hash(style)}; img-src data:; "
              f"connect-src '{'self' if live else 'none'}'; base-uri 'none'; form-action 'none'")

    # What is left without JavaScript: how each run stands, and the last value of each curve.
    runs = data["runs"]
    rows = [["", *(run["name"] for run in runs)], ["state", *(run["sentence"] for run in runs)]]
    for chart in data["charts"]:
        for line in chart["series"]:
            curves = [run["curves"].get(line["curve"], {"y": []})["y"] for run in runs]
            values = [[value for value in curve if value is not None] for curve in curves]
            rows.append([f"{chart['title']}: {line['label']}",
                         *(f"{each[-1]:,.4g}" if each else "" for each in values)])
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    table = f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    # JSON that cannot end the element that it stands in.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    text = text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})
    parts = {"policy": policy, "title": html.escape(data["title"]), "style": style, "library": library,
             "script": script, "live": str(live).lower(), "table": table, "data": text}
    return fill_template(join_assets("page.html"), parts).encode("utf-8", "replace").decode()


def join_assets(*paths: str | Path) -> str:
    """Return the texts of these files one after another; a relative path lies in `assets/`."""
    return "".join((ASSETS / path).read_text(encoding="utf-8") for path in paths)


def fill_template(template: str, parts: dict[str, str]) -> str:
    """Return the template with each `{name}` replaced by its part."""
    return re.sub(r"\{(\w+)\}", lambda name: parts[name[1]], template)


def csp_hash(text: str) -> str:
    """Return what a Content-Security-Policy says to allow this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
