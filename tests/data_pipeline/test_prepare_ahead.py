"""PREPARE_AHEAD: a run on data that is still being prepared is the run on the same data, prepared before.

The tests with a `kind` hold for text and for chats.
"""

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import Command
from factories import PATIENCE, TinyRun, prepared_set, sentence, wait_until, write_jsonl
from test_dataloaders import PROMPT, WORDS, write

from common.activity import ACTIVITY
from config import Config
from data_pipeline import prepare as preparation
from data_pipeline.examples import open_example_set
from data_pipeline.shards import MANIFEST, TokenizerInfo
from dataloaders import ExampleRows
from extensions import prepare_ahead
from extensions.preparation import look, slots_of, why_ended
from parallel.ranks import Ranks
from tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
AHEAD = {"PREPARE_AHEAD": "true", "HELLASWAG_EVERY": 0, "VALIDATION_ROWS": 2}  # rows that are held out early
# Tokens of a shard: 18 rows of 32 tokens of text, or of 128 tokens of chats. A step of 8 rows often reads two shards.
SHARDS = {"documents": 600, "chats": 2300}
# Such rows hold one chat to three; some chats are cut, and those with long questions are left out.
CHATS = {"TRAINING_STAGE": "sft", "RANDOM_INIT": "true", "MAX_SEQ_LEN": 128, "TOTAL_BATCH_SIZE": 1024}


def write_source(folder, documents=None, kind="documents"):
    documents = documents or (120 if kind == "documents" else 240)
    folder.mkdir(parents=True, exist_ok=True)
    dice = Random(3)

    def record(number):
        text = f"{number}: {sentence(dice)}"
        if kind == "documents":
            return {"text": f"{text} {sentence(dice)}"}
        asked, answer = text * (5 if number % 40 == 30 else 1), text[:1 + 7 * number % 23] * (9 if number % 40 == 10 else 1)
        return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}

    return Path(write_jsonl(folder / "text.jsonl", map(record, range(documents))))


def prepare(source, tokenizer, output, kind="documents", **options):
    return prepared_set(kind, source, tokenizer, output, **{"shard_tokens": SHARDS[kind], "ahead": True} | options)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 300)


@pytest.fixture(scope="module")
def kind(request):
    return getattr(request, "param", "documents")


both_kinds = pytest.mark.parametrize("kind", [*SHARDS], indirect=True, scope="module")
of_chats = pytest.mark.parametrize("kind", ["chats"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prepared, kind):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "CHUNK_CHARACTERS", 300)
        return prepare(write_source(folder, kind=kind), prepared.tokenizer, folder / "sets", kind=kind)


@pytest.fixture(scope="module")
def before(tmp_path_factory, prepared, whole):
    return ahead_run(prepared, tmp_path_factory.mktemp("before"), whole).trained()


def publish(whole, folder, shards, held_out=0):
    """Make `folder` a preparation of the set `whole` that has finished so many shards; all of training make it complete."""
    manifest = json.loads((whole / MANIFEST).read_text())
    folder.mkdir(parents=True, exist_ok=True)
    for path in whole.glob("*.bin"):
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    train = manifest["splits"]["train"]
    if shards >= len(train["shards"]):
        preparation.write_json(folder / MANIFEST, manifest)
        return
    finished = train["shards"][:shards]
    validation = manifest["splits"]["validation"]
    splits = {"train": {**train, "tokens": sum(shard["tokens"] for shard in finished) + 7, "shards": finished},
              "validation": {**validation, "shards": validation["shards"][:held_out]}}
    for stream in [split["segments"] for split in splits.values() if "segments" in split]:
        stream["shards"] = []  # they are still in their first shard
    preparation.write_json(folder / preparation.JOURNAL, {**manifest, "splits": splits})


def grow_when_waited_for(monkeypatch, whole, folder, first):
    """Publish one more shard each time that a run waits for one; returns the list of their numbers."""
    published, ticks = [first], []
    publish(whole, folder, first)

    def sleep(seconds):
        ticks.append(ACTIVITY.ticks)
        assert len({*ticks}) == len(ticks), "the watchdog must not take it for a hang"
        if len(ticks) % 2 == 0:  # each wait has two looks
            published.append(published[-1] + 1)
            publish(whole, folder, published[-1])

    monkeypatch.setattr(prepare_ahead, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))  # other threads sleep, too
    monkeypatch.setattr("extensions.preparation.why_ended", lambda folder: "")
    return published


def settings_of(data, kind=None):
    kind = kind or ("chats" if [*data.glob("*-segments-*")] else "documents")
    return {**CHATS, "SFT_DATA_PATH": data} if kind == "chats" else {"PRETRAIN_DATA_PATH": data}


