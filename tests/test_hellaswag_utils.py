"""HellaSwag: the same answers as lm-evaluation-harness, item by item, and the same counts on any number of ranks."""

import gzip
import json
import random
import string
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas
import pytest
import torch
from factories import new_model, write_jsonl

from checkpoint.huggingface import save_model_folder
from common.errors import DataError
from common.files import json_sha256
from config import Config, ModelConfig
from hellaswag_utils import (
    Task,
    batches_of,
    ending_logprobs,
    evaluate_batches,
    prepare_task,
    read_choice_set,
    read_items,
)
from model import Transformer
from tokenizer import Tokenizer

CPU = torch.device("cpu")
MAX_SEQ_LEN = 512
WORDS = ("a", "man", "woman", "sits", "on", "the", "roof", "boat", "and", "then", "slowly", "runs", "away", "café", "[title]",
         "[step]", "don't", "it's", "12", "skis.")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes and a few merges, some of which a careless cut between context and ending would break."""
    pieces = [bytes([i]) for i in range(256)]
    pieces += [b" a", b" t", b" th", b" the", b"an", b" s", b"in", b"er", b": ", b"at", b" m", b" man", b" w", b". ", b"  "]
    return Tokenizer({piece: rank for rank, piece in enumerate(pieces)})


@pytest.fixture(scope="module")
def model(tokenizer) -> Transformer:
    config = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16)
    model = new_model(config, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)
    return model


@pytest.fixture(scope="module")
def records() -> list[dict]:
    """Random items in HellaSwag's schema, with ctx_a and ctx_b, bracketed marks, accents, and endings of unequal length."""
    rng = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))

    return [{"ind": i, "activity_label": text(1, 3), "ctx_a": text(4, 30), "ctx_b": text(0, 3),
             "endings": [rng.choice(string.ascii_lowercase) + text(1, 12) for _ in range(4)], "label": rng.randrange(4)}
            for i in range(50)]


@pytest.fixture(scope="module")
def items(records, tmp_path_factory):
    return read_items(write_jsonl(tmp_path_factory.mktemp("items") / "made.jsonl", records))


def prepared(items, tokenizer, max_seq_len: int = MAX_SEQ_LEN) -> list[Task]:
    return [prepare_task(item, tokenizer, max_seq_len) for item in items]


def evaluate(model, tasks, batch_tokens: int) -> np.ndarray:
    correct_N2 = np.zeros((len(tasks), 2), bool)
    for indices, correct_B2 in evaluate_batches(model, tasks, device=CPU, batch_tokens=batch_tokens):
        correct_N2[indices] = correct_B2
    return correct_N2


def test_files_are_read_plain_and_compressed(tmp_path):
    record = {"ind": 4, "activity_label": "Canoeing", "ctx": "A man paddles. he", "label": 3,
              "endings": ["falls.", "sings [laughs] loudly.", " swims. ", "rests."]}
    plain = tmp_path / "a.jsonl"
    write_jsonl(plain, [record, record])
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n\n"))
    for path in (plain, packed):
        first, second = read_items(path)
        assert first.context == "Canoeing: A man paddles. he", "a ctx is taken as it stands"
        assert first.endings == ["falls.", "sings loudly.", "swims.", "rests."]
        assert (first.label, first.where) == (3, f"{path}:1") and second.where.startswith(f"{path}:")
    # In two parts, and with a label that is text, as the hub has them.
    record |= {"activity_label": "Sailing", "ctx_a": "Step one. [title] Go.", "ctx_b": "the Man", "ctx": "unused", "label": "0"}
    (item,) = read_items(write_jsonl(plain, [record]))
    assert item.context == "Sailing: Step one.. Go. The man" and item.label == 0


WRITTEN = [{"ctx": "  Two  spaces [title] and x[0]\n", "endings": [" x[1]", "[1, 2] ", "A  [note] b"], "label": 1},
           {"ctx_a": "First: [a]", "ctx_b": "the Man", "endings": ["[]", "b"], "label": "0", "ind": 3},
           {"ctx": "The second", "ctx_a": "x", "activity_label": "Sailing", "endings": ["a", "b"], "label": 0}]


