"""scripts/inspect_data.py, and what it counts."""

import json
import re
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from factories import Prepared, sentence, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, SettingsError
from config import Config
from data_pipeline.mixture import Mixture, write_mixture
from data_preparation_utils import PreparationOptions, prepare_set
from extensions.debug import inspect as statistics
from extensions.debug.inspect import measure
from extensions.exclude import exclude
from extensions.settings import Selector
from scripts import inspect_data
from tokenizer import load_tokenizer

DOCUMENTS = st.lists(st.lists(st.integers(1, 3), max_size=12), min_size=1, max_size=12)


@given(DOCUMENTS, st.integers(1, 9))
def test_documents_are_measured_as_by_hand_however_they_lie_in_the_blocks(documents, block):
    ids = np.array([token for document in documents for token in (0, *document)], np.uint16)
    starts = np.cumsum([0, *(1 + len(document) for document in documents)])[:-1]
    shards = SimpleNamespace(tokens=len(ids), vocab_size=5, document_start_id=0,
                             blocks=lambda: (ids[first:first + block] for first in range(0, len(ids), block)))
    lengths = sorted(1 + len(document) for document in documents)
    longer = [length for length in lengths if length > 4]
    for places in (None, starts):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(statistics, "LONGEST", 64)
            facts, id_counts = measure(shards, places, 4)
        assert id_counts.tolist() == np.bincount(ids, minlength=5).tolist()
        assert [count for first, count in facts["histogram"]] == [
            sum(first <= length < 2 * max(1, first) for length in lengths) for first, _ in facts["histogram"]]
        assert sum(count for _, count in facts["histogram"]) == facts["documents"] == len(documents)
        assert (facts["longest"], facts["tokens"]) == (lengths[-1], len(ids))
        assert facts["repeated"] == len(documents) - len(set(map(tuple, documents)))
        assert facts["median"] == lengths[(len(lengths) - 1) // 2]
        assert (facts["longer"], facts["tokens_in_longer"]) == pytest.approx((len(longer) / len(lengths), sum(longer) / len(ids)))


@pytest.fixture(scope="module")
def sets(prepared: Prepared, tmp_path_factory) -> dict[str, Path]:
    """Prepared documents, of which a third are repeated, chats and a mixture."""
    rng, folder, made = Random(3), tmp_path_factory.mktemp("sets"), {}
    texts = [" ".join(sentence(rng) for _ in range(3)) + f" Ümlaut {number}" for number in range(60)]
    records = {"documents": [{"text": text} for text in texts + texts[:30]],
               "chats": [{"prompt": f"{text}?", "completion": "Yes\x1b[2J, it is."} for text in texts]}
    for kind, lines in records.items():
        options = PreparationOptions(str(prepared.tokenizer), "auto", 100_000, 0, workers=1)
        made[kind] = prepare_set(kind, write_jsonl(folder / f"{kind}.jsonl", lines), folder / "sets", options)
    sources = [{"label": label, "set": f"../{made['documents'].name}"} for label in "ab"]
    made["mixture"] = write_mixture(folder / "sets", Mixture(sources=sources, phases=[{"weights": {"a": 1, "b": 1}}]))
    return made


@pytest.fixture
def inspect(prepared, tmp_path, monkeypatch, capsys):
    """A function that runs the script's main and returns what it prints."""
    def run(*flags) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["inspect_data.py", *map(str, flags), "--tokenizer-path", str(prepared.tokenizer)])
        inspect_data.main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("kind, pattern, examples, hashes", [
    ("documents", r"Ümlaut 3\b", 2, 1), ("chats", r"Ümlaut 3\b", 1, 1), ("chats", "Yes", 60, 60), ("mixture", r"Ümlaut 3\b", 4, 1)])
def test_find_writes_a_file_that_excludes_the_examples_with_a_pattern(kind, pattern, examples, hashes, sets, inspect, prepared, tmp_path):
    flags = (sets[kind], "--find", pattern, "--exclude", "unwanted.txt")
    output = inspect(*flags)
    assert re.search(rf"^.*: {examples} of \d+ examples \(.* have this pattern$", output, re.M), output
    assert "Ümlaut" in output and "\x1b" not in output and output.endswith("\nTrain without them: EXCLUDE_DATA=unwanted.txt\n")
    comment, *lines = (tmp_path / "unwanted.txt").read_text().splitlines()
    assert comment == f"# {pattern} in {sets[kind]}" and len(lines) == hashes, "repeated examples have one hash"
    data = statistics.open_data(sets[kind], Config(tokenizer_path=str(prepared.tokenizer)))
    assert exclude(data.rows, data.tokenizer, [Selector(*line.split(" ")) for line in lines]).total == examples
    with pytest.raises(SettingsError, match="unwanted.txt exists; choose another file with --exclude"):
        inspect(*flags)
    with pytest.raises(DataError, match="nothing has the pattern 'no such text', so nothing is written"):
        inspect(sets[kind], "--find", "no such text", "--exclude", "nothing.txt")
    assert not (tmp_path / "nothing.txt").exists()


def test_documents_are_described(sets, inspect, prepared):
    facts = json.loads(inspect(sets["documents"], "--json", "--max-seq-len", 128))
    tokenizer = load_tokenizer(str(prepared.tokenizer))
    texts = [json.loads(line)["text"] for line in (sets["documents"].parents[1] / "documents.jsonl").read_text().splitlines()]
    lengths = sorted(len(tokenizer.encode_document(text)) for text in texts)
    assert (facts["documents"], facts["tokens"], facts["longest"]) == (90, sum(lengths), lengths[-1])
    assert facts["repeated"] == 30 and not facts["repeated_is_estimate"]
    assert facts["bytes_per_token"] == pytest.approx(sum(len(text.encode()) for text in texts) / sum(lengths))
    assert facts["longer"] == pytest.approx(sum(length > 128 for length in lengths) / 90)
    listed = inspect("--list", sets["documents"])
    assert re.search(rf"documents +90 +{sum(lengths):,} ", listed)
    output = inspect(sets["documents"], "--max-seq-len", 128, "--batch", 2)
    assert re.search(r"documents,\s+made from", output) and "repeated: 30 documents (33.33 %)" in output and "█" in output
    assert output.count("of the run: 128 slots, 128 labels") == 2 and "positions 0-" in output
