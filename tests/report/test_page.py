"""The page of a report: what it may do, and, in a browser, what a reader can do with it."""

import base64
import hashlib
import html
import json
import re

import pytest
from factories import SMALL_TARGETS

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
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for rule, tag in (("script-src", "script"), ("style-src", "style")):
        inline = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inline]
        assert rules.pop(rule).split() == hashes
    assert rules.pop("connect-src") == ("'self'" if live else "'none'")
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}


def test_the_page_makes_no_requests():
    page = render(report(run(), run("second")))
    elements = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert {*re.findall(r"\b(?:src|href|action|poster)=(\S+?)>", elements)} == {'"data:,"', '"#main"'}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|sendBeacon|importScripts|WebSocket", page)
    assert set(re.findall(r"https?://[\w./-]+", page)) == {"https://github.com/leeoniya/uPlot"}  # its own first line


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


# The connection of a live page, which the tests speak through: fake.emit("data", {...}).
FAKE_EVENTS = """
window.EventSource = class extends EventTarget {
  static CLOSED = 2;
  constructor(url) { super(); this.readyState = 1; window.fake = this; window.connections = (window.connections || 0) + 1; }
  emit(name, data) { this.dispatchEvent(new MessageEvent(name, {data: JSON.stringify(data)})); }
};
"""


@pytest.fixture(scope="module")
def tab(browser):
    """A page with a list of what it complained of and asked for; one for all tests, which saves seconds."""
    page = browser.new_page(reduced_motion="reduce")
    page.heard = []
    page.on("console", lambda message: page.heard.append(message.text))
    page.on("pageerror", lambda error: page.heard.append(str(error)))
    page.on("request", lambda request: page.heard.append(request.url))
    page.add_init_script(FAKE_EVENTS)
    return page


@pytest.fixture
def show(tab, tmp_path):
    """Open the page of a report; it fails at the end if the page asked for something or complained."""
    tab.heard.clear()

    def open_page(data: dict, width: int = 1440, live: bool = False, scheme: str = "light"):
        path = tmp_path / "report.html"
        path.write_text(render(data, live), encoding="utf-8")
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=scheme)
        tab.goto(path.as_uri())
        return tab

    yield open_page
    assert {each for each in tab.heard if not each.startswith(("file:", "data:"))} == set()


def spoken(page, chart: str) -> str:
    return page.locator(f"#chart-{chart} .plot").get_attribute("aria-valuetext")


@pytest.mark.parametrize("options", ["%7B", '{"axis":5,"smoothing":"x","hidden":3,"zoom":"a","theme":[]}', "null", '{"axis":"no","zoom":[1]}', "[]"])
def test_a_link_with_wrong_options_shows_the_page(options, show):
    """The fixture fails if a script complains."""
    page = show(report(run()))
    page.evaluate("options => { location.hash = '#view?' + encodeURIComponent(options); }", options)
    page.reload()
    assert page.evaluate("[view.axis, view.smoothing, document.querySelector('#theme').value]") == ["step", 25, ""]
    assert "Learned a lot." in page.inner_text("body")


def test_the_page_shows_all_of_its_data(show):
    page = show(report(run(), run("second")))
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    text = page.inner_text("body")
    for words in ("2 running", "step 1,000 of 2,000, about 8 min 20 s left", "Learned a lot.", "as of 2023-11-", "device", "8 x a GPU", "first is better by one", "2.500 ± 0.100", "SEED",
                  "± 2.0", "chance 25 %", "45.0 ± 2.0 %", "Once second at 1000", "web text", "75 %", "killed by a test", "50 % of 16 min 40 s",
                  "LEARNING_RATE 0.2 → 0.1", "a loss of 9", "The highest one.", "What beta is.", "GiB"):
        assert words in text, words
    for run_of_page in (0, 1):
        assert page.evaluate(f"[...new Set(charts.get('phases-{run_of_page}').visibleMarks().map(({{run}}) => report.runs.indexOf(run)))]") == [run_of_page]
    assert page.evaluate("charts.get('loss').visibleMarks().length") == 4
    diverged = run()
    diverged["curves"]["val_loss"]["y"][-1] = None
    page = show(report(diverged))
    assert page.locator(".tiles .value").first.inner_text() == "not finite" and "(step 900)" in spoken(page, "loss")
    page = show(report(diverged, run("second"), run("third")))
    assert page.locator("#overview tbody td").nth(3).inner_text() == "not finite"


