"""What a reader meets in a run does not grow: see tests/phases.py."""

from phases import BOUNDS, measured_runs, table


def test_a_run_enters_no_more_functions_files_and_classes_than_today(tmp_path):
    rows = table(*measured_runs(tmp_path))
    assert rows.keys() == BOUNDS.keys()
    above = {name: (numbers, BOUNDS[name]) for name, numbers in rows.items()
             if any(bound is not None and number > bound for number, bound in zip(numbers, BOUNDS[name]))}
    assert above == {}, "simplify, or raise the bound as a decision; `python tests/phases.py --list PHASE` shows what is entered"
