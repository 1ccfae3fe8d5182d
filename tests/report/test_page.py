"""The page of a report: what it may do, and, in a browser, what it shows."""

import hashlib
import html
import json
import re
import shutil
from copy import deepcopy

import pytest
from factories import SMALL_TARGETS, rules_of_policy
from test_damaged_runs import intact  # noqa: F401 (a fixture)

from extensions.report.numbers import number_text
from extensions.report.page import ASSETS, Report, render

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028{data}<!--"

@pytest.fixture(scope="module")
def pages(intact, whole, tmp_path_factory) -> tuple[dict, dict]:  # noqa: F811
    """The data of the page of a run with something in every part, and of the page that compares it with the run that it is made from."""
    second = shutil.copytree(whole.folder, tmp_path_factory.mktemp("runs") / "second", ignore=shutil.ignore_patterns("checkpoints"))
    reports = Report([intact]), Report([intact, second])
    for report in reports:
        report.read()
    return tuple(report.data() for report in reports)


@pytest.fixture
def alone(pages) -> dict:
    return deepcopy(pages[0])


@pytest.fixture
def both(pages) -> dict:
    return deepcopy(pages[1])


def embedded(page: str) -> str:
    return re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)[1]


@pytest.mark.parametrize("live", [False, True])
def test_the_policy_allows_these_scripts_and_styles_and_nothing_else(live, alone):
    page = render(alone, live)
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1])
    rules = rules_of_policy(policy, page)
    assert rules.pop("connect-src") == ("'self'" if live else "'none'")
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}


def test_texts_of_a_run_cannot_leave_their_element(alone):
    plain = render(alone)
    alone["runs"][0]["name"] = alone["runs"][0]["samples"][0]["text"] = HOSTILE
    page = render(alone)
    for sign in ("<script", "</script", "<img", "<!--"):
        assert page.count(sign) == plain.count(sign), sign
    assert json.loads(embedded(page)) == json.loads(json.dumps(alone)) and "\u2028" not in embedded(page)
    alone["runs"][0]["name"] = b"run-\xff".decode(errors="surrogateescape")  # no Unicode, and a page all the same
    assert json.loads(embedded(render(alone).encode().decode()))["runs"][0]["name"] == alone["runs"][0]["name"]


def test_the_library_is_the_one_that_was_published():
    """Source: the npm package uplot 1.6.32, dist/."""
    sums = {"uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
            "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"}
    assert {name: hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() for name in sums} == sums
    assert "(v1.6.32)" in (ASSETS / "uPlot.iife.min.js").read_text()[:100] and "MIT License" in (ASSETS / "uPlot.LICENSE").read_text()


@pytest.fixture
def show(open_page, tmp_path):
    """A function that opens the page of a report."""
    def show(data: dict, width: int = 1440, scheme: str = "light"):
        (tmp_path / "report.html").write_text(render(data), encoding="utf-8")
        return open_page((tmp_path / "report.html").as_uri(), width, scheme)

    return show


def spoken(page, chart: str) -> str:
    return page.locator(f"#chart-{chart} .plot").get_attribute("aria-valuetext")


def failed(data: dict) -> dict:
    """The data of a run whose next step was not finite."""
    data["runs"][0]["failure"] = {"where": "in step 7", "reason": "the loss became NaN in step 7. Details: a folder has a report",
                                  "saved": "step-00000006", "command": "./paddock replay runs/first --step 7"}
    data["runs"][0]["alarms"].append({"step": 7, "kind": "step not finite", "text": "the loss was NaN or infinite"})
    return data


def test_a_long_run_says_how_it_spent_its_time(show, alone, both):
    spent = {"share": 0.9, "seconds": 3600, "interruptions": [], "parts": [{"name": "steps", "seconds": 3240}, {"name": "saving", "seconds": 360}]}
    alone["runs"][0]["goodput"] = spent
    time = show(alone).locator("#time")
    assert "90 % of 1 h 00 min was spent on steps" in time.inner_text() and time.locator(".bar").count() == 1
    both["runs"] = [{**run, "name": f"{run['name']}-{number}"} for number in range(8) for run in both["runs"]]
    time = show(both | {"overview": True}).locator("#time")
    assert time.locator(".bar").count() > 1, "the phases of each of many runs"


