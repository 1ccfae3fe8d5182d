"""Answers to held-out chats: which are asked, that they are those of the model, and how they are scored."""

import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from factories import checkpoint_without_weights, without_clocks, write_jsonl

from common.errors import SettingsError
from data_pipeline.templates import load_chat_format
from data_preparation_utils import PreparationOptions, prepare_set
from dataloaders import open_rows
from extensions import evaluate
from extensions.evaluate import open_model, score_texts, settings_for
from extensions.inference.engine import generate
from extensions.inference.weights import load_model
from extensions.report.console import describe_data
from extensions.report.items import item_scores, read_item_scores, unpacked_bits
from parallel.ranks import Ranks, RunContext, StopSignals
from plan.layers import read_flags
from plan.make import make_plan
from scripts.evaluate import Measured, paired_tests
from tokenizer import load_tokenizer

GENERATION = {"GENERATION_EVAL_EVERY": 1, "GENERATION_EVAL_TOKENS": 12, "GENERATION_EVAL_EXAMPLES": 8, "MAX_STEPS": 0,
              "VALIDATE_EVERY": 0, "HELLASWAG_EVERY": 0, "SAMPLE_EVERY": 0, "TOTAL_BATCH_SIZE": 12 * 96}


def test_exact_match_and_means_with_their_errors():
    found, scores = score_texts(["the red cat", " yes\n", "no", "a"], ["the red cat", "yes", "No", "b c d e"])
    assert unpacked_bits(scores["exact"], 4).tolist() == [True, True, False, False]
    # ROUGE-L: the longest common subsequence over the lengths, as F1, with letters in lower case.
    assert scores["rouge_l"] == [1, 1, 1, 0]
    assert (found["generation_n"], found["generation_exact_match"], found["generation_rouge_l"]) == (4, 0.5, 0.75)
    assert found["generation_exact_match_stderr"] == pytest.approx(np.std([1, 1, 0, 0], ddof=1) / 2)
    assert found["generation_rouge_l_stderr"] == pytest.approx(np.std([1, 1, 1, 0], ddof=1) / 2)
    found, _ = score_texts(["a b c"], ["a x c d"])
    assert found["generation_rouge_l"] == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert found["generation_exact_match_stderr"] == 0
    # Four of the words, two of the pairs, a sequence of two words, and all four where lines may change places.
    found, _ = score_texts(["c d\na b"], ["a b x\nc d y"])
    assert found["generation_rouge_1"] == pytest.approx(2 * 1 * (4 / 6) / (1 + 4 / 6))
    assert found["generation_rouge_2"] == pytest.approx(2 * (2 / 3) * (2 / 5) / (2 / 3 + 2 / 5))
    assert found["generation_rouge_l"] == pytest.approx(2 * (2 / 4) * (2 / 6) / (2 / 4 + 2 / 6))
    assert found["generation_rouge_lsum"] == found["generation_rouge_1"]


@pytest.mark.parametrize("answers, references, tokenizer", [
    (["今天天气很好，我们去公园吧。", "他不喜欢吃鱼"], ["今天的天气很好，我们去公园玩。", "他不喜欢吃鱼。"], "zh"),
    (["きょうはいい天気ですね。", "魚は食べません"], ["きょうは天気がいいですね。", "魚は食べませんよ"], "char"),
    (["Сегодня хорошая погода, идём в парк", "Он не любит рыбу."], ["Сегодня очень хорошая погода, идём в парк", "Он не любит рыбу."], "13a"),
    (["We met 王先生 in the park today, and went home"], ["We met 王先生 in the park, and then went home"], "13a")])
def test_scores_of_other_scripts_compare_their_words(answers, references, tokenizer):
    """By sacrebleu's tokenizer for the language, and rouge-score of the same words written as Latin ones."""
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    found = score_texts(answers, references)[0]
    assert found["generation_bleu"] == pytest.approx(sacrebleu.BLEU(tokenize=tokenizer).corpus_score(answers, [references]).score / 100) and (
        found["generation_bleu"] > 0.1)
    assert all(score_texts(texts, texts)[0][f"generation_rouge_{kind}"] == 1 for texts in (answers, references) for kind in ("1", "l"))
    spelled = {}

    def in_latin(text):
        words = re.findall("[a-z0-9]+" if tokenizer == "13a" and "We" in text else "[\u3040-\u30ff\u3400-\u9fff]|[^\\W_\u3040-\u30ff\u3400-\u9fff]+", text.lower())
        return " ".join(spelled.setdefault(word, f"w{len(spelled)}") for word in words)

    pairs = [(in_latin(reference), in_latin(answer)) for answer, reference in zip(answers, references)]
    expected = [RougeScorer(["rougeL"]).score(*pair)["rougeL"].fmeasure for pair in pairs]
    assert found["generation_rouge_l"] == pytest.approx(np.mean(expected))


