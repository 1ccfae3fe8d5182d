"""The report: data of one or several runs, and a single HTML page that shows it.

The page makes no external requests, and never interprets a run's text as HTML or code. uPlot 1.6.32 draws the
charts on a canvas (`assets/uPlot.*`: unmodified `dist/` and LICENSE of the npm package `uplot`, MIT). For
keyboards and screen readers, `assets/chart.js` adds a slider, a sentence and a table to each chart.
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

from extensions.report.compare import choice_name, comparison
from extensions.report.curves import FEWEST_POINTS, charts, points_per_curve
from extensions.report.data import RunReader

ASSETS = Path(__file__).parent / "assets"
FORMAT = 1
MOST_BYTES = 800_000  # of data; the page is limited to 1 MB
MOST_POINTS = 24_000  # over all curves
MOST_RUNS = 4  # with more, list only changed settings


class Report:
    """One or several runs; `read` reads new lines, `data` returns the page's data.

    An overview begins with the table of its runs, instead of with the answer which one is better.
    """

    def __init__(self, folders: Sequence[Path], is_overview: bool = False):
        self.is_overview = is_overview and len(folders) > 1
        self.runs = [RunReader(folder, name) for folder, name in zip(folders, distinct_names(folders))]

    def read(self) -> None:
        for run in self.runs:
            run.read()

    def signature(self) -> tuple:
        return tuple(run.signature() for run in self.runs)

    def data(self, live: bool = False) -> dict[str, Any]:
        """The page's data, as JSON; docs/architecture.md describes it."""
        last = {name: run.value(name) for run in self.runs for name in run.curves}
        names = [run.name for run in self.runs]
        on_cpu = [str(process.events[0].get("device")).startswith("CPU")
                  for run in self.runs for process in run.processes] or [False]
        memory = ["allocated by PyTorch"] * (not all(on_cpu)) + ["resident memory"] * any(on_cpu)
        made = {"format": FORMAT, "title": " and ".join(names) if len(names) < 3 else f"{len(names)} runs",
                "generated": time.time(), "live": live, "overview": self.is_overview, "runs": [],
                "charts": charts(last, choice_name(self.runs), self.runs[0].main.curve, " or ".join(memory)),
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
    """Return the folders' names, with as many parent folders as are needed to make them distinct."""
    parts = [Path(folder).absolute().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({number})" for number, part in enumerate(parts, 1)]


def as_text(data: dict[str, Any]) -> str:
    """Return the page's data as JSON with finite numbers and valid Unicode."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()  # a folder's name may not be Unicode


def render(data: dict[str, Any], live: bool = False) -> str:
    """Return the HTML page for a report's data; a `live` page redraws after each event from `events`."""
    style, library = join_assets("uPlot.min.css", "base.css", "page.css"), join_assets("uPlot.iife.min.js")
    script = join_assets("elements.js", "chart.js", "export.js", "page.js", *["live.js"] * live)
    policy = (f"default-src 'none'; script-src {csp_hash(library)} {csp_hash(script)}; "
              f"style-src {csp_hash(style)}; img-src data:; "
              f"connect-src '{'self' if live else 'none'}'; base-uri 'none'; form-action 'none'")

    # Without JavaScript, show each run's state and the last value of each curve.
    runs = data["runs"]
    rows = [["", *(run["name"] for run in runs)], ["state", *(run["sentence"] for run in runs)]]
    for chart in data["charts"]:
        for line in chart["series"]:
            curves = [run["curves"].get(line["curve"], {"y": []})["y"] for run in runs]
            rows.append([f"{chart['title']}: {line['label']}",
                         *("" if not each else "not finite" if each[-1] is None else f"{each[-1]:,.4g}"
                           for each in curves)])
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    table = f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    # Escape the JSON, so that it cannot close its script element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    text = text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})
    parts = {"policy": policy, "title": html.escape(data["title"]), "style": style, "library": library,
             "script": script, "live": str(live).lower(), "table": table, "data": text}
    return fill_template(join_assets("page.html"), parts).encode("utf-8", "replace").decode()


def join_assets(*paths: str | Path) -> str:
    return "".join((ASSETS / path).read_text(encoding="utf-8") for path in paths)


def fill_template(template: str, parts: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: parts[name[1]], template)


def csp_hash(text: str) -> str:
    """Return the Content-Security-Policy source that allows this inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
