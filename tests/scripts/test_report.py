"""scripts/report.py: the page as a file, and served on loopback while the run goes on."""

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import sys
import time

import pytest
from commands import ROOT, listening, python
from factories import PATIENCE, contents

SCRIPT = ROOT / "scripts" / "report.py"


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of a finished run without its checkpoints."""
    return shutil.copytree(whole.folder, tmp_path / "runs" / "first", ignore=shutil.ignore_patterns("checkpoints"))


def report(*arguments, cwd=ROOT, code: int = 0) -> subprocess.CompletedProcess:
    done = python(SCRIPT, *arguments, cwd=cwd)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done


def test_the_page_is_written_into_the_runs_folder_and_nothing_else_changes(folder):
    before = contents(folder)
    assert report(folder).stdout == f"{folder}/report.html\n"
    after = contents(folder)
    page = after.pop("report.html")[1]
    assert after == before and len(page) < 1_000_000 and page.lower().startswith(b"<!doctype html>")
    report(folder)
    assert contents(folder).keys() == before.keys() | {"report.html"}


def test_a_run_is_named_as_elsewhere_and_several_are_written_beside_them(folder, tmp_path):
    second = shutil.copytree(folder, tmp_path / "runs" / "second")
    assert report("first", cwd=tmp_path).stdout == "runs/first/report.html\n"
    assert report("first", "second", cwd=tmp_path).stdout == f"{tmp_path}/runs/report.html\n"
    assert "second" in (tmp_path / "runs" / "report.html").read_text()
    for place in (second / "merged", tmp_path / "runs" / "model"):
        place.mkdir()
        (place / "config.json").write_text("{}")
        (place / "model.safetensors").touch()
    assert report(cwd=tmp_path).stdout == "runs/report.html\n", "without a name, all runs, but no models"
    assert "there is no run in runs" in report(cwd=folder, code=5).stderr
    assert report(folder, second, "--output", tmp_path / "both.html").stdout == f"{tmp_path}/both.html\n"


@pytest.mark.slow
def test_a_figure_is_vector_graphics_of_the_width_and_joins_seeds(folder, tmp_path):
    pytest.importorskip("matplotlib")
    second = shutil.copytree(folder, tmp_path / "runs" / "second")
    settings = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(settings | {"SEED": 7}))
    report(folder, second, "--figure", tmp_path / "loss.pdf", "--log", "--width", "3.3in")
    pdf = (tmp_path / "loss.pdf").read_bytes()
    assert float(re.search(rb"/MediaBox \[ 0 0 ([\d.]+)", pdf)[1]) == pytest.approx(3.3 * 72) and b"/Subtype /Image" not in pdf
    report(folder, second, "--figure", tmp_path / "loss.svg")
    assert (tmp_path / "loss.svg").read_text().count("#0067b0") > 0 == (tmp_path / "loss.svg").read_text().count("#c04d00"), "one line for two seeds"
    assert "argument --width" in report(folder, "--figure", "x.pdf", "--width", "wide", code=2).stderr


def test_a_failed_write_leaves_the_earlier_page(folder, monkeypatch):
    import runpy

    (folder / "report.html").write_text("earlier")
    monkeypatch.setattr("extensions.report.page.render", lambda data, live=False: "half \ud800")
    monkeypatch.setattr(sys, "argv", ["report.py", str(folder)])
    with pytest.raises(UnicodeEncodeError):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert (folder / "report.html").read_text() == "earlier" and not [*folder.glob("*.tmp*")]


class Server:
    """`report.py --serve` in a process of its own."""

    def __init__(self, *runs):
        self.process = subprocess.Popen([sys.executable, SCRIPT, *runs, "--serve", "--port", "0"], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, start_new_session=True)
        line = self.process.stdout.readline()
        found = re.match(r"http://127.0.0.1:(\d+)/ ", line)
        if not found:
            self.process.kill()
            raise AssertionError(line + self.process.stderr.read())
        self.port, self.streams = int(found[1]), []

    def request(self, method: str, path: str, host: str = "127.0.0.1") -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request(method, path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def events(self) -> http.client.HTTPResponse:
        """An open stream of events."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("GET", "/events")
        answer = connection.getresponse()
        self.streams += [connection, answer]
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
        return answer


def next_data(stream) -> dict:
    """The data of the next event."""
    lines = iter(stream.readline, b"")
    return json.loads(next(line for line in lines if line.startswith(b"data: ")).removeprefix(b"data: "))


@pytest.fixture
def server(folder):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    server = Server(folder)
    yield server
    server.process.kill()
    server.process.wait()
    for each in (*server.streams, server.process.stdout, server.process.stderr):
        each.close()


def test_the_served_page_follows_the_run_and_writes_nothing(server, folder):
    before = contents(folder)
    status, page = server.request("GET", "/")
    assert status == 200 and b"first" in page and page.lower().startswith(b"<!doctype html>")
    assert server.request("HEAD", "/") == (200, b"") and server.request("HEAD", "/events") == (200, b"")
    assert contents(folder) == before
    stream = server.events()
    first = next_data(stream)
    assert first["live"] and first["runs"][0]["step"] == 6
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "train_loss": 1.25}\n{"step": 8, "train_')
    run, = next_data(stream)["runs"]
    assert run["step"] == 7 and run["curves"]["train_loss"]["y"][-1] == 1.25
    # A resumed run has taken two steps back.
    with open(folder / "events.jsonl", "a") as file:
        file.write(f'{{"time": {time.time()}, "step": 4, "event": "start"}}\n')
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.tmp").write_text("".join(lines[:5]))
    (folder / "metrics.tmp").replace(folder / "metrics.jsonl")
    run, = next_data(stream)["runs"]
    assert run["step"] == 4 and run["curves"]["train_loss"]["x"][-1] == 4


def test_nothing_but_the_page_is_served_and_only_to_this_machine(server):
    assert [str(address) for address, _ in listening(server.process.pid)] == ["127.0.0.1"]
    status, answer = server.request("GET", "/points/0/2/4")
    assert status == 200 and json.loads(answer)["train_loss"]["x"] == [2, 3, 4]
    for path in ("/points", "/points/1/1/2", "/points/0/x/2", "/x", "/events/", "/report.html", "/metrics.jsonl", "/../config.json", "//", "/%2e%2e/config.json"):
        assert server.request("GET", path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert server.request(method, "/")[0] == server.request(method, "/events")[0] == 405, method
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", "0.0.0.0", "", "localhost.evil.example"):
        assert server.request("GET", "/", host)[0] == server.request("GET", "/events", host)[0] == 400, host
    for host in ("localhost", f"localhost:{server.port}", f"127.0.0.1:{server.port}"):
        assert server.request("GET", "/", host)[0] == 200, host
