"""Prepared chats and pairs hold what was said and what is learned from, to the token, whatever stops or hurries their making."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from factories import prepare_under_fire, prepared_set, write_jsonl

from common.errors import DataError
from data_pipeline import examples as tokenize_chats
from data_pipeline import prepare as preparation
from data_pipeline.shards import HEADER_BYTES, MANIFEST
from data_pipeline.templates import load_chat_format
from tokenizer import load_tokenizer

WORDS = ["cat", "naïve", "the", "🦙", "<|eot_id|>", "\n\n", "  "]
# As Gemma's: there is no system role.
TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{{- '<|start_header_id|>' ~ m.role ~ ': ' ~ m.content | trim ~ '<|eot_id|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant:' }}{% endif %}"""


@pytest.fixture(scope="session")
def folder_path(tokenizer_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("huggingface")
    load_tokenizer(tokenizer_path).save_huggingface(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def words(draw):
    return "x" + "".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 12)))


def chats(count, seed=0):
    draw = random.Random(seed)
    dialogs = [[{"role": role, "content": f"{number}{words(draw)}"} for _ in range(draw.randrange(1, 4))
                for role in ("user", "assistant")] for number in range(count)]
    return [{"messages": [{"role": "system", "content": "Be kind."}] * (number % 5 == 0) + dialog}
            for number, dialog in enumerate(dialogs)]


def pairs(count, seed=0):
    draw = random.Random(seed)
    return [{"prompt": f"{number}{words(draw)}", "chosen": "y" + words(draw), "rejected": "n" + words(draw)}
            for number in range(count)]


def prompts(count):
    return [{"question": f"{number}?", "answer": {"é": [number]}} for number in range(count)]


def prepare(kind, source, tokenizer_path, output, **options):
    return prepared_set(kind, source, tokenizer_path, output, **{"shard_tokens": 3000} | options)


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))} | {
        MANIFEST: json.loads((folder / MANIFEST).read_text())}


def examples_of(folder, split):
    """Every example as its segments, read back by nothing but the description of the format."""
    manifest = json.loads((folder / MANIFEST).read_text())["splits"][split]

    def stream(shards, dtype):
        return np.concatenate([np.fromfile(folder / shard["file"], dtype, offset=HEADER_BYTES) for shard in shards]).tolist()

    ids, examples, segments = stream(manifest["shards"], "<u2"), [], []
    for flag in stream(manifest["segments"]["shards"], "<u4"):
        part, ids = ids[:flag >> 2], ids[flag >> 2:]
        segments.append((part, bool(flag & 1)))
        if flag & 2:
            examples.append(segments)
            segments = []
    assert not ids and not segments and len(examples) == manifest["documents"]
    return examples


@pytest.mark.parametrize("path", ["tiktoken", "huggingface"])
def test_every_chat_is_there_with_its_answers_marked(tmp_path, tokenizer_path, folder_path, path):
    path = tokenizer_path if path == "tiktoken" else folder_path
    tokenizer = load_tokenizer(path)
    records = [record for record in chats(80) if path == tokenizer_path or record["messages"][0]["role"] != "system"]
    folder = prepare("chats", write_jsonl(tmp_path / "x.jsonl", records), path, tmp_path / "out")
    manifest, encoded = json.loads((folder / MANIFEST).read_text()), []
    for record in records:
        segments = load_chat_format(tokenizer).encode_chat(record["messages"])
        answers = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
        assert [tokenizer.decode(ids[:-1]).strip() for ids, is_target in segments if is_target] == [
            answer.strip() for answer in answers]
        encoded.append(segments)
    prepared = {split: examples_of(folder, split) for split in ("train", "validation")}
    assert all(len(examples) > 1 for examples in prepared.values())
    for examples in prepared.values():
        places = [encoded.index(example) for example in examples]
        assert places == sorted(places)
    assert sorted(map(str, encoded)) == sorted(str(example) for examples in prepared.values() for example in examples)
    train = manifest["splits"]["train"]
    assert train["target_tokens"] == sum(len(ids) for example in prepared["train"] for ids, is_target in example if is_target)
    assert manifest["kind"] == "chats" and len(train["shards"]) > 2


def test_every_pair_is_its_prompt_once_and_its_two_answers(tmp_path, tokenizer_path):
    tokenizer, records = load_tokenizer(tokenizer_path), pairs(40)
    folder = prepare("pairs", write_jsonl(tmp_path / "x.jsonl", records), tokenizer_path, tmp_path / "out")
    chat_format, encoded = load_chat_format(tokenizer), []
    for record in records:
        ask = {"role": "user", "content": record["prompt"]}
        chosen, rejected = (chat_format.encode_chat([ask, {"role": "assistant", "content": record[name]}])
                            for name in ("chosen", "rejected"))
        encoded.append([*chosen, rejected[1]])
    found = [example for split in ("train", "validation") for example in examples_of(folder, split)]
    assert sorted(map(str, found)) == sorted(map(str, encoded))
    assert json.loads((folder / MANIFEST).read_text())["kind"] == "pairs"


