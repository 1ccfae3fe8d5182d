import json
import shlex
import sys
import types
from pathlib import Path

import pytest

from checkpoint.schema import read_lines
from common.errors import DataError
from common.text import print_traceback, show
from config import Config
from extensions.trackers import start_trackers
from run import log as run_log
from run.log import RunLog, console_line, keep_lines

METRICS = {"step": 200, "train_loss": 2.234, "learning_rate": 1e-5, "grad_norm": 2.7565, "tokens_seen": 1000,
           "tokens_per_second": 12345.4, "mfu": 0.4123, "peak_memory_bytes": 2**30}


def make_log(run_dir, rank=0, device="cpu", step=0, **settings) -> RunLog:
    log = RunLog(Config(**settings), rank, device)
    if run_dir:
        log.open(run_dir, step)
        log.trackers = start_trackers(log, "")
    return log


def written(path: Path) -> list:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# The console


def test_the_line_of_a_step_is_the_one_that_users_grep_for(capsys, tmp_path):
    log = make_log(tmp_path)
    log.info(console_line(200, 1000, METRICS, 330.9))
    log.close()
    line = "[CPU0] Step [200/1000] | Loss: 2.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | Tok/s: 12,345 | MFU: 41.2 % | ETA: 5 min 31 s\n"
    assert capsys.readouterr().out == line
    assert (tmp_path / "log" / "rank-0.txt").read_text() == line
    unknown_peak = {name: value for name, value in METRICS.items() if name != "mfu"}
    assert f"[CPU0] {console_line(200, 1000, unknown_peak, 330.9)}\n" == line.replace(" | MFU: 41.2 %", "")


def test_a_sample_shows_a_rendered_chat_as_words_and_keeps_it_as_it_is(capsys, tmp_path):
    prompt = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    log = make_log(tmp_path, 0)
    log.sample(3, prompt, "Hello")
    log.close()
    shown = capsys.readouterr().out
    assert "<|" not in shown and "user" in shown and "Hi" in shown and shown.rstrip().endswith("Hello")
    assert json.loads((tmp_path / "samples.jsonl").read_text())["prompt"] == prompt


def test_foreign_text_stays_on_one_line_and_cannot_control_the_terminal(capsys, tmp_path):
    prompt = "\x1b]0;owned\x07a"
    text = "\n[CPU0] Saved /forged in 0.0 s\r\x9b2J\u202eb\u2028c\td \U0001f469\u200d\U0001f466\u3000"
    log = make_log(tmp_path, 0)
    log.sample(3, prompt, text)
    log.warn(f"{prompt}{text}")
    log.close()
    one_line = (r"\x1b]0;owned\x07a\n[CPU0] Saved /forged in 0.0 s\r\x9b2J\u202eb\u2028c" "\td \U0001f469\u200d\U0001f466\u3000")
    shown = capsys.readouterr()
    assert shown.out == f"[CPU0] Sample: {one_line}\n" and shown.err == f"[CPU0] warning: {one_line}\n"
    assert (tmp_path / "log" / "rank-0.txt").read_text() == shown.out + shown.err
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {"step": 3, "prompt": prompt, "text": text}
    assert str(DataError(f"{prompt}{text}", "two")) == f"{one_line}\ntwo"
    print_traceback(ValueError, ValueError(prompt), None)
    show(prompt)
    assert capsys.readouterr() == ("\\x1b]0;owned\\x07a\n", "ValueError: \\x1b]0;owned\\x07a\n")


# metrics.jsonl


def test_of_a_step_that_a_signal_interrupted_after_its_update_the_answers_stay(tmp_path):
    """The checkpoint has metrics up to step 2 and the update of step 3, which is not taken again."""
    answers = [{"step": step, "group": 0, "prompt": "?", "answer": "!", "reward": 1.0, "advantage": 0.0, "tokens": 1} for step in (1, 2, 3, 4)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in answers))
    for name in ("metrics", "samples"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"step": step, "prompt": "", "text": ""}) + "\n" for step in (1, 2, 3, 4)))
    log = RunLog(Config(training_stage="grpo"), 0, "cpu")
    log.open(tmp_path, step=2, steps_taken=3)
    log.close()
    kept = {name: [line["step"] for line in written(tmp_path / f"{name}.jsonl")] for name in ("rollouts", "metrics", "samples")}
    assert kept == {"rollouts": [1, 2, 3], "metrics": [1, 2], "samples": [1, 2]}


