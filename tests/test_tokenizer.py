"""The tokenizer's truths: both backends and transformers agree on every id, and text stays text."""

import json
import os
import re
import shutil

import pytest
from commands import python
from hypothesis import example, given
from hypothesis import strategies as st

import tokenizer as tokenizer_module
from common.errors import DataError
from data_pipeline.vocabulary import train_bpe, write_characters, write_tiktoken
from scripts.convert_to_gguf import OLLAMA
from tokenizer import PATTERN, SPECIALS, HuggingFaceTokenizer, Tokenizer, load_tokenizer, split_long

RANKS = 450
SENTENCES = (
    "Anna's cat wasn't in the house; they'll look for it at 12:30 tomorrow, and it'd better be there!\n\n",
    "def f(x):\n    return [i ** 2 for i in range(1000000)]  # squares\n\tif x:\r\n\t\tpass\r\n",
    "Ж жизни бывает всякое. 日本語のテキストと中文文本。 नमस्ते दुनिया 👩‍👩‍👧‍👦 e\u0301 caf\u00e9   \n "
    "aaaa aaaaaaa aaa aa    ",
)
HARD_TEXTS = (
    "", " ", "\n", "   \n\n  x", "\t\t x  \r\n\r\n", "👩‍👩‍👧‍👦🏳️‍🌈👍🏽", "e\u0301a\u0308\u1100\u1161\u11a8", "it's IT'S '\u017f we'LL",
    "1234567 \u0661\u0662\u0663\u0664", "\0\x85\u00a0\u2003\u200b\ufeff\U0010ffff", "for(i=0;i<10;++i){a[i]+=1;}//   x",
    "<|eot_id|><|begin_of_text|>", "aaaaaaaaaaaaa", "\ud800 lone", "\ud83d\ude00")
any_text = st.text(st.characters()) | st.text("aelo '\n\r\t 1!é\u0301") | st.lists(
    st.sampled_from((*HARD_TEXTS, *SPECIALS[:12], *SENTENCES))).map("".join)


@pytest.fixture(scope="module")
def ranks():
    return train_bpe(SENTENCES * 3, RANKS)


@pytest.fixture(scope="module")
def native(ranks):
    return Tokenizer(ranks)


def with_hard_texts(test):
    for text in HARD_TEXTS:
        test = example(text)(test)
    return test


@with_hard_texts
@given(any_text)
def test_both_backends_and_transformers_give_the_same_ids_whose_byte_lengths_add_up(native, hf_tokenizer, transformers_tokenizer, text):
    ids = native.encode(text)
    assert hf_tokenizer.encode(text) == ids and hf_tokenizer.byte_lengths == native.byte_lengths
    assert sum(native.byte_lengths[token] for token in ids) == len(tokenizer_module.without_surrogates(text).encode())
    assert not any(native.byte_lengths[token] for token in native.special_ids.values())
    if not any(0xD800 <= ord(char) < 0xE000 for char in text):
        plain = transformers_tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert plain == ids


@example([*HARD_TEXTS, "a!", *SENTENCES])
@given(st.lists(any_text | st.text("ae' \n\r\u00a0!\u017f1", max_size=6), max_size=9))
def test_many_documents_at_once_have_the_ids_of_each(native, hf_tokenizer, texts):
    with_nul = Tokenizer(native.ranks | {b"!\0": RANKS})  # a separator does not join the text before it
    for tokenizer in (native, hf_tokenizer, with_nul):
        assert [*tokenizer.document_ids(texts)] == [i for text in texts for i in tokenizer.encode_document(text)]


@with_hard_texts
@given(any_text)
def test_text_comes_back_and_never_becomes_a_control_token(native, hf_tokenizer, text):
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    ids = native.encode(text)
    assert all(token < len(native.ranks) for token in ids)
    assert native.decode(ids) == hf_tokenizer.decode(ids) == expected


@given(st.lists(st.integers(0, RANKS + 255)))
def test_any_ids_decode_alike(native, hf_tokenizer, transformers_tokenizer, ids):
    assert native.decode(ids) == hf_tokenizer.decode(ids) == transformers_tokenizer.decode(ids)


@given(st.text("abc ", min_size=1), st.lists(st.text("abc", min_size=2, max_size=5), max_size=30, unique=True))
@example("abc", ["abc"])  # in the ranks, but no merge leads there
@example("aaaaa", ["aa", "aaa"])
def test_folder_is_exact_for_ranks_that_no_training_made(tmp_path_factory, text, tokens):
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in tokens:
        ranks[token.encode()] = len(ranks)
    tokenizer = Tokenizer(ranks)
    folder = tmp_path_factory.mktemp("odd")
    tokenizer.save_huggingface(folder)
    assert load_tokenizer(str(folder)).encode(text) == tokenizer.encode(text)