def test_the_system_prompt_goes_before_chats_that_have_none_and_moves_no_chat_to_the_other_split(tmp_path, tokenizer_path):
    source, tokenizer = write_jsonl(tmp_path / "x.jsonl", chats(50)), load_tokenizer(tokenizer_path)
    plain = prepare("chats", source, tokenizer_path, tmp_path / "out")
    set_folder = prepare("chats", source, tokenizer_path, tmp_path / "out", system_prompt="Be brief.")
    for split in ("train", "validation"):
        texts = [[tokenizer.decode([token for ids, _ in example for token in ids]) for example in examples_of(folder, split)]
                 for folder in (plain, set_folder)]
        message = "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>"
        for without, has in zip(*texts):
            assert message.format("Be kind.") in has or message.format("Be brief.") in has
            assert has.replace(message.format("Be brief."), "") == without
    source = write_jsonl(tmp_path / "y.jsonl", pairs(20))
    pair = prepare("pairs", source, tokenizer_path, tmp_path / "dpo", system_prompt="Be brief.")
    assert all(message.format("Be brief.") in tokenizer.decode(prompt) for (prompt, _), _, _ in examples_of(pair, "train"))


def test_a_prompt_is_on_one_side_whatever_is_answered_and_however_it_is_written(tmp_path, tokenizer_path):
    def ways(number):
        asked = f"Is {number} \ufb01ne at the caf\u00e9?"
        return (asked, f"\n {asked}\t", asked.upper(), asked.replace("\ufb01", "fi").replace(" ", "  "),
                asked.replace("\u00e9", "e\u0301"))

    def said(asked, answer):
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}

    later = said("And why?", "So.")["messages"]
    dialogs = [record for number in range(30) for record in (
        *[said(asked, f"{number} is.") for asked in ways(number)],
        said(ways(number)[0], f"{number} is not."), {"messages": said(ways(number)[0], f"Hm, {number}.")["messages"] + later})]
    preferences = [record for number in range(30) for asked in ways(number) for record in (
        {"prompt": asked, "chosen": f"{number} yes", "rejected": "no"}, {"prompt": asked, "chosen": "no", "rejected": "yes"})]
    sides, tokenizer = {number: set() for number in range(30)}, load_tokenizer(tokenizer_path)
    for kind, records, count in (("chats", dialogs, 210), ("pairs", preferences, 300)):
        folder = prepare(kind, write_jsonl(tmp_path / f"{kind}.jsonl", records), tokenizer_path, tmp_path / "out",
                         validation_fraction=0.3)
        found = [(split, example) for split in ("train", "validation") for example in examples_of(folder, split)]
        assert len(found) == count
        for split, example in found:
            text = tokenizer.decode(example[0][0]).lower()
            sides[int(text.split("is ")[1].split()[0])].add(split)
    assert all(len(side) == 1 for side in sides.values()) and 4 < sum(side == {"validation"} for side in sides.values()) < 15


def test_a_prompt_that_one_stage_holds_out_is_trained_on_in_no_other(tmp_path, tokenizer_path):
    """In sets of other sizes, with a system message or earlier answers, and in pairs, unpaired answers and prompts."""
    asked, tokenizer = [f"How long is plank {number}?" for number in range(4500)], load_tokenizer(tokenizer_path)
    system = {"role": "system", "content": "Be kind."}
    stages = {"chats": [{"messages": [system, *chat(text, "Nine.")]} for text in asked[:200]],
              "pairs": [{"prompt": text, "chosen": "Nine.", "rejected": "No."} for text in asked],
              "unpaired": [{"prompt": text.upper(), "completion": answer, "label": answer == "Nine."} for text in asked[:300] for answer in ("Nine.", "No.")],
              "prompts": [{"prompt": chat(text, "Nine.", "And now?"), "answer": 9} for text in asked]}
    sides = {name: {"train": set(), "validation": set()} for name in stages}
    for name, records in stages.items():
        folder = prepare("pairs" if name == "unpaired" else name, write_jsonl(tmp_path / f"{name}.jsonl", records), tokenizer_path, tmp_path / name,
                         validation_fraction=None, shard_tokens=10**6)
        for split, side in sides[name].items():
            side |= {int(tokenizer.decode(example[0][0]).lower().split("plank ")[1].split("?")[0]) for example in examples_of(folder, split)}
    for name, side in sides.items():
        assert side["validation"] and not any(side["validation"] & other["train"] for other in sides.values()), name


@pytest.mark.parametrize("marks, learned", [({}, [3]), ({1: {"weight": 1}}, [1, 3]), ({1: {"train": False}}, [3])])
def test_of_a_prompt_and_a_completion_only_the_completion_is_learned(tmp_path, tokenizer_path, marks, learned):
    """As TRL's prompt-completion format; a mark says otherwise."""
    dialog = [message | marks.get(place, {}) for place, message in enumerate(chat("A plank?", "Which?", "The long one.", "Nine feet."))]
    source = write_jsonl(tmp_path / "x.jsonl", [{"prompt": dialog[:3], "completion": dialog[3:]}])
    folder = prepare("chats", source, tokenizer_path, tmp_path / "out", validation_fraction=0)
    targets = [load_tokenizer(tokenizer_path).decode(ids) for ids, is_target in examples_of(folder, "train")[0] if is_target]
    assert targets == [dialog[place]["content"] + "<|eot_id|>" for place in learned]


