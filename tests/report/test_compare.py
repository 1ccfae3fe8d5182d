"""Paired tests, against scipy where it is installed; and what they say of two runs."""

import json
import re
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.schema import packed_bits
from common.text import PROGRAM
from extensions.decide import ERROR, compare, compare_items, holm, sign_test
from extensions.report.compare import ONE_SEED, comparison
from extensions.report.data import RunReader


@given(st.integers(0, 400), st.integers(0, 400))
def test_the_sign_test_is_exact(a, b):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(a, a + b).pvalue if a + b else 1.0
    assert sign_test(a, b) == pytest.approx(expected, rel=1e-9)


def test_the_t_test_is_the_usual_one_and_weights_count_as_copies():
    stats, rng = pytest.importorskip("scipy.stats"), np.random.default_rng(0)
    a, b = rng.normal(size=(2, 24))
    found = compare_items(a, b)
    assert found.p == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-9)
    assert (found.a, found.b, found.difference) == pytest.approx((a.mean(), b.mean(), b.mean() - a.mean()))
    assert compare_items(a, b, np.full(24, 512.0))[1:] == pytest.approx(found[1:])
    weighted = compare_items(a, b, np.arange(1.0, 25.0))
    assert weighted.difference == pytest.approx(np.average(b - a, weights=np.arange(1, 25)))


def test_a_constant_difference_is_no_division_by_zero():
    a = np.array([1.0, 2.0, 4.0])
    assert [compare_items(a, a + shift).p for shift in (0.0, 0.5)] == [1, 0] and compare_items(a[:1], a[:1] + 0.5).p == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_multiplies_the_smallest_by_all_the_next_by_one_less_and_keeps_the_order(p_values):
    """By its definition: the rank-th smallest is at least those before it, and (number - rank) times itself."""
    found, number = holm(p_values), len(p_values)
    for p, corrected in zip(p_values, found):
        ranked = sorted(p_values)
        assert corrected == pytest.approx(min(1.0, max((number - rank) * each for rank, each in enumerate(ranked) if each <= p)))


