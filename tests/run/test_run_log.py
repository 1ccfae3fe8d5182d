import json
import re
import shlex
import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest

from checkpoint.schema import read_lines
from common.errors import DataError
from common.text import print_traceback, show
from config import Config
from extensions.evaluate import log_sample
from extensions.report.console import how_to_start
from extensions.trackers import start_trackers
from parallel import process
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


def test_foreign_text_stays_on_one_line_and_cannot_control_the_terminal(capsys, tmp_path):
    prompt = "\x1b]0;owned\x07a"
    text = "\n[CPU0] Saved /forged in 0.0 s\r\x9b2J\u202eb\u2028c\td \U0001f469\u200d\U0001f466\u3000"
    log = make_log(tmp_path, 0)
    log_sample(log, 3, prompt, text)
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


@pytest.mark.parametrize(("ledger", "metrics", "gaps"), [
    (5, [3], []), (6, [2, 4], []), (3, [3], ["ledger.jsonl lacks lines of steps 4 to 5"]),
    (0, [], ["ledger.jsonl lacks lines of steps 1 to 5", "metrics.jsonl lacks lines of steps 1 to 5"])])
def test_a_run_that_continues_without_its_earlier_lines_says_so(ledger, metrics, gaps, tmp_path, capsys):
    line = {"rows_crc32": "0", "loss": 1.0, "grad_norm": 1.0, "updated": True}
    for name, steps in (("ledger", range(1, ledger + 1)), ("metrics", metrics)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in steps))
    log = RunLog(Config(log_every=3), 0, "cpu")
    log.open(tmp_path, step=5)
    log.close()
    assert re.findall(r"[a-z]+\.jsonl lacks.*", capsys.readouterr().err) == gaps


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
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**third, "step": 4, "step_seconds": 2.5}) + "\n")
    (tmp_path / "ledger.jsonl").write_text("".join(
        json.dumps({"step": step, "rows_crc32": "0", "loss": 1.0, "grad_norm": 1.0, "updated": True}) + "\n" for step in range(1, 8)))
    log = make_log(tmp_path, step=1)
    assert log.previous == {"previous_step": 7, "previous_time": third["time"] + 3 * 2.5}, "three steps were taken, but not logged"
    log.event("end", 1, reason="\x1b\u2028\udcff", ratio=float("inf"))
    log.close()
    first, *_, last = events = written(tmp_path / "events.jsonl")
    assert [event["step"] for event in events] == [1, 2, 3, 1] and first.keys() == {"time", "step", "event", "seconds", "checkpoint"}
    assert last == {"time": last["time"], "step": 1, "event": "end", "reason": "\x1b\u2028?", "ratio": None}
    assert all(entry for _, entry in read_lines(tmp_path / "events.jsonl"))


# Trackers


def fake_module(monkeypatch, name: str) -> MagicMock:
    """A stand-in for the module of a tracker, which records its calls."""
    fake = MagicMock()
    fake.init.return_value = fake
    monkeypatch.setitem(sys.modules, name, fake)
    return fake


def logged(fake) -> list[tuple]:
    return [(call.kwargs["step"], *call.args) for call in fake.log.call_args_list]


def opened(folder: Path, step: int = -1, **settings) -> RunLog:
    log = RunLog(Config(**settings), 0, "cpu")
    log.open(folder, step)
    log.trackers = start_trackers(log, "12ab")
    return log


def log_a_run(log) -> None:
    """A step with an evaluation, a sample, and the report of a run."""
    (log.run_dir / "report.html").write_text("<html>")
    log_sample(log, 2, "a|b", "c\nd")
    log.step({"step": 2, "train_loss": 0.5, "val_loss": 1.5, "hellaswag_n": 4, "entropy": NAN})
    log.send("report", log.run_dir / "report.html")
    log.close()


def log_steps(log, steps) -> None:
    if 2 in steps:
        log_sample(log, 2, "a", "b")
    for step in steps:
        log.step({"step": step, "train_loss": 0.5})
    log.close()