# events.jsonl


def test_the_events_of_a_run_are_a_chronicle_that_no_resume_shortens(tmp_path):
    log = make_log(tmp_path)
    assert log.previous == {"previous_step": None, "previous_time": None}
    for step in (1, 2, 3):
        log.step({"step": step})
        log.event("save", step, seconds=0.5, checkpoint=f"step-{step}")
    log.close()
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"time": 1.5, "st')  # a kill -9
    third = written(tmp_path / "metrics.jsonl")[2]
    log = make_log(tmp_path, step=1)
    assert log.previous == {"previous_step": 3, "previous_time": third["time"]}
    log.event("end", 1, reason="\x1b\u2028\udcff", ratio=float("inf"))
    log.close()
    first, *_, last = events = written(tmp_path / "events.jsonl")
    assert [event["step"] for event in events] == [1, 2, 3, 1] and first.keys() == {"time", "step", "event", "seconds", "checkpoint"}
    assert last == {"time": last["time"], "step": 1, "event": "end", "reason": "\x1b\u2028?", "ratio": None}
    assert all(entry for _, entry in read_lines(tmp_path / "events.jsonl"))


# Trackers


class FakeWandb(types.ModuleType):
    """A wandb module that records its calls, and misbehaves in one of them."""

    id = "abc"

    def __init__(self, bad=None, misbehave=None):
        super().__init__("wandb")
        self.bad, self.misbehave, self.calls, self.logged, self.artifacts = bad, misbehave, [], [], []

    def Table(self, columns, data):
        return columns, data

    def Artifact(self, name, type):
        return types.SimpleNamespace(add_file=lambda path: self.artifacts.append((name, type, Path(path).read_text())))

    def log_artifact(self, artifact):
        self._call("log_artifact")

    def Settings(self, **settings):
        return settings

    def _call(self, name):
        self.calls.append(name)
        if name == self.bad:
            self.misbehave()

    def init(self, **arguments):
        self.arguments = arguments
        self._call("init")
        return self

    def log(self, values, step):
        self.logged.append((step, values))
        self._call("log")

    def finish(self):
        self._call("finish")


def run_with(fake, tmp_path, monkeypatch, steps=3, finish_seconds=5.0) -> list:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(run_log, "FINISH_SECONDS", finish_seconds)
    log = make_log(tmp_path, wandb_enabled=True)
    for step in range(1, steps + 1):
        log.step({**METRICS, "step": step})
    log.close()
    return written(tmp_path / "metrics.jsonl")


class FakeTrackio(types.ModuleType):
    """A trackio module with the signatures of trackio 0.43, as far as they are used."""

    def __init__(self):
        super().__init__("trackio")
        self.logged, self.artifacts, self.finished = [], [], 0

    def init(self, project, name=None, config=None, resume="never", embed=True, auto_log_gpu=None, auto_log_cpu=None):
        self.named = (project, name, resume)
        assert not any(key.startswith("_") for key in config), "reserved for trackio"
        return self

    def Table(self, columns=None, data=None):
        return [dict(zip(columns, row)) for row in data]

    def log(self, metrics, step=None):
        assert not {"project", "run", "timestamp", "step", "time", "metrics"} & metrics.keys(), "reserved for trackio"
        self.logged.append((step, metrics))

    def log_artifact(self, artifact_or_path, name=None, type=None):
        self.artifacts.append((Path(artifact_or_path).read_text(), name, type))

    def finish(self):
        self.finished += 1


def log_a_run(log) -> None:
    """A step with an evaluation, a sample, and the report of a run."""
    (log.run_dir / "report.html").write_text("<html>")
    log.sample(2, "a|b", "c\nd")
    log.step({"step": 2, "train_loss": 0.5, "val_loss": 1.5, "hellaswag_n": 4, "entropy": NAN})
    log.send("report", log.run_dir / "report.html")
    log.close()


NAN = float("nan")  # a service shows it, a gap would hide it
VALUES = {"train_loss": 0.5, "val_loss": 1.5, "hellaswag_n": 4, "entropy": NAN}
SAMPLE, EVALUATION = (2, "a|b", "c\nd"), [(2, "val_loss", 1.5), (2, "hellaswag_n", 4)]