def test_trained_ranks_are_the_bpe_that_was_trained(monkeypatch):
    import tokenizers
    from tokenizers.trainers import BpeTrainer
    texts = SENTENCES * 3
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.train_from_iterator(texts, BpeTrainer(
        vocab_size=RANKS, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    native = Tokenizer(train_bpe(texts, RANKS))
    assert len(native.ranks) == RANKS
    for text in (*SENTENCES, *HARD_TEXTS[:13], "Anna will be there tomorrow, isn't it aaaa?"):
        assert native.encode(text) == library.encode(text).ids
    assert len(native.encode(SENTENCES[0])) < len(SENTENCES[0]) / 3


def test_a_pattern_that_explodes_is_an_error_that_names_the_tokenizer(native, tmp_path, capfd):
    native.save_huggingface(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(x+x+)+y"
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    foreign = HuggingFaceTokenizer(tmp_path / "tokenizer.json", "foreign")
    assert foreign.decode(foreign.encode("some words")) == "some words"
    with pytest.raises(DataError, match="TOKENIZER_PATH=foreign: its tokenizer.json fails on the text that starts with 'xxx"):
        foreign.encode("x" * 100)


def test_special_tokens_follow_the_ranks_in_metas_numbering(native, hf_tokenizer):
    assert native.vocab_size == RANKS + 256 and len(set(SPECIALS)) == 256
    offsets = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|reserved_special_token_0|>": 2,
               "<|finetune_right_pad_id|>": 4, "<|start_header_id|>": 6, "<|end_header_id|>": 7, "<|eom_id|>": 8,
               "<|eot_id|>": 9, "<|python_tag|>": 10, "<|reserved_special_token_2|>": 11,
               "<|reserved_special_token_246|>": 255}
    assert {name: native.special_ids[name] - RANKS for name in offsets} == offsets
    assert (native.bos_id, native.eos_id, native.pad_id, native.eot_id) == (RANKS, RANKS + 1, RANKS + 4, RANKS + 9)
    for name in ("vocab_size", "bos_id", "eos_id", "eot_id", "pad_id", "document_start_id", "special_ids"):
        assert getattr(native, name) == getattr(hf_tokenizer, name), name
    assert native.encode_document("a cat") == hf_tokenizer.encode_document("a cat") == [RANKS, *native.encode("a cat"), RANKS + 1]


def test_metas_file_works_unchanged(meta, tmp_path):
    assert (meta.vocab_size, meta.bos_id, meta.eos_id, meta.eot_id) == (128256, 128000, 128001, 128009)
    # Published example of the Llama 3 repository's own test.
    assert meta.encode_document("This is a test sentence.") == [128000, 2028, 374, 264, 1296, 11914, 13, 128001]
    meta.save_huggingface(tmp_path)
    hf_tokenizer = load_tokenizer(str(tmp_path))
    for text in (*SENTENCES, *HARD_TEXTS, " " * 60_000):
        assert hf_tokenizer.encode(text) == meta.encode(text)


LONG_TEXTS = {"spaces": " " * 1_000_000, "letters": "a" * 1_000_000, "newlines": "\n" * 100_000,
              "no space": "1!" * 50_000, "words": "é\u0301 " * 150_000}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_long_texts_are_cut_alike_and_come_back(native, hf_tokenizer, text):
    ids = native.encode(text)
    assert native.decode(ids) == text
    assert hf_tokenizer.encode(text) == ids


@given(st.lists(st.sampled_from(["a", "bb", " ", "\n\n", "ccccc", "     ", "\ud800"])).map("".join))
def test_pieces_are_where_the_reference_cuts(text):
    def reference(text, piece, run):
        for start in range(0, max(len(text), 1), piece):
            part, length, cut = text[start:start + piece], 0, 0
            for i, char in enumerate(part):
                length = length + 1 if i and char.isspace() == part[i - 1].isspace() else 1
                if length > run:
                    yield part[cut:i]
                    cut, length = i, 1
            yield part[cut:]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "MAX_PIECE_CHARS", 11)
        patch.setattr(tokenizer_module, "MAX_RUN_CHARS", 3)
        assert list(split_long(text)) == list(reference(text.replace("\ud800", "\ufffd"), 11, 3))


def changed_document(folder, path, change) -> HuggingFaceTokenizer:
    shutil.copytree(folder, path, dirs_exist_ok=True)
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(document)
    (path / "tokenizer.json").write_text(json.dumps(document))
    return load_tokenizer(str(path))


def test_hash_follows_content_and_not_place(ranks, native, hf_tokenizer, folder, tmp_path):
    first, second = tmp_path / "a.model", tmp_path / "b.model"
    for path in (first, second):
        write_tiktoken(ranks, path)
    assert load_tokenizer(str(first)).sha256 == load_tokenizer(str(second)).sha256 == native.sha256
    # The same path with other content: tiktoken's own reader would give the old ranks.
    swapped = {**ranks, **dict(zip(list(ranks)[-2:], (ranks[token] for token in list(ranks)[:-3:-1])))}
    write_tiktoken(swapped, first)
    assert load_tokenizer(str(first)).sha256 != native.sha256
    assert load_tokenizer(str(first)).ranks == swapped

    assert changed_document(folder, tmp_path / "copy", lambda file: None).sha256 == hf_tokenizer.sha256
    hashes = {changed_document(folder, tmp_path / "copy", change).sha256 for change in (
        lambda file: file["model"]["merges"].pop(), lambda file: file.update(normalizer={"type": "Lowercase"}),
        lambda file: file["pre_tokenizer"]["pretokenizers"].pop(0), lambda file: file["added_tokens"].pop())}
    assert len({hf_tokenizer.sha256, *hashes}) == 5


def test_an_exported_tokenizer_is_the_same_tokenizer(ranks, native, hf_tokenizer, folder, transformers_tokenizer, tmp_path):
    assert hf_tokenizer.sha256 != native.sha256, "checkpoints and prepared data of before have this hash"
    transformers_tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "again").mkdir()
    hf_tokenizer.save_huggingface(tmp_path / "again")
    again = load_tokenizer(str(tmp_path / "again"))
    assert again.sha256 == hf_tokenizer.sha256 and again.chat_template == hf_tokenizer.chat_template
    same = [native, hf_tokenizer, load_tokenizer(str(tmp_path / "saved")),
            changed_document(folder, tmp_path / "pairs", lambda document: document["model"].update(
                merges=[merge.split(" ") for merge in document["model"]["merges"]]))]
    assert len({tokenizer.sha256 for tokenizer in same}) >= 3
    for tokenizer in same:
        assert tokenizer.is_same(native.sha256) and tokenizer.is_same(hf_tokenizer.sha256) and tokenizer.is_same(tokenizer.sha256)