def test_the_text_of_other_sets_is_scored_as_written_and_what_is_not_scored_is_counted(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", WRITTEN)
    found = read_items(path, "EVAL_TASKS=a:")
    assert [item.context for item in found] == ["  Two  spaces [title] and x[0]\n", "First: [a] the Man", "The second"]
    assert [item.endings for item in found] == [record["endings"] for record in WRITTEN]
    config = Config(eval_tasks=f"a:{path}", hellaswag_examples=0)
    choices = read_choice_set(config.choice_sets[0], tokenizer, config)
    assert choices.notes == [f"EVAL_TASKS=a:{path} has fields that are not scored: ind (1), activity_label (1), ctx_a (1); "
                             "HellaSwag itself belongs in HELLASWAG_PATH"]
    assert choices.sha256 == json_sha256([[item.context, item.endings, item.label] for item in found])
    assert read_choice_set(config.choice_sets[0]._replace(path=write_jsonl(tmp_path / "b.jsonl", WRITTEN[:1])), tokenizer, config).notes == []


ARC = [{"id": "a", "question": "Which is hot? ", "choices": {"text": ["ice", "fire", "rain"], "label": ["A", "B", "C"]}, "answerKey": "B"},
       {"id": "b", "question": "And cold?", "choices": {"text": ["fire", "ice", "sun", "oven"], "label": ["1", "2", "3", "4"]}, "answerKey": "2"}]
MMLU = [{"question": "1 + 1?", "subject": "sums", "choices": ["0", "1", "2", "3"], "answer": 2},
        {"question": "2 + 2?", "subject": "sums", "choices": ["4", "5", "6", "7"], "answer": 0}]
GOOD = {"ind": 0, "activity_label": "x", "ctx": "y", "endings": ["a", "b", "c", "d"], "label": 1}


@pytest.mark.parametrize("line, word", [
    ("{not json", "not valid JSON"), (b"\xff\xfe{}", "byte 1 of the line is not UTF-8"),
    ({**GOOD, "label": 5}, "'label' must be 0 to 3 (or in the whole file 1 to 4), or A to D, got 5"),
    ({**GOOD, "label": ""}, "has no label; use the validation split"), ({**GOOD, "ctx": None}, "'ctx' is null, expected text"),
    ({**GOOD, "endings": ["a", "b", "c"]}, "'endings' must be 4 texts"), ({**GOOD, "endings": ["a", "[b]", "c", "d"]}, "ending 1 is empty")])
def test_a_bad_line_is_an_error_with_its_number(tmp_path, line, word):
    check_refused(tmp_path, line, word)


@pytest.mark.parametrize("record, word", [
    ({**GOOD, "endings": ["a"] * 17}, "'endings' must be 2 to 16 texts"), ({**GOOD, "endings": ["a", "b"], "label": 3}, "'label' must be 0 to 1"),
    ({"ctx": "y", "endings": ["a", "b"], "gold": 1}, "has no 'label'; it has 'ctx', 'endings', 'gold'"),
    ({**ARC[0], "answerKey": "D"}, "'answerKey' must be a label of its choices, A, B, C, got 'D'"),
    ({**ARC[0], "choices": {"text": ["a", "b"], "label": ["A"]}}, "'choices' must be 2 to 16 texts"),
    ({**ARC[0], "choices": ["0", "2", "1"], "answerKey": "1"}, "'answerKey' is '1', a position and also the text of another one"),
    ({**ARC[0], "question": {"stem": "x"}}, "'question' is an object, expected text")])
def test_a_bad_line_of_another_set_is_an_error_with_its_number(tmp_path, record, word):
    check_refused(tmp_path, record, word, "EVAL_TASKS=a:")


def check_refused(folder, line, word, *name) -> None:
    line = json.dumps(line) if isinstance(line, dict) else line
    (folder / "bad.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(DataError) as error:
        read_items(folder / "bad.jsonl", *name)
    assert f"{folder}/bad.jsonl:2: " in str(error.value) and word in str(error.value)


def test_files_are_read_in_the_formats_and_with_the_labels_that_people_have(tmp_path, tokenizer):
    """As pandas and pyarrow write them: HellaSwag's Parquet of the hub has labels as text, other sets letters or numbers from 1."""
    records = [{"ctx": f"Q{number}?", "endings": ["a", "b", "c", "d"], "label": label} for number, label in enumerate((3, 1, 2, 1))]

    def written(labels, name):
        table = pandas.DataFrame([{**record, "label": label} for record, label in zip(records, labels)])
        path = tmp_path / name
        if path.suffix == ".parquet":
            table.to_parquet(path)
        elif path.suffix == ".json":
            table.to_json(path, orient="records")
        elif path.suffix == ".csv":
            table.assign(endings=table["endings"].map(json.dumps)).to_csv(path, index=False)
        else:
            table.to_json(path, orient="records", lines=True)
        return read_items(path, "EVAL_TASKS=t:")

    for name in ("x.jsonl", "x.json", "x.parquet", "x.csv"):
        for labels, expected in ((("3", "1", "2", "0"), [3, 1, 2, 0]), ("DBCA", [3, 1, 2, 0]), ("dbca", [3, 1, 2, 0]),
                                 ((4, 2, 3, 1), [3, 1, 2, 0]), ((3, 1, 2, 1), [3, 1, 2, 1]),
                                 (("D", "2", "C", "1"), [3, 1, 2, 0]), (("4", "B", "C", "B"), [3, 1, 2, 1]), (("D", "2", "C", "0"), [3, 2, 2, 0])):
            assert [item.label for item in written(labels, name)] == expected, (name, labels)
    written((4, 2, 3, 1), "x.jsonl")
    path = str(tmp_path / "x.jsonl")
    config = Config(eval_tasks=f"t:{path}", hellaswag_examples=0)
    assert read_choice_set(config.choice_sets[0], tokenizer, config).notes == [f"EVAL_TASKS=t:{path} has labels that count from 1"]
    with pytest.raises(DataError, match="x.jsonl:1: its label is 4, but it must be 0 to 3, since the file has labels that are 0"):  # neither from 0 nor from 1
        written((4, 2, 3, 0), "x.jsonl")


def test_questions_with_choices_are_read_as_the_hub_has_them(tmp_path, tokenizer):
    """ARC's labels are those of each question's choices, also 1 to 4; MMLU's are numbers from 0, and letters or from 1 in copies."""
    import datasets
    letters, from_1 = ([{**record, "answer": answer} for record, answer in zip(MMLU, answers)] for answers in ("CA", (4, 1)))
    written = [{**record, "choices": json.dumps(record["choices"])} for record in ARC]
    listed = [{**record, "choices": [{"text": text, "label": label} for text, label in zip(*map(record["choices"].get, ("text", "label")))]} for record in ARC]
    for records, expected in ((ARC, [1, 1]), (written, [1, 1]), (listed, [1, 1]), (MMLU, [2, 0]), (letters, [2, 0]), (from_1, [3, 0])):
        datasets.Dataset.from_list(records).to_parquet(tmp_path / "x.parquet")
        pandas.DataFrame(records).to_json(tmp_path / "x.jsonl", orient="records", lines=True)
        for name in ("x.parquet", "x.jsonl"):
            found = read_items(tmp_path / name, "EVAL_TASKS=a:")
            assert [item.label for item in found] == expected and found[0].context == f"Question: {records[0]['question'].strip()}\nAnswer:"
            assert found[1].endings == (["fire", "ice", "sun", "oven"] if "id" in records[0] else ["4", "5", "6", "7"])
    config = Config(eval_tasks=f"a:{write_jsonl(tmp_path / 'x.jsonl', ARC)}", hellaswag_examples=0)
    assert [note.partition(" has ")[2] for note in read_choice_set(config.choice_sets[0], tokenizer, config).notes] == [
        "fields that are not scored: id (2)", "questions with choices; each choice is scored after 'Question: ...\\nAnswer:'"]
    for answer in (2, "C"):
        (item,) = read_items(write_jsonl(tmp_path / "x.jsonl", [{"question": "x", "choices": ["0", "2", "1"], "answer": answer}]), "EVAL_TASKS=a:")
        assert item.endings[item.label] == "1"


def alone(model: Transformer, context: list[int], ending: list[int], max_seq_len: int) -> float:
    row = (context + ending)[-(max_seq_len + 1):]
    with torch.no_grad():
        logprobs = model(torch.tensor([row[:-1]]), mode="logits")[0].log_softmax(-1)
    return float(logprobs[-len(ending):].gather(1, torch.tensor(ending)[:, None]).double().sum())


@pytest.mark.parametrize("max_seq_len", [MAX_SEQ_LEN, 64, 48])
def test_endings_score_as_if_each_stood_alone(model, tokenizer, items, max_seq_len):
    """With the context whole, and with contexts that lose their beginning in some items or in all."""
    tasks = prepared(items[:12], tokenizer, max_seq_len)
    batches = [[tasks[index] for index in batch] for batch in batches_of(tasks, 2000)]
    got = np.concatenate([ending_logprobs(model, batch, CPU) for batch in batches])
    expected = {}
    for item, task in zip(items, tasks):
        whole = [tokenizer.encode(f"{item.context} {ending}") for ending in item.endings]
        context = tokenizer.encode(item.context.rstrip())
        expected[id(task)] = [alone(model, [tokenizer.bos_id, *context], ids[len(context):], max_seq_len) for ids in whole]
    order = [id(task) for batch in batches for task in batch]
    np.testing.assert_allclose(got, [expected[key] for key in order], atol=2e-4)


def test_an_ending_that_does_not_fit_is_an_error_and_the_context_is_run_once(tokenizer, items):
    context = len(tokenizer.encode(items[3].context.rstrip())) + 1
    task = prepare_task(items[3], tokenizer, MAX_SEQ_LEN)
    assert len(task.tokens_T) == context - 1 + sum(task.ending_tokens)
    assert int((task.targets_T >= 0).sum()) == sum(task.ending_tokens)
    longest = max(task.ending_tokens)
    prepare_task(items[3], tokenizer, longest)
    expected = rf"made.jsonl:4: an ending of {longest} tokens does not fit into MAX_SEQ_LEN={longest - 1}"
    with pytest.raises(DataError, match=expected):
        prepare_task(items[3], tokenizer, longest - 1)


def test_items_with_other_numbers_of_endings_share_a_batch(model, tokenizer, items):
    """Cut to 2, 3 or 4 endings, in one batch with whole items: each ending scores as it did."""
    cut = [item._replace(endings=item.endings[:2 + number % 3], label=0) for number, item in enumerate(items[:9])]
    whole, some = (prepared(part, tokenizer) for part in (items[:9], cut))
    expected, got = ending_logprobs(model, whole, CPU), ending_logprobs(model, some, CPU)
    for number, item in enumerate(cut):
        count = len(item.endings)
        np.testing.assert_allclose(got[number, :count], expected[number, :count], atol=2e-4)
        assert np.all(np.isneginf(got[number, count:]))
    answers = evaluate(model, some, 10**6)
    lengths = np.array([[len(ending) for ending in item.endings] for item in items[:9]])
    for number, item in enumerate(cut):
        scores = expected[number, :len(item.endings)]
        assert answers[number].tolist() == [scores.argmax() == 0, (scores / lengths[number, :len(scores)]).argmax() == 0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 40])
def test_ranks_together_count_what_one_process_counts(model, tokenizer, items, world_size):
    tasks = prepared(items[:23], tokenizer)
    one = evaluate(model, tasks, 1500)
    together, forwards, answered = np.zeros((23, 2), int), [], []
    for rank in range(world_size):
        parts = list(evaluate_batches(model, tasks, rank=rank, world_size=world_size, device=CPU, batch_tokens=1500))
        forwards.append(len(parts))
        for indices, correct_B2 in parts:
            together[indices] += correct_B2
            answered += indices
    assert together.tolist() == one.tolist() and sorted(answered) == list(range(23))
    assert len(set(forwards)) == 1 and 0 < one.sum() < 46


@pytest.fixture(scope="module")
def harness(model, tokenizer, tmp_path_factory):
    """The harness's own hellaswag task and model on given records: (acc, acc_norm, log-probabilities) of each."""
    folder = tmp_path_factory.mktemp("exported")
    save_model_folder(folder, model.state_dict(), model.config, tokenizer, MAX_SEQ_LEN)
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness (requirements-dev.txt)")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=16, max_length=MAX_SEQ_LEN)

    reference = Path(lm_eval.__file__).parent / "tasks" / "hellaswag" / "hellaswag.yaml"

    def judge(records: list[dict], is_hellaswag: bool = True, fields: Mapping = MappingProxyType({})) -> list[tuple[float, float, list[float]]]:
        file = write_jsonl(folder / "records.jsonl", records)
        own_data = {"task": "on_our_records", "dataset_path": "json", "training_split": None,
                    "dataset_kwargs": {"data_files": {"validation": file}, "cache_dir": str(folder / "cache")}}
        own_data |= {"include": str(reference)} if is_hellaswag else {
            "validation_split": "validation", "output_type": "multiple_choice", "doc_to_text": "ctx", "doc_to_choice": "endings",
            "doc_to_target": "label", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]} | fields
        (folder / "task.yaml").write_text(json.dumps(own_data))
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        results = lm_eval.simple_evaluate(lm, tasks=["on_our_records"], task_manager=manager, log_samples=True, bootstrap_iters=0)
        samples = sorted(results["samples"]["on_our_records"], key=lambda sample: sample["doc_id"])
        return [(sample["acc"], sample["acc_norm"], [float(logprob) for logprob, _ in sample["filtered_resps"]])
                for sample in samples]

    return judge


