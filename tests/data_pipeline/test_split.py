"""Which items are held out: limits of the plan, and where a document's end begins."""

from itertools import count
from types import SimpleNamespace

import pytest

from data_pipeline.prepare import SplitPlan, cut_tails, describe_split, is_far, name_set, plan_split
from data_pipeline.sources import Document
from data_pipeline.workers import position_of


def keys(how_many, lowest=0.05, start=0):
    """Different keys whose positions are at least `lowest`, so that the usual share holds out none of them."""
    found = (f"key {number}" for number in count(start) if position_of(f"key {number}") >= lowest)
    return [next(found) for _ in range(how_many)]


def items(*openings):
    return [SimpleNamespace(split_key=key, whole_key=f"whole {key} {number}") for key, times in openings for number in range(times)]


def plan(examples, requested=0.05, kind="chats"):
    return plan_split(SimpleNamespace(name=kind), examples, requested)


@pytest.mark.parametrize("others, answers, is_common", [(184, 16, False), (183, 17, True), (3975, 25, False), (3974, 26, True)])
def test_an_opening_is_common_beyond_sixteen_answers_and_an_eighth_of_what_is_held_out(others, answers, is_common):
    opening, *more = keys(1 + others)
    assert plan(items((opening, answers), *((key, 1) for key in more))).common == [position_of(opening)] * is_common


def test_one_opening_of_few_answers_is_common_and_alone_holds_out_nothing():
    assert plan(items((keys(1)[0], 10))).common and not plan(items((keys(1)[0], 10)), kind="").common
    assert plan(items((keys(1)[0], 1)), requested=None) == SplitPlan(0.0, [position_of(keys(1)[0])])
    assert plan(items((keys(1, 0.3)[0], 1)), requested=0.3, kind="").fraction == 0.3


def test_a_large_set_keeps_its_common_openings_and_reserves_what_others_hold_out():
    opening, *more = keys(4001)
    assert plan(items((opening, 1000), *((key, 1) for key in more)), requested=None) == SplitPlan(0.005, [position_of(opening)], 0.05)


@pytest.mark.parametrize("size, requested, rank", [(20, 0.05, 1), (60, 0.05, 3), (70, 0.05, 3), (75, 0.05, 4), (60, None, 3)])
def test_without_a_key_in_the_share_as_many_are_held_out_as_come_nearest(size, requested, rank):
    chosen = keys(size)
    ordered = sorted(map(position_of, chosen))
    assert plan(items(*((key, 1) for key in chosen)), requested).fraction == sum(ordered[rank - 1:rank + 1]) / 2


def test_of_few_documents_the_ends_are_held_out_and_of_a_part_of_many_what_the_share_gives():
    assert [plan(items(*((key, 1) for key in keys(size))), None, kind="").fraction is None for size in (19, 20)] == [True, False]
    assert [plan(items(*((key, 1) for key in keys(size))), 0.05, kind="").fraction == 0.05 for size in (399, 400)] == [False, True]


@pytest.mark.parametrize("kind, requested, read", [("chats", None, 10_000), ("chats", 0.5, 10_000), ("", None, 4000), ("", 0.01, 2000), ("", 0.5, 40)])
def test_so_many_items_are_read_ahead(kind, requested, read):
    source = iter(items(*((f"key {number}", 1) for number in range(read + 1))))
    plan(source, requested, kind)
    assert next(source).split_key == f"key {read}"


@pytest.mark.parametrize("target, far, near", [(100, [49, 201], [50, 200]), (4, [9], [0, 8]), (1, [4], [0, 3]), (64, [31, 129], [32, 128])])
def test_a_split_is_far_beyond_half_twice_and_chance(target, far, near):
    assert all(is_far(held_out, target) for held_out in far) and not any(is_far(held_out, target) for held_out in near)


@pytest.mark.parametrize("ends, cut", [({81: "\n\n", 88: "\n"}, 83), ({85: "\n"}, 86), ({82: "\n", 87: "\n"}, 88), ({82: "\n\n", 86: "\n\n"}, 88),
                                       ({}, 90), ({75: "\n\n"}, 90), ({91: "\n"}, 90)])
def test_a_document_is_cut_at_the_last_end_of_a_paragraph_or_line_in_its_ninth_tenth(ends, cut):
    text = "x" * 100
    for place, end in ends.items():
        text = text[:place] + end + text[place + len(end):]
    assert [*cut_tails([Document("x:1", text)])] == [Document("x:1", text[:cut], "train"), Document("x:1", text[cut:], "validation")]
    assert [*cut_tails([Document("x:1", 90 * "x" + 10 * " ")])] == [Document("x:1", 90 * "x", "train")], "a blank end is nothing"


@pytest.mark.parametrize("held_out, total, share", [(1, 40, "0.4 holds out about 16"), (9, 150, "0.1 holds out about 15"), (10, 200, ""), (2, 19, "")])
def test_too_few_held_out_examples_for_a_verdict_are_said_if_there_could_be_more(held_out, total, share):
    splits = {"train": {"documents": total - held_out}, "validation": {"documents": held_out}}
    manifest = {"kind": "chats", "rules": 2, "settings": {"validation_fraction": None}, "splits": splits, "source": {"sources": [{"path": "a"}]}}
    few = [line for line in describe_split(manifest) if line.startswith("Held out")]
    assert [line.partition("--validation-fraction ")[2] for line in few] == [share] * bool(share)


def test_a_name_that_moves_to_another_set_is_said(tmp_path, capsys):
    for number in (1, 2, 2):
        (tmp_path / f"set{number}").mkdir(exist_ok=True)
        assert name_set(tmp_path / f"set{number}", "chats.jsonl") == tmp_path / "chats"
    assert capsys.readouterr().out == f"{tmp_path / 'chats'} is this set now; a run of the earlier one needs its folder, set1\n"
