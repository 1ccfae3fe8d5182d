"""scripts/evaluate.py finds the numbers that a run logged, and evaluates models from elsewhere."""

import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ROOT
from factories import UNMEASURED, prepare, prepared_set, rehash, start, tiny_model_folder

from checkpoint.store import read_state
from common.errors import CheckpointError, DataError, SettingsError
from data_pipeline.prepare import name_set
from extensions.decide import compare_items
from extensions.report.items import read_item_scores
from tokenizer import load_tokenizer

MEASURED = {"MAX_STEPS": 2, "HELLASWAG_EVERY": 2, "SAMPLE_EVERY": 0}


def call(*argv) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate.py", *map(str, argv)])
        patch.setattr(sys, "path", [*sys.path])
        runpy.run_path(str(ROOT / "scripts" / "evaluate.py"))["main"]()


def evaluate(*argv, output: Path) -> dict:
    """Call the script; returns what it wrote as JSON."""
    call(*argv, "--json", output)
    return json.loads(output.read_text())


def logged(run, step: int) -> dict:
    """What the run logged of its evaluations after a step."""
    line = next(line for line in run.metrics() if line["step"] == step)
    return {name: value for name, value in line.items() if name.startswith(("val_", "hellaswag_", "generation_"))}


def test_of_a_checkpoint_it_finds_exactly_what_the_run_logged(whole, tmp_path, capsys):
    found = evaluate(whole.checkpoint(6), output=tmp_path / "found.json")
    assert found == {"model": str(whole.checkpoint(6)), "step": 6, "metrics": logged(whole, 6)}
    heading, _, *table = capsys.readouterr().out.splitlines()
    assert heading == f"{whole.checkpoint(6)} (step 6), float32 on cpu, 32 tokens at a time"
    share, error = (f"{100 * found['metrics'][f'hellaswag_{name}']:.1f}" for name in ("acc", "stderr"))
    assert table[3].split() == ["HellaSwag", "accuracy", share, "±", error, "%", "25.0", "%", "10"]
    assert evaluate(whole.folder, output=tmp_path / "again.json")["metrics"] == found["metrics"], "the newest of the run"


def test_a_set_that_the_run_names_is_evaluated_although_the_run_did_not(tiny_run, prepared, tmp_path):
    run = tiny_run(**UNMEASURED, MAX_STEPS=1, VALIDATION_DATA_PATH=prepared.shards).trained()
    assert "val_loss" in evaluate(run.folder, output=tmp_path / "found.json")["metrics"]


def test_after_another_preparation_a_run_finds_the_set_that_it_read(tiny_run, prepared, tmp_path, capsys):
    """The name of a set moves to the newest one of a source and tokenizer. `eval` finds the earlier one, and so does one who resumes."""
    text = prepared.tokenizer.parent / "text.jsonl"
    earlier = prepared_set("documents", text, prepared.tokenizer, tmp_path / "sets", validation_fraction=0.2)
    link = name_set(earlier, "farm.jsonl")
    run = tiny_run(**MEASURED, PRETRAIN_DATA_PATH=link).trained()
    now = prepared_set("documents", text, prepared.tokenizer, tmp_path / "sets", validation_fraction=0.3)
    assert name_set(now, "farm.jsonl") == link and link.samefile(now)
    capsys.readouterr()
    assert evaluate(run.folder, output=tmp_path / "found.json")["metrics"] == logged(run, 2)
    assert f"{link} is another set now than the one that the run read, which is used: {earlier}" in capsys.readouterr().err
    call(run.folder, "--max-seq-len", 64, "--total-batch-size", 1 << 15)
    assert f"which is used: {earlier}" in capsys.readouterr().err, "flags change the rows, but not the set"
    other = tiny_run(**MEASURED, RUN_NAME="other", PRETRAIN_DATA_PATH=link).trained()
    for models, is_warned in (((run.folder, other.folder), True), ((other.folder, other.folder), False), ((run.folder, run.folder), False)):
        capsys.readouterr()
        call(*models)
        assert (f"was trained on {earlier}, of which another part is held out" in capsys.readouterr().err) == is_warned
    assert run.train(MAX_STEPS=3) == CheckpointError.exit_code
    assert f"(perhaps {earlier})" in capsys.readouterr().err
    assert run.train(MAX_STEPS=3, PRETRAIN_DATA_PATH=earlier) == 0
    shutil.rmtree(earlier)
    capsys.readouterr()
    call(run.checkpoint(2))
    assert f"warning: {link} is not the set that the run read, which was not found in {tmp_path / 'sets'}" in capsys.readouterr().err


