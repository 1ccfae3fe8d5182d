"""The other arm of a run differs in exactly what it should, and its page states what that did."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import TinyRun

from extensions.debug import without
from extensions.debug.without import Experiment, Question, left_out, screen, spearman


def data_of(page: Path) -> dict:
    return json.loads(re.search('id="report">(.*?)</script>', page.read_text(), re.DOTALL)[1])


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> TinyRun:
    run = TinyRun(prepared, tmp_path_factory.mktemp("trained"), SAVE_EVERY=2, KEEP_EVERY=2, MAX_STEPS=6, LEDGER_CHECKSUM="true",
                  VALIDATE_EVERY=3, HELLASWAG_EVERY=3, SAMPLE_EVERY=0)
    assert run.train() == 0
    return run


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    monkeypatch.setattr(without, "show", lambda text: None)


def arm_of(trained: TinyRun, folder: Path, name: str = "without") -> TinyRun:
    arm = TinyRun.__new__(TinyRun)
    arm.output_dir, arm.settings = folder, trained.settings | {"RUN_NAME": name}
    return arm


@pytest.mark.slow
def test_another_rate_from_a_step_on_continues_the_checkpoint_before_it(trained, tmp_path):
    """As a run that was stopped there, and resumed with the other rate."""
    data = data_of(Experiment(trained.folder, tmp_path / "out", settings={"LEARNING_RATE": 0.003}, from_step=4).run())
    assert (data["fork"], data["first"], data["parted"]) == (3, 4, 4) and "weights" in data["fields"]
    by_hand = trained.copy(tmp_path / "by-hand", RUN_NAME="again", LEARNING_RATE=0.01)
    assert by_hand.train(STOP_STEP=3) == by_hand.train(LEARNING_RATE=0.003) == 0
    arm = arm_of(trained, tmp_path / "out")
    assert arm.lines("ledger") == by_hand.lines("ledger") and arm.hashes(6) == by_hand.hashes(6)
    assert arm.lines("ledger")[:3] == trained.lines("ledger")[:3]


def test_the_screening_is_the_dot_product_of_gradients(trained, monkeypatch):
    """Of the answer and of each document, by a backward for each, at two checkpoints."""
    kept = {step: trained.checkpoint(step) for step in (2, 4)}
    monkeypatch.setattr(without.history, "kept_checkpoints", lambda run_dir, last: kept)
    question = Question("The cow", " met the dog.")
    excluded, _ = left_out(trained.folder, [])
    (estimates,) = screen(trained.folder, question, excluded)
    expected, read = np.zeros(len(estimates)), excluded.rows.sources[0].source
    for step in kept:
        config, _ = without.read_settings(trained.folder, without.history.NO_FLAGS, step)
        run = without.open_run(trained.folder, config, step + 1, lambda text: None)
        run.model.eval()
        rows = sorted({row for each in range(6) for row in run.inputs.order(config, run.ranks).all_rows(each).tolist()})
        language = without.LanguageModel("", run.model, run.inputs.tokenizer, 32, True)
        trained_weights = [*run.model.parameters()]
        answer = torch.autograd.grad(question.loss(run.model, language), trained_weights)
        rate = without.learning_rate(run.progress.updates, config)
        for row in rows:
            batch = run.inputs.rows(np.array([row]))
            for place, document in enumerate(next(read.in_rows(np.array([row])))):
                targets_BT = batch.targets_BT.where(batch.document_ids_BT == place + 1, -100)
                if (targets_BT == -100).all():
                    continue
                loss = -run.model(batch.tokens_BT, targets_BT, batch.document_ids_BT, mode="sum")
                gradients = torch.autograd.grad(loss, trained_weights)
                expected[document] += rate * sum(float((one * other).sum()) for one, other in zip(answer, gradients))
    assert 30 < np.count_nonzero(expected) < len(expected)
    assert np.allclose(estimates, expected, rtol=0.01, atol=2e-3 * np.abs(expected).max())


@pytest.mark.slow
def test_the_top_examples_are_verified_by_runs_without_them(trained, tmp_path):
    data = data_of(Experiment(trained.folder, tmp_path / "out", prompts=["The cow"], answer=" met the dog.", verify=3).run())
    influence, stats = data["influence"], pytest.importorskip("scipy.stats")
    assert influence["screened"] == 107 and len(influence["rows"]) == 3
    estimates, truths = ([row[name] for row in influence["rows"]] for name in ("estimate", "truth"))
    assert estimates == sorted(estimates, reverse=True) and all(truths)
    assert influence["correlation"] == pytest.approx(stats.spearmanr(estimates, truths).statistic)


def test_the_rank_correlation_is_that_of_scipy():
    stats, dice = pytest.importorskip("scipy.stats"), np.random.default_rng(0)
    for count in (3, 10, 50):
        one, other = dice.normal(size=(2, count))
        assert spearman(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)


HOSTILE = "</script><img src=x onerror=alert(1)>"


def test_the_page_shows_its_data_in_a_browser_and_interprets_none_of_it(open_page, violations, tmp_path):
    share = {"a": "the run", "b": "the other arm", "step": 6, "n": 120, "better": "a", "p": 1e-5, "stderr": 0.041}
    data = {"title": "first and its other arm", "first": 3, "parted": 3, "fields": ["loss", "tensors"], "fork": 2, "settings": {},
            "left_out": "2 of 107 examples (2.3 % of the tokens)", "selectors": ["find " + HOSTILE], "examples": [HOSTILE],
            "curves": [[[[0, 6.0], [6, 4.25]], [[0, 6.0], [6, 4.5]]]] * 2, "influence": {
                "prompt": "The cow", "answer": HOSTILE, "loss": 3.25, "screened": 107, "correlation": 0.5,
                "rows": [{"text": HOSTILE, "estimate": 0.12, "truth": -0.05}]},
            "tests": [share | {"name": "noah accuracy", "a_value": 1.0, "b_value": 0.283, "difference": -0.717}],
            "seeds": [{"name": "noah accuracy at step 6", "runs": [1.0, 1.0], "arms": [0.25, 0.35], "spread": 0.0, "difference": -0.7,
                       "sentence": "the run is better than the other arm by 70.0 ± 9.0 points"}], "answer": HOSTILE, "prompts": [{"prompt": HOSTILE, "run": "red", "without": "blue"}]}
    page = open_page(without.write_page(tmp_path / "page.html", data).as_uri())
    text = page.inner_text("main")
    for words in ("2 of 107 examples", "continues the checkpoint of step 2", "The first step that differs is 3, by loss, tensors",
                  "100.0 %\t28.3 %\t−71.7 ± 4.1 points\t< 0.0001\t120", "25.0 %, 35.0 %\t0.0 %\t−70.0 points\tthe run is better than the other arm by 70.0 ± 9.0 points",
                  "rank correlation of estimate and truth is 0.5 over 1", "+0.120\t−0.050", HOSTILE):
        assert words in text, f"{words!r} is not in {text}"
    assert text.split("\n\n")[1] == HOSTILE, "it begins with the result"
    assert page.evaluate("groups.get('steps').charts.map((chart) => chart.lines.length)") == [4] and page.locator("img").count() == 0
    assert violations(page) == []