@pytest.mark.parametrize("change", [
    lambda document: document["model"]["merges"].pop(), lambda document: document["model"]["merges"].reverse(),
    lambda document: document["model"].update(ignore_merges=False),
    lambda document: document["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\\S+|\\s+"),
    lambda document: document["added_tokens"][20].update(content="<|mine|>"),
    lambda document: document["added_tokens"].pop(), lambda document: document.update(normalizer={"type": "NFC"}),
    lambda document: document["model"]["vocab"].update({"!": 1, '"': 0}), lambda document: document["model"]["vocab"].update({" x": 9999}),
])
def test_a_tokenizer_with_another_vocabulary_or_other_merges_is_another(change, native, hf_tokenizer, folder, tmp_path):
    other = changed_document(folder, tmp_path / "other", change)
    assert not any(other.is_same(tokenizer.sha256) or tokenizer.is_same(other.sha256) for tokenizer in (native, hf_tokenizer))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
@pytest.mark.parametrize("put, words", [(os.mkfifo, "is not a plain file"), (lambda path: path.symlink_to("gone"), "No such file")])
def test_a_pipe_or_broken_link_beside_a_tokenizer_is_refused(name, put, words, hf_tokenizer, tmp_path):
    hf_tokenizer.save_huggingface(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    put(tmp_path / name)
    with pytest.raises(DataError, match=f"{name} cannot be read: {words}"):
        load_tokenizer(str(tmp_path))


def test_a_folder_with_llama_3s_own_file_is_its_tokenizer(ranks, native, tmp_path):
    write_tiktoken(ranks, file := tmp_path / "tokenizer.model")
    assert load_tokenizer(str(tmp_path)).sha256 == native.sha256
    file.write_bytes(b"\n\n\n" + file.read_bytes())
    assert load_tokenizer(str(file)).sha256 == native.sha256


def test_foreign_tokenizer_without_a_bos(folder, native, tmp_path):
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    end = {**document["added_tokens"][0], "content": "<|endoftext|>"}
    document.update(added_tokens=[end], post_processor=None, truncation={
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    for config in (None, {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"},
                   {"eos_token": {"content": "<|endoftext|>"}},
                   {"eos_token": "<|endoftext|>", "pad_token": "<not there>"}):
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        foreign = load_tokenizer(str(path))
        assert (foreign.bos_id, foreign.eos_id, foreign.eot_id, foreign.pad_id) == (None, RANKS, RANKS, None)
        assert foreign.document_start_id == RANKS and foreign.vocab_size == RANKS + 1
        assert foreign.encode_document(SENTENCES[0]) == [RANKS, *native.encode(SENTENCES[0])]
    foreign.save_huggingface(tmp_path)
    assert not (tmp_path / "chat_template.jinja").exists()
    loaded = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == RANKS + 1 and loaded(SENTENCES[0])["input_ids"] == native.encode(SENTENCES[0])


@pytest.mark.parametrize("name, content", [
    ("tokenizer_config.json", {"additional_special_tokens": ["<|more|>"]}), ("tokenizer_config.json", {"extra_special_tokens": ["<|more|>"]}),
    ("tokenizer_config.json", {"eos_token": "<|more|>"}), ("added_tokens.json", {"<|more|>": RANKS + 256}),
    *(("tokenizer_config.json", {"added_tokens_decoder": {str(RANKS + 256): {"content": "<|more|>", "special": special}}}) for special in (True, False))])
def test_a_token_that_only_a_file_beside_it_adds_is_refused_until_transformers_has_written_it(name, content, hf_tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    hf_tokenizer.save_huggingface(tmp_path)
    (tmp_path / "special_tokens_map.json").unlink()  # which would be right
    config = json.loads(path.read_text()) if (path := tmp_path / name).exists() else {}
    path.write_text(json.dumps(config | content))
    with pytest.raises(DataError, match=r"tokenizer.json lacks '<\|more\|>', which a file beside it adds; .*save_pretrained"):
        load_tokenizer(str(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "new")
    again = load_tokenizer(str(tmp_path / "new"))
    assert again.vocab_size == len(theirs) == RANKS + 257 and again.added_tokens[-1]["id"] == theirs.convert_tokens_to_ids("<|more|>") == RANKS + 256


def test_a_tokenizer_of_characters_is_the_sorted_set_of_the_text(tmp_path):
    """Ids as nanoGPT's prepare.py for Shakespeare gives them; transformers reads the file."""
    text = "Grüße an alle!\n\t<|endoftext|> Ä"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    done = python("scripts/train_tokenizer.py", "--characters", "--output", "tokenizer.json", "text.txt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ids = {character: number for number, character in enumerate(sorted(set(text)))}
    assert f"{len(ids)} tokens and 1 special token" in done.stdout
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode(text) == [ids[character] for character in text] and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_id == tokenizer.document_start_id == len(ids) and tokenizer.vocab_size == len(ids) + 1
    theirs = pytest.importorskip("transformers").PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert theirs("alle!")["input_ids"] == tokenizer.encode("alle!") and theirs.decode(tokenizer.encode("alle!")) == "alle!"
    with pytest.raises(DataError, match="its vocabulary lacks a character of the text that starts with 'zu'"):
        tokenizer.encode("zu")


def test_a_text_with_other_characters_is_a_bad_record(tmp_path):
    write_characters(["abc\n"], tmp_path / "tokenizer.json")
    (tmp_path / "text.txt").write_text("ab\ncäz\nba\n", encoding="utf-8")
    command = ["scripts/load_pretrain_dataset.py", "--source", "text.txt", "--documents", "line", "--tokenizer-path", "tokenizer.json",
               "--validation-fraction", "0"]
    refused = python(*command, cwd=tmp_path)
    assert refused.returncode and "text.txt:2: 'z' is not in the vocabulary; remove it" in " ".join(refused.stderr.split())
    done = python(*command, "--on-bad-record", "skip", cwd=tmp_path)
    assert done.returncode == 0 and "2 documents" in done.stdout and "1 bad record" in done.stdout, done.stdout + done.stderr


def test_the_template_for_ollama_renders_chats_as_the_chat_template_does(whole):
    jinja2 = pytest.importorskip("jinja2")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."},
                {"role": "user", "content": "Why?"}]
    template = OLLAMA["<|start_header_id|>"]
    before, turn, after = re.fullmatch(r"(.*)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL).groups()
    turns = [turn.replace("{{ .Role }}", message["role"]).replace("{{ .Content }}", message["content"]) for message in messages]
    actual = jinja2.Template((whole.checkpoint(6) / "chat_template.jinja").read_text()).render(
        messages=messages, bos_token="", add_generation_prompt=True)
    assert before + "".join(turns) + after == actual and "{{" not in actual
