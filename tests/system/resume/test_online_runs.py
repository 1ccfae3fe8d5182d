"""Runs of GRPO: the same bits after any kill and on two ranks, rewards that fail, and what is refused."""

import json
import os
import re

import numpy as np
import pytest
import torch
from factories import TinyRun, assert_same_run, write_jsonl

import train
from data_pipeline.shards import TokenizerInfo
from data_pipeline.source_files import Source
from data_preparation_utils import PreparationOptions, prepare_set
from dataloaders import open_example_set
from extensions import online
from extensions.online import GRPO, Rewards, advantages, training_batch
from extensions.prompts import PromptRows
from extensions.report.page import Report
from model_kernels.head import IGNORE_INDEX
from tokenizer import load_tokenizer

FUNCTIONS = """
import os, time

def fails(prompt, answer, record):
    if len(answer) % 3 == 0:
        raise ValueError("too bad")
    return len(answer)

def hangs(prompt, answer, record):
    if len(answer) % 3 == 0:
        time.sleep(60)
    return len(answer)

def dies(prompt, answer, record):
    if len(answer) % 3 == 0:
        os._exit(7)
    return len(answer)

def own(prompt, answer, record):
    print("to the terminal, not into a reply")
    return float(answer == record["answer"])
"""


@pytest.fixture(scope="module")
def whole(stages, tmp_path_factory) -> TinyRun:
    return stages.run("grpo", tmp_path_factory.mktemp("whole")).trained()


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """The module in the path of the processes that are started."""
    (tmp_path / "rated.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")


@pytest.mark.parametrize("mode, together", [pytest.param("grpo", 1, marks=pytest.mark.slow), ("lora-grpo", 3), ("gkd", 1), ("gkd", 3)])
def test_two_ranks_generate_and_learn_the_same_bits(mode, together, stages, tmp_path, monkeypatch):
    """Also if micro-batches are answered together, as on a GPU, some with those of another rank."""
    monkeypatch.setattr(online, "answered_together", lambda *_: together)
    same = {"REPRODUCIBLE": "true", "MICRO_BATCH_SIZE": 2}
    one, two = (stages.run(mode, tmp_path / name, **same) for name in ("one", "two"))
    assert one.train() == 0
    two.ends([0, 0])
    assert_same_run(two, one, 4)
    assert len(one.lines("rollouts")) == 4 * 8


def test_the_reference_of_adapters_is_the_model_without_them(stages, tmp_path):
    run = stages.run("lora-grpo", tmp_path, GRPO_UPDATES=1, MAX_STEPS=2, VALIDATE_EVERY=0, HELLASWAG_EVERY=0,
                     SAMPLE_EVERY=0, SAVE_EVERY=0)
    assert run.train() == 0
    first, second = run.column("kl").values()
    assert first == pytest.approx(0, abs=1e-10) and second > 1e-4


def test_a_step_is_all_of_its_updates(stages, tmp_path, monkeypatch, capsys):
    """Its metrics are their means. If the second is not finite, there is no third, and the saved state is that before the first."""
    changes = dict(GRPO_UPDATES=3, MAX_STEPS=2, SAVE_EVERY=1, VALIDATE_EVERY=0, HELLASWAG_EVERY=0, SAMPLE_EVERY=0)
    calm, run = (stages.run("grpo", tmp_path / name, **changes) for name in ("calm", "bad"))
    results, step, loss_sum = [], train.train_step, GRPO.loss_sum
    monkeypatch.setattr(train, "train_step", lambda *facts: results.append(step(*facts)) or results[-1])
    assert calm.train() == 0 and len(results) == 6
    for line, logged, updates in zip(calm.lines("ledger"), calm.metrics()[-2:], (results[:3], results[3:]), strict=True):
        for name, value in {"loss": line["loss"], "grad_norm": line["grad_norm"]}.items():
            assert value == pytest.approx(sum(getattr(each, name) for each in updates) / 3, rel=1e-12)
        assert logged["clipped"] == pytest.approx(sum(each.metrics["clipped"] for each in updates) / 3)

    def not_finite(objective, model, batch):
        found = loss_sum(objective, model, batch)
        return found._replace(total=found.total * torch.nan) if len(results) == 4 else found

    first = stages.run("grpo", tmp_path / "first", **changes)
    for poisoned, saved in ((run, 1), (first, 0)):  # in the second step, and in the first, before which the optimizer has no state
        monkeypatch.setattr(GRPO, "loss_sum", not_finite)
        results[:] = [None] * (3 - 3 * saved)
        assert poisoned.train(SAVE_EVERY=0) == 4 and len(results) == 5
        error = capsys.readouterr().err
        assert f"became NaN in step {saved + 1}" in error and f"Step {saved} is saved." in error and "replay" not in error
        assert poisoned.lines("ledger")[-1]["updated"] is False
        assert poisoned.steps_saved() == [saved]
        monkeypatch.setattr(GRPO, "loss_sum", loss_sum)
        assert poisoned.train() == 0
        assert poisoned.hashes(2) == calm.hashes(2)
    assert run.hashes(1) == first.hashes(1) == calm.hashes(1)


