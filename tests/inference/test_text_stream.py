"""Pieces of text: together they are the whole text, whatever the tokenizer, the tokens and the stop strings."""

import json
from pathlib import Path

import pytest
from factories import prepare
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from extensions.inference.text import WINDOW, TextStream
from tokenizer import HuggingFaceTokenizer, load_tokenizer

KINDS = ("tiktoken", "byte-level", "llama 2", "metaspace", "gemma", "wordpiece", "no decoder")
AB = ("b", "ab", "ba", "aba", "babb")
TEXT = "The cat saw 猫 and 👩‍👩‍👧, then naïve ДОМ\n\n\tfed it.  Twice! "


def sentencepiece_like(folder: Path, kind: str) -> HuggingFaceTokenizer:
    """A tokenizer.json with few words, and a token for each byte that has none."""
    words = ["▁the", "▁cat", "▁", "a", "t", "é", "s", "\n", "�", "##s", ".", "▁▁", *AB]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    vocab = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *words])}
    model = models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(models.WordPiece(vocab, unk_token="<unk>") if kind == "wordpiece" else model)
    if kind in ("llama 2", "gemma"):
        spaces = [normalizers.Prepend("▁")] * (kind == "llama 2") + [normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(spaces)
        strip = [decoders.Strip(" ", 1, 0)] * (kind == "llama 2")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    elif kind == "metaspace":
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace(prepend_scheme="first")
    elif kind == "wordpiece":
        made.decoder = decoders.WordPiece()
    made.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {kind: sentencepiece_like(folder / kind, kind) for kind in KINDS[2:]}
    made["tiktoken"] = load_tokenizer(str(prepare(folder / "prepared").tokenizer))
    (folder / "byte-level").mkdir()
    made["tiktoken"].save_huggingface(folder / "byte-level")
    made["byte-level"] = load_tokenizer(str(folder / "byte-level"))
    return made


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [*map(stream.add, ids), stream.finish()]


def cut(text: str, stop: list[str]) -> str:
    """The text before the stop string that is complete first, read one character after the other."""
    for end in range(len(text) + 1):
        if here := [word for word in stop if text[:end].endswith(word)]:
            return text[:end - max(map(len, here))]
    return text


ids_and_stop = st.tuples(
    st.lists(st.floats(0, 1, exclude_max=True) | st.floats(0.95, 1, exclude_max=True), max_size=6 * WINDOW),
    st.lists(st.text("abt .�é", min_size=1, max_size=3), max_size=3))


@pytest.mark.parametrize("kind", KINDS)
@given(ids_and_stop)
def test_any_tokens_give_the_text_of_all_tokens_up_to_the_stop_string(tokenizers, kind, drawn):
    tokenizer, (places, stop) = tokenizers[kind], drawn
    ids = [int(place * tokenizer.vocab_size) for place in places]
    stream = TextStream(tokenizer, stop)
    text, whole = "".join(pieces(stream, ids)), tokenizer.decode(ids)
    assert text == cut(whole, stop)
    assert stream.stopped == any(word in whole for word in stop)


def test_text_that_cannot_change_is_streamed_at_once(tokenizers):
    """Whole characters come with their last token; only what may begin a stop string, or become one, waits."""
    for kind in ("tiktoken", "byte-level"):
        stream, ids = TextStream(tokenizers[kind]), tokenizers[kind].encode(TEXT)
        assert "".join(tokenizers[kind].decode([token]) for token in ids) != TEXT, "no character over several tokens"
        for count, token in enumerate(ids, 1):
            whole, start = tokenizers[kind].decode(ids[:count]), tokenizers[kind].decode(ids[:count - 1])
            assert stream.add(token) == whole.removesuffix("\ufffd")[len(start.removesuffix("\ufffd")):]
    stream = TextStream(tokenizers["tiktoken"], ["User:", "Us"])
    messages = [stream.add(token) for character in "a U-User: b" for token in tokenizers["tiktoken"].encode(character)]
    assert messages == ["a", " ", "", "U-", "", "", "", "", "", "", ""] and stream.stopped and stream.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
@given(st.text("a 猫é", max_size=2 * WINDOW), st.text("a 猫é", max_size=2 * WINDOW))
@example("猫猫猫", "猫")
def test_a_continuation_has_the_space_that_the_first_word_of_a_text_lacks(tokenizers, kind, before, after):
    tokenizer = tokenizers[kind]
    before, after = tokenizer.encode(before), tokenizer.encode(after)
    text = "".join(pieces(TextStream(tokenizer, prefix=before), after))
    assert tokenizer.decode(before) + text == tokenizer.decode(before + after)