def test_wandb_gets_tables_and_the_report_and_prints_the_upload_command(tmp_path, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    settings = dict(wandb_enabled=True)
    log = make_log(tmp_path / "my runs" / "run", **settings)
    log_a_run(log)
    assert fake.logged == [(2, {"samples": (["step", "prompt", "text"], [SAMPLE])}), (2, VALUES),
                           (2, {"evaluation": (["step", "metric", "value"], EVALUATION)})]
    assert fake.artifacts == [("report-abc", "report", "<html>")]
    assert fake.arguments["config"] == Config(**settings).public() and "canary" not in repr(fake.arguments)
    printed = capsys.readouterr().out.partition("Upload to wandb: ")[2].splitlines()[0]
    assert shlex.split(printed) == [f"{Path(sys.executable).parent}/wandb", "sync", f"{tmp_path}/my runs/run/wandb/offline-run-*"]


def test_trackio_gets_the_same_and_no_step_twice(tmp_path, monkeypatch):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    log = RunLog(Config(trackio_enabled=True), 0, "cpu")
    log.open(tmp_path / "run")
    log.trackers = start_trackers(log, "12ab")
    log_a_run(log)
    table = [{"step": 2, "metric": "val_loss", "value": 1.5}, {"step": 2, "metric": "hellaswag_n", "value": 4}]
    expected = [(2, {"samples": [dict(zip(("step", "prompt", "text"), SAMPLE))]}), (2, VALUES), (2, {"evaluation": table})]
    assert fake.logged == expected and fake.artifacts == [("<html>", "report-12ab", "report")] and fake.finished == 1
    assert fake.named == ("paddock", "run-12ab", "allow")
    log = RunLog(Config(trackio_enabled=True), 0, "cpu")
    log.open(tmp_path / "run", step=1)
    log.trackers = start_trackers(log, "12ab")
    log.sample(2, "a", "b")
    for step in (2, 3):
        log.step({"step": step, "train_loss": 0.5})
    log.close()
    log = make_log(tmp_path / "run", step=-1, trackio_enabled=True)
    log.step({"step": 1, "train_loss": 1.5})
    log.close()
    assert fake.logged[len(expected):] == [(3, {"train_loss": 0.5}), (1, {"train_loss": 1.5})], (
        "step 2 is taken again; a new run in the folder of a killed one begins with step 1")


class FakeMlflow(types.ModuleType):
    """An mlflow module with its client, as far as it is used; its store outlives a client."""

    def __init__(self):
        super().__init__("mlflow")
        self.MlflowClient = lambda: self
        self.experiments, self.runs, self.params, self.logged, self.tables, self.finished = {}, [], {}, [], [], 0

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name):
        self.experiments[name] = types.SimpleNamespace(experiment_id="7")
        return "7"

    def search_runs(self, experiment_ids, filter_string=""):
        return [run for run in self.runs if filter_string == f"tags.paddock_run = '{run.tags['paddock_run']}'"]

    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        self.runs.append(types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run{len(self.runs)}"), tags=tags))
        return self.runs[-1]

    def log_param(self, run_id, key, value):
        assert (run_id, key) not in self.params, "mlflow refuses to change a parameter"
        self.params[run_id, key] = value

    def log_metric(self, run_id, key, value, timestamp=None, step=None):
        self.logged.append((run_id, step, key, value))

    def log_table(self, run_id, data, artifact_file):
        self.tables.append((artifact_file, data))

    def log_artifact(self, run_id, local_path):
        self.artifact = Path(local_path).read_text()

    def set_terminated(self, run_id):
        self.finished += 1


def test_mlflow_gets_the_same_and_no_step_twice_and_a_resumed_run_goes_on(tmp_path, monkeypatch, capsys):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)

    def opened(step: int, run_id: str = "12ab") -> RunLog:
        log = RunLog(Config(mlflow_enabled=True), 0, "cpu")
        log.open(tmp_path / "run", step=step)
        log.trackers = start_trackers(log, run_id)
        return log

    log_a_run(opened(-1))
    expected = [("run0", 2, name, value) for name, value in VALUES.items()]
    assert fake.logged == expected and fake.artifact == "<html>" and fake.finished == 1
    assert ("samples.json", {"step": [2], "prompt": ["a|b"], "text": ["c\nd"]}) in fake.tables
    assert fake.params["run0", "MLFLOW_ENABLED"] == "True"
    log, tables = opened(1), len(fake.tables)
    log.sample(2, "a", "b")
    for step in (2, 3):
        log.step({"step": step, "train_loss": 0.5})
    log.close()
    assert fake.logged[len(expected):] == [("run0", 3, "train_loss", 0.5)] and len(fake.tables) == tables, "step 2 is there"
    monkeypatch.setattr(fake, "search_runs", fail)
    log = opened(3)
    log.close()
    assert capsys.readouterr().err.count("mlflow is off for the rest of this run: TypeError") == 1
    monkeypatch.setitem(sys.modules, "mlflow", None)
    opened(3).close()
    assert "mlflow is off for the rest of this run: MLFLOW_ENABLED=true needs" in capsys.readouterr().err, "without the class of our error"