def write_run(folder, settings, metrics, evaluations):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    for name, rows in (("metrics", metrics), ("evaluations", evaluations)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunReader(folder, folder.name)
    run.read()
    return run


def scored(step: int, right: np.ndarray, items: str = "abc", shift: float = 0.0) -> list[dict]:
    noise = np.random.default_rng(step).normal(0, 0.01, 16)
    return [{"step": step, "name": "hellaswag", "items": items, "n": len(right), "correct": packed_bits(right)},
            {"step": step, "name": "validation", "items": items, "n": 16, "loss": (2.5 + shift + noise).tolist(), "count": [256] * 16}]


@pytest.fixture
def right():
    """1,000 items, of which b solves 12 more than a."""
    a = np.arange(1000) < 600
    b = np.arange(1000) < 612
    return a, b


def test_two_runs_are_compared_on_the_same_items(tmp_path, right):
    settings = {"MAX_STEPS": 20, "LEARNING_RATE": 0.1, "HELLASWAG_NAME": "stories", "RUN_NAME": "x"}
    metrics = [*({"step": step, "tokens_per_second": 900 + 10 * step} for step in (3, 4, 5)),
               {"step": 10, "val_loss": 2.0, "val_loss_stderr": 0.1, "hellaswag_acc": 0.5, "tokens_per_second": 5},
               {"step": 20, "val_loss": 2.5, "val_loss_stderr": 0.2, "hellaswag_acc": 0.6, "hellaswag_stderr": 0.01}]
    a = write_run(tmp_path / "a", settings, metrics, scored(10, right[0], shift=0.1) + scored(20, ~right[0]))
    b = write_run(tmp_path / "b", settings | {"LEARNING_RATE": 0.2, "RUN_NAME": "y", "COMPILE": True, "LOG_EVERY": 3, "SAVE_EVERY": 7}, metrics[:4],
                  scored(10, right[1]))
    found = comparison([a, b])
    assert found["settings"] == [{"name": "LEARNING_RATE", "values": ["0.1", "0.2"]}, {"name": "COMPILE", "values": [None, "true"]}], \
        "what is logged and kept does not matter"
    rows = {row["name"]: row["cells"] for row in found["results"]}
    assert rows["validation loss at step 10"] == [{"value": 2.0, "stderr": 0.1, "step": 10}, {"value": 2.0, "stderr": 0.1, "step": 10, "is_better": True}]
    assert rows["validation loss (best)"][0] == {"value": 2.0, "stderr": 0.1, "step": 10}
    assert rows["stories accuracy at step 10"][0] == {"value": 0.5, "stderr": None, "step": 10}
    assert rows["tokens per second (recent median)"][1] == {"value": 935, "stderr": None, "step": 10}, "not that of the last step"
    loss, accuracy = found["tests"]
    assert accuracy["sentence"] == "stories accuracy at step 10: of these two models, b is better than a by 1.2 ± 0.3 points (p = 0.00049, 1,000 items)"
    assert (accuracy["better"], accuracy["step"], accuracy["n"]) == ("b", 10, 1000)
    assert loss["sentence"].startswith("validation loss at step 10: of these two models, b is better than a by 0.1") and "16 items" in loss["sentence"]
    assert found["refused"] == [] and comparison([a]) is None
    assert found["sentences"] == [loss["sentence"], accuracy["sentence"], ONE_SEED,
                                  f"a trained further than step 10; to compare the last models: {PROGRAM} eval a b"]
    marked = [row["name"] for row in found["results"] if any(cell and cell.get("is_better") for cell in row["cells"])]
    assert marked == ["validation loss at step 10", "stories accuracy at step 10"], "bold only where a test says so"


def test_neither_the_first_step_nor_a_failed_run_is_tested(tmp_path, right, monkeypatch):
    runs = [write_run(tmp_path / name, {"RUN_NAME": name}, [], scored(0, right[0]) + scored(step, right[0], shift=step))
            for name, step in (("a", 5), ("b", 10), ("c", 10))]
    assert comparison(runs[:2])["sentences"][0] == (
        "No items of the same evaluation say which run is better. "
        "HellaSwag: a and b did not score the same items at the same step (last at 5 and 10), so they are not compared.")
    monkeypatch.setattr("extensions.report.compare.has_failed", lambda run: run.name == "a")
    assert {(test["a"], test["b"], test["step"]) for test in comparison(runs)["tests"]} == {("b", "c", 10)}


def test_a_loss_that_is_not_finite_is_shown_and_not_tested(tmp_path, right):
    metrics = [{"step": 0, "val_loss": 3.0}, {"step": 10, "val_loss": 2.5}]
    runs = [write_run(tmp_path / name, {"SEED": seed, "LEARNING_RATE": rate}, metrics, scored(0, right[0]) + scored(10, right[0]))
            for name, seed, rate in (("a", 1, 1), ("b", 1, 3), ("c", 1, 2))]
    lines = scored(0, right[0]) + scored(10, right[0])
    lines[-1]["loss"][3] = None
    runs.append(write_run(tmp_path / "nan", {"SEED": 1, "LEARNING_RATE": 4}, [metrics[0], {"step": 10, "val_loss": None}], lines))
    found = comparison(runs)
    assert [cell["value"] for cell in found["results"][0]["cells"]] == [2.5, 2.5, 2.5, None], "at step 10, not at the last finite one"
    assert found["configurations"] == []
    assert found["refused"] == ["validation: a and nan have NaN or infinite scores at step 10 (nan), so they are not compared"]
    assert [(test["name"], test["a"], test["b"], test["step"]) for test in found["tests"]] == [
        *(("validation loss", "a", other, 10) for other in "bc"), *(("HellaSwag accuracy", "a", other, 10) for other in ("b", "c", "nan"))]
    assert found["sentences"] == [test["sentence"] for test in found["tests"]] + [ONE_SEED], "each other run against the first"


def test_chance_is_not_taken_for_a_difference_and_other_items_are_not_compared(tmp_path, right):
    a = write_run(tmp_path / "a", {}, [], scored(5, right[1]) + scored(10, right[0]))  # the last common step counts
    same = write_run(tmp_path / "same", {}, [], scored(5, right[0]) + scored(10, right[0]))
    other = write_run(tmp_path / "other", {}, [], scored(10, right[1], items="def"))
    without = write_run(tmp_path / "without", {}, [], [])
    tests = comparison([a, same, other, without])["tests"]
    losses = [write_run(tmp_path / f"loss-{items}", {}, [{"step": 10, "val_loss": 2.0, "hellaswag_acc": 0.5, "hellaswag_acc_norm": 0.5, "tokens_per_second": 9.0}],
                        scored(10, right[0], items=items)) for items in ("abc", "abc ", "def")]
    (losses[1].folder / "evaluations.jsonl").write_text((losses[0].folder / "evaluations.jsonl").read_text())
    losses[1] = RunReader(losses[1].folder, losses[1].name)
    losses[1].read()
    for runs, better in ((losses[:2], ["lower", "lower", "higher", "higher", "higher"]), (losses[1:], [None] * 4 + ["higher"])):
        assert [row["better"] for row in comparison(runs)["results"]] == better, "no winner on other items"
    assert [(test["a"], test["b"], test["better"], test["p"]) for test in tests] == [("a", "same", None, 1.0)] * 2
    assert [test["sentence"] for test in tests] == [
        f"{label} at step 10: these two models do not differ significantly: same minus a is {size} (p = 1, {items} items)"
        for label, size, items in (("validation loss", "0.0000", "16"), ("HellaSwag accuracy", "0.0 points", "1,000"))]


def test_a_comparison_of_a_run_that_ended_above_its_best_names_the_best_checkpoints(tmp_path, right):
    runs = [write_run(tmp_path / name, {"MAX_STEPS": 10, "RUN_NAME": name}, [{"step": 5, "val_loss": 2.5}, {"step": 10, "val_loss": 2.5}],
                      [{"step": step, "name": "validation", "items": "abc", "n": 16, "loss": (2.5 + shift + np.arange(16) / 100).tolist(), "count": [256] * 16}
                       for step, shift in ((5, 0.0), (10, last))]) for name, last in (("a", 0.9), ("b", -0.1))]
    last = comparison(runs)["sentences"][-1]
    assert last.startswith("a ended above the best validation loss; to compare the best checkpoints: ") and last.endswith(" eval a:best b:best")
    assert not {"ended above", "trained further"} & {*re.findall("ended above|trained further", " ".join(comparison(runs[1:] * 2)["sentences"]))}


def test_two_runs_without_common_items_are_told_why_and_how_to_compare_them(tmp_path, right):
    def sentences(**changes) -> list[str]:
        runs = [write_run(tmp_path / f"{name}{len(changes)}{[*changes]}", {"MAX_STEPS": 10, "TOKENIZER_PATH": "t", "MAX_SEQ_LEN": 8} | settings,
                          [{"step": 10, "val_loss": 2.5}], scored(10, right[0], items=name)) for name, settings in (("a", {}), ("b", changes))]
        return comparison(runs)["sentences"]

    found = sentences(MAX_SEQ_LEN=16)
    assert "scored different items, as MAX_SEQ_LEN differs, so they are not compared" in found[0]
    assert found[1].startswith("To compare the models on the same items: ") and " eval a" in found[1] and len(found) == 2
    found = sentences(TOKENIZER_PATH="u")
    assert "as TOKENIZER_PATH differs" in found[0] and found[1:] == ["Their tokenizers differ: losses per token cannot be compared"]
    assert "scored different items, so" in sentences()[0]


def test_a_comparison_before_the_end_of_a_run_says_so(tmp_path, right):
    runs = [write_run(tmp_path / name, {"MAX_STEPS": end, "RUN_NAME": name}, [{"step": step, "val_loss": 2.5} for step in range(5, end + 1, 5)],
                      [{"step": step, "name": "validation", "items": "abc", "n": 16, "loss": (2.5 - step / 100 + np.arange(16) / 100).tolist(), "count": [256] * 16}
                       for step in range(5, end + 1, 5)]) for name, end in (("a", 10), ("b", 15))]
    assert comparison(runs)["sentences"][-1].startswith("b trained further than step 10; to compare the last models: ")
    assert comparison(runs)["sentences"][-1].endswith(" eval a b")


def test_below_ten_items_there_is_no_test_and_a_sentence_says_so(tmp_path):
    for count, refused in ((1, "1 chat"), (9, "9 chats"), (10, None)):
        losses = [0.1 * place for place in range(count)]
        runs = [write_run(tmp_path / f"{name}{count}", {}, [{"step": 5, "val_loss": 1.0}],
                          [{"step": 5, "name": "validation", "items": "x", "n": count, "kind": "chats", "loss": [each + shift for each in losses], "count": [9] * count}])
                for name, shift in (("a", 0.0), ("b", 0.5))]
        found = comparison(runs)
        assert bool(found["tests"]) == (refused is None)
        assert found["refused"] == [f"validation: a{count} and b{count} share {refused}, and a verdict needs 10, so they are not compared"] * bool(refused)
        assert ("p < 0.0001, 10 chats" in found["sentences"][0]) == (refused is None) and not any("±" in each for each in found["sentences"][:-1] if refused)


@pytest.fixture
def seeded(tmp_path):
    """Write runs: losses by learning rate and seed; None is a run that failed at step 0."""
    def write(losses, last=MappingProxyType({})):
        runs = []
        for rate, values in losses.items():
            steps = last.get(rate, 10)
            for seed, loss in enumerate(values):
                name = f"{rate}-{seed}"
                settings = {"LEARNING_RATE": rate, "SEED": seed, "RUN_NAME": name, "MAX_STEPS": steps}
                metrics = [{"step": 0, "val_loss": 3.0, "time": 1.0}]
                metrics += [{"step": steps, "val_loss": loss, "time": 2.0}] * (loss is not None)
                run = write_run(tmp_path / name, settings, metrics, [])
                end = {"time": 3.0, "step": metrics[-1]["step"], "event": "end", "reason": "finished" if loss is not None else "the loss is NaN"}
                (run.folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ({"time": 0.0, "step": 0, "event": "start"}, end)))
                run.read()
                runs.append(run)
        return runs

    return write