def assert_equal_judgement(judged, model, tokenizer, items) -> None:
    tasks = prepared(items, tokenizer)
    for (_, _, logprobs), task in zip(judged, tasks, strict=True):
        np.testing.assert_allclose(ending_logprobs(model, [task], CPU)[0], logprobs, atol=1e-3)
    correct_N2 = evaluate(model, tasks, 4000)
    assert correct_N2.tolist() == [[bool(acc), bool(acc_norm)] for acc, acc_norm, _ in judged]
    assert correct_N2[:, 0].tolist() != correct_N2[:, 1].tolist(), "else a confusion of the two would not show"


@pytest.mark.filterwarnings("default")  # the harness warns of its own ways
def test_made_items_are_judged_as_lm_evaluation_harness_does(harness, model, tokenizer, records, items):
    assert_equal_judgement(harness(records), model, tokenizer, items)


def test_of_equal_endings_the_first_is_the_answer_as_with_argmax(model, tokenizer, items):
    """Their scores differ by rounding, as they have other places in the row."""
    single = [item._replace(endings=item.endings[:2], label=0) for item in items[:9]]
    doubled = [item._replace(endings=[*item.endings[:1] * 2, item.endings[1]], label=label) for item in single for label in range(3)]
    expected = [[is_first, False, not is_first] for is_first in evaluate(model, prepared(single, tokenizer), 4000)[:, 0].tolist()]
    assert evaluate(model, prepared(doubled, tokenizer), 4000)[:, 0].reshape(-1, 3).tolist() == expected


