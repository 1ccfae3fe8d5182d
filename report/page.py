"""A report as one HTML page: no request leaves it, and no text of a run is read as HTML or code.

Charts are drawn by uPlot 1.6.32 (`assets/uPlot.*`: `dist/` and LICENSE of the npm package `uplot`, unmodified, MIT). It is 51 kB
without dependencies, where Plotly (over 3 MB) and ECharts (over 1 MB) alone exceed a page of 1 MB, and it redraws a hundred thousand
points within a frame, with the bands, gaps, logarithmic axes and hooks that a run needs. It draws on a canvas, so what keyboards and
screen readers need (a slider, a sentence, a table for each chart) is our own, in `assets/page.js`.
"""

import base64
import hashlib
import html
import json
import re
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"


def render(data: dict, live: bool = False) -> str:
    """Return the whole page of a report's data (docs/contracts.md).

    Args:
        live: the page also listens to server-sent events at `events`, and redraws at each event `data`.
    """
    style = _asset("uPlot.min.css") + _asset("page.css")
    library, script = _asset("uPlot.iife.min.js"), _asset("chart.js") + _asset("page.js")
    policy = (f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}; img-src data:; "
              f"connect-src {_quoted('self' if live else 'none')}; base-uri 'none'; form-action 'none'")
    parts = {"policy": policy, "title": html.escape(data["title"]), "style": style, "library": library, "script": script,
             "live": str(live).lower(), "table": _table(data), "data": _json(data)}
    return re.sub(r"\{(\w+)\}", lambda name: parts[name[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _quoted(word: str) -> str:
    return f"'{word}'"


def _hash(text: str) -> str:
    return _quoted(f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}")


def _json(data: dict) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})


def _last(curve: dict) -> str:
    values = [value for value in curve["y"] if value is not None]
    return f"{values[-1]:,.4g}" if values else ""


def _table(data: dict) -> str:
    """What is left without JavaScript: how each run stands, and the last value of each curve."""
    series = [(chart["title"], line) for chart in data["charts"] for line in chart["series"]]
    rows = [["", *(run["name"] for run in data["runs"])], ["state", *(run["sentence"] for run in data["runs"])]]
    rows += [[f"{title}: {line['label']}", *(_last(run["curves"].get(line["curve"], {"y": []})) for run in data["runs"])]
             for title, line in series]
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