def test_runs_that_differ_only_in_their_seeds_are_one_configuration(seeded):
    stats, rng = pytest.importorskip("scipy.stats"), np.random.default_rng(0)
    losses = {rate: 2.0 + shift + 0.05 * rng.normal(size=8) for rate, shift in ((0.1, 0), (0.2, 0.5), (0.3, -0.5), (0.4, 0.0))}
    runs = seeded(losses)
    found = comparison(runs)
    assert [made["name"] for made in found["configurations"]] == [f"LEARNING_RATE={rate}" for rate in losses]
    for made, values in zip(found["configurations"], losses.values()):
        assert (made["mean"], made["stderr"]) == pytest.approx((values.mean(), stats.sem(values)))
    assert found["tests"] == [], "the unit is a seed, not an item"
    worse, better, unknown = found["sentences"]
    for text, rate in ((worse, 0.2), (better, 0.3)):
        verdict = compare(losses[rate] - losses[0.1], ERROR / 3)
        winner, loser = (0.1, rate) if rate == 0.2 else (rate, 0.1)
        assert text == (f"validation loss at step 10: LEARNING_RATE={winner} is better than LEARNING_RATE={loser} by "
                        f"{abs(verdict.difference):.4f} ± {verdict.half:.4f} (8 seeds in common)"), "the error is shared by three comparisons"
    assert unknown.startswith("validation loss at step 10: undecided between LEARNING_RATE=0.1 and LEARNING_RATE=0.4: ")
    assert comparison(runs[::8])["configurations"] == [], "no two runs differ only in their seeds"
    assert comparison(runs[:3] + runs[8:11])["sentences"] == [
        "validation loss at step 10: undecided between LEARNING_RATE=0.1 and LEARNING_RATE=0.2 (3 seeds in common; 6 or more can decide)"]


