"""A report as one HTML page: no request leaves it, and no text of a run is read as HTML or code.

Charts are drawn by uPlot 1.6.32 (`assets/uPlot.*`: `dist/` and LICENSE of the npm package `uplot`,
unmodified, MIT). It takes 51 kB of a page that may have 1 MB, has no dependencies, draws bands, gaps and
logarithmic axes, and lets us draw phases and marks between its layers. It draws on a canvas, so what
keyboards and screen readers need (a slider, a sentence and a table for each chart) is in `assets/chart.js`.
"""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Optional

ASSETS = Path(__file__).parent / "assets"


def render(data: dict, live: bool = False) -> str:
    """Return the whole page of a report's data (docs/contracts.md).

    Args:
        live: the page also listens to server-sent events at `events`, and redraws at each event `data`.
    """
    style, library = join_assets("uPlot.min.css", "base.css", "page.css"), join_assets("uPlot.iife.min.js")
    script = join_assets("elements.js", "chart.js", "page.js")
    policy = (f"default-src 'none'; script-src {csp_hash(library)} {csp_hash(script)}; "
              f"style-src {csp_hash(style)}; img-src data:; "
              f"connect-src {_quoted('self' if live else 'none')}; base-uri 'none'; form-action 'none'")
    parts = {"policy": policy, "title": html.escape(data["title"]), "style": style, "library": library,
             "script": script, "live": str(live).lower(), "table": _table(data), "data": _json(data)}
    page = fill_template(join_assets("page.html"), parts)
    return page.encode("utf-8", "replace").decode()  # a folder's name may be no Unicode


def join_assets(*paths: str | Path) -> str:
    """Return the texts of these files one after another; a relative path lies in `assets/`."""
    return "".join((ASSETS / path).read_text(encoding="utf-8") for path in paths)


def fill_template(template: str, parts: dict[str, str]) -> str:
    """Return the template with each `{name}` replaced by its part."""
    return re.sub(r"\{(\w+)\}", lambda name: parts[name[1]], template)


def _quoted(word: str) -> str:
    return f"'{word}'"


def csp_hash(text: str) -> str:
    """Return what a Content-Security-Policy says to allow this inline script or style."""
    return _quoted(f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}")


def _json(data: dict) -> str:
    """JSON that cannot end the element that it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})


def _last(curve: Optional[dict]) -> str:
    values = [value for value in curve["y"] if value is not None] if curve else []
    return f"{values[-1]:,.4g}" if values else ""


def _table(data: dict) -> str:
    """What is left without JavaScript: how each run stands, and the last value of each curve."""
    runs = data["runs"]
    rows = [["", *(run["name"] for run in runs)], ["state", *(run["sentence"] for run in runs)]]
    for chart in data["charts"]:
        rows += [[f"{chart['title']}: {line['label']}",
                  *(_last(run["curves"].get(line["curve"])) for run in runs)] for line in chart["series"]]
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
