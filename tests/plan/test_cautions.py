"""Warnings about the model that a run or a command starts from."""

from pathlib import Path

import pytest
from factories import checkpoint_without_weights, rehash

from checkpoint.store import read_manifest
from common.errors import CheckpointError
from extensions.cautions import better_one, cautions, past_best
from extensions.inference.weights import find_model
from plan.make import make_plan

NEXT = ["--training-stage", "sft", "--sft-data-path", "set", "--tokenizer-path", "t", "--run-name", "chats"]
BEFORE = {"TRAINING_STAGE": "pretrain", "MAX_STEPS": 150, "OPTIMIZER": "muon", "TOTAL_BATCH_SIZE": 4096, "MAX_SEQ_LEN": 64}


def save(step: int, loss: float | None, items: str = "same") -> Path:
    folder = checkpoint_without_weights(Path("runs/book"), step, {}, **BEFORE)
    rehash(folder, manifest={**read_manifest(folder), "val_loss": loss, "val_items": items})
    return folder


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_name_of_a_run_past_its_best_names_the_best_one():
    save(1, 2.0), save(2, 3.0, "other items")
    newest = save(3, 2.03)
    assert [*better_one("runs/book", newest)] == [
        f"{newest} has a validation loss of 2.030, and step-00000001 has 2.000. To use that checkpoint, name runs/book:best"]
    assert not [*better_one(str(newest), newest)], "whoever names a step means it"
    assert not [*better_one("book:best", newest)] and not past_best(newest.with_name("step-00000001"))
    for loss in (2.01, 1.9, None):
        assert not past_best(save(4, loss)), "no clear rise, a lower one, none measured"


def test_lines_of_env_for_the_stage_before_are_named():
    """Only those that say the same there; not a flag, another value, a preset, or the same stage."""
    base = save(1, 2.0)
    Path(".env").write_text("MAX_STEPS=150\nTOTAL_BATCH_SIZE=4096\nOPTIMIZER=muon\nLEARNING_RATE=0.1\n")

    def texts(*flags: str) -> list[str]:
        return [*cautions(make_plan([*NEXT, "--pretrain-checkpoint", str(base), *flags], {}))]

    assert texts() == [".env still sets MAX_STEPS=150, TOTAL_BATCH_SIZE=4096, OPTIMIZER=muon from pretrain; "
                       "without these lines, sft uses values that suit its data"]
    assert texts("--max-steps", "150", "--optimizer", "adamw")[0].startswith(".env still sets TOTAL_BATCH_SIZE=4096 from")
    Path(".env").unlink()
    assert not texts("--max-steps", "150")


def test_data_with_the_name_of_a_run_does_not_hide_it():
    """`prepare` names the run after the data."""
    save(1, 2.0)
    newest = save(2, 1.5)
    Path("book").mkdir()
    for name in ("book", "book:best", "runs/book", "./runs/book"):
        assert find_model(name).resolve() == newest.resolve()
    assert find_model("book").is_relative_to("runs")
    with pytest.raises(CheckpointError, match="chats is neither"):
        Path("chats").mkdir()
        find_model("chats")