def test_finished_runs_of_other_lengths_are_compared_at_their_ends_and_not_at_the_first_step(seeded):
    """Recipes may differ in MAX_STEPS."""
    runs = seeded({0.1: [2.0] * 8, 0.2: [1.0] * 8}, last={0.2: 7})
    assert comparison(runs)["sentences"][0].startswith("validation loss (last): LEARNING_RATE=0.2, MAX_STEPS=7 is better than LEARNING_RATE=0.1, MAX_STEPS=10")
    with (runs[0].folder / "events.jsonl").open("a") as events:
        events.write("".join(json.dumps({"time": 4.0, "step": 10, **each}) + "\n" for each in (
            {"event": "start"}, {"event": "end", "reason": "stopped by a signal"})))
    begun = RunReader(runs[0].folder, "begun")
    begun.read()
    assert comparison([begun, *runs[1:]])["sentences"] == ["validation loss (last): the runs have no step or items in common, so they cannot be compared"]


def test_losses_on_other_items_have_no_verdict_over_seeds(seeded):
    """Two data sets, each with its own held-out part."""
    runs = seeded({0.1: [2.0] * 8, 0.2: [1.0] * 8})
    for run in runs:
        run.items = {"validation": {str(run.settings["LEARNING_RATE"])}}
    assert comparison(runs)["sentences"] == ["validation loss at step 10: the runs have no step or items in common, so they cannot be compared"]
    for run in runs:
        run.items = {"validation": {"same", run.name}}
    assert "LEARNING_RATE=0.2 is better than LEARNING_RATE=0.1" in comparison(runs)["sentences"][0]


def test_two_seeds_of_one_recipe_are_not_tested(seeded):
    """Issue 71: a run was called better than its twin, p = 0.00075."""
    found = comparison(seeded({0.1: [2.0, 2.092]}))
    assert found["sentences"] == ["validation loss at step 10: the same settings; their 2 seeds span 0.0920, by chance"] and found["tests"] == []


def test_a_failed_run_is_named_and_left_out_of_means(seeded):
    found = comparison(seeded({0.1: [2.0, 2.1, 2.2], 0.2: [2.5, None, 2.7]}))
    assert found["results"][0]["name"] == "validation loss at step 10", "not at step 0, where the failed run ended"
    assert [cell and cell["value"] for cell in found["results"][0]["cells"]] == [2.0, 2.1, 2.2, 2.5, None, 2.7]
    assert [(made["n"], made["mean"]) for made in found["configurations"]] == [(3, pytest.approx(2.1)), (2, pytest.approx(2.6))]
    assert found["sentences"][1] == "0.2-1 failed after 0 of 10 steps: the loss is NaN; it counts as the worst, and is left out of means" and "3 seeds in common" in found["sentences"][0]
