"""A run's folder as the page's data: real runs, old ones, damaged ones; curves, and logs as they grow."""

import json
import shutil
import time

import numpy as np
import pytest
from factories import TinyRun, stop_at
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.schema import read_lines
from common.files import FileLock
from extensions.report.curves import Curve, as_json, charts, points_per_curve
from extensions.report.data import LogFile
from extensions.report.goodput import KILLED
from extensions.report.numbers import without_control_tokens
from extensions.report.page import Report, as_text


def read(*folders) -> Report:
    report = Report(folders)
    report.read()
    return report


@pytest.fixture(scope="module")
def resumed(prepared, tmp_path_factory) -> TinyRun:
    """A run that a signal stopped after step 4, and that goes on with another setting."""
    run = TinyRun(prepared, tmp_path_factory.mktemp("resumed"), RUN_NAME="resumed")
    with stop_at(4):
        assert run.train() == 143
    assert run.train(LEARNING_RATE=0.02, ALLOW_RESUME_MISMATCH="LEARNING_RATE") == 0
    return run


def test_the_page_of_a_run_shows_what_its_files_hold(resumed):
    data = read(resumed.folder).data()
    run, = data["runs"]
    assert (run["name"], run["state"], run["step"], run["max_steps"]) == ("resumed", "finished", 6, 6)
    assert run["sentence"] == "finished after 6 of 6 steps" and run["eta_seconds"] is None
    for name in ("train_loss", "val_loss", "learning_rate", "tokens_per_second"):
        expected = resumed.column(name)
        assert run["curves"][name]["x"] == [*expected] and run["curves"][name]["y"] == pytest.approx([*expected.values()], rel=1e-5)
    assert [sample["step"] for sample in run["samples"]] == [line["step"] for line in resumed.lines("samples")]
    settings = {line["name"]: line for line in run["settings"]}
    assert (settings["DIM"]["value"], settings["DIM"]["changed"], settings["DIM"]["default"]) == ("32", True, "768")
    assert settings["COMPILE"]["value"] == "false" and settings["SEED"]["changed"] is False and settings["SEED"]["meaning"]
    assert "HF_TOKEN" not in settings
    assert [(part["step"], part["world_size"]) for part in run["segments"]] == [(1, 1), (5, 1)]
    assert {"name": "LEARNING_RATE", "before": "0.01", "after": "0.02"} in run["segments"][1]["changes"]
    facts = dict(run["facts"])
    assert (facts["stage"], facts["tokens"], facts["newest checkpoint"]) == ("pretrain", "1,536", "step-00000006")
    assert "shards" in run["sources"][0]["label"]
    assert {"loss", "accuracy", "learning-rate", "grad-norm", "throughput"} <= {chart["id"] for chart in data["charts"]}
    curves = {series["curve"] for chart in data["charts"] for series in chart["series"]}
    assert curves <= run["curves"].keys() and len(as_text(data)) < 100_000


