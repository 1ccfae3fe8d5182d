"""Runs on mixtures: resumed inside a phase and across its border, on other numbers of ranks, in every stage."""

import json
import signal
from functools import partial
from pathlib import Path

import faults
import pytest
from factories import UNMEASURED, Prepared, TinyRun, assert_same_run, at_step

from data_pipeline.mixture import Mixture, write_mixture
from data_preparation_utils import PreparationOptions, prepare_set


def mixture_of(kind: str, prepared: Prepared, file: Path, sets: Path, *phases: tuple[float, int, int]) -> Path:
    """A mixture of all and of the first 60 documents, chats or pairs of a file, by (until, weight, weight)."""
    sources = []
    for label, count in (("all", 0), ("few", 60)):
        options = PreparationOptions(str(prepared.tokenizer), "auto", 100_000, 0.1, workers=1, max_documents=count)
        sources.append({"label": label, "set": f"../{prepare_set(kind, str(file), sets, options).name}"})
    described = [{"until": until, "weights": {"all": one, "few": other}} for until, one, other in phases]
    return write_mixture(sets, Mixture(sources=sources, phases=described))


@pytest.fixture(scope="module")
def mixture(prepared, tmp_path_factory):
    """A function that returns the mixture of the tiny documents by some phases."""
    sets, text = tmp_path_factory.mktemp("sets"), prepared.tokenizer.parent / "text.jsonl"
    return lambda *phases: mixture_of("documents", prepared, text, sets, *phases)


@pytest.fixture(scope="module")
def whole(mixture, prepared, tmp_path_factory):
    """A run that nothing interrupted, whose weights change after step 3 of 6."""
    return TinyRun(prepared, tmp_path_factory.mktemp("whole"), PRETRAIN_DATA_PATH=mixture((0.5, 3, 1), (1, 1, 3))).trained()


def die():
    raise KeyError("as if killed")


def test_a_run_that_was_killed_inside_a_phase_and_beyond_its_border_is_the_uninterrupted_one(whole, tmp_path):
    run = whole.copy(tmp_path / "runs", RUN_NAME="killed", ASYNC_SAVE="false")
    with at_step(3, die), pytest.raises(KeyError):
        run.train()
    run.ends([-signal.SIGKILL], partial(faults.act, 0, 5, faults.die))
    assert run.steps_saved() == [2, 4]
    assert run.train() == 0
    assert_same_run(run, whole, 6)
    text = (run.folder / "log" / "rank-0.txt").read_text()
    assert text.count("until 0.5  until 1") == 3
    table = json.loads((run.folder / "data.json").read_text())["sources"]
    assert [(source["source"], source["share"], source["weights"]) for source in table] == [
        ("all", 0.5, [0.75, 0.25]), ("few", 0.5, [0.25, 0.75])]


def test_two_ranks_read_the_rows_of_one(whole, tmp_path):
    run = whole.copy(tmp_path / "runs", RUN_NAME="two", **UNMEASURED)
    run.ends([0, 0])
    assert [line["rows_crc32"] for line in run.lines("ledger")] == [line["rows_crc32"] for line in whole.lines("ledger")]
