"""Mixtures: which row is where, what a batch holds, and the sets that --mix prepares."""

import json

import numpy as np
import pytest
import torch
from factories import Prepared
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

from common.errors import DataError, SettingsError
from config import Config
from data_pipeline.mixture import Mixture, Phase, read_mix, weight_units
from data_pipeline.prepare import PreparationOptions
from data_preparation_utils import prepare_mixture
from dataloaders import Mixing, RowOrder, open_rows
from tokenizer import load_tokenizer

WEIGHTS = st.one_of(st.just(0), st.integers(1, 20), st.floats(1e-6, 1e6))


@st.composite
def mixings(draw):
    sources = draw(st.integers(1, 4))
    starts = [0, *sorted(draw(st.lists(st.integers(0, 200), max_size=2)))]
    phases = [draw(st.lists(WEIGHTS, min_size=sources, max_size=sources).filter(any)) for _ in starts]
    sizes = tuple(draw(st.integers(1, 60)) for _ in range(sources))
    return Mixing(sizes, tuple(Phase(start, weight_units(weights)) for start, weights in zip(starts, phases)))


@given(mixings())
def test_each_position_has_one_source_and_each_source_its_share_to_within_a_row_or_so(mixing):
    taken = mixing.taken(np.arange(401))
    steps = np.diff(taken, axis=1)
    assert (steps.sum(axis=0) == 1).all() and steps.min() >= 0
    ends = [phase.start for phase in mixing.phases[1:]] + [400]
    for phase, end in zip(mixing.phases, ends):
        share = np.array(phase.weights)[:, None] / sum(phase.weights)
        inside = taken[:, phase.start:end + 1] - taken[:, phase.start:phase.start + 1]
        expected = share * np.arange(inside.shape[1])
        assert np.abs(inside - expected).max(initial=0) < len(mixing.sizes)
        assert (inside[np.array(phase.weights) == 0] == 0).all()


@settings_of(max_examples=40)
@given(mixings(), st.integers(0, 2**31), st.sampled_from([1, 2, 4]))
def test_the_rows_are_the_same_from_any_step_on_and_on_any_number_of_ranks(mixing, seed, world_size):
    whole = mixing.rows_at(np.arange(400), seed)
    step = seed % 50
    orders = [RowOrder(mixing, 8, 2, seed, rank, world_size) for rank in range(world_size)]
    read = np.concatenate([order.micro_batches(step).reshape(-1) for order in orders])
    assert read.tolist() == whole[step * 8:step * 8 + 8].tolist()


@settings_of(max_examples=40)
@given(mixings(), st.integers(0, 2**31))
def test_a_source_gives_all_its_rows_once_before_it_repeats_one(mixing, seed):
    rows, first = mixing.rows_at(np.arange(400), seed), 0
    for size in mixing.sizes:
        own = rows[(rows >= first) & (rows < first + size)]
        for start in range(0, len(own), size):
            epoch = own[start:start + size].tolist()
            assert len(set(epoch)) == len(epoch)
        first += size


def write_mix(folder, content):
    path = folder / "mix.json"
    path.write_text(json.dumps(content))
    return path


A, B = {"path": "a"}, {"path": "b"}


@pytest.mark.parametrize("content, reason", [
    ({"sources": []}, "sources: list should have at least 1"),
    ({"sources": [{**A, "weight": 0}]}, "sources.0.weight: input should be greater"),
    ({"sources": [A, A]}, "two sources have the label 'a'; use different labels"),
    ({"sources": [{**A, "weight": 1}], "phases": [{"weights": {"a": 1}}]}, "remove its weight"),
    ({"sources": [A], "phases": [{"weights": {"b": 1}}]}, "phase 1 weighs 'b', which is not a source's label; the labels are 'a'"),
    ({"sources": [A, B], "phases": [{"weights": {"a": 1}}]}, "'b' has no weight above 0 in a phase"),
    ({"sources": [A], "phases": [{"until": 0.5, "weights": {"a": 1}}]}, "each must end later than the one before it, and the last at 1"),
])
def test_a_malformed_mix_is_refused_by_field(tmp_path, content, reason):
    with pytest.raises(SettingsError, match=reason):
        read_mix(write_mix(tmp_path, content))


