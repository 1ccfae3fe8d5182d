"""The sentences that say whether a run has learned, and whether it is healthy."""

from collections import Counter

import numpy as np
import pytest

from checkpoint.schema import REWARD, VALIDATION
from extensions.report.curves import Curve
from extensions.report.goodput import RESTARTED
from extensions.report.health import HEADLINES, LOSS, alarms_and_downtime, learning
from extensions.report.items import ItemScores, trends


def curves(**values: list[float]) -> dict[str, Curve]:
    made = {name: Curve() for name in values}
    for name, curve in made.items():
        for place, value in enumerate(values[name]):
            curve.add(10 * place, value)
    return made


@pytest.mark.parametrize("losses, state, kinds, verdicts", [
    ([7.59, 0.77], "finished", (), [(True, "Learned: validation loss 7.590 → 0.770 (unpaired).")]),
    ([7.59, 7.56], "finished", (), [(False, "Did not learn: validation loss 7.590 → 7.560 (unpaired).")]),  # two errors are 0.04
    ([7.59, 7.54], "finished", (), [(True, "Learned: validation loss 7.590 → 7.540 (unpaired).")]),
    ([7.59, 9.0], "running", (), [(False, "Getting worse: validation loss 7.590 → 9.000 (unpaired).")]),
    ([7.59, 9.0], "failed", ("divergence",), [(False, "Diverged: validation loss 7.590 → 9.000 (unpaired).")]),
    ([7.59, 7.15, float("nan")], "finished", (), [(False, "Diverged: validation loss 7.590 → not finite.")]),
    ([7.59, 7.15], "failed", ("step not finite",), [(False, "Diverged: validation loss 7.590 → 7.150 (unpaired), until a step was NaN or infinite.")]),
    ([99.0, 7.15], "failed", ("no gradient",), [(False, "Stopped learning: validation loss 99.000 → 7.150 (unpaired).")]),
    ([7.59, 0.7, 0.9], "finished", (), [(True, "Learned: validation loss 7.590 → 0.900 (unpaired)."),
                                        (False, "The validation loss has risen since step 10, where it was 0.700.")]),
    ([7.59, 0.8, 0.85], "finished", (), [(True, "Learned: validation loss 7.590 → 0.850 (unpaired).")]), ([7.59], "running", (), [])])
def test_a_run_has_learned_if_its_loss_fell_by_more_than_its_error(losses, state, kinds, verdicts):
    values = curves(val_loss=losses, val_loss_stderr=[0.02] * len(losses))
    assert [*learning(values, state, kinds, "HellaSwag")] == verdicts


def measured(*means: float, noise: float = 0.0, metric: str = "loss", n: int = 24) -> tuple[dict, dict]:
    """Curves and trends of a run's validations of the same chats, whose losses differ much more than a chat's from step to step."""
    rng, name = np.random.default_rng(0), {"loss": "val_loss", "preferred": "val_reward_accuracy", "reward": "val_reward"}[metric]
    own, followed = rng.normal(0, 1.2, n), trends()
    for place, mean in enumerate(means):
        changes = rng.normal(size=n)
        values = mean + own - own.mean() + noise * bool(place) * (changes - changes.mean()) / (changes.std(ddof=1) if n > 1 else 1)
        scores = {"loss": values, "count": np.full(n, 10.0)} if metric == "loss" else {metric: values}
        if metric == "preferred":
            scores = {metric: np.arange(n) < round(mean * n)}
        followed[name].add(ItemScores(10 * place, REWARD if metric == "reward" else VALIDATION, "abc", scores, "chats"))
    return curves(**{name: [*means], f"{name}_stderr": [0.25] * len(means)}), followed


def test_the_same_rows_are_compared_in_pairs():
    """Issue 50: an error of 0.25 of each loss hides a fall of 0.13 on the same chats, t = -15."""
    values, followed = measured(2.36, 2.23, noise=0.13 / 15 * 24**0.5)
    (is_good, text), = learning(values, "finished", (), "", LOSS, followed)
    assert is_good and text == "Learned: validation loss 2.360 → 2.230 (-0.1300 ± 0.0087, paired over 24 chats)."
    assert not next(learning(values, "finished", (), ""))[0], "unpaired, it did not"
    stats = pytest.importorskip("scipy.stats")
    first, last = (each.scores["loss"] for each in (followed["val_loss"].first, followed["val_loss"].last))
    test, expected = followed["val_loss"].against(followed["val_loss"].first), stats.ttest_rel(last, first)
    assert (test.difference / test.stderr, test.p) == pytest.approx((expected.statistic, expected.pvalue)) and expected.statistic == pytest.approx(-15)


@pytest.mark.parametrize("losses, word", [((7.6, 5.088, 5.325), "Overfit: validation loss 7.600 → 5.088 at step 10 → 5.325 (+0.2370 ± 0.0"),
                                          ((5.088, 5.325), "Got worse: validation loss 5.088 → 5.325 (+0.2370 ± 0.0624")])
