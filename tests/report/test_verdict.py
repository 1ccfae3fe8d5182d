"""The sentences that say whether a run has learned, and whether it is healthy."""

from collections import Counter

import numpy as np
import pytest

from report.curves import Curve
from report.goodput import RESTARTED
from report.verdict import health, learning, time_text


def curves(**values: list[float]) -> dict[str, Curve]:
    made = {name: Curve() for name in values}
    for name, curve in made.items():
        for place, value in enumerate(values[name]):
            curve.add(10 * place, value)
    return made


@pytest.mark.parametrize("losses, state, kinds, verdicts", [
    ([7.59, 0.77], "finished", (), [(True, "Learned: validation loss 7.59 → 0.77.")]),
    ([7.59, 0.77], "running", (), [(True, "Learning: validation loss 7.59 → 0.77.")]),
    ([7.59, 7.58], "finished", (), [(False, "Did not learn: validation loss 7.59 → 7.58.")]),
    ([7.59, 9.0], "running", (), [(False, "Not learning: validation loss 7.59 → 9.00.")]),
    ([99.0, 7.15], "failed", ("no gradient",), [(False, "Diverged: validation loss 99.00 → 7.15.")]),
    ([7.59, 0.7, 0.9], "finished", (), [
        (True, "Learned: validation loss 7.59 → 0.90."), (False, "The validation loss has risen since step 10, where it was 0.70.")]),
    ([7.59, 0.8, 0.81], "finished", (), [(True, "Learned: validation loss 7.59 → 0.81.")]), ([7.59], "running", (), [])])
def test_a_run_has_learned_if_its_loss_fell_by_more_than_its_error(losses, state, kinds, verdicts):
    given = curves(val_loss=losses, val_loss_stderr=[0.02] * len(losses))
    assert [*learning(given, state, kinds, "HellaSwag")] == verdicts


def test_accuracies_have_their_error_and_their_chance():
    given = curves(val_loss=[3, 1], hellaswag_acc=[0.2, 0.6], hellaswag_stderr=[0.02, 0.022], hellaswag_chance=[0.25, 0.25],
                   hellaswag_acc_norm=[0.1, 0.1], arc_acc=[0.5, 0.5])
    (_, text), = learning(given, "finished", (), "sample items")
    assert text == "Learned: validation loss 3.00 → 1.00; accuracy on sample items 60.0 % ± 2.2 (chance 25 %); accuracy on arc 50.0 %."


def test_without_validation_the_training_loss_decides_by_its_recent_median():
    noise = np.random.default_rng(0).normal(size=100)
    (is_good, text), = learning(curves(train_loss=[5.0, *(2 + 0.1 * noise)]), "finished", (), "")
    assert is_good and text.startswith("Learned: training loss 5.00 → ")
    (is_good, text), = learning(curves(train_loss=[2.1, *(2 + 0.1 * noise)]), "finished", (), "")
    assert not is_good and text.startswith("Did not learn")
    (is_good, text), = learning(curves(train_loss=[7.5, 7.1, 6.3, 5.5, 4.8, 4.4, 3.9, 3.5, 3.1]), "running", (), "")
    assert is_good and text == "Learning: training loss 7.50 → 3.90.", "a steep fall is not noise"


def test_health_counts_alarms_by_kind_and_what_interruptions_cost():
    assert health("finished", Counter(), []) == (True, "Healthy: no alarms, no interruptions.")
    away = [{"away_seconds": 50.0, "reason": "killed"}, {"away_seconds": None, "reason": "killed"}]
    assert health("running", Counter({"loss spike": 2}), away) == (False, "Alarms: 2 × loss spike; 2 interruptions (50 s away).")
    away[1]["reason"] = f"killed ({RESTARTED})"
    assert health("finished", Counter(), away)[1].endswith("2 interruptions (50 s away, 1 restarted by the launcher).")
    assert health("finished", Counter(), away[:1]) == (True, "Healthy: no alarms, 1 interruption (50 s away).")
    assert health("failed", Counter(), []) == (False, "Failed. No alarms; no interruptions.")


def test_times_have_two_units():
    assert [time_text(each) for each in (0.4, 59, 60, 7500, 200_000)] == ["0 s", "59 s", "1 min 00 s", "2 h 05 min", "2 d 07 h"]
