"""Every stage in the training loop: exact steps, stop and resume, references and adapters, and what is refused."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from commands import during
from factories import (
    MODES,
    ONLINE,
    UNMEASURED,
    TinyRun,
    assert_same_run,
    is_rank,
    prepare_stages,
    stop_at,
    without_clocks,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import train
from data_pipeline import shards
from learn import reference_cache as precompute


@pytest.fixture(scope="module")
def stages(prepared, tmp_path_factory):
    """References that other tests have stored are not here."""
    return prepare_stages(prepared, tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def finished(stages, tmp_path_factory):
    """A function that returns an uninterrupted run of a mode, which is trained once."""
    runs: dict[str, TinyRun] = {}

    def run_of(mode: str) -> TinyRun:
        if mode not in runs:
            runs[mode] = stages.run(mode, tmp_path_factory.mktemp(mode))
            assert runs[mode].train() == 0
        return runs[mode]

    return run_of


@pytest.fixture
def run(stages, tmp_path):
    return lambda mode, **changes: stages.run(mode, tmp_path / "runs", **changes)


# They differ from dpo-live, and from distilled and sft, in the loss only; the last, from lora-sft and dpo-live together, in nothing.
SAME_STATE = ("orpo", "simpo", "distilled-sft", "lora-dpo")


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=pytest.mark.slow) if mode in SAME_STATE else mode for mode in (*MODES, *ONLINE)])
def test_a_run_that_was_stopped_and_resumed_is_identical(mode, finished, run):
    """Validation and samples come after step 2, the signal in step 3."""
    whole, stopped = finished(mode), run(mode)
    with stop_at(3):
        assert stopped.train() == train.EXIT_PREEMPTED
    assert stopped.steps_saved()[-1] == 3 and list(stopped.column("train_loss")) == [1, 2, 3]
    assert stopped.train() == 0
    validated = stopped.column("val_reward" if mode in ONLINE else "val_loss")
    assert list(validated) == [0, 2, 4] and stopped.column("hellaswag_n") == {4: 10}
    assert_same_run(stopped, whole, 4)


@pytest.mark.parametrize("mode, data", [("sft", "chats"), ("lora-dpo", "pairs"), ("grpo", "prompts"), ("pretrain", "shards")])
def test_a_validation_set_of_one_s_own_is_read_by_what_it_holds_out_or_as_a_whole(mode, data, stages, tmp_path, capsys):
    """A set of just the examples that the data holds out gives the same figures as these, and training has the same bits."""
    folder = stages.prepared.shards if mode == "pretrain" else getattr(stages, data)

    def trained(name, **changes):
        changes = UNMEASURED | {"VALIDATE_EVERY": 1, "MAX_STEPS": 1} | changes
        run = TinyRun(stages.prepared, tmp_path / name, **changes) if mode == "pretrain" else stages.run(mode, tmp_path / name, **changes)
        return run.trained()

    def alone(name, split):
        """A copy whose only split is this one."""
        copy = shutil.copytree(folder, tmp_path / name)
        manifest = json.loads((copy / "manifest.json").read_text())
        nothing = {key: [] if key == "shards" else 0 for key in manifest["splits"][split] if key != "segments"}
        manifest["splits"] = {"train": manifest["splits"][split], "validation": nothing}
        (copy / "manifest.json").write_text(json.dumps(manifest))
        return copy

    usual = trained("usual")
    for other in (trained("held-out", VALIDATION_DATA_PATH=folder), trained("whole", VALIDATION_DATA_PATH=alone("copy", "validation"))):
        assert without_clocks(other.metrics()) == without_clocks(usual.metrics()) and other.lines("evaluations") == usual.lines("evaluations")
        assert_same_run(other, usual, 1, logs=["ledger"])
    capsys.readouterr()
    trained("others", VALIDATION_DATA_PATH=alone("more", "train"))
    assert "more: the same tokens that the run trains on" in capsys.readouterr().out


def bare(path: Path, folder: Path) -> Path:
    """Copy prepared data without stored references."""
    return Path(shutil.copytree(path, folder, ignore=shutil.ignore_patterns("reference-*")))


@pytest.mark.parametrize("mode", ["dpo-stored", "distilled"])
def test_two_ranks_learn_and_measure_what_one_does(mode, finished, run, stages, tmp_path):
    """They also compute stored references together."""
    both = run(mode, DPO_DATA_PATH=bare(stages.pairs, tmp_path / "pairs"),
               PRETRAIN_DATA_PATH=bare(stages.prepared.shards, tmp_path / "shards"))
    both.ends([0, 0])
    for actual, other in zip(without_clocks(both.metrics()), without_clocks(finished(mode).metrics()), strict=True):
        assert actual == pytest.approx(other, rel=1e-4, abs=1e-5)


def signal_the_last_rank_in_the_reference() -> None:
    if is_rank(int(os.environ.get("WORLD_SIZE", 1)) - 1):
        during(precompute, "frozen_logprobs", lambda: os.kill(os.getpid(), signal.SIGTERM), 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_a_signal_stops_while_the_reference_is_computed_leave_together_and_begin_again(ranks, run, bare_pairs, finished):
    stopped = run("dpo-stored", DPO_DATA_PATH=bare_pairs)
    text = stopped.ends([train.EXIT_PREEMPTED] * ranks, signal_the_last_rank_in_the_reference)
    assert not [*bare_pairs.glob("*reference-*.safetensors")] and not stopped.steps_saved() and "Traceback" not in text
    if ranks == 1:
        assert stopped.train() == 0
        assert_same_run(stopped, finished("dpo-stored"), 4)


def test_unpaired_answers_are_trained_alike_on_two_ranks_and_with_a_live_reference(finished, run):
    """The reference point of a step is that of all ranks' micro-batches; validation has one for each micro-batch."""
    one, live, two = finished("kto"), run("kto", RUN_NAME="live", DPO_REFERENCE="live"), run("kto", RUN_NAME="two")
    assert live.train() == 0
    two.ends([0, 0])
    points = one.column("kl")
    assert points[1] == 0 and points[4] > 0, "the model is its reference at first, and leaves it"
    for other in (live, two):
        for actual, its in zip(without_clocks(one.metrics()), without_clocks(other.metrics()), strict=True):
            assert actual == pytest.approx(its, rel=1e-4, abs=1e-5)