def test_phases_begin_with_steps_and_weights_count_only_by_their_ratios():
    def mixture(*phases):
        parts = [{"label": "a", "set": "x"}, {"label": "b", "set": "y"}]
        return Mixture.model_validate({"sources": parts, "phases": [{"until": end, "weights": weights} for end, weights in phases]})

    one = mixture((0.8, {"a": 9, "b": 1}), (1, {"b": 2}))
    assert [phase.start for phase in one.phases_of_run(10, 4)] == [0, 32]
    assert [phase.start for phase in one.phases_of_run(3, 4)] == [0, 8]
    assert [phase.start for phase in one.phases_of_run(7, 4)] == [0, 24], "of 5.6 steps, six"
    hashes = [mixture(*phases).fingerprint(["x", "y"]) for phases in (
        [(0.8, {"a": 0.9, "b": 0.1}), (1, {"b": 1})], [(0.7, {"a": 9, "b": 1}), (1, {"b": 1})], [(1, {"a": 9, "b": 1})])]
    assert hashes[0] == one.fingerprint(["x", "y"]) and len({*hashes, one.fingerprint(["x", "z"])}) == 4


@pytest.fixture(scope="module")
def sources(tmp_path_factory, prepared):
    """A function that prepares a mix of two texts: the tiny one, and one of 40 lines of other words."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "plays.txt").write_text("".join(f"Line {number} of the play is spoken by the fox.\n" for number in range(40)))
    files = [{"path": str(prepared.tokenizer.parent / "text.jsonl"), "label": "farm"},
             {"path": str(folder / "plays.txt"), "documents": "line", "label": "plays"}]
    options = PreparationOptions(str(prepared.tokenizer), "auto", 100_000, 0.1, workers=1)

    def make(*phases):
        described = {"sources": files, "phases": [{"until": until, "weights": dict(zip(("farm", "plays"), weights))}
                                                  for until, weights in phases]}
        return prepare_mixture("documents", write_mix(folder, described), folder / "sets", options)

    return make


def settings(prepared: Prepared, folder, **changes):
    given = prepared.settings() | {"PRETRAIN_DATA_PATH": str(folder)} | changes
    return Config(**{name.lower(): str(value) for name, value in given.items()})


def test_a_batch_holds_the_rows_of_the_sets(sources, prepared):
    folder = sources((0.5, [3, 1]), (1, [1, 1]))
    config, tokenizer = settings(prepared, folder), load_tokenizer(str(prepared.tokenizer))
    rows = open_rows(config, "train", tokenizer, "auto")
    assert len(rows) == sum(map(len, rows.sources)) and len(set(map(len, rows.sources))) == 2
    indices = np.array([len(rows) - 1, 0, len(rows.sources[0]), 3])
    batch = rows(indices)
    for number, index in enumerate(indices):
        part, within = (rows.sources[0], index) if index < len(rows.sources[0]) else (rows.sources[1], index - len(rows.sources[0]))
        alone = part(np.array([within]))
        for name in ("tokens_BT", "targets_BT", "document_ids_BT"):
            assert torch.equal(getattr(batch, name)[number], getattr(alone, name)[0])
    # The sources of the run: 3 of 4 rows, then one of two.
    order = RowOrder(rows.mixing, 8, 2, config.seed)
    from_first = [(order.all_rows(step) < len(rows.sources[0])).sum() for step in range(6)]
    assert from_first == [6, 6, 6, 4, 4, 4]
    facts = rows.source_table(48)
    assert [fact["share"] for fact in facts] == [30 / 48, 18 / 48]
    assert facts[1]["passes"] == 18 / len(rows.sources[1]) > 0


def test_an_invalid_mixture_is_an_error_that_names_the_fault(sources, prepared, tmp_path):
    folder, tokenizer, moved = sources((1, [1, 1])), load_tokenizer(str(prepared.tokenizer)), tmp_path / "alone"
    moved.mkdir()
    (moved / "mixture.json").write_bytes((folder / "mixture.json").read_bytes())
    for place, changes, reason in (
            (folder, {"TRAINING_STAGE": "sft", "SFT_DATA_PATH": folder}, "holds documents, but SFT_DATA_PATH needs chats"),
            (folder, {"MAX_SEQ_LEN": 2048, "TOTAL_BATCH_SIZE": 4096}, "its .* tokens are fewer than a row of MAX_SEQ_LEN=2048"),
            (folder, {"TOTAL_BATCH_SIZE": 1 << 15}, "its sources fill .* rows of MAX_SEQ_LEN=32 tokens, but a step reads 1,024"),
            (folder.parent, {}, "holds several prepared sets, name one"), (moved, {}, "the set of 'farm', is missing")):
        with pytest.raises(DataError, match=reason):
            open_rows(settings(prepared, place, **changes), "train", tokenizer, "auto")
    (moved / "mixture.json").write_text("{}")
    with pytest.raises(DataError, match="mixture.json: sources: field required; prepare the mixture again"):
        open_rows(settings(prepared, moved), "train", tokenizer, "auto")
