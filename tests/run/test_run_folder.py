"""The run folder: a refused start changes no file, and the files of a run stay together."""

import errno
import math
import os
import re
import shutil
import signal
import stat
from functools import partial
from pathlib import Path

import pytest
from factories import (
    UNMEASURED,
    TinyRun,
    assert_same_run,
    at_step,
    contents,
    do_in_step,
    is_rank,
    prepare,
    stop_at,
)

from checkpoint import store
from common.activity import ACTIVITY
from common.errors import CheckpointError, DataError
from learn.objectives import NextToken
from run import build as run_build
from run import folder as run_folder


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory) -> TinyRun:
    return TinyRun(prepared, tmp_path_factory.mktemp("whole"), **UNMEASURED).trained()


@pytest.fixture
def finished(whole, tmp_path) -> TinyRun:
    return whole.copy(tmp_path / "finished")


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code catches it."""


@pytest.fixture(scope="module")
def others(prepared, tmp_path_factory) -> dict[str, Path]:
    """Paths that do not fit the run: other data, another tokenizer, a model of another shape, and no file at all."""
    folder = tmp_path_factory.mktemp("others")
    other = prepare(folder / "data", vocab_size=260)
    small = TinyRun(prepared, folder, **UNMEASURED, MAX_STEPS=0, DIM=16, RUN_NAME="small").trained()
    return {"DATA": other.shards, "TOKENIZER": other.tokenizer, "SMALL": small.checkpoint(0), "NOWHERE": folder / "nowhere"}


REFUSED = [
    ({"SEED": 7}, 5), ({"OPTIMIZER": "muon"}, 5), ({"DIM": 48}, 5), ({"RESUME": "NOWHERE"}, 5),
    ({"ATTENTION_BACKEND": "flash"}, 2), ({"HELLASWAG_PATH": "NOWHERE", "HELLASWAG_EVERY": 1}, 3),
    ({"PRETRAIN_DATA_PATH": "NOWHERE"}, 3), ({"PRETRAIN_DATA_PATH": "DATA"}, 3), ({"TOKENIZER_PATH": "TOKENIZER"}, 3),
    ({"PRETRAIN_CHECKPOINT": "NOWHERE"}, 5), ({"PRETRAIN_CHECKPOINT": "SMALL"}, 5),
    ({"PRETRAIN_CHECKPOINT": "SMALL", "LORA_ENABLED": "true"}, 5), ({"TRAINING_STAGE": "sft", "SFT_DATA_PATH": "NOWHERE"}, 5),
    ({"DISTILLATION_ENABLED": "true", "TEACHER_MODEL": "NOWHERE"}, 5), ({"MAX_STEPS": 9, "no room": ""}, 5),
    ({"MAX_STEPS": 9, "stale reference": ""}, 3), ({"in use": ""}, 5),
    ({"no disk": ""}, 5),
]


def stale(*arguments):
    raise DataError("what is found last of all")


@pytest.mark.parametrize(("changes", "code", "resume"),
                         [(*case, "auto") for case in REFUSED]
                         + [({**changes, "RESUME": "never"}, code, "never") for changes, code in REFUSED
                            if {"HELLASWAG_PATH", "LORA_ENABLED", "stale reference", "in use"} & set(changes)]
                         + [({"PRETRAIN_CHECKPOINT": "step-00000004", "RESUME": "never"}, 5, "never")])
def test_a_refused_start_changes_nothing(changes, code, resume, finished, others, monkeypatch):
    """Only a start that is accepted deletes the remains of a crash, and log lines after the checkpoint."""
    if "no disk" in changes:
        shutil.move(finished.folder / "checkpoints", finished.output_dir / "elsewhere")
        (finished.folder / "checkpoints").symlink_to(finished.output_dir / "gone")
    for left_over in () if "no disk" in changes else ("tmp-00000008-1", "trash-1-step-00000001", "replaced-step-00000006"):
        shutil.copytree(finished.checkpoint(6), finished.folder / "checkpoints" / left_over)
    with open(finished.folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7}\n')
    before, other = contents(finished.output_dir), None
    if "no room" in changes:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 1000, 0))
    if "stale reference" in changes:
        monkeypatch.setattr(run_build, "choose_objective", stale)
    if "in use" in changes:
        other = open(finished.folder / run_folder.LOCK, "w")
        run_folder.fcntl.flock(other, run_folder.fcntl.LOCK_EX)
    values = {name: others.get(value, value) for name, value in changes.items() if name.isupper()}
    assert finished.train(**values) == code
    assert contents(finished.output_dir) == before
    if other:
        other.close()


@pytest.mark.parametrize("resume", ["auto", "step-00000006"])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_resumes_from_a_checkpoint_that_was_being_rewritten(damaged, resume, finished, capsys):
    """The old one is called `replaced-...` until the new one is published, and longer if the new one is damaged."""
    checkpoint, replaced = finished.checkpoint(6), finished.checkpoint(6).with_name("replaced-step-00000006")
    shutil.copytree(checkpoint, replaced) if damaged else checkpoint.rename(replaced)
    if damaged:
        (checkpoint / "model.safetensors").write_bytes(b"")
    code = finished.train(RESUME=resume, MAX_STEPS=7, KEEP_LAST=1, KEEP_BEST=0)
    if damaged and resume != "auto":
        assert code == 5 and replaced.exists()
        return
    assert code == 0 and "resuming after step 6" in capsys.readouterr().out
    assert {path.name for path in checkpoint.parent.iterdir()} == {"step-00000007", (replaced if damaged else checkpoint).name}


@pytest.mark.parametrize("fatal", range(len(run_folder.RUN_FILES) + 1))
def test_a_kill_during_the_move_leaves_the_run_in_one_of_the_two_places(fatal, tmp_path, monkeypatch):
    """At each rename. The next start completes the move, even without RESUME=never."""
    for entry in run_folder.RUN_FILES:
        (tmp_path / entry / "inside").mkdir(parents=True)
    rename, calls = Path.rename, iter(range(99))

    def dying(path, target):
        if next(calls) == fatal:
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", dying)
    monkeypatch.setattr(Path, "replace", dying)
    with pytest.raises(Killed):
        run_folder.archive_run(tmp_path, is_wanted=True)
    monkeypatch.undo()
    assert len(run_folder.earlier_runs(tmp_path)) == (fatal > 0), "and the look before that knows"
    aside = run_folder.archive_run(tmp_path, is_wanted=False)
    assert sorted(os.listdir(aside or tmp_path)) == sorted(run_folder.RUN_FILES)
    assert os.listdir(tmp_path) == [aside.name] if fatal else aside is None
    assert run_folder.archive_run(tmp_path, is_wanted=False) is None


def test_a_folder_that_cannot_be_moved_stays_whole(finished, monkeypatch, capsys):
    before, rename = contents(finished.folder), Path.rename

    def refused(path, target):
        if path.name == "ledger.jsonl" and "tmp-before-" in str(target):
            raise OSError(16, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    assert finished.train(RESUME="never") == 5
    assert "ledger.jsonl cannot be written: Device or resource busy" in capsys.readouterr().err
    assert contents(finished.folder) == before


def test_a_run_that_dies_after_the_move_is_restarted_by_the_next_command_with_a_note(finished, whole, capsys):
    def die():
        raise Killed

    (finished.folder / "ledger.jsonl.bad").write_text("{}")
    with at_step(1, die), pytest.raises(Killed):
        finished.train(RESUME="never", SEED=7)
    (aside,) = finished.folder.glob("before-*")
    assert (aside / "ledger.jsonl.bad").exists() and not (finished.folder / "ledger.jsonl.bad").exists()
    assert f"was moved into {aside.name}" in capsys.readouterr().err
    assert finished.train(MAX_STEPS=2) == 0
    message = capsys.readouterr().err
    assert "this run starts from the beginning" in message and f"RESUME={aside}" in message
    assert finished.steps_saved() == [2]
    # The advice works: the earlier run continues, although another one used the folder since.
    shutil.rmtree(finished.folder / "checkpoints")
    assert finished.train(RESUME=aside, MAX_STEPS=8) == 0
    assert list(finished.column("train_loss")) == [7, 8]
    capsys.readouterr()
    assert finished.train() == 0 and "starts from the beginning" not in capsys.readouterr().err


def test_a_preempted_run_does_not_advise_to_move_itself_aside(tiny_run, capsys):
    run = tiny_run(**UNMEASURED)
    with stop_at(3):
        assert run.train(RESUME="never") == 143
    assert re.search(r"resume   .* --resume auto\b", capsys.readouterr().out)


def test_runs_of_one_second_get_folders_of_their_own(tiny_run, monkeypatch):
    run = tiny_run(**UNMEASURED, MAX_STEPS=1)
    del run.settings["RUN_NAME"]
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "now")
    for _ in range(3):
        assert run.train() == 0
    assert sorted(os.listdir(run.output_dir)) == ["pretrain-now", "pretrain-now-2", "pretrain-now-3"]


def test_a_lock_that_somebody_has_deleted_still_keeps_others_out(tiny_run, capsys):
    run = tiny_run(**UNMEASURED, MAX_STEPS=2)

    def delete_and_begin():
        (run.folder / run_folder.LOCK).unlink()
        assert run.train(MAX_STEPS=1) == 5

    with at_step(2, delete_and_begin):
        assert run.train() == 0
    assert "in use by another job, although its run.lock was deleted" in capsys.readouterr().err
    assert run.steps_saved() == [2]


def test_a_lock_is_not_taken_through_a_link_whose_target_it_would_write_over(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / run_folder.LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match=f"{run_folder.LOCK} is not a plain file .* or link"), run_folder.lock_run(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("lose", [lambda folder: shutil.rmtree(folder), lambda folder: folder.rename(folder.with_name("new"))],
                         ids=["deleted", "renamed"])
@pytest.mark.parametrize("save_every", [2, 100])
def test_a_run_whose_folder_is_lost_stops_after_the_step_and_saves_its_state_in_a_new_one(tiny_run, whole, capsys, lose, save_every):
    """Also if SAVE_EVERY would save much later, or a thread is writing the previous checkpoint."""
    run = tiny_run(**UNMEASURED, SAVE_EVERY=save_every)
    with at_step(3, lambda: lose(run.folder)):
        assert run.train() == 5
    assert re.fullmatch(rf"error: {run.folder} was renamed or deleted during the run. The state after step 3 is saved in a new "
                        rf"folder, {run.folder}, .*. To resume: the same command\n", capsys.readouterr().err)
    assert run.steps_saved() == [3] and not (run.folder / "metrics.jsonl").exists()
    assert run.train() == 0
    assert_same_run(run, whole, 6, logs=())


@pytest.mark.parametrize("refused", ["sync of files", "sync of folders", "rename"])
def test_a_disk_that_cannot_do_what_a_save_does_is_found_before_the_first_step(refused, tiny_run, monkeypatch, capsys):
    fsync, rename = os.fsync, Path.rename

    def sync(descriptor):
        if refused == f"sync of {'folders' if stat.S_ISDIR(os.fstat(descriptor).st_mode) else 'files'}":
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    def move(path, target):
        if refused == "rename":
            raise OSError(errno.EPERM, "Operation not permitted", str(path), None, str(target))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", move)
    run = tiny_run(**UNMEASURED)
    assert run.train() == 5
    text = capsys.readouterr()
    assert "cannot be written: " in text.err and "OUTPUT_DIR" in text.err and "Traceback" not in text.err
    assert "Step [" not in text.out and run.steps_saved() == []


def test_a_run_does_not_save_into_the_folder_of_another(tiny_run, prepared, whole, capsys):
    """Which has taken the name of a folder that was renamed: nothing of it changes, and nothing is lost."""
    run = tiny_run(**UNMEASURED)

    def replace():
        run.folder.rename(run.folder.with_name("new"))
        assert run.train(MAX_STEPS=1) == 0
        replace.contents = contents(run.folder)

    with at_step(3, replace):
        assert run.train() == 5
    assert contents(run.folder) == replace.contents
    name = f"{run.folder.name}-2"
    assert f"is saved in a new folder, {run.folder}-2, " in (text := capsys.readouterr().err) and f"with --run-name {name}" in text
    assert run.train(RUN_NAME=name) == 0
    moved = TinyRun(prepared, run.folder.parent, **UNMEASURED, RUN_NAME=name)
    assert_same_run(moved, whole, 6, logs=())


def delete_in_step(step: int, folder: Path) -> None:
    if is_rank(0):
        do_in_step(step, lambda: shutil.rmtree(folder))


def test_two_ranks_stop_when_rank_0_has_lost_the_folder(tiny_run):
    run = tiny_run(**UNMEASURED)
    text = run.ends([5, 5], partial(delete_in_step, 3, run.folder))
    assert text.count("was renamed or deleted during the run. The state after step 3") == 1
    assert run.steps_saved() == [3]


def test_a_refused_start_leaves_no_folder_behind(prepared, others, tmp_path):
    run = TinyRun(prepared, tmp_path / "all" / "runs", **UNMEASURED, PRETRAIN_CHECKPOINT=others["SMALL"])
    assert run.train() == 5 and not (tmp_path / "all").exists()
    del run.settings["RUN_NAME"]
    run.output_dir.mkdir(parents=True)
    assert run.train() == 5 and list(run.output_dir.iterdir()) == [], "what was there stays"


def test_a_signal_before_the_first_step_leaves_the_run_as_it_was(finished, monkeypatch, capsys):
    original, before = store.check_room, contents(finished.output_dir)
    monkeypatch.setattr(store, "check_room",
                        lambda *given: (original(*given), os.kill(os.getpid(), signal.SIGTERM)))
    assert finished.train(RESUME="never") == 143
    assert "nothing was changed" in capsys.readouterr().out
    assert contents(finished.output_dir) == before


def test_settings_that_another_has_put_beside_are_left_alone(finished):
    foreign = finished.folder / "configs" / "step-of-mine.json"
    foreign.write_text("{}")
    assert finished.train(MAX_STEPS=7) == 0 and foreign.exists()


def test_a_lock_that_is_taken_away_with_its_folder_is_taken_again(tmp_path, monkeypatch):
    """A job whose start is refused deletes the folder after this job opened the lock file, and before it locked it."""
    flock, run_dir = run_folder.fcntl.flock, tmp_path / "run"
    actions = iter([lambda: shutil.rmtree(run_dir)])

    def too_late(file, how):
        flock(file, how)
        next(actions, lambda: None)()

    monkeypatch.setattr(run_folder.fcntl, "flock", too_late)
    with run_folder.lock_run(run_dir):
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} "), run_folder.lock_run(run_dir):
            pass


def test_a_bad_step_of_a_run_whose_folder_was_deleted_saves_the_state_before_it(tiny_run, monkeypatch, capsys):
    run, loss_sum = tiny_run(**UNMEASURED, SAVE_EVERY=1, ASYNC_SAVE="false"), NextToken.loss_sum

    def bad_loss_sum(self, *arguments):
        summed = loss_sum(self, *arguments)
        return summed._replace(total=summed.total * (math.nan if ACTIVITY.step == 3 else 1))

    monkeypatch.setattr(NextToken, "loss_sum", bad_loss_sum)
    with at_step(3, lambda: shutil.rmtree(run.folder)):
        assert run.train() == 4
    assert "The state after step 2 is saved in a new folder" in capsys.readouterr().err
    assert run.steps_saved() == [2]