@pytest.fixture
def bare_pairs(stages, tmp_path) -> Path:
    return bare(stages.pairs, tmp_path / "bare")


DPO_MODES = ("dpo-stored", "dpo-live", "lora-dpo")


def test_stored_and_live_references_and_the_base_under_adapters_are_one(finished, run):
    stored, live, adapters = (finished(mode) for mode in DPO_MODES)
    adapters_stored = run("lora-dpo", DPO_REFERENCE="stored").trained()
    for one, other in ((stored, live), (adapters, adapters_stored)):
        for name in ("train_loss", "val_loss", "reward_margin", "val_reward_margin", "val_logprob_chosen"):
            assert one.column(name) == pytest.approx(other.column(name), rel=1e-5, abs=1e-6), name
        assert one.column("val_loss")[4] != pytest.approx(math.log(2), abs=1e-4), "nothing was learned that could differ"
    for name in ("val_logprob_chosen", "val_logprob_rejected"):
        assert adapters.column(name)[0] == pytest.approx(stored.column(name)[0], rel=1e-5)


@pytest.fixture
def own_pairs(stages, finished, tmp_path) -> Path:
    """A copy of the pairs and their stored reference."""
    finished("dpo-stored")
    shutil.copytree(stages.pairs, tmp_path / "pairs")
    return tmp_path / "pairs"


def the_reference(pairs: Path) -> Path:
    (file,) = pairs.glob("reference-*-train-96-*.safetensors")
    return file


@pytest.mark.parametrize("harm, message", [
    *((fact, f"is stale: its {fact} was another") for fact in ("weights_sha256", "data")), ("cut", "cannot be read"), ("changed", "is damaged")])
