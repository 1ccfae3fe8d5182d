"""The files of a run's folder are either valid or refused in one sentence that names file and field."""

import copy
import json
import os
from pathlib import Path

import pytest
from factories import UNMEASURED, TinyRun, rehash

from checkpoint import store
from checkpoint.schema import Progress
from common.errors import CheckpointError

GONE = object()
WRONG = (GONE, None, "\0", -1, 1.5, 10**30, True, [None], {})


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> TinyRun:
    return TinyRun(prepared, tmp_path_factory.mktemp("trained"), **UNMEASURED, MAX_STEPS=2).trained()


@pytest.fixture
def run(trained, tmp_path) -> TinyRun:
    return trained.copy(tmp_path / "runs")


def changed(content: dict, *place: str, to) -> dict:
    content = copy.deepcopy(content)
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    if to is GONE:
        inner.pop(place[-1], None)
    else:
        inner[place[-1]] = to
    return content


def both_files(folder: Path) -> tuple[dict, dict]:
    manifest = json.loads((folder / store.MANIFEST).read_text())
    return ({name: value for name, value in manifest.items() if name != "sha256"},
            json.loads((folder / store.STATE).read_text()))


def test_any_field_of_any_type_is_read_or_refused_by_name(run):
    folder = run.checkpoint(2)
    manifest, state = both_files(folder)
    tried = refused = 0
    places = [(0, name) for name in manifest] + [(0, "files", "config.json"), (0, "files", "config.json", "size")]
    places += [(1, name) for name in state] + [(1, part, name) for part in ("progress", "identity") for name in state[part]]
    places += [(1, "settings", "TRAINING_STAGE"), (1, "settings", "LORA_ENABLED")]
    for which, *place in places:
        for value in WRONG:
            files = [copy.deepcopy(manifest), state]
            files[which] = changed(files[which], *place, to=value)
            rehash(folder, *reversed(files))
            tried += 1
            try:
                store.read_manifest(folder)
                progress = Progress(**store.read_state(folder)["progress"])
            except CheckpointError as error:
                refused += 1
                name = (store.MANIFEST, store.STATE)[which]
                assert str(folder / name) in str(error) and place[-1] in str(error), (place, value, error)
            else:
                assert 0 <= progress.updates <= progress.step and progress.tokens_seen >= 0, (place, value)
    assert tried > 250 and refused > tried / 2


SPOILT = {
    "of tomorrow": (1, ("of_tomorrow",), 1, "of_tomorrow is not known to this version: it was written by a newer Paddock"),
    "progress of tomorrow": (1, ("progress", "pace"), 1, "progress.pace is not known to this version: it was written by a newer"),
    "manifest of tomorrow": (0, ("of_tomorrow",), 1, "of_tomorrow is not known to this version: it was written by a newer"),
    "format of tomorrow": (0, ("format",), 3, "format 3, but this version reads format 2; use the version"),
    "format of the past": (0, ("format",), 1, "format 1, but this version reads format 2; use the version"),
    "more left out than taken": (1, ("progress", "skipped_steps"), 3, "progress.skipped_steps is more than progress.step"),
    "a file of words": (0, ("files", "config.json"), "x", "files.config.json: input should be an object")}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_run_does_not_go_on_from_what_it_does_not_understand(spoilt, run, capsys):
    which, place, value, message = SPOILT[spoilt]
    files = [*both_files(run.checkpoint(2))]
    files[which] = changed(files[which], *place, to=value)
    rehash(run.checkpoint(2), *reversed(files))
    assert run.train(MAX_STEPS=3) == 5
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error and f"{run.checkpoint(2)}/" in error


@pytest.mark.parametrize("name", ["metrics", "ledger"])
def test_lines_that_cannot_be_read_are_set_aside_and_the_run_goes_on(name, run, capsys):
    path = run.folder / f"{name}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    bad = [b"{}\n", b"5\n", b"null\n", b"[1]\n", b'{"step": "x"}\n', b'{"step": -1}\n', b'{"step": 1.5}\n', b"[" * 10**5 + b"\n",
           b"\xff\n", b"no JSON\n"]
    path.write_bytes(b"".join([lines[0], *bad, lines[1]]))
    assert run.train(MAX_STEPS=3) == 0
    assert f"warning: {path}: {len(bad)} unreadable lines moved to {name}.jsonl.bad" in capsys.readouterr().err
    assert path.with_name(f"{name}.jsonl.bad").read_bytes() == b"".join(bad)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert run.train(MAX_STEPS=3) == 0 and "set aside" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "samples.jsonl", "log/rank-0.txt", "run.lock"])
def test_a_pipe_in_place_of_a_log_is_refused_without_waiting(name, run, capsys, no_hang):
    for put in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")):
        (run.folder / name).unlink(missing_ok=True)
        put(run.folder / name)
        assert run.train(MAX_STEPS=3) == 5
        error = capsys.readouterr().err
        assert f"{run.folder / name}" in error and "is not a plain file but a pipe, device, folder or link" in error
        (run.folder / name).rmdir() if put is os.mkdir else (run.folder / name).unlink()


@pytest.mark.parametrize("resume", ["auto", "step-00000002"])
def test_a_checkpoint_of_its_own_may_be_a_link_to_another_disk(resume, run, tmp_path, capsys):
    elsewhere = run.checkpoint(2).rename(tmp_path / "elsewhere")
    run.checkpoint(2).symlink_to(elsewhere)
    assert run.train(MAX_STEPS=3, RESUME=resume, SAVE_EVERY=1, KEEP_LAST=1) == 0
    assert "resuming after step 2" in capsys.readouterr().out and run.steps_saved() == [2, 3]