def test_a_first_model_with_settings_that_are_refused_now_is_compared(tiny_run, capsys):
    """A run of an older version may have recorded them."""
    first, last = (tiny_run(**MEASURED, RUN_NAME=name).trained() for name in ("first", "last"))
    state = read_state(first.checkpoint(2))
    state["settings"]["EVAL_TASKS"] = "no form"
    rehash(first.checkpoint(2), state)
    capsys.readouterr()
    call(first.folder, last.folder)
    assert "difference" in capsys.readouterr().out


def test_a_set_of_another_tokenizer_has_another_name_and_is_offered(tiny_run, prepared, tmp_path, capsys):
    text, other = prepared.tokenizer.parent / "text.jsonl", prepare(tmp_path / "other", vocab_size=290).tokenizer
    one, another = (prepared_set("documents", text, each, tmp_path / "sets") for each in (prepared.tokenizer, other))
    assert [name_set(each, "farm.jsonl").name for each in (one, another)] == ["farm", f"farm-{another.name[:6]}"]
    run = tiny_run(**MEASURED, PRETRAIN_DATA_PATH=one).trained()
    assert run.train(MAX_STEPS=3, PRETRAIN_DATA_PATH=another) == DataError.exit_code
    assert f"name {one}, which was made with this one" in capsys.readouterr().err
    other_run = tiny_run(**MEASURED, RUN_NAME="other", PRETRAIN_DATA_PATH=another, TOKENIZER_PATH=other).trained()
    with pytest.raises(CheckpointError, match=r"TOKENIZER_PATH has \d+ ids, .* use the model's own tokenizer.* evaluate each alone"):
        call(run.folder, other_run.folder)


def test_models_of_other_tokens_are_not_compared(tiny_run, prepared, tmp_path):
    """Also where the ids of the evaluated text are ids of both: the loss would be that of other texts."""
    text, other = prepared.tokenizer.parent / "text.jsonl", prepare(tmp_path / "other", vocab_size=280).tokenizer
    large = tiny_run(**MEASURED, RUN_NAME="large", TOKENIZER_PATH=other,
                     PRETRAIN_DATA_PATH=prepared_set("documents", text, other, tmp_path / "sets")).trained()
    run = tiny_run(**MEASURED).trained()
    with pytest.raises(CheckpointError, match="uses another tokenizer than .* cannot be compared; evaluate each alone, and compare bits per byte"):
        call(large.folder, run.folder)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("default")
def test_a_compiled_half_precision_run_has_one_loss(tiny_run, tmp_path, capsys):
    """Compiled kernels round less often than eager ones, so eval compiles what the run compiled."""
    run = tiny_run(COMPILE="true", PRECISION="bf16", MAX_STEPS=2, HELLASWAG_EVERY=0, SAMPLE_EVERY=0).trained()
    found = {how: evaluate(run.folder, *flags, output=tmp_path / f"{how}.json")["metrics"]
             for how, flags in (("compiled", ()), ("eager", ("--compile", "false")), ("fp32", ("--precision", "fp32")))}
    assert found["compiled"] == logged(run, 2)
    assert len({each["val_perplexity"] for each in found.values()}) == 3
    assert "bfloat16 on cpu, compiled, 32 tokens at a time" in capsys.readouterr().out


