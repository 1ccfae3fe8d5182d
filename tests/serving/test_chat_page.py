"""The chat page: what it may do, and, in a browser, what a person can do with it, whatever the server does."""

import json
import re
from contextlib import contextmanager

import pytest
from factories import SMALL_TARGETS, rules_of_policy, wait_until
from stub_server import StubServer, model

from data_pipeline.chats import chats_of, pair_of
from extensions.serving.app import CONTENT_SECURITY_POLICY, PAGE

HOSTILE = "</script><img src=x onerror=alert(1)>\n  two  spaces\n\n\u202egnp.exe {style} &amp;"
ERRORS = "Failed to load resource"  # what Chromium writes to the console for a refused or broken request


def test_the_policy_allows_this_script_and_style_and_nothing_else():
    rules = rules_of_policy(CONTENT_SECURITY_POLICY, PAGE)
    assert rules == {"default-src": "'none'", "img-src": "data:", "connect-src": "'self'", "base-uri": "'none'", "form-action": "'none'",
                     "frame-ancestors": "'none'", "require-trusted-types-for": "'script'", "trusted-types": "'none'"}


class Chat:
    """The page in a browser."""

    def __init__(self, page):
        self.page = page

    def __getattr__(self, name: str):
        return getattr(self.page, name)

    def say(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def do(self, action: str) -> None:
        self.finishes()  # while an answer is written, no other one is asked for
        self.page.locator(f"[data-do={action}]").first.click()

    def sees(self, *texts: str, where: str = ".answer .text") -> None:
        elements = self.page.locator(where)
        wait_until(lambda: elements.all_text_contents() == [*texts], elements.all_text_contents, 10)

    def reads(self, pattern: str) -> None:
        """Wait until the line below the last answer matches."""
        from playwright.sync_api import expect  # which not every machine has

        expect(self.page.locator(".status").last).to_have_text(re.compile(pattern), timeout=10_000)

    def exported(self, action: str) -> list[dict]:
        with self.page.expect_download() as download:
            self.do(action)
        self.file = download.value.suggested_filename
        return [json.loads(line) for line in download.value.path().read_text().splitlines()]

    def toggle(self, place: str) -> None:
        self.page.locator(f"[aria-controls={place}]").click()

    def finishes(self) -> None:
        wait_until(lambda: self.page.evaluate("running.size") == 0)


@pytest.fixture(scope="module")
def server():
    stub = StubServer()
    stub.start()
    yield stub
    stub.crash()


@pytest.fixture
def stub(server):
    server.reset()
    yield server
    server.hold_at = None


@pytest.fixture
def chat(open_page, stub):
    """A function that opens the page."""
    return lambda width=1440, scheme="light": Chat(open_page(stub.url, width, scheme, height=800, heard=(ERRORS,)))


@contextmanager
def held(stub, at: int):
    """Within it, answers stop before this piece."""
    stub.hold_at = at
    yield
    stub.hold_at = None


def messages(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def test_good_and_bad_versions_become_pairs_and_chats_that_training_reads(chat, stub):
    page = chat()
    page.toggle("panel")
    page.fill("[name=system]", "Be kind.")
    stub.pieces = ["Fine \ud83d"]
    page.say("Hi")
    page.reads("seed")
    page.locator("[data-mark=good]").click()
    page.say("More")
    for text in ("A", "B", " A "):
        page.finishes()  # the answer before, which may not have asked for its pieces yet
        stub.pieces = [text]
        page.do("answer")
        page.sees("Fine \ud83d", text)
        page.locator("[data-mark=bad]" if text == "B" else "[data-mark=good]").last.click()
    page.locator("[data-mark=bad]").last.click()  # " A " is bad too
    page.toggle("drawer")
    page.sees("1 preference pair so far. A pair is a good and a bad answer to the same messages.", where="#kept-note")
    requests = [{"role": "system", "content": "Be kind."}, *messages("Hi", "Fine \ufffd", "More")]
    line, = page.exported("pairs")
    example = pair_of("line 1", line)
    assert (example.messages, [answer["content"] for answer in example.answers]) == (requests, ["A", "B"])
    assert re.fullmatch(r"preferences-\d{14}\.jsonl", page.file)
    page.sees("1 line saved. To train on them (if the browser saves in ~/Downloads): ./paddock prepare pairs "
              f"~/Downloads/{page.file} --instruct-checkpoint 'runs/it'\\''s' ", where="#notice")
    line, = page.exported("chats")
    assert chats_of("line 1", line)[0].messages == requests[:-1], "what follows a bad answer is not learned"


@pytest.mark.parametrize("faults, text, sentence", [
    ({"drops": True}, "Hello, world", "lost before the answer was complete"), ({}, "Hello, ", "lost before the answer was complete"),
    ({"refuses": 429}, "", "^Refused with 429.$")], ids=["dropped", "the server crashes", "refused"])
def test_a_failed_request_is_shown_once_and_can_be_retried(chat, stub, faults, text, sentence):
    page = chat()
    vars(stub).update(faults)
    with held(stub, 3 if faults else 2):
        page.say("Hi")
        page.sees(text)
        if not faults:
            stub.crash()
    page.reads(sentence)
    page.sees(text)
    if not faults:
        page.do("answer")
        page.reads("^The server cannot be reached. Is it still running[?]$")
        stub.start()
    vars(stub).update(drops=False, refuses=None)
    assert page.inner_text("[data-do=answer]") == "Try again"
    page.do("answer")
    page.reads("3 tokens")
    page.sees("Hello, world")


def test_texts_are_text(chat, stub):
    stub.models = [model("<b>sft</b>")]
    stub.pieces = [HOSTILE, "\ud83d", "\u0000\u001b[2J"]
    page = chat()
    page.fill("#text", HOSTILE)
    page.evaluate("document.getElementById('text').value += String.fromCharCode(0xd800)")
    page.press("#text", "Enter")
    page.do("raw")
    page.sees(HOSTILE + "\ud83d\u0000\u001b[2J")
    assert page.locator(".said .text").evaluate("element => element.innerText.toWellFormed()") == HOSTILE + "\ufffd"  # with its lines and spaces
    assert page.evaluate("document.images.length + document.scripts.length") == 1
    assert stub.requests[0]["messages"] == messages(HOSTILE + "\ufffd")
    page.sees("<b>sft</b>", where=".answer h2")
    assert page.evaluate("getComputedStyle(document.querySelector('.text')).unicodeBidi") == "plaintext"


@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1440, "light")])
def test_axe_finds_nothing_and_the_page_fits_a_phone_and_a_desktop(chat, stub, violations, width, scheme):
    stub.models, stub.pieces = [model("a" * 90), model("b/" * 50)], ["w" * 500, " ", "مرحبا", " x" * 500]
    page = chat(width, scheme)
    page.say("u" * 300)
    page.sees(*["".join(stub.pieces)] * 2)
    overflowing = "[...document.querySelectorAll('main, main *, #panel')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)"
    for part in ("panel", "drawer"):
        size = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        assert page.evaluate(size) == [width, 800], "only the conversation scrolls"
        assert page.evaluate(f"{overflowing}.map(e => e.className || e.id)") == page.evaluate(SMALL_TARGETS) == []
        page.toggle(part)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 100") == (scheme == "dark")
    assert violations(page.page) == []
