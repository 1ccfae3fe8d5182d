"""scripts/report.py: the page as a file, and served on loopback while the run goes on."""

import json
import re
import shutil
import subprocess
import sys
import time
from functools import partial

import pytest
from commands import ROOT, listening, python
from factories import PATIENCE, contents

SCRIPT = ROOT / "scripts" / "report.py"


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of a finished run without its checkpoints."""
    return shutil.copytree(whole.folder, tmp_path / "runs" / "first", ignore=shutil.ignore_patterns("checkpoints"))


report = partial(python, SCRIPT, code=0)


def test_the_page_is_written_into_the_runs_folder_and_nothing_else_changes(folder):
    before = contents(folder)
    verdict, healthy, path = report(folder).stdout.splitlines()
    assert verdict.startswith("Too few to tell: validation loss ") and healthy == "Healthy: no alarms, no interruptions."
    assert path == f"{folder}/report.html"
    after = contents(folder)
    page = after.pop("report.html")[1]
    assert after == before and len(page) < 1_000_000 and page.lower().startswith(b"<!doctype html>")
    report(folder)
    assert contents(folder).keys() == before.keys() | {"report.html"}


def test_a_run_is_named_as_elsewhere_and_several_are_written_beside_them(folder, tmp_path):
    second = shutil.copytree(folder, tmp_path / "runs" / "second")
    assert report("first", cwd=tmp_path).stdout.endswith("\nruns/first/report.html\n")
    sentence, *_, path = report("first", "second", cwd=tmp_path).stdout.splitlines()
    assert "do not differ significantly: second minus first is " in sentence and path == f"{tmp_path}/runs/comparison.html"
    assert "second" in (tmp_path / "runs" / "comparison.html").read_text()
    for place in (second / "merged", tmp_path / "runs" / "model"):
        place.mkdir()
        (place / "config.json").write_text("{}")
        (place / "model.safetensors").touch()
    assert report(cwd=tmp_path).stdout == "runs/report.html\n", "without a name, all runs, but no models"
    assert "runs contains no runs" in report(cwd=folder, code=5).stderr
    assert report(folder, second, "--output", tmp_path / "both.html").stdout.endswith(f"{tmp_path}/both.html\n")


def test_the_report_of_a_folder_reads_no_settings(folder, tmp_path):
    """A running run writes it while `.env` may be edited for the next one."""
    (tmp_path / ".env").write_text("EPOCS=3\n")
    assert report(folder, cwd=tmp_path).stdout.endswith(f"{folder}/report.html\n")
    assert "unknown setting EPOCS" in report(cwd=tmp_path, code=2).stderr


@pytest.mark.slow
def test_a_figure_is_vector_graphics_of_the_width_and_joins_seeds(folder, tmp_path):
    pytest.importorskip("matplotlib")
    second = shutil.copytree(folder, tmp_path / "runs" / "second")
    settings = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(settings | {"SEED": 7}))
    report(folder, second, "--figure", tmp_path / "loss.pdf", "--log", "--width", "3.3in")
    pdf = (tmp_path / "loss.pdf").read_bytes()
    assert float(re.search(rb"/MediaBox \[ 0 0 ([\d.]+)", pdf)[1]) == pytest.approx(3.3 * 72) and b"/Subtype /Image" not in pdf
    runs = [folder, second]
    for seed in range(8, 12):
        runs.append(shutil.copytree(second, tmp_path / "runs" / str(seed)))
        (runs[-1] / "config.json").write_text(json.dumps(settings | {"SEED": seed}))
    for count, has_second in ((2, True), (6, False)):
        report(*runs[:count], "--figure", tmp_path / "loss.svg")
        drawn = (tmp_path / "loss.svg").read_text()
        assert "#0067b0" in drawn and ("#c04d00" in drawn) == has_second, "one line for six seeds, not for two"
    assert "argument --width" in report(folder, "--figure", "x.pdf", "--width", "wide", code=2).stderr


def test_a_failed_write_leaves_the_earlier_page(folder, monkeypatch):
    import runpy

    (folder / "report.html").write_text("earlier")
    monkeypatch.setattr("extensions.report.page.render", lambda data, live=False: "half \ud800")
    monkeypatch.setattr(sys, "argv", ["report.py", str(folder)])
    with pytest.raises(UnicodeEncodeError):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert (folder / "report.html").read_text() == "earlier" and not [*folder.glob("*.tmp*")]


@pytest.fixture
def server(folder):
    """A client of `report.py --serve` in a process of its own."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    with subprocess.Popen([sys.executable, SCRIPT, folder, "--serve", "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            url = re.match(r"(http://127.0.0.1:\d+)/ ", process.stdout.readline())[1]
            with httpx.Client(base_url=url, timeout=PATIENCE) as client:
                client.pid = process.pid
                yield client
        finally:
            process.kill()


def next_data(lines) -> dict:
    """The data of the next event."""
    return json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))


def test_the_served_page_follows_the_run_and_writes_nothing(server, folder):
    before = contents(folder)
    page = server.get("/")
    assert page.status_code == 200 and "first" in page.text and page.text.lower().startswith("<!doctype html>")
    assert [(each.status_code, each.content) for each in map(server.head, ("/", "/events"))] == [(200, b"")] * 2
    assert contents(folder) == before
    with server.stream("GET", "/events") as stream:
        events = stream.iter_lines()
        first = next_data(events)
        assert first["live"] and first["runs"][0]["step"] == 6
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 7, "train_loss": 1.25}\n{"step": 8, "train_')
        run, = next_data(events)["runs"]
        assert run["step"] == 7 and run["curves"]["train_loss"]["y"][-1] == 1.25
        # A resumed run has taken two steps back.
        with open(folder / "events.jsonl", "a") as file:
            file.write(f'{{"time": {time.time()}, "step": 4, "event": "start"}}\n')
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.tmp").write_text("".join(lines[:5]))
        (folder / "metrics.tmp").replace(folder / "metrics.jsonl")
        run, = next_data(events)["runs"]
        assert run["step"] == 4 and run["curves"]["train_loss"]["x"][-1] == 4


def test_nothing_but_the_page_is_served_and_only_to_this_machine(server):
    assert [str(address) for address, _ in listening(server.pid)] == ["127.0.0.1"]
    assert server.get("/points/0/2/4").json()["train_loss"]["x"] == [2, 3, 4]
    for path in ("/points", "/points/1/1/2", "/points/0/x/2", "/x", "/events/", "/report.html", "/metrics.jsonl", "/%2e%2e/config.json"):
        assert server.get(path).status_code == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert server.request(method, "/").status_code == server.request(method, "/events").status_code == 405, method
    port = server.base_url.port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "0.0.0.0", "", "localhost.evil.example"):
        assert [server.get(path, headers={"Host": host}).status_code for path in ("/", "/events")] == [400, 400], host
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}"):
        assert server.get("/", headers={"Host": host}).status_code == 200, host