def test_the_page_shows_all_of_its_data(show, alone, both, tmp_path):
    both["runs"][1]["samples"].append({"step": 6, "prompt": HOSTILE, "text": HOSTILE})
    page = show(both)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    text = page.inner_text("body")
    for run in both["runs"]:
        words = [*(each[1] for each in run["health"]), *(word for fact in run["facts"] for word in fact), *(each["text"] for each in run["alarms"]),
                 *(each["label"] for each in run["sources"]), *(each["name"] for each in run["settings"] if each["changed"])]
        assert len(words) > 20 and [each for each in words if each not in text] == []
    loss, error = (both["runs"][0]["curves"][name]["y"][-1] for name in ("val_loss", "val_loss_stderr"))
    for words in (number_text(loss, error), "chance 25 %", "50.0 ± 16.7 %", "70 %", *both["comparison"]["sentences"]):
        assert words in text, words
    assert HOSTILE in page.locator("#samples blockquote").all_text_contents() and page.evaluate("document.images.length") == 0
    for number in (0, 1):
        runs = f"charts.get('phases-{number}').visibleMarks().map(({{run}}) => report.runs.indexOf(run))"
        assert page.evaluate(f"[...new Set({runs})]") == [number] * (number == 0)
    with page.expect_download() as download:
        page.locator("#chart-loss select").select_option("csv")
    download.value.save_as(tmp_path / "file")
    rows = (tmp_path / "file").read_text().splitlines()
    assert rows[0].startswith("step,") and [row.split(",")[0] for row in rows[1:]] == [*"0123456"]

    assert [each.inner_text() for each in page.locator("#contents a").all()][:3] == ["Is one better than the other?", "Charts", "Overview"]
    overview = show(both | {"overview": True})
    assert [each.inner_text() for each in overview.locator("#contents a").all()][:2] == ["Overview", "Charts"]
    assert [each["name"] in overview.inner_text("#overview table") for each in both["runs"]] == [True, True]

    diverged = deepcopy(alone)
    diverged["runs"][0]["curves"]["val_loss"]["y"][-1] = None
    page = show(diverged)
    assert page.locator(".tiles .value").first.inner_text() == "not finite" and "(step 4)" in spoken(page, "loss")
    page = show(failed(alone), 390)
    lines = [line for line in page.inner_text("main").split("\n") if line]
    assert lines[:4] == ["Overview", "✕ Failed in step 7 of 6", "The loss became NaN in step 7.",
                         "Examine the step with ./paddock replay runs/first --step 7 Copy"], "before all figures"
    marks = page.evaluate("charts.get('loss').visibleMarks().map(({sign, label, x}) => [sign, label, x])")
    assert ["▼", "step 7: NaN or infinite", 7] in marks


def test_the_page_and_the_terminal_write_numbers_alike(show, alone):
    page = show(alone)
    values = (0, 0.00004, 0.000999, 0.001, 0.61691, 1.23456, -9.877, 99.9994, 123.456, 12345.6, 2.5e13)
    numbers = [(value, error, share) for value in values for error in (0, 0.0004, 0.0123, 2.6) for share in (False, True)]
    shown = page.evaluate("all => all.map(([value, error, percent]) => measured(value, error, {percent}).join(''))", numbers)
    assert shown == [number_text(*each) for each in numbers]
    assert page.evaluate("measured(null, 0)[0]") == number_text(None) == "not finite"


@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1440, "light")])
def test_axe_finds_nothing_and_the_page_fits_a_phone_and_a_desktop(show, violations, alone, both, width, scheme):
    both["runs"][0]["name"] = "a" * 80
    page = show({390: failed(alone), 1440: both}[width], width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width and page.evaluate(SMALL_TARGETS) == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 100") == (scheme == "dark")
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert violations(page) == []