HEADER, WORDS = "<|start_header_id|>assistant<|end_header_id|>\n\n", "{{ m.content }}<|eot_id|>"


@pytest.mark.parametrize("answer, between", [
    (HEADER + "{% generation %}" + WORDS + "\n{% endgeneration %}", "\n"), ("{% generation %}" + HEADER + WORDS + "{% endgeneration %}", "")])
def test_what_is_asked_and_compared_does_not_depend_on_what_a_template_marks(answer, between, stages, prepared, tmp_path):
    folder, records = tmp_path / "marked", [json.loads(line) for line in (stages.chats.parents[1] / "chats.jsonl").read_text().splitlines()]
    folder.mkdir()
    load_tokenizer(str(prepared.tokenizer)).save_huggingface(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}<|start_header_id|>user<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
        f"{between}{{% else %}}{answer}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{HEADER}{{% endif %}}")
    chats = prepare_set("chats", str(stages.chats.parents[1] / "chats.jsonl"), tmp_path / "sft", PreparationOptions(str(folder), "auto", 10**6, 0.2, workers=1))
    config = make_plan(stages.run("sft", tmp_path, **GENERATION).argv(TOKENIZER_PATH=folder, SFT_DATA_PATH=chats)).config
    tokenizer = load_tokenizer(str(folder))
    chat_format = load_chat_format(tokenizer)
    expected = {(tuple(chat_format.encode_prompt(record["messages"][:-1])), record["messages"][-1]["content"]) for record in records}
    found = {(tuple(prompt), tokenizer.decode(answer)) for prompt, answer in evaluate.read_held_out(config, tokenizer, "never")}
    assert len(found) == 8 and found <= expected


def plant() -> None:
    """Several batches, which do not divide evenly over the ranks."""
    evaluate.GENERATION_BATCH = 3


SCORES = """
def letters(prompt, answer, record): return sum(map(ord, answer)) / len(prompt)
def same(prompt, answer, record): return answer == record["answer"] or prompt == "never"
def none(prompt, answer, record): return None
def endless(prompt, answer, record): return float("inf")
def bleu(prompt, answer, record): return 1
def other(prompt, answer, record): return record["hint"]
"""


@pytest.fixture
def scores(tmp_path, monkeypatch):
    (tmp_path / "scores.py").write_text(SCORES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    yield
    evaluate.function_of.cache_clear()


def test_an_own_function_gets_prompt_answer_and_reference_also_in_eval(scores, stages, tmp_path):
    run = stages.run("sft", tmp_path, **GENERATION).trained()
    config = settings_for(run.checkpoint(0), read_flags(["--metric", "scores:letters"]), None)
    opened = open_model(run.checkpoint(0), config, None, RunContext(Ranks(), StopSignals(), SimpleNamespace(info=print, warn=print)))
    measured = evaluate.generation(opened, opened.extensions[0].held_out)
    scored = [sum(map(ord, text["answer"])) / len(text["prompt"]) for text in measured.line["texts"]]
    names = "generation_letters", "generation_letters_stderr"
    mean, error = (measured.metrics[name] for name in names)
    assert len(scored) == 4 and min(scored) > 0 and mean > 0 and error > 0 and "letters" in [row.metric for row in measured.table]
    items = item_scores({"step": 0, **measured.line})
    own = items.scores["own"]
    assert own[:4] == pytest.approx(scored) and own.mean() == pytest.approx(mean)
    before, after = (Measured(0, {}, measured.table, [each] * len(measured.table), []) for each in (
        items._replace(scores=items.scores | {"own": 2 * own}), items))
    tests = dict(zip([row.metric for row in measured.table], paired_tests(before, after, "letters")))
    assert (tests["letters"].difference, tests["rouge_l"].difference) == (pytest.approx(-mean), 0) and tests["bleu"] is None
    pairs = ("ab", "x", "b"), ("ab", "b", "b"), ("ab", "b", "c")
    assert evaluate.own_scores("scores:same", *zip(*pairs)) == [0, 1, 0]


@pytest.mark.parametrize("metric, words", [
    ("scores:none", "METRIC=scores:none has no score for the answer '"), ("scores:endless", "are not finite; the function gets"),
    ("scores:absent", "METRIC=scores:absent: a function cannot be imported: AttributeError"),
    ("no_such_module:f", "a function cannot be imported: ModuleNotFoundError"),
    ("scores:other", "METRIC=scores:other reads a column 'hint', but the records have no 'hint': they have 'answer'; change the function"),
    ("scores", "METRIC=scores does not have the form module:function"), ("scores:bleu", "is the name of another metric")])
def test_a_metric_that_is_no_number_or_cannot_be_imported_ends_the_run(metric, words, scores, stages, tmp_path, capsys):
    run = stages.run("sft", tmp_path, METRIC=metric, **GENERATION)
    assert run.train() == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["sft", "orpo"])
