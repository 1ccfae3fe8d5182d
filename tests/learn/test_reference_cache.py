"""One of several jobs computes what is stored beside the data, and the others wait for it."""

import math
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from factories import UNMEASURED

from common.files import FileLock
from data_pipeline.shards import Cache
from learn import reference_cache
from learn.reference_cache import StoredReference
from parallel.ranks import Interrupted, Ranks, RunContext


def get_or_compute(folder: Path, work=lambda: None, signals=SimpleNamespace(received=None), info=[].append) -> str:
    """Return the text that is stored beside data in the folder, and is the process that computed it."""
    rows = SimpleNamespace(token_set=SimpleNamespace(folder=folder), fingerprint="d")
    context = RunContext(Ranks(), signals, SimpleNamespace(info=info))
    with StoredReference({}, None, None, Cache(folder / "cache"), context).locked(rows, "key") as path:
        if not path.exists():
            work()
            path.write_text(threading.current_thread().name)
        return path.read_text()


def test_of_two_jobs_one_computes_and_the_other_waits(tmp_path, monkeypatch):
    """The jobs may run on different machines, whose outputs differ in their last bits."""
    monkeypatch.setattr(reference_cache, "WAIT_SECONDS", 0.01)
    begun, waits, messages = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        assert waits.wait(30)

    def info(text: str) -> None:
        messages.append(text)
        if "waiting for" in text:
            waits.set()

    with ThreadPoolExecutor() as pool:
        first = pool.submit(get_or_compute, tmp_path, work)
        assert begun.wait(30)
        assert get_or_compute(tmp_path, lambda: pytest.fail("computed twice"), info=info) == first.result()
    assert any(f"process {os.getpid()} on" in line for line in messages)
    assert get_or_compute(tmp_path, lambda: pytest.fail("computed again")) == first.result()


def test_a_job_that_waits_leaves_at_a_signal_and_one_that_died_holds_nothing(tmp_path):
    get_or_compute(tmp_path)
    [lock], [result] = tmp_path.rglob(".key.lock"), tmp_path.rglob("key")
    result.unlink()
    ready, tell = os.pipe()
    if not (child := os.fork()):
        held = FileLock(lock)
        os.write(tell, held.take().encode() or b"taken")
        time.sleep(60)
        os._exit(0)
    assert os.read(ready, 99) == b"taken"
    with pytest.raises(Interrupted):
        get_or_compute(tmp_path, signals=SimpleNamespace(received=15))
    assert not result.exists()
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert get_or_compute(tmp_path) and result.exists()


def test_a_rank_without_rows_adds_nothing(stages, tmp_path):
    """Before the first step the model is its reference, so that the loss of each held-out pair is ln 2."""
    pairs = shutil.copytree(stages.pairs, tmp_path / "pairs", ignore=shutil.ignore_patterns("*reference-*"))
    run = stages.run("dpo-stored", tmp_path / "runs", **UNMEASURED, DPO_DATA_PATH=pairs, MAX_STEPS=1, SAVE_EVERY=0)
    run.ends([0, 0], VALIDATE_EVERY=1, VALIDATION_ROWS=1)
    assert run.column("val_loss")[0] == pytest.approx(math.log(2), abs=1e-6)
