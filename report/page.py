"""The page of a report: one HTML text."""

import json
from typing import Any


def render(data: dict[str, Any], live: bool = False) -> str:
    """Return the page that shows the data."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return f"<!doctype html>\n<title>Paddock</title>\n<script type=\"application/json\">{text}</script>\n"