@pytest.fixture
def folder(tmp_path):
    """A run without checkpoints, of 5 of 10 steps; events are written by the tests."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text('{"MAX_STEPS": 10}')
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "train_loss": 1.0}}\n' for step in range(1, 6)))
    return folder


def started(folder, *events) -> None:
    start = {"time": time.time() - 60, "step": 0, "event": "start"}
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (start, *events)))


@pytest.mark.parametrize("reason, state, sentence", [
    ("finished", "stopped", "stopped after 5 of 10 steps"), ("STOP_STEP", "stopped", "stopped by STOP_STEP after 5 of 10 steps"), ("early stopping", "finished", "stopped early after 5 of 10 steps"),
    ("stopped by a signal", "stopped", "stopped by a signal after 5 of 10 steps"),
    ("the disk is full", "failed", "failed after 5 of 10 steps: the disk is full"),
    (None, "failed", "exited without reporting a reason (killed, or machine failure) after 5 of 10 steps")])
def test_the_report_shows_how_a_run_ended(folder, reason, state, sentence):
    started(folder, *([{"time": time.time(), "step": 5, "event": "end", "reason": reason}] if reason else []))
    run, = read(folder).data()["runs"]
    assert (run["state"], run["sentence"]) == (state, sentence)


def test_a_run_goes_on_while_its_lock_is_held_and_the_lock_is_left_alone(folder):
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "time": {1000 + 3 * step}}}\n' for step in range(1, 6)))
    with FileLock(folder / "run.lock") as lock:
        assert lock.take() == ""
        before = (folder / "run.lock").stat()
        run, = read(folder).data()["runs"]
        assert (run["state"], run["sentence"], run["eta_seconds"]) == ("running", "running: 5 of 10 steps done", 15)
        assert (folder / "run.lock").stat() == before
    assert read(folder).data()["runs"][0]["state"] == "stopped"


def test_alarms_come_from_the_step_log_and_the_events(folder):
    good = {"step": 1, "rows_crc32": "0", "loss": 1.0, "grad_norm": 1.0, "updated": True}
    rows = [good, good | {"step": 2, "loss": 9.0, "spike": 12.34, "updated": False, "rows": [1, 2]},
            good | {"step": 3, "grad_norm": None, "updated": False}, good | {"step": 5, "loss": None, "grad_norm": 0.0, "updated": False}]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    started(folder, {"time": time.time(), "step": 4, "event": "slow rank", "rank": 5, "phase": "data", "ratio": 1.4, "host": "a"},
            {"time": time.time(), "step": 6, "event": "slow rank ended", "rank": 5, "phase": "data"},
            {"time": time.time(), "step": 1, "event": "drift", "rank": 2}, {"time": time.time(), "step": 5, "event": "save", "seconds": 1})
    alarms = read(folder).data()["runs"][0]["alarms"]
    assert [(alarm["step"], alarm["kind"]) for alarm in alarms] == [(1, "drift"), (2, "loss spike"), (3, "update left out"), (4, "slow rank"),
                                                                    (5, "update left out"), (6, "slow rank ended")]
    assert "12.3 robust standard deviations" in alarms[1]["text"] and "rank 5 on a takes 1.40 times as long" in alarms[3]["text"]
    started(folder, {"time": time.time(), "step": 2, "event": "end", "reason": "step 3 was not finite"})
    assert [alarm["kind"] for alarm in read(folder).data()["runs"][0]["alarms"]] == ["loss spike", "step not finite", "step not finite"]


@pytest.mark.parametrize("value", ['"high"', "NaN", "1" + "0" * 400])
def test_only_the_value_that_is_not_a_number_is_left_out_and_counted(folder, value):
    lines = [f'{{"step": {step}, "train_loss": {value if step == 500 else 1.5}, "grad_norm": 0.5}}\n' for step in range(1, 1501)]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"step": 1501, "train_loss": null}\n{"step": 1501, "train_loss": 2}\n{}\n')
    run, = read(folder).data()["runs"]
    loss = run["curves"]["train_loss"]
    assert loss["x"] == [step for step in range(1, 1502) if step != 500] and loss["y"][-1] is None
    assert len(run["curves"]["grad_norm"]["x"]) == 1500
    assert dict(run["facts"])["invalid, left out"] == "2 lines of metrics.jsonl, 1 value of train_loss"


def test_a_failed_run_reports_the_failure_the_last_save_and_the_replay_command(folder):
    for name in ("checkpoints/step-00000004", "debug/step-00000006"):
        (folder / name).mkdir(parents=True)
    started(folder, {"time": time.time(), "step": 5, "event": "end", "reason": "step 6 was not finite."})
    assert read(folder).data()["runs"][0]["failure"] == {
        "where": "in step 6", "reason": "step 6 was not finite.", "saved": "step-00000004 in checkpoints/",
        "command": f"./paddock replay {folder} --step 6"}
    started(folder)
    shutil.rmtree(folder / "debug")
    failure = read(folder).data()["runs"][0]["failure"]
    assert (failure["where"], failure["command"], failure["reason"]) == ("after step 5", None, KILLED)
    started(folder, {"time": time.time(), "step": 5, "event": "end", "reason": "finished"})
    assert read(folder).data()["runs"][0]["failure"] is None


@pytest.mark.parametrize("recorded, shown", [
    ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWho is Tim?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "user: Who is Tim?"),
    ("<s>[INST] Who is Tim? [/INST]", "Who is Tim? "), ("<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "user: Hi"),
    ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n1!<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n",
     "system: Be brief.\nuser: 1?\nassistant: 1!\nuser: 2?"),
    ("user\nof a machine", "user\nof a machine"), (" if a < b and c > d | e", " if a < b and c > d | e")])
def test_prompts_read_as_words(recorded, shown):
    assert without_control_tokens(recorded) == shown


VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=300)


def curve_of(x, y) -> Curve:
    curve = Curve()
    for step, value in zip(x, y):
        curve.add(step, value)
    return curve


@given(VALUES, st.integers(6, 50), st.integers(1, 40))
def test_a_point_is_the_mean_and_the_range_of_the_values_it_stands_for(values, most, stride):
    x, y = np.arange(len(values)) * stride, np.array(values)
    points = curve_of(x, y).points(most)
    assert len(points.x) <= most and (np.diff(points.x) > 0).all() and points.count.sum() == np.isfinite(y).sum()
    assert (points.x[0], points.x[-1]) == (x[0], x[-1]) and points.y[[0, -1]].tolist() == pytest.approx(y[[0, -1]].tolist(), nan_ok=True)
    edges = np.concatenate(([0], np.cumsum(np.maximum(points.count, 1)).astype(int))) if np.isfinite(y).all() else ()
    for start, end, mean, low, high in zip(edges, edges[1:], points.y, points.low, points.high):
        assert mean == pytest.approx(y[start:end].mean(), rel=1e-9, abs=1e-6)
        assert (low, high) == (y[start:end].min(), y[start:end].max())


def test_what_is_not_finite_is_a_gap_and_json_has_no_nan():
    curve = curve_of([1, 2, 3, 4], [1.0, np.inf, None, 2 / 3])
    assert as_json(curve.points(100)) == {"x": [1, 2, 3, 4], "y": [1, None, None, 0.66666667]} and curve.newest == (2 / 3, 4)
    assert curve.known()[0].tolist() == [1, 4] and (curve.at(4), curve.at(3), curve.at(5)) == (2 / 3, None, None)


@pytest.mark.parametrize("lengths, budget, most", [([10, 10], 1000, 10), ([10, 5000], 1010, 1000),
                                                   ([10, 900, 5000, 5000], 3010, 1050), ([5000] * 100, 1000, 50)])
def test_short_curves_are_whole_and_long_ones_share_what_is_left(lengths, budget, most):
    assert points_per_curve(lengths, budget) == most


@pytest.fixture
def log(tmp_path):
    return LogFile(tmp_path / "metrics.jsonl")


def new(log: LogFile) -> bytes:
    return b"".join(line for line, _ in log.new_lines())


def lines(*steps: int) -> bytes:
    return b"".join(json.dumps({"step": step, "time": 1.5 * step}).encode() + b"\n" for step in steps)


def test_only_what_is_new_is_read_and_an_incomplete_line_waits(log):
    assert new(log) == b""
    with open(log.path, "ab", buffering=0) as file:
        file.write(lines(1, 2) + b'{"step": 3, "ti')
        assert new(log) == lines(1, 2)
        file.write(b'me": 4.5}\n')
        assert new(log) == lines(3) and not log.is_replaced()


@pytest.mark.parametrize("after", [lines(1, 5, 6, 7, 8, 9, 10, 11), None])
def test_a_file_that_a_resume_has_replaced_is_noticed_but_not_one_that_begins_alike(log, after):
    log.path.write_bytes(lines(1, 2, 3, 4))
    assert new(log) == lines(1, 2, 3, 4)
    log.path.write_bytes(lines(1, 2, 3, 4, 5))
    assert not log.is_replaced() and new(log) == lines(5)
    log.path.unlink()
    if after is not None:
        log.path.write_bytes(after)
    assert log.is_replaced()


def test_a_last_line_that_lacks_only_its_end_is_read_when_nothing_is_appended_any_more(log):
    log.path.write_bytes(lines(1, 2)[:-1])
    assert new(log) == lines(1)
    assert [(line, entry.step) for line, entry in read_lines(log.path)] == [(lines(1), 1), (lines(2), 2)]
    log.path.write_bytes(lines(1, 2)[:-2])
    assert [line for line, _ in read_lines(log.path)] == [lines(1)]


def test_scores_of_generated_answers_are_of_held_out_prompts_and_never_of_training():
    last = dict.fromkeys(["train_loss", "own_loss", "generation_right", *(f"generation_{name}" for name in ("rouge_1", "rouge_l", "bleu"))], 0.5)
    labels = {line["curve"]: (chart["title"], line["label"]) for chart in charts(last, "x") for line in chart["series"]}
    assert labels.keys() == last.keys()
    assert labels["generation_right"] == ("Right, of generated answers", "held-out prompts") and labels["own_loss"] == ("Own loss", "training")
    assert labels["generation_rouge_1"] == ("Generated answers", "ROUGE-1")
