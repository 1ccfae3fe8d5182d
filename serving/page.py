"""The chat page: one HTML document that asks nobody but the server that it came from for anything."""

from pathlib import Path

from report.page import csp_hash, fill_template, join_assets

ASSETS = Path(__file__).parent / "assets"
STYLE = join_assets("base.css", ASSETS / "chat.css")
SCRIPT = join_assets("elements.js", ASSETS / "chat.js")
# Trusted types forbid the page to set text as HTML, should its script ever try.
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; script-src {csp_hash(SCRIPT)}; style-src {csp_hash(STYLE)}; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'")


def page_html() -> str:
    """Return the page; it is sent with CONTENT_SECURITY_POLICY."""
    return fill_template(join_assets(ASSETS / "chat.html"), {"style": STYLE, "script": SCRIPT})