def test_held_out_prompts_are_answered_in_validations(whole, stages):
    """Each question is in one split, whose shards have it."""
    decode = load_tokenizer(str(stages.prepared.tokenizer)).decode
    asked = {split: {*re.findall(r"[a-z]at\?", decode(np.fromfile(stages.prompts / f"{split}-00000.bin", "<u2", offset=1024).tolist()))}
             for split in ("train", "validation")}
    texts = [each["prompt"] for line in whole.lines("evaluations") if line["name"] == "val_reward" for each in line["texts"]]
    found = {question for text in texts for question in re.findall(r"[a-z]at\?", text)}
    assert found and found <= asked["validation"] and not found & asked["train"]


def test_a_teacher_scores_own_and_recorded_answers(stages, tmp_path, capsys):
    """GKD's lambda: the share of micro-batches with own answers; the others have those of the records."""
    runs = {share: stages.run("gkd", tmp_path / str(share), DISTILLATION_LAMBDA=share, VALIDATE_EVERY=0) for share in (0, 0.5, 1)}
    recorded = {}
    for share, run in runs.items():
        assert run.train() == 0
        lines = run.lines("rollouts")
        assert len(lines) == 4 * 8 and all(line["rewards"] == {} and line["advantage"] == 0 for line in lines)
        recorded[share] = sum(line["answer"] in "abcdefghijklmnopqrstuvwxyz" and line["tokens"] == 2 for line in lines)
        divergences = list(run.column("divergence").values())
        assert divergences == pytest.approx(list(run.column("train_loss").values())) and sum(divergences[2:]) < sum(divergences[:2])
    assert recorded[0] == 32 and recorded[1] <= 2 and 4 <= recorded[0.5] <= 28
    assert runs[0].column("answers_cut") == dict.fromkeys(range(1, 5), 0)
    options = PreparationOptions(str(stages.prepared.tokenizer), "auto", 100_000, 0.0, workers=1)
    asked = prepare_set("prompts", write_jsonl(tmp_path / "asked.jsonl", [{"prompt": "Why?"}] * 40), tmp_path, options)
    lost = stages.run("gkd", tmp_path / "lost", DISTILLATION_LAMBDA=0, GRPO_DATA_PATH=asked, VALIDATE_EVERY=0)
    assert lost.train() == 3 and "needs an answer in each record" in capsys.readouterr().err


def test_the_log_has_every_answer_with_its_rewards(whole):
    metrics = whole.metrics()
    for step in (1, 2, 3, 4):
        lines = [line for line in whole.lines("rollouts") if line["step"] == step]
        assert [line["group"] for line in lines] == [0, 0, 1, 1, 2, 2, 3, 3]
        for line in lines:
            assert line["reward"] == pytest.approx(0.1 * line["rewards"]["length"] + line["rewards"]["contains"])
            assert line["rewards"]["length"] == len(line["answer"]) and line["tokens"] <= 12
        logged = next(line for line in metrics if line["step"] == step and "reward" in line)
        assert logged["reward"] == pytest.approx(np.mean([line["reward"] for line in lines]))
        assert logged["answer_tokens"] == np.mean([line["tokens"] for line in lines])
        assert logged["reward_std"] == pytest.approx(np.std([line["reward"] for line in lines]))
        assert logged["equal_groups"] == np.mean([one["reward"] == other["reward"] for one, other in zip(lines[::2], lines[1::2])])
        for group in range(0, 8, 2):
            one, other = lines[group:group + 2]
            assert one["prompt"] == other["prompt"] and abs(one["advantage"] + other["advantage"]) < 1e-12
            assert np.sign(one["advantage"]) == np.sign(one["reward"] - other["reward"])
    assert len({line["answer"] for line in whole.lines("rollouts")}) > 25, "answers draw their own numbers"
    assert not any("<|reserved" in line["answer"] for line in whole.lines("rollouts")), "half of the vocabulary, which the base has never seen"
    report = Report([whole.folder])
    report.read()
    data = report.data()
    shown = {sample["step"]: sample["text"] for sample in data["runs"][0]["samples"] if "Rewards" in sample["prompt"]}
    for line in whole.lines("rollouts"):
        assert line["group"] or f'\n{line["reward"]:g}: {line["answer"]}' in shown[line["step"]]


@pytest.mark.parametrize("function, reason", [("fails", "ValueError: too bad"),
                                              ("hangs", "no reply within 0.5 seconds"), ("dies", "ended with code 7")])