def ahead_run(prepared, folder, data, kind=None, **settings):
    return TinyRun(prepared, folder, **{**AHEAD, **settings_of(data, kind), **settings})


def steps_of(run):
    return [(line["step"], line["rows_crc32"], line["loss"]) for line in run.lines("ledger")]


@both_kinds
def test_the_journal_lists_shards_as_they_are_finished(tmp_path, prepared, monkeypatch, kind):
    source, seen = write_source(tmp_path, kind=kind), []
    original = preparation.write_json
    monkeypatch.setattr(preparation, "write_json", lambda path, content: (original(path, content), path.name == preparation.JOURNAL
                                                                          and seen.append(look(path.parent))))
    folder = prepare(source, prepared.tokenizer, tmp_path / "ahead", kind=kind, journal_seconds=PATIENCE)
    complete = look(folder)
    assert complete.is_complete and len(seen) >= 3 and not any(each.is_complete for each in seen)
    listed = complete.manifest.splits["train"].shards
    assert [len(each.manifest.splits["train"].shards) for each in seen] == [*range(1, len(seen) + 1)], "each shard at once"
    assert all(each.manifest.splits["train"].shards == listed[:number] for number, each in enumerate(seen, 1))
    held_out = [each.written["validation"] for each in seen]
    assert held_out == sorted(held_out) and held_out[0] > 0
    other = prepare(source, prepared.tokenizer, tmp_path / "later", ahead=False, kind=kind)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {path.name: path.read_bytes() for path in other.iterdir()}


def opened(prepared, folder, split, **settings):
    settings = {name.lower(): str(value) for name, value in ({"MAX_SEQ_LEN": 32, "TOTAL_BATCH_SIZE": 256} | settings_of(folder)).items()} | settings
    config = Config(prepare_ahead=True, micro_batch_size=2, **settings)
    rows = prepare_ahead.open_rows(config, split, load_tokenizer(str(prepared.tokenizer), "auto"), "auto")
    return rows.sources[0]


@both_kinds
def test_the_order_does_not_depend_on_how_much_is_prepared(tmp_path, prepared, whole, kind):
    def rows(folder):
        return opened(prepared, folder, "train", validate_every=0)

    complete = rows(whole)
    count = len(complete)
    order = complete.rows_at(np.arange(3 * count), seed=5)
    for epoch in range(3):
        assert sorted(order[epoch * count:(epoch + 1) * count]) == [*range(count)], "each row once in each pass"
    assert not np.array_equal(order[:count], order[count:2 * count])
    ends = [0, *complete.ends]
    for first, end in zip(ends, ends[1:]):  # shard by shard, shuffled within each
        assert {*order[first:end]} == {*range(first, end)} and [*order[first:end]] != [*range(first, end)]
    assert [complete.shards_with(end) for end in complete.ends] == [*range(1, len(ends))] and complete.shards_with(10**9) == len(ends) - 1
    assert [complete.shards_with(end + 1) for end in ends[:-1]] == [*range(1, len(ends))]
    orders = [tuple(order[first:end] - first) for first, end in zip(ends, ends[1:])]
    assert len({*orders}) == len(orders), "each shard has its own order"
    assert kind == "chats" or len(orders) > len({*map(len, orders)}), "and there are equal ones"
    for shards in range(1, len(complete.entries)):
        publish(whole, tmp_path / f"part-{shards}", shards)
        part = rows(tmp_path / f"part-{shards}")
        known = (sum(entry.tokens for entry in complete.entries[:shards]) - 1) // 32 if kind == "documents" else complete.ends[shards - 1]
        assert len(part) == known and part.has(known) and not part.has(known + 1)
        assert np.array_equal(part.rows_at(np.arange(known), seed=5), order[:known])
        for batch, same in zip(vars(part(order[:8])).values(), vars(complete(order[:8])).values()):
            assert torch.equal(batch, same) if torch.is_tensor(batch) else batch == same
        assert part.fingerprint == complete.fingerprint


def test_validation_is_that_of_the_whole_set_while_its_last_shard_is_written(tmp_path, prepared):
    whole = prepare(write_source(tmp_path), prepared.tokenizer, tmp_path / "sets", ahead=False, validation_fraction=0.3)
    publish(whole, tmp_path / "grows", 2, held_out=2)
    files = json.loads((whole / MANIFEST).read_text())["splits"]["validation"]["shards"]
    tokens = np.concatenate([np.fromfile(whole / each["file"], "<u2", offset=1024) for each in files])
    assert len(files) == 3
    for folder in (whole, tmp_path / "grows"):
        rows = opened(prepared, folder, "validation", validation_rows=40, validate_every=1)
        assert rows(np.arange(40)).targets_BT.flatten().tolist() == tokens[1:40 * 32 + 1].tolist()


