"""Any past step comes back bit for bit, with proof; a flip of an answer is found; the run stays as it is."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from commands import python
from factories import MODES, UNMEASURED, TinyRun, contents

from checkpoint import store
from common.errors import CheckpointError, PaddockError, SettingsError
from data_preparation_utils import PreparationOptions, prepare_set
from extensions.debug import history as history_module
from extensions.debug import replay as replay_module
from extensions.debug.history import diff, recreate

CHECKED = {**UNMEASURED, "LEDGER_CHECKSUM": "true"}
PRINTED: list[str] = []


@pytest.fixture(autouse=True)
def lines(monkeypatch) -> list[str]:
    PRINTED.clear()
    monkeypatch.setattr(history_module, "show", PRINTED.append)
    return PRINTED


@pytest.fixture
def forked(monkeypatch):
    """Forks the processes that repeat steps, so that they need not import torch."""
    def run(command, env, stdout, **_) -> SimpleNamespace:
        done = python(*command[1:], env=env)
        stdout.write((done.stdout + done.stderr).encode())
        return done

    monkeypatch.setattr(history_module, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def check_step(run: TinyRun, step: int, output: Path, expected: dict[str, str]) -> str:
    """Re-create a step; compare it with the checkpoint that the run had, and return what is printed."""
    before = contents(run.folder)
    recreate(run.folder, step, output)
    assert hashes(output) == expected and contents(run.folder) == before
    store.verify(output)
    assert sorted(path.name for path in output.parent.iterdir()) == [output.name], "something temporary is left"
    return "\n".join(PRINTED)


def all_steps(run: TinyRun, steps: int) -> dict[int, dict[str, str]]:
    """The hashes of all checkpoints, of which then only every third stays."""
    expected = {step: hashes(run.checkpoint(step)) for step in range(1, steps + 1)}
    for step in expected:
        if step % 3:
            shutil.rmtree(run.checkpoint(step))
    return expected


@pytest.fixture(scope="module")
def checked(prepared, tmp_path_factory):
    """A run of eight steps with checksums, stopped once, that validates and keeps every third step; and the hashes of all."""
    run = TinyRun(prepared, tmp_path_factory.mktemp("checked"), **CHECKED | {"VALIDATE_EVERY": 2}, SAVE_EVERY=1, MAX_STEPS=8)
    assert run.train(STOP_STEP=4) == run.train() == 0
    return run, all_steps(run, 8)


def test_a_step_comes_back_with_its_checksum_as_proof(checked, tmp_path, monkeypatch):
    run, expected = checked
    for name in ("MICRO_BATCH_SIZE", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "SEED"):
        monkeypatch.setenv(name, "4")  # not as recorded
    text = check_step(run, 8, tmp_path / "out" / "eight", expected[8])
    assert "Step 8" in text and "2 steps from step-00000006, about " in text
    assert "Steps 7 to 8: WORLD_SIZE=1, SHARDING=none, MICRO_BATCH_SIZE=2, 1 CPU thread per rank" in text
    assert "the checksum of its weights is that of the step log" in text
    state = store.read_state(tmp_path / "out" / "eight")
    assert state["settings"]["SAVE_EVERY"] == 1 and state["settings"]["STOP_STEP"] is None, "a resume keeps the run's settings"
    assert state["progress"]["step"] == 8 and state["progress"]["best_val_loss"] is not None


def test_without_checksums_the_losses_are_the_proof(tiny_run, forked, tmp_path, lines):
    run = tiny_run(**UNMEASURED, SAVE_EVERY=1, MAX_STEPS=4).trained()
    expected = all_steps(run, 4)
    recreate(run.folder, 2, tmp_path / "out" / "two", {})
    assert hashes(tmp_path / "out" / "two") == expected[2]
    assert "2 steps from the start" in lines[0] and "losses and gradient norms" in lines[-1]


def another_value(run: TinyRun, name: str, value, step: int) -> None:
    path = run.folder / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[step - 1][name] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def start_event(run: TinyRun, **values) -> None:
    path = run.folder / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | (values if line["event"] == "start" else {})) + "\n"
                            for line in lines))


MISTAKES = {
    "another weight": (lambda run: another_value(run, "weights", "0" * 16, 5), {}, "step 5 is not the recorded step: weights is"),
    "another loss": (lambda run: another_value(run, "loss", 1.5, 4), {}, "step 4 is not the recorded step: loss is"),
    "another commit": (lambda run: start_event(run, commit="abc"), {}, "taken with commit abc, but this is"),
    "another device": (lambda run: start_event(run, device="NVIDIA H100"), {}, "taken with device NVIDIA H100"),
    "no checkpoint": (lambda run: shutil.rmtree(run.checkpoint(3)), {}, "add --from-start to repeat all steps, or set KEEP_EVERY"),
    "no such step": (lambda run: None, {"step": 9}, "step 9: the run has no such step; .* has the steps 1 to 8"),
    "other data": (lambda run: (run.folder / "configs" / "step-00000005.json").write_text(
        (run.folder / "configs" / "step-00000005.json").read_text().replace('"SEED": 1337', '"SEED": 7')), {}, "SEED was 1337, is 7")}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_step_that_differs_from_the_record_is_an_error_and_nothing_is_written(mistake, checked, forked, tmp_path):
    run = checked[0].copy(tmp_path / "copy")
    change, options, words = MISTAKES[mistake]
    change(run)
    with pytest.raises((CheckpointError, SettingsError, PaddockError), match=words):
        recreate(run.folder, options.get("step", 5), tmp_path / "out" / "five")
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]


def test_runs_part_at_a_step_and_a_tensor(checked, tmp_path, lines):
    run = checked[0]
    other = run.copy(tmp_path / "other")
    assert not diff(run.folder, other.folder)
    assert lines == ["8 common steps, 1 to 8: equal, weights included"]
    tensors = run.lines("ledger")[4]["tensors"]
    another_value(other, "tensors", "00000000" + tensors[8:], 5)
    lines.clear()
    assert diff(run.folder, other.folder)
    assert lines[0].startswith("The first difference is in step 5")
    assert lines[1:] == ["1 of 20 tensors differ after it, the first is layers.0.attention.wk.weight", "Settings: equal"]


def test_a_replay_names_the_rank_whose_rows_differ(tiny_run, tmp_path, monkeypatch, lines):
    """Of one run, the seventh of eight rows has another gradient when it is replayed, as with other data."""
    run = tiny_run(**CHECKED, MAX_STEPS=2, SAVE_EVERY=1)
    run.ends([0, 0])
    other, calls, seventh, original = run.copy(tmp_path / "other"), [], [0], replay_module.gradient_norm
    another_value(other, "loss", 1.0, 2)

    def planted(model):  # called for each row
        calls.append(model)
        return original(model) + (len(calls) == seventh[0])

    monkeypatch.setattr(replay_module, "gradient_norm", planted)
    for number, words in ((15, "the rows of rank 1 give other gradients"), (0, "settings and data are not the cause")):
        seventh[0] = number
        lines.clear(), calls.clear()
        assert diff(run.folder, other.folder, replays=True)
        text = "\n".join(lines)
        assert "The first difference is in step 2" in text and text.count(words) == 2, text
    smaller = tiny_run(**CHECKED, MAX_STEPS=2, SAVE_EVERY=1, MICRO_BATCH_SIZE=1, RUN_NAME="smaller").trained()
    another_value(smaller, "loss", 1.0, 2)
    lines.clear()
    assert diff(run.folder, smaller.folder, replays=True)
    text = "\n".join(lines)
    assert text.count("every row's gradient is the other run's: with another WORLD_SIZE and MICRO_BATCH_SIZE, they are added in another order") == 2, text


@pytest.mark.parametrize("first, words", [(1, "could not be repeated: .*PRETRAIN_DATA_PATH"), (0, "step 1 is not the recorded step: .* Data, code")])
def test_data_that_was_prepared_again_is_an_error(first, words, prepared, forked, tmp_path):
    shards = Path(shutil.copytree(prepared.shards, tmp_path / "shards"))
    run = TinyRun(prepared._replace(shards=shards), tmp_path, **CHECKED, SAVE_EVERY=1, MAX_STEPS=2).trained()
    (tmp_path / "other.jsonl").write_text((json.dumps({"text": "A dog saw the cat."}) + "\n") * 1000)
    options = PreparationOptions(str(prepared.tokenizer), "auto", 2000, 0.0, workers=1)
    shutil.rmtree(shards)
    shutil.move(prepare_set("documents", str(tmp_path / "other.jsonl"), tmp_path / "other", options), shards)
    with pytest.raises(PaddockError, match=words):
        recreate(run.folder, 2, tmp_path / "out", {1: run.checkpoint(1)} if first else {})


FULL, HYBRID = {"SHARDING": "full", "MICRO_BATCH_SIZE": 1}, {"SHARDING": "hybrid", "SHARD_DEGREE": 2, "MICRO_BATCH_SIZE": 1}


@pytest.mark.parametrize("recorded, again, settings", [
    (1, 2, {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 1, HYBRID), (2, None, FULL), (2, 1, FULL), (4, None, HYBRID)))])
def test_a_reproducible_run_comes_back_on_another_number_of_ranks(recorded, again, settings, tiny_run, forked, tmp_path, lines):
    run = tiny_run(**UNMEASURED | settings, REPRODUCIBLE="true", SAVE_EVERY=1, MAX_STEPS=3)
    run.ends([0] * recorded)
    output = tmp_path / "out" / "three"
    recreate(run.folder, 3, output, {1: run.checkpoint(1)}, ranks=again)
    assert hashes(output) == hashes(run.checkpoint(3)) and f"WORLD_SIZE={again or recorded}, SHARDING={settings.get('SHARDING', 'none')}" in lines[1]


RANDOM_STEPS = 10  # of each stage and number of ranks: 100 in all
STAGES_OF_SOAK = {**MODES, "pretrain": {"TRAINING_STAGE": "pretrain"}}


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode", ["pretrain", "sft", "dpo-stored", "distilled", "lora-sft"])
def test_random_steps_of_every_stage_come_back(mode, world_size, stages, tmp_path):
    """From a random earlier checkpoint, or from the start; adapters with dropout."""
    settings = stages.settings(mode, STAGES_OF_SOAK) | CHECKED | {"OUTPUT_DIR": tmp_path / "runs", "SAVE_EVERY": 1, "MAX_STEPS": 6}
    run = TinyRun(stages.prepared, tmp_path / "runs", **settings)
    run.ends([0] * world_size)
    rng = Random(f"{mode} {world_size}")
    for number in range(RANDOM_STEPS):
        step = rng.randint(1, 6)
        first, output = rng.randrange(step), tmp_path / "out" / str(number)
        recreate(run.folder, step, output, {first: run.checkpoint(first)} if first else {})
        assert hashes(output) == hashes(run.checkpoint(step)), (step, first)


def test_other_code_and_ranks_must_be_asked_for(checked, forked, tmp_path, lines):
    run, output = checked[0].copy(tmp_path / "copy"), tmp_path / "out" / "five"
    with pytest.raises(SettingsError, match="without REPRODUCIBLE, which this run did not set"):
        recreate(run.folder, 5, output, ranks=2)
    start_event(run, commit="abc")
    recreate(run.folder, 5, output, force=True)
    assert lines[0].startswith("Warning: step 4 was taken with commit abc, but this is")