def test_a_loss_above_its_best_is_overfit_not_learned(losses, word):
    """Issue 50: t = 3.8 on the same chats; the unpaired error of 0.25 sees nothing."""
    values, followed = measured(*losses, noise=0.237 / 3.8 * 24**0.5 / (2**0.5 if len(losses) > 2 else 1))
    (is_good, text), = learning(values, "finished", (), "", LOSS, followed)
    assert not is_good and text.startswith(word) and text.endswith("paired over 24 chats).")
    assert alarms_and_downtime("finished", Counter(), [], is_good) == (None, "No alarms, no interruptions."), "not healthy"
    small = measured(*losses[:-1], losses[-2] + 0.03, noise=0.001)
    assert small[1]["val_loss"].rise() is None, "a rise of less than 1 % is trivial, however certain"
    rising = values | curves(train_loss=[7.5, 5.0, 9.0])
    assert next(learning(rising, "finished", (), "", LOSS, followed))[1].startswith("Got worse"), "whoever overfits learns the training data"


def test_preferences_are_judged_by_their_accuracy_and_grpo_by_its_reward():
    """The loss does not decide; the reference prefers no answer, so DPO begins at chance."""
    for shares, good, text in (((0.0, 18 / 24), True, "Learned: held-out preference accuracy 50.0 % → 75.0 % (from chance, over 24 chats)."),
                               ((0.0, 13 / 24), False, "Did not learn: held-out preference accuracy 50.0 % → 54.2 % (from chance, over 24 chats)."),
                               ((10 / 24, 20 / 24), True, "Learned: held-out preference accuracy 41.7 % → 83.3 % (+41.7 ± 10.3 points, paired over 24 chats).")):
        values, followed = measured(*shares, metric="preferred")
        values |= curves(val_loss=[0.69, 1.2], train_loss=[0.7, 0.1])
        assert next(learning(values, "finished", (), "", HEADLINES["dpo"], followed)) == (good, text)
    values, followed = measured(0.0, 1.0, metric="preferred", n=1)
    assert next(learning(values, "finished", (), "", HEADLINES["dpo"], followed)) == (
        None, "Too few to tell: held-out preference accuracy 50.0 % → 100.0 % (1 chat held out; a verdict needs 10: raise VALIDATION_FRACTION).")
    for n, good, word, proof in ((2, None, "Too few to tell", "(2 chats held out; a verdict needs 10: raise VALIDATION_FRACTION)."),
                                 (9, None, "Too few to tell", "(9 chats held out; a verdict needs 10: raise VALIDATION_FRACTION)."), (10, False, "Did not learn", "paired over 10 chats).")):
        values, followed = measured(6.63, 6.52, noise=0.2, n=n)
        good_now, text = next(learning(values, "finished", (), "", LOSS, followed))
        assert (good_now, text.split(":")[0]) == (good, word) and text.endswith(proof)
    values, followed = measured(0.1, 0.3, noise=0.2, metric="reward")
    values |= curves(train_loss=[0.0, 0.02, 0.05])
    assert next(learning(values, "finished", {"divergence"}, "", HEADLINES["grpo"], followed))[1].startswith("Learned: held-out reward 0.100 → 0.300 (+0.2000 ±")
    assert next(learning(curves(reward=[0.1, 0.5, 0.9, 0.9]), "running", (), "", HEADLINES["grpo"]))[1].startswith("Learning: training reward 0.100 → 0.900")


def test_without_validation_the_training_loss_decides_by_its_recent_median():
    noise = np.random.default_rng(0).normal(size=100)
    (is_good, text), = learning(curves(train_loss=[5.0, *(2 + 0.1 * noise)]), "finished", (), "")
    assert is_good and text.startswith("Learned: training loss 5.000 → ")
    (is_good, text), = learning(curves(train_loss=[2.1, *(2 + 0.1 * noise)]), "finished", (), "")
    assert not is_good and text.startswith("Did not learn")
    (is_good, text), = learning(curves(train_loss=[7.5, 7.1, 6.3, 5.5, 4.8, 4.4, 3.9, 3.5, 3.1]), "running", (), "")
    assert is_good and text == "Learning: training loss 7.500 → 3.900 (recent median).", "a steep fall is not noise"


def test_health_counts_alarms_by_kind_and_what_interruptions_cost():
    assert alarms_and_downtime("finished", Counter(), []) == (True, "Healthy: no alarms, no interruptions.")
    downtime = [{"downtime_seconds": 50.0, "reason": "killed"}, {"downtime_seconds": 0.0, "reason": f"killed ({RESTARTED})"}]
    assert alarms_and_downtime("running", Counter({"loss spike": 2}), downtime) == (
        False, "Alarms: 2 × loss spike; 2 interruptions (50 s downtime, 1 restarted by the launcher).")
    assert alarms_and_downtime("failed", Counter(), []) == (False, "Failed. No alarms; no interruptions.")