def test_the_last_answers_of_held_out_chats_and_the_chosen_ones_of_pairs_are_asked_for(mode, stages, tmp_path):
    run = stages.run(mode, tmp_path, **GENERATION)
    config = make_plan(run.argv()).config
    tokenizer = load_tokenizer(config.tokenizer_path)
    chat_format, rows = load_chat_format(tokenizer), open_rows(config, "validation", tokenizer, "never").sources[0]
    expected = set()
    for line in (stages.chats.parents[1] / f"{rows.example_set.kind}.jsonl").read_text().splitlines():
        record = json.loads(line)
        messages = record["messages"][:-1] if mode == "sft" else [{"role": "user", "content": record["prompt"]}]
        answer = record["messages"][-1]["content"] if mode == "sft" else record["chosen"]
        expected.add((tuple(chat_format.encode_prompt(messages)), answer))
    every = config.model_copy(update={"generation_eval_examples": 10**6})
    found = evaluate.read_held_out(every, tokenizer, "never")
    assert len(found) == rows.examples - rows.truncated > 8 == len(evaluate.read_held_out(config, tokenizer, "never"))
    assert {(tuple(prompt), tokenizer.decode(answer)) for prompt, answer in found} <= expected

    # The run's answers are those of each prompt alone.
    assert run.train() == 0
    line, = run.lines("evaluations")
    model = load_model(run.checkpoint(0))[0]
    for text, (prompt, answer) in zip(line["texts"], found):
        own, = generate(model, [prompt], 12, stop_ids=chat_format.stop_ids)
        assert text == {"prompt": tokenizer.decode(prompt), "reference": tokenizer.decode(answer), "answer": tokenizer.decode(own)}
    assert len(line["texts"]) == 4 and line["n"] == 8 and any(text["answer"] for text in line["texts"])
    scores, = read_item_scores(run.folder / "evaluations.jsonl")
    logged = run.metrics()[-1]
    assert logged["generation_n"] == 8 and logged["generation_rouge_l"] == pytest.approx(scores.scores["rouge_l"].mean(), abs=1e-4)
    assert "Generation [0/0] | Exact match: " in (run.folder / "log" / "rank-0.txt").read_text()


def test_any_number_of_ranks_and_a_divided_model_give_the_same_figures(scores, stages, tmp_path, monkeypatch):
    """Also those of an own function; at the first step, where the weights are the same."""
    alone, divided = (stages.run("sft", tmp_path, RUN_NAME=f"sharding-{sharding}", SHARDING=sharding, METRIC="scores:letters", **GENERATION)
                      for sharding in ("none", "full"))
    job = divided.start(3, plant, env={"PYTHONPATH": os.environ["PYTHONPATH"]})
    monkeypatch.setattr(evaluate, "GENERATION_BATCH", 3)
    assert alone.train() == 0 and alone.lines("evaluations")[0]["name"] == "generation"
    found, = (line for line in alone.metrics() if "generation_n" in line)
    assert found["generation_letters"] > 0 and found["generation_letters_stderr"] > 0
    assert " | letters: " in (alone.folder / "log" / "rank-0.txt").read_text()
    assert job.wait() == [0] * 3, job.text()
    assert divided.lines("evaluations") == alone.lines("evaluations")
    assert without_clocks(divided.metrics()) == without_clocks(alone.metrics())