def fail():
    raise RuntimeError("the service process is dead")


@pytest.mark.parametrize("bad, misbehave", [("init", lambda: sys.exit(1)), ("log", fail), ("finish", fail)])
def test_a_tracker_that_raises_costs_one_warning(bad, misbehave, tmp_path, monkeypatch, capsys):
    run_with(None, tmp_path / "not installed", monkeypatch)
    assert "wandb is off" in capsys.readouterr().err
    fake = FakeWandb(bad, misbehave)
    assert [entry["step"] for entry in run_with(fake, tmp_path, monkeypatch)] == [1, 2, 3]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and "wandb is off for the rest of this run" in warnings[0]
    assert fake.calls.count(bad) == 1 and fake.calls[-1] == bad
    assert warnings[0] in (tmp_path / "log" / "rank-0.txt").read_text()


def test_tensorboard_shows_a_step_that_is_taken_again_once_and_keeps_the_last_saved_one(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for loss, saved, last in ((1.0, 0, 4), (2.0, 2, 5)):  # killed after step 4, resumed from step 2
        log = make_log(tmp_path, step=saved, tensorboard_enabled=True)
        for step in range(saved + 1, last + 1):
            log.step({**METRICS, "step": step, "train_loss": loss})
        log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train_loss")] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


# The lines of an interrupted run


def test_a_resumed_run_writes_each_step_once(tmp_path, capsys):
    log = make_log(tmp_path)
    for step in range(1, 6):
        log.step({"step": step, "run": 1})
        log.sample(step, "line\u2028separator\n", "é")
    log.close()
    log = make_log(tmp_path, step=3)
    for step in range(4, 7):
        log.step({"step": step, "run": 2})
    log.close()
    assert [(entry["step"], entry["run"]) for entry in written(tmp_path / "metrics.jsonl")] == [
        (1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    samples = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["prompt"] for line in samples if line] == ["line\u2028separator\n"] * 3


@pytest.mark.parametrize("torn", [b'{"step": 2, "te', b'{"step": 2, "text": "\xc3', b"\0\0\0"])
@pytest.mark.parametrize("unreadable", [b"", b"{}\n", b'{"step": true}\n', b"[" * 100_000 + b"\n", b"\xff\xfe\n"], ids=lambda line: line[:9].decode(errors="replace"))
def test_a_line_that_a_crash_cut_is_dropped_and_an_unreadable_one_moved_aside(unreadable, torn, tmp_path):
    path, lines, warnings = tmp_path / "metrics.jsonl", [b'{"step": 0}\n', b'{"step": 1, "text": "\xc3\xa9"}\n'], []
    path.write_bytes(lines[0] + unreadable + lines[1] + torn)
    assert [entry.step for entry, _ in keep_lines(path, lambda entry: True, warnings.append)] == [0, 1]
    assert path.read_bytes() == b"".join(lines)
    aside = tmp_path / "metrics.jsonl.bad"
    assert warnings == ([f"{path}: 1 unreadable line moved to {aside.name}"] if unreadable else [])
    assert (aside.read_bytes() if unreadable else b"") == unreadable and len([*tmp_path.iterdir()]) == 1 + bool(unreadable)
