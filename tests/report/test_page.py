"""The page of a report: what it may do, and, in a browser, what it shows."""

import hashlib
import html
import json
import re

import pytest
from factories import SMALL_TARGETS, rules_of_policy

from extensions.report.numbers import number_text
from extensions.report.page import ASSETS, render

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028{data}<!--"
STEPS = list(range(10, 1010, 10))


def curve(steps, value) -> dict:
    return {"x": [*steps], "y": [value(step) for step in steps]}


def run(name: str = "first", offset: float = 0.0) -> dict:
    """A run with something in every part of the contract."""
    rare = STEPS[9::10]
    metrics = {"train_loss": curve(STEPS, lambda step: 2 + offset + 5 / step + 0.1 * (step % 3)), "val_loss": curve(rare, lambda step: 2 + offset + 6 / step),
               "val_loss_stderr": curve(rare, lambda step: 0.01), "hellaswag_acc": curve(rare, lambda step: 0.25 + step / 5000),
               "hellaswag_stderr": curve(rare, lambda step: 0.02), "tokens_seen": curve(STEPS, lambda step: step * 4096),
               "time": curve(STEPS, lambda step: 1.7e9 + step / 2), "data_seconds": curve(STEPS, lambda step: 0.01),
               "forward_seconds": curve(STEPS, lambda step: 0.2), "peak_memory_bytes": curve(STEPS, lambda step: 2**31),
               "tokens_per_second": curve(STEPS, lambda step: None if step == 500 else 8000 + step), "mfu": curve(STEPS, lambda step: 0.4)}
    return {"name": name, "state": "running", "sentence": "running: step 1,000 of 2,000",
            "health": [[True, "Learned a lot."], [None, "One alarm."]], "step": 1000, "max_steps": 2000, "eta_seconds": 500.0,
            "facts": [["device", "8 x a GPU"]], "curves": metrics,
            "samples": [{"step": step, "prompt": "Once", "text": f"Once {name} at {step}"} for step in (500, 1000)],
            "settings": [{"name": "LEARNING_RATE", "value": 0.1, "default": 0.2, "changed": True, "meaning": "The highest one."},
                         {"name": "BETA", "value": None, "default": None, "changed": False, "meaning": "What beta is."}],
            "segments": [{"step": 1, "world_size": 2, "changes": []},
                         {"step": 400, "world_size": None, "changes": [{"name": "LEARNING_RATE", "before": 0.2, "after": 0.1}]}],
            "sources": [{"label": "web text", "share": 0.75, "tokens": 3000, "documents": 10, "epochs": 1.5}, {"label": "math", "share": 0.25}],
            "goodput": {"share": 0.5, "seconds": 1000, "parts": [{"name": "steps", "seconds": 500}, {"name": "downtime", "seconds": 500}],
                        "interruptions": [{"time": 1.7e9, "step": 410, "resumed_from": 400, "resumed_time": 1.7e9, "reason": "killed by a test",
                                           "downtime_seconds": 500, "repeated_steps": 10}]},
            "recent": {"tokens_per_second": 8990, "mfu": 0.4}, "best": [2.006, 1000], "stage": "sft, LoRA",
            "headline": {"curve": "val_loss", "title": "Validation loss", "higher": False}, "failure": None,
            "alarms": [{"step": 700, "kind": "loss spike", "text": "a loss of 9"}]}


def series(name: str, label: str, error=None, kind="line", reference=None) -> dict:
    return {"curve": name, "label": label, "error": error, "kind": kind, "reference": reference}


def report(*runs: dict) -> dict:
    """The data of a page of these runs."""
    def chart(identity, title, *lines, **style):
        return {"id": identity, "title": title, "unit": "", "log": False, "percent": False, "stacked": False, **style, "series": [*lines]}

    charts = [chart("loss", "Loss", series("train_loss", "training"), series("val_loss", "validation", "val_loss_stderr", "points"), log=True),
              chart("accuracy", "Accuracy", series("hellaswag_acc", "HellaSwag", "hellaswag_stderr", "points", 0.25), percent=True),
              chart("speed", "Tokens per second", series("tokens_per_second", "tokens per second")),
              chart("memory", "Peak memory", series("peak_memory_bytes", "allocated"), unit="bytes"),
              chart("phases", "Time by phase", series("data_seconds", "data"), series("forward_seconds", "forward"), unit="s", stacked=True)]
    cells = [{"value": 2.5 + i, "stderr": 0.1, "step": 1000} for i in range(len(runs))]
    test = {"name": "validation loss", "a": "first", "b": "second", "step": 1000, "n": 8, "a_value": 2.5, "b_value": 3.5,
            "difference": 1.0, "stderr": 0.1, "p": 0.001, "better": "a", "sentence": "first is better by one"}
    comparison = {"settings": [{"name": "SEED", "values": [*range(len(runs))]}], "tests": [test], "refused": [],
                  "sentences": [test["sentence"], "One seed each."],
                  "results": [{"name": "validation loss (last)", "better": "lower", "cells": cells}]}
    return {"format": 1, "title": " and ".join(each["name"] for each in runs), "generated": 1.7e9, "live": False, "runs": [*runs],
            "charts": charts, "comparison": comparison if len(runs) > 1 else None}