def test_examples_of_one_s_own_validation_set_that_are_trained_on_too_are_counted(stages, tmp_path):
    """By their prompts, whatever is answered, and whatever system message precedes; three are in both sets."""
    options, records = PreparationOptions(str(stages.prepared.tokenizer), "auto", 10**6, 0.0, workers=1), [
        {"messages": [{"role": "user", "content": f"Number {number}?"}, {"role": "assistant", "content": f"So {number}."}]} for number in range(60)]
    train, own = (prepare_set("chats", write_jsonl(tmp_path / f"{name}.jsonl", each), tmp_path / name, options) for name, each in (
        ("train", [{"messages": [{**message, "content": message["content"].replace("So", "No")} for message in record["messages"]]} for record in records[:30]]),
        ("own", [{"messages": [{"role": "system", "content": "Be brief."}, *record["messages"]]} for record in records[27:]])))
    config = make_plan(stages.run("sft", tmp_path, SFT_DATA_PATH=train, VALIDATION_DATA_PATH=own).argv()).config
    tokenizer = load_tokenizer(config.tokenizer_path)
    inputs = SimpleNamespace(rows=open_rows(config, "train", tokenizer, "never"), validation_rows=open_rows(config, "validation", tokenizer, "never"),
                             tokenizer=tokenizer, description="")
    sentence = f"VALIDATION_DATA_PATH={own}: 3 of 33 examples have the prompt of one that the run trains on"
    _, *notes = describe_data(config, inputs)
    assert [note.partition(", so")[0] for note in notes] == [sentence]
    inputs.rows = open_rows(config.model_copy(update={"sft_data_path": str(stages.chats)}), "train", tokenizer, "never")
    assert len(describe_data(config, inputs)) == 1


def test_documents_of_one_s_own_validation_set_that_are_trained_on_too_are_counted(stages, tmp_path):
    """Whole, or but for the end that was held out; a common first sentence is no document."""
    texts = [f"{'The stones of the wall are old. ' * 3}Stone {number} has {number * 7} corners.\n" * 3 for number in range(60)]
    options = PreparationOptions(str(stages.prepared.tokenizer), "auto", 10**6, None, workers=1)
    few, many, own = (prepare_set("documents", write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in each]), tmp_path / name,
                                  replace(options, validation_fraction=share))
                      for name, each, share in (("few", texts[30:36], None), ("many", texts[:30], 0.0), ("own", texts[27:], 0.0)))
    for data, count in ((many, 3), (few, 6)):
        config = make_plan(stages.run("sft", tmp_path, TRAINING_STAGE="pretrain", PRETRAIN_DATA_PATH=data, VALIDATION_DATA_PATH=own).argv()).config
        rows = {name: open_rows(config, split, load_tokenizer(config.tokenizer_path), "never") for name, split in (("rows", "train"), ("validation_rows", "validation"))}
        _, *notes = describe_data(config, SimpleNamespace(**rows, description=""))
        assert [note.partition(", so")[0] for note in notes] == [
            f"VALIDATION_DATA_PATH={own}: {count} of 33 documents have the text of one that the run trains on"]


def test_a_validation_set_of_one_s_own_is_asked_and_data_of_a_command_replaces_it(stages, tmp_path):
    records = [{"messages": [{"role": "user", "content": f"Number {number}?"}, {"role": "assistant", "content": "So."}]} for number in range(9)]
    own = prepare_set("chats", write_jsonl(tmp_path / "own.jsonl", records), tmp_path / "own", PreparationOptions(str(stages.prepared.tokenizer), "auto", 10**6, 0.0, workers=1))
    run = stages.run("sft", tmp_path, **GENERATION | {"GENERATION_EVAL_EXAMPLES": 100}, VALIDATION_DATA_PATH=own)
    config = make_plan(run.argv()).config
    tokenizer = load_tokenizer(config.tokenizer_path)
    assert sorted(re.search(r"Number \d", tokenizer.decode(prompt))[0] for prompt, _ in evaluate.read_held_out(config, tokenizer, "never")) == [
        f"Number {number}" for number in range(9)]
    checkpoint = checkpoint_without_weights(tmp_path / "run", 1, **{name.upper(): value for name, value in config.model_dump(include={
        "training_stage", "sft_data_path", "validation_data_path", "tokenizer_path", "pretrain_checkpoint"}).items()})
    recorded, replaced = (settings_for(checkpoint, read_flags([]), data) for data in (None, str(stages.chats)))
    with pytest.raises(SettingsError, match=r"own.jsonl is not prepared; run .* with text, chats or pairs"):
        settings_for(checkpoint, read_flags([]), str(tmp_path / "own.jsonl"))
    assert (recorded.validation_data_path, replaced.validation_data_path, replaced.sft_data_path) == (str(own), *2 * (str(stages.chats),))
