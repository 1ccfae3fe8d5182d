"""REPORT=true: a process of the lowest priority writes the page during the run, and an ordinary one at its end."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from factories import PATIENCE, UNMEASURED, wait_until

from extensions import report as writing
from extensions.report import LOWEST_PRIORITY, Report
from run.log import RunLog

SLOW = "import sys, time; open(sys.argv[1] + '/begun', 'a').write('x'); time.sleep(600)"


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path, warnings) -> SimpleNamespace:
    return SimpleNamespace(folder=tmp_path, log=SimpleNamespace(warn=warnings.append))


@pytest.fixture
def script(monkeypatch, tmp_path):
    """A function that puts other code in place of scripts/report.py; it gets the run's folder as its first argument."""
    def replace(code: str) -> None:
        (tmp_path / "script.py").write_text(code)
        monkeypatch.setattr(writing, "SCRIPT", tmp_path / "script.py")

    return replace


def test_a_run_writes_its_report_at_its_end_and_at_each_save_and_then_prints_its_path(tiny_run, monkeypatch):
    starts, there, start, info = [], [], Report.start, RunLog.info

    def record(self, text: str, shown=None) -> None:
        if text.endswith("  (wrote report.html)"):
            page = self.run_dir / "report.html"
            there.append(page.is_file() and "6 of 6 steps" in page.read_text())
        info(self, text, shown)

    monkeypatch.setattr(Report, "start", lambda self, run, **named: (
        starts.append(run.folder), start(self, run, **named)))
    monkeypatch.setattr(RunLog, "info", record)
    run = tiny_run(REPORT="true", **UNMEASURED)
    assert run.train() == 0 and there == [True]
    assert starts == [run.folder] * (len(run.steps_saved()) + 1)
    assert "train_loss" in (run.folder / "report.html").read_text() and not [*run.folder.glob("*.tmp*")]


def test_there_are_never_two_and_the_last_state_is_written(script, tmp_path, run, warnings):
    report = Report()
    script(SLOW)
    report.start(run)
    first = report.process
    wait_until((tmp_path / "begun").exists)
    assert os.getpriority(os.PRIO_PROCESS, first.pid) == LOWEST_PRIORITY and os.getsid(first.pid) == first.pid
    if (group := Path(f"/proc/{first.pid}/autogroup")).exists():
        assert group.read_text().endswith(f"nice {LOWEST_PRIORITY}\n")
    unfinished = tmp_path / f"report.html.tmp-{first.pid}"
    unfinished.write_text("half")
    report.start(run)
    assert report.process is first
    script("import os, sys; open(sys.argv[1] + '/report.html', 'w').write(f'final {os.getpriority(os.PRIO_PROCESS, 0)}')")
    report.finish(run, PATIENCE)
    assert first.poll() == -signal.SIGKILL and not unfinished.exists()
    assert (tmp_path / "report.html").read_text() == f"final {os.getpriority(os.PRIO_PROCESS, 0)}" and warnings == []


def test_a_report_that_fails_or_hangs_is_one_warning(script, run, monkeypatch, warnings):
    report = Report()
    script("import sys; sys.exit('the disk is full')")
    for _ in range(3):
        report.start(run)
        report.process.wait()
    assert len(warnings) == 1 and warnings[0].startswith("the report was not written: the disk is full. This does not")
    report.finish(run, PATIENCE)
    assert warnings == 2 * warnings[:1], "again at the end of the run"
    warnings.clear()
    script(SLOW)
    report.finish(run, 0.2)
    assert len(warnings) == 1 and "it takes longer than 0 s" in warnings[0] and report.process is None
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert not Report().finish(run, 1)
    assert len(warnings) == 2 and "No such file" in warnings[1]


def test_a_stop_signal_to_it_is_ignored(whole, tmp_path):
    """Ctrl-C and a scheduler's SIGTERM go to all processes of a job, again and again."""
    program = writing.SCRIPT
    process = subprocess.Popen([sys.executable, "-c", f"import os, runpy, signal, sys; sys.argv = [{str(program)!r}, {str(whole.folder)!r}, "
                                f"'--in-background', '--output', {str(tmp_path / 'x.html')!r}]\nfrom extensions.report import page\n"
                                "original = page.Report.read\n"
                                "def read(self):\n    [os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]\n"
                                "    original(self)\n"
                                "page.Report.read = read\n"
                                f"runpy.run_path({str(program)!r}, run_name='__main__')"], cwd=program.parents[1])
    assert process.wait(PATIENCE) == 0 and (tmp_path / "x.html").exists()
