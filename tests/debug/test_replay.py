"""A replayed step is the step that was, in every stage; what was planted in it is found; the run is left as it is."""

import json
import math
import re
import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from factories import MODES, UNMEASURED, Prepared, TinyRun, contents, sentence

import model_utils
import train
from data_preparation_utils import PreparationOptions, prepare_set
from dataloaders import Mixing, RowOrder
from extensions.debug.replay import read_settings, replay
from model import choose_masks
from model_utils import build_model
from plan.layers import Layer, read_flags
from run import folder as run_folder
from tokenizer import load_tokenizer

NOTHING = "Nothing is wrong"
ROW_TOKENS = 32


def replayed(run: TinyRun, step: int, *flags: str, **options) -> str:
    lines = []
    replay(run.folder, step, read_flags(flags), **options, info=lines.append)
    return "\n".join(lines)


def check_same(text: str) -> None:
    assert "as in the step log" in text and "NOT" not in text and "BUT" not in text, text
    assert re.search(r"Loss .* the same", text) and re.search(r"Gradient norm .* the same", text), text


@pytest.fixture
def finished(whole) -> TinyRun:
    return whole


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_replayed_step_is_the_step_bit_for_bit_and_the_run_stays_as_it_is(step, finished):
    """From initial weights, from a checkpoint, with and without steps in between; a run that goes on holds the lock."""
    before = contents(finished.folder)
    with run_folder.lock_run(finished.folder):
        before = contents(finished.folder)
        text = replayed(finished, step)
        assert contents(finished.folder) == before
    check_same(text)
    assert NOTHING in text
    assert ("the initial ones" in text) == (step < 3)
    assert "replayed; losses equal to the step log" in text or step in (1, 3)


SHORT = ("dpo-stored", "distilled", "lora-dpo")  # chats are replayed in the next test


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=() if mode in SHORT else pytest.mark.slow) for mode in MODES])
def test_every_stage_is_replayed(mode, stages, tmp_path):
    run = stages.run(mode, tmp_path, **UNMEASURED).trained()
    for step in (1, 4):
        text = replayed(run, step)
        check_same(text)
        assert "finite" in text.splitlines()[-1] and ("example" in text or mode == "distilled")


def test_two_ranks_are_replayed_in_one_process_with_the_dropout_that_each_drew(stages, tmp_path, monkeypatch):
    run = stages.run("lora-sft", tmp_path, **UNMEASURED)
    run.ends([0, 0])
    text = replayed(run, 4)
    assert NOTHING in text and "DIFFERENT" not in text and "BUT" not in text
    monkeypatch.setattr(train, "choose_masks", lambda model, seed, step, *rows: choose_masks(model, seed, step + 1, *rows))
    assert "DIFFERENT" in replayed(run, 4)


@pytest.fixture
def in_parts(tiny_run) -> TinyRun:
    """A run whose settings changed at step 4, and of which a command was told afterwards that had nothing to do."""
    run = tiny_run(**UNMEASURED)
    assert run.train(MAX_STEPS=3) == run.train(LEARNING_RATE=0.03) == 0
    newest = (run.folder / "config.json").read_text()
    assert run.train(LEARNING_RATE=0.5, MAX_STEPS=5) == 0
    assert (run.folder / "config.json").read_text() == newest and json.loads(newest)["LEARNING_RATE"] == 0.03
    return run


def test_each_part_of_a_run_is_replayed_with_its_own_settings(in_parts):
    parts = {path.name: json.loads(path.read_text())["LEARNING_RATE"] for path in (in_parts.folder / "configs").iterdir()}
    assert parts == {"step-00000001.json": 0.01, "step-00000004.json": 0.03}
    for step, rate in ((1, 0.01), (3, 0.01), (4, 0.03), (6, 0.03)):
        assert read_settings(in_parts.folder, Layer(), step)[0].learning_rate == rate
    for step in (3, 6):
        text = replayed(in_parts, step)
        check_same(text)
        assert NOTHING in text
    # Taken back to step 2, the run has its later part no more.
    assert in_parts.train(RESUME="step-00000002", LEARNING_RATE=0.02) == 0
    assert sorted(path.name for path in (in_parts.folder / "configs").iterdir()) == ["step-00000001.json", "step-00000003.json"]
    for step in (2, 6):
        check_same(replayed(in_parts, step))


def test_a_replayed_step_that_differs_leads_to_no_conclusion(in_parts):
    """Without `configs`, config.json alone has the settings of the newest command."""
    shutil.rmtree(in_parts.folder / "configs")
    check_same(replayed(in_parts, 6))
    text = replayed(in_parts, 2)
    assert "DIFFERENT" in text and NOTHING not in text
    assert text.splitlines()[-1].startswith("This is not the recorded step: it has a different loss")


STRANGE, NOISE = "Q", "ZXJKVWYPUI"  # letters that no sentence has


@pytest.fixture(scope="module")
def poisoned(prepared, tmp_path_factory) -> Prepared:
    """Easy sentences, of which one has a letter that is nowhere else; and a document of noise, as long as a row and more."""
    rng, folder = Random(3), tmp_path_factory.mktemp("poisoned")
    texts = [" ".join(sentence(rng) for _ in range(1 + int(rng.random() * 4))) for _ in range(150)]
    texts[40] = f"The cat saw the {STRANGE}."
    texts[90] = "".join(NOISE[int(rng.random() * len(NOISE))] for _ in range(60))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = PreparationOptions(str(prepared.tokenizer), "auto", 2000, 0.0, workers=1)
    shards = prepare_set("documents", str(folder / "text.jsonl"), folder / "shards", options)
    return Prepared(shards, prepared.tokenizer, prepared.items)


