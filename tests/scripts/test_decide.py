"""./paddock decide: ordinary runs, looked at after each seed, until the question is decided."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
from commands import python
from factories import TinyRun

from common.errors import PaddockError, SettingsError
from extensions.report.data import RunReader
from scripts import decide
from scripts.decide import Comparison


def data_of(page) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="report">(.*?)</script>', page.read_text(), re.DOTALL)[1])


@pytest.mark.slow
def test_a_comparison_trains_each_arm_once(prepared, tmp_path):
    run = TinyRun(prepared, tmp_path / "runs", MAX_STEPS=2, HELLASWAG_EVERY=0, SAMPLE_EVERY=0)
    flags = [flag for flag in run.argv() if not flag.startswith("--run-name")]
    command = ("scripts/decide.py", "--vary", "learning_rate=0.0001,0.02", "--pairs", "1", *flags)
    done = python(*command, code=0)
    answer = ("validation loss: undecided between LEARNING_RATE=0.0001 and LEARNING_RATE=0.02; "
              "1 pair so far, --pairs allows no more; a decision takes 6 or more.")
    assert [line for line in done.stdout.splitlines() if line.startswith("validation loss: ")] == [answer]
    folder = run.output_dir / "decide-learning_rate"
    arms = [folder / f"decide-learning_rate-{rate}-seed1337" for rate in ("0.0001", "0.02")]
    assert sorted(path for path in folder.glob("decide-*") if path.is_dir()) == arms
    comparison = data_of(folder / "decide.html")["comparison"]
    assert comparison["sentences"] == [answer, "All arms read the same rows in every step."]
    readers = [RunReader(arm, "") for arm in arms]
    for reader in readers:
        reader.read()
    row, = comparison["sequence"]["rows"]
    one, other = (reader.value("val_loss") for reader in readers)
    assert other - one == pytest.approx(float(row[3]), abs=1e-4)
    again = python(*command, code=0)
    assert answer in again.stdout and "===" not in again.stdout, "nothing is trained again"
    assert "was started with another margin" in python(*command, "--margin=0.1", code=2).stderr


def fake_run(folder, loss, reason="finished", settings=(), rows="same", data="one", items="one", step_seconds=(0.5,)):
    """A run of two steps that ended with this loss, or failed; or of a step for each of these times."""
    checkpoint = folder / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"identity": {"PRETRAIN_DATA_PATH": data, "HIDDEN_DIM": len(folder.name)}}))
    (folder / "evaluations.jsonl").write_text(json.dumps({"step": 0, "name": "validation", "items": items, "n": 1, "loss": [1.0], "count": [1]}) + "\n")
    steps = max(2, len(step_seconds)) if reason != "loss is NaN" else 1
    (folder / "config.json").write_text(json.dumps({"TRAINING_STAGE": "pretrain", "MAX_STEPS": 2, "TOTAL_BATCH_SIZE": 64, **dict(settings)}))
    timed = [{"step": step, "step_seconds": each, "time": 1.0} for step, each in enumerate(step_seconds, 1 + steps - len(step_seconds))]
    timed[-1]["val_loss"] = loss
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timed))
    (folder / "ledger.jsonl").write_text("".join(json.dumps({"step": step, "rows_crc32": rows, "loss": loss, "grad_norm": 1.0, "updated": True})
                                                 + "\n" for step in range(1, steps + 1)))
    events = [{"time": 1.0, "step": 0, "event": "start"}, {"time": 2.0, "step": steps, "event": "end", "reason": reason}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """Compare arms whose runs exist: losses by arm and seed, where text is the reason of a failure."""
    flags_of = {}

    def make_trial(folder, flags, chosen):
        flags_of[folder.name] = flags
        return decide.Trial(folder, flags)

    def compare(losses, error=0.05, margin=0.0, pairs=20, judge=None, pilots=None, **kinds):
        folder = tmp_path / "runs" / "x"
        shutil.rmtree(folder, ignore_errors=True)
        for arm, values in losses.items():
            for seed, value in enumerate(values):
                loss, reason = (None, value) if isinstance(value, str) else (value, "finished")
                fake_run(folder / f"x-{arm}-seed{seed}", loss, reason, **kinds.get(arm, {}))
        for arm, step_seconds in (pilots or {}).items():
            fake_run(folder / f"x-{arm}-pilot", 9.0, "STOP_STEP" if len(step_seconds) == 20 else "loss is NaN", step_seconds=step_seconds)
        monkeypatch.setattr(decide, "make_trial", make_trial)
        monkeypatch.setattr(decide, "gpus_of", lambda config: [None])
        config = SimpleNamespace(seed=0, data_seed=None, output_dir=str(tmp_path / "runs"), max_steps=100, total_batch_size=64, epochs=None)
        args = SimpleNamespace(name="x", judge=judge, error=error, margin=margin, pairs=pairs, budget=float("inf"), equal=pilots and "seconds")
        comparison = Comparison(args, [decide.Arm(arm, arm, [], config) for arm in losses])
        comparison.run()
        return data_of(folder / "decide.html")["comparison"] | {"flags": flags_of}

    return compare


def test_the_sentence_says_what_the_runs_say(compared):
    better = compared({"a": [2.0, 2.1, 2.2, 2.1, 2.0, 2.2, 9.0], "b": [1.5, 1.61, 1.69, 1.6, 1.51, 1.7, 0.0]})["sentences"]
    assert better[0].startswith("validation loss: b is better than a by 0.4983 ± ") and "decided after 6 of at most 20 pairs" in better[0]
    assert better[1:] == ["All arms read the same rows in every step."]
    alike = compared({"a": [2.0, 2.001, 2.0, 2.001, 2.0, 2.001, 2.0, 2.001], "b": [2.001, 2.0, 2.001, 2.0, 2.001, 2.0, 2.001, 2.0]},
                     margin=0.01, b={"rows": "others"})["sentences"]
    assert "a and b have no difference that matters: b minus a is between -0.0" in alike[0] and len(alike) == 1, "other rows are not called the same"
    other_data = compared({"a": [2.0], "b": [2.1]}, pairs=1, b={"data": "other"})["sentences"]
    longer = compared({"a": [2.0], "b": [2.1]}, pairs=1, b={"settings": {"MAX_SEQ_LEN": 64}})["sentences"]
    assert len(other_data) == len(longer) == 1, "equal numbers of rows in other data are not the same rows"
    with pytest.raises(SettingsError, match="--judge val_loss: the arms were evaluated on different items; set the same VALIDATION_DATA_PATH"):
        compared({"a": [2.0], "b": [2.1]}, b={"data": "other", "items": "other"})
    with pytest.raises(SettingsError, match="--judge accuracy.*val_loss"):
        compared({"a": [2.0], "b": [2.1]}, judge="accuracy")
    undecided = compared({"a": [2.0, 2.0], "b": [2.1, 1.9]}, pairs=2)["sentences"][0]
    assert undecided == ("validation loss: undecided between a and b; 2 pairs so far, --pairs allows no more; a decision takes 6 or more.")


def test_equal_seconds_are_steps_by_the_recorded_times_of_pilots_and_the_sentence_has_the_times_of_the_runs(compared):
    """A step of b takes 2.5 times as long, after the first ten, which compile. Its runs took 20 % longer than forecast."""
    pilots = {"a": [9.0] * 10 + [0.1] * 9 + [5.0], "b": [1.0] * 10 + [0.25] * 10}
    kinds = {"a": {"step_seconds": [0.1] * 100, "settings": {"MAX_STEPS": 100}}, "b": {"step_seconds": [0.3] * 40, "settings": {"MAX_STEPS": 40}}}
    found = compared({"a": [2.0], "b": [1.5]}, pairs=1, pilots=pilots, **kinds)
    assert {name: flags for name, flags in found["flags"].items() if "seed" in name} == {"x-a-seed0": ["--max-steps=100"], "x-b-seed0": ["--max-steps=40"]}
    assert "(b has 0.40 times the tokens and 0.40 times the FLOPs and 1.20 times the seconds of a)" in found["sentences"][0]
    without = compared({"a": [2.0], "b": [1.5]}, pairs=1, **kinds)
    assert "seconds" not in without["sentences"][0] and without["flags"]["x-b-seed0"] == []
    with pytest.raises(PaddockError, match="x-b-pilot failed, so its time for a step is unknown"):
        compared({"a": [2.0], "b": [1.5]}, pairs=1, pilots=pilots | {"b": [1.0] * 3})


def test_a_failed_run_counts_as_the_worst_and_is_named(compared):
    failed = compared({"a": [2.0] * 8, "b": [2.1, "loss is NaN", 2.1, 2.1, 2.1, 2.1, 2.1, 2.1]})
    assert failed["sentences"][0].startswith("validation loss: a is better than b; decided after 6 of at most 20 pairs")
    assert "x-b-seed1 failed, which counts as the worst." in failed["sentences"][0]
    assert [row[2] for row in failed["sequence"]["rows"]][:3] == ["2.1000", "inf", "2.1000"]


def test_several_arms_share_the_error_and_the_worse_ones_go(compared):
    losses = {"a": [2.0 + 0.001 * seed for seed in range(12)], "b": [2.5 + 0.001 * seed for seed in range(12)],
              "c": [1.0 + 0.0011 * seed for seed in range(12)]}
    found = compared(losses)
    assert found["sentences"][0].startswith("validation loss: c is the best of 3; decided after ")
    seeds = int(re.search(r"after (\d+)", found["sentences"][0])[1])
    assert seeds > 6, "three comparisons share the error, so six pairs are not enough"
    assert sum("is better than" in each for each in found["sentences"]) == 3
    assert len(found["sequence"]["rows"]) == seeds