NAN = float("nan")  # a service shows it, a gap would hide it
VALUES = {"train_loss": 0.5, "val_loss": 1.5, "hellaswag_n": 4, "entropy": NAN}
SAMPLE, EVALUATION = (2, "a|b", "c\nd"), [(2, "val_loss", 1.5), (2, "hellaswag_n", 4)]


def test_wandb_gets_tables_and_the_report_and_prints_the_upload_command(tmp_path, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    fake = fake_module(monkeypatch, "wandb")
    fake.Table, fake.id = dict, "abc"
    log_a_run(opened(tmp_path / "my runs" / "run", wandb_enabled=True))
    assert logged(fake) == [
        (2, {"samples": {"columns": ["step", "prompt", "text"], "data": [SAMPLE]}}), (2, VALUES),
        (2, {"evaluation": {"columns": ["step", "metric", "value"], "data": EVALUATION}})]
    fake.Artifact.assert_called_once_with("report-abc", "report")
    page = tmp_path / "my runs" / "run" / "report.html"
    fake.Artifact.return_value.add_file.assert_called_once_with(str(page))
    fake.log_artifact.assert_called_once_with(fake.Artifact.return_value)
    assert fake.init.call_args.kwargs["config"] == Config(wandb_enabled=True).public()
    printed = capsys.readouterr().out.partition("Upload to wandb: ")[2].splitlines()[0]
    assert shlex.split(printed) == [
        f"{Path(sys.executable).parent}/wandb", "sync", f"{tmp_path}/my runs/run/wandb/offline-run-*"]


def test_trackio_gets_the_same_and_no_step_twice(tmp_path, monkeypatch):
    fake = fake_module(monkeypatch, "trackio")
    fake.Table = lambda columns, data: [dict(zip(columns, row)) for row in data]
    log_a_run(opened(tmp_path / "run", trackio_enabled=True))
    table = [dict(zip(("step", "metric", "value"), row)) for row in EVALUATION]
    expected = [(2, {"samples": [dict(zip(("step", "prompt", "text"), SAMPLE))]}), (2, VALUES), (2, {"evaluation": table})]
    assert logged(fake) == expected
    assert not any({"project", "run", "timestamp", "step", "time", "metrics"} & values.keys() for _, values in expected), "reserved"
    fake.log_artifact.assert_called_once_with(tmp_path / "run" / "report.html", name="report-12ab", type="report")
    named = fake.init.call_args.kwargs
    assert (named["project"], named["name"], named["resume"]) == ("paddock", "run-12ab", "allow")
    fake.finish.assert_called_once_with()
    # Step 2 is taken again; a new run in the folder of a killed one begins with step 1.
    for saved, steps in ((1, (2, 3)), (-1, (1,))):
        log_steps(opened(tmp_path / "run", saved, trackio_enabled=True), steps)
    assert logged(fake)[len(expected):] == [(3, {"train_loss": 0.5}), (1, {"train_loss": 0.5})]


def test_mlflow_gets_the_same_and_no_step_twice_and_a_resumed_run_goes_on(tmp_path, monkeypatch, capsys):
    client = fake_module(monkeypatch, "mlflow").MlflowClient.return_value
    client.get_experiment_by_name.return_value.experiment_id = "7"
    client.search_runs.return_value = []
    client.create_run.return_value.info.run_id = "run0"
    log_a_run(opened(tmp_path / "run", mlflow_enabled=True))
    client.create_run.assert_called_once_with("7", run_name="run", tags={"paddock_run": "12ab"})
    expected = [call("run0", name, value, step=2) for name, value in VALUES.items()]
    assert client.log_metric.call_args_list == expected
    sample = {"step": [2], "prompt": ["a|b"], "text": ["c\nd"]}
    assert client.log_table.call_args_list[0] == call("run0", sample, "samples.json")
    client.log_artifact.assert_called_once_with("run0", str(tmp_path / "run" / "report.html"))
    client.set_terminated.assert_called_once_with("run0")
    params = client.log_param.call_args_list
    assert call("run0", "MLFLOW_ENABLED", "True") in params
    client.search_runs.return_value = [client.create_run.return_value]
    tables = client.log_table.call_count
    log_steps(opened(tmp_path / "run", 1, mlflow_enabled=True), (2, 3))
    assert client.search_runs.call_args == call(["7"], "tags.paddock_run = '12ab'")
    assert client.log_param.call_args_list == params, "mlflow refuses to change a parameter"
    assert client.log_metric.call_args_list == [*expected, call("run0", "train_loss", 0.5, step=3)]
    assert client.log_table.call_count == tables, "step 2 is there"
    monkeypatch.setitem(sys.modules, "mlflow", None)
    opened(tmp_path / "run", 3, mlflow_enabled=True).close()
    assert "mlflow is off for the rest of this run: MLFLOW_ENABLED=true needs" in capsys.readouterr().err


@pytest.mark.parametrize("bad, error", [
    ("init", SystemExit(1)), ("log", RuntimeError), ("finish", RuntimeError)])
def test_a_tracker_that_raises_costs_one_warning(bad, error, tmp_path, monkeypatch, capsys):
    fake = fake_module(monkeypatch, "wandb")
    getattr(fake, bad).side_effect = error
    log = opened(tmp_path, wandb_enabled=True)
    for step in (1, 2, 3):
        log.step({**METRICS, "step": step})
    log.close()
    assert [entry["step"] for entry in written(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and "wandb is off for the rest of this run" in warnings[0]
    assert getattr(fake, bad).call_count == 1
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


@pytest.mark.parametrize("torn", [b'{"step": 2, "te', b'{"step": 2, "text": "\xc3', b"\0\0\0"])
@pytest.mark.parametrize("unreadable", [b"", b"{}\n", b'{"step": true}\n', b"[" * 100_000 + b"\n", b"\xff\xfe\n"], ids=lambda line: line[:9].decode(errors="replace"))
def test_a_line_that_a_crash_cut_is_dropped_and_an_unreadable_one_moved_aside(unreadable, torn, tmp_path):
    path, lines, warnings = tmp_path / "metrics.jsonl", [b'{"step": 0}\n', b'{"step": 1, "text": "\xc3\xa9"}\n'], []
    path.write_bytes(lines[0] + unreadable + lines[1] + torn)
    assert [entry.step for entry in keep_lines(path, lambda entry: True, warnings.append)] == [0, 1]
    assert path.read_bytes() == b"".join(lines)
    aside = tmp_path / "metrics.jsonl.bad"
    assert warnings == ([f"{path}: 1 unreadable line moved to {aside.name}"] if unreadable else [])
    assert (aside.read_bytes() if unreadable else b"") == unreadable and len([*tmp_path.iterdir()]) == 1 + bool(unreadable)


@pytest.mark.parametrize(("world_size", "environ", "words"), [
    (1, {}, "train --run-name x"), (2, {"LAUNCHER": "1", "LOCAL_WORLD_SIZE": "2"}, "train --run-name x"),  # after NPROC=2
    (2, {"LOCAL_WORLD_SIZE": "2"}, "the same torchrun command, with --run-name x"),
    (4, {"LOCAL_WORLD_SIZE": "2"}, "the same torchrun command on each machine, with --run-name x"),
    (4, {"LAUNCHER": "1", "LOCAL_WORLD_SIZE": "2"}, "the same command on each machine, with --run-name x"),
    (4, {"LAUNCHER": "1", "LOCAL_WORLD_SIZE": "2", "SLURM_JOB_ID": "7"}, "the same sbatch command, with --run-name x"),
    (4, {"LAUNCHER": "1", "LOCAL_WORLD_SIZE": "2", "SLURM_JOB_ID": "7", "RUN_NAME": "x"}, "the same sbatch command")])
def test_the_last_line_names_what_resumes_this_kind_of_job(world_size, environ, words, monkeypatch):
    for name in ("LAUNCHER", "LOCAL_WORLD_SIZE", "SLURM_JOB_ID", "RUN_NAME"):
        variable = process.LAUNCHER_PID if name == "LAUNCHER" else name
        monkeypatch.setenv(variable, environ[name]) if name in environ else monkeypatch.delenv(variable, raising=False)
    how = how_to_start(world_size, ["--run-name", "x"])
    assert how.endswith(words) and how.startswith("NPROC=2 ") == (world_size == 2 and "LAUNCHER" in environ)