def test_two_models_are_compared_by_pairs_with_their_answers(whole, tmp_path, capsys):
    found = evaluate(whole.checkpoint(2), whole.folder, output=tmp_path / "found.json")
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    scores = {(each.step, each.name): each.scores for each in read_item_scores(whole.folder / "evaluations.jsonl")}
    before, after = (scores[step, "validation"] for step in (2, 6))
    expected = compare_items(before["loss"], after["loss"], after["count"])
    assert found["tests"]["validation loss"] == pytest.approx(expected._asdict())
    assert (found["before"]["step"], found["step"], found["metrics"]) == (2, 6, logged(whole, 6))
    assert found["tests"].keys() == {"validation loss", "HellaSwag acc", "HellaSwag acc_norm"} and len(found["answers"]) == 1
    assert lines[2].split()[:4] == ["validation", "loss", f"{expected.a:.3f}", f"{expected.b:.3f}"]
    assert re.search(rf"{re.escape(str(whole.checkpoint(2)))}, in \d+ s: validation loss {expected.a:.3f}, ", shown.err), "as soon as it is known"
    for wrong in ((whole.folder,) * 3, (whole.folder, whole.folder, "--tasks", "x")):
        with pytest.raises(SystemExit):
            call(*wrong)


@pytest.mark.parametrize("mode", ["lora-sft", "lora-dpo", "distilled"])
def test_in_every_stage_and_with_adapters_too(mode, stages, tmp_path):
    requested = {"GENERATION_EVAL_EVERY": 2, "GENERATION_EVAL_TOKENS": 6} if mode == "lora-sft" else {}
    run = stages.run(mode, tmp_path, **MEASURED, **requested).trained()
    found = evaluate(run.folder, output=tmp_path / "found.json")["metrics"]
    assert found == logged(run, 2) and {"val_loss", "hellaswag_acc"} < found.keys()
    assert ("generation_bleu" in found) == (mode == "lora-sft")
    if mode == "lora-dpo":  # the start is its own reference: the margin is 0
        paired = evaluate(stages.base, run.folder, output=tmp_path / "paired.json")
        assert paired["before"]["metrics"]["val_loss"] == pytest.approx(math.log(2), abs=1e-6) and paired["metrics"] == found
    if mode == "lora-sft":
        of_text = evaluate(run.folder, "--data", stages.prepared.shards, output=tmp_path / "text.json")["metrics"]
        assert "val_bits_per_byte" in of_text and "generation_bleu" not in of_text


def test_two_ranks_share_the_work(whole, tmp_path):
    job = start(call, whole.checkpoint(6), "--json", tmp_path / "two.json", world_size=2, folder=tmp_path / "outputs")
    assert job.wait() == [0, 0], job.text()
    found = json.loads((tmp_path / "two.json").read_text())["metrics"]
    assert found == pytest.approx(logged(whole, 6), rel=1e-6) and job.text().count("validation  loss") == 1