def test_a_failing_reward_names_the_record_and_its_answer_does_not_count(function, reason, functions, stages, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(online, "REPLY_SECONDS", 0.5)
    run = stages.run("grpo", tmp_path / "runs", REWARD=f"rated:{function}", MAX_STEPS=1, VALIDATE_EVERY=0,
                     HELLASWAG_EVERY=0)
    assert run.train() == 0
    failed = [line for line in run.lines("rollouts") if line["reward"] is None]
    assert 0 < len(failed) < 8 and all(line["advantage"] == 0 and line["rewards"] == {} for line in failed)
    error = capsys.readouterr().err
    assert f'step 1: REWARD=rated:{function} failed for the record {{"question": "' in error and reason in error
    assert run.metrics()[-1]["reward"] == np.mean([line["reward"] for line in run.lines("rollouts") if line not in failed])


def test_a_reward_whose_code_was_changed_is_named_when_the_run_goes_on(functions, stages, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    run = stages.run("grpo", tmp_path / "runs", REWARD="rated:own", MAX_STEPS=3, VALIDATE_EVERY=0, HELLASWAG_EVERY=0)
    told = []
    for step, code in ((1, FUNCTIONS), (2, FUNCTIONS), (3, FUNCTIONS + "# stricter\n")):
        (tmp_path / "rated.py").write_text(code)
        assert run.train(STOP_STEP=step) == 0
        told.append("the code of rated (REWARD) was changed since the checkpoint" in capsys.readouterr().err)
    assert told == [False, False, True]


def prompts_of(records, stages, folder, **source):
    options = PreparationOptions(str(stages.prepared.tokenizer), "auto", 100_000, 0.1, workers=1)
    source = Source(path=write_jsonl(folder / "asked.jsonl", records), **source)
    return prepare_set("prompts", source, folder / "asked", options)


def test_answers_that_no_reward_can_read_are_refused_before_an_answer(stages, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(online.Rollouts, "generate", lambda *_: pytest.fail("an answer was generated"))
    prompts = prompts_of([{"prompt": f"{number}+1?", "answer": [str(number + 1)]} for number in range(40)], stages, tmp_path)
    assert stages.run("grpo", tmp_path / "runs", REWARD="math", GRPO_DATA_PATH=prompts, MAX_STEPS=1).train() == 2
    assert "REWARD=math fails for the records' own answers: ValueError: the record's answer is ['" in capsys.readouterr().err


@pytest.mark.parametrize("column, record", [
    ("reward_model.ground_truth", lambda n: {"data_source": "sums", "prompt": [{"role": "user", "content": f"{n}+1?"}],
                                             "reward_model": {"style": "rule", "ground_truth": str(n + 1)}}),
    ("output", lambda n: {"instruction": "Add 1.", "input": str(n), "output": str(n + 1)}),
    ("solution", lambda n: {"question": f"{n}+1?", "solution": f"so $\\boxed{{{n + 1}}}$"})])
def test_answers_in_the_columns_of_verl_alpaca_and_others_are_used_and_named(column, record, functions, stages, tmp_path, capsys):
    data = prompts_of(map(record, range(40)), stages, tmp_path)
    run = stages.run("grpo", tmp_path / "runs", REWARD="math,rated:own", GRPO_DATA_PATH=data, MAX_STEPS=1)
    assert run.train() == 0
    assert f"REWARD=math,rated:own reads the column '{column}' as the answer of " in capsys.readouterr().out
    for line in run.lines("rollouts"):
        assert line["rewards"].keys() == {"math", "rated:own"}


def test_a_training_row_is_the_prompt_the_answer_as_targets_and_padding(stages):
    rows = PromptRows(open_example_set(stages.prompts, "train", "prompts", TokenizerInfo(512)), 96, 12)
    prompts = rows(np.array([3, 1]))
    answers = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    batch = training_batch(prompts, answers, advantages(torch.tensor([[0.0, 1], [2, 0]]).double(), True), 1, 96, 96)
    for row, answer in enumerate(answers):
        prompt = prompts.tokens_BT[row // 2, :prompts.stored["prompt_B1"][row // 2]].tolist()
        end = len(prompt) + len(answer) - 1
        assert batch.tokens_BT[row].tolist() == [*prompt, *answer[:-1], *[0] * (96 - end)]
        assert batch.targets_BT[row].tolist() == [*[IGNORE_INDEX] * (len(prompt) - 1), *answer, *[IGNORE_INDEX] * (96 - end)]
    assert torch.equal(batch.targets_BT.flatten()[batch.target_index_M], torch.tensor(sum(answers, [])))
    assert batch.stored["advantage_BT"].flatten()[batch.target_index_M] == pytest.approx(
        np.repeat([-0.707, 0.707, 0.707, -0.707], [3, 1, 2, 4]), abs=1e-3)
    assert batch.padding == int((batch.tokens_BT == 0).sum()) and batch.document_ids_BT is None


def test_rewards_are_counted_and_end_with_their_parent():
    rewards = Rewards("REWARD", [("exact", 2.0)])
    assert rewards("", "4", json.dumps({"answer": 4})) == [1.0, False]
    assert Rewards("REWARD", [("length", 1.0), ("math", 1.0)])("", "four", json.dumps({"answer": 4})) == [4.0, 0.0, True]
    process = rewards.process
    process.stdin.close()
    assert process.wait(10) == 0