def tokens_of(prepared: Prepared) -> tuple[np.ndarray, list[Path]]:
    files = sorted(prepared.shards.glob("train-*.bin"))
    return np.concatenate([np.fromfile(file, "<u2", offset=1024) for file in files]), files


def place_of(prepared: Prepared, token: int) -> str:
    """Where a token lies, as a replay says it."""
    for file in tokens_of(prepared)[1]:
        tokens = (file.stat().st_size - 1024) // 2
        if token < tokens:
            return f"{file}, token {token:,}\n"
        token -= tokens
    raise AssertionError(token)


def seed_for(row: int, tokens: int, steps: range) -> tuple[int, int]:
    """A seed with which the row is read in one of these steps (from 1), and in which."""
    rows = (tokens - 1) // ROW_TOKENS
    return next((seed, step) for seed in range(1000) for step in steps if row in RowOrder(Mixing((rows,)), 8, 1, seed).all_rows(step - 1))


def noise_row(prepared: Prepared) -> tuple[int, np.ndarray]:
    """The row that is full of noise, and all tokens."""
    tokens, _ = tokens_of(prepared)
    noise = load_tokenizer(str(prepared.tokenizer)).encode(NOISE)
    return int(np.flatnonzero(np.isin(tokens, noise))[0]) // ROW_TOKENS + 1, tokens


@pytest.fixture
def strange_run(poisoned, tmp_path, monkeypatch):
    """A run whose embedding of the strange letter is changed at its birth, with the letter in one of the steps 4 to 7: the run,
    the letter's token, its place among all tokens, and the step."""
    token = load_tokenizer(str(poisoned.tokenizer)).encode(STRANGE)[0]
    tokens, _ = tokens_of(poisoned)
    (place,) = np.flatnonzero(tokens == token).tolist()
    seed, step = seed_for(place // ROW_TOKENS, len(tokens), range(4, 8))

    def make(change, **settings) -> tuple[TinyRun, int, int, int]:
        def build(*arguments):
            model = build_model(*arguments)
            with torch.no_grad():
                change(model.tok_embeddings.weight[token])
            return model

        run = TinyRun(poisoned, tmp_path, TIE_EMBEDDINGS="false", SEED=seed, SAVE_EVERY=2, **UNMEASURED, **settings)
        with monkeypatch.context() as patch:
            patch.setattr(model_utils, "build_model", build)
            assert run.train(MAX_STEPS=30) == 4
        assert run.steps_saved()[-1] < step
        return run, token, place, step

    return make


def test_a_replay_names_the_document_whose_token_makes_the_forward_infinite(strange_run, poisoned):
    run, token, place, step = strange_run(lambda weight: weight[3:5].fill_(math.inf))
    text = replayed(run, step)
    assert "Loss           nan          recorded not finite   the same" in text
    assert "Parameter tok_embeddings.weight (512, 32): 2 non-finite elements" in text
    assert f"the first at [{token}, 3] (token 'Q')" in text
    row, within = divmod(place, ROW_TOKENS)
    assert f"Row {row}: loss nan" in text and "first non-finite output: tok_embeddings" in text
    assert f"token: {within} of the row, 'Q'" in text
    starts = np.flatnonzero(tokens_of(poisoned)[0][:place] == tokens_of(poisoned)[0][0])
    assert f"document: {place_of(poisoned, max(int(starts[-1]), row * ROW_TOKENS))}" in text
    assert "saw the >>Q<<" in text
    assert text.splitlines()[-1].startswith(f"The weights were not finite before this step, and row {row} used them")


def test_a_gradient_that_turns_nan_is_traced_to_its_parameter(strange_run):
    """A row of zeros has no direction: without a floor under the norm's root, its gradient is 0 times infinity."""
    run, _, place, step = strange_run(lambda weight: weight.zero_(), NORM_EPS=1e-40)
    text = replayed(run, step)
    assert "Parameter" not in text and "first non-finite output" not in text
    row = place // ROW_TOKENS
    assert re.search(r"Row (\d+): loss \d", text)[1] == str(row)
    assert "first non-finite gradient: tok_embeddings.weight" in text
    assert f"token: {place % ROW_TOKENS} of the row, 'Q'" in text and "saw the >>Q<<" in text
    assert text.splitlines()[-1] == f"Not finite because of row {row}."


def test_a_replay_names_the_document_of_noise_among_easy_ones(poisoned, tmp_path):
    row, tokens = noise_row(poisoned)
    seed, step = seed_for(row, len(tokens), range(24, 28))
    run = TinyRun(poisoned, tmp_path, SEED=seed, MAX_STEPS=30, SAVE_EVERY=10, **UNMEASURED).trained()
    text = replayed(run, step, rows_shown=1)
    check_same(text)
    assert re.findall(r"Row (\d+):", text) == [str(row)]
    assert f"document: {place_of(poisoned, row * ROW_TOKENS)}" in text
    assert all(letter in NOISE for letter in re.search(r"hardest targets: '(.)'", text)[1])
    assert f"row {row} is an outlier" in text.splitlines()[-1]