def embedded(page: str) -> str:
    return re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)[1]


@pytest.mark.parametrize("live", [False, True])
def test_the_policy_allows_these_scripts_and_styles_and_nothing_else(live):
    page = render(report(run()), live)
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1])
    rules = rules_of_policy(policy, page)
    assert rules.pop("connect-src") == ("'self'" if live else "'none'")
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}


def test_texts_of_a_run_cannot_leave_their_element():
    plain, data = render(report(run())), report(run(HOSTILE))
    data["runs"][0]["samples"][0]["text"] = HOSTILE
    page = render(data)
    for sign in ("<script", "</script", "<img", "<!--"):
        assert page.count(sign) == plain.count(sign), sign
    assert json.loads(embedded(page)) == data and "\u2028" not in embedded(page)
    name = b"run-\xff".decode(errors="surrogateescape")  # no Unicode, and a page all the same
    assert json.loads(embedded(render(report(run(name))).encode().decode()))["runs"][0]["name"] == name


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


def failed_run() -> dict:
    failure = {"where": "in step 1,001", "reason": "the loss became NaN in step 1,001. Details: a folder has a report",
               "saved": "step-00001000", "command": "./paddock replay runs/first --step 1001"}
    failed = run() | {"state": "failed", "failure": failure}
    failed["alarms"].append({"step": 1001, "kind": "step not finite", "text": "the loss was NaN or infinite"})
    return failed


def test_the_page_shows_all_of_its_data(show, tmp_path):
    data = report(run(), run("second"))
    data["runs"][1]["samples"].append({"step": 1000, "prompt": HOSTILE, "text": HOSTILE})
    page = show(data)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    text = page.inner_text("body")
    for words in ("2 running", "step 1,000 of 2,000, about 8 min 20 s left", "Learned a lot.", "as of 2023-11-", "device", "8 x a GPU",
                  "first is better by one", "2.500 ± 0.100", "SEED", "± 2.0", "chance 25 %", "45.0 ± 2.0 %", "Once second at 1000",
                  "web text", "75 %", "killed by a test", "50 % of 16 min 40 s", "LEARNING_RATE 0.2 → 0.1", "a loss of 9",
                  "The highest one.", "What beta is.", "GiB"):
        assert words in text, words
    assert HOSTILE in page.locator("#samples blockquote").all_text_contents() and page.evaluate("document.images.length") == 0
    for number in (0, 1):
        runs = f"charts.get('phases-{number}').visibleMarks().map(({{run}}) => report.runs.indexOf(run))"
        assert page.evaluate(f"[...new Set({runs})]") == [number]
    assert page.evaluate("charts.get('loss').visibleMarks().length") == 4
    with page.expect_download() as download:
        page.locator("#chart-loss select").select_option("csv")
    download.value.save_as(tmp_path / "file")
    rows = (tmp_path / "file").read_text().splitlines()
    assert rows[0].startswith("step,") and rows[1].startswith("10,2.6,") and rows[10].startswith("100,2.15,") and len(rows) == 101

    diverged = run()
    diverged["curves"]["val_loss"]["y"][-1] = None
    page = show(report(diverged))
    assert page.locator(".tiles .value").first.inner_text() == "not finite" and "(step 900)" in spoken(page, "loss")
    page = show(report(failed_run()), 390)
    lines = [line for line in page.inner_text("main").split("\n") if line]
    assert lines[:4] == ["Overview", "✕ Failed in step 1,001 of 2,000", "The loss became NaN in step 1,001.",
                         "Examine the step with ./paddock replay runs/first --step 1001 Copy"], "before all figures"
    marks = page.evaluate("charts.get('loss').visibleMarks().map(({sign, label, x}) => [sign, label, x])")
    assert ["▼", "step 1,001: NaN or infinite", 1001] in marks


def test_the_page_and_the_terminal_write_numbers_alike(show):
    page = show(report(run()))
    values = (0, 0.00004, 0.000999, 0.001, 0.61691, 1.23456, -9.877, 99.9994, 123.456, 12345.6, 2.5e13)
    numbers = [(value, error, share) for value in values for error in (0, 0.0004, 0.0123, 2.6) for share in (False, True)]
    shown = page.evaluate("all => all.map(([value, error, percent]) => measured(value, error, {percent}).join(''))", numbers)
    assert shown == [number_text(*each) for each in numbers]
    assert page.evaluate("measured(null, 0)[0]") == number_text(None) == "not finite"


@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1440, "light")])
def test_axe_finds_nothing_and_the_page_fits_a_phone_and_a_desktop(show, violations, width, scheme):
    data = {390: report(failed_run()), 1440: report(run("a" * 80), run("second"))}[width]
    for each in data["runs"]:  # axe looks at each cell of the tables: a few rows will do
        each["curves"] = {name: {axis: values[-9:] for axis, values in found.items()} for name, found in each["curves"].items()}
    page = show(data, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width and page.evaluate(SMALL_TARGETS) == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 100") == (scheme == "dark")
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert violations(page) == []