def test_whatever_changes_a_token_changes_the_folder(tmp_path, tokenizer_path, folder_path, monkeypatch):
    records = [{**chat, **pair} for chat, pair in zip(chats(40, seed=1), pairs(40))]
    records = [{**record, "messages": record["messages"][-2:]} for record in records]
    source = write_jsonl(tmp_path / "x.jsonl", records)

    def name(kind="chats", source=source, path=tokenizer_path, **options):
        return prepare(kind, source, path, tmp_path / "out", **options).name

    names = [name(), name("pairs"), name(path=folder_path), name(system_prompt="Be kind."), name(shard_tokens=4000),
             name(validation_fraction=0.2), name(max_documents=30)]
    (Path(folder_path) / "chat_template.jinja").write_text(TEMPLATE.replace(": ", ":"))
    names.append(name(path=folder_path))
    (Path(folder_path) / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(tokenize_chats, "EXAMPLES_VERSION", tokenize_chats.EXAMPLES_VERSION + 1)
    names.append(name())
    assert len(set(names)) == len(names)
    monkeypatch.undo()
    monkeypatch.setattr(preparation, "write_shards", None)
    assert [name(), name(path=folder_path)] == [names[0], names[2]]


def test_killed_and_started_again_it_ends_with_the_same_bytes_and_counts(tmp_path, folder_path):
    # The template refuses every fifth chat, in the process that tokenises; an earlier one has no answer.
    source = write_jsonl(tmp_path / "x.jsonl", [{"messages": []}, *chats(1500)])
    undisturbed = prepare("chats", source, folder_path, tmp_path / "calm", on_bad_record="skip")
    assert files_of(undisturbed)[MANIFEST]["skipped"]["bad"] == 301
    output = tmp_path / "out"
    prepare_under_fire(1, 0.05, "chats", source, folder_path, output, 500, tokenizer_backend="auto", shard_tokens=3000, workers=1,
                       on_bad_record="skip")
    assert files_of(output / undisturbed.name) == files_of(undisturbed) and not list(output.glob("tmp-*"))


def test_answers_of_the_same_tokens_are_refused(tmp_path, folder_path, tokenizer_path):
    record = {"prompt": "a", "chosen": "e\u0301 \n x", "rejected": "é \n x"}
    assert prepare("pairs", write_jsonl(tmp_path / "x.jsonl", [record]), tokenizer_path, tmp_path / "out", validation_fraction=0)
    document = json.loads((Path(folder_path) / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**document, "normalizer": {"type": "NFC"}}))
    with pytest.raises(DataError, match="x.jsonl:1: chosen and rejected have the same tokens"):
        prepare("pairs", str(tmp_path / "x.jsonl"), str(tmp_path), tmp_path / "out")
    # An answer that is written in the other normal form is no fault of its labels.
    chat = {"prompt": "a", "completion": "e\u0301"}
    assert prepare("chats", write_jsonl(tmp_path / "y.jsonl", [chat]), str(tmp_path), tmp_path / "out", validation_fraction=0)


@pytest.mark.parametrize("break_it, fault", [
    (lambda asked, said, *more: [(asked, False), (said[:-1], True), *more], "the end of the turn is not a target"),
    (lambda asked, said, *more: [(asked[:3], False), (asked[3:] + said, True), *more], "a control token is a target"),
    (lambda asked, said, *more: [(asked[:-1], False), (asked[-1:] + [120] + said, True), *more], "the targets are"),
    (lambda asked, said, *more: [(asked + said, False), *more], "0 runs of targets for|1 run of targets for"),
    (lambda asked, said, *more: [(asked + said, True), *more], "a target has no token before it"),
    (lambda asked, said, *more: [([], False), (said, True), *more], "a target has no token before it"),
    (lambda asked, said, *more: [(asked, False), (said, True), *more, ([10], False)], "the last tokens are not targets"),
])
@pytest.mark.parametrize("skipping", ["fail", "skip"])
def test_wrong_labels_stop_the_preparation_with_file_and_line(tmp_path, tokenizer_path, monkeypatch, break_it, fault, skipping):
    def broken(asked, said, *more):
        return break_it(asked[0], said[0], *more)

    def broken_format(tokenizer):
        chat_format = load_chat_format(tokenizer)
        right = chat_format.encode_chat
        chat_format.encode_chat = lambda messages, options: broken(*right(messages, options))
        return chat_format

    monkeypatch.setattr("data_pipeline.examples.worker_chat_format", broken_format)
    source = write_jsonl(tmp_path / "x.jsonl", chats(3)[1:])
    with pytest.raises(DataError, match=f"x.jsonl:1: its labels are wrong.*({fault})"):
        prepare("chats", source, tokenizer_path, tmp_path / "out", on_bad_record=skipping)


def chat(*words, system=""):
    roles = ["user", "assistant"] * len(words)
    return [*[{"role": "system", "content": system}] * bool(system), *({"role": role, "content": word} for role, word in zip(roles, words))]