@both_kinds
@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_overtakes_the_preparation_waits_and_is_the_same(tmp_path, prepared, whole, before, monkeypatch, capfd, kind, finished):
    """It is stopped and resumed, when more is prepared or all."""
    assert "Waiting for data" not in (before.folder / "log" / "rank-0.txt").read_text()
    published = grow_when_waited_for(monkeypatch, whole, tmp_path / "grows", 1)
    meanwhile = ahead_run(prepared, tmp_path / "meanwhile", tmp_path / "grows")
    assert meanwhile.train(STOP_STEP=4) == 0
    if finished:
        publish(whole, tmp_path / "grows", 1000)
    assert meanwhile.train() == 0 and len(published) > 1
    out = capfd.readouterr().out
    assert f"Waiting for data: step 3 needs more than {SHARDS[kind]:,} tokens in 1 shard" in out
    assert steps_of(meanwhile) == steps_of(before) and len(steps_of(before)) == 6
    assert meanwhile.column("val_loss") == before.column("val_loss") and len(before.column("val_loss")) > 2
    assert meanwhile.hashes(6) == before.hashes(6)
    card = (meanwhile.checkpoint(6) / "README.md").read_text()
    assert "text.jsonl" in card and "token files" not in card
    usual = ahead_run(prepared, tmp_path / "usual", whole, PREPARE_AHEAD="false")
    assert usual.train() == 0 and steps_of(usual) != steps_of(before), "without PREPARE_AHEAD, rows are shuffled over all shards"


@both_kinds
def test_a_failed_preparation_ends_the_run_with_a_checkpoint(tmp_path, prepared, whole, before, capfd):
    """And the run resumes with the corrected source, if the shards that it has read are the same."""
    data = tmp_path / "grows" / "0123456789abcdef"
    publish(whole, data, 2)
    host, error = socket.gethostname(), "text.jsonl:77: not valid JSON: ... ; correct the data"
    (data.parent / f".{data.name}.{host}.log").write_text(f"Preparing: 12tok\nerror: {error}\n")
    assert why_ended(data) == error
    run = ahead_run(prepared, tmp_path / "run", data, SAVE_EVERY=0)
    assert run.train() == 3
    captured = capfd.readouterr()
    assert captured.err.count(error) == 2, "a warning at once, and the error at the end"
    assert "Step 4, the last with data, is saved" in captured.err
    assert run.steps_saved() == [4]
    publish(whole, data, 1000)
    assert run.train() == 0
    assert steps_of(run) == steps_of(before)


@both_kinds
def test_a_run_resumes_only_with_the_shards_that_it_has_read(tmp_path, prepared, whole, capfd, kind):
    run = ahead_run(prepared, tmp_path / "run", whole)
    assert run.train(STOP_STEP=4) == 0
    source = write_source(tmp_path / "changed", kind=kind)
    lines = source.read_text().splitlines()
    left_out = 17 if kind == "documents" else 50
    changed = [*lines[:left_out], *lines[left_out + 1:]]  # in the second shard
    source.write_text("\n".join(changed) + "\n")
    other = prepare(source, prepared.tokenizer, tmp_path / "changed", kind=kind)
    actual, reference = (look(folder).manifest.splits["train"].shards for folder in (whole, other))
    assert actual[0] == reference[0] and actual[1] != reference[1]
    ledger = run.lines("ledger")
    assert run.train(**settings_of(other)) == 5
    error = capfd.readouterr().err
    assert f"{reference[1].file}: the run has read this shard with SHA-256" in error
    assert kind == "chats" or actual[1].sha256[:12] in error, "of chats, it is also the hash of what is a target"
    assert run.lines("ledger") == ledger and run.train() == 0
    source.write_text("\n".join([*lines[:-1], lines[0]]) + "\n")  # in the last shard, which the run does not reach
    later = ahead_run(prepared, tmp_path / "later", whole)
    assert later.train(STOP_STEP=4) == 0
    assert later.train(**settings_of(prepare(source, prepared.tokenizer, tmp_path / "changed", kind=kind))) == 0
    assert steps_of(later) == steps_of(run)