CHAT = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
# Other sets: with marks in brackets, in which endings differ, doubled spaces, and spaces around a text; chats, in whose contexts
# names of control tokens are these tokens; and with the wording and the labels of the tasks arc_easy and mmlu_continuation.
OTHER_SETS = {
    "texts": lambda record: {"ctx": f" {record['ctx_a']} [title]  x[0] ", "label": record["label"],
                             "endings": [f"x[{number}] {ending}{' ' * number}" for number, ending in enumerate(record["endings"])]},
    "chats": lambda record: {"ctx": CHAT.format(record["ctx_a"]), "endings": record["endings"], "label": record["label"]},
    "chats from their start": lambda record: {"ctx": f"<|begin_of_text|>{CHAT.format(record['ctx_a'])}", "endings": record["endings"],
                                              "label": record["label"]},
    "questions": lambda record: {"question": record["ctx_a"], "choices": {"text": record["endings"], "label": [*"ABCD"]},
                                 "answerKey": "ABCD"[int(record["label"])]}}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", OTHER_SETS)
def test_other_sets_are_judged_as_lm_evaluation_harness_does(name, harness, model, tokenizer, records, tmp_path):
    written, fields = [*map(OTHER_SETS[name], records[:20])], {}
    if name == "questions":
        fields = {"doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "{{choices.label.index(answerKey)}}",
                  "doc_to_choice": "{{choices.text}}"}
    items = read_items(write_jsonl(tmp_path / "written.jsonl", written), "EVAL_TASKS=a:")
    assert_equal_judgement(harness(written, is_hellaswag=False, fields=fields), model, tokenizer, items)
    assert (prepared(items, tokenizer)[0].tokens_T == tokenizer.bos_id).sum() == 1, "the start token is not doubled"
