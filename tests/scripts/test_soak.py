"""A small soak, and that it reports what does not hold; a stop at every step of an epoch."""

import re

import pytest
from factories import assert_same_run, stop_at

import train
from data_pipeline.shards import TokenizerInfo
from dataloaders import ExampleRows, open_example_set
from scripts.dev import soak

LAST_LINE = re.compile(r"soak: (\d+)/(\d+) kills identical \((\d+) inside saves, (\d+) of two ranks\), (\d+)/(\d+) crash points "
                       r"recovered, (\d+)/(\d+) bit flips found, (\d+)/(\d+) truncations found, (\d+)/(\d+) elastic "
                       r"kills identical; pretrain, seed (\d+); [\w ]+")


def last_line(capsys) -> list[int]:
    captured = capsys.readouterr()
    found = LAST_LINE.fullmatch(captured.out.splitlines()[-1])
    assert found, captured.out
    return [int(number) for number in found.groups()]


def test_a_few_kills_crash_points_flips_and_truncations(capsys, monkeypatch):
    monkeypatch.setitem(soak.STAGES, "pretrain", ("", (1,)))  # with two ranks in those marked soak
    assert soak.main(["--kills", "1", "--points", "1", "--flips", "1", "--truncations", "1", "--seed", "4"]) == 0
    kills, of, inside, _, *others = last_line(capsys)
    assert (kills, of) == (1, 1) and inside == 1 and others == [1, 1, 1, 1, 1, 1, 0, 0, 4]


@pytest.mark.soak
@pytest.mark.parametrize("points", ["all", "borders"])
def test_twenty_kills_every_crash_point_and_every_file_damaged(points, capsys):
    assert soak.main(["--kills", "20", "--points", points, "--flips", "12", "--truncations", "24", "--seed", "1"]) == 0
    kills, of, inside, of_two_ranks, passed, crash_points, *others = last_line(capsys)
    assert (kills, of) == (20, 20) and inside >= 6 and of_two_ranks >= 6
    assert passed == crash_points >= 20 and others == [12, 12, 24, 24, 0, 0, 1]


@pytest.mark.soak
def test_three_elastic_kills(capsys):
    assert soak.main(["--kills", "0", "--points", "0", "--flips", "0", "--truncations", "0", "--elastic", "3"]) == 0
    assert last_line(capsys)[-3:-1] == [3, 3]


@pytest.mark.slow
def test_a_stop_at_any_step_of_an_epoch_and_beyond_its_end_changes_nothing(stages, tmp_path):
    """With dropout, whose random state is not saved."""
    rows = len(ExampleRows(open_example_set(stages.chats, "train", "chats", TokenizerInfo(512)), 96))
    last = -(-rows // 8) + 2
    settings = {"MAX_STEPS": last, "LORA_DROPOUT": 0.3}
    whole = stages.run("lora-sft", tmp_path / "whole", **settings).trained()
    assert last * 8 > rows and list(whole.column("train_loss")) == [*range(1, last + 1)]
    print(f"{last} steps, {rows} rows, 8 a step")
    dry = stages.run("lora-sft", tmp_path / "dry", **settings | {"LORA_DROPOUT": 0})
    assert dry.train() == 0 and dry.hashes(last) != whole.hashes(last), "dropout must make a difference"
    for step in range(1, last + 1):
        stopped = stages.run("lora-sft", tmp_path / f"stopped-{step}", **settings)
        with stop_at(step):
            assert stopped.train() == train.EXIT_PREEMPTED
        assert stopped.steps_saved()[-1] == step and stopped.train() == 0
        assert_same_run(stopped, whole, last)