@of_chats
def test_a_chat_is_packed_with_those_that_end_in_the_same_shard(prepared, whole, kind):
    """Compared with the chats as they are stored; those that start in an earlier shard are whole, too."""
    rows, tokenizer = opened(prepared, whole, "train", validate_every=0), load_tokenizer(str(prepared.tokenizer), "auto")
    stored, ends = open_example_set(whole, "train", "chats", tokenizer), np.cumsum([entry.tokens for entry in rows.entries])
    expected = [[] for _ in rows.entries]
    for number in range(len(stored)):
        if stored.first_targets[number] <= 128:
            expected[np.searchsorted(ends, stored.starts[number + 1])].append(stored.read(number)[0][:129].tolist())
    rows.has(len(rows))
    assert sum(map(len, expected)) < len(stored) == sum(map(len, rows.parts)), "some have too long questions"
    assert rows.shortened == f", {sum(len(ids) == 129 for each in expected for ids in each)} cut to MAX_SEQ_LEN=128, {len(stored) - sum(map(len, expected))} too long and left out"
    for first, end, chats in zip([0, *rows.ends], rows.ends, expected):
        found, batch = [], rows(np.arange(first, end))
        for tokens_T, targets_T, ids_T in zip(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT):
            for inside in [ids_T == document for document in range(1, int(ids_T.max()) + 1) if targets_T[ids_T == document].max() > 0]:
                found.append(tokens_T[inside].tolist() + targets_T[inside][-1:].tolist())
        assert sorted(found) == sorted(chats)


def test_the_slots_of_chats_are_those_of_the_rows(tmp_path):
    """Of all lengths of question and answer around those that fill a row of five tokens."""
    examples = [[(PROMPT, prompt * [5]), (WORDS, answer * [6])] for prompt in range(1, 8) for answer in range(1, 8)]
    stored = open_example_set(write(tmp_path / "set", "chats", examples), "train", "chats", TokenizerInfo(100, "abc"))
    slots, rows = slots_of(stored, 5), ExampleRows(stored, 5)
    assert ((slots > 0).sum(), (slots == 0).sum(), slots.sum()) == (rows.examples, rows.left_out, rows.tokens)


@pytest.mark.parametrize("shard", [1, -1])
def test_machines_with_other_shards_do_not_train_together(shard, tmp_path, prepared, whole, capfd, monkeypatch):
    """Each machine may prepare its own set; here another rank has another second or last shard."""
    gather, hashes = Ranks.gather_or_raise, [each["sha256"][:16] for each in json.loads((whole / MANIFEST).read_text())["splits"]["train"]["shards"]]
    place, hashes[shard] = range(len(hashes))[shard], "other"

    def gather_two(ranks, make):
        [own] = gather(ranks, make)
        return [own, [*own[:3], hashes]] if len(own) == 4 else [own]

    monkeypatch.setattr(Ranks, "gather_or_raise", gather_two)
    run = ahead_run(prepared, tmp_path / "run", whole)
    assert run.train() == 3
    assert f"shard {place} differs between machines, because their sources or tokenizers do" in capfd.readouterr().err
    assert run.train(PRETRAIN_DATA_PATH=tmp_path / "none") == 3 and "none does not exist" in capfd.readouterr().err


SLOW = """
import sys
if any("extensions.preparation" in argument for argument in sys.orig_argv):
    import time
    from data_pipeline import prepare
    prepare.CHUNK_CHARACTERS, original = 300, prepare.write_json
    def write_json(path, content):
        original(path, content)
        if path.name == prepare.JOURNAL and len(content["splits"]["train"]["shards"]) > 1:
            time.sleep(60)
    prepare.write_json = write_json
"""


@pytest.mark.slow
@both_kinds
def test_a_killed_command_resumes_preparation_and_training(tmp_path, prepared, before, kind):
    """Whatever kills the launcher also ends the preparation, whose shards stay."""
    run, source = ahead_run(prepared, tmp_path / "runs", write_source(tmp_path, kind=kind), kind), tmp_path / "site" / "sitecustomize.py"
    source.parent.mkdir()
    source.write_text(SLOW)
    flags = [*run.argv(SHARD_TOKENS=SHARDS[kind], VALIDATION_FRACTION=0.1, PREPARATION_WORKERS=1), "--output", tmp_path / "runs" / "sets"]
    path = {"PYTHONPATH": f"{source.parent}{os.pathsep}{os.environ['PYTHONPATH']}"}
    command = Command(run, ROOT / "scripts" / "run.py", *flags, env=path)
    wait_until(lambda: "Waiting for data" in command.text(), command.text)
    assert "Training starts on the first shard" in command.text() and "Step [4/6]" in command.text()
    os.killpg(command.pid, signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL, "the preparation has ended, too"
    again = Command(run, ROOT / "scripts" / "run.py", *flags)
    assert again.wait() == 0, again.text()
    assert steps_of(run) == steps_of(before) and run.hashes(6) == before.hashes(6)
    folder = next(path.parent for path in (tmp_path / "runs" / "sets").glob(f"[0-9a-f]*/{MANIFEST}"))
    assert "Continuing after the" in (folder.parent / f".{folder.name}.{socket.gethostname()}.log").read_text()
