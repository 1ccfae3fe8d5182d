"""The card of a checkpoint tells the truth about its run, whatever the texts in it, and cannot harm a save."""

import hashlib
import re
import string
from pathlib import Path

import pytest
import yaml
from factories import new_model
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import store
from checkpoint.manifest import CARD
from common import __version__
from common.text import printable
from config import Config, ModelConfig
from extensions.card import NOT_IN_RECIPE, card_metadata, card_text, cell, code, read_card, sections_of
from extensions.report.console import trained_count
from plan.make import make_plan


@pytest.mark.parametrize("tied", [True, False])
def test_trained_parameters_are_counted_without_the_padding_of_the_vocabulary(tied):
    config = ModelConfig(dim=32, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=48, tie_embeddings=tied)
    assert trained_count(new_model(config, 300), 300) == (1 if tied else 2) * 300 * 32 + 4 * 32 * 32 + 3 * 48 * 32 + 3 * 32


def test_the_metadata_are_what_the_hub_reads(whole):
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(whole.checkpoint(6) / CARD)
    data, newest = card.data, whole.metrics()[-1]
    assert (data.license, data.library_name, data.pipeline_tag) == ("unknown", "transformers", "text-generation")
    ledger = hashlib.sha256((whole.folder / "ledger.jsonl").read_bytes()).hexdigest()
    assert data.paddock == {"version": __version__, "step": 6, "tokens": 6 * 256, "ledger_sha256": ledger}
    found = {(result.dataset_name, result.metric_type): result.metric_value for result in data.eval_results}
    assert found == {("validation split", "loss"): pytest.approx(newest["val_loss"], abs=1e-6),
                     ("validation split", "bits_per_byte"): pytest.approx(newest["val_bits_per_byte"], abs=1e-6),
                     ("HellaSwag", "acc"): newest["hellaswag_acc"], ("HellaSwag", "acc_norm"): newest["hellaswag_acc_norm"]}
    assert hub.ModelCard(str(card)).data.to_dict() == data.to_dict()
    (items,) = {line["n"] for line in whole.lines("evaluations") if line["name"] == "validation"}
    assert re.search(rf"\| `validation split` \| loss \|.*\| {items} \|", str(card)), str(card)


@pytest.mark.parametrize("by_epochs", [False, True])
def test_the_recipe_gives_the_same_settings(by_epochs, whole, tiny_run, tmp_path):
    checkpoint = whole.checkpoint(6)
    if by_epochs:
        run = tiny_run(EPOCHS=1, STOP_STEP=1)
        del run.settings["MAX_STEPS"]  # which follows from the data
        run.train()
        checkpoint = run.checkpoint(1)
    file, section = tmp_path / "card.env", sections_of(read_card(checkpoint))["Make it again"]
    file.write_text(re.search(r"```\n(.*?)\n```", section, re.DOTALL)[1])
    made = make_plan(["--env-file", str(file)], {}, complete=False).config.public()
    recorded = Config(**{name.lower(): value for name, value in store.read_state(checkpoint)["settings"].items()}).public()
    places = {"PRETRAIN_DATA_PATH", "TOKENIZER_PATH", "HELLASWAG_PATH"}
    assert {name for name in recorded if recorded[name] != made[name]} - NOT_IN_RECIPE <= places | ({"MAX_STEPS"} if by_epochs else set())
    assert {name: made[name] for name in places} == {name: Path(recorded[name]).name for name in places}


def test_the_card_of_a_resumed_run_lists_its_parts_and_has_the_digest_of_an_uninterrupted_one(whole, tiny_run):
    run = tiny_run()
    assert run.train(MAX_STEPS=3) == 0
    assert run.train(MODEL_LICENSE="My own") == 0
    card, straight = read_card(run.checkpoint(6)), read_card(whole.checkpoint(6))
    assert "- from step 4 on: MAX_STEPS=`6`" in card
    facts = card_metadata(card)
    assert (facts["license"], facts["license_name"]) == ("other", "my-own")
    # The learning rate of the first three steps does not depend on MAX_STEPS here.
    assert facts["ledger_sha256"] == card_metadata(straight)["ledger_sha256"]


def test_a_card_that_fails_is_a_warning(tiny_run, monkeypatch, capsys):
    def fail(*facts):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("extensions.card.run_card", fail)
    run = tiny_run(MAX_STEPS=2, VALIDATE_EVERY=0, HELLASWAG_EVERY=0).trained()
    assert "the checkpoint has no model card: ZeroDivisionError: planted" in capsys.readouterr().err
    store.verify(run.checkpoint(2))
    assert not (run.checkpoint(2) / CARD).exists()


def test_an_edited_card_is_no_damage(whole, tmp_path):
    copy = whole.copy(tmp_path / "copy")
    (copy.checkpoint(6) / CARD).write_text("my own")
    assert CARD not in store.verify(copy.checkpoint(6))["files"]


TEXTS = st.one_of(st.text(st.characters(codec="utf-8")), st.text("-:`|#\"'{}[]&*!%@,\n\\ ano0.<>~=_"), st.sampled_from(
    ["no", "Yes", "null", "~", "1e5", "0x1", "12:30:45", "2001-01-01", ".inf", "---", "a: b", "<script>", "{{ x }}", "\ufeff", "\uffff"]))


@settings(max_examples=30)
@given(st.dictionaries(st.text(string.ascii_lowercase, min_size=1).filter(lambda name: name not in ("n", "y", "no", "on", "off", "yes", "null", "true", "false")),
                       st.one_of(TEXTS.filter(bool), st.integers(), st.lists(TEXTS.filter(bool), min_size=1), st.lists(
                           st.fixed_dictionaries({"type": TEXTS.filter(bool), "metrics": st.lists(st.fixed_dictionaries({"value": st.floats(-1e6, 1e6)}), min_size=1)}),
                           min_size=1)), max_size=4))
def test_yaml_reads_back_what_was_written(block):
    text = card_text(block, "title", introduction="---\nname: value", is_chat=False)
    assert yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n")) == block
    expected = {name: str(value) for name, value in block.items() if isinstance(value, (str, int))}
    assert card_metadata(text) == expected


@settings(max_examples=50)
@given(TEXTS)
def test_markdown_reads_inline_code_as_one_text_also_in_a_table(text):
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    if not printable(text):
        return
    paragraph = markdown.parse(f"before {code(text)} after")[1].children
    assert [(token.type, token.content.strip()) for token in paragraph] == [
        ("text", "before"), ("code_inline", printable(text).strip()), ("text", "after")]
    row = [token.children for token in markdown.parse(f"| a | b |\n|---|---|\n| {cell(text)} | c |") if token.type == "inline"]
    assert [[child.type for child in children] for children in row] == [["text"], ["text"], ["code_inline"], ["text"]]
    assert row[2][0].content.strip() == printable(text).strip()