def test_a_single_step_has_phases(show):
    single = run()
    single["curves"] = {name: {axis: values[:1] for axis, values in found.items()} for name, found in single["curves"].items()}
    page = show(report(single))
    page.wait_for_timeout(100)  # uPlot draws a frame later
    colored = page.evaluate("""() => {
      const {ctx} = charts.get("phases-0").plot, {data} = ctx.getImageData(0, 0, ctx.canvas.width, ctx.canvas.height);
      return Array.from({length: data.length / 4}, (_, i) => data.slice(4 * i, 4 * i + 3)).filter((rgb) => Math.max(...rgb) - Math.min(...rgb) > 60).length;
    }""")
    assert colored > 500


@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1440, "light")])
def test_the_page_fits_a_phone_and_a_desktop(show, width, scheme):
    page = show(report(run("a" * 80)), width, scheme=scheme)
    tops = [page.locator(each).first.bounding_box()["y"] for each in ("h1", "#state", ".health", ".tiles", "#chart-loss .plot")]
    assert tops == sorted(tops) and tops[-1] < 844 - 150, "half of the first chart is on a phone's first screen"
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page = show(report(run("a" * 80), run("second", 0.5)), width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(SMALL_TARGETS) == []
    assert page.locator("section:visible h2").all_inner_texts() == [
        "Is one better than the other?", "Charts", "Overview", "Comparison", "Samples", "Time and interruptions", "Alarms", "Data", "Settings"]
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(f"{background}.match(/\\d+/)[0] < 100") == (scheme == "dark")
    assert page.locator("#display").is_visible() == (width == 390) != page.locator("#theme").is_visible()
    if width == 390:
        page.locator("#display").click()
    page.locator("#theme").select_option("light")
    assert page.evaluate(background) == "rgb(244, 245, 247)"


def test_answers_stand_beside_those_of_the_base(show):
    trained, several = run(), run("second")
    for each in (trained, several):
        each["samples"] = [{"step": step, "prompt": prompt, "text": f"{each['name']} {prompt} at {step}"} for step in (0, 500, 1000) for prompt in "abc"]
        for sample in each["samples"][:3]:
            sample["text"] = f"the base on {sample['prompt']}"
    page = show(report(trained))
    assert page.locator("#samples .box").all_inner_texts() == [
        f"{prompt}\nbefore training\nthe base on {prompt}\nstep 1,000\nfirst {prompt} at 1000" for prompt in "abc"]
    page = show(report(trained, several))
    assert page.locator("#samples .box").first.locator("small").all_inner_texts() == ["before training", "A first, step 1,000", "B second, step 1,000"]


def test_goodput_is_left_out_of_a_short_run(show):
    for seconds, is_shown in ((599, False), (600, True)):
        short = run()
        short["goodput"] |= {"seconds": seconds}
        page = show(report(short))
        assert ("Goodput" in page.inner_text(".tiles")) == ("(goodput)" in page.inner_text("#time")) == is_shown
        assert "killed by a test" in page.inner_text("#time"), "interruptions are listed anyway"


def test_a_running_run_shows_how_far_it_is(show):
    page = show(report(run()), live=True)
    assert page.evaluate("groups.get('steps').extent") == [10, 2000], "up to the last step"
    assert page.evaluate("[document.querySelector('progress').value, document.querySelector('progress').max]") == [1000, 2000]
    page.evaluate("data => fake.emit('data', data)", report(run() | {"state": "finished", "step": 2000}))
    assert page.evaluate("groups.get('steps').extent[1]") == 1000 and page.locator("progress").count() == 0


def test_the_page_and_the_terminal_write_numbers_alike(show):
    page = show(report(run()))
    numbers = [(value, error, share) for value in (0, 0.00004, 0.000999, 0.001, 0.61691, 1.23456, -9.877, 99.9994, 123.456, 12345.6, 2.5e13)
               for error in (0, 0.0004, 0.0123, 2.6) for share in (False, True)]
    shown = page.evaluate("all => all.map(([value, error, percent]) => measured(value, error, {percent}).join(''))", numbers)
    assert shown == [number_text(*each) for each in numbers]
    assert page.evaluate("measured(null, 0)[0]") == number_text(None) == "not finite"


def test_a_printed_page_has_drawings_instead_of_controls(show):
    page = show(report(run()))
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert not page.locator("#controls").is_visible() and not page.locator(".plot").first.is_visible()
    assert page.locator("figure > svg").count() == page.locator("figure:not([hidden])").count() and page.locator("figure > svg").first.is_visible()
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("figure > svg").count() == 0 and page.locator(".plot").first.is_visible()


def test_a_failed_run_begins_with_its_failure(show):
    message = "the loss became NaN in step 1,001. Step 1,000 is saved. Try a lower LEARNING_RATE (now 1e9). Details: a folder has a report"
    failed = run() | {"state": "failed", "failure": {"where": "in step 1,001", "reason": message, "saved": "step-00001000",
                                                     "command": "./paddock replay runs/first --step 1001"}}
    failed["alarms"].append({"step": 1001, "kind": "step not finite", "text": "the loss was NaN or infinite"})
    page = show(report(failed), 390)
    text = page.inner_text("main")
    assert [each for each in text.split("\n") if each][:6] == [
        "Overview", "✕ Failed in step 1,001 of 2,000", "The loss became NaN in step 1,001. Step 1,000 is saved. Try a lower LEARNING_RATE (now 1e9).",
        "Examine the step with ./paddock replay runs/first --step 1001 Copy", "Details", "✓ Learned a lot."], "before all figures"
    page.locator(".failure summary").click()
    details = page.inner_text(".failure details")
    assert "a folder has a report" in details and "a loss of 9" in details and "Newest checkpoint: step-00001000" in details and "was NaN" not in details
    marks = page.evaluate("charts.get('loss').visibleMarks().map(({sign, label, x}) => [sign, label, x])")
    assert ["▼", "step 1,001: NaN or infinite", 1001] in marks, "a labelled line"
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.locator(".failure button").click()
    assert page.evaluate("copied") == "./paddock replay runs/first --step 1001"
    assert page.locator("#alarms").is_hidden(), "they stand in the banner"
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.fixture
def four() -> dict:
    """The data of four runs: two learning rates, two seeds each."""
    runs = [run(name, offset) for name, offset in (("a1", 0.3), ("a2", 0.1), ("b1", 0.2), ("b2", 0.0))]
    data = report(*runs)
    data["comparison"] |= {"tests": [data["comparison"]["tests"][0] | {"a": a["name"], "b": b["name"]} for a, b in zip(runs, runs[1:])],
                           "settings": [{"name": "LEARNING_RATE", "values": ["0.1", "0.1", "0.02", "0.02"]}], "configurations": []}
    return data


def test_many_runs_are_a_table_that_can_be_sorted_and_does_not_widen_the_page(show, four):
    page = show(four, 390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    names = page.locator("#overview tbody th")
    assert names.all_inner_texts() == ["A a1", "B a2", "C b1", "D b2"]
    for heading, order in (("validation loss", "DBCA"), ("validation loss", "ACBD"), ("LEARNING_RATE", "CDAB")):
        page.locator("#overview thead button", has_text=heading).click()
        assert "".join(text[0] for text in names.all_inner_texts()) == order
    assert page.locator("#overview thead [aria-sort]").inner_text() == "LEARNING_RATE ▲"
    page.locator("#overview [data-run=a1]").uncheck()
    assert page.evaluate("charts.get('loss').lines.length") == 6
    assert page.locator("#comparison table").first.locator("tbody tr").count() == 4, "a matrix of paired tests"
    assert page.locator("#time .box").first.locator(".bar").count() == 3, "one bar of phases for each run that is shown"


def test_a_comparison_begins_with_its_sentence_and_averages_from_six_runs_on(show, four):
    cells = [{"value": 2.5, "stderr": 0.1, "step": 1000, "is_better": True}, {"value": 2.4, "stderr": 0.1, "step": 1000}]
    two = report(run("a1", 0.3), run("a2", 0.1))
    one_group = {"name": "all runs", "runs": ["a1", "a2"], "results": [{"n": 2, "mean": 2.5, "stderr": 0.1}]}
    two["comparison"] |= {"configurations": [one_group], "results": [{"name": "speed", "better": "higher", "cells": cells}]}
    page = show(two)
    assert page.inner_text("main").split("\n\n")[:2] == ["Is one better than the other?", "first is better by one"]
    positions = page.evaluate("['answer', 'charts', 'overview', 'comparison'].map((id) => byId(id).getBoundingClientRect().top)")
    assert positions == sorted(positions), "the sentence, curves, tables"
    assert page.evaluate("new Set(charts.get('loss').lines.map((line) => line.color)).size") == 2, "two runs, two colours"
    assert page.locator("#comparison .best").all_inner_texts() == ["2.500 ± 0.100\n(better)"], "by a test, not the larger value"
    runs = [run(f"{arm}{seed}", 0.1 * seed) for arm in "ab" for seed in range(6)]
    for count, lines in ((6, 2), (5, 10)):
        some = [each for each in runs if int(each["name"][1]) < count]
        data = report(*some)
        data["comparison"]["configurations"] = [{"name": arm, "runs": [each["name"] for each in some if each["name"][0] == arm],
                                                 "results": [{"n": count, "mean": 2.5, "stderr": 0.1}]} for arm in "ab"]
        data["comparison"]["sequence"] = {"columns": ["seed", "a", "b"], "rows": [["1337", "2.5", "2.4"]]}
        page = show(data)
        page.evaluate("view.hidden.clear(); refresh()")
        found = page.evaluate("charts.get('loss').lines.filter(({series}) => series.curve === 'train_loss').map((line) => line.color)")
        assert (len(found), len({*found})) == (lines, 2), "one line for six runs, else one for each, in the colour of the arm"
        assert "The sequence" in page.inner_text("#answer")


def test_a_chart_is_saved_as_csv_svg_or_png(show, tmp_path):
    page = show(report(run()))
    saved = {}
    for kind in ("csv", "svg", "png"):
        with page.expect_download() as download:
            page.locator("#chart-loss select").select_option(kind)
        assert download.value.suggested_filename == f"loss.{kind}"
        download.value.save_as(tmp_path / "file")
        saved[kind] = (tmp_path / "file").read_bytes()
    rows = saved["csv"].decode().splitlines()
    assert rows[0] == "step,training,validation" and rows[1] == "10,2.6," and rows[10] == "100,2.15,2.06" and len(rows) == 101
    assert saved["svg"].startswith(b"<svg xmlns=") and b">Loss</text>" in saved["svg"] and saved["svg"].count(b"<path") > 5
    assert saved["png"].startswith(b"\x89PNG") and len(saved["png"]) > 10_000


@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1440, "light")])
def test_axe_finds_nothing_on_a_report(show, four, violations, width, scheme):
    failed = {"state": "failed", "failure": {"where": "in step 9", "reason": "it was not finite", "saved": "step-00000008", "command": "./paddock replay x"}}
    pages = {390: (report(run() | failed), four), 1440: (report(run()), report(run(), run("second")))}
    for data in pages[width]:
        for each in data["runs"]:  # axe looks at each cell of the tables: a few rows will do
            each["curves"] = {name: {axis: values[-9:] for axis, values in found.items()} for name, found in each["curves"].items()}
        page = show(data, width, scheme=scheme)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        if width == 390:
            page.locator("#display").click()
        assert violations(page) == [], data["title"]


