"""A card says what it is told to, whatever the text, to YAML and Markdown as others read them."""

import json
import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from common.text import printable
from run.card import card_text, cell, code, facts_of, fenced, read_card, sections_of

TEXTS = st.one_of(st.text(st.characters(codec="utf-8")), st.text("-:`|#\"'{}[]&*!%@,\n\\ ano0.<>~=_"), st.sampled_from(
    ["no", "Yes", "null", "~", "1e5", "0x1", "12:30:45", "2001-01-01", ".inf", "---", "a: b", "<script>", "{{ x }}", "\ufeff", "\uffff"]))


@given(st.dictionaries(st.text(string.ascii_lowercase, min_size=1).filter(lambda name: name not in ("n", "y", "no", "on", "off", "yes", "null", "true", "false")),
                       st.one_of(TEXTS.filter(bool), st.integers(), st.lists(TEXTS.filter(bool), min_size=1), st.lists(
                           st.fixed_dictionaries({"type": TEXTS.filter(bool), "metrics": st.lists(st.fixed_dictionaries({"value": st.floats(-1e6, 1e6)}), min_size=1)}),
                           min_size=1)), max_size=4))
def test_yaml_reads_back_what_was_written(block):
    text = card_text(block, "title", introduction="---\nname: value", is_chat=False)
    assert yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n")) == block
    expected = {name: str(value) for name, value in block.items() if isinstance(value, (str, int))}
    assert facts_of(text) == expected


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


@given(st.lists(TEXTS, max_size=5))
def test_no_line_ends_a_block_of_code(lines):
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark")
    tokens = markdown.parse(fenced(lines) + "\n\nafter")
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]
    assert tokens[0].content == "".join(f"{printable(line)}\n" for line in lines)


def test_a_card_is_read_back(tmp_path):
    text = card_text({"license": "other", "license_name": "my own: one", "tags": ["a"], "empty": "", "none": [], "paddock": {"step": 3}},
                     "a|`b", introduction="{{ hello }}", is_chat=True, inherited={"Empty": "", "Scores": "| a |"})
    assert facts_of(text) == {"license": "other", "license_name": "my own: one", "step": "3"}
    assert "\n\n# ``a|`b``\n\n{{ hello }}\n\n## Use\n" in text and [*sections_of(text)] == ["Use", "Scores", "Check a copy"]
    assert sections_of(text)["Scores"] == "| a |" and "apply_chat_template" in sections_of(text)["Use"]
    assert read_card(tmp_path) == "" == read_card(tmp_path / "missing")
    # Cards of others: comments, quotes, lists of mappings, no metadata at all.
    assert facts_of("---\nlicense: 'llama3.2' \nbase_model:\n- a/b\nlicense_link: \"LICENSE.txt\"\n---\n# T\nlicense: mit\n") == {
        "license": "llama3.2", "license_link": "LICENSE.txt"}
    assert facts_of("# Title\nlicense: mit\n") == {} == facts_of(json.dumps({}))