@pytest.mark.parametrize("longest", [24, 1500])
def test_a_context_is_cut_on_its_left_at_the_length_in_config_json(prepared, tmp_path, capsys, longest, transformers):
    """The labels are the best endings by transformers, of the last tokens that the model was made for (lm-evaluation-harness's formula)."""
    (model := tmp_path / "model").mkdir()
    tiny_model_folder(model, load_tokenizer(str(prepared.tokenizer)), context=longest)
    network, tok = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), transformers.AutoTokenizer.from_pretrained(model)
    rng, records, differ = np.random.default_rng(5), [], 0

    def best(context, endings, limit):
        scores, before = [], tok(context)["input_ids"]
        for ending in endings:
            ids = tok(f"{context} {ending}")["input_ids"]
            count = len(ids) - len(before)
            row = torch.tensor([ids[-(limit + 1):]])
            with torch.no_grad():
                logprobs = network(row[:, :-1]).logits[0].double().log_softmax(-1)[-count:]
            scores.append(logprobs.gather(1, row[0, -count:, None]).sum().item())
        return int(np.argmax(scores))

    for _ in range(12):
        context = "".join(rng.choice([*"abcdefghij "], 40 if longest < 100 else 1480)) + "so"
        endings = ["".join(rng.choice([*"abcdefgh"], 5)) for _ in range(4)]
        records.append({"ctx": context, "endings": endings, "label": best(context, endings, longest)})
        differ += records[-1]["label"] != best(context, endings, 2000 if longest < 100 else 1024)
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = (model, "--eval-tasks", f"t:{tmp_path}/items.jsonl", "--precision", "fp32")
    assert evaluate(*flags, output=tmp_path / "found.json")["metrics"]["t_acc"] == 1 and differ
    shown = capsys.readouterr()
    assert f"{longest:,} tokens at a time" in shown.out
    assert (f"has 12 of 12 contexts that lose their beginning, since they do not fit into {longest} tokens" in shown.err) == (longest < 100)
    evaluate(*flags, "--max-seq-len", 2000, output=tmp_path / "found.json")
    assert f"was made for {longest:,} tokens, and is evaluated on up to MAX_SEQ_LEN=2,000" in capsys.readouterr().err


@pytest.fixture
def task(prepared, tmp_path) -> tuple[str, ...]:
    """The flags for a task of lm-evaluation-harness on our items, with its own wording of HellaSwag; without a network."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness (requirements-dev.txt)")
    records = [json.loads(line) for line in prepared.items.read_text().splitlines()]
    file, folder = tmp_path / "records.jsonl", tmp_path / "tasks"
    file.write_text("".join(json.dumps({**record, "ctx_a": record["ctx"], "ctx_b": ""}) + "\n" for record in records))
    folder.mkdir()
    (folder / "own.yaml").write_text(json.dumps({
        "include": str(Path(lm_eval.__file__).parent / "tasks" / "hellaswag" / "hellaswag.yaml"), "task": "own_items",
        "dataset_path": "json", "training_split": None,
        "dataset_kwargs": {"data_files": {"validation": str(file)}, "cache_dir": str(tmp_path / "cache")}}))
    return "--tasks", "own_items", "--include-path", str(folder)


@pytest.mark.filterwarnings("default")  # the harness warns of its own ways
def test_tasks_of_lm_evaluation_harness_stand_in_the_same_table(whole, task, tmp_path, capsys, monkeypatch):
    found = evaluate(whole.checkpoint(6), *task, output=tmp_path / "found.json")["metrics"]
    assert found["own_items_acc"] == found["hellaswag_acc"] and found["own_items_acc_norm"] == found["hellaswag_acc_norm"]
    assert found["own_items_n"] == 10 and found["own_items_acc_stderr"] == pytest.approx(found["hellaswag_stderr"])
    assert "\nown_items   accuracy  " in capsys.readouterr().out
    few = evaluate(whole.checkpoint(6), *task, "--limit", 3, "--hellaswag-every", 0, output=tmp_path / "few.json")["metrics"]
    from lm_eval.tasks import TaskManager

    assert few["own_items_n"] == 3 and "hellaswag_acc" not in few
    Path(task[3], "own.yaml").write_text(Path(task[3], "own.yaml").read_text().replace("records.jsonl", "gone.jsonl"))
    capsys.readouterr()
    with pytest.raises(DataError, match="--tasks own_items: .*hub"):
        call(whole.checkpoint(6), *task, "--validate-every", 0)
    assert "HellaSwag" in capsys.readouterr().out, "what was evaluated is shown"
    original = TaskManager  # all of the harness's own tasks would take half a minute to find
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path, **_: original(None, include_path, False))
    with pytest.raises(SettingsError, match="has no task own_item, nothing_such;"):
        call(whole.checkpoint(6), "--tasks", "own_item,own_items,nothing_such", *task[2:])