def test_a_hostile_run_is_only_text(show):
    data = report(run(HOSTILE), run("second"))
    data["runs"][0]["samples"] = [{"step": 1, "prompt": HOSTILE, "text": HOSTILE}]
    data["charts"][0]["title"] = HOSTILE
    page = show(data)
    assert page.evaluate("document.images.length") == 0
    assert page.locator("#samples blockquote").first.text_content() == HOSTILE
    assert page.locator("#chart-loss h3").text_content().strip() == HOSTILE


def test_the_keyboard_reaches_a_chart_and_moves_its_cursor(show):
    page = show(report(run()))
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#chart-loss .plot') !== null"):
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert spoken(page, "loss").startswith("step 990: training ")
    assert spoken(page, "speed") == "step 990: tokens per second 8,990"  # the other charts follow
    page.keyboard.press("+")
    assert page.evaluate("charts.get('speed').plot.scales.x.min") > 10 and page.locator("#reset").is_enabled()
    page.keyboard.press("Escape")
    assert page.evaluate("charts.get('speed').plot.scales.x.min") == 10


def test_an_update_keeps_zoom_focus_scroll_and_what_is_open(show):
    page = show(report(run()), live=True)
    page.locator("#settings summary").click()
    page.locator("#chart-speed .plot").focus()
    page.keyboard.press("+")
    before = "[groups.get('steps').zoom, scrollY, document.activeElement.id, document.querySelector('#settings details').open]"
    kept, later = page.evaluate(before), run()
    later["curves"]["tokens_per_second"] = curve([*STEPS, 1010], lambda step: 9000)
    later["samples"].append({"step": 1010, "prompt": "Once", "text": "something new"})
    page.evaluate("data => fake.emit('data', data)", report(later))
    assert page.evaluate(before) == kept and kept[0][0] > 10 and kept[1] > 0
    assert "something new" in page.inner_text("#samples") and "9,000" in spoken(page, "speed")


def test_a_lost_connection_is_shown_and_reopened(show):
    assert show(report(run())).evaluate("window.connections") is None, "a page that is not live opens none"
    page = show(report(run()), live=True)
    state = page.locator("#state")
    page.evaluate("fake.emit('open')")
    assert state.inner_text().endswith("live")
    page.clock.install()
    page.evaluate("fake.readyState = 2; fake.emit('error')")
    assert state.inner_text().endswith("connection lost, retrying")
    page.clock.fast_forward(5000)
    assert page.evaluate("connections") == 2
    page.evaluate("fake.emit('open')")
    assert state.inner_text() == "▶ running · live"