def test_a_stale_or_damaged_reference_is_recomputed_and_reported(harm, message, own_pairs, run, capsys):
    file = the_reference(own_pairs)
    content = bytearray(file.read_bytes())
    if harm in ("cut", "changed"):
        content[-5] ^= 1
        file.write_bytes(content if harm == "changed" else content[:-8])
    else:
        with safe_open(file, framework="pt") as opened:
            facts = opened.metadata()
        save_file(load_file(file), file, metadata=facts | {harm: "another"})
    again = run("dpo-stored", DPO_DATA_PATH=own_pairs, MAX_STEPS=1, **UNMEASURED).trained()
    assert f"{file} {message}" in capsys.readouterr().out
    assert again.train() == 0
    assert "computed" not in capsys.readouterr().out


def test_a_run_computes_the_reference_of_the_pairs_that_it_reads_unless_it_is_known(finished, run, bare_pairs, capsys):
    """A short run computes few, and the next one those that are missing; both read what a whole run reads."""
    known, printed = [], []
    for steps in (1, 4):
        assert run("dpo-stored", DPO_DATA_PATH=bare_pairs, MAX_STEPS=steps, RUN_NAME=f"of-{steps}").train() == 0
        known.append(load_file(the_reference(bare_pairs))["logprob_E2"])
        printed += re.findall(r"log-probabilities of (\d+) pairs?, computed", capsys.readouterr().out)
    few, all = known
    is_known = ~few.isnan()
    assert torch.equal(few[is_known], all[is_known]) and not all.isnan().all()
    assert is_known[:, 0].sum() == int(printed[0]) and (~all.isnan())[:, 0].sum() == int(printed[0]) + int(printed[2])
    long = run("dpo-stored", RUN_NAME="of-4")
    for name in ("train_loss", "val_loss", "reward_margin"):
        assert long.column(name) == pytest.approx(finished("dpo-stored").column(name), rel=1e-6, abs=1e-7)


def test_a_reference_that_cannot_be_stored_beside_the_data_is_stored_elsewhere(run, stages, tmp_path, capsys,
                                                                                        monkeypatch):
    data = bare(stages.pairs, tmp_path / "data")
    (data / ".verified.json").unlink(missing_ok=True)
    (data / ".verified.json").mkdir()  # as in a folder that cannot be written, which root can
    original, refused = shards.why_not_writable, PermissionError(13, "Permission denied")
    monkeypatch.setattr(shards, "why_not_writable",
                        lambda folder: refused if folder.is_relative_to(data) else original(folder))
    settings = {"DPO_DATA_PATH": data, "MAX_STEPS": 1, **UNMEASURED}
    before = sorted(path.name for path in data.iterdir())
    for place, more in ((tmp_path / "runs" / ".cache", {}), (tmp_path / "chosen", {"CACHE_DIR": tmp_path / "chosen"})):
        here = run("dpo-stored", **settings, **more, OUTPUT_DIR=tmp_path / "runs", RUN_NAME=place.name.strip("."))
        assert here.train() == 0
        message = capsys.readouterr().out
        assert "computed once" in message
        assert message.count(f"Permission denied; storing the results in {place} (") == (not more)
        assert here.train(RESUME="never") == 0
        assert "computed once" not in capsys.readouterr().out
        assert list(place.rglob("reference-*")) and list(place.rglob(".verified.json"))
    assert sorted(path.name for path in data.iterdir()) == before
    (tmp_path / "file").touch()
    assert here.train(CACHE_DIR=tmp_path / "file") == 2
    assert f"CACHE_DIR={tmp_path / 'file'} cannot be written" in capsys.readouterr().err


def test_each_stage_begins_with_the_weights_of_the_one_before_and_nothing_else(stages, finished, run, capsys):
    """From pretraining (step 2) to chats, and from chats (step 4) to preferences."""
    assert list(finished("sft").column("train_loss")) == [1, 2, 3, 4]
    learned = run("dpo-stored", INSTRUCT_CHECKPOINT=finished("sft").folder, RUN_NAME="preferences")
    del learned.settings["PRETRAIN_CHECKPOINT"]
    assert learned.train() == 0
    assert "schedule and step restart" in capsys.readouterr().out
    assert list(learned.column("train_loss")) == [1, 2, 3, 4] and learned.column("learning_rate")[1] == 0.01
    assert learned.column("val_loss")[0] == pytest.approx(math.log(2), abs=1e-6)
